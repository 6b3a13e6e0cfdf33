"""A search from a layout: never worse, and its changes lead from the one to the other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.report.explanation import explain
from meshdsl.report.remedies import sent
from meshdsl.report.search_result import searched
from meshdsl.search.candidate import Rules, SearchRule, StartLayout
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import solve
from meshdsl.search.warm_start import changes, started
from meshdsl.syntax.format import format_source
from tests.cli.command import Cli, write
from tests.cli.conftest import cli
from tests.covering import in_turn

from .problems import LINE, SQUARE, problem
from .test_command import TEXT
from .test_promises import program

__all__ = ["cli"]

STARTS: dict[str, Rules] = {
    "none": (),
    "data": (SearchRule("batch", ("x",)),),
    "both": (SearchRule("batch", ("x",)), SearchRule("hidden", ("y",))),
    "least": (SearchRule("hidden", ("x", "y")),),
}


def begin(start: str, objective: str, cluster: str, mesh: Mesh = SQUARE) -> Problem:
    """The problem of the small net, from a layout."""
    asked = problem("net", mesh, objective, cluster)
    return Problem(
        asked.program,
        mesh,
        objective,
        asked.request,
        asked.timing,
        start=StartLayout(start, STARTS[start]),
    )


@in_turn(start=STARTS, method=("layouts", "tofu", "mcmc"), objective=("bytes", "time"))
def test_never_worse_and_the_changes_add_up(start: str, method: str, objective: str) -> None:
    asked = begin(start, objective, "h100" if objective == "time" else "")
    found = solve([asked], METHODS[method])
    first, best = started(asked), found.plans[0]
    divided = objective == "time" or first.flops <= 1.15 * best.flops
    assert not divided or asked.value(best) <= asked.value(first)
    made = list(changes(found))
    assert bool(made) == (set(first.rules) != set(best.rules))
    saved = sum(change.saved["bytes"] for change in made)
    assert not made or saved == first.sent - best.sent
    assert not made or set(made[-1].plan.rules) == set(best.rules)


def test_one_of_more_rules_than_are_allowed_is_no_answer() -> None:
    asked = begin("both", "bytes", "")
    few = replace(asked, request=replace(asked.request, max_rules=1))
    assert {len(plan.rules) for plan in solve([few], METHODS["layouts"]).plans} == {1}
    assert started(few).rules == STARTS["both"]


CLIPPED = """
dim batch = 64, model = 8, hidden = 8
mesh m = { a: 2, b: 2 }
program p(x[batch, model], t[batch, model]) {
  param w[model, hidden]
  param v[hidden, model]
  y = einsum(relu(einsum(x, w -> [batch, hidden])), v -> [batch, model])
  loss = mean(square(x + y - t))
  return loss
  minimize loss with adamw(lr=0.1, clip=1.0)
}
"""


def test_what_is_said_to_be_computed_is_what_is_compiled() -> None:
    """Also where a kernel of the optimizer scales gradients, which operators of their own did."""
    made = Compilation(Source("p.mdsl", CLIPPED), Options())
    (asked,) = problems(SearchRequest(fix="batch -> (a, b)"), made)
    found = solve([asked], METHODS["layouts"])
    told = searched(found, "p.mdsl", "layouts")["plans"][0]
    options = Options(layout="batch -> (a, b)", reduce=told["reduce"])
    report = explain(made.under(options, Diagnostics()).device)
    assert told["flops_per_device"] == report["totals"]["flops_per_device"] != found.plans[0].flops


ATTENTION = """
dim batch = 4, seq = 8, mem = 8, heads = 2, key = 4
mesh m = { tp: 2 }
program p(q[batch, seq, heads, key], k[batch, mem, heads, key], v[batch, mem, heads, key]) {
  weights = softmax[mem](einsum(q, k -> [batch, heads, seq, mem]))
  return einsum(weights, v -> [batch, seq, heads, key])
}
"""


def test_what_is_kept_is_placed_as_it_is_compiled() -> None:
    """Its rule for the inside of an attention is followed: there is no fused one."""
    made = Compilation(Source("p.mdsl", ATTENTION), Options())
    (asked,) = problems(SearchRequest(fix="heads -> tp, weights: seq -> tp"), made)
    for plan in solve([asked], METHODS["layouts"]).every:
        layout = ", ".join(map(str, plan.rules))
        device = made.under(Options(layout=layout, reduce=plan.policy), Diagnostics()).device
        assert sent(device) == plan.sent > 0


def test_one_that_is_better_than_what_is_found_is_kept() -> None:
    # A tofu of one step takes no storage rules; what is given may have them.
    kept = (*STARTS["least"], SearchRule("io", ("x",), ("params",)))
    asked = problem("net", SQUARE, memory=started(begin("least", "bytes", "")).peak)
    found = solve(
        [Problem(asked.program, SQUARE, "memory", start=StartLayout("kept", kept))], METHODS["tofu"]
    )
    assert found.plans[0].peak <= found.problem.plan(kept, "deferred").peak


def test_command(cli: Cli) -> None:
    text = f"{TEXT}\nlayout mine {{ batch -> x }}\nlayout best {{ hidden -> (x, y) }}\n"
    path = write(format_source(Source("net.mdsl", text)))
    done = cli("search", path, "--from", "mine")
    assert "The layout to begin from" in done.out
    told = json.loads(cli("search", path, "--from", "mine", "--json").out)
    assert {c["before"] for c in told["from"]["changes"]} >= {"batch -> x"}
    assert "nothing is changed" in cli("search", path, "--from", "best").out
    told = cli("search", path, "--from", "other")
    assert told.codes == ["error[MD0108]"]
    assert "--> --from:1:1" in told.err
    assert "error[MD0302]" in cli("search", path, "--from", "io:x,hidden:x").codes


@in_turn(
    option=["--from", "--fix"],
    text=[
        "batch -> x, params: io -> x",
        "{ hidden -> (x, y) }",
        "layout searched {  # by time\n  batch -> x  # saves 1 KiB\n  hidden -> y\n}",
        "batch -> x, activations: gather = again",
        "batch:x,hidden:y",
    ],
)
def test_what_is_printed_is_accepted(option: str, text: str, cli: Cli) -> None:
    """A layout as any report shows it: whole, its rules in braces, or these alone."""
    told = cli("search", write(TEXT), "--mesh", "x:2,y:2", option, text, "--replicated", "400%")
    assert (told.code, told.err) == (0, "")
    if option == "--fix":
        assert told.out.count("as asked") == max(text.count("->"), text.count(":"))


@pytest.mark.parametrize("stages", ["", ", layers -> pipe with one_f_one_b[batch](4)"])
def test_the_text_of_a_plan_is_that_plan(stages: str) -> None:
    text = f"batch -> data, params: model -> data{stages}"
    asked = SearchRequest(start=text)
    (problem,) = problems(asked, program("lm on stages"))
    assert problem.start is not None
    assert str(started(problem)) == text


def test_on_one_axis() -> None:
    found = solve([begin("data", "bytes", "", LINE)], METHODS["layouts"])
    assert [str(c) for c in changes(found)]


def test_a_rule_for_an_axis_that_is_not_there_is_told(cli: Cli) -> None:
    text = f"{TEXT}\nlayout other {{ batch -> (x, tp), hidden -> tp }}\n"
    done = cli("search", write(text), "--mesh", "x:2", "--from", "other", "--fix", "other")
    assert (done.code, {*done.codes}) == (0, {"warning[MD0304]"})
    assert "tp" not in done.out
    assert "nothing is changed" in done.out
