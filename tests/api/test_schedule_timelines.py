"""`md.schedule`: what it prints, draws and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.schedule.csv_files import read
from meshdsl.syntax.parse import read_source
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.notebook.markup import drawing, pictures, texts

__all__ = ["cli"]

batch = md.dim("batch", 8)
ROWS = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
mine = md.scheduled(ROWS, batch)
uneven = md.scheduled("gpipe", "batch", micro=2, slices="3 1")
GPIPE: dict[str, Any] = {"stages": 4, "micro": 8}

CALLS: dict[str, Callable[[], Any]] = {
    "one_f_one_b --stages 4 --micro 8": lambda: md.schedule("one_f_one_b", **GPIPE),
    "gpipe --stages 3 --micro 2 --times F=1:2:1,send=1/2 --late": lambda: md.schedule(
        "gpipe", stages=3, micro=2, times={"F": [1, 2, 1], "send": Fraction(1, 2)}, late=True
    ),
    "interleaved --stages 2 --micro 4 --chunks 3": lambda: md.schedule(
        md.scheduled("interleaved", batch, micro=4, chunks=3), stages=2
    ),
    "two_bw --stages 2 --micro 4 --batch 2 --times I=0.5": lambda: md.schedule(
        "two_bw", stages=2, micro=4, batch=2, times="I=0.5"
    ),
    "terapipe --stages 2 --micro 1 --tokens 16 --unit 4 --slice-times slice=8,token=1": lambda: (
        md.schedule(
            "terapipe", stages=2, micro=1, tokens=16, unit=4, slice_times={"slice": 8, "token": 1}
        )
    ),
}


@pytest.mark.parametrize("command", CALLS)
def test_it_prints_and_says_what_the_command_does(
    command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    made = CALLS[command]()
    done = cli("schedule", *command.split())
    assert str(made).split() == done.out.split()
    assert made.json == json.loads(cli("schedule", *command.split(), "--json").out)


def test_it_is_a_function_however_the_package_of_its_name_is_imported() -> None:
    import meshdsl.schedule.times

    assert callable(meshdsl.schedule)
    assert md.schedule("gpipe", **GPIPE).makespan == 30


def test_a_table_is_drawn_from_its_rows_its_file_and_its_layout(tmp_path: Path) -> None:
    found = md.schedule(ROWS, times={"F": 2})
    assert found.rows == ROWS
    path = tmp_path / "table.csv"
    found.csv(str(path))
    assert read(read_source(str(path))).schedule.text == "\n".join(ROWS)
    for other in (md.schedule(path, times="F=2"), md.schedule(mine, times={"F": 2})):
        assert (other.makespan, other.bubble) == (found.makespan, found.bubble)
        assert (other.rows, other.laws) == (ROWS, [])


def test_updates_of_rows_read_what_is_said() -> None:
    rows = ["F0 F1 B0 U0 F2 B1 U1 B2 U2", "F0 B0 U0 F1 B1 U1 F2 B2 U2"]
    for weights, copies in (("latest", 1), ("stashed", 2)):
        made = md.schedule(rows, weights=weights).json
        assert (made["weights"], made["versions"][0]["copies"]) == (weights, copies)
    declared = md.scheduled(rows, batch, weights="stashed")
    assert md.schedule(declared).json["weights"] == "stashed"


def widths(html: str) -> Iterator[set[float]]:
    """The widths of the actions in each picture."""
    for picture in pictures(html):
        boxes = [box for box in picture.iter() if box.get("height") == "24"]
        yield {float(box.get("width", "0")) for box in boxes}


def test_it_draws_itself_and_others_on_one_time_axis() -> None:
    found = md.schedule("one_f_one_b", **GPIPE)
    data = found._repr_mimebundle_()
    assert data["text/plain"] == str(found)
    (picture,) = pictures(data["text/html"])
    assert {"device 3", "7", "30"} <= set(texts(picture))
    long = md.schedule("gpipe", stages=4, micro=8, times="F=2")
    beside = found.beside(slow=long).beside(short=md.schedule("gpipe", stages=2, micro=2))
    alone, slow, short = widths(beside.html())
    assert min(alone) == min(short)
    assert slow == {max(alone)}
    last = beside.text().splitlines()[-3:]
    assert [line.split()[:2] for line in last] == [
        ["one_f_one_b", "30"],
        ["slow", "41"],
        ["short", "8"],
    ]


def test_files_are_written(tmp_path: Path) -> None:
    found = md.schedule("zb_h1", **GPIPE)
    svg, csv, torch = (tmp_path / name for name in ("a.svg", "a.csv", "b.csv"))
    found.save(svg)
    found.csv(str(csv))
    found.csv(str(torch), torch=True)
    with pytest.raises(md.ProgramError, match="MD0501"):
        found.csv(str(tmp_path / "no" / "a.csv"))
    drawing(svg.read_text(encoding="utf-8"))
    ours, theirs = (read(read_source(str(p))).schedule.rows for p in (csv, torch))
    assert ours == theirs
    large = md.schedule("gpipe", stages=16, micro=128)
    assert '`.save("FILE.svg")` draws it' in str(large)


WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {
    "name": (lambda: md.schedule("gpip", **GPIPE), "MD0528", '"gpip"'),
    "size": (lambda: md.schedule("gpipe", stages=4), "MD0532", '"gpipe"'),
    "zero": (lambda: md.schedule("gpipe", stages=4, micro=0), "MD0533", "0"),
    "text": (lambda: md.schedule("gpipe", stages="4", micro=8), "MD0533", '"4"'),  # type: ignore[call-overload]
    "count": (lambda: md.schedule("gpipe", chunks=2, **GPIPE), "MD0529", '"gpipe"'),
    "times": (lambda: md.schedule("gpipe", times="F=1:2", **GPIPE), "MD0530", '"F=1:2"'),
    "part": (lambda: md.schedule("gpipe", times={"X": 1}, **GPIPE), "MD0530", '{"X": 1}'),
    "no times": (lambda: md.schedule("gpipe", times=3, **GPIPE), "MD0533", "3"),  # type: ignore[call-overload]
    "weights": (lambda: md.schedule("gpipe", weights="stashed", **GPIPE), "MD0532", '"gpipe"'),
    "rule": (lambda: md.schedule(["F0 B0"], weights="old"), "MD0602", '["F0 B0"]'),
    "no rule": (lambda: md.schedule(["F0 B0"], weights=2), "MD0533", "2"),  # type: ignore[call-overload]
    "no update": (lambda: md.schedule(["F0 B0"], weights="stashed"), "MD0532", '["F0 B0"]'),
    "two sizes": (lambda: md.schedule(["F0 B0"], stages=1), "MD0532", '["F0 B0"]'),
    "unequal": (lambda: md.schedule(uneven, stages=2), "MD0532", "uneven"),
    "two rules": (lambda: md.schedule(mine, weights="latest"), "MD0532", "mine"),
    "action": (lambda: md.schedule(["F0 X0"]), "MD0520", '["F0 X0"]'),
    "deadlock": (lambda: md.schedule(ROWS[::-1]), "MD0525", "ROWS[::-1]"),
    "row": (lambda: md.schedule([8]), "MD0533", "[8]"),  # type: ignore[list-item]
    "nothing": (lambda: md.schedule(8), "MD0533", "8"),  # type: ignore[call-overload]
    "file": (lambda: md.schedule("none.csv"), "MD0010", '"none.csv"'),
    "unit": (lambda: md.schedule("gpipe", unit=8, **GPIPE), "MD0532", '"gpipe"'),
    "slices": (lambda: md.schedule("gpipe", tokens=8, **GPIPE), "MD0532", '"gpipe"'),
    "late": (lambda: md.schedule("terapipe", tokens=8, late=True, **GPIPE), "MD0532", '"terapipe"'),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_is_told_in_the_words_of_python(what: str) -> None:
    make, code, place = WRONG[what]
    with pytest.raises(md.ProgramError) as caught:
        make()
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert found.span is not None
    assert found.span.text == place
    assert found.help is not None
    assert "`--" not in found.message + found.help


def test_torch_has_no_word_for_updates(tmp_path: Path) -> None:
    with pytest.raises(md.ProgramError, match="MD0531") as caught:
        md.schedule("pipedream", **GPIPE).csv(str(tmp_path / "a.csv"), torch=True)
    assert caught.value.diagnostics[0].help == (
        'leave out `torch`; or write `.csv("FILE")`: that form has it'
    )
    assert not list(tmp_path.iterdir())
