"""Layouts: rules `dim -> axis`, the tensors they bind, and their precedence.

A rule binds every tensor that has its dim. A selector narrows it: a role (`params:`), a function
(`head:`), one tensor (`h:`); `@` on a tensor is narrower still. Per tensor and dim the narrowest
rule wins, and a narrower rule takes an axis away from a wider one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import NamedTuple

from meshdsl.backends.runtime.values import block
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    OptionEdit,
    Related,
    Source,
    Span,
    advice,
    fail,
)
from meshdsl.ir.types import Dim
from meshdsl.named.declarations import Declarations, declared_integer, known_names, unknown
from meshdsl.named.ir import NamedOp, Value
from meshdsl.named.selectors import (
    FUNCTION,
    GENERAL,
    PIN,
    ROLE,
    STORED,
    TENSOR,
    selected,
    selects,
)
from meshdsl.option_edits import refuse
from meshdsl.placed.free_tensors import freed, way_free
from meshdsl.placed.layout_schedules import used, used_of_text
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.settings import (
    Setting,
    StageRule,
    settings_of,
    stage_rules_of,
)
from meshdsl.placed.sharding_rules import call_of, legal_rows
from meshdsl.placed.sub_axes import sub_axis
from meshdsl.records import dataclass
from meshdsl.schedule.use import ScheduleUse
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal, resized
from meshdsl.syntax.parse import parse_layout, parse_mesh
from meshdsl.syntax.symbols import ACTIVATIONS, ROLES

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"[0-9]{1,10}")

STORAGE = tuple((role,) for role in ROLES)


_ROLE_OF = {"grad": ("grads",), "state": ("state",)}
"""The selector of a role that is stored, beside that of parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule, or one `@`. `axes` are outer first, empty for `none`. Compared by identity.

    Where the mesh has parts of an axis, `axes` are these, and `written` what the rule names.
    """

    selector: tuple[str, ...]
    dim: str
    axes: tuple[str, ...]
    keep: bool
    span: Span
    written: tuple[str, ...] = ()

    def __str__(self) -> str:
        return rule_text(self.selector, self.dim, self.written or self.axes)

    @property
    def is_in_layout(self) -> bool:
        """Whether it is written as in a layout, where a fix can edit it: not as an `@`."""
        return "->" in self.span.text


def rule_text(selector: tuple[str, ...], dim: str, axes: tuple[str, ...]) -> str:
    """A rule as the language writes it: `y: io -> cols`, `a -> (x, y)`, `b -> none`."""
    target = {0: "none", 1: "".join(axes)}.get(len(axes), f"({', '.join(axes)})")
    prefix = f"{'.'.join(selector)}: " if selector else ""
    return f"{prefix}{dim} -> {target}"


class SplitCause(NamedTuple):
    """What splits a dim: a rule or an annotation as written, its place, and what it selects."""

    text: str
    span: Span
    selector: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """The rules that apply to one tensor: its splits, and the rule behind each ruled dim.

    A dim with a rule to `none`, or one that lost its axis, has a cause but no split. `own` are the
    dims whose rule is for this tensor alone, or is an `@` of it.
    """

    splits: dict[str, tuple[str, ...]]
    causes: dict[str, Rule]
    own: frozenset[str] = frozenset()

    def placement(self, mesh: Mesh) -> Placement:
        """The splits as a placement; nothing partial."""
        return placement(mesh, self.splits)

    @property
    def unsplit(self) -> frozenset[str]:
        """The dims that a rule to `none` is for."""
        return frozenset(dim for dim, rule in self.causes.items() if not rule.axes)

    def known(self, splits: Mapping[str, tuple[str, ...]]) -> dict[str, SplitCause]:
        """The rule behind each dim that is split."""
        ruled = ((dim, rule) for dim, rule in self.causes.items() if splits.get(dim))
        return {dim: SplitCause(str(rule), rule.span, rule.selector) for dim, rule in ruled}


Target = Value | tuple[tuple[str, ...], str]
"""A value by itself, or the names of its dims and its role."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A resolved layout on a mesh.

    `declared` has the places where `("dim", name)` and `("axis", name)` are declared. `schedule` is
    that of a pipeline, where the layout names one; `cuts` are the stages that it gives by name.
    `naming` are the rules for functions and tensors: with one of them, values are not alike.
    """

    name: str
    rules: tuple[Rule, ...]
    mesh: Mesh
    declared: Mapping[tuple[str, str], Related] = field(default_factory=dict)
    schedule: ScheduleUse | None = None
    settings: tuple[Setting, ...] = ()
    cuts: tuple[StageRule, ...] = ()
    naming: tuple[Rule, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        naming = (r for r in self.rules if r.selector and r.selector[0] not in ROLES)
        object.__setattr__(self, "naming", tuple(naming))

    def uneven(
        self, dim: str, size: int, axes: tuple[str, ...], span: Span
    ) -> Iterable[Diagnostic]:
        """A note where devices hold nothing of a dim (MD0301), an error on huge meshes (MD0310)."""
        axes = self.mesh.known(axes)
        place = self.declared.get(("dim", dim))
        named = None if place is None else place.span
        for diagnostic in uneven(dim, size, axes, self.mesh, span, named):
            keys = [("dim", dim), *(("axis", axis) for axis in axes)]
            related = tuple(self.declared[key] for key in keys if key in self.declared)
            yield replace(diagnostic, related=related)

    def setting(self, selector: str, name: str) -> Setting | None:
        """The setting of a name for what a selector names, if there is one."""
        fitting = (s for s in self.settings if (s.selector, s.name) == (selector, name))
        return next(fitting, None)

    def setting_for(self, value: Value, name: str) -> Setting | None:
        """The narrowest setting of a name for a value of the forward pass; of equals the last."""
        chosen: tuple[int, Setting] | None = None
        for setting in (s for s in self.settings if s.name == name):
            level = GENERAL if setting.selector == ACTIVATIONS else selected(setting.path, value)
            if level is not None and (chosen is None or level >= chosen[0]):
                chosen = level, setting
        return chosen and chosen[1]

    @property
    def settings_of_tensors(self) -> tuple[Setting, ...]:
        """The settings of single tensors and functions."""
        return tuple(s for s in self.settings if not s.is_of_kind)

    @property
    def known(self) -> frozenset[tuple[str, str]]:
        """The pairs (dim, axis) that some rule splits."""
        return frozenset((rule.dim, axis) for rule in self.rules for axis in rule.axes)

    def bind(self, value: Value, stored: bool = False) -> Binding:
        """The splits that rules demand of `value`; with `stored`, of a stored value.

        Gradients and states are stored as their parameter is, unless rules of their own say more.
        Raises MD0302 (two dims on one axis), MD0303 (equally narrow rules).
        """
        chosen: dict[str, tuple[int, Rule]] = {}
        for level, rule in self._applying(value, stored):
            old = chosen.get(rule.dim)
            if old is None or level > old[0]:
                chosen[rule.dim] = (level, rule)
            elif level == old[0]:
                self._equally_narrow(value, old[1], rule)
        splits = self._displace(value, chosen)
        own = frozenset(d for d, (level, _) in chosen.items() if level >= TENSOR)
        return Binding(splits, {d: rule for d, (_, rule) in chosen.items()}, own)

    def target(self, value: Value) -> Target:
        """All that rules can tell of a value: those with equal targets are bound alike.

        Rules for functions and tensors (`naming`) tell values apart, as soon as there is one.
        """
        if self.naming or value.pins or value.source.pins:
            return value
        return value.type.names, value.role

    def summed(self, value: Value, op: NamedOp) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Splits that rules naming a result of `op` demand of dims that `op` has reduced.

        Less those that `op` cannot follow: it splits no dim along an axis that splits another one.
        """
        naming = [r for r in self.naming if selects(r.selector, value) == TENSOR]
        if not naming:
            return ()
        loops = [row.factor for row in legal_rows(call_of(op)) if row.factor]
        reduced = {d for loop in loops if not any(loop.outs) for d in loop.ins}
        summed = {n for v in op.ins for n in v.type.names if n in reduced}
        demanded: dict[str, tuple[str, ...]] = {}
        for rule in naming:
            if rule.dim not in summed or not self._exists(rule.axes):
                continue
            axes = self.mesh.known(rule.axes)
            taken = {a for others in demanded.values() for a in others}
            if rule.dim not in demanded and taken.isdisjoint(axes):
                demanded[rule.dim] = axes
        return tuple(demanded.items())

    def freed(self, value: Value, results: Iterable[Value]) -> frozenset[str]:
        """The dims of a value that rules leave whole for the function in which it is read.

        Of all `results` of the reader's function, and not of a value that a rule names itself.
        """
        inside = [r for r in self.naming if not r.axes and value.type.has(r.dim)]
        if not inside or value.pins or value.source.pins:
            return frozenset()
        named_dims = {r.dim for r in self.naming if selects(r.selector, value.source) == TENSOR}
        return frozenset(
            rule.dim
            for rule in inside
            if rule.dim not in named_dims
            and all(selects(rule.selector, result) == FUNCTION for result in results)
        )

    def is_stored(self, value: Value, returned: bool) -> bool:
        """Whether rules for stored values bind a value at its definition.

        A gradient is stored as defined where it is `returned` or a `grads:` rule binds it.
        """
        if value.role == "grad":
            return returned or self._has_rule("grads", value)
        return value.role == "state" or (value.role == "param" and not value.is_loaded)

    def _has_rule(self, role: str, value: Value) -> bool:
        return any(
            rule.selector == (role,) and value.type.has(rule.dim) and self._exists(rule.axes)
            for rule in self.rules
        )

    def also(self, dim: Dim, axes: tuple[str, ...], span: Span) -> Layout:
        """The layout with a rule for a dim that the compiler made up: the blocks of a split dim."""
        others = (rule for rule in self.rules if rule.dim != dim.name)
        return replace(self, rules=(*others, Rule((), dim.name, axes, False, span)))

    def _applying(self, value: Value, stored: bool) -> Iterable[tuple[int, Rule]]:
        for rule in self.rules:
            if value.type.has(rule.dim) and self._exists(rule.axes):
                level = self._level(rule, value, stored)
                if level is not None:
                    yield level, rule
        for pin in value.pins or value.source.pins:
            if self._exists(pin.axes) and value.type.has(pin.dim):
                yield PIN, Rule((value.label,), pin.dim, pin.axes, False, pin.span)

    def _exists(self, axes: tuple[str, ...]) -> bool:
        """Whether a rule to these axes has a meaning here: `none`, or an axis of the mesh."""
        return not axes or bool(self.mesh.known(axes))

    def _level(self, rule: Rule, value: Value, stored: bool) -> int | None:
        if not rule.selector:
            return GENERAL
        if rule.selector[0] in ROLES:
            if not stored or rule.selector not in (("params",), _ROLE_OF.get(value.role)):
                return None
            return STORED if rule.selector == ("params",) else ROLE
        return selected(rule.selector, value)

    def _equally_narrow(self, value: Value, first: Rule, second: Rule) -> None:
        if first.axes == second.axes:
            return
        fixes = (removal(second.span, "remove this rule"),) if second.is_in_layout else ()
        fail(
            "MD0303",
            f"two rules for `{first.dim}` of `{value.label}` are equally specific: "
            f"`{first}` and `{second}`",
            second.span,
            Related(first.span, "the other rule"),
            help=advice(fixes, f"or fix the tensor: `{value.label}[{first.dim}@AXIS, …]`"),
            fixes=fixes,
        )

    def _displace(
        self, value: Value, chosen: dict[str, tuple[int, Rule]]
    ) -> dict[str, tuple[str, ...]]:
        """Splits after narrower rules have taken their axes from wider ones."""
        owner: dict[str, str] = {}
        for dim in sorted(chosen, key=lambda d: (-chosen[d][0], value.type.names.index(d))):
            for axis in self.mesh.known(chosen[dim][1].axes):
                if axis in owner and chosen[owner[axis]][0] == chosen[dim][0]:
                    self._one_axis(value, axis, chosen[owner[axis]][1], chosen[dim][1])
                owner.setdefault(axis, dim)
        return {
            d: tuple(a for a in self.mesh.known(rule.axes) if owner[a] == d)
            for d, (_, rule) in chosen.items()
        }

    def _one_axis(self, value: Value, axis: str, first: Rule, second: Rule) -> None:
        if self.mesh.size(axis) == 1:
            return
        # An update has tensors without a name beside a state: rules for its parameter free all.
        of = value.rules_from if value.role == "state" and value.rules_from else value
        fixes, inner = freed(of, second), ""
        if first.written:
            from meshdsl.placed.refined_layout import within

            inner, others = within(first, second, self.mesh)
            fixes = (*others, *fixes)
        said = f"`{value.label}`" if value.name else "this subexpression"
        said += f" of `{of.label}`" if of is not value else ""
        fail(
            "MD0302",
            f"{said} {value.type} would have `{first.dim}` and `{second.dim}` both split "
            f"over mesh axis `{axis}`",
            value.span,
            Related(first.span, f"`{first}`"),
            Related(second.span, f"`{second}`"),
            help=advice(fixes, inner or "or split one of them over another axis")
            if fixes
            else inner or f"split one of them over another axis, or {way_free(of, second)}",
            fixes=fixes,
        )


MOST_UNEVEN = 1 << 16
"""Devices of the largest mesh on which blocks may differ in size: each block is worked out."""


def uneven(
    dim: str,
    size: int,
    axes: tuple[str, ...],
    mesh: Mesh,
    span: Span,
    declared: Span | None = None,
) -> Iterable[Diagnostic]:
    """MD0301 where a device along `axes` has nothing of a dim; MD0310 on a huge mesh.

    `declared` is the place of the dim's name in its declaration.
    """
    ways = tuple(mesh.size(axis) for axis in axes)
    count = math.prod(ways)
    if size % count == 0:
        return
    over = f"mesh axis `{axes[0]}`" if len(axes) == 1 else f"mesh axes {', '.join(axes)}"
    near = nearest(size, count)
    sizes = " or ".join(f"`--set {dim}={n}`" for n in near)
    fixes = () if declared is None else resized(declared, near)
    sizes = f"or {sizes} for one run" if fixes else f"the nearest sizes that divide: {sizes}"
    if mesh.devices > MOST_UNEVEN:
        message = (
            f"dim `{dim}` of size {size} does not divide over {over} of size {count}, and on more "
            f"than {MOST_UNEVEN:,} devices it has to"
        )
        yield Diagnostic("MD0310", message, span, help=advice(fixes, sizes), fixes=fixes)
        return
    # Of nested blocks the last need not be the smallest: 7 over 2 and 3 are 2, 2, 0, 1, 1, 1.
    every = itertools.product(*map(range, ways))
    if not all(block(size, ways, at)[1] for at in every):
        message = (
            f"some devices store no part of dim `{dim}`: it has size {size}, over {over} of size "
            f"{count}"
        )
        help = advice(fixes, sizes, "the program is right as it is, but those devices wait")
        yield Diagnostic("MD0301", message, span, "note", help=help, fixes=fixes)


def nearest(size: int, ways: int) -> tuple[int, ...]:
    """The sizes next to one that divide into so many parts."""
    near = (size // ways * ways, -(-size // ways) * ways)
    return tuple(n for n in dict.fromkeys(near) if n > 0)


# --- from syntax -----------------------------------------------------------------------------

NO_MESH = Mesh("none", ())
"""The mesh of a layout that is looked at by itself."""


def resolve_mesh(
    declarations: Declarations, mesh: str | None, layout: str | None = None, sbp: str | None = None
) -> Mesh:
    """The mesh called `mesh`, or written as `data:2,model:4`.

    For None: the first declared that has every axis the layout names (as many axes as the `sbp`
    block has components), else the one that lacks fewest; one device when none is declared.
    Raises a diagnostic when there is no such mesh, or it is wrong.
    """
    problems = Diagnostics()
    result = collect_mesh(declarations, mesh, layout, sbp, problems)
    problems.raise_errors()
    return result


def collect_mesh(
    declarations: Declarations,
    mesh: str | None,
    layout: str | None,
    sbp: str | None,
    diagnostics: Diagnostics,
) -> Mesh:
    """The mesh of `resolve_mesh`; what is wrong with a declared one goes to `diagnostics`.

    Raises a diagnostic when there is no such mesh.
    """
    if mesh is not None and "{" in mesh:
        return mesh_of_language(mesh, "--mesh", declarations)
    if mesh is not None and ":" in mesh:
        return _mesh_of_text(mesh)
    if mesh is None:
        if not declarations.meshes:
            return Mesh("one", ())
        mesh = _suiting_mesh(declarations, layout, sbp)
    if mesh not in declarations.meshes:
        name = ast.Name(mesh, Span(Source("--mesh", mesh), 0, len(mesh)))
        help = "write the name of a mesh, or its axes: `--mesh '{ data: 2, model: 4 }'`"
        raise DiagnosticError(unknown("MD0108", "mesh", name, list(declarations.meshes), help))
    return collect_axes(declarations.meshes[mesh], declarations, diagnostics)


def _suiting_mesh(declarations: Declarations, layout: str | None, sbp: str | None) -> str:
    """The declared mesh that has every axis of a layout; else the one that lacks fewest."""
    meshes = declarations.meshes
    if sbp is not None and sbp in declarations.sbps:
        counts = {len(e.components) for e in declarations.sbps[sbp].entries}
        fitting = (n for n, m in meshes.items() if counts <= {len(m.axes)})
        return next(fitting, next(iter(meshes)))
    axes = axes_of(declarations, layout)
    lacking = {name: axes - {a.name.text for a in node.axes} for name, node in meshes.items()}
    return min(lacking, key=lambda name: len(lacking[name]))


def axes_of(declarations: Declarations, layout: str | None) -> set[str]:
    """The axes that a layout names, by its name or written out; those of the first for None.

    None of a layout that there is not.
    """
    if layout is None:
        layout = next(iter(declarations.layouts), "")
    cuts: tuple[StageRule, ...] = ()
    rules: Iterable[Rule]
    if layout in declarations.layouts or is_of_language(layout):
        node = declarations.layouts.get(layout) or _parsed(layout, "--layout")
        asked = collect_declared(node, declarations, Diagnostics())
        rules, cuts = asked.rules, asked.cuts
    else:
        rules = _rules_of_text(layout, "--layout") if ":" in layout else ()
    axes = {axis.partition(".")[0] for rule in rules for axis in rule.axes}
    for cut in cuts:
        axes.add(cut.axis)
    return axes


def mesh_of(node: ast.MeshDecl, declarations: Declarations) -> Mesh:
    """A declared mesh with its sizes computed. Raises all that is wrong with it."""
    problems = Diagnostics()
    mesh = collect_axes(node, declarations, problems)
    problems.raise_errors()
    return mesh


def collect_axes(node: ast.MeshDecl, declarations: Declarations, diagnostics: Diagnostics) -> Mesh:
    """A declared mesh; an axis whose size is wrong has the size 1, one that is wrong is left out.

    Errors go to `diagnostics`.
    """
    axes: dict[str, int] = {}
    for axis in node.axes:
        name = axis.name
        if name.text in axes:
            first = next(a.name for a in node.axes if a.name.text == name.text)
            message = f"mesh axis `{name.text}` is declared twice"
            where = (Related(first.span, "first declared here"),)
            help = "give it another name"
            diagnostics.add(Diagnostic("MD0104", message, name.span, related=where, help=help))
            continue
        if name.text == "none":
            help = "in a layout, `dim -> none` splits over no axis; choose another name"
            message = "`none` cannot name a mesh axis"
            diagnostics.add(Diagnostic("MD0109", message, name.span, help=help))
            continue
        size = diagnostics.of(partial(declared_integer, axis.size, declarations))
        axes[name.text] = 1 if size is None else size
    return Mesh(node.name.text, tuple(axes.items()))


def mesh_of_language(text: str, option: str, declarations: Declarations) -> Mesh:
    """A mesh written as the language has it, and as it is printed: `{ rows: 2, cols: 2 }`."""
    node, errors = parse_mesh(Source(option, text))
    if node is None:
        raise DiagnosticError(*errors)
    if node.profile is not None:
        axes, cluster = mesh_of(node, declarations), node.profile.text
        fix = Fix(
            f"write `{option} '{axes}' --cluster {cluster}`",
            options=(OptionEdit(option, str(axes), text), OptionEdit("--cluster", cluster)),
        )
        message = "a mesh that is written out has axes alone"
        refuse("MD0601", message, fix, span=node.profile.span)
    return replace(mesh_of(node, declarations), name=text)


def _mesh_of_text(text: str) -> Mesh:
    axes: dict[str, int] = {}
    for name, size, span in _pairs(text, "--mesh", _AXES):
        if not _SIZE.fullmatch(size) or not 1 <= int(size) < 2**31:
            message = "the size of a mesh axis is an integer in 1 … 2147483647"
            fail("MD0105", message, span, help=f"write `--mesh {_AXES}`")
        if name == "none":
            fail("MD0109", "`none` cannot name a mesh axis", span, help="choose another name")
        if name in axes:
            fail("MD0104", f"mesh axis `{name}` is given twice", span, help="name each axis once")
        axes[name] = int(size)
    return Mesh(text, tuple(axes.items()))


_AXES, _RULES = "data:2,model:4", "batch:data,hidden:model"
"""What `--mesh` and `--layout` look like."""


def _pairs(text: str, option: str, example: str) -> Iterable[tuple[str, str, Span]]:
    """`a:b,c:d` (or with `;`) as pairs with their places."""
    source = Source(option, text)
    start = 0
    for part in text.replace(";", ",").split(","):
        span = Span(source, start, start + max(1, len(part)))
        start += len(part) + 1
        left, colon, right = part.strip().partition(":")
        if not part.strip() and text.strip():
            continue
        if not colon or not _NAME.fullmatch(left.strip()) or not right.strip():
            help = f"for instance `{option} {example}`"
            fail("MD0601", f"`{option}` is written `name:value,name:value`", span, help=help)
        yield left.strip(), right.strip(), span


def resolve_layout(
    declarations: Declarations,
    layout: str | None,
    mesh: Mesh,
    schedule: str | None = None,
    option: str = "--layout",
) -> Layout:
    """The layout called `layout`, or written out; the first for None.

    It is written out as it is printed, `batch -> data, hidden -> model`, or in Mesh-TensorFlow's
    form, `batch:data,hidden:model`.

    An empty text is the layout without rules. A `schedule`, `one_f_one_b[batch](8)`, replaces that
    of the layout. `option` is where `layout` is from.

    Raises a diagnostic when there is no such layout, or it is wrong by itself.
    """
    problems = Diagnostics()
    result = collect_layout(declarations, layout, mesh, problems, schedule, option)
    problems.raise_errors()
    return result


def declared_layout(declarations: Declarations, layout: str | None, sbp: str | None) -> str | None:
    """The name of the declared layout that is chosen: the first for None.

    None where it is written out, or an `sbp` block is taken.
    """
    if sbp is not None:
        return None
    name = next(iter(declarations.layouts), None) if layout is None else layout
    return name if name in declarations.layouts else None


def collect_layout(
    declarations: Declarations,
    layout: str | None,
    mesh: Mesh,
    diagnostics: Diagnostics,
    schedule: str | None = None,
    option: str = "--layout",
) -> Layout:
    """The layout of `resolve_layout`, without what is wrong with a declared one.

    That is reported in `diagnostics`. Raises a diagnostic when there is no such layout.
    """
    if layout is None:
        layout = next(iter(declarations.layouts), "")
    if layout in declarations.layouts:
        node = declarations.layouts[layout]
        resolved = collect_declared(node, declarations, diagnostics, mesh)
    elif is_of_language(layout):
        resolved = collect_declared(_parsed(layout, option), declarations, diagnostics, mesh)
    else:
        rules = _written_out(declarations, layout, option) if layout else ()
        resolved = Layout(layout or "none", tuple(rules), mesh, _places(declarations, mesh))
    if schedule is not None:
        use = diagnostics.of(partial(used_of_text, schedule, declarations))
        resolved = replace(resolved, schedule=use)
    for rule in resolved.rules:
        if mesh.parts or "." in "".join(rule.axes):
            from meshdsl.placed.refined_layout import refined

            return refined(resolved, diagnostics)
    return resolved


def is_of_language(layout: str) -> bool:
    """Whether a layout is written out as the language has it, and as it is printed."""
    return any(sign in layout for sign in ("->", "=", "{"))


def _parsed(layout: str, option: str) -> ast.LayoutDecl:
    """The tree of a layout that is written out. Raises what is wrong with it.

    Without a name it is named by its text.
    """
    node, errors = parse_layout(Source(option, layout))
    if node is None:
        raise DiagnosticError(*errors)
    return (
        node
        if node.name.text
        else replace(node, name=ast.Name(layout, Span(Source(option, layout), 0, len(layout))))
    )


def _written_out(declarations: Declarations, layout: str, option: str) -> Iterable[Rule]:
    """The rules of a layout that is written out. Raises a diagnostic for the name of none."""
    if ":" in layout:
        return _rules_of_text(layout, option)
    span = Span(Source(option, layout), 0, len(layout))
    if layout in declarations.sbps:
        message = f"`{layout}` is an `sbp` block, not a layout"
        where = Related(declarations.sbps[layout].name.span, "declared here")
        fail("MD0108", message, span, where, help=f"choose it with `--sbp {layout}`")
    name, layouts = ast.Name(layout, span), list(declarations.layouts)
    help = f"{known_names('layout', layouts)}; rules are written `{option} 'batch -> data'`"
    raise DiagnosticError(unknown("MD0108", "layout", name, layouts, help))


def _places(declarations: Declarations, mesh: Mesh) -> dict[tuple[str, str], Related]:
    """Where the dims of a file and the axes of a mesh are declared, with their sizes."""
    places = {
        ("dim", name): Related(span, f"`{name}` is of size {declarations.dims[name].size}")
        for name, span in declarations.dim_spans.items()
    }
    node = declarations.meshes.get(mesh.name)
    for axis in node.axes if node is not None else ():
        name = axis.name.text
        message = f"`{name}` is of size {mesh.size_or_one(name)}"
        places["axis", name] = Related(axis.name.span, message)
    return places


def _rules_of_text(text: str, option: str) -> Iterable[Rule]:
    """Mesh-TensorFlow's form; a dim named twice is split over several axes, outer first."""
    by_dim: dict[str, Rule] = {}
    for dim, axis, span in _pairs(text, option, _RULES):
        if not _NAME.fullmatch(axis) and sub_axis(axis) is None:
            help = f"for instance `{option} {_RULES}`"
            fail("MD0601", f"`{axis}` is no axis of a mesh", span, help=help)
        axes = () if axis == "none" else (axis,)
        before = by_dim[dim].axes if dim in by_dim else ()
        if dim in by_dim and not (axes and before):
            message = f"two rules for `{dim}`: it is split, and whole"
            fail(
                "MD0303",
                message,
                span,
                Related(by_dim[dim].span, "the other rule"),
                help="keep one of them",
            )
        if axis in before:
            message, help = f"`{dim}` is split over one axis twice", "name each axis once"
            fail("MD0302", message, span, help=help)
        by_dim[dim] = Rule((), dim, before + axes, False, span)
    return by_dim.values()


def collect_declared(
    node: ast.LayoutDecl, declarations: Declarations, diagnostics: Diagnostics, mesh: Mesh = NO_MESH
) -> Layout:
    """A declared layout on a mesh: what it says, over what the layouts say that it extends.

    A rule displaces one of the same selector and dim. The schedule is that of the nearest layout
    which has one. What is wrong is left out; errors go to `diagnostics`.
    """
    chain = _chain(node, declarations, diagnostics)
    rules: dict[tuple[tuple[str, ...], str], Rule] = {}
    for layout in chain:
        rules.update(_own_rules(layout, diagnostics))
    settings, cuts = settings_of(chain, diagnostics), stage_rules_of(chain, diagnostics)
    calls = (layout.schedule for layout in reversed(chain) if layout.schedule is not None)
    call = next(calls, None)
    schedule = None if call is None else diagnostics.of(partial(used, call, declarations))
    places = _places(declarations, mesh)
    return Layout(node.name.text, tuple(rules.values()), mesh, places, schedule, settings, cuts)


def _chain(
    node: ast.LayoutDecl, declarations: Declarations, diagnostics: Diagnostics
) -> list[ast.LayoutDecl]:
    """The layouts that one extends, the widest first, and itself."""
    # By identity: two layouts are compared rule by rule, and a chain of hundreds is walked often.
    chain, met = [node], {id(node)}
    while (base := chain[-1].base) is not None:
        if base.text not in declarations.layouts:
            diagnostics.add(unknown("MD0108", "layout", base, list(declarations.layouts)))
            break
        parent = declarations.layouts[base.text]
        if id(parent) in met:
            start = next(i for i, layout in enumerate(chain) if layout is parent)
            diagnostics.add(_circle(chain[start:]))
            break
        chain.append(parent)
        met.add(id(parent))
    return chain[::-1]


def _circle(layouts: list[ast.LayoutDecl]) -> Diagnostic:
    """The error of layouts each of which extends the next, and the last the first."""
    first = min(layouts, key=lambda layout: layout.span.start)
    assert first.base is not None
    bases = (n.base.span for n in layouts if n is not first and n.base is not None)
    others = tuple(Related(span, "and so back to it") for span in bases)
    message = f"layout `{first.name.text}` extends itself"
    alone = Span(first.span.source, first.name.span.end, first.base.span.end)
    fixes = (Fix(f"remove `extends {first.base.text}`", (Edit(alone, ""),), safe=False),)
    return Diagnostic("MD0107", message, first.base.span, related=others, fixes=fixes)


def _own_rules(
    node: ast.LayoutDecl, diagnostics: Diagnostics
) -> dict[tuple[tuple[str, ...], str], Rule]:
    by_target: dict[tuple[tuple[str, ...], str], Rule] = {}
    for item in node.rules:
        axes = tuple(a.text for a in item.axes)
        if len(set(axes)) != len(axes):
            message, help = f"`{item.dim.text}` is split over one axis twice", "name each axis once"
            diagnostics.add(Diagnostic("MD0302", message, item.span, help=help))
            continue
        rule = Rule(tuple(s.text for s in item.selector), item.dim.text, axes, item.keep, item.span)
        old = by_target.setdefault((rule.selector, rule.dim), rule)
        if old is not rule:
            message = f"two rules for `{rule.dim}` are equally specific: `{old}` and `{rule}`"
            where = (Related(old.span, "the other rule"),)
            fixes = (removal(rule.span, "remove this rule", safe=old.axes == rule.axes),)
            diagnostics.add(Diagnostic("MD0303", message, rule.span, related=where, fixes=fixes))
    return by_target
