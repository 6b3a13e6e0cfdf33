"""Rules that bind nothing, and axes the mesh lacks: reported, never an error by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean
from meshdsl.named.ir import Program, Value, walk
from meshdsl.placed.layout import TENSOR, Layout, Rule, selects
from meshdsl.placed.request import loops
from meshdsl.placed.sbp_block import Annotations, means
from meshdsl.syntax.symbols import ROLES


def values_of(program: Program) -> Iterator[Value]:
    """Every tensor of a program: inputs, stored values, results, carried and collected values."""
    yield from program.inputs
    yield from (p.value for p in program.params)
    yield from (s.value for s in program.states)
    for op in walk(program.body):
        yield from op.outs
    for loop in loops(program):
        yield from (c.inside for c in loop.carries)
        yield from (c.outer for c in loop.collected)


def lint(program: Program, layout: Layout, diagnostics: Diagnostics) -> None:
    """Warn of rules that cannot have an effect, each with a way out."""
    values = tuple(values_of(program))
    # Rules for the dims of a `repeat` are reported elsewhere.
    dims = {d for v in values for d in v.type.names} | {n.dim.name for n in loops(program)}
    for rule in layout.rules:
        for axis in rule.axes:
            if axis not in layout.mesh.names:
                diagnostics.add(_no_axis(rule, axis, layout))
        if rule.dim not in dims:
            diagnostics.add(_no_dim(rule, dims))
        elif not _selects_any(rule, values) and not _selects_summed(rule, program, layout):
            diagnostics.add(_selects_nothing(rule, values))
    # The backward pass copies the pins of a tensor.
    for pin in dict.fromkeys(pin for value in values for pin in value.pins):
        for axis in pin.axes:
            if axis not in layout.mesh.names:
                rule = Rule((), pin.dim, pin.axes, False, pin.span)
                diagnostics.add(_no_axis(rule, axis, layout))


def _no_axis(rule: Rule, axis: str, layout: Layout) -> Diagnostic:
    known = list(layout.mesh.names)
    help = did_you_mean(axis, known) or f"the mesh has {', '.join(known) or 'no axes'}"
    message = f"mesh `{layout.mesh.name}` has no axis `{axis}`; the rule does nothing there"
    return Diagnostic("MD0304", message, rule.span, "warning", help=help)


def _no_dim(rule: Rule, dims: set[str]) -> Diagnostic:
    help = did_you_mean(rule.dim, sorted(dims)) or "remove the rule"
    message = f"no tensor of the program has the dim `{rule.dim}`; the rule matches nothing"
    return Diagnostic("MD0305", message, rule.span, "warning", help=help)


def _selects_any(rule: Rule, values: Iterable[Value]) -> bool:
    """Whether a rule can bind a tensor; a program that trains nothing has no gradients to bind."""
    if not rule.selector:
        return True
    if rule.selector[0] in ROLES:
        role = rule.selector[0].removesuffix("s")
        kept = [v for v in values if v.role == role]
        return any(v.type.has(rule.dim) for v in kept) or (role != "param" and not kept)
    return any(selects(rule.selector, v) is not None and v.type.has(rule.dim) for v in values)


def _selects_summed(rule: Rule, program: Program, layout: Layout) -> bool:
    """Whether a rule splits a dim that the operator of a tensor reduces."""
    made = ((v, op) for op in walk(program.body) for v in op.outs)
    return any(
        selects(rule.selector, v) == TENSOR and rule.dim in dict(layout.summed(v, op))
        for v, op in made
    )


def _selects_nothing(rule: Rule, values: tuple[Value, ...]) -> Diagnostic:
    tensors = [v for v in values if v.name]
    labels = {v.label for v in tensors} | {f for v in values for f in v.functions}
    dotted = {f"{v.functions[-1]}.{v.label}" for v in tensors if v.functions}
    selector = ".".join(rule.selector)
    known = sorted(dotted if len(rule.selector) > 1 else labels)
    meant = None if selector in known else did_you_mean(selector, known)
    help = meant or "remove the rule"
    message = f"`{selector}` selects no tensor with the dim `{rule.dim}`"
    return Diagnostic("MD0306", message, rule.span, "warning", help=help)


def lint_sbp(program: Program, annotations: Annotations, diagnostics: Diagnostics) -> None:
    """Warn of entries that name no tensor."""
    values = tuple(values_of(program))
    labels = sorted({v.label for v in values if v.name})
    for entry in annotations.entries:
        for path in (entry.tensor, entry.at):
            if path and not any(means(path, v) for v in values):
                name = ".".join(n.text for n in path)
                help = did_you_mean(path[-1].text, labels) or "remove the entry"
                message = f"`{name}` names no tensor of the program"
                diagnostics.add(Diagnostic("MD0306", message, entry.span, "warning", help=help))
