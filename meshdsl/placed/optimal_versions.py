"""Versions of values in the search for the optimum, and how readers come by them.

Each reader takes a unit of flow from where the value settled to what it needs, along a version that
is paid for once. Per reader that is a transport problem, whose relaxation is tight.
"""

from __future__ import annotations

from meshdsl.named.ir import Value
from meshdsl.placed.reshard import Route, route
from meshdsl.placed.sbp import Mesh, Placement
from meshdsl.placed.zero_one import ZeroOne


class Versions:
    """What there is of every value. `settled` are the variables of where a value settles."""

    def __init__(
        self,
        lp: ZeroOne,
        mesh: Mesh,
        settled: dict[Value, dict[Placement, int]],
        trips: dict[Value, int],
    ) -> None:
        self.lp, self.mesh, self.settled, self.trips = lp, mesh, settled, trips
        self.available: dict[Value, dict[Placement, list[tuple[Placement, int]]]] = {}

    def edge(self, made: Route, trips: int) -> int:
        """The variable of a reshard that is made `trips` times."""
        return self.lp.variable(made.wire_bytes * trips, made.collectives * trips)

    def offer(self, value: Value, needs: set[Placement]) -> None:
        """Versions: the settled one, those made from it, and those that then cost nothing.

        `available` holds per need the placements it may come from, with the variable that says so.
        """
        found: dict[Placement, list[tuple[Placement, int]]] = {}
        for source, one in self.settled[value].items():
            made = {source: one}
            for need in sorted(needs - {source}, key=repr):
                way = route(value.type, source, need, self.mesh)
                if way is not None:
                    made[need] = self.edge(way, self.trips[value]) if way.wire_bytes else one
            for need in sorted(needs, key=repr):
                found.setdefault(need, []).extend(
                    (source, v) for v in self._of_one(value, made, need)
                )
        self.available[value] = found

    def _of_one(self, value: Value, made: dict[Placement, int], need: Placement) -> list[int]:
        """The versions of one settled placement that `need` is, or is had from for nothing."""
        ways = [made[need]] if need in made else []
        for other, variable in made.items():
            way = route(value.type, other, need, self.mesh)
            if other != need and way is not None and not way.wire_bytes:
                ways.append(variable)
        return list(dict.fromkeys(ways))

    def consume(self, value: Value, wanted: dict[Placement, list[int]]) -> None:
        """One reader: where the value settled flows to what the reader wants, along versions.

        `wanted` are the variables of which one is taken, by the placement that it needs.
        """
        out: dict[Placement, list[tuple[int, float]]] = {p: [] for p in self.settled[value]}
        for need, picks in wanted.items():
            ways: dict[Placement, list[int]] = {}
            for source, variable in self.available[value].get(need, []):
                ways.setdefault(source, []).append(variable)
            into = []
            for source, variables in ways.items():
                flow = self.lp.variable(whole=False)
                self.lp.constrain(
                    [(flow, 1.0), *((v, -1.0) for v in variables)], -len(variables), 0
                )
                out[source].append((flow, 1.0))
                into.append((flow, 1.0))
            self.lp.constrain([*into, *((p, -1.0) for p in picks)], 0, 0)
        for source, flows in out.items():
            self.lp.constrain([*flows, (self.settled[value][source], -1.0)], 0, 0)
