"""A stage of a pipeline followed in time.

A stage's forward and backward pass are walked once, or for each micro-batch where these are of
several sizes, and put where the schedule has them when every action begins as early as its row and
its messages let it (`schedule/times.py`). A message leaves when the pass has made it; the backward
pass goes on meanwhile with the gradients of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import (
    Collective,
    Compute,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    Start,
    Var,
    Wait,
)
from meshdsl.device.live_memory import Amounts, less, plus
from meshdsl.device.memory import PassMemory
from meshdsl.records import dataclass
from meshdsl.schedule.table import Action
from meshdsl.schedule.times import Exact, TimedSchedule, Times, timed
from meshdsl.simulate.device_run import PER_PASS, DeviceRun, ticks
from meshdsl.simulate.timeline import Event, Folded, Timeline, way_back


@dataclass(frozen=True, slots=True)
class Pass:
    """What a stage does for one micro-batch, from 0 on; `held` is the memory that it leaves.

    Samples of `memory` are counted from what there was before; at `sent` the message can leave.
    """

    events: Sequence[Event]
    folded: Sequence[Folded]
    flows: Sequence[tuple[int, int]]
    memory: Sequence[tuple[int, Amounts]]
    held: Amounts
    duration: int
    sent: int


def simulate_stage(
    program: DeviceProgram,
    timing: Timing,
    unroll: bool,
    stage: int | None = None,
    events: bool = True,
) -> Timeline:
    """The timeline of the devices of a stage; for None of those that end last.

    A device with several stages is named by its own number. Without `events` there are none of the
    passes, but the step takes as long.
    """
    (pipe,) = (node for node in program.body if isinstance(node, Pipeline))
    schedule = in_time(pipe, program, timing)
    if stage is None:
        ends = [row[-1] for row in schedule.ends]
        stage = ends.index(max(ends))
    run = _Stage(program, timing, unroll, stage, schedule, events)
    run.walked()
    return replace(run.timeline(), stage=stage, passes=schedule)


def in_time(pipe: Pipeline, program: DeviceProgram, timing: Timing) -> TimedSchedule:
    """The schedule with predicted times of its passes, in ticks.

    Inner stages of as many iterations are alike.
    """
    last = pipe.last
    passes: dict[tuple[int, ...], Sequence[Mapping[str, Pass]]] = {}
    each = []
    for stage in range(last + 1):
        alone = (stage,) if pipe.node_stages else (stage == 0, stage == last)
        kind = (*alone, *pipe.sizes[stage : stage + 1])
        if kind not in passes:
            run = _Stage(program, timing, False, pipe.known.device_of[0, stage])
            run.walked()
            passes[kind] = [run.passes[stage, number] for number in run.micros]
        each.append(passes[kind])
    longest = max(
        sum(ticks(timing.node(move)) for move in pipe.leaving(stage, forward))
        for forward in (True, False)
        for stage in range(last + 1)
    )
    alike = [_times([stage[number] for stage in each], longest) for number in range(len(each[0]))]
    if len(alike) == 1:
        return timed(pipe.known, alike[0])
    actions = (action for row in pipe.rows for action in row)
    unlike = {action: alike[action.micro].of(action) for action in actions}
    return timed(pipe.known, replace(alike[0], unlike=unlike))


def _times(each: Sequence[Mapping[str, Pass]], longest: int) -> Times:
    """The times of the passes of a micro-batch, stage by stage."""
    return Times(
        forward=tuple(each_pass["F"].duration for each_pass in each),
        inputs=tuple(inputs for inputs, _ in map(_backward, each)),
        weights=tuple(weights for _, weights in map(_backward, each)),
        update=tuple(each_pass["U"].duration if "U" in each_pass else 0 for each_pass in each),
        send=(longest,),
    )


def _backward(passes: Mapping[str, Pass]) -> tuple[int, int]:
    """How long the halves of a backward pass take, if there is one; in one it sends in between."""
    if "B" not in passes and "I" not in passes:
        return 0, 0
    if "B" in passes:
        return passes["B"].sent, passes["B"].duration - passes["B"].sent
    return passes["I"].duration, passes["W"].duration


class _Stage(DeviceRun):
    """One device of a pipeline; without `found`, the passes of its stages are only measured."""

    def __init__(
        self,
        program: DeviceProgram,
        timing: Timing,
        unroll: bool,
        device: int,
        found: TimedSchedule | None = None,
        events: bool = True,
    ) -> None:
        super().__init__(program, timing, unroll, device)
        self.found, self.has_events = found, events
        # By stage, and by micro-batch where these are unlike.
        self.passes: dict[tuple[int, int], dict[str, Pass]] = {}
        self.sent = 0
        self.sending: Node | None = None

    def _pipeline(self, node: Pipeline) -> None:
        super()._pipeline(node)
        if self.found is not None:
            (self._follow if self.has_events else self._pass_over)(node, self.found)

    # --- a pass --------------------------------------------------------------------------------

    def _pass(self, node: Pipeline, parts: Sequence[StagePhase], kept: set[str]) -> PassMemory:
        """Walk a pass as if it began at 0, and take what it did out of the timeline."""
        outside = {name: getattr(self, name) for name in PER_PASS}
        self._restart()
        before = tuple(self.held.by_kind)
        self.held.begin_high()
        pass_ = super()._pass(node, parts, kept)
        self._note(self.clock)
        kind = next(kind for kind, kind_parts in node.passes.items() if kind_parts == parts)
        self.passes.setdefault((self.stage, self.micro), {})[kind] = Pass(
            self.events,
            self.folded,
            self.flows,
            [(at, less(amounts, before)) for at, amounts in self.memory],
            less(tuple(self.held.by_kind), before),
            self.clock,
            self.sent,
        )
        for name, value in outside.items():
            setattr(self, name, value)
        self.held.begin_high()
        return pass_

    def _part(self, node: Pipeline, part: StagePhase) -> None:
        self.sending = node.sends_after if part is StagePhase.LOOP_BACKWARD else None
        super()._part(node, part)
        late = part is StagePhase.LOOP_BACKWARD and self.sending is None
        if part <= StagePhase.LAST or late:
            self.sent = self.clock

    def statement(self, node: Compute | Collective | Start | Wait, dead: tuple[Var, ...]) -> None:
        """A statement; behind one of them the last iteration sends."""
        super().statement(node, dead)
        if node is self.sending:
            self.sent = self.clock

    def _of(self, node: Pipeline, action: Action) -> list[Pass]:
        """The passes of an action."""
        number = action.micro if len(self.micros) > 1 else 0
        return [self.passes[action.stage, number][kind] for kind in node.passes_of(action.kind)]

    # --- the row ---------------------------------------------------------------------------------

    def _pass_over(self, node: Pipeline, found: TimedSchedule) -> None:
        """The time after the row: as `_follow`, which tells what is done in it."""
        begun, action = self.clock, node.rows[self.device][-1]
        passes = self._of(node, action)
        start = begun + _whole(found.starts[self.device][-1])
        self.clock = start + sum(done.duration for done in passes)
        self.joined = {node.axis: begun + _whole(found.makespan)}

    def _follow(self, node: Pipeline, found: TimedSchedule) -> None:
        """The passes of the row, with the gaps between them, and the messages beside them."""
        begun, now = self.clock, tuple(self.held.by_kind)
        streams = {True: node.axis, False: way_back(node.axis)}
        free = dict.fromkeys(streams, begun)
        for slot in found.row(self.device):
            forward, stage = slot.action.kind == "F", slot.action.stage
            messages = node.leaving(stage, forward)
            leaves = bool(node.node_stages) or node.does(
                StagePhase.SENT if forward else StagePhase.SENT_BACKWARD, stage
            )
            passes_on = slot.action.kind in "FBI"
            start = begun + _whole(slot.start)
            if passes_on and (awaited := self._awaited(node, forward, stage)):
                # What is not yet sent is idle time of the schedule, the rest is on its way.
                sent = start - sum(ticks(self.time_of(message)) for message in awaited)
                self._stand(awaited[0], sent, "idle")
                self._stand(awaited[0], start)
            self.clock = start
            kinds = node.passes_of(slot.action.kind)
            for kind, done in zip(kinds, self._of(node, slot.action), strict=True):
                at = self.clock
                self._put(done, at, now)
                now = plus(now, done.held)
                self.clock = at + done.duration
                if passes_on and kind != "W" and leaves:
                    ready = max(at + done.sent, free[forward])
                    free[forward] = self._send(messages, streams[forward], ready)
        self.joined = {node.axis: begun + _whole(found.makespan)}

    def _awaited(self, node: Pipeline, forward: bool, stage: int) -> tuple[Move, ...]:
        """The messages that a pass of a stage waits for, if it begins with some."""
        return node.arriving(stage, forward) if node.node_stages else node.leaving(stage, forward)

    def _put(self, done: Pass, at: int, held: Amounts) -> None:
        """A pass that begins at a time, when so much memory of each kind is held."""
        number = len(self.events)
        self.events.extend(event.later(at) for event in done.events)
        self.flows.extend((one + number, other + number) for one, other in done.flows)
        self.folded.extend(replace(f, start=f.start + at, end=f.end + at) for f in done.folded)
        self.memory.extend((at + when, plus(held, amounts)) for when, amounts in done.memory)

    def _send(self, messages: Sequence[Move], stream: str, at: int) -> int:
        """Send messages one after the other; the time at which the last one is there."""
        for message in messages:
            if took := ticks(self.time_of(message)):
                self.events.append(Event(message, "run", (stream,), at, at + took, "network"))
                at += took
        return at


def _whole(time: Exact) -> int:
    assert time.denominator == 1, "a pass begins between two ticks"
    return time.numerator
