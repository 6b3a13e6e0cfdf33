"""What one device of a pipeline alone reads: it alone stores it, with its gradient and states.

A parameter outside of the loop belongs to the stage that reads it; so do all parameters of a
network that rules cut. Statements on such tensors are done there alone, and their gradients need no
reduction over the stages. Numbers that all devices read, such as the norm of all gradients, are
added up over them. (An embedding on the first stage, a head on the last one: Megatron-LM, Narayanan
et al. 2021.) What several devices read stays on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace

from meshdsl.device.costs import with_flops
from meshdsl.device.ir import (
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    Stages,
    Var,
    known_words,
)
from meshdsl.device.liveness import uses
from meshdsl.device.names import Names, names_of
from meshdsl.device.stage_phases import read_in
from meshdsl.ir.program import Leaf, every
from meshdsl.ir.rewrite import mapped, reads_of
from meshdsl.placed.collectives import Step, all_reduce, zero_fill
from meshdsl.placed.placements import Placement
from meshdsl.records import dataclass

Stored = Mapping[str, int | None]
"""The device along the axis of the stages that alone stores a parameter, by its name."""

JOINED = ("all_reduce", "zero_fill")
"""The steps over the axis of the stages that a tensor of one device does not need."""


def on_one_device(program: DeviceProgram, stored: Stored | None = None) -> DeviceProgram:
    """The program whose parameters that one device reads are on that device alone.

    `stored` says where another program has them, of which this one is the forward pass.
    """
    pipe = program.pipeline
    if pipe is None or pipe.known.schedule.updates:
        return program
    owners = _OwnedGroups(program, pipe).owners(stored)
    return _Owned(program, pipe, owners).program() if owners else program


def stored_on(program: DeviceProgram) -> Stored:
    """Where a program has its parameters."""
    return {var.value.name or "": var.on for var in program.params}


class _OwnedGroups:
    """Tensors that are computed of each other outside of the passes, and so are on one device.

    A parameter, its gradient, its states, its new value; numbers join nothing.
    """

    def __init__(self, program: DeviceProgram, pipe: Pipeline) -> None:
        self.program, self.pipe = program, pipe
        self.roots: dict[Var, Var] = {}
        for var in (*program.params, *program.states):
            self._join((var,))
        for carry in pipe.carries:
            self._join((carry.init, carry.inside, carry.next, carry.result))
        for node in every(pipe.body):
            if isinstance(node, Compute) and node.onto is not None:
                total = node.ins[node.onto]
                self._join((total, *node.outs) if total in self.roots else ())
        for pair in program.updates:
            self._join(pair)
        joined = 0
        while joined < len(self.roots):  # what joins a group later joins others to it
            joined = len(self.roots)
            for node in program.body:
                read = [v for v in reads_of(node) if v in self.roots]
                self._join((*read, *node.makes) if read and node is not pipe else ())

    def _join(self, joined: Iterable[Var]) -> None:
        tensors = [v for v in joined if v.local.dims]
        for var in tensors:
            self.roots[self._root(var)] = self._root(tensors[0])

    def _root(self, var: Var) -> Var:
        root = self.roots.setdefault(var, var)
        if root is not var:
            root = self.roots[var] = self._root(root)
        return root

    def owners(self, stored: Stored | None) -> dict[Var, int]:
        """The device of each tensor that is on one alone."""
        stays = {self._root(v) for v in self._on_all()}
        params = {self._root(v): v for v in self.program.params if v.local.dims}
        read: dict[Var, set[int]] = {root: set() for root in params}
        for var, devices in read_in_passes(self.pipe):
            if var in self.roots and (root := self._root(var)) in read:
                read[root] |= devices
        device_of = {}
        for root, devices in read.items():
            device = next(iter(devices)) if len(devices) == 1 else None
            if stored is not None:
                device = stored[params[root].value.name or ""]
                assert device is None or devices <= {device}, "a pass reads more than its step"
            if device is not None and root not in stays:
                device_of[root] = device
        return {v: device_of[root] for v in self.roots if (root := self._root(v)) in device_of}

    def _on_all(self) -> Iterator[Var]:
        """Tensors of groups that all devices have, or have parts of, along the axis."""
        axis, program = self.pipe.axis, self.program
        yield from (v for v in self.roots if any(axis in axes for _, axes in v.placement.splits))
        yield from (v for _, v in program.outputs if v in self.roots)
        yield from (v for v in self.roots if v in program.lists)
        yield from (s.outer for s in self.pipe.stacked if s.outer in self.roots)
        for node in program.body:
            if not isinstance(node, Leaf) and node is not self.pipe:
                yield from (v for v in (*reads_of(node), *node.makes) if v in self.roots)
            elif isinstance(node, Compute) and any(v.placement.op != "sum" for v in _parts(node)):
                # Numbers of single devices are added up over them: a maximum has to be whole.
                yield from (v for v in node.ins if v in self.roots)
            elif isinstance(node, Move) and axis in node.step.axes:
                if node.step.kind not in JOINED or node.step.op != "sum":
                    yield from (v for v in (node.source, node.target) if v in self.roots)


def _parts(node: Compute) -> tuple[Var, ...]:
    """The numbers that an operator makes parts of."""
    return tuple(v for v in node.outs if v.placement.partial and not v.local.dims)


def read_in_passes(pipe: Pipeline) -> Iterator[tuple[Var, set[int]]]:
    """What the passes read, and on which devices along the axis of the stages."""
    for node, part, ends in pipe.places:
        for var in reads_of(node):
            yield var, _devices(pipe, node, part, ends, var)


def _devices(pipe: Pipeline, node: Node, part: StagePhase, ends: Stages, var: Var) -> set[int]:
    end_devices = {"first": {0}, "last": {pipe.last}}
    stages = {ends[0]} if ends else end_devices.get(read_in(node, part, var).stages)
    # By device and stage: there are fewer of these than of micro-batches on them.
    return {device for device, at in pipe.known.taken if stages is None or at in stages}


@dataclass(slots=True)
class _Sum:
    """A sum of numbers, some of which single devices have: by device, in parts, and whole."""

    on: dict[int, list[Var]] = field(default_factory=dict)
    parts: list[Var] = field(default_factory=list)
    whole: list[Var] = field(default_factory=list)


class _Owned:
    """Rewrites the program. `on` are the devices of what single ones have, `sums` sums of that.

    `new` has the new variables in the place of the old ones.
    """

    def __init__(self, program: DeviceProgram, pipe: Pipeline, on: dict[Var, int]) -> None:
        self.source, self.pipe, self.on = program, pipe, on
        self.mesh, self.axis = program.mesh, pipe.axis
        self.names = Names(names_of(program))
        self.uses = uses(program)
        # The devices on which passes read what is made outside of them.
        self.read: dict[Var, set[int]] = {}
        for var, devices in read_in_passes(pipe):
            self.read.setdefault(var, set()).update(devices)
        self.new = {var: self._alone(var, device) for var, device in on.items()}
        self.sums: dict[Var, _Sum] = {}
        self.made: list[Node] = []

    def program(self) -> DeviceProgram:
        """The program."""
        for node in self.source.body:
            self._node(node)
        for var in (*(v for _, v in self.source.outputs), *(n for _, n in self.source.updates)):
            self._whole(var, self.source.body[-1])
        source = self.source
        return replace(
            source,
            body=tuple(self.made),
            params=tuple(map(self._now, source.params)),
            states=tuple(map(self._now, source.states)),
            outputs=tuple((name, self._now(v)) for name, v in source.outputs),
            updates=tuple((self._now(old), self._now(new)) for old, new in source.updates),
        )

    # --- variables -------------------------------------------------------------------------------

    def _now(self, var: Var) -> Var:
        return self.new.get(var, var)

    def _alone(self, var: Var, device: int) -> Var:
        return replace(var, on=device, placement=var.placement.less(self.axis, self.mesh))

    def _own(self, var: Var, device: int) -> Var:
        """The variable on its device alone."""
        self.on[var] = device
        self.new[var] = self._alone(var, device)
        return self.new[var]

    def _fresh(self, like: Var, p: Placement, on: int | None = None) -> Var:
        name = self.names.fresh(like.name)
        return replace(like, name=name, value=replace(like.value), placement=p, on=on)

    # --- nodes -----------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        match node:
            case Compute():
                self._compute(node)
            case Move() if node.source in self.on:
                self._move(node)
            case Move() if node.source in self.sums and self._fills(node):
                self.sums[node.target] = self.sums[node.source]
            case Move() | DeviceLoop():
                for var in reads_of(node):
                    if node is not self.pipe or self.read.get(var) != {self.on.get(var)}:
                        self._whole(var, node)
                self.made.append(mapped(node, self._now))
            case _:
                raise AssertionError(f"{node} comes after parameters have their devices")

    def _fills(self, node: Move) -> bool:
        return node.step.kind == "zero_fill" and node.step.axes == (self.axis,)

    def _move(self, node: Move) -> None:
        """A move of what one device has: over the stages there is nothing to do."""
        device, step = self.on[node.source], node.step
        axes = tuple(axis for axis in step.axes if axis != self.axis)
        if not axes:
            self.on[node.target] = device
            self.new[node.target] = self.new[node.source]
            return
        target = self._own(node.target, device)
        before, after = (p.less(self.axis, self.mesh) for p in (step.before, step.after))
        step = replace(step, axes=axes, before=before, after=after)
        move = replace(node, step=step, source=self.new[node.source], target=target)
        self.made.append(move.counted(self.mesh))

    def _compute(self, node: Compute) -> None:
        if self._is_sum(node):
            self.sums[node.out] = self._sum(node)
            return
        both = (*node.ins, *node.outs)
        tensors = {self.on[v] for v in both if v in self.on and v.local.dims}
        devices = tensors or {self.on[v] for v in node.ins if v in self.on}
        alone = len(devices) == 1 and all(v in self.on or not v.local.dims for v in node.outs)
        for var in node.ins:
            if var in self.sums or not alone or self.on.get(var) not in devices:
                self._whole(var, node)
        for var in node.outs:
            if alone and var not in self.on:
                self._own(var, *devices)
        self.made.append(mapped(node, self._now))

    # --- numbers ---------------------------------------------------------------------------------

    def _is_sum(self, node: Compute) -> bool:
        """Whether an operator adds numbers of several devices, or of one to parts of a sum."""
        if node.name != "add" or node.out.local.dims:
            return False
        devices = {self.on[v] for v in node.ins if v in self.on}
        in_parts = any(self._parts_of(v) is not None for v in node.ins if v not in self.on)
        return any(v in self.sums for v in node.ins) or len(devices) + in_parts > 1

    def _sum(self, node: Compute) -> _Sum:
        total = _Sum()
        for var in node.ins:
            other = self.sums.get(var) or self._addend(var)
            for device, numbers in other.on.items():
                total.on[device] = [*total.on.get(device, ()), *numbers]
            total.parts += other.parts
            total.whole += other.whole
        return total

    def _addend(self, var: Var) -> _Sum:
        """A number as a sum."""
        if var in self.on:
            return _Sum({self.on[var]: [self.new[var]]})
        part = self._parts_of(var)
        if part is None:
            return _Sum(whole=[self._now(var)])
        if part is not self._now(var):
            self.made = [node for node in self.made if var not in node.makes]
        return _Sum(parts=[part])

    def _parts_of(self, var: Var) -> Var | None:
        """Parts of a number: it is in parts, or they are added up over the stages for it alone."""
        if self.axis in var.placement.partial:
            return self._now(var)
        maker = next((node for node in self.made if var in node.makes), None)
        if isinstance(maker, Move) and self.uses[var] == 1:
            if maker.step.kind == "all_reduce" and maker.step.axes == (self.axis,):
                return maker.source
        return None

    def _whole(self, var: Var, reader: Node) -> None:
        """Let all devices have a number that is added up over them, or parts of it."""
        if var.local.dims or (var not in self.on and var not in self.sums):
            return
        addends = self.sums.pop(var, None) or self._addend(var)
        self.on.pop(var, None)
        parts = [self._part(var, device, numbers, reader) for device, numbers in addends.on.items()]
        if self.axis in var.placement.partial:
            parts += [self._part(var, 0, [number], reader) for number in addends.whole]
            self.new[var] = self._added([*parts, *addends.parts], reader)
            return
        part = self._added([*parts, *addends.parts], reader)
        step = all_reduce(self.mesh, part.placement, (self.axis,))
        total = self._fresh(var, step.after)
        self._moved(step, part, total, reader)
        self.new[var] = self._added([total, *addends.whole], reader)

    def _in_parts(self, here: Placement, device: int) -> Step:
        """The step that makes of the number of one device a part of a sum over the stages."""
        assert here.op in (None, "sum"), "a number is a maximum over devices of one stage"
        return replace(zero_fill(self.mesh, here, self.axis, "sum", None), at=device)

    def _part(self, var: Var, device: int, numbers: list[Var], reader: Node) -> Var:
        local = self._added(numbers, reader)
        step = self._in_parts(local.placement, device)
        target = self._fresh(var, step.after)
        self._moved(step, local, target, reader)
        return target

    def _moved(self, step: Step, source: Var, target: Var, reader: Node) -> None:
        why = "each stage has its own part of it, and all read the sum"
        about = (reader.span, known_words(why), reader.phase)
        self.made.append(Move(step, source, target, 0, 0, *about).counted(self.mesh))

    def _added(self, numbers: list[Var], reader: Node) -> Var:
        """The sum of numbers that the same devices have."""
        total = numbers[0]
        for number in numbers[1:]:
            out = self._fresh(total, total.placement, total.on)
            add = Compute("add", (total, number), (out,), (), reader.span, reader.phase)
            self.made.append(with_flops(add))
            total = out
        return total
