"""Schedules of the learning rate: as numbers, and written in scalar operators.

A schedule rises over its first `warmup` steps and then stays, or falls until step `steps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshdsl.named.ir import DType, TensorType, Value

Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate for every step: `peak`, times what warming up and falling make of it.

    The first `warmup` steps rise in equal parts, the last of them to `peak`. A `cosine` (Loshchilov
    and Hutter 2017, without restarts) or `linear` one then falls, and is `final` from step `steps`
    on; a `constant` one stays.
    """

    shape: Shape
    peak: float
    steps: int = 0
    warmup: int = 0
    final: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of the step before which `step` steps were done (0, 1, …)."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rise * (self.final + (self.peak - self.final) * self._height(step))

    def _height(self, step: int) -> float:
        """How much of the way from `final` up to `peak` is left after `step` steps."""
        if self.shape == "constant":
            return 1.0
        done = min(1.0, max(0.0, (step - self.warmup) / (self.steps - self.warmup)))
        return (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done


class UpdateEmitter(Protocol):
    """Where an update is written to: it becomes the last part of a training step."""

    def emit(
        self, name: str, *ins: Value, follows: Value | None, **attrs: Any
    ) -> tuple[Value, ...]:
        """Apply operator `name` in phase `update`.

        The results have the role `state` and follow the parameter `follows`; None: no parameter.
        """

    def state(
        self, name: str, type: TensorType, follows: Value | None, copies: Value | None = None
    ) -> Value:
        """Declare a state that is kept from step to step; at first zeros, or what it `copies`."""

    def constant(self, number: int | float, dtype: DType) -> Value:
        """A number as a value without dims."""

    def update(self, old: Value, new: Value) -> None:
        """Record that the parameter or state `old` is `new` in the next step."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operators of one result, on values and numbers; numbers become constants of `dtype`."""

    emitter: UpdateEmitter
    dtype: DType
    follows: Value | None = None

    def __call__(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """The result of operator `name`."""
        ins = (x if isinstance(x, Value) else self.number(x) for x in operands)
        (out,) = self.emitter.emit(name, *ins, follows=self.follows, **attrs)
        return out

    def number(self, number: float) -> Value:
        """A constant."""
        return self.emitter.constant(number, self.dtype)


def emit_rate(schedule: Schedule, do: Arithmetic, step: Value) -> Value:
    """The learning rate as a scalar in the dtype of `do`; the i32 `step` counts the steps done."""
    if schedule.shape == "constant" and not schedule.warmup:
        return do.number(schedule.peak)
    step = do("cast", step, dtype=do.dtype)
    rate = _fall(schedule, do, step)
    if not schedule.warmup:
        return rate
    rise = do("div", do("add", step, 1.0), float(schedule.warmup))
    return do("mul", do("minimum", rise, 1.0), rate)


def _fall(schedule: Schedule, do: Arithmetic, step: Value) -> Value:
    """The learning rate without warming up."""
    if schedule.shape == "constant":
        return do.number(schedule.peak)
    since = do("sub", step, float(schedule.warmup)) if schedule.warmup else step
    done = do("div", since, float(schedule.steps - schedule.warmup))
    done = do("minimum", do("maximum", done, 0.0) if schedule.warmup else done, 1.0)
    span = schedule.peak - schedule.final
    if schedule.shape == "linear":
        return do("sub", schedule.peak, do("mul", done, span))
    height = do("add", do("cos", do("mul", done, math.pi)), 1.0)
    return do("add", do("mul", height, span / 2), schedule.final)
