"""Bytes that each device sends in a step: every collective as often as it does it.

Devices differ where blocks of a tensor do, in a permute or a halo, which leave some of them out,
and by their stages. What one sends follows from its own block; in a pass, from that of the stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property

from meshdsl.device.alike import alike_devices
from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    is_on,
    walk,
)
from meshdsl.device.stored_blocks import home_of, of_other_stages
from meshdsl.records import dataclass

Coordinates = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """A collective of one device in a step: how often it is done, and all the bytes it sends."""

    count: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sender:
    """The collectives and local moves of a device, in order; so many `alike` do the same.

    `along` are the coordinates of these along the stages of a pipeline.
    """

    alike: int
    along: tuple[int, ...]
    done: Mapping[Collective, Done]

    def does(self, node: Collective) -> bool:
        """Whether it takes part in a collective."""
        return self.done.get(node, Done()).count > 0

    @property
    def bytes(self) -> int:
        """All that it sends."""
        return sum(done.bytes for done in self.done.values())


def busiest(program: DeviceProgram) -> Sender:
    """The device that sends most."""
    return _Senders(program).busiest()


def senders(program: DeviceProgram) -> tuple[Sender, ...]:
    """All devices, one of those that do the same."""
    return _Senders(program).found()


class _Senders:
    def __init__(self, program: DeviceProgram) -> None:
        self.program, self.mesh, self.pipe = program, program.mesh, program.placed.pipe
        self.others = of_other_stages(program)
        cut = self.pipe.cut if self.pipe else None
        # The micro-batches of unequal sizes, of which each sends its own number of bytes.
        self.micro, self.count = (cut.axis, cut.micro) if cut and cut.sizes else ("", 1)
        self.order = [n for n, _ in walk(program.body) if not isinstance(n, Compute)]
        self.unlike = {n: self._unlike(n) for n in self.order}
        self.axes = self.mesh.sorted(frozenset(itertools.chain(*self.unlike.values())))

    def found(self) -> tuple[Sender, ...]:
        groups, axes = self._groups
        return tuple(self._sender(group, at) for group in groups for at in self.mesh.places(axes))

    def busiest(self) -> Sender:
        """The first of those that send most; the others' bytes are added up all at once."""
        groups, axes = self._groups
        if not axes:
            return max((self._sender(group, {}) for group in groups), key=lambda s: s.bytes)
        every = [self._bytes(group[0], axes) for group in groups]
        group, sent = max(zip(groups, every, strict=True), key=lambda pair: max(pair[1]))
        number = sent.index(max(sent))
        return self._sender(group, next(itertools.islice(self.mesh.places(axes), number, None)))

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The devices along the stages that do the same, and the other axes where some differ."""
        groups, staged = alike_devices(self.program), self.pipe.axis if self.pipe else ""
        if staged in self.axes:
            groups = tuple((device,) for group in groups for device in group)
        return groups, tuple(axis for axis in self.axes if axis != staged)

    def _sender(self, group: tuple[int, ...], at: Coordinates) -> Sender:
        groups, axes = self._groups
        along = self.mesh.size(*axes) * sum(map(len, groups))
        return Sender(self.mesh.devices // along * len(group), group, self._sent(group[0], at))

    def _bytes(self, device: int, axes: tuple[str, ...]) -> list[int]:
        """All that each device along `axes` sends, row-major."""
        sent, alike = [0] * self.mesh.size(*axes), 0
        for node, count, home in self._done(device):
            if isinstance(node, Move) and self.unlike[node]:
                each = node.step.sent_along(node.source.type, self.mesh, axes, home)
                sent = [before + count * more for before, more in zip(sent, each, strict=True)]
            else:
                alike += count * node.wire
        return [bytes_ + alike for bytes_ in sent]

    def _unlike(self, node: Collective) -> tuple[str, ...]:
        """The axes along which devices send other numbers of bytes; a bucket has equal blocks."""
        if isinstance(node, Bucket):
            return ()
        of = node.source.type, self.mesh
        unlike = node.step.unlike(*of)
        if self.micro and self.micro in node.step.unlike_moments(*of):
            return (*unlike, self.micro)
        return unlike

    def _sent(self, device: int, at: Coordinates) -> Mapping[Collective, Done]:
        """What the device with these coordinates does, which is `device` along the stages."""
        sent: dict[Collective, Done] = {}
        for node, count, home in self._done(device):
            each = node.wire
            if isinstance(node, Move) and self.unlike[node]:
                on = {**at, **home}
                (each,) = node.step.sent_along(node.source.type, self.mesh, (), on)
            before = sent.get(node, Done())
            sent[node] = Done(before.count + count, before.bytes + count * each)
        return {node: sent[node] for node in self.order if node in sent}

    def _done(self, device: int) -> Iterator[tuple[Collective, int, Coordinates]]:
        """The collectives of a device along the stages, how often each, and whose block it is."""
        for node in self.program.body:
            if not isinstance(node, Pipeline) or self.pipe is None:
                for one, count in _collectives(node) if is_on(node, device) else ():
                    yield one, count, self._outside(one, device)
                continue
            for number, stage in enumerate(node.known.held[device]):
                home = stage if self.pipe.others else device
                at = dict(zip(self.pipe.axes(self.mesh), (home, number), strict=False))
                for one, count in _collectives(node.on(stage, device=device)):
                    if self.micro not in self.unlike[one]:
                        yield one, count, at
                        continue
                    of = node.known.device_of
                    taken = [m for m in range(self.count) if of[m, stage] == device]
                    for micro in taken:
                        yield one, count // len(taken), {**at, self.micro: micro}

    def _outside(self, node: Collective, device: int) -> Coordinates:
        """Whose block a collective is on outside of passes."""
        if self.pipe is None:
            return {}
        source = node.moves[0].source
        return {self.pipe.axis: home_of(source, device, self.program, self.others)}


def _collectives(node: Node) -> Iterator[tuple[Collective, int]]:
    return ((one, count) for one, count in walk((node,)) if not isinstance(one, Compute))
