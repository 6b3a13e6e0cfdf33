"""`%mdsl` lines: what they show, what they say of mistakes, and how runs are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import meshdsl as md
from meshdsl.backends.engines.stack_sampler import device_in
from meshdsl.cli.app import app
from meshdsl.diagnostics import DiagnosticError
from meshdsl.notebook.magic_lines import INSTEAD, INSTEAD_OF, VERBS, instead_of, read_line
from tests.cli.command import Cli, write
from tests.cli.conftest import cli
from tests.notebook.conftest import BASE, MLP, Notebook
from tests.notebook.markup import parsed, pictures
from tests.waiting import until

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::meshdsl.ProgramWarning")


@pytest.mark.parametrize(
    ("line", "code", "help"),
    [
        ("explian", "MD0604", "did you mean `explain`"),
        ("explain --laut x", "MD0604", "--layout"),
        ("explain --layout 'x", "MD0604", "--layout"),
        ("explain nobody", "MD0108", "known: `mlp`"),
        ("explain --layout hybird", "MD0108", "did you mean `hybrid`"),
        ("explain --layout nope:rows", "MD0305", "remove the rule"),
        ("explain --mesh 7:", "MD0601", ""),
        ("explain --set batch", "MD0601", "--set"),
        ("explain --dtype f33", "MD0602", "f32"),
        ("run --engine locl", "MD0602", "write `--engine local`"),
        ("run --seed x", "MD0604", ""),
        ("mesh sqare", "MD0108", "did you mean `square`"),
        ("tensor hh --layout hybrid", "MD0102", "did you mean `h`"),
        ("compare --layouts hybrid,nope", "MD0108", "known: `hybrid`"),
        ("explain --tensor zz", "MD0607", "there are x, w, v, h, y"),
        ("explain --line 99", "MD0607", "write `--line"),
        ("explain --all --top 3", "MD0601", "leave out `--top` or `--all`"),
        ("explain --layout hybrid --layout hybrid", "MD0604", "--layout"),
        ("search --mesh square --method layout", "MD0602", "write `--method layouts`"),
        ("search --mesh square --memory x", "MD0601", "80GB"),
        ("search --mesh square --compare-methods --front", "MD0601", "leave out `--front`"),
        ("simulate --layout hybrid", "MD0630", "--cluster a100-dgx"),
        ("simulate --layout hybrid --cluster h10", "MD0320", "did you mean"),
        ("simulate --layout hybrid --cluster h100 --against none.json", "MD0631", "--trace"),
        ("schedule", "MD0604", "one_f_one_b"),
        ("schedule gpip --stages 2 --micro 2", "MD0528", "write `gpipe`"),
        ("schedule gpipe --stages 2", "MD0532", "--micro 8"),
        ("schedule gpipe --stages 2 --micro 2 --times F=1:2:3", "MD0530", "2 separated"),
        ("schedule gpipe --list", "MD0532", "leave out `gpipe`"),
    ],
)
def test_mistakes_in_a_line(defined: Notebook, line: str, code: str, help: str) -> None:
    with pytest.raises(md.ProgramError) as told:
        defined.line(line)
    (diagnostic,) = told.value.diagnostics
    assert diagnostic.code == code
    assert help in (diagnostic.help or "")


LINES = {"explain": "explain", "compare": "compare", "run": "run", "code": "compile"}
LINES |= {name: name for name in ("search", "simulate", "schedule")}
"""Lines, and the commands whose options they take."""

OPTIONS = [
    (line, option)
    for line, command in LINES.items()
    for option in typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    if option.param_type_name == "option" and option.name != "help"
]
VALUES = {"print_after": "named"}
"""Values of options that do not take a 3."""


@pytest.mark.parametrize(("line", "option"), OPTIONS, ids=lambda x: getattr(x, "name", x))
def test_a_line_takes_every_option_of_its_command_or_says_why_not(line: str, option: Any) -> None:
    value = () if option.is_flag else (VALUES.get(option.name, "3"),)
    words = " ".join((line, option.opts[-1], *value))
    if (help := instead_of(line).get(option.name)) is not None:
        with pytest.raises(DiagnosticError) as told:
            read_line(words)
        (diagnostic,) = told.value.diagnostics
        assert (diagnostic.code, diagnostic.help) == ("MD0604", help)
        return
    plain, given = (vars_of(read_line(text).given) for text in (line, words))
    assert {name for name in plain if plain[name] != given[name]} == {option.name}


def vars_of(given: Any) -> dict[str, Any]:
    return {f.name: getattr(given, f.name) for f in fields(given)}


def test_nothing_is_refused_that_no_command_has() -> None:
    assert set(INSTEAD) <= {option.name for _, option in OPTIONS}
    for line, options in INSTEAD_OF.items():
        assert set(options) <= {option.name for of, option in OPTIONS if of == line}


@pytest.mark.parametrize("words", ["--laut x", "--message-bytes=-1", "--layout", "--strict=1"])
def test_a_line_is_refused_as_the_command_line_is(words: str, cli: Cli) -> None:
    with pytest.raises(DiagnosticError) as told:
        read_line(f"explain {words}")
    (diagnostic,) = told.value.diagnostics
    done = cli("explain", "f.mdsl", *words.split())
    assert done.err.startswith(f"error[{diagnostic.code}]: {diagnostic.message}\n")


def test_lines_before_any_cell(notebook: Notebook) -> None:
    for line in ("explain", "run", "compare", "code", "memory", "collectives", "tensor h"):
        with pytest.raises(md.ProgramError, match="MD0111"):
            notebook.line(line)
    with pytest.raises(md.ProgramError, match="MD0108"):
        notebook.line("mesh")


def test_warnings_are_shown_below(defined: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    defined.line("explain --layout hybrid --mesh other:2")
    assert "MD0304" in capsys.readouterr().err


# --- lines -----------------------------------------------------------------------------------


def test_every_line_shows_something(defined: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    words = dict.fromkeys(("mesh", "show", "reset"), "")
    words |= {
        "search": "--mesh square",
        "simulate": "--layout hybrid --cluster h100",
        "schedule": "gpipe --stages 2 --micro 2",
    }
    for verb in VERBS:
        found = defined.line(f"{verb} {words.get(verb, '--layout hybrid')}")
        assert verb in ("show", "reset") or set(found._repr_mimebundle_()) == {
            "text/plain",
            "text/html",
        }
    assert "program mlp" in capsys.readouterr().out


def test_compare_is_that_of_plans(defined: Notebook) -> None:
    found = defined.line("compare --layouts hybrid,batch:cols --run")
    assert found.json["run"]["executed"] == ["A", "B"]
    plan = defined.shell.user_ns["mlp"].compile("square", "hybrid")
    ours, theirs = (x.json["columns"] for x in (plan.compare("batch:cols"), found))
    assert [c["totals"] for c in ours] == [c["totals"] for c in theirs]
    assert [[t["named"] for t in c["tensors"]] for c in ours] == [
        [t["named"] for t in c["tensors"]] for c in theirs
    ]


def test_search_is_that_of_the_command_and_its_plans_are_compiled(
    defined: Notebook, cli: Cli
) -> None:
    words = "--mesh square --memory 7KB --front"
    found = defined.line(f"search mlp {words}")
    done = json.loads(cli("search", write(BASE + MLP, "f.mdsl"), *words.split(), "--json").out)
    assert found.json["front"]
    for part in ("plans", "front"):  # of which the line of the peak is another in a cell
        ours, theirs = (
            [dict(p, memory=p["memory"]["peak"]) for p in x[part]] for x in (found.json, done)
        )
        assert ours == theirs
    assert found[0].cost().peak_memory <= 7_000
    (listing,) = parsed(found.html()).iter("pre")
    assert "layout searched {" in (listing.text or "")
    assert "monospace" in listing.get("style", "")
    methods = defined.line("search --mesh square --compare-methods")
    assert {"layouts", "exhaustive"} <= {method["method"] for method in methods.json["methods"]}
    sized = defined.line("search --mesh square --set batch=64").json["plans"][0]
    assert sized["memory"] != defined.line("search --mesh square").json["plans"][0]["memory"]


def test_simulate_draws_the_step(defined: Notebook, tmp_path: Path) -> None:
    found = defined.line("simulate --layout hybrid --cluster h100 --top 1")
    plan = defined.shell.user_ns["mlp"].compile("square", "hybrid")
    assert found.json == plan.simulate("h100").json
    assert len(pictures(found.html())) == 1
    assert "The 1 slowest of 2 lines" in str(found)
    with pytest.raises(md.ProgramError) as told:
        defined.line(f"simulate --layout hybrid --cluster h100 --against {tmp_path}/none.json")
    assert told.value.diagnostics[0].code == "MD0631"


def test_schedule_draws_tables_by_name_of_cells_and_of_python(defined: Notebook) -> None:
    table = "schedule mine(stages=2, micro=2) {\n  0: F0 F1 B0 B1\n  1: F0 B0 F1 B1\n}"
    defined.cell(table)
    defined.python("import meshdsl as md; other = md.scheduled(['F0 B0', 'F0 B0'])")
    found = defined.line("schedule mine --times F=2")
    assert (found.makespan, found.rows) == (11, ["F0 F1 B0 B1", "F0 B0 F1 B1"])
    assert len(pictures(found.html())) == 1
    assert defined.line("schedule other").rows == ["F0 B0", "F0 B0"]
    with pytest.raises(md.ProgramError, match="MD0532"):
        defined.line("schedule mine --weights stashed")
    assert "zb_v" in str(defined.line("schedule --list"))
    sliced = defined.line("schedule terapipe --stages 2 --micro 1 --tokens 8").json
    assert sum(sliced["best"]["slices"]) == 8


def test_run_is_compared_with_the_reference(defined: Notebook) -> None:
    found = defined.line("run --layout hybrid --verify")
    assert found.ok
    assert found.outputs["y"].shape == (8, 16)
    assert "verified" in str(found)
    assert "\x1b" not in str(found)


@pytest.mark.usefixtures("forked_ranks")
def test_real_ranks_are_processes_of_their_own(defined: Notebook) -> None:
    found = defined.line("run --mesh rows:1,cols:2 --layout hybrid --engine torchrun --verify")
    assert found.ok


def test_sizes_for_one_line(defined: Notebook) -> None:
    found = defined.line("explain --layout hybrid --set batch=32 io=8").json
    assert {t["name"]: t["shape"] for t in found["tensors"]}["x"] == [32, 8]
    assert defined.shell.user_ns["mlp"].named().inputs[0].type.shape == (8, 16)


def test_a_trained_program_is_its_step(defined: Notebook) -> None:
    defined.cell(
        "program fit(x[batch, io]) {\n  param w[io, hidden]\n"
        "  loss = mean(einsum(x, w -> [batch, hidden])^2)\n  return loss\n"
        "  minimize loss with adam(0.1)\n}"
    )
    held = defined.line("memory fit --layout hybrid")
    assert held["grads"] > 0
    assert held["state"] > 0


def test_programs_of_python_are_known_too(defined: Notebook) -> None:
    text = """
import meshdsl as md
batch, io = md.dims(batch=8, io=16)

@md.program
def double(x: md.Tensor[batch, io]):
    y = x * 2
    return y
"""
    defined.python(text)
    found = defined.line("explain double --mesh rows:2 --layout batch:rows")
    assert "y = x * 2" in found.text()
    assert found.json["file"] == "In[3]"


def test_cells_of_python_have_their_numbers(defined: Notebook) -> None:
    """Lines of a function in one cell are not looked for in another."""
    defined.python("import meshdsl as md\nbatch, io = md.dims(batch=8, io=16)")
    defined.python(
        "@md.function\ndef inner(x: md.Tensor[batch, io]) -> md.Tensor[batch, io]:\n"
        "    kept = x * 3\n    return kept"
    )
    defined.python(
        "@md.program\ndef outer(x: md.Tensor[batch, io]):\n    y = inner(x)\n    return y"
    )
    plan = defined.shell.user_ns["outer"].compile(md.mesh(rows=2), "batch:rows")
    files = {t["name"]: t["file"] for t in plan.explain().json["tensors"]}
    assert (files["inner.kept"], files["y"]) == ("In[4]", "In[5]")
    assert "kept = x * 3" in plan.explain().html()
    assert "kept = x * 3" in str(plan.explain(tensor="inner.kept"))
    assert "y = inner(x)" in str(plan.explain(line=3))


def test_reset_forgets(defined: Notebook) -> None:
    defined.line("reset")
    assert defined.codes("program p(x[batch]) {\n  return x\n}") == ["MD0101"]


# --- interrupting ----------------------------------------------------------------------------

SLOW = """
dim batch = 2, io = 8, trips = 500000
mesh pair = { d: 2 }
layout l { io -> d }
program slow(x[batch, io]) {
  repeat trips {
    x = x * 0.5 + sum[io](x) * 0.01
  }
  return x
}
"""


def computing() -> bool:
    """Whether a thread is in the program of a device."""
    return any(map(device_in, sys._current_frames().values()))


@pytest.mark.usefixtures("ctrl_c")
def test_interrupting_the_kernel_ends_a_run(notebook: Notebook) -> None:
    notebook.cell(SLOW)
    notebook.python("plan = slow.compile('pair', 'l'); given = plan.sample()")

    def interrupt() -> None:
        until(computing)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        notebook.python("plan(**given)")
    other.join()
    until(lambda: not computing())
    assert notebook.python("1 + 1") == 2


def test_the_extension_is_said_to_be_missing_without_ipython(tmp_path: Path) -> None:
    """The rest of the package does not need it."""
    code = "import sys; sys.modules['IPython'] = None; import meshdsl as md; print(md.mesh(a=2))"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
