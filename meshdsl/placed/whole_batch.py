"""What is made of a whole batch, once its last micro-batch is done.

A schedule cuts a batch, and a sum over it is there after the last micro-batch. Gradients cannot
wait for it. What the loss and its gradients do not need can: metrics, and the next values of
states, such as a bias that balances the loads of experts. The operators that need such a sum
follow the passes, and read what leaves these. (DeepSeek-V3, 2024; Megatron's
`finalize_model_grads`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshdsl.ir.program import every
from meshdsl.ir.rewrite import needed, reads_of, substitute
from meshdsl.named.after_passes import Parting
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, uses_of
from meshdsl.named.simplify import drop_unused
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import B, Component, Split
from meshdsl.placed.sharding_rules import Row, best_row, call_of


def after_batch(program: NamedProgram, pipe: Piped) -> NamedProgram:
    """The program whose operators that wait for the whole batch follow the passes.

    A forward pass alone stays as it is where samples on their way through the stages wait.
    """
    if pipe.cut is None:
        return program
    passes = tuple(n for n in program.body if n.phase != "update")
    in_passes = _needed_in_passes(program, passes)
    if in_passes.issuperset(v for n in every(passes) for v in n.makes):
        return program
    waiting = _Components(program, pipe, in_passes).waiting(passes)
    trains = any(n.phase == "backward" for n in passes)
    if not waiting or (not trains and _stages_wait(passes, waiting, pipe)):
        return program
    parting = Parting(waiting)
    now, later = parting.block(passes)
    now = substitute(now, {}, origins=parting.origins)
    update = tuple(n for n in program.body if n.phase == "update")
    return drop_unused(replace(program, body=(*now, *later, *update)))


def _stages_wait(passes: Sequence[Node], waiting: set[Value], pipe: Piped) -> bool:
    """Whether what goes from stage to stage waits for the whole batch."""
    assert pipe.cut is not None
    carried = {c.inside for n in passes for c in n.carries}
    return any(pipe.cut.has(v) for v in (waiting if pipe.count else waiting & carried))


def _needed_in_passes(program: NamedProgram, passes: Sequence[Node]) -> set[Value]:
    """What the loss and the gradients are made of."""
    wanted = {v for n in program.body if n.phase == "update" for v in reads_of(n)}
    wanted.update(v for n in passes if n.phase == "backward" for v in n.makes)
    if program.goal is not None:
        wanted.update(program.goal.losses)
    return {v for n in every(needed(passes, wanted)) for v in (*n.makes, *n.enters)}


class _Components:
    """The components of values along micro-batches, and those that wait for the last one."""

    def __init__(self, program: NamedProgram, pipe: Piped, in_passes: set[Value]) -> None:
        assert pipe.cut is not None
        self.pipe, self.cut, self.in_passes = pipe, pipe.cut, in_passes
        self.parts: dict[Value, Component] = {
            v: Split(dim) for v in program.inputs if (dim := self.cut.dim_of(v)) is not None
        }
        self.late: set[Value] = set()
        self.uses = uses_of(program)
        # What operators outside of loops make of inputs and parameters can be made beforehand.
        self.beforehand = {*program.inputs, *(p.value for p in program.params)}
        self.beforehand.update(s.value for s in program.states)

    def waiting(self, passes: Sequence[Node]) -> set[Value]:
        """The values that are made after the last micro-batch."""
        self._block(passes, outside=True)
        if self.late:
            self._only_for_late(passes, Counter())
        return self.late

    def _only_for_late(self, nodes: Sequence[Node], late_uses: Counter[Value]) -> None:
        """Add what nothing else reads, and has no samples: it is made once, too."""
        for node in reversed(nodes):
            if isinstance(node, NamedLoop):
                ends = (*((c.next, c.inside) for c in node.carries),)
                ends += tuple((c.inside, c.inside) for c in node.collected)
                late_uses.update(v for v, of in ends if of in self.late)
                self._only_for_late(node.body, late_uses)
                late_uses.update(c.init for c in node.carries if c.inside in self.late)
            elif self._is_late(node, late_uses):
                self.late.update(node.outs)
                late_uses.update(node.ins)

    def _is_late(self, op: NamedOp, late_uses: Counter[Value]) -> bool:
        """Whether an operator is late, or can be: only late ones read it, and it has no samples."""
        if not self.late.isdisjoint(op.outs):
            return True
        has_samples = any(isinstance(self._of(v), Split) for v in (*op.ins, *op.outs))
        return (
            self.in_passes.isdisjoint(op.outs)
            and not has_samples
            and all(self.uses[v] == late_uses[v] for v in op.outs)
        )

    def _of(self, value: Value) -> Component:
        return self.parts.get(value, B)

    def _block(self, nodes: Iterable[Node], outside: bool = False) -> None:
        for node in nodes:
            if isinstance(node, NamedLoop):
                self._loop(node)
                continue
            self._op(node)
            if outside and len(node.outs) == 1 and self.beforehand.issuperset(node.ins):
                self.beforehand.update(node.outs if not self.pipe.count else ())

    def _op(self, op: NamedOp) -> None:
        can_wait = self.in_passes.isdisjoint(op.outs)
        if can_wait and not self.late.isdisjoint(op.ins):
            self.late.update(op.outs)
            return
        row = self._row(op)
        if row is not None:
            self.parts.update(zip(op.outs, row.outs, strict=True))
        elif can_wait:
            self.late.update(op.outs)

    def _row(self, op: NamedOp) -> Row | None:
        """How micro-batches do an operator; None where only the whole batch can."""
        have = [self._of(v) for v in op.ins]
        wanted = [self.cut.dim_of(v) if self.cut.micro > 1 else None for v in op.outs]
        row = best_row(call_of(op), have, wanted)
        for index in reversed(range(len(have))):
            if row is None and op.ins[index] in self.beforehand:
                row = best_row(call_of(op), [*have[:index], B, *have[index + 1 :]], wanted)
        return row

    def _loop(self, loop: NamedLoop) -> None:
        """A loop; a carry that becomes a part, or waits, does so from the first iteration on."""
        for item in loop.stacked:
            self._same(item.outer, item.inside)
        for carry in loop.carries:
            self._same(carry.init, carry.inside)
        while True:
            self._block(loop.body)
            before = [(self._of(c.inside), c.inside in self.late) for c in loop.carries]
            for carry in loop.carries:
                self._same(carry.next, carry.inside)
            if before == [(self._of(c.inside), c.inside in self.late) for c in loop.carries]:
                break
        for carry in loop.carries:
            self._same(carry.inside, carry.result)
        for one in loop.collected:
            self._same(one.inside, one.outer)

    def _same(self, source: Value, target: Value) -> None:
        """Give one value the component of another, where that has one."""
        if source in self.late and target not in self.in_passes:
            self.late.add(target)
        if self._of(source) != B:
            self.parts[target] = self._of(source)
