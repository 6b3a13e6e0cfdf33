"""Micro-batches: a dim that a schedule cuts is split over time.

Its blocks are made one after the other: along the axis `micro`, whose devices are points in time,
a value is split (a slice of each micro-batch), partial (added up over all of them) or the same in
each. The rows of the operators say which, as along any axis. Nothing can be reduced before the last
micro-batch: a program in which the pass of one needs a sum over all of them is refused. (GPipe,
Huang et al. 2019, calls for it and leaves batch normalisation to the user.)

What leaves the loop is a sum of a step, added up in f32 at least, as where the optimizer
accumulates; or, of what is cut, the whole, in which each micro-batch has its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NoReturn

from meshdsl.device.costs import with_flops
from meshdsl.device.ir import (
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Var,
    known_words,
)
from meshdsl.device.names import Names, names_of
from meshdsl.device.past_slices import PastSlices, earlier_dims, without_unread
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Fix, Related, Span, advice, counted
from meshdsl.ir.program import Carry, OpKind, Stacked, every, kind_of
from meshdsl.ir.rewrite import defined, reads_of
from meshdsl.ir.types import Dim
from meshdsl.named.accumulate import summed
from meshdsl.named.step_numbers import may_be_batches
from meshdsl.ops.opdef import lookup
from meshdsl.placed.collectives import Step
from meshdsl.placed.layout_edits import by_schedule, cut_into
from meshdsl.placed.pipelined import Microbatching, Piped
from meshdsl.placed.placements import B, Component, Partial, Placement, Split
from meshdsl.placed.sharding_rules import Row, best_row, call_of


class NotCut(DiagnosticError):
    """A program that cannot be cut into micro-batches: MD0331, MD0332 or MD0333."""


@lru_cache(maxsize=1)
def in_micro_batches(program: DeviceProgram) -> DeviceProgram:
    """The program with its passes in a loop over micro-batches, where its layout cuts a dim.

    Raises `NotCut`. What placing tries is kept for the passes.
    """
    pipe = program.placed.pipe
    if pipe is None or pipe.cut is None:
        return program
    return _Cutting(program, pipe, pipe.cut).program()


def _refuse(
    code: str,
    message: str,
    span: Span,
    *related: Related,
    help: str | None,
    fixes: tuple[Fix, ...] = (),
) -> NoReturn:
    raise NotCut(Diagnostic(code, message, span, related=related, help=help, fixes=fixes))


class _Cutting:
    def __init__(self, program: DeviceProgram, pipe: Piped, cut: Microbatching) -> None:
        self.source, self.pipe, self.cut = program, pipe, cut
        sized = dict.fromkeys(self._sized())
        block_sizes = tuple((dim, (cut.axis,), cut.sizes) for dim in sized)
        moments = ((cut.axis, cut.micro),)
        self.mesh = replace(
            program.mesh, moments=moments, given=(*program.mesh.given, *block_sizes)
        )
        self.parts = counted(cut.micro, "micro-batch")
        self.names = Names(names_of(program))
        self.index = self.names.fresh(cut.axis)
        self.components: dict[Var, Component] = {}
        self.new: dict[Var, Var] = {}
        # The versions of values made by slices and zeros, and the nodes that make them.
        self.versions: dict[tuple[Var, Component], Var] = {}
        self.made: list[Node] = []
        # What is made of whole inputs, before the loop.
        self.inside: set[Node | Var] = set()
        self.makers = {v: node for node in program.body for v in node.makes}
        self.of_batch: dict[Var, Var | None] = {}
        self.ahead: list[Node] = []
        self.past = PastSlices(program, pipe, self.mesh, self.names)

    def _sized(self) -> Iterator[str]:
        """The dims whose blocks have given sizes: those that are cut, and of what these read."""
        if self.cut.sizes:
            yield from self.cut.dims
            for node in every(self.source.body):
                if isinstance(node, Compute):
                    yield from (d for d, of in earlier_dims(node).items() if of in self.cut.dims)

    def program(self) -> DeviceProgram:
        """The program, with what does not depend on the batch before the loop."""
        cut_inputs = {v for v in self.source.inputs if self.cut.has(v)}
        inside = self.inside = self._inside(cut_inputs)
        before, after, left = [], [], []
        self.versions.clear()
        for node in self.source.body:
            if isinstance(node, Compute) and node.kind is OpKind.STAGE_OUTPUT:
                assert node.ins[0] in inside, (
                    "what is the same for all micro-batches leaves nothing"
                )
                left.append(node)
            elif node in inside:
                self._node(node)
            elif left or node.phase == "update":
                after.append(node)
            else:
                before.append(node)
        loop, zeros, ends = self._loop(left)
        body = (*before, *self.ahead, *zeros, loop, *ends, *after)
        return replace(
            self.source,
            body=body,
            mesh=self.mesh,
            coordinates={**self.source.coordinates, self.cut.axis: self.index},
            lists=frozenset(self.new.get(v, v) for v in self.source.lists),
        )

    def _inside(self, given: set[Var]) -> set[Node | Var]:
        """The nodes that depend on the batch, and what they make."""
        inside: set[Node | Var] = set(given)
        behind: set[Var] = set()
        for node in self.source.body:
            leaves = kind_of(node) is OpKind.STAGE_OUTPUT
            if leaves or node.phase == "update" or not behind.isdisjoint(reads_of(node)):
                behind.update(node.makes)
                continue
            if isinstance(node, Move) and node.source not in inside:
                continue  # of a parameter: micro-batches take their part of what arrives
            has = any(self.cut.has(v) for v in _every_var(node))
            if has or any(v in inside for v in reads_of(node)):
                inside |= {node, *node.makes}
        return inside

    # --- values ----------------------------------------------------------------------------------

    def _component(self, var: Var) -> Component:
        return self.components.get(var, B)

    def _placed(self, var: Var, part: Component) -> Var:
        """A variable of a micro-batch: a block of what a device has of all of them."""
        placement = self._with(var.placement, part)
        self._check(var, part)
        return replace(var, placement=placement, local=placement.local(var.value.type, self.mesh))

    def _with(self, placed: Placement, part: Component) -> Placement:
        """A placement with a component along the axis of micro-batches.

        A device cuts the block that it is given of an input: what is split further is split inside.
        What is split otherwise is cut first of all: it has the blocks of several devices.
        """
        if not isinstance(part, Split):
            return placed
        splits = dict(placed.splits)
        axes = splits.get(part.dim, ())
        outer = 0 if self._is_exchanged(placed, part.dim) else len(self.given)
        splits[part.dim] = (*axes[:outer], self.cut.axis, *axes[outer:])
        return replace(placed, splits=tuple(sorted(splits.items())))

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The axes that the cut dims of inputs are split over. Raises MD0331 where they differ."""
        dims = ((v, d) for v in self.source.inputs if (d := self.cut.dim_of(v)) is not None)
        by_axes = {v.placement.axes_of(d): (v, d) for v, d in dims}
        if len(by_axes) > 1:
            (_, dim), (var, _) = list(by_axes.values())[:2]
            self._refuse_given(var, dim)
        return next(iter(by_axes), ())

    def _is_exchanged(self, placed: Placement, dim: str) -> bool:
        """Whether a dim of a micro-batch is on other devices than its blocks of the inputs.

        A micro-batch has one block of every device that an input is split over. Wherever they are
        together, they are no neighbours in the whole batch.
        """
        return self.cut.micro > 1 and placed.axes_of(dim)[: len(self.given)] != self.given

    def _refuse_given(self, var: Var, dim: str) -> NoReturn:
        name = f"`{var.value.label}`" if var.value.name else "a value"
        _refuse(
            "MD0331",
            f"{name} splits `{dim}` over other axes than another input does, and both are divided "
            f"into {self.parts}",
            var.value.span,
            Related(self.cut.span, "divided here"),
            help="split the dim over the same axes everywhere, or over none",
        )

    def _refuse_order(self, var: Var, dim: str, span: Span, what: str) -> NoReturn:
        """MD0331: something needs the order of the batch, where blocks of devices are together."""
        over = " and ".join(f"`{axis}`" for axis in self.given)
        name = f"`{var.value.label}`" if var.value.name else "a value"
        _refuse(
            "MD0331",
            f"{what} depends on the order of `{dim}` in {name}, and a micro-batch has one block "
            f"from each device of {over}",
            span,
            Related(self.cut.span, "divided here"),
            help=f"compute it where `{dim}` is split over {over}, as in the inputs; or use 1 "
            "micro-batch",
        )

    def _check(self, var: Var, part: Component) -> None:
        """Refuse blocks of several sizes."""
        if not isinstance(part, Split):
            return
        size, axes = var.type.size(part.dim), var.placement.axes_of(part.dim)
        if self.cut.sizes:
            self._check_sizes(var, part.dim, axes)
            return
        count = self.cut.micro * self.source.mesh.size(*axes)
        if size % count:
            over = f" on {self.source.mesh.size(*axes)} devices" if axes else ""
            _refuse(
                "MD0331",
                f"`{part.dim}` of size {size} does not divide into {self.cut.micro} "
                f"micro-batches{over}",
                self.cut.span,
                help=f"give it a multiple of {count}, or take fewer micro-batches",
            )

    def _check_sizes(self, var: Var, dim: str, axes: tuple[str, ...]) -> None:
        """Refuse unequal blocks of what is split over devices, too, or of other dims."""
        is_known = any(
            dim == sized and sum(s) == var.type.size(dim) for sized, _, s in self.mesh.given
        )
        if is_known and not axes:
            return
        name = f"`{var.value.label}`" if var.value.name else "a value"
        if axes:
            what = f"split over {' and '.join(f'`{a}`' for a in axes)}, too"
            help = "leave `slices=` out: the micro-batches are then of one size"
        else:
            what = "another dim"
            # One as long may be the memory of an attention.
            is_as_long = var.type.size(dim) == sum(self.cut.sizes)
            help = _causal(self.cut.dims[0], dim) if is_as_long else "leave `slices=` out"
        _refuse(
            "MD0331",
            f"`slices=` are of `{', '.join(self.cut.dims)}`, and `{dim}` of {name} is {what}",
            var.value.span,
            Related(self.cut.span, "divided here"),
            help=help,
        )

    def _define(self, var: Var, part: Component, name: str = "") -> Var:
        self.components[var] = part
        self.new[var] = replace(self._placed(var, part), name=name or var.name)
        return self.new[var]

    def _read(self, var: Var, need: Component, node: Node) -> Var:
        """The version of a value that a reader needs; slices and zeros are made where it is."""
        have = self._component(var)
        if have == need:
            return self.new.get(var, var)
        assert have == B, f"{var.name} is {have}, not {need}"
        if (var, need) not in self.versions:
            self.versions[var, need] = self._version(var, need, node)
        return self.versions[var, need]

    def _differs(self, var: Var, dim: str) -> bool:
        """Whether the elements of a value along a dim may differ, or come of their indices."""
        maker = self.makers.get(var)
        if not var.type.has(dim):
            return False
        if not isinstance(maker, Compute) or dim in _ordered(maker):
            return True
        return any(self._differs(v, dim) for v in maker.ins)

    def _version(self, var: Var, need: Component, node: Node) -> Var:
        source = self.new.get(var, var)
        target = replace(self._placed(var, need), name=self.names.fresh(var.name))
        if isinstance(need, Split):
            if self._is_exchanged(var.placement, need.dim) and self._differs(var, need.dim):
                self._refuse_order(var, need.dim, node.span, f"`{_word(node)}`")
            step = Step("slice", (self.cut.axis,), source.placement, target.placement, dim=need.dim)
        else:
            assert isinstance(need, Partial)
            step = Step(
                "zero_fill", (self.cut.axis,), source.placement, target.placement, op=need.op
            )
        self.made.append(Move(step, source, target, 0, 0, node.span, known_words(), node.phase))
        return target

    # --- nodes -----------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        match node:
            case Compute():
                self._compute(node)
            case Move():
                self._move(node)
            case DeviceLoop():
                self._inner(node)
            case _:
                raise AssertionError(f"{node} comes after micro-batches are made")

    def _compute(self, node: Compute) -> None:
        have = {self._component(v) for v in node.ins}
        pairs = earlier_dims(node)
        # Queries that are an input or a parameter are whole, and read slice by slice.
        whole = {d for v in node.ins if self._component(v) == B for d in v.type.names}
        if earlier := {
            dim: of
            for dim, of in pairs.items()
            if Split(dim) in have and (Split(of) in have or of in whole)
        }:
            self._of_slices(node, earlier)
            return
        row, ins = self._row(node)
        ins = tuple(self._read(v, need, node) for v, need in zip(ins, row.ins, strict=True))
        outs = tuple(self._define(v, part) for v, part in zip(node.outs, row.outs, strict=True))
        for var, part in zip((*node.ins, *node.outs), (*row.ins, *row.outs), strict=True):
            if isinstance(part, Split) and part.dim in _ordered(node):
                if self._is_exchanged(var.placement, part.dim):
                    self._refuse_order(var, part.dim, node.span, lookup(node.name).words)
        self.made.append(with_flops(replace(node, ins=ins, outs=outs)))

    def _of_slices(self, node: Compute, earlier: Mapping[str, str]) -> None:
        """An operator of a slice, which reads what earlier slices have made, and not later ones.

        Along the dims `earlier` its operands are of these; what its results have along them, it
        adds to their gradients.
        """
        have = [self._component(v) for v in node.ins]
        read = [c.dim if isinstance(c, Split) and c.dim in earlier else None for c in have]
        needs = [part if dim is None else B for part, dim in zip(have, read, strict=True)]
        for i, var in enumerate(node.ins):
            of = next((d for d in earlier.values() if var.type.has(d)), None)
            if needs[i] == B and read[i] is None and of is not None:
                needs[i] = Split(of)
        wanted = [self.cut.dim_of(v) for v in node.outs]
        row = best_row(call_of(node), needs, wanted)
        if row is None:
            self._refuse(node, have)
        pairs = zip(node.ins, read, strict=True)
        self._check_slices(node, {var: dim for var, dim in pairs if dim is not None})
        ins = tuple(
            self._read(var, part, node) if dim is None else self._of_all_slices(var, dim, node)
            for var, part, dim in zip(node.ins, row.ins, read, strict=True)
        )
        outs, behind = list[Var](), list[Node]()
        for var, part in zip(node.outs, row.outs, strict=True):
            dim = next((d for d in earlier if var.type.has(d)), None)
            if dim is None or not isinstance(part, Partial):
                outs.append(self._define(var, part))
            else:
                outs.append(replace(var, name=self.names.fresh(f"{var.name}_addend")))
                behind += self._added_to_slices(outs[-1], var, dim, node)
        dim = next(dim for dim in read if dim is not None)
        each = node.ins[read.index(dim)].type.size(dim) // self.cut.micro
        sizes = self.cut.sizes or (each,) * self.cut.micro
        attrs = (*node.attrs, ("slices", sizes))
        of_slice = replace(node, ins=ins, outs=tuple(outs), attrs=attrs)
        self.made += [with_flops(of_slice), *behind]

    def _check_slices(self, node: Compute, read: Mapping[Var, str]) -> None:
        """MD0342: a stage has no buffers of what an operator reads of earlier slices."""
        assert self.pipe.use is not None
        use, dims = self.pipe.use, ", ".join(self.cut.dims)
        table = use.verified(self.source.mesh.size(self.pipe.axis), self.cut.micro)
        keys = (self.past.key(*pair) for pair in read.items() if node.phase == "backward")
        fixes: tuple[Fix, ...] = ()
        if not table.reverses:
            what = f"`{self.cut.name}` does not go back from the last of them to the first"
            help = f"use `terapipe[{dims}]({self.cut.micro})`"
            fixes = by_schedule(self.cut.span, "terapipe")
        elif self.given:
            axes = " and ".join(f"`{axis}`" for axis in self.given)
            what, help = f"`{dims}` is split over {axes}, too", "leave the rule for it out"
        elif not self.past.fits:
            what = f"it is not in the loop over `{self.pipe.dim}` itself"
            help = "cut the batch in place of the sequence"
        elif use.recompute:
            what, help = "`recompute=stage` makes them anew", "leave `recompute=stage` out"
        elif not all(key in self.past.buffers for key in keys):
            what = "its backward pass computes again what they have made"
            help = "leave out the `recompute` around it"
        else:
            return
        _refuse(
            "MD0342",
            f"{lookup(node.name).words} of a slice of `{dims}` reads earlier slices, and {what}",
            node.span,
            Related(self.cut.span, "divided here"),
            help=None if fixes else help,
            fixes=fixes,
        )

    def _of_all_slices(self, var: Var, dim: str, node: Compute) -> Var:
        """What slices up to this one have of a value; the forward pass of this one puts its own."""
        row, is_new = self.past.slice_of(var, dim, var.local.dtype)
        if is_new and node.phase == "forward":
            rows = self._slice_of_row(row, var, dim, node, f"{row.name}_rows")
            put = Compute("add", (rows, self.new[var]), (replace(rows),), (), *_about(node), onto=0)
            self.made.append(with_flops(put))
        return row

    def _added_to_slices(self, addend: Var, var: Var, dim: str, node: Compute) -> Iterator[Node]:
        """What adds to the gradients of all slices, and the slice of them that is whole then."""
        dtype = summed(var.local.dtype)
        row, _ = self.past.slice_of(var, dim, dtype)
        if dtype != addend.local.dtype:
            wide = replace(row, name=self.names.fresh(f"{addend.name}_wide"))
            yield self._cast(addend, wide, node)
            addend = wide
        total = replace(row)
        yield with_flops(Compute("add", (row, addend), (total,), (), *_about(node), onto=0))
        self._define(var, Split(dim))
        outside, self.made = self.made, []
        part = self._slice_of_row(total, var, dim, node, f"{row.name}_rows")
        (move,), self.made = self.made, outside
        yield move
        if dtype == var.local.dtype:
            self.new[var] = part
        else:
            yield self._cast(part, self.new[var], node)

    def _slice_of_row(self, row: Var, var: Var, dim: str, node: Compute, name: str) -> Var:
        """The part of a micro-batch of what is of all of them."""
        placed = self._placed(var, Split(dim))
        dtype = row.local.dtype
        value = replace(placed.value, type=replace(placed.value.type, dtype=dtype))
        local = replace(placed.local, dtype=dtype)
        rows = replace(placed, name=self.names.fresh(name), value=value, local=local)
        step = Step("slice", (self.cut.axis,), row.placement, rows.placement, dim=dim)
        self.made.append(Move(step, row, rows, 0, 0, node.span, known_words(), node.phase))
        return rows

    def _row(self, node: Compute) -> tuple[Row, tuple[Var, ...]]:
        """The row along the axis of micro-batches, and the operands.

        What is cut stays so, the rest is cut or not. Where that leads to no row, operands that
        only inputs make are made of the whole batch.
        """
        row = self._best_row(node, node.ins)
        if row is not None:
            return row, node.ins
        undivided = [None if self._component(v) == B else self._whole(v) for v in node.ins]
        for i in reversed(range(len(undivided))):
            ins = (*node.ins[:i], undivided[i] or node.ins[i], *node.ins[i + 1 :])
            if (row := self._best_row(node, ins)) is not None:
                return row, ins
        self._refuse(node, [self._component(v) for v in node.ins])

    def _whole(self, var: Var) -> Var | None:
        """A value of the whole batch, made before the loop; None of what stages make."""
        if var in self.source.inputs or var not in self.inside:
            return var
        if var.value in self.pipe.stage_of:
            return None
        if var not in self.of_batch:
            self.of_batch[var] = self._made_whole(var)
        return self.of_batch[var]

    def _made_whole(self, var: Var) -> Var | None:
        maker = self.makers.get(var)
        if not isinstance(maker, Compute | Move) or len(maker.makes) > 1:
            return None
        ins = [self._whole(v) for v in maker.reads]
        operands = tuple(v for v in ins if v is not None)
        if len(operands) < len(ins):
            return None
        result = replace(var, name=self.names.fresh(var.name))
        if isinstance(maker, Move):
            self.ahead.append(replace(maker, source=operands[0], target=result))
        else:
            self.ahead.append(replace(maker, ins=operands, outs=(result,)))
        return result

    def _best_row(self, node: Compute, ins: tuple[Var, ...]) -> Row | None:
        have = [self._component(v) for v in ins]
        # One micro-batch is the whole batch.
        wanted = [self.cut.dim_of(v) if self.cut.micro > 1 else None for v in node.outs]
        return best_row(call_of(node), have, wanted)

    def _refuse(self, node: Compute, have: list[Component]) -> NoReturn:
        """MD0332: an operator needs something of all micro-batches at once."""
        parts = {v: h for v, h in zip(node.ins, have, strict=True) if h != B}
        sums = [v for v, h in parts.items() if isinstance(h, Partial)]
        var = next(iter(sums or parts))
        part = parts[var]
        name = f"`{var.value.label}`" if var.value.name else f"the result of `{var.hint}`"
        dims = " and ".join(f"`{d}`" for d in self.cut.dims)
        words = lookup(node.name).words
        what = (
            f"{words} needs the {part.op} of {name} over all of {dims}"
            if isinstance(part, Partial)
            else f"{words} needs all of {dims} of {name} at once"
        )
        program = self.source.placed.named
        in_eight_bits = program.goal is not None and program.goal.optimizer.eight_bits is not None
        by_row = in_eight_bits and lookup(node.name).narrows
        help = "write `compute=f8(rowwise=true)`; or " if by_row else ""
        if mask := self._missing_mask(node, have):
            help += f"{mask}; or "
        fixes = () if help else cut_into(self.cut.span, 1)
        help += "" if fixes else "use 1 micro-batch; "
        if program.goal is not None:
            each = "" if may_be_batches(program, self.cut.micro) else ", each=true"
            help += (
                f"or end the layout with `with {self.cut.name}` and write "
                f"`accumulate={self.cut.micro}{each}` to the optimizer: it is then computed for "
                "each batch"
            )
        _refuse(
            "MD0332",
            f"{what}, which is divided into {self.parts}",
            var.value.span if sums else node.span,
            Related(self.cut.span, "divided here"),
            help=advice(fixes, help.removesuffix("; ")),
            fixes=fixes,
        )

    def _missing_mask(self, node: Compute, have: list[Component]) -> str:
        """The mask with which slices of a sequence could be computed; "" where none would help."""
        opdef = lookup(node.name)
        if opdef.earlier is None or earlier_dims(node):
            return ""
        types = tuple(v.type for v in node.ins)
        cut = dict.fromkeys(d for t in types for d in t.dims if d.name in self.cut.dims)
        for dim in cut:
            as_causal = {**dict(node.attrs), opdef.ordered: (dim,)}
            for mem in opdef.earlier(types, as_causal):
                if mem != dim.name and Split(mem) in have:
                    return _causal(dim.name, mem)
        return ""

    def _move(self, node: Move) -> None:
        part = self._component(node.source)
        if node.step.kind == "halo" and part == Split(node.step.window.dim):
            # What is beside the block is of other micro-batches: a reader needs all of them.
            self.components[node.target] = part
            return
        source = self.new.get(node.source, node.source)
        target = self._define(node.target, part)
        step = replace(node.step, before=source.placement, after=target.placement)
        micro_move = replace(node, step=step, source=source, target=target)
        self.made.append(micro_move.counted(self.mesh))

    def _inner(self, node: DeviceLoop) -> None:
        """A loop of the program; its carries are cut, or sums, if they become so in its body."""
        carried = [self._component(c.init) for c in node.carries]
        while True:
            before = self._state()
            iteration = self._iteration(node, carried)
            nexts = [self._component(c.next) for c in node.carries]
            joined = [_joined(a, b) for a, b in zip(carried, nexts, strict=True)]
            if joined == carried:
                break
            self.components, self.new, self.versions, self.made = before
            carried = joined
        self.made.append(iteration)

    def _state(
        self,
    ) -> tuple[dict[Var, Component], dict[Var, Var], dict[tuple[Var, Component], Var], list[Node]]:
        return dict(self.components), dict(self.new), dict(self.versions), list(self.made)

    def _iteration(self, node: DeviceLoop, carried: list[Component]) -> DeviceLoop:
        """A loop whose carries have these components; the next ones may turn out to have others."""
        pairs = list(zip(node.carries, carried, strict=True))
        inits = [self._read(c.init, part, node) for c, part in pairs]
        outside, self.made = self.made, []
        names = [self._carried(c, init) for c, init in zip(node.carries, inits, strict=True)]
        insides = [self._define(c.inside, p, n) for (c, p), n in zip(pairs, names, strict=True)]
        stacked = tuple(self._slice(s) for s in node.stacked)
        outer = dict(self.versions)
        self.past.enter(node)
        for inner in node.body:
            self._node(inner)
        stacked += self.past.leave()
        # The next value of a carry that becomes another is read as it is: the loop is done again.
        ends = [
            self._read(c.next, part, node) if self._component(c.next) in (B, part) else c.next
            for c, part in pairs
        ]
        body, self.made, self.versions = tuple(self.made), outside, outer
        results = [self._define(c.result, p, n) for (c, p), n in zip(pairs, names, strict=True)]
        carries = tuple(Carry(*vs) for vs in zip(inits, insides, ends, results, strict=True))
        collected = tuple(self._collected(c) for c in node.collected)
        return replace(node, carries=carries, stacked=stacked, body=body, collected=collected)

    def _carried(self, carry: Carry[Var], init: Var) -> str:
        """The name of a carry: that of its initial value, where that is nothing else.

        One from before the first micro-batch is there for all of them.
        """
        if carry.inside.name != carry.init.name:
            return carry.inside.name
        outside = init is carry.init and init not in self.components
        return self.names.fresh(init.name) if outside else init.name

    def _slice(self, item: Stacked[Var]) -> Stacked[Var]:
        outer = self.new.get(item.outer, item.outer)
        return Stacked(outer, self._define(item.inside, self._component(item.outer)))

    def _collected(self, item: DeviceCollected) -> DeviceCollected:
        inside = self.new.get(item.inside, item.inside)
        outer = self._define(item.outer, self._component(item.inside))
        return replace(item, inside=inside, outer=outer)

    # --- the loop --------------------------------------------------------------------------------

    def _loop(self, left: list[Compute]) -> tuple[DeviceLoop, list[Node], list[Node]]:
        """The loop over micro-batches, the zeros before it, and what reads its sums behind it."""
        zeros: list[Node] = []
        ends: list[Node] = []
        carries = []
        for node in left:
            (var,) = node.ins
            part = self._component(var)
            if isinstance(part, Split):
                begun, carry = self._gathered(var, part, node)
                zeros.append(begun)
                carries.append(carry)
                ends.append(replace(node, ins=(carry.result,)))
                continue
            if isinstance(part, Partial) and part.op != "sum":
                self._refuse_extreme(node, part)
            addend = self._read(var, Partial("sum"), node)
            begun, carry = self._sum(addend, var, node)
            zeros.append(begun)
            carries.append(carry)
            total = carry.result
            if total.local.dtype != var.local.dtype:
                total = replace(var, name=self.names.fresh(var.name))
                ends.append(self._cast(carry.result, total, node))
            ends.append(replace(node, ins=(total,)))
        dim = Dim(self.cut.axis, self.cut.micro)
        if buffers := [*self.past.buffers.values()]:
            zeros += [buffer.zeros for buffer in buffers]
            carries += [buffer.carry for buffer in buffers]
            self.made = [*without_unread(tuple(self.made))]
        parts = (tuple(carries), (), _read(self.made, {c.next for c in carries}), self.cut.span)
        return DeviceLoop(dim, *parts, index=self.index), zeros, ends

    def _gathered(self, var: Var, part: Split, node: Compute) -> tuple[Compute, Carry[Var]]:
        """The zeros into which each micro-batch puts its block of a value, and their carry."""
        if var.placement.axes_of(part.dim) != self.given:
            self._refuse_given(var, part.dim)
        gathered = replace(var, name=self.names.fresh(f"{var.name}_whole"))
        about = (node.span, node.phase)
        attrs = (("dims", var.value.type.dims), ("dtype", var.local.dtype))
        zeros = with_flops(Compute("zeros", (), (gathered,), attrs, *about))
        inside, block = replace(gathered), self.new[var]
        rows = replace(block, name=self.names.fresh(f"{var.name}_rows"))
        step = Step("slice", (self.cut.axis,), gathered.placement, rows.placement, dim=part.dim)
        self.made.append(Move(step, inside, rows, 0, 0, node.span, known_words(), node.phase))
        put = Compute("add", (rows, block), (replace(rows),), (), *about, onto=0)
        self.made.append(with_flops(put))
        return zeros, Carry(gathered, inside, inside, replace(gathered))

    def _sum(self, addend: Var, var: Var, node: Compute) -> tuple[Compute, Carry[Var]]:
        """The zeros of a sum of a step, and its carry."""
        dtype = summed(var.type.dtype)
        value = replace(var.value, type=replace(var.value.type, dtype=dtype))
        local = replace(var.local, dtype=dtype)
        about = (node.span, node.phase)

        def total(suffix: str) -> Var:
            name = self.names.fresh(f"{var.name}_{suffix}")
            return replace(var, name=name, value=value, local=local)

        init, inside, added = map(total, ("zeros", "sum", "next"))
        if addend.local.dtype != dtype:
            wide = total("wide")
            self.made.append(self._cast(addend, wide, node))
            addend = wide
        attrs = (("dims", value.type.dims), ("dtype", dtype))
        zeros = with_flops(Compute("zeros", (), (init,), attrs, self.cut.span, node.phase))
        add = with_flops(Compute("add", (inside, addend), (added,), (), *about))
        self.made.append(add)
        return zeros, Carry(init, inside, added, replace(inside))

    def _cast(self, source: Var, target: Var, node: Compute) -> Compute:
        attrs = (("dtype", target.local.dtype),)
        return with_flops(Compute("cast", (source,), (target,), attrs, node.span, node.phase))

    def _left(self, node: Compute) -> str:
        """What leaves the loop, by its name, and where it goes."""
        (var,), out = node.ins, node.outs[0]
        name = f"`{var.value.label}`" if var.value.name else f"the result of `{var.hint}`"
        if any(n.phase == "update" and out in reads_of(n) for n in self.source.body):
            return f"{name} is read by the update"
        return f"{name} is returned"

    def _refuse_extreme(self, node: Compute, part: Partial) -> NoReturn:
        _refuse(
            "MD0333",
            f"{self._left(node)}, the {part.op} over micro-batches",
            node.ins[0].value.span,
            Related(self.cut.span, "divided here"),
            help="return the tensor that it is over, or a sum or a mean",
        )


def _read(nodes: list[Node], needed: set[Var]) -> tuple[Node, ...]:
    """The statements that make what is needed, or write into it.

    Others have made a value for what then reads one of the whole batch, from before the loop.
    """
    needed_nodes: list[Node] = []
    for node in reversed(nodes):
        written = isinstance(node, Compute) and node.onto is not None
        if written or not needed.isdisjoint(node.makes):
            needed.update(reads_of(node))
            needed_nodes.append(node)
    return tuple(reversed(needed_nodes))


def _causal(dim: str, mem: str) -> str:
    """The way out where a slice along `dim` reads others that it may not."""
    return (
        f"give the attention a mask that is causal and nothing else, `iota[{dim}] >= iota[{mem}]`: "
        "a slice reads only earlier ones"
    )


def _about(node: Compute) -> tuple[Span, str]:
    return node.span, node.phase


def _word(node: Node) -> str:
    """What a reader knows a node by."""
    return node.name if isinstance(node, Compute) else "repeat"


def _ordered(node: Compute) -> frozenset[str]:
    """The dims along which the index of an element counts."""
    types = tuple(v.type for v in node.ins)
    return lookup(node.name).ordered_dims(types, dict(node.attrs))


def _joined(one: Component, other: Component) -> Component:
    return other if one == B else one


def _every_var(node: Node) -> Iterable[Var]:
    return (v for n in every((node,)) for v in (*n.reads, *defined(n)))
