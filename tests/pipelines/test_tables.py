"""Random tables: every one that is verified gives the numbers of one device, the rest is refused.

A valid table is the record of a random execution; others come from it by a random change. The text
of a program is the same for all tables but for its rows, which are put in here.
"""

from __future__ import annotations

import functools
import os
import random
import re

import pytest

from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.device.ir import Pipeline, StagePhase
from meshdsl.diagnostics import DiagnosticError
from meshdsl.pipeline import Compilation
from meshdsl.schedule.registry import schedules
from meshdsl.schedule.table import Action, of_rows, row_text
from meshdsl.schedule.verification import verify
from tests.covering import in_turn
from tests.pipelines.in_flight import counted
from tests.pipelines.test_cuts import PROGRAMS as NETWORKS
from tests.pipelines.test_cuts import rules_of
from tests.pipelines.test_programs import (
    PROGRAMS,
    compiled,
    hold,
    hold_bytes,
    hold_to,
    on_one_device,
    results,
)

RUNS = int(os.environ.get("MESHDSL_CASES", "6"))
ROWS = re.compile(r"^SCHEDULE = \(.*?^\)", re.DOTALL | re.MULTILINE)
SIZES = ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8))
NAMES = ("two carries", "penalty inside")
LOOPS = {"F": StagePhase.LOOP, "B": StagePhase.LOOP_BACKWARD}
Rows = list[list[Action]]


@functools.cache
def emitted(name: str, schedule: str, stages: int, micro: int) -> tuple[str, dict[str, Array]]:
    """The text for so many stages and micro-batches, and what one device makes of the program."""
    text = PROGRAMS[name].replace("OPT", "momentum(lr=0.1)")
    alone = on_one_device(text)
    made = compiled(text, f"pipe:{stages}", "l -> pipe", f"with {schedule}[b]({micro})")
    return made.text, alone


def executed(
    stages: int,
    micro: int,
    random_: random.Random,
    halves: bool = False,
    ways: list[list[int]] | None = None,
) -> Rows:
    """The rows of a random execution: any action whose operands are there may be the next.

    `ways` are the devices of the stages, for each micro-batch; without them each has its own.
    """
    ways = ways or [[*range(stages)]] * micro
    rows: Rows = [[] for _ in {home for way in ways for home in way}]
    done: set[Action] = set()
    parts = [(m, s) for m in range(micro) for s in range(stages)]
    todo = [Action("F", *part) for part in parts]
    for part in parts:
        whole, half = [Action("B", *part)], [Action("I", *part), Action("W", *part)]
        todo += half if halves and random_.random() < 0.5 else whole
    # Some tables keep to few micro-batches, others do all forward passes they can.
    leaning = random_.uniform(0.05, 0.95)
    while todo:
        ready = [a for a in todo if is_ready(a, stages, done)]
        forward = [a for a in ready if a.kind == "F"]
        backward = [a for a in ready if a.kind != "F"]
        first = forward and (not backward or random_.random() < leaning)
        action = random_.choice(forward if first else backward)
        rows[ways[action.micro][action.stage]].append(action)
        done.add(action)
        todo.remove(action)
    return rows


def is_ready(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether what an action reads is there."""
    kind, micro, stage = action
    if kind == "F":
        return stage == 0 or Action("F", micro, stage - 1) in done
    if kind == "W":
        return Action("I", micro, stage) in done
    later = {Action("B", micro, stage + 1), Action("I", micro, stage + 1)}
    return Action("F", micro, stage) in done and (stage == stages - 1 or bool(later & done))


def run(name: str, rows: Rows) -> tuple[dict[str, Array], dict[str, Array]]:
    """What the program returns and updates by a table, and on one device."""
    halves = any(a.kind in "IW" for row in rows for a in row)
    schedule = "zb_h1" if halves else "gpipe"
    text, alone = emitted(name, schedule, len(rows), sum(a.kind == "F" for a in rows[0]))
    table = "".join(f'    "{row_text(stage, row)}",\n' for stage, row in enumerate(rows))
    put, count = ROWS.subn(f"SCHEDULE = (\n{table})", text)
    assert count == 1
    return results(run_local(put, seed=4)), alone


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_table_gives_the_numbers_of_one_device(seed: int) -> None:
    random_ = random.Random(seed)
    rows = executed(*SIZES[seed % len(SIZES)], random_, halves=bool(seed % 2))
    found = verify(of_rows([tuple(row) for row in rows]))
    assert found.schedule.devices == len(rows)
    made, alone = run(NAMES[seed // len(SIZES) % len(NAMES)], rows)
    hold_to(made, alone, 2e-5)


def changed(rows: Rows, random_: random.Random) -> Rows:
    """Rows with an action moved, left out, done twice, or done for another micro-batch."""
    row = random_.choice([row for row in rows if len(row) > 1])
    at, to = random_.sample(range(len(row)), 2)
    match random_.randrange(4):
        case 0:
            row.insert(to, row.pop(at))
        case 1:
            del row[at]
        case 2:
            row.insert(to, row[at])
        case _:
            row[at] = row[at]._replace(micro=row[to].micro)
    return rows


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_changed_table_is_refused_or_right(seed: int) -> None:
    random_ = random.Random(1000 + seed)
    rows = executed(*SIZES[seed % len(SIZES)], random_, halves=bool(seed % 2))
    rows = changed(rows, random_)
    try:
        verify(of_rows([tuple(row) for row in rows]))
    except DiagnosticError:
        return
    made, alone = run("two carries", rows)
    hold_to(made, alone, 2e-5)


def declared(rows: Rows, stages: int, micro: int) -> str:
    """Rows as a file declares them."""
    table = "\n".join(f"  {n}: {row_text(n, row)}" for n, row in enumerate(rows))
    return f"schedule mine(stages={stages}, micro={micro}) {{\n{table}\n}}\n"


SEVERAL = ((2, 4, 2), (2, 4, 4), (4, 4, 3), (1, 4, 2), (2, 2, 4))
"""Devices, stages and micro-batches; stages are dealt out at random, to each device as many."""


@pytest.mark.parametrize("seed", range(RUNS))
def test_stages_may_be_dealt_out_in_any_way(seed: int) -> None:
    random_ = random.Random(2000 + seed)
    devices, stages, micro = SEVERAL[seed % len(SEVERAL)]
    homes = [device for device in range(devices) for _ in range(stages // devices)]
    random_.shuffle(homes)
    rows = executed(stages, micro, random_, bool(seed % 2), [homes] * micro)
    table = declared(rows, stages, micro)
    text = PROGRAMS[NAMES[seed // len(SEVERAL) % len(NAMES)]].replace("OPT", "momentum(lr=0.1)")
    text = text.replace("b = 8", f"b = {4 * micro}")
    alone = on_one_device(text)
    mesh, rules = ("pipe:1", "l -> pipe") if devices == 1 else (f"pipe:{devices}", "l -> pipe")
    made = results(run_local(compiled(text + table, mesh, rules, "with mine[b]").text, seed=4))
    hold_to(made, alone, 2e-5)


def in_pairs(stages: int, micro: int, random_: random.Random) -> list[list[int]]:
    """Ways of micro-batches where devices have each other's stages; each of them goes both ways."""
    order = random_.sample(range(stages), stages)
    ways = [[*range(stages)] for _ in range(micro)]
    for one, other in zip(order[::2], order[1::2], strict=True):
        apart = random_.random() < 0.7
        first = random_.randrange(2)
        for n, way in enumerate(ways):
            turned = (n + first) % 2 if n < 2 else random_.randrange(2)
            pair = (one, other) if apart else (one, one)
            swapped = (other, one) if apart else (other, other)
            way[one], way[other] = swapped if turned else pair
    return ways


@pytest.mark.parametrize("seed", range(RUNS))
def test_stages_may_be_on_two_devices_each(seed: int) -> None:
    """Micro-batches take either device of a pair, or both of its stages stay on one."""
    random_ = random.Random(3000 + seed)
    stages, micro = ((2, 2), (2, 4), (4, 4), (4, 3))[seed % 4]
    rows = executed(stages, micro, random_, bool(seed % 3), in_pairs(stages, micro, random_))
    text = PROGRAMS[NAMES[seed // 4 % len(NAMES)]].replace("OPT", "adamw(lr=0.01, clip=0.3)")
    text = text.replace("b = 8", f"b = {4 * micro}")
    text += declared(rows, stages, micro)
    made = compiled(text, f"pipe:{stages}", "l -> pipe", "with mine[b]")
    run, most = counted(made)
    hold_messages(made, run)
    assert most == pipeline_of(made).known.peaks
    hold_to(results(run), on_one_device(text), 2e-5)


REFUSED = {
    "stay on a device where others leave it": ("F0 F0@1 B0@1 B0 F1 B1", "F1 B1"),
    "on several devices, other than in pairs": ("F0 B0", "F1@0 B1@0", "F0@1 B0@1 F1@1 B1@1"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_stages_on_several_devices_in_other_ways_are_refused(message: str) -> None:
    rows = "\n".join(f"{n}: {row}" for n, row in enumerate(REFUSED[message]))
    text = PROGRAMS["two carries"].replace("OPT", "sgd(lr=0.1)").replace("l = 4", "l = 6")
    text += f"schedule mine(stages=2, micro=2) {{\n{rows}\n}}\n"
    made = compiled(text, f"pipe:{len(REFUSED[message])}", "l -> pipe", "with mine[b]")
    with pytest.raises(DiagnosticError, match=message) as caught:
        made.checked()
    assert [d.code for d in caught.value.diagnostics] == ["MD0335"]
    assert all(d.span and d.help for d in caught.value.diagnostics)


def pipeline_of(made: Compilation) -> Pipeline:
    (pipe,) = (node for node in made.device.body if isinstance(node, Pipeline))
    return pipe


def hold_messages(made: Compilation, run: LocalRun) -> None:
    """What a step sends are the messages of the table, and the bytes that were said."""
    hold_bytes(run, made)
    pipe = pipeline_of(made)
    carried = {kind: len(pipe.loop(part).carries) for kind, part in LOOPS.items()}
    told = sum(len(line.messages) * carried[line.kind] for line in pipe.known.lines)
    sent = sum(n for device in run.sent for one, n in device.items() if one.kind == "send")
    assert sent == told


WITH_OPTIONS = ("chimera, forward=2", "hanayo, waves=2")
"""Schedules with options that make another table."""


@in_turn(name=(*schedules(), *WITH_OPTIONS), devices=(4, 2))
def test_what_is_known_by_name_runs_as_it_is_verified(name: str, devices: int) -> None:
    """Micro-batches in flight on each device, and messages, as they are counted while it runs."""
    micro = 2 * devices
    name, comma, option = name.partition(",")
    text = PROGRAMS["two carries"].replace("OPT", "momentum(lr=0.1)")
    text = text.replace("b = 8", f"b = {2 * micro}")
    text = text.replace("l = 4", f"l = {16 if 'waves' in option else 8}")
    text = text.replace(" + 0.1 * aux", "")
    use = f"with {name}[b]({micro}{comma}{option})"
    made = compiled(text, f"pipe:{devices}", "l -> pipe", use)
    run, most = counted(made)
    hold_messages(made, run)
    assert most == pipeline_of(made).known.peaks
    if not schedules()[name].asynchronous:
        hold_to(results(run), on_one_device(text), 2e-5)


def apart(stages: int, micro: int, random_: random.Random) -> list[list[int]]:
    """Ways of micro-batches over any devices, all of them with the same stages on one device."""
    blocks = random_.choice([[0, 1, 2, 3], [0, 1, 1, 2], [0, 0, 1, 1], [0, 1, 0, 1]])
    count = random_.randint(max(blocks) + 1, 4)
    while True:
        each = [random_.sample(range(count), max(blocks) + 1) for _ in range(micro)]
        ways = [[devices[block] for block in blocks] for devices in each]
        if {home for way in ways for home in way} == {*range(count)}:
            return ways


@pytest.mark.parametrize("seed", range(RUNS))
def test_stages_of_a_network_may_be_on_any_devices(seed: int) -> None:
    """All devices have all parameters: the devices of a stage may be many, or two of three."""
    random_ = random.Random(4000 + seed)
    stages, micro = 4, (2, 4, 8)[seed % 3]
    ways = apart(stages, micro, random_)
    rows = executed(stages, micro, random_, bool(seed % 2), ways)
    name = ("residual", "several values", "tied", "layers")[seed % 4]
    text = NETWORKS[name].replace("OPT", "adamw(lr=0.01, clip=0.3)")
    mesh, cuts = f"pipe:{len(rows)}", rules_of(name, stages, "pipe:4")
    made = compiled(text + declared(rows, stages, micro), mesh, cuts, "with mine[b]")
    hold(made, text, 2e-5)
