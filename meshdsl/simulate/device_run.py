"""The simulator: a device program followed in time on the streams of one device.

A device has a stream for operators, one for every mesh axis, and one for each direction between its
memory and another that tensors are stored in. Streams take their work in program
order, as torch and NCCL do: a collective begins when all that was computed before its `Start` is
done and its axes are free, and only its `Wait` holds the operators up. (So the ends of operands
need no times of their own: they lie before the `Start`.) An operator beside a collective is slower,
by the `overlap_slowdown` of the profile (Miao et al. 2022, Galvatron, measure it).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from meshdsl.cluster.timing import Time, Timing
from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Start,
    Var,
    Wait,
)
from meshdsl.device.live_memory import Amounts
from meshdsl.device.memory import MemoryWalk
from meshdsl.device.offloaded_updates import OffloadedUpdate
from meshdsl.records import dataclass
from meshdsl.simulate.timeline import (
    COMPUTE,
    PER_SECOND,
    Event,
    Folded,
    Standstill,
    Timeline,
    tier_streams,
)

MILLION = 10**6

PER_PASS = ("clock", "free", "busy", "events", "folded", "flows", "memory", "last", "arrived")
"""The fields of a run that begin anew where a pass of a micro-batch is walked on its own."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A collective from its start to its end, and the number of its event, if it takes time."""

    node: Collective
    start: int
    end: int
    event: int | None

    def later(self, by: int) -> _Flight:
        """The same in a later iteration."""
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The beginning of an iteration: its number, the clock, and how many events there were."""

    trip: int
    clock: int
    events: int


class DeviceRun(MemoryWalk):
    """One device at work; `clock` is the time up to which its compute stream is busy."""

    repeats = False  # each time a loop is walked, it takes its place in the timeline

    def __init__(
        self, program: DeviceProgram, timing: Timing, unroll: bool, device: int = 0
    ) -> None:
        super().__init__(program, device)
        self.timing, self.unroll = timing, unroll
        self.time_of = cache(timing.node)
        self.slowdown = max(MILLION, round(timing.cluster.device.overlap_slowdown * MILLION))
        self.flights: dict[str, _Flight] = {}
        self.begun: dict[DeviceLoop, dict[tuple[object, ...], _Begun]] = {}
        # When all stages are there for a collective along the axis of a pipeline.
        self.joined: dict[str, int] = {}
        self._restart()

    def _restart(self) -> None:
        """Begin at 0, with all streams free (`PER_PASS`)."""
        self.clock = 0
        self.free = dict.fromkeys((*self.program.mesh.names, *tier_streams(self.program)), 0)
        # Collectives that are begun and perhaps not over, in order.
        self.busy: list[_Flight] = []
        self.events: list[Event] = []
        self.folded: list[Folded] = []
        self.flows: list[tuple[int, int]] = []
        self.memory: list[tuple[int, Amounts]] = []
        # The last event of the compute stream, and what the next one waits for.
        self.last: int | None = None
        self.arrived: list[int] = []

    def timeline(self) -> Timeline:
        """The timeline, once everything was walked."""
        self._note(self.clock)
        ends = (self.clock, *self.free.values())
        return Timeline(
            self.program,
            self.timing,
            tuple(self.events),
            tuple(self.folded),
            self.stored,
            tuple(self.memory),
            tuple(self.flows),
            max(ends),
        )

    # --- statements ------------------------------------------------------------------------------

    def statement(self, node: Compute | Collective | Start | Wait, dead: tuple[Var, ...]) -> None:
        """One statement: it holds its results from its beginning, its operands to its end."""
        if isinstance(node, Wait) and node.work in self.flights:  # none before the first iteration
            self._wait(self.flights.pop(node.work))
        begins = self.clock
        super().statement(node, dead)
        self._note(begins)
        match node:
            case Compute():
                self._work(node)
            case Move() if not node.step.moves:
                self._work(node)
            case Move() | Bucket():
                self._wait(self._begin_sending(node))
        self._note(self.clock)

    def _move_chunks(self, update: OffloadedUpdate) -> None:
        """Move what an update has in another memory: nothing is computed meanwhile."""
        node, streams = update.update, update.streams
        time = self.timing.transfer(update.tier, self.bytes(update.moved))
        start = max(self.clock, *(self.free[stream] for stream in streams))
        end = start + ticks(time)
        self.events.append(Event(node, "run", streams, start, end, time.bound))
        self._event(Event(node, "wait", (COMPUTE,), self.clock, end, time.bound))
        self.free.update(dict.fromkeys(streams, end))
        self.clock = end

    def _work(self, node: Compute | Move) -> None:
        if isinstance(node, Compute) and (update := self.streamed.get(node)):
            self._move_chunks(update)
        sized = self.sized(node) if isinstance(node, Compute) else node
        time = self.time_of(sized)
        if duration := ticks(time):
            end = self._computed(duration)
            one = sized if len(self.micros) > 1 else node
            self._event(Event(one, "run", (COMPUTE,), self.clock, end, time.bound))
            self.clock = end

    def _computed(self, left: int) -> int:
        """The time at which work of some length is done; beside collectives it takes longer."""
        at = self.clock
        for flight in sorted(self._under_way(), key=lambda f: (f.start, f.end)):
            alone = max(0, flight.start - at)
            if left <= alone:
                break
            at, left = at + alone, left - alone
            slowed = -(-left * self.slowdown // MILLION)
            if slowed <= flight.end - at:
                return at + slowed
            left -= max(0, flight.end - at) * MILLION // self.slowdown
            at = max(at, flight.end)
        return at + left

    def _under_way(self) -> list[_Flight]:
        """The collectives that are not over."""
        self.busy = [flight for flight in self.busy if flight.end > self.clock]
        return self.busy

    # --- collectives -----------------------------------------------------------------------------

    def issue(self, collective: Collective, work: str) -> None:
        """Begin a collective."""
        super().issue(collective, work)
        self.flights[work] = self._begin_sending(collective)

    def _begin_sending(self, node: Collective) -> _Flight:
        """Occupy the streams of a collective from when all of them are free."""
        time, streams = self.time_of(node), node.step.streams
        duration = ticks(time)
        if not duration:
            return _Flight(node, self.clock, self.clock, None)
        others = (self.joined.get(stream, 0) for stream in streams)
        start = max(self.clock, *(self.free[stream] for stream in streams), *others)
        flight = _Flight(node, start, start + duration, len(self.events))
        self.free.update(dict.fromkeys(streams, flight.end))
        self.busy.append(flight)
        if self.last is not None:
            self.flows.append((self.last, len(self.events)))
        self.events.append(Event(node, "run", streams, start, flight.end, time.bound))
        return flight

    def _wait(self, flight: _Flight) -> None:
        """Let the compute stream stand still until a collective is over.

        Until its axes are free, it is one before it that is waited for.
        """
        ahead, under_way = [flight], self._under_way()
        while ahead[-1].start > self.clock:
            streams = set(ahead[-1].node.step.streams)
            before = (f for f in under_way if f.end == ahead[-1].start)
            first = next((f for f in before if streams.intersection(f.node.step.streams)), None)
            if first is None:  # the other stages are waited for
                break
            ahead.append(first)
        for each in reversed(ahead):
            self._stand(each.node, each.start, "idle")
            if each is flight and flight.event is not None:
                self.arrived.append(flight.event)
            self._stand(each.node, each.end)

    def _stand(self, node: Collective, until: int, kind: Standstill = "wait") -> None:
        """Let the compute stream stand still for a collective: until it is over, or can begin."""
        if until > self.clock:
            bound = self.time_of(node).bound
            self._event(Event(node, kind, (COMPUTE,), self.clock, until, bound))
            self.clock = until

    def _event(self, event: Event) -> None:
        """Note an event of the compute stream."""
        self.last = len(self.events)
        self.flows += [(earlier, self.last) for earlier in self.arrived]
        self.arrived = []
        self.events.append(event)

    def _note(self, at: int) -> None:
        """Note the most memory since the last time, and what is held now, by kind."""
        highest = self.held.at_high
        self.held.begin_high()
        for amounts in (highest, self.held.at_high):
            if not self.memory or self.memory[-1][1] != amounts:
                self.memory.append((at, amounts))

    # --- loops -----------------------------------------------------------------------------------

    def alike(self, node: DeviceLoop, trip: int) -> int:
        """The iterations from `trip` on that repeat what was simulated, less the last one.

        An iteration depends on how much of each collective is still to come: where that is as at
        the beginning of an earlier one, everything since then repeats.
        """
        if trip == 0:
            self.begun[node] = {}
        if self.unroll or trip == 0:
            return 0
        now = _Begun(trip, self.clock, len(self.events))
        before = self.begun[node].setdefault(self._state(), now)
        if before is now:
            return 0
        periods = (self.trips(node) - 1 - trip) // (trip - before.trip)
        if periods:
            self._fold(node, before, now, periods)
        return periods * (trip - before.trip)

    def _state(self) -> tuple[object, ...]:
        """All that the future depends on, as seen from now."""
        now = self.clock
        free = tuple(max(0, at - now) for at in self.free.values())
        busy = tuple((f.node, max(0, f.start - now), f.end - now) for f in self._under_way())
        flights = tuple((work, max(0, f.end - now)) for work, f in self.flights.items())
        return free, busy, flights

    def _fold(self, node: DeviceLoop, before: _Begun, now: _Begun, periods: int) -> None:
        """Repeat what was simulated between two iterations some more times."""
        later = periods * (now.clock - before.clock)
        for i in range(before.events, now.events):
            event = self.events[i]
            self.events[i] = replace(event, trips=event.trips * (1 + periods))
        trips = periods * (now.trip - before.trip)
        self._note(self.clock)
        self.folded.append(Folded(node, now.trip, trips, self.clock, self.clock + later))
        self.clock += later
        self.free = {axis: at + later for axis, at in self.free.items()}
        self.busy = [flight.later(later) for flight in self.busy]
        self.flights = {work: flight.later(later) for work, flight in self.flights.items()}


def ticks(time: Time) -> int:
    """The time in picoseconds."""
    return round(time.seconds * PER_SECOND)
