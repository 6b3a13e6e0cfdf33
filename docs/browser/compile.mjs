// Compile all Python of a folder with the Python of the browser: node compile.mjs PYODIDE FOLDER

import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [pyodide, folder] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(join(pyodide, "pyodide.mjs")));
const python = await loadPyodide();
python.mountNodeFS("/code", folder);
python.runPython(`
import compileall, py_compile
# Nobody changes the files: they are not compared with their bytecode when they are imported.
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
done = compileall.compile_dir(
    "/code", quiet=1, stripdir="/code", prependdir="/meshdsl", invalidation_mode=unchecked
)
assert done
`);
