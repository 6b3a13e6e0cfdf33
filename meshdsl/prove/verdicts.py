"""What `meshdsl prove` says of the operators of a package: facts, diagnostics and text."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from meshdsl.carets import DiagnosticFacts
from meshdsl.diagnostics import Diagnostic, Source, Span, counted
from meshdsl.named.packages import PARTS, OperatorPackage
from meshdsl.ops.opdef import OpDef
from meshdsl.prove.record import Checked, prove
from meshdsl.prove.wrong_cases import WrongCase
from meshdsl.records import dataclass
from meshdsl.report.document import aligned


class ProofFacts(TypedDict):
    """A check, the cases it has tried, and how many of them are wrong."""

    check: str
    cases: int
    wrong: int


class VerdictFacts(TypedDict):
    """An operator with its checks."""

    operator: str
    samples: int
    proved: bool
    checks: list[ProofFacts]


class PackageFacts(TypedDict):
    """What `meshdsl prove --json` prints."""

    version: int
    package: str
    operators: list[VerdictFacts]
    diagnostics: list[DiagnosticFacts]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was tried of one operator, and what is wrong with it."""

    facts: VerdictFacts
    diagnostics: tuple[Diagnostic, ...]


def of_package(package: OperatorPackage) -> list[Verdict]:
    """The verdict on each operator of a package."""
    return [_verdict(opdef, package) for opdef in package.operators.values()]


def _verdict(opdef: OpDef, package: OperatorPackage) -> Verdict:
    checks = prove(opdef)
    said = tuple(d for check in checks for d in _told(opdef, package, check, checks))
    facts: VerdictFacts = {
        "operator": opdef.name,
        "samples": len(opdef.samples),
        "proved": not any(d.severity == "error" for d in said),
        "checks": [{"check": c.name, "cases": c.cases, "wrong": len(_errors(c))} for c in checks],
    }
    return Verdict(facts, said)


def _errors(check: Checked) -> list[WrongCase]:
    return [case for case in check.wrong if case.code != "MD0172"]


_MESSAGES = {
    "MD0164": "the {part} of `{name}` fails: {said}",
    "MD0170": "the shape rule of `{name}` is wrong: {said}",
    "MD0171": "a placement that the factors of `{name}` declare does not hold: {said}",
    "MD0172": "the factors of `{name}` lack a placement that is right",
    "MD0173": "the torch text of `{name}` differs from its numpy meaning: {said}",
    "MD0174": "the gradient of `{name}` is wrong: {said}",
    "MD0175": "the torch text of `{name}` uses memory as its record does not declare: {said}",
}

_HELP = {
    "MD0164": "correct it, or the sample",
    "MD0170": "return these dims, in this order, and this dtype",
    "MD0171": "remove the loop, or the operands of `linear` or `monotone`, from which it follows",
    "MD0172": "add it to the factors, so that such data is not gathered, or give the reason in "
    "`true_rows`",
    "MD0174": "write the gradient of the numpy meaning, which finite differences measure",
    "MD0175": "return new memory and leave operands unchanged, or declare it with `view`, `shows` "
    "or `in_place`",
}


def _told(
    opdef: OpDef, package: OperatorPackage, check: Checked, checks: list[Checked]
) -> Iterator[Diagnostic]:
    """The first case of each code and part, with how many more there are."""
    groups: dict[tuple[str, str], list[WrongCase]] = {}
    for case in check.wrong:
        groups.setdefault((case.code, case.part), []).append(case)
    for (code, part), cases in groups.items():
        first, others = cases[0], len(cases) - 1
        more = f"; and {counted(others, 'more case')}" if others else ""
        words = PARTS.get(part, part)
        message = _MESSAGES[code].format(name=opdef.name, part=words, said=first.said)
        help = _HELP.get(code) or _which_is_wrong(checks)
        severity: Any = "warning" if code == "MD0172" else "error"
        text = f"{message} ({first.case}{more})"
        yield Diagnostic(code, text, _place(getattr(opdef, part), package), severity, help=help)


def _which_is_wrong(checks: list[Checked]) -> str:
    """Which of numpy meaning and torch text is probably wrong: the one that the gradient is not of.

    Finite differences are of the numpy meaning.
    """
    gradient = next((c for c in checks if c.name == "gradient"), None)
    if gradient is None or not gradient.cases:
        return "one of the two is wrong; the numpy meaning is what every result is compared with"
    if gradient.wrong:
        return "the gradient is not that of the numpy meaning either: that is probably wrong"
    return "the gradient is that of the numpy meaning: the torch text is probably wrong"


def _place(part: object, package: OperatorPackage) -> Span | None:
    """The line of the package that defines a part of a record; None for a part from elsewhere."""
    part = part.args[1] if isinstance(part, partial) else part  # the shape rule behind its options
    function = inspect.unwrap(part) if callable(part) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    path = Path(code.co_filename)
    root = package.home.partition(":")[0].partition(".")[0]
    if root not in (path.stem, *(p.name for p in path.parents)):
        return None
    source = Source(str(_relative(path)), "".join(linecache.getlines(str(path))))
    start, end = source.bounds(code.co_firstlineno)
    return Span(source, start, end) if end > start else None


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def verdict_text(verdict: Verdict) -> str:
    """The checks of an operator as a table, and the verdict."""
    facts = verdict.facts
    rows = [[c["check"], counted(c["cases"], "case"), _result(c)] for c in facts["checks"]]
    ending = "proved" if facts["proved"] else "not proved"
    head = f"{facts['operator']}: {ending}, on {counted(facts['samples'], 'sample')}"
    return "\n".join([head, *(f"  {line}" for line in aligned(rows))]) + "\n"


def _result(check: ProofFacts) -> str:
    if not check["cases"]:
        return "nothing to try"
    return f"{check['wrong']} wrong" if check["wrong"] else "right"
