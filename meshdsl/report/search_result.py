"""What `search` shows: the layout with its reasons, the certificate, the plans that come next.

`searched` gives the facts as JSON version 1; `shown` is the document for people.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from meshdsl.placed.placements import Mesh
from meshdsl.report.document import (
    Block,
    Document,
    Gap,
    Grid,
    Listing,
    Paragraph,
    Piece,
    counted,
    human,
    line,
    scaled,
)
from meshdsl.report.schema import (
    ChangeFacts,
    MeshFacts,
    Saves,
    SavingRule,
    SearchedPlan,
    SearchFacts,
)
from meshdsl.search.budget import PER_SECOND, operators
from meshdsl.search.candidate import NAME, Candidate, SearchRule
from meshdsl.search.layout_text import block, written
from meshdsl.search.pareto_front import front
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.reasons import Reason, reasons
from meshdsl.search.warm_start import Change, changes, started

VERSION = 1


# --- facts ---------------------------------------------------------------------------------------


def searched(found: SearchResult, file: str, method: str) -> SearchFacts:
    """The result of a search. Bytes and FLOPs are per device."""
    problem = found.problem
    count = found.count
    facts: SearchFacts = {
        "version": VERSION,
        "program": problem.program.name,
        "file": file,
        "mesh": dict(problem.mesh.declared),
        "cluster": problem.timing.cluster.name if problem.timing else None,
        "objective": problem.objective,
        "memory_limit": problem.request.memory,
        "method": method,
        "space": {
            "level": count.level,
            "valid": count.valid,
            "evaluated": count.evaluated,
            "bounded": count.bounded,
            "symmetry": count.symmetry,
            "steps": count.steps,
            "pipelines": count.pipelines,
        },
        "plans": [_plan(plan, found) for plan in found.plans],
        "bound": {problem.objective: found.bound},
        "proven": found.proven,
    }
    if problem.request.budget is not None:
        most = int(operators(problem.request.budget))
        facts["budget"] = {"operators": most, "is_over": problem.budget.is_over}
    if problem.request.front:
        facts["front"] = [_plan(p, found) for p in _front(found)]
    if found.others:
        facts["meshes"] = list(map(_mesh, found.others))
    if found.certificate is not None and found.plans:
        gap = found.certificate.gap(problem.value(found.plans[0]))
        least = found.certificate.least
        facts["certificate"] = {"space": "L3", problem.objective: least, "gap": gap}
    if problem.start is not None and found.plans:
        changed = [*map(_change, changes(found))]
        facts["from"] = {**_plan(started(problem), found), "changes": changed}
    return facts


def _change(change: Change) -> ChangeFacts:
    return {
        "before": str(change.before) if change.before else None,
        "after": str(change.after) if change.after else None,
        "saves": change.saved,
    }


def _mesh(found: SearchResult) -> MeshFacts:
    """The best plan found on another mesh; None where none fits, or none could be better."""
    best = _plan(found.plans[0], found) if found.plans else None
    bound = {found.problem.objective: found.bound}
    mesh = dict(found.problem.mesh.declared)
    return {"mesh": mesh, "best": best, "bound": bound, "proven": found.proven}


def _front(found: SearchResult) -> tuple[Candidate, ...]:
    return front(found.problem, found.every)


def _rule(rule: SearchRule, saves: Saves, mesh: Mesh) -> SavingRule:
    selector, axes = ".".join(rule.selector), list(mesh.written(rule.axes))
    return {"selector": selector, "dim": rule.dim, "axes": axes, "saves": saves}


def _plan(plan: Candidate, found: SearchResult) -> SearchedPlan:
    is_best = plan in found.plans[:1]
    saved = {r.rule: r.saved for r in reasons(found, plan)} if is_best else {}
    return {
        "rules": [_rule(rule, saved.get(rule, {}), found.problem.mesh) for rule in plan.rules],
        "cuts": [str(cut) for cut in plan.cuts],
        "settings": [str(setting) for setting in plan.execution.settings],
        "schedule": str(plan.schedule) if plan.schedule else None,
        "reduce": plan.policy,
        "step_seconds": plan.seconds if plan.timing else None,
        "wire_bytes": plan.sent,
        "memory": plan.memory,
        "flops_per_device": plan.compiled_flops,
    }


# --- reasons -------------------------------------------------------------------------------------


def told(reason: Reason, problem: Problem) -> str:
    """What leaving a rule out would cost, in words: what weighs most comes first."""
    return compared(reason.plan, reason.without, problem)


def compared(plan: Candidate, other: Candidate | None, problem: Problem) -> str:
    """What a plan saves beside another one, in words."""
    if other is None:
        return "without it the others cannot be followed"
    if not problem.fits(other):
        return f"without it {human(other.peak)}: does not fit"
    work = other.flops / max(plan.flops, 1)
    if plan.timing is None and work > 1 + problem.request.replicated:
        return f"without it {work:.2g}x the work"
    words = []
    if plan.timing is not None:
        words.append(_saved(other.seconds - plan.seconds, duration))
    words.append(_saved(other.sent - plan.sent, lambda n: f"{human(int(n))} sent"))
    words.append(_saved(other.peak - plan.peak, lambda n: f"{human(int(n))} held"))
    return ", ".join(filter(None, words))


def _saved(amount: float, shown: Callable[[float], str]) -> str:
    if not amount:
        return ""
    return f"{'saves' if amount > 0 else 'costs'} {shown(abs(amount))}"


def duration(seconds: float) -> str:
    """Seconds to three digits in a suitable unit: `412 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def block_of(found: SearchResult, plan: Candidate, name: str = NAME, stamp: str = "") -> str:
    """The layout block of a plan, with a reason behind each rule; `stamp`: of the program."""
    problem = found.problem
    said = {str(r.rule): told(r, problem) for r in reasons(found, plan)}
    fixed = {str(rule): "as asked" for rule in problem.fixed}
    head = _head(found) + (f"; program {stamp}" if stamp else "")
    return block(name, head, plan, fixed | said)


def next_block_of(found: SearchResult, plan: Candidate, name: str) -> str:
    """The layout block of a plan that comes after the best; reasons would have to be searched."""
    return block(name, _head(found, "next best"), plan, {})


def _head(found: SearchResult, proof: str = "") -> str:
    problem = found.problem
    where = f"--mesh {shlex.quote(str(problem.mesh))}"
    if problem.timing is not None:
        where += f" --cluster {problem.timing.cluster.name}"
    if problem.request.fix is not None:
        where += f" --fix {shlex.quote(' '.join(problem.request.fix.split()))}"
    proof = proof or ("proven best" if found.proven else "best found")
    least = f"{proof} by {problem.objective}"
    return f"meshdsl search {problem.program.name} {where}: {least}"


# --- the document --------------------------------------------------------------------------------


def shown(found: SearchResult) -> Document:
    """The result for people; the first paragraphs are the certificate."""
    return tuple(_blocks(found))


UNDER_OPTIMAL = "`explain` places with `optimal` reduction, which may send or hold less."
"""Layouts are compared as walks place them; `explain` may place them with less."""


def _too_large(found: SearchResult) -> str:
    """Whether the best plan needs more memory than a device of the cluster has."""
    problem, best = found.problem, found.plans[0]
    if problem.timing is None or problem.request.memory is not None:
        return ""
    cluster = problem.timing.cluster
    limit = int(cluster.device.memory)
    if best.peak <= limit:
        return ""
    return (
        f"IT DOES NOT FIT: a device of {cluster.name} has {human(limit)}. "
        f"`--memory {limit / 1e9:g}GB` searches for what does."
    )


def _blocks(found: SearchResult) -> Iterator[Block]:
    yield Paragraph((Piece(scope(found), "strong"),))
    best = found.plans[0]
    yield line(f"{best_of(found)} {UNDER_OPTIMAL}")
    if too_large := _too_large(found):
        yield line(too_large, "strong")
    if found.problem.request.budget is not None:
        yield line(_budget(found))
    if found.problem.request.certificate:
        yield line(_certified(found))
    if found.problem.start is not None:
        yield line(f"The layout to begin from: {figures(started(found.problem))}.")
    yield Gap()
    mesh = f"{written(best.mesh)}\n\n" if found.others else ""
    yield Listing.of(mesh + block_of(found, best))
    yield Gap()
    if found.problem.start is not None:
        yield _changed(found)
        yield Gap()
    if found.problem.request.front:
        yield _listed("memory front", _front(found), found)
    elif found.plans[1:]:
        yield _listed("next best", found.plans[1:], found)
    if found.others:
        yield Gap()
        yield _meshes(found)


def best_of(found: SearchResult) -> str:
    """The figures of the best plan, and what is proven of it."""
    objective = found.problem.objective
    return f"Best by {objective}: {figures(found.plans[0])}, {_proof(found)}."


def scope(found: SearchResult) -> str:
    """How many layouts were searched, and how each was judged."""
    problem, count = found.problem, found.count
    cluster = (
        f" ({problem.mesh.devices:,} x {problem.timing.cluster.name})" if problem.timing else ""
    )
    left = count.valid - count.evaluated - count.bounded
    words = [f"{count.evaluated:,} evaluated"]
    words += [f"{count.bounded:,} ruled out by bounds"] if count.bounded else []
    if left or count.cut:
        words.append(f"{'others' if count.cut else f'{left:,}'} not evaluated")
    of = "tensors" if count.level == "L3" else "functions and parameters"
    words += [f"{count.steps:,} with rules for {of}"] if count.steps else []
    words += [f"{counted(count.pipelines, 'pipeline')} evaluated"] if count.pipelines else []
    mesh = str(problem.mesh) or "one device"
    layouts = ("at least " if count.cut else "") + counted(count.valid, "layout")
    return f"{problem.program.name} on {mesh}{cluster}: {layouts}: {', '.join(words)}"


def _proof(found: SearchResult) -> str:
    if found.proven:
        walks = " or ".join(found.problem.policies)
        return f"proven the best of this space under {walks} reduction"
    if found.count.further:
        return f"not proven: {found.count.further}"
    if found.count.pipelines:
        return "not proven: pipelines are searched step by step"
    if found.count.steps and not found.problem.expired():
        return "not proven, but adding or removing any one rule is worse"
    return "not proven: some were not evaluated"


def _budget(found: SearchResult) -> str:
    """What the budget was, and whether all of it was needed."""
    most = operators(found.problem.request.budget)
    counts = f"The budget is {most:,.0f} placed operators, {PER_SECOND:,} per second"
    if found.problem.budget.is_over:
        return f"{counts}: it ended before all were tried."
    return f"{counts}: it was enough."


CLOSE, FAR = 1e-3, 0.99
"""Parts of a value: up to one a bound is said to be reached, from the other on it says nothing."""


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %" if part < 0.1 else f"{100 * part:.0f} %"


def _certified(found: SearchResult) -> str:
    """What is known of plans that decide for every tensor alone."""
    problem, certificate = found.problem, found.certificate
    if certificate is None:
        return "There are too many per-tensor plans to bound here."
    gap = certificate.gap(problem.value(found.plans[0]))
    timed = problem.objective == "time"
    plans = "No per-tensor plan on this mesh" if found.others else "No per-tensor plan"
    if gap < CLOSE:
        return f"{plans} {'is faster' if timed else 'sends less'}."
    if gap > FAR:
        return "No useful bound on per-tensor plans: it is far below."
    least = duration(certificate.least) if timed else human(int(certificate.least))
    verb = "is faster than" if timed else "sends less than"
    return f"{plans} {verb} {least}: at most {_percent(gap)} could still be saved."


def figures(plan: Candidate) -> str:
    """`3.61 MiB sent, 20.6 MiB held, 1.07 GFLOP a device with deferred reduction`."""
    seconds = f"{duration(plan.seconds)} a step, " if plan.timing else ""
    held = f"{human(plan.sent)} sent, {human(plan.peak)} held, {scaled(plan.compiled_flops)}"
    return f"{seconds}{held} a device (--reduce {plan.policy})"


def _meshes(found: SearchResult) -> Grid:
    """The best plan on each of the other meshes."""
    timed = found.problem.timing is not None
    # Each was searched as far as it could be better: its own search may find a better one.
    head = ("other meshes", *(("time, at most",) if timed else ()), "sent", "held", "layout")
    rows = []
    for other in found.others:
        if not other.plans:
            why = "nothing is better" if other.count.bounded else "nothing fits"
            rows.append((str(other.problem.mesh), *[""] * (len(head) - 2), why))
            continue
        best = other.plans[0]
        seconds = (duration(best.seconds),) if timed else ()
        held = (human(best.sent), human(best.peak), str(best))
        rows.append((str(other.problem.mesh), *seconds, *held))
    return Grid("", head, tuple(rows))


def _changed(found: SearchResult) -> Grid:
    """What is other than in the layout to begin from, and what each change saves."""
    rows = [
        (str(change), compared(change.plan, change.than, found.problem) or "the same")
        for change in changes(found)
    ]
    head = ("changed", "each after those above") if rows else ("nothing is changed",)
    return Grid("", head, tuple(rows))


def _listed(title: str, plans: tuple[Candidate, ...], found: SearchResult) -> Grid:
    timed = found.problem.timing is not None
    rows = ((str(plan), *columns_of(plan)) for plan in plans)
    return Grid("", (title, *columns(timed)), tuple(rows))


def columns(timed: bool) -> tuple[str, ...]:
    """The heads of the figures of plans in a table."""
    return (*(("time",) if timed else ()), "sent", "held", "work", "reduce")


def columns_of(plan: Candidate) -> tuple[str | Piece, ...]:
    """The figures of a plan below these heads, each per device."""
    return (
        *((duration(plan.seconds),) if plan.timing else ()),
        Piece(human(plan.sent), "sent"),
        human(plan.peak),
        scaled(plan.compiled_flops),
        plan.policy,
    )
