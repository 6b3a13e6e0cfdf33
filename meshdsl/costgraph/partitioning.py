"""Baselines of ColocRL's table: one device, an expert's placement, and graph partitioning.

Partitioning sees the seconds of each group, and the bytes between groups, not the order of a step:
parts of about equal seconds, with the least bytes between them. `scotch` stands for the mapping of
Scotch (Pellegrini 2009), which bisects recursively; `mincut` for a k-way partition with the least
cut. Both are METIS (Karypis and Kumar 1995), by pymetis: Scotch itself has no package on PyPI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshdsl.costgraph.black_box import package
from meshdsl.costgraph.device_placement import Devices, GraphOperator, Placed, makespan

UNITS = 1_000_000
"""The largest weight of a group, and of an edge: METIS takes whole numbers."""

Placer = Callable[[Sequence[GraphOperator], Devices], Placed]
"""A method that places groups of operators on devices."""


def single(operators: Sequence[GraphOperator], devices: Devices) -> Placed:
    """Everything on one device."""
    return _placed(operators, devices, [0] * _groups(operators))


def given(places: Sequence[int]) -> Placer:
    """The placement of an expert, as a method: a device for each group."""
    return lambda operators, devices: _placed(operators, devices, places)


def partitioned(name: str, recursive: bool) -> Placer:
    """A partition by METIS, as a method: by recursive bisection, or in so many parts at once."""

    def place(operators: Sequence[GraphOperator], devices: Devices) -> Placed:
        """Raises MD0667 without pymetis."""
        metis = package("pymetis", name)
        groups = _groups(operators)
        between = sent_between(operators)
        seconds = [math.fsum(o.seconds for o in operators if o.group == g) for g in range(groups)]
        most_bytes, most_seconds = max([1.0, *between.values()]), max(seconds) or 1.0
        near = [[h for h in range(groups) if between.get(_pair(g, h))] for g in range(groups)]
        edges = [
            max(1, round(UNITS * between[_pair(g, h)] / most_bytes))
            for g in range(groups)
            for h in near[g]
        ]
        _, parts = metis.part_graph(
            min(devices.count, groups),
            adjacency=near,
            vweights=[max(1, round(UNITS * s / most_seconds)) for s in seconds],
            eweights=edges or None,
            recursive=recursive,
        )
        return _placed(operators, devices, [int(part) for part in parts])

    return place


def sent_between(operators: Sequence[GraphOperator]) -> dict[tuple[int, int], float]:
    """The bytes that any two groups send each other if they are on two devices.

    An output goes to each group that reads it once.
    """
    between: dict[tuple[int, int], float] = {}
    read = {(s, o.group) for o in operators for s in o.reads if operators[s].group != o.group}
    for source, reader in sorted(read):
        pair = _pair(operators[source].group, reader)
        between[pair] = between.get(pair, 0.0) + operators[source].output
    return between


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _groups(operators: Sequence[GraphOperator]) -> int:
    return 1 + max(operator.group for operator in operators)


def _placed(operators: Sequence[GraphOperator], devices: Devices, places: Sequence[int]) -> Placed:
    return Placed(tuple(places), makespan(operators, places, devices), 1)
