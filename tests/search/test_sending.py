"""A walk that is ended early would go beyond the limit: what it sends by then is a bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import POLICIES, Candidate, SearchRule
from meshdsl.search.lower_bounds import Sent
from meshdsl.search.problem import Problem
from meshdsl.search.storage_rules import stored
from tests.covering import in_turn

from .problems import LINE, UNEQUAL, problem

STEP = 5
"""One layout in so many is placed."""

OBJECTIVES = [("bytes", ""), ("time", "h100"), ("time", "cpu")]


def plans(asked: Problem) -> list[Candidate]:
    """Layouts of general rules, some with rules for storage, by both walks."""
    about = (asked.program, asked.mesh)
    every = [
        (*rules, *more)
        for rules in asked.space.every()
        for more in stored(*about, rules, asked.space.exchanged)
    ]
    return [asked.plan(rules, policy) for rules in every[::STEP] for policy in POLICIES]


@in_turn(by=OBJECTIVES, case=[("lookup", LINE), ("net", UNEQUAL)])
def test_a_walk_is_ended_for_a_reason(by: tuple[str, str], case: tuple[str, Mesh]) -> None:
    objective, cluster = by
    asked, ended, seen = problem(*case, objective, cluster), 0, []
    for plan in plans(asked):
        computing = asked.computing(plan.rules) if objective == "time" else None
        try:
            value = asked.value(plan)
        except DiagnosticError:
            continue
        assert asked.at_least(plan) <= value
        watched = replace(plan)  # not placed before
        assert watched.within(value, computing) is None
        if "_sent" in watched.__dict__:
            seen.append([sent_by(each) for each in (watched, plan)])
        beyond = replace(plan).within(0.4 * value, computing)
        assert beyond is None or beyond.bytes <= plan.sent
        ended += beyond is not None
    # In time collectives as small as these count for nothing.
    assert ended or objective == "time"
    # What a walk has seen is what a program that it has placed sends.
    assert seen
    assert all(by_walk == by_program for by_walk, by_program in seen)


def sent_by(plan: Candidate) -> list[object]:
    """What is known of what a plan sends, and takes at least."""
    sent = plan.known["_sent"]
    assert isinstance(sent, Sent)
    return [sent.bytes, sent.wire, sent.busy, sent.whole, sent.kept]


ODD = """
dim batch = 10, io = 7, hidden = 9, out = 5
program odd(x[batch, io], target[batch, out]) {
  param w[io, hidden]
  param v[hidden, out]
  h = tanh(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, out])
  loss = mean((y - target)^2)
  return loss
  minimize loss with adam(lr=0.1)
}
"""
GRID = Mesh("grid", (("x", 3), ("y", 2), ("z", 2)))


def test_bounds_hold_where_devices_send_unlike_numbers_of_bytes() -> None:
    """Blocks of several sizes, and permutes: another device may send most in each collective."""
    program = Compilation(Source("odd.mdsl", ODD), Options()).named
    ways = [(), ("x",), ("y",), ("z",), ("y", "z"), ("x", "z")]
    found = []
    for axes in itertools.product(ways, repeat=4):
        pairs = zip(("batch", "hidden", "io"), axes, strict=False)
        rules = [SearchRule(dim, over) for dim, over in pairs if over]
        rules += [SearchRule("hidden", axes[3], ("state",))] if axes[3] else []
        found.append(Candidate(program, GRID, tuple(rules), "deferred"))
    unlike = 0
    for plan in found[::STEP]:
        try:
            sent = plan.sent
        except DiagnosticError:
            continue
        assert plan.sent_at_least <= sent <= plan.sent_at_most
        unlike += sent < plan.sent_at_most
    assert unlike
