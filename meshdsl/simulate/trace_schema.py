"""What a trace that is compared with may hold: the types of the fields that are used.

There may be more in it. Nothing of a trace is believed before it was here: somebody may have
written it by hand, or edited it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

Time = Annotated[float, Meta(ge=0, le=1e24)]
"""A time or a length: of any numbers of them, the sum is a number."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class TraceOrigin(Struct):
    """By what a trace was written."""

    made_by: str = field(name="made by")


class TraceMaker(Struct):
    """A trace of any maker that says so."""

    otherData: TraceOrigin


class Head(Struct):
    """What a trace is of: see `meshdsl.simulate.trace.whole`."""

    seconds: Time
    program: str = ""
    mesh: dict[str, int] = {}
    layout: str | None = None


class AnyEvent(Struct):
    """An event of any kind."""

    ph: str
    pid: int = 0


class Trace(Struct):
    """A trace."""

    otherData: Head
    traceEvents: list[AnyEvent]


class Args(Struct):
    """What is told of a statement; one without an operator is not compared."""

    line: int
    op: str = ""
    file: str = ""
    phase: str = ""
    trips: Count = 1


class Slice(Struct):
    """An event of a statement."""

    pid: int
    ts: Time
    dur: Time
    args: Args
    tid: int = 0
    cat: str = ""
