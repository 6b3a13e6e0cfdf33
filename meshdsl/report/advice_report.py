"""What `advise` shows: how to divide a program over devices, question by question, with figures.

`advised` gives the facts as JSON version 1; `shown` is the document for people, made of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TypedDict

from meshdsl.pipeline import Compilation
from meshdsl.placed.layout import rule_text
from meshdsl.report.document import (
    Block,
    Document,
    Gap,
    Grid,
    Listing,
    Paragraph,
    Piece,
    counted,
    duration,
    human,
    line,
    mesh_text,
)
from meshdsl.report.predicted_times import BOUNDS, times
from meshdsl.report.search_result import told
from meshdsl.search.advice import KINDS, Advice, Baseline, Parallelism, within_machine
from meshdsl.search.candidate import Candidate
from meshdsl.search.reasons import reasons

VERSION = 1
NAME = "advised"
"""The layout that the last command writes into the file."""


class WayFacts(TypedDict):
    """One kind of parallelism: its dims, the axes, how many ways, and whether inside a machine."""

    kind: str
    dims: list[str]
    axes: list[str]
    ways: int
    inside_machine: bool


class QuestionFacts(TypedDict):
    """A question of the decision, its answer in a word, and what the answer rests on."""

    question: str
    answer: str
    because: str


class AdvicePlan(TypedDict):
    """A plan by name, per device; `fits` within the memory limit."""

    name: str
    rules: list[str]
    schedule: str | None
    reduce: str
    step_seconds: float
    memory: int
    wire_bytes: int
    fits: bool


class AdviceFacts(TypedDict):
    """`advise`: the plan in words, the questions that lead to it, and other plans beside it."""

    version: int
    program: str
    file: str
    mesh: dict[str, int]
    devices: int
    cluster: str
    memory_limit: int
    advice: str
    ways: list[WayFacts]
    questions: list[QuestionFacts]
    plans: list[AdvicePlan]
    bounds: dict[str, float]
    waiting: float
    proven: bool
    commands: list[str]


# --- facts ---------------------------------------------------------------------------------------


def advised(advice: Advice, file: str, options: Sequence[str] = ()) -> AdviceFacts:
    """The advice. `options` are words of the command line that its commands need, too."""
    problem, best = advice.problem, advice.best
    timing = problem.timing
    assert timing is not None, "advice is by time"
    assert problem.request.memory is not None, "devices have a memory"
    size, time = timing.cluster.levels[0].size, times(best.device, timing)
    ways: list[WayFacts] = [
        {
            "kind": way.kind,
            "dims": [*way.dims],
            "axes": [*way.axes],
            "ways": way.ways,
            "inside_machine": within_machine(way, best.mesh, size),
        }
        for way in advice.ways
    ]
    return {
        "version": VERSION,
        "program": problem.program.name,
        "file": file,
        "mesh": dict(best.mesh.declared),
        "devices": best.mesh.devices,
        "cluster": timing.cluster.name,
        "memory_limit": problem.request.memory,
        "advice": _advice(ways),
        "ways": ways,
        "questions": [*_questions(advice, ways)],
        "plans": [*_plans(advice)],
        "bounds": time["by_bound"],
        "waiting": time["waiting"],
        "proven": advice.found.proven,
        "commands": _commands(advice, file, options),
    }


def _advice(ways: Sequence[WayFacts]) -> str:
    """The advice in one sentence."""
    if not ways:
        return "one device does it as well: split nothing"
    return " + ".join(map(_words, ways))


def _words(way: WayFacts) -> str:
    """`tensor parallelism, 8 ways over tp within a machine (heads, hidden)`."""
    where = "within a machine" if way["inside_machine"] else "across machines"
    dims = f" ({', '.join(way['dims'])})" if way["dims"] else ""
    return f"{KINDS[way['kind']]}, {way['ways']} ways over {', '.join(way['axes'])} {where}{dims}"


def _plans(advice: Advice) -> Iterator[AdvicePlan]:
    """The ordinary steps, the plan that is advised, and the next best."""
    for step in advice.steps:
        yield _plan(step.name, step.plan, step.fits)
    yield _plan("advised", advice.best, True)
    for plan in advice.found.plans[1:2]:
        yield _plan("next best", plan, True)


def _plan(name: str, plan: Candidate, fits: bool) -> AdvicePlan:
    return {
        "name": name,
        "rules": _rules(plan),
        "schedule": str(plan.schedule) if plan.schedule else None,
        "reduce": plan.policy,
        "step_seconds": plan.seconds,
        "memory": plan.peak,
        "wire_bytes": plan.sent,
        "fits": fits,
    }


def _rules(plan: Candidate) -> list[str]:
    """The rules as a layout has them."""
    rules = [rule_text(r.selector, r.dim, plan.mesh.written(r.axes)) for r in plan.rules]
    return [*rules, *map(str, (*plan.cuts, *plan.execution.settings))]


def same_program(made: Compilation) -> list[str]:
    """The options of commands for the program of a compilation: which one, its dtype, its sizes."""
    options, several = made.options, len(made.declarations.programs) > 1
    words = ["--program", made.named.name] if several else []
    words += ["--dtype", options.dtype] if options.dtype else []
    sizes = [f"{dim}={size}" for dim, size in options.set_dims.items()]
    return [*words, *(["--set", *sizes] if sizes else [])]


def _commands(advice: Advice, file: str, options: Sequence[str]) -> list[str]:
    """Commands that show the plan, and that write it into the file."""
    problem, best = advice.problem, advice.best
    assert problem.timing is not None, "advice is by time"
    mesh = ["--mesh", str(best.mesh)] if best.mesh.axes else []
    layout = ["--layout", ", ".join(_rules(best)), "--reduce", best.policy]
    layout += ["--schedule", str(best.schedule)] if best.schedule else []
    named = "--cluster" in options
    cluster = [*([] if named else ["--cluster", problem.timing.cluster.name]), *options]
    limit = ["--memory", str(problem.request.memory)]
    if problem.request.budget is not None:
        limit += ["--budget", f"{problem.request.budget:g}s"]
    axis = problem.request.pipeline
    stages = ["--pipeline", axis] if axis in best.mesh.names else []
    return [
        shlex.join(["meshdsl", "explain", file, *mesh, *layout, *cluster]),
        shlex.join(["meshdsl", "search", file, *mesh, *cluster, *stages, *limit, "--write", NAME]),
    ]


# --- questions -----------------------------------------------------------------------------------


def _questions(advice: Advice, ways: Sequence[WayFacts]) -> Iterator[QuestionFacts]:
    """The questions in the order in which they are asked."""
    steps = {step.name: step for step in advice.steps}
    limit = human(advice.problem.request.memory or 0)
    alone = steps.get("one device")
    if alone is not None:
        held = _need(alone, limit)
        yield _question("Does it fit on one device?", "yes" if alone.fits else "no", held)
    yield _batch(advice)
    data = steps.get(KINDS["data"])
    if data is not None:
        held = _need(data, limit)
        yield _question("Does it fit with the batch split?", "yes" if data.fits else "no", held)
    yield _question("Split what is stored (ZeRO)?", *_used(advice, ways, "zero1", "zero2", "zero3"))
    for kind, question in (
        ("tensor", "Split matrices (tensor parallelism)?"),
        ("sequence", "Split positions (sequence, context)?"),
        ("experts", "Split experts?"),
        ("pipeline", "Split layers (pipeline stages)?"),
    ):
        yield _question(question, *_used(advice, ways, kind))


def _need(step: Baseline, limit: str) -> str:
    """The memory and the time of a plan, beside the memory that a device has."""
    plan = step.plan
    return f"needs {human(plan.peak)}, a device has {limit}; {duration(plan.seconds)} a step"


PIPELINES = "`--pipeline AXIS` searches stages on an axis, too"


def _question(question: str, answer: str, because: str) -> QuestionFacts:
    return {"question": question, "answer": answer, "because": because}


def _batch(advice: Advice) -> QuestionFacts:
    """Whether each device may have samples of its own."""
    question, sizes = "Is there batch for all devices?", _sizes(advice)
    if not advice.roles.batch:
        return _question(question, "no", "no dim is of independent samples")
    count = max(sizes[dim] for dim in advice.roles.batch)
    devices = advice.best.mesh.devices
    each = f"{counted(count, 'sample')} over {counted(devices, 'device')}"
    if count < devices:
        return _question(question, "no", each)
    return _question(question, "yes", f"{each}: {-(-count // devices):,} each")


def _sizes(advice: Advice) -> dict[str, int]:
    return {d.name: d.size for v in advice.problem.program.inputs for d in v.type.dims}


def _used(advice: Advice, ways: Sequence[WayFacts], *kinds: str) -> tuple[str, str]:
    """Whether the plan does one of these, and what it would be otherwise."""
    used = [way for way in ways if way["kind"] in kinds]
    if used:
        return "yes", f"{' + '.join(map(_words, used))}; {_saving(advice, kinds)}"
    if kinds == ("pipeline",) and advice.loops and advice.problem.request.pipeline is None:
        return "not asked", PIPELINES
    return "no", _unused(advice, kinds)


def _saving(advice: Advice, kinds: Sequence[str]) -> str:
    """What the first rule of these kinds is good for; without one, the best plan without them."""
    rules = {rule: way for way in advice.has(*kinds) for rule in _of(advice, way)}
    for reason in reasons(advice.found, advice.best):
        if reason.rule in rules:
            return f"`{reason.rule}` {told(reason, advice.problem) or 'changes nothing alone'}"
    return "as asked"


def _of(advice: Advice, way: Parallelism) -> Iterator[object]:
    return (
        rule
        for rule in advice.best.rules
        if rule.dim in way.dims and bool(rule.selector) == way.kind.startswith("zero")
    )


def _unused(advice: Advice, kinds: Sequence[str]) -> str:
    """Why a plan does nothing of some kinds."""
    dims = {
        "tensor": advice.roles.learned,
        "sequence": advice.roles.sequence,
        "experts": advice.roles.experts,
        "pipeline": advice.loops,
    }
    if all(kind in dims and not dims[kind] for kind in kinds):
        return "the program has no such dim"
    other = advice.with_(*kinds)
    if other is None:
        return "no layout with it was evaluated that fits: bounds rule them out"
    more = other.seconds / advice.best.seconds - 1
    longer = f"{100 * more:.2g} % longer" if more >= 0.0005 else "no less time"
    kinds_of = dict.fromkeys(way.kind for way in advice.ways_of(other))
    does = " + ".join(KINDS[kind] for kind in kinds_of)
    return f"the best with it takes {longer}: {duration(other.seconds)} by {does}"


# --- the document --------------------------------------------------------------------------------


def shown(facts: AdviceFacts) -> Document:
    """The advice for people."""
    return tuple(_blocks(facts))


def _blocks(facts: AdviceFacts) -> Iterator[Block]:
    plans = {plan["name"]: plan for plan in facts["plans"]}
    best = plans["advised"]
    devices = counted(facts["devices"], "device")
    axes = mesh_text(facts["mesh"])
    where = f"mesh {axes} ({devices})" if axes else devices
    head = f"{facts['program']} on {where} of {facts['cluster']}: {facts['advice']}."
    yield Paragraph((Piece(head, "strong"),))
    yield line(
        f"A step takes {duration(best['step_seconds'])}. Each device stores "
        f"{human(best['memory'])} of its {human(facts['memory_limit'])}, and sends "
        f"{human(best['wire_bytes'])}. {_proof(facts)} {_bounded(facts)}"
    )
    yield Gap()
    rows = tuple((q["question"], q["answer"], q["because"]) for q in facts["questions"])
    yield Grid("", ("question", "", "because"), rows)
    yield Gap()
    yield Grid("", ("plan", "step", "memory", "sent", "layout"), tuple(map(_row, facts["plans"])))
    yield Gap()
    yield Listing.of("\n".join(facts["commands"]))


def _proof(facts: AdviceFacts) -> str:
    if facts["proven"]:
        return "No other layout that was searched is faster."
    return "It is the best found, not proven to be the fastest."


def _bounded(facts: AdviceFacts) -> str:
    """What takes most of the time, of computing and of sending."""
    bounds = facts["bounds"]
    if not bounds:
        return ""
    most, total = max(bounds, key=lambda bound: bounds[bound]), sum(bounds.values())
    said = f"Most of the work is {BOUNDS[most]} ({100 * bounds[most] / total:.0f} %)"
    step = next(p["step_seconds"] for p in facts["plans"] if p["name"] == "advised")
    return f"{said}; {100 * facts['waiting'] / step:.0f} % of the step waits for what is sent."


def _row(plan: AdvicePlan) -> tuple[str, ...]:
    fits = "" if plan["fits"] else ", does not fit"
    used = f" with {plan['schedule']}" if plan["schedule"] else ""
    figures = (duration(plan["step_seconds"]), human(plan["memory"]) + fits)
    rules = ", ".join(plan["rules"]) or "nothing split"
    return (plan["name"], *figures, human(plan["wire_bytes"]), rules + used)
