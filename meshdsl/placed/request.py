"""The placements requested of a program's values: by the rules of a layout, or an `sbp` block.

`Request` is that of a layout; `BlockRequest` that of a block, where tensors without an annotation
are free. The walk (`from_named.py`) and the search for the optimum (`optimal.py`) both query it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Literal, NoReturn, Self

from meshdsl.diagnostics import Diagnostics, Fix, Related, Span, advice, fail
from meshdsl.ir import program as ir
from meshdsl.ir.program import OpKind, kind_of
from meshdsl.ir.rewrite import makes_of
from meshdsl.ir.types import Dim
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations
from meshdsl.named.ir import NamedOp, Value, loops_of, values_of
from meshdsl.named.workers import is_per_worker
from meshdsl.ops.opdef import lookup
from meshdsl.placed.layout import Binding, Layout, SplitCause, Target, collect_layout, collect_mesh
from meshdsl.placed.pipelined import Piped, gradient_sums
from meshdsl.placed.placements import WHOLE, Component, Mesh, Partial, Placement, Split, placement
from meshdsl.placed.sbp_block import Annotation, Annotations, resolve_sbp
from meshdsl.placed.settings import Setting
from meshdsl.placed.sharding_rules import Row, call_of, legal_rows
from meshdsl.placed.strategies import Want
from meshdsl.records import dataclass

Pins = tuple[Placement | None, ...]
"""Placements in which single operands of an operator must be read."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The placement requested of a value; per split dim the text that requests it, and where.

    Dims that a rule to `none` is for are `unsplit`, and `own` those of rules for this value alone.
    `want` is the demand on an operator that makes the value, where rules say nothing of what it
    reduces.
    """

    placement: Placement
    causes: dict[str, SplitCause]
    unsplit: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    want: Want = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "want", Want(self.placement))


ShardingSpec = Layout | Annotations
"""What a user specifies: a layout, or an `sbp` block."""

Basis = Literal["used", "stored", "sum", "parts", "block"]
"""What constrains a value.

The rules for computed values, those for stored ones, or those for gradients, of a sum over batches;
`Request.parts`; or the `sbp` block.
"""

Where = Literal["everywhere", "passes", "stack"]
"""Whether the passes of a micro-batch make a value, and the loop on the stages collects it."""

Key = tuple[Target, Basis, Where]
"""All that a constraint depends on."""


@dataclass(frozen=True, eq=False)
class Request:
    """The placements that the rules of a layout request of the values of a program.

    `left` are the placements in which a walk has left the outputs, `parts` those of states that are
    stored partial (`State.parts`). `pipe` is the pipeline; `whole` is what its passes make of whole
    operands, since a stage reads all of it. `one_stage` is the pipeline of which a stage is planned
    by itself. `_constraints` is the table of what has been looked up: by key, which values share
    that are constrained alike, and by value.
    """

    program: named.NamedProgram
    layout: Layout
    left: Mapping[Value, Placement] = field(default_factory=dict)
    pipe: Piped | None = None
    parts: Mapping[Value, Placement] = field(default_factory=dict, kw_only=True)
    whole: frozenset[Value] = field(default=frozenset(), kw_only=True)
    one_stage: Piped | None = field(default=None, kw_only=True)
    _constraints: dict[Value | Key, Constraint] = field(
        default_factory=dict, kw_only=True, repr=False
    )

    def on(
        self, program: named.NamedProgram, left: Mapping[Value, Placement] | None = None
    ) -> Self:
        """The same request for a program that has been rewritten."""
        by_key: dict[Value | Key, Constraint] = {
            key: c for key, c in self._constraints.items() if isinstance(key, tuple)
        }
        return replace(self, program=program, left=left or {}, _constraints=by_key)

    def also(self, dim: Dim, axes: tuple[str, ...], span: Span) -> Self:
        """The same request with a rule for a dim that the compiler made up."""
        return replace(self, layout=self.layout.also(dim, axes, span), _constraints={})

    def with_parts(self, parts: Mapping[Value, Placement]) -> Self:
        """The same request with states that are stored partial."""
        return replace(self, parts=parts, _constraints={})

    def with_whole(self, value: Value) -> Self:
        """The same request with one more value that passes make of whole operands."""
        assert value not in self.whole, "a value is made whole once"
        return replace(self, whole=self.whole | {value})

    @property
    def is_of_values(self) -> bool:
        """Whether what is requested of a value does not depend on the operators around it."""
        return self.pipe is None

    @property
    def mesh(self) -> Mesh:
        """The mesh that values are placed on."""
        return self.layout.mesh

    @cached_property
    def returned(self) -> frozenset[Value]:
        """The outputs of the program."""
        return frozenset(o.value for o in self.program.outputs)

    # --- of a value --------------------------------------------------------------------------

    def asked(self, value: Value) -> Constraint:
        """The placement requested of a value at its definition, and why; other axes are free."""
        constraint = self._constraints.get(value)
        if constraint is None:
            constraint = self._constraint(self._key(value), value)
            self._constraints[value] = constraint
        return constraint

    def _constraint(self, key: Key, value: Value) -> Constraint:
        """The constraint of a key, of which `value` is one."""
        constraint = self._constraints.get(key)
        if constraint is None:
            constraint = self._constraints[key] = self._constrain(key, value)
        return constraint

    def used(self, value: Value) -> Constraint:
        """What rules request of a value where it is used."""
        return self._bound(value, "used")

    def kept(self, value: Value) -> Constraint:
        """What rules request of a value where it is stored."""
        return self._bound(value, "stored")

    def _bound(self, value: Value, basis: Basis) -> Constraint:
        """What rules request of a value, wherever in the program it is."""
        return self._constraint((self.layout.target(value), basis, "everywhere"), value)

    def _key(self, value: Value) -> Key:
        """The key of what is requested of a value at its definition."""
        if value in self.parts:
            return value, "parts", "everywhere"
        layout = self.layout
        if self.pipe is None:
            stored = layout.is_stored(value, value in self.returned)
            return layout.target(value), "stored" if stored else "used", "everywhere"
        where: Where = "everywhere"
        if value in self._in_passes:
            where = "stack" if value in self._stacks else "passes"
        if self._waits_for_all(value):
            return layout.target(value), "used", where
        if value in self._sums:
            return value, "sum", where
        stored = layout.is_stored(value, value in self.returned)
        return layout.target(value), "stored" if stored else "used", where

    def _constrain(self, key: Key, value: Value) -> Constraint:
        """The constraint of a value, of all that have the key."""
        _, basis, where = key
        if basis == "parts":
            return Constraint(self.parts[value], {})
        bound = replace(value, role="grad") if basis == "sum" else value
        binding = self.layout.bind(bound, basis != "used")
        if where != "everywhere":
            return self._on_stages(binding, where)
        causes = binding.known(binding.splits)
        return Constraint(binding.placement(self.mesh), causes, binding.unsplit, binding.own)

    def _waits_for_all(self, value: Value) -> bool:
        """Whether a gradient is placed as `grads` rules say only once all passes are done."""
        if self.pipe is None or (self.pipe.use and self.pipe.use.reduce == "each"):
            return False
        return value in self._sums or (value.role == "grad" and value in self._in_passes)

    @cached_property
    def _in_passes(self) -> frozenset[Value]:
        """What the passes of a micro-batch make."""
        pipe = self.pipe
        if pipe is None:
            return frozenset()
        if pipe.cut is None:
            micro = (loop for loop in loops_of(self.program) if loop.dim.name == pipe.micro)
            return self._sums.union(*(makes_of(loop) for loop in micro))
        passes = (n for n in self.program.body if n.phase != "update")
        inside = (n for n in passes if kind_of(n) is not OpKind.STAGE_OUTPUT)
        return frozenset(v for n in inside for v in makes_of(n))

    @cached_property
    def _stacks(self) -> frozenset[Value]:
        """What the loop on the stages collects, gradients made of it, and sums over batches."""
        pipe = self.pipe
        if pipe is None:
            return frozenset()
        piped = (loop for loop in loops_of(self.program) if pipe.cuts(loop))
        sums = (v for v in self._sums if v.type.has(pipe.dim))
        grads = (v for v in self._in_passes if v.role == "grad" and v.type.has(pipe.dim))
        return frozenset((*(c.outer for loop in piped for c in loop.collected), *grads, *sums))

    def _on_stages(self, found: Binding, where: Where) -> Constraint:
        """What is requested of what the passes make: a stage has it, or all of its iterations.

        The axis of the stages may split it otherwise once it has left the passes.
        """
        pipe = self.pipe
        assert pipe is not None, "only with a pipeline there are stages"
        splits = {
            dim: axes if dim == pipe.dim else tuple(a for a in axes if a != pipe.axis)
            for dim, axes in found.splits.items()
        }
        causes = found.known(splits)
        if where == "stack" and splits.get(pipe.dim, ())[:1] != (pipe.axis,):
            splits[pipe.dim] = (pipe.axis,)
            causes[pipe.dim] = SplitCause(f"{pipe.dim} -> {pipe.axis}", pipe.span)
        return Constraint(placement(self.mesh, splits), causes)

    @cached_property
    def _sums(self) -> frozenset[Value]:
        """The sums of gradients over batches that a rule for `grads` asks to be split."""
        sums: set[Value] = set()
        batches = (loop for loop in loops_of(self.program) if loop.phase == "forward")
        for carry in (c for loop in batches for c in gradient_sums(loop)):
            if self.layout.is_stored(replace(carry.inside, role="grad"), False):
                sums.update((carry.init, carry.inside, carry.next, carry.result))
        return frozenset(sums)

    def ruled(self, value: Value) -> Placement:
        """The placement requested of a value."""
        return self.asked(value).placement

    def read(self, value: Value, op: NamedOp) -> Placement:
        """The splits that rules request of a value where an operator reads it.

        Dims that a rule for the operator's function leaves whole are so, whatever splits them
        outside of it.
        """
        placed = self.ruled(value)
        freed = self.layout.freed(value, op.outs) if placed.splits else frozenset()
        return functools.reduce(Placement.without_dim, sorted(freed), placed)

    def demanded(self, value: Value) -> Placement:
        """The placement requested of a value that is not returned."""
        stored = self.layout.is_stored(value, False)
        return self._bound(value, "stored" if stored else "used").placement

    def stored(self, value: Value) -> Placement:
        """The placement a parameter or a state is stored in; one that is read in parts is whole."""
        return self.parts.get(value) or self.ruled(value).reduced

    def output(self, value: Value) -> Placement | None:
        """The placement a value is returned in; None where it is as it settles, reduced."""
        if value.role == "param":
            return self._bound(value, "used").placement
        return self.ruled(value)

    def carried(self, carry: ir.Carry[Value]) -> Value | None:
        """The value whose placement a loop carries; None: that of the initial value, reduced."""
        return carry.inside

    def reduced_in(self, value: Value) -> Setting | None:
        """The setting of the dtype in which parts of a value are added up, where there is one."""
        return self.layout.setting("grads", "reduce") if value.role == "grad" else None

    # --- of an operator ----------------------------------------------------------------------

    def wants(self, op: NamedOp) -> tuple[Want, ...]:
        """The demands on the results of an operator. Raises MD0309 for one it cannot yield."""
        wants = tuple([self.asked(v).want for v in op.outs])
        if not self.layout.naming:
            return wants
        summed = (self.layout.summed(v, op) for v in op.outs)
        return tuple([replace(w, summed=s) if s else w for w, s in zip(wants, summed, strict=True)])

    def pins(self, op: NamedOp) -> Pins:
        """The placements in which `op` must read its operands; rules do not tell readers apart.

        States and parameters elsewhere are read where they lie: an update has only pieces of them
        in memory.
        """
        if not self._away:
            return (None,) * len(op.ins)
        return tuple([self.stored(v) if v in self._away else None for v in op.ins])

    def added_first(self, op: NamedOp) -> frozenset[str]:
        """The axes over which a sum is added up before `op` multiplies it.

        A device that has nothing of a summed dim adds 0, and 0 times infinity is NaN. Workers that
        compress what they have keep it in parts, whatever is in them.
        """
        if (
            is_per_worker(self.program)
            or not self._axes_of_empty
            or any(p and p.partial for p in self.pins(op))
        ):
            return frozenset()
        call = call_of(op)
        factors = [v for v in op.ins if v.type.dtype.kind == "float" and v not in self._finite]
        multiplied = any(
            any(v not in self._finite for v in group) and any(v not in group for v in factors)
            for indices in call.opdef.factors(call.signature).linear
            if (group := [op.ins[i] for i in indices])
        )
        return self._axes_of_empty if multiplied else frozenset()

    @cached_property
    def _axes_of_empty(self) -> frozenset[str]:
        """The axes along which some devices have an empty block of a dim."""
        if not self._may_be_uneven:
            return frozenset()
        entering = [*self.program.inputs, *(p.value for p in self.program.params)]
        entering += [s.value for s in self.program.states]
        results = (v for op in named.walk(self.program.body) for v in op.outs)
        uneven = {
            (dim, v.type.size(dim), placed)
            for v in (*entering, *results)
            if (placed := self.ruled(v)).splits_unevenly(v.type, self.mesh)
            for dim, _ in placed.splits
        }
        return frozenset(
            axis
            for dim, size, placed in uneven
            if any(start == stop for start, stop in placed.blocks(dim, size, self.mesh))
            for axis in placed.axes_of(dim)
        )

    @property
    def _may_be_uneven(self) -> bool:
        """Whether rules may split a dim into blocks of several sizes, known from these alone."""
        if self.pipe is not None or self.mesh.given or self.parts:
            return True
        sizes, splits = _sizes_of(self.program)
        for dim, axes in splits.union((rule.dim, rule.axes) for rule in self.layout.rules):
            blocks = self.mesh.size(*self.mesh.known(axes))
            for size in sizes.get(dim, ()):
                if size % blocks:
                    return True
        return False

    @cached_property
    def _finite(self) -> frozenset[Value]:
        """Literals that are finite."""
        made = (op for op in named.walk(self.program.body) if op.name == "constant")
        return frozenset(op.outs[0] for op in made if math.isfinite(op.attr("value")))

    @cached_property
    def _away(self) -> frozenset[Value]:
        away = [s.value for s in self.program.states if s.away]
        return frozenset((*away, *(p.value for p in self.program.params if p.away)))

    def refuse(self, op: NamedOp) -> NoReturn:
        """Raise MD0309: no row of `op` has its operands as `pins` demand."""
        raise AssertionError(f"{op.name} has no legal placement, and no annotation pins it")

    def alike(self, first: NamedOp, second: NamedOp) -> bool:
        """Whether the results of two operators are requested in one placement."""
        pairs = zip(first.outs, second.outs, strict=True)
        return all(self.demanded(a) == self.demanded(b) for a, b in pairs)

    # --- of a search -------------------------------------------------------------------------

    @cached_property
    def known(self) -> frozenset[tuple[str, str]]:
        """The pairs (dim, axis) of all requested splits."""
        return self.layout.known

    def is_settled(self, value: Value) -> bool:
        """Whether the placement of a value is fixed by `ruled`, on all axes."""
        return value in self.returned or value.role == "param"

    def is_known(self, value: Value) -> bool:
        """Whether `ruled` has the split dims of a value wherever it is read."""
        return True

    def may_split(self, value: Value) -> tuple[str, ...]:
        """The dims that may be split on axes without a rule; a rule to `none` fixes all."""
        unsplit = self._bound(value, "used").unsplit
        return tuple(d for d in value.type.names if d not in unsplit)

    def waits(self, value: Value) -> bool:
        """Whether a value is a gradient that keeps its placement until the update reads it."""
        return value.role == "grad" and not self.layout.is_stored(value, value in self.returned)


@dataclass(frozen=True, eq=False)
class BlockRequest(Request):
    """The placements that an `sbp` block requests: those of its annotations, or anything.

    Inputs, parameters and states without an annotation are whole. `layout` has rules only for dims
    that were made up. When to reduce does not change the placement of outputs.
    """

    annotations: Annotations = field(kw_only=True)

    @property
    def is_of_values(self) -> bool:
        """No: readers may be annotated, and slices are placed as their stack is."""
        return False

    @cached_property
    def _slices(self) -> dict[Value, tuple[Value, str]]:
        """The stack of every slice, and the dim of its loop."""
        every = loops_of(self.program)
        return {s.inside: (s.outer, loop.dim.name) for loop in every for s in loop.stacked}

    @cached_property
    def _readers(self) -> dict[NamedOp, Value]:
        return dict(_readers(self.program.body))

    @property
    def _may_be_uneven(self) -> bool:
        """As annotations are no rules, that is not known before."""
        return True

    def _annotated(self, value: Value) -> Annotation | None:
        return None if value in self._slices else self.annotations.of(value)

    def _key(self, value: Value) -> Key:
        """Annotations tell all values apart."""
        return value, "parts" if value in self.parts else "block", "everywhere"

    def _constrain(self, key: Key, value: Value) -> Constraint:
        """A slice is placed as its stack is: positions count the dims of the stack."""
        if key[1] == "block" and value in self._slices:
            stack, loop = self._slices[value]
            of_stack = self.asked(stack)
            return Constraint(of_stack.placement.without_dim(loop), of_stack.causes)
        annotation = self.annotations.of(value) if key[1] == "block" else None
        if annotation is None:
            return super()._constrain(super()._key(value), value)
        span, placed = annotation.entry.span, annotation.placement
        selector = tuple(name.text for name in annotation.entry.tensor)
        cause = SplitCause(span.text, span, selector)
        return Constraint(placed, {dim: cause for dim, _ in placed.splits})

    def demanded(self, value: Value) -> Placement:
        """As annotated, returned or not."""
        found = self.annotations.of(value)
        return super().demanded(value) if found is None else found.placement

    def output(self, value: Value) -> Placement | None:
        """As a walk has left it."""
        return self.left.get(value)

    def read(self, value: Value, op: NamedOp) -> Placement:
        """As annotated: annotations name tensors, no functions."""
        return self.ruled(value)

    def carried(self, carry: ir.Carry[Value]) -> Value | None:
        """The first that is annotated."""
        return next((v for v in (carry.inside, carry.next) if self.annotations.of(v)), None)

    # --- of an operator ----------------------------------------------------------------------

    def wants(self, op: NamedOp) -> tuple[Want, ...]:
        """As annotated, or anything. Raises MD0309."""
        wants = tuple(self._want(v, op) for v in op.outs)
        for value, want in zip(op.outs, wants, strict=True):
            self._check_yields(op, value, want)
        return wants

    def _want(self, value: Value, op: NamedOp) -> Want:
        if self._annotated(value) is not None:
            placed = self.ruled(value)
            return Want(placed.reduced if value in self.returned else placed, "exact")
        if self.layout.bind(value).causes:
            return Want(self.ruled(value))
        # An operator without operands yields a whole value: to split it later costs nothing.
        return Want(WHOLE, "free" if op.ins else "exact")

    def _check_yields(self, op: NamedOp, value: Value, want: Want) -> None:
        """Raise MD0309 where a result is to be partial and no row of the operator yields that.

        An operator without operands may begin a partial sum: zeros on all devices but one.
        """
        annotation = self._annotated(value)
        if annotation is None or not want.placement.op or not op.ins:
            return
        legal = legal_rows(call_of(op))
        wanted, axis = Partial(want.placement.op), want.placement.partial[0]
        if all(wanted not in row.outs for row in legal):
            words = lookup(op.name).words
            rules = f"its sharding rules: {'; '.join(map(str, legal))}"
            at = op.outs.index(value)
            fixes = self._components(value, annotation, axis, (row.outs[at] for row in legal))
            fail(
                "MD0309",
                f"{words} cannot produce `{value.label}` as {wanted} over mesh axis `{axis}`",
                annotation.entry.span,
                Related(op.span, "it is computed here"),
                help=advice(fixes, rules) if fixes else f"use one of {rules}",
                fixes=fixes,
            )

    def pins(self, op: NamedOp) -> Pins:
        """The annotations for single readers."""
        found = (self._pin(v, op) for v in op.ins)
        return tuple(None if pin is None else pin.placement for pin in found)

    def _pin(self, value: Value, op: NamedOp) -> Annotation | None:
        return self.annotations.at(value, self._readers.get(op))

    def refuse(self, op: NamedOp) -> NoReturn:
        """MD0309: the operator, the axis, and its legal rows."""
        at, pin = next((i, a) for i, v in enumerate(op.ins) if (a := self._pin(v, op)))
        legal = legal_rows(call_of(op))
        for axis in self.mesh.names:
            parts = tuple(p and p.component(axis) for p in self.pins(op))
            if not any(_fits(row, parts) for row in legal):
                break
        asked = ", ".join("?" if c is None else str(c) for c in parts)
        words = lookup(op.name).words
        rules = f"its sharding rules: {'; '.join(map(str, legal))}"
        others = (*parts[:at], None, *parts[at + 1 :])
        fixes = self._components(
            op.ins[at], pin, axis, (row.ins[at] for row in legal if _fits(row, others))
        )
        fail(
            "MD0309",
            f"{words} cannot read its operands as ({asked}) over mesh axis `{axis}`",
            pin.entry.span,
            Related(op.span, "it is applied here"),
            help=advice(fixes, rules) if fixes else f"use one of {rules}",
            fixes=fixes,
        )

    def _components(
        self, value: Value, annotation: Annotation, axis: str, legal: Iterable[Component]
    ) -> tuple[Fix, ...]:
        """The fixes that write another component over an axis, each once."""
        written = annotation.entry.components
        if len(written) != len(self.mesh.names):
            return ()
        span = written[self.mesh.names.index(axis)].span
        texts = dict.fromkeys(
            f"S({value.positions.index(c.dim)})" if isinstance(c, Split) else str(c) for c in legal
        )
        return tuple(Fix.write(span, text, safe=False) for text in texts)

    def alike(self, first: NamedOp, second: NamedOp) -> bool:
        """Annotations for one reader tell all operators apart."""
        if any(entry.at for entry in self.annotations.entries):
            return False
        return super().alike(first, second)

    # --- of a search -------------------------------------------------------------------------

    @cached_property
    def known(self) -> frozenset[tuple[str, str]]:
        """Those of annotations, beside those of made-up dims."""
        ops = list(named.walk(self.program.body))
        values = [*self.program.inputs, *(p.value for p in self.program.params)]
        ruled = [self.ruled(v) for v in (*values, *(v for op in ops for v in op.outs))]
        ruled += [p for op in ops for p in self.pins(op) if p is not None]
        return self.layout.known | {(d, a) for p in ruled for d, axes in p.splits for a in axes}

    def is_settled(self, value: Value) -> bool:
        """Whether a value is annotated or returned: it has no freedom."""
        return value in self.returned or self._annotated(value) is not None

    def is_known(self, value: Value) -> bool:
        """Whether a value is stored, annotated, or a slice of such."""
        stored = value.role in ("param", "state", "input")
        return stored or value in self._slices or self._annotated(value) is not None

    def may_split(self, value: Value) -> tuple[str, ...]:
        """Every dim."""
        return value.type.names


def resolve(
    declarations: Declarations,
    mesh: str | None,
    layout: str | None,
    sbp: str | None,
    schedule: str | None,
    diagnostics: Diagnostics,
) -> ShardingSpec:
    """The layout, with its schedule, or the block of these names, on the mesh of this name.

    What None stands for, and errors, are as those of `collect_mesh`, `collect_layout` and
    `resolve_sbp`.
    """
    on = collect_mesh(declarations, mesh, layout, sbp, diagnostics)
    if sbp is not None:
        return resolve_sbp(declarations, sbp, on)
    return collect_layout(declarations, layout, on, diagnostics, schedule)


@functools.lru_cache(maxsize=64)
def _sizes_of(
    program: named.NamedProgram,
) -> tuple[Mapping[str, frozenset[int]], frozenset[tuple[str, tuple[str, ...]]]]:
    """The sizes of each dim of a program, and the axes that `@` puts dims on."""
    sizes: dict[str, set[int]] = {}
    pinned = set[tuple[str, tuple[str, ...]]]()
    for value in values_of(program):
        for dim in value.type.dims:
            sizes.setdefault(dim.name, set()).add(dim.size)
        pinned.update((pin.dim, pin.axes) for pin in value.pins or value.source.pins)
    return {dim: frozenset(of) for dim, of in sizes.items()}, frozenset(pinned)


def _fits(row: Row, parts: tuple[object, ...]) -> bool:
    return all(part in (None, c) for part, c in zip(parts, row.ins, strict=True))


def _readers(nodes: tuple[named.Node, ...]) -> Iterator[tuple[NamedOp, Value]]:
    """The named tensor that each operator is on the way to, within one statement."""
    towards: dict[Value, Value] = {}
    for node in reversed(nodes):
        if isinstance(node, named.NamedLoop):
            yield from _readers(node.body)
            continue
        out = node.outs[0]
        reader = out if out.name else towards.get(out)
        if reader is not None:
            yield node, reader
            towards.update({v: reader for v in node.ins if v.name is None})
