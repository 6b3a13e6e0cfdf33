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
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import Source, Span
from meshdsl.ir.program import counted
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.cse import cse
from meshdsl.named.expand import IN_BLOCKS, expand
from meshdsl.named.ir import Value, loops_of, values_of
from meshdsl.ops.opdef import Signature
from meshdsl.placed.placements import Mesh
from meshdsl.placed.sharding_rules import Call, call_of, whole_dims
from meshdsl.placed.strategies import flops
from meshdsl.records import dataclass
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.search.lower_bounds import ROUNDING, at_least, divided, is_started
from meshdsl.syntax.symbols import ROLES

Weigh = Callable[[Call, Signature], float]
"""The work of a call on one device, from its local types: FLOPs, or seconds."""


def work(call: Call, local: Signature) -> float:
    """Floating-point operations."""
    return flops(call.opdef, local)


@functools.lru_cache(maxsize=256)
def seconds(timing: Timing) -> Weigh:
    """The least seconds on a device of a cluster; a number takes none."""

    def weigh(call: Call, local: Signature) -> float:
        if call.name == "constant":
            return 0.0
        taken = timing.operator(call.opdef, local, flops(call.opdef, local)).seconds
        return at_least(taken, call.opdef, (*local.ins, *local.outs), timing)

    return weigh


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim to be split: the axes that may split it, and the dims that it meets, as a bit set."""

    name: str
    size: int
    axes: tuple[str, ...]
    meets: int


class LayoutSpace:
    """The valid layouts of a program on a mesh. `fixed` rules are in all of them, as `asked`.

    Axes are equal if they have one size and, where a cluster is given, lie in the same levels.
    Where rules for storage are `stored` beside these, seconds are the least with any of them.
    """

    def __init__(
        self,
        program: named.NamedProgram,
        mesh: Mesh,
        fixed: Rules = (),
        timing: Timing | None = None,
        stored: bool = True,
    ) -> None:
        self.stored = stored or any(rule.selector for rule in fixed)
        self.program, self.mesh, self.timing = program, mesh, timing
        self.axes = tuple(a for a, size in mesh.axes if size > 1)
        self.asked = {rule.dim: rule.axes for rule in fixed if not rule.selector}
        self.fixed = {d: tuple(a for a in axes if a in self.axes) for d, axes in self.asked.items()}
        self.narrower = tuple(rule for rule in fixed if rule.selector)
        self.calls, self.updates, self.related = _calls(program)
        self.loops = frozenset(loop.dim.name for loop in loops_of(program))
        self.dims = self._dims()
        self._tables: dict[Weigh, list[_Tables]] = {}
        self._least: dict[Weigh, float] = {}

    def _dims(self) -> tuple[_Dim, ...]:
        """The dims that may be split, those of most work first."""
        every = {d.name: d.size for v in values_of(self.program) for d in v.type.dims}
        # No rule can name a dim that the compiler has made up: its name has a dot.
        sizes = {name: size for name, size in every.items() if "." not in name}
        touched: Counter[str] = Counter()
        for call, trips in self.calls.items():
            local = Signature(call.ins, call.outs, dict(call.attrs))
            for dim in {d for t in (*call.ins, *call.outs) for d in t.names}:
                touched[dim] += trips * flops(call.opdef, local)
        names = [d for d in sizes if d not in self.loops and self._may_split(sizes, d)]
        names.sort(key=lambda d: (d not in self.fixed, -touched[d]))
        numbers = {name: i for i, name in enumerate(names)}
        meets = dict.fromkeys(names, 0)
        for value in values_of(self.program):
            splittable = [d for d in value.type.names if d in numbers]
            for one, other in itertools.permutations(splittable, 2):
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
        axes = []
        for axis in self.axes:
            parts = self.mesh.size(axis)
            even = any(n % parts == 0 for n in sizes.values())
            if sizes[dim] % parts == 0 if even else sizes[dim] >= parts:
                axes.append(axis)
        return tuple(axes)

    @functools.cached_property
    def exchanged(self) -> tuple[tuple[str, str], ...]:
        """Pairs of neighbours among equal axes that no rule or `@` tells apart."""
        told = {a for axes in self.fixed.values() for a in axes}
        pins = (pin for v in values_of(self.program) for pin in v.pins)
        told |= {a for pin in pins for a in self.mesh.known(pin.axes)}
        alike: dict[object, list[str]] = {}
        for axis in (a for a in self.axes if a not in told):
            links = tuple(self.timing.parts((axis,))) if self.timing else ()
            alike.setdefault((self.mesh.size(axis), links), []).append(axis)
        return tuple(pair for axes in alike.values() for pair in itertools.pairwise(axes))

    @property
    def symmetry(self) -> int:
        """The number of exchanges of axes under which layouts are the same."""
        after = {b: a for a, b in self.exchanged}
        exchanges = 1
        for axis in after:
            length, here = 1, axis
            while here in after:
                length, here = length + 1, after[here]
            exchanges *= length
        return exchanges

    @functools.cached_property
    def sharing(self) -> Counter[Call]:
        """How many distinct calls become each of `on_parts`; none of what stands alone beside."""
        parts = (part for call in self.calls if own_dims(call) for part in {*on_parts(call)})
        counts = Counter(parts)
        for call in self.calls:
            counts.pop(call, None)
        return counts

    def tables(self, weigh: Weigh) -> list[_Tables]:
        """The least work of all calls with the same dims, filled as it is asked for."""
        if weigh not in self._tables:
            by_dims: dict[int, list[_WorkTable]] = {}
            for call, trips in self.calls.items():
                table = _WorkTable(call, trips, self, weigh)
                by_dims.setdefault(table.mask, []).append(table)
            self._tables[weigh] = [_Tables(mask, tables) for mask, tables in by_dims.items()]
        return self._tables[weigh]

    # --- choices -------------------------------------------------------------------------------

    @functools.cached_property
    def undecided(self) -> tuple[Open, Tied]:
        """What is open before any dim is decided, and the equal axes."""
        number = {axis: i for i, axis in enumerate(self.axes)}
        open_ = (sum(1 << i for i, d in enumerate(self.dims) if a in d.axes) for a in self.axes)
        return tuple(open_), tuple((number[a], number[b]) for a, b in self.exchanged)

    def options(self, number: int, open_: Open, tied: Tied) -> Iterator[tuple[str, ...]]:
        """The axes that may split a dim; those of a fixed rule are not chosen."""
        dim, names = self.dims[number], self.axes
        if dim.name in self.fixed:
            yield dim.axes
            return
        free = [a for a, dims in zip(names, open_, strict=True) if dims >> number & 1]
        for count in range(len(free) + 1):
            for axes in itertools.combinations(free, count):
                ahead = any(names[b] in axes and names[a] not in axes for a, b in tied)
                if not ahead and self.divides(dim, axes):
                    yield axes

    def left(self, number: int, axes: tuple[str, ...], open_: Open) -> Open:
        """What stays open once a dim is split over these axes alone."""
        meets = self.dims[number].meets
        pairs = zip(self.axes, open_, strict=True)
        return tuple([o & ~meets if a in axes else o & ~(1 << number) for a, o in pairs])

    def still(self, tied: Tied, axes: tuple[str, ...]) -> Tied:
        """The axes that are equal still once a dim is split over some."""
        names = self.axes
        return tuple((a, b) for a, b in tied if (names[a] in axes) == (names[b] in axes))

    def allows(self, chosen: Sequence[tuple[str, ...]]) -> bool:
        """Whether a choice of axes per dim is a valid layout, or one with equal axes exchanged."""
        open_, _ = self.undecided
        for number, axes in enumerate(chosen):
            if axes not in self.options(number, open_, ()):
                return False
            open_ = self.left(number, axes, open_)
        return True

    # --- layouts -------------------------------------------------------------------------------

    def least(self, weigh: Weigh = work) -> float:
        """The least work that any layout leaves a device."""
        if weigh not in self._least:
            self._least[weigh] = self._least_of_all(weigh)
        return self._least[weigh]

    def _least_of_all(self, weigh: Weigh) -> float:
        """The least work of all layouts, the best looked at first.

        Best by what is decided and the least of the rest; choices that leave the same open are one,
        so that many dims of which few meet are no trouble.
        """
        tables, order = self.tables(weigh), self._order
        live = self._live(tables)
        changed = [[t for t in tables if t.mask & (self.dims[n].meets | 1 << n)] for n in order]
        open_, tied = self.undecided
        begun = sum(table.least(open_) for table in tables)
        heap: list[tuple[float, int, int, Open, Tied]] = [(begun, 0, 0, open_, tied)]
        least_of: dict[tuple[int, Open, Tied], float] = {}
        numbers = itertools.count(1)
        while True:
            bound, depth, _, open_, tied = heapq.heappop(heap)
            at = -depth
            if at == len(order):
                return sum(table.least(open_) for table in tables)
            unchanged = bound - sum(table.least(open_) for table in changed[at])
            for axes in self.options(order[at], open_, tied):
                left, still = self.left(order[at], axes, open_), self.still(tied, axes)
                below = unchanged + sum(table.least(left) for table in changed[at])
                state = at, tuple([dims & live[at] for dims in left]), still
                if below < least_of.get(state, math.inf):
                    least_of[state] = below
                    heapq.heappush(heap, (below, depth - 1, next(numbers), left, still))

    def within(self, limit: float, weigh: Weigh = work) -> Iterator[tuple[float, Rules]]:
        """The layouts whose work is not above a limit, with it; depth first."""
        for found, chosen in _Descent(self, weigh, limit).leaves():
            yield found, self.rules(chosen)

    def of(self, rules: Rules, weigh: Weigh = work) -> float:
        """The least work under general rules."""
        open_ = self._open(rules)
        return sum(table.least(open_) for table in self.tables(weigh))

    def _open(self, rules: Rules) -> Open:
        """The dims that each axis splits under general rules."""
        axes = {rule.dim: rule.axes for rule in rules if not rule.selector}
        dims = [(1 << i, axes.get(dim.name, ())) for i, dim in enumerate(self.dims)]
        return tuple(sum(bit for bit, split in dims if a in split) for a in self.axes)

    def knows(self, rules: Rules) -> bool:
        """Whether the tables say what rules leave a device: those of dims that may be split.

        And those for storage. Nothing else may split a dim, as `@` does.
        """
        split = {rule.dim for rule in rules if not rule.selector and rule.axes}
        narrower = {rule.selector[0] for rule in rules if rule.selector}
        is_known = split <= {dim.name for dim in self.dims} and narrower <= {*ROLES}
        return is_known and not any(value.pins for value in values_of(self.program))

    def kept_work(self, rules: Rules) -> float:
        """The least work under general rules that no rules for storage divide further."""
        open_ = self._open(rules)
        calls = (table for tables in self.tables(work) for table in tables.calls)
        return sum(t.least(open_) * (1 - self.updates[t.call] / t.trips) for t in calls)

    def every(self) -> Iterator[Rules]:
        """Every valid layout."""
        return (rules for _, rules in self.within(math.inf))

    @functools.cached_property
    def count(self) -> int:
        """The number of valid layouts: choices that leave the same open are counted together."""
        order, live = self._order, self._live([])
        counts: Counter[tuple[Open, Tied]] = Counter({self.undecided: 1})
        for number, later in zip(order, live, strict=True):
            ways: Counter[tuple[Open, Tied]] = Counter()
            for (open_, tied), times in counts.items():
                for axes in self.options(number, open_, tied):
                    left = self.left(number, axes, open_)
                    ways[tuple([dims & later for dims in left]), self.still(tied, axes)] += times
            counts = ways
        return sum(counts.values())

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """The dims as calls meet them, so that few are open at a time; fixed ones first."""
        order = dict.fromkeys(d for c in self.calls for t in (*c.ins, *c.outs) for d in t.names)
        numbers = {dim.name: i for i, dim in enumerate(self.dims)}
        dims = [*(numbers[name] for name in order if name in numbers), *range(len(numbers))]
        return tuple(sorted(dict.fromkeys(dims), key=lambda i: self.dims[i].name not in self.fixed))

    def _live(self, tables: Sequence[_Tables]) -> list[int]:
        """Behind each dim of the order, those that are to be decided, or in a table with such."""
        live, later = [], 0
        for number in reversed(self._order):
            live.append(
                later
                | functools.reduce(operator.or_, (t.mask for t in tables if t.mask & later), 0)
            )
            later |= 1 << number
        return live[::-1]

    def rules(self, chosen: Sequence[tuple[str, ...]]) -> Rules:
        """The rules of a choice of axes per dim, in the order in which the program has the dims."""
        axes_of = {dim.name: axes for dim, axes in zip(self.dims, chosen, strict=True)}
        order = dict.fromkeys(d for v in values_of(self.program) for d in v.type.names)
        ruled = [d for d in order if d in self.asked or axes_of.get(d)]
        general = (SearchRule(d, self.asked.get(d) or axes_of.get(d, ())) for d in ruled)
        return (*general, *self.narrower)


@functools.lru_cache(maxsize=64)
def space_of(
    program: named.NamedProgram,
    mesh: Mesh,
    fixed: Rules = (),
    timing: Timing | None = None,
    stored: bool = True,
) -> LayoutSpace:
    """The space of a problem: one, with its tables, for all that ask."""
    return LayoutSpace(program, mesh, fixed, timing, stored)


def _calls(
    program: named.NamedProgram,
) -> tuple[dict[Call, int], dict[Call, int], frozenset[Call]]:
    """Every distinct call, and how often it runs, as far as a walk does not merge equal ones.

    And how often for gradients and updates, which rules for storage may divide further. And those
    of which two have an operand in common, but not all.
    """
    trips_of: Counter[Call] = Counter()
    updates: Counter[Call] = Counter()
    operands: dict[Call, set[Value]] = {}
    related = set[Call]()
    for node, trips in counted(cse(program, lambda one, other: True).body):
        if isinstance(node, named.NamedOp):
            call, read = call_of(node), {*node.ins}
            if read & operands.setdefault(call, set()):
                related.add(call)
            operands[call] |= read
            trips_of[call] += trips
            gradient = any(v.role == "grad" for v in node.outs)
            updates[call] += trips * (gradient or node.phase == "update")
    return dict(trips_of), dict(updates), frozenset(related)


Open = tuple[int, ...]
"""For each axis the dims that it splits or may still split, as a bit set."""

# --- work ----------------------------------------------------------------------------------------

Ways = tuple[int, ...]
"""How often each loop of a call is split."""

_INS, _OUTS = operator.attrgetter("ins"), operator.attrgetter("outs")


class _Tables:
    """The least work of all calls with the same dims, by the dims that each axis may split."""

    def __init__(self, mask: int, calls: list[_WorkTable]) -> None:
        self.mask, self.calls = mask, calls
        self.known: dict[Open, float] = {}

    def least(self, open_: Open) -> float:
        """The least work where axis i may split the dims of the bit set `open_[i]`."""
        key = tuple([dims & self.mask for dims in open_])
        least = self.known.get(key)
        if least is None:
            least = self.known[key] = sum(call.least(key) for call in self.calls)
        return least


class _WorkTable:
    """The least work of one call, by the dims of it that each axis may split."""

    def __init__(self, call: Call, trips: int, space: LayoutSpace, weigh: Weigh) -> None:
        self.call, self.trips, self.weigh = call, trips, weigh
        self.updates = space.updates[call] if space.stored and weigh is not work else 0
        self.timing, self.space = space.timing, space
        self.sizes = tuple(space.mesh.size(a) for a in space.axes)
        numbers = {dim.name: i for i, dim in enumerate(space.dims)}
        self.loops = call.opdef.factors(call.signature).loops
        self.masks = [_bits((*loop.ins, *loop.outs), numbers) for loop in self.loops]
        self.own = _bits(own_dims(call), numbers)
        self.mask = functools.reduce(operator.or_, self.masks, self.own)
        self.known: dict[Open, float] = {}
        self.split: dict[Ways, float] = {}

    def least(self, open_: Open) -> float:
        """The least work where axis i may split the dims of the bit set `open_[i]`."""
        key = tuple([dims & self.mask for dims in open_])
        if key not in self.known:
            least = min(map(self._of, self._ways(key)))
            if any(dims & self.own for dims in key):
                least = min(least, self._expanded(key))
            self.known[key] = self.trips * least
            if self.updates and self.timing is not None:
                starts = is_started(self.call.opdef)
                self.known[key] -= self.updates * (least - divided(least, self.timing, starts))
        return self.known[key]

    def _expanded(self, open_: Open) -> float:
        """The work where a dim is split that the operator needs whole; infinite if none may be.

        The operators that it becomes may be common to several composites, and are then done once:
        so none of them is a bound of seconds.
        """
        if not on_parts(self.call):
            return math.inf
        if self.weigh is not work:
            return 0.0
        if self.call.name in IN_BLOCKS:
            return self._in_blocks()
        return sum(part.least(open_) / shared for part, shared in self._parts)

    def _in_blocks(self) -> float:
        """The work on one block, where all axes split what the operator needs whole."""
        call, every = self.call, math.prod(self.sizes)
        split = [(dim, every) for dim in own_dims(call)]
        ins, outs = (
            tuple(_local(t, [(d, n) for d, n in split if t.has(d)]) for t in types)
            for types in (call.ins, call.outs)
        )
        return work(call, Signature(ins, outs, dict(call.attrs)))

    @functools.cached_property
    def _parts(self) -> list[tuple[_WorkTable, int]]:
        """The operators that a composite becomes, and how many calls become the same one.

        Of several results some may not be asked for, and what makes them is left out: there
        products alone count. So they do where calls of the same operand may have parts in common.
        """
        calls = on_parts(self.call)
        if len(self.call.outs) > 1 or self.call in self.space.related:
            calls = tuple(c for c in calls if len(c.ins) > 1 and c.opdef.flops is not None)
        sharing = self.space.sharing
        return [(_WorkTable(c, 1, self.space, work), sharing[c]) for c in calls if sharing[c]]

    def _ways(self, open_: Open) -> set[Ways]:
        """How often loops may be split, each axis by one loop or by none."""
        ways: set[Ways] = {(1,) * len(self.loops)}
        for dims, size in zip(open_, self.sizes, strict=True):
            may = [i for i, mask in enumerate(self.masks) if mask & dims]
            ways |= {(*w[:i], w[i] * size, *w[i + 1 :]) for w in ways for i in may}
        return ways

    def _of(self, ways: Ways) -> float:
        """The work with loops split so often."""
        if ways not in self.split:
            call, split = self.call, [p for p in zip(self.loops, ways, strict=True) if p[1] > 1]
            ins, outs = (
                tuple(_local(t, [(dims(f)[i], n) for f, n in split]) for i, t in enumerate(types))
                for types, dims in ((call.ins, _INS), (call.outs, _OUTS))
            )
            self.split[ways] = self.weigh(call, Signature(ins, outs, dict(call.attrs)))
        return self.split[ways]


def _bits(dims: Iterable[str | None], numbers: Mapping[str, int]) -> int:
    """The set of dims that may be split, of some."""
    return sum(1 << numbers[d] for d in {*dims} if d is not None and d in numbers)


def own_dims(call: Call) -> frozenset[str]:
    """The dims of operands that the operator needs whole."""
    return frozenset().union(*whole_dims(call))


@functools.lru_cache(maxsize=1 << 12)
def on_parts(call: Call) -> tuple[Call, ...]:
    """The calls that one becomes where a dim is split that it needs whole; none if it cannot."""
    if call.name in IN_BLOCKS:
        return (call,)
    span = Span(Source("", ""), 0, 0)
    values = {i: Value(t, span) for i, t in zip(call.same, call.ins, strict=True)}
    outs = tuple(Value(t, span) for t in call.outs)
    op = named.NamedOp(call.name, tuple(values[i] for i in call.same), outs, call.attrs, span)
    expansion = expand(op, {})
    return () if expansion is None else tuple(map(call_of, expansion.ops))


def _local(type_: TensorType, split: Sequence[tuple[str | None, int]]) -> TensorType:
    parts: dict[str, int] = {}
    for dim, ways in split:
        if dim is not None:
            parts[dim] = parts.get(dim, 1) * ways
    return type_.resized({d: -(-type_.size(d) // n) for d, n in parts.items()})


# --- descent -------------------------------------------------------------------------------------

Tied = tuple[tuple[int, int], ...]
"""Pairs of equal axes that have split the same dims so far: the second may not go ahead."""

Chosen = tuple[tuple[str, ...], ...]
"""The axes of the first dims of a space."""


class _Descent:
    """Depth first over the dims of a space; what is above the limit is left out."""

    def __init__(self, space: LayoutSpace, weigh: Weigh, limit: float) -> None:
        self.space, self.limit = space, limit
        self.tables = space.tables(weigh)
        self.numbers = {axis: i for i, axis in enumerate(space.axes)}
        changed = [dim.meets | 1 << number for number, dim in enumerate(space.dims)]
        self.changed = [[t for t in self.tables if t.mask & dims] for dims in changed]

    def leaves(self) -> Iterator[tuple[float, Chosen]]:
        """The work and the axes of every dim, of each layout within the limit."""
        open_, tied = self.space.undecided
        bound = sum(table.least(open_) for table in self.tables)
        yield from self._below((), open_, tied, bound)

    def _below(
        self, chosen: Chosen, open_: Open, tied: Tied, bound: float
    ) -> Iterator[tuple[float, Chosen]]:
        """The layouts that go on from what is chosen; none has less work than `bound`.

        What does not change by a choice is not added up again: up to rounding, which the sum at
        the end is free of.
        """
        number = len(chosen)
        if number == len(self.space.dims):
            least = sum(table.least(open_) for table in self.tables)
            if least <= self.limit:
                yield least, chosen
            return
        changed = self.changed[number]
        unchanged = bound - sum(table.least(open_) for table in changed)
        options = []
        for axes in self.space.options(number, open_, tied):
            left = self.space.left(number, axes, open_)
            options.append((unchanged + sum(table.least(left) for table in changed), axes, left))
        for below, axes, left in sorted(options, key=lambda o: (o[0], -len(o[1]))):
            if below * (1 - ROUNDING) <= self.limit:
                still = self.space.still(tied, axes)
                yield from self._below((*chosen, axes), left, still, below)
