"""Rules of a layout that change nothing of a program: it is placed the same without them.

Rules for what is stored (`params:`, `grads:`, `state:`) are none of these: they say how it is
stored even where another rule does, and a program that trains nothing has no gradients to bind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Span
from meshdsl.named.ir import NamedProgram, Value, loops_of, values_of, walk
from meshdsl.placed.layout import STORAGE, Binding, Layout, Rule
from meshdsl.placed.lint import binds_inside, definition
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Placement
from meshdsl.placed.request import Request
from meshdsl.placed.stage_rules import pipeline_of
from meshdsl.records import dataclass
from meshdsl.syntax.edits import removal


def silent_rules(program: NamedProgram, layout: Layout) -> Iterator[Diagnostic]:
    """A note (MD0226) for each rule that changes nothing of a program on the mesh of the layout.

    Rules for axes that the mesh lacks are none of these, nor are rules for an axis of one device:
    they may change something on other meshes.
    """
    rules = [rule for rule in layout.rules if _is_to_act(rule, layout)]
    before = _Bound.of(program, layout) if rules else None
    if before is None:
        return
    loops = {loop.dim.name for loop in loops_of(program)}
    dims = Counter(rule.dim for rule in layout.rules)
    splitting = frozenset(before.splitting())
    for rule in rules:
        if dims[rule.dim] == 1 and rule.span in splitting:
            continue  # nothing else splits what it splits
        if binds_inside(rule, program):
            continue
        others = tuple(other for other in layout.rules if other is not rule)
        after = _Bound.of(program, replace(layout, rules=others), rule.dim)
        if after is not None and after.is_like(before) and _requests_alike(before, after):
            yield _note(rule, rule.dim in loops and not rule.selector)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A layout as stages have it, and what its rules bind of each value wherever that is used.

    Of all values that are bound alike there is one, and none without `dim`.
    """

    program: NamedProgram
    layout: Layout
    pipe: Piped | None
    bindings: Mapping[Value, Binding]

    @classmethod
    def of(cls, program: NamedProgram, layout: Layout, dim: str = "") -> _Bound | None:
        """What a layout binds; None where it cannot be followed, which others report."""
        try:
            layout, pipe = pipeline_of(program, layout)
            values = (v for v in values_of(program) if not dim or v.type.has(dim))
            by_target = {layout.target(value): value for value in values}
            bindings = {value: layout.bind(value) for value in by_target.values()}
            return cls(program, layout, pipe, bindings)
        except DiagnosticError:
            return None

    def splitting(self) -> Iterator[Span]:
        """The places of rules that split something."""
        for binding in self.bindings.values():
            yield from (r.span for dim, r in binding.causes.items() if binding.splits[dim])

    def is_like(self, other: _Bound) -> bool:
        """Whether another layout binds alike what this one binds."""
        return all(
            (mine.splits, mine.unsplit) == (theirs.splits, theirs.unsplit)
            for value, mine in self.bindings.items()
            for theirs in (other.bindings.get(value) or other.layout.bind(value),)
        )


def _requests_alike(one: _Bound, other: _Bound) -> bool:
    """Whether all is requested alike; not so where a request cannot be followed."""
    try:
        return _Requested.of(one) == _Requested.of(other)
    except DiagnosticError:
        return False


@dataclass(frozen=True, slots=True)
class _Requested:
    """All that a layout requests of a program: placed programs follow from it, and are as equal.

    `bound` has, for each value, where it is placed and which dims are to be whole: as made, as
    used, and as stored. `summed` has the splits of dims that operators or their definitions reduce,
    by the number of the result.
    """

    pipe: Piped | None
    bound: tuple[tuple[Placed, ...], ...]
    summed: Mapping[int, tuple[tuple[str, tuple[str, ...]], ...]]

    @classmethod
    def of(cls, of: _Bound) -> _Requested:
        """What a layout requests. Raises what cannot be followed."""
        program, layout, pipe = of.program, of.layout, of.pipe
        request = Request(program, layout, pipe=pipe)
        bound = tuple(_constraints(value, request) for value in values_of(program))
        naming = walk(program.body) if layout.naming else ()
        forms = [form for op in naming for form in (op, *definition(op))]
        summed = enumerate(layout.summed(v, form) for form in forms for v in form.outs)
        return cls(pipe, bound, {number: splits for number, splits in summed if splits})


Placed = tuple[Placement, frozenset[str]]
"""A placement, and the dims that a rule makes whole."""


def _constraints(value: Value, request: Request) -> tuple[Placed, ...]:
    constraints = [request.asked(value), request.used(value)]
    if value.role in ("param", "state", "grad"):
        constraints.append(request.kept(value))
    return tuple((c.placement, c.unsplit) for c in constraints)


def _note(rule: Rule, is_of_loop: bool) -> Diagnostic:
    message = f"`{rule}` changes nothing: the program is placed the same without it"
    if is_of_loop:
        message = f"`{rule}` changes nothing: each device runs all of `repeat {rule.dim}`"
    fixes = (removal(rule.span, "remove the rule"),)
    return Diagnostic("MD0226", message, rule.span, "note", fixes=fixes, strict=True)


def _is_to_act(rule: Rule, layout: Layout) -> bool:
    if rule.selector in STORAGE:
        return False
    sizes = [layout.mesh.size_or_one(axis) for axis in rule.axes]
    return all(size > 1 for size in sizes)
