"""`minimize … with …` as text: the options that are not what they are without being given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshdsl.named.ir import DType
from meshdsl.named.optimizers import OPTIMIZERS, SCHEDULES, Optimizer
from meshdsl.named.schedules import Schedule


def optimizer_text(optimizer: Optimizer) -> str:
    """`adamw(lr=cosine(0.0003, 1000), clip=1.0)`."""
    return f"{optimizer.name}({', '.join(_options(optimizer))})"


def _options(optimizer: Optimizer) -> Iterator[str]:
    for name, option in OPTIMIZERS[optimizer.name].items():
        value = optimizer.option(name)
        if value != option.default:
            yield f"{name}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Schedule):
        return _schedule(value)
    if isinstance(value, DType):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _schedule(schedule: Schedule) -> str:
    if schedule.shape == "constant":
        if not schedule.warmup:
            return repr(schedule.peak)
        return f"linear_warmup({schedule.peak!r}, {schedule.warmup})"
    known = SCHEDULES[schedule.shape]
    values = {name: getattr(schedule, name) for name in known}
    given = [repr(schedule.peak), str(schedule.steps)]
    given += [f"{n}={values[n]!r}" for n in ("warmup", "final") if values[n] != known[n].default]
    return f"{schedule.shape}({', '.join(given)})"
