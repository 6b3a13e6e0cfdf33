"""A schedule as a layout names it: `with one_f_one_b[batch](8)`, and the table that this means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from typing import Literal, cast

from meshdsl.diagnostics import DiagnosticError, Fix, Span, counted, fail
from meshdsl.records import dataclass
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import ANNEAL
from meshdsl.schedule.times import Times
from meshdsl.schedule.verification import Verified, verify
from meshdsl.syntax.call_edits import written_anew

Option = int | str | tuple[int, ...]

Reduce = Literal["last", "each"]


@dataclass(frozen=True)
class ScheduleUse:
    """The schedule of a layout.

    `dims` are cut into `micro` micro-batches; without dims, `micro` is None, and those are taken
    that the optimizer accumulates. `options` are those written: `chunks` and the like of the
    schedule itself, `layers`, `slices`, `recompute`, `backward`, `reduce`. `table` is that of a
    schedule which the file declares. `apart` is a dim that has been cut into so many batches of
    their own, and the axis along which they are, in time. `forward`: of a program without a
    backward pass, which takes the forward passes of the table alone.
    """

    name: str
    dims: tuple[str, ...]
    micro: int | None
    span: Span
    options: Mapping[str, Option] = field(default_factory=dict)
    table: Verified | None = None
    apart: tuple[str, int, str] | None = None
    forward: bool = False

    def __str__(self) -> str:
        """What stands behind `with`; options as they are written."""
        micro = [] if self.micro is None or self.table else [str(self.micro)]
        words = ", ".join([*micro, *(f"{key}={_said(v)}" for key, v in self.options.items())])
        dims = f"[{', '.join(self.dims)}]" if self.dims else ""
        return f"{self.name}{dims}" + (f"({words})" if words else "")

    @property
    def layers(self) -> tuple[int, ...]:
        """How many iterations of the loop each stage has; empty where they are as many on all."""
        return cast(tuple[int, ...], self.options.get("layers", ()))

    @property
    def slices(self) -> tuple[int, ...]:
        """How much each micro-batch has of the dims that are cut, if that is said."""
        return cast(tuple[int, ...], self.options.get("slices", ()))

    @property
    def unequal(self) -> tuple[int, ...]:
        """The `slices`; empty where they are equal."""
        return self.slices if len(set(self.slices)) > 1 else ()

    @property
    def counts(self) -> tuple[str, ...]:
        """The options that the schedule counts by; a declared table has none."""
        return () if self.table is not None else tuple(schedules()[self.name].options)

    @property
    def asynchronous(self) -> bool:
        """Whether parameters are updated on the way."""
        return self.updates and not self.forward

    @property
    def updates(self) -> bool:
        """Whether the table of the schedule has updates; a forward pass has none."""
        if self.table is not None:
            return self.table.schedule.updates
        return schedules()[self.name].asynchronous

    @property
    def anneal(self) -> int:
        """After how many updates the steps of `corrected` are whole."""
        return cast(int, self.options.get("anneal", ANNEAL))

    @property
    def recompute(self) -> bool:
        """Whether a stage keeps what it received alone, and computes the rest of it again."""
        return self.options.get("recompute") == "stage" and not self.forward

    @property
    def splits_backward(self) -> bool:
        """Whether all input gradients of a backward pass come before its weight gradients."""
        return self.options.get("backward") == "split"

    @property
    def reduce(self) -> Reduce:
        """Whether gradients are reduced behind a stage's last backward pass or behind each."""
        return cast(Reduce, self.options.get("reduce", "last"))

    def verified(self, devices: int, micro: int | None = None) -> Verified:
        """The table for so many devices and micro-batches (its own number for None), verified.

        Raises MD0529 for numbers that the schedule cannot be made for, MD0536 for those that a
        declared table is not of.
        """
        table = self._verified(devices, self.micro if micro is None else micro)
        return table.forward if self.forward else table

    def _verified(self, devices: int, micro: int | None) -> Verified:
        if self.table is not None:
            return self._declared(self.table, devices, micro)
        assert micro is not None, "the micro-batches of a schedule over `accumulate` are counted"
        numbers = tuple((key, n) for key, n in self.options.items() if isinstance(n, int))
        try:
            return _generated(self.name, devices, micro, numbers, self.layers)
        except DiagnosticError as error:
            placed = (replace(d, span=self.span) for d in error.diagnostics)
            raise DiagnosticError(*placed) from None

    def _declared(self, table: Verified, devices: int, micro: int | None) -> Verified:
        schedule = table.schedule
        if schedule.devices != devices:
            message = f"schedule `{self.name}` has {schedule.devices} rows, for {devices} devices"
            fail("MD0536", message, self.span, help="write a row for each device of the axis")
        if micro is not None and schedule.micro != micro:
            described = counted(schedule.micro, "micro-batch")
            message = f"schedule `{self.name}` is of {described}, not of {micro}"
            help = f"cut the batch into {schedule.micro}: `with {self.name}[batch]`"
            if self.micro is None and not self.dims:
                help = f"write `accumulate={schedule.micro}` to the optimizer, or {help}"
            fail("MD0536", message, self.span, help=help)
        return table


def synchronous(use: ScheduleUse) -> tuple[Fix, ...]:
    """The fix that takes one stage on each device, and one update of all at the end of a step.

    What the micro-batches and the stages have stays as it is written.
    """
    table = None if use.table is None else use.table.schedule
    micro = use.micro if table is None or not use.dims else table.micro
    has_one_each = table is None or table.stages == table.devices
    kept = ("recompute", "slices", *(("layers",) if has_one_each else ()))
    options = {key: value for key, value in use.options.items() if key in kept}
    other = replace(use, name="one_f_one_b", micro=micro, options=options, table=None)
    return written_anew(use.span, str(other))


def _said(option: Option) -> str:
    return f'"{" ".join(map(str, option))}"' if isinstance(option, tuple) else str(option)


@lru_cache(maxsize=8)
def _generated(
    name: str,
    devices: int,
    micro: int,
    options: tuple[tuple[str, int], ...],
    layers: tuple[int, ...],
) -> Verified:
    """The verified table of a schedule: a compilation asks for it more than once.

    Passes of stages with unequally many layers take as long as they have layers.
    """
    times = Times(layers, layers, layers) if len(layers) == devices else None
    return verify(generate(name, devices, micro, dict(options), times=times))
