// The memory of Python after it has imported the package and answered once: node snapshot.mjs PYODIDE FILES PROGRAM OUT
//
// A browser that starts from it neither starts Python nor imports anything. Nothing in it may be of
// JavaScript or of a library of C: those are not in the memory, so msgspec is imported afterwards.

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
  python.globals.set("program", readFileSync(program, "utf8"));
  python.runPython(`
import os, sys

sys.path.insert(0, "/meshdsl")
sys.dont_write_bytecode = True
sys.modules["msgspec"] = None
os.environ["MESHDSL_CACHE"] = "/meshdsl/cache"

import lark
import meshdsl.grammar as grammar

kept, grammar.parser_of = grammar.parser_of, lambda text: lark.Lark(text, postlex=grammar._KeepAll(), **grammar.OPTIONS)
grammar.load()  # by the grammar, and not by tables from the cache, which msgspec reads
grammar.parser_of = kept

import meshdsl.placed.optimal
import meshdsl.placed.zero_one
import meshdsl.play.layout_search
import meshdsl.play.side_by_side
import meshdsl.play.browser_worker
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.play.answer import answer, views

meshdsl.play.browser_worker.runs_of({"text": program})  # which reads the library functions
warming = meshdsl.play.browser_worker.warming(program)
text = program.partition("\\nexpect")[0]  # what is expected needs a plan, from the cache or the solver
made = Compilation(Source("program.mdsl", text), Options(reduce="deferred", cache=False), Diagnostics())
assert answer(made)["result"] and views(made)["views"]
del sys.modules["msgspec"], program, text, kept, grammar, lark, made, answer, views, Compilation, Diagnostics, Source, Options
import gc

gc.collect()
`);
  writeFileSync(out, gzipSync(python.makeMemorySnapshot(), { level: 9 }));
};
main().then(() => process.exit(0), (error) => {
  console.error(String(error.message ?? error).slice(0, 4000)); // not the line of the minified script
  process.exit(1);
});
