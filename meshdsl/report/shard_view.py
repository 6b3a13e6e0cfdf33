"""The blocks of a tensor on a mesh, and the devices of each: the data of pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from meshdsl.backends.runtime.values import block
from meshdsl.device.stored_blocks import lie_alone
from meshdsl.placed.placements import Mesh
from meshdsl.placed.sub_axes import size_of_part
from meshdsl.records import dataclass

if TYPE_CHECKING:
    from meshdsl.report.schema import TensorFacts

SIGNS = {"sum": "+", "prod": "×", "max": "max", "min": "min"}
"""Signs between devices whose partial values are reduced."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor on a mesh. `order` has the axes of each split dim, outer first.

    Along `partial` axes devices have partial values, to be reduced by `op`. `lying` are the blocks
    of dims that do not lie in order (`Spec.blocks`).
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    order: Mapping[str, tuple[str, ...]]
    partial: tuple[str, ...]
    op: str
    mesh: Mesh
    lying: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: TensorFacts, mesh: Mapping[str, int]) -> Holding:
        """The tensor of an entry of `tensors` in the JSON of `explain`, on its `mesh`.

        Where its placement is by parts of an axis, the picture's axes are these.
        """
        axes = {axis: mesh.get(axis) or size_of_part(axis) for axis in tensor["placement"]}
        partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
        order = {dim: tuple(axes) for dim, axes in tensor["order"].items()}
        lying = dict(tensor.get("blocks", {}))
        sizes = dict(zip(tensor["dims"], tensor["shape"], strict=True))
        for axis, device in tensor.get("on", {}).items():
            lie_alone(sizes, order, lying, axis, range(axes[axis]), device)
        return cls(
            tensor["name"] or "a subexpression",
            tensor["dtype"],
            tuple(tensor["dims"]),
            tuple(tensor["shape"]),
            order,
            tuple(partial),
            next(iter(partial.values()), "")[2:-1] or "sum",
            Mesh("mesh", tuple(axes.items())),
            lying,
        )

    # --- blocks ------------------------------------------------------------------------------

    def size(self, dim: str) -> int:
        """The global size of a dim."""
        return self.shape[self.dims.index(dim)]

    def parts(self, dim: str) -> int:
        """The number of blocks along a dim."""
        return self.mesh.size(*self.order.get(dim, ()))

    def extent(self, dim: str, part: int) -> str:
        """The indices of one block of a dim: `0–31`, or `all` of it, or `none`."""
        if self.parts(dim) == 1:
            return "all"
        axes, lying = self.order.get(dim, ()), self.lying.get(dim, ())
        at: list[int] = []
        for axis in reversed(axes):
            part, number = divmod(part, self.mesh.size(axis))
            at.insert(0, number)
        ways = list(self.mesh.ways(dim, self.size(dim), axes))
        if len(lying) > 1:
            ways[0] = tuple(map(len, lying))
        first, local = block(self.size(dim), tuple(ways), tuple(at))
        if not local:
            return "none"
        every = [i for each in lying for i in each][first : first + local]
        if every and every != [*range(every[0], every[0] + local)]:
            return ", ".join(map(str, every))
        first = every[0] if every else first
        return str(first) if local == 1 else f"{first}–{first + local - 1}"

    def part_of(self, rank: int) -> dict[str, int]:
        """The block index of device `rank` along every dim."""
        at = self.mesh.coordinates(rank)
        numbers = {}
        for dim in self.dims:
            number = 0
            for axis in self.order.get(dim, ()):
                number = number * self.mesh.size(axis) + at[axis]
            numbers[dim] = number
        return numbers

    def holders(self, dims: tuple[str, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The ranks that have each block; the key is the block's index along each of `dims`."""
        by_block: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.devices):
            part = self.part_of(rank)
            by_block.setdefault(tuple(part[d] for d in dims), []).append(rank)
        return {block: tuple(ranks) for block, ranks in sorted(by_block.items())}

    # --- replicas and partial values ---------------------------------------------------------

    @property
    def copies(self) -> int:
        """The number of replicas (of a device, or of a group with partial values)."""
        used = {axis for axes in self.order.values() for axis in axes} | set(self.partial)
        return math.prod(n for axis, n in self.mesh.axes if axis not in used)

    def terms(self, ranks: tuple[int, ...]) -> list[list[int]]:
        """The ranks of one block, grouped by those whose partial values are reduced together."""
        by_replica: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            at = self.mesh.coordinates(rank)
            key = tuple(n for axis, n in at.items() if axis not in self.partial)
            by_replica.setdefault(key, []).append(rank)
        return list(by_replica.values())

    def label(self, ranks: tuple[int, ...], room: int = 10_000) -> str:
        """`3`, `0 = 2` for replicas, `0 + 1` for partial values, in about `room` characters."""
        terms = self.terms(ranks)
        texts = [f" {SIGNS[self.op]} ".join(map(str, term)) for term in terms]
        if len(terms) > 1 and self.partial:
            texts = [f"({t})" for t in texts]
        joined = " = ".join(texts)
        if len(joined) <= room:
            return joined
        if self.copies == self.mesh.devices:
            return f"all {len(ranks):,}"
        if len(texts) > 1 and len(texts[0]) + 4 <= room:
            return f"{texts[0]} = …"
        sign = "=" if len(texts) > 1 else SIGNS[self.op]
        return f"{ranks[0]} {sign} … {sign} {ranks[-1]}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on replicas, partial values, and dims split by several axes."""
        sentences = []
        if self.copies > 1:
            sentences.append(f"{self.copies:,} copies of each block (=)")
        if self.partial:
            over = ", ".join(self.partial)
            sign = SIGNS[self.op]
            sentences.append(
                f"partial over {over}: the value is the {self.op} of the parts ({sign})"
            )
        return tuple(sentences)
