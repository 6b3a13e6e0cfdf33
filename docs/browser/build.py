"""Build the page that needs no installation into a folder: `python -m docs.browser.build FOLDER`.

It is the page of `meshdsl play`, with a web worker in place of the server. The worker loads Python
and HiGHS, which are WebAssembly from npm (`package-lock.json` has their digests), and this package
with the libraries that it imports, of the versions in `constraints.txt`. It starts from the memory
of a Python that has imported them (`snapshot.mjs`).
Without node and npm nothing is built, which is said.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from meshdsl.play.page import static_page
from meshdsl.play.protocol import PageExample

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / "build/browser"
"""What is built is kept there for the next time."""

LIBRARIES = ("lark", "pygments")
"""What the package imports to check and explain a program, beside the standard library."""

LEFT_OUT = (
    *(f"meshdsl/{name}" for name in ("api", "cli", "editor", "notebook", "prove")),
    *(
        f"meshdsl/backends/{name}"
        for name in ("data", "engines", "generate", "module", "peers", "train", "weights")
    ),
)
"""What the page does not import of the package: what runs programs, and the other doors."""

BUILT = ("msgspec",)
"""The same, of C, which PyPI has for Python in a browser."""

BROWSER = ("--python-version=3.14", "--platform=pyemscripten_2026_0_wasm32")
"""The Python of this Pyodide, for pip."""

LOADED = {
    "pyodide": ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"),
    "highs": ("build/highs.mjs", "build/highs.wasm"),
}
"""The files of the packages of npm that a browser loads."""

SCRIPTS = ("worker.mjs", "files.mjs")
"""The scripts that are ours."""

FIRST = ("mlp", "matmul", "transformer")
"""The examples at the head of the menu; the others follow by name."""


def main(site: Path) -> None:
    """Write `play.html` and the folder `play` beside it."""
    if missing():
        print(f"without {' and '.join(missing())} the page that needs no installation is not built")
        return
    packages = _packages()
    folder = site / "play"
    folder.mkdir(parents=True, exist_ok=True)
    for package, names in LOADED.items():
        for name in names:
            shutil.copy(packages / package / name, folder)
    # The list of packages that Pyodide could load from elsewhere: none.
    (folder / "pyodide-lock.json").write_text(_no_packages(packages), encoding="utf-8")
    for archive in _code(packages):
        shutil.copy(archive, folder / f"{archive.name.partition('-')[0]}.gz")
    for name in SCRIPTS:
        shutil.copy(HERE / name, folder)
    (site / "play.html").write_text(static_page([*_examples()]), encoding="utf-8")
    print(f"open play.html of {site} by a server of files: python -m http.server -d {site}")


def missing() -> list[str]:
    """The programs that the page cannot be built without, and that are not here."""
    return [name for name in ("node", "npm") if shutil.which(name) is None]


def _packages() -> Path:
    """The packages of npm, installed if they are not."""
    folder = CACHE / "npm"
    for name in ("package.json", "package-lock.json"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / name, folder)
    stamp = folder / "installed"
    wanted = _digest([HERE / "package-lock.json"])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(command, cwd=folder, check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "node_modules"


def _no_packages(packages: Path) -> str:
    lock = json.loads((packages / "pyodide/pyodide-lock.json").read_text(encoding="utf-8"))
    return json.dumps({"info": lock["info"], "packages": {}})


def _code(packages: Path) -> tuple[Path, Path]:
    """This package and its libraries in one file, with their bytecode; and Python's memory.

    The memory is that of a Python that has imported them and compiled a program.
    """
    folders = (ROOT / name for name in ("meshdsl", "grammar", "backends"))
    found = (p for folder in folders for p in folder.rglob("*"))
    sources = sorted(p for p in found if p.is_file() and not _is_made(p))
    scripts = [HERE / f"{name}.mjs" for name in ("compile", "snapshot", "files")]
    scripts += [HERE / "build.py", HERE / "snapshot.py"]
    own = [*scripts, ROOT / "constraints.txt"]
    own += [ROOT / f"examples/{name}.mdsl" for name in FIRST]
    digest = _digest([*own, HERE / "package-lock.json", *sources])
    archives = tuple(CACHE / f"{name}-{digest[:16]}.gz" for name in ("files", "snapshot"))
    files, snapshot = archives
    if snapshot.is_file():
        return files, snapshot
    print("compiling the package for the browser, which takes about a minute")
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        wheels, code = Path(temporary, "wheels"), Path(temporary, "code")
        _fetch(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(code, [name for name in opened.namelist() if _is_used(name)])
        _fill_cache(code / "cache")
        compiler = ["node", str(HERE / "compile.mjs"), str(packages / "pyodide"), str(code)]
        subprocess.run(compiler, check=True)
        _leave_out_sources(code)
        made = [Path(temporary, archive.name) for archive in archives]
        made[0].write_bytes(gzip.compress(_packed(code), mtime=0))
        program = ROOT / f"examples/{FIRST[0]}.mdsl"
        command = ["node", HERE / "snapshot.mjs", packages / "pyodide", made[0], program, made[1]]
        subprocess.run([*map(str, command)], check=True)
        for before in (*CACHE.glob("files-*.gz"), *CACHE.glob("snapshot-*.gz")):
            before.unlink(missing_ok=True)
        for path, archive in zip(made, archives, strict=True):
            path.rename(archive)
    return files, snapshot


def _packed(folder: Path) -> bytes:
    """The files of a folder as `files.mjs` reads them."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    contents = [path.read_bytes() for path in paths]
    pairs = zip(paths, contents, strict=True)
    index = [[str(path.relative_to(folder)), len(content)] for path, content in pairs]
    head = json.dumps(index).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, *contents))


def _fetch(wheels: Path) -> None:
    """The wheels of the libraries, and that of this package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    constraints = ["--constraint", str(ROOT / "constraints.txt"), "--no-deps"]
    only = ["--only-binary=:all:", "--dest", str(wheels)]
    for libraries in (LIBRARIES, (*BROWSER, *BUILT)):
        subprocess.run([*pip, "download", *constraints, *only, *libraries], check=True)
    own = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run([*pip, *own], check=True)


def _fill_cache(folder: Path) -> None:
    """The cache that the browser begins with: the tables of the parser, the plans of `FIRST`."""
    programs = [example["text"] for example in _examples() if example["name"] in FIRST]
    text = (
        "import json, sys; from meshdsl.diagnostics import Source;"
        "from meshdsl.diagnostics import Diagnostics; from meshdsl.play.answer import answer;"
        "from meshdsl.pipeline import Compilation, Options;"
        "texts = json.load(sys.stdin);"
        "[answer(Compilation(Source('', t), Options(), Diagnostics())) for t in texts]"
    )
    environment = os.environ | {"MESHDSL_CACHE": str(folder)}
    command = [sys.executable, "-c", text]
    subprocess.run(command, input=json.dumps(programs).encode(), env=environment, check=True)


def _leave_out_sources(code: Path) -> None:
    """Let the bytecode stand for the modules, less those whose text emitted programs contain."""
    for path in code.rglob("__pycache__/*.pyc"):
        folder, (name, *_) = path.parents[1], path.name.split(".")
        if not folder.match("meshdsl/backends/runtime"):
            path.rename(folder / f"{name}.pyc")
            (folder / f"{name}.py").unlink()


def _is_made(path: Path) -> bool:
    return "__pycache__" in path.parts


def _is_used(name: str) -> bool:
    """Of the words of hundreds of languages only those of Python are shown; tests are not run."""
    folder, _, file = name.rpartition("/")
    if f"{folder}/".startswith(tuple(f"{left_out}/" for left_out in LEFT_OUT)):
        return False
    if folder.endswith((".dist-info", "/tests")):
        return False
    return folder != "pygments/lexers" or file in ("__init__.py", "_mapping.py", "python.py")


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(ROOT)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _examples() -> Iterator[PageExample]:
    """The programs in `examples`, each with its name."""
    files = {path.stem: path for path in sorted((ROOT / "examples").glob("*.mdsl"))}
    for name in (*FIRST, *(name for name in files if name not in FIRST)):
        yield {"name": name, "text": files[name].read_text(encoding="utf-8")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
