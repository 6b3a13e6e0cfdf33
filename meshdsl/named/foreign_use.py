"""A foreign expression as rules see it: its word and its operands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field

from meshdsl.ir.types import Dim, DType
from meshdsl.records import dataclass

DIM_OPTIONS = ("dim", "axis", "dims", "axes", "reduction_indices")
"""The names of an argument that says which dims are meant."""


@dataclass(frozen=True, slots=True)
class ForeignOperand:
    """An operand: `ref` is its placeholder in what is written.

    A tensor has `dims`, in the order that positions count, and a `dtype`; others are a `number`, a
    `dim` by its name, a `text` (a string, or a name without meaning), a list (`parts`), or the
    `bounds` of a slice. Of a `shifted` tensor positions cannot be counted: other libraries have
    dims of size 1 there, or several tensors.
    """

    ref: str
    dims: tuple[Dim, ...] | None = None
    dtype: DType | None = None
    number: int | float | None = None
    dim: Dim | None = None
    text: str | None = None
    parts: tuple[ForeignOperand, ...] | None = None
    bounds: tuple[int | None, int | None] | None = None
    shifted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims of a tensor."""
        return tuple(d.name for d in self.dims or ())


@dataclass(slots=True)
class Use:
    """One foreign expression: its word, its operands, and the dims known where it stands.

    A rule may declare dims (`fresh`), and say in which `order` the result has its dims where it was
    used by positions, or that it is `shifted`: positions are counted otherwise there.
    """

    word: str
    parts: tuple[ForeignOperand, ...]
    named: Mapping[str, ForeignOperand]
    known: Mapping[str, Dim]
    new: dict[str, Dim] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    shifted: bool = False

    @property
    def tensors(self) -> list[ForeignOperand]:
        """The operands that are tensors."""
        return [p for p in self.parts if p.dims is not None]

    def fresh(self, hint: str, size: int, taken: Sequence[str] = ()) -> str:
        """The name of a dim of this size that no operand has: a new one after `hint`."""
        if size < 1:
            raise ValueError(size)
        for name in itertools.chain([hint], (f"{hint}{i}" for i in itertools.count(2))):
            old = self.new.get(name) or self.known.get(name)
            if name not in taken and (old is None or old.size == size):
                if old is None:
                    self.new[name] = Dim(name, size)
                return name
        raise AssertionError("there is always another name")

    def option(self, *names: str, at: int | None = None) -> ForeignOperand | None:
        """The argument of one of these names, or at a position."""
        argument = next((self.named[n] for n in names if n in self.named), None)
        if argument is None and at is not None and at < len(self.parts):
            return self.parts[at]
        return argument

    def dims_of(
        self, part: ForeignOperand | None, tensor: ForeignOperand
    ) -> tuple[str, ...] | None:
        """The names of the dims that an argument names or counts; None where it does not."""
        if part is None:
            return None
        if part.parts is not None:
            each = [self.dims_of(p, tensor) for p in part.parts]
            return None if None in each else tuple(n for names in each for n in names or ())
        if part.dim is not None:
            return (part.dim.name,) if part.dim.name in tensor.names else None
        if part.text is not None:
            words = tuple(part.text.split())
            return words if words and set(words) <= set(tensor.names) else None
        if tensor.shifted:
            return None
        if isinstance(part.number, int) and -len(tensor.names) <= part.number < len(tensor.names):
            return (tensor.names[part.number],)
        return None
