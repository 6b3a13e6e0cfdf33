"""What a walk sends at least, while it goes on: so that it ends where a layout cannot be better.

In bytes that is a sum. In time an axis sends one collective at a time, so that a step takes at
least as long as an axis is busy. And it takes as long as its operators and, of each collective over
one axis, what operators cannot hide: a collective is under way between the operator that makes its
source and the first that reads its result, so no more is hidden than is computed between them
(`device/overlap.py`). Gathers of parameters, which are issued earlier, and collectives so small
that buckets may take them count nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshdsl.cluster.timing import Timing
from meshdsl.device.buckets import SMALL
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.placed.collectives import Step
from meshdsl.placed.ir import Apply, Loop, Node, Reshard, Tensor
from meshdsl.placed.reshard import Route
from meshdsl.placed.sbp import Mesh

ROUNDING = 1e-6
"""The part by which a simulated time may lie below the sum of its events: each is rounded."""

STORED = ("param", "state", "input")
"""The roles of tensors that are there before a step, also where they are read."""

Busy = tuple[tuple[str, float], ...]


class Beyond(Exception):
    """A walk sends more than a limit: by then so many `bytes`."""

    def __init__(self, bytes: int) -> None:
        super().__init__()
        self.bytes = bytes


@dataclass(slots=True)
class _Block:
    """A block so far: seconds computed, when tensors were made, and what is to be waited for."""

    clock: float = 0.0
    made: dict[Tensor, float] = field(default_factory=dict)
    waiting: dict[Tensor, tuple[float, Busy, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Sent:
    """What a walk sends: bytes, and with a cluster the seconds that each axis is busy, and exposed.

    `computing` is what operators take at least, `products` what those with products do. Beyond
    `most` bytes, or seconds where a cluster is named, it ends the walk.
    """

    mesh: Mesh
    timing: Timing | None
    computing: float = 0.0
    most: float = math.inf
    bytes: int = 0
    products: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What a step takes at least."""
        computed = max(self.computing, self.products)
        exposed = max(self.exposed.values(), default=0.0)
        return max(computed + exposed, max(self.busy.values(), default=0.0))

    def passes(self, node: Node, depth: int, times: int) -> None:
        """A node at the end of a block; of a loop, after those of its body."""
        if isinstance(node, Reshard):
            # Buckets round up less often.
            self.bytes += max(0, node.route.wire_bytes - node.route.collectives) * times
        if self.timing is not None:
            self._timed(node, depth, times, self.timing)
        elif self.bytes > self.most:
            raise Beyond(self.bytes)

    def replay(self, nodes: Iterable[Node], depth: int = 0, times: int = 1) -> None:
        """Nodes of a block, with the bodies of loops."""
        for node in nodes:
            if isinstance(node, Loop):
                self.replay(node.body, depth + 1, times * node.dim.size)
            self.passes(node, depth, times)

    # --- time --------------------------------------------------------------------------------

    def _timed(self, node: Node, depth: int, times: int, timing: Timing) -> None:
        while len(self.blocks) <= depth:
            self.blocks.append(_Block())
        block = self.blocks[depth]
        if isinstance(node, Loop):
            inner = self.blocks.pop() if len(self.blocks) > depth + 1 else _Block()
            self._read(node.reads)
            block.clock += inner.clock * node.dim.size
        elif isinstance(node, Apply):
            self._read(node.ins)
            seconds = _seconds(timing, node)
            block.clock += seconds
            # What in-place sums leave out are casts and additions.
            if lookup(node.name).flops is not None:
                self.products += seconds * times
                self._check()
        else:
            self._read((node.source,))
            self._sends(node, block, times, timing)
        block.made.update(dict.fromkeys(node.makes, block.clock))

    def _sends(self, node: Reshard, block: _Block, times: int, timing: Timing) -> None:
        source = node.source
        busy = _busy(timing, node.route, source.type)
        for axis, seconds in busy:
            self.busy[axis] = self.busy.get(axis, 0.0) + seconds * times
        if busy and source.value.role not in STORED:
            block.waiting[node.target] = block.made.get(source, 0.0), busy, times
        if busy:
            self._check()

    def _check(self) -> None:
        if self.seconds * (1 - ROUNDING) > self.most:
            raise Beyond(self.bytes)

    def _read(self, tensors: Iterable[Tensor]) -> None:
        """Tensors are waited for, those of blocks around this one before the loop."""
        for tensor in tensors:
            for block in self.blocks:
                if tensor in block.waiting:
                    since, busy, times = block.waiting.pop(tensor)
                    hidden = block.clock - since
                    for axis, seconds in busy:
                        left = max(0.0, seconds - hidden) * times
                        self.exposed[axis] = self.exposed.get(axis, 0.0) + left


def _seconds(timing: Timing, node: Apply) -> float:
    """Seconds of an operator on its local tensors."""
    if node.name == "constant":
        return 0.0
    ins, outs = (tuple([t.local(timing.mesh) for t in ts]) for ts in (node.ins, node.outs))
    return _operator(timing, node.name, node.attrs, ins, outs, node)


def _operator(
    timing: Timing,
    name: str,
    attrs: object,
    ins: tuple[TensorType, ...],
    outs: tuple[TensorType, ...],
    node: Apply,
) -> float:
    known = _known(timing)
    key = name, attrs, ins, outs
    if key not in known:
        local = node.local(timing.mesh)
        known[key] = timing.operator(lookup(name), local, node.flops(timing.mesh)).seconds
    return known[key]


@functools.lru_cache(maxsize=64)
def _known(timing: Timing) -> dict[object, float]:
    return {}


@functools.lru_cache(maxsize=1 << 16)
def _busy(timing: Timing, route: Route, type_: TensorType) -> Busy:
    """The seconds that a route occupies each axis, less collectives that buckets may take."""
    found: dict[str, float] = {}
    for step in route.steps:
        if step.moves and _is_alone(step, type_, timing.mesh):
            for axis in step.axes:
                found[axis] = found.get(axis, 0.0) + timing.step(step, type_).seconds
    return tuple(found.items())


def _is_alone(step: Step, type_: TensorType, mesh: Mesh) -> bool:
    """Whether a collective is too large for a bucket, in which it would take less."""
    return any(p.local(type_, mesh).bytes >= SMALL for p in (step.before, step.after))
