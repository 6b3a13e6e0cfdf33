"""Routes against brute force: shortest paths over every single step between all placements.

Single steps and their bytes are defined here independently, as a relation on pairs.
"""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

import pytest

from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.reshard import route

TENSOR = TensorType((Dim("i", 12), Dim("j", 12)), F32)
MESHES = {
    "2x2": Mesh("m", (("x", 2), ("y", 2))),
    "2x3": Mesh("m", (("x", 2), ("y", 3))),
    "3x3": Mesh("m", (("x", 3), ("y", 3))),
}


def placements(mesh: Mesh) -> list[Placement]:
    """Every placement of the tensor: per axis `i`, `j`, whole or partial; both orders of axes."""
    found = []
    for kinds in itertools.product("ijBP", repeat=2):
        for order in (("x", "y"), ("y", "x")):
            by_axis = dict(zip(("x", "y"), kinds, strict=True))
            splits = {d: tuple(a for a in order if by_axis[a] == d) for d in "ij"}
            partial = tuple(a for a in mesh.names if by_axis[a] == "P")
            if all(TENSOR.size(d) % mesh.size(*axes) == 0 for d, axes in splits.items()):
                found.append(placement(mesh, splits, partial, "sum"))
    return list(dict.fromkeys(found))


def step(p: Placement, q: Placement, mesh: Mesh) -> Fraction | None:
    """Bytes that one step from `p` to `q` sends per device; None when no single step does it."""
    size = p.local(TENSOR, mesh).bytes
    changed = [a for a in mesh.names if str(p.component(a)) != str(q.component(a))]
    pairs = {(str(p.component(a)), str(q.component(a))) for a in changed}
    n = mesh.size(*changed)
    if not changed:
        return Fraction(size)  # another order of axes: blocks change places
    if len(pairs) == 2 and _exchanged(p, q, mesh, changed):
        return Fraction(size)
    if len(pairs) != 1 or not _in_order(p, q, changed):
        return None
    ((old, new),) = pairs
    if old == "P":
        return Fraction((2 if new == "B" else 1) * (n - 1) * size, n)
    if new == "P" or old == "B":
        return Fraction(0)
    return Fraction((n - 1) * size, n) if new != "B" else Fraction((n - 1) * size)


def _exchanged(p: Placement, q: Placement, mesh: Mesh, changed: list[str]) -> bool:
    """Two axes of one size in each other's place, nothing partial about them."""
    a, b = changed
    free = all(axis not in (*p.partial, *q.partial) for axis in changed)
    crossed = p.component(a) == q.component(b) and p.component(b) == q.component(a)
    return free and crossed and mesh.size(a) == mesh.size(b)


def _in_order(p: Placement, q: Placement, changed: list[str]) -> bool:
    """Whether axes that leave a dim were innermost there, and axes that enter one are now."""
    if len(changed) > 1 and not _in_mesh_order(p, q, changed):
        return False
    for dim in TENSOR.names:
        old, new = p.axes_of(dim), q.axes_of(dim)
        kept_old = tuple(a for a in old if a not in changed)
        kept_new = tuple(a for a in new if a not in changed)
        if (
            kept_old != kept_new
            or old[: len(kept_old)] != kept_old
            or new[: len(kept_new)] != kept_new
        ):
            return False
    return True


def _in_mesh_order(p: Placement, q: Placement, changed: list[str]) -> bool:
    """Collectives over a product of axes keep the mesh's order; slices and fills are local."""
    if all(str(p.component(a)) == "B" or str(q.component(a)) == "P" for a in changed):
        return True
    orders = [axes for s in (p, q) for _, axes in s.splits if set(changed) <= set(axes)]
    return all([a for a in axes if a in changed] == changed for axes in orders)


def least(p: Placement, q: Placement, mesh: Mesh) -> Fraction:
    """The least bytes from `p` to `q` within the limits of `considered` (Bellman and Ford)."""
    nodes = [n for n in placements(mesh) if considered(n, p, q, mesh)]
    far = Fraction(10**9)
    cost = {n: Fraction(0) if n == p else far for n in nodes}
    edges = [
        (a, b, sent)
        for a, b in itertools.permutations(nodes, 2)
        if (sent := single_steps(mesh).get((a, b))) is not None
    ]
    for _ in nodes:
        before = dict(cost)
        for a, b, sent in edges:
            cost[b] = min(cost[b], cost[a] + sent)
        if cost == before:
            break
    return cost[q]


@functools.cache
def single_steps(mesh: Mesh) -> dict[tuple[Placement, Placement], Fraction]:
    """Every pair that one step leads along, and its bytes."""
    pairs = itertools.permutations(placements(mesh), 2)
    return {(a, b): sent for a, b in pairs if (sent := step(a, b, mesh)) is not None}


def considered(n: Placement, p: Placement, q: Placement, mesh: Mesh) -> bool:
    """The limits routes keep.

    Axes whole at both ends stay so, what stays partial is not reduced, nothing becomes partial
    on the way, and other dims are split only where partial values come or go.
    """
    if not set(n.partial) <= {*p.partial, *q.partial}:
        return False
    for axis in mesh.names:
        ends = {str(p.component(axis)), str(q.component(axis))}
        if ends in ({"B"}, {"P"}) and str(n.component(axis)) not in ends:
            return False
    dims = {d for d, _ in (*p.splits, *q.splits)}
    return p.partial != q.partial or {d for d, _ in n.splits} <= dims


@pytest.mark.parametrize("name", MESHES)
def test_no_sequence_of_steps_sends_less(name: str) -> None:
    mesh = MESHES[name]
    for p, q in itertools.permutations(placements(mesh), 2):
        found = route(TENSOR, p, q, mesh)
        assert found is not None
        assert found.wire_bytes <= least(p, q, mesh), f"{p} -> {q}"
