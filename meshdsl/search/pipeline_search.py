"""Pipelines: the layouts of the other axes, in stages under schedules of the language.

The user names the axis of the stages. On the mesh without it the best layouts are searched as ever.
Each of them with the loop's dim over the axis is a pipeline under a schedule and in a number of
micro-batches, placed and timed as any program is: with idle time, messages, and what is done twice.
Layout and number of micro-batches are chosen by one schedule, then the schedule for these. (What to
choose among is that of Narayanan et al. 2021 and Zheng et al. 2022.)

A network without a loop is cut where its stages have about the same work; then all ways to cut it
are tried, or where there are many, single stages begin earlier or later as long as that is better.
(PipeDream, Harlap et al. 2018, cuts chains of layers by measured times.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import DiagnosticError, Source, Span, counted
from meshdsl.ir.program import block_loops
from meshdsl.ir.types import Dim
from meshdsl.named import ir as named
from meshdsl.named.ir import values_of
from meshdsl.named.one_batch import sample_dims
from meshdsl.option_edits import leave_out, refuse
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.schedule.use import ScheduleUse
from meshdsl.search.budget import SIMULATED
from meshdsl.search.candidate import PLAIN, Candidate, Execution, Rules, SearchRule, StageStart
from meshdsl.search.enumeration import SHOWN
from meshdsl.search.lower_bounds import ROUNDING
from meshdsl.search.practice import practised
from meshdsl.search.problem import Count, Method, PlanOrder, Problem, SearchResult, least_value
from meshdsl.search.space import seconds, work
from meshdsl.search.stage_boundaries import Beginnings, beginnings, passes
from meshdsl.search.storage_rules import on_other_dims, stored, stored_rules, uniform

STARTS, PRACTISED = 3, 1
"""The layouts of the other axes that are put in stages, for each split of the batch: the best that
are found, and conventional ones, since the former have been placed only until one was proven best.
"""

FIRST = "one_f_one_b"
"""The schedule by which layout and micro-batches are chosen."""

OTHERS = ("zb_h1", "interleaved", "zb_v", "gpipe")
"""The schedules that are tried beside it."""

MICRO = (4, 2, 1, 8)
"""Numbers of micro-batches, as multiples of the stages; by the first of them layouts are compared.
Of those that the batch can be cut into, the nearest are taken.

With four times as many as stages a fifth of the time is idle, with eight times a tenth.
"""

MOST = 2
"""The layouts that are compared with other numbers of micro-batches."""

FITTED = 6
"""The layouts that are made to fit into memory, the fastest first."""

RECOMPUTED = 12
"""The pipelines that are tried with all computed again, the best first."""

WAYS = 40
"""The ways to cut a network that are all tried; of more, those near the best one."""

Tried = tuple[Rules, ScheduleUse, tuple[StageStart, ...]]
"""Rules for the other axes, a schedule, and where the stages of a network begin."""


def searched(problem: Problem, method: Method) -> SearchResult:
    """What a method finds, and pipelines over the axis that the problem names, if it names one.

    Where the rule of the stages is to be kept, pipelines alone.
    """
    axis = problem.request.pipeline
    if axis is None or problem.mesh.size(axis) == 1:
        return method.solve(problem)
    places, cut = None, tuple[SearchRule, ...]()
    if not list(_loops(problem.program)):
        places = _beginnings(problem.program, problem.timing)
        if places.even(problem.mesh.size(axis)) is None:
            return method.solve(problem)
    elif (loop := _loop(problem)) is not None:
        cut = (SearchRule(loop.name, (axis,)),)
    else:
        return method.solve(problem)
    run = _PipelineSearch(problem, axis, cut, places)
    run.search(method)
    fitting = sorted(filter(problem.fits, run.made), key=problem.key)
    result = SearchResult(problem, (), (), Count("L1", 0, 0, 0, 1), 0.0)
    if problem.execution.schedule is None and not (cut and {*cut} <= {*problem.fixed}):
        result = _without_stages(problem, method, fitting)
    count = replace(result.count, pipelines=len(run.made))
    plans = sorted((*result.plans, *fitting), key=problem.key)
    # The best pipeline is shown, however many others come before it.
    shown = (*plans[:SHOWN], *(p for p in fitting[:1] if p not in plans[:SHOWN]))
    return replace(result, plans=shown, every=(*result.every, *run.made), count=count)


def _without_stages(
    problem: Problem, method: Method, pipelines: Sequence[Candidate]
) -> SearchResult:
    """What a method finds, only as far as it may be better than the best pipeline that fits."""
    below = min([problem.below, *map(problem.value, pipelines[:1])])
    return replace(method.solve(replace(problem, below=below)), problem=problem)


def check(program: named.NamedProgram, axis: str, meshes: Sequence[Mesh]) -> None:
    """Raise MD0647 where a program has no stages on this axis of any of the meshes."""
    if program.goal is None:
        message = f"`{program.name}` is no training step: pipelines are searched for these alone"
        refuse("MD0647", message, leave_out("--pipeline", safe=False), span=program.span)
    dims = list(_loops(program))
    sizes = [mesh.size(axis) for mesh in meshes]
    if not dims:
        places = _beginnings(program, None)
        if all(places.even(n) is None for n in sizes):
            at = counted(len(places.places), "tensor")
            message = f"`{program.name}` has no `repeat`, and {at} with a name where one"
            message += f" of {min(sizes)} stages could begin"
            help = "write equal layers as `repeat layers { … }`, or give what begins a stage a name"
            refuse("MD0647", message, leave_out("--pipeline", safe=False), help, span=program.span)
        return
    if not any(dim.size % n == 0 for dim in dims for n in sizes):
        dim = max(dims, key=lambda dim: dim.size)
        message = f"`{dim.name}` of size {dim.size} does not divide over `{axis}` of {sizes[0]}"
        refuse(
            "MD0647", message, leave_out("--pipeline", safe=False), "take another size of the axis"
        )


def _loops(program: named.NamedProgram) -> Iterator[Dim]:
    """The dims of the loops that a pipeline may cut."""
    forward = (n for n in block_loops(passes(program), named.NamedLoop) if n.phase == "forward")
    return (loop.dim for loop in forward)


def _beginnings(program: named.NamedProgram, timing: Timing | None) -> Beginnings:
    """Where stages may begin: by seconds, or without a cluster by FLOPs."""
    return beginnings(program, work if timing is None else seconds(timing))


def _loop(problem: Problem) -> Dim | None:
    """The dim whose iterations are on the stages: of several the one with the most, if any do."""
    stages = problem.mesh.size(problem.request.pipeline or "")
    dims = [dim for dim in _loops(problem.program) if dim.size % stages == 0]
    return max(dims, key=lambda dim: dim.size, default=None)


def _beside(problem: Problem, axis: str) -> Iterator[Problem]:
    """The problem of the other axes for each split of the batch, those of least work first.

    How far a batch can be split depends on the number of micro-batches; what is best beside a
    split does not, for sums of gradients are sent once. What a layout takes without stages, of
    memory or of time for what stages store, decides nothing here.
    """
    axes = tuple((name, 1 if name == axis else size) for name, size in problem.mesh.axes)
    request = replace(problem.request, memory=None, pipeline=None, storage=False, certificate=False)
    others = replace(problem, mesh=replace(problem.mesh, axes=axes), request=request)
    settings = problem.execution.settings
    execution = Execution(settings=settings) if settings else PLAIN
    others = replace(others, start=None, least=None, below=math.inf, execution=execution)
    yield from sorted((replace(others, fixed=f) for f in _splits(problem, axis)), key=least_value)


def _layouts(problem: Problem, method: Method) -> tuple[Rules, ...]:
    """The best general rules for the axes beside the stages: once for all limits, unless cut off.

    None where they cannot be placed.
    """
    key = problem.mesh, problem.objective, problem.fixed
    if key in problem.known_splits:
        return problem.known_splits[key]
    try:
        plans = method.solve(problem).plans
    except DiagnosticError:
        return ()
    loops = {dim.name for dim in _loops(problem.program)}
    axes = {axis for axis, size in problem.mesh.axes if size > 1}
    over_all = (r for r in practised(problem.space) if axes <= {a for one in r for a in one.axes})
    best, conventional = (
        dict.fromkeys(tuple(r for r in rules if r.axes and r.dim not in loops) for rules in each)
        for each in ((plan.rules for plan in plans), over_all)
    )
    layouts = tuple(dict.fromkeys((*[*best][:STARTS], *[*conventional][:PRACTISED])))
    if not problem.expired():
        problem.known_splits[key] = layouts
    return layouts


def _splits(problem: Problem, axis: str) -> Iterator[Rules]:
    """The rules that are kept, with each way to split the batch over some of the other axes."""
    fixed = tuple(rule for rule in problem.fixed if axis not in rule.axes)
    batch = next(iter(sample_dims(problem.program)), None)
    if batch is None or any(r.dim == batch.name and not r.selector for r in fixed):
        yield fixed
        return
    meets = {d for v in values_of(problem.program) if v.type.has(batch.name) for d in v.type.names}
    taken = {a for rule in fixed if rule.dim in meets and not rule.selector for a in rule.axes}
    free = (name for name, size in problem.mesh.axes if size > 1 and name not in taken)
    others = [name for name in free if name != axis]
    for count in range(len(others) + 1):
        for over in itertools.combinations(others, count):
            if batch.size % problem.mesh.size(*over) == 0:
                yield (*fixed, SearchRule(batch.name, over))


@dataclass(slots=True)
class _PipelineSearch:
    """One search among the layouts of the other axes.

    `cut` is the rule of the stages, or a network without a loop has `places` where they may begin;
    `made` are the pipelines that were placed.
    """

    problem: Problem
    axis: str
    cut: Rules
    places: Beginnings | None
    made: list[Candidate] = field(default_factory=list)

    def search(self, method: Method) -> None:
        """Choose layouts, then among micro-batches, cuts, what is stored how, and schedules."""
        for others in _beside(self.problem, self.axis):
            if not self._is_slower(least_value(others)):
                layouts = _layouts(others, method)
                self._try((rules, use, ()) for rules in layouts for use in self._uses(rules)[:1])
        first = [self._general(plan) for plan in sorted(self.made, key=self._key)[:MOST]]
        self._try((rules, use, ()) for rules in first for use in self._uses(rules)[1:])
        if self.made and self.places is not None and not self.problem.execution.cuts:
            self._move(self.places)
        self._fit()
        for changed in (
            (self._stored, self._on_other_dims, self._recomputed, self._scheduled)
            if self.made
            else ()
        ):
            best = min(self.made, key=self._key)
            self._try((*others, best.cuts) for others in changed(best))

    @property
    def _others(self) -> Mesh:
        """The axes beside that of the stages."""
        mesh = self.problem.mesh
        return replace(mesh, axes=tuple(axis for axis in mesh.axes if axis[0] != self.axis))

    def _is_slower(self, computing: float) -> bool:
        """Whether stages of operators that take so long in all are slower than what is found."""
        if self.problem.objective != "time":
            return False
        least = computing / self.problem.mesh.size(self.axis) * (1 - ROUNDING)
        return least > self._reached

    @property
    def _reached(self) -> float:
        """The value that is to be improved on: that of the best pipeline that fits."""
        best = min(self.made, key=self._key, default=None)
        if best is None or not self.problem.fits(best):
            return self.problem.below
        return min(self.problem.below, self.problem.value(best))

    def _move(self, places: Beginnings) -> None:
        """Cut the best pipeline in every way; of many, near it as long as that gets better."""
        stages = self.problem.mesh.size(self.axis)
        is_exhaustive, here = places.ways(stages) <= WAYS, places.even(stages)
        while here is not None:
            best = min(self.made, key=self._key)
            assert best.schedule is not None
            tried = places.every(stages) if is_exhaustive else places.near(here)
            ways = {places.cuts(chosen, self.axis): chosen for chosen in tried}
            rules = tuple(rule for rule in best.rules if rule not in self.cut)
            self._try((rules, best.schedule, cuts) for cuts in ways)
            here = None if is_exhaustive else ways.get(min(self.made, key=self._key).cuts)

    def _fit(self) -> None:
        """Make the fastest layouts fit into memory, as long as they may be better than what does.

        Each is stored by ZeRO's stages, then computed again as well, until it fits.
        """
        problem = self.problem
        if problem.request.memory is None or problem.execution.schedule is not None:
            return
        for plan in sorted(self.made, key=problem.value)[:FITTED]:
            if problem.value(plan) >= self._reached:
                return
            general, use, ways = self._general(plan), plan.schedule, [Rules()]
            assert use is not None
            if problem.request.storage:
                ways += uniform(problem.program, self._others, general)
            for again, rules in itertools.product(({}, {"recompute": "stage"}), ways):
                self._try([((*general, *rules), replace(use, options=again), plan.cuts)])
                if problem.fits(self.made[-1]):
                    break

    def _stored(self, plan: Candidate) -> Iterator[tuple[Rules, ScheduleUse]]:
        """A pipeline with rules for what is stored."""
        use, general = plan.schedule, self._general(plan)
        assert use is not None
        if self.problem.request.storage:
            for rules in stored(self.problem.program, self._others, general):
                yield (*general, *rules), use

    def _on_other_dims(self, plan: Candidate) -> Iterator[tuple[Rules, ScheduleUse]]:
        """A pipeline with what it stores in parts divided by other dims."""
        use, general, role_rules = plan.schedule, self._general(plan), stored_rules(plan.rules)
        assert use is not None
        if role_rules and self.problem.request.storage:
            program, others = self.problem.program, self._others
            for moved in on_other_dims(program, others, general, role_rules):
                yield (*general, *moved), use

    def _recomputed(self, best: Candidate) -> Iterator[tuple[Rules, ScheduleUse]]:
        """The pipelines so far with all computed again, where memory is what counts.

        They compute more: those that are no better without a limit are no better so.
        """
        problem = self.problem
        is_limited = problem.request.memory is not None or problem.objective == "memory"
        if problem.execution.schedule is not None or not is_limited:
            return
        value = problem.value
        order = sorted(self.made, key=lambda plan: (value(plan), plan.peak))
        for plan in order[:RECOMPUTED]:
            assert plan.schedule is not None
            if problem.objective != "memory" and value(plan) >= self._reached:
                return
            rules = tuple(rule for rule in plan.rules if rule not in self.cut)
            yield rules, replace(plan.schedule, options={"recompute": "stage"})

    def _scheduled(self, plan: Candidate) -> Iterator[tuple[Rules, ScheduleUse]]:
        """A pipeline under other schedules."""
        assert plan.schedule is not None
        if self.problem.execution.schedule is not None:
            return iter(())
        rules = tuple(rule for rule in plan.rules if rule not in self.cut)
        return ((rules, replace(plan.schedule, name=name)) for name in OTHERS)

    def _general(self, plan: Candidate) -> Rules:
        return tuple(r for r in plan.rules if not r.selector and r not in self.cut)

    def _key(self, plan: Candidate) -> tuple[bool, float, PlanOrder]:
        fits = self.problem.fits(plan)
        return not fits, 0.0 if fits else plan.peak, self.problem.key(plan)

    def _try(self, tried: Iterable[Tried]) -> None:
        """Place layouts in stages, as far as they can be and there is time."""
        most, fixed = self.problem.request.max_rules, self.problem.fixed
        asked = {plan.asked for plan in self.made}
        for others, use, cuts in tried:
            rules = (*self.cut, *others)
            long = most is not None and len(rules) > most
            general = tuple(rule for rule in others if not rule.selector)
            if long or not {*fixed} <= {*rules} or self._is_slower(self._computing(general)):
                continue
            try:
                plan = self._plan(rules, use, cuts)
                if plan.asked in asked:
                    continue
                if self.problem.expired() and self.made:
                    return
                self.problem.spend(SIMULATED)
                if plan.placed.pipe is not None:
                    _ = self.problem.value(plan), plan.peak
                    self.made.append(plan)
            except DiagnosticError:
                continue

    def _computing(self, general: Rules) -> float:
        """The seconds of all operators at least; settings may change what is computed where."""
        if self.problem.execution.settings or self.problem.objective != "time":
            return 0.0
        return self.problem.computing(general)

    def _plan(self, rules: Rules, use: ScheduleUse, cuts: tuple[StageStart, ...]) -> Candidate:
        """Rules in stages, placed by the first walk. Raises what is wrong with the schedule."""
        base = self.problem.execution
        execution = Execution(use, base.cuts or self._begun(use, cuts), base.settings)
        return self.problem.plan(rules, self.problem.policies[0], execution)

    def _begun(self, use: ScheduleUse, cuts: tuple[StageStart, ...]) -> tuple[StageStart, ...]:
        """Where the stages of a network begin: as they do, or evenly where a schedule has others.

        Raises what is wrong with the schedule. Where there are too few places, it has no stages.
        """
        if self.places is None:
            return ()
        goal = self.problem.program.goal
        micro = use.micro or (goal.optimizer.accumulate if goal else 1)
        stages = use.verified(self.problem.mesh.size(self.axis), micro).schedule.stages
        if len(cuts) == stages - 1:
            return cuts
        return self.places.cuts(self.places.even(stages) or (), self.axis)

    def _uses(self, rules: Rules) -> list[ScheduleUse]:
        """The numbers of micro-batches that a batch may be cut into, if it does not accumulate."""
        program, axis = self.problem.program, self.axis
        assert program.goal is not None
        if self.problem.execution.schedule is not None:
            return [self.problem.execution.schedule]
        span = Span(Source("--pipeline", axis), 0, len(axis))
        if program.goal.optimizer.accumulate > 1:
            return [ScheduleUse(FIRST, (), None, span)]
        batch = next(iter(sample_dims(program)), None)
        if batch is None:
            return []
        ways = self.problem.mesh.size(*(a for r in rules if r.dim == batch.name for a in r.axes))
        wanted = [times * self.problem.mesh.size(axis) for times in MICRO]
        most = min(batch.size, 2 * max(wanted))
        fitting = [n for n in range(1, most + 1) if batch.size % (n * ways) == 0]
        nearest = (min(fitting, key=lambda n: abs(math.log(n / w))) for w in wanted if fitting)
        return [ScheduleUse(FIRST, (batch.name,), n, span) for n in dict.fromkeys(nearest)]
