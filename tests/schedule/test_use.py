"""Schedules as layouts name them, and the tables that they mean."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import DiagnosticError, Source, Span
from meshdsl.schedule.registry import generate
from meshdsl.schedule.table import parsed
from meshdsl.schedule.use import ScheduleUse
from meshdsl.schedule.verification import verify

HERE = Span(Source("f", "with x"), 5, 6)
MINE = verify(parsed("F0 F1 B0 B1\nF0 B0 F1 B1"))


def test_the_table_of_a_schedule_by_name() -> None:
    use = ScheduleUse("interleaved", ("batch",), 8, HERE, {"chunks": 3, "recompute": "stage"})
    assert use.verified(4).schedule == generate("interleaved", 4, 8, {"chunks": 3})
    assert use.verified(4, 16).schedule == generate("interleaved", 4, 16, {"chunks": 3})
    assert (use.recompute, use.reduce, use.layers) == (True, "last", ())


def test_the_table_that_is_declared() -> None:
    use = ScheduleUse("mine", ("batch",), 2, HERE, {"layers": (3, 5)}, MINE)
    assert use.verified(2) is MINE
    assert use.layers == (3, 5)


@pytest.mark.parametrize(
    ("devices", "micro", "said"), [(3, 2, "2 rows, for 3 devices"), (2, 4, "not of 4")]
)
def test_a_declared_table_is_of_its_numbers(devices: int, micro: int, said: str) -> None:
    use = ScheduleUse("mine", ("batch",), None, HERE, table=MINE)
    with pytest.raises(DiagnosticError) as error:
        use.verified(devices, micro)
    (found,) = error.value.diagnostics
    assert said in found.message
    assert (found.code, found.span) == ("MD0536", HERE)
