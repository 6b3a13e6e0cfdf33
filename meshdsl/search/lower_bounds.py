"""What a walk sends at least, while it goes on: so that it ends where a layout cannot be better.

In bytes that is a sum. In time an axis sends one collective at a time, so that a step takes at
least as long as an axis is busy. And it takes as long as its operators and, of each collective over
one axis, what operators cannot hide: a collective is under way between the operator that makes its
source and the first that reads its result, so no more is hidden than is computed between them
(`device/overlap.py`). Gathers of parameters, which are issued earlier, count nothing, nor do
operators that the device program may not have. Of collectives so small that one bucket may take
them (`device/buckets.py`) one counts: of those after what reads its result, the next one.

Rules for storage change where parameters are loaded from, the gradients of these and the update.
What other operators compute, and wait for, is `kept` whatever such rules there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import field
from typing import NamedTuple

from meshdsl.cluster.timing import Timing
from meshdsl.device.buckets import KINDS, SMALL
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import OpDef, lookup
from meshdsl.placed.collectives import Step
from meshdsl.placed.ir import Apply, Node, PlacedLoop, PlacedTensor, Reshard
from meshdsl.placed.placements import Mesh
from meshdsl.placed.reshard import Route, with_sent
from meshdsl.records import dataclass

ROUNDING = 1e-6
"""The part by which a simulated time may lie below the sum of its events: each is rounded."""

STORED = ("param", "state", "input")
"""The roles of tensors that are there before a step, also where they are read."""

LEFT_OUT = ("constant", "cast", "zeros", "identity")
"""Operators that in-place sums (`device/sums.py`) and loads from storage may be without."""

Busy = tuple[tuple[str, float], ...]
Kind = tuple[str, tuple[str, ...]]
Timed = tuple[Kind, Busy, bool]
"""A collective: its kind and axes, the seconds it occupies each axis, whether it may be one of a
bucket."""


class Beyond(Exception):
    """A walk sends more than a limit: by then so many `bytes`.

    By then it has taken so many seconds that rules for storage cannot change: `kept`.
    """

    def __init__(self, bytes: int, kept: float) -> None:
        super().__init__()
        self.bytes, self.kept = bytes, kept


def divided(taken: float, timing: Timing, starts: bool = True) -> float:
    """The least seconds of what takes so long for an update where rules for storage divide it.

    `starts`: a kernel of its own has to be started for it.
    """
    launch = timing.cluster.device.launch if starts else 0.0
    return taken - (1 - 1 / timing.mesh.devices) * max(0.0, taken - launch)


def is_started(opdef: OpDef) -> bool:
    """Whether an operator has a kernel of its own; updates and norms are done several at once."""
    return not (opdef.each or opdef.adds_up)


def at_least(taken: float, opdef: OpDef, types: Iterable[TensorType], timing: Timing) -> float:
    """The least of the seconds that an operator takes alone; its operands and results have `types`.

    Several updates or norms are one call on lists, and numbers made of numbers are of the host.
    """
    if not any(t.dims for t in types):
        return 0.0
    return taken if is_started(opdef) else max(0.0, taken - timing.cluster.device.launch)


class _Produced(NamedTuple):
    """When in its block a tensor is made: after so many seconds, and so many nodes."""

    clock: float = 0.0
    nodes: int = 0


class _Waiting(NamedTuple):
    """Collectives that are done so many `times`, and when their source is made."""

    since: _Produced
    sent: tuple[Timed, ...]
    times: int


@dataclass(slots=True)
class _SentBlock:
    """A block so far: seconds computed, when tensors were made, and what is to be waited for.

    `sums` are additions, with their node and how often they are done: a loop does those in place
    that it carries. `full` is the number of nodes behind which a collective that may be in a bucket
    is in another than those that counted.
    """

    clock: float = 0.0
    passed: int = 0
    made: dict[PlacedTensor, _Produced] = field(default_factory=dict)
    waiting: dict[PlacedTensor, _Waiting] = field(default_factory=dict)
    full: dict[Kind, int] = field(default_factory=dict)
    sums: list[tuple[Apply, float, int]] = field(default_factory=list)


@dataclass(slots=True)
class _PartTime:
    """Seconds of operators, and of each axis those that these wait for it."""

    computed: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.computed + self.waited

    @property
    def waited(self) -> float:
        return max(self.exposed.values(), default=0.0)


@dataclass(slots=True)
class Sent:
    """What a walk sends: bytes, and with a cluster the seconds that each axis is busy, and exposed.

    Of `bytes`, of the device that sends most, there are no fewer, as buckets round up less often,
    and of `wire` no more. `alike` are those that all devices send, `apart` those that each does.

    `computing` is what operators take at least, `whole` what those so far do, `kept` the part that
    no rules for storage change. Beyond `most` bytes, or seconds where a cluster is named, it ends
    the walk; by seconds once `kept` is beyond `most_kept`, too. Of a walk that it did not end it
    has the `body`.
    """

    mesh: Mesh
    timing: Timing | None
    computing: float = 0.0
    most: float = math.inf
    most_kept: float = -math.inf
    alike: int = 0
    apart: tuple[int, ...] = ()
    wire: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    whole: _PartTime = field(default_factory=_PartTime)
    kept: _PartTime = field(default_factory=_PartTime)
    blocks: list[_SentBlock] = field(default_factory=list)
    body: tuple[Node, ...] | None = None

    @property
    def bytes(self) -> int:
        """What is sent at least."""
        return self.alike + max(self.apart, default=0)

    @property
    def seconds(self) -> float:
        """What a step takes at least."""
        computed = max(self.computing, self.whole.computed)
        return max(computed + self.whole.waited, max(self.busy.values(), default=0.0))

    def passes(self, node: Node, depth: int, times: int) -> None:
        """A node at the end of a block; of a loop, after those of its body."""
        if isinstance(node, Reshard):
            self._adds(node, times)
        if self.timing is not None:
            self._timed(node, depth, times, self.timing)
        elif self.bytes > self.most:
            raise Beyond(self.bytes, self.kept.seconds)

    def _adds(self, node: Reshard, times: int) -> None:
        route = node.route
        self.wire += route.wire_bytes * times
        # Buckets round up less often.
        if not route.unlike:
            self.alike += max(0, route.wire_bytes - route.collectives) * times
            return
        sent = (self.apart, route, node.sent_type, self.mesh)
        self.apart = with_sent(*sent, times, less=route.collectives)

    def replay(self, nodes: Iterable[Node], depth: int = 0, times: int = 1) -> None:
        """Nodes of a block, with the bodies of loops."""
        for node in nodes:
            if node.body:
                self.replay(node.body, depth + 1, times * node.repeats)
            self.passes(node, depth, times)

    def ends(self, body: tuple[Node, ...]) -> None:
        """Keep the body of a walk that was seen to its end."""
        self.body = body

    # --- time --------------------------------------------------------------------------------

    def _timed(self, node: Node, depth: int, times: int, timing: Timing) -> None:
        while len(self.blocks) <= depth:
            self.blocks.append(_SentBlock())
        block = self.blocks[depth]
        if isinstance(node, PlacedLoop):
            inner = self.blocks.pop() if len(self.blocks) > depth + 1 else _SentBlock()
            self._read(node.reads)
            block.clock += inner.clock * node.dim.size
            carried = {carry.next for carry in node.carries}
            for add, seconds, adds in inner.sums:
                if carried.isdisjoint(add.outs):
                    self._computes(add, seconds, adds, timing)
            self._check()
        elif isinstance(node, Apply):
            self._read(node.ins, kept=not _is_divided(node))
            seconds = _seconds(timing, node)
            block.clock += seconds
            if depth and node.name == "add":
                block.sums.append((node, seconds, times))
            elif node.name not in LEFT_OUT:
                self._computes(node, seconds, times, timing)
                self._check()
        else:
            self._read((node.source,))
            self._sends(node, block, times, timing)
        block.passed += 1
        block.made.update(dict.fromkeys(node.makes, _Produced(block.clock, block.passed)))

    def _computes(self, node: Apply, seconds: float, times: int, timing: Timing) -> None:
        record = lookup(node.name)
        types = (t.value.type for t in (*node.ins, *node.outs))
        least = at_least(seconds, record, types, timing)
        self.whole.computed += least * times
        if _is_divided(node):
            least = divided(least, timing, is_started(record))
        self.kept.computed += least * times

    def _sends(self, node: Reshard, block: _SentBlock, times: int, timing: Timing) -> None:
        source = node.source
        sent = _sent(timing, node.route, source.type)
        for _, busy, bucketed in sent:
            for axis, seconds in () if bucketed else busy:
                self.busy[axis] = self.busy.get(axis, 0.0) + seconds * times
        if sent and source.value.role not in STORED:
            block.waiting[node.target] = _Waiting(block.made.get(source, _Produced()), sent, times)
        if sent:
            self._check()

    def _check(self) -> None:
        below = 1 - ROUNDING
        if self.seconds * below > self.most and self.kept.seconds * below > self.most_kept:
            raise Beyond(self.bytes, self.kept.seconds)

    def _read(self, tensors: Iterable[PlacedTensor], kept: bool = False) -> None:
        """Tensors are waited for, those of blocks around this one before the loop."""
        parts = (self.whole, self.kept) if kept else (self.whole,)
        for tensor in tensors:
            for block in self.blocks:
                if tensor in block.waiting:
                    self._waits(block, block.waiting.pop(tensor), parts)

    def _waits(self, block: _SentBlock, waiting: _Waiting, parts: tuple[_PartTime, ...]) -> None:
        """Collectives are waited for, less what operators may have hidden since."""
        hidden = block.clock - waiting.since.clock
        for kind, busy, bucketed in waiting.sent:
            if bucketed:
                if waiting.since.nodes < block.full.get(kind, 0):
                    continue
                block.full[kind] = block.passed + 1
            for axis, seconds in busy:
                left = max(0.0, seconds - hidden) * waiting.times
                for part in parts:
                    part.exposed[axis] = part.exposed.get(axis, 0.0) + left


def _is_divided(node: Apply) -> bool:
    """Whether rules for storage may divide an operator: for the update, or making a gradient."""
    return node.phase == "update" or any(t.value.role == "grad" for t in node.outs)


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
    seconds_of = _known(timing)
    key = name, attrs, ins, outs
    if key not in seconds_of:
        local = node.local(timing.mesh)
        seconds_of[key] = timing.operator(lookup(name), local, node.flops(timing.mesh)).seconds
    return seconds_of[key]


@functools.lru_cache(maxsize=64)
def _known(timing: Timing) -> dict[object, float]:
    return {}


@functools.lru_cache(maxsize=1 << 16)
def _sent(timing: Timing, route: Route, type_: TensorType) -> tuple[Timed, ...]:
    """The collectives of a route, each as if alone."""
    collectives = []
    for step in route.steps:
        if step.moves:
            seconds = timing.step(step, type_).seconds
            busy = tuple((axis, seconds) for axis in step.axes)
            collectives.append(
                ((step.kind, step.axes), busy, _is_bucketed(step, type_, timing.mesh))
            )
    return tuple(collectives)


def _is_bucketed(step: Step, type_: TensorType, mesh: Mesh) -> bool:
    """Whether a bucket may take a collective, which is so small that it takes less in one."""
    small = all(p.local(type_, mesh).bytes < SMALL for p in (step.before, step.after))
    return small and step.kind in KINDS and not step.is_uneven(type_, mesh)
