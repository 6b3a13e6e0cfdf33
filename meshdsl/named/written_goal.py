"""`minimize … with …` as text: the options that are not what they are without being given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshdsl.ir.types import DType
from meshdsl.named.optimizers import OPTIMIZERS, SCHEDULES, Optimizer, Schedule
from meshdsl.named.sizes import how_of
from meshdsl.named.written_expressions import amount


def optimizer_text(optimizer: Optimizer) -> str:
    """`adamw(lr=cosine(0.0003, 1000), clip=1.0)`."""
    return f"{optimizer.name}({', '.join(_options(optimizer))})"


def _options(optimizer: Optimizer) -> Iterator[str]:
    for name, option in OPTIMIZERS[optimizer.name].items():
        value = optimizer.option(name)
        if value != option.default or how_of(value) is not None:
            yield f"{name}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Schedule):
        return _schedule(value)
    if isinstance(value, DType):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else _number(value)


def _number(value: int | float) -> str:
    return repr(value) if how_of(value) is None else amount(value).text


def _schedule(schedule: Schedule) -> str:
    if schedule.shape == "constant":
        if not schedule.warmup:
            return _number(schedule.peak)
        return f"linear_warmup({_number(schedule.peak)}, {_number(schedule.warmup)})"
    known = SCHEDULES[schedule.shape]
    given = [_number(schedule.peak), _number(schedule.steps)]
    for name, value in (("warmup", schedule.warmup), ("final", schedule.final)):
        if value != known[name].default or how_of(value) is not None:
            given.append(f"{name}={_number(value)}")
    return f"{schedule.shape}({', '.join(given)})"
