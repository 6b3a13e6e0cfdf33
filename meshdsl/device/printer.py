"""The device program as text: variables with local sizes, FLOPs of operators, bytes of moves.

```
program mlp on each of 4 devices, mesh square { rows: 2, cols: 2 }
  # 18 | y = einsum(h, v -> [batch, io])
  y_part = einsum h v : f32[batch@rows 32, io 512] partial sum over cols  33,554,432 FLOP
  y = all_reduce sum over cols: y_part : f32[batch@rows 32, io 512]  65,536 B held, 65,536 B sent
```

The size of a dim whose blocks differ is that of the largest: `batch@rows 3 of 5`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Pipeline,
    StageRows,
    Start,
    Var,
    Wait,
)
from meshdsl.ir import program as ir
from meshdsl.ir.printer import INDENT, Printer, phase_text
from meshdsl.ir.program import Op, Stacked
from meshdsl.placed.placements import Mesh
from meshdsl.placed.printer import mesh_text, placed_type_text, step_text
from meshdsl.schedule.table import row_text


def print_program(program: DeviceProgram) -> str:
    """The text of a device program."""
    return "\n".join(_DevicePrinter().program(program)) + "\n"


def fingerprint(program: DeviceProgram) -> str:
    """A hash of the statements of every device, without their places in the source."""
    lines = (line.strip() for line in print_program(program).splitlines())
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()


class _DevicePrinter(Printer[Var]):
    mesh: Mesh

    def program(self, program: DeviceProgram) -> Iterator[str]:
        self.mesh = program.mesh
        devices, mesh = program.mesh.devices, mesh_text(program.mesh)
        yield f"program {program.placed.named.name} on each of {devices} devices, mesh {mesh}"
        for var in program.inputs:
            yield f"{INDENT}input  {self.typed(var)} = {var.value.name}"
        for var in program.params:
            where = f" on {var.away}" if var.away else ""
            yield f"{INDENT}param  {self.typed(var)} = {var.value.name}{where}"
        for var in program.states:
            where = f" on {var.away}" if var.away else ""
            yield f"{INDENT}state  {self.typed(var)} = {var.value.name}{where}"
        yield from self.nodes(program.body, 1)
        for name, var in program.outputs:
            yield f"{INDENT}return {name} = {var.name}"
        for old, new in program.updates:
            yield f"{INDENT}update {old.name} = {new.name}"

    def name(self, value: Var) -> str:
        return value.name

    def type(self, value: Var) -> str:
        type_, p = value.type, value.placement
        wholes = {d.name: d.size for d in type_.dims if p.is_uneven(d.name, d.size, self.mesh)}
        alone = "" if value.on is None else f" only on {value.on}"
        return placed_type_text(p.plain.local(type_, self.mesh), p, wholes) + alone

    def after(self, op: Op[Var]) -> str:
        assert isinstance(op, Compute)
        return f"  {op.flops:,} FLOP" if op.flops else ""

    def shows_source(self, node: Move | Bucket | Start | Wait) -> bool:
        return not isinstance(node, Wait) and not (isinstance(node, Start) and node.ahead)

    def repeat(self, node: DeviceLoop) -> str:
        return f" as {node.index}{f' over {node.axis}' if isinstance(node, Pipeline) else ''}"

    def first(self, node: DeviceLoop, depth: int) -> Iterator[str]:
        for ahead in node.ahead:
            yield f"{INDENT * depth}ahead {ahead.work}"
            pad = INDENT * (depth + 1)
            for item in ahead.slices:
                source = f"{item.outer.name}[{node.dim.name}]"
                yield f"{pad}slice {self.typed(item.inside)} = {source}"
            yield from (pad + line for line in self._collective(ahead.collective))

    def sliced(self, node: ir.Loop[Var, Any]) -> Iterable[Stacked[Var]]:
        return (item for item in node.stacked if not isinstance(item, StageRows))

    def block(self, node: DeviceLoop, depth: int) -> Iterator[str]:
        """Of a pipeline the row of each device, the rows of stages, and the statements by part."""
        if not isinstance(node, Pipeline):
            yield from super().block(node, depth)
            return
        pad = INDENT * depth
        for stage, row in enumerate(node.rows):
            yield f"{pad}stage {stage}: {row_text(stage, row)}"
        if node.known.schedule.updates:
            yield f"{pad}weights {node.known.schedule.weights}"
        if node.sizes:
            yield f"{pad}iterations {' '.join(map(str, node.sizes))}"
        for item in node.stacked:
            if isinstance(item, StageRows):
                other = f" or {item.other.name}" if item.other else ""
                yield f"{pad}rows {self.typed(item.inside)} = {item.outer.name}{other}"
        for (part, ends), group in groupby(node.places, lambda place: place[1:]):
            stages = f" of {' to '.join(map(str, ends))}" if ends else ""
            yield f"{pad}part {part.name}{stages}"
            yield from self.nodes(tuple(n for n, *_ in group), depth + 1)

    def collect(self, node: DeviceLoop, made: DeviceCollected) -> str:
        how = " as list" if made.is_list else ""
        how = how if made.stack is None else f" onto {made.stack.name}"
        how = " into slice" if made.into_slice else how
        return f"{super().collect(node, made)}{how}"

    def leaf(self, node: Move | Bucket | Start | Wait) -> Iterator[str]:
        match node:
            case Start() if node.ahead:
                yield f"{node.work} = start for the next trip"
            case Start():
                first, *others = self._collective(node.collective)
                yield f"{node.work} = start{' late' if node.late else ''} {first}"
                yield from others
            case Wait() if node.late:
                yield f"wait {node.work} of the trip before"
            case Wait():
                targets = ", ".join(m.target.name for m in node.collective.moves)
                yield f"{targets} = wait {node.work}"
            case _:
                yield from self._collective(node)

    def _collective(self, node: Collective) -> Iterator[str]:
        """A move on a line; of a bucket a line for the buffer, and one for each part."""
        if isinstance(node, Move):
            yield self._move(node)
            return
        size = f"  {node.payload:,} B held, {node.wire:,} B sent"
        yield f"bucket of {len(node.moves)}, {node.step.kind}{size}"
        yield from (INDENT + self._move(move) for move in node.moves)

    def _move(self, node: Move) -> str:
        step = (
            f"{step_text(node.step)}: {node.source.name}{_rows_text(node)}{phase_text(node.phase)}"
        )
        size = f"  {node.payload:,} B held, {node.wire:,} B sent" if node.step.moves else ""
        size = f"  {node.payload:,} B moved" if node.step.tier else size
        return f"{node.target.name} = {step} : {self.type(node.target)}{size}"


def _rows_text(node: Move) -> str:
    """The dim whose rows are sent by number, what has these numbers, and the bytes."""
    if node.rows is None:
        return ""
    leaving, arriving = (var.name for var in node.rows.reads)
    numbers = f"{node.rows.most} {node.rows.balanced}"
    return f" {{rows={node.rows.row} {leaving} {arriving} {numbers}}}"
