"""The placed program as text: every tensor with its placement, every reshard with its route.

```
program mlp, mesh square (rows 2, cols 2), layout hybrid, reduce deferred
  # 18 | y = einsum(h, v -> [batch, io])
  %8 y = einsum %7 %4 : f32[batch@rows, io] partial sum over cols
  %9 y = reshard %8 : f32[batch@rows, io]
    all_reduce sum over cols
```
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.named.printer import INDENT, Numbers, SourceLines, attributes, label
from meshdsl.placed.collectives import Step
from meshdsl.placed.ir import Apply, Loop, Node, Program, Reshard, Tensor
from meshdsl.placed.sbp import Mesh


def print_program(program: Program) -> str:
    """The text of a placed program. Sizes are those of the named program."""
    return "\n".join(_Printer().program(program)) + "\n"


def mesh_text(mesh: Mesh) -> str:
    """`square (rows 2, cols 2)`."""
    return f"{mesh.name} ({', '.join(f'{axis} {size}' for axis, size in mesh.axes)})"


def step_text(step: Step) -> str:
    """`all_to_all heads to seq over tp`; `slice batch over data`."""
    words = [step.kind, step.op, step.dim, f"to {step.to_dim}" if step.to_dim else None]
    return f"{' '.join(w for w in words if w)} over {', '.join(step.axes)}"


def placed_text(tensor: Tensor) -> str:
    """`f32[batch@rows, io] partial sum over cols`."""
    return f"{tensor.value.type.dtype}{tensor.placement.show(tensor.value.type)}"


class _Printer:
    def __init__(self) -> None:
        self.numbers = Numbers()
        self.sources = SourceLines()

    def program(self, program: Program) -> Iterator[str]:
        head = f"program {program.named.name}, mesh {mesh_text(program.mesh)}"
        yield f"{head}, layout {program.layout}, reduce {program.policy}"
        for tensor in program.inputs:
            yield f"{INDENT}input  {self._tensor(tensor)}"
        for param in program.params:
            yield f"{INDENT}param  {self._tensor(param.tensor)}"
        for state in program.states:
            yield f"{INDENT}state  {self._tensor(state)}"
        yield from self._nodes(program.body, 1)
        for name, tensor in program.outputs:
            yield f"{INDENT}return {name} = {self.numbers[tensor]}"
        for old, new in program.updates:
            yield f"{INDENT}update {self.numbers[old]} = {self.numbers[new]}"

    def _tensor(self, tensor: Tensor) -> str:
        return f"{self._name(tensor)} : {placed_text(tensor)}"

    def _name(self, tensor: Tensor) -> str:
        return f"{self.numbers[tensor]}{label(tensor.value)}"

    def _nodes(self, nodes: tuple[Node, ...], depth: int) -> Iterator[str]:
        for node in nodes:
            match node:
                case Apply():
                    yield from self.sources.at(node.span, depth)
                    yield INDENT * depth + self._apply(node)
                case Reshard():
                    yield from self._reshard(node, depth)
                case Loop():
                    yield from self.sources.at(node.span, depth)
                    yield from self._loop(node, depth)

    def _apply(self, node: Apply) -> str:
        ins = "".join(f" {self.numbers[t]}" for t in node.ins)
        outs = ", ".join(map(self._name, node.outs))
        types = ", ".join(map(placed_text, node.outs))
        return f"{outs} = {node.name}{ins}{attributes(node)} : {types}"

    def _reshard(self, node: Reshard, depth: int) -> Iterator[str]:
        source = self.numbers[node.source]
        phase = "" if node.phase == "forward" else f" [{node.phase}]"
        target = f"{self._name(node.target)} = reshard {source}{phase} : {placed_text(node.target)}"
        yield INDENT * depth + target
        for step in node.route.steps:
            yield INDENT * (depth + 1) + step_text(step)

    def _loop(self, node: Loop, depth: int) -> Iterator[str]:
        pad, n, dim = INDENT * (depth + 1), self.numbers, node.dim
        backwards = " from the last" if node.reverse else ""
        yield f"{INDENT * depth}repeat {dim.name} {dim.size}{backwards}"
        for item in node.stacked:
            yield f"{pad}slice {self._tensor(item.inside)} = {n[item.outer]}[{dim.name}]"
        for c in node.carries:
            yield f"{pad}carry {self._tensor(c.inside)} = {n[c.init]}"
        yield from self._nodes(node.body, depth + 1)
        for c in node.carries:
            yield f"{pad}next  {n[c.inside]} = {n[c.next]}; at the end {n[c.result]}"
        for made in node.collected:
            yield f"{pad}collect {self._tensor(made.outer)}[{dim.name}] = {n[made.inside]}"
