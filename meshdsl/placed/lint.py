"""Rules that bind nothing, and axes the mesh lacks: reported, never an error by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean
from meshdsl.named.ir import Node, Program, Repeat, Value, walk
from meshdsl.placed.layout import ROLES, Layout, Rule
from meshdsl.placed.selectors import selects


def values_of(program: Program) -> Iterator[Value]:
    """Every tensor of a program once: inputs, parameters, results, and what loops carry."""
    yield from program.inputs
    yield from (p.value for p in program.params)
    for op in walk(program.body):
        yield from op.outs
    for node in program.body:
        if isinstance(node, Repeat):
            yield from (c.inside for c in node.carries)


def _loops(nodes: Iterable[Node]) -> Iterator[str]:
    """The dims that `repeat` runs over; rules for them are answered elsewhere."""
    for node in nodes:
        if isinstance(node, Repeat):
            yield node.dim.name
            yield from _loops(node.body)


def lint(program: Program, layout: Layout, diagnostics: Diagnostics) -> None:
    """Warn of rules that cannot have an effect, each with a way out."""
    values = tuple(values_of(program))
    dims = {d for v in values for d in v.type.names} | set(_loops(program.body))
    for rule in layout.rules:
        for axis in rule.axes:
            if axis not in layout.mesh.names:
                diagnostics.add(_no_axis(rule, axis, layout))
        if rule.dim not in dims:
            diagnostics.add(_no_dim(rule, dims))
        elif not _selects_any(rule, values):
            diagnostics.add(_selects_nothing(rule, values))
    for value in values:
        for pin in value.pins:
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
    if not rule.selector or rule.selector[0] in ROLES[1:]:
        return True
    if rule.selector[0] == "params":
        return any(v.role == "param" and v.type.has(rule.dim) for v in values)
    return any(selects(rule.selector, v) is not None and v.type.has(rule.dim) for v in values)


def _selects_nothing(rule: Rule, values: tuple[Value, ...]) -> Diagnostic:
    tensors = [v for v in values if v.name]
    labels = {v.label for v in tensors} | {f for v in values for f in v.functions}
    dotted = {f"{v.functions[-1]}.{v.label}" for v in tensors if v.functions}
    selector = ".".join(rule.selector)
    known = sorted(dotted if len(rule.selector) > 1 else labels)
    help = did_you_mean(selector, known) or "remove the rule"
    message = f"`{selector}` selects no tensor with the dim `{rule.dim}`"
    return Diagnostic("MD0306", message, rule.span, "warning", help=help)
