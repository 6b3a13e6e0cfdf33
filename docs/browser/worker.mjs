// Python in a web worker: answers the questions of the page by the compiler itself (docs/browser.md).

import { unzipped, write } from "./files.mjs";
import loadHighs from "./highs.mjs";
import createModule from "./pyodide.asm.mjs";
import { loadPyodide } from "./pyodide.mjs";

const here = new URL(".", import.meta.url).href;

const read = async (name) => {
  const found = await fetch(here + name);
  if (!found.ok) throw new Error(`${name}: ${found.status}`);
  return unzipped(found.body);
};

// The memory of this Pyodide does not begin with the size of a snapshot: it grows when it is full.
const largeEnough = (snapshot) => async (settings) => {
  const [module, { length }] = await Promise.all([createModule(settings), snapshot]);
  while (module.HEAP8.length < length) if (!module._malloc(1 << 23)) throw new Error("too little memory");
  return module;
};

const load = async () => {
  postMessage({ progress: "Loading Python and the compiler, 36 MB …" });
  const snapshot = read("snapshot.gz");
  const [python, files, highs] = await Promise.all([
    loadPyodide({ indexURL: here, _loadSnapshot: snapshot, createPyodideModule: largeEnough(snapshot) }),
    read("files.gz"),
    loadHighs({ locateFile: (name) => here + name }),
  ]);
  write(python.FS, files, "/meshdsl");
  python.registerJsModule("highs", highs);
  python.runPython("import sys; sys.path_importer_cache.clear()"); // what folders had in the snapshot
  const { reply } = python.pyimport("meshdsl.play.browser_worker");
  postMessage({ ready: true });
  return { reply, warming: python.globals.get("warming") };
};

// What the first edit would be the first to need, step by step while nobody waits: questions come between.
const warm = (steps) => setTimeout(() => steps.next().done || warm(steps));

const loaded = load();
let isWarm = false;
addEventListener("message", async ({ data: { id, path, question } }) => {
  try {
    const { reply, warming } = await loaded;
    postMessage({ id, reply: JSON.parse(reply(path, question)) });
    if (isWarm || path === "/colours") return; // the program's answer comes next
    isWarm = true;
    warm(warming);
  } catch (error) {
    postMessage({ failed: String(error.message ?? error).slice(-500) });
  }
});
