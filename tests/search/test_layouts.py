"""The methods `layouts` and `exhaustive`: they agree, keep to limits, and prove what they say."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search.budget import Budget
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.search.lower_bounds import ROUNDING
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.request import SearchRequest as Request
from meshdsl.search.space import LayoutSpace, seconds
from tests.covering import in_turn

from .problems import CASES, LINE, SQUARE, UNEQUAL, named, problem, solved

each_case = pytest.mark.parametrize(
    ("name", "mesh"), CASES, ids=lambda of: of.name if isinstance(of, Mesh) else of
)
METHOD = METHODS["layouts"]
OBJECTIVES = [("bytes", ""), ("memory", ""), ("time", "h100")]
each_objective = pytest.mark.parametrize(("objective", "cluster"), OBJECTIVES)


def value(found: SearchResult) -> float:
    """The objective of the best plan."""
    return found.problem.value(found.plans[0])


@each_objective
@pytest.mark.parametrize(("name", "mesh"), [("net", SQUARE), ("lookup", LINE)])
def test_bounds_lose_nothing(name: str, mesh: Mesh, objective: str, cluster: str) -> None:
    asked = (objective, cluster, True)
    bounded, every = (solved(name, mesh, m, *asked) for m in ("layouts", "exhaustive"))
    assert bounded.proven
    assert every.proven
    assert not every.count.bounded
    assert value(bounded) == value(every) == bounded.bound


@pytest.mark.parametrize(("name", "mesh"), [("net", SQUARE), ("lookup", LINE)])
def test_no_walk_is_faster_than_its_operators(name: str, mesh: Mesh) -> None:
    found = solved(name, mesh, "exhaustive", "time", "h100", storage=False)
    assert found.problem.timing is not None
    space = LayoutSpace(named(name), mesh, timing=found.problem.timing)
    bounds = {r: s for s, r in space.within(math.inf, seconds(found.problem.timing))}
    assert {plan.rules for plan in found.every} == set(bounds)
    assert all(plan.seconds >= bounds[plan.rules] * (1 - ROUNDING) for plan in found.every)


@each_case
def test_layouts_are_counted_as_they_are_listed(name: str, mesh: Mesh) -> None:
    for fixed in [(), (SearchRule(LayoutSpace(named(name), mesh).dims[1].name, ("x",)),)]:
        space = LayoutSpace(named(name), mesh, fixed)
        every = list(space.within(math.inf))
        assert space.count == len(every)
        assert space.least() == min(work for work, _ in every)


@each_case
def test_axes_of_one_size_are_exchanged(name: str, mesh: Mesh) -> None:
    every = set(LayoutSpace(named(name), mesh).every())
    for one, other in LayoutSpace(named(name), mesh).exchanged:
        names = {one: other, other: one}
        for rules in list(every)[:20]:
            turned = tuple(
                SearchRule(r.dim, mesh.sorted({names.get(a, a) for a in r.axes}), r.selector)
                for r in rules
            )
            assert (turned in every) == (turned == rules)


@pytest.mark.parametrize("name", ["net", "lookup"])
def test_more_memory_is_never_worse(name: str) -> None:
    free = solved(name, LINE, storage=True)
    before = None
    for plan in sorted(free.every, key=lambda plan: plan.peak)[::3]:
        found = solved(name, LINE, storage=True, memory=plan.peak)
        assert found.plans[0].peak <= plan.peak
        assert before is None or value(found) <= before
        before = value(found)


@pytest.mark.parametrize("name", ["net", "lookup", "mlp", "matmul"])
def test_another_device_never_takes_more_memory(name: str) -> None:
    """Nor more time: `test_agreement.py`."""
    one = Mesh("one", (("x", 1),))
    few, many = (solved(name, mesh, "layouts", "memory") for mesh in (one, LINE))
    assert value(many) <= value(few)


ADDED = """
dim rows = 64, inner = 256, cols = 64
program added(a[rows, inner], b[inner, cols], c[rows, inner], d[inner, cols]) {
  y = einsum(a, b -> [rows, cols]) + einsum(c, d -> [rows, cols])
  return y
}
"""


def test_a_partial_value_that_flows_on_saves_half() -> None:
    """A B + C D: two reductions where each product is reduced at once (GShard), else one."""
    named = Compilation(Source("added.mdsl", ADDED), Options()).named
    fixed = (SearchRule("inner", ("x",)),)
    sent = [
        METHODS["layouts"].solve(Problem(named, LINE, request=Request(partial=flows), fixed=fixed))
        for flows in (True, False)
    ]
    one, two = (found.plans[0] for found in sent)
    assert (one.policy, two.policy) == ("deferred", "immediate")
    assert two.sent == 2 * one.sent


@pytest.mark.parametrize(("name", "mesh"), [("net", SQUARE), ("mlp", LINE), ("lookup", LINE)])
def test_without_partial_values_the_best_is_least_of_all_that_reduce_at_once(
    name: str, mesh: Mesh
) -> None:
    found, every = (
        METHODS[method].solve(problem(name, mesh, storage=False, partial=False))
        for method in ("layouts", "exhaustive")
    )
    assert {plan.policy for plan in (*found.every, *every.every)} == {"immediate"}
    best = found.plans[0]
    assert best.sent == every.plans[0].sent == min(plan.sent for plan in every.every)
    assert best.sent >= solved(name, mesh).plans[0].sent


def test_memory_is_asked_of_equal_plans_alone() -> None:
    asked = problem("net", UNEQUAL, "time", "h100")
    found = METHOD.solve(asked)
    times = Counter(plan.seconds for plan in found.every if "seconds" in plan.__dict__)
    alone = [plan for plan in found.plans if times[plan.seconds] == 1]
    assert len(alone) > 1
    assert not any("memory" in plan.__dict__ for plan in alone)
    assert [*map(asked.key, found.plans)] == sorted(map(asked.key, found.plans))


def test_what_is_fixed_stays() -> None:
    kept = (SearchRule("hidden", ("y",)),)
    found = METHOD.solve(problem("net", UNEQUAL, fixed=kept, storage=False))
    assert all(kept[0] in plan.rules for plan in found.every)


@pytest.mark.parametrize("objective", ["bytes", "memory"])
def test_the_first_layouts_may_divide_too_little_where_the_time_is_over(objective: str) -> None:
    asked = Problem(named("encdec"), Mesh("two", (("x", 2),)), objective, budget=Budget(0))
    found = METHOD.solve(asked)
    assert found.plans
    assert all(asked.divides(plan) for plan in found.plans)
    assert not found.proven


def test_more_devices_are_never_slower_however_many_layouts_there_are() -> None:
    """Three devices divide none of the large dims of alexnet; more are listed than are placed."""
    one, three = (Mesh("m", (("x", size),)) for size in (1, 3))
    timing = {mesh: Timing(load("cpu"), mesh) for mesh in (one, three)}
    found = [
        METHOD.solve(Problem(named("alexnet"), m, "time", timing=t)) for m, t in timing.items()
    ]
    assert value(found[1]) <= value(found[0])
    assert found[1].count.evaluated + found[1].count.bounded < found[1].count.valid


def test_few_rules() -> None:
    found = METHOD.solve(problem("net", SQUARE, max_rules=1))
    assert all(len(plan.rules) <= 1 for plan in found.every)


def test_nothing_divides_the_work_so_far() -> None:
    fixed = (SearchRule("io", ("x",)),)
    asked = problem("mlp", LINE, fixed=fixed, replicated=-0.5)
    with pytest.raises(DiagnosticError) as error:
        METHOD.solve(asked)
    assert [d.code for d in error.value.diagnostics] == ["MD0641"]


MEETS = """
dim s = 8, t = 8, c = 2
program p(x[s, c], z[t, c]) {
  q = tanh(exp(sin(x)))
  k = tanh(exp(sin(z)))
  y = attention[c, t](q, k, k)
  return y
}
"""
"""What divides the work best has two rules that meet in the scores of the attention."""


@pytest.mark.parametrize("method", ["layouts", "exhaustive", "elimination", "ilp", "tofu", "mcmc"])
@pytest.mark.parametrize("objective", ["bytes", "memory"])
def test_what_divides_best_cannot_be_placed(objective: str, method: str) -> None:
    program = Compilation(Source("p.mdsl", MEETS), Options()).named
    mesh = Mesh("m", (("d", 8),))

    def solve(fixed: Rules = (), **limits: Any) -> SearchResult:
        request = Request(storage=False, **limits)
        return METHODS[method].solve(Problem(program, mesh, objective, request, fixed=fixed))

    with pytest.raises(DiagnosticError) as error:
        solve()
    (told,) = error.value.diagnostics
    assert told.code == "MD0641"
    assert told.help is not None
    if said := re.search(r"--replicated (\d+)%", told.help):
        assert solve(replicated=int(said[1]) / 100).plans
    else:
        assert "--method layouts" in told.help
    both = (SearchRule("s", ("d",)), SearchRule("t", ("d",)))
    with pytest.raises(DiagnosticError, match="MD0302"):
        solve(fixed=both)


LAYERED = """
dim batch = 8, model = 4, out = 2, layers = 4
program p(x[batch, model], u[batch]) {
  param g[model]
  param r[model, out]
  h = 2.0 * g
  repeat layers {
    param w[model]
    h = h + w
  }
  return mean(u * einsum(h, r -> [out]))
}
"""


@pytest.mark.parametrize("axis", ["x", "y"])
@each_objective
def test_layers_that_are_stored_in_parts(objective: str, cluster: str, axis: str) -> None:
    """What is fixed of a loop's dim is a rule for storage, which another one may better."""
    program = Compilation(Source("p.mdsl", LAYERED), Options()).named
    timing = Timing(load(cluster), SQUARE) if cluster else None
    fixed = (SearchRule("layers", (axis,)),)
    asked = Problem(program, SQUARE, objective, timing=timing, fixed=fixed)
    found, every = (value(METHODS[m].solve(asked)) for m in ("layouts", "exhaustive"))
    assert found == pytest.approx(every)


# --- composites, empty choices, time --------------------------------------------------------------

COMPOSITES = ("softmax", "log_softmax", "rms_norm", "layer_norm", "logsumexp", "cumsum", "argmax")
SHARED = ("softmax[c](x) + log_softmax[c](x)", "softmax[c](x) + softmax[c](2 * x)")


@in_turn(text=[*(f"{name}[c](x)" for name in COMPOSITES), *SHARED], mesh=(LINE, UNEQUAL))
def test_a_composite_along_a_split_dim_counts_its_work(text: str, mesh: Mesh) -> None:
    """No plan has less work than is known of its layout; the least is that of one, or nearly."""
    if "norm[" in text:
        text = text.replace("(x)", "(x, w, w)" if "layer" in text else "(x, w)")
    source = f"dim b = 8, c = 64\nprogram one(x[b, c], w[c]) {{\n  y = {text}\n  return y\n}}\n"
    made = Compilation(Source("one.mdsl", source), Options()).named
    found = METHODS["exhaustive"].solve(Problem(made, mesh, request=Request(replicated=9.0)))
    space, least = found.problem.space, found.problem.least_work
    assert least > 0
    assert all(plan.flops >= space.of(plan.rules) for plan in found.every)
    assert min(plan.flops for plan in found.every) <= least * 1.15
    assert METHOD.solve(Problem(made, mesh)).plans


STEP = """
dim b = 64, c = 16, s = 4, m = s, k = 16
program one(x[b, c], q[b, s, k], kv[b, m, k]) {
  param w[c]
  param v[k]
  loss = mean(TEXT ^ 2)
  return loss
  minimize loss with sgd(0.1)
}
"""
TRAINED = (
    *(f"w * {name}[c](w * x)" for name in ("softmax", "log_softmax", "cumsum")),
    *("rms_norm[c](x, w)", "layer_norm[c](x, w, w)", "logsumexp[c](w * x)"),
    "v * attention[k, m](v * q, kv, kv, iota[s] >= iota[m])",
)


@in_turn(text=TRAINED, mesh=(LINE, SQUARE))
def test_an_even_share_of_the_work_is_never_too_much(text: str, mesh: Mesh) -> None:
    """A batch that is split evenly is looked at, where tables count less for a composite's dim."""
    made = Compilation(Source("one.mdsl", STEP.replace("TEXT", text)), Options()).named
    asked = Problem(made, mesh)
    split, whole = (asked.plan(r, "deferred") for r in ((SearchRule("b", mesh.names),), ()))
    assert split.flops <= whole.flops / mesh.devices * (1 + asked.request.replicated)
    assert asked.key(METHOD.solve(asked).plans[0]) <= asked.key(split)


EMPTY = "dim a = 3, b = 5\nprogram none(x[a, b]) {\n  y = x * 2\n  return y\n}\n"


@pytest.mark.parametrize("method", list(METHODS))
def test_nothing_to_split(method: str) -> None:
    """An axis larger than every dim leaves no choice, which is an answer."""
    made = Compilation(Source("none.mdsl", EMPTY), Options()).named
    found = METHODS[method].solve(Problem(made, Mesh("wide", (("x", 8),))))
    assert [str(plan) for plan in found.plans[:1]] == ["nothing split"]


@pytest.mark.parametrize("method", list(METHODS))
def test_what_is_fixed_to_an_axis_of_one_device_stays(method: str) -> None:
    mesh = Mesh("thin", (("x", 2), ("one", 1)))
    fixed = (SearchRule("hidden", ("one",)),)
    found = METHODS[method].solve(problem("net", mesh, fixed=fixed))
    assert fixed[0] in found.plans[0].rules


@pytest.mark.parametrize(("objective", "cluster"), [("bytes", ""), ("time", "h100")])
def test_no_layout_is_listed_once_the_time_is_over(objective: str, cluster: str) -> None:
    asked = problem("lm", SQUARE, objective, cluster, storage=False)
    found = METHOD.solve(replace(asked, budget=Budget(0)))
    assert found.plans
    assert found.count.cut
    assert not found.proven
    assert found.count.valid < asked.space.count
