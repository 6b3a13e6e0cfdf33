"""Programs as text: one operator per line, loops indented, source lines as comments.

```
program mlp
  input  %0 x : f32[batch 64, io 512]
  param  %2 w : f32[io 512, hidden 2048] = normal, fan 512 to 2048
  # 17 | h = relu(einsum(x, w -> [batch, hidden]) + b)
  %5 = einsum %0 %2 {dims=(batch hidden)} : f32[batch 64, hidden 2048]
  repeat layers 4
    slice %6 u : f32[hidden 2048] = %3[layers]
    carry %7 h : f32[batch 64, hidden 2048] = %5
    %8 = mul %7 %6 : f32[batch 64, hidden 2048]
    next  %7 = %8; at the end %9
  return loss = %11
```

The names of values and the text of their types are a stage's own; `tests/ir_text/` reads all of it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from meshdsl.carets import safe
from meshdsl.diagnostics import Span
from meshdsl.ir.program import Loop, Op, Origin, Stacked
from meshdsl.ir.types import Dim, DType, TensorType

V = TypeVar("V")
INDENT = "  "


class Numbers:
    """Names for nodes that are compared by identity: `%0`, `%1`, … in order of first mention."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __getitem__(self, node: Hashable) -> str:
        return f"%{self._known.setdefault(node, len(self._known))}"

    def __contains__(self, node: Hashable) -> bool:
        return node in self._known


class SourceLines:
    """The source lines of a program, each yielded where it changes."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] = ("", 0)

    def at(self, span: Span, depth: int) -> Iterator[str]:
        """A comment with the line of `span`, unless it was the last one shown, or is empty."""
        place = _, line = (span.file, span.line)
        if place == self._shown:
            return
        if text := safe(span.source.excerpt(line).strip()):
            self._shown = place
            yield f"{INDENT * depth}# {line} | {text}"


class Printer(Generic[V]):
    """The text of nodes; a stage defines the text of its values, and of nodes that only it has."""

    def __init__(self) -> None:
        self.sources = SourceLines()

    # --- hooks of a stage ---------------------------------------------------------------------

    def name(self, value: V) -> str:
        """The name that refers to a value."""
        raise NotImplementedError

    def defined(self, value: V) -> str:
        """The name of a value at its definition."""
        return self.name(value)

    def type(self, value: V) -> str:
        """The type of a value, and the other fields that a stage gives it."""
        raise NotImplementedError

    def origin(self, of: Any) -> str:
        """The name of a value that an origin names; nothing where a stage prints none."""
        return ""

    def after(self, op: Op[V]) -> str:
        """The text after the types of an operator."""
        return ""

    def leaf(self, node: Any) -> Iterator[str]:
        """The lines of a node that only this stage has."""
        raise NotImplementedError

    def shows_source(self, node: Any) -> bool:
        """Whether a node that only this stage has is printed under its source line."""
        return False

    def repeat(self, node: Any) -> str:
        """The text after the dim of a loop."""
        return ""

    def first(self, node: Any, depth: int) -> Iterator[str]:
        """More lines at the beginning of a loop."""
        yield from ()

    def collect(self, node: Any, made: Any) -> str:
        """The text of a value that a loop collects."""
        return f"collect {self.typed(made.outer)}[{node.dim.name}] = {self.name(made.inside)}"

    def block(self, node: Any, depth: int) -> Iterator[str]:
        """The lines of the statements of a loop."""
        yield from self.nodes(node.body, depth)

    # --- common to all stages -----------------------------------------------------------------

    def typed(self, value: V) -> str:
        """The value at its definition, with its type."""
        return f"{self.defined(value)} : {self.type(value)}"

    def nodes(self, nodes: Iterable[Any], depth: int) -> Iterator[str]:
        """The lines of a block."""
        for node in nodes:
            if isinstance(node, Op):
                yield from self.sources.at(node.span, depth)
                yield INDENT * depth + self.op(node)
            elif isinstance(node, Loop):
                yield from self.sources.at(node.span, depth)
                yield from self.loop(node, depth)
            else:
                if self.shows_source(node):
                    yield from self.sources.at(node.span, depth)
                yield from (INDENT * depth + line for line in self.leaf(node))

    def op(self, op: Op[V]) -> str:
        """The line of an operator."""
        ins = "".join(f" {self.name(v)}" for v in op.ins)
        outs = ", ".join(map(self.defined, op.outs))
        types = ", ".join(map(self.type, op.outs))
        tags = self.tags(op)
        name = f"{op.kind or op.name}{ins}{constants(op.attrs)}"
        return f"{outs} = {name}{tags} : {types}{self.after(op)}"

    def tags(self, node: Op[V] | Loop[V, Any]) -> str:
        """The phase, the origin and the `recompute` block of an operator or a loop."""
        origin = node.origin
        name = "" if origin is None else self.origin(origin.of)
        return phase_text(node.phase, node.block, origin_text(origin, name))

    def sliced(self, node: Loop[V, Any]) -> Iterable[Stacked[V]]:
        """The stacks that a loop takes slices of."""
        return node.stacked

    def loop(self, node: Loop[V, Any], depth: int) -> Iterator[str]:
        """The lines of a loop."""
        pad, dim = INDENT * (depth + 1), node.dim
        backwards = " from the last" if node.reverse else ""
        head = f"repeat {dim.name} {dim.size}{self.repeat(node)}{backwards}"
        yield f"{INDENT * depth}{head}{self.tags(node)}"
        for item in self.sliced(node):
            yield f"{pad}slice {self.typed(item.inside)} = {self.name(item.outer)}[{dim.name}]"
        yield from self.first(node, depth + 1)
        for c in node.carries:
            yield f"{pad}carry {self.typed(c.inside)} = {self.name(c.init)}"
        yield from self.block(node, depth + 1)
        for c in node.carries:
            ends = f"{self.name(c.inside)} = {self.name(c.next)}"
            yield f"{pad}next  {ends}; at the end {self.defined(c.result)}"
        for part in node.collected:
            yield pad + self.collect(node, part)


def origin_text(origin: Origin | None, name: str) -> str:
    """` of %5`, ` copy of %5`; nothing without a name."""
    if origin is None or not name:
        return ""
    return f" copy of {name}" if origin.is_copy else f" of {name}"


def phase_text(phase: str, block: int | None = None, origin: str = "") -> str:
    """` [backward of %5]`, ` [recompute 1]`; nothing for an operator of the forward pass."""
    words = [] if phase == "forward" else [f"{phase}{origin}"]
    words += [] if block is None else [f"recompute {block}"]
    return f" [{', '.join(words)}]" if words else ""


def type_text(type_: TensorType) -> str:
    """`f32[batch 64, io 512]`."""
    return f"{type_.dtype}[{', '.join(f'{d.name} {d.size}' for d in type_.dims)}]"


def constants(named: Iterable[tuple[str, Any]]) -> str:
    """` {dim=mem}`, or nothing."""
    pairs = [f"{name}={_literal(value)}" for name, value in named]
    return f" {{{', '.join(pairs)}}}" if pairs else ""


def _literal(value: Any) -> str:
    """One constant of an operator; text in quotes, so that it is not taken for a dim."""
    if isinstance(value, tuple):
        return f"({' '.join(map(_literal, value))})"
    return json.dumps(value) if isinstance(value, str) else attribute(value)


def attribute(value: Any) -> str:
    """One constant of an operator for a reader; dims and dtypes by name."""
    if isinstance(value, Dim | DType):
        return value.name
    if isinstance(value, TensorType):
        return type_text(value)
    if isinstance(value, tuple):
        return f"({' '.join(map(attribute, value))})"
    return safe(value if isinstance(value, str) else repr(value))
