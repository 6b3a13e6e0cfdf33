"""Rules and windows: kernels split along a window (MD0224), positions without a rule (MD0225).

A way out is a change of the layout that was tried: it can be followed, and the note is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Edit, Fix, Span, advice
from meshdsl.named.ir import NamedOp, NamedProgram, Value, values_of, walk
from meshdsl.placed.layout import Layout, Rule
from meshdsl.records import dataclass
from meshdsl.syntax.edits import removal


@dataclass(frozen=True, slots=True)
class _Window:
    """An operator whose kernel, or whose result, a rule does not suit.

    `dim` is that of the window where the kernel is split (`is_kernel`), else that of the positions.
    """

    op: NamedOp
    dim: str
    rule: Rule
    is_kernel: bool

    @property
    def key(self) -> tuple[str, Rule, bool]:
        """All that a note is of: one for each rule and dim."""
        return self.dim, self.rule, self.is_kernel


def window_notes(program: NamedProgram, layout: Layout) -> Iterator[Diagnostic]:
    """A warning or a note for each rule that does not suit a window; none without a way out."""
    windows = {window.key: window for window in _windows(program, layout)}
    for window in windows.values():
        note = _split_kernel if window.is_kernel else _no_rule
        yield from note(window, program, layout)


def _windows(program: NamedProgram, layout: Layout) -> Iterator[_Window]:
    for op in walk(program.body):
        attrs = dict(op.attrs)
        if op.phase != "forward" or "target" not in attrs or not {"window", "size"} & attrs.keys():
            continue
        try:
            image, *others, result = (layout.bind(v) for v in (*op.ins, *op.outs))
        except DiagnosticError:
            continue  # `lint` reports it
        for dim in attrs.get("window", ()):
            kernel = others[0]
            if dim.name in kernel.splits:
                yield _Window(op, dim.name, kernel.causes[dim.name], True)
        for source, target in zip(attrs["source"], attrs["target"], strict=True):
            if source.name in image.splits and target.name not in result.causes:
                yield _Window(op, target.name, image.causes[source.name], False)


def _split_kernel(window: _Window, program: NamedProgram, layout: Layout) -> Iterator[Diagnostic]:
    rule, dim = window.rule, window.dim
    stored = Rule(("params",), rule.dim, rule.axes, False, rule.span, rule.written)
    fixes = []
    if _suits(window, program, _with(layout, rule)):
        fixes.append(removal(rule.span, "remove the rule"))
    if _suits(window, program, _with(layout, rule, stored)):
        fixes.append(Fix.write(rule.span, str(stored), safe=False))
    message = f"`{window.op.name}` cannot use a kernel that is split along `{dim}`: it is gathered "
    message += "before each use"
    written = _written(rule, tuple(fixes))
    yield Diagnostic("MD0224", message, rule.span, "warning", help=advice(fixes), fixes=written)


def _no_rule(window: _Window, program: NamedProgram, layout: Layout) -> Iterator[Diagnostic]:
    rule, result = window.rule, window.op.out
    selectors = [(result.label,)] if rule.selector and result.is_nameable else []
    for selector in (*selectors, ()):
        other = Rule(selector, window.dim, rule.axes, rule.keep, rule.span, rule.written)
        if _suits(window, program, _with(layout, rule, rule, other)):
            end = Span(rule.span.source, rule.span.end, rule.span.end)
            fix = Fix(f"add `{other}`", (Edit(end, f", {other}"),), safe=False)
            message = f"no rule places `{window.dim}`, which `{window.op.name}` computes from "
            message += f"`{rule.dim}`: the compiler chooses"
            help, fixes = advice((fix,)), _written(rule, (fix,))
            yield Diagnostic("MD0225", message, rule.span, "note", help=help, fixes=fixes)
            return


def _written(rule: Rule, fixes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """The fixes, if the rule is written as in a layout."""
    return fixes if rule.is_in_layout else ()


def _with(layout: Layout, rule: Rule, *instead: Rule) -> Layout:
    """The layout with other rules in the place of one."""
    rules = tuple(r for old in layout.rules for r in (instead if old is rule else (old,)))
    return replace(layout, rules=rules)


def _suits(window: _Window, program: NamedProgram, layout: Layout) -> bool:
    """Whether a layout can be followed, and nothing is to be told of the window any more."""
    try:
        for value in values_of(program):
            _bind(value, layout)
    except DiagnosticError:
        return False
    same = (w for w in _windows(program, layout) if w.op is window.op)
    return all(w.dim != window.dim for w in same)


def _bind(value: Value, layout: Layout) -> None:
    layout.bind(value)
    if value.role in ("param", "state", "grad"):
        layout.bind(value, stored=True)
