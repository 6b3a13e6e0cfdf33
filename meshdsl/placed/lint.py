"""The lint of a layout or an `sbp` block under a program, before anything is placed.

Rules that bind nothing, and axes that the mesh lacks, are reported, in a file never as an error;
rules and annotations that cannot be followed are errors. Placing needs none of it: it raises the
first of what cannot be followed.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Related,
    Severity,
    Span,
    advice,
    counted,
    did_you_mean,
    spelled_right,
)
from meshdsl.named.declarations import Declarations
from meshdsl.named.expand import expand, may_be_expanded
from meshdsl.named.ir import NamedOp, NamedProgram, Pin, Value, loops_of, values_of, walk
from meshdsl.named.prelude_files import function_names
from meshdsl.named.selectors import TENSOR, selects
from meshdsl.ops.opdef import lookup
from meshdsl.option_edits import leave_out
from meshdsl.placed import rings
from meshdsl.placed.layout import STORAGE, Layout, Rule
from meshdsl.placed.pipelined import check_layers, is_forward
from meshdsl.placed.request import Request, ShardingSpec
from meshdsl.placed.sbp_block import Annotations, check_component, means
from meshdsl.placed.settings import Setting, StageRule
from meshdsl.placed.stage_rules import pipeline_of
from meshdsl.placed.sub_axes import whole_axis
from meshdsl.placed.window_rules import window_notes
from meshdsl.schedule.use import ScheduleUse
from meshdsl.syntax import ast
from meshdsl.syntax.call_edits import without_option, written_anew
from meshdsl.syntax.edits import removal, word_in
from meshdsl.syntax.symbols import ACTIVATIONS, ROLES


def lint(
    program: NamedProgram | None,
    spec: ShardingSpec,
    declarations: Declarations,
    fused: bool = True,
) -> Diagnostics:
    """What is wrong with a layout or a block under a program, and what has no effect.

    Of a program that could not be built (None) the names in the file tell a part of that. Unless
    `fused`, attention is written in primitives.
    """
    diagnostics = Diagnostics()
    if isinstance(spec, Annotations):
        if program is None:
            _lint_names_in_block(spec, declarations, diagnostics)
        else:
            _lint_block(program, spec, diagnostics)
    elif program is None:
        _lint_names(spec, declarations, diagnostics)
    else:
        _lint_layout(program, spec, diagnostics)
        if spec.settings:
            _lint_rings(program, spec, fused, diagnostics)
        _lint_demands(program, spec, diagnostics)
    return diagnostics


def _lint_layout(program: NamedProgram, layout: Layout, diagnostics: Diagnostics) -> None:
    """Report rules that cannot have an effect, and schedules and stages that do not fit."""
    values = tuple(values_of(program))
    _lint_rules(program, values, layout, diagnostics)
    _lint_settings(values, layout, diagnostics)
    _lint_blocks(program, values, layout, diagnostics)
    if layout.cuts:
        _lint_stages(program, values, layout, diagnostics)
    if layout.schedule is not None:
        _lint_schedule(program, layout, layout.schedule, diagnostics)
    diagnostics.add(*window_notes(program, layout))
    # The backward pass copies the pins of a tensor.
    for pin in dict.fromkeys(pin for value in values for pin in value.pins):
        for axis in pin.axes:
            if not layout.mesh.known((axis,)):
                rule = Rule((), pin.dim, pin.axes, False, pin.span)
                diagnostics.add(_no_axis(rule, axis, layout))


def _lint_rules(
    program: NamedProgram, values: tuple[Value, ...], layout: Layout, diagnostics: Diagnostics
) -> None:
    """Warn of axes that the mesh lacks, and of rules that bind nothing."""
    # Rules for the dims of a `repeat` are reported elsewhere.
    dims = {d for v in values for d in v.type.names} | {n.dim.name for n in loops_of(program)}
    for rule in layout.rules:
        for axis in rule.axes:
            if axis not in layout.mesh.names:
                diagnostics.add(_no_axis(rule, axis, layout))
        if rule.dim not in dims:
            diagnostics.add(_no_dim(rule, dims, layout))
            if not _selects_some(rule, values):
                diagnostics.add(_selects_nothing(rule, values))
        elif not (
            _selects_any(rule, values)
            or _selects_summed(rule, program, layout)
            or binds_inside(rule, program)
            or program.unspoken.intersection(rule.selector[-1:])  # MD0226: attention has it inside
        ):
            diagnostics.add(_selects_nothing(rule, values))


def _lint_settings(values: tuple[Value, ...], layout: Layout, diagnostics: Diagnostics) -> None:
    """Warn of settings for tensors and functions that the program does not have.

    A note says that `activations` are all, where one tensor has that name.
    """
    for setting in (s for s in layout.settings if s.selector == ACTIVATIONS):
        alike = [v for v in values if selects(setting.path, v) is not None]
        if alike:
            diagnostics.add(_of_all(setting, alike[0]))
    for setting in layout.settings_of_tensors:
        if not any(selects(setting.path, v) is not None for v in values):
            labels, dotted = _selectable(values)
            names = dotted if len(setting.path) > 1 else labels
            diagnostics.add(_sets_nothing(setting, sorted(names)))


def _lint_rings(
    program: NamedProgram, layout: Layout, fused: bool, diagnostics: Diagnostics
) -> None:
    """Report attentions that cannot be rings; note settings that none follows and none is told."""
    told = {d.span for d in diagnostics if d.code == "MD0306"}
    notes = diagnostics.of(lambda: [*rings.without_effect(program, layout, fused)])
    diagnostics.add(*(note for note in notes or () if note.span not in told))


def _of_all(setting: Setting, alike: Value) -> Diagnostic:
    """MD0313 where a setting of all activations might be taken for that of a tensor or function."""
    message = f"`{ACTIVATIONS}` is every value of the forward pass, not only the one of this name"
    is_tensor = alike.label == ACTIVATIONS
    of_name = f"the tensor `{ACTIVATIONS}`" if is_tensor else f"in the function `{ACTIVATIONS}`"
    where = Related(alike.span, of_name)
    help = "to set it for that one alone, rename that one and write its new name here"
    if not is_tensor:
        help += f"; for one of its tensors, write `{ACTIVATIONS}.NAME`"
    return Diagnostic("MD0313", message, setting.span, "note", related=(where,), help=help)


def _lint_blocks(
    program: NamedProgram, values: tuple[Value, ...], layout: Layout, diagnostics: Diagnostics
) -> None:
    """Report splits after which devices have nothing of a dim (MD0301), or too many blocks.

    Stages of a pipeline have as many iterations each, or there is none: that is MD0334.
    """
    loop_dims = {loop.dim.name for loop in loops_of(program)} if program.goal else set[str]()
    sizes = {d.name: d.size for v in values for d in v.type.dims}
    pins = dict.fromkeys(pin for value in values for pin in value.pins)
    bound: tuple[Rule | Pin, ...] = (*layout.rules, *pins)
    for rule in bound:
        is_piped = isinstance(rule, Rule) and not rule.selector and rule.dim in loop_dims
        if rule.dim in sizes and not is_piped:
            diagnostics.add(*layout.uneven(rule.dim, sizes[rule.dim], rule.axes, rule.span))


# --- schedules -----------------------------------------------------------------------------------


def _lint_schedule(
    program: NamedProgram, layout: Layout, use: ScheduleUse, diagnostics: Diagnostics
) -> None:
    """Report a schedule that does not fit the program or the mesh, or has nothing to do there.

    Where stages are run through, micro-batches divide the dims that they cut (MD0534); without dims
    there are batches that are accumulated (MD0535); its table can be made for the devices of the
    axis (MD0529, MD0536), and `layers=` has a number for each stage (MD0538).
    """
    sizes = {n.dim.name: n.dim.size for n in loops_of(program)}
    rules = [r for r in layout.rules if r.dim in sizes and r.selector[:1] not in STORAGE]
    rules = [r for r in rules if not r.selector] or rules
    if cuts := _cuts_of(program, layout):
        _lint_cut_network(program, layout, use, cuts, diagnostics)
        return
    if any(_is_to_cut(rule, program, layout) for rule in layout.cuts):
        return  # what is wrong with these is said
    if not rules:
        diagnostics.add(_makes_no_pipeline(use, layout, sorted(sizes)))
        return
    if not _has_stages(program, layout):
        return
    accumulated = program.goal.optimizer.accumulate if program.goal else 1
    piped = {r.dim: layout.mesh.size(*layout.mesh.known(r.axes)) for r in rules}
    diagnostics.add(*_lint_cuts(use, program, layout, accumulated, piped))
    for dim, devices in piped.items():
        if devices > 1 and not diagnostics.errors:
            micro = accumulated * (use.micro or 1)
            diagnostics.of(partial(_check_table, use, sizes[dim], devices, micro))


def _cuts_of(program: NamedProgram, layout: Layout) -> list[StageRule]:
    """The rules that give stages to something in a program."""
    values = tuple(values_of(program))
    return [r for r in layout.cuts if any(selects(r.selector, v) is not None for v in values)]


def _has_stages(program: NamedProgram, layout: Layout) -> bool:
    """Whether a program runs through stages, if its layout has any."""
    return program.goal is not None or is_forward(program, layout.schedule)


def _is_to_cut(rule: StageRule, program: NamedProgram, layout: Layout) -> bool:
    """Whether a rule is to cut a program on several devices."""
    return _has_stages(program, layout) and layout.mesh.size_or_one(rule.axis) > 1


def _lint_cut_network(
    program: NamedProgram,
    layout: Layout,
    use: ScheduleUse,
    cuts: list[StageRule],
    diagnostics: Diagnostics,
) -> None:
    if not _has_stages(program, layout):
        return
    accumulated = program.goal.optimizer.accumulate if program.goal else 1
    devices = layout.mesh.size_or_one(cuts[0].axis)
    diagnostics.add(*_lint_cuts(use, program, layout, accumulated, {"": devices}))
    if use.layers:
        message = "`layers=` divides the iterations of a loop, and rules cut this network"
        fixes = without_option(use.span, "layers")
        help = advice(fixes, "a stage begins where its rule says")
        diagnostics.add(Diagnostic("MD0538", message, use.span, help=help, fixes=fixes))
    if devices > 1 and not diagnostics.errors:
        diagnostics.of(partial(_check_table, use, 0, devices, accumulated * (use.micro or 1)))


def _lint_stages(
    program: NamedProgram, values: tuple[Value, ...], layout: Layout, diagnostics: Diagnostics
) -> None:
    """Report stages given on an axis that there is not, or to what there is not."""
    some = _cuts_of(program, layout)
    for rule in layout.cuts:
        if not layout.mesh.known((rule.axis,)):
            diagnostics.add(_no_axis(rule, rule.axis, layout))
        if rule in some or not layout.mesh.known((rule.axis,)):
            continue
        name = ".".join(rule.selector)
        selectable = {v.label for v in values if v.name and v.role == "activation"}
        selectable |= {f for v in values for f in v.functions}
        fixes = _spelled(rule.span, rule.selector[-1], sorted(selectable))
        why = None if fixes else "or name a result of an operator, or a function"
        fixes = fixes or (removal(rule.span, "remove the rule"),)
        help = advice(fixes, why)
        message = f"`{name}` names nothing that the program computes; `{rule}` does nothing"
        wrong = some or _is_to_cut(rule, program, layout)
        severity: Severity = "error" if wrong else "warning"
        diagnostics.add(Diagnostic("MD0306", message, rule.span, severity, help=help, fixes=fixes))


def _makes_no_pipeline(use: ScheduleUse, layout: Layout, dims: list[str]) -> Diagnostic:
    loop = f"the dim of a loop, `{dims[0]} -> pipe`" if dims else "the dim of a `repeat`"
    message = f"no rule of layout `{layout.name}` makes a pipeline; its schedule does nothing"
    help = f"add a rule for {loop}, or a stage by name, `NAME: pipe = 1`; or leave the schedule out"
    fixes = (leave_out("--schedule", safe=False),) if use.span.is_in_option else ()
    return Diagnostic("MD0537", message, use.span, _severity(use.span), help=help, fixes=fixes)


def _lint_slices(use: ScheduleUse, dim: str, size: int, micro: int) -> Iterator[Diagnostic]:
    """MD0534: `slices=` are not so many parts of a dim, or one is empty."""
    if len(use.slices) == micro and sum(use.slices) == size and 0 not in use.slices:
        return
    slices = f"{counted(len(use.slices), 'slice')} of {sum(use.slices)} in all"
    message = f"`slices=` are {slices}, and `{dim}` of size {size} is cut into {micro}"
    if 0 in use.slices:
        message = f"`slices=` leaves micro-batch {use.slices.index(0)} without a part of `{dim}`"
    each, more = divmod(size, micro)
    parts = [str(each + (at < more)) for at in range(micro)]
    shown = " ".join(parts if micro <= MOST_TRIED else [*parts[:MOST_TRIED], "…"])
    help = f'write the size of each: `slices="{shown}"`'
    if size < micro:
        help = f"use {size} micro-batches or fewer"
    yield Diagnostic("MD0534", message, use.span, help=help)


def _lint_equal(
    use: ScheduleUse, dim: str, size: int, layout: Layout, fits: Callable[[int], bool]
) -> Iterator[Diagnostic]:
    """MD0534: a dim is not cut into equal parts; `fits` says which numbers have a schedule."""
    assert use.micro is not None
    if size % use.micro == 0:
        return
    # Each device cuts its own part of the dim.
    ways = math.prod(
        layout.mesh.size(*layout.mesh.known(rule.axes))
        for rule in layout.rules
        if rule.dim == dim and not rule.selector
    )
    part = size // ways if size % ways == 0 else size
    fitting = [n for n in _near(divisors(part), use.micro, MOST_TRIED) if fits(n)]
    near = ", ".join(map(str, _near(fitting, use.micro, 2)))
    fixes = _numbers_of_parts(use, near.split(", ") if near else [])
    fitting_numbers = f"numbers that fit: {near}" if near else f"give `{dim}` another size"
    help = advice(fixes) or fitting_numbers
    place = layout.declared.get(("dim", dim))
    related = () if place is None else (place,)
    message = f"`{dim}` of size {size} is not cut into {use.micro} equal parts"
    yield Diagnostic("MD0534", message, use.span, related=related, help=help, fixes=fixes)


def _numbers_of_parts(use: ScheduleUse, numbers: Iterable[str]) -> tuple[Fix, ...]:
    """The fixes that write other numbers of micro-batches into a schedule."""
    place = word_in(use.span, str(use.micro))
    if place is None:
        return ()
    return tuple(Fix(f"write `{n}`", (Edit(place, n),), safe=False) for n in numbers)


def _lint_cuts(
    use: ScheduleUse,
    program: NamedProgram,
    layout: Layout,
    accumulated: int,
    piped: Mapping[str, int],
) -> Iterator[Diagnostic]:
    """What is wrong with the dims that a schedule cuts, and with their micro-batches.

    `piped` are the dims on the stages (empty: a network that rules cut), with the devices of each.
    """
    sizes = {d.name: d.size for v in values_of(program) for d in v.type.dims}

    def has_tables(micro: int) -> bool:
        """Whether a number of micro-batches has a schedule on each number of devices."""
        return all(d == 1 or _has_table(use, d, accumulated * micro) for d in piped.values())

    if use.slices and not use.dims:
        message = "`slices=` are sizes of a dim, and the schedule cuts none"
        help = "name the dim, as in `[batch](4, …)`; or leave `slices=` out"
        yield Diagnostic("MD0534", message, use.span, help=help)
    if use.unequal and use.asynchronous:
        message = f"`{use.name}` updates asynchronously, after micro-batches of one size"
        yield Diagnostic("MD0534", message, use.span, help="leave `slices=` out")
        return
    for dim in use.dims:
        if dim not in sizes:
            message = f"no tensor of the program has the dim `{dim}`; the schedule cuts nothing"
            help = did_you_mean(dim, sorted(sizes)) or "name a dim of the inputs"
            yield Diagnostic("MD0537", message, use.span, _severity(use.span), help=help)
        elif dim in piped:
            message = f"`{dim}` is on the stages: it cannot be cut into micro-batches as well"
            help = "name a dim of the inputs, such as that of the samples"
            yield Diagnostic("MD0534", message, use.span, help=help)
        elif use.slices and use.micro is not None:
            yield from _lint_slices(use, dim, sizes[dim], use.micro)
        elif use.micro is not None:
            yield from _lint_equal(use, dim, sizes[dim], layout, has_tables)
    if use.micro is None and accumulated == 1:
        message = f"`{use.name}` does not say what its micro-batches are, and none are accumulated"
        cut = replace(use, dims=("batch",), micro=8)
        fixes = written_anew(use.span, str(cut)) if "batch" in sizes else ()
        help = advice(fixes) or f"cut a dim: `{cut}`"
        help += "; or write `accumulate=8` to the optimizer"
        yield Diagnostic("MD0535", message, use.span, help=help, fixes=fixes)


MOST_TRIED = 6
"""Divisors on each side of a number for which a message tries whether there is a schedule."""


def _near(numbers: list[int], number: int, most: int) -> list[int]:
    """Of ascending numbers, at most so many on each side of a number."""
    at = bisect.bisect(numbers, number)
    return numbers[max(0, at - most) : at + most]


def divisors(size: int) -> list[int]:
    """The numbers that divide a size, ascending."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def _has_table(use: ScheduleUse, devices: int, micro: int) -> bool:
    """Whether a schedule can be made for so many devices and micro-batches."""
    try:
        use.verified(devices, micro)
    except DiagnosticError:
        return False
    return True


def _check_table(use: ScheduleUse, layers: int, devices: int, micro: int) -> None:
    """Raise where there is no table for so many devices, or `layers=` is not of its stages."""
    stages = use.verified(devices, micro).schedule.stages
    if use.layers:
        check_layers(use, layers, stages)


# --- rules, by themselves ------------------------------------------------------------------------


def _lint_demands(program: NamedProgram, layout: Layout, diagnostics: Diagnostics) -> None:
    """Report rules that cannot be followed (MD0302, MD0303), each pair of rules once.

    Where the pipeline of the layout is refused, that alone is reported: it is the cause.
    """
    request, conflicts = Request(program, layout), Diagnostics()
    reported = set()
    for value in values_of(program):
        try:
            request.asked(value)
        except DiagnosticError as error:
            (conflict,) = error.diagnostics
            rules = (conflict.code, *(related.span for related in conflict.related))
            if rules not in reported:
                conflicts.add(conflict)
            reported.add(rules)
    refusal = Diagnostics()
    if conflicts.errors and layout.schedule is not None:
        refusal.of(partial(pipeline_of, program, layout))
    diagnostics.add(*(refusal.errors or conflicts))


def _lint_names(layout: Layout, declarations: Declarations, diagnostics: Diagnostics) -> None:
    """Warn of names in rules that nothing in a file has, whose programs could not be built."""
    names = declared_names(declarations)
    for rule in layout.rules:
        for axis in rule.axes:
            if axis not in layout.mesh.names:
                diagnostics.add(_no_axis(rule, axis, layout))
        if rule.dim not in declarations.dims:
            diagnostics.add(_no_dim(rule, set(declarations.dims), layout))
        if rule.selector and _declared(rule.selector[0]) not in names.union(ROLES):
            diagnostics.add(_no_tensor(".".join(rule.selector), rule, sorted(names)))
    for setting in layout.settings_of_tensors:
        if _declared(setting.path[0]) not in names:
            diagnostics.add(_sets_nothing(setting, sorted(names)))
    for stage in layout.cuts:
        if not layout.mesh.known((stage.axis,)):
            diagnostics.add(_no_axis(stage, stage.axis, layout))


def declared_names(declarations: Declarations) -> set[str]:
    """The names of all tensors and functions of a file, by its text alone."""
    bodies = (*declarations.programs.values(), *declarations.functions.values())
    named = (node for body in bodies for node in ast.walk(body))
    return {_declared(n.name.text) for n in named if isinstance(n, _NAMING)} | function_names()


def _declared(name: str) -> str:
    """The name in the text behind that of a gradient (`d_w`) or of a further call (`mlp_2`)."""
    return re.sub(r"_\d+$", "", name.removeprefix("d_"))


_NAMING = ast.Target | ast.TensorParam | ast.FunctionDecl


def _no_axis(rule: Rule | StageRule, axis: str, layout: Layout) -> Diagnostic:
    axes, declared = list(layout.mesh.whole.names), whole_axis(axis)
    fixes = _spelled(rule.span, declared, axes)
    help: str | None = advice(fixes) or f"the mesh has {', '.join(axes) or 'no axes'}"
    message = f"mesh `{layout.mesh.name}` has no axis `{axis}`; the rule does nothing there"
    if declared in axes:
        message = f"no rule of the layout names the sub-axis `{axis}` of `{declared}`; it does "
        message += "nothing"
        fixes = _written_axis(rule.span, axis, declared)
        help = advice(fixes, f"or name the sub-axis in a rule, `DIM -> {axis}`")
    return Diagnostic("MD0304", message, rule.span, _severity(rule.span), help=help, fixes=fixes)


def _no_dim(rule: Rule, dims: set[str], layout: Layout) -> Diagnostic:
    # Rules given by hand may be meant for several programs of a file, with different dims.
    is_declared = ("dim", rule.dim) in layout.declared
    severity: Severity = "warning" if is_declared else _severity(rule.span)
    message = f"no tensor of the program has the dim `{rule.dim}`; the rule matches nothing"
    remove = removal(rule.span, "remove the rule")
    fixes = _spelled(rule.span, rule.dim, sorted(dims)) or (remove,)
    return Diagnostic("MD0305", message, rule.span, severity, fixes=fixes)


def _severity(span: Span) -> Severity:
    """An error for what is given by hand, for this one run: it was meant to do something."""
    return "error" if span.is_in_option else "warning"


def _written_axis(span: Span, axis: str, whole: str) -> tuple[Fix, ...]:
    """The fix that writes an axis in the place of a part of it, which stands once in a rule."""
    at = span.text.find(axis)
    if at < 0:
        return ()
    place = Span(span.source, span.start + at, span.start + at + len(axis))
    return (Fix.write(place, whole, safe=False),)


def _spelled(span: Span, name: str, known: list[str]) -> tuple[Fix, ...]:
    """The fix for a misspelt name that stands once in a rule or an entry."""
    place = word_in(span, name)
    return () if place is None else spelled_right(place, name, known)


def _selects_any(rule: Rule, values: Iterable[Value]) -> bool:
    """Whether a rule can bind a tensor; a program that trains nothing has no gradients to bind."""
    if not rule.selector:
        return True
    if rule.selector[0] in ROLES:
        role = rule.selector[0].removesuffix("s")
        of_role = [v for v in values if v.role == role]
        return any(v.type.has(rule.dim) for v in of_role) or (role != "param" and not of_role)
    return any(selects(rule.selector, v) is not None and v.type.has(rule.dim) for v in values)


def _selects_some(rule: Rule, values: Iterable[Value]) -> bool:
    """Whether the selector of a rule names anything, whatever its dims."""
    if not rule.selector or rule.selector[0] in ROLES:
        return True
    return any(selects(rule.selector, v) is not None for v in values)


def _selects_summed(rule: Rule, program: NamedProgram, layout: Layout) -> bool:
    """Whether a rule splits a dim that the operator of a tensor reduces, or its definition."""
    made = (op for op in walk(program.body) for v in op.outs if _names(rule, v))
    forms = (form for op in made for form in (op, *definition(op)))
    return any(
        rule.dim in dict(layout.summed(v, op)) for op in forms for v in op.outs if _names(rule, v)
    )


def _names(rule: Rule, value: Value) -> bool:
    """Whether a rule names a tensor itself."""
    return selects(rule.selector, value) == TENSOR


def definition(op: NamedOp) -> tuple[NamedOp, ...]:
    """What an operator is where a dim that it works along is split, if it is defined so."""
    expanded = expand(op, {}) if lookup(op.name).composite else None
    return () if expanded is None else expanded.ops


def binds_inside(rule: Rule, program: NamedProgram) -> bool:
    """Whether a rule may bind what the definition of a library function makes, once it is expanded.

    A selector has to name the function: the names inside are not those of the program.
    """
    for op in walk(program.body):
        if may_be_expanded(op) and any(v.type.has(rule.dim) for v in (*op.ins, *op.outs)):
            out = op.outs[0]
            path, functions = (*out.path, op.name), (*out.functions, op.name)
            inside = replace(out, name=None, path=path, functions=functions)
            if not rule.selector or selects(rule.selector, inside) is not None:
                return True
    return False


def _selects_nothing(rule: Rule, values: tuple[Value, ...]) -> Diagnostic:
    labels, dotted = _selectable(values)
    selector = ".".join(rule.selector)
    selectable = sorted(dotted if len(rule.selector) > 1 else labels)
    return _no_tensor(selector, rule, selectable)


def _selectable(values: tuple[Value, ...]) -> tuple[set[str], set[str]]:
    """The names of tensors and functions, and the paths of tensors in functions."""
    tensors = [v for v in values if v.name]
    labels = {v.label for v in tensors} | {f for v in values for f in v.functions}
    return labels, {f"{v.functions[-1]}.{v.label}" for v in tensors if v.functions}


def _sets_nothing(setting: Setting, known: list[str]) -> Diagnostic:
    """MD0306: a setting of something that there is not."""
    remove = removal(setting.span, "remove the setting")
    fixes = _spelled(setting.span, setting.selector, known) or (remove,)
    message = f"`{setting.selector}` selects no tensor; the setting does nothing"
    return Diagnostic("MD0306", message, setting.span, "warning", fixes=fixes)


def _no_tensor(selector: str, rule: Rule, known: list[str]) -> Diagnostic:
    is_clear = selector in known or selector in ROLES
    meant = () if is_clear else _spelled(rule.span, selector, known)
    message = f"`{selector}` selects no tensor with the dim `{rule.dim}`"
    fixes = meant or (removal(rule.span, "remove the rule"),)
    return Diagnostic("MD0306", message, rule.span, "warning", fixes=fixes)


# --- blocks --------------------------------------------------------------------------------------


def _lint_block(program: NamedProgram, block: Annotations, diagnostics: Diagnostics) -> None:
    """Warn of entries that name no tensor; report annotations that theirs cannot have (MD0308)."""
    values = tuple(values_of(program))
    labels = sorted({v.label for v in values if v.name})
    for entry in block.entries:
        for path in (entry.tensor, entry.at):
            if path and not any(means(path, v) for v in values):
                diagnostics.add(_names_nothing(entry, path, labels))
    _lint_components(block, diagnostics)
    for value in values:
        diagnostics.of(partial(block.of, value))


def _lint_names_in_block(
    block: Annotations, declarations: Declarations, diagnostics: Diagnostics
) -> None:
    """Warn of names in entries that nothing in a file has, whose programs could not be built."""
    _lint_components(block, diagnostics)
    names = declared_names(declarations)
    for entry in block.entries:
        for path in (entry.tensor, entry.at):
            if path and _declared(path[0].text) not in names:
                diagnostics.add(_names_nothing(entry, path, sorted(names)))


def _lint_components(block: Annotations, diagnostics: Diagnostics) -> None:
    for component in (c for entry in block.entries for c in entry.components):
        diagnostics.of(partial(check_component, component))


def _names_nothing(
    entry: ast.SbpEntry, path: tuple[ast.Name, ...], labels: list[str]
) -> Diagnostic:
    name = ".".join(n.text for n in path)
    remove = removal(entry.span, "remove the entry")
    message = f"`{name}` names no tensor of the program"
    fixes = spelled_right(path[-1].span, path[-1].text, labels) or (remove,)
    return Diagnostic("MD0306", message, entry.span, "warning", fixes=fixes)
