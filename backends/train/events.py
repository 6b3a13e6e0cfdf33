"""The events of a training run, as its processes write them: a line of JSON each.

A line may be damaged, by a full disk for example. One of another form than these is no event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from meshdsl.backends.train.job import Event
from meshdsl.codes import CODES
from meshdsl.diagnostics import Severity
from meshdsl.disk_cache import from_json

Step = Annotated[int, Meta(ge=0, lt=10**18)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Kind(TypedDict):
    """What any event has."""

    kind: str


class StepMeasurements(TypedDict):
    """The measurements of a step; see `Event`."""

    lr: NotRequired[float]
    grad_norm: NotRequired[float]
    memory: Count


class Begin(TypedDict):
    """The beginning of a run."""

    kind: Literal["begin"]
    start: Step
    steps: Step
    amount: Count
    unit: str
    predicted: Count | None
    memory_of: str


class Stepped(TypedDict):
    """A step that was taken."""

    kind: Literal["step"]
    step: Annotated[int, Meta(ge=1, lt=10**18)]
    values: dict[str, bool | Integer | float]
    measured: StepMeasurements
    seconds: Annotated[float, Meta(ge=0)]


class Evaluated(TypedDict):
    """An evaluation."""

    kind: Literal["eval"]
    step: Step
    values: dict[str, float]


class CheckpointSaved(TypedDict):
    """A checkpoint."""

    kind: Literal["checkpoint"]
    step: Step
    path: str


class Watched(TypedDict):
    """Steps that are run again to find where a number stopped being one."""

    kind: Literal["watch"]
    first: Step
    last: Step


class DiagnosticNoted(TypedDict):
    """A diagnostic, less its place."""

    kind: Literal["note"]
    code: Annotated[str, Meta(pattern=r"^MD\d{4}$")]
    text: str
    severity: Severity
    help: str | None


KINDS: Mapping[str, type] = {
    "begin": Begin,
    "step": Stepped,
    "eval": Evaluated,
    "checkpoint": CheckpointSaved,
    "watch": Watched,
    "note": DiagnosticNoted,
}
"""The form of each kind of event."""


def event_from_line(line: str, loss: str) -> Event:
    """The event of a line, of a program with this loss. Raises ValueError for what is none."""
    kind = from_json(line, Kind)["kind"]
    if kind not in KINDS:
        raise ValueError("no event of a run")
    event: Event = from_json(line, KINDS[kind])
    json.dumps(event, ensure_ascii=False).encode("utf-8")  # half a surrogate is no text
    if kind == "step" and loss not in event["values"]:
        raise ValueError("a step without its loss")
    if kind == "note" and event["code"] not in CODES:
        raise ValueError("a code that there is not")
    return event


def heard(line: str, loss: str) -> Event:
    """The event of a line or, where that is damaged, the note that it was left out."""
    try:
        return event_from_line(line, loss)
    except ValueError:
        return {
            "kind": "note",
            "code": "MD0724",
            "text": f"a line in which device 0 reports its progress is damaged: {line[:60]!a}",
            "severity": "warning",
            "help": "the training goes on; see that the folder for temporary files has room "
            "(TMPDIR)",
        }
