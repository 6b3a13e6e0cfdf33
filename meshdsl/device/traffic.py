"""Bytes that each device sends in a step: every collective as often as it does it.

Devices differ where blocks of a tensor do, in a permute or a halo, which leave some of them out,
and by their stages. What one sends follows from its own block; in a pass, from that of the stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
    return max(senders(program), key=lambda sender: sender.bytes)


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
        """One device of each kind, those along the stages first."""
        return tuple(sender for group in self._groups for sender in self._of_group(group))

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices along the stages that do the same, and whose blocks are alike."""
        groups = alike_devices(self.program)
        if self.pipe is None or self.pipe.axis not in self.axes:
            return groups
        return tuple((device,) for group in groups for device in group)

    def _of_group(self, group: tuple[int, ...]) -> Iterator[Sender]:
        """The devices at some places along the stages, one of those that send the same."""
        axes = tuple(a for a in self.axes if self.pipe is None or a != self.pipe.axis)
        done, places = [*self._done(group[0])], self.mesh.size(*axes)
        each = [
            node.step.sent_along(node.source.type, self.mesh, axes, home)
            for node, _, home in done
            if isinstance(node, Move) and self.unlike[node]
        ]
        alike = self.mesh.devices // (places * sum(map(len, self._groups))) * len(group)
        for sent, times in Counter(zip(*each, strict=True) if each else [()] * places).items():
            yield Sender(alike * times, group, self._sent(done, iter(sent)))

    def _unlike(self, node: Collective) -> tuple[str, ...]:
        """The axes along which devices send other numbers of bytes; a bucket has equal blocks."""
        if isinstance(node, Bucket):
            return ()
        of = node.source.type, self.mesh
        unlike = node.step.unlike(*of)
        if self.micro and self.micro in node.step.unlike_moments(*of):
            return (*unlike, self.micro)
        return unlike

    def _sent(
        self, done: Iterable[tuple[Collective, int, Coordinates]], unlike: Iterator[int]
    ) -> Mapping[Collective, Done]:
        """What a device does; `unlike` has its bytes in each collective in which others differ."""
        sent: dict[Collective, Done] = {}
        for node, count, _ in done:
            is_unlike = isinstance(node, Move) and self.unlike[node]
            each, before = next(unlike) if is_unlike else node.wire, sent.get(node, Done())
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
