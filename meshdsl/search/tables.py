"""The bytes of each distinct call as a function of the axes of its own dims: an estimate by sum.

A call is chosen for alone, with its operands as the rules say and its results reduced at once. A
walk that shares gathered operands, or leaves partial what may stay so, sends less: the sum is an
upper bound of the walk `immediate`.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.ir.types import TensorType
from meshdsl.placed.choose import Choice, Chooser, Want
from meshdsl.placed.rows import Call
from meshdsl.placed.sbp import Placement, placement
from meshdsl.search.plan import Rules
from meshdsl.search.space import Space


class Tables:
    """The tables of the calls of a space, filled as they are read."""

    def __init__(self, space: Space) -> None:
        self.space, self.mesh = space, space.mesh
        self.known: dict[tuple[Call, tuple[Placement, ...]], Choice] = {}

    def sent(self, rules: Rules) -> int:
        """The bytes sent under general rules, at most."""
        axes = {rule.dim: rule.axes for rule in rules}
        calls = self.space.calls.items()
        return sum(self.chosen(call, axes).cost * trips for call, trips in calls)

    def chosen(self, call: Call, axes: Mapping[str, tuple[str, ...]]) -> Choice:
        """The placements of a call alone, with its bytes, and its FLOPs last in their rank."""
        key = call, tuple(self._placed(t, axes) for t in (*call.ins, *call.outs))
        if key not in self.known:
            self.known[key] = self._chosen(*key)
        return self.known[key]

    def _placed(self, type_: TensorType, axes: Mapping[str, tuple[str, ...]]) -> Placement:
        return placement(self.mesh, {d: axes[d] for d in type_.names if d in axes})

    def _chosen(self, call: Call, placed: tuple[Placement, ...]) -> Choice:
        ins, outs = placed[: len(call.ins)], placed[len(call.ins) :]
        pairs = zip((*call.ins, *call.outs), placed, strict=True)
        uneven = any(p.splits_unevenly(t, self.mesh) for t, p in pairs)
        versions = tuple((p,) for p in ins)
        wants = tuple(map(Want, outs))
        pins = (None,) * len(ins)
        chooser = Chooser(call, versions, wants, pins, self.mesh, "immediate", uneven=uneven)
        return chooser.candidates()[0]
