"""The choice of an operator's placement: the rows of its factors, combined over the mesh axes.

Where the operands already match a row, there is no conflict and that row is taken. Otherwise the
candidates are the rows that the operands or the result call for, and the combination is taken
whose reshards send the fewest bytes; ties go to fewer collectives, fewer partial results, fewer
FLOPs, and then the order of the rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import field, replace

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import OpDef, ReduceOp, Signature, lookup
from meshdsl.placed.placements import B, Component, Mesh, Partial, Placement, Split, placement
from meshdsl.placed.reshard import BYTES, Price, Route, has_many_axes, route
from meshdsl.placed.sharding_rules import Call, Row, legal_rows, multiplies_a_sum, with_windows
from meshdsl.records import dataclass

MOST_COMBINED = 64
"""The most combinations of rows that are looked at for one operator, on a mesh of many axes."""

MOST_EXPLAINED, FEW_EXPLAINED = 256, 8
"""The most combinations that are looked at only to tell the next best of them.

Few are on a mesh of many axes, where each route is a search of its own.
"""


Read = list[list[Component]]
"""How each operand may be read along an axis."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Placements required of the operands, yielded by the operator, and settled in by its results.

    `cost` is in wire bytes per device; a new partial result counts its reduction. `is_cut`: a
    search for one of its routes ended before every cheaper one was ruled out.
    """

    needs: tuple[Placement, ...]
    yields: tuple[Placement, ...]
    targets: tuple[Placement, ...]
    cost: int = 0
    rank: tuple[int, ...] = ()
    is_cut: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Other:
    """The bytes of the next best way; of those looked at, where not every one was."""

    cost: int
    of_some: bool


@dataclass(frozen=True, slots=True)
class Want:
    """A demand on an output.

    kind: `ruled` (split as in `placement`; whole or partial on the other axes), `exact`
    (just `placement`), `free` (anything). `summed` are the axes over which rules split dims that
    the operator reduces.
    """

    placement: Placement
    kind: str = "ruled"
    summed: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def stands(self, component: Component, axis: str) -> bool:
        """Whether `component` along the axis meets the demand, or may once it is reduced."""
        if self.kind == "free" or isinstance(component, Partial):
            return True
        return component == self.placement.component(axis)

    def allows(self, row: Row, axis: str) -> bool:
        """Whether a row splits the reduced dims along the axis as the rules require."""
        dims = {c.dim for c in row.ins if isinstance(c, Split)}
        return all((axis in axes) == (dim in dims) for dim, axes in self.summed)


def allowed_rows(rows: Iterable[Row], wants: Sequence[Want], axis: str) -> list[Row]:
    """The rows that rules for summed dims allow; all, where they allow none."""
    every = list(rows)
    if not any(want.summed for want in wants):
        return every
    return [row for row in every if all(w.allows(row, axis) for w in wants)] or every


def adding_first(rows: list[Row], axis: str, added_first: Set[str]) -> list[Row]:
    """The rows without those that multiply a partial sum over an axis of `added_first`."""
    if axis not in added_first:
        return rows
    return [row for row in rows if not multiplies_a_sum(row)]


@dataclass(frozen=True, slots=True)
class OnStages:
    """The stages of a pipeline, where what a micro-batch makes cannot be reduced over their `axis`.

    They are never at one micro-batch together. kind: `waits` (each stage has a part of what the
    operator makes until the passes are done), `whole` (a stage reads all of what is made, and so
    makes it of whole operands), `alone` (one stage does it, of all that it reads). `made` says of
    each operand whether the passes make it. `given` are the axes that inputs split the batch over.
    """

    axis: str
    kind: str
    made: tuple[bool, ...]
    given: tuple[str, ...]

    def keeps(self, axis: str) -> bool:
        """Whether a result that is partial over an axis stays so under every policy."""
        return self.kind == "waits" and axis == self.axis

    def allows(self, row: Row, axis: str) -> bool:
        """Whether a row can be taken along an axis."""
        if axis != self.axis or self.kind == "waits":
            return True
        if self.kind == "alone":
            return all(c == B for c in (*row.ins, *row.outs))
        return not any(isinstance(c, Partial) for c in (*row.ins, *row.outs))

    def moved(self, one: Placement, other: Placement) -> int:
        """What a reshard does over the stages: 0 nothing, 2 something.

        1: it reduces, which is not needed where each makes all of the value.
        """
        before, after = one.component(self.axis), other.component(self.axis)
        if before == after:
            return 0
        return 1 if isinstance(before, Partial) and after == B else 2


@functools.lru_cache(maxsize=65536)
def _candidates(chooser: Chooser) -> tuple[Choice, ...]:
    choices = chooser.combined(standing=True)
    if not any(chooser.misfit(c) == 0 for c in choices):
        # Rows that are taken for granted per axis may not go together.
        choices = chooser.combined(standing=False)
    if not choices and not chooser.uneven:
        # A rule for a dim that is summed may leave only rows with blocks of several sizes.
        choices = replace(chooser, uneven=True).combined(standing=False)
    assert choices or any(chooser.pins), f"no legal placement for {chooser.call.name}"
    least = min(map(chooser.misfit, choices), default=0)
    possible = (c for c in choices if chooser.misfit(c) == least)
    return tuple(sorted(possible, key=lambda c: (c.cost, c.rank)))


@functools.lru_cache(maxsize=4096)
def _next_best(chooser: Chooser, chosen: Choice) -> Other | None:
    choices = chooser.candidates()
    same_costs = (c.cost for c in choices if (c.needs, c.yields) == (chosen.needs, chosen.yields))
    cost = next(same_costs, chosen.cost)
    dearer = [c.cost for c in choices if c.cost > cost]
    some = has_many_axes(chooser.mesh) and chooser._leaves_out(choices, standing=True)
    if not dearer and choices and choices[0].cost:
        choices, some = chooser._some_others()
        dearer = [c.cost for c in choices if c.cost > cost]
    return Other(min(dearer), some) if dearer else None


@functools.lru_cache(maxsize=65536)
def is_legal(
    call: Call, needs: tuple[Placement, ...], yields: tuple[Placement, ...], mesh: Mesh
) -> bool:
    """Whether the placements of an operator are a legal row along every axis."""
    legal = _legal_pairs(call)
    pairs = (
        (tuple(p.component(axis) for p in needs), tuple(p.component(axis) for p in yields))
        for axis, size in mesh.axes
        if size > 1
    )
    return all(pair in legal for pair in pairs) and with_windows(call, needs, yields, mesh) == needs


def never_partial(
    call: Call,
    versions: tuple[tuple[Placement, ...], ...],
    wants: tuple[Want, ...],
    pins: tuple[Placement | None, ...],
) -> bool:
    """Whether no row that a `Chooser` of these looks at makes a partial result."""
    if _makes_partial(call) or any(want.summed for want in wants):
        return False
    read = (*pins, *(p for placements in versions for p in placements))
    return not any(p.partial for p in read if p is not None)


@functools.lru_cache(maxsize=65536)
def _makes_partial(call: Call) -> bool:
    """Whether a row makes a partial result of operands none of which has to be partial."""
    for row in legal_rows(call):
        ins, outs = {*map(type, row.ins)}, {*map(type, row.outs)}
        if Partial in outs and (Split in ins or Partial not in ins):
            return True
    return False


@functools.lru_cache(maxsize=65536)
def _legal_pairs(call: Call) -> frozenset[tuple[object, object]]:
    return frozenset((r.ins, r.outs) for r in legal_rows(call))


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one operator.

    `versions` are the placements each operand is available in; `wants` the demands on the outputs;
    `pins` the placements in which single operands must be read; `price` that of a reshard.
    Where it is `forced`, no result stays partial unless that is wanted.
    Rows that split a dim into blocks of several sizes are considered where it is `uneven`.
    `stages` are those of a pipeline, for an operator of their passes. Over the axes `added_first`,
    a sum is added up before the operator multiplies it.
    """

    call: Call
    versions: tuple[tuple[Placement, ...], ...]
    wants: tuple[Want, ...]
    pins: tuple[Placement | None, ...]
    mesh: Mesh
    policy: str
    price: Price = BYTES
    forced: bool = False
    uneven: bool = False
    stages: OnStages | None = None
    added_first: frozenset[str] = frozenset()
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Walks under many layouts ask for the same choices.
        about = (self.call, self.versions, self.wants, self.pins, self.mesh, self.policy)
        more = (self.price, self.forced, self.uneven, self.stages, self.added_first)
        object.__setattr__(self, "_hash", hash((*about, *more)))

    def __hash__(self) -> int:
        return self._hash

    def candidates(self) -> tuple[Choice, ...]:
        """The legal combinations, the cheapest first; none only where `pins` allow none."""
        return _candidates(self)

    @property
    def is_bounded(self) -> bool:
        """Whether, on many axes, not every combination and route was looked at for a choice."""
        return has_many_axes(self.mesh) and self._leaves_out(self.candidates(), standing=True)

    def _leaves_out(self, found: Sequence[Choice], standing: bool) -> bool:
        """Whether there are more combinations than were looked at, or cheaper routes."""
        many = self._are_many(self._options(standing)[1])
        return many or any(choice.is_cut for choice in found)

    def next_best(self, chosen: Choice) -> Other | None:
        """The cheapest combination dearer than `chosen`: only for explanations.

        Of very many combinations only some are looked at: explaining costs no more than placing.
        """
        return _next_best(self, chosen)

    def _some_others(self) -> tuple[tuple[Choice, ...], bool]:
        """Combinations of rows that operands need not match, and whether some were left out."""
        axes, options = self._options(standing=False)
        most = FEW_EXPLAINED if has_many_axes(self.mesh) else MOST_EXPLAINED
        if math.prod(map(len, options)) <= most:
            choices = tuple(self.combined(standing=False))
            return choices, has_many_axes(self.mesh) and any(c.is_cut for c in choices)
        combinations = itertools.islice(self._alike(axes, options), most)
        return tuple(c for c in map(self._choice, combinations) if c is not None), True

    def misfit(self, choice: Choice) -> int:
        """How far a choice is from what passes can do: 0 where nothing is wrong with it.

        1 and 2: what passes make is moved over stages, which are never there together, as
        `OnStages.moved` says. 3: a device has a block that the schedule cannot cut.
        """
        stages = self.stages
        if stages is None:
            return 0
        types = (*self.call.ins, *self.call.outs * 2)
        placed = (*choice.needs, *choice.yields, *choice.targets)
        if not all(map(self._is_cut, types, placed)):
            return 3
        read = zip(stages.made, self.versions, choice.needs, strict=True)
        each = [min(stages.moved(p, need) for p in ps) for flies, ps, need in read if flies]
        results = zip(choice.yields, choice.targets, strict=True)
        return max((*each, *itertools.starmap(stages.moved, results)), default=0)

    def _is_cut(self, type_: TensorType, placed: Placement) -> bool:
        """Whether a device has an equal part of every micro-batch.

        Where the index of an element counts, within its inputs' block.
        """
        batch_axes = self.stages.given if self.stages else ()
        ordered = self.call.opdef.ordered_dims(self.call.ins, dict(self.call.attrs))
        return all(
            (dim not in ordered or axes[: len(batch_axes)] == batch_axes)
            and type_.size(dim) % (micro * self.mesh.size(*axes)) == 0
            for dim, micro in self.mesh.cut
            if type_.has(dim)
            for axes in (placed.axes_of(dim),)
        )

    # --- rows --------------------------------------------------------------------------------

    def combined(self, standing: bool) -> list[Choice]:
        """Every legal combination; if `standing`, of rows that the operands match where any do."""
        return [c for c in map(self._choice, self._combinations(standing)) if c is not None]

    def _combinations(self, standing: bool) -> Iterator[dict[str, Row]]:
        axes, options = self._options(standing)
        if self._are_many(options):
            yield from self._alike(axes, options)
            return
        for combination in itertools.product(*options):
            yield dict(zip(axes, combination, strict=True))

    def _options(self, standing: bool) -> tuple[list[str], list[list[Row]]]:
        """The axes that split anything, and the rows of each."""
        axes = [a for a, size in self.mesh.axes if size > 1]
        legal = legal_rows(self.call)
        return axes, [self._rows(legal, a, standing) for a in axes]

    def _are_many(self, options: list[list[Row]]) -> bool:
        """Whether not all combinations are looked at."""
        return has_many_axes(self.mesh) and math.prod(map(len, options)) > MOST_COMBINED

    def _alike(self, axes: list[str], options: list[list[Row]]) -> Iterator[dict[str, Row]]:
        """The combinations in which axes of one size with the same rows take the same of them.

        No more than `MOST_COMBINED`, of axes that are not alike each with the first row of others.
        """
        groups: dict[tuple[int, tuple[Row, ...]], list[str]] = {}
        for axis, rows in zip(axes, options, strict=True):
            groups.setdefault((self.mesh.size(axis), tuple(rows)), []).append(axis)
        ways = [rows for _, rows in groups]
        if math.prod(map(len, ways)) <= MOST_COMBINED:
            combined: Iterator[tuple[Row, ...]] = itertools.product(*ways)
        else:
            combined = _one_other(ways)
        for picked in combined:
            each = zip(groups.values(), picked, strict=True)
            yield {axis: row for group, row in each for axis in group}

    def _rows(self, legal: tuple[Row, ...], axis: str, standing: bool) -> list[Row]:
        every = allowed_rows(legal, self.wants, axis)
        if self.policy == "mesh-tf":
            every = [row for row in every if self._lazy_enough(row, axis)]
        if self.stages is None or not self.stages.keeps(axis):
            every = adding_first(every, axis, self.added_first)
        if self.stages is not None:
            every = [r for r in every if self.stages.allows(r, axis)] or [legal[0]]
        read = self._read(axis)
        stood_on = [row for row in every if standing and self._stands(row, read, axis)]
        if stood_on:
            return stood_on
        return [row for row in every if row is every[0] or self._called_for(row, read, axis)]

    def _lazy_enough(self, row: Row, axis: str) -> bool:
        """Whether the policy lets partial operands through (Mesh-TensorFlow's: in few places)."""
        if self.policy != "mesh-tf" or not any(isinstance(c, Partial) for c in row.ins):
            return True
        if self.stages is not None and self.stages.keeps(axis):
            return True
        if not lookup(self.call.name).lazy:
            return False
        partial = {p.partial for placements in self.versions for p in placements}
        return len(partial) == 1 and axis in next(iter(partial))

    def _stands(self, row: Row, read: Read, axis: str) -> bool:
        """Whether every operand matches the row, and the demands agree with its results."""
        for component, components in zip(row.ins, read, strict=True):
            if component not in components:
                return False
        return all(w.stands(c, axis) for c, w in zip(row.outs, self.wants, strict=True))

    @property
    def _readable(self) -> tuple[tuple[Placement, ...], ...]:
        """The placements in which each operand may be read without a reshard."""
        return tuple((p,) if p else v for p, v in zip(self.pins, self.versions, strict=True))

    def _read(self, axis: str) -> Read:
        """How each operand may be read along an axis without a reshard."""
        return [[p.component(axis) for p in placements] for placements in self._readable]

    def _called_for(self, row: Row, read: Read, axis: str) -> bool:
        """Whether an operand already matches the row, or a rule demands a split that it yields."""
        for component, components in zip(row.ins, read, strict=True):
            if component in components and isinstance(component, Split | Partial):
                return True
        pairs = zip(row.outs, self.wants, strict=True)
        return any(isinstance(c, Split) and axis in w.placement.axes_of(c.dim) for c, w in pairs)

    # --- one combination ---------------------------------------------------------------------

    def _choice(self, combination: dict[str, Row]) -> Choice | None:
        placements = self.placements(combination)
        if placements is None:
            return None
        yields = placements[1]
        targets = tuple(self._target(y, w) for y, w in zip(yields, self.wants, strict=True))
        routes = self._routes(*placements, targets)
        if routes is None:
            return None
        expected = self._expected(targets)
        cost = sum(r.wire_bytes for r in routes) + sum(r.wire_bytes for r in expected)
        collectives = sum(r.collectives for r in (*routes, *expected))
        partial = sum(len(t.partial) for t in targets)
        rank = collectives, partial, self.flops(*placements)
        is_cut = any(r.is_cut for r in (*routes, *expected))
        return Choice(*placements, targets, cost, rank, is_cut)

    def placements(
        self, combination: dict[str, Row]
    ) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
        """Operand and result placements of a combination; None if illegal or against a pin."""
        picked = self._ordered(combination)
        needs = [
            self._compose(type_, [(a, row.ins[i]) for a, row in picked])
            for i, type_ in enumerate(self.call.ins)
        ]
        yields = [
            self._compose(type_, [(a, row.outs[i]) for a, row in picked])
            for i, type_ in enumerate(self.call.outs)
        ]
        pinned = all(pin in (None, need) for pin, need in zip(self.pins, needs, strict=True))
        if not pinned or not self._legal(needs, yields):
            return None
        read, yielded = (tuple(p for p in ps if p is not None) for ps in (needs, yields))
        windows = with_windows(self.call, read, yielded, self.mesh)
        return None if windows is None else (windows, yielded)

    def _compose(
        self, type_: TensorType, components: Iterable[tuple[str, Component]]
    ) -> Placement | None:
        """One placement from a component per axis; None if ops mix or it is not to be uneven."""
        splits: dict[str, list[str]] = {}
        ops: set[ReduceOp] = set()
        partial = []
        for axis, component in components:
            if isinstance(component, Split):
                splits.setdefault(component.dim, []).append(axis)
            elif isinstance(component, Partial):
                partial.append(axis)
                ops.add(component.op)
        divides = all(type_.size(d) % self.mesh.size(*axes) == 0 for d, axes in splits.items())
        if len(ops) > 1 or not (divides or self.uneven):
            return None
        op = next(iter(ops), None)
        return placement(self.mesh, {d: tuple(a) for d, a in splits.items()}, tuple(partial), op)

    def _ordered(self, combination: dict[str, Row]) -> list[tuple[str, Row]]:
        """Axes with their rows: those of one factor in the order its dims are already split in.

        Of several factors that index one dim (the parts of a merged one), the outer come first.
        """
        if len(combination) < 2:
            return [*combination.items()]
        every = legal_rows(self.call)
        keys = {
            a: (every.index(row), self._position(a, row), self.mesh.names.index(a))
            for a, row in combination.items()
        }
        return sorted(combination.items(), key=lambda item: keys[item[0]])

    def _position(self, axis: str, row: Row) -> int:
        """The depth of `axis` in the order of the first output, else operand, that has it."""
        if row.factor is None:
            return 0
        placed = [
            *zip(row.factor.outs, ((w.placement,) for w in self.wants), strict=True),
            *zip(row.factor.ins, self._readable, strict=True),
        ]
        for dim, placements in placed:
            for p in placements:
                if dim is not None and axis in p.axes_of(dim):
                    return p.axes_of(dim).index(axis)
        return len(self.mesh.axes)

    def _legal(self, needs: Sequence[Placement | None], yields: Sequence[Placement | None]) -> bool:
        if any(p is None for p in (*needs, *yields)):
            return False
        legal = self.call.opdef.legal
        if legal is None:
            return True
        assert needs[0] is not None
        assert yields[0] is not None
        return legal(self.call.signature, self._ways(needs[0]), self._ways(yields[0]))

    def _ways(self, p: Placement) -> dict[str, int]:
        return {d: self.mesh.size(*axes) for d, axes in p.splits}

    def _target(self, yielded: Placement, want: Want) -> Placement:
        """The placement a result settles in: as demanded, and partial where it may stay so."""
        if want.kind == "exact":
            return want.placement
        splits = dict((yielded if want.kind == "free" else want.placement).splits)
        ruled = {a for axes in splits.values() for a in axes}
        partial = tuple(a for a in yielded.partial if a not in ruled)
        if self.forced:
            partial = tuple(a for a in partial if self.stages is not None and self.stages.keeps(a))
        return placement(self.mesh, splits, partial, yielded.op)

    # --- cost --------------------------------------------------------------------------------

    def _routes(
        self,
        needs: tuple[Placement, ...],
        yields: tuple[Placement, ...],
        targets: tuple[Placement, ...],
    ) -> list[Route] | None:
        routes_of: dict[object, Route | None] = {}
        call = self.call
        for which, type_, placements, need in zip(
            call.same, call.ins, self.versions, needs, strict=True
        ):
            routes_of["in", which, need] = cheapest(type_, placements, need, self.mesh, self.price)
        for which, (type_, yielded, target) in enumerate(
            zip(call.outs, yields, targets, strict=True)
        ):
            routes_of["out", which, target] = route(type_, yielded, target, self.mesh, self.price)
        routes = [r for r in routes_of.values() if r is not None]
        return routes if len(routes) == len(routes_of) else None

    def _expected(self, targets: tuple[Placement, ...]) -> list[Route]:
        """The reductions that newly partial results will cause later."""
        carried = {a for placements in self.versions for p in placements for a in p.partial}
        reductions = []
        for type_, target, want in zip(self.call.outs, targets, self.wants, strict=True):
            new = tuple(a for a in target.partial if a not in carried)
            if new and want.kind != "exact":
                source = placement(self.mesh, dict(target.splits), new, target.op)
                reduced = route(type_, source, target.reduced, self.mesh, self.price)
                assert reduced is not None
                reductions.append(reduced)
        return reductions

    def flops(self, needs: tuple[Placement, ...], yields: tuple[Placement, ...]) -> int:
        """Floating-point operations of one device."""
        return flops(self.call.opdef, self.local(needs, yields))

    def local(self, needs: tuple[Placement, ...], yields: tuple[Placement, ...]) -> Signature:
        """The local types of the call on one device."""
        call = self.call
        ins = tuple(p.local(t, self.mesh) for t, p in zip(call.ins, needs, strict=True))
        outs = tuple(p.local(t, self.mesh) for t, p in zip(call.outs, yields, strict=True))
        return Signature(ins, outs, dict(call.attrs))


@functools.lru_cache(maxsize=64)
def choosers(mesh: Mesh, policy: str, price: Price) -> Callable[..., Chooser]:
    """The choosers on a mesh: one for all operators that are asked for alike.

    `immediate` has those of `deferred`, in which every result is `forced`.
    """

    @functools.lru_cache(maxsize=1 << 16)
    def made(
        call: Call,
        versions: tuple[tuple[Placement, ...], ...],
        wants: tuple[Want, ...],
        pins: tuple[Placement | None, ...],
        forced: bool,
        stages: OnStages | None,
        added_first: frozenset[str],
    ) -> Chooser:
        asked = [(t, want.placement) for t, want in zip(call.outs, wants, strict=True)]
        placed = [(t, p) for t, ps in zip(call.ins, versions, strict=True) for p in ps]
        uneven = any(p.splits_unevenly(t, mesh) for t, p in (*asked, *placed))
        how = (mesh, policy, price, forced, uneven, stages, added_first)
        return Chooser(call, versions, wants, pins, *how)

    return made


def _one_other(ways: Sequence[tuple[Row, ...]]) -> Iterator[tuple[Row, ...]]:
    """The first row everywhere, and in one place another."""
    first = tuple(rows[0] for rows in ways)
    yield first
    for place, rows in enumerate(ways):
        yield from ((*first[:place], row, *first[place + 1 :]) for row in rows[1:])


def cheapest(
    type_: TensorType,
    placements: tuple[Placement, ...],
    need: Placement,
    mesh: Mesh,
    price: Price = BYTES,
) -> Route | None:
    """The cheapest route to `need` from any of the existing versions."""
    routes = [route(type_, p, need, mesh, price) for p in placements]
    possible = [r for r in routes if r is not None]
    if len(possible) < 2:
        return next(iter(possible), None)
    return min(
        possible, key=lambda r: (price.of(r, type_), r.collectives, len(r.steps)), default=None
    )


def flops(opdef: OpDef, local: Signature) -> int:
    """Floating-point operations of one device; views and copies of indices count none."""
    if opdef.view:
        return 0
    if opdef.flops is not None:
        return opdef.flops(local)
    return sum(t.elements for t in local.outs)
