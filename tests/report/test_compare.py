"""The comparison: columns say what `explain` says, and `same` means what it says."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from meshdsl.backends.engines.compare_run import measure
from meshdsl.columns import Column, Wish
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.ir import Reshard, walk
from meshdsl.report.comparison import compare, positional, sentence, verdict
from meshdsl.report.document import duration, human, plain
from meshdsl.report.explanation import explain
from tests.report.comparing import (
    NOW,
    POLICIES,
    columns_of,
    compared,
    every_layout,
    of_example,
)
from tests.report.golden import CASES, SIZES, SOME, Case, layouts, source

EXTRA = {"named", "sbp"}
"""The fields that a comparison adds to every tensor of `explain`."""


# --- what a column says ----------------------------------------------------------------------


@pytest.mark.parametrize("example", SOME)
def test_a_column_says_what_explain_says(example: str) -> None:
    columns = every_layout(example)["columns"]
    asked = itertools.product(layouts(example), POLICIES)
    for column, (layout, policy) in zip(columns, asked, strict=True):
        options = Options(layout=layout, reduce=policy, set_dims=SIZES.get(example, {}))
        made = compile_source(source(example), options, Diagnostics())
        expected = explain(made.device, identifiers=made.identifiers)
        plain = [{k: v for k, v in t.items() if k not in EXTRA} for t in column["tensors"]]
        found = {k: column[k] for k in expected} | {"tensors": plain, "warnings": []}
        assert found == expected


@pytest.mark.parametrize("example", SOME)
def test_routes_and_rows_add_up_to_the_totals(example: str) -> None:
    facts = every_layout(example)
    for number, column in enumerate(facts["columns"]):
        every = sum(column["totals"]["by_phase"].values())
        assert sum(r["wire_bytes"] for r in column["routes"]) == every
        assert sum(row["wire_bytes"][number] for row in facts["rows"]) == every
        for route in column["routes"]:
            assert route["from"] == route["steps"][0]["before"]["named"]
            assert route["to"] == route["steps"][-1]["after"]["named"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_placements_are_those_of_the_compiler(case: Case) -> None:
    (column,) = of_example(case.example, case.layout, None, NOW)
    (found,) = compare([column], source(case.example))["columns"]
    assert column.made is not None
    assert "tensors" in found
    mesh = column.made.placed.mesh
    for entry, tensor in zip(found["tensors"], column.made.placed.tensors, strict=True):
        assert entry["named"] == tensor.placement.show(tensor.value.type, mesh)


WHOLE = {"x": "B", "y": "B", "z": "B"}
TENSOR = {"dims": ["b", "i"], "declared": ["b", "i"], "placement": WHOLE, "order": {}}
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
    tensor: Any = {**TENSOR, "placement": WHOLE | placement, "order": order}
    assert list(positional(tensor).values()) == expected


WRITTEN = {
    ("mlp", "hybrid"): (2, 5),  # x, target, w, b, v
    ("mlp", "megatron"): (1, 3),
    ("transformer", "data_parallel"): (1, 2),
    ("transformer", "fsdp"): (3, 16),  # two inputs, seven parameters, and each of these gathered
}


@pytest.mark.parametrize(("example", "layout"), WRITTEN)
def test_what_has_to_be_written(example: str, layout: str) -> None:
    (column,) = compare(of_example(example, layout, None, NOW), source(example))["columns"]
    assert "annotations" in column
    rules, signatures = WRITTEN[example, layout]
    assert column["annotations"]["rules"] == rules
    assert column["annotations"]["signatures"] == signatures


def test_pins_are_counted() -> None:
    text = Source("p.mdsl", "dim b = 4\nmesh m = { a: 2 }\nprogram p(x[b@a]) { return x }\n")
    (column,) = compare(columns_of(text, Options(), None, None, "deferred"), text)["columns"]
    assert "annotations" in column
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
    columns = columns_of(SUMMA, Options(), "two", "outer,inner")
    facts = compared(columns, SUMMA, measure(columns, 0))
    assert [c["annotations"]["signatures"] for c in facts["columns"]] == [2, 2, 3]
    assert [c["positional"] for c in facts["columns"]] == [False, True, True]
    (c,) = [e for row in facts["rows"] for e in row["tensors"] if e["tensor"] == "c"]
    assert [list(cell["sbp"].values()) for cell in c["cells"]] == [
        ["S(0)", "S(1)"],
        ["S(0)", "S(1)"],
        ["P", "S(0)"],
    ]
    assert c["differs"] == [False, False, True]
    assert facts["run"]["between"][0]["max_error"] == 0
    assert compare(columns[:2], SUMMA)["same"]


# --- same or different -----------------------------------------------------------------------


def _facts(stages: Compilation) -> Any:
    """The facts that must agree, from no comparison: placements of named tensors, and reshards."""
    program = stages.placed
    held = [(t.value.name, t.placement) for t in program.tensors if t.value.name]
    sent = [
        (n.span.start, n.phase, k, [(s.kind, s.axes, s.before, s.after) for s in n.route.steps])
        for n, k in walk(program.body)
        if isinstance(n, Reshard)
    ]
    return held, sent, explain(stages.device)["totals"]["by_axis"]


def _pairs() -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    found = []
    for example in SOME:
        asked = list(itertools.product(layouts(example), POLICIES))
        found += [(example, a, b) for a, b in itertools.combinations(asked, 2)]
    return found


@functools.cache
def _stages(example: str, layout: str, policy: str) -> Compilation:
    options = Options(layout=layout, reduce=policy, set_dims=SIZES.get(example, {}))
    return compile_source(source(example), options, Diagnostics())


def _columns_of(example: str, *asked: tuple[str, str]) -> list[Column]:
    return [
        Column(letter, Wish("layout", *wish), _stages(example, *wish))
        for letter, wish in zip("AB", asked, strict=True)
    ]


@pytest.mark.parametrize("example", SOME)
def test_same_exactly_when_placements_routes_and_bytes_agree(example: str) -> None:
    seen = set()
    for _, first, second in (pair for pair in _pairs() if pair[0] == example):
        found = compare(_columns_of(example, first, second), source(example))["same"]
        stages = [_stages(example, *wish) for wish in (first, second)]
        assert found == (_facts(stages[0]) == _facts(stages[1]))
        seen.add(found)
    # On a training step no two layouts or policies do the same.
    trained = ("alexnet", "dlrm", "encdec", "lm", "moe", "nmt", "resnet", "unet", "vgg", "vit")
    # Of the one layout of stages, which send nothing else, all policies do the same.
    alike = {"digits_async": {True}} | {name: {False} for name in trained}
    assert seen == alike.get(example, {True, False})


def test_a_row_differs_where_its_entries_do() -> None:
    facts = compared(of_example("mlp", "hybrid,data_parallel"), source("mlp"))
    differs = {e["tensor"] for row in facts["rows"] for e in row["tensors"] if not e["same"]}
    assert differs == {"w", "b", "v", "h"}
    unlike = [row["line"] for row in facts["rows"] if not row["same"]]
    assert unlike == [13, 14, 15, 17, 18]  # y is placed alike; only one column has to reduce it
    assert not facts["same"]
    assert sentence(facts) == "mlp in 2 columns: 5 of 7 statements differ."


# --- which columns there are -----------------------------------------------------------------

ASKED = {
    "default": ((None, None, None), [("hybrid", NOW), ("data_parallel", NOW)]),
    "one": (
        ("data_parallel", None, None),
        [("data_parallel", NOW), ("data_parallel", NOW), ("data_parallel", "immediate")],
    ),
    "layouts": (
        ("megatron, hybrid", None, None),
        [("megatron", NOW), ("hybrid", NOW)],
    ),
    "empty": (("", None, None), [("none", NOW), ("none", NOW), ("none", "immediate")]),
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
    found = [(c.made.placed.layout, c.wish.reduce) for c in of_example("mlp", *given) if c.made]
    assert found == expected


@pytest.mark.parametrize("example", SOME)
def test_the_layouts_of_a_file_that_fit_one_mesh(example: str) -> None:
    """What is compared where nothing is named compiles, on one mesh."""
    columns = of_example(example)
    assert all(c.works for c in columns)
    assert len({c.made.placed.mesh for c in columns if c.made}) == 1


def test_the_verdict_has_the_differences_of_the_totals() -> None:
    facts = compared(of_example("mlp", cluster="h100"), source("mlp"))
    one, other = facts["columns"]
    (told,) = verdict(facts)
    assert one["totals"]["wire_bytes"] - other["totals"]["wire_bytes"] == 65_536
    held = other["memory"]["peak"] - one["memory"]["peak"]
    waited = other["time"]["seconds"] - one["time"]["seconds"]
    assert plain(told.text) == (
        f"Per device B sends 64 KiB less, holds {human(held)} more and takes "
        f"{duration(abs(waited))} {'more' if waited > 0 else 'less'} than A."
    )
    assert not [*verdict(compared(of_example("mlp", "hybrid"), source("mlp")))]


def test_the_positional_column_is_the_same_program() -> None:
    first, second, _ = of_example("mlp", "hybrid")
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
        of_example("mlp", *given)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.help
    assert diagnostic.span is not None
    assert (diagnostic.span.start, diagnostic.span.end) == place
