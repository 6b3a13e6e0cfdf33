"""What is published of a schedule is what is simulated of its table; names of the literature."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.report.document import Listing
from meshdsl.report.schedule_charts import described, shown
from meshdsl.schedule.laws import CONDITIONS, Law, Passes
from meshdsl.schedule.registry import called, generate, laws_of_idle, meant, schedules
from meshdsl.schedule.table import Action, ScheduleTable
from meshdsl.schedule.times import TimedSchedule, Times, timed
from meshdsl.schedule.verification import Verified, needs, verify
from tests.cli.command import Cli
from tests.cli.conftest import cli

__all__ = ["cli"]

DEVICES = (2, 4, 8)
MICRO = range(1, 33) if "MESHDSL_CASES" in os.environ else (1, 2, 3, 4, 7, 8, 12, 15, 16, 24, 32)

B_IS_F = Times(weights=(Fraction(0),), early=False)
B_IS_2F = Times(early=False)
UNEVEN = Times((Fraction(2),), (Fraction(1),), (Fraction(4),), early=False)
TIMES: Mapping[Passes, tuple[Times, ...]] = {
    "whole": (B_IS_F, B_IS_2F, UNEVEN),
    "equal": (B_IS_F,),
    "twice": (B_IS_2F,),
    "thirds": (Times(),),
    "window": (Times(),),
    "pairs": (Times(),),
    "doubled": (B_IS_2F,),
}
ALONE: Mapping[Passes, Mapping[str, int]] = {
    "pairs": {"F": 1, "I": 1, "W": 1, "B": 2},
    "doubled": {"F": 1, "B": 2},
}
"""How long passes take where the two of a pair are one action."""

OPTIONS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "chimera": ({}, {"forward": 2}),
    "hanayo": ({}, {"waves": 2}),
    "interleaved": ({}, {"chunks": 3}),
}
"""Options that a law is looked at with."""


def tables(name: str) -> Iterator[ScheduleTable]:
    for devices, micro in itertools.product(DEVICES, MICRO):
        for options in OPTIONS.get(name, ({},)):
            with contextlib.suppress(DiagnosticError):
                yield generate(name, devices, micro, options)


def blocks(row: tuple[Action, ...], second: str) -> list[tuple[Action, ...]]:
    """The actions of a row; a forward pass and a pass of the second kind behind it are one."""
    made: list[tuple[Action, ...]] = []
    for action in row:
        before = made[-1] if made else ()
        if action.kind == second and len(before) == 1 and before[0].kind == "F":
            made[-1] = (*before, action)
        else:
            made.append((action,))
    return made


def idle_in_pairs(table: ScheduleTable, took: Mapping[str, int], second: str = "B") -> set[int]:
    """How long devices are idle where what a block yields is there when all of it is done."""
    places = {a: (d, n) for d, row in enumerate(table.rows) for n, a in enumerate(row)}
    rows = [blocks(row, second) for row in table.rows]
    free, at, done = [0] * len(rows), [0] * len(rows), dict[Action, int]()
    while any(n < len(row) for n, row in zip(at, rows, strict=True)):
        for device, row in enumerate(rows):
            while at[device] < len(row):
                block = row[at[device]]
                read = {n for a in block for n in needs(table, a, places)} - {*block}
                if not read <= {*done}:
                    break
                free[device] = max([free[device], *(done[n] for n in read)])
                free[device] += sum(took[a.kind] for a in block)
                done |= dict.fromkeys(block, free[device])
                at[device] += 1
    busy = [sum(took[a.kind] for a in row) for row in table.rows]
    return {max(free) - each for each in busy}


def share(found: Verified, times: Times, passes: Passes) -> Fraction:
    """The idle share of a step, as a law means it."""
    made = timed(found, times)
    if passes in ALONE:
        second = "B" if passes == "pairs" else "F"
        (idle,) = idle_in_pairs(found.schedule, ALONE[passes], second)
        return Fraction(idle) / (idle + made.busy[0])
    if passes == "window":
        return max(made.waiting) / made.makespan
    return made.bubble


@pytest.mark.parametrize("name", schedules())
def test_laws_are_exact(name: str) -> None:
    record = schedules()[name]
    assert record.in_flight is not None
    held: Counter[Law] = Counter()
    for table in tables(name):
        found = verify(table)
        numbers = {"D": table.devices, "N": table.micro, **table.options}
        peaks = [record.in_flight.of({**numbers, "s": s}) for s in range(table.devices)]
        assert all(law in (None, peak) for law, peak in zip(peaks, found.peaks, strict=True))
        for law, wanted in laws_of_idle(table):
            held[law] += 1
            for times in TIMES[law.passes]:
                assert share(found, times, law.passes) == wanted, (table.devices, table.micro)
    assert {*held} == {*record.idle}
    assert min(held.values()) >= 6


def test_forward_doubling_is_less_idle_than_units_in_a_row() -> None:
    """At B = 2F: D/2 - 1 bubbles fewer of 2D micro-batches, and never as idle as 1F1B.

    Less than the published 2(D - 2), too, where each micro-batch of a pair is sent when it is done.
    """
    for devices in DEVICES:
        for micro in (2 * devices, 4 * devices, 32):
            row, twice = (
                verify(generate("chimera", devices, micro, {"forward": n})) for n in (1, 2)
            )
            units = (devices - 2) * (micro // devices + 1)
            assert {*timed(row, B_IS_2F).idle} == {units}
            (in_pairs,) = idle_in_pairs(twice.schedule, ALONE["doubled"], "F")
            assert units - in_pairs == 2 * (devices // 2 - 1) * (micro // devices - 1)
            apart = 3 * (devices - 2) // 2 if micro == 2 * devices else 2 * (devices - 2)
            assert {*timed(twice, B_IS_2F).idle} == {apart}
            assert {*timed(twice, Times()).idle} == {devices - 2}
            equal = devices - 2 if micro == 2 * devices else 3 * (devices - 2) // 2
            assert {*timed(twice, B_IS_F).idle} == {equal}
            most = 2 * devices if micro > 2 * devices or devices == 2 else None
            assert most is None or {*twice.peaks} == {most}
    for devices, micro in itertools.product(DEVICES, range(4, 33, 4)):
        with contextlib.suppress(DiagnosticError):
            twice = verify(generate("chimera", devices, micro, {"forward": 2}))
            one_way = verify(generate("one_f_one_b", devices, micro))
            assert timed(twice, B_IS_2F).bubble <= timed(one_way, B_IS_2F).bubble


@pytest.mark.parametrize(
    ("devices", "micro", "forward", "help"),
    [
        (4, 12, 2, "multiple of 8, or a multiple of 4 below 8"),
        (4, 6, 2, "of 4 below 8"),
        (4, 8, 3, "use 1 or 2"),
    ],
)
def test_forward_doubling_of_other_numbers_is_refused(
    devices: int, micro: int, forward: int, help: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        generate("chimera", devices, micro, {"forward": forward})
    (found,) = caught.value.diagnostics
    assert found.code == "MD0529"
    assert found.help is not None
    assert help in found.help


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_dualpipe_waits_as_published_in_pairs(name: str) -> None:
    """(D/2 - 1)(F&B + B - 3W), and D - 1 of a V, where I takes as long as F and F&B is F + B.

    So in DeepSeek-V3 (DeepSeek-AI 2024, table 2, with twice the parameters and D + 1 activations).
    As sent here less is idle: what F yields is on its way before B is done.
    """
    for devices, F, W in itertools.product(DEVICES, (1, 2), (0, 1)):
        apart = devices // 2 - 1 if name == "dualpipe" else devices - 1
        for micro in (2 * devices, 32):
            table = generate(name, devices, micro)
            whole = F + W
            law = apart * ((F + whole) + whole - 3 * W)
            assert idle_in_pairs(table, {"F": F, "I": F, "W": W, "B": whole}) == {law}
            each = (Fraction(F),)
            made = timed(verify(table), Times(each, each, (Fraction(W),)))
            assert set(made.idle) == {apart * (F + whole - 2 * W)}
    held = verify(generate("dualpipe", 8, 16)).held
    assert [sum(stage in each for each in held) for stage in range(8)] == [2] * 8


def test_hanayo_is_as_idle_as_its_authors_say_in_the_whole_step() -> None:
    """(2D - 2) / (3DW + D - 1) for N = D and B = 2F (Liu et al. 2023, as others quote it).

    The idle time is 2D - 2 beside 3DW of work, but in the denominator D - 1 of it are missing.
    """
    for devices, waves in itertools.product(DEVICES, (1, 2)):
        found = verify(generate("hanayo", devices, devices, {"waves": waves}))
        work, idle = 3 * devices * waves, 2 * devices - 2
        assert timed(found, B_IS_2F).bubble == Fraction(idle, work + idle)
        assert timed(found, B_IS_2F).bubble < Fraction(idle, work + devices - 1)
        assert {*timed(found).idle} == {idle}


def sentences(made: TimedSchedule) -> str:
    return str(shown(made, Listing.of("")))


def test_the_textbook_is_beside_what_is_simulated(cli: Cli) -> None:
    done = cli("schedule", "one_f_one_b", "--stages", "4", "--micro", "8")
    said = " ".join(done.out.split())
    assert "1/5 of the devices' time is idle (20 %)." in said
    law = "(D - 1) / (N + D - 1) = 3/11 with whole backward passes"
    assert f"Textbook: {law}; here 1/5." in said
    late = cli("schedule", "one_f_one_b", "--stages", "4", "--micro", "8", "--late")
    assert f"Textbook: {law}; here the same." in " ".join(late.out.split())
    facts = described(timed(verify(generate("naive", 3, 4))))
    assert [law["share"] for law in facts["laws"]] == ["2/3"]


def test_there_is_none_where_the_law_does_not_hold() -> None:
    made = timed(verify(generate("interleaved", 4, 6)))
    assert described(made)["laws"] == []
    assert "Textbook" not in sentences(made)


def test_the_list_has_every_schedule(cli: Cli) -> None:
    done = cli("schedule", "--list")
    assert done.code == 0
    told = json.loads(cli("schedule", "--list", "--json").out)["schedules"]
    assert [each["name"] for each in told] == [*schedules()]
    for each in told:
        record = schedules()[each["name"]]
        assert each["options"] == record.options
        assert each["source"] == record.source
        assert each["meaning"] == record.meaning
        assert [law["formula"] for law in each["idle"]] == [law.text for law in record.idle]
        assert all(law["condition"] in CONDITIONS.values() for law in each["idle"])
        assert each["name"] in done.out
    assert cli("schedule", "--list", "gpipe").codes == ["error[MD0532]"]
    assert cli("schedule", "--list", "--micro", "4").codes == ["error[MD0532]"]
    assert cli("schedule").codes == ["error[MD0604]"]


NAMES = {
    "zero_bubble": "did you mean `zb_h1`, `zb_h2` or `zb_v`?",
    "ZeroBubble": "did you mean `zb_h1`, `zb_h2` or `zb_v`?",
    "1f1b": "did you mean `one_f_one_b`?",
    "ZB-H1": "did you mean `zb_h1`?",
    "pipedream-2bw": "did you mean `two_bw`?",
    "gpip": "did you mean `gpipe`?",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_literature_are_known(name: str) -> None:
    assert meant(name) == NAMES[name]


def test_no_name_of_the_literature_is_one_of_ours() -> None:
    others = {other for record in schedules().values() for other in record.also}
    assert not others & {*schedules()}
    assert all(called(other) for other in others)


def test_a_layout_says_which_one_is_meant(cli: Cli, tmp_path) -> None:
    path = tmp_path / "a.mdsl"
    path.write_text(
        "dim b = 4, l = 2\nmesh m = { p: 2 }\nlayout pp { l -> p } with zb1p[b](2)\n"
        "program f(x[b]) {\n  param w[l]\n  repeat l { x = x * w }\n  return x\n}\n"
    )
    assert "help: did you mean `zb_h1`?" in cli("check", str(path)).err
    assert cli("check", "--fix", str(path)).code == 0
    assert "with zb_h1[b](2)" in path.read_text()
