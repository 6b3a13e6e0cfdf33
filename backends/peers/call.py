"""One call of an operator while it is being written for another array library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import Attrs
from meshdsl.ops.text import aligned, tuple_text

Text = str | Callable[["PeerCall"], str]
Table = Mapping[str, Text]
"""By operator: a template over aligned operands, or a function of the call."""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A call on whole tensors.

    args:      a variable per operand, or a Python literal where `constants` says so.
    transpose: the method that permutes dims.
    where:     the text that says how the result is placed.
    """

    args: tuple[str, ...]
    constants: tuple[bool, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    attrs: Attrs
    transpose: str
    where: str

    @property
    def out(self) -> TensorType:
        """The type of the result."""
        return self.outs[0]

    @property
    def axis(self) -> int:
        """Position of the dim that the call is about, in its first operand."""
        return self.ins[0].index(self.attrs["dim"].name)

    @property
    def axes(self) -> tuple[int, ...]:
        """Positions of the dims that the call is about, ascending."""
        return tuple(sorted(self.ins[0].index(d.name) for d in self.attrs["dims"]))

    def permuted(self, text: str, old: tuple[str, ...], new: tuple[str, ...]) -> str:
        """`text` with its dims brought from order `old` to `new`."""
        if old == new:
            return text
        return f"{text}.{self.transpose}({', '.join(str(old.index(n)) for n in new)})"

    def aligned(self, index: int, dims: tuple[Dim, ...] | None = None) -> str:
        """Operand `index` so that it broadcasts against `dims`, by default those of the result."""
        if self.constants[index]:
            return self.args[index]
        target = tuple(d.name for d in (self.out.dims if dims is None else dims))
        names = self.ins[index].names
        present = tuple(n for n in target if n in names)
        text = self.permuted(self.args[index], names, present)
        return aligned(text, present, target)

    def full(self, index: int, dims: tuple[str, ...]) -> str:
        """Operand `index` with every one of `dims`, of size 1 where it does not have it."""
        names = self.ins[index].names
        present = tuple(n for n in dims if n in names)
        text = self.permuted(self.args[index], names, present)
        return aligned(text, present, dims, full=True)

    def write(self, text: Text) -> str:
        """The text of the call by an entry of a table."""
        if callable(text):
            return text(self)
        return text.format(*(self.aligned(i) for i in range(len(self.args))))


def shape_text(type_: TensorType) -> str:
    """`(64, 512)`."""
    return tuple_text(type_.shape)


def padded(call: PeerCall) -> tuple[int, int, int]:
    """The position that `pad` or `shift` is about, and how much goes before and after it."""
    attrs = call.attrs
    if "by" in attrs:
        size = attrs["dim"].size
        by = max(-size, min(size, attrs["by"]))
        return call.axis, by, -by
    return call.ins[0].index(attrs["source"][0].name), attrs["before"], attrs["after"]


def concat_parts(call: PeerCall) -> tuple[list[str], int]:
    """The operands of a `concat`, their dims as in the result, and the position they join at."""
    target, sources = call.attrs["target"], call.attrs["sources"]
    parts = []
    for i, source in enumerate(sources):
        dims = tuple(source if d.name == target.name else d for d in call.out.dims)
        parts.append(call.aligned(i, dims))
    return parts, call.out.index(target.name)
