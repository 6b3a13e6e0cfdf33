"""`run`: devices, outputs and their comparison, as JSON and as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import counted
from meshdsl.ir.types import TensorType
from meshdsl.report.document import Block, Grid, line, mesh_text
from meshdsl.report.schema import RanProgram, SentFacts, ValueFacts

if TYPE_CHECKING:
    from meshdsl.backends.engines.against_reference import TensorComparison
    from meshdsl.backends.engines.execution import Result
    from meshdsl.device.ir import DeviceProgram, Var
    from meshdsl.pipeline import Compilation

MOST_ROWS = 16
"""The most devices listed one by one; of more, the first few represent all."""


def run_report(
    made: Compilation, engine: str, result: Result, checked: Sequence[TensorComparison]
) -> Iterator[Block]:
    """The devices, the outputs, and the comparison, if there is one."""
    yield line(f"{headline(made, engine)}, {result.seconds:.2f} s")
    if engine != "reference":
        yield _devices(made, result)
    yield _outputs(made, result, checked)
    if result.updated:
        yield _updated(made, result, checked)
    if checked:
        yield line(_verdict(checked))
    if made.options.evaluate and made.written.goal is not None:
        yield line("nothing was updated: a training step is taken with --step")


def run_as_json(
    made: Compilation, engine: str, result: Result, checked: Sequence[TensorComparison]
) -> RanProgram:
    """The report as data, without values, which `--out` writes."""
    compared = {(c.role, c.name): c for c in checked}
    outputs = [_facts(n, var, compared.get(("output", n))) for n, var in made.device.outputs]
    devices: list[SentFacts] = [{"collectives": n, "wire_bytes": b} for n, b in result.sent]
    updated = []
    for var, _ in made.device.updates:
        name, role = str(var.value.name), var.value.role
        if name in result.updated:
            updated.append(_facts(name, var, compared.get((role, name)), role))
    return {
        "version": 1,
        "engine": engine,
        "seconds": result.seconds,
        "devices": devices,
        "outputs": outputs,
        "updated": updated,
    }


def _facts(name: str, var: Var, compared: TensorComparison | None, role: str = "") -> ValueFacts:
    facts: ValueFacts = {
        "name": name,
        "dims": list(var.value.type.names),
        "shape": list(var.value.type.shape),
        "local_shape": list(var.local.shape),
    }
    if role:
        facts["role"] = role
    if compared is not None:
        facts["max_error"], facts["relative"] = compared.error, compared.relative
        facts["ok"] = compared.ok
    return facts


def headline(made: Compilation, engine: str) -> str:
    """The program, its layout, the mesh and the engine."""
    program = made.device
    source = program.placed
    if engine == "reference":
        return f"{source.named.name}: one device, numpy float64"
    mesh = mesh_text(dict(program.mesh.declared)) or "one device"
    return (
        f"{source.named.name} under layout {source.layout} on {mesh}: "
        f"{counted(program.mesh.devices, 'device')}, engine {engine}"
    )


def _devices(made: Compilation, result: Result) -> Grid:
    program = made.device
    in_memory = {*program.inputs, *program.params, *program.states} - program.away.keys()
    mesh, ranks = program.mesh.whole, range(min(program.mesh.devices, MOST_ROWS))
    sizes = [_bytes(v, program, ranks) for v in in_memory]
    what = "inputs, parameters and states" if program.states else "inputs and parameters"
    lines = []
    for rank in ranks:
        at = ", ".join(f"{a} {i}" for a, i in mesh.coordinates(rank).items())
        held = sum(each[rank] for each in sizes)
        sent = _sent(*result.sent[rank]) if result.sent else "not counted"
        lines.append((str(rank), at or "-", f"{held:,} B of {what}", sent))
    if program.mesh.devices > MOST_ROWS:
        lines.append(("…", f"{program.mesh.devices:,} in all", "the same", ""))
    return Grid("what each device did", ("device", "at", "holds", "sent"), tuple(lines))


def _bytes(var: Var, program: DeviceProgram, ranks: range) -> list[int]:
    """What devices have of a variable, which one along the axis of the stages may have alone."""
    pipe, mesh = program.placed.pipe, program.mesh
    shapes = var.placement.shapes(var.type, mesh, ranks)
    there = (
        var.on is None or pipe is None or mesh.coordinates(rank)[pipe.axis] == var.on
        for rank in ranks
    )
    each = (math.prod(shape) * var.local.dtype.bytes for shape in shapes)
    return [size if here else 0 for size, here in zip(each, there, strict=True)]


def _sent(calls: int, sent: int) -> str:
    kind = "collective" if calls == 1 else "collectives"
    return f"{sent:,} B in {calls} {kind}" if calls else "nothing"


def _outputs(made: Compilation, result: Result, checked: Sequence[TensorComparison]) -> Grid:
    errors = {c.name: c for c in checked if c.role == "output"}
    head = ("name", "whole", "per device", "value", *(("error",) if checked else ()))
    lines = (
        (*_described(name, var, result.outputs[name], made), *_error(errors.get(name)))
        for name, var in made.device.outputs
    )
    return Grid("outputs", head, tuple(lines))


def _described(name: str, var: Var, value: Any, made: Compilation) -> tuple[str, ...]:
    pipe, local = made.device.placed.pipe, _shape(var.local)
    if var.on is not None and pipe is not None:
        local += f" where {pipe.axis} = {var.on}"
    return name, _shape(var.value.type), local, _summary(value)


def _error(found: TensorComparison | None) -> tuple[str, ...]:
    """The cell of an error; none if nothing was compared."""
    if found is None:
        return ()
    return (f"{found.relative:.1e}" if found.error else "none",)


def _updated(made: Compilation, result: Result, checked: Sequence[TensorComparison]) -> Grid:
    """The parameters after a step that has new ones, and the number of its optimizer's states.

    Of the states the worst error is shown.
    """
    errors = {c.name: c for c in checked if c.role == "param"}
    updates = [old for old, _ in made.device.updates]
    named = ((v.value.name or "", v) for v in updates if v.value.role == "param")
    lines = [(*_described(n, v, result.updated[n], made), *_error(errors.get(n))) for n, v in named]
    head = ("parameter", "whole", "per device", "value", *(("error",) if checked else ()))
    states = sum(v.value.role == "state" for v in updates)
    if not states:
        return Grid("after one step", head, tuple(lines))
    worst = max((c for c in checked if c.role == "state"), key=lambda c: c.relative, default=None)
    none = ("none",) if checked and worst is None else ()
    lines.append((counted(states, "state"), "", "", "not shown", *_error(worst), *none))
    return Grid("after one step", head, tuple(lines))


def _shape(type_: TensorType) -> str:
    dims = ", ".join(f"{d.name} {d.size}" for d in type_.dims)
    return f"{type_.dtype}[{dims}]"


def _summary(array: Any) -> str:
    """A scalar's value; of a larger array the range and the mean."""
    if array.ndim == 0:
        return f"{array.item():.7g}" if array.dtype.kind == "f" else str(array.item())
    if array.dtype.kind == "b":
        return f"{int(array.sum()):,} of {array.size:,} true"
    return f"{array.min():.4g} … {array.max():.4g}, mean {array.mean():.4g}"


def _verdict(checked: Sequence[TensorComparison]) -> str:
    worst = max(checked, key=lambda c: c.relative)
    if not all(c.ok for c in checked):
        return "verified: NOT equal to the reference"
    if worst.error == 0:
        return "verified: equal to the float64 reference, bit for bit"
    return (
        "verified: equal to the float64 reference up to rounding "
        f"(largest error {worst.relative:.1e} of {worst.measure}, allowed {worst.tolerance:.0e})"
    )
