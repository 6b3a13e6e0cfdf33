"""Numbers made of the sizes of dims, which record their derivation: `4 * io`, `sqrt(key)`.

They are plain numbers to every pass. But `--set` changes sizes, so such a number is never taken
for the literal that it happens to equal, and `to_mdsl` writes its derivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from meshdsl.ir.types import Dim
from meshdsl.records import dataclass

LONGEST = 200
"""The most operators recorded in one number; beyond it only its use of sizes is known."""


@dataclass(frozen=True, slots=True)
class How:
    """The derivation of a number: `size` of a dim, or an operator of numbers.

    An empty `operator` is one that the language does not have. `count` counts operators.
    """

    operator: str
    operands: tuple[int | float | Dim, ...]
    count: int = 1


class SizedInt(int):
    """An integer made of sizes."""

    how: How


class SizedFloat(float):
    """A float made of sizes."""

    how: How


def size_of(dim: Dim) -> int:
    """The size of a dim, with the dim recorded."""
    return _with(dim.size, How("size", (dim,)))


@overload
def made(value: int, operator: str, *operands: int | float) -> int: ...
@overload
def made(value: int | float, operator: str, *operands: int | float) -> int | float: ...
def made(value: int | float, operator: str, *operands: int | float) -> int | float:
    """`value`, recorded as `operator` of `operands`, if any of them is made of sizes."""
    origins = [how for how in map(how_of, operands) if how is not None]
    if not origins:
        return value
    count = 1 + sum(how.count for how in origins)
    if count > LONGEST:
        dims = tuple({d.name: d for o in operands for d in dims_of(o)}.values())
        return _with(value, How("", dims, 0))
    return _with(value, How(operator, operands, count))


def as_float(number: int | float) -> float:
    """`float(number)` with the same derivation."""
    how = how_of(number)
    return float(number) if how is None else _with(float(number), how)


def how_of(number: object) -> How | None:
    """The derivation of a number, or None for one that is not made of sizes."""
    return number.how if isinstance(number, SizedInt | SizedFloat) else None


def dims_of(number: object) -> Iterator[Dim]:
    """The dims whose sizes a number is made of, some more than once."""
    how = how_of(number)
    for operand in how.operands if how else ():
        if isinstance(operand, Dim):
            yield operand
        else:
            yield from dims_of(operand)


def operators_of(number: object) -> Iterator[str]:
    """The operators in the derivation of a number, some more than once."""
    how = how_of(number)
    if how is not None and how.operator != "size":
        yield how.operator
        for operand in how.operands:
            yield from operators_of(operand)


@overload
def _with(value: int, how: How) -> int: ...
@overload
def _with(value: int | float, how: How) -> int | float: ...
def _with(value: int | float, how: How) -> int | float:
    found = SizedFloat(value) if isinstance(value, float) else SizedInt(value)
    found.how = how
    return found
