"""Rules for stored tensors (space L1): ZeRO's stages, by `state:`, `grads:` and `params:`.

Per mesh axis a program stores its parameters whole, or splits the optimizer's states, the gradients
too, or all three (Rajbhandari et al. 2020). Which dims carry an axis follows from the sizes: those
that cover most bytes of parameters first, until no parameter is left that can be split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.syntax.symbols import ROLES

Pairs = tuple[tuple[str, str], ...]

STAGES: tuple[tuple[str, ...], ...] = ((), ("state",), ("state", "grads"), ("params", "grads"))
"""The roles of stored tensors that an axis splits; states are stored as parameters are."""


def stored(
    program: named.NamedProgram, mesh: Mesh, rules: Rules, equal: Pairs = ()
) -> Iterator[Rules]:
    """Every choice of storage beside general rules, as rules for roles; the first has none.

    The same stage over all axes comes before different ones. Of `equal` axes that the general rules
    treat alike, the second splits no more than the first.
    """
    axes = [a for a, size in mesh.axes if size > 1]
    stages = STAGES if program.states else (STAGES[0], ("params",))
    alike = [(axes.index(a), axes.index(b)) for a, b in equal if _are_alike(a, b, rules)]
    yielded: set[Rules] = set()
    every = itertools.product(stages, repeat=len(axes))
    for chosen in sorted(every, key=lambda stages: len({*stages}) > 1):
        if any(stages.index(chosen[a]) < stages.index(chosen[b]) for a, b in alike):
            continue
        role_rules = _rules(program, mesh, rules, dict(zip(axes, chosen, strict=True)))
        if role_rules not in yielded:
            yielded.add(role_rules)
            yield role_rules


def stored_rules(rules: Rules) -> Rules:
    """Of some rules those for what is stored."""
    return tuple(r for r in rules if len(r.selector) == 1 and r.selector[0] in ROLES)


def uniform(program: named.NamedProgram, mesh: Mesh, rules: Rules) -> Iterator[Rules]:
    """ZeRO's stages 1, 2 and 3 over all axes, as rules for roles."""
    axes = [a for a, size in mesh.axes if size > 1]
    stages = STAGES[1:] if program.states else (("params",),)
    for stage in stages:
        if role_rules := _rules(program, mesh, rules, dict.fromkeys(axes, stage)):
            yield role_rules


def on_other_dims(
    program: named.NamedProgram, mesh: Mesh, general: Rules, role_rules: Rules
) -> Iterator[Rules]:
    """The same roles split over the same axes, by each other dim of many parameters.

    Which of them sends or holds less, placing tells: a dim of a loop is stored by iterations.
    """
    stages = {
        axis: tuple(dict.fromkeys(r.selector[0] for r in role_rules if axis in r.axes))
        for axis, size in mesh.axes
        if size > 1
    }
    # States that are stored as their parameters are need no axes of their own.
    stages = {
        axis: tuple(r for r in roles if r != "state" or "params" not in roles)
        for axis, roles in stages.items()
    }
    types = [p.value.type for p in program.params]
    weights = {name: sum(t.bytes for t in types if t.has(name)) for t in types for name in t.names}
    least, yielded = max(weights.values(), default=0) / 2, {role_rules}
    for dim in (name for name, weight in weights.items() if weight >= least):
        moved = _rules(program, mesh, general, stages, dim)
        if moved and moved not in yielded:
            yielded.add(moved)
            yield moved


def _are_alike(one: str, other: str, rules: Rules) -> bool:
    return all((one in rule.axes) == (other in rule.axes) for rule in rules)


def _rules(
    program: named.NamedProgram,
    mesh: Mesh,
    rules: Rules,
    stages: Mapping[str, tuple[str, ...]],
    preferred: str = "",
) -> Rules:
    """The rules that split, over every axis, the roles of its stage; by a preferred dim first."""
    general = {rule.dim: rule.axes for rule in rules}
    types = [p.value.type for p in program.params]
    carried: dict[str, tuple[str, ...]] = {}
    for axis in (a for a, stage in stages.items() if stage):
        for dim in _covering(types, axis, general, carried, mesh, preferred):
            carried[dim] = (*carried.get(dim, ()), axis)
    role_rules = []
    for role in ("params", "grads", "state"):
        for dim, axes in carried.items():
            stored_axes = tuple(a for a in axes if role in stages[a])
            # States are stored as their parameters are, unless their own rule says more.
            told = tuple(a for a in axes if {role, *_above(role)} & set(stages[a]))
            if stored_axes:
                role_rules.append(SearchRule(dim, told, (role,)))
    return tuple(role_rules)


def _above(role: str) -> tuple[str, ...]:
    return ("params",) if role == "state" else ()


def _covering(
    types: list[TensorType],
    axis: str,
    general: Mapping[str, tuple[str, ...]],
    carried: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
    preferred: str,
) -> Iterator[str]:
    """Dims without a general rule that an axis divides: a preferred one, then by their bytes.

    Where the axis divides none of them, they are split unevenly.
    """
    split = {d for d, axes in general.items() if axis in axes}
    left = [t for t in types if not split.intersection(t.names)]
    # A rule for a dim that a split parameter has, too, would take the axis away from that one.
    taken = {d for t in types if split.intersection(t.names) for d in t.names}
    sizes = {d.name: d.size for t in left for d in t.dims}
    free = [d for d in sizes if d not in taken and not general.get(d)]
    parts = {d: mesh.size(axis, *carried.get(d, ())) for d in free}
    free = [d for d in free if sizes[d] % parts[d] == 0] or [
        d for d in free if sizes[d] >= parts[d]
    ]
    while left and free:
        best = max(free, key=lambda d: (d == preferred, sum(t.bytes for t in left if t.has(d))))
        if not any(t.has(best) for t in left):
            return
        yield best
        left = [t for t in left if not t.has(best)]
        meeting = {d for t in types if t.has(best) for d in t.names}
        free = [d for d in free if d not in meeting]
