"""Checks of indices, integer divisors and numbers of rows, of torch tensors and numpy arrays."""

from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np


class IndexOutOfRange(IndexError):
    """What is no index of a dim, at a global `position` by dim."""

    def __init__(self, message: str, place: str, position: dict[str, int]) -> None:
        super().__init__(message)
        self.place, self.position = place, position


FEW = 32
"""So many indices are read one by one in less time than torch takes for a call."""


def check_index(
    index: Any,
    dim: str,
    size: int,
    place: str,
    dims: tuple[str, ...],
    offsets: tuple[int, ...],
    ignored: int | None = None,
) -> Any:
    """Return `index` if all of it lies in 0 … size - 1 or is `ignored`; nothing waits for a GPU.

    `index` is an integer torch tensor or numpy array with dims `dims`; its first element has the
    global position `offsets`. IndexOutOfRange names the first bad element in row-major order; on
    a GPU an assertion fails instead, when it gets there.
    """
    counted = index if ignored is None else index * (index != ignored)
    if getattr(index, "is_cuda", False):
        import torch

        bad = (counted < 0) | (counted >= size)
        torch._assert_async(~bad.any(), f"MD0801 {place}: no index of dim `{dim}` of size {size}")
    elif 0 not in counted.shape and not 0 <= (ends := _ends(counted))[0] <= ends[1] < size:
        first = [int(at) for at in np.argwhere(np.asarray((counted < 0) | (counted >= size)))[0]]
        position = {d: o + at for d, o, at in zip(dims, offsets, first, strict=True)}
        at = f" at [{', '.join(f'{d}={at}' for d, at in position.items())}]" if dims else ""
        wrong = f"index {int(index[(*first,)])}{at} is out of range for dim `{dim}` of size {size}"
        raise IndexOutOfRange(f"MD0801 {place}: {wrong}", place, position)
    return index


def _ends(x: Any) -> tuple[int, int]:
    """The least and the largest element, of torch in one pass; few are compared here."""
    if not x.shape:
        return (at := int(x)), at
    if len(x.shape) == 1 and x.shape[0] <= FEW:
        few = x.tolist()
        return min(few), max(few)
    least, largest = x.aminmax() if hasattr(x, "aminmax") else (x.min(), x.max())
    return int(least), int(largest)


def local_index(index: Any, start: Any, count: int, outside: int = 0) -> tuple[Any, Any]:
    """Indices counted from `start`, or `outside` where none of `count` is meant; whether one is."""
    local = index - start
    inside = (local >= 0) & (local < count)
    return local.where(inside, outside), inside


class DividedByZero(ZeroDivisionError):
    """An integer that is divided by zero."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def check_divisor(divisor: Any, place: str) -> Any:
    """Return `divisor`, an integer torch tensor or numpy array, if no element of it is zero.

    On a GPU nothing waits for the look: an assertion fails when it gets there.
    """
    bad = divisor == 0
    if getattr(divisor, "is_cuda", False):
        import torch

        torch._assert_async(~bad.any(), f"MD0802 {place}: an integer is divided by zero")
    elif bad.any():
        raise DividedByZero(f"MD0802 {place}: an integer is divided by zero", place)
    return divisor


class TooManyRows(ValueError):
    """More rows than `rows=` of a `grouped_einsum` says that there are at most."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def check_rows(sizes: Any, most: int, room: int, place: str) -> Any:
    """Return `sizes` if the groups of all blocks have at most `most` rows together.

    `sizes` is an integer torch tensor or numpy array over blocks, batches and groups; a block has
    `room` rows. Each batch is counted for itself. On a GPU nothing waits for the look: an assertion
    fails when it gets there.
    """
    rows = sizes.clip(0, None).sum(-1).clip(None, room).sum(0).reshape(-1)
    if getattr(sizes, "is_cuda", False):
        import torch

        torch._assert_async((rows <= most).all(), f"MD0803 {place}: more rows than `rows={most}`")
    elif len(rows) and int(rows.max()) > most:
        wrong = f"{int(rows.max())} rows are more than `rows={most}` promises"
        raise TooManyRows(f"MD0803 {place}: {wrong}", place)
    return sizes
