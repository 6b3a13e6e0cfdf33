"""Schedules in CSV files: read as they were written, and refused at the cell that is wrong."""

from __future__ import annotations

import random

import pytest

from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.schedule.csv_files import read, written, written_for_torch
from meshdsl.schedule.registry import generate, schedules

from .executor import random_table


@pytest.mark.parametrize("name", schedules())
def test_what_is_written_is_read(name: str) -> None:
    table = generate(name, 4, 8)
    found = read(Source("t.csv", written(table)), table.weights).schedule
    assert (found.rows, found.stages, found.micro) == (table.rows, table.stages, 8)


def test_both_forms_say_the_same() -> None:
    chance = random.Random(1)
    for _ in range(200):
        table = random_table(chance)
        homes = {(a.stage, d) for d, row in enumerate(table.rows) for a in row}
        if not all(table.rows) or len(homes) > table.stages:
            continue
        texts = (written(table), written_for_torch(table))
        assert [read(Source("t.csv", text)).schedule.rows for text in texts] == [table.rows] * 2


FINE = {
    "F0,F1,B0,B1\n": "F0 F1 B0 B1",
    "F0,,F1, B0 ,B1,,\n\n\n": "F0 F1 B0 B1",
    '"F0",F1,"B0",B1': "F0 F1 B0 B1",
    ",F0,B0\n,F0,B0\n": "F0 B0\nF0 B0",
    "0F0,0B0,\n": "F0 B0",
    "0UNSHARD,0F0,0SEND_F0,\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n": None,
    "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0I2,0W2,0RESHARD": "F0 F1 F2 B0 B1 I2 W2",
}


@pytest.mark.parametrize("text", FINE)
def test_empty_cells_and_what_is_derived_are_skipped(text: str) -> None:
    if FINE[text] is None:
        with pytest.raises(DiagnosticError, match="MD0522: B0@0 is missing"):
            read(Source("t.csv", text))
        return
    assert read(Source("t.csv", text)).schedule.text == FINE[text]


WRONG = {
    "F0,B0\nF0,b0\n": ("MD0520", 2, 4, "b0"),
    "F0, 1B0\n": ("MD0520", 1, 5, "1B0"),
    "0F0,B0\n": ("MD0520", 1, 5, "B0"),
    "0F0,(0B0;x)OVERLAP_F_B\n": ("MD0520", 1, 5, "(0B0;x)OVERLAP_F_B"),
    "F0;B0\n": ("MD0520", 1, 1, "F0;B0"),
    "F0,B0,F0\n": ("MD0523", 1, 7, "F0"),
    "B0,F0\n": ("MD0525", 1, 1, "B0"),
    "F0,F1,B1\n": ("MD0522", 1, 1, "F0,F1,B1"),
    "F0\n\nB0@0,F0@1,B0@1\n": ("MD0521", 2, 1, ""),
    "\n": ("MD0521", None, None, ""),
    "": ("MD0521", None, None, ""),
    "F0,U0,B0\n": ("MD0526", 1, 4, "U0"),
    "F\u0660,B0\n": ("MD0520", 1, 1, "F\u0660"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_at_its_cell(text: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read(Source("t.csv", text))
    (found,) = caught.value.diagnostics
    span = found.span
    where = (span.line, span.column, span.text) if span else (None, None, "")
    assert (found.code, *where) == WRONG[text]
    assert found.help


def test_any_text_is_a_table_or_refused() -> None:
    chance = random.Random(2)
    signs = [
        "F0",
        "B0",
        "F1",
        "B1",
        ",",
        ",",
        "\n",
        "0F0",
        "0B0",
        "@",
        "1",
        '"',
        ";",
        "(",
        ")",
        " ",
    ]
    for _ in range(3000):
        text = "".join(chance.choices(signs, k=chance.randint(0, 12)))
        try:
            found = read(Source("t.csv", text)).schedule
        except DiagnosticError as error:
            codes = {d.code for d in error.diagnostics}
            assert codes <= {f"MD052{n}" for n in range(7)}, text
        else:
            assert read(Source("t.csv", written(found))).schedule.rows == found.rows
