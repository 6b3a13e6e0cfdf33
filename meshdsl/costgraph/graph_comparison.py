"""`search --graph --compare-methods`: every method for the kind of a graph with costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshdsl.costgraph.graph_file import published_of, read_graph
from meshdsl.costgraph.method_rows import Figures, MethodRow, compared, refusals, table, title
from meshdsl.costgraph.solve import METHODS, solved
from meshdsl.records import dataclass
from meshdsl.report.document import aligned
from meshdsl.search.request import SearchRequest

UNITS = {"placement": "cost", "stages": "seconds a micro-batch"}
"""What the costs of a kind of graph are; of the others seconds of a step."""

OWN_SPACES = {"stages", "transformer"}
"""Kinds whose methods search spaces of their own, in which each proves its best."""


@dataclass(frozen=True, slots=True)
class ComparedGraph:
    """The methods on one graph, in the order of the registry.

    `published` has costs by method, None for one that was published and could not be found.
    """

    graph: str
    kind: str
    rows: tuple[MethodRow, ...]
    published: dict[str, float | None]

    def facts(self) -> dict[str, object]:
        """The table as data (version 1)."""
        methods = [row.facts() for row in self.rows]
        facts = {"version": 1, "graph": self.graph, "kind": self.kind, "methods": methods}
        return {**facts, "published": self.published} if self.published else facts

    def lines(self) -> Iterable[str]:
        """The table as text."""
        yield title(self.graph, self.rows, UNITS.get(self.kind, "seconds a step"))
        rows = [[*row] for row in table(self.rows, "{:.6g}".format, self.published)]
        yield from (f"  {line}" for line in aligned(rows))
        yield from refusals(self.rows)
        if self.kind in OWN_SPACES:
            yield "Each method searches plans of its own: what is proven is so of these."


def compared_on(path: Path, request: SearchRequest) -> ComparedGraph:
    """Every method on the graph in a file. Raises MD066x, that of the first where none answers."""
    top = read_graph(path)
    kind = top.field("kind").value
    published = published_of(top, request.devices, METHODS[kind]) if kind == "devices" else {}

    def run(name: str) -> Figures:
        return solved(path, replace(request, method=name)).answer.figures()

    rows = compared({name: partial(run, name) for name in METHODS[kind]})
    return ComparedGraph(str(path), kind, rows, published)
