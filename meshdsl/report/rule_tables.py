"""The legal rows of one operator, as JSON first; all of them are derived from its factors.

A row gives, along one mesh axis, the placement of each operand and of the results. Placements on
several axes take one row per axis.
"""

from __future__ import annotations

from meshdsl.diagnostics import Diagnostic, DiagnosticError, fail
from meshdsl.ir.printer import attribute
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.named.packages import operator_called
from meshdsl.named.prelude import form, library
from meshdsl.ops.opdef import Factors, OpDef, Sample, Signature, load_all, signs
from meshdsl.ops.requirements import listed
from meshdsl.option_edits import known_values
from meshdsl.placed.sharding_rules import Row, rows
from meshdsl.report.document import aligned
from meshdsl.report.schema import CallFacts, OperatorFacts, OperatorMeanings, ShardingRow, TypeFacts

VERSION = 1
_M, _K, _N = Dim("m", 4), Dim("k", 6), Dim("n", 8)
TELLING: dict[str, Sample] = {
    "einsum": Sample((TensorType((_M, _K), F32), TensorType((_K, _N), F32)), (("dims", (_M, _N)),)),
}
"""Calls that show more rows of an operator than any sample of its record."""


def find(name: str) -> OpDef:
    """The record of `name`, an operator or a sign such as `+`; MD0605 when there is none."""
    records = load_all()
    record = records.get(signs().get(name, name))
    if record is not None:
        return record
    if name in library():
        message = f"`{name}` is a function of the library, made of operators, which have the rows"
        help = f"`explain --print-after named` prints what a call is: `{form(library()[name])}`"
        fail("MD0605", message, help=help)
    broken: tuple[Diagnostic, ...] = ()
    try:
        of_package = operator_called(name)
    except DiagnosticError as error:
        of_package, broken = None, error.diagnostics
    if of_package is not None:
        return of_package
    fixes, help = known_values("", name, [*records, *library()])
    where = ", except perhaps in a package that cannot be loaded" if broken else ""
    message = f"there is no operator `{name[:40]}`{where}"
    raise DiagnosticError(*broken, Diagnostic("MD0605", message, help=help, fixes=fixes))


def describe(opdef: OpDef, every_call: bool = False) -> OperatorFacts:
    """The rows of the call that has most of them, or of every sample of the record."""
    samples = (TELLING[opdef.name],) if opdef.name in TELLING else opdef.samples
    calls = [_call(opdef, sample) for sample in samples]
    calls = [max(calls, key=lambda call: len(call["rows"]))]
    if every_call:
        calls += [_call(opdef, sample) for sample in opdef.samples]
    facts: OperatorFacts = {
        "version": VERSION,
        "operator": opdef.name,
        "composite": opdef.composite,
        "multi_axis_condition": opdef.legal is not None,
        "calls": [call for i, call in enumerate(calls) if call not in calls[:i]],
    }
    if every_call:
        facts["hold_but_are_not_used"] = dict(opdef.true_rows)
    return facts


def meanings() -> OperatorMeanings:
    """What every operator computes."""
    records = sorted(load_all().items())
    return {"version": VERSION, "operators": {name: opdef.meaning for name, opdef in records}}


def _call(opdef: OpDef, sample: Sample) -> CallFacts:
    attrs = dict(sample.attrs)
    sig = Signature(sample.ins, opdef.infer(sample.ins, attrs), attrs)
    factors = opdef.factors(sig)
    return {
        "ins": [_type(t) for t in sig.ins],
        "outs": [_type(t) for t in sig.outs],
        "attrs": {name: attribute(value) for name, value in sample.attrs},
        "rows": [_row(row) for row in rows(factors, len(sig.ins), len(sig.outs))],
        "whole": _whole(sig, factors),
    }


def _type(type_: TensorType) -> TypeFacts:
    return {"dtype": str(type_.dtype), "dims": list(type_.names)}


def _row(row: Row) -> ShardingRow:
    return {
        "ins": [str(c) for c in row.ins],
        "outs": [str(c) for c in row.outs],
        "because": _because(row),
    }


def _because(row: Row) -> str:
    """The part of the record from which the row follows."""
    if row.factor is not None:
        reduced = f", joined by {row.factor.reduce}" if row.factor.reduce else ""
        read = {d for d, r in zip(row.factor.ins, row.factor.reads, strict=False) if d and r}
        windows = f"; a block reads an interval of {listed(sorted(read))}" if read else ""
        return f"`{row.factor.name}` is split{reduced}{windows}"
    parts = [(i, str(c)) for i, c in enumerate(row.ins, 1) if str(c) != "B"]
    if not parts:
        return "nothing is split"
    numbers = joined([str(i) for i, _ in parts])
    if parts[0][1] != "P":
        return f"it rises with operand {numbers}"
    return f"it is linear in operand{'s' if len(parts) > 1 else ''} {numbers}" + (
        " together" if len(parts) > 1 else ""
    )


def joined(words: list[str]) -> str:
    """`1`, `1 and 2`, `1, 2 and 3`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _whole(sig: Signature, factors: Factors) -> list[str]:
    """The dims of operands that are in no loop of the factors: they are gathered first."""
    free = {(i, dim) for f in factors.loops for i, dim in enumerate(f.ins)}
    return list(
        dict.fromkeys(n for i, t in enumerate(sig.ins) for n in t.names if (i, n) not in free)
    )


# --- for people --------------------------------------------------------------------------------


def meanings_text(facts: OperatorMeanings) -> str:
    """The result of `meanings` as text, a line for each."""
    table = [[name, meaning] for name, meaning in facts["operators"].items()]
    return "\n".join(aligned(table)) + "\n"


def rows_text(found: OperatorFacts) -> str:
    """The result of `describe` as text."""
    blocks = [_call_text(found, call) for call in found["calls"]]
    blocks += [notes for notes in (_notes(found),) if notes]
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _call_text(found: OperatorFacts, call: CallFacts) -> list[str]:
    cells = [[*row["ins"], "->", *row["outs"], row["because"]] for row in call["rows"]]
    lines = [_headline(found["operator"], call), *(f"  {line}" for line in aligned(cells))]
    if call["whole"]:
        lines.append(f"  {_about_whole(found, call['whole'])}")
    return lines


def _headline(name: str, call: CallFacts) -> str:
    ins, outs = (", ".join(map(_type_text, side)) for side in (call["ins"], call["outs"]))
    attrs = ", ".join(f"{key}={value}" for key, value in call["attrs"].items())
    return f"{name}: {ins or 'no operands'} -> {outs}" + (f"  {{{attrs}}}" if attrs else "")


def _type_text(type_: TypeFacts) -> str:
    return f"{type_['dtype']}[{', '.join(type_['dims'])}]"


def _about_whole(found: OperatorFacts, whole: list[str]) -> str:
    if found["composite"]:
        dims = " or ".join(f"`{name}`" for name in whole)
        return f"where {dims} is split, the prelude's `{found['operator']}` is used instead"
    return f"{listed(whole)} must be whole on each device"


def _notes(found: OperatorFacts) -> list[str]:
    lines = []
    if found["multi_axis_condition"]:
        lines.append("over several axes, both sides must be cut into the same blocks")
    held = found.get("hold_but_are_not_used", {})
    if held:
        lines.append("these hold too, and are not used:")
        lines += [f"  {row}: {reason}" for row, reason in held.items()]
    return lines
