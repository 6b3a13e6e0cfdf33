"""The emitted text: the same bytes wherever it is made, laid out as a formatter would do it."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.backends.torch.line_breaks import double_quoted, statement
from meshdsl.backends.torch.preamble import RUNTIME
from tests.compiling import compile_text
from tests.covering import some
from tests.project import ROOT, examples
from tests.report.everything import everything
from tests.report.golden import CASES as EVERY_CASE
from tests.report.golden import Case, made
from tests.waiting import ended, started

CASES = some(EVERY_CASE)
"""Their texts; of the others, golden files."""

RUFF = (sys.executable, "-m", "ruff")
AS_HERE = ("--isolated", "--line-length", "100", "--target-version", "py311")


def _run(command: tuple[str, ...], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


EVERY = 1 if "MESHDSL_CASES" in os.environ else 60
"""Of how many cases one is compiled several times."""


def _folder(home: Path) -> Path:
    """A folder with the examples."""
    for path in examples():
        copy = home / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return home


@pytest.mark.timeout(1800)  # a machine that is busy besides takes several times as long
def test_the_same_bytes_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent of the folder, the order, the seed of hashes, and the load of the machine."""
    monkeypatch.chdir(_folder(tmp_path / "here"))
    backwards = (sys.executable, "-m", "tests.report.everything", str(EVERY), "-1", "-1")
    own = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "2"}
    other = {"cwd": _folder(tmp_path / "some where"), "env": os.environ | own}
    with started(backwards, **other, stdout=subprocess.PIPE) as processes:
        here = everything(EVERY, 0, 1)  # meanwhile, in a process that has compiled other programs
        (text,) = ended(processes)
    there = json.loads(text)
    assert here.keys() == there.keys()
    assert len(here) > 80 / EVERY
    assert [name for name in here if here[name] != there[name]] == []


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the emitted text of every case."""
    folder = tmp_path_factory.mktemp("programs")
    for case in CASES:
        (folder / f"{case.name}.py").write_text(made(case).text, encoding="utf-8")
    return folder


def test_a_formatter_changes_nothing(programs: Path) -> None:
    _run((*RUFF, "format", *AS_HERE, "--check", "--diff", "."), programs)


def test_a_linter_finds_nothing(programs: Path) -> None:
    # Comments quote source lines, which are as long as their author made them. The runtime below
    # the program has its imports with it.
    rules = ("--select", "E,F,I,UP,B", "--ignore", "E501,E402")
    _run((*RUFF, "check", *AS_HERE, *rules, "."), programs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_quoted_source_lines_are_long(case: Case) -> None:
    long = [line for line in made(case).text.splitlines() if len(line) > 100]
    assert all(line.lstrip().startswith(f"# examples/{case.example}.mdsl:") for line in long)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_program_comes_first_and_says_no_more_than_it_must(case: Case) -> None:
    """It imports numpy and torch alone; that it runs without meshdsl: `test_readme.py`."""
    device, _, runtime = made(case).text.partition(RUNTIME)
    assert "\ndef device(" in device
    assert "\ndef " not in device.partition("\ndef device(")[2]
    nodes = [*ast.walk(ast.parse(made(case).text))]
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported} - {"numpy", "torch"}
    assert roots <= set(sys.stdlib_module_names)
    defined = set(re.findall(r"^def (\w+)", runtime, re.MULTILINE))
    assert defined <= {n.id for n in nodes if isinstance(n, ast.Name)}
    # Another name for what has one is only what an iteration of a loop hands on to the next, or the
    # first one begins with, where it is read behind the loop, too.
    alias = re.compile(r" +\w+ = (?!rank\b)[a-z]\w*(  #|$)")
    lines = [line for line in device.split("\n") if line.strip()]
    for line, following in itertools.pairwise(lines):
        if alias.match(line) and not alias.match(following):
            inner, outer = (len(s) - len(s.lstrip()) for s in (line, following))
            assert outer < inner or following.lstrip().startswith("for ")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_person_reads_is_the_function_of_a_device(case: Case) -> None:
    heading, _, device = made(case).bare.partition("\n\n\n")
    assert "for reading" in heading
    comments, _, table = heading.partition("\n\n")
    assert all(line.startswith("# ") for line in comments.split("\n"))
    assert not table or table.startswith("SCHEDULE = (")
    assert f"\n{table}\n" in made(case).text
    assert f"\n\n\n{device}\n\n{RUNTIME}\n" in made(case).text


def test_the_transformer_is_short() -> None:
    """Header, tables, program and runtime: 80 lines of files, 14 of MKL first calls.

    11 of what stays on the host, 10 of groups of devices without numpy, 1 of ignored targets,
    6 of the two ways to look at indices, 10 of the one for a few, 7 of the block of indices that a
    device has, 1 of an import that only writing a file needs; the step itself is 4 lines shorter
    for these.
    """
    case = Case("transformer", "megatron")
    assert len(made(case).text.splitlines()) <= 623
    assert len(made(case).bare.splitlines()) <= 114


LONG = "a" * 30
STATEMENTS = {
    "x = y": ["x = y"],
    "x = f('a', \"b\", 'say \"hi\"')": ['x = f("a", "b", \'say "hi"\')'],
    f"x = f({LONG}, {LONG}, {LONG[1:]}).long()": [
        "x = f(",
        f"    {LONG}, {LONG}, {LONG[1:]}",
        ").long()",
    ],
    f"x = f({LONG}, {LONG}, {LONG}, {LONG}, '(,')": [
        "x = f(",
        *(f"    {LONG}," for _ in range(4)),
        '    "(,",',
        ")",
    ],
    f"return {{'a': {LONG}, 'b': {LONG}, 'c': {LONG}, 'd': 1}}": [
        "return {",
        *(f'    "{key}": {LONG},' for key in "abc"),
        '    "d": 1,',
        "}",
    ],
    f"x = {LONG} * ({LONG} - f({LONG}, {LONG[:9]}))": [
        f"x = {LONG} * (",
        f"    {LONG} - f({LONG}, {LONG[:9]})",
        ")",
    ],
    f"{LONG}, {LONG}, {LONG} = f([a, b], {LONG})": [
        f"{LONG}, {LONG}, {LONG} = f(",
        f"    [a, b], {LONG}",
        ")",
    ],
    f"{LONG}, {LONG}, {LONG} = work.wait()": [
        f"{LONG}, {LONG}, {LONG} = (",
        "    work.wait()",
        ")",
    ],
    f"{LONG}, {LONG}, {LONG}, b = f([{LONG}, {LONG}], {LONG[8:]}, x)": [
        "(",
        *(f"    {LONG}," for _ in range(3)),
        "    b,",
        f") = f([{LONG}, {LONG}], {LONG[8:]}, x)",
    ],
    f"{LONG}, {LONG}, {LONG}, b = f([{LONG}, {LONG}], {LONG[8:]}, uvwxyz)": [
        "(",
        *(f"    {LONG}," for _ in range(3)),
        "    b,",
        ") = f(",
        f"    [{LONG}, {LONG}], {LONG[8:]}, uvwxyz",
        ")",
    ],
    f"{LONG}, {LONG}, {LONG}, b = work.wait()": [
        "(",
        *(f"    {LONG}," for _ in range(3)),
        "    b,",
        ") = work.wait()",
    ],
    f"{LONG}[i + 1], {LONG}[i + 1], {LONG}[i + 1], b[i + 1] = work.wait()": [
        "(",
        *(f"    {LONG}[i + 1]," for _ in range(3)),
        "    b[i + 1],",
        ") = work.wait()",
    ],
    f"x, y, z, a = {LONG}, {LONG}, {LONG}, 1": [
        "x, y, z, a = (",
        *(f"    {LONG}," for _ in range(3)),
        "    1,",
        ")",
    ],
}


@pytest.mark.parametrize("text", STATEMENTS)
def test_long_statements_are_broken_as_the_formatter_does(text: str) -> None:
    found = statement(text)
    assert found == STATEMENTS[text]
    body = "\n".join(found) + "\n"
    command = (*RUFF, "format", *AS_HERE, "-")
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=True)
    assert done.stdout == body


@pytest.mark.parametrize("value", ["", "a", 'a"b', "it's", "\\", "\\'", "\n'\"", "\x00é\u2028"])
def test_quotes_change_no_string(value: str) -> None:
    assert eval(double_quoted(f"[{value!r}, {value!r}]")) == [value, value]


NUMBERS = {
    "y = x * -1000000000.0": "y = x * -1e9 ",
    "y = x * 1000000.0": "y = x * 1e6 ",
    "y = x * 1000.0": "y = x * 1000.0 ",
    "y = x * 1234567890.0": "y = x * 1234567890.0 ",
    "y = n * 1000000000": "y = n * 1000000000 ",
}
"""A statement of the language, and the number in the text: short, and never of another type."""


@pytest.mark.parametrize("statement", NUMBERS)
def test_a_number_is_short_and_keeps_its_type(statement: str) -> None:
    text = f"dim a = 4\nprogram p(x[a], n[a]: i64) {{\n  {statement}\n  return y\n}}\n"
    assert NUMBERS[statement] in compile_text(text).emitted.text


@pytest.mark.parametrize(("dtype", "copies"), [("i32", 2), ("f32", 0)])
def test_only_integers_are_copied_to_be_reduced_twice(dtype: str, copies: int) -> None:
    """Floats are sent in memory of their own, for their NaN; integers where they are."""
    text = f"""dim a = 4, b = 3, c = b
mesh pair = {{ p: 2 }}
layout split {{ a -> p }}
program q(x[a, b]: {dtype}) {{
  m = max[a](x)
  y = m[b -> c]
  z = m * m
  return y, z
}}
"""
    emitted = compile_text(text, layout="split", reduce="deferred").emitted.text
    assert emitted.count('groups["p"], "max")') == 2
    assert emitted.count("all_reduce(m_part.clone(), ") == copies
