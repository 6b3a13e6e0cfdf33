"""A run as a notebook shows it: what each device did, the outputs, how they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.diagnostics import Diagnostic, did_you_mean, fail
from meshdsl.notebook.views import Ran

if TYPE_CHECKING:
    from meshdsl.api.plan import Plan


def ran(plan: Plan, engine: str, seed: int, verify: bool) -> tuple[Ran, list[Diagnostic]]:
    """Run a plan on made-up values, and what there is to say about it.

    Raises:
        DiagnosticError: no such engine (MD0602), or the run fails (MD07xx).
    """
    from meshdsl.backends.engines import run as engines
    from meshdsl.backends.engines.verify import problems

    if engine not in engines.ENGINES:
        help = did_you_mean(engine, list(engines.ENGINES)) or ", ".join(engines.ENGINES)
        fail("MD0602", f"`--engine {engine}`: no engine is called so", help=help)
    given = engines.Given(seed=seed)
    result = engines.run(plan._made, engine, given)
    found = [Diagnostic("MD0506", note, severity="note") for note in result.notes]
    found += [Diagnostic("MD0707", text) for text in result.disagreements]
    yielded = (result.outputs, result.updated)
    checked = engines.verify(plan._made, given, *yielded) if verify else ()
    found += problems(checked)
    return Ran(plan._made, engine, result, checked), found
