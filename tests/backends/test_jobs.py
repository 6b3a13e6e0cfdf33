"""The files that processes hand each other are read back as written, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from meshdsl.backends.engines.torchrun import RunJob
from meshdsl.backends.generate.task import Task, task_from_json
from meshdsl.backends.train.job import (
    DataFiles,
    Ending,
    Job,
    Trouble,
    ending_from_dict,
    job_from_json,
)
from meshdsl.kept import checked
from tests.poison import poisoned

FILES = DataFiles("d.txt", "held.txt", 0.5, "batch", "bytes", ("a", "b"), "ab", "steps")
MADE: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "job": (Job(FILES, 3, about={"program": "p"}, rate={"lr": 0.1}), job_from_json),
    "task": (Task("t", "p", "l", "w", ("s",), (1, 2), 3, 4, "f"), task_from_json),
    "ending": (
        Ending(
            0, 1, "finished", {"loss": 0.5}, {"loss": 1.0}, 3, "tokens", 0.5, "ck", Trouble(1, "")
        ),
        lambda text: ending_from_dict(json.loads(text)),
    ),
    "run": (RunJob("a.npz", None, 7, None), lambda text: checked(json.loads(text), RunJob)),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_read_is_of_the_types_it_was_written_with(kind: str) -> None:
    made, read = MADE[kind]
    content = asdict(made)
    assert read(json.dumps(content)) == made
    refused = 0
    for name, other in poisoned(json.loads(json.dumps(content))):
        try:
            found = read(json.dumps(other))
        except ValueError:
            refused += 1
        else:
            assert isinstance(found, type(made)), name
    assert refused >= 20
