"""`meshdsl search`: the best layout of a program on a mesh, with a reason behind each rule."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.cli import common
from meshdsl.cli.options import (
    AsData,
    File,
    Force,
    SearchOptions,
    Sizes,
    Strict,
    Which,
    chosen,
    flag,
    opt,
    option,
    pipeline_options,
    refuse_unknown,
)
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.output_files import write_whole
from meshdsl.syntax.parse import STDIN

if TYPE_CHECKING:
    from meshdsl.diagnostics import Diagnostics
    from meshdsl.pipeline import Compilation
    from meshdsl.search.all_methods import MethodComparison
    from meshdsl.search.problem import SearchResult
    from meshdsl.search.request import SearchRequest


@option
class Objective:
    """Options of what is sought."""

    objective: str | None = opt(
        "--objective",
        "O",
        "Minimise time, bytes or memory. [default: time with a cluster, else bytes]",
    )
    cluster: str | None = opt("--cluster", "C", "The cluster: h100, … or a .toml file.")
    memory: str | None = opt("--memory", "80GB", "The memory of a device.")
    replicated: str = opt(
        "--replicated",
        "15%",
        "How much more than the least work a device may do, for bytes and memory.",
        "15%",
    )
    fix: str | None = opt("--fix", "'batch -> data'", "Keep these rules, or this layout.")
    devices: int | None = opt(
        "--devices", "N", "Try every mesh shape of N devices.", min=1, max=1 << 20
    )
    start: str | None = opt("--from", "LAYOUT", "Start from this layout: a name, or rules.")
    pipeline: str | None = opt("--pipeline", "AXIS", "Also search pipeline stages on this axis.")
    max_rules: int | None = opt("--max-rules", "N", "Use at most N rules.", min=0)
    no_storage: bool = flag("--no-storage", "Use no rules for params, grads and state.")
    selectors: bool = flag(
        "--selectors", "Also search rules for functions and parameters, locally."
    )
    per_tensor: bool = flag("--per-tensor", "Also search rules for every named tensor, locally.")
    no_partial: bool = flag(
        "--no-partial", "Add every partial sum where it appears, for comparison."
    )
    method: str | None = opt(
        "--method", "M", "The search method. [default: layouts, or one for the graph]"
    )
    compare_methods: bool = flag("--compare-methods", "Compare all methods in one table.")
    certificate: bool = flag(
        "--certificate", "Bound all per-tensor plans, for bytes. Always on for time."
    )
    budget: str | None = opt("--budget", "10s", "Stop after this much work, with the best so far.")


@option
class WriteOptions:
    """Options of what is written."""

    write: str | None = opt(
        "--write", "NAME", "Write the layout into the file, and the mesh if it lacks it."
    )
    expect: bool = flag("--expect", "With --write: add an `expect` block of placements and bytes.")
    front: bool = flag("--front", "Also print layouts that no other one beats in memory.")


@option
class Graph:
    """Options of a graph with costs."""

    heading = "Graph options"

    graph: bool = flag("--graph", "FILE is a graph with costs, in JSON.")
    bandwidth: str | None = opt("--bandwidth", "1.25GB/s", "The bandwidth of a link, one way.")
    stages: int | None = opt("--stages", "N", "The number of stages.", min=1)


@option
class SearchLayouts(
    Which, Objective, WriteOptions, Graph, SearchOptions, Sizes, Strict, Force, AsData
):
    """Options of `search`."""


OF_GRAPHS = ("bandwidth", "stages")
"""The options that mean something with `--graph` alone."""
OF_BOTH = ("graph", "method", "compare_methods", "devices", "cluster", "memory", "force", "json")
"""The options that mean something with `--graph` and without."""
OF_ONE_METHOD = ("method", "write", "expect", "front", "start")
"""The options that mean nothing where methods are compared."""


def command(file: File, given: SearchLayouts) -> None:
    """Find the best layout, with a reason for each rule."""
    with common.reporting(given.json) as diagnostics:
        refuse_meaningless(given)
        if given.graph:
            _graph(file, given)
            return
        if given.compare_methods:
            _compare(file, given, diagnostics)
            return
        if given.expect and not given.write:
            message = "`--expect` is written beside the layout of `--write`"
            refuse("MD0601", message, give("--write", "best", safe=False), "any other name")
        check_method(given)
        compilation = common.compiled(file, pipeline_options(given), diagnostics, "named")
        if given.write:
            from meshdsl.search.layout_text import refuse_name

            refuse_name(given.write, compilation.tree, given.force)
        with common.patience(f"searching layouts of {compilation.source.name}"):
            result, name = searched(compilation, given)
        if given.json:
            from meshdsl.report.search_result import searched as facts

            common.print_json(facts(result, compilation.source.name, name))
        if given.write:
            _write(file, compilation, result, given)
        if not given.json:
            _show(result)


def searched(compilation: Compilation, given: SearchLayouts) -> tuple[SearchResult, str]:
    """The plans that are found, and the name of the method."""
    from meshdsl.search.methods import best_plans

    name = check_method(given)
    return best_plans(request_of(given), compilation), name


def check_method(given: SearchLayouts) -> str:
    """The method that is asked for. Raises MD0602."""
    from meshdsl.search.methods import DEFAULT, METHODS

    name = given.method or DEFAULT
    refuse_unknown("method", name, METHODS, "there is no such method")
    return name


def methods_compared(compilation: Compilation, given: SearchLayouts) -> MethodComparison:
    """Every method on the question of the options."""
    from meshdsl.search.all_methods import compare_methods
    from meshdsl.search.methods import METHODS

    return compare_methods(request_of(given), compilation, METHODS)


def refuse_meaningless(given: SearchLayouts) -> None:
    """Raise MD0601 for an option that would do nothing."""
    for field, told in chosen(given).items():
        if given.graph and field not in (*OF_GRAPHS, *OF_BOTH):
            message = f"`{told}` is about layouts, and `--graph` has none"
            refuse("MD0601", message, leave_out(told))
        if given.compare_methods and field in OF_ONE_METHOD:
            message = (
                f"`{told}` is about one result, and `--compare-methods` has one of each method"
            )
            fixes = [leave_out(option, safe=False) for option in (told, "--compare-methods")]
            refuse("MD0601", message, fixes)
        if not given.graph and field in OF_GRAPHS:
            message = f"`{told}` is about the graph of `--graph`, and there is none"
            refuse("MD0601", message, leave_out(told), "search a graph: `--graph FILE.json`")


def request_of(given: SearchLayouts) -> SearchRequest:
    """What the options ask for, in numbers. Raises MD0601."""
    from meshdsl.search.request import Amounts, SearchRequest

    amounts = Amounts(given.memory, given.replicated, given.budget, given.bandwidth)
    names = {f.name for f in fields(SearchRequest)} - {f.name for f in fields(Amounts)}
    same: Any = {name: getattr(given, name) for name in names if hasattr(given, name)}
    request = SearchRequest(storage=not given.no_storage, partial=not given.no_partial, **same)
    return request.with_amounts(amounts)


def _graph(file: Path, given: SearchLayouts) -> None:
    """Find the best plan of a graph with costs."""
    from meshdsl.costgraph.graph_comparison import compared_on
    from meshdsl.costgraph.solve import solved

    answer = (compared_on if given.compare_methods else solved)(file, request_of(given))
    if given.json:
        common.print_json(answer.facts())
    else:
        for line in answer.lines():
            common.say(line)


def _compare(file: Path, given: SearchLayouts, diagnostics: Diagnostics) -> None:
    """Every method of search on one question, in a table."""
    from meshdsl.report.method_comparison import methods_facts, methods_shown
    from meshdsl.report.terminal import print_document

    compilation = common.compiled(file, pipeline_options(given), diagnostics, "named")
    with common.patience(f"searching layouts of {compilation.source.name} by every method"):
        comparison = methods_compared(compilation, given)
    if given.json:
        common.print_json(methods_facts(comparison, compilation.source.name))
    else:
        print_document(methods_shown(comparison))


def _show(found: SearchResult) -> None:
    from meshdsl.report.search_result import shown
    from meshdsl.report.terminal import print_document

    print_document(shown(found))


def _write(file: Path, made: Compilation, found: SearchResult, given: SearchLayouts) -> None:
    """Write the best layout into the file."""
    from meshdsl.report.autofix import with_line_ends_of
    from meshdsl.report.search_result import block_of
    from meshdsl.search.fingerprint import stamp
    from meshdsl.search.layout_text import expectation, inserted, placed_on

    name, plan = given.write, found.plans[0]
    assert name is not None
    mesh, lacking = placed_on(name, plan.mesh, made.declarations)
    # With other sizes than those of the file it would be none of the file's program.
    is_own = not made.options.set_dims and made.options.dtype is None
    text = lacking + block_of(found, plan, name, stamp(made.named) if is_own else "")
    if given.expect:
        program = made.named.name if len(made.declarations.programs) > 1 else ""
        text += expectation(name, program, mesh, plan)
    names = {name, mesh} if lacking else {name}
    new = inserted(made.source, made.tree, names, text, given.force)
    if str(file) == STDIN:
        sys.stdout.write(new)
        return
    path = file.resolve()
    write_whole(path, with_line_ends_of(read_regular(path).decode("utf-8"), new))
    if not given.json:
        common.say(f"wrote layout `{given.write}` into {made.source.name}")
