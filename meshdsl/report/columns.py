"""Columns of a comparison: parsed from options, compiled, and run on the same values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Severity,
    Source,
    Span,
    fail,
)
from meshdsl.named.declarations import Declarations, unknown
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.ir import reduced_in
from meshdsl.placed.place import check_policy
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.backends.engines.verify import Comparison, Reference

Json = dict[str, Any]
OPTIONS = {"layout": "--layouts", "sbp": "--sbp"}


@dataclass(frozen=True, slots=True)
class Wish:
    """The request for one column.

    `kind` is `layout` or `sbp`, `name` None for the first layout. A `positional` column is the same
    program as the one under its layout, shown by positions.
    """

    kind: str
    name: str | None
    reduce: str
    positional: bool = False


@dataclass(slots=True)
class Column:
    """One column: its letter, the stages of its compilation, and its diagnostics.

    `same_as` is the letter of an earlier column with an identical program.
    """

    letter: str
    wish: Wish
    made: Compilation | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    same_as: str | None = None

    @property
    def works(self) -> bool:
        """Whether the column compiled."""
        return self.made is not None

    @property
    def title(self) -> str:
        """The title `layout hybrid, reduced immediate`."""
        name = self.made.placed.layout if self.made else self.wish.name
        how = f"{self.wish.kind} {name}" if name not in (None, "none") else "no layout"
        as_sbp = ", as positional SBP" if self.wish.positional else ""
        return f"{how}, reduced {self.wish.reduce}{as_sbp}"


# --- requests --------------------------------------------------------------------------------


def wishes(
    declarations: Declarations,
    layouts: str | None,
    sbps: str | None,
    policies: str | None,
    default: str,
) -> tuple[Wish, ...]:
    """The requested columns: the product of the options.

    By default: the first layout, its program as positional SBP, and reduced immediately.
    Raises a diagnostic for an unknown name, and for a column that is requested twice.
    """
    reduces = [part for part, _ in _policies(policies)] if policies is not None else [default]
    placed = [*_named(declarations, "layout", layouts), *_named(declarations, "sbp", sbps)]
    if placed or policies is not None:
        first = placed or [_first(declarations)]
        return tuple(Wish(kind, name, policy) for kind, name in first for policy in reduces)
    kind, name = _first(declarations)
    now = Wish(kind, name, default)
    derived = (replace(now, positional=True),) if kind == "layout" else ()
    return (now, *derived, replace(now, reduce="immediate"))


def _first(declarations: Declarations) -> tuple[str, str | None]:
    if declarations.layouts or not declarations.sbps:
        return "layout", next(iter(declarations.layouts), None)
    return "sbp", next(iter(declarations.sbps))


def _policies(text: str) -> Iterator[tuple[str, Span]]:
    found: dict[str, Span] = {}
    for part, span in _joined(_parts(text, "--reduce")):
        check_policy(part, span)
        _once(part, span, found)
        yield part, span


def _named(
    declarations: Declarations, kind: str, text: str | None
) -> Iterator[tuple[str, str | None]]:
    """The layouts or `sbp` blocks of a list, each known and named once."""
    if text is None:
        return
    if kind == "layout" and not text.strip():
        yield kind, ""  # the empty layout
        return
    known = list(declarations.layouts if kind == "layout" else declarations.sbps)
    found: dict[str, Span] = {}
    for part, span in _joined(_parts(text, OPTIONS[kind])):
        if part not in known and not (kind == "layout" and ":" in part):
            word = "layout" if kind == "layout" else "`sbp` block"
            raise DiagnosticError(unknown("MD0108", word, ast.Name(part, span), known))
        _once(part, span, found)
        yield kind, part


def _once(part: str, span: Span, found: dict[str, Span]) -> None:
    if part in found:
        message = f"the column `{part}` is asked for twice"
        fail("MD0606", message, span, help="name it once: equal columns say nothing new")
    found[part] = span


def _parts(text: str, option: str) -> Iterator[tuple[str, Span]]:
    """The parts of a list with their spans; a `;` is kept as a mark for `_joined`."""
    source = Source(option, text)
    start = 0
    for part in text.replace(";", ",;").split(","):
        bare = part.removeprefix(";")
        first = start + len(bare) - len(bare.lstrip())
        span = Span(source, first, first + max(1, len(bare.strip())))
        start += len(bare) + 1
        if not bare.strip():
            help = f"separate the columns by single commas: `{option} a,b`"
            fail("MD0601", f"`{option}` has an empty place", span, help=help)
        yield part.strip(), span


def _joined(parts: Iterator[tuple[str, Span]]) -> Iterator[tuple[str, Span]]:
    """`a`, `batch:x`, `io:y` as `a`, `batch:x,io:y`: adjacent rules make one layout up to `;`."""
    held: list[tuple[str, Span]] = []
    for part, span in parts:
        rule = ":" in part
        if held and not (rule and ":" in held[-1][0] and not part.startswith(";")):
            yield _join(held)
            held = []
        held.append((part.removeprefix(";").strip(), span))
    if held:
        yield _join(held)


def _join(parts: Sequence[tuple[str, Span]]) -> tuple[str, Span]:
    return ",".join(part for part, _ in parts), parts[0][1].to(parts[-1][1])


# --- compilation -----------------------------------------------------------------------------


def compile_columns(made: Compilation, asked: Sequence[Wish]) -> list[Column]:
    """Every column of a program, placed and lowered.

    A column that cannot be placed keeps its diagnostics; equal columns share a program.
    """
    columns: list[Column] = []
    for number, wish in enumerate(asked):
        letter = chr(ord("A") + number) if number < 26 else str(number + 1)
        plain = replace(wish, positional=False)
        twin = next((c for c in columns if replace(c.wish, positional=False) == plain), None)
        if twin is not None:
            columns.append(Column(letter, wish, twin.made, twin.diagnostics, twin.letter))
        else:
            columns.append(_compiled(Column(letter, wish), made))
    return columns


def _compiled(column: Column, made: Compilation) -> Column:
    options = options_of(column.wish, made.options)
    try:
        column.made = made.under(options, column.diagnostics).checked()
    except DiagnosticError as error:
        column.diagnostics.add(*error.diagnostics)
    return column


def options_of(wish: Wish, chosen: Options) -> Options:
    """The options under which a column compiles."""
    if wish.kind == "layout":
        return replace(chosen, layout=wish.name, reduce=wish.reduce)
    return replace(chosen, layout=None, sbp=wish.name, reduce=wish.reduce)


def raise_if_none_works(columns: Sequence[Column]) -> None:
    """Raise all errors if no column compiled."""
    if not any(c.works for c in columns):
        found: list[Diagnostic] = [d for c in columns for d in c.diagnostics]
        raise DiagnosticError(*dict.fromkeys(found))


# --- runs ------------------------------------------------------------------------------------

Yielded = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The outputs of a run, and its parameters and states after the step."""

TOO_LARGE = ("MD0703", "MD0704")
"""The codes of refused runs: too much memory, or too many devices."""

NOT_RUN: Json = {"executed": [], "seed": None, "engine": None, "runs": [], "between": []}
"""The result of `measure` where nothing was executed."""


def measure(columns: Sequence[Column], seed: int, budget: int | None = None) -> Json:
    """Run all columns that compiled with the local engine, and the float64 reference once.

    `runs` has an entry per column: `status` is `ran`, `same` (the program of an earlier column,
    not run again), `refused` (too large), `failed` or `broken` (it did not compile). `between`
    compares every two that ran. `budget` is the available memory; None queries the machine.
    """
    from meshdsl.backends.engines.run import Given, check_reference, reference_of

    given = Given(seed=seed)
    for column in columns:
        if column.made:
            check_reference(column.made)
    yielded: dict[str, Yielded] = {}
    runs = [_run(c, given, budget, yielded) for c in columns]
    between: list[Json] = []
    if yielded:
        ran = next(c.made for c in columns if c.letter in yielded and c.made)
        reference = reference_of(ran, given)
        _against_reference(columns, reference, yielded, runs)
        reduced = {c.letter: reduced_in(c.made.placed) for c in columns if c.made}
        for a, b in itertools.combinations(yielded, 2):
            allowed = reference.allowing(reduced[a] | reduced[b])
            between.append(_between(a, b, yielded, allowed))
    return {
        "executed": list(yielded),
        "seed": seed,
        "engine": "local",
        "runs": runs,
        "between": between,
    }


def _run(column: Column, given: Any, budget: int | None, yielded: dict[str, Yielded]) -> Json:
    from meshdsl.backends.engines.run import run
    from meshdsl.render import to_json

    entry: Json = {"column": column.letter, "status": "broken"}
    if column.made is None:
        return entry
    if column.same_as is not None:
        return entry | {"status": "same", "same_as": column.same_as}
    try:
        result = run(column.made, "local", given, budget)
    except DiagnosticError as error:
        refused = all(d.code in TOO_LARGE for d in error.diagnostics)
        told = [to_json(d) for d in error.diagnostics]
        severity: Severity = "warning" if refused else "error"
        column.diagnostics.add(*(replace(d, severity=severity) for d in error.diagnostics))
        return entry | {"status": "refused" if refused else "failed", "diagnostics": told}
    for text in result.disagreements:
        column.diagnostics.add(Diagnostic("MD0707", f"column {column.letter}: {text}"))
    yielded[column.letter] = (result.outputs, result.updated)
    sent = max((wire for _, wire in result.sent), default=0)
    return entry | {"status": "ran", "seconds": result.seconds, "wire_bytes": sent}


def _against_reference(
    columns: Sequence[Column],
    reference: Reference,
    yielded: Mapping[str, Yielded],
    runs: Sequence[Json],
) -> None:
    """Add to every run the distance of its outputs and updates from the reference's."""
    from meshdsl.backends.engines.verify import problems

    for entry, column in zip(runs, columns, strict=True):
        if entry["status"] == "ran":
            assert column.made is not None
            allowed = reference.allowing(reduced_in(column.made.placed))
            checked = allowed.compare(*yielded[column.letter])
            entry["reference"] = _worst(checked)
            column.diagnostics.add(*problems(checked, f" of column {column.letter}"))


def _between(first: str, second: str, yielded: Mapping[str, Yielded], reference: Reference) -> Json:
    checked = reference.compare(*yielded[second], other=yielded[first])
    return {"columns": [first, second], **_worst(checked)}


def _worst(checked: Sequence[Comparison]) -> Json:
    """The worst output: `max_error` is the largest max|Δ|, `relative` a part of its `measure`.

    Both are None where shapes, NaN or infinities differ. `role` is `output`, `param` or `state`.
    """
    worst = max(checked, key=lambda c: c.relative)
    return {
        "output": worst.name,
        "role": worst.role,
        "measure": worst.measure,
        "max_error": _finite(max(c.error for c in checked)),
        "relative": _finite(worst.relative),
        "tolerance": worst.tolerance,
        "ok": all(c.ok for c in checked),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
