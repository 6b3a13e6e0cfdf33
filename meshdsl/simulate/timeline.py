"""The result of a simulation: what each stream of a device does when, and its memory.

Every device runs the same text, so there is one timeline for all of them. Where blocks differ in
size, and in permutes, it is that of the device with the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

from meshdsl.cluster.timing import Timing
from meshdsl.device.alike import alike_devices
from meshdsl.device.costs import flops_in_all
from meshdsl.device.ir import (
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    on_device,
    walk,
)
from meshdsl.device.live_memory import Amounts, MemoryKind
from meshdsl.device.offloaded_updates import OffloadedUpdate, streamed, transfers
from meshdsl.records import dataclass
from meshdsl.schedule.times import TimedSchedule
from meshdsl.simulate.model import flops_by_dtype, model_flops

PER_SECOND = 10**12
"""Times are whole picoseconds: sums are exact, and an iteration repeats to the last digit."""

COMPUTE = "compute"
"""The stream of operators and local steps; the others are the mesh axes and `tier_streams`."""


Standstill = Literal["wait", "idle"]
"""Why nothing is computed: what is waited for is being sent, or other stages are not so far yet."""


def way_back(axis: str) -> str:
    """The stream of messages to the stage before; those to the next one are on the axis."""
    return f"{axis}, back"


def streams_of(program: DeviceProgram) -> tuple[str, ...]:
    """The streams of a device: compute, the mesh axes, of a pipeline's both directions, tiers."""
    pipe = program.placed.pipe
    back = () if pipe is None else (way_back(pipe.axis),)
    return (COMPUTE, *program.mesh.names, *back, *tier_streams(program))


def tier_streams(program: DeviceProgram) -> tuple[str, ...]:
    """The streams between the memory of a device and those beside it: `from host`."""
    used = [name for move, _ in transfers(program) for name in move.step.streams]
    used += [name for update in streamed(program).values() for name in update.streams]
    return tuple(dict.fromkeys(used))


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that occupies `streams` from `start` to `end`, and `trips - 1` times more.

    Of a collective, `run` is itself, on the streams of its axes, `wait` the time for which the
    compute stream stands still for it, and `idle` that before it can begin, since other stages of a
    pipeline are not so far yet. `bound` says what limits it (`timing.Time`).
    """

    node: Compute | Collective
    kind: Literal["run"] | Standstill
    streams: tuple[str, ...]
    start: int
    end: int
    bound: str
    trips: int = 1

    def later(self, ticks: int) -> Event:
        """The same so many ticks later."""
        start, end = self.start + ticks, self.end + ticks
        return Event(self.node, self.kind, self.streams, start, end, self.bound, self.trips)

    @property
    def duration(self) -> int:
        """How long it takes, once."""
        return self.end - self.start

    @property
    def total(self) -> int:
        """How long it takes, all trips together."""
        return self.duration * self.trips


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """Iterations from `first` on, like those before, that were not simulated one by one."""

    loop: DeviceLoop
    first: int
    trips: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of a device, from 0 to `ticks`.

    `stored` are the bytes of parameters, states and inputs. `samples` are times, and what is held
    beside them from then on. `flows` are pairs of the numbers of events, of which the first lets
    the second begin. Of a pipeline it is one of a `stage`, and `passes` are those of all stages, in
    ticks from the first one on.
    """

    program: DeviceProgram
    timing: Timing
    events: tuple[Event, ...]
    folded: tuple[Folded, ...]
    stored: Mapping[str, int]
    samples: tuple[tuple[int, Amounts], ...]
    flows: tuple[tuple[int, int], ...]
    ticks: int
    stage: int | None = None
    passes: TimedSchedule | None = None

    @property
    def bubble(self) -> float:
        """The share of all stages' time between the first pass and the last that is idle."""
        return 0.0 if self.passes is None else float(self.passes.bubble)

    @property
    def ends_last(self) -> bool:
        """Whether no stage of a pipeline ends later: its end is that of the step."""
        ends = [row[-1] for row in self.passes.ends] if self.passes else []
        return self.stage is None or ends[self.stage] == max(ends)

    @property
    def seconds(self) -> float:
        """The length of the step; of a pipeline, the time until the stage has ended its own."""
        return self.ticks / PER_SECOND

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of a device."""
        return streams_of(self.program)

    def during(self, kind: str) -> Iterator[Event]:
        """The events of a kind."""
        return (event for event in self.events if event.kind == kind)

    @cached_property
    def compute(self) -> float:
        """Seconds in which the compute stream works. The others are exposed or idle."""
        return sum(e.total for e in self.during("run") if COMPUTE in e.streams) / PER_SECOND

    @cached_property
    def idle(self) -> float:
        """Seconds in which the device waits for other stages: its share of the bubble."""
        return sum(e.total for e in self.during("idle")) / PER_SECOND

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds in which nothing is computed, by the axes of the collective that is under way.

        Those of a collective over several axes stand under all of them, `data+tp`.
        """
        return self._by_axes("wait")

    @cached_property
    def sending(self) -> dict[str, float]:
        """Seconds of collectives, by their axes, whether they are hidden or not."""
        return self._by_axes("run")

    def _by_axes(self, kind: str) -> dict[str, float]:
        by_axes: Counter[str] = Counter()
        for event in self.during(kind):
            if name := self._name(event):
                by_axes[name] += event.total
        return {axes: ticks / PER_SECOND for axes, ticks in sorted(by_axes.items())}

    def _name(self, event: Event) -> str:
        """What an event occupies beside the compute stream: axes, or the way to a memory."""
        node = event.node
        if isinstance(node, Compute):
            update = self._updates.get(node)
            chunks = update is not None and (event.kind == "wait" or COMPUTE not in event.streams)
            return "+".join(update.streams) if update is not None and chunks else ""
        if not node.step.moves:
            return ""
        step = node.step
        return "+".join(self.program.mesh.written(step.axes) if step.axes else step.streams)

    @cached_property
    def _updates(self) -> Mapping[Compute, OffloadedUpdate]:
        return streamed(self.program)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """Times, and the bytes that are held from then on until the next."""
        stored = sum(self.stored.values())
        sizes = [(at, stored + sum(amounts)) for at, amounts in self.samples]
        return tuple(
            s
            for s, before in zip(sizes, [None, *sizes], strict=False)
            if not before or s[1] != before[1]
        )

    @property
    def memory_by_kind(self) -> Iterator[tuple[float, dict[str, int]]]:
        """The seconds, and the bytes of each kind from then on until the next."""
        kinds = [kind.name.lower() for kind in MemoryKind]
        for at, amounts in self.samples:
            yield at / PER_SECOND, {**self.stored, **dict(zip(kinds, amounts, strict=True))}

    @cached_property
    def peak(self) -> tuple[int, float]:
        """The most bytes that a device holds, and the second at which it first does."""
        most = max(size for _, size in self.memory)
        first = next(at for at, size in self.memory if size == most)
        return most, first / PER_SECOND

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022): of what all devices could compute.

        Counted are the FLOPs that the program needs once, on no matter how many devices: neither
        those repeated on several nor what `recompute` does again.
        """
        return self._at_peak(self.model_flops) / self.program.mesh.devices

    @cached_property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation (Chowdhery et al. 2022): of what all devices could compute.

        Counted is all that they compute, with what is recomputed or computed alike on several.
        """
        groups = alike_devices(self.program)
        computed = sum(len(group) * self._computed(group[0]) for group in groups)
        return computed / sum(map(len, groups))

    def _computed(self, device: int) -> float:
        """The share of the step for which one device of a pipeline computes at its peak."""
        nodes = walk(on_device(self.program, device))
        calls = (
            (n.local, flops_in_all(n, times, self.program))
            for n, times in nodes
            if isinstance(n, Compute)
        )
        return self._at_peak(flops_by_dtype(calls))

    def _at_peak(self, flops: Mapping[str, int]) -> float:
        """The share of the step for which FLOPs keep one device busy at its peak rates."""
        seconds = sum(n / self.timing.flops(dtype) for dtype, n in flops.items())
        return seconds / self.seconds if self.ticks else 0.0

    @cached_property
    def model_flops(self) -> dict[str, int]:
        """The FLOPs of `mfu`, by dtype."""
        return model_flops(self.program.placed.named)
