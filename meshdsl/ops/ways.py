"""What would make a call that an operator refuses legal, as changes of the call or of a dim.

An operator knows types and options, and no text: `named/call_fixes.py` makes edits of these, where
the operand, the option or the dim is written in the program.
"""

from __future__ import annotations

from meshdsl.ir.types import TensorType
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Cast:
    """Cast the operands of a type."""

    type: TensorType
    dtype: str


@dataclass(frozen=True, slots=True)
class CastAll:
    """Cast all operands."""

    dtype: str


@dataclass(frozen=True, slots=True)
class NonZero:
    """Compare the operands of a type with 0, which makes booleans of numbers."""

    type: TensorType


@dataclass(frozen=True, slots=True)
class ResizeDim:
    """Declare a dim with another size."""

    dim: str
    size: int


@dataclass(frozen=True, slots=True)
class SetOption:
    """Write a value of an option, in the language's text."""

    option: str
    text: str


@dataclass(frozen=True, slots=True)
class DropDim:
    """Leave out a dim of the brackets, or of the result, the last time that it is there."""

    dim: str


@dataclass(frozen=True, slots=True)
class SwapDim:
    """Write another dim in the brackets."""

    dim: str
    new: str


@dataclass(frozen=True, slots=True)
class Brackets:
    """Write these brackets."""

    text: str


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Write another size of the window along a dim."""

    dim: str
    size: int


@dataclass(frozen=True, slots=True)
class ResultDims:
    """Write these dims of the result, after `->`."""

    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RenameDim:
    """Rename a dim of operands, by number: a new dim of its size is declared.

    It is renamed in the brackets, too, where these are about the operands.
    """

    operands: tuple[int, ...]
    dim: str


@dataclass(frozen=True, slots=True)
class MergeDims:
    """Merge dims of operands, by number, into one that is declared."""

    operands: tuple[int, ...]
    dims: tuple[str, ...]


Way = (
    Cast
    | CastAll
    | NonZero
    | ResizeDim
    | SetOption
    | DropDim
    | SwapDim
    | Brackets
    | WindowSize
    | ResultDims
    | RenameDim
    | MergeDims
)
