"""The bytes of each distinct call as a function of the axes of its own dims: an estimate by sum.

A call is chosen for alone, with its operands as the rules say and its results reduced at once. A
walk that shares gathered operands, or leaves partial what may stay so, sends less: the sum is an
upper bound of the walk `immediate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshdsl.ir.types import TensorType
from meshdsl.placed.choose import Choice, Chooser, Want
from meshdsl.placed.rows import Call
from meshdsl.placed.sbp import Placement, placement
from meshdsl.search.graph import CostGraph, Factor, Solution, Variable
from meshdsl.search.plan import Rules
from meshdsl.search.space import Space

Axes = tuple[str, ...]


class Tables:
    """The tables of the calls of a space, filled as they are read."""

    def __init__(self, space: Space) -> None:
        self.space, self.mesh = space, space.mesh
        self.dims: dict[Call, tuple[str, ...]] = {}
        self.known: dict[tuple[Call, tuple[Axes, ...]], Choice] = {}

    def sent(self, rules: Rules) -> int:
        """The bytes sent under general rules, at most."""
        axes = {rule.dim: rule.axes for rule in rules}
        calls = self.space.calls.items()
        return sum(self.chosen(call, axes).cost * trips for call, trips in calls)

    def chosen(self, call: Call, axes: Mapping[str, Axes]) -> Choice:
        """The placements of a call alone, with its bytes, and its FLOPs last in their rank."""
        key = call, tuple([axes.get(dim, ()) for dim in self._dims(call)])
        found = self.known.get(key)
        if found is None:
            placed = tuple(self._placed(t, axes) for t in (*call.ins, *call.outs))
            found = self.known[key] = self._chosen(call, placed)
        return found

    def _dims(self, call: Call) -> tuple[str, ...]:
        """The dims of what a call reads and makes."""
        if call not in self.dims:
            names = (name for t in (*call.ins, *call.outs) for name in t.names)
            self.dims[call] = tuple(dict.fromkeys(names))
        return self.dims[call]

    def _placed(self, type_: TensorType, axes: Mapping[str, tuple[str, ...]]) -> Placement:
        return placement(self.mesh, {d: axes[d] for d in type_.names if d in axes})

    def _chosen(self, call: Call, placed: tuple[Placement, ...]) -> Choice:
        ins, outs = placed[: len(call.ins)], placed[len(call.ins) :]
        pairs = zip((*call.ins, *call.outs), placed, strict=True)
        uneven = any(p.splits_unevenly(t, self.mesh) for t, p in pairs)
        versions = tuple((p,) for p in ins)
        wants = tuple(map(Want, outs))
        pins = (None,) * len(ins)
        chooser = Chooser(call, versions, wants, pins, self.mesh, "immediate", uneven=uneven)
        return chooser.candidates()[0]


# --- the graph of a space ------------------------------------------------------------------------


def table_graph(
    space: Space, most_work: float, among: Sequence[tuple[Axes, ...]] | None = None
) -> CostGraph:
    """The bytes of every call by the axes of its dims, and its FLOPs as what is limited.

    `among` are the choices of each dim, where these are not all.
    """
    tables = Tables(space)
    every = [tuple(choices_of(space, number)) for number in range(len(space.dims))]
    choices = every if among is None else list(among)
    names = zip(space.dims, choices, strict=True)
    variables = tuple(Variable(d.name, tuple(" ".join(a) for a in axes)) for d, axes in names)
    factors, work = list(_meetings(space, choices)), []
    for call, trips in space.calls.items():
        scope, cost, flops = _of_call(space, tables, choices, call)
        factors.append(Factor(scope, cost * trips))
        work.append(Factor(scope, flops * trips))
    return CostGraph(variables, tuple(factors), tuple(work), most_work)


def choices_of(space: Space, number: int) -> Iterator[Axes]:
    """The axes that may split a dim, none first; a fixed rule leaves no choice."""
    open_, _ = space.undecided
    return space.options(number, open_, ())


def _meetings(space: Space, choices: list[tuple[Axes, ...]]) -> Iterator[Factor]:
    """Dims that meet in a tensor are split over different axes."""
    for i, j in itertools.combinations(range(len(space.dims)), 2):
        if space.dims[i].meets >> j & 1:
            shared = [[bool(set(a) & set(b)) for b in choices[j]] for a in choices[i]]
            yield Factor((i, j), np.where(shared, math.inf, 0.0))


def _of_call(
    space: Space, tables: Tables, choices: list[tuple[Axes, ...]], call: Call
) -> tuple[tuple[int, ...], np.ndarray[tuple[int, ...], np.dtype[np.float64]], np.ndarray]:
    """The dims of a call that may be split, and its bytes and FLOPs by the axes of each."""
    own = {d for t in (*call.ins, *call.outs) for d in t.names}
    scope = tuple(i for i, dim in enumerate(space.dims) if dim.name in own)
    shape = [len(choices[i]) for i in scope]
    cost, flops = np.zeros(shape), np.zeros(shape)
    for at in itertools.product(*map(range, shape)):
        axes = {space.dims[i].name: choices[i][k] for i, k in zip(scope, at, strict=True)}
        if not _may_stand(call, axes):
            continue  # forbidden by the dims that meet
        chosen = tables.chosen(call, axes)
        cost[at], flops[at] = chosen.cost, chosen.rank[-1]
    return scope, cost, flops


def _may_stand(call: Call, axes: Mapping[str, Axes]) -> bool:
    """Whether no axis splits two dims of one tensor."""
    every = ([a for d in t.names for a in axes.get(d, ())] for t in (*call.ins, *call.outs))
    return all(len(set(used)) == len(used) for used in every)


def picked(space: Space, found: Solution) -> tuple[Axes, ...]:
    """The axes of each dim in a solution of the graph."""
    choices = (tuple(choices_of(space, n)) for n in range(len(space.dims)))
    return tuple(axes[k] for axes, k in zip(choices, found.picks, strict=True))
