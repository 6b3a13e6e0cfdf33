"""What the search for the optimum decides, and the program it is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.placed import ir as placed
from meshdsl.placed.sbp import Placement


@dataclass(frozen=True, slots=True)
class Decision:
    """What one operator does: the versions it reads, what it yields, where that settles."""

    needs: tuple[Placement, ...]
    yields: tuple[Placement, ...]
    targets: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions per operator, and the placement of what loops carry and collect.

    `versions` are those of values that something is sent for: others are had from them for nothing.
    `cost` is that of all reshards, in all their trips. `least` says that no other plan costs less,
    of those that were `searched`.
    """

    decisions: dict[Op, Decision]
    carries: dict[Value, Placement]
    versions: dict[Value, tuple[Placement, ...]]
    cost: int
    least: bool
    searched: str = ""


def as_rewritten(program: placed.Program) -> named.Program:
    """The named program with the operators that placing it came to (expanded, in pairs)."""
    return replace(program.named, body=_nodes(program.body))


def _loop(node: placed.Loop) -> named.Loop:
    carries = (
        Carry(c.init.value, c.inside.value, c.next.value, c.result.value) for c in node.carries
    )
    stacked = (Stacked(s.outer.value, s.inside.value) for s in node.stacked)
    collected = (Collected(c.inside.value, c.outer.value) for c in node.collected)
    about = (node.span, tuple(collected), node.reverse, node.phase, node.block)
    return named.Loop(node.dim, tuple(carries), tuple(stacked), _nodes(node.body), *about)


def _nodes(nodes: tuple[placed.Node, ...]) -> tuple[named.Node, ...]:
    found: list[named.Node] = []
    for node in nodes:
        if isinstance(node, placed.Loop):
            found.append(_loop(node))
        elif isinstance(node, placed.Apply):
            found.append(node.named)
    return tuple(found)
