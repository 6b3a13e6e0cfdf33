"""The search of Tofu (Wang, Huang and Li 2019): one mesh axis at a time, the outer ones first.

Each step splits the whole program once more, over one axis, so that the least is sent in all; what
earlier steps have split stays so. An operator is split along one of its loops in a step, and what
that leaves partial is reduced at once: partition-n-reduce, which the tables of `immediate` are. Of
equal axes that often leads to what all axes decided jointly would; an axis of another speed may be
better off with what an earlier one has taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.costgraph.exact import TooWide, least
from meshdsl.costgraph.graph import least_memory
from meshdsl.diagnostics import fail
from meshdsl.records import dataclass
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.space import LayoutSpace
from meshdsl.search.table_methods import placed, refuse_width
from meshdsl.search.tables import Axes, table_graph


@dataclass(frozen=True, slots=True)
class Tofu:
    """The layout of general rules that is split axis by axis, placed."""

    def solve(self, problem: Problem) -> SearchResult:
        """The plan. Raises MD0641 where a step cannot divide the work as asked."""
        taken: dict[str, Axes] = {}
        work = 0
        for axis, size in problem.mesh.axes:
            if size > 1:
                taken, steps = _step(problem, axis, taken)
                work += steps
        space = problem.space
        rules = space.rules([taken.get(dim.name, ()) for dim in space.dims])
        return placed(problem, space, rules, work)


def _step(problem: Problem, axis: str, taken: dict[str, Axes]) -> tuple[dict[str, Axes], int]:
    """What splits each dim, once an axis does so, too, and the steps that it took.

    Axes behind it have one device yet.
    """
    mesh = problem.mesh
    done = mesh.names[: mesh.names.index(axis) + 1]
    sizes = tuple((a, n if a in done else 1) for a, n in mesh.axes)
    space = LayoutSpace(problem.program, replace(mesh, axes=sizes), problem.fixed)
    choices = [tuple(_choices(space, number, axis, taken)) for number in range(len(space.dims))]
    graph = table_graph(space, float("inf"), choices)
    try:
        work = least(least_memory(graph))
        best = least(replace(graph, limit=work.cost * (1 + problem.request.replicated)))
    except TooWide as error:
        refuse_width(error)
    if not best.found:
        help = "a larger `--replicated`, or fewer rules by `--fix`"
        fail("MD0641", f"no split over `{axis}` leaves the others as they are", help=help)
    dims = zip(space.dims, choices, best.picks, strict=True)
    return {dim.name: axes[k] for dim, axes, k in dims}, work.work + best.work


def _choices(space: LayoutSpace, number: int, axis: str, taken: dict[str, Axes]) -> Iterator[Axes]:
    """A dim as it is, or split over one more axis; a fixed rule leaves no choice."""
    dim = space.dims[number]
    before = taken.get(dim.name, ())
    if dim.name in space.fixed:
        yield tuple(a for a in dim.axes if space.mesh.size(a) > 1)
        return
    yield before
    if axis in dim.axes and space.divides(dim, (*before, axis)):
        yield (*before, axis)
