"""Packages of operators: used by files and by commands, and refused where they are wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshdsl.ops import kit
from meshdsl.ops.opdef import ADDED
from meshdsl.placed import sharding_rules, strategies
from tests.packages import EXAMPLE, KERNELS, example, installed
from tests.project import ROOT

from .command import Cli, write

GUIDE = ROOT / "docs" / "howto" / "own_operators.md"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[str]:
    """The program of the guide, with its package installed."""
    with example(tmp_path) as path:
        yield str(path)


# --- the package of the guide ------------------------------------------------------------------


def test_every_command_takes_it(program: str, cli: Cli) -> None:
    """Placed, run in this process on uneven blocks, and written otherwise."""
    for command in (
        f"check {program}",
        f"fmt --check {program}",
        f"explain {program}",
        f"run {program} --step --verify --mesh rows:3,cols:1",
        f"render {program} --as sbp",
        "rows swiglu",
    ):
        done = cli(*command.split())
        assert done.code == 0, done.err
        assert "verified: equal" in done.out or "--verify" not in command


@pytest.mark.usefixtures("forked_ranks")
def test_the_text_imports_its_kernel_and_runs_on_processes(program: str, cli: Cli) -> None:
    done = cli("compile", program, "-o", "mlp.py")
    assert done.code == 0, done.err
    text = Path("mlp.py").read_text()
    assert "import torch.distributed as dist\nimport swiglu_kernels.kernel\n" in text
    assert "torch.ops.swiglu_kernels.swiglu(einsum, einsum_2, 1.5)" in text
    two = ("--mesh", "rows:1,cols:2", "--engine", "torchrun")
    ran = cli("run", program, *two, "--step", "--verify")
    assert ran.code == 0, ran.err
    assert "verified: equal" in ran.out


def test_a_look_at_such_a_program_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    looks = (
        "import sys; from meshdsl.cli import main\n"
        f"sys.argv = ['meshdsl', 'check', {str(EXAMPLE / 'mlp.mdsl')!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print('LOADED', *({'torch', 'numpy', 'swiglu_kernels'} & set(sys.modules)))"
    )
    with example(tmp_path):
        path = [str(ROOT), str(tmp_path), str(EXAMPLE)]
        environment = {"PYTHONPATH": ":".join(path), "PATH": "", "MESHDSL_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", looks],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.endswith("LOADED swiglu_kernels\n"), done.stdout


def test_it_is_proved(program: str, cli: Cli) -> None:
    done = cli("prove", KERNELS)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("swiglu: proved, on 3 samples\n  shapes ")
    found = json.loads(cli("prove", KERNELS, "--json").out)
    assert found["operators"][0]["proved"] is True
    assert f"$ meshdsl prove {KERNELS}\n{done.out}" in GUIDE.read_text(encoding="utf-8")
    assert found["diagnostics"] == []


WRONG_TWIN = """
import dataclasses
from meshdsl.ops import kit
from swiglu_kernels import OPERATORS as RIGHT
OPERATORS = (dataclasses.replace(RIGHT[0], factors=kit.plain(linear=[[0], [1]])),)
"""


def test_its_twin_with_a_wrong_placement_is_refused(tmp_path: Path, cli: Cli) -> None:
    """As the guide shows it."""
    (tmp_path / "wrong_twin.py").write_text(WRONG_TWIN)
    with example(tmp_path / "right"), installed(tmp_path, "twin", "wrong_twin:OPERATORS"):
        done = cli("prove", "twin")
        assert done.code == 1
        assert done.out.startswith("swiglu: not proved, on 3 samples\n")
        assert done.codes == ["error[MD0171]"]
        assert " ".join(done.err.split()) in " ".join(GUIDE.read_text(encoding="utf-8").split())


def test_an_operator_is_not_there_without_a_use(program: str, cli: Cli) -> None:
    text = Path(program).read_text().replace(f"use {KERNELS}\n", "")
    done = cli("check", write(text))
    assert done.codes == ["error[MD0103]"]
    assert f"those of installed packages need a line before all else: `use {KERNELS}`" in done.err


def test_a_package_that_is_used_is_not_proposed(program: str, cli: Cli) -> None:
    text = Path(program).read_text(encoding="utf-8").replace("swiglu(", "swigloo(", 1)
    done = cli("check", write(text))
    assert "error[MD0103]" in done.codes
    assert f"`use {KERNELS}`" not in done.err


def test_a_loaded_package_changes_no_other_program(program: str, cli: Cli) -> None:
    """A variable may have the name of a module that a program does not import."""
    assert cli("check", program).code == 0
    text = LINE.replace("use bad\n", "").replace("bad_op", "relu").replace("y", KERNELS)
    assert f"    {KERNELS} = " in cli("compile", write(text)).out


def test_wrong_calls_are_told_as_those_of_the_language(program: str, cli: Cli) -> None:
    calls = {
        "swiglu(x, y)": "MD0214",
        "swiglu(x, x, beta=3)": "MD0253",
        "swiglu(x)": "MD0251",
        "swiglu[a](x, x)": "MD0252",
        "swiglu(n, n)": "MD0202",
        "swiglu": "MD0102",
        'swiglu(x, x, "s")': "MD0213",
    }
    lines = [f"  z{i} = {call}" for i, call in enumerate(calls)]
    names = ", ".join(f"z{i}" for i in range(len(calls)))
    head = f"use {KERNELS}\ndim a = 4, b = 2\nprogram p(x[a], y[b], n[a]: i32) {{"
    done = cli("check", write("\n".join([head, *lines, f"  return {names}", "}", ""])))
    assert done.codes == [f"error[{code}]" for code in calls.values()], done.err


def test_a_variable_does_not_hide_the_module(program: str, cli: Cli) -> None:
    text = Path(program).read_text().replace("h = swiglu", f"{KERNELS} = swiglu")
    text = text.replace("einsum(h,", f"einsum({KERNELS},").replace(
        "  h: [batch", f"  {KERNELS}: [batch"
    )
    done = cli("run", write(text), "--verify")
    assert done.code == 0, done.err
    assert f"{KERNELS}_2 = torch.ops." in cli("compile", "f.mdsl").out


def test_plans_of_another_record_are_not_taken(program: str, cli: Cli) -> None:
    """The cache of plans knows by which factors a plan was found."""

    def sent() -> int:
        for module in (sharding_rules, strategies):  # what a process knows of the record
            for function in vars(module).values():
                getattr(function, "cache_clear", int)()
        total: int = json.loads(cli("explain", program, "--json").out)["totals"]["wire_bytes"]
        return total

    before = sent()
    assert sent() == before
    ADDED["swiglu"] = dataclasses.replace(ADDED["swiglu"], factors=lambda sig: kit.Factors(()))
    assert sent() > before


# --- packages that are wrong -------------------------------------------------------------------

LINE = "use bad\ndim a = 2\nprogram p(x[a]) {\n  y = bad_op(x)\n  return y\n}\n"
RECORD = """
from meshdsl.ops import kit
one = kit.pointwise_record({name!r}, 1, lambda x: x * 2, "({{0}} * 2)", {more})
"""


def record(name: str = "bad_op", more: str = "", end: str = "OPERATORS = (one,)") -> str:
    """A module with an operator that doubles."""
    return RECORD.format(name=name, more=more) + end + "\n"


WRONG = {
    "no module": ("", "bad_missing:OPERATORS", "MD0161", "ModuleNotFoundError: No module named"),
    "an error": ("raise ValueError('one\\ntwo')", "", "MD0161", "ValueError: one two"),
    "an exit": ("import sys; sys.exit(3)", "", "MD0161", "SystemExit: 3"),
    "no attribute": ("x = 1", "", "MD0161", "AttributeError"),
    "no syntax": ("def", "", "MD0161", "SyntaxError"),
    "a module without records": ("x = 1", "bad_module", "MD0163", "lists no operators"),
    "no list": ("OPERATORS = 3", "", "MD0163", "has int, not a tuple of operators"),
    "an empty list": ("OPERATORS = ()", "", "MD0163", "has no operators"),
    "no record": ("OPERATORS = ('relu',)", "", "MD0163", "lists str, not a record"),
    "taken by the language": (
        record("relu"),
        "",
        "MD0162",
        "`relu` (package `bad`) is already used by",
    ),
    "taken by the library": (
        record("top2_gating"),
        "",
        "MD0162",
        "is already used by the language",
    ),
    "twice": (record(end="OPERATORS = (one, one)"), "", "MD0162", "by another record"),
    "a word": (record("repeat"), "", "MD0163", "needs a valid name"),
    "no name": (record("a b"), "", "MD0163", "needs a valid name"),
    "no samples": (
        record(end="import dataclasses\nOPERATORS = (dataclasses.replace(one, samples=()),)"),
        "",
        "MD0163",
        "needs samples",
    ),
    "a sample that cannot be read": (
        record(
            end="import dataclasses\nwrong = kit.samples('b h=x')\n"
            "OPERATORS = (dataclasses.replace(one, samples=wrong),)"
        ),
        "",
        "MD0163",
        "needs other samples: AssertionError: 'h=x' is not a dim of a sample",
    ),
    "no torch text": (
        record(end="import dataclasses\nOPERATORS = (dataclasses.replace(one, torch=None),)"),
        "",
        "MD0163",
        "needs a function for its torch text",
    ),
    "a composite": (
        record(end="import dataclasses\nOPERATORS = (dataclasses.replace(one, composite=True),)"),
        "",
        "MD0163",
        "sets `composite`",
    ),
    "a part that is left out": (
        "from meshdsl.ops import kit\nOPERATORS = (kit.OpDef('bad_op'),)",
        "",
        "MD0161",
        "missing 6 required positional arguments: 'surface', 'infer'",
    ),
    "an import that is code": (
        record(more="imports=('os; x',)"),
        "",
        "MD0163",
        "needs module names",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_package_is_told_where_it_is_used(what: str, tmp_path: Path, cli: Cli) -> None:
    module, home, code, said = WRONG[what]
    (tmp_path / "bad_module.py").write_text(module)
    with installed(tmp_path, "bad", home or "bad_module:OPERATORS"):
        done = cli("check", write(LINE))
        assert done.codes == [f"error[{code}]"], done.err
        assert said in done.err
        assert "f.mdsl:1:5" in done.err
        assert "help: " in done.err
        proved = cli("prove", "bad")
        assert proved.codes == [f"error[{code}]"]


def test_what_a_package_prints_is_no_output(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "bad_module.py").write_text("print('hello')\n" + record())
    with installed(tmp_path, "bad", "bad_module"):
        done = cli("check", write(LINE), "--json")
        assert json.loads(done.out)["diagnostics"] == []
        assert done.err == "hello\n"


def test_rows_tells_of_a_package_that_cannot_be_loaded(tmp_path: Path, cli: Cli) -> None:
    """The operator may be in it; those of other packages are found."""
    (tmp_path / "bad_module.py").write_text("raise ValueError('broken')\n")
    (tmp_path / "good_module.py").write_text(record("good_op"))
    with (
        installed(tmp_path, "bad", "bad_module:OPERATORS"),
        installed(tmp_path, "good", "good_module:OPERATORS"),
    ):
        assert cli("rows", "good_op").code == 0
        done = cli("rows", "bad_op")
    assert done.codes == ["error[MD0161]", "error[MD0605]"]
    assert "ValueError: broken" in done.err
    assert "no operator `bad_op`, except perhaps in a package that cannot be loaded" in done.err


FAILING = {
    "infer": ("check", "lambda ins, attrs: ins[3]", "f.mdsl:4:7"),
    "factors": ("check --layout x", "lambda sig: 1 / 0", ""),
    "torch": ("compile", "lambda call: 'nobody(' + call.tensor(0) + ')'", ""),
    "numpy": ("run --engine reference", "lambda call, x: x.nothing", ""),
}


@pytest.mark.parametrize("part", FAILING)
def test_a_part_that_fails_is_told_without_a_traceback(part: str, tmp_path: Path, cli: Cli) -> None:
    command, function, place = FAILING[part]
    end = f"import dataclasses\nOPERATORS = (dataclasses.replace(one, {part}={function}),)"
    (tmp_path / "bad_module.py").write_text(record(end=end))
    text = "mesh m = { d: 2 }\nlayout x { a -> d }\n"
    with installed(tmp_path, "bad", "bad_module:OPERATORS"):
        name, *options = command.split()
        done = cli(name, write(LINE + text), *options)
        assert done.codes == ["error[MD0164]"], done.err
        assert place in done.err
