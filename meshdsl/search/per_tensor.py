"""Rules for every tensor that has a name (space L3): where the bound of per-tensor plans leads.

The messages that bound all plans leave a choice for each operator. What it says of named tensors
are rules for these, beside the general ones; a walk places what has no name, and steps go on.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.named import ir as named
from meshdsl.named.ir import Value, values_of
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.search.dual import bound, sweeping
from meshdsl.search.problem import Problem
from meshdsl.search.tensor_graph import TooMany, tensors


def named_tensors(program: named.NamedProgram) -> Iterator[Value]:
    """The tensors that a rule can name, but for those inside functions of the library."""
    return filter(_has_name, values_of(program))


def _has_name(value: Value) -> bool:
    return value.is_nameable and bool(value.type.dims)


def chosen(problem: Problem, general: Rules) -> Rules | None:
    """General rules and those that the bound's choice adds; None where nothing is chosen."""
    try:
        graph = tensors(problem, problem.most_work)
    except TooMany:
        return None
    picks = bound(graph, sweeping(graph, problem.budget)).picks
    if not picks:
        return None
    axes = {rule.dim: rule.axes for rule in general}
    by_tensor: dict[tuple[str, str], SearchRule] = {}
    for edge in graph.edges:
        value, state = edge.value, int(edge.made[picks[edge.source]])
        if not _has_name(value):
            continue
        placement = graph.moves.states(value.type).placement(state)
        for dim in value.type.names:
            rule = SearchRule(dim, placement.axes_of(dim), (value.label,))
            by_tensor.setdefault((value.label, dim), rule)
    other = (rule for rule in by_tensor.values() if rule.axes != axes.get(rule.dim, ()))
    return (*general, *other)
