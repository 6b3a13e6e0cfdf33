// The memory of Python after it has imported the package and answered once: node snapshot.mjs PYODIDE FILES PROGRAM OUT
//
// A browser that starts from it neither starts Python nor imports anything. Nothing in it may be of
// JavaScript or of a library of C: those are not in the memory. snapshot.py is what Python does.

import { createReadStream, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Readable } from "node:stream";
import { pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";
import { unzipped, write } from "./files.mjs";

const [pyodide, files, program, out] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(join(pyodide, "pyodide.mjs")));
const main = async () => {
  const python = await loadPyodide({ _makeSnapshot: true });
  write(python.FS, await unzipped(Readable.toWeb(createReadStream(files))), "/meshdsl");
  python.runPython(readFileSync(new URL("snapshot.py", import.meta.url), "utf8"));
  python.globals.set("program", readFileSync(program, "utf8"));
  python.runPython(`
import os, sys

sys.path.insert(0, "/meshdsl")
sys.dont_write_bytecode = True
os.environ["MESHDSL_CACHE"] = "/meshdsl/cache"
warming = prepared(program)
del program, prepared
`);
  writeFileSync(out, gzipSync(python.makeMemorySnapshot(), { level: 9 }));
};
main().then(() => process.exit(0), (error) => {
  console.error(String(error.message ?? error).slice(0, 4000)); // not the line of the minified script
  process.exit(1);
});
