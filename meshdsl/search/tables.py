"""The bytes of each distinct call as a function of the axes of its own dims: an estimate by sum.

A call is chosen for alone, with its operands as the rules say and its results reduced at once. A
walk that shares gathered operands, or leaves partial what may stay so, sends less: the sum is an
upper bound of the walk `immediate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.exact import TooWide
from meshdsl.costgraph.graph import CostFactor, CostGraph, Costs, Solution, Variable, entries
from meshdsl.ir.types import TensorType
from meshdsl.placed.placements import Placement, placement
from meshdsl.placed.sharding_rules import Call
from meshdsl.placed.strategies import Choice, Chooser, Want, never_partial
from meshdsl.search.budget import Budget
from meshdsl.search.candidate import Rules
from meshdsl.search.space import LayoutSpace

Axes = tuple[str, ...]

MOST_ENTRIES = 10_000_000
"""Entries of the tables of all calls."""


class Tables:
    """The tables of the calls of a space, filled as they are read: an entry counts as work."""

    def __init__(self, space: LayoutSpace) -> None:
        self.space, self.mesh = space, space.mesh
        self.budget = Budget()
        self.dims: dict[Call, tuple[str, ...]] = {}
        self.known: dict[tuple[Call, tuple[Axes, ...]], Choice] = {}

    def sent(self, rules: Rules) -> int:
        """The bytes sent under general rules, at most."""
        return sum(choice.cost * trips for choice, trips in self._choices(rules))

    def collectives(self, rules: Rules) -> int:
        """The collectives under general rules, at most."""
        return sum(choice.rank[0] * trips for choice, trips in self._choices(rules))

    def _choices(self, rules: Rules) -> Iterator[tuple[Choice, int]]:
        axes = {rule.dim: rule.axes for rule in rules if not rule.selector}
        return ((self.chosen(call, axes), trips) for call, trips in self.space.calls.items())

    def chosen(self, call: Call, axes: Mapping[str, Axes]) -> Choice:
        """The placements of a call alone, with its bytes; in their rank collectives, FLOPs last."""
        key = call, tuple([axes.get(dim, ()) for dim in self._dims(call)])
        choice = self.known.get(key)
        if choice is None:
            self.budget.spend(1)
            placed = tuple(self._placed(t, axes) for t in (*call.ins, *call.outs))
            choice = self.known[key] = self._chosen(call, placed)
        return choice

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
        forced = not never_partial(call, versions, wants, pins)  # at once, as `immediate` does
        chooser = Chooser(
            call, versions, wants, pins, self.mesh, "deferred", forced=forced, uneven=uneven
        )
        return chooser.candidates()[0]


# --- the graph of a space ------------------------------------------------------------------------


def table_graph(
    space: LayoutSpace, most_work: float, among: Sequence[tuple[Axes, ...]] | None = None
) -> CostGraph:
    """The bytes of every call by the axes of its dims, and its FLOPs as what is limited.

    `among` are the choices of each dim, where these are not all. Raises TooWide.
    """
    tables = Tables(space)
    every = [tuple(choices_of(space, number)) for number in range(len(space.dims))]
    choices = every if among is None else list(among)
    names = zip(space.dims, choices, strict=True)
    variables = tuple(Variable(d.name, tuple(" ".join(a) for a in axes)) for d, axes in names)
    factors, work = list(_meetings(space, choices)), []
    scopes = {call: _scope(space, call) for call in space.calls}
    if sum(entries(scope, [*map(len, choices)]) for scope in scopes.values()) > MOST_ENTRIES:
        raise TooWide(f"the tables of all calls would have more than {MOST_ENTRIES:,} entries")
    for call, trips in space.calls.items():
        cost, flops = _of_call(space, tables, choices, call, scopes[call])
        factors.append(CostFactor(scopes[call], cost * trips))
        work.append(CostFactor(scopes[call], flops * trips))
    return CostGraph(variables, tuple(factors), tuple(work), most_work)


def choices_of(space: LayoutSpace, number: int) -> Iterator[Axes]:
    """The axes that may split a dim, none first; a fixed rule leaves no choice."""
    open_, _ = space.undecided
    return space.options(number, open_, ())


def _meetings(space: LayoutSpace, choices: list[tuple[Axes, ...]]) -> Iterator[CostFactor]:
    """Dims that meet in a tensor are split over different axes."""
    for i, j in itertools.combinations(range(len(space.dims)), 2):
        if space.dims[i].meets >> j & 1:
            shared = [[bool(set(a) & set(b)) for b in choices[j]] for a in choices[i]]
            yield CostFactor((i, j), np.where(shared, math.inf, 0.0))


def _scope(space: LayoutSpace, call: Call) -> tuple[int, ...]:
    """The dims of a call that may be split."""
    own = {d for t in (*call.ins, *call.outs) for d in t.names}
    return tuple(i for i, dim in enumerate(space.dims) if dim.name in own)


def _of_call(
    space: LayoutSpace,
    tables: Tables,
    choices: list[tuple[Axes, ...]],
    call: Call,
    scope: Sequence[int],
) -> tuple[Costs, Costs]:
    """The bytes and FLOPs of a call by the axes of each dim: 0 where these are forbidden."""
    shape = [len(choices[i]) for i in scope]
    cost, flops = np.zeros(shape), np.zeros(shape)
    names = [space.dims[i].name for i in scope]
    tensors = [{*t.names} for t in (*call.ins, *call.outs)]
    near = [
        [m for m in range(n) if any({names[m], name} <= dims for dims in tensors)]
        for n, name in enumerate(names)
    ]
    for at in _apart([choices[i] for i in scope], near):
        axes = {name: choices[i][k] for name, i, k in zip(names, scope, at, strict=True)}
        chosen = tables.chosen(call, axes)
        cost[at], flops[at] = chosen.cost, chosen.rank[-1]
    return cost, flops


def _apart(
    options: Sequence[Sequence[Axes]], near: Sequence[Sequence[int]], at: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Every choice of one option each after `at` in which those near each other share no axis."""
    if len(at) == len(options):
        yield at
        return
    used = {axis for m in near[len(at)] for axis in options[m][at[m]]}
    for k, axes in enumerate(options[len(at)]):
        if used.isdisjoint(axes):
            yield from _apart(options, near, (*at, k))


def picked(space: LayoutSpace, found: Solution) -> tuple[Axes, ...]:
    """The axes of each dim in a solution of the graph."""
    choices = (tuple(choices_of(space, n)) for n in range(len(space.dims)))
    return tuple(axes[k] for axes, k in zip(choices, found.picks, strict=True))
