"""List scheduling by the critical path: HEFT (Topcuoglu et al. 2002) for groups of operators.

A group is as urgent as the longest way from one of its operators to the end of the step, transfers
included. The most urgent group first, each goes to the device on which what has been placed so far
ends earliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshdsl.costgraph.device_placement import Devices, GraphOperator, Placed, makespan


def critical_path(operators: Sequence[GraphOperator], devices: Devices) -> Placed:
    """The placement of the heuristic; of equal devices the first."""
    groups = 1 + max(operator.group for operator in operators)
    urgent = [0.0] * groups
    for operator, rank in zip(operators, _ranks(operators, devices), strict=True):
        urgent[operator.group] = max(urgent[operator.group], rank)
    places = dict[int, int]()
    tried = 0
    for group in sorted(range(groups), key=lambda g: (-urgent[g], g)):
        part = _of_groups(operators, {*places, group})
        # Devices that are still empty are equal: one of them is enough.
        ends = {}
        for device in range(min(devices.count, len({*places.values()}) + 1)):
            chosen = [{**places, group: device}.get(g, 0) for g in range(groups)]
            ends[device] = makespan(part, chosen, devices)
        tried += len(ends)
        places[group] = min(ends, key=ends.__getitem__)
    placement = tuple(places[g] for g in range(groups))
    return Placed(placement, makespan(operators, placement, devices), tried)


def _ranks(operators: Sequence[GraphOperator], devices: Devices) -> list[float]:
    """The seconds from the beginning of each operator to the end of the step, all others apart."""
    ranks = [operator.seconds for operator in operators]
    for number in reversed(range(len(operators))):
        for source in operators[number].reads:
            sent = devices.transfer + operators[source].output / devices.bandwidth
            behind = operators[source].seconds + sent + ranks[number]
            ranks[source] = max(ranks[source], behind)
    return ranks


def _of_groups(operators: Sequence[GraphOperator], groups: set[int]) -> list[GraphOperator]:
    """The operators of some groups alone, which read only one another."""
    numbers = [number for number, operator in enumerate(operators) if operator.group in groups]
    new = {number: place for place, number in enumerate(numbers)}
    return [
        replace(operators[n], reads=tuple(new[r] for r in operators[n].reads if r in new))
        for n in numbers
    ]
