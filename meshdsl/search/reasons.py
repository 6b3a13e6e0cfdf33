"""Why a plan has each of its rules: what leaving it out would cost, all others kept."""

from __future__ import annotations

import math

from meshdsl.diagnostics import DiagnosticError
from meshdsl.records import dataclass
from meshdsl.search.candidate import Candidate, Rules, SearchRule
from meshdsl.search.problem import SearchResult


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule of a plan, and the plan `without` it; None where that cannot be placed."""

    rule: SearchRule
    plan: Candidate
    without: Candidate | None

    @property
    def saved(self) -> dict[str, float]:
        """What the rule saves: bytes sent and held, FLOPs, and seconds where a cluster is named."""
        return {} if self.without is None else saved(self.plan, self.without)


def saved(plan: Candidate, other: Candidate) -> dict[str, float]:
    """What a plan saves beside another one."""
    amounts: dict[str, float] = {"bytes": other.sent - plan.sent}
    amounts |= {"memory": other.peak - plan.peak, "flops": other.flops - plan.flops}
    if plan.timing is not None:
        amounts["seconds"] = other.seconds - plan.seconds
    return amounts


def reasons(found: SearchResult, plan: Candidate) -> tuple[Reason, ...]:
    """The reason of every rule that was not fixed, in order."""
    problem = found.problem
    free = [rule for rule in plan.rules if rule not in problem.fixed]
    for rule in free if plan.execution is problem.execution else ():
        problem.ask(_less(plan, rule), math.inf, None, math.inf)
    return tuple(Reason(rule, plan, without(found, plan, rule)) for rule in free)


def without(found: SearchResult, plan: Candidate, rule: SearchRule) -> Candidate | None:
    """The better walk of a plan less one rule; where none fits, the one that needs less memory."""
    problem = found.problem
    evaluated = {(p.asked, p.policy): p for p in found.every}
    plans = problem.executed(_less(plan, rule), plan.execution)
    alternatives = [evaluated.get((p.asked, p.policy), p) for p in plans]
    try:
        for other in alternatives:
            problem.within(other, math.inf, None)
        best: Candidate | None = None
        for other in alternatives:
            best = other if problem.is_better(other, best) else best
        return best or min(alternatives, key=lambda p: p.peak)
    except DiagnosticError:
        return None


def _less(plan: Candidate, rule: SearchRule) -> Rules:
    return tuple(other for other in plan.rules if other is not rule)
