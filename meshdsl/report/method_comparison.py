"""What `search --compare-methods` shows of a program: the table as text and as data (version 1)."""

from __future__ import annotations

from typing import TypedDict

from meshdsl.costgraph.method_rows import MethodFacts, refusals, table, title
from meshdsl.report.document import Document, Grid, Paragraph, Piece, human, line
from meshdsl.report.search_result import duration
from meshdsl.search.all_methods import MethodComparison


class MethodsFacts(TypedDict):
    """`search --compare-methods`: every method of search on one question."""

    version: int
    program: str
    file: str
    mesh: dict[str, int]
    cluster: str | None
    objective: str
    methods: list[MethodFacts]


def methods_facts(found: MethodComparison, file: str) -> MethodsFacts:
    """The table as data; costs are in bytes or seconds, as the objective says."""
    problem = found.problem
    return {
        "version": 1,
        "program": problem.program.name,
        "file": file,
        "mesh": dict(problem.mesh.declared),
        "cluster": problem.timing.cluster.name if problem.timing else None,
        "objective": problem.objective,
        "methods": [row.facts() for row in found.rows],
    }


def methods_shown(found: MethodComparison) -> Document:
    """The table for people, with the methods that have no answer below it."""
    problem = found.problem
    mesh = str(problem.mesh) or "one device"
    mesh = f"every mesh of {found.devices} devices" if found.devices else mesh
    cluster = f" of {problem.timing.cluster.name}" if problem.timing else ""
    head = title(f"{problem.program.name} on {mesh}{cluster}", found.rows, problem.objective)
    timed = problem.objective == "time"
    names, *rows = table(found.rows, lambda cost: duration(cost) if timed else human(int(cost)))
    grid = Grid("", names, tuple(rows))
    return (Paragraph((Piece(head, "strong"),)), grid, *map(line, refusals(found.rows)))
