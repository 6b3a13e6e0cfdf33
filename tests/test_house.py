"""The house: packaging, imports, and what no file may contain."""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.project import ROOT, copy_tree, matching, tracked

IN_THE_WHEEL = {".py", ".pyi", ".toml", ".lark", ".mdsl", ".html", ".css", ".js", ".template"}

NOT_IN_ANY_FILE = {
    "a path of one machine": rb"(?<![\w.~-])/(?:work|root|opt/wheels|opt/pypi|tmp/venv)(?:/|\b)",
    "somebody's home folder": rb"/(?:home|Users)/\w+/",
    "a package index": (
        rb"(?:pypi|pythonhosted)\.org|download\.pytorch\.org|https?://\S+/simple\b"
        rb"|--(?:extra-)?index-url|--find-links"
    ),
}


def _run(*command: str | Path, cwd: Path, stdin: str = "", **env: str) -> str:
    """Run a command and return what it printed; a failure shows all of its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | env,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the project, built from a copy so that the checkout stays clean."""
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


_WHERE = """
import sys, meshdsl, meshdsl.grammar, meshdsl.backends
bare = [name for name in ("grammar", "backends") if name in sys.modules]
assert not bare, f"imported under a bare name: {bare}"
for module in (meshdsl, meshdsl.grammar, meshdsl.backends):
    print(module.__file__)
"""


def _assert_imports_from(home: Path, elsewhere: Path) -> None:
    printed = _run(sys.executable, "-c", _WHERE, cwd=elsewhere, PYTHONPATH=str(home))
    homes = [Path(line) for line in printed.splitlines()]
    assert len(homes) == 3
    assert all(path.is_relative_to(home) for path in homes), homes


_LIGHT = """
import importlib, sys
for module in ("", ".grammar", ".backends", ".pipeline", ".backends.torch"):
    importlib.import_module(f"meshdsl{module}")
    assert not {"torch", "highspy", "sklearn"} & {*sys.modules}, module
assert not {"grammar", "backends"} & {*sys.modules}
sys.argv = ["meshdsl", "--version"]
from meshdsl.cli import main
main()
"""


def test_import_is_light_and_of_no_bare_names_and_the_version_is_said(tmp_path: Path) -> None:
    """In a process of its own: pytest looks for folders of tests under their bare names, too."""
    printed = _run(sys.executable, "-c", _LIGHT, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert re.search(r"\d+\.\d+\.\d+", printed)


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    wanted = {
        path.as_posix() if path.parts[0] == "meshdsl" else f"meshdsl/{path.as_posix()}"
        for path in tracked()
        if path.parts[0] in {"meshdsl", "grammar", "backends"}
        and (path.suffix in IN_THE_WHEEL or path.name == "py.typed")
    }
    assert {"meshdsl/py.typed", "meshdsl/grammar/mdsl.lark"} <= wanted
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("meshdsl/")}
    assert names == wanted, "a new package folder goes in `packages` of pyproject.toml"


def test_wheel_imports_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "install", "--no-deps", "--quiet", "--target", site, wheel, cwd=tmp_path)
    _assert_imports_from(site, elsewhere=tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which a copy of the checkout is installed as editable."""
    tree, out = copy_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("editable")
    hook = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    _run(sys.executable, "-c", hook, out, cwd=tree)
    home = tmp_path_factory.mktemp("user") / ".venv"
    venv.create(home, symlinks=True)
    (built,), (site,) = out.glob("*.whl"), home.glob("lib/python*/site-packages")
    zipfile.ZipFile(built).extractall(site)
    return home / "bin" / "python"


def test_an_editable_install_has_nothing_else_of_the_checkout(installed: Path) -> None:
    code = """
import importlib.util
import meshdsl, meshdsl.grammar, meshdsl.backends
known = ["tests", "backends", "grammar", "examples", "benchmarks", "meshdsl.tests"]
print([name for name in known if importlib.util.find_spec(name)])
"""
    assert _run(installed, "-c", code, cwd=installed.parent) == "[]\n"


def test_type_checkers_find_an_editable_install(installed: Path) -> None:
    """Without settings; they read `.pth` files, and do not run import hooks."""
    (installed.parent / "use.py").write_text("import meshdsl as md\nreveal_type(md.dim)\n")
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        installed,
        "--cache-dir",
        os.devnull,
    )
    said = _run(*mypy, "use.py", cwd=installed.parent, MYPYPATH="")
    assert "meshdsl.api.dims.Dim" in said, said


def _all_of(terminal: int) -> str:
    """What was written to a terminal that nobody has open any more; it comes in pieces."""
    found = b""
    with contextlib.suppress(OSError):  # so it ends
        while part := os.read(terminal, 10_000):
            found += part
    return found.decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_make_shows_progress_on_a_terminal_only(tmp_path: Path, terminal: bool) -> None:
    copy = copy_tree(tmp_path)
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho called: $*\n")
    python.chmod(0o755)
    outer, inner = pty.openpty()
    out = inner if terminal else subprocess.PIPE
    done = subprocess.run(["make", "install"], cwd=copy, stdout=out, check=True, text=True)
    os.close(inner)
    said = _all_of(outer) if terminal else done.stdout
    os.close(outer)
    assert "minutes, depending on the network" in said
    assert "called: -m pip install" in said
    assert ("--quiet" in said) is not terminal


def test_bare_clone_imports(tmp_path: Path) -> None:
    clone = copy_tree(tmp_path / "clone")
    for link in (clone / "meshdsl/grammar", clone / "meshdsl/backends"):
        assert link.is_symlink()
    _assert_imports_from(clone, elsewhere=tmp_path)


def test_constraints_pin_every_requirement() -> None:
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=~ ]", line)[0].lower() for line in wanted}
    assert {name for name in names if name.replace("-", "_") not in pinned} <= pinned


def test_what_lies_about_is_no_file_of_the_project(tmp_path: Path) -> None:
    copy = copy_tree(tmp_path)
    for stray in ("run.log", "examples/mine.mdsl", "meshdsl/__pycache__/a.pyc", ".venv/bin/python"):
        (copy / stray).parent.mkdir(parents=True, exist_ok=True)
        (copy / stray).write_text("left behind")
    unpacked = set(tracked(copy)) - set(tracked())
    assert unpacked == {Path("run.log"), Path("examples/mine.mdsl")}, "nobody can know"
    _run("git", "init", "-q", cwd=copy)
    _run("git", "add", "--pathspec-from-file=-", cwd=copy, stdin="\n".join(map(str, tracked())))
    tracked.cache_clear()
    assert tracked(copy) == tracked()


@pytest.mark.parametrize("why", NOT_IN_ANY_FILE)
def test_no_file_contains(why: str) -> None:
    pattern = re.compile(NOT_IN_ANY_FILE[why])
    found = [
        f"{path}: {match.group().decode()}"
        for path in tracked()
        if not (ROOT / path).is_symlink() and path != Path("tests/test_house.py")
        for match in pattern.finditer((ROOT / path).read_bytes())
    ]
    assert not found, why


def test_the_walk_through_the_house_is_short_and_leads_through_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walk = text.partition("## One rule, from text to collective")[2].partition("\n## ")[0]
    files = re.findall(r"`((?:meshdsl|backends)/[\w/]+\.py)`", walk)
    assert 8 <= len(files) <= 12
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_files_of_tests_have_the_names_of_their_folders() -> None:
    """Else `tests/site` would stand for Python's own module `site`, for whoever asks next."""
    files = {
        name: Path(file)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(ROOT / "tests")
    }
    assert files
    assert [name for name in files if not name.startswith("tests.")] == []


SHARED = {"Dim", "DType", "TensorType", "Mesh", "Layout"}
"""Classes of the language in Python, and of the compiler for the same thing."""


def test_a_class_name_has_one_meaning() -> None:
    homes: dict[str, set[Path]] = {}
    for path in matching("meshdsl/**/*.py", "backends/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(path.resolve())
    assert {name for name, files in homes.items() if len(files) > 1} == SHARED
