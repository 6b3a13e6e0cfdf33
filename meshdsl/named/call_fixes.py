"""Fixes of a call that an operator refuses: its ways out (`ops/ways.py`) as edits of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from meshdsl.diagnostics import Edit, Fix, Span, advice
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.ops import ways
from meshdsl.ops.opdef import OpError
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import (
    around,
    below_dims,
    cast_to,
    inserted,
    resized,
    shortened,
    without_entry,
)
from meshdsl.syntax.enclosing import is_used_only_in


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call or an item of a view as it is written.

    `options` are the places of those that are given by position; `operands` those of the operands
    that may be edited, where they are not the ones that messages point at.
    """

    node: ast.CallExpr | None
    options: Mapping[str, Span] = field(default_factory=dict)
    operands: tuple[Span | None, ...] | None = None

    @property
    def items(self) -> tuple[ast.Item, ...]:
        """What the brackets hold."""
        return () if self.node is None or self.node.items is None else self.node.items

    def option(self, name: str) -> Span | None:
        """The place of the value of an option."""
        keywords = () if self.node is None else self.node.keywords
        return next((k.value.span for k in keywords if k.name.text == name), self.options.get(name))

    def dims(self, name: str) -> list[Span]:
        """The places of a dim in the brackets, then in the result."""
        out = () if self.node is None else self.node.out or ()
        items = [item.dim for item in self.items if isinstance(item, ast.DimItem)]
        return [n.span for n in (*items, *out) if n.text == name]


NOTHING = WrittenCall(None)
"""What is no call: an operator between its operands."""


def call_fixes(
    found: Sequence[ways.Way],
    spans: Sequence[Span],
    types: Sequence[TensorType],
    written: WrittenCall = NOTHING,
    dims: Mapping[str, Span] = {},
    at: Span | None = None,
) -> tuple[Fix, ...]:
    """The ways out that the text has a place for: a person decides which.

    Args:
        found: what the operator says.
        spans: the places of its operands; none where the program does not write them.
        types: the types of its operands.
        written: the call.
        dims: the places of the names of declared dims.
        at: the place of the call.
    """
    places = spans if written.operands is None else written.operands
    operands = [(s, t) for s, t in zip(places, types, strict=False) if s is not None]
    text = _Text(operands, places, written, dims, at)
    return tuple(fix for way in found for fix in _EDITS[type(way)](text, way))


def along_a_dim(node: ast.CallExpr, names: Mapping[str, object]) -> tuple[Fix, ...]:
    """The fixes that apply a call along one dim of its first operand, where that has a name."""
    operand = node.args[0] if node.args else None
    value = names.get(operand.name.text) if isinstance(operand, ast.Ref) else None
    dims = value.type.names if isinstance(value, Value) and node.items is None else ()
    name = node.function
    return tuple(
        inserted(name.span.end, f"[{dim}]", name.span, f"write `{name.text}[{dim}](…)`")
        for dim in dims
    )


def call_help(error: OpError, fixes: Sequence[Fix]) -> str | None:
    """The help of a refused call with these fixes."""
    if not fixes:
        return error.help or error.also
    return advice(fixes, error.also)


@dataclass(frozen=True, slots=True)
class _Text:
    """The places of a call; a method for each way out yields the fixes that take it."""

    operands: Sequence[tuple[Span, TensorType]]
    places: Sequence[Span | None]
    written: WrittenCall
    declared: Mapping[str, Span]
    at: Span | None

    def cast(self, way: ways.Cast) -> Iterator[Fix]:
        for span, type_ in self.operands:
            if type_ == way.type:
                yield cast_to(span, way.dtype, safe=False)

    def cast_all(self, way: ways.CastAll) -> Iterator[Fix]:
        edits = [edit for span, _ in self.operands for edit in cast_to(span, way.dtype).edits]
        if edits:
            yield Fix(f"cast both to {way.dtype}", tuple(edits), safe=False)

    def compare(self, way: ways.NonZero) -> Iterator[Fix]:
        for span, type_ in self.operands:
            if type_ == way.type:
                title = f"write `({shortened(span)} != 0)`"
                yield around(span, "(", " != 0)", title, safe=False)

    def resize(self, way: ways.ResizeDim) -> Iterator[Fix]:
        """A dim that is used elsewhere, too, has the size that is right there."""
        name = self.declared.get(way.dim)
        if name is not None and self.at is not None and is_used_only_in(self.at, name):
            yield from resized(name, (way.size,))

    def option(self, way: ways.SetOption) -> Iterator[Fix]:
        place, node = self.written.option(way.option), self.written.node
        text = f"{way.option}={way.text}"
        if place is not None and place == self.written.options.get(way.option):
            yield Fix.write(place, way.text, safe=False)
        elif place is not None:
            yield Fix(f"write `{text}`", (Edit(place, way.text),), safe=False)
        elif node is not None and node.args:
            last = max((*node.args, *node.keywords), key=lambda part: part.span.end)
            yield inserted(last.span.end, f", {text}", last.span, f"add `{text}`")

    def drop(self, way: ways.DropDim) -> Iterator[Fix]:
        for place in self.written.dims(way.dim)[-1:]:
            yield Fix(f"leave out `{way.dim}`", (Edit(without_entry(place), ""),), safe=False)

    def swap(self, way: ways.SwapDim) -> Iterator[Fix]:
        for place in self.written.dims(way.dim)[:1]:
            yield Fix.write(place, way.new, safe=False)

    def brackets(self, way: ways.Brackets) -> Iterator[Fix]:
        if items := self.written.items:
            span = items[0].span.to(items[-1].span)
            yield Fix(f"write `[{way.text}]`", (Edit(span, way.text),), safe=False)

    def window(self, way: ways.WindowSize) -> Iterator[Fix]:
        for item in self.written.items:
            if isinstance(item, ast.ByItem) and item.dim.text == way.dim:
                if isinstance(item.window, ast.Number):
                    text = f"{way.dim} by {way.size}"
                    edit = Edit(item.window.span, str(way.size))
                    yield Fix(f"write `{text}`", (edit,), safe=False)

    def result(self, way: ways.ResultDims) -> Iterator[Fix]:
        out = None if self.written.node is None else self.written.node.out
        if out:
            text = ", ".join(way.dims)
            edit = Edit(out[0].span.to(out[-1].span), text)
            yield Fix(f"write `-> [{text}]`", (edit,), safe=False)

    def rename(self, way: ways.RenameDim) -> Iterator[Fix]:
        new = f"other_{way.dim}"
        edits = self._viewed(way.operands, (way.dim,), new, way.dim)
        brackets = [item.dim.span for item in self.written.items if isinstance(item, ast.DimItem)]
        edits += [Edit(span, new) for span in brackets if span.text == way.dim]
        if len(edits) > 1:
            title = f"rename `{way.dim}` there, with `dim {new} = {way.dim}`"
            yield Fix(title, tuple(edits), safe=False)

    def merge(self, way: ways.MergeDims) -> Iterator[Fix]:
        if edits := self._viewed(way.operands, way.dims, "_".join(way.dims), " * ".join(way.dims)):
            title = f"merge {' and '.join(f'`{dim}`' for dim in way.dims)} there"
            yield Fix(title, tuple(edits), safe=False)

    def _viewed(
        self, operands: Sequence[int], dims: Sequence[str], new: str, size: str
    ) -> list[Edit]:
        """Views of operands with one dim in place of others, which is declared; or nothing."""
        places = [self.places[n] for n in operands if n < len(self.places)]
        spans = [span for span in places if span is not None]
        is_known = new not in self.declared and set(dims) <= set(self.declared)
        if not is_known or len(spans) != len(operands):
            return []
        old = dims[0] if len(dims) == 1 else f"({', '.join(dims)})"
        edits = [below_dims(f"dim {new} = {size}", spans[0].source, self.declared.values())]
        for span in spans:
            view = f"[{old} -> {new}]"
            edits += (
                [Edit(span, f"{span.text}{view}")]
                if span.text.isidentifier()
                else around(span, "(", f"){view}", "").edits
            )
        return edits


_EDITS: Mapping[type, Callable[[_Text, Any], Iterator[Fix]]] = {
    ways.Cast: _Text.cast,
    ways.CastAll: _Text.cast_all,
    ways.NonZero: _Text.compare,
    ways.ResizeDim: _Text.resize,
    ways.SetOption: _Text.option,
    ways.DropDim: _Text.drop,
    ways.SwapDim: _Text.swap,
    ways.Brackets: _Text.brackets,
    ways.WindowSize: _Text.window,
    ways.ResultDims: _Text.result,
    ways.RenameDim: _Text.rename,
    ways.MergeDims: _Text.merge,
}
