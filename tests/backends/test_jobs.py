"""The files that processes hand each other are read back as written, or refused."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.engines.torchrun import RunJob, earliest_of, reports_in, unexplained
from meshdsl.backends.engines.watchdog import Processes
from meshdsl.backends.generate.task import Task
from meshdsl.backends.train.job import DataFiles, Ending, Job, Trouble
from meshdsl.backends.train.lock import locked
from meshdsl.diagnostics import DiagnosticError
from meshdsl.disk_cache import from_json
from meshdsl.named.optimizers import LearningRate
from tests.poison import poisoned

FILES = DataFiles("d.txt", "held.txt", 0.5, "batch", "bytes", ("a", "b"), "ab", "steps")
MADE: dict[str, Any] = {
    "job": Job(FILES, 3, about={"program": "p"}, rate=LearningRate("cosine", 0.1)),
    "task": Task("t", "p", "l", "w", ("s",), (1, 2), 3, 4, "f"),
    "ending": Ending(
        0, 1, "finished", {"loss": 0.5}, {"loss": 1.0}, 3, "tokens", 0.5, "ck", Trouble(1, "")
    ),
    "run": RunJob("a.npz", None, 7, None),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_read_is_of_the_types_it_was_written_with(kind: str) -> None:
    made, refused = MADE[kind], 0
    content = asdict(made)
    assert from_json(json.dumps(content), type(made)) == made
    for name, other in poisoned(json.loads(json.dumps(content))):
        try:
            found = from_json(json.dumps(other), type(made))
        except ValueError:
            refused += 1
        else:
            assert isinstance(found, type(made)), name
    assert refused >= 20


REPORT = {
    **{"rank": 1, "code": None, "kind": "IndexError", "message": "m", "line": 3, "loops": {"i": 2}},
    **{"position": {"n": 4}, "in_collective": False, "collective": "all_reduce"},
    "diagnostics": [{"code": "MD0511", "message": "m", "help": None}],
}
ACTIVITY = {"pid": 7, "beat": 3, "mark": 12, "line": None, "collective": "", "outside": "o"}


@pytest.mark.parametrize("content", [REPORT, ACTIVITY], ids=["report.rank1", "at_work.rank1"])
def test_reports_of_another_form_are_none(content: dict[str, Any], tmp_path: Path) -> None:
    """They are read as they were written, or as if nothing had been."""
    is_report = content is REPORT
    path = tmp_path / ("report.rank1" if is_report else "at_work.rank1")

    def read() -> Any:
        return reports_in(tmp_path) if is_report else Processes(tmp_path, 2, {}).report(1)

    def shown() -> None:
        if is_report:
            earliest_of("", read(), {}) if read() else unexplained("")
        else:
            Processes(tmp_path, 2, {}).doing()

    path.write_text(json.dumps(content))
    assert read() == [REPORT] if is_report else ACTIVITY.items() <= read().items()
    refused = 0
    for _, other in poisoned(content):
        path.write_text(json.dumps(other))
        refused += not read()
        shown()
    path.write_text(json.dumps(content)[:-7])
    assert not read()
    assert refused >= 20


def test_an_owner_of_another_form_is_none(tmp_path: Path) -> None:
    """What the text of a lock file says is for people: the lock counts."""
    here = {"pid": 1, "host": socket.gethostname(), "since": "now"}
    for _, other in [*poisoned(here), ((), [7]), ((), None)]:
        path = tmp_path / ".lock"
        path.write_text(json.dumps(other))
        elsewhere = isinstance(other, dict) and other.get("host") != here["host"]
        assert _codes_of_locking(tmp_path) in ([[], ["MD0518"]] if elsewhere else [[]])
        path.unlink(missing_ok=True)
        tmp_path.mkdir(exist_ok=True)


def _codes_of_locking(folder: Path) -> list[str]:
    try:
        with locked(str(folder)):
            return []
    except DiagnosticError as error:
        return [diagnostic.code for diagnostic in error.diagnostics]
