"""Several stages on a device: a pass is of one of them, and of its rows of what the device has.

The stages of a device are points in time, as micro-batches are (`microbatching.py`): along an axis
inside of that of the devices, every tensor with the dim of the loop is split. Of what is stored,
and of the sums of a step, a pass reads and writes the rows of its stage.

Where two devices have each other's stages (Chimera, Li and Hoefler 2021), each stores its own, and
has the other's for the time of the passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from meshdsl.device.costs import with_flops
from meshdsl.device.ir import (
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    StageRows,
    Var,
    known_words,
)
from meshdsl.device.names import Names
from meshdsl.diagnostics import fail
from meshdsl.ir.program import Carry, Stacked, every
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.collectives import exchange
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh
from meshdsl.placed.strategies import flops


def in_chunks(
    program: DeviceProgram, loop: DeviceLoop, pipe: Piped, names: Names
) -> tuple[DeviceProgram, DeviceLoop]:
    """The loop over micro-batches in rows of stages, and the program with their axis."""
    axes = pipe.axes(program.mesh)
    if len(axes) == 1:
        return program, loop
    mesh = pipe.in_time(program.mesh)
    cutting = _Chunks(mesh, loop, pipe, axes, names)
    chunked = cutting.loop()
    program = replace(
        program,
        mesh=mesh,
        coordinates={**program.coordinates, axes[1]: names.fresh(axes[1])},
        lists=frozenset(cutting.new.get(v, v) for v in program.lists),
    )
    return program, chunked


def in_pairs(
    program: DeviceProgram, loop: DeviceLoop, pipe: Piped, names: Names
) -> tuple[list[Node], DeviceLoop, list[Node]]:
    """The loop in rows of stages that two devices have, and what is done before and behind it.

    Each gets the other's block of every stack before the first micro-batch. The sums of that block
    go back behind the last one, and are added to the other's own.
    """
    if not pipe.others:
        return [], loop, []
    pairs = _Pairs(program, loop, pipe, names)
    paired = pairs.loop()
    return pairs.before, paired, pairs.behind


class _Chunks:
    def __init__(
        self, mesh: Mesh, loop: DeviceLoop, pipe: Piped, axes: tuple[str, ...], names: Names
    ) -> None:
        self.mesh, self.micro, self.pipe, self.axes, self.names = mesh, loop, pipe, axes, names
        # What is added up in place, all of it or the row of a micro-batch.
        sums = (*(c.inside for c in loop.carries), *(s.inside for s in loop.stacked))
        self.totals = {var.name: var for var in sums}
        self.own = {v for node in every(loop.body) for v in node.makes}
        self.new: dict[Var, Var] = {}
        self.rows: dict[Var, Var] = {}

    def loop(self) -> DeviceLoop:
        """The loop over micro-batches."""
        body = tuple(map(self._node, self.micro.body))
        carries = tuple(
            self._in_rows(c) if c.inside in self.rows else c for c in self.micro.carries
        )
        rows = tuple(StageRows(outer, inside) for outer, inside in self.rows.items())
        stacked = (*self.micro.stacked, *rows)
        return replace(self.micro, body=body, carries=carries, stacked=stacked)

    def _in_rows(self, carry: Carry[Var]) -> Carry[Var]:
        """A sum that passes add to row by row: its memory is the same in all of them."""
        name = carry.inside.name
        assert carry.next.name == name, f"{name} is not added up in place, so its rows are lost"
        return replace(carry, next=carry.inside)

    # --- variables -------------------------------------------------------------------------------

    def _of(self, var: Var) -> Var:
        """What a pass has for a variable: itself, that of its stage, or the rows of its stage."""
        if self.pipe.axis not in var.placement.axes_of(self.pipe.dim):
            return var
        if var in self.new:
            return self.new[var]
        total = self.totals.get(var.name)
        if total is not None and total is not var:
            self.new[var] = replace(self._rows(total), value=var.value)
        elif var in self.own:
            self.new[var] = self._split(var)
        else:
            self.new[var] = self._rows(var)
        return self.new[var]

    def _rows(self, outer: Var) -> Var:
        """The rows of a stack from outside; the versions of a sum have one name."""
        if outer not in self.rows:
            name = self.names.fresh(f"{outer.name.removesuffix('_stack')}_rows")
            hint = f"{outer.hint.removesuffix('_stack')}_rows"
            self.rows[outer] = replace(self._split(outer), name=name, hint=hint)
        return self.rows[outer]

    def _split(self, var: Var) -> Var:
        splits = dict(var.placement.splits)
        if splits[self.pipe.dim] != (self.pipe.axis,):
            self._refuse(var, splits[self.pipe.dim])
        splits[self.pipe.dim] = self.axes
        placed = replace(var.placement, splits=tuple(sorted(splits.items())))
        return replace(var, placement=placed, local=placed.local(var.value.type, self.mesh))

    def _refuse(self, var: Var, axes: tuple[str, ...]) -> NoReturn:
        """Blocks of the iterations of a device are not those of the iterations of a stage."""
        further = " and ".join(f"`{axis}`" for axis in axes if axis != self.pipe.axis)
        use = self.pipe.use
        assert use is not None, "a schedule has several stages on a device"
        fail(
            "MD0335",
            f"`{self.pipe.dim}` of `{var.value.label}` is split over {further} too, which "
            f"`reduce=each` cannot do yet with several stages on a device (`{use.name}`)",
            use.span,
            help="leave out `reduce=each`, let the rule split another dim, or use a schedule with "
            "one stage on each device",
        )

    # --- nodes -----------------------------------------------------------------------------------

    def _node(self, node: Node) -> Node:
        match node:
            case Compute():
                return with_flops(node.with_values(self._of))
            case Move():
                return self._move(node)
            case DeviceLoop():
                looped = node.with_values(self._of)
                return replace(looped, body=tuple(map(self._node, node.body)))
        raise AssertionError(f"{node} comes after stages are")

    def _move(self, node: Move) -> Move:
        source, target = self._of(node.source), self._of(node.target)
        if (source, target) == (node.source, node.target):
            return node
        step = replace(node.step, before=source.placement, after=target.placement)
        return replace(node, step=step, source=source, target=target).counted(self.mesh)


class _Pairs(_Chunks):
    """Stages that two devices have: in a pass, the axis of the stages is where its stage is."""

    def __init__(self, program: DeviceProgram, loop: DeviceLoop, pipe: Piped, names: Names) -> None:
        super().__init__(program.mesh, loop, pipe, (pipe.axis,), names)
        self.makers = {v: node for node in program.body for v in node.makes}
        self.before: list[Node] = []
        self.behind: list[Node] = []
        self.others: dict[Var, Var] = {}

    def loop(self) -> DeviceLoop:
        """The loop, with a second sum for each, and a second block for each stack."""
        microbatched = super().loop()
        carries = [pair for carry in microbatched.carries for pair in self._sums(carry)]
        slices = [pair for item in microbatched.stacked for pair in self._blocks(item)]
        return replace(microbatched, carries=tuple(carries), stacked=tuple(slices))

    def _split(self, var: Var) -> Var:
        return var

    def _sums(self, carry: Carry[Var]) -> list[Carry[Var]]:
        """A carry; of a sum in rows also that of the other stage.

        Behind the loop that goes to the device that stores the stage, and is added there.
        """
        if carry.inside not in self.rows:
            return [carry]
        zeros = self.makers[carry.init]
        assert isinstance(zeros, Compute), "a sum begins with zeros"
        other = self.others[carry.inside] = self._other(carry.inside)
        init, result = replace(other), replace(other)
        self.before.append(replace(zeros, outs=(init,)))
        total, here = carry.result, replace(carry.result)
        why = "the device that stores this stage adds up what both have"
        came = self._other(carry.inside, "back")
        self.behind.append(self._exchange(result, came, why, "backward"))
        add = Signature((here.local, came.local), (total.local,), {})
        about = ((), zeros.span, "backward")
        cost = flops(lookup("add"), add)
        self.behind.append(Compute("add", (here, came), (total,), *about, flops=cost, onto=0))
        return [replace(carry, result=here), Carry(init, other, other, result)]

    def _blocks(self, item: Stacked[Var]) -> list[Stacked[Var]]:
        """Rows with those of the other stage; of what is cut into slices first, both slices."""
        if isinstance(item, StageRows):
            if item.outer not in self.others:
                self.others[item.outer] = self._block(item.outer)
            return [replace(item, other=self.others[item.outer])]
        if item.inside not in self.rows:
            return [item]
        other = self.others[item.inside] = self._other(item.inside)
        return [item, Stacked(self._block(item.outer), other)]

    def _block(self, stack: Var) -> Var:
        """The block of a stack that the other stage of the device has."""
        why = "the device has this stage too, for other micro-batches"
        other = self._other(stack)
        self.before.append(self._exchange(stack, other, why, "forward"))
        return other

    def _exchange(self, source: Var, target: Var, why: str, phase: str) -> Move:
        """What is sent to the device that has this one's stage too, for the same from there."""
        step = exchange(source.placement, self.pipe.axis, self.pipe.others)
        about = (source.value.span, known_words(why), phase)
        return Move(step, source, target, 0, 0, *about).counted(self.mesh)

    def _other(self, var: Var, word: str = "other") -> Var:
        """A variable like another, of the other stage of the device."""
        name, hint = (f"{w.removesuffix('_stack')}_{word}" for w in (var.name, var.hint))
        return replace(var, name=self.names.fresh(name), value=replace(var.value), hint=hint)
