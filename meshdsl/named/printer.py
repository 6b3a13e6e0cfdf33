"""The named program as text: values numbered in order of definition, one operator per line.

```
program mlp
  input  %0 x : f32[batch 64, io 512]
  param  %2 w : f32[io 512, hidden 2048] = normal, fan 512 to 2048
  # 17 | h = relu(einsum(x, w -> [batch, hidden]) + b)
  %5 = einsum %0 %2 : f32[batch 64, hidden 2048]
  return loss = %11
```
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from meshdsl.diagnostics import Span
from meshdsl.ir import program as ir
from meshdsl.ir.types import Dim, DType, TensorType
from meshdsl.named.ir import Loop, Node, Op, Param, Program, Value
from meshdsl.render import _safe

INDENT = "  "


def print_program(program: Program) -> str:
    """The text of a named program."""
    return "\n".join(_Printer().program(program)) + "\n"


class Numbers:
    """Names for nodes that are compared by identity: `%0`, `%1`, … in order of first mention."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __getitem__(self, node: Hashable) -> str:
        return f"%{self._known.setdefault(node, len(self._known))}"


class SourceLines:
    """Says which source line comes next, where it changes."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] = ("", 0)

    def at(self, span: Span, depth: int) -> Iterator[str]:
        """A comment with the line of `span`, unless it was the last one shown."""
        place = (span.file, span.line)
        if place == self._shown:
            return
        self._shown = place
        text = _safe(span.source.excerpt(span.line).strip())
        yield f"{INDENT * depth}# {span.line} | {text}"


def type_text(type_: TensorType) -> str:
    """`f32[batch 64, io 512]`."""
    return f"{type_.dtype}[{', '.join(f'{d.name} {d.size}' for d in type_.dims)}]"


def label(value: Value) -> str:
    """The name of a value with a space before it; empty for a subexpression."""
    return f" {value.name}" if value.name else ""


def attributes(op: ir.Op[Any]) -> str:
    """` {dim=mem}`, or nothing."""
    pairs = [f"{name}={attribute(value)}" for name, value in op.attrs]
    return f" {{{', '.join(pairs)}}}" if pairs else ""


def attribute(value: Any) -> str:
    """One constant of an operator; dims and dtypes by their names."""
    if isinstance(value, Dim | DType):
        return value.name
    if isinstance(value, TensorType):
        return type_text(value)
    if isinstance(value, tuple):
        return f"({' '.join(map(attribute, value))})"
    return _safe(value if isinstance(value, str) else repr(value))


class _Printer:
    def __init__(self) -> None:
        self.numbers = Numbers()
        self.sources = SourceLines()

    def program(self, program: Program) -> Iterator[str]:
        yield f"program {program.name}"
        for value in program.inputs:
            yield f"{INDENT}input  {self._value(value)}"
        for param in program.params:
            yield f"{INDENT}param  {self._param(param)}"
        for state in program.states:
            begins = f"a copy of {self.numbers[state.copies]}" if state.copies else "zeros"
            yield f"{INDENT}state  {self._value(state.value)} = {begins}"
        yield from self._nodes(program.body, 1)
        for output in program.outputs:
            yield f"{INDENT}return {output.name} = {self.numbers[output.value]}"
        for update in program.updates:
            yield f"{INDENT}update {self.numbers[update.old]} = {self.numbers[update.new]}"

    def _value(self, value: Value) -> str:
        pins = "".join(f" @{p.dim}:{'+'.join(p.axes) or 'none'}" for p in value.pins)
        return f"{self.numbers[value]}{label(value)} : {type_text(value.type)}{pins}"

    def _param(self, param: Param) -> str:
        args = f"({', '.join(f'{x:g}' for x in param.init.args)})" if param.init.args else ""
        init = f"{param.init.kind}{args}, fan {param.fan_in} to {param.fan_out}"
        return f"{self._value(param.value)} = {init}"

    def _nodes(self, nodes: tuple[Node, ...], depth: int) -> Iterator[str]:
        for node in nodes:
            yield from self.sources.at(node.span, depth)
            if isinstance(node, Loop):
                yield from self._repeat(node, depth)
            else:
                yield INDENT * depth + self._op(node)

    def _op(self, op: Op) -> str:
        ins = "".join(f" {self.numbers[v]}" for v in op.ins)
        outs = ", ".join(f"{self.numbers[v]}{label(v)}" for v in op.outs)
        types = ", ".join(type_text(v.type) for v in op.outs)
        return f"{outs} = {op.name}{ins}{attributes(op)} : {types}"

    def _repeat(self, node: Loop, depth: int) -> Iterator[str]:
        pad, n = INDENT * (depth + 1), self.numbers
        backwards = " from the last" if node.reverse else ""
        yield f"{INDENT * depth}repeat {node.dim.name} {node.dim.size}{backwards}"
        for item in node.stacked:
            yield f"{pad}slice {self._value(item.inside)} = {n[item.outer]}[{node.dim.name}]"
        for c in node.carries:
            yield f"{pad}carry {self._value(c.inside)} = {n[c.init]}"
        yield from self._nodes(node.body, depth + 1)
        for c in node.carries:
            yield f"{pad}next  {n[c.inside]} = {n[c.next]}; at the end {n[c.result]}"
        for made in node.collected:
            yield f"{pad}collect {self._value(made.outer)}[{node.dim.name}] = {n[made.inside]}"
