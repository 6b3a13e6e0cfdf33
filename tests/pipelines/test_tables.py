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

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError
from meshdsl.schedule.table import Action, of_rows, row_text
from meshdsl.schedule.verify import verify
from tests.pipelines.test_programs import PROGRAMS, compiled, hold_to, on_one_device, results

RUNS = int(os.environ.get("MESHDSL_CASES", "40"))
ROWS = re.compile(r"^SCHEDULE = \(.*?^\)", re.DOTALL | re.MULTILINE)
SIZES = ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8))
NAMES = ("two carries", "penalty inside")
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
    homes: list[int] | None = None,
) -> Rows:
    """The rows of a random execution: any action whose operands are there may be the next.

    `homes` are the devices of the stages; without them each has its own.
    """
    homes = homes or [*range(stages)]
    rows: Rows = [[] for _ in {*homes}]
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
        rows[homes[action.stage]].append(action)
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


SEVERAL = ((2, 4, 2), (2, 4, 4), (4, 4, 3), (1, 4, 2), (2, 2, 4))
"""Devices, stages and micro-batches; stages are dealt out at random, to each device as many."""


@pytest.mark.parametrize("seed", range(RUNS))
def test_stages_may_be_dealt_out_in_any_way(seed: int) -> None:
    random_ = random.Random(2000 + seed)
    devices, stages, micro = SEVERAL[seed % len(SEVERAL)]
    homes = [device for device in range(devices) for _ in range(stages // devices)]
    random_.shuffle(homes)
    rows = executed(stages, micro, random_, bool(seed % 2), homes)
    table = "\n".join(f"  {n}: {row_text(n, row)}" for n, row in enumerate(rows))
    table = f"schedule mine(stages={stages}, micro={micro}) {{\n{table}\n}}\n"
    text = PROGRAMS[NAMES[seed // len(SEVERAL) % len(NAMES)]].replace("OPT", "momentum(lr=0.1)")
    text = text.replace("b = 8", f"b = {4 * micro}")
    alone = on_one_device(text)
    mesh, rules = ("pipe:1", "l -> pipe") if devices == 1 else (f"pipe:{devices}", "l -> pipe")
    made = results(run_local(compiled(text + table, mesh, rules, "with mine[b]").text, seed=4))
    hold_to(made, alone, 2e-5)
