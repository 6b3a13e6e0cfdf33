"""Parts of a mesh axis: how they are named, and the mesh in whose axes each part is whole.

`tp.2` is the outer part of the axis `tp`: its devices in two halves, one after the other. `tp.2.4`
is the part of size 4 within each half, so that on `tp` of size 8 the two together are `tp`. Shardy
writes them `"tp":(1)2` and `"tp":(2)4`: the product of the sizes before, and the size
(https://openxla.org/shardy/sharding_representation, "Axis splitting and sub-axes").
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import NamedTuple

_PART = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)((?:\.[0-9]{1,10})+)")

Parts = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""The axes that are in parts, each with its parts and their sizes, outer first."""


class SubAxis(NamedTuple):
    """A part of an axis as it is named: by the sizes from the outermost part to itself."""

    axis: str
    sizes: tuple[int, ...]

    @property
    def before(self) -> int:
        """The product of the sizes of the parts outside of it."""
        return math.prod(self.sizes[:-1])

    @property
    def end(self) -> int:
        """The same with its own size."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ".".join([self.axis, *map(str, self.sizes)])


def sub_axis(name: str) -> SubAxis | None:
    """The part of an axis that a name says; None for the name of a whole axis."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return SubAxis(match[1], tuple(map(int, match[2][1:].split("."))))


def size_of_part(name: str) -> int:
    """The size of a part of an axis, which its name ends with; 1 for a whole axis."""
    part = sub_axis(name)
    return 1 if part is None else part.sizes[-1]


def whole_axis(name: str) -> str:
    """The axis that a name speaks of, whole or of a part."""
    return name.partition(".")[0]


def parts_of(axis: str, size: int, cuts: Set[int]) -> tuple[tuple[str, int], ...]:
    """The parts of an axis of a size that is cut after each of some products, outer first.

    Each of the `cuts`, in order, divides the next one, and the last one the size. Without cuts the
    only part is the axis itself.
    """
    if not cuts - {size}:
        return ((axis, size),)
    parts, sizes, before = [], list[int](), 1
    for cut in [*sorted(cuts - {size}), size]:
        sizes.append(cut // before)
        parts.append((str(SubAxis(axis, tuple(sizes))), cut // before))
        before = cut
    return tuple(parts)


def named_parts(axes: tuple[tuple[str, int], ...]) -> Parts:
    """The axes of which a mesh has all parts, in order, by their names: `tp.2` and `tp.2.4`."""
    complete = []
    for axis in dict.fromkeys(part.axis for name, _ in axes if (part := sub_axis(name))):
        ends = [part.end for name, _ in axes if (part := sub_axis(name)) and part.axis == axis]
        parts = parts_of(axis, max(ends), {*ends})
        at = axes.index(parts[0]) if parts[0] in axes else len(axes)
        if axes[at : at + len(parts)] == parts and len(parts) == len(ends):
            complete.append((axis, parts))
    return tuple(complete)


def resolved(name: str, parts: Parts) -> tuple[str, ...]:
    """The parts of a mesh that an axis, or a part of it, consists of; empty for others."""
    named = sub_axis(name)
    for axis, its in parts:
        if axis == name:
            return tuple(part for part, _ in its)
        if named is not None and axis == named.axis:
            ends = [1, *(math.prod(n for _, n in its[: k + 1]) for k in range(len(its)))]
            if named.before in ends and named.end in ends:
                start, stop = ends.index(named.before), ends.index(named.end)
                return tuple(part for part, _ in its[start:stop])
    return ()


def joined(axes: tuple[str, ...], parts: Parts) -> tuple[str, ...]:
    """Axes of a mesh, where all parts of an axis follow one another that axis for them."""
    for axis, its in parts:
        names = tuple(part for part, _ in its)
        starts = (at for at in range(len(axes)) if axes[at : at + len(names)] == names)
        if (at := next(starts, None)) is not None:
            axes = (*axes[:at], axis, *axes[at + len(names) :])
    return axes
