"""The files that processes hand each other are read back as written, or refused."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.engines.execution import InputSource
from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.engines.torchrun import (
    ROOT_CAUSE,
    TERMINATED,
    earliest_of,
    error_of,
    reports_in,
    unexplained,
)
from meshdsl.backends.engines.watchdog import Processes
from meshdsl.backends.generate.contract import Contract, Prefill
from meshdsl.backends.generate.sampling import Sampling
from meshdsl.backends.generate.task import Task, TextPiece
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.train.job import DataFiles, Ending, Job, Trouble
from meshdsl.backends.train.lock import locked
from meshdsl.diagnostics import DiagnosticError
from meshdsl.disk_cache import from_json
from meshdsl.named.optimizers import LearningRate
from tests.poison import poisoned

FILES = DataFiles("d.txt", "held.txt", 0.5, "batch", "bytes", ("a", "b"), "ab", "steps")
MADE: dict[str, Any] = {
    "job": Job(FILES, 3, about={"program": "p"}, rate=LearningRate("cosine", 0.1)),
    "task": Task(
        Contract("t", "p", "l", "w", 4, None, ("s",), prefill=Prefill("t", "c", "l", 3)),
        *(((1, 2), (3,)), (3, 2), 4, "f", TextCodec("chars", "abcd")),
        *(Sampling(0.5, 2, 0.9, 7), (3,), ("d",)),
    ),
    "ending": Ending(
        0, 1, "finished", {"loss": 0.5}, {"loss": 1.0}, 3, "tokens", 0.5, "ck", Trouble(1, "")
    ),
    "piece": TextPiece(1, (2, 3), "ab", "length", 0.5),
    "run": InputSource("a.npz", None, 7, None),
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
    "diagnostics": [{"code": "MD0511", "message": "m", "help": "h"}],
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


def reported(rank: int, **facts: Any) -> Any:
    return {**REPORT, "rank": rank, "diagnostics": [], "position": None, **facts}


IN_COLLECTIVE = {"in_collective": True, "line": 4}
ENDED = {**IN_COLLECTIVE, "kind": TERMINATED}
LOG = f"{ROOT_CAUSE}:\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
FAILURES: dict[str, tuple[list[Any], str, str, str]] = {
    "killed": ([reported(0, **ENDED)], LOG, "MD0721", "device 1 was killed; device 0 was waiting"),
    "silent": ([reported(0, **IN_COLLECTIVE)], "", "MD0721", "the process of device 1 was killed"),
    "refused": ([reported(0), reported(1, code="MD0501")], "", "MD0501", "m"),
    "a diagnostic": ([reported(1), REPORT], "", "MD0511", "m"),
    "a cause": ([reported(0, **IN_COLLECTIVE), reported(1)], LOG, "MD0701", "device 1 failed"),
    "collectives": ([reported(0, **ENDED), reported(1, **IN_COLLECTIVE)], "", "MD0701", "device 1"),
    "ended": ([reported(0, **ENDED), reported(1, **ENDED)], "a log", "MD0705", "a log"),
    "nothing": ([], "a log", "MD0705", "a log"),
}
"""The reports of two processes, the log of torchrun, and what is told."""


@pytest.mark.parametrize("case", FAILURES)
def test_one_error_is_told_of_all_reports(case: str) -> None:
    reports, log, code, message = FAILURES[case]
    error = error_of(Emitted(ProgramText("", {})), 2, reports, log)
    (told,) = error.diagnostics if isinstance(error, DiagnosticError) else (error.diagnostic,)
    assert told.code == code
    assert message in told.message
    assert told.help


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
