"""The legal imports: the stations in order, and no cycles. Imports inside functions count."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from graphlib import TopologicalSorter

import grimp
import pytest

LAYERS = (
    ("version", "records", "diagnostics", "option_edits"),
    ("carets", "codes", "disk_cache", "backends.runtime"),
    ("output_files",),
    ("report.document", "report.memory_kinds", "search.request"),
    ("grammar", "syntax", "ir"),
    ("cluster.this_machine", "cluster.profile", "schedule"),
    ("named", "ops", "prelude", "lexer", "project"),
    ("placed",),
    ("device",),
    ("cluster",),
    ("costgraph",),
    ("simulate",),
    ("backends.draws", "backends.walk", "backends.torch", "backends.peers"),
    ("analysis", "prove"),
    ("pipeline",),
    ("columns",),
    ("search",),
    (
        "report",
        "backends.data",
        "backends.engines",
        "backends.train",
        "backends.generate",
        "backends.worker",
        "backends.weights",
    ),
    ("editor",),
    ("api", "notebook", "play", "cli", "backends.module"),
    ("__main__",),
)
"""Folders and files of the package from the first to the last."""

LATER = {
    (
        "meshdsl.report.views.parts",
        "meshdsl.api.errors",
    ): "`save` reports to users of Python",
    ("meshdsl", "meshdsl.notebook.magic"): "`%load_ext meshdsl` asks the package itself",
    ("meshdsl.pipeline", "meshdsl.report.explanation"): "the report ends a compilation",
    ("meshdsl.pipeline", "meshdsl.report.remedies"): "remedies are compiled, to be in a report",
}
"""Imports of what comes later, and why."""


@functools.cache
def imports() -> tuple[tuple[str, str], ...]:
    """Every import of one module by another, less those for types alone."""
    graph = grimp.build_graph("meshdsl", cache_dir=None, exclude_type_checking_imports=True)
    return tuple(
        (one, other)
        for one in sorted(graph.modules)
        for other in sorted(graph.find_modules_directly_imported_by(one))
    )


def layer(module: str) -> int:
    """The position of a module; the package itself is in front of all of them."""
    for number, names in enumerate(LAYERS):
        if any(f"{module}.".startswith(f"meshdsl.{name}.") for name in names):
            return number
    assert module in ("meshdsl", "meshdsl.backends"), f"{module} is in no layer"
    return len(LAYERS)


def test_nobody_imports_what_comes_later() -> None:
    wrong = [(a, b) for a, b in imports() if layer(a) < layer(b) and (a, b) not in LATER]
    assert not wrong
    assert set(LATER) <= set(imports())


@pytest.mark.parametrize("leaf", ["meshdsl.backends.runtime", "meshdsl.diagnostics"])
def test_leaves_import_nothing_of_ours(leaf: str) -> None:
    own = [(a, b) for a, b in imports() if f"{a}.".startswith(f"{leaf}.")]
    assert [(a, b) for a, b in own if not f"{b}.".startswith(f"{leaf}.")] == []


def test_there_are_no_cycles() -> None:
    ordered(imports())


def ordered(pairs: Iterable[tuple[str, str]]) -> None:
    """Raises CycleError, with the modules, where there is no order to import them in."""
    after: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        after[one].add(other)
    TopologicalSorter(after).prepare()
