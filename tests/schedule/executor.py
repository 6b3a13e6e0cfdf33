"""A table carried out, action by action, on numbers: what is right is known without the verifier.

Stage s is x -> (s + 2) * x + m for micro-batch m, the loss of a micro-batch the square of what
comes out. Whole numbers are exact, so gradients of parameters have one right value.
"""

from __future__ import annotations

import random
from collections import Counter

from meshdsl.schedule.table import Action, Kind, Row, ScheduleTable


class Broken(Exception):
    """The table cannot be carried out, or something is left undone."""


class Stuck(Broken):
    """Some devices wait for ever; `waiting` has what each of them wants to do."""

    def __init__(self, waiting: dict[int, Action]) -> None:
        super().__init__(str(waiting))
        self.waiting = waiting


def right(schedule: ScheduleTable) -> dict[int, int]:
    """The gradient of every stage's factor, over all micro-batches, on one device."""
    found = dict.fromkeys(range(schedule.stages), 0)
    for micro in range(schedule.micro):
        inputs = [micro + 1]
        for stage in range(schedule.stages):
            inputs.append((stage + 2) * inputs[-1] + micro)
        slope = 2 * inputs[-1]
        for stage in reversed(range(schedule.stages)):
            found[stage] += slope * inputs[stage]
            slope *= stage + 2
    return found


class Machine:
    """The devices, their memories and what is under way. One action is carried out at a time."""

    def __init__(self, schedule: ScheduleTable) -> None:
        self.schedule = schedule
        self.at = [0] * len(schedule.rows)
        self.inputs = {(m, 0): m + 1 for m in range(schedule.micro)}
        self.slopes: dict[tuple[int, int], int] = {}
        self.kept: list[dict[tuple[int, int], int]] = [{} for _ in schedule.rows]
        self.halves: list[dict[tuple[int, int], int]] = [{} for _ in schedule.rows]
        self.gradients: Counter[int] = Counter()
        self.added: Counter[int] = Counter()
        self.most = [0] * len(schedule.rows)

    def run(self) -> dict[int, int]:
        """Carry out everything; the gradients."""
        while any(self._step(device) for device in range(len(self.at))):
            pass
        waiting = {
            device: row[at]
            for device, (row, at) in enumerate(zip(self.schedule.rows, self.at, strict=True))
            if at < len(row)
        }
        if waiting:
            raise Stuck(waiting)
        left = [*self.inputs, *self.slopes, *(p for kept in self.kept + self.halves for p in kept)]
        wanted = dict.fromkeys(range(self.schedule.stages), self.schedule.micro)
        if left or self.added != wanted or not all(self.schedule.rows):
            raise Broken("something is left undone")
        return dict(self.gradients)

    def _step(self, device: int) -> bool:
        row = self.schedule.rows[device]
        if self.at[device] == len(row) or not self._act(device, row[self.at[device]]):
            return False
        self.at[device] += 1
        flying = len(self.kept[device]) + len(self.halves[device])
        self.most[device] = max(self.most[device], flying)
        return True

    def _act(self, device: int, action: Action) -> bool:
        part = (action.micro, action.stage)
        kept, halves = self.kept[device], self.halves[device]
        match action.kind:
            case "F" if part in self.inputs and part not in kept:
                kept[part] = self.inputs.pop(part)
                self._forward(part, (action.stage + 2) * kept[part] + action.micro)
            case "B" | "I" if part in self.slopes and part in kept:
                slope, seen = self.slopes.pop(part), kept.pop(part)
                if action.stage:
                    self.slopes[action.micro, action.stage - 1] = slope * (action.stage + 2)
                halves[part] = slope * seen
                if action.kind == "B":
                    self._add(halves, part)
            case "W" if part in halves:
                self._add(halves, part)
            case "U":
                pass
            case _:
                return False
        return True

    def _forward(self, part: tuple[int, int], value: int) -> None:
        micro, stage = part
        if stage + 1 == self.schedule.stages:
            self.slopes[part] = 2 * value
        else:
            self.inputs[micro, stage + 1] = value

    def _add(self, halves: dict[tuple[int, int], int], part: tuple[int, int]) -> None:
        self.gradients[part[1]] += halves.pop(part)
        self.added[part[1]] += 1


# --- random tables -------------------------------------------------------------------------------


def random_table(chance: random.Random) -> ScheduleTable:
    """A table that can be carried out: what devices did that took what was ready at random."""
    devices, micro = chance.randint(1, 4), chance.randint(1, 4)
    stages = chance.randint(devices, 2 * devices)
    homes = [*range(devices), *(chance.randrange(devices) for _ in range(stages - devices))]
    chance.shuffle(homes)
    replicas = chance.random() < 0.3
    rows: list[list[Action]] = [[] for _ in range(devices)]
    parts = [(m, s) for m in range(micro) for s in range(stages)]
    home = {(m, s): chance.randrange(devices) if replicas and m else homes[s] for m, s in parts}
    whole = {part: chance.random() < 0.5 for part in parts}
    ready = [Action("F", m, 0) for m in range(micro)]
    while ready:
        action = ready.pop(chance.randrange(len(ready)))
        rows[home[action.micro, action.stage]].append(action)
        ready += _enabled(action, stages, whole)
    return ScheduleTable(stages, micro, tuple(map(tuple, rows)))


def _enabled(action: Action, stages: int, whole: dict[tuple[int, int], bool]) -> list[Action]:
    """What can be done once an action is."""
    micro, stage = action.micro, action.stage
    if action.kind == "F" and stage + 1 < stages:
        return [Action("F", micro, stage + 1)]
    if action.kind == "W":
        return []
    found = [Action("W", micro, stage)] if action.kind == "I" else []
    before = stage if action.kind == "F" else stage - 1
    if before >= 0:
        found.append(Action("B" if whole[micro, before] else "I", micro, before))
    return found


KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def changed(table: ScheduleTable, chance: random.Random) -> ScheduleTable:
    """The table with some actions dropped, doubled, swapped, moved or renamed."""
    rows = [list(row) for row in table.rows]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        row = chance.choice([r for r in rows if r] or [[Action("F", 0, 0)]])
        at, other = chance.randrange(len(row)), chance.randrange(len(row))
        match chance.choice(["drop", "double", "swap", "swap", "swap", "move", "rename"]):
            case "drop":
                del row[at]
            case "double":
                target = chance.choice(rows)
                target.insert(chance.randint(0, len(target)), row[at])
            case "swap":
                row[at], row[other] = row[other], row[at]
            case "move":
                target = chance.choice(rows)
                target.insert(chance.randint(0, len(target)), row.pop(at))
            case "rename":
                row[at] = Action(chance.choice(KINDS), row[at].micro, row[at].stage)
    found: tuple[Row, ...] = tuple(map(tuple, rows))
    return ScheduleTable(table.stages, table.micro, found)
