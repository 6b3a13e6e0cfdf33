"""The device program as text: variables with local shapes, FLOPs of operators, bytes of moves.

```
program mlp on each of 4 devices, mesh square (rows 2, cols 2)
  # 18 | y = einsum(h, v -> [batch, io])
  y_part = einsum h v : f32[batch 32, io 512]  33,554,432 FLOP
  y = all_reduce sum over cols y_part : f32[batch 32, io 512]  65,536 B held, 65,536 B sent
```
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    Loop,
    Move,
    Node,
    Program,
    Start,
    Var,
    Wait,
)
from meshdsl.named.printer import INDENT, SourceLines, attributes, type_text
from meshdsl.placed.printer import mesh_text, step_text


def print_program(program: Program) -> str:
    """The text of a device program."""
    return "\n".join(_Printer().program(program)) + "\n"


def fingerprint(program: Program) -> str:
    """A hash of what every device does, wherever its source stands."""
    lines = (line.strip() for line in print_program(program).splitlines())
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()


class _Printer:
    def __init__(self) -> None:
        self.sources = SourceLines()

    def program(self, program: Program) -> Iterator[str]:
        devices, mesh = program.mesh.devices, mesh_text(program.mesh)
        yield f"program {program.placed.named.name} on each of {devices} devices, mesh {mesh}"
        for var in program.inputs:
            yield f"{INDENT}input  {_var(var)} = {var.value.name}"
        for var in program.params:
            yield f"{INDENT}param  {_var(var)} = {var.value.name}"
        for var in program.states:
            yield f"{INDENT}state  {_var(var)} = {var.value.name}"
        yield from self._nodes(program.body, 1)
        for name, var in program.outputs:
            yield f"{INDENT}return {name} = {var.name}"
        for old, new in program.updates:
            yield f"{INDENT}update {old.name} = {new.name}"

    def _nodes(self, nodes: tuple[Node, ...], depth: int) -> Iterator[str]:
        for node in nodes:
            if not isinstance(node, Wait):
                yield from self.sources.at(node.span, depth)
            match node:
                case Compute():
                    yield INDENT * depth + _compute(node)
                case Move() | Bucket():
                    yield from (INDENT * depth + line for line in _collective(node))
                case Start():
                    yield from (INDENT * depth + line for line in _start(node))
                case Wait():
                    targets = ", ".join(m.target.name for m in node.collective.moves)
                    yield f"{INDENT * depth}{targets} = wait {node.work}"
                case Loop():
                    yield from self._loop(node, depth)

    def _loop(self, node: Loop, depth: int) -> Iterator[str]:
        pad = INDENT * (depth + 1)
        backwards = " from the last" if node.reverse else ""
        yield f"{INDENT * depth}repeat {node.dim.name} {node.dim.size} as {node.index}{backwards}"
        for item in node.stacked:
            yield f"{pad}slice {_var(item.inside)} = {item.outer.name}[{node.index}]"
        for ahead in node.ahead:
            for item in ahead.slices:
                yield f"{pad}slice {_var(item.inside)} = {item.outer.name}[{node.index}], ahead"
            yield from (pad + line for line in _start(Start(ahead.collective, ahead.work)))
        for carry in node.carries:
            yield f"{pad}carry {_var(carry.inside)} = {carry.init.name}"
        yield from self._nodes(node.body, depth + 1)
        for carry in node.carries:
            yield f"{pad}next  {carry.inside.name} = {carry.next.name}"
        for made in node.collected:
            what = "list" if made.is_list else "stack" if made.stack is None else "onto"
            yield f"{pad}{what}  {_var(made.outer)} = {made.inside.name}"


def _var(var: Var) -> str:
    return f"{var.name} : {type_text(var.local)}"


def _compute(node: Compute) -> str:
    ins = "".join(f" {v.name}" for v in node.ins)
    outs = ", ".join(v.name for v in node.outs)
    types = ", ".join(type_text(v.local) for v in node.outs)
    flops = f"  {node.flops:,} FLOP" if node.flops else ""
    return f"{outs} = {node.name}{ins}{attributes(node)} : {types}{flops}"


def _collective(node: Collective) -> Iterator[str]:
    """A move on a line; of a bucket a line for the buffer, and one for each part."""
    if isinstance(node, Move):
        yield _move(node)
        return
    size = f"{node.payload:,} B held, {node.wire:,} B sent"
    yield f"bucket of {len(node.moves)}, {node.step.kind}: {size}"
    yield from (INDENT + _move(move) for move in node.moves)


def _start(node: Start) -> Iterator[str]:
    if node.ahead:
        yield f"{node.work} = start for the next trip"
        return
    first, *rest = _collective(node.collective)
    yield f"{node.work} = start {first}"
    yield from rest


def _move(node: Move) -> str:
    step = f"{step_text(node.step)}: {node.source.name}"
    size = f"  {node.payload:,} B held, {node.wire:,} B sent" if node.step.moves else ""
    return f"{node.target.name} = {step} : {type_text(node.target.local)}{size}"
