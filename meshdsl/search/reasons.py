"""Why a plan has each of its rules: what leaving it out would cost, all others kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshdsl.diagnostics import DiagnosticError
from meshdsl.search.plan import Plan, Rule, Rules
from meshdsl.search.problem import Found


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule of a plan, and the plan `without` it; None where that cannot be placed."""

    rule: Rule
    plan: Plan
    without: Plan | None

    @property
    def saved(self) -> dict[str, float]:
        """What the rule saves: bytes sent and held, FLOPs, and seconds where a cluster is named."""
        if self.without is None:
            return {}
        one, other = self.plan, self.without
        found: dict[str, float] = {"bytes": other.sent - one.sent}
        found |= {"memory": other.peak - one.peak, "flops": other.flops - one.flops}
        if one.timing is not None:
            found["seconds"] = other.seconds - one.seconds
        return found


def reasons(found: Found, plan: Plan) -> tuple[Reason, ...]:
    """The reason of every rule that was not fixed, in order."""
    problem = found.problem
    free = [rule for rule in plan.rules if rule not in problem.fixed]
    for rule in free if plan.schedule is None else ():
        problem.ask(_less(plan, rule), math.inf, None, math.inf)
    return tuple(Reason(rule, plan, without(found, plan, rule)) for rule in free)


def without(found: Found, plan: Plan, rule: Rule) -> Plan | None:
    """The better walk of a plan less one rule; where none fits, the one that needs less memory."""
    problem = found.problem
    known = {(p.asked, p.policy): p for p in found.every}
    plans = problem.as_staged(_less(plan, rule), plan)
    made = [known.get((p.asked, p.policy), p) for p in plans]
    try:
        for other in made:
            problem.within(other, math.inf, None)
        fitting = [p for p in made if problem.fits(p)]
        return min(fitting, key=problem.key) if fitting else min(made, key=lambda p: p.peak)
    except DiagnosticError:
        return None


def _less(plan: Plan, rule: Rule) -> Rules:
    return tuple(other for other in plan.rules if other is not rule)
