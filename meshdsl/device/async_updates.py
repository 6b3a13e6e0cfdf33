"""Updates on the way: each stage updates its parameters in the loop over micro-batches.

The program is one that accumulates batches: its update comes behind the loop and reads the sums of
all stages. Here it becomes a part of the loop, on what one stage has, which the table does as often
as it says. A parameter outside of the stages' loop belongs to the stage that reads it. All stages
store it: behind the loop they get what has become of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from meshdsl.device.aliases import shared
from meshdsl.device.ir import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    Var,
    known_words,
    renamed,
)
from meshdsl.device.names import Names, names_of
from meshdsl.diagnostics import fail
from meshdsl.ir.program import Carry, OpKind, Stacked, block_loops
from meshdsl.ir.rewrite import mapped, reads_of
from meshdsl.placed.collectives import Step, all_reduce, zero_fill
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Placement
from meshdsl.schedule.use import ScheduleUse

UPDATES = {
    "every": StagePhase.UPDATE,
    "first": StagePhase.FIRST_UPDATE,
    "last": StagePhase.LAST_UPDATE,
}
"""By the stages that do it, the part of an update."""


# --- inputs --------------------------------------------------------------------------------------


def given_whole(program: DeviceProgram) -> DeviceProgram:
    """The program given the whole batch, where it accumulates parts of one that are apart."""
    pipe = program.placed.pipe
    if pipe is None or pipe.use is None or pipe.use.apart is None:
        return program
    dim, count, axis = pipe.use.apart
    at, loop = loop_of(program, pipe)
    mesh = replace(program.mesh, moments=((axis, count),))
    cut_inputs = (*program.inputs, *(item.outer for item in loop.stacked))  # some may not be read
    undivided = {v: _whole(v, pipe, program) for v in cut_inputs}
    cut = [item for item in loop.stacked if undivided[item.outer].type.has(dim)]
    slices = (_slice(undivided[item.outer], item, axis, dim, loop) for item in cut)
    new = {item.inside: undivided[item.outer] for item in loop.stacked if item not in cut}
    index = Names(names_of(program)).fresh(axis)
    body = (*slices, *(renamed(n, new) for n in loop.body))
    loop = replace(loop, stacked=(), body=body, index=index)
    return replace(
        program,
        mesh=mesh,
        inputs=tuple(undivided.get(v, v) for v in program.inputs),
        body=(*program.body[:at], loop, *program.body[at + 1 :]),
        coordinates={**program.coordinates, axis: index},
    )


def loop_of(program: DeviceProgram, pipe: Piped) -> tuple[int, DeviceLoop]:
    """The loop over micro-batches, and where it stands."""
    over = (n for n in block_loops(program.body, DeviceLoop) if n.dim.name == pipe.micro)
    loop = next(over, None)
    assert loop is not None, "a pipeline has a loop over micro-batches"
    return program.body.index(loop), loop


def _whole(stack: Var, pipe: Piped, program: DeviceProgram) -> Var:
    """The input that the batches of a stack are parts of."""
    assert pipe.use is not None, "updates on the way are those of a schedule"
    assert pipe.use.apart is not None, "the batch is cut"
    value, (dim, count, _) = stack.value, pipe.use.apart
    ways = program.mesh.size(*stack.placement.axes_of(dim))
    if value.type.has(dim) and value.type.size(dim) % ways:
        size = value.type.size(dim)
        message = f"`{dim}` of a micro-batch, of size {size}, does not divide over {ways} devices"
        fail("MD0331", message, pipe.use.span, help="use fewer micro-batches, or a larger batch")
    own_dims = (d for d in value.type.dims if d.name != pipe.micro)
    dims = tuple(replace(d, size=d.size * count) if d.name == dim else d for d in own_dims)
    type_ = replace(value.type, dims=dims)
    local = stack.placement.local(type_, program.mesh)
    return replace(stack, value=replace(value, type=type_), local=local, hint=value.label)


def _slice(given: Var, item: Stacked[Var], axis: str, dim: str, loop: DeviceLoop) -> Move:
    """A micro-batch of an input, cut from the block that a device has."""
    splits = dict(given.placement.splits)
    splits[dim] = (*splits.get(dim, ()), axis)
    after = replace(given.placement, splits=tuple(sorted(splits.items())))
    step = Step("slice", (axis,), given.placement, after, dim=dim)
    return Move(step, given, item.inside, 0, 0, loop.span, known_words(), "forward")


# --- updates -------------------------------------------------------------------------------------


def sunk(program: DeviceProgram, pipe: Piped) -> DeviceProgram:
    """The program with what is made of parameters before the loop made in each of its passes.

    There is another version of it after each update. Raises MD0335 where it is made of all stages.
    """
    at, loop = loop_of(program, pipe)
    stored = {old for old, _ in program.updates}
    dependent: set[Var] = set()
    moved: list[Node] = []
    for node in program.body[:at]:
        if not (stored | dependent).isdisjoint(reads_of(node)):
            _check_stored(node, pipe)
            moved.append(node)
            dependent.update(node.makes)
    stay = tuple(n for n in program.body[:at] if n not in moved)
    loop = replace(loop, body=(*moved, *loop.body))
    return replace(program, body=(*stay, loop, *program.body[at + 1 :]))


def _check_stored(node: Node, pipe: Piped) -> None:
    """Refuse a parameter that comes to its stage from others before the first micro-batch."""
    if isinstance(node, Move) and pipe.axis in node.step.axes:
        assert pipe.use is not None, "updates on the way are those of a schedule"
        message = f"`{node.source.value.label}` is not stored where its stage updates it"
        help = f"leave out the rule for `params` over `{pipe.axis}`, or write the axis "
        help += f"first: `params: {pipe.dim} -> ({pipe.axis}, data)`"
        fail("MD0335", message, pipe.use.span, help=help)


def updated_on_the_way(program: DeviceProgram, at: int) -> DeviceProgram:
    """The program whose pipeline, at a place of its body, makes the updates that come behind it."""
    node = program.body[at]
    assert isinstance(node, Pipeline)
    return _Updates(program, at, node).program()


class _Updates:
    def __init__(self, source: DeviceProgram, at: int, loop: Pipeline) -> None:
        pipe = source.placed.pipe
        assert pipe is not None, "a pipeline has a rule"
        assert pipe.use is not None, "updates on the way are those of a schedule"
        self.source, self.at, self.loop, self.pipe, self.use = source, at, loop, pipe, pipe.use
        self.after = source.body[at + 1 :]
        self.names = Names(names_of(source))
        self.inside = {old: replace(old) for old, _ in source.updates}
        # What update nodes read in the place of what came behind the loop.
        self.new: dict[Var, Var] = {**self.inside, **{c.result: c.next for c in loop.carries}}

    def program(self) -> DeviceProgram:
        """The program with the update in the loop."""
        nodes = self._needed()
        owners = _Owners(self.loop, self.use, self.source, nodes)
        self._check_read(owners)
        assert not self.loop.known.changes or self._shows_none(), (
            "an update writes over what is kept"
        )
        homes = [(owners.of(n), moved) for n in nodes if (moved := self._moved(n)) is not None]
        parts = sorted(((UPDATES[home], n) for home, n in homes), key=lambda pair: pair[0])
        carries = [
            Carry(old, self.inside[old], self.new.get(new, new), replace(old))
            for old, new in self.source.updates
        ]
        ends: list[Node] = []
        carry_results = {c.init: self._told(c.result, owners.home(c.init), ends) for c in carries}
        remaining = tuple(n for n in self.after if n not in nodes)
        loop = self._with(parts, carries)
        results = {new: carry_results[old] for old, new in self.source.updates}
        outputs = {v for _, v in self.source.outputs if v not in results}
        assert all(outputs.isdisjoint(n.makes) for n in nodes), "outputs are sums of their own"
        return replace(
            self.source,
            body=(*self.source.body[: self.at], loop, *ends, *remaining),
            outputs=tuple((name, results.get(v, v)) for name, v in self.source.outputs),
            updates=tuple(carry_results.items()),
        )

    def _needed(self) -> list[Node]:
        """The statements behind the loop that updates need."""
        needed = {new for _, new in self.source.updates}
        nodes: list[Node] = []
        for node in reversed(self.after):
            if not needed.isdisjoint(node.makes):
                needed.update(reads_of(node))
                nodes.append(node)
        return nodes[::-1]

    def _check_read(self, owners: _Owners) -> None:
        """Refuse what other stages make of a parameter that one updates: theirs is of no version.

        They do where a value from before the loop is read in it, or behind it (`stage_phases.py`).
        """
        stored, pipeline = {old for old, _ in self.source.updates}, self.loop.known
        for node, part in zip(self.loop.body, self.loop.parts, strict=True):
            for var in stored.intersection(reads_of(node)):
                home = owners.home(var)
                if part in WEIGHTS and pipeline.schedule.halves and pipeline.changes:
                    message = f"`{var.value.label}` is read in the second half of a backward pass, "
                    message += "which may come after an update"
                    self._refuse(message, "write B instead of I and W, or use `weights=stashed`")
                if home not in ("every", part.stages):
                    name = f"`{var.value.label}`"
                    message = f"{name} is updated on the {home} stage, and other stages read it"
                    help = "pass what is computed from it through the loop; or "
                    help += "`meshdsl train --engine reference` trains by this table"
                    fail("MD0335", message, node.span, help=help)

    def _shows_none(self) -> bool:
        """Whether nothing that a forward pass keeps for its backward pass shows a parameter.

        An update writes over those; what they determine alone is made again (`recompute.py`).
        """
        owners = shared(self.source)
        stored = {owners.get(old, old) for old, _ in self.source.updates}
        saved = {v for n in self.loop.of(*FORWARD) for v in n.makes}
        read = {v for n in self.loop.of(*INPUTS, *WEIGHTS) for v in reads_of(n)}
        return stored.isdisjoint(owners.get(v, v) for v in saved & read)

    def _refuse(self, message: str, help: str) -> NoReturn:
        fail("MD0335", message, self.use.span, help=help)

    def _with(self, parts: list[tuple[StagePhase, Node]], carries: list[Carry[Var]]) -> Pipeline:
        """The loop with the statements of the update."""
        body = tuple(renamed(n, self.inside) for n in self.loop.body)
        return replace(
            self.loop,
            body=(*body, *(n for _, n in parts)),
            parts=(*self.loop.parts, *(part for part, _ in parts)),
            carries=(*self.loop.carries, *carries),
        )

    # --- statements of the update ----------------------------------------------------------------

    def _moved(self, node: Node) -> Node | None:
        """A statement of the update on what one stage has; None where nothing is left to do."""
        match node:
            case Compute(kind=OpKind.STAGE_OUTPUT):
                self.new[node.outs[0]] = self._read(node.ins[0])
                return None
            case Compute():
                for var in node.outs:
                    self._of_stage(var)
                return mapped(node, self._read)
            case Move() if self.pipe.axis not in node.step.axes:
                self._of_stage(node.target)
                return self._move(node, node.step.axes)
            case Move() if node.step.kind == "all_reduce" and node.step.op == "sum":
                axes = tuple(a for a in node.step.axes if a != self.pipe.axis)
                if axes:
                    return self._move(node, axes)
                self.new[node.target] = self._read(node.source)
                return None
        message = f"an update needs all stages of `{self.pipe.axis}`, which update by themselves"
        help = f"leave out the rules for `params`, `grads` and `state` that name `{self.pipe.axis}`"
        self._refuse(message, help)

    def _read(self, var: Var) -> Var:
        return self.new.get(var, var)

    def _of_stage(self, var: Var) -> None:
        """Note what a variable is as a stage has it: no part of a sum over stages."""
        placed = self._alone(var.placement)
        if placed != var.placement:
            self.new[var] = replace(var, placement=placed)

    def _alone(self, p: Placement) -> Placement:
        partial = tuple(a for a in p.partial if a != self.pipe.axis)
        return replace(p, partial=partial, op=p.op if partial else None)

    def _move(self, node: Move, axes: tuple[str, ...]) -> Move:
        source, target = self._read(node.source), self._read(node.target)
        step = replace(node.step, axes=axes, before=source.placement, after=target.placement)
        return replace(node, step=step, source=source, target=target).counted(self.source.mesh)

    # --- what other stages are told --------------------------------------------------------------

    def _told(self, var: Var, home: str, ends: list[Node]) -> Var:
        """What all stages get of a value that one has updated: the others add zeros to it."""
        if home == "every":
            return var
        mesh, axis = self.source.mesh, self.pipe.axis
        at, stage = (0, 0) if home == "first" else (mesh.size(axis) - 1, self.loop.last)
        fill = replace(zero_fill(mesh, var.placement, axis, "sum", None), at=at)
        part = replace(var, name=self.names.fresh(f"{var.name}_own"), placement=fill.after)
        step = all_reduce(mesh, fill.after, (axis,))
        target = replace(var, name=self.names.fresh(f"{var.name}_new"), placement=step.after)
        why = f"stage {stage} alone updates it"
        about = (0, 0, var.value.span, known_words(why), "update")
        for move in (Move(fill, var, part, *about), Move(step, part, target, *about)):
            ends.append(move.counted(mesh))
        return target


class _Owners:
    """The stages that make a statement of the update, and whose a parameter with its states is.

    All that one gradient goes into belongs together. What reads none, such as a learning rate that
    follows a schedule, every stage makes.
    """

    def __init__(
        self, loop: Pipeline, use: ScheduleUse, source: DeviceProgram, nodes: list[Node]
    ) -> None:
        self.up: dict[Var, Var] = {}
        self.homes: dict[Var, set[str]] = {}
        counter = source.placed.named.counter
        stored = {old for old, _ in source.updates if old.value is not counter}
        self.own = stored | {c.result for c in loop.carries}
        for node in nodes:
            read = [v for v in reads_of(node) if v in self.own]
            if read:
                self.own.update(node.makes)
                for var in (*read, *node.makes):
                    self._join(var, read[0])
        for old, new in source.updates:
            if old in stored and new in self.own:
                self._join(old, new)
        for carry in loop.carries:
            adds = (
                part.stages
                for node, part in zip(loop.body, loop.parts, strict=True)
                if any(v.name == carry.inside.name for v in node.makes)
            )
            self.homes.setdefault(self._root(carry.result), set()).update(adds)
        for var in stored:
            if len(self.homes.get(self._root(var), ())) > 1:
                message = (
                    f"`{var.value.label}` has gradients on several stages, which update separately"
                )
                help = "use a schedule that updates at the end of a step: `one_f_one_b`"
                fail("MD0337", message, use.span, help=help)

    def _join(self, one: Var, other: Var) -> None:
        self.up[self._root(one)] = self._root(other)

    def _root(self, var: Var) -> Var:
        while self.up.get(var, var) is not var:
            var = self.up[var]
        return var

    def home(self, var: Var) -> str:
        """`first`, `last` or `every`."""
        return next(iter(self.homes.get(self._root(var), ())), "every")

    def of(self, node: Node) -> str:
        """The stages that make a statement."""
        return next((self.home(v) for v in reads_of(node) if v in self.own), "every")
