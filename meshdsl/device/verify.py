"""Verifier of a device program: names, shapes, collectives in flight, and nothing made in vain.

A violation is our mistake, hence an assert with a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshdsl.device.ir import (
    UPDATE,
    Bucket,
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Pipeline,
    StageRows,
    Start,
    Var,
    Wait,
    only_on,
)
from meshdsl.device.liveness import uses
from meshdsl.device.stage_local import read_in_passes
from meshdsl.ir.program import Stacked, every
from meshdsl.ir.verify import Verifier
from meshdsl.ops.opdef import lookup


def verify(program: DeviceProgram) -> None:
    """Check that variables are assigned once, before reads, with the shape of their placement.

    A variable may take over the name of another, which is dead from there on.
    """
    check = _DeviceVerifier(program)
    check.define((*program.inputs, *program.params, *program.states))
    check.nodes(program.body)
    check.need((var for _, var in program.outputs), "an output")
    check.need((new for _, new in program.updates), "an update")
    for old, new in program.updates:
        assert new.local == old.local, f"{old.name} changes its shape"
    _check_collectives_read(program)
    if program.pipeline is not None:
        _check_sums_written(program.pipeline)


def _check_collectives_read(program: DeviceProgram) -> None:
    """Check that what a collective makes is read; a stage reads what it is sent from its line."""
    read = uses(program)
    for node in every(program.body):
        collective = node.collective if isinstance(node, Wait) else node
        for move in collective.moves if isinstance(collective, Move | Bucket) else ():
            name, step = move.target.name, move.step
            description = f"the {step.kind} of {move.source.name} of line {move.span.line}"
            used = read[move.target] or not step.moves or step.kind == "send"
            assert used, f"nothing reads {name}, {description}"


def _check_sums_written(node: Pipeline) -> None:
    """Check that passes add to every sum that they carry, in its own memory or in rows of it.

    Passes of several micro-batches are under way at once, so nothing else reaches the next one.
    """
    written, memory = set[Var](), dict[Var, tuple[Var, ...]]()
    for inner in every((node,)):
        memory.update((s.inside, (s.outer, *_other(s))) for s in inner.stacked)
        written.update(c.stack for c in inner.collected if c.stack is not None)
        if isinstance(inner, Move) and inner.step.kind == "slice":
            memory[inner.target] = (inner.source,)
        elif isinstance(inner, Compute) and inner.over is not None:
            memory.update((var, (inner.over,)) for var in inner.outs)
            written.update(inner.outs)
    reached = list(written)
    for var in reached:
        new = [v for v in memory.get(var, ()) if v not in written]
        written.update(new)
        reached += new
    stored = {var for inner in node.of(*UPDATE) for var in inner.makes}
    for carry in node.carries:
        if carry.next in stored:  # an update puts it where the old value was
            continue
        line, name = carry.next.value.span.line, carry.inside.name
        assert carry.next.name == name, f"{name} of line {line} goes on as {carry.next.name}"
        assert carry.inside in written, f"no pass writes {name} of line {line}, which it carries"


def _other(item: Stacked[Var]) -> tuple[Var, ...]:
    """Of rows, those of the other stage of a device."""
    return (item.other,) if isinstance(item, StageRows) and item.other is not None else ()


class _DeviceVerifier(Verifier[Var]):
    """`works` are the collectives in flight, by the variables that name them."""

    def __init__(self, program: DeviceProgram) -> None:
        super().__init__()
        self.program = program
        self.names: set[str] = set(program.coordinates.values())
        self.works: dict[str, Collective] = {}
        self.passing = False

    def label(self, value: Var) -> str:
        return value.name

    def check_value(self, value: Var) -> None:
        local = value.placement.local(value.value.type, self.program.mesh)
        assert value.local == local, f"shape of {value.name}"
        assert value.name not in self.names, f"{value.name} is assigned twice"
        self.names.add(value.name)

    def define_over(self, var: Var, before: Var | None) -> None:
        """Define `var`; where it has the name of `before`, that one ends."""
        if before is not None and before.name == var.name:
            self.known.discard(before)
            self.names.discard(var.name)
        self.define((var,))

    # --- operators and collectives ------------------------------------------------------------

    def nodes(self, nodes: Iterable[Any]) -> None:
        before = dict(self.works)
        super().nodes(nodes)
        missing = ", ".join(self.works.keys() - before.keys())
        assert self.works == before, f"nobody waits for {missing}"

    def op(self, node: Compute | Move | Bucket | Start | Wait) -> None:
        self._there(node)
        match node:
            case Compute():
                self.need(node.reads, node.name)
                self.check_kind(node)
                over = node.into if node.onto is None else node.ins[node.onto]
                if node.into is not None:
                    assert node.into.local == node.out.local, node.out.name
                    writes = node.adds or lookup(node.name).converts
                    assert writes, f"{node.name} is not written into memory"
                for var in node.outs:
                    self.define_over(var, over)
            case Start():
                self._start(node)
            case Wait():
                waited = self.works.pop(node.work, None)
                assert waited is node.collective, f"nothing is in {node.work}"
                if not node.late:
                    self._arrive(node.collective)
            case _:
                self.need(node.reads, node.step.kind)
                self.check(node)
                self._arrive(node)

    def _arrive(self, node: Collective) -> None:
        for move in node.moves:
            assert move.into is None or move.into.local == move.target.local, move.target.name
            self.define_over(move.target, move.into)

    def _there(self, node: Compute | Move | Bucket | Start | Wait) -> None:
        """Check that what one device of a pipeline has alone is read there alone."""
        filled = isinstance(node, Move) and node.step.kind == "zero_fill"
        if not (self.passing or filled):
            device = only_on(node)
            for var in node.reads:
                assert var.on in (None, device), f"{var.name} is only on {var.on}"

    def check(self, node: Collective) -> None:
        if isinstance(node, Bucket):
            flat = {(m.step.kind, m.step.axes, m.step.op, m.source.local.dtype) for m in node.moves}
            assert len(flat) == 1, f"one bucket for {flat}"

    def _start(self, node: Start) -> None:
        assert node.work not in self.works, f"{node.work} is already under way"
        if not node.ahead:
            self.need(node.reads, node.work)
            self.check(node.collective)
            assert node.work not in self.names, f"{node.work} is assigned twice"
            self.names.add(node.work)
        if node.late:
            for var in node.collective.makes:
                self.check_value(var)
        self.works[node.work] = node.collective

    # --- loops --------------------------------------------------------------------------------

    def loop(self, node: DeviceLoop) -> None:  # type: ignore[override]
        self.need(node.reads, node.index)
        if isinstance(node, Pipeline):
            self.passing = True
            for var, devices in read_in_passes(node):
                assert var.on is None or devices == {var.on}, f"{var.name} is only on {var.on}"
        taken = {c.init for c in node.carries if c.init.name == c.inside.name}
        # What is taken of a list may have the name of a variable that nothing reads any more.
        listed = {s.inside.name for s in node.stacked if s.outer in self.program.lists}
        taken |= {v for v in self.known if v.name in listed}
        self.names -= listed
        outside = self.known - taken
        for carry in node.carries:
            self.define_over(carry.inside, carry.init)
        self.define(s.inside for s in node.stacked)
        under_way, self.works = self.works, {}
        for ahead in node.ahead:
            self._ahead(ahead.collective, ahead.work, tuple(s.inside for s in ahead.slices))
        collected = {c.inside for c in node.collected if not c.is_list and c.stack is None}
        for wait in node.late:
            assert collected.issuperset(wait.collective.makes), f"{wait.work} is not collected"
            self.works[wait.work] = wait.collective
        self.nodes(node.body)
        self.works, self.passing = under_way, self.passing and not isinstance(node, Pipeline)
        self.need(node.ends, node.index)
        late = {move.target for wait in node.late for move in wait.collective.moves}
        makers = {var: maker for maker in node.body for var in maker.makes}
        for var in node.in_slices.keys() - late:
            maker = makers.get(var)
            fills = isinstance(maker, Compute) and lookup(maker.name).fills is not None
            assert fills, f"{var.name} cannot be written to its slice"
        # What only an iteration has is known no more: a later loop may have a variable of its name.
        stay = {v.name for v in (*outside, *(c.result for c in node.carries))}
        self.names -= {v.name for v in self.known} - stay
        self.known = outside
        for carry in node.carries:
            assert carry.result.name == carry.inside.name, "a carry changes its name"
            self.known.add(carry.result)
        for item in node.collected:
            self.define_over(item.outer, item.stack)

    def _ahead(self, collective: Collective, work: str, slices: tuple[Var, ...]) -> None:
        """Define the collectives that are in flight when an iteration begins."""
        sources = tuple(m.source for m in collective.moves)
        assert sources == slices, "issued ahead of a slice"
        self.define(inside for inside in slices if inside not in self.known)
        self._start(Start(collective, work))
