"""The backward pass of one block of nodes, and of the loops in it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshdsl.named.autodiff_active import active, feeding
from meshdsl.named.autodiff_again import copied, copied_loop
from meshdsl.named.autodiff_call import Call, about, source
from meshdsl.named.autodiff_tape import Tape
from meshdsl.named.builder import Frame
from meshdsl.named.expand import expand
from meshdsl.named.ir import (
    Carry,
    Collected,
    Dim,
    Node,
    Op,
    Repeat,
    TensorType,
    Value,
    results,
)
from meshdsl.ops.opdef import lookup

FREE = ("cast", "identity")
"""Beside views: operators that are done again rather than kept, if they read nothing else kept."""


class Block:
    """The backward pass of one block of nodes: of a program, or of the body of a loop."""

    def __init__(
        self,
        tape: Tape,
        nodes: tuple[Node, ...],
        loop: Repeat | None = None,
        parent: Block | None = None,
    ) -> None:
        self.tape, self.builder = tape, tape.builder
        self.nodes, self.loop, self.parent = nodes, loop, parent
        self.depth = len(tape.builder.frames) - 1
        self.grads: dict[Value, list[Value]] = {}
        self.moved: dict[Value, Value] = {}
        self.made = {v: n for n in nodes if isinstance(n, Op) for v in n.outs}
        self.own = {v for n in nodes for v in results(n)}
        self.slices: dict[Value, Value] = {}
        if loop is not None:
            self.own.update(c.inside for c in loop.carries)
            self.slices = {s.inside: s.outer for s in loop.stacked}

    # --- gradients ---------------------------------------------------------------------------

    def add(self, value: Value, grad: Value) -> None:
        """A contribution to the gradient of `value`; a copy made again stands for its original."""
        original = self.tape.builder.originals.get(value)
        target = value if original is None or original not in self.own else original
        self.grads.setdefault(target, []).append(grad)

    def total(self, value: Value) -> Value | None:
        """The sum of all contributions so far; some dims may be missing."""
        parts = self.grads.pop(value, [])
        if not parts:
            return None
        emit = self.tape.emitter(value, source(value))
        total = parts[0]
        for part in parts[1:]:
            total = emit.emit("add", total, part)
        if value in self.tape.wrt:
            self.add(value, total)
        return total

    def whole(self, value: Value) -> Value:
        """The sum of all contributions, of the type of `value`; zeros where there are none."""
        emit = self.tape.emitter(value, source(value))
        total = self.total(value)
        if total is None:
            return emit.zeros(value.type)
        return emit.full(total, value.type.dims)

    # --- one node after the other, backwards ------------------------------------------------

    def reverse(self) -> None:
        """Walk the nodes from the last to the first."""
        groups = [(b, list(g)) for b, g in itertools.groupby(self.nodes, lambda n: n.block)]
        for block, group in reversed(groups):
            if not any(v in self.grads for n in group for v in results(n)):
                continue
            if block is not None:
                self._compute_again(group)
            for node in reversed(group):
                if isinstance(node, Repeat):
                    self._loop(node)
                else:
                    self._op(node)

    def _op(self, op: Op) -> None:
        wanted = frozenset(i for i, v in enumerate(op.ins) if v in self.tape.active)
        if not wanted or not any(v in self.grads for v in op.outs):
            return
        gradient = lookup(op.name).gradient
        if gradient is None:
            self._defined(op)
            return
        assert len(op.outs) == 1, f"{op.name} has several results and a gradient"
        grad = self.total(op.out)
        assert grad is not None
        call = Call(op, grad, wanted, self.available, self.tape.emitter(op.outs[0]))
        labelled: dict[Value, Value] = {}  # one part may be that of two operands
        for index, part in gradient(call).items():
            if index in wanted:
                own = call.emitter.follow(labelled.get(part, part), op.ins[index])
                labelled[part] = own
                self.add(op.ins[index], own)

    def _defined(self, op: Op) -> None:
        """Differentiate a composite as its definition in the prelude, computed again for that."""
        if not lookup(op.name).composite:
            return
        expansion = expand(op, {})
        assert expansion is not None
        self.tape.active |= active(expansion.ops, self.tape.active)
        for inner in expansion.ops:
            self.made.update({v: inner for v in inner.outs})
            self.own.update(inner.outs)
            self._done_again(inner)
        for inner in reversed(expansion.ops):
            self._op(inner)

    # --- what the backward pass reads of the forward one -------------------------------------

    def available(self, value: Value) -> Value:
        """What stands for a value of the forward block here."""
        if value in self.moved:
            return self.moved[value]
        if self.loop is None or self.parent is None:
            return value
        with self.builder.at(self.depth):
            if value in self.own and self._is_free(value):
                return self._done_again(self.made[value])
            if value in self.own:
                found = self._collected(value, self.loop, self.parent)
            else:
                found = self.parent.available(self.slices.get(value, value))
            self.moved[value] = self.builder.reach(found)
        return self.moved[value]

    def _collected(self, value: Value, loop: Repeat, parent: Block) -> Value:
        """All that `value` was in the iterations of the forward loop, as the parent has it."""
        outer = self.tape.collect(loop, self.tape.again.get(value, value), self.depth - 1)
        if loop in self.tape.twins:  # it was done again beside the loop that is being built
            return outer
        parent.own.add(outer)
        return parent.available(outer)

    def _is_free(self, value: Value) -> bool:
        """Whether it costs nothing to make the value again: it need not be kept."""
        assert self.loop is not None
        op = self.made.get(value)
        if op is None:
            return False
        if not op.ins or value.type.has(self.loop.dim.name):
            return True
        light = lookup(op.name).view or op.name in FREE
        return light and all(v not in self.own or self._is_free(v) for v in op.ins)

    def _compute_again(self, group: list[Node]) -> None:
        """Do a `recompute` block once more; what follows reads its values from here."""
        for node in group:
            if isinstance(node, Repeat):
                self.moved.update(copied_loop(self.tape, node, self.available))
            else:
                self._done_again(node)

    def _done_again(self, op: Op) -> Value:
        ins = tuple(self.available(v) for v in op.ins)
        self.moved.update(zip(op.outs, copied(self.tape, op, ins), strict=True))
        return self.moved[op.outs[0]]

    # --- loops ---------------------------------------------------------------------------------

    def _loop(self, loop: Repeat) -> None:
        """A loop from the last iteration to the first, carrying the gradients of the carries."""
        if not any(v in self.grads for v in results(loop)):
            return
        carries = self._reached(loop)
        inits = [self.whole(c.result) for c in carries]
        seeds = [(c.inside, self.total(c.outer)) for c in loop.collected if c.outer in self.grads]
        self.builder.frames.append(Frame(loop.dim))
        child = Block(self.tape, loop.body, loop, self)
        insides = [self._gradient(c.next) for c in carries]
        for carry, inside in zip(carries, insides, strict=True):
            child.add(carry.next, inside)
        for value, seed in seeds:
            assert seed is not None
            child.add(value, self.builder.reach(seed))
        child.reverse()
        nexts = [child.whole(c.inside) for c in carries]
        self._close(loop, child, list(zip(carries, inits, insides, nexts, strict=True)))

    def _close(
        self, loop: Repeat, child: Block, carried: list[tuple[Carry, Value, Value, Value]]
    ) -> None:
        """Append the backward loop, and hand on the gradients of what the forward one read."""
        stacked = [(s, child.total(s.inside)) for s in loop.stacked if s.inside in child.grads]
        sums = [(v, child.summed(v)) for v in list(child.grads) if v not in child.own]
        frame = self.builder.frames.pop()
        collected, carries = [], []
        for item, inside in stacked:
            assert inside is not None
            outer = self._gradient(item.outer, (loop.dim, *inside.type.dims))
            collected.append(Collected(inside, outer))
            self.add(item.outer, outer)
        for value, (inside, next_) in sums:
            init = self.tape.emitter(value, source(value)).zeros(inside.type)
            result = self._gradient(value, inside.type.dims)
            carries.append(Carry(init, inside, next_, result))
            self.add(value, result)
        for carry, init, inside, next_ in carried:
            result = self._gradient(carry.init)
            carries.append(Carry(init, inside, next_, result))
            self.add(carry.init, result)
        made = Repeat(
            loop.dim, tuple(carries), self.builder.stacks(frame), tuple(frame.body), loop.span,
            tuple(collected), not loop.reverse, self.builder.phase,
        )  # fmt: skip
        self.builder.frames[-1].body.append(made)

    def summed(self, value: Value) -> tuple[Value, Value]:
        """The gradient of a value from outside, added up over the iterations: carry and next."""
        grad = self.total(value)
        assert grad is not None
        inside = self._gradient(value, grad.type.dims)
        emit = self.tape.emitter(value, source(value))
        return inside, emit.full(emit.emit("add", inside, grad), inside.type.dims)

    def _gradient(self, value: Value, dims: tuple[Dim, ...] | None = None) -> Value:
        """A new value for a gradient of `value`."""
        type_ = TensorType(value.type.dims if dims is None else dims, value.type.dtype)
        plain = Value(type_, value.span, path=value.path, functions=value.functions)
        grad = replace(plain, **about(source(value)))
        self.builder.place(grad, len(self.builder.frames) - 1)
        return grad

    def _reached(self, loop: Repeat) -> list[Carry]:
        """The carries whose gradients go round: those that reach what has a gradient."""
        found = {c for c in loop.carries if c.result in self.grads}
        ends = {c.inside for c in loop.collected if c.outer in self.grads}
        while True:
            needed = feeding(loop.body, {c.next for c in found} | ends)
            more = {c for c in loop.carries if c.inside in needed} | found
            if more == found:
                return [c for c in loop.carries if c in found and c.inside in self.tape.active]
            found = more
