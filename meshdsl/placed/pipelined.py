"""Pipelines: a `repeat` whose dim is split over a mesh axis, block by block on its stages.

Inside a micro-batch every operator has a stage and all of its operands there, so operators are
placed as if the mesh had no such axis; slices of what is stored split along the loop, and what the
loop collects, are blocks of the stage (GPipe, Huang et al. 2019; Megatron-LM, Narayanan et al.
2021). What leaves the loop over micro-batches goes through `leaving`: each stage has a part of it,
zeros where none of its operators adds to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from meshdsl.diagnostics import DiagnosticError, Fix, Related, Span, advice, counted, fail
from meshdsl.ir import program as ir
from meshdsl.ir.program import OpKind, block_loops, kind_of
from meshdsl.ir.rewrite import makes_of, reads_of, substitute
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Pin, Value
from meshdsl.named.one_batch import SampleFlow
from meshdsl.placed.layout import STORAGE, Layout, Rule, nearest
from meshdsl.placed.layout_edits import ended
from meshdsl.placed.placements import Mesh
from meshdsl.placed.settings import StageRule
from meshdsl.records import dataclass
from meshdsl.schedule.use import ScheduleUse
from meshdsl.schedule.verification import Verified
from meshdsl.syntax.call_edits import with_option
from meshdsl.syntax.edits import removal


@dataclass(frozen=True, slots=True)
class Microbatching:
    """The dims that a schedule cuts into `micro` micro-batches.

    `axis` is what these are called, `name` that of the schedule. `sizes` are the sizes of their
    blocks in order, where these are not equal.
    """

    dims: tuple[str, ...]
    micro: int
    axis: str
    name: str
    span: Span
    sizes: tuple[int, ...] = ()

    def has(self, value: Any) -> bool:
        """Whether a micro-batch has a part of a value, or of a variable of a device."""
        return self.dim_of(value) is not None

    def dim_of(self, value: Any) -> str | None:
        """The dim along which a value, or a variable of a device, is cut."""
        return next((dim for dim in self.dims if value.type.has(dim)), None)


@dataclass(frozen=True, slots=True)
class Piped:
    """The dim of the loop, the axis that its blocks are on, and the rule.

    `micro` is the dim of the loop over micro-batches, which has the loop in it: that of the
    optimizer's `accumulate`, or of a `cut`. `use` is the schedule of the layout. `order` has the
    stages device by device, where a device has others than that of its own number; `sizes` how many
    iterations each stage has, where these are not equally many. `others` has for each device the
    stage that it has beside its own, where devices have each other's in pairs.

    Where `rules` cut a network into `count` stages (`stage_rules.py`) there is no loop, and `dim`
    is empty; `stage_of` has then the stages of the values of a placed program.
    """

    dim: str
    axis: str
    micro: str
    span: Span
    use: ScheduleUse | None = None
    cut: Microbatching | None = None
    order: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    count: int = 0
    rules: tuple[StageRule, ...] = ()
    stage_of: Mapping[Value, int] = field(default_factory=dict, compare=False)

    def stages(self, mesh: Mesh) -> int:
        """The number of stages; a device may have several."""
        return self.count or len(self.order) or mesh.size(self.axis)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes that the stages are on: of several on a device, also that of them in time."""
        if self.count or self.stages(mesh) == mesh.size(self.axis):
            return (self.axis,)
        name = "chunk"
        while name in mesh.names or name in (self.micro, self.dim):
            name += "_"
        return self.axis, name

    def most(self, size: int, mesh: Mesh) -> int:
        """The most iterations of a stage, of a loop of a size."""
        return max(self.sizes, default=size // self.stages(mesh))

    def on(self, mesh: Mesh) -> Mesh:
        """The mesh with the dims that are cut, and blocks of the loop's as on its devices."""
        if self.cut is not None:
            mesh = replace(mesh, cut=tuple((dim, self.cut.micro) for dim in self.cut.dims))
        if not self.sizes:
            return mesh
        each = (sum(self.sizes[stage] for stage in held) for held in self._held(mesh))
        return self._given(mesh, (self.axis,), tuple(each))

    def in_time(self, mesh: Mesh) -> Mesh:
        """The mesh with the axis in time of several stages on a device, and their blocks."""
        axes, stages = self.axes(mesh), self.stages(mesh)
        timed = replace(mesh, moments=(*mesh.moments, (axes[1], stages // mesh.size(self.axis))))
        sizes = tuple(self.sizes[stage] for stage in self.order) if self.sizes else ()
        return self._given(timed, axes, sizes)

    def _given(self, mesh: Mesh, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Mesh:
        if len(set(sizes)) < 2:
            return mesh
        return replace(mesh, given=(*mesh.given, (self.dim, axes, sizes)))

    def _held(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """The stages of each device."""
        order = self.order or tuple(range(self.stages(mesh)))
        each = len(order) // mesh.size(self.axis)
        return tuple(order[at : at + each] for at in range(0, len(order), each))

    def iterations(self, size: int, stages: int) -> tuple[range, ...]:
        """The iterations of each of so many stages, of a loop of a size."""
        sizes = self.sizes or (size // stages,) * stages
        ends = [*itertools.accumulate(sizes, initial=0)]
        return tuple(range(*pair) for pair in itertools.pairwise(ends))

    def blocks(self, size: int, axes: tuple[str, ...], mesh: Mesh) -> list[list[int]]:
        """The indices in each block of the loop's dim, split over `axes`; `Spec.blocks`.

        None where all of it lies in order, in blocks that are as equal as they can be.
        """
        iterations = self.iterations(size, self.stages(mesh))
        each = [[iterations[stage] for stage in held] for held in self._held(mesh)]
        if axes[:1] == (self.axis,) and mesh.ways(self.dim, size, axes)[0] != len(each):
            return [[*itertools.chain(*held)] for held in each]
        ranges = [*filter(None, itertools.chain(*each))]
        # Told from the ends alone: there may be any number of iterations.
        ends = [0, *(end for part in ranges for end in (part.start, part.stop)), size]
        if ends[::2] == ends[1::2]:
            return []
        return [[*itertools.chain(*ranges)]]

    def cuts(self, loop: ir.Loop[Any, Any]) -> bool:
        """Whether the iterations of a loop are on the stages."""
        return loop.dim.name == self.dim and loop.phase != "update"


def is_forward(program: NamedProgram, use: ScheduleUse | None) -> bool:
    """Whether a program goes through the stages of a schedule that cuts a batch, and not back.

    One that has a backward pass of its own (`grad`), or assigns a state, does not.
    """
    passes = {node.phase for node in program.body} == {"forward"} and not program.updates
    return passes and use is not None and use.micro is not None


def forward_only(program: NamedProgram, layout: Layout) -> Layout:
    """The layout for a program that is no training step: of its schedule the forward passes.

    Where it has no stages, parameters are only `stored` by stage.
    """
    use = layout.schedule
    if use is None or not is_forward(program, use):
        return stored(program, layout)
    return replace(layout, schedule=replace(use, forward=True))


def stored(program: NamedProgram, layout: Layout) -> Layout:
    """The layout under which stages only store their iterations.

    Each iteration gathers its own parameters, and every stage does all of them. Rules for
    parameters take the axis from the loop, as in a training step.
    """
    dims = {loop.dim.name for loop, _ in _loops(program.body, ())}
    storage_rules = [rule for rule in layout.rules if rule.selector == ("params",)]
    told = {rule.dim for rule in storage_rules}
    taken = {axis for rule in storage_rules for axis in rule.axes}
    rules = []
    for rule in layout.rules:
        if rule.selector or rule.dim not in dims:
            rules.append(rule)
        elif rule.dim not in told and taken.isdisjoint(rule.axes):
            rules.append(replace(rule, selector=("params",)))
    return replace(layout, rules=tuple(rules), schedule=None, cuts=())


def piped(program: NamedProgram, layout: Layout) -> Piped | None:
    """The pipeline of a program under a layout, if a rule splits the dim of a `repeat`.

    Raises MD0907 for what cannot be a pipeline.
    """
    for loop, around in _loops(program.body, ()):
        # A rule with a selector places tensors outside of the loop, such as what it collects.
        for rule in (rule for rule in layout.rules if not rule.selector):
            axes = tuple(a for a in layout.mesh.known(rule.axes) if layout.mesh.size(a) > 1)
            if rule.dim == loop.dim.name and axes:
                if len(axes) > 1:
                    one = replace(rule, axes=axes[:1], written=())
                    help = _with_rest(f"write `{one}`", program, layout, rule, one)
                    _refuse(
                        f"a pipeline has one axis, and `{rule}` names {len(axes)}", rule.span, help
                    )
                accumulates = bool(program.goal and program.goal.optimizer.accumulate > 1)
                if len(around) > accumulates:
                    message = f"the loop over `{loop.dim.name}` is inside of another loop"
                    outer = replace(rule, dim=around[-1])
                    help = f"split the dim of the outer loop: `{outer}`"
                    _refuse(message, rule.span, _with_rest(help, program, layout, rule, outer))
                use = layout.schedule
                cut = cut_of(use, loop.dim.name, layout)
                if not around and cut is None:
                    message = f"splitting the `repeat` dim `{loop.dim.name}` needs micro-batches"
                    fixes, also = _with_micro_batches(program, loop, rule, layout)
                    fail("MD0907", message, rule.span, help=advice(fixes, also), fixes=fixes)
                if around and cut is not None:
                    message = "a step is either cut into micro-batches or accumulates batches"
                    help = f"write `with {cut.name}` alone, or leave `accumulate` out"
                    _refuse(message, cut.span, help)
                micro = cut.axis if cut else around[0]
                pipe = Piped(loop.dim.name, axes[0], micro, rule.span, use, cut)
                return _checked(program, loop, layout, _ordered(pipe, program, layout))
            _refuse_one_stage(layout.schedule, rule, loop)
        for pin in (p for s in loop.stacked for p in s.outer.pins if p.dim == loop.dim.name):
            if layout.mesh.size(*layout.mesh.known(pin.axes)) > 1:
                message = f"`@` cannot split the `repeat` dim `{loop.dim.name}`"
                _refuse(message, pin.span, _instead_of(pin, program, layout))
    return None


def _with_rest(way: str, program: NamedProgram, layout: Layout, old: Rule, new: Rule) -> str:
    """A way out by another rule, and the way out of what is refused under that rule."""
    rules = tuple(new if rule is old else rule for rule in layout.rules)
    try:
        piped(program, replace(layout, rules=rules))
    except DiagnosticError as error:
        further = str(error.diagnostics[0].help)
        return further if further == REMOVE else f"{way}, and {further}"
    return way


REMOVE = "remove the rule"


def _with_micro_batches(
    program: NamedProgram, loop: NamedLoop, rule: Rule, layout: Layout
) -> tuple[tuple[Fix, ...], str | None]:
    """The ways out of a split loop without micro-batches; it has stages if they have parameters.

    Where the schedule cannot be written, as in an option, it is told in words.
    """
    dim = loop.dim.name
    if not any(s.outer.source.role == "param" for s in loop.stacked):
        return (removal(rule.span, REMOVE),), None
    text = f"params: {dim} -> {rule.axes[0]}"
    words = f"write `{text}`, which splits only the stored parameters"
    stored = replace(Fix.write(rule.span, text, safe=False), said=words)
    schedule = ending_with_micro_batches(program, layout, dim)
    if not schedule or layout.schedule is not None:
        return (stored,), None
    ended_so = ended(rule.span, schedule)
    also = None if ended_so else f"or end a layout with `with {schedule}`"
    return (*ended_so, stored), also


def ending_with_micro_batches(program: NamedProgram, layout: Layout, loop: str = "") -> str:
    """A schedule that cuts a dim of the samples, not that of a loop; empty if none divides."""
    ways = {r.dim: layout.mesh.size(*layout.mesh.known(r.axes)) for r in layout.rules}
    dims = [d for v in program.inputs for d in v.type.dims if d.name != loop]
    samples = SampleFlow(program).dims
    for batch in [d for d in dims if d.name in samples] or dims:
        part, left = divmod(batch.size, ways.get(batch.name, 1))
        micro = next((n for n in (8, 4, 2) if left == part % n == 0), None)
        if micro is not None:
            return f"one_f_one_b[{batch.name}]({micro})"
    return ""


def _instead_of(pin: Pin, program: NamedProgram, layout: Layout) -> str:
    """The way out of an `@` on the dim of a loop: a rule, where that would make stages."""
    rule = Rule((), pin.dim, pin.axes, False, pin.span)
    try:
        has_stages = piped(program, replace(layout, rules=(*layout.rules, rule))) is not None
    except DiagnosticError:
        has_stages = False
    return f"leave the `@` out, and add the rule `{rule}`" if has_stages else "leave the `@` out"


def _refuse_one_stage(use: ScheduleUse | None, rule: Rule, loop: NamedLoop) -> None:
    """Raise MD0335 for updates on the way where all stages are one: these are ordinary steps."""
    if rule.dim == loop.dim.name and rule.axes and use is not None and use.asynchronous:
        message = f"`{use.name}` is asynchronous and needs several stages, but `{rule}` gives one"
        help = "give the axis more devices; or leave out the schedule, and use smaller batches"
        fail("MD0335", message, use.span, Related(rule.span, "the rule"), help=help)


def _ordered(pipe: Piped, program: NamedProgram, layout: Layout) -> Piped:
    """The pipeline with the stages of each device, where a device program can have them."""
    use = pipe.use
    if use is None:
        return pipe
    table = use.verified(layout.mesh.size(pipe.axis), _count_of_micro(pipe, program))
    order = tuple(stage for stages in table.held for stage in stages)
    if not_built(table) or order == tuple(range(table.schedule.devices)):
        return pipe
    if others := pairs_of(table):
        return replace(pipe, others=others)
    return replace(pipe, order=order)


def not_built(table: Verified, stored: bool = True) -> str:
    """What is not built yet of a table's stages, where devices have `stored` them; or nothing."""
    counts = [*map(len, table.held)]
    if sum(counts) == table.schedule.stages:
        return "devices have different numbers of stages" if stored and len({*counts}) > 1 else ""
    if len({_shared(table, micro) for micro in range(table.schedule.micro)}) > 1:
        return "some micro-batches stay on a device where others leave it"
    fits = not stored or pairs_of(table)
    return "" if fits else "a stage is on several devices, other than in pairs"


def pairs_of(table: Verified) -> tuple[int, ...]:
    """The stage that each device has beside its own, if two devices have each other's (Chimera).

    Empty where it is not so.
    """
    pairs = [set(held) - {device} for device, held in enumerate(table.held)]
    if table.schedule.stages != len(pairs) or any(len(pair) != 1 for pair in pairs):
        return ()
    others = tuple(pair.pop() for pair in pairs)
    return others if all(others[n] == device for device, n in enumerate(others)) else ()


def _shared(table: Verified, micro: int) -> tuple[int, ...]:
    """For each stage the first one that a micro-batch has on the same device."""
    first: dict[int, int] = {}
    homes = (table.device_of[micro, stage] for stage in range(table.schedule.stages))
    return tuple(first.setdefault(home, stage) for stage, home in enumerate(homes))


def _refuse(message: str, span: Span, help: str, *related: Related) -> None:
    fail("MD0907", message, span, *related, help=help)


def cut_of(use: ScheduleUse | None, loop: str, layout: Layout) -> Microbatching | None:
    """The cut into micro-batches that a schedule asks for; its axis is not called as the loop."""
    if use is None or not use.dims or use.micro is None:
        return None
    axis = "micro"
    while axis in layout.mesh.names or axis == loop:
        axis += "_"
    return Microbatching(use.dims, use.micro, axis, use.name, use.span, use.unequal)


def _above(sizes: list[int], stages: int) -> list[int]:
    """The next number of stages that divides, if there is one."""
    return [n for n in sizes if n > stages][:1]


def _count_of_micro(pipe: Piped, program: NamedProgram) -> int:
    """How many micro-batches a pipeline with a schedule has."""
    if pipe.cut:
        return pipe.cut.micro
    assert program.goal, "without a cut, the optimizer accumulates"
    micro: int = program.goal.optimizer.accumulate
    return micro


def _with_other_options(pipe: Piped, size: int, mesh: Mesh, program: NamedProgram) -> list[str]:
    """Options of the schedule that give it a number of stages that divides a size, as written."""
    use, ways = pipe.use, list[str]()
    assert use is not None, "a schedule has given the stages their order"
    for option, value in itertools.product(use.counts, range(1, MOST_SHOWN + 1)):
        other = replace(use, options={**use.options, option: value})
        try:
            table = other.verified(mesh.size(pipe.axis), _count_of_micro(pipe, program))
        except DiagnosticError:
            continue
        if size % table.schedule.stages == 0 and not not_built(table):
            ways.append(f"`{option}={value}` ({counted(table.schedule.stages, 'stage')})")
    return ways


def _sized(pipe: Piped, size: int, mesh: Mesh, program: NamedProgram) -> Piped:
    """The pipeline with the iterations of each stage, of a loop of a size. Raises MD0334."""
    layers = pipe.use.layers if pipe.use else ()
    stages = pipe.stages(mesh)
    if pipe.use and layers:
        check_layers(pipe.use, size, stages)
        return replace(pipe, sizes=layers if len(set(layers)) > 1 else ())
    if size % stages == 0:
        return pipe
    if pipe.order:
        ways = _with_other_options(pipe, size, mesh, program)
        near = " or ".join(map(str, nearest(size, stages)))
        help = f"write {' or '.join(ways)}" if ways else f"give `{pipe.dim}` the size {near}"
    else:
        sizes = [n for n in range(1, size + 1) if size % n == 0]
        counts = (max((n for n in sizes if n < stages), default=1), *_above(sizes, stages))
        help = f"use {' or '.join(map(str, counts))} {'stage' if counts[-1] == 1 else 'stages'}"
    if size > stages and (pipe.use is None or stages > MOST_SHOWN):
        option = f'`layers="{shared(size, stages)}"`'
        help += f"; or give the iterations of each stage in the schedule: {option}"
    message = f"`{pipe.dim}` of size {size} does not divide over {stages} stages of `{pipe.axis}`"
    fixes = _with_layers(pipe, shared(size, stages)) if MOST_SHOWN >= stages < size else ()
    help = f"or {help}" if fixes else help
    fail("MD0334", message, pipe.span, help=advice(fixes, help), fixes=fixes)


def _with_layers(pipe: Piped, layers: str) -> tuple[Fix, ...]:
    """The fix that says in the schedule how many iterations each stage has."""
    if pipe.use is None:
        return ()
    return with_option(pipe.use.span, "layers", f'"{layers}"')


def check_layers(use: ScheduleUse, size: int, stages: int) -> None:
    """Raise MD0538 where `layers=` is not of so many stages of a loop of a size."""
    fits = len(use.layers) == stages and sum(use.layers) == size
    if fits and 0 not in use.layers:
        return
    message = (
        f"`layers=` is of {counted(len(use.layers), 'stage')} with {sum(use.layers)} layers; the "
        f"pipeline has {stages} with {size}"
    )
    fixes = with_option(use.span, "layers", f'"{shared(size, stages)}"') if size >= stages else ()
    help = advice(fixes, "a number for each stage")
    if fits:
        message = f"`layers=` leaves stage {use.layers.index(0)} without a layer"
    if size < stages:
        help = f"use {size} stages or fewer: each needs a layer"
    fail("MD0538", message, use.span, help=help, fixes=fixes)


MOST_SHOWN = 8
"""Stages whose iterations a message proposes one by one."""


def shared(size: int, stages: int) -> str:
    """How many iterations each stage may have, as `layers=` says it; of many, the first ones.

    The ends have the fewest: they have more to do than their iterations.
    """
    least, more = divmod(size, stages)
    order = sorted(range(stages), key=lambda n: (n in (0, stages - 1), n))
    each = [str(least + (stage in order[:more])) for stage in range(stages)]
    return " ".join(each if stages <= MOST_SHOWN else [*each[:3], "…"])


def _checked(program: NamedProgram, first: NamedLoop, layout: Layout, found: Piped) -> Piped:
    """The pipeline, unless several loops would be on the stages at once, or blocks differ."""
    found = _sized(found, first.dim.size, layout.mesh, program)
    forward = [
        loop for loop, _ in _loops(program.body, ()) if found.cuts(loop) and loop.phase == "forward"
    ]
    if len(forward) > 1:
        message = f"two loops over `{found.dim}` cannot both be on the stages of `{found.axis}`"
        other = Related(forward[1].span, "the second one")
        _refuse(message, forward[0].span, _apart(forward, found, layout.mesh), other)
    check_axis(program, layout, found)
    whole_values = (v for n in first.body for v in makes_of(n) if v.type.has(found.dim))
    for value in whole_values:
        name = f"`{value.name}`" if value.name else "a value"
        message = f"{name} has all of `{found.dim}` inside of the loop, whose stages have a part"
        _refuse(
            message,
            value.span,
            f"compute it before the loop, or with another dim than `{found.dim}`",
        )
    return found


def _apart(loops: list[NamedLoop], found: Piped, mesh: Mesh) -> str:
    """The ways out of several loops over the stages: of two stages each loop may have one."""
    other_dim = (
        f"write one of them over another dim, `dim other = {found.dim}`: it is then on one stage"
    )
    before = {c.result.name for c in loops[0].carries}
    begins = next((c.result.name for c in loops[1].carries if c.result.name not in before), None)
    if begins is None or len(loops) > 2 or mesh.size(found.axis) > 2:
        return other_dim
    rule = f"`{begins}: {found.axis} = 1`"
    return f"put each on one stage, by {rule} in place of `{found.dim} -> {found.axis}`"


def check_axis(program: NamedProgram, layout: Layout, found: Piped) -> None:
    """Refuse another split over the axis of the stages: of an operator, one stage has it all."""
    stored = (p.value for p in program.params)
    values = (*program.inputs, *stored, *(v for n in program.body for v in makes_of(n)))
    dims = {dim for v in values for dim in v.type.names}
    asked = [(r.dim, r.axes, r.span) for r in layout.rules if r.selector not in STORAGE]
    asked += [(p.dim, layout.mesh.known(p.axes), p.span) for v in values for p in v.pins]
    for dim, axes, span in asked:
        if found.axis in axes and dim in dims - {found.dim}:
            message = f"`{dim}` cannot be split over the stages of `{found.axis}`"
            what = "each operator" if found.count else "each operator of the loop"
            related = Related(found.span, f"{what} is on one stage")
            _refuse(message, span, f"split `{dim}` over another axis", related)


def _loops(
    nodes: Iterable[Node], around: tuple[str, ...]
) -> Iterator[tuple[NamedLoop, tuple[str, ...]]]:
    """Every loop, with the dims of those around it."""
    for loop in block_loops(nodes, NamedLoop):
        yield loop, around
        yield from _loops(loop.body, (*around, loop.dim.name))


def with_leaving(program: NamedProgram, pipe: Piped) -> NamedProgram:
    """The program with a `leaving` for each value that leaves the loop over micro-batches."""
    return _behind_passes(program, pipe.cut) if pipe.cut else _behind_loop(program, pipe)


def _behind_passes(program: NamedProgram, cut: Microbatching) -> NamedProgram:
    """The program whose update, and whose outputs, read what leaves the passes of a batch.

    What does not depend on the batch is made once, alike on all stages, and leaves nothing.
    """
    passes = [n for n in program.body if n.phase != "update"]
    update = [n for n in program.body if n.phase == "update"]
    inside = of_batch(program, cut)
    makers = {v: n for n in passes for v in n.makes if v in inside}
    read = [v for n in update for v in reads_of(n)]
    read += [*(o.value for o in program.outputs), *(u.new for u in program.updates)]
    new = {v: replace(v) for v in dict.fromkeys(read) if v in makers}
    leaving = [_leaving(old, value, makers[old]) for old, value in new.items()]
    body = (*passes, *leaving, *substitute(update, new))
    return _ending(program, body, new)


def _leaving(old: Value, new: Value, maker: Node) -> NamedOp:
    """The operator through which a value leaves the stages, in the phase of what makes it."""
    tags = maker.phase, None, maker.origin, OpKind.STAGE_OUTPUT
    return NamedOp("identity", (old,), (new,), (), old.span, *tags)


def of_batch(program: NamedProgram, cut: Microbatching) -> set[Value]:
    """What the passes make of the batch, each micro-batch a part of it or all again."""
    dependent = {v for v in program.inputs if cut.has(v)}
    for node in program.body:
        if node.phase == "update" or kind_of(node) is OpKind.STAGE_OUTPUT:
            continue
        if any(v in dependent or cut.has(v) for v in (*reads_of(node), *makes_of(node))):
            dependent.update(makes_of(node))
    return dependent


def in_each_batch(program: NamedProgram, pipe: Piped) -> dict[Value, int]:
    """How often what a micro-batch makes is sent as a whole, where a schedule cuts the batch.

    A gradient without the dim is of the size of its parameter each time; what has the dim is sent
    in slices, as much as at once.
    """
    cut = pipe.cut
    if cut is None:
        return {}
    return {v: cut.micro for v in of_batch(program, cut) if not cut.has(v)}


def _ending(
    program: NamedProgram, body: tuple[Node, ...], new: Mapping[Value, Value]
) -> NamedProgram:
    """The program with another body, whose results are new."""
    goal = program.goal
    return replace(
        program,
        body=body,
        outputs=tuple(replace(o, value=new.get(o.value, o.value)) for o in program.outputs),
        updates=tuple(replace(u, new=new.get(u.new, u.new)) for u in program.updates),
        goal=goal and goal.on(lambda v: new.get(v, v)),
    )


def _behind_loop(program: NamedProgram, pipe: Piped) -> NamedProgram:
    """The program with a `leaving` for what the loop over batches makes.

    Of gradients that each stage takes on the way, none leaves the stage.
    """
    stays = program.goal is not None and program.goal.taken is not None
    body: list[Node] = []
    new: dict[Value, Value] = {}
    makers = {v: node for node in program.body for v in node.makes}
    for node in program.body:
        _refuse_state(node, pipe, makers)
        (node,) = substitute((node,), new)
        body.append(node)
        if isinstance(node, NamedLoop) and node.dim.name == pipe.micro:
            kept = {c.result for c in gradient_sums(node)} if stays else set()
            for value in node.makes:
                if not value.type.has(pipe.dim) and value not in kept:
                    new[value] = replace(value)
                    body.append(_leaving(value, new[value], node))
    return _ending(program, tuple(body), new)


def gradient_sums(loop: NamedLoop) -> tuple[ir.Carry[Value], ...]:
    """The sums over batches to which the backward pass in a loop adds."""
    added = {v for n in loop.body if n.phase == "backward" for v in n.makes}
    return tuple(c for c in loop.carries if c.next in added)


def _refuse_state(node: Node, pipe: Piped, made: Mapping[Value, Node]) -> None:
    """Refuse what each batch reads of the one before it: stages do them at different times."""
    if not isinstance(node, NamedLoop) or node.dim.name != pipe.micro:
        return
    for carry in node.carries:
        begun = made.get(carry.init)
        if not (isinstance(begun, NamedOp) and begun.name == "zeros"):
            message = f"each batch that is accumulated goes on with `{carry.inside.label}`"
            help = "leave `each=true` out: the program then assigns it once a step"
            _refuse(message, carry.next.span, help)
