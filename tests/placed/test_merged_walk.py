"""A walk that merges on the way yields what a second walk over the merged program would.

And what watches it counts no more than is sent in the end. Layouts are drawn for every example.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator

import pytest

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import Dim
from meshdsl.named.cse import cse
from meshdsl.named.ir import NamedProgram, values_of
from meshdsl.pipeline import Compilation
from meshdsl.placed.from_named import Placer
from meshdsl.placed.layout import Layout
from meshdsl.placed.pipelined import stored
from meshdsl.placed.place import WALKS, Walk, place
from meshdsl.placed.placements import Mesh
from meshdsl.placed.printer import print_program
from meshdsl.placed.request import Request
from meshdsl.placed.storage import with_loads
from meshdsl.search.candidate import SearchRule, layout_of
from meshdsl.search.lower_bounds import ROUNDING, Sent
from meshdsl.syntax.parse import read_source
from tests.compiling import compile_text
from tests.covering import in_turn
from tests.project import matching
from tests.report.golden import SOME

MESHES = (Mesh("square", (("a", 2), ("b", 2))), Mesh("cube", (("a", 2), ("b", 2), ("c", 2))))
DRAWN = 12 if "MESHDSL_CASES" in os.environ else 2
"""Layouts that are drawn for each example and mesh; some of them cannot be placed."""

EXAMPLES = {path.stem: path for path in matching("examples/*.mdsl")}


@functools.cache
def program(name: str) -> NamedProgram:
    return Compilation(read_source(EXAMPLES[name])).named


def layouts(name: str) -> Iterator[Layout]:
    """Layouts of two to four rules, the same ones each time."""
    drawn = random.Random(name)
    known: dict[str, Dim] = {d.name: d for v in values_of(program(name)) for d in v.type.dims}
    for mesh in MESHES:
        for _ in range(DRAWN):
            rules = []
            for dim in drawn.sample(sorted(known), min(len(known), drawn.randint(1, 3))):
                axes = tuple(drawn.sample(mesh.names, drawn.choice((1, 1, 2))))
                if known[dim].size % mesh.size(*axes) == 0:
                    rules.append(SearchRule(dim, axes))
            stored = (drawn.choice(("params", "grads", "state")),)
            rules.append(
                SearchRule(drawn.choice(sorted(known)), (drawn.choice(mesh.names),), stored)
            )
            yield layout_of(tuple(rules), mesh)


def in_two_walks(request: Request, policy: str) -> str:
    """The placed program where operators are merged between two walks."""
    first = Placer(request.on(cse(request.program, request.alike)), Walk(policy))
    merged = cse(first.program().rewritten, first.request.alike)
    return print_program(Placer(first.request.on(merged), Walk(policy)).program())


@pytest.mark.parametrize("name", SOME)
def test_one_walk_is_as_good_as_two(name: str) -> None:
    placed = 0
    for layout in layouts(name):
        for policy in WALKS:
            try:
                made = place(program(name), layout, policy)
            except DiagnosticError:
                continue
            placed += 1
            asked = layout if program(name).updates else stored(program(name), layout)
            request = Request(with_loads(program(name), asked, None), asked)
            assert print_program(made) == in_two_walks(request, policy), layout.rules
    assert placed


@in_turn(name=EXAMPLES, cluster=(None, "a100-dgx"))
def test_a_watch_counts_no_more_than_is_there(name: str, cluster: str | None) -> None:
    for layout in layouts(name):
        timing = Timing(load(cluster), layout.mesh) if cluster else None
        for policy in WALKS:
            watches = [Sent(layout.mesh, timing) for _ in range(2)]
            try:
                made = place(program(name), layout, policy, watch=iter(watches).__next__)
            except DiagnosticError:
                continue
            whole = Sent(layout.mesh, timing)
            whole.replay(made.body)
            for seen in watches:
                assert seen.bytes <= whole.bytes
                assert seen.seconds <= whole.seconds * (1 + ROUNDING)
                assert seen.kept.seconds <= whole.kept.seconds * (1 + ROUNDING)


IN_BLOCKS = """
dim a = 8, best = 2
mesh square = { x: 2, y: 2 }
sbp whole { v: (S(0), S(0)) }
sbp inner { v: (S(0), B) }
program p(v[a]) {
  t, i = top_k[a -> best](v)
  return cumsum[a](v), t
}
"""


@pytest.mark.parametrize("policy", WALKS)
@pytest.mark.parametrize("block", ["whole", "inner"])
def test_what_blocks_exchange_is_not_taken_apart(block: str, policy: str) -> None:
    """In a block without other annotations, what is exchanged stays split as well."""
    found = print_program(compile_text(IN_BLOCKS, sbp=block, reduce=policy).placed)
    assert "cumsum" in found
    assert "blocks.all_blocks" not in found


@in_turn(name=EXAMPLES)
def test_what_is_merged_is_merged_once(name: str) -> None:
    request = Request(program(name), Layout("none", (), Mesh("one", ())))
    merged = cse(request.program, request.alike)
    assert cse(merged, request.alike) is merged
