"""The comparison: columns add up, `same` means what it says, and nothing is called equal unseen."""

from __future__ import annotations

import functools
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import DEFAULT_POLICY, Options, compile_source
from meshdsl.placed.ir import Reshard, walk
from meshdsl.report.columns import Column, Wish, compile_columns, raise_if_none_works, wishes
from meshdsl.report.compare import compare, positional
from meshdsl.report.compare_terminal import comparison_lines, measured, print_comparison, sentence
from meshdsl.report.explain import explain
from meshdsl.report.measure import NOT_RUN, measure
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.report.golden import CASES, EXAMPLES, ROOT, SIZES, Case, layouts, made, source

__all__ = ["cli"]

POLICIES = ("immediate", "deferred")
NOW = "deferred"
"""What stands for the default policy here, whatever that is."""

EXTRA = {"named", "sbp"}
"""What a comparison adds to every tensor of `explain`."""


def _columns(text: Source, chosen: Options, *given: str | None) -> list[Column]:
    named = compile_source(text, chosen, Diagnostics(), "named")
    layouts_, sbps, policies = (*given, None, None, None)[:3]
    asked = wishes(named["declarations"], layouts_, sbps, policies, NOW)
    return compile_columns(named, asked, chosen)


def _example(name: str, *given: str | None, **options: Any) -> list[Column]:
    chosen = Options(set_dims=SIZES.get(name, {}), **options)
    return _columns(source(name), chosen, *given)


def _compared(columns: list[Column], text: Source, run: Any = NOT_RUN) -> dict[str, Any]:
    return {**compare(columns, text), "run": run}


@functools.cache
def _all(example: str) -> dict[str, Any]:
    """Every layout of an example under two policies."""
    given = (",".join(layouts(example)), None, ",".join(POLICIES))
    return _compared(_example(example, *given), source(example))


# --- what a column says ----------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_column_says_what_explain_says(example: str) -> None:
    columns = _all(example)["columns"]
    asked = itertools.product(layouts(example), POLICIES)
    for column, (layout, policy) in zip(columns, asked, strict=True):
        options = Options(layout=layout, reduce=policy, set_dims=SIZES.get(example, {}))
        expected = explain(compile_source(source(example), options, Diagnostics())["device"])
        plain = [{k: v for k, v in t.items() if k not in EXTRA} for t in column["tensors"]]
        found = {k: column[k] for k in expected} | {"tensors": plain, "warnings": []}
        assert found == expected


@pytest.mark.parametrize("example", EXAMPLES)
def test_routes_and_rows_add_up_to_the_totals(example: str) -> None:
    compared = _all(example)
    for number, column in enumerate(compared["columns"]):
        every = sum(column["totals"]["by_phase"].values())
        assert sum(r["wire_bytes"] for r in column["routes"]) == every
        assert sum(row["wire_bytes"][number] for row in compared["rows"]) == every
        for route in column["routes"]:
            assert route["from"] == route["steps"][0]["before"]["named"]
            assert route["to"] == route["steps"][-1]["after"]["named"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_placements_are_those_of_the_compiler(case: Case) -> None:
    tensors = compare(_example(case.example, case.layout), source(case.example))["columns"][0]
    placed = made(case)["placed"].tensors
    for entry, tensor in zip(tensors["tensors"], placed, strict=True):
        assert entry["named"] == tensor.placement.show(tensor.value.type)


TENSOR = {"dims": ["b", "i"], "placement": {"x": "B", "y": "B", "z": "B"}, "order": {}}
POSITIONAL = {
    "whole": ({}, {}, ["B", "B", "B"]),
    "split": ({"y": "S(i)"}, {"i": ["y"]}, ["B", "S(1)", "B"]),
    "in_mesh_order": ({"x": "S(i)", "y": "S(i)"}, {"i": ["x", "y"]}, ["S(1)", "S(1)", "B"]),
    "another_order": ({"x": "S(b)", "y": "S(b)"}, {"b": ["y", "x"]}, ["S(0)/2", "S(0)/1", "B"]),
    "partial": ({"x": "P", "z": "S(b)"}, {"b": ["z"]}, ["P", "B", "S(0)"]),
    "maximum": ({"x": "P(max)"}, {}, ["P(max)", "B", "B"]),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_by_positions(name: str) -> None:
    placement, order, expected = POSITIONAL[name]
    tensor = TENSOR | {"placement": TENSOR["placement"] | placement, "order": order}  # type: ignore[operator]
    assert list(positional(tensor).values()) == expected


WRITTEN = {
    ("mlp", "hybrid"): (2, 5),  # x, target, w, b, v
    ("mlp", "megatron"): (1, 3),
    ("transformer", "data_parallel"): (1, 2),
    ("transformer", "fsdp"): (3, 16),  # two inputs, seven parameters, and each of these gathered
}


@pytest.mark.parametrize(("example", "layout"), WRITTEN)
def test_what_has_to_be_written(example: str, layout: str) -> None:
    (column,) = compare(_example(example, layout), source(example))["columns"]
    rules, signatures = WRITTEN[example, layout]
    assert column["annotations"]["rules"] == rules
    assert column["annotations"]["signatures"] == signatures


def test_pins_are_counted() -> None:
    text = Source("p.mdsl", "dim b = 4\nmesh m = { a: 2 }\nprogram p(x[b@a]) { return x }\n")
    (column,) = compare(_columns(text, Options(), None, None, "deferred"), text)["columns"]
    assert column["annotations"] == {"rules": 0, "pins": 1, "signatures": 1}


SUMMA = Source(
    "summa.mdsl",
    """dim m = 8, k = 16, n = 8
mesh square = { x: 2, y: 2 }
layout two { m -> x, n -> y }
sbp outer { a: (S(0), B), b: (B, S(1)) }
sbp inner { a: (S(1), S(0)), b: (S(0), B), c: (P, S(0)) }
program mm(a[m, k], b[k, n]) {
  c = einsum(a, b -> [m, n])
  return -c
}
""",
)


def test_layouts_and_sbp_blocks_beside_each_other() -> None:
    columns = _columns(SUMMA, Options(), "two", "outer,inner")
    compared = _compared(columns, SUMMA, measure(columns, 0))
    assert [c["annotations"]["signatures"] for c in compared["columns"]] == [2, 2, 3]
    assert [c["positional"] for c in compared["columns"]] == [False, True, True]
    (c,) = [e for row in compared["rows"] for e in row["tensors"] if e["tensor"] == "c"]
    assert [list(cell["sbp"].values()) for cell in c["cells"]] == [
        ["S(0)", "S(1)"],
        ["S(0)", "S(1)"],
        ["P", "S(0)"],
    ]
    assert c["differs"] == [False, False, True]
    assert compared["run"]["between"][0]["max_error"] == 0
    assert compare(columns[:2], SUMMA)["same"]


# --- same or different -----------------------------------------------------------------------


def _facts(stages: dict[str, Any]) -> Any:
    """What must agree, told without the comparison: placements of named tensors, and reshards."""
    program = stages["placed"]
    held = [(t.value.name, t.placement) for t in program.tensors if t.value.name]
    sent = [
        (n.span.start, n.phase, k, [(s.kind, s.axes, s.before, s.after) for s in n.route.steps])
        for n, k in walk(program.body)
        if isinstance(n, Reshard)
    ]
    return held, sent, explain(stages["device"])["totals"]["by_axis"]


def _pairs() -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    found = []
    for example in EXAMPLES:
        asked = list(itertools.product(layouts(example), POLICIES))
        found += [(example, a, b) for a, b in itertools.combinations(asked, 2)]
    return found


@functools.cache
def _stages(example: str, layout: str, policy: str) -> dict[str, Any]:
    options = Options(layout=layout, reduce=policy, set_dims=SIZES.get(example, {}))
    return compile_source(source(example), options, Diagnostics())


def _columns_of(example: str, *asked: tuple[str, str]) -> list[Column]:
    return [
        Column(letter, Wish("layout", *wish), _stages(example, *wish))
        for letter, wish in zip("AB", asked, strict=True)
    ]


@pytest.mark.parametrize("example", EXAMPLES)
def test_same_exactly_when_placements_routes_and_bytes_agree(example: str) -> None:
    seen = set()
    for _, first, second in (pair for pair in _pairs() if pair[0] == example):
        found = compare(_columns_of(example, first, second), source(example))["same"]
        stages = [_stages(example, *wish) for wish in (first, second)]
        assert found == (_facts(stages[0]) == _facts(stages[1]))
        seen.add(found)
    assert seen == {True, False} or example == "matmul"


def test_a_row_differs_where_its_entries_do() -> None:
    compared = _compared(_example("mlp", "hybrid,data_parallel"), source("mlp"))
    differs = {e["tensor"] for row in compared["rows"] for e in row["tensors"] if not e["same"]}
    assert differs == {"w", "b", "v", "h"}
    unlike = [row["line"] for row in compared["rows"] if not row["same"]]
    assert unlike == [13, 14, 15, 17, 18]  # y stands alike; only one column has to reduce it
    assert not compared["same"]
    assert sentence(compared) == "mlp in 2 columns: 5 of 7 statements differ."


# --- which columns there are -----------------------------------------------------------------

ASKED = {
    "default": (
        (None, None, None),
        [("hybrid", NOW), ("hybrid", NOW), ("hybrid", "immediate")],
    ),
    "layouts": (
        ("megatron, hybrid", None, None),
        [("megatron", NOW), ("hybrid", NOW)],
    ),
    "policies": (
        (None, None, "immediate,deferred"),
        [("hybrid", "immediate"), ("hybrid", "deferred")],
    ),
    "product": (
        ("hybrid,megatron", None, "immediate,deferred"),
        list(itertools.product(("hybrid", "megatron"), POLICIES)),
    ),
    "rules": (
        ("batch:rows,io:cols,hybrid,io:rows;hidden:rows", None, "deferred"),
        [(n, "deferred") for n in ("batch:rows,io:cols", "hybrid", "io:rows", "hidden:rows")],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_columns(name: str) -> None:
    given, expected = ASKED[name]
    found = [(c.made["placed"].layout, c.wish.reduce) for c in _example("mlp", *given)]
    assert found == expected


def test_the_positional_column_is_the_same_program() -> None:
    first, second, _ = _example("mlp")
    assert second.wish.positional
    assert second.same_as == "A"
    assert second.made is first.made


WRONG = {
    "twice": (("hybrid,hybrid", None, None), "MD0606", (7, 13)),
    "policy_twice": ((None, None, "deferred,deferred"), "MD0606", (9, 17)),
    "unknown": (("hybrid, hybird", None, None), "MD0108", (8, 14)),
    "unknown_sbp": ((None, "summa", None), "MD0108", (0, 5)),
    "unknown_policy": ((None, None, "now"), "MD0108", (0, 3)),
    "empty": (("hybrid,,megatron", None, None), "MD0601", (7, 8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_columns_that_cannot_be_asked_for(name: str) -> None:
    given, code, place = WRONG[name]
    with pytest.raises(DiagnosticError) as caught:
        _example("mlp", *given)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.help
    assert diagnostic.span is not None
    assert (diagnostic.span.start, diagnostic.span.end) == place


# --- columns that do not work ----------------------------------------------------------------


def _half_broken() -> list[Column]:
    chosen = Options(set_dims={"hidden": 6})
    return _columns(source("mlp"), chosen, "hybrid,megatron")


def test_a_broken_column_is_reported() -> None:
    columns = _half_broken()
    compared = _compared(columns, source("mlp"), measure(columns, 0))
    assert not compared["same"]
    assert compared["columns"][1]["diagnostics"][0]["code"] == "MD0301"
    assert all(e["cells"][1] is None for row in compared["rows"] for e in row["tensors"])
    assert [r["status"] for r in compared["run"]["runs"]] == ["ran", "broken"]
    text = _text(compared, source("mlp"))
    assert "B  layout megatron, reduced deferred: MD0301 dim `hidden` of size 6" in text
    assert "mlp in 2 columns. 1 column could not be compiled." in text
    assert "B: not executed: it did not compile." in text


def test_where_no_column_works_all_is_raised() -> None:
    columns = _columns(source("mlp"), Options(set_dims={"hidden": 7}), "hybrid,megatron")
    with pytest.raises(DiagnosticError) as caught:
        raise_if_none_works(columns)
    assert [d.code for d in caught.value.diagnostics] == ["MD0301", "MD0301"]


def test_a_column_that_is_too_large_is_not_run_and_says_so() -> None:
    columns = _example("mlp", "hybrid,data_parallel")
    run = measure(columns, 0, budget=4 * 5_000_000)
    assert [r["status"] for r in run["runs"]] == ["ran", "refused"]
    assert not run["between"]
    assert "B: not executed: MD0703" in " ".join(measured({"run": run}))
    assert {d.severity for d in columns[1].diagnostics} == {"warning"}


FAILS = """dim n = 4, m = 4
mesh pair = { a: 2 }
layout l { n -> a }
program p(x[m], i[n]: i32) { return x[m = i + 4] }
"""


def test_a_column_that_fails_is_reported(cli: Cli) -> None:
    Path("p.mdsl").write_text(FAILS)
    done = cli("compare", "p.mdsl", "--layouts", "l")
    assert done.code == 3
    assert "A: failed: MD08" in done.out
    assert "error[MD08" in done.err


# --- what was measured -----------------------------------------------------------------------


@pytest.mark.parametrize("example", ["mlp", "matmul", "digits"])
def test_the_columns_agree_with_the_reference_and_each_other(example: str) -> None:
    columns = _example(example, ",".join(layouts(example)[:3]))
    run = measure(columns, 3)
    assert [r["status"] for r in run["runs"]] == ["ran"] * len(columns)
    for entry, column in zip(run["runs"], columns, strict=True):
        assert entry["reference"]["ok"]
        assert entry["wire_bytes"] == explain(column.made["device"])["totals"]["wire_bytes"]
    assert len(run["between"]) == len(columns) * (len(columns) - 1) // 2
    assert all(pair["ok"] for pair in run["between"])


def _spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> dict[str, Any]:
    """Three columns, of which the second to run has other outputs."""
    from meshdsl.backends import engines

    real, calls = engines.run, itertools.count()

    def run(stages: Any, engine: str, *rest: Any) -> Any:
        result = real(stages, engine, *rest)
        if engine == "local" and next(calls) == 1:
            result.outputs["y"] = spoil(result.outputs["y"])
        return result

    monkeypatch.setattr(engines, "run", run)
    columns = _example("mlp")
    return _compared(columns, source("mlp"), measure(columns, 0))


def test_columns_that_differ_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _spoilt(monkeypatch, lambda y: y + 0.5)
    (pair,) = compared["run"]["between"]
    assert pair["columns"] == ["A", "C"]
    assert pair["output"] == "y"
    assert pair["max_error"] == pytest.approx(0.5)
    assert not pair["ok"]
    lines = list(measured(compared))
    assert any(line.startswith("  A and C: NOT equal, by ") for line in lines)
    assert any(line.startswith("  C: NOT equal, by ") for line in lines)


def test_a_difference_without_a_number_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _spoilt(monkeypatch, lambda y: y * float("nan"))
    assert compared["run"]["between"][0]["max_error"] is None
    json.dumps(compared, allow_nan=False)
    assert "A and C: NOT equal, `y` has other shapes, NaN" in " ".join(measured(compared))


def test_nothing_is_called_equal_that_was_not_executed() -> None:
    text = _text(_compared(_example("mlp"), source("mlp")), source("mlp"))
    assert text.endswith("Nothing was executed: no word on whether the values are equal.")
    assert "equal," not in text
    assert "equal up" not in text


def test_a_program_shown_twice_is_executed_once() -> None:
    run = measure(_example("mlp"), 0)
    assert run["executed"] == ["A", "C"]
    assert run["between"][0]["max_error"] == 0
    text = " ".join(measured({"run": run}))
    assert "B: the program of A, not executed again." in text
    assert "A and C: equal, bit for bit." in text


# --- on a terminal ---------------------------------------------------------------------------


def _lines(compared: dict[str, Any], text: Source, width: int = 100) -> list[str]:
    return ["".join(t for t, _ in line) for line in comparison_lines(compared, text, width)]


def _text(compared: dict[str, Any], text: Source, width: int = 200) -> str:
    return "\n".join(_lines(compared, text, width))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("example", EXAMPLES)
def test_no_line_is_wider_than_the_screen(example: str, width: int) -> None:
    for compared in (_all(example), _compared(_example(example), source(example))):
        assert [x for x in _lines(compared, source(example), width) if len(x) > width] == []


def test_names_and_positions_beside_each_other() -> None:
    lines = _lines(_compared(_example("mlp"), source("mlp")), source("mlp"), 120)
    assert any(
        line.split() == "h [batch@rows, hidden@cols] (S(0), S(1)) [batch@rows, hidden@cols]".split()
        for line in lines
    )
    assert any(line.split() == "written 2 rules 5 signatures 2 rules".split() for line in lines)


def test_differences_are_marked_in_text() -> None:
    columns = _example("mlp", "hybrid,megatron")
    lines = _lines(_compared(columns, source("mlp")), source("mlp"), 80)
    (found,) = [x for x in lines if x.startswith("≠   w ")]
    assert found.split() == ["≠", "w", "[io,", "hidden@cols]", "≠", "[io,", "hidden@model]"]
    assert any(x.startswith("    loss  ") for x in lines)


def test_many_columns_stand_below_each_other() -> None:
    lines = _lines(_all("transformer"), source("transformer"), 80)
    assert "    A  [layers, model, heads@tp, key]" in lines


def _printed(**console: Any) -> str:
    out = console.pop("file", None) or io.StringIO()
    compared = _compared(_example("mlp", "hybrid,megatron"), source("mlp"))
    print_comparison(compared, source("mlp"), Console(file=out, width=80, **console))
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
    columns = _columns(text, Options(mesh="d:2"), "b:d")
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    print_comparison(_compared(columns, text), text, console)
    assert "\x1b[31m" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "# \\x1b[31m[bold]\\x07" in out.getvalue()


# --- the command -----------------------------------------------------------------------------

MLP = str(ROOT / "examples" / "mlp.mdsl")


def test_json(cli: Cli) -> None:
    done = cli("compare", MLP, "--json", "--no-run")
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
    done = cli("compare", MLP, "--layouts", "hybrid,megatron", "--set", "hidden=6")
    assert done.code == 1
    assert done.out.startswith("mlp in 2 columns. 1 column could not be compiled.")
    assert "error[MD0301]" in done.err


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
