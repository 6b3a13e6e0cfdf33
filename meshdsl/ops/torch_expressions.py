"""Small pieces of torch text that the records share. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

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


def shifted(text: str, rank: int, at: int, by: int) -> str:
    """`text` of `rank` dims, moved `by` places along dim `at`; zeros come in.

    Torch lists the widths of a padding from the last dim backwards.
    """
    widths = [0, 0] * (rank - 1 - at) + [by, -by]
    return f"torch.nn.functional.pad({text}, {tuple_text(widths)})"


def expanded(call: TorchCall, index: int, dims: tuple[Dim, ...]) -> str:
    """Operand `index` with all of `dims`, local sizes, in this order: a view without copies."""
    text = aligned_tensor(call, index, dims)
    if call.ins[index].names and all(call.ins[index].has(d.name) for d in dims):
        return text
    return f"{text}.expand({tuple_text([call.extent(d.name) for d in dims])})" if dims else text
