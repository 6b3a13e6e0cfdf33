"""What a run did, for people and as JSON: devices, outputs, and how they compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import counted
from meshdsl.ir.types import TensorType

if TYPE_CHECKING:
    from rich.table import Table

    from meshdsl.backends.engines.run import Result
    from meshdsl.backends.engines.verify import Comparison
    from meshdsl.pipeline import Compilation

MOST_ROWS = 16
"""Devices that are listed one by one; of more the first few stand for all."""


def print_run(
    made: Compilation, engine: str, result: Result, checked: Sequence[Comparison]
) -> None:
    """Print what each device did, the outputs, and the comparison, if there was one."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_headline(made, engine, result), markup=False)
    if engine != "reference":
        console.print(_devices(made, result))
    console.print(_outputs(made, result, checked))
    if result.updated:
        console.print(_updated(made, result, checked))
    if checked:
        console.print(_verdict(checked), markup=False)


def run_as_json(
    made: Compilation, engine: str, result: Result, checked: Sequence[Comparison]
) -> dict[str, Any]:
    """The same as data. Values are left to `--out`."""
    found = {"max_error": "error", "relative": "relative", "ok": "ok"}
    errors = {
        (c.role, c.name): {key: getattr(c, field) for key, field in found.items()} for c in checked
    }
    outputs = [
        {
            "name": name,
            "dims": list(var.value.type.names),
            "shape": list(var.value.type.shape),
            "local_shape": list(var.local.shape),
            **errors.get(("output", name), {}),
        }
        for name, var in made.device.outputs
    ]
    devices = [{"collectives": n, "wire_bytes": b} for n, b in result.sent]
    updated = [
        {
            "name": var.value.name,
            "role": var.value.role,
            "dims": list(var.value.type.names),
            "shape": list(var.value.type.shape),
            "local_shape": list(var.local.shape),
            **errors.get((var.value.role, str(var.value.name)), {}),
        }
        for var, _ in made.device.updates
        if var.value.name in result.updated
    ]
    return {
        "version": 1,
        "engine": engine,
        "seconds": result.seconds,
        "devices": devices,
        "outputs": outputs,
        "updated": updated,
    }


def _headline(made: Compilation, engine: str, result: Result) -> str:
    program = made.device
    source = program.placed
    if engine == "reference":
        return f"{source.named.name}: one device, numpy float64, {result.seconds:.2f} s"
    mesh = " x ".join(f"{a} {n}" for a, n in program.mesh.axes) or "one device"
    return (
        f"{source.named.name} under layout {source.layout} on {mesh}: "
        f"{counted(program.mesh.devices, 'device')}, engine {engine}, {result.seconds:.2f} s"
    )


def _devices(made: Compilation, result: Result) -> Table:
    from rich.table import Table

    program = made.device
    table = Table(title="what each device did", title_justify="left", box=None, pad_edge=False)
    for heading in ("device", "at", "holds", "sent"):
        table.add_column(heading, overflow="fold")
    kept = (*program.inputs, *program.params, *program.states)
    held = sum(v.local.bytes for v in kept)
    what = "inputs, parameters and states" if program.states else "inputs and parameters"
    for rank in range(min(program.mesh.devices, MOST_ROWS)):
        at = ", ".join(f"{a} {i}" for a, i in program.mesh.coordinates(rank).items())
        sent = "not counted"
        if result.sent:
            calls, sent_bytes = result.sent[rank]
            sent = f"{sent_bytes:,} B in {calls} collectives" if calls else "nothing"
        table.add_row(str(rank), at or "-", f"{held:,} B of {what}", sent)
    if program.mesh.devices > MOST_ROWS:
        table.add_row("…", f"{program.mesh.devices:,} in all", "the same", "")
    return table


def _outputs(made: Compilation, result: Result, checked: Sequence[Comparison]) -> Table:
    from rich.table import Table
    from rich.text import Text

    errors = {c.name: c for c in checked if c.role == "output"}
    table = Table(title="outputs", title_justify="left", box=None, pad_edge=False)
    for heading in ("name", "whole", "per device", "value", *(("error",) if checked else ())):
        table.add_column(heading, overflow="fold")
    for name, var in made.device.outputs:
        row = [name, _shape(var.value.type), _shape(var.local), _summary(result.outputs[name])]
        if checked:
            row.append(_error(errors[name]))
        table.add_row(*(Text(cell) for cell in row))
    return table


def _error(found: Comparison) -> str:
    return f"{found.relative:.1e}" if found.error else "none"


def _updated(made: Compilation, result: Result, checked: Sequence[Comparison]) -> Table:
    """What a training step has made of parameters; the states of its optimizer are counted.

    Of the states the worst error is shown.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title="after one step", title_justify="left", box=None, pad_edge=False)
    for heading in ("parameter", "whole", "per device", "value", *(("error",) if checked else ())):
        table.add_column(heading, overflow="fold")
    errors = {c.name: c for c in checked if c.role == "param"}
    kept = [c for c in checked if c.role == "state"]
    updates = [old for old, _ in made.device.updates]
    for var in (v for v in updates if v.value.role == "param"):
        name = var.value.name or ""
        row = [name, _shape(var.value.type), _shape(var.local), _summary(result.updated[name])]
        row += [_error(errors[name])] if checked else []
        table.add_row(*(Text(cell) for cell in row))
    states = sum(v.value.role == "state" for v in updates)
    row = [counted(states, "state"), "", "", "not shown"]
    row += [_error(max(kept, key=lambda c: c.relative))] if checked else []
    table.add_row(*row)
    return table


def _shape(type_: TensorType) -> str:
    dims = ", ".join(f"{d.name} {d.size}" for d in type_.dims)
    return f"{type_.dtype}[{dims}]"


def _summary(array: Any) -> str:
    """A scalar itself, of anything larger the range and the mean."""
    if array.ndim == 0:
        return f"{array.item():.7g}" if array.dtype.kind == "f" else str(array.item())
    if array.dtype.kind == "b":
        return f"{int(array.sum()):,} of {array.size:,} true"
    return f"{array.min():.4g} … {array.max():.4g}, mean {array.mean():.4g}"


def _verdict(checked: Sequence[Comparison]) -> str:
    worst = max(checked, key=lambda c: c.relative)
    if not all(c.ok for c in checked):
        return "verified: NOT equal to the reference"
    if worst.error == 0:
        return "verified: equal to the float64 reference, bit for bit"
    return (
        "verified: equal to the float64 reference up to rounding "
        f"(largest error {worst.relative:.1e} of {worst.measure}, allowed {worst.tolerance:.0e})"
    )
