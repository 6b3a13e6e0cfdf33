"""The layouts of general rules `dim -> axes` (space L0), and the least work under each.

An axis may split several dims, but none that meet in one tensor. Axes of one dim stand in the order
of the mesh. Splits are even; only an axis that divides no dim may split unevenly. Axes may stay
unused. Of layouts that are the same up to an exchange of equal axes, the first alone is listed.

The work of a call under a layout is a table over the dims of that call alone: the least over all
rows that its dims allow. Summed, it bounds the seconds of any walk from below, and a partial
layout's bound is that of its best completion per call: depth first over dims, that is branch and
bound.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import Source, Span
from meshdsl.ir.program import counted
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.cse import cse
from meshdsl.named.expand import IN_BLOCKS, expand
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Factor, Signature
from meshdsl.placed.choose import flops
from meshdsl.placed.lint import values_of
from meshdsl.placed.request import loops
from meshdsl.placed.rows import Call, call_of, whole_dims
from meshdsl.placed.sbp import Mesh
from meshdsl.search.plan import Rule, Rules

Weigh = Callable[[Call, Signature], float]
"""The work of a call on one device, from its local types: FLOPs, or seconds."""


def work(call: Call, local: Signature) -> float:
    """Floating-point operations."""
    return flops(call.opdef, local)


@functools.lru_cache(maxsize=256)
def seconds(timing: Timing) -> Weigh:
    """Seconds on a device of a cluster; a number takes none."""

    def weigh(call: Call, local: Signature) -> float:
        if call.name == "constant":
            return 0.0
        return timing.operator(call.opdef, local, flops(call.opdef, local)).seconds

    return weigh


def divided(taken: float, timing: Timing) -> float:
    """The least seconds of what takes so long for an update where rules for storage divide it."""
    launch = timing.cluster.device.launch
    return taken - (1 - 1 / timing.mesh.devices) * max(0.0, taken - launch)


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim to be split: the axes that may split it, and the dims that it meets, as a bit set."""

    name: str
    size: int
    axes: tuple[str, ...]
    meets: int


class Space:
    """The valid layouts of a program on a mesh. `fixed` rules are in all of them.

    Axes are equal if they have one size and, where a cluster is given, lie in the same levels.
    Where rules for storage are `stored` beside these, seconds are the least with any of them.
    """

    def __init__(
        self,
        program: named.Program,
        mesh: Mesh,
        fixed: Rules = (),
        timing: Timing | None = None,
        stored: bool = True,
    ) -> None:
        self.stored = stored or any(rule.selector for rule in fixed)
        self.program, self.mesh, self.timing = program, mesh, timing
        self.axes = tuple(a for a, size in mesh.axes if size > 1)
        self.fixed = {rule.dim: rule.axes for rule in fixed if not rule.selector}
        self.narrower = tuple(rule for rule in fixed if rule.selector)
        self.calls, self.updates = _calls(program)
        self.dims = self._dims()
        self._tables: dict[Weigh, list[_Table]] = {}

    def _dims(self) -> tuple[_Dim, ...]:
        """The dims that may be split, those of most work first."""
        sizes = {d.name: d.size for v in values_of(self.program) for d in v.type.dims}
        own = {loop.dim.name for loop in loops(self.program)}
        touched: Counter[str] = Counter()
        for call, trips in self.calls.items():
            local = Signature(call.ins, call.outs, dict(call.attrs))
            for dim in {d for t in (*call.ins, *call.outs) for d in t.names}:
                touched[dim] += trips * flops(call.opdef, local)
        names = [d for d in sizes if d not in own and self._may_split(sizes, d)]
        names.sort(key=lambda d: (d not in self.fixed, -touched[d]))
        numbers = {name: i for i, name in enumerate(names)}
        meets = dict.fromkeys(names, 0)
        for value in values_of(self.program):
            known = [d for d in value.type.names if d in numbers]
            for one, other in itertools.permutations(known, 2):
                meets[one] |= 1 << numbers[other]
        return tuple(_Dim(d, sizes[d], self._may_split(sizes, d), meets[d]) for d in names)

    def divides(self, dim: _Dim, axes: tuple[str, ...]) -> bool:
        """Whether axes may split a dim together: evenly, unless one may not even alone."""
        parts = [self.mesh.size(axis) for axis in axes]
        if any(dim.size % n for n in parts):
            return dim.size >= math.prod(parts)
        return dim.size % math.prod(parts) == 0

    def _may_split(self, sizes: Mapping[str, int], dim: str) -> tuple[str, ...]:
        """The axes that divide a dim, or that divide none and have no more parts than it."""
        if dim in self.fixed:
            return self.fixed[dim]
        found = []
        for axis in self.axes:
            parts = self.mesh.size(axis)
            even = any(n % parts == 0 for n in sizes.values())
            if sizes[dim] % parts == 0 if even else sizes[dim] >= parts:
                found.append(axis)
        return tuple(found)

    @functools.cached_property
    def exchanged(self) -> tuple[tuple[str, str], ...]:
        """Pairs of neighbours among equal axes that no rule or `@` tells apart."""
        told = {a for axes in self.fixed.values() for a in axes}
        told |= {a for v in values_of(self.program) for pin in v.pins for a in pin.axes}
        alike: dict[object, list[str]] = {}
        for axis in (a for a in self.axes if a not in told):
            links = tuple(self.timing.parts((axis,))) if self.timing else ()
            alike.setdefault((self.mesh.size(axis), links), []).append(axis)
        return tuple(pair for axes in alike.values() for pair in itertools.pairwise(axes))

    @property
    def symmetry(self) -> int:
        """The number of exchanges of axes under which layouts are the same."""
        after = {b: a for a, b in self.exchanged}
        found = 1
        for axis in after:
            length, here = 1, axis
            while here in after:
                length, here = length + 1, after[here]
            found *= length
        return found

    def tables(self, weigh: Weigh) -> list[_Table]:
        """The least work of every call, filled as it is asked for."""
        if weigh not in self._tables:
            self._tables[weigh] = [_Table(c, n, self, weigh) for c, n in self.calls.items()]
        return self._tables[weigh]

    # --- layouts -------------------------------------------------------------------------------

    def least(self, weigh: Weigh = work) -> float:
        """The least work that any layout leaves a device."""
        search = _Descent(self, weigh, math.inf)
        for found, _ in search.leaves():
            search.limit = min(search.limit, math.nextafter(found, 0))
        return math.nextafter(search.limit, math.inf)

    def within(self, limit: float, weigh: Weigh = work) -> Iterator[tuple[float, Rules]]:
        """The layouts whose work is not above a limit, with it; depth first."""
        for found, chosen in _Descent(self, weigh, limit).leaves():
            yield found, self.rules(chosen)

    def of(self, rules: Rules, weigh: Weigh = work) -> float:
        """The least work under general rules."""
        axes = {rule.dim: rule.axes for rule in rules if not rule.selector}
        dims = [(1 << i, axes.get(dim.name, ())) for i, dim in enumerate(self.dims)]
        open_ = tuple(sum(bit for bit, split in dims if a in split) for a in self.axes)
        return sum(table.least(open_) for table in self.tables(weigh))

    def every(self) -> Iterator[Rules]:
        """Every valid layout."""
        return (rules for _, rules in self.within(math.inf))

    def rules(self, chosen: Sequence[tuple[str, ...]]) -> Rules:
        """The rules of a choice of axes per dim, in the order in which the program has the dims."""
        found = {dim.name: axes for dim, axes in zip(self.dims, chosen, strict=True)}
        order = dict.fromkeys(d for v in values_of(self.program) for d in v.type.names)
        kept = [d for d in order if d in self.fixed or found.get(d)]
        general = (Rule(d, found[d] if d in found else self.fixed[d]) for d in kept)
        return (*general, *self.narrower)


@functools.lru_cache(maxsize=64)
def space_of(
    program: named.Program,
    mesh: Mesh,
    fixed: Rules = (),
    timing: Timing | None = None,
    stored: bool = True,
) -> Space:
    """The space of a problem: one, with its tables, for all that ask."""
    return Space(program, mesh, fixed, timing, stored)


def _calls(program: named.Program) -> tuple[dict[Call, int], dict[Call, int]]:
    """Every distinct call, and how often it runs, as far as a walk does not merge equal ones.

    And how often for gradients and updates, which rules for storage may divide further.
    """
    found: Counter[Call] = Counter()
    updates: Counter[Call] = Counter()
    for node, trips in counted(cse(program, lambda one, other: True).body):
        if isinstance(node, named.Op):
            found[call_of(node)] += trips
            gradient = any(v.role == "grad" for v in node.outs)
            updates[call_of(node)] += trips * (gradient or node.phase == "update")
    return dict(found), dict(updates)


Open = tuple[int, ...]
"""For each axis the dims that it splits or may still split, as a bit set."""

# --- work ----------------------------------------------------------------------------------------


class _Table:
    """The least work of one call, by the dims of it that each axis may split."""

    def __init__(self, call: Call, trips: int, space: Space, weigh: Weigh) -> None:
        self.call, self.trips, self.weigh = call, trips, weigh
        self.updates = space.updates[call] if space.stored and weigh is not work else 0
        self.timing = space.timing
        self.sizes = tuple(space.mesh.size(a) for a in space.axes)
        numbers = {dim.name: i for i, dim in enumerate(space.dims)}
        self.loops = [
            (_bits((*f.ins, *f.outs), numbers), f) for f in call.opdef.factors(call.signature).loops
        ]
        self.own = _bits(own_dims(call), numbers)
        self.mask = functools.reduce(operator.or_, (mask for mask, _ in self.loops), self.own)
        self.known: dict[Open, float] = {}

    def least(self, open_: Open) -> float:
        """The least work where axis i may split the dims of the bit set `open_[i]`."""
        key = tuple(dims & self.mask for dims in open_)
        if key not in self.known:
            options = [[f for mask, f in self.loops if mask & dims] + [None] for dims in key]
            found = min(map(self._of, itertools.product(*options)))
            if any(dims & self.own for dims in key):
                found = min(found, self._expanded)
            self.known[key] = self.trips * found
            if self.updates and self.timing is not None:
                self.known[key] -= self.updates * (found - divided(found, self.timing))
        return self.known[key]

    @functools.cached_property
    def _expanded(self) -> float:
        """The work where a dim is split that the operator needs whole.

        The operators that it becomes may be common to several composites, and are then done once:
        so none of them is a bound of seconds. FLOPs count the products.
        """
        calls = on_parts(self.call)
        if not calls:
            return math.inf
        if self.weigh is not work:
            return 0.0
        products = [call for call in calls if len(call.ins) > 1 and call.opdef.flops is not None]
        return sum(work(call, call.signature) for call in products) / math.prod(self.sizes)

    def _of(self, chosen: Sequence[Factor | None]) -> float:
        """The work with one loop split by each axis, or none."""
        pairs = [(f, n) for f, n in zip(chosen, self.sizes, strict=True) if f is not None]
        call = self.call
        ins = tuple(_local(t, [(f.ins[i], n) for f, n in pairs]) for i, t in enumerate(call.ins))
        outs = tuple(_local(t, [(f.outs[i], n) for f, n in pairs]) for i, t in enumerate(call.outs))
        return self.weigh(call, Signature(ins, outs, dict(call.attrs)))


def _bits(dims: Iterable[str | None], numbers: Mapping[str, int]) -> int:
    """The set of dims that may be split, of some."""
    return sum(1 << numbers[d] for d in {*dims} if d is not None and d in numbers)


def own_dims(call: Call) -> frozenset[str]:
    """The dims of operands that the operator needs whole."""
    return frozenset().union(*whole_dims(call))


def on_parts(call: Call) -> tuple[Call, ...]:
    """The calls that one becomes where a dim is split that it needs whole; none if it cannot."""
    if call.name in IN_BLOCKS:
        return (call,)
    span = Span(Source("", ""), 0, 0)
    values = {i: Value(t, span) for i, t in zip(call.same, call.ins, strict=True)}
    outs = tuple(Value(t, span) for t in call.outs)
    op = named.Op(call.name, tuple(values[i] for i in call.same), outs, call.attrs, span)
    found = expand(op, {})
    return () if found is None else tuple(map(call_of, found.ops))


def _local(type_: TensorType, split: Sequence[tuple[str | None, int]]) -> TensorType:
    parts: dict[str, int] = {}
    for dim, ways in split:
        if dim is not None:
            parts[dim] = parts.get(dim, 1) * ways
    return type_.resized({d: -(-type_.size(d) // n) for d, n in parts.items()})


# --- descent -------------------------------------------------------------------------------------

Tied = tuple[tuple[int, int], ...]
"""Pairs of equal axes that have split the same dims so far: the second may not go ahead."""


class _Descent:
    """Depth first over the dims of a space; what is above the limit is left out."""

    def __init__(self, space: Space, weigh: Weigh, limit: float) -> None:
        self.space, self.limit = space, limit
        self.chosen: list[tuple[str, ...]] = []
        self.tables = space.tables(weigh)
        self.numbers = {axis: i for i, axis in enumerate(space.axes)}

    def leaves(self) -> Iterator[tuple[float, tuple[tuple[str, ...], ...]]]:
        """The work and the axes of every dim, of each layout within the limit."""
        masks = ((1 << i, dim) for i, dim in enumerate(self.space.dims))
        by_axis = [0] * len(self.space.axes)
        for mask, dim in masks:
            for axis in dim.axes:
                by_axis[self.numbers[axis]] |= mask
        tied = tuple((self.numbers[a], self.numbers[b]) for a, b in self.space.exchanged)
        yield from self._below((), tuple(by_axis), tied)

    def _below(
        self, chosen: tuple[tuple[str, ...], ...], open_: Open, tied: Tied
    ) -> Iterator[tuple[float, tuple[tuple[str, ...], ...]]]:
        number = len(chosen)
        if number == len(self.space.dims):
            yield sum(table.least(open_) for table in self.tables), chosen
            return
        options = []
        for axes in self._options(number, open_, tied):
            left = self._left(number, axes, open_)
            options.append((sum(table.least(left) for table in self.tables), axes, left))
        for bound, axes, left in sorted(options, key=lambda o: (o[0], -len(o[1]))):
            if bound <= self.limit:
                yield from self._below((*chosen, axes), left, self._still(tied, axes))

    def _options(self, number: int, open_: Open, tied: Tied) -> Iterator[tuple[str, ...]]:
        """The axes that may split a dim; those of a fixed rule are not chosen."""
        dim, names = self.space.dims[number], self.space.axes
        if dim.name in self.space.fixed:
            yield dim.axes
            return
        free = [a for a in dim.axes if open_[self.numbers[a]] >> number & 1]
        for count in range(len(free) + 1):
            for axes in itertools.combinations(free, count):
                ahead = any(names[b] in axes and names[a] not in axes for a, b in tied)
                if not ahead and self.space.divides(dim, axes):
                    yield axes

    def _left(self, number: int, axes: tuple[str, ...], open_: Open) -> Open:
        """What stays open once a dim is split over these axes alone."""
        meets, names = self.space.dims[number].meets, self.space.axes
        pairs = zip(names, open_, strict=True)
        return tuple(o & ~meets if a in axes else o & ~(1 << number) for a, o in pairs)

    def _still(self, tied: Tied, axes: tuple[str, ...]) -> Tied:
        names = self.space.axes
        return tuple((a, b) for a, b in tied if (names[a] in axes) == (names[b] in axes))
