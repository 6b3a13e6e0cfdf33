"""What a schedule needs, and whether it can be executed: nothing is run to know that.

Whoever executes a table needs to check nothing: every part is there once, no order of messages lets
devices wait for each other, and peaks, messages and versions of parameters are known before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Literal, NoReturn

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Related, Span, fail
from meshdsl.records import dataclass
from meshdsl.schedule.table import MOST_PARTS, Action, Kind, Row, ScheduleTable, Weights, parsed

Place = tuple[int, int]
"""A device, and the position of an action in its row."""

Part = tuple[int, int]
"""A micro-batch and a stage."""

ROW = -1
"""The position that stands for a whole row."""

Where = Callable[[Place], Span | None]
"""Where an action or a row was read."""

Way = tuple[str, Mapping[int, Row]]
"""What may be done, in words, and the rows after it by device."""


class Unexecutable(DiagnosticError):
    """A table that cannot be executed, and `ways` of which the first that can be is the best."""

    def __init__(self, diagnostic: Diagnostic, ways: Iterable[Way] = ()) -> None:
        super().__init__(diagnostic)
        self.ways = ways


def _refuse(
    code: str,
    message: str,
    span: Span | None,
    *related: Related,
    help: str,
    ways: Iterable[Way] = (),
) -> NoReturn:
    raise Unexecutable(Diagnostic(code, message, span, related=related, help=help), ways)


def _without(row: Row, at: int) -> Row:
    return row[:at] + row[at + 1 :]


def _added(device: int, row: Row, action: Action, title: str = "add {0}") -> Iterator[Way]:
    """An action in each place of a row, the last one first; `title` names it as `{0}`."""
    for at in range(len(row), -1, -1):
        yield title.format(f"`{action.text(device)}`"), {device: (*row[:at], action, *row[at:])}


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The messages of one direction from a device to another, in the order in which they are sent.

    `kind` F carries what forward passes yield, B the gradients of it. The receiver consumes them in
    the same order where `buffers` is 1; else it has to keep so many of them at once.
    """

    source: int
    target: int
    kind: Literal["F", "B"]
    messages: tuple[Part, ...]
    buffers: int


@dataclass(frozen=True, slots=True)
class StageVersions:
    """Versions of a stage's parameters: `forward` and `backward` are read by each micro-batch.

    Version n is what n updates have made. `staleness` is by how many updates the version that its
    forward pass read is older than the one that its gradient is applied to. `copies` is the most
    versions that are kept at once.
    """

    stage: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    staleness: tuple[int, ...]
    copies: int


FlowStep = tuple[int, int, int | None, int | None, int | None, int]
"""An action: its device, its kind, the message that it waits for and the one that it sends.

These by number, and the line that the message goes through to another device, that of a stage and
the next; at last this stage.
"""


@dataclass(frozen=True, slots=True)
class Flow:
    """The actions of a table in an order of execution; numbers of `messages` and `lines`.

    `kinds` are the different actions for any micro-batch, in order of their numbers.
    """

    steps: tuple[FlowStep, ...]
    kinds: tuple[tuple[Kind, int], ...]
    messages: int
    lines: int


@dataclass(frozen=True)
class Verified:
    """A schedule that can be executed, in `order`, and what it needs."""

    schedule: ScheduleTable
    device_of: Mapping[Part, int]
    order: tuple[Place, ...]

    def action(self, place: Place) -> Action:
        """The action at a place."""
        return self.schedule.rows[place[0]][place[1]]

    @cached_property
    def flow(self) -> Flow:
        """What each action waits for and sends: the same however long they take."""
        stages, steps = self.schedule.stages, list[FlowStep]()
        kinds, lines = dict[tuple[Kind, int], int](), dict[Key, int]()
        for device, at in self.order:
            kind, micro, stage = self.schedule.rows[device][at]
            read = sent = line = None
            # Messages to the next stage have even numbers, those back odd ones.
            back = kind != "F"
            reader = stage + (-1 if back else 1)
            if kind in "FBI":
                read = 2 * (micro * stages + stage) + back
                if 0 <= reader < stages:
                    sent = 2 * (micro * stages + reader) + back
                    target = self.device_of[micro, reader]
                    if target != device:
                        key: Key = (device, target, "B" if back else "F")
                        line = lines.setdefault(key, len(lines))
            number = kinds.setdefault((kind, stage), len(kinds))
            steps.append((device, number, read, sent, line, min(stage, reader)))
        return Flow(tuple(steps), tuple(kinds), 2 * stages * self.schedule.micro, len(lines))

    @cached_property
    def forward(self) -> Verified:
        """The forward passes alone, for a program that has no others."""
        return verify(self.schedule.forward, forward=True)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in ascending order."""
        return tuple(tuple(sorted({a.stage for a in row})) for row in self.schedule.rows)

    @cached_property
    def taken(self) -> Mapping[tuple[int, int], int]:
        """By device and stage, how many micro-batches it takes through that stage."""
        return Counter((device, stage) for (_, stage), device in self.device_of.items())

    @cached_property
    def updates(self) -> Mapping[tuple[int, int], int]:
        """By device and stage, how often it updates that stage's parameters."""
        rows = enumerate(self.schedule.rows)
        return Counter((device, a.stage) for device, row in rows for a in row if a.kind == "U")

    @cached_property
    def stage_peaks(self) -> tuple[Mapping[int, int], ...]:
        """The most micro-batches in flight on each stage of each device."""
        return tuple(
            {stage: _peak(a for a in row if a.stage == stage) for stage in held}
            for row, held in zip(self.schedule.rows, self.held, strict=True)
        )

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most in flight on each device, over all of its stages.

        A micro-batch is in flight on a stage from its forward pass to the end of its backward pass.
        """
        return tuple(map(_peak, self.schedule.rows))

    @cached_property
    def accumulation(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """By device and stage, the micro-batches in the order in which gradients are added up."""
        order: dict[tuple[int, int], list[int]] = defaultdict(list)
        for device, row in enumerate(self.schedule.rows):
            for action in row:
                if action.kind in "BW":
                    order[device, action.stage].append(action.micro)
        return {key: tuple(value) for key, value in order.items()}

    @cached_property
    def in_order(self) -> bool:
        """Whether every gradient is added up as one device does it: the sums round alike."""
        whole = tuple(range(self.schedule.micro))
        return all(order == whole for order in self.accumulation.values())

    @cached_property
    def reverses(self) -> bool:
        """Whether each stage takes all micro-batches in order, and back from the last to the first.

        Only then may one read what those before it have made, as a slice of a sequence reads keys
        and values: their gradients are known when all behind it have gone back.
        """
        orders: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        for row in self.schedule.rows:
            for action in row:
                orders[action.stage, action.kind].append(action.micro)
        up = [*range(self.schedule.micro)]
        wanted = {"F": up, "B": up[::-1], "I": up[::-1], "W": up[::-1]}
        return all(order == wanted.get(kind) for (_, kind), order in orders.items())

    @cached_property
    def lines(self) -> tuple[MessageOrder, ...]:
        """Every line that carries messages."""
        sent, read = (_messages(self, consumed) for consumed in (False, True))
        return tuple(
            MessageOrder(*key, tuple(messages), _buffers(messages, read[key]))
            for key, messages in sorted(sent.items())
        )

    @cached_property
    def sends(self) -> int:
        """The messages of all lines."""
        return sum(len(line.messages) for line in self.lines)

    @property
    def changes(self) -> bool:
        """Whether a backward pass may read another version of parameters than its forward pass."""
        return self.schedule.updates and self.schedule.weights in ("latest", "corrected")

    @cached_property
    def versions(self) -> tuple[StageVersions, ...]:
        """The versions of each stage's parameters; empty where there are no updates on the way."""
        rows = self.schedule.rows if self.schedule.updates else ()
        versions = (
            _versions(self.schedule, device, stage)
            for device, row in enumerate(rows)
            for stage in {action.stage for action in row}
        )
        return tuple(sorted(versions, key=lambda v: v.stage))

    def kept(self, stage: int) -> tuple[int, ...]:
        """By update of a stage, how many versions there are room for behind it.

        A version stays until the last pass that reads it has ended.
        """
        row = [a for a in self.schedule.rows[self.device_of[0, stage]] if a.stage == stage]
        read = self.versions[stage].forward
        last = {read[a.micro]: at for at, a in enumerate(row) if a.kind != "U"}
        rooms, there = [1], {0}
        for at, action in enumerate(row):
            if action.kind == "U":
                there = {v for v in there if last.get(v, -1) > at} | {max(there) + 1}
                rooms.append(max(rooms[-1], len(there)))
        return tuple(rooms[1:])


def verify(
    schedule: ScheduleTable, where: Where = lambda place: None, forward: bool = False
) -> Verified:
    """The facts of a schedule, one of `forward` passes alone if asked. Raises MD0521 to MD0526.

    `where` gives the place of an action or a row in a file.
    """
    _check_sizes(schedule, where)
    places = _places(schedule, where)
    device_of = _devices(schedule, places, where, forward)
    order = tuple(_executed(schedule, places, where))
    verified = Verified(schedule, device_of, order)
    if schedule.updates:
        _check_updates(verified, where)
    return verified


def printed(text: str, weights: Weights = "latest") -> Verified:
    """The facts of a table as a program is printed with it: it may be of forward passes alone."""
    schedule = parsed(text, weights)
    return verify(schedule, forward=schedule.is_forward)


# --- each part once ------------------------------------------------------------------------------


def _check_sizes(schedule: ScheduleTable, where: Where) -> None:
    """Refuse numbers that are out of range, and devices with nothing to do."""
    if min(schedule.stages, schedule.micro, schedule.devices) < 1:
        help = "write a row for each device: `F0 F1 B0 B1`"
        fail("MD0521", "the schedule holds no actions", help=help)
    if schedule.stages * schedule.micro > MOST_PARTS:
        sizes = f"{schedule.stages:,} stages of {schedule.micro:,} micro-batches"
        help = f"stay below {MOST_PARTS:,} forward passes"
        fail("MD0521", f"a schedule of {sizes} is too large", help=help)
    last = schedule.micro - 1
    for device, row in enumerate(schedule.rows):
        if not row:
            help = "leave its row out, or give it a stage"
            fail("MD0521", f"device {device} has nothing to do", where((device, ROW)), help=help)
        for index, action in enumerate(row):
            if action.stage >= schedule.stages or action.micro >= schedule.micro:
                help = f"stages are 0 to {schedule.stages - 1}, micro-batches 0 to {last}"
                place = where((device, index))
                ways = _in_place_of(schedule, device, index)
                message = f"there is no {action} in this schedule"
                _refuse("MD0521", message, place, help=help, ways=ways)


def _in_place_of(schedule: ScheduleTable, device: int, index: int) -> Iterator[Way]:
    """The actions of the same kind that the table lacks, each in the place of another one."""
    row, there = schedule.rows[device], {a for row in schedule.rows for a in row}
    alike = (row[index]._replace(stage=stage) for stage in range(schedule.stages))
    for action in alike:
        if action not in there and action.micro < schedule.micro:
            new = (*row[:index], action, *row[index + 1 :])
            yield f"write `{action.text(device)}`", {device: new}


def _places(schedule: ScheduleTable, where: Where) -> dict[Action, Place]:
    """The place of every action. Refuses one that occurs twice."""
    places: dict[Action, Place] = {}
    for device, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            if action in places:
                rows = sorted({places[action][0], device})
                message = f"{action} occurs twice, on device {' and '.join(map(str, rows))}"
                ways = [
                    (f"remove the {which} one", {d: _without(schedule.rows[d], at)})
                    for which, (d, at) in (("second", (device, index)), ("first", places[action]))
                ]
                span = where((device, index))
                _refuse("MD0523", message, span, help="remove one of them", ways=ways)
            places[action] = (device, index)
    return places


def _devices(
    schedule: ScheduleTable, places: Mapping[Action, Place], where: Where, alone: bool
) -> Mapping[Part, int]:
    """The device of every part. Refuses a part that is missing, doubled or divided."""
    device_of = {}
    for stage in range(schedule.stages):
        for micro in range(schedule.micro):
            there = _passes(schedule, places, micro, stage, where, alone)
            device, _ = places[there[0]]
            for action in there:
                place = places[action]
                if place[0] != device:
                    help = f"move it to device {device}, which holds what it needs"
                    message = f"{action} is on device {place[0]}, {there[0]} on device {device}"
                    ways = (
                        (title, {place[0]: _without(schedule.rows[place[0]], place[1]), **rows})
                        for title, rows in _added(
                            device, schedule.rows[device], action, f"move {{0}} to device {device}"
                        )
                    )
                    _refuse("MD0524", message, where(place), help=help, ways=ways)
            device_of[micro, stage] = device
    return device_of


def _passes(
    schedule: ScheduleTable,
    places: Mapping[Action, Place],
    micro: int,
    stage: int,
    where: Where,
    alone: bool,
) -> tuple[Action, ...]:
    """The forward pass of a part, unless `alone` with its backward pass, in one piece or two."""
    forward, undivided, inputs, weights = (
        Action(kind, micro, stage) for kind in ("F", "B", "I", "W")
    )  # fmt: skip
    if undivided in places and (inputs in places or weights in places):
        half = inputs if inputs in places else weights
        help = "write either B, or both I and W"
        message = f"{undivided} and {half} both occur: B is I and W"
        fail("MD0523", message, where(places[half]), help=help)
    halves = inputs in places or weights in places
    back = (inputs, weights) if halves else () if alone else (undivided,)
    for action in (forward, *back):
        if action not in places:
            help = "every stage takes every micro-batch forward once, and backward once"
            device = _row_of(action, places)
            ways = () if device is None else _added(device, schedule.rows[device], action)
            span = None if device is None else where((device, ROW))
            _refuse("MD0522", f"{action} is missing", span, help=help, ways=ways)
    return (forward, *back)


def _row_of(missing: Action, places: Mapping[Action, Place]) -> int | None:
    """The row that an action is missing from: one that has the same part, or the same stage."""
    same = [a for a in places if a.stage == missing.stage]
    nearest = next((a for a in same if a.micro == missing.micro), next(iter(same), None))
    return None if nearest is None else places[nearest][0]


# --- the order -----------------------------------------------------------------------------------


def needs(
    schedule: ScheduleTable, action: Action, places: Mapping[Action, Place]
) -> Iterator[Action]:
    """The actions whose results an action reads."""
    micro, stage = action.micro, action.stage
    if action.kind == "F" and stage > 0:
        yield Action("F", micro, stage - 1)
    if action.kind in "BI":
        yield Action("F", micro, stage)
        if stage + 1 < schedule.stages:
            yield gradient(micro, stage + 1, places)
    if action.kind == "W":
        yield Action("I", micro, stage)


def gradient(micro: int, stage: int, places: Mapping[Action, Place]) -> Action:
    """The action that yields the gradient of a stage's input."""
    whole = Action("B", micro, stage)
    return whole if whole in places else Action("I", micro, stage)


def _executed(
    schedule: ScheduleTable, places: Mapping[Action, Place], where: Where
) -> Iterator[Place]:
    """Every place, in an order in which each comes behind what it needs. Refuses a deadlock."""
    at = [0] * schedule.devices
    waiting: dict[Action, int] = {}
    ready = list(range(schedule.devices))
    done: set[Action] = set()
    while ready:
        device = ready.pop()
        row = schedule.rows[device]
        while at[device] < len(row):
            action = row[at[device]]
            if not _is_ready(action, schedule.stages, done):
                missing = next(n for n in needs(schedule, action, places) if n not in done)
                waiting[missing] = device
                break
            yield (device, at[device])
            done.add(action)
            at[device] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        _refuse_deadlock(schedule, places, at, where)


def _is_ready(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether all that an action `needs` is done: of a table of many, none is made to tell."""
    kind, micro, stage = action
    if kind == "F":
        return stage == 0 or ("F", micro, stage - 1) in done
    if kind in "BI":
        above = micro, stage + 1
        later = stage + 1 == stages or ("B", *above) in done or ("I", *above) in done
        return later and ("F", micro, stage) in done
    return kind != "W" or ("I", micro, stage) in done


def _refuse_deadlock(
    schedule: ScheduleTable, places: Mapping[Action, Place], at: list[int], where: Where
) -> NoReturn:
    """Name the devices of which each waits for the next one, and the last for the first."""
    done = {a for row, end in zip(schedule.rows, at, strict=True) for a in row[:end]}
    device = next(d for d, row in enumerate(schedule.rows) if at[d] < len(row))
    chain: dict[int, Action] = {}
    while device not in chain:
        action = schedule.rows[device][at[device]]
        chain[device] = next(n for n in needs(schedule, action, places) if n not in done)
        device = places[chain[device]][0]
    cycle = list(chain)[list(chain).index(device) :]
    cycle = cycle[cycle.index(min(cycle)) :] + cycle[: cycle.index(min(cycle))]
    first = (cycle[0], at[cycle[0]])
    waits = [f"device {d} waits at {schedule.rows[d][at[d]]} for {chain[d]}" for d in cycle]
    if len(cycle) == 1:
        help = f"move {chain[device]} before it"
        message = f"deadlock: {waits[0]}, which comes after it"
        ways = _earlier(schedule, at, chain.values(), places)
        _refuse("MD0525", message, where(first), help=help, ways=ways)
    moved = [(chain[d], *places[chain[d]]) for d in cycle]
    moves = [f"{a} before {schedule.rows[d][at[d]]}" for a, d, index in moved if at[d] < index]
    help = f"move {' or '.join(moves)}"
    others = ((d, where((d, at[d]))) for d in cycle[1:])
    related = [Related(span, f"device {d} waits here") for d, span in others if span is not None]
    ways = _earlier(schedule, at, chain.values(), places)
    message = f"deadlock: {', '.join(waits)}"
    _refuse("MD0525", message, where(first), *related, help=help, ways=ways)


def _earlier(
    schedule: ScheduleTable,
    at: list[int],
    awaited: Iterable[Action],
    places: Mapping[Action, Place],
) -> Iterator[Way]:
    """Each action that a device waits for, before the one at which its own device waits."""
    for action in awaited:
        device, index = places[action]
        row, stop = schedule.rows[device], at[device]
        if stop < index:
            moved, before = action.text(device), row[stop].text(device)
            title = f"move `{moved}` before `{before}` on device {device}"
            yield title, {device: (*row[:stop], action, *_without(row[stop:], index - stop))}


# --- memory and messages -------------------------------------------------------------------------


def _peak(actions: Iterator[Action] | tuple[Action, ...]) -> int:
    """The most micro-batches between their forward pass and the end of their backward pass.

    Without backward passes, between the beginning of their forward pass and its end.
    """
    actions = tuple(actions)
    if all(action.kind == "F" for action in actions):
        return min(1, len(actions))
    steps = {"F": 1, "B": -1, "W": -1}
    return max(accumulate(steps.get(action.kind, 0) for action in actions), default=0)


Key = tuple[int, int, Literal["F", "B"]]


def _messages(found: Verified, consumed: bool) -> dict[Key, list[Part]]:
    """What passes from device to device, in the order of the senders' or the receivers' rows.

    A message is named by the part that yields it.
    """
    lines: dict[Key, list[Part]] = defaultdict(list)
    for row in found.schedule.rows:
        for action in row:
            if action.kind not in "FBI":
                continue
            forward = action.kind == "F"
            step = (1 if forward else -1) * (-1 if consumed else 1)
            here, there = (action.micro, action.stage), (action.micro, action.stage + step)
            if there not in found.device_of or found.device_of[here] == found.device_of[there]:
                continue
            maker, reader = (there, here) if consumed else (here, there)
            key: Key = (found.device_of[maker], found.device_of[reader], "F" if forward else "B")
            lines[key].append(maker)
    return lines


def _buffers(sent: list[Part], read: list[Part]) -> int:
    """The messages that have arrived and are not consumed yet, at most, if no more are taken."""
    position = {part: number for number, part in enumerate(sent)}
    taken = accumulate((position[part] + 1 for part in read), max)
    return max(arrived - number for number, arrived in enumerate(taken))


# --- versions of parameters ----------------------------------------------------------------------


def _check_updates(found: Verified, where: Where) -> None:
    """Refuse gradients that no update takes, replicas, and versions that are not there yet."""
    schedule = found.schedule
    devices = Counter(stage for held in found.held for stage in held)
    for device, row in enumerate(schedule.rows):
        last: dict[int, Action | None] = dict.fromkeys(found.held[device])
        for index, action in enumerate(row):
            before = last[action.stage]
            if action.kind == "U" and (before is None or before.micro != action.micro):
                last_pass = f"{before}" if before else "no backward pass since the last update"
                message = f"{action} comes after {last_pass}"
                help = "an update has the number of the micro-batch whose gradients come last"
                ways = []
                if before is not None:
                    right = action._replace(micro=before.micro)
                    new = (*row[:index], right, *row[index + 1 :])
                    ways = [(f"write `{right.text(device)}`", {device: new})]
                _refuse("MD0526", message, where((device, index)), help=help, ways=ways)
            if action.kind in "BWU":
                last[action.stage] = None if action.kind == "U" else action
        for stage, left in last.items():
            if left is not None:
                last_update = Action("U", left.micro, stage)
                help = f"end the row with {last_update}"
                title = f"end the row with `{last_update.text(device)}`"
                ways = [(title, {device: (*row, last_update)})]
                message = f"no update takes the gradients of {left}"
                _refuse("MD0526", message, None, help=help, ways=ways)
            if devices[stage] > 1:
                message = f"stage {stage} is on {devices[stage]} devices, and updated on each"
                help = "with updates during a step, put each stage on one device"
                fail("MD0526", message, help=help)
    for version in found.versions:
        _check_there(found, version)


def _check_there(found: Verified, versions: StageVersions) -> None:
    """Refuse a forward pass that would read what no update has made yet."""
    stage, updates = versions.stage, 0
    for action in found.schedule.rows[found.device_of[0, stage]]:
        if action.stage == stage:
            updates += action.kind == "U"
            read = versions.forward[action.micro]
            if action.kind == "F" and read > updates:
                message = f"{action} reads version {read}, and {updates} updates stand before it"
                help = "let an update take the gradients of more micro-batches"
                fail("MD0526", message, help=help)


def _versions(schedule: ScheduleTable, device: int, stage: int) -> StageVersions:
    """The versions of a stage, from the order of its row and the rule of the schedule."""
    row = [action for action in schedule.rows[device] if action.stage == stage]
    forward, backward, applied = _counted(row)
    if schedule.weights == "buffered":
        forward = backward = {micro: max(0, batch - 1) for micro, batch in applied.items()}
    elif schedule.weights == "stashed":
        backward = forward
    stale = {micro: version - forward[micro] for micro, version in applied.items()}
    copies = 1 if schedule.weights in ("latest", "corrected") else _copies(row, forward)
    return StageVersions(stage, _listed(forward), _listed(backward), _listed(stale), copies)


def _listed(of: Mapping[int, int]) -> tuple[int, ...]:
    """The values of micro-batches, in the order of these."""
    return tuple(value for _, value in sorted(of.items()))


def _counted(row: list[Action]) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """By micro-batch, the updates before its passes, and before the update that takes it."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    applied: dict[int, int] = {}
    waiting, updates = [], 0
    for action in row:
        if action.kind == "F":
            forward[action.micro] = updates
        elif action.kind in "BI":
            backward[action.micro] = updates
        if action.kind in "BW":
            waiting.append(action.micro)
        if action.kind == "U":
            applied |= dict.fromkeys(waiting, updates)
            waiting, updates = [], updates + 1
    return forward, backward, applied


def _copies(row: list[Action], read: Mapping[int, int]) -> int:
    """The most versions at once: the newest one, and those that passes in flight still read."""
    flying: set[int] = set()
    most, updates = 1, 0
    for action in row:
        updates += action.kind == "U"
        if action.kind == "F":
            flying.add(action.micro)
        elif action.kind in "BW":
            flying.discard(action.micro)
        most = max(most, len({updates, *(read[micro] for micro in flying)}))
    return most
