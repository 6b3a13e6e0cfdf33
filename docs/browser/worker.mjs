// Python in a web worker: answers the questions of the page by the compiler itself (docs/browser.md).

import loadHighs from "./highs.mjs";
import { loadPyodide } from "./pyodide.mjs";

const here = new URL(".", import.meta.url).href;

const read = async (name) => {
  const found = await fetch(here + name);
  if (!found.ok) throw new Error(`${name}: ${found.status}`);
  return found.arrayBuffer();
};

const load = async () => {
  postMessage({ progress: "Loading Python, 6 MB …" });
  const [python, highs, code] = await Promise.all([
    loadPyodide({ indexURL: here }),
    loadHighs({ locateFile: (name) => here + name }),
    read("meshdsl.zip"),
  ]);
  postMessage({ progress: "Loading the compiler …" });
  python.registerJsModule("highs", highs);
  python.unpackArchive(code, "zip", { extractDir: "/meshdsl" });
  python.runPython(`
import os, sys
sys.path.insert(0, "/meshdsl")
sys.dont_write_bytecode = True
os.environ["MESHDSL_CACHE"] = "/meshdsl/cache"
`);
  const { reply } = python.pyimport("meshdsl.play.browser_worker");
  postMessage({ ready: true });
  return reply;
};

const loaded = load();
addEventListener("message", async ({ data: { id, path, question } }) => {
  try {
    const reply = await loaded;
    postMessage({ id, reply: JSON.parse(reply(path, question)) });
  } catch (error) {
    postMessage({ failed: String(error.message ?? error).slice(-500) });
  }
});
