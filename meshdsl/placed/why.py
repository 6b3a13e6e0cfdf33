"""Explanations of reshards: the cause of one, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshdsl.diagnostics import Span
from meshdsl.named.ir import NamedOp, Value
from meshdsl.ops.opdef import lookup
from meshdsl.placed.ir import Words
from meshdsl.placed.layout import SplitCause
from meshdsl.placed.reshard import Route
from meshdsl.placed.settings import Setting
from meshdsl.placed.strategies import Choice, Other
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """The reader that needs a tensor placed otherwise.

    kind: `operand` (an operator), `rule` (the layout), `policy` (reduce at once), `plan` (the
    optimum), `storage` (a parameter is stored otherwise), `carry` (a loop), `output`, `update` (the
    new value of a stored one). `who` is a clause or an operator. `instead` finds the next
    best route, if one was considered.
    """

    kind: str
    who: str
    span: Span
    instead: Callable[[], Other | None] = lambda: None
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class PartialCause:
    """Why a tensor is partial: a sentence, between whose parts the line of `op` may be named.

    `op` is the operator that `subject` designates. What a loop carries was made partial by the
    iteration before.
    """

    subject: str
    clause: str
    op: NamedOp | None = None
    is_carried: bool = False


@dataclass(frozen=True, slots=True)
class TensorCauses:
    """Known facts of a tensor: the rule per split dim, and why it is partial."""

    causes: Mapping[str, SplitCause]
    partial: tuple[PartialCause, ...]


def carried(value: Value) -> tuple[PartialCause, ...]:
    """Why a value that a loop carries is partial: the iteration before left it so."""
    clause = "comes from the iteration that ran before as a partial sum"
    return (PartialCause(f"`{value.label}`", clause, is_carried=True),)


def operator(op: NamedOp) -> str:
    """The designation of an operator in a sentence: with the name it yields, where there is one."""
    name = op.outs[0].label
    words = lookup(op.name).words
    return words if name == "_" else f"{words} (for `{name}`)"


def _runner_up(ask: Ask) -> str:
    """The cost of the next best route, as a clause; empty without one."""
    other = ask.instead()
    if other is None or not other.cost:
        return ""
    which = "the cheapest alternative tried" if other.of_some else "the cheapest alternative"
    return f"{which} sends {other.cost:,} B per device"


STAGED = (PartialCause("each stage", "has a partial sum of it"),)
KEPT = (PartialCause("it", "is stored as partial sums, like the value added to it"),)
ANNOTATED = (PartialCause("the `sbp` block", "says so"),)


def summed(
    op: NamedOp, choice: Choice, causes: Mapping[str, SplitCause]
) -> tuple[PartialCause, ...]:
    """Reasons why a result is newly partial: the split dims that the operator reduces."""
    gone = {
        d
        for v, p in zip(op.ins, choice.needs, strict=True)
        for d, _ in p.splits
        if not op.outs[0].type.has(d)
    }
    parts = []
    for dim in sorted(gone):
        by = f"which {_rule(causes[dim])} splits" if dim in causes else "which is split"
        parts.append(PartialCause(lookup(op.name).words, f"reduces `{dim}`, {by}", op))
    return tuple(parts)


def explain(value: Value, route: Route, ask: Ask, facts: TensorCauses) -> tuple[str, ...]:
    """The clauses that say why a reshard is there, its cause first."""
    kinds = {step.kind for step in route.steps}
    if kinds & {"all_reduce", "reduce_scatter"}:
        match facts.partial:
            case ():
                text = "each device holds a partial sum"
            case (cause,):
                text = f"{cause.subject} {cause.clause}"
            case several:
                text = _of_several(several, ask.span.file)
        tail = _reduced_for(ask)
    elif "halo" in kinds or "window" in kinds:
        text = f"{ask.who} reads beyond each block of {_windowed(route)}"
        tail = _split_by(route, facts)
    elif ask.kind == "storage":
        text, tail = _stored_by(value, facts), _plain(ask)
    else:
        text, tail = _split_by(route, facts), _moved_for(ask, route)
    return tuple(clause for clause in (text, tail, _runner_up(ask)) if clause) or ("",)


def in_dtype(words: Words, setting: Setting) -> tuple[str, ...]:
    """The words of a reduction that is done in another dtype than that of the tensor."""
    return (*words(), f"in {setting.value}, by {_rule(SplitCause(str(setting), setting.span))}")


def gathered_again(setting: Setting, kept: int, whole: int) -> tuple[str, ...]:
    """The cause of a gather of the backward pass, which stores `kept` bytes in place of `whole`."""
    by = _rule(SplitCause(str(setting), setting.span))
    return (f"by {by} the backward pass stores {kept:,} B of it, not the {whole:,} B gathered",)


def _of_several(causes: tuple[PartialCause, ...], file: str) -> str:
    """Several causes, each once. Operators of several lines of a file say which."""
    by_words: dict[tuple[str, str], PartialCause] = {}
    for cause in causes:
        by_words.setdefault((cause.subject, cause.clause), cause)
    ops = [cause.op for cause in by_words.values()]
    lines = {op.span.line if op and op.span.file == file else 0 for op in ops}

    def said(cause: PartialCause) -> str:
        op = cause.op
        if op is None or len(lines) == 1 or op.span.file != file:
            return f"{cause.subject} {cause.clause}"
        where = "in the backward pass of" if op.phase == "backward" else "on"
        return f"{cause.subject} {where} line {op.span.line} {cause.clause}"

    carried = [said(cause) for cause in by_words.values() if cause.is_carried]
    others = [said(cause) for cause in by_words.values() if not cause.is_carried]
    together = [", and ".join(each) for each in (carried, others) if each]
    return ", and what is added to it is one, too: ".join(together)


def _reduced_for(ask: Ask) -> str:
    return {
        "operand": f"{ask.who} needs the complete sum",
        "policy": "`immediate` reduction completes each sum at once",
        "plan": "reducing it here sends the fewest bytes overall",
        "timed": "reducing it here takes the least time overall",
        "rule": "the layout splits the result over the same axis",
        "carry": f"{_plain(ask)} reduced",
        "output": f"{ask.who}, so its partial sums are added",
        "update": f"{ask.who}",
    }.get(ask.kind, ask.who)


def _moved_for(ask: Ask, route: Route) -> str:
    dims = " and ".join(f"`{d}`" for d in _moved(route))
    gathered = {step.kind for step in route.steps if step.moves} == {"all_gather"}
    wanted = "all" if gathered else "another split"
    return {
        "operand": f"{ask.who} needs {wanted} of {dims}",
        "rule": "the layout splits the result differently",
        "policy": "the layout splits the result differently",
        "carry": f"{_plain(ask)} as its rules say",
        "plan": "this placement sends the fewest bytes overall",
        "timed": "this placement takes the least time overall",
        "output": "the layout splits the result differently",
        "update": f"{ask.who}",
    }.get(ask.kind, ask.who)


def _moved(route: Route) -> list[str]:
    """The dims whose blocks move; each once, in order."""
    steps = [step for step in route.steps if step.moves]
    dims = [step.dim for step in steps if step.dim]
    dims += [d for step in steps if step.kind == "permute" for d in step.changed()[0]]
    return list(dict.fromkeys(dims))


def _windowed(route: Route) -> str:
    """The dims that windows are made of."""
    dims = (step.dim for step in route.steps if step.kind in ("halo", "window"))
    return " and ".join(f"`{dim}`" for dim in dims)


def _plain(ask: Ask) -> str:
    """The reader, less the `so` in place of a placement."""
    return ask.who.removesuffix(" so")


def _rule(cause: SplitCause) -> str:
    """A rule with its place: `batch -> rows` (line 8)."""
    span = cause.span
    return f"`{cause.text}` ({span.file if span.file.startswith('--') else f'line {span.line}'})"


def _stored_by(value: Value, facts: TensorCauses) -> str:
    """The storage rules of a parameter, as a clause."""
    rules = [c for _, c in sorted(facts.causes.items()) if c.selector == ("params",)]
    how = f"split by {' and '.join(map(_rule, rules))}" if rules else "differently"
    return f"`{value.label}` is stored {how}"


def _split_by(route: Route, facts: TensorCauses) -> str:
    """The rules that split the dims that move."""
    ruled = [f"{_rule(c)} splits `{d}`" for d in _moved(route) if (c := facts.causes.get(d))]
    unruled = (d for d in _moved(route) if d not in facts.causes)
    by_operators = [f"the operator that makes it splits `{d}`" for d in unruled]
    return " and ".join(ruled + by_operators)
