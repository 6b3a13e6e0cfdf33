"""The programs of `examples/sbp`: each runs as it must under every layout, sbp block and policy.

Values are those of the reference, to the bit where every operator is exact, and the bytes that
devices send are those that were predicted. The figures in the documentation are computed anew;
`MESHDSL_UPDATE_GOLDEN=1` writes them.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.pipeline import Options
from meshdsl.placed.place import POLICIES
from meshdsl.report.checks import check_source
from meshdsl.syntax.format import format_source
from tests.covering import in_turn
from tests.examples.sbp_pages import (
    FILES,
    PAGES,
    Chosen,
    blocks,
    chosen,
    declared,
    figures,
    renewed,
)
from tests.programs.harness import run_case
from tests.report.golden import AGAIN, UPDATE

SMALL = {
    "block": {"batch": 4, "seq": 8, "model": 16, "heads": 4, "key": 4, "hidden": 32},
    "total": {"m": 64},
}
"""Sizes to run at, where the real ones take long or leave the range of exact sums."""

ROUNDS = {"block", "moe"}
"""Examples with an operator that rounds on the way to every output."""


# --- the files --------------------------------------------------------------------------------


def test_there_is_an_example_for_each_subject() -> None:
    subjects = {"uvw", "sums", "total", "megatron", "accumulate", "summa", "two_axes", "moe"}
    assert subjects <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_expectations_hold_and_the_form_is_canonical(name: str) -> None:
    source = declared(name).source
    diagnostics = Diagnostics()
    line = check_source(source, Options(), diagnostics)
    assert [str(d) for d in diagnostics] == []
    assert re.search(r"\d+ expectations\)", line)
    assert format_source(source) == source.text


BLOCKS = [(n, b) for n in FILES for b in blocks(n)]


@in_turn(at=BLOCKS, policy=POLICIES)
def test_it_runs_as_predicted(at: tuple[str, str], policy: str) -> None:
    name, block = at
    checked = run_case(replace(chosen(name, block, policy), dims=SMALL.get(name, {})))
    assert name in ROUNDS or checked.exact == {o.name for o in checked.named.outputs}


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_optimal_sends_no_more_than_the_others(name: str, block: str) -> None:
    sent = {p: figures(name, block, p)["totals"]["wire_bytes"] for p in POLICIES}
    assert sent["optimal"] == min(sent.values())


# --- names and positions say the same ---------------------------------------------------------

SAME = (
    ("uvw", "both", "inputs"),
    ("sums", "contractions", "by_position"),
    ("sums", "scattered", "into_rows"),
    ("total", "contraction", "by_position"),
    ("megatron", "megatron", "by_position"),
    ("megatron", "two_d", "two_d_by_position"),
    ("megatron", "two_d", "in_full"),
    ("block", "two_d", "two_d_by_position"),
    ("accumulate", "data_parallel", "by_position"),
    ("summa", "selectors", "blocks"),
    ("summa_panels", "blocks", "by_position"),
    ("two_axes", "rows", "split_twice"),
    ("two_axes", "tiles", "tiled"),
    ("two_axes", "rows_to_tiles", "split_to_tiled"),
    ("moe", "gshard", "by_position"),
)


@pytest.mark.parametrize(("name", "layout", "sbp"), SAME)
def test_a_layout_and_an_sbp_block_are_the_same_program(name: str, layout: str, sbp: str) -> None:
    """Inputs, parameters and outputs lie alike, and the same collectives run on the same bytes."""
    named, positional = (figures(name, block, "deferred") for block in (layout, sbp))
    assert ends(named) == ends(positional)
    assert sent(named) == sent(positional)


def ends(report: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The placements of inputs and outputs."""
    roles = ("input", "param", "output")
    return [
        (t["name"], t["placement"], t["order"]) for t in report["tensors"] if t["role"] in roles
    ]


def sent(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("kind", "op", "axes", "count", "payload_bytes", "wire_bytes")
    return sorted(tuple(map(str, (c[k] for k in keys))) for c in report["collectives"])


# --- any configuration ------------------------------------------------------------------------

MATMUL = """
dim m = 4, k = 8, n = 4
mesh pair = {{ x: 2 }}
mesh square = {{ x: 2, y: 2 }}
sbp chosen {{ a: ({}), b: ({}), t: ({}) }}
program p(a[m, k], b[k, n]) {{
  t = einsum(a, b -> [m, n])
  h = relu(t)
  return h
}}"""
COMPONENTS = ("S(0)", "S(1)", "B", "P")


def signatures(axes: int) -> Iterator[tuple[str, ...]]:
    """Every way to annotate the three tensors."""
    every = [", ".join(parts) for parts in itertools.product(COMPONENTS, repeat=axes)]
    yield from itertools.product(every, repeat=3)


def drawn() -> list[tuple[str, ...]]:
    return random.Random(0).sample(list(signatures(2)), 64)


@functools.cache
def bytes_of(parts: tuple[str, ...], mesh: str) -> int:
    """Wire bytes of a matmul under one annotation, after a run that was right to the bit."""
    checked = run_case(Chosen(MATMUL.format(*parts), mesh, "chosen", "deferred", sbp=True))
    assert checked.exact == {"h"}
    return int(checked.report["totals"]["wire_bytes"])


@functools.cache
def any_configuration() -> str:
    one = [bytes_of(parts, "pair") for parts in signatures(1)]
    two = [bytes_of(parts, "square") for parts in drawn()]
    lines = [
        "| | annotations | right to the bit | nothing sent | most sent |",
        "|---|---|---|---|---|",
    ]
    for name, sent in (("2 devices, all", one), ("2×2 devices, drawn", two)):
        lines.append(f"| {name} | {len(sent)} | {len(sent)} | {sent.count(0)} | {max(sent):,} B |")
    return "\n".join(lines)


def test_what_is_illegal_is_refused() -> None:
    """`relu` of a partial sum would be another number."""
    text = MATMUL.format("S(1)", "S(0)", "P").replace("t: (P)", "t at h: (P)")
    with pytest.raises(DiagnosticError, match="MD0309"):
        run_case(Chosen(text, "pair", "chosen", "deferred", sbp=True))


# --- a transposed weight ----------------------------------------------------------------------


@functools.cache
def transposed() -> str:
    """The Megatron MLP and the one with its second weight stored the other way round."""
    lines = ["| | `w2[hidden, io]` | `w2[io, hidden]` |", "|---|---|---|"]
    for block in ("megatron", "by_position"):
        case = chosen("megatron", block, "deferred")
        turned = replace(case, text=case.text.replace("w2[hidden, io]", "w2[io, hidden]"))
        sent = [run_case(c).report["totals"]["wire_bytes"] for c in (case, turned)]
        lines.append(f"| `{block}` | {sent[0]:,} | {sent[1]:,} |")
    return "\n".join(lines)


# --- the pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_the_figures_in_the_pages_are_those_computed(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    others = {"any": any_configuration(), "transposed": transposed()}
    made = renewed(page, others)
    if UPDATE and made != page:
        path.write_text(made, encoding="utf-8", newline="\n")
        return
    assert page == made, AGAIN


@pytest.mark.parametrize("name", FILES)
def test_every_example_has_a_section(name: str) -> None:
    page = PAGES[0].read_text(encoding="utf-8")
    assert f"`examples/sbp/{name}.mdsl`" in page
    assert f"<!-- table {name} -->" in page
