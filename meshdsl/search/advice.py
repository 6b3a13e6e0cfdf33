"""What a search has decided, in the terms of the field, beside what else could be done.

Each rule of the best plan is data, tensor, sequence, expert or pipeline parallelism, or a stage of
ZeRO, by what operators do with its dim (`practice.py`). Beside the plan stand the ordinary steps on
the way to it: nothing split, the batch alone, ZeRO's stages. All are placed and simulated alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshdsl.cluster.profile import refuse_unnamed
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import loops_of
from meshdsl.pipeline import Compilation
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.search.candidate import Candidate, Rules, SearchRule
from meshdsl.search.methods import best_plans
from meshdsl.search.practice import DimRoles, practised, roles
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.storage_rules import stored_rules, uniform

KINDS = {
    "data": "data parallelism",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
    "tensor": "tensor parallelism",
    "sequence": "sequence parallelism",
    "experts": "expert parallelism",
    "pipeline": "pipeline parallelism",
    "other": "a split of dims that only intermediate values have",
}
"""The kinds of parallelism in the order in which they are considered."""

ZERO = {"state": "zero1", "grads": "zero2", "params": "zero3"}
"""The stage of ZeRO that the rules for a role are."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """One kind of parallelism of a plan: the dims that it splits, over which axes, how often."""

    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    ways: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """A plan on the way to the best one, by name; `fits`: within the memory of a device."""

    name: str
    plan: Candidate
    fits: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of a search, its kinds of parallelism, and the ordinary steps beside it."""

    found: SearchResult
    roles: DimRoles
    ways: tuple[Parallelism, ...]
    steps: tuple[Baseline, ...]
    loops: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The plan that is advised."""
        return self.found.plans[0]

    @property
    def problem(self) -> Problem:
        """The problem that was solved."""
        return self.found.problem

    def has(self, *kinds: str) -> tuple[Parallelism, ...]:
        """What the plan does of some kinds."""
        return tuple(way for way in self.ways if way.kind in kinds)

    def ways_of(self, plan: Candidate) -> tuple[Parallelism, ...]:
        """The kinds of parallelism of a plan."""
        return ways_of(plan, self.roles, self.loops)

    def with_(self, *kinds: str) -> Candidate | None:
        """The best other plan that was evaluated, fits, and does something of these kinds."""
        plans = [
            plan
            for plan in self.found.every
            if plan is not self.best
            and not {way.kind for way in self.ways_of(plan)}.isdisjoint(kinds)
            and self.problem.fits(plan)
        ]
        return min(plans, key=self.problem.value, default=None)


def advice(request: SearchRequest, made: Compilation) -> Advice:
    """The search of a request, and what its result means.

    Devices have the memory of the cluster where the request has no limit. Raises MD0324 without a
    cluster, and what the search raises.
    """
    timing = problems(request, made)[0].timing
    if timing is None:
        refuse_unnamed("MD0324", "advice is by time, but no cluster is named")
    if request.memory is None:
        request = replace(request, memory=int(timing.cluster.device.memory))
    search_result = best_plans(request, made)
    role = roles(search_result.problem.program)
    loops = tuple(dict.fromkeys(loop.dim.name for loop in loops_of(search_result.problem.program)))
    ways = ways_of(search_result.plans[0], role, loops)
    return Advice(search_result, role, ways, tuple(_steps(search_result, role)), loops)


def ways_of(plan: Candidate, role: DimRoles, loops: tuple[str, ...]) -> tuple[Parallelism, ...]:
    """The kinds of parallelism of a plan, in the order of `KINDS`."""
    mesh = plan.mesh
    stored = stored_rules(plan.rules)
    kinds: dict[str, list[SearchRule]] = {}
    for rule in plan.rules:
        if rule not in stored:
            kinds.setdefault(_kind(rule, role, loops), []).append(rule)
    # An axis has one stage of ZeRO: the last of those that its rules are of.
    stages: dict[str, str] = {}
    for rule in stored:
        for axis in rule.axes:
            stages[axis] = max(stages.get(axis, ""), ZERO[rule.selector[0]])
    ways = [_way(kind, rules, mesh) for kind, rules in kinds.items()]
    for stage in dict.fromkeys(stages.values()):
        axes = [axis for axis, its in stages.items() if its == stage]
        dims = tuple(dict.fromkeys(r.dim for r in stored if not {*axes}.isdisjoint(r.axes)))
        ways.append(_on(stage, axes, dims, mesh))
    if plan.cuts and "pipeline" not in kinds:
        ways.append(_on("pipeline", [cut.axis for cut in plan.cuts], (), mesh))
    return tuple(sorted(ways, key=lambda way: list(KINDS).index(way.kind)))


def _kind(rule: SearchRule, role: DimRoles, loops: tuple[str, ...]) -> str:
    if rule.dim in loops:
        return "pipeline"
    kinds = {"data": role.batch, "experts": role.experts, "tensor": role.learned}
    kinds["sequence"] = role.sequence
    return next((kind for kind, dims in kinds.items() if rule.dim in dims), "other")


def _way(kind: str, rules: list[SearchRule], mesh: Mesh) -> Parallelism:
    axes = [axis for rule in rules for axis in rule.axes]
    return _on(kind, axes, tuple(dict.fromkeys(rule.dim for rule in rules)), mesh)


def _on(kind: str, axes: list[str], dims: tuple[str, ...], mesh: Mesh) -> Parallelism:
    used = mesh.sorted(frozenset(axes))
    return Parallelism(kind, used, dims, mesh.size(*used))


def within_machine(way: Parallelism, mesh: Mesh, size: int) -> bool:
    """Whether devices that split something between them share a machine of so many devices.

    The devices of the last axis are nearest to each other.
    """
    first = min(mesh.names.index(axis) for axis in way.axes)
    return math.prod(mesh.size(axis) for axis in mesh.names[first:]) <= size


def _steps(found: SearchResult, role: DimRoles) -> Iterator[Baseline]:
    """Nothing split, the batch over all axes, and ZeRO's stages beside that."""
    problem = found.problem
    yield from _placed(problem, "one device", ())
    batch = next(
        (
            rules
            for rules in practised(problem.space)
            if rules and all(rule.dim in role.batch for rule in rules)
        ),
        None,
    )
    if batch is None:
        return
    yield from _placed(problem, KINDS["data"], batch)
    for rules in uniform(problem.program, problem.mesh, batch):
        stage = max(ZERO[rule.selector[0]] for rule in rules)
        yield from _placed(problem, f"{KINDS['data']}, {KINDS[stage]}", (*batch, *rules))


def _placed(problem: Problem, name: str, rules: Rules) -> Iterator[Baseline]:
    """The better walk of some rules; nothing where they cannot be followed."""
    try:
        plan = min(problem.plans(rules), key=problem.value)
    except DiagnosticError:
        return
    yield Baseline(name, plan, problem.fits(plan))
