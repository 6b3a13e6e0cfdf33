"""The one way through the compiler: `Compilation` has every stage of a program as a property.

The command line, Python, notebooks, modules and training all go through it. Below it are the
stages themselves, pure functions of what comes before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from meshdsl.analysis import analyse
from meshdsl.cluster.profile import load, refuse_unnamed
from meshdsl.cluster.timing import Timing, refuse_uneven
from meshdsl.device.ir import DeviceProgram
from meshdsl.diagnostics import Diagnostic, Diagnostics, Source, Span
from meshdsl.named.attention_fusion import spoken_of
from meshdsl.named.declarations import Declarations, declare
from meshdsl.named.ir import NamedProgram
from meshdsl.named.program_choice import build, choose_program, finish_named
from meshdsl.named.rematerialisation import without_effect as blocks_without_effect
from meshdsl.placed import async_checks
from meshdsl.placed.ir import PlacedProgram
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.place import OverLimit, PlanSearch, check_policy
from meshdsl.placed.reshard import MESSAGE_BYTES, Price
from meshdsl.records import dataclass
from meshdsl.schedule.use import ScheduleUse
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.backends.torch.emitter import ProgramText, WrittenFunctions
    from meshdsl.device.stage_local import Stored
    from meshdsl.placed.placements import Mesh
    from meshdsl.report.schema import ReportFacts

DEFAULT_POLICY = "optimal"

OBJECTIVES = ("time", "bytes")
"""What `optimal` may minimise."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choices beside the file, named as on the command line; None: the default.

    `message_bytes` is the cost of a collective beside its bytes where the policy is `optimal`;
    with `cache`, plans are kept in the user's cache folder. `evaluate` leaves out what `minimize`
    adds: gradients and update. With `measured`, a training step returns the norm of the gradient.
    A step of the `warmup` sends whole gradients where later ones send a compressed momentum.
    Unless `fused`, attention is written in primitives, as other systems are told of it. `cluster`
    is a profile by name or `.toml` file, that of the mesh where None; with one, `optimal` counts
    time, and bytes where `objective` is `bytes`. `set_in` has the places of the sizes of
    `set_dims` that a file has.
    """

    program: str | None = None
    mesh: str | None = None
    layout: str | None = None
    sbp: str | None = None
    schedule: str | None = None
    reduce: str = DEFAULT_POLICY
    message_bytes: int = MESSAGE_BYTES
    cache: bool = True
    set_dims: Mapping[str, int] = field(default_factory=dict)
    set_in: Mapping[str, Span] = field(default_factory=dict)
    dtype: str | None = None
    strict: bool = False
    evaluate: bool = False
    measured: bool = False
    warmup: bool = False
    fused: bool = True
    cluster: str | None = None
    objective: str | None = None

    def search(self, timing: Timing | None = None) -> PlanSearch:
        """The search for a plan on a cluster; without one that of bytes. Raises MD0324."""
        if timing is None and self.objective == "time":
            message = "the least time is asked for, but no cluster is named"
            refuse_unnamed("MD0324", message)
        if timing is None or self.objective == "bytes":
            return PlanSearch(Price(self.message_bytes), self.cache)
        return PlanSearch(Price(clock=timing), self.cache)


@dataclass(frozen=True, slots=True)
class Known:
    """Stages known beforehand: the tree recorded in Python, all of one program placed otherwise."""

    tree: ast.SourceFile | None = None
    declarations: Declarations | None = None
    written: NamedProgram | None = None
    named: NamedProgram | None = None


@dataclass(frozen=True, eq=False)
class Compilation:
    """One program on its way from text to text. A stage is made when it is first read.

    Messages go to `diagnostics`. A stage that finds errors raises DiagnosticError. A forward pass
    of a training has its parameters where the `step` has them.
    """

    source: Source
    options: Options = field(default_factory=Options)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    known: Known = field(default_factory=Known)
    step: Compilation | None = None

    @cached_property
    def tree(self) -> ast.SourceFile:
        """The syntax tree of the parts that could be parsed."""
        if self.known.tree is not None:
            return self.known.tree
        return parsed(self.source, self.diagnostics)

    @cached_property
    def declarations(self) -> Declarations:
        """The declarations of the file, by kind and name."""
        if self.known.declarations is not None:
            return self.known.declarations
        problems = Diagnostics()
        declarations = declare(self.tree, problems, self.options.set_dims, self.options.set_in)
        self._keep(problems)
        return declarations

    @cached_property
    def written(self) -> NamedProgram:
        """The chosen program, before it is simplified and becomes a training step."""
        if self.known.written is not None:
            return self.known.written
        problems = Diagnostics()
        chosen = choose_program(self.declarations, self.options.program)
        spoken = spoken_of(self.declarations, self.options.layout)
        program = build(self.declarations, chosen, spoken, problems)
        self._keep(problems)
        assert program is not None
        return program

    def _keep(self, problems: Diagnostics) -> None:
        """Report what a stage has found; with an error, all that is wrong with the text is told."""
        if self.known.tree is None and (problems.errors or self.diagnostics.errors):
            problems = analyse(self.source, self._chosen).diagnostics
        self.diagnostics.add(*problems)
        self.diagnostics.raise_all()

    @property
    def _chosen(self) -> Options:
        """The options with the layout that they mean by default: others are not looked at."""
        options = self.options
        layouts = (d for d in self.tree.declarations if isinstance(d, ast.LayoutDecl))
        first = next(layouts, None)
        if options.layout is not None or options.sbp is not None or first is None:
            return options
        return replace(options, layout=first.name.text)

    @cached_property
    def named(self) -> NamedProgram:
        """The program simplified; one with `minimize` is a training step, or its forward pass."""
        if self.known.named is not None:
            return self.known.named
        chosen = self.options
        spoken = spoken_of(self.declarations, chosen.layout) if chosen.fused else None
        flags = chosen.evaluate, chosen.measured, spoken, chosen.warmup
        return finish_named(self.written, chosen.dtype, *flags)

    @cached_property
    def placed(self) -> PlacedProgram:
        """The placement of each value on the mesh, and its reshards."""
        place = partial(place_named, self.named, self.declarations, self.options, self.diagnostics)
        program = place() if self.known.tree is None else self._without_edits(place)
        self.diagnostics.raise_errors()
        return program

    def _without_edits(self, place: Callable[[], PlacedProgram]) -> PlacedProgram:
        """What `place` gives; what it says of layouts recorded in Python has no edits of text."""
        calls = [n.span for n in self.declarations.layouts.values() if n.recorded]

        def without_edits(diagnostic: Diagnostic) -> Diagnostic:
            edits = ((fix, [e.span for e in fix.edits]) for fix in diagnostic.fixes)
            fixes = (fix for fix, spans in edits if not _overlap(spans, calls))
            return replace(diagnostic, fixes=tuple(fixes))

        return self.diagnostics.told(place, without_edits) if calls else place()

    def placed_within(self, most: int) -> PlacedProgram | None:
        """The program placed by a walk (`WALKS`); None where it costs more than `most`."""
        program = self.named, self.declarations, self.options, self.diagnostics
        try:
            return place_named(*program, most=most)
        except OverLimit:
            return None

    @property
    def asynchronous(self) -> bool:
        """Whether stages update on the way: then each micro-batch is a batch of its own."""
        pipe = self.placed.pipe
        return pipe is not None and pipe.use is not None and pipe.use.asynchronous

    @property
    def updates(self) -> int:
        """How many updates of its parameters each stage makes in a step."""
        pipe = self.placed.pipe
        if pipe is None or pipe.use is None or not pipe.use.asynchronous:
            return 1
        micro = async_checks.count_of(self.named, pipe)
        return max(pipe.use.verified(self.placed.mesh.size(pipe.axis), micro).updates.values())

    @cached_property
    def timing(self) -> Timing | None:
        """The chosen cluster as its mesh sees it; None where none is named."""
        return timing_of(self.declarations, self.options, self.placed.mesh)

    @cached_property
    def device(self) -> DeviceProgram:
        """The statements of each device, collectives among them."""
        placed = self._apart if self.asynchronous else self.placed
        if self.step is None or placed.pipe is None:
            return lower_placed(placed)
        from meshdsl.device.stage_local import stored_on

        return lower_placed(placed, stored=stored_on(self.step.device))

    @cached_property
    def _apart(self) -> PlacedProgram:
        """The placed program of devices whose stages update on the way: it accumulates batches."""
        pipe = self.placed.pipe
        assert pipe is not None, "updates on the way are those of stages"
        assert pipe.use is not None, "updates on the way are those of a schedule"
        async_checks.check_built(pipe, next(iter(self.placed.away.values()), ""))
        micro, cut = async_checks.count_of(self.named, pipe), pipe.cut
        table = pipe.use.verified(self.placed.mesh.size(pipe.axis), micro)
        async_checks.check_apart(self.of_batches(pipe), pipe, table)
        program = self.of_batches(pipe, micro, async_checks.taken(pipe, table))
        apart = None if cut is None else (cut.dims[0], micro, cut.axis)
        use = replace(pipe.use, dims=(), micro=None, apart=apart)
        return place_named(program, self.declarations, self.options, Diagnostics(), use)

    def of_batches(self, pipe: Piped, count: int = 1, taken: int = 1) -> NamedProgram:
        """The step of `count` micro-batches, each a batch of its own.

        Gradients of several are added up, and divided by how many are `taken` into an update.
        Raises MD0331 and MD0337 for what cannot be cut so.
        """
        cut, compilation = pipe.cut, self
        if cut is not None:
            sizes = {**self.options.set_dims, cut.dims[0]: async_checks.part_of(self.named, cut)}
            chosen = replace(self.options, set_dims=sizes)
            compilation = Compilation(self.source, chosen, Diagnostics(), Known(self.tree))
        written, options = compilation.written, compilation.options
        goal = written.goal
        assert goal is not None, "what is cut is a training step"
        optimizer_options = {**goal.optimizer.options, "accumulate": count}
        goal = replace(
            goal, optimizer=replace(goal.optimizer, options=optimizer_options), taken=taken
        )
        spoken = spoken_of(compilation.declarations, options.layout) if options.fused else None
        step = finish_named(replace(written, goal=goal), options.dtype, False, spoken=spoken)
        if count == 1:
            async_checks.check_sizes(self.named, step, cut)
        return step

    @cached_property
    def functions(self) -> WrittenFunctions:
        """The functions of the torch program, before they have their tables and what they call."""
        from meshdsl.backends.torch.emitter import write

        return write(self.device)

    @cached_property
    def emitted(self) -> ProgramText:
        """The torch program that every device runs, and the source lines of its statements."""
        from meshdsl.backends.draws import draws

        draw_of, device = draws(self.named), self.device
        if self.asynchronous:
            # Inputs are those of the whole step, whatever micro-batches are made of.
            by_name = {
                value.label: draw for value, draw in draw_of.items() if value.role == "input"
            }
            of_step = {
                v.value: by_name[v.value.label] for v in device.inputs if v.value.label in by_name
            }
            draw_of = draws(device.placed.named) | of_step
        return self.functions.text(draw_of)

    @property
    def text(self) -> str:
        """The torch program that every device runs."""
        return self.emitted.text

    @property
    def bare(self) -> str:
        """The function of one device alone, for reading."""
        return self.functions.bare().text

    @cached_property
    def report(self) -> ReportFacts:
        """The memory and communication of each line, their reasons, and their cost."""
        from meshdsl.report.explanation import explain

        stages = self.device, self.diagnostics, self.timing
        return explain(*stages, self.identifiers, self._warmup_device)

    @cached_property
    def advised(self) -> ReportFacts:
        """The report with remedies: rules that were compiled, each with what it saves."""
        from meshdsl.report.remedies import with_remedies

        return with_remedies(self.report, self)

    def identifiers(self) -> Mapping[str, str]:
        """The variables of the text, by their names in the device program."""
        return self.functions.identifiers

    def _warmup_device(self) -> DeviceProgram | None:
        return None if self.warmup is None else self.warmup.device

    @property
    def forward(self) -> Compilation:
        """The program without the gradients and updates that `minimize` adds."""
        if self.named.goal is None:
            return self
        return self._forward

    @cached_property
    def _forward(self) -> Compilation:
        options = replace(self.options, evaluate=True, measured=False, warmup=False)
        return self.under(options, Diagnostics())

    @property
    def evaluation(self) -> Compilation:
        """The forward pass on the parameters of the training step, where that has them."""
        return replace(self.forward, step=self)

    @cached_property
    def measured(self) -> Compilation:
        """The training step that returns the norm of its gradient, too."""
        return self.under(replace(self.options, measured=True), Diagnostics())

    @cached_property
    def warmup(self) -> Compilation | None:
        """The step of the first steps of a training, where these are not as the others are."""
        goal = self.named.goal
        compress = None if goal is None else goal.optimizer.compress
        if compress is None or not compress.warmup:
            return None
        return self.under(replace(self.options, warmup=True), Diagnostics())

    def under(
        self,
        options: Options,
        diagnostics: Diagnostics,
        declarations: Declarations | None = None,
    ) -> Compilation:
        """The same program placed otherwise; the stages that placing does not change are reused.

        `declarations` are those of this program, and more: layouts that `options` names.
        """
        before, now = self.options, options
        assert (before.program, before.set_dims) == (now.program, now.set_dims)
        same = all(
            getattr(before, n) == getattr(now, n)
            for n in ("dtype", "evaluate", "measured", "warmup", "fused")
        )
        declarations, written = declarations or self.declarations, self.written
        spoken = spoken_of(declarations, now.layout)
        if not self._stays(written, spoken):
            chosen = choose_program(declarations, now.program)
            rebuilt = build(declarations, chosen, spoken, Diagnostics())
            assert rebuilt is not None, "it could be built under other layouts"
            written = rebuilt
        same = same and self._stays(self.named, spoken)
        known_stages = Known(self.tree, declarations, written, self.named if same else None)
        return Compilation(self.source, options, diagnostics, known_stages)

    def _stays(self, program: NamedProgram, spoken: Set[tuple[str, str]]) -> bool:
        """Whether a named program of this file stays as it is where layouts speak of others."""
        before = spoken_of(self.declarations, self.options.layout)
        pairs = (spoken - before, before - spoken)
        newly, no_longer = ({name for name, _ in changed} for changed in pairs)
        return program.unspoken.isdisjoint(newly) and program.kept_spoken.isdisjoint(no_longer)

    def checked(self, until: str = "device") -> Compilation:
        """This one, with all stages up to `until` made. Under `strict`, warnings are errors."""
        getattr(self, until)
        if self.options.strict:
            self.diagnostics.promote_warnings()
            self.diagnostics.raise_errors()
        return self


def _overlap(spans: Iterable[Span], others: Iterable[Span]) -> bool:
    """Whether two spans of one text have a place in common."""
    return any(
        a.source is b.source and a.start <= b.end and b.start <= a.end
        for a, b in itertools.product(spans, others)
    )


def compile_source(
    source: Source, options: Options, diagnostics: Diagnostics, until: str = "device"
) -> Compilation:
    """A file compiled as far as `until`. Raises `DiagnosticError`."""
    return Compilation(source, options, diagnostics).checked(until)


# --- stages ----------------------------------------------------------------------------------


def front(source: Source, set_dims: Mapping[str, int], diagnostics: Diagnostics) -> Declarations:
    """Read and declare a file; errors go to `diagnostics`."""
    return declare(parsed(source, diagnostics), diagnostics, set_dims)


def parsed(source: Source, diagnostics: Diagnostics) -> ast.SourceFile:
    """The syntax tree of the parsable parts of a file; errors go to `diagnostics`."""
    from meshdsl.syntax.parse import parse

    tree, problems = parse(source)
    diagnostics.add(*problems)
    return tree


def build_named(
    declarations: Declarations,
    name: str | None,
    dtype: str | None,
    diagnostics: Diagnostics,
    evaluate: bool = False,
) -> NamedProgram:
    """The named program called `name` (the only one for None), verified and simplified.

    One with `minimize` becomes a training step, unless it is only to be evaluated.
    """
    program = written(declarations, name, diagnostics)
    return finish_named(program, dtype, evaluate, spoken=spoken_of(declarations))


def written(declarations: Declarations, name: str | None, diagnostics: Diagnostics) -> NamedProgram:
    """The program called `name` (the only one for None), as built from the tree."""
    chosen, spoken = choose_program(declarations, name), spoken_of(declarations)
    program = build(declarations, chosen, spoken, diagnostics)
    diagnostics.raise_errors()
    assert program is not None
    return program


def place_named(
    program: NamedProgram,
    declarations: Declarations,
    options: Options,
    diagnostics: Diagnostics,
    schedule: ScheduleUse | None = None,
    most: int | None = None,
) -> PlacedProgram:
    """The placed program under the chosen mesh, layout and policy, verified.

    `schedule` is taken in the place of the layout's. A walk may raise `OverLimit` as soon as it
    costs more than `most`.
    """
    from meshdsl.placed.gather_again import may_gather_again, without_effect
    from meshdsl.placed.layout import Layout
    from meshdsl.placed.lint import lint
    from meshdsl.placed.offload import without_effect as nothing_away
    from meshdsl.placed.pipelined import stored
    from meshdsl.placed.place import CostLimit, place
    from meshdsl.placed.request import resolve
    from meshdsl.placed.verify import verify

    check_policy(options.reduce)
    problems = Diagnostics()
    names = (options.mesh, options.layout, options.sbp, options.schedule)
    spec = resolve(declarations, *names, problems)
    problems.raise_errors()
    if schedule is not None and isinstance(spec, Layout):
        spec = replace(spec, schedule=schedule)
    problems = lint(program, spec, declarations, options.fused)
    diagnostics.add(*problems, *blocks_without_effect(program))
    problems.raise_errors()
    search = options.search(timing_of(declarations, options, spec.mesh))
    watch = None
    if most is not None and isinstance(spec, Layout) and not may_gather_again(spec):
        watch = partial(CostLimit, search.price, spec.mesh, most=most)
    result = place(program, spec, options.reduce, search, watch)
    if isinstance(spec, Layout) and _is_to_cut(result) and not _is_cut(result):
        result = _cut_otherwise(result, partial(place, program, spec, search=search), search)
        if _needs_whole_batch(result):
            result = place(program, stored(program, spec), options.reduce, search)
    verify(result)
    if isinstance(spec, Layout):
        diagnostics.add(*without_effect(result, spec))
        if spec.settings:
            diagnostics.add(*nothing_away(result, spec))
    return result


def _is_to_cut(placed: PlacedProgram) -> bool:
    """Whether the passes of a step are cut: of asynchronous stages each batch is its own step."""
    use = placed.pipe.use if placed.pipe else None
    return use is not None and not use.asynchronous


def _is_cut(placed: PlacedProgram) -> bool:
    """Whether the passes of a program can be cut into the micro-batches of its schedule."""
    from meshdsl.device.from_placed import lower
    from meshdsl.device.microbatching import NotCut, in_micro_batches

    try:
        in_micro_batches(lower(placed))
    except NotCut:
        return False
    return True


def _cut_otherwise(
    placed: PlacedProgram, under: Callable[[str], PlacedProgram], search: PlanSearch
) -> PlacedProgram:
    """A program that can be cut into micro-batches, by the cheapest other walk that leaves it so.

    A policy says when sums are reduced, not whether a layout is legal. Where no walk leaves it so,
    the program as it is.
    """
    from meshdsl.placed.place import WALKS, cost

    others = [under(policy) for policy in WALKS if policy != placed.policy]
    cheapest_first = sorted(others, key=lambda other: cost(other, search.price))
    best = next(filter(_is_cut, cheapest_first), None)
    if best is None:
        return placed
    plan = None if placed.plan is None else replace(placed.plan, least=False)
    return replace(best, policy=placed.policy, plan=plan)


def _needs_whole_batch(placed: PlacedProgram) -> bool:
    """Whether an asynchronous layout has a forward pass that cannot be cut into micro-batches.

    In a training step each of these is a batch of its own, and nothing has to be cut. A forward
    pass has no updates, so it may take the whole batch at once, as one device does.
    """
    use = placed.pipe.use if placed.pipe else None
    return use is not None and use.forward and use.updates and not _is_cut(placed)


def timing_of(declarations: Declarations, options: Options, mesh: Mesh) -> Timing | None:
    """The cluster of the options, or that which the mesh is declared `on`, as the mesh sees it.

    Raises MD0320 to MD0323.
    """
    declared = declarations.meshes.get(mesh.name)
    profile = None if declared is None else declared.profile
    if options.cluster is None and profile is None:
        return None
    span = profile.span if profile is not None and options.cluster is None else None
    cluster = load(options.cluster or (profile.text if profile else ""), span)
    sizes = {} if declared is None else {axis.name.text: axis.size.span for axis in declared.axes}
    refuse_uneven(cluster, mesh, span, sizes)
    return Timing(cluster, mesh)


def lower_placed(
    program: PlacedProgram, verified: bool = True, stored: Stored | None = None
) -> DeviceProgram:
    """The device program, verified: small collectives in buckets, others in flight early.

    One of many that are only compared is not `verified`.
    `stored` says which parameters single devices have, where another program decides that.
    """
    from meshdsl.device.from_placed import lower
    from meshdsl.device.passes import passes
    from meshdsl.device.verify import verify

    result = lower(program)
    if verified:
        verify(result)
    for step in passes(program, stored):
        before, result = result, step(result)
        if verified and result is not before:
            verify(result)
    return result
