"""When to reduce: `optimal` never sends more than the other policies, and runs like them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings

from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.place import POLICIES, WALKS
from meshdsl.placed.place import cost as objective
from tests.programs.harness import REFUSALS, Case, compiled, explained, run_case
from tests.programs.strategy import cases

CASES = int(os.environ.get("MESHDSL_CASES", "15"))


def sent(case: Case, policy: str) -> int:
    """Wire bytes per device under one policy, where only they count."""
    only_bytes = replace(case, reduce=policy, message_bytes=0)
    total: int = explained(only_bytes)["totals"]["wire_bytes"]
    return total


def cost(case: Case, policy: str) -> int:
    """The objective of `optimal`: bytes, plus a price for each collective."""
    placed = compiled(replace(case, reduce=policy)).placed
    return objective(placed, case.options.search().price)[0]


def refusal(case: Case, policy: str) -> str:
    """The code with which a policy refuses a layout; empty where it is accepted."""
    try:
        compiled(replace(case, reduce=policy)).checked()
    except DiagnosticError as error:
        return error.diagnostics[0].code
    return ""


def agree(case: Case) -> bool:
    """Whether all policies accept a layout; fails where one does, and another one does not."""
    found = {policy: refusal(case, policy) for policy in POLICIES}
    assert len({*found.values()}) == 1, found
    code = found["optimal"]
    assert code in ("", *REFUSALS)
    return not code


def check(case: Case) -> None:
    """`optimal` costs the least of all, in bytes alone too; all policies run right."""
    if not agree(case):
        return
    for figure in (sent, cost):
        others = {policy: figure(case, policy) for policy in WALKS}
        assert figure(case, "optimal") <= min(others.values()), others
    for policy in POLICIES:
        run_case(replace(case, reduce=policy))


UNLIKE = """
dim a = 2, b = 2, c = 2, d = 2, e = 2, wide = 4, g = 4
program p(u[e, d, a], v[d, b]) {
  t[a@x, c] = (v[d -> a])[b -> c]
  kept = where(u < t, u, u)
  small[a, c] = t < 1.0
  joined = concat[(e, e) -> wide](pad[d -> g](u, 0, 2), pad[d -> g](u, 0, 2))
  return kept, small, joined
}
"""


def test_optimal_is_never_worse_and_all_policies_run():
    test = settings(max_examples=CASES, suppress_health_check=list(HealthCheck), deadline=None)(
        given(case=cases())(lambda case: check(case))
    )
    if "MESHDSL_CASES" not in os.environ:
        test = seed(0)(test)
    test()


def test_halos_of_different_devices_count_as_what_the_busiest_one_sends() -> None:
    """One device sends the halo of one operand, the other one that of the other operand."""
    check(Case(UNLIKE, mesh="x:2", layout="{ e -> x, wide -> x, b -> x }"))


CHAIN = """
dim m = 256, a = 64, n = {n}, k = {k}
mesh four = {{ x: 4 }}
layout split {{ a -> x }}
program p(u[m, a], v[a, n], w[n, k]) {{
  t = einsum(u, v -> [m, n])
  y = einsum(t, w -> [m, k])
  return y
}}
"""


@pytest.mark.parametrize(("n", "k", "least"), [(1024, 16, 24_576), (64, 256, 98_304)])
def test_the_optimum_of_a_chain_is_the_better_of_both(n, k, least):
    case = Case(CHAIN.format(n=n, k=k), mesh="four", layout="split")
    figures = {policy: sent(case, policy) for policy in (*WALKS, "optimal")}
    assert figures["optimal"] == least
    assert figures["immediate"] == figures["mesh-tf"]
    assert min(figures["immediate"], figures["deferred"]) == least
