"""A layout that uses parts of mesh axes: the mesh in whose axes they are whole, and its rules.

This is the one place where a part is told from an axis. All that comes after sees the refined mesh,
whose devices have the same numbers; `Mesh.written` gives the names back.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Diagnostic, Diagnostics, Edit, Fix, Related, Span, advice
from meshdsl.placed.placements import Mesh
from meshdsl.placed.sub_axes import Parts, SubAxis, parts_of, resolved, sub_axis, whole_axis

if TYPE_CHECKING:
    from meshdsl.placed.layout import Layout, Rule

_Cuts = Mapping[int, tuple[SubAxis, "Rule | None"]]
"""The products of sizes after which an axis is cut, with a part that begins or ends there."""


def refined(layout: Layout, diagnostics: Diagnostics) -> Layout:
    """The layout on the mesh whose axes are the parts that its rules name.

    Rules with a part that there cannot be (MD0318), or with one axis twice (MD0302), are left out;
    parts of axes that the mesh does not have stay as they are. Stages by name are on whole axes
    (MD0318).
    """
    rules: list[Rule] = []
    declared = layout.mesh.whole
    by_axis: dict[str, dict[int, tuple[SubAxis, Rule | None]]] = {
        axis: {part.end: (part, None) for name, _ in its if (part := sub_axis(name)) is not None}
        for axis, its in layout.mesh.parts
    }
    for rule in layout.rules:
        named = [part for name in rule.axes if (part := sub_axis(name)) is not None]
        parts = [part for part in named if part.axis in declared.names]
        wrong = [w for part in parts for w in _wrong(part, rule, declared)]
        wrong = wrong or [
            w
            for part in parts
            for w in _conflict(part, rule, by_axis.get(part.axis, {}), declared.size(part.axis))
        ]
        if wrong:
            diagnostics.add(wrong[0])
            continue
        rules.append(rule)
        for part in parts:
            cuts = by_axis.setdefault(part.axis, {})
            for product in {part.before, part.end} - {1}:
                cuts.setdefault(product, (part, rule))
    sizes = {axis: declared.size(axis) for axis in by_axis}
    cut_up = tuple((axis, parts_of(axis, sizes[axis], {*cuts})) for axis, cuts in by_axis.items())
    mesh, places = declared.refined(cut_up), dict(layout.declared)
    for axis, its in cut_up:
        place = places.get(("axis", axis))
        places |= {} if place is None else {("axis", part): place for part, _ in its}
    in_parts = {axis for axis, its in cut_up if len(its) > 1}
    for stage in (stage for stage in layout.cuts if stage.axis in in_parts):
        message = (
            f"`{stage}`: stages use a whole axis, and another rule names a sub-axis of "
            f"`{stage.axis}`"
        )
        help = f"split dims over other axes than `{stage.axis}`"
        diagnostics.add(Diagnostic("MD0318", message, stage.span, help=help))
    on_parts = tuple(_on_parts(rules, cut_up, diagnostics))
    return replace(layout, rules=on_parts, mesh=mesh, declared=places)


def _wrong(part: SubAxis, rule: Rule, mesh: Mesh) -> Iterator[Diagnostic]:
    """MD0318 for a part that an axis of this size does not have."""
    size = mesh.size(part.axis)
    before = ".".join([part.axis, *map(str, part.sizes[:-1])])
    if 1 in part.sizes or 0 in part.sizes:
        message = f"`{part}`: the size of a sub-axis is 2 or more"
        left = [n for n in part.sizes if n > 1]
        shorter = ".".join([part.axis, *map(str, left)])
        fixes = _renamed(rule, str(part), shorter)
        help = advice(fixes, "or another size") if fixes else f"write `{shorter}`, or another size"
        yield Diagnostic("MD0318", message, rule.span, help=help, fixes=fixes)
    elif size % part.end:
        inner = f"{' x '.join(map(str, part.sizes))} = {part.end}" if part.before > 1 else part.end
        message = f"`{part}` is no sub-axis of `{part.axis}`, of size {size}: {inner} does not "
        message += "divide it"
        room = size // part.before if size % part.before == 0 else 1
        fitting = [f"{before}.{n}" for n in range(2, room + (part.before > 1)) if room % n == 0]
        fixes = tuple(fix for new in fitting[:8] for fix in _renamed(rule, str(part), new))
        help = f"there are {', '.join(f'`{n}`' for n in fitting[:8])}" if fitting else ""
        help = advice(fixes) or help or "give the axis another size"
        yield Diagnostic("MD0318", message, rule.span, help=help, fixes=fixes)


def _conflict(part: SubAxis, rule: Rule, cuts: _Cuts, size: int) -> Iterator[Diagnostic]:
    """MD0318 for a part that begins or ends inside of what another one does not cut."""
    for product in {part.before, part.end}:
        for other, (cause, of) in cuts.items():
            least, most = sorted((product, other))
            if most % least == 0:
                continue
            message = f"`{part}` and `{cause}` do not nest: they divide `{part.axis}` "
            message += f"into {product} and into {other} groups of devices"
            room = size // cause.end
            asked = [part.sizes[-1], *range(2, room + 1)]
            inner = next((n for n in asked if room % n == 0), 1)
            fixes = _renamed(rule, str(part), f"{cause}.{inner}" if inner > 1 else str(cause))
            help = f"name a sub-axis of the other, as `{cause}.{inner}`"
            if inner == 1:
                help = f"write `{cause}` for both, or a size of `{part.axis}` that both divide"
            help = advice(fixes) or help
            where = () if of is None else (Related(of.span, f"`{of}`"),)
            yield Diagnostic("MD0318", message, rule.span, related=where, help=help, fixes=fixes)


def _on_parts(rules: list[Rule], parts: Parts, diagnostics: Diagnostics) -> Iterator[Rule]:
    """Rules to the parts of a mesh. One that has a part twice is left out, with MD0302."""
    for rule in rules:
        each = [resolved(axis, parts) or (axis,) for axis in rule.axes]
        axes = tuple(itertools.chain.from_iterable(each))
        if len(set(axes)) == len(axes):
            yield replace(rule, axes=axes, written=rule.axes)
            continue
        twice = next(axis for axis in axes if axes.count(axis) > 1)
        first, second = (a for a, its in zip(rule.axes, each, strict=True) if twice in its)
        message = f"`{rule.dim}` is split over one axis twice: `{first}` and `{second}` overlap"
        inner = _within(first, second, dict(parts))
        fixes = _renamed(rule, second, inner)
        help = f"the sub-axis inside `{first}` is `{inner}`" if inner else "name each sub-axis once"
        help = advice(fixes) or help
        diagnostics.add(Diagnostic("MD0302", message, rule.span, help=help, fixes=fixes))


def within(first: Rule, second: Rule, mesh: Mesh) -> tuple[str, tuple[Fix, ...]]:
    """The way out where both rules name the outer part of one axis: the one within the other.

    Empty where they do not, or no such part fits.
    """
    for one, other in itertools.product(first.written, second.written):
        inner = _within(one, other, dict(mesh.parts))
        if inner is not None:
            fixes = _renamed(second, other, inner)
            return f"`{inner}` is the sub-axis of `{whole_axis(one)}` inside `{one}`", fixes
    return "", ()


def _within(
    first: str, second: str, parts: Mapping[str, tuple[tuple[str, int], ...]]
) -> str | None:
    """`tp.2.4` for `tp.2` and `tp.4`, if the axis is that long."""
    one, other = sub_axis(first), sub_axis(second)
    if one is None or other is None or one.axis != other.axis or other.before > 1:
        return None
    inner = SubAxis(one.axis, (*one.sizes, *other.sizes))
    size = math.prod(n for _, n in parts[one.axis])
    return None if size % inner.end else str(inner)


def _renamed(rule: Rule, name: str, new: str | None) -> tuple[Fix, ...]:
    place = re.search(rf"(?<!\w){re.escape(name)}(?![\w.])", rule.span.text)
    if place is None or new is None or not rule.is_in_layout:
        return ()
    start = rule.span.start
    span = Span(rule.span.source, start + place.start(), start + place.end())
    return (Fix(f"write `{new}`", (Edit(span, new),), safe=False),)
