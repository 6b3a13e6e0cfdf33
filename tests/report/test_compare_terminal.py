"""The comparison on a terminal, and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from meshdsl.diagnostics import Source
from meshdsl.pipeline import DEFAULT_POLICY, Options
from meshdsl.report.comparison import NOT_RUN, comparison
from meshdsl.report.terminal import print_document
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.covering import in_turn
from tests.project import ROOT
from tests.report.comparing import (
    columns_of,
    compared,
    every_layout,
    lines_of,
    of_example,
)
from tests.report.golden import SOME, broken, source

__all__ = ["cli"]


# --- on a terminal ---------------------------------------------------------------------------


@in_turn(example=SOME, width=(60, 80, 120))
def test_no_line_is_wider_than_the_screen(example: str, width: int) -> None:
    for facts in (every_layout(example), compared(of_example(example), source(example))):
        assert [x for x in lines_of(facts, source(example), width) if len(x) > width] == []


def test_names_and_positions_beside_each_other() -> None:
    lines = lines_of(compared(of_example("mlp", "hybrid"), source("mlp")), source("mlp"), 120)
    assert any(
        line.split() == "h [batch@rows, hidden@cols] (S(0), S(1)) [batch@rows, hidden@cols]".split()
        for line in lines
    )
    assert any(line.split() == "annotations 2 rules 5 signatures 2 rules".split() for line in lines)


def test_differences_are_marked_in_text() -> None:
    columns = of_example("mlp", "hybrid,megatron")
    lines = lines_of(compared(columns, source("mlp")), source("mlp"), 80)
    (found,) = [x for x in lines if x.startswith("≠   w ")]
    assert found.split() == ["≠", "w", "[io,", "hidden@cols]", "≠", "[io,", "hidden@model]"]
    assert any(x.startswith("    loss  ") for x in lines)


def test_many_columns_stand_below_each_other() -> None:
    lines = lines_of(every_layout("transformer"), source("transformer"), 80)
    assert "    A  [layers, model, heads@tp, key]" in lines


def _printed(**console: Any) -> str:
    out = console.pop("file", None) or io.StringIO()
    facts = compared(of_example("mlp", "hybrid,megatron"), source("mlp"))
    print_document(comparison(facts, source("mlp")), Console(file=out, width=80, **console))
    return out.getvalue() if isinstance(out, io.StringIO) else ""


def test_colour_only_on_a_terminal() -> None:
    assert "\x1b" not in _printed()
    assert "\x1b[1;33m≠" in _printed(force_terminal=True, color_system="standard")


def test_a_terminal_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    _printed(file=out)
    out.flush()
    assert "!   w " in raw.getvalue().decode("ascii")


def test_nothing_from_a_file_steers_the_terminal() -> None:
    name = "\x1b[2J[red].mdsl"
    text = Source(name, "dim b = 4\nprogram p(x[b]) { # \x1b[31m[bold]\x07\n  return x\n}\n")
    columns = columns_of(text, Options(mesh="d:2"), "b:d", None, DEFAULT_POLICY)
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    print_document(comparison(compared(columns, text), text), console)
    assert "\x1b[31m" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "# \\x1b[31m[bold]\\x07" in out.getvalue()


# --- the command -----------------------------------------------------------------------------

MLP = str(ROOT / "examples" / "mlp.mdsl")


def test_json(cli: Cli) -> None:
    done = cli("compare", MLP, "--layouts", "hybrid", "--json", "--no-run")
    found = json.loads(done.out)
    assert done.code == 0
    assert not done.err
    assert set(found) == {"version", "program", "file", "same", "columns", "rows", "run"}
    assert [c["letter"] for c in found["columns"]] == ["A", "B", "C"]
    assert [c["reduce"] for c in found["columns"]] == [DEFAULT_POLICY] * 2 + ["immediate"]
    assert {c["version"] for c in found["columns"]} == {1}
    assert found["run"] == NOT_RUN
    for row in found["rows"]:
        for entry in (*row["tensors"], *row["routes"]):
            assert len(entry["cells"]) == len(entry["differs"]) == 3
            assert entry["same"] == (not any(entry["differs"]))


def test_a_broken_column_makes_the_exit_code(cli: Cli) -> None:
    Path("broken.mdsl").write_text(broken("megatron").text, encoding="utf-8")
    done = cli("compare", "broken.mdsl", "--layouts", "hybrid,megatron")
    assert done.code == 1
    assert done.out.startswith("mlp in 2 columns. 1 column could not be compiled.")
    assert "error[MD0302]" in done.err


def test_a_wrong_column_is_a_wrong_command(cli: Cli) -> None:
    done = cli("compare", MLP, "--layouts", "hybrid,hybrid", "--json")
    assert done.code == 2
    assert json.loads(done.out)["diagnostics"][0]["code"] == "MD0606"


def test_a_page_is_not_overwritten_unasked(cli: Cli) -> None:
    Path("page.html").write_text("mine")
    command = ("compare", MLP, "--no-run", "--html", "page.html")
    assert "error[MD0503]" in cli(*command).err
    assert Path("page.html").read_text() == "mine"
    done = cli(*command, "--force")
    assert done.code == 0
    assert done.out.endswith("wrote page.html; open it in a browser\n")
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
