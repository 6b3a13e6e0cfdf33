"""A search does not contradict itself: obligations over every example, shipped layout and limit."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshdsl.cli.app import app
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.named.one_batch import sample_dims
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search import enumeration
from meshdsl.search.budget import Budget, rounds
from meshdsl.search.candidate import Candidate, SearchRule
from meshdsl.search.infeasible import least_possible
from meshdsl.search.local_search import _Steps
from meshdsl.search.methods import METHODS, best_plans
from meshdsl.search.practice import practised, roles
from meshdsl.search.problem import SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import solve
from meshdsl.search.space import LayoutSpace
from meshdsl.search.storage_rules import stored_rules, uniform
from meshdsl.search.warm_start import placed_as
from meshdsl.syntax.parse import read_source
from tests.covering import in_turn
from tests.project import ROOT

ALL = "MESHDSL_CASES" in os.environ
EXAMPLES = ("dlrm", "matmul", "mlp", "moe") + (
    ("lm", "transformer", "nmt", "encdec") if ALL else ()
)
MESHES = {
    name: tuple(
        Compilation(read_source(ROOT / "examples" / f"{name}.mdsl"), Options()).declarations.meshes
    )
    for name in EXAMPLES
}
PLACES = [f"{name} on {mesh}" for name, meshes in MESHES.items() for mesh in meshes]
"""Every mesh of the examples."""

SLOW = ("moe on four", "moe on grid", "dlrm on four", "dlrm on square")
QUICK = [place for place in PLACES if ALL or place not in SLOW]
"""The places of which every obligation is tried each time."""

OBJECTIVES = {"bytes": None, "time": "h100"}

LAYOUTS = METHODS["layouts"]


@functools.cache
def program(place: str) -> Compilation:
    """An example on one of its meshes."""
    name, mesh = place.split(" on ")
    chosen = Options(mesh=mesh, program="lm" if name == "lm" else None)
    return Compilation(read_source(ROOT / "examples" / f"{name}.mdsl"), chosen)


@functools.cache
def searched(
    place: str, objective: str = "bytes", memory: int | None = None, selectors: bool = False
) -> SearchResult:
    """The result of a search."""
    cluster = OBJECTIVES[objective]
    asked = SearchRequest(
        objective=objective, cluster=cluster, memory=memory, selectors=selectors, storage=True
    )
    return solve(problems(asked, program(place)), LAYOUTS)


@functools.cache
def shipped(place: str, objective: str = "bytes") -> tuple[Candidate, ...]:
    """The layouts of an example that its mesh can follow, as the walks of a search place them."""
    problem = searched(place, objective).problem
    plans = []
    for layout in problem.declared:
        try:
            plans.append(placed_as(problem, layout))
        except DiagnosticError:
            continue
    return tuple(plans)


LIMITS = ("the best", "a byte less", "the first", "the last", "the largest", "the smallest")


def limit_of(place: str, objective: str, limit: str) -> int:
    """What the best layout of a search holds, or a layout of the file."""
    best, plans = searched(place, objective).plans[0], shipped(place, objective)
    held = sorted(plan.peak for plan in plans) or [best.peak]
    return {
        "the best": best.peak,
        "a byte less": best.peak - 1,
        "the first": plans[0].peak if plans else best.peak,
        "the last": plans[-1].peak if plans else best.peak,
        "the largest": held[-1],
        "the smallest": held[0],
    }[limit]


@in_turn(place=QUICK, objective=OBJECTIVES, limit=LIMITS)
def test_a_limit_agrees_with_what_is_found_without(place: str, objective: str, limit: str) -> None:
    """No limit that the best keeps to changes it; none has less than a layout that fits."""
    free, most = searched(place, objective), limit_of(place, objective, limit)
    problem = free.problem
    found = searched(place, objective, most)
    fitting = [plan for plan in shipped(place, objective) if plan.peak <= most]
    if free.plans[0].peak <= most:
        assert found.plans[0].asked == free.plans[0].asked
    assert found.plans or not fitting
    for plan in fitting:
        if problem.divides(plan):
            assert problem.value(found.plans[0]) <= problem.value(plan)
    assert all(plan.peak <= most for plan in found.plans)
    for plan in (*free.every, *fitting):
        assert least_possible(problem) <= plan.peak


HELD = (262_000, 266_000, 272_000, 282_580, 292_000, 400_000)
"""Limits for the mixture of experts; what nothing general fits into takes many steps."""


@pytest.mark.skipif(not ALL, reason="two searches of a mixture of experts, with rules of its own")
@pytest.mark.parametrize("memory", HELD)
def test_experts_under_a_limit(memory: int) -> None:
    """Of experts with rules of their own, the shipped layout holds 282,580 B."""
    free = searched("moe on four", selectors=True)
    found = searched("moe on four", memory=memory, selectors=True)
    if memory >= free.plans[0].peak:
        assert found.plans[0].asked == free.plans[0].asked
    elif found.plans:
        assert found.plans[0].peak <= memory
    else:
        assert found.least is not None
        assert found.least.plans[0].peak > memory


def test_the_least_that_is_told_is_found() -> None:
    """What a search that finds nothing says it would find, it finds."""
    asked = SearchRequest(memory=280_000, objective="bytes")
    with pytest.raises(DiagnosticError, match="MD0642") as error:
        best_plans(asked, program("moe on four"))
    (told,) = error.value.diagnostics
    assert told.message.startswith("none of the ")
    assert "no layout holds less than" in told.message
    assert told.help is not None
    least = int(told.help.split("--memory ")[1].split("B")[0])
    assert searched("moe on four", memory=least).plans[0].peak <= least


SEQUENCE = """
dim batch = 2, seq = 128, model = 16, hidden = 64, layers = 16
mesh four = { tp: 4 }
layout parallel { hidden -> tp, x: seq -> tp }
program net(x0[batch, seq, model], t[batch, seq, model]) {
  x = x0
  repeat layers {
    param w[model, hidden]
    param v[hidden, model]
    h = gelu(einsum(rms_norm[model](x), w -> [batch, seq, hidden]))
    x = x + einsum(h, v -> [batch, seq, model])
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with adamw(lr=0.01)
}
"""
"""Sequence parallelism, whose backward pass may gather again what the forward pass has gathered."""


@pytest.mark.parametrize("objective", ["bytes", "memory"])
def test_activations_are_gathered_again_where_memory_counts(objective: str) -> None:
    made = Compilation(Source("net.mdsl", SEQUENCE), Options(mesh="four"))
    asked = SearchRequest(fix="hidden -> tp, x: seq -> tp", objective="bytes")
    once = solve(problems(asked, made), METHODS["layouts"]).plans[0]
    asked = replace(asked, objective=objective)
    if objective == "bytes":
        asked = replace(asked, memory=once.peak - 1)
    found = solve(problems(asked, made), LAYOUTS)
    assert found.plans[0].peak < once.peak
    assert "activations: gather = again" in str(found.plans[0])


def test_what_is_stored_is_divided_by_each_dim_that_covers_it() -> None:
    """Of equal dims the one that holds or sends less is taken, not the first."""
    made = Compilation(Source("net.mdsl", SEQUENCE), Options(mesh="four"))
    asked = SearchRequest(objective="memory", fix="batch -> none, seq -> tp")
    found = solve(problems(asked, made), LAYOUTS)
    dims = {r.dim for plan in found.every for r in plan.rules if r.selector == ("params",)}
    assert dims >= {"layers", "model", "hidden"}
    assert found.plans[0].peak == min(plan.peak for plan in found.every)


def test_nothing_fits_is_said_with_a_proof() -> None:
    with pytest.raises(DiagnosticError, match="MD0642") as error:
        best_plans(SearchRequest(memory=1000), program("mlp on square"))
    (told,) = error.value.diagnostics
    assert told.message.startswith("no layout fits into 1,000 B on a device: what is stored, split")
    assert told.help is not None
    assert "the largest part is parameters (2 MiB), which more devices (`--devices 8`)" in told.help


def test_a_plan_that_no_device_can_hold_says_so_and_what_does_is_searched_for(
    tmp_path: Path,
) -> None:
    """Of a cluster, without `--memory`: the option that is named finds a plan that fits."""
    small = tmp_path / "small.toml"
    profile = (ROOT / "meshdsl" / "cluster" / "profiles" / "h100.toml").read_text()
    small.write_text(profile.replace("memory = 80e9", "memory = 4e6"))
    path = str(ROOT / "examples" / "mlp.mdsl")
    args = ["search", path, "--mesh", "square", "--cluster", str(small), "--no-cache"]
    first = " ".join(CliRunner().invoke(app, args).output.split())
    told = re.search(r"IT DOES NOT FIT: a device of small has 3.81 MiB\. `([^`]+)`", first)
    assert told is not None, first
    again = " ".join(CliRunner().invoke(app, [*args, *told[1].split()]).output.split())
    assert "DOES NOT FIT" not in again
    assert "Best by time" in again
    for layout, fits in (("hidden -> (rows, cols)", True), ("hybrid", False)):
        args[2:] = ["--mesh", "square", "--layout", layout, "--cluster", str(small), "--no-cache"]
        shown = CliRunner().invoke(app, ["explain", *args[1:]]).output
        assert " MiB of 3.81 MiB at its peak" in shown
        assert ("IT DOES NOT FIT" not in shown) == fits


def test_what_fills_the_memory_is_said_with_what_can_lower_it() -> None:
    made = Compilation(Source("net.mdsl", SEQUENCE), Options(mesh="four"))
    asked = SearchRequest(memory=1000, fix="batch -> none, seq -> none, hidden -> tp")
    with pytest.raises(DiagnosticError, match="MD0642") as error:
        best_plans(asked, made)
    help = error.value.diagnostics[0].help or ""
    assert "the largest part is activations" in help
    least = re.search(r"--memory (\d+)B", help)
    assert least is not None
    assert "a smaller `seq` (`--set seq=64`)" in help
    smaller = Compilation(Source("net.mdsl", SEQUENCE), Options(mesh="four", set_dims={"seq": 64}))
    assert best_plans(replace(asked, memory=int(least[1]) * 2 // 3), smaller).plans


def layouts_of(place: str) -> list[str]:
    """The layouts of the file of an example."""
    return [*program(place).declarations.layouts]


WIDEST = QUICK if ALL else ["dlrm on four", "mlp on square"]
"""One mesh of each example, of as many axes as it has layouts for."""

KEPT = [f"{place} under {layout}" for place in WIDEST for layout in layouts_of(place)]


@in_turn(option=["fix", "start"], case=[*KEPT, "lm on stages under pipeline"])
def test_every_layout_of_a_file_can_be_kept_or_begun_from(case: str, option: str) -> None:
    place, layout = case.split(" under ")
    if option == "fix":
        keep(place, layout)
        return
    asked = SearchRequest(replicated=math.inf, start=layout)
    (problem,) = problems(asked, program(place))
    best = solve([problem], METHODS["layouts"]).plans[0]
    assert problem.start is not None
    assert problem.value(best) <= problem.value(placed_as(problem, problem.start))


def keep(place: str, layout: str) -> None:
    """Search with a layout of the file, which stays as it is."""
    (problem,) = problems(SearchRequest(replicated=math.inf, fix=layout), program(place))
    best = solve([problem], METHODS["layouts"]).plans[0]
    assert {*problem.fixed} <= {*best.rules}
    assert str(best.execution) == str(problem.execution)


@pytest.mark.parametrize("case", ["lm on four under zero1", "lm on stages under data_parallel"])
def test_a_layout_keeps_what_it_stores_and_how_it_is_executed(case: str) -> None:
    """Not even a better dim for its states, nor the pipeline of another layout, takes its place."""
    keep(*case.split(" under "))


BUDGETS = (0.0, 0.3, 1.0)


@in_turn(place=PLACES if ALL else ("dlrm on four", "mlp on square"), objective=OBJECTIVES)
def test_more_of_a_budget_is_never_worse(place: str, objective: str) -> None:
    """Nor does an answer depend on anything but the budget."""
    results = []
    for budget in BUDGETS:
        asked = SearchRequest(objective=objective, cluster=OBJECTIVES[objective], budget=budget)
        results.append(solve(problems(asked, program(place)), METHODS["layouts"]))
    results.append(searched(place, objective))  # without a limit
    values = [found.problem.value(found.plans[0]) for found in results]
    assert values == sorted(values, reverse=True)


def test_rounds_of_a_smaller_budget_are_the_first_of_a_larger_one() -> None:
    sizes = [[budget.most for budget in rounds(most)] for most in (0, 10, 1e3, 5e3, 1e5, 3e6)]
    for one, other in itertools.pairwise(sizes[2:]):
        assert other[: len(one)] == one
    assert [sum(of) <= most for of, most in zip(sizes, (0, 10, 1e3, 5e3, 1e5, 3e6), strict=True)]
    assert [budget.most for budget in rounds(math.inf)] == [math.inf]
    assert Budget(0).is_over


def test_another_axis_never_makes_a_step_slower() -> None:
    made = program("mlp on square")
    before = math.inf
    for axes in ("rows:2", "rows:2,cols:2", "rows:2,cols:2,more:2"):
        chosen = Options(mesh=axes)
        asked = SearchRequest(cluster="h100")
        best = solve(problems(asked, Compilation(made.source, chosen)), METHODS["layouts"]).plans[0]
        assert best.seconds <= before
        before = best.seconds


def test_so_many_devices_take_the_mesh_of_most_axes() -> None:
    made = program("lm on four")
    free = Compilation(made.source, Options(program="lm"))
    every = problems(SearchRequest(devices=4), free)
    assert {problem.mesh.names for problem in every} == {("data", "tp")}
    assert solve(every, METHODS["layouts"]).plans[0].rules


def test_times_of_other_meshes_are_bounds() -> None:
    """Searching such a mesh gives no more than is shown of it, and nothing better than the best."""
    made, asked = program("mlp on square"), SearchRequest(cluster="h100", devices=4)
    found = solve(problems(asked, made), LAYOUTS)
    assert found.others
    for other in found.others:
        chosen = Compilation(made.source, Options(mesh=str(other.problem.mesh)))
        alone = solve(problems(replace(asked, devices=None), chosen), METHODS["layouts"]).plans[0]
        assert found.plans[0].seconds <= alone.seconds
        assert not other.plans or alone.seconds <= other.plans[0].seconds


# --- what practitioners begin with ----------------------------------------------------------------


def example(path: Path) -> NamedProgram:
    """The program of a file."""
    return Compilation(
        read_source(path), Options(program="lm" if path.stem == "lm" else None)
    ).named


ROLES = {
    "lm.mdsl": (("batch",), ("seq",), ()),
    "moe.mdsl": (("group",), ("token",), ("experts",)),
    "encdec.mdsl": (("batch",), ("source", "target"), ()),
    "vit.mdsl": (("batch",), ("height", "width"), ()),
    "mlp.mdsl": (("batch",), (), ()),
    "dlrm.mdsl": (("batch",), (), ("table",)),
    "search/gpt3.mdsl": (("batch",), ("seq",), ()),
    "search/llama3.mdsl": (("batch",), ("seq",), ()),
}


@pytest.mark.parametrize("name", ROLES)
def test_roles_follow_from_what_is_done_with_dims(name: str) -> None:
    role = roles(example(ROOT / "examples" / name))
    assert (role.batch, role.sequence, role.experts) == ROLES[name]


def test_positions_that_are_learned_make_no_samples() -> None:
    """One definition for steps of several batches, for pipelines and for what is searched first."""
    (dim,) = sample_dims(example(ROOT / "examples" / "lm.mdsl"))
    assert dim.name == "batch"


def test_practised_layouts_are_those_of_the_literature() -> None:
    space = LayoutSpace(example(ROOT / "examples" / "lm.mdsl"), Mesh("m", (("a", 2), ("b", 2))))
    texts = [", ".join(map(str, rules)) for rules in practised(space)]
    assert texts[0] == "batch -> (a, b)"
    assert "batch -> a, vocab -> b, heads -> b, hidden -> b" in texts
    assert "batch -> a, seq -> b" in texts
    assert all(space.allows(_chosen(space, rules)) for rules in practised(space))


def _chosen(space: LayoutSpace, rules: tuple[object, ...]) -> list[tuple[str, ...]]:
    axes = {rule.dim: rule.axes for rule in rules}  # type: ignore[attr-defined]
    return [axes.get(dim.name, ()) for dim in space.dims]


TALL = """
dim batch = 64, model = 2048, hidden = 8192, layers = 4
mesh grid = { data: 2, tp: 4 }
program tall(x[batch, model]) {
  repeat layers {
    param up[model, hidden]
    param down[hidden, model]
    x = x + einsum(relu(einsum(x, up -> [batch, hidden])), down -> [batch, model])
  }
  loss = mean(x * x)
  return loss
  minimize loss with adamw(lr=0.001, clip=1.0)
}
"""

MODELS = ("llama", "gpt2", "bert", "mixtral") if ALL else ()


@pytest.mark.parametrize("model", ["tall", *MODELS])
def test_no_stage_of_zero_is_faster(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither 1, 2 nor 3 over all axes, beside the layout that is fastest without."""
    path = ROOT / "examples" / "models" / f"{model}.mdsl"
    source = Source("tall.mdsl", TALL) if model == "tall" else read_source(path)
    asked = SearchRequest(objective="time", cluster="h100", storage=True, fix="batch -> (data, tp)")
    made = Compilation(source, Options(mesh="data:2, tp:4"))
    given = problems(asked, made)
    if model == "tall":  # a program of so many operators that only few choices are tried
        monkeypatch.setattr(enumeration, "STORED", 4 * given[0].operators)
    found = solve(given, LAYOUTS)
    problem = found.problem
    plain = [plan for plan in found.every if not stored_rules(plan.rules)]
    fastest = min(plain, key=problem.value)
    stages = [*uniform(problem.program, problem.mesh, fastest.rules)]
    assert len(stages) == 3
    values = [min(map(problem.value, problem.plans((*fastest.rules, *m)))) for m in stages]
    assert problem.value(found.plans[0]) <= min(values)


ODD = TALL.replace("batch = 64", "batch = 66").replace("tp: 4", "tp: 3")


def test_an_axis_that_divides_no_parameter_stores_them_in_uneven_blocks() -> None:
    """Where no layout of whole parameters fits, one that stores them over all devices does."""
    made = Compilation(Source("odd.mdsl", ODD), Options(mesh="grid"))
    free = solve(problems(SearchRequest(objective="memory", fix="batch -> tp"), made), LAYOUTS)
    limit = free.plans[0].peak * 5 // 4
    asked = SearchRequest(objective="time", cluster="h100", fix="batch -> tp", memory=limit)
    found = solve(problems(asked, made), LAYOUTS).plans[0]
    assert found.peak <= limit
    assert any("tp" in rule.axes for rule in stored_rules(found.rules))


def test_rules_that_store_roles_by_one_dim_are_left_out_together() -> None:
    made = Compilation(Source("tall.mdsl", TALL), Options(mesh="grid"))
    (problem,) = problems(SearchRequest(objective="time", cluster="h100"), made)
    of_hidden = tuple(SearchRule("hidden", ("tp",), (role,)) for role in ("params", "grads"))
    of_model = SearchRule("model", ("data",), ("state",))
    steps = [*_Steps(problem, []).steps_from((*of_hidden, of_model), lambda rule: True)]
    assert (of_model,) in steps
    assert len(steps) == 4
