"""What the verifier accepts is what can be carried out, and what it says is so."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest

from meshdsl.diagnostics import Diagnostic, DiagnosticError
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import Action, ScheduleTable, of_rows, parsed
from meshdsl.schedule.times import Times, timed
from meshdsl.schedule.verification import verify
from tests.together import together

from .executor import Broken, Machine, Stuck, changed, random_table, right

TABLES = 3000


def refusal(table: ScheduleTable) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        verify(table)
    (found,) = caught.value.diagnostics
    assert found.help
    return found


def made(name: str, devices: int, micro: int) -> ScheduleTable | None:
    """The table; None where there is none of these numbers."""
    try:
        return generate(name, devices, micro)
    except DiagnosticError as error:
        codes = [d.code for d in error.diagnostics]
    assert codes == ["MD0529"]
    return None


@together(name=schedules(), devices=(1, 2, 3, 4, 6), micro=(1, 2, 4, 6, 12))
def test_what_is_known_by_name_can_be_carried_out(name: str, devices: int, micro: int) -> None:
    table = made(name, devices, micro)
    if table is None:
        return
    found = verify(table)
    machine = Machine(table)
    assert machine.run() == right(table)
    assert found.peaks == tuple(machine.most)
    assert table.devices == devices
    assert parsed(table.text).rows == table.rows


@pytest.mark.parametrize("seed", range(4))
def test_random_tables_are_accepted_and_do_what_is_said(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(TABLES // 4):
        table = random_table(chance)
        if not all(table.rows):
            continue
        found = verify(table)
        machine = Machine(table)
        assert machine.run() == right(table), table.text
        assert found.peaks == tuple(machine.most)
        assert len(set(found.order)) == sum(map(len, table.rows))
        within_bounds(table)


def within_bounds(table: ScheduleTable) -> None:
    """No device is faster than its work, and all together no slower than one after the other."""
    found = timed(verify(table), Times())
    assert max(found.busy) <= found.makespan <= sum(found.busy)
    for row in found.rows:
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))


def test_random_changes_are_refused_where_they_break_something() -> None:
    chance = random.Random(7)
    codes = Counter(
        _code_of(changed(random_table(chance), chance)) for _ in range(TABLES)
    )  # fmt: skip
    assert set(codes) == {"", *(f"MD052{n}" for n in range(1, 6))}, codes
    assert codes[""] >= 100, "some changes break nothing"


def _code_of(table: ScheduleTable) -> str:
    """The code that a table is refused with, which has to be right; empty where it is fine."""
    stuck: Stuck | None = None
    try:
        Machine(table).run()
    except Stuck as error:
        stuck = error
    except Broken:
        pass
    else:
        verify(table)
        return ""
    found = refusal(table)
    if found.code == "MD0525":
        assert stuck is not None
        cycle_is_real(found.message, stuck)
    elif found.code != "MD0521":
        assert re.search(r"[FBIW]\d+@\d+", found.message), found.message
    return found.code


def cycle_is_real(message: str, stuck: Stuck) -> None:
    """Each device of the message is where it says, and the next one has not done what it needs."""
    waits = re.findall(r"device (\d+) waits at (\w+)@(\d+) for (\w+)@(\d+)", message)
    assert waits
    for device, action, stage, _, _ in waits:
        assert str(stuck.waiting[int(device)]) == f"{action}@{stage}"
    assert len({device for device, *_ in waits}) == len(waits)


REFUSED = {
    "F0 B0\nF0": ("MD0522", "B0@1 is missing"),
    "F0\nF0 B0": ("MD0522", "B0@0 is missing"),
    "F0 I0": ("MD0522", "W0@0 is missing"),
    "F0 B0 F0": ("MD0523", "F0@0 occurs twice, on device 0"),
    "F0 B0 I0 W0": ("MD0523", "B0@0 and I0@0 both occur: B is I and W"),
    "F0 B0\nF0@0 F0 B0": ("MD0523", "F0@0 occurs twice, on device 0 and 1"),
    "F0\nF0 B0 B0@0": ("MD0524", "B0@0 is on device 1, F0@0 on device 0"),
    "F0 B0\n\nF0@1 B0@1": ("MD0521", "device 1 has nothing to do"),
    "": ("MD0521", "the schedule holds no actions"),
    "B0 F0": (
        "MD0525",
        "deadlock: device 0 waits at B0@0 for F0@0, which comes after it",
    ),
    "F0 B0 F1 B1\nF0 F1 B0 B1": (
        "MD0525",
        "deadlock: device 0 waits at B0@0 for B0@1, device 1 waits at F1@1 for F1@0",
    ),
    "F0 B0 U0 F1 B1": ("MD0526", "no update takes the gradients of B1@0"),
    "F0 B0 U1 F1 B1": ("MD0526", "U1@0 comes after B0@0"),
    "U0 F0 B0": ("MD0526", "U0@0 comes after no backward pass since the last update"),
    "F0 B0 U0 F1@1 B1@1 U1@1\nF0 B0 U0 F1@0 B1@0 U1@0": (
        "MD0526",
        "stage 0 is on 2 devices, and updated on each",
    ),
    "F0 B0 X0": ("MD0520", "`X0` is no action of a schedule"),
    "F0 B0 F": ("MD0520", "`F` is no action of a schedule"),
    "F0 B0 F9999999999": ("MD0520", "`F9999999999` is no action of a schedule"),
    "F0 B0 F999999@9": (
        "MD0521",
        "a schedule of 10 stages of 1,000,000 micro-batches is too large",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_table_is_refused_with_what_is_wrong(text: str) -> None:
    code, message = REFUSED[text]
    with pytest.raises(DiagnosticError) as caught:
        verify(parsed(text))
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (code, message)
    assert found.help


def test_the_numbers_of_a_schedule_are_those_it_is_declared_with() -> None:
    (row,) = parsed("F0 B0 F1 B1").rows
    assert refusal(ScheduleTable(1, 1, (row,))).message == "there is no F1@0 in this schedule"
    assert refusal(ScheduleTable(1, 3, (row,))).message == "F2@0 is missing"
    assert refusal(ScheduleTable(2, 2, (row,))).message == "F0@1 is missing"


def test_no_pass_reads_what_is_not_there_yet() -> None:
    """Batches of two micro-batches on three stages: the first stage is too far ahead."""
    rows = parsed("F0 F1 F2 F3 F4 B0 B1 U1 F5 B2 B3 U3 B4 B5 U5").rows
    early = of_rows(rows, "buffered")
    found = refusal(early)
    assert (found.code, found.message) == (
        "MD0526",
        "F4@0 reads version 1, and 0 updates stand before it",
    )
    verify(of_rows(rows, "stashed"))


def test_messages_that_are_not_read_in_order_are_counted() -> None:
    rows = ("F0 F1 F2 B0 B1 B2", "F2 F1 F0 B0 B1 B2")
    forward, backward = verify(parsed("\n".join(rows))).lines
    assert (forward.kind, forward.source, forward.target, forward.buffers) == ("F", 0, 1, 3)
    assert (backward.kind, backward.source, backward.target, backward.buffers) == ("B", 1, 0, 1)
    assert forward.messages == ((0, 0), (1, 0), (2, 0))
    assert verify(parsed("F0 F1 B0 B1\nF1 F0 B0 B1")).lines[0].buffers == 2


def test_gradients_in_another_order_are_told() -> None:
    assert verify(parsed("F0 F1 B0 B1")).in_order
    late = verify(parsed("F0 F1 I0 I1 W1 W0"))
    assert late.accumulation == {(0, 0): (1, 0)}
    assert not late.in_order


def test_actions_are_written_with_their_stage_where_it_is_not_the_devices() -> None:
    assert Action("F", 3, 5).text(5) == "F3"
    assert Action("F", 3, 5).text(1) == str(Action("F", 3, 5)) == "F3@5"
