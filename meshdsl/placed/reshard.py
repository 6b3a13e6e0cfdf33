"""Resharding: the cheapest steps from one placement to another.

Dijkstra over placements. An edge is one collective over one axis or over the product of several, or
a local step. Cost: that of `Price`, then collectives, then steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import NamedTuple, Protocol

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import OpDef, ReduceOp, Signature
from meshdsl.placed import collectives as c
from meshdsl.placed import routes_known as known
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.records import dataclass


class Duration(Protocol):
    """A duration."""

    @property
    def seconds(self) -> float:
        """Its seconds."""


class Clock(Protocol):
    """A cluster seen through a mesh (`cluster/timing.py`): what steps and operators take there."""

    @property
    def key(self) -> str:
        """The same text for clocks that tell the same times."""

    def step(self, step: c.Step, type_: TensorType, /) -> Duration:
        """The time of one step of a reshard."""

    def operator(self, opdef: OpDef, signature: Signature, flops: int, /) -> Duration:
        """The time of an operator on local tensors."""


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a reshard, in bytes sent per device; with a `clock`, in nanoseconds.

    In bytes a collective counts `message` more, and a pass over local memory a quarter of that
    (slices and zero-fills are kernels to start, too); computing is free. Without `scatter` there is
    no reduce_scatter (Mesh-TensorFlow has none).
    """

    message: int = 0
    scatter: bool = True
    clock: Clock | None = None

    @property
    def kernel(self) -> int:
        """The cost of a pass over memory."""
        return self.message // 4

    def of(self, route: Route, type_: TensorType) -> int:
        """The cost of a route of a tensor."""
        if self.clock is not None:
            return sum(nanoseconds(self.clock.step(step, type_)) for step in route.steps)
        if not self.message:
            return route.wire_bytes
        started = self.message * route.collectives + self.kernel * route.kernels
        return route.wire_bytes + started

    def operator(self, opdef: OpDef, signature: Signature, flops: int) -> int:
        """The cost of an operator on local tensors: 0 where only what is sent counts."""
        if self.clock is None or opdef.name == "constant":
            return 0
        return nanoseconds(self.clock.operator(opdef, signature, flops))


def nanoseconds(time: Duration) -> int:
    """A duration as a whole number, so that sums do not depend on their order.

    It is rounded up: one collective never costs more than two that take as long.
    """
    return math.ceil(1e9 * time.seconds)


BYTES = Price()

MESSAGE_BYTES = 8192
"""The default cost of a collective: a link of 10 GB/s moves that in 0.8 µs, about the least time
to start one."""


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one placement to another, and the most bytes that a device sends in each.

    `collectives` of the steps send anything. `unlike`: devices may send other numbers of bytes.
    `is_cut`: the search ended before every cheaper one was ruled out.
    """

    steps: tuple[c.Step, ...]
    wire_bytes: int
    collectives: int
    unlike: bool = False
    is_cut: bool = False

    @classmethod
    def of(cls, steps: tuple[c.Step, ...], type_: TensorType, mesh: Mesh) -> Route:
        """The route of some steps."""
        sent = sum(step.wire(type_, mesh) for step in steps)
        unlike = any(step.unlike(type_, mesh) for step in steps)
        return cls(steps, sent, sum(step.moves for step in steps), unlike)

    def by_device(self, type_: TensorType, mesh: Mesh) -> tuple[int, ...]:
        """Bytes that each device sends, in the order of ranks."""
        return tuple(map(sum, zip(*(s.by_device(type_, mesh) for s in self.steps), strict=True)))

    def of_type(self, type_: TensorType, mesh: Mesh) -> Route:
        """The same steps of a tensor of another type."""
        return replace(Route.of(self.steps, type_, mesh), is_cut=self.is_cut)

    def sent_at(self, type_: TensorType, mesh: Mesh, at: Mapping[str, int]) -> int:
        """Bytes that the device with the coordinates `at` sends."""
        return sum(sum(step.sent_along(type_, mesh, (), at)) for step in self.steps)

    @property
    def kernels(self) -> int:
        """Passes over memory of the local steps."""
        return sum(step.kernels for step in self.steps)

    @property
    def reduces(self) -> bool:
        """Whether a partial value is reduced on the way."""
        return any(step.kind in ("all_reduce", "reduce_scatter") for step in self.steps)


def with_sent(
    before: tuple[int, ...], way: Route, type_: TensorType, mesh: Mesh, times: int, less: int = 0
) -> tuple[int, ...]:
    """The bytes that each device has sent after a route, taken so many times, in order of ranks.

    Each is counted `less` bytes of it. `before` may be empty.
    """
    each = zip(before or (0,) * mesh.devices, _by_device(way, type_, mesh), strict=True)
    return tuple(sent + max(0, more - less) * times for sent, more in each)


@functools.lru_cache(maxsize=1 << 12)
def _by_device(way: Route, type_: TensorType, mesh: Mesh) -> tuple[int, ...]:
    return way.by_device(type_, mesh)


STAY = Route((), 0, 0)


@functools.lru_cache(maxsize=1 << 18)
def route(
    type_: TensorType, source: Placement, target: Placement, mesh: Mesh, price: Price = BYTES
) -> Route | None:
    """The cheapest route, or None when there is none (a partial sum cannot become a partial max).

    Axes that are `B` at both ends are left alone.
    """
    if source == target:
        return STAY
    if source.windows or target.windows:
        return _to_windows(type_, source, target, mesh, price)
    space = _space(type_, source, target, mesh, price.scatter)
    search = _Search(space, type_, source, target, price)
    if len(space.axes) <= FEW_AXES:
        search.run()
        return search.route()
    return _bounded(search)


FEW_AXES = 3
"""The most axes whose placements are all looked at without a bound: there are few."""

MOST_STEPS = 20_000
"""The most steps that one search looks at on a mesh of many axes; then it keeps what is known."""

MOST_UNEVEN = 4_000
"""The same where blocks differ in size: what each step sends is counted block by block."""


def has_many_axes(mesh: Mesh) -> bool:
    """Whether a mesh has more axes than whose placements can all be looked at."""
    return sum(size > 1 for _, size in mesh.axes) > MOST_TOGETHER


def _bounded(search: _Search) -> Route | None:
    """The cheapest route, by a search that passes over what a known route and a bound rule out.

    The first search is led by the bound and finds the cost; the second takes, of the routes of that
    cost, the one that a search without a bound takes.
    """
    steps = min(_known(search), key=search.cost_of, default=None)
    search.most = math.inf if steps is None else search.cost_of(steps)
    limit = MOST_UNEVEN if search.space.uneven else MOST_STEPS if search.space.left_out else None
    cut = not search.run(guided=True, most=limit)
    if search.came and search.is_found:
        steps, search.most = search.steps(), search.best[search.goal]
    again = _Search(search.space, *search.about, most=search.most)
    if not cut and again.run(most=limit) and again.is_found:
        return again.route(search.is_open)
    if steps is None:
        if cut:
            search.run(most=None)
        return search.route()
    result = Route.of(_merged_slices(list(steps)), search.type, search.space.mesh)
    return replace(result, is_cut=cut or search.is_open)


def _known(search: _Search) -> Iterator[tuple[c.Step, ...]]:
    """Routes that need no search, and the one on axes that go together as one."""
    space, mesh = search.space, search.space.mesh
    candidates = [known.plain(search.source, search.target, mesh)]
    candidates += [known.turned(search.source, search.target, mesh)]
    groups = known.joined(search.source, search.target, space.axes)
    if len(groups) < len(space.axes) and not mesh.given and not mesh.moments:
        fewer = known.joined_mesh(groups, mesh)
        ends = (known.on_joined(p, groups, fewer) for p in (search.source, search.target))
        way = route(search.type, *ends, fewer, replace(search.price, clock=None))
        steps = () if way is None else tuple(known.apart(way.steps, groups, mesh))
        turned = any(s.kind == "permute" and s.is_uneven(search.type, mesh) for s in steps)
        candidates += [None if way is None or turned else steps]
    return (steps for steps in candidates if steps is not None)


class _Search:
    """One search for the cheapest route: `best` costs by number of placement, `came` from where."""

    def __init__(
        self,
        space: _Space,
        type_: TensorType,
        source: Placement,
        target: Placement,
        price: Price,
        most: float = math.inf,
    ) -> None:
        self.space, self.type, self.price, self.most = space, type_, price, most
        self.source, self.target = source, target
        self.about = type_, source, target, price
        self.start, self.goal = space.number(source), space.number(target)
        self.best: dict[int, int] = {self.start: 0}
        self.came: dict[int, _ReshardEdge] = {}
        self.least: dict[int, int] = {}
        self.devices = space.mesh.size(*space.axes)

    @property
    def is_found(self) -> bool:
        """Whether a route was found."""
        return self.goal in self.came

    @property
    def is_open(self) -> bool:
        """Whether steps were left out on the way, and the bound does not rule out a cheaper one."""
        return self.space.left_out and self.most > self._least(self.start)

    def run(self, *, guided: bool = False, most: int | None = MOST_STEPS) -> bool:
        """Search; whether it came to an end within `most` steps."""
        self.best, self.came = {self.start: 0}, {}
        order, queue, looked = itertools.count(), [(0, 0, 0, self.start)], 0
        bounded = self.most < math.inf or guided
        while queue:
            _, cost, _, here = heapq.heappop(queue)
            if here == self.goal:
                return True
            if cost > self.best[here]:
                continue
            local = self.type.bytes // self.space.parts[here]
            edges = self.space.edges(here)
            looked += len(edges)
            if bounded and most is not None and looked > most:
                return False
            for edge in edges:
                there = cost + self._taken(edge, local)
                if there >= self.best.get(edge.after, there + 1):
                    continue
                ahead = self._least(edge.after) if bounded else 0
                if there + ahead > self.most:
                    continue
                self.best[edge.after] = there
                self.came[edge.after] = edge
                key = there + ahead if guided else there
                heapq.heappush(queue, (key, there, next(order), edge.after))
        return True

    def _taken(self, edge: _ReshardEdge, local: int) -> int:
        """The cost of a step from a block of `local` bytes."""
        price = self.price
        if price.clock is not None:
            taken = nanoseconds(price.clock.step(edge.step, self.type))
            return taken * BYTE + (COLLECTIVE if edge.sends else 0) + STEP
        if edge.sends is None:
            return edge.kernels * price.kernel * BYTE + STEP
        uneven = self.space.uneven
        sent = edge.step.wire(self.type, self.space.mesh) if uneven else edge.sends(local)
        return (sent + price.message) * BYTE + COLLECTIVE + STEP

    def cost_of(self, steps: tuple[c.Step, ...]) -> int:
        """The cost of a route that is known."""
        mesh, cost = self.space.mesh, 0
        for step in steps:
            local = self.type.bytes // known.parts(step.before, mesh)
            cost += self._taken(_ReshardEdge(0, step.sends(mesh), step.kernels, step), local)
        return cost

    def _least(self, number: int) -> int:
        """The cost of the rest of a route, at least."""
        if number not in self.least:
            self.least[number] = self._bound(number)
        return self.least[number]

    def _bound(self, number: int) -> int:
        if number == self.goal:
            return 0
        if self.price.clock is not None:
            return STEP
        space = self.space
        about = (space.met[number], self.target, space.mesh, self.devices, space.uneven)
        sent = known.least_bytes(self.type, *about)
        return (sent + self.price.message) * BYTE + COLLECTIVE + STEP if sent else STEP

    def steps(self) -> tuple[c.Step, ...]:
        """The steps of the route found."""
        backwards, here = [], self.goal
        while here != self.start:
            backwards.append(self.came[here].step)
            here = self.space.numbers[self.came[here].step.before]
        return tuple(backwards[::-1])

    def route(self, is_cut: bool = False) -> Route | None:
        """The route found, if there is one."""
        if not self.is_found:
            return None
        steps = _merged_slices(list(self.steps()))
        return replace(Route.of(steps, self.type, self.space.mesh), is_cut=is_cut)


def _to_windows(
    type_: TensorType, source: Placement, target: Placement, mesh: Mesh, price: Price
) -> Route | None:
    """The cheapest route to windows: of the blocks, or, cut locally, of a dim that is whole.

    Of a window those can be cut that it covers.
    """
    if source.windows:
        step = c.cut(mesh, source, target)
        return None if step is None else Route((step,), 0, 0)
    routes = []
    for count in range(len(target.windows) + 1):
        for unsplit in itertools.combinations(target.windows, count):
            base = target.plain
            for window in unsplit:
                base = base.without_dim(window.dim)
            way = route(type_, source, base, mesh, price)
            if way is not None:
                routes.append(_through(type_, way, base, target, mesh))
    return min(
        routes, key=lambda r: (price.of(r, type_), r.collectives, len(r.steps)), default=None
    )


def _through(
    type_: TensorType, way: Route, base: Placement, target: Placement, mesh: Mesh
) -> Route:
    """A route to blocks, and the windows of `target` from there."""
    steps, here = list(way.steps), base
    for window in target.windows:
        steps.append(c.halo(mesh, here, target.axes_of(window.dim), window))
        here = steps[-1].after
    return Route.of(tuple(steps), type_, mesh)


STEP, COLLECTIVE, BYTE = 1, 1 << 10, 1 << 20
"""Weights of a cost as one number: bytes (or nanoseconds) first, then collectives, then steps."""


def _merged_slices(steps: list[c.Step]) -> tuple[c.Step, ...]:
    """Slices of one dim that follow each other as one slice over all their axes, outer first."""
    merged: list[c.Step] = []
    for step in steps:
        last = merged[-1] if merged else None
        if last is not None and last.kind == step.kind == "slice" and last.dim == step.dim:
            merged[-1] = replace(last, axes=last.axes + step.axes, after=step.after)
        else:
            merged.append(step)
    return tuple(merged)


def _space(
    type_: TensorType, source: Placement, target: Placement, mesh: Mesh, scatter: bool
) -> _Space:
    """The space between two placements, shared by all tensors whose dims divide alike.

    Its dims are those split at one end and, where partial values come or go, as many others as can
    take their axes: to reduce in parts. Its axes are those that are not `B` at both ends.
    """
    dims = dict.fromkeys(d for d, _ in (*source.splits, *target.splits))
    used = {a for p in (source, target) for _, axes in p.splits for a in axes}
    axes = mesh.sorted(used | set(source.partial) | set(target.partial))
    # A product of axes divides a size where it divides what the size shares with all devices.
    cut = dict(mesh.cut)
    parts = {d.name: d.size // cut.get(d.name, 1) for d in type_.dims}
    shared = {dim: math.gcd(size, mesh.devices) for dim, size in parts.items()}
    remaining = mesh.size(*set(source.partial) ^ set(target.partial))
    for dim in sorted(shared.keys() - dims.keys(), key=lambda d: (-shared[d], type_.index(d))):
        if remaining > 1:
            dims[dim] = None
            remaining //= math.gcd(remaining, shared[dim])
    # Of a dim that does not divide, 0: any number of parts will do.
    ends = (source, target)
    uneven = {d for p in ends for d, _ in p.splits if p.is_uneven(d, type_.size(d), mesh)}
    unequal = {d for p in ends for d, axes in p.splits if parts[d] % mesh.size(*axes)} - uneven
    shared |= {d: math.gcd(type_.size(d), mesh.devices) for d in unequal}
    uneven |= {dim for dim, *_ in mesh.given}
    ways = tuple((d, 0 if d in uneven else shared[d]) for d in type_.names if d in dims)
    return _shared_space(ways, axes, target.partial, target.op, mesh, scatter)


@functools.lru_cache(maxsize=1 << 14)
def _shared_space(
    ways: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    partial: tuple[str, ...],
    op: ReduceOp | None,
    mesh: Mesh,
    scatter: bool,
) -> _Space:
    return _Space(dict(ways), axes, frozenset(partial), op, mesh, scatter)


class _ReshardEdge(NamedTuple):
    """A step, the placement it leads to, bytes sent as a function of local bytes, its kernels."""

    after: int
    sends: Callable[[int], int] | None
    kernels: int
    step: c.Step


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The steps worth taking between placements, on the way to one partial over `partial`.

    `ways` has for each dim that may be split a number whose divisors are the numbers of parts it
    divides into, 0 for one that need not divide. Placements are numbered in order of discovery:
    `parts` are the numbers of blocks of each, `known` the steps from it once computed.
    """

    ways: dict[str, int]
    axes: tuple[str, ...]
    partial: frozenset[str]
    op: ReduceOp | None
    mesh: Mesh
    scatter: bool
    numbers: dict[Placement, int] = field(default_factory=dict)
    met: list[Placement] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    known: dict[int, tuple[_ReshardEdge, ...]] = field(default_factory=dict)

    @property
    def uneven(self) -> bool:
        """Whether blocks may differ in size: then bytes depend on the tensor."""
        return 0 in self.ways.values()

    @property
    def left_out(self) -> bool:
        """Whether steps may have been left out."""
        return len(self.axes) > MOST_TOGETHER

    def number(self, p: Placement) -> int:
        """The number of a placement."""
        if p not in self.numbers:
            self.numbers[p] = len(self.met)
            self.met.append(p)
            self.parts.append(self.mesh.size(*(a for _, axes in p.splits for a in axes)))
        return self.numbers[p]

    def edges(self, number: int) -> tuple[_ReshardEdge, ...]:
        """Every step from a placement."""
        if number not in self.known:
            p = self.met[number]
            steps = (*self._local_steps(p), *self._exchanges(p), *self._reductions(p))
            edges = (
                _ReshardEdge(self.number(s.after), s.sends(self.mesh), s.kernels, s) for s in steps
            )
            self.known[number] = tuple(edges)
        return self.known[number]

    def _exchanges(self, p: Placement) -> Iterator[c.Step]:
        for dim, axes in self._splits(p):
            for suffix in self._suffixes(axes):
                yield c.all_gather(self.mesh, p, dim, suffix)
                for other in self.ways:
                    if other != dim and self._divides(p, other, suffix):
                        yield c.all_to_all(self.mesh, p, dim, other, suffix)
        yield from self._permutes(p)

    def _reductions(self, p: Placement) -> Iterator[c.Step]:
        for axes in _subsets(p.partial):
            if self.partial.issuperset(axes) and p.op == self.op:
                continue
            yield c.all_reduce(self.mesh, p, axes)
            for dim in self.ways if self.scatter else ():
                if self._divides(p, dim, axes):
                    yield c.reduce_scatter(self.mesh, p, dim, axes)

    def _permutes(self, p: Placement) -> Iterator[c.Step]:
        """Another order of the axes of one dim; two axes of one size in each other's place."""
        splits = dict(p.splits)
        for dim, axes in self._splits(p):
            for order in _orders(axes):
                if order != axes and self._same_blocks(dim, axes, order):
                    yield c.permute(self.mesh, p, splits | {dim: order})
        for a, b in itertools.combinations(self.axes, 2):
            split = any(a in axes or b in axes for axes in splits.values())
            free = a not in p.partial and b not in p.partial
            together = any(a in axes and b in axes for axes in splits.values())
            if split and free and not together and self.mesh.size(a) == self.mesh.size(b):
                swap = {a: b, b: a}
                turned = {d: tuple(swap.get(x, x) for x in axes) for d, axes in p.splits}
                if all(turned[dim] == p.axes_of(dim) for dim in splits if self._is_given(dim)):
                    yield c.permute(self.mesh, p, turned)

    def _same_blocks(self, dim: str, old: tuple[str, ...], new: tuple[str, ...]) -> bool:
        """Whether another order of axes leaves the blocks of a dim as they are."""
        ways = [[self.mesh.size(a) for a in axes] for axes in (old, new)]
        return self.ways[dim] != 0 or (ways[0] == ways[1] and not self._is_given(dim))

    def _is_given(self, dim: str) -> bool:
        """Whether blocks of a dim have given sizes on some axes, and others on others."""
        return any(dim == known for known, *_ in self.mesh.given)

    def _local_steps(self, p: Placement) -> Iterator[c.Step]:
        for axis in self.axes:
            if axis in p.partial:
                continue
            inner = next((d for d, axes in p.splits if axes[-1] == axis), None)
            is_free = not any(axis in axes for _, axes in p.splits)
            if is_free:
                for dim in self.ways:
                    if self._divides(p, dim, (axis,)):
                        yield c.slice_(self.mesh, p, dim, (axis,))
            if axis in self.partial and p.op in (None, self.op):
                yield from self._fills(p, axis, inner, is_free)

    def _fills(self, p: Placement, axis: str, inner: str | None, whole: bool) -> Iterator[c.Step]:
        assert self.op is not None
        if whole and self.op != "prod":
            yield c.zero_fill(self.mesh, p, axis, self.op, None)
        elif inner is not None and self.op == "sum":
            yield c.zero_fill(self.mesh, p, axis, self.op, inner)

    def _splits(self, p: Placement) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The split dims in the order of the tensor: of two plans alike, no name decides."""
        return ((d, axes) for d in self.ways if (axes := p.axes_of(d)))

    def _suffixes(self, axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Innermost axes of a split, as far as they follow each other in mesh order."""
        for start in range(len(axes) - 1, -1, -1):
            suffix = axes[start:]
            if suffix != self.mesh.sorted(set(suffix)):
                return
            yield suffix

    def _divides(self, p: Placement, dim: str, axes: tuple[str, ...]) -> bool:
        return self.ways[dim] % self.mesh.size(*p.axes_of(dim), *axes) == 0


MOST_TOGETHER = 5
"""The most axes of which all orders and all subsets are tried: of n there are n! and 2^n."""


def _orders(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The orders of axes; of many, those in which two have changed places."""
    if len(axes) <= MOST_TOGETHER:
        yield from itertools.permutations(axes)
        return
    for i, j in itertools.combinations(range(len(axes)), 2):
        order = list(axes)
        order[i], order[j] = order[j], order[i]
        yield tuple(order)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The subsets of axes, the largest first; of many, those that follow each other."""
    for size in range(len(axes), 0, -1):
        if len(axes) <= MOST_TOGETHER:
            yield from itertools.combinations(axes, size)
        else:
            yield from (axes[i : i + size] for i in range(len(axes) - size + 1))
