"""A run as a notebook shows it: what each device did, the outputs, how they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Diagnostic, did_you_mean, fail
from meshdsl.notebook.views import View

if TYPE_CHECKING:
    from meshdsl.api.plan import Plan

WIDTH = 100


class Ran(View):
    """A run: `outputs` by name, whole; `seconds`; `ok`, whether it equals the reference, if asked.

    On real ranks (`torchrun`) it was a process of its own: interrupting the kernel ends it.
    """

    def __init__(self, lines: str, result: Any, checked: Any) -> None:
        self.outputs = dict(result.outputs)
        self.seconds: float = result.seconds
        self.ok: bool | None = all(c.ok for c in checked) if checked else None
        self._lines = lines

    def __str__(self) -> str:
        return self._lines

    def html(self) -> str:
        """The lines as they are."""
        from meshdsl.notebook.html import LINES
        from meshdsl.notebook.svg import tag

        return tag("pre", self._lines, style=LINES)


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
    return Ran(_lines(plan, engine, result, checked), result, checked), found


def _lines(plan: Plan, engine: str, result: Any, checked: Any) -> str:
    """What the command line prints."""
    import io

    from rich.console import Console

    from meshdsl.report import running

    page = io.StringIO()
    plain: dict[str, Any] = {"force_jupyter": False, "force_terminal": False, "color_system": None}
    console = Console(file=page, width=WIDTH, highlight=False, **plain)
    console.print(running._headline(plan._made, engine, result), markup=False)
    if engine != "reference":
        console.print(running._devices(plan._made, result))
    console.print(running._outputs(plan._made, result, checked))
    if result.updated:
        console.print(running._updated(plan._made, result, checked))
    if checked:
        console.print(running._verdict(checked), markup=False)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())
