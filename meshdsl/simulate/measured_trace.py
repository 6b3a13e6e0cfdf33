"""Measured traces: the statements of the emitted text in the form that `simulate` writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshdsl.device.ir import Bucket, Compute, DeviceProgram, Move, Node, Wait
from meshdsl.simulate.timeline import COMPUTE
from meshdsl.simulate.trace import Measurement, TraceEvent, TraceFile, named_streams, slices, whole

Timed = tuple[int, int, int]
"""A line of the emitted text, and the nanoseconds at which it began and ended."""


def measured_trace(
    program: DeviceProgram,
    nodes: Mapping[int, Node],
    ranks: Sequence[Sequence[Timed]],
    evaluate: bool = False,
    measured: bool = False,
) -> TraceFile:
    """The trace of a run: a process for each device, from what each measured of its lines.

    `nodes` are the statements behind the lines of the emitted text. Times begin with the first
    statement of all. A collective that was waited for at once stands on the streams of its axes,
    too; of one in flight the wait alone was measured.
    """
    zero = min((timed[0][1] for timed in ranks if timed), default=0)
    events: list[TraceEvent] = []
    for rank, timed in enumerate(ranks):
        name = f"{program.placed.named.name}: device {rank}"
        events += named_streams(program, rank, name)
        events += _of_device(program, nodes, rank, [(n, s - zero, e - zero) for n, s, e in timed])
    seconds = max((end - zero for timed in ranks for *_, end in timed), default=0) / 1e9
    about: Measurement = {"seconds": seconds, "evaluate": evaluate, "measured": measured}
    return whole(program, "run", events, about)


def _of_device(
    program: DeviceProgram, nodes: Mapping[int, Node], rank: int, timed: Sequence[Timed]
) -> Iterator[TraceEvent]:
    for node, start, end in statements(nodes, timed):
        at: TraceEvent = {"pid": rank, "ts": start / 1e3, "dur": (end - start) / 1e3}
        match node:
            case Compute():
                yield from slices(program, node, "run", (COMPUTE,), at)
            case Move() if not node.step.moves:
                yield from slices(program, node, "run", (COMPUTE,), at)
            case Move() | Bucket():
                yield from slices(program, node, "run", node.step.streams, at)
                yield from slices(program, node, "wait", (COMPUTE,), at)
            case Wait():
                yield from slices(program, node.collective, "wait", (COMPUTE,), at)


def statements(
    nodes: Mapping[int, Node], timed: Sequence[Timed]
) -> Iterator[tuple[Node, int, int]]:
    """The statements that were run, with their beginning and end; several lines may be one.

    Between two iterations of a loop stands its first line, which is no statement.
    """
    for node, lines in itertools.groupby(timed, lambda entry: nodes.get(entry[0])):
        (_, start, end), *others = lines
        if node is not None:
            yield node, start, others[-1][2] if others else end
