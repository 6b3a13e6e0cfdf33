"""Operators as a user calls them: their form, and what the registry says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshdsl.named.from_syntax import INITS
from meshdsl.named.optimizers import CALLS, OPTIMIZERS
from meshdsl.named.prelude import form as written
from meshdsl.named.prelude import library, prelude
from meshdsl.named.prelude import meaning as told
from meshdsl.ops.opdef import OpDef, load_all
from meshdsl.placed.layout_schedules import VALUES
from meshdsl.report.rule_tables import describe, rows_text
from meshdsl.schedule.registry import schedules as pipelines

_BRACKETS = {
    "none": "",
    "out": "",
    "view": "",
    "dims": "[dims]",
    "dims?": "[dims]",
    "dim": "[dim]",
    "arrow": "[dim -> new]",
    "join": "[dim -> new]",
    "maker": "[dims]",
    "filter": "[dim by window -> new]",
    "slide": "[dim by size -> new]",
    "rows": "[dim]",
}
NONE_ADDED: Mapping[str, OpDef] = {}
_LETTERS = ("x", "y", "z", "u", "v", "w")


def form(name: str, added: Mapping[str, OpDef] = NONE_ADDED) -> str | None:
    """The call of an operator, an optimizer, a schedule or an initialiser; None for other names.

    A schedule is one of learning rates, or one of pipelines, as a layout names it. `added` are the
    operators of packages that the file uses.
    """
    if name == "grad":
        return "grad(loss, x, …)"
    record = load_all().get(name) or added.get(name)
    if record is not None and record.surface.items != "view":
        return _call(record)
    if name in library():
        return written(library()[name])
    for table in (OPTIMIZERS, CALLS):
        if name in table:
            known = table[name].items()
            options = [n if o.default is ... else f"{n}={o.shown or 'none'}" for n, o in known]
            return f"{name}({', '.join(options)})"
    if name in pipelines():
        return f"{name}[dims]({', '.join(('micro', *pipelines()[name].options, *VALUES))})"
    if name in INITS:
        return f"{name}({', '.join(('a', 'b')[: INITS[name]])})"
    return None


def _call(record: OpDef) -> str:
    """`softmax[dim](x)`, `einsum(x, … -> [dims])`."""
    low, high = record.surface.arity
    names = list(_LETTERS[: high if high is not None else low])
    definition = prelude().functions.get(record.name)
    if definition is not None:
        options = dict(record.surface.options)
        names = [p.name.text for p in definition.params if p.name.text not in options]
    if high is None:
        names.append("…")
    for option, default in record.surface.options:
        names.append(option if default in (..., None) else f"{option}={default}")
    out = " -> [dims]" if record.surface.states_result else ""
    bracket = _BRACKETS[record.surface.items]
    if record.surface.indexed:
        bracket = f"[dim = {names.pop()}]"
    if record.surface.items == "maker" and not names:
        return f"{record.name}{bracket}"
    return f"{record.name}{bracket}({', '.join(names)}{out})"


def meaning(name: str, added: Mapping[str, OpDef] = NONE_ADDED) -> Iterator[str]:
    """What an operator is, in Markdown: its form, its definition, its legal placements."""
    shown = form(name, added)
    if shown is None:
        return
    yield f"```mdsl\n{shown}\n```"
    record = load_all().get(name) or added.get(name)
    if record is not None and record.meaning:
        yield record.meaning
    if name in pipelines():
        yield f"{pipelines()[name].meaning} ({pipelines()[name].source})"
    definition = prelude().functions.get(name)
    if name in library():
        yield told(library()[name])
    if definition is not None:
        yield f"Defined in the prelude:\n```mdsl\n{definition.span.text}\n```"
    if record is None:
        return
    if record.infix:
        yield f"Written `x {record.infix} y`."
    rows = rows_text(describe(record)).rstrip()
    yield f"Along one mesh axis, S split, P partial, B whole:\n```text\n{rows}\n```"
