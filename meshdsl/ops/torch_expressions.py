"""Small pieces of torch text that the records share. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshdsl.ir.types import Dim, DType
from meshdsl.ops.opdef import TorchCall

Names = tuple[str, ...]


def scalar(number: str, dtype: DType) -> str:
    """A literal as a tensor, filled where it lies: a GPU waits for a copy from the host."""
    return f"torch.full((), {number}, dtype={dtype.torch})"


def permuted(text: str, old: Names, new: Names) -> str:
    """`text` with its dims permuted from order `old` to `new`: `x`, `x.mT` or `x.permute(…)`."""
    if old == new:
        return text
    if len(old) > 1 and new == (*old[:-2], old[-1], old[-2]):
        return f"{text}.mT"
    return f"{text}.permute({', '.join(str(old.index(n)) for n in new)})"


def aligned(text: str, names: Names, target: Names, *, full: bool = False) -> str:
    """`text` with dims `names`, permuted and widened to broadcast over `target`.

    Leading dims that are missing are left to broadcasting, unless a tensor of `full` rank is
    needed.
    """
    present = tuple(n for n in target if n in names)
    assert len(present) == len(names), f"{names} do not broadcast to {target}"
    while target and target[0] not in names and not full:
        target = target[1:]
    return permuted(text, names, present) + _widening([n in names for n in target])


def aligned_tensor(call: TorchCall, index: int, dims: tuple[Dim, ...]) -> str:
    """Operand `index` aligned to `dims`, a tensor even where it is a literal."""
    return call.tensor(index) if call.is_constant(index) else call.aligned(index, dims)


def _widening(present: list[bool]) -> str:
    """The index that inserts a dim where one is not `present`: `[:, None]`, `[..., None]`."""
    if all(present):
        return ""
    marks = [":" if p else "None" for p in present]
    while marks[-1] == ":":
        marks.pop()
    lead = marks.index("None")
    if lead > 1 and len(marks) == len(present) and ":" not in marks[lead:]:
        marks[:lead] = ["..."]
    return f"[{', '.join(marks)}]"


def atom(text: str) -> str:
    """`text`, in parentheses unless it is a name or a number."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def tuple_text(items: Sequence[object]) -> str:
    """A Python tuple, `(a, b)` or `(a,)`, of texts or numbers."""
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"


def one_or_tuple(items: Sequence[object]) -> str:
    """The item itself when it is the only one, else a tuple."""
    return str(items[0]) if len(items) == 1 else tuple_text(items)


def indexed(text: str, at: int, index: object) -> str:
    """`text[:, :, index]`, with the index at dim `at`."""
    return f"{text}[{':, ' * at}{index}]"


def padded_at(text: str, rank: int, at: int, before: int, after: int, fill: str = "") -> str:
    """`text` of `rank` dims with margins along dim `at`; a negative one cuts elements off.

    `fill` is the option that says with what. Torch lists the widths from the last dim backwards.
    """
    widths = [0, 0] * (rank - 1 - at) + [before, after]
    return f"torch.nn.functional.pad({text}, {tuple_text(widths)}{fill})"


def joined(text: str, at: int, count: int) -> str:
    """`text` with its `count` dims from `at` on made one; of none, one of size 1."""
    if count == 1:
        return text
    return f"{text}.flatten({at}, {at + count - 1})" if count else f"{text}.unsqueeze({at})"


def grouped(text: str, names: Names, groups: Sequence[Names]) -> str:
    """`text` with one dim for each group of dims, in this order; an empty group is of size 1."""
    text = permuted(text, names, tuple(n for group in groups for n in group))
    at = sum(map(len, groups))
    for group in reversed(groups):
        at -= len(group)
        text = joined(text, at, len(group))
    return text


class Sized(Protocol):
    """What knows the local sizes of dims, as a call or a variable."""

    def extent(self, dim: str, /) -> str:
        """Text of the local size of `dim`."""


def ungrouped(call: Sized, text: str, groups: Sequence[Names], names: Names) -> str:
    """The inverse of `grouped`, for the result."""
    for at, group in reversed([*enumerate(groups)]):
        if not group:
            text = f"{text}.squeeze({at})"
        elif len(group) > 1:
            text = f"{text}.unflatten({at}, {tuple_text([call.extent(n) for n in group])})"
    return permuted(text, tuple(n for group in groups for n in group), names)


def range_text(call: TorchCall, dim: str, dtype: str) -> str:
    """The global indices of the local elements of `dim`."""
    text = f"torch.arange({call.extent(dim)}, dtype={dtype})"
    return f"{text} + {atom(call.offset(dim))}" if call.is_split(dim) else text


def block_text(call: TorchCall, text: str, dim: str, at: int = 0) -> str:
    """What a device has of `text`, whose dim `at` is all of `dim`."""
    if not call.is_split(dim):
        return text
    return f"{text}.narrow({at}, {call.offset(dim)}, {call.extent(dim)})"


def expanded(call: TorchCall, index: int, dims: tuple[Dim, ...]) -> str:
    """Operand `index` with all of `dims`, local sizes, in this order: a view without copies."""
    text = aligned_tensor(call, index, dims)
    if call.ins[index].names and all(call.ins[index].has(d.name) for d in dims):
        return text
    return f"{text}.expand({tuple_text([call.extent(d.name) for d in dims])})" if dims else text
