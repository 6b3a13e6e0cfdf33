"""The lines in which processes report a training run: what is written is read, damage is told."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from meshdsl.backends.engines.torchrun import relay
from meshdsl.backends.train.devices import ending_in, train_local
from meshdsl.backends.train.events import KINDS, event_from_line, heard
from meshdsl.backends.train.job import DataFiles, Event, Job
from meshdsl.report.training_progress import Bar, PlainLines
from tests.backends.training_text import line

NOTE = {
    "kind": "note", "code": "MD0507", "text": "every gradient is 0", "severity": "note",
    "help": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The events of a run that ends well, and of one whose loss is no number; and a note."""
    folder = tmp_path_factory.mktemp("events")
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    np.savez(folder / "d.npz", x=x, y=x @ np.array([1, -2, 3], np.float32))
    files, found = DataFiles(str(folder / "d.npz"), fraction=0.5), list[Event]()
    job = Job(files, 3, seed=4, eval_every=2, checkpoint=str(folder / "ck"), checkpoint_every=2)
    train_local(line(evaluated=True), job, found.append, lambda: False)
    train_local(line(rate=4), Job(files, 200), found.append, lambda: False)
    return [*found, NOTE]


def test_what_is_written_is_read(events: list[Event]) -> None:
    assert {event["kind"] for event in events} == KINDS.keys()
    for event in events:
        text = json.dumps(event)
        assert json.dumps(event_from_line(text, "loss")) == text
    assert any(not math.isfinite(e["values"]["loss"]) for e in events if e["kind"] == "step")


def one_of_each(events: list[Event]) -> list[Event]:
    return list({event["kind"]: event for event in events}.values())


ODD: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, "", "\ud800", "\x1b[31m", [], {}, [1], {"a": None}, math.nan,
]  # fmt: skip


def damages(events: list[Event]) -> Iterator[str]:
    """Lines cut short, with other characters, and with other values at every place."""
    rng = random.Random(33)
    for event in one_of_each(events):
        text = json.dumps(event)
        yield from (text[:end] for end in range(0, len(text), 3))
        for at in range(0, len(text), 2):
            yield text[:at] + chr(rng.choice([*range(32, 127), 0, 0xFFFD])) + text[at + 1 :]
        for key in event:
            yield json.dumps({k: v for k, v in event.items() if k != key})
            yield from (json.dumps({**event, key: value}) for value in ODD)
            inner = event[key] if isinstance(event[key], dict) else {}
            for name in inner:
                yield json.dumps({**event, key: {k: v for k, v in inner.items() if k != name}})
                yield from (json.dumps({**event, key: {**inner, name: v}}) for v in ODD)
    yield from ("[" * 100_000, "9" * 5_000, "null", "[]", "NaN", '{"kind": []}')


def test_damaged_lines_are_refused_or_can_be_shown(events: list[Event]) -> None:
    """Nothing else is raised, neither here nor where events are shown."""
    refused = 0
    shown: list[PlainLines] = []
    for kind, terminal in ((PlainLines, False), (Bar, True)):
        console = Console(file=io.StringIO(), force_terminal=terminal, highlight=False)
        shown.append(kind(console, "a run"))
    for text in damages(events):
        try:
            event = event_from_line(text, "loss")
        except ValueError:
            refused += 1
            continue
        for each in shown:
            each.tell(event)
    for each in shown:
        each.close()
    assert refused > 500


def test_a_damaged_line_is_told_and_the_others_are_passed_on(
    events: list[Event], tmp_path: Path
) -> None:
    path, told = tmp_path / "events", list[Event]()
    good = [json.dumps(event).encode() for event in events[:2]]
    path.write_bytes(good[0] + b"\n\xff\x00{\x1b\n" + good[1] + b"\n" + good[0][:9])
    with open(path, encoding="utf-8", errors="replace") as file:
        relay(file, lambda line: told.append(heard(line, "loss")))
        with open(path, "ab") as more:
            more.write(good[0][9:] + b"\n")
        relay(file, lambda line: told.append(heard(line, "loss")))
    first, note, second, last = told
    assert [first, second, last] == [events[0], events[1], events[0]]
    assert (note["kind"], note["code"], note["severity"]) == ("note", "MD0724", "warning")
    assert "\x1b" not in note["text"]


def test_an_ending_that_was_cut_short_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ending.json"
    assert ending_in(tmp_path) is None
    for text in ("", "{", '{"how": 3}', "[]", "\ud800"):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert ending_in(tmp_path) is None
