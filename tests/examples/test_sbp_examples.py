"""The programs of `examples/sbp`: each runs as it must under every layout, sbp block and policy.

Values are those of the reference, to the bit where every operator is exact, and the bytes that
devices send are those that were predicted. The tables in the XX
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import Options, front
from meshdsl.placed.place import POLICIES
from meshdsl.report.check import check_source
from meshdsl.syntax.format import format_source
from tests.programs.harness import Case, explained, run_case

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "examples" / "sbp").glob("*.mdsl"))}
SMALL = {
    "block": {"batch": 4, "seq": 8, "model": 16, "heads": 4, "key": 4, "hidden": 32},
    "total": {"m": 64},
}
"""Sizes to run at, where the real ones take long or leave the range of exact sums."""

ROUNDS = {"block", "moe"}
"""Examples with an operator that rounds on the way to every output."""


@dataclass(frozen=True, slots=True)
class Chosen(Case):
    """A case under a layout or, with `sbp`, a block of its file, on the mesh that suits it."""

    sbp: bool = False

    @property
    def options(self) -> Options:
        key = "sbp" if self.sbp else "layout"
        mesh = self.mesh or None
        return Options(mesh=mesh, reduce=self.reduce, set_dims=self.dims, **{key: self.layout})


@functools.cache
def declared(name: str) -> Declarations:
    path = FILES[name]
    return front(Source(path.name, path.read_text(encoding="utf-8")), {}, Diagnostics())


def chosen(name: str, block: str, policy: str, small: bool = False) -> Chosen:
    text = declared(name).source.text
    dims = SMALL.get(name, {}) if small else {}
    return Chosen(text, "", block, policy, dims, f"{name}.mdsl", block in declared(name).sbps)


def blocks(name: str) -> list[str]:
    """Every layout and sbp block of an example."""
    return [*declared(name).layouts, *declared(name).sbps]


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


CASES = [(n, b, p) for n in FILES for b in blocks(n) for p in POLICIES]


@pytest.mark.parametrize(("name", "block", "policy"), CASES)
def test_it_runs_as_predicted(name: str, block: str, policy: str) -> None:
    checked = run_case(chosen(name, block, policy, small=True))
    assert name in ROUNDS or checked.exact == {o.name for o in checked.named.outputs}


@pytest.mark.parametrize(("name", "block"), [(n, b) for n in FILES for b in blocks(n)])
def test_optimal_sends_no_more_than_the_others(name: str, block: str) -> None:
    sent = {p: figures(name, block, p)["totals"]["wire_bytes"] for p in POLICIES}
    assert sent["optimal"] == min(sent.values())


@functools.cache
def figures(name: str, block: str, policy: str) -> dict[str, Any]:
    return explained(chosen(name, block, policy))


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
    """Where what goes in and what comes out lies."""
    roles = ("input", "param", "output")
    return [
        (t["name"], t["placement"], t["order"]) for t in report["tensors"] if t["role"] in roles
    ]


def sent(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("kind", "op", "axes", "count", "payload_bytes", "wire_bytes")
    return sorted(tuple(map(str, (c[k] for k in keys))) for c in report["collectives"])
