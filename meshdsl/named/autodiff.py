"""Reverse mode on the named program: the gradient of a scalar, written in the same operators.

The backward pass is more of the same program, so that it is placed, reduced, costed and printed
like everything else. A loop is differentiated by a loop that runs from the last iteration to the
first; what it needs of the forward one is collected there. Contributions to one gradient are summed
as they are, still partial where they are. (Griewank and Walther 2008; for loops as here: JAX scan.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from meshdsl.named.autodiff_call import Call, Emitter, about, source
from meshdsl.named.builder import Builder, Frame, Scope
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
    walk,
)
from meshdsl.named.prelude import prelude
from meshdsl.named.rewrite import substitute
from meshdsl.ops.opdef import lookup

FREE = ("cast", "identity")
"""Beside views: operators that are done again rather than kept, if they read nothing else kept."""


def gradients(
    builder: Builder, loss: Value, wrt: Sequence[Value], seed: Value | None = None
) -> list[Value | None]:
    """The gradients of `loss` by the values `wrt`, emitted at the end of the current block.

    Differentiates the nodes of the block so far. Each gradient has the type of its tensor; None
    where the loss does not depend on it. `seed` is the gradient of the loss, 1 without.
    """
    nodes = tuple(builder.frames[-1].body)
    tape = Tape(builder, active(nodes, set(wrt)), frozenset(wrt))
    start = len(builder.frames[-1].body)
    with in_phase(builder, "backward"):
        block = Block(tape, nodes)
        emit = tape.emitter(loss)
        block.add(loss, seed if seed is not None else emit.number(1.0, loss.type.dtype))
        block.reverse()
        found = [block.whole(v) if v in block.grads else None for v in wrt]
    body = builder.frames[-1].body
    body[:] = tape.with_collected(tuple(body))
    return _marked(builder, start, found, wrt)


def _marked(
    builder: Builder, start: int, found: list[Value | None], wrt: Sequence[Value]
) -> list[Value | None]:
    """The gradients of parameters, marked as such: values of their own."""
    body = builder.frames[-1].body
    made = {v for n in body[start:] for v in results(n)}
    new: dict[Value, Value] = {}
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is None or value.role != "param":
            continue
        if grad in new or grad not in made:
            with in_phase(builder, "backward"):
                scope = Scope({}, {}, prelude(), value.path, value.functions)
                grad = builder.emit("identity", (grad,), {}, grad.span, scope)[0]
        for part in (grad, *_parts(body, grad)):
            new[part] = replace(part, role="grad", **about(source(value)))
            builder.place(new[part], len(builder.frames) - 1)
        found[index] = new[grad]
    body[start:] = substitute(body[start:], new)
    return found


def _parts(nodes: Sequence[Node], grad: Value) -> Iterator[Value]:
    """What a loop collects `grad` from, if it is collected: a gradient as well, slice by slice."""
    for loop in (n for n in nodes if isinstance(n, Repeat)):
        for made in (c.inside for c in loop.collected if c.outer is grad):
            if any(made in op.outs for op in loop.body if isinstance(op, Op)):
                yield made


@contextmanager
def in_phase(builder: Builder, phase: str) -> Iterator[None]:
    """What is emitted meanwhile belongs to `phase`, and to no `recompute` block."""
    before = builder.phase, builder.block
    builder.phase, builder.block = phase, None
    try:
        yield
    finally:
        builder.phase, builder.block = before


def active(nodes: Sequence[Node], seeds: set[Value]) -> set[Value]:
    """Floats that depend on `seeds` in a differentiable way, those inside loops too."""
    found = {v for v in seeds if v.type.dtype.kind == "float"}
    for node in nodes:
        if isinstance(node, Repeat):
            found |= _active_loop(node, found)
        elif is_differentiable(node) and not found.isdisjoint(node.ins):
            found.update(v for v in node.outs if v.type.dtype.kind == "float")
    return found


def is_differentiable(op: Op) -> bool:
    """Whether the operator passes gradients on: by its own rule, or by those of its definition."""
    opdef = lookup(op.name)
    return opdef.gradient is not None or opdef.composite


def _active_loop(loop: Repeat, outside: set[Value]) -> set[Value]:
    found = outside | {s.inside for s in loop.stacked if s.outer in outside}
    found |= {c.inside for c in loop.carries if c.init in outside}
    while True:
        inner = active(loop.body, found)
        more = {c.inside for c in loop.carries if c.next in inner} - inner
        if not more:
            break
        found = inner | more
    inner |= {c.result for c in loop.carries if c.next in inner}
    return inner | {c.outer for c in loop.collected if c.inside in inner}


class Tape:
    """What the blocks of one backward pass share."""

    def __init__(self, builder: Builder, active: set[Value], wrt: frozenset[Value]) -> None:
        self.builder, self.active, self.wrt = builder, active, wrt
        self.numbers: dict[Value, float] = {}
        self.collected: dict[Repeat, dict[Value, Value]] = {}
        self.twins: dict[Repeat, Repeat] = {}
        self.again: dict[Value, Value] = {}

    def emitter(self, at: Value, follows: Value | None = None) -> Emitter:
        """Emits for the gradient of `at`, at its place in the source."""
        return Emitter(self.builder, self.numbers, at, follows)

    def collect(self, loop: Repeat, value: Value, depth: int) -> Value:
        """All iterations' `value` of a forward loop, as a tensor outside it, `depth` loops deep."""
        known = self.collected.setdefault(self.twins.get(loop, loop), {})
        if value not in known:
            type_ = TensorType((loop.dim, *value.type.dims), value.type.dtype)
            known[value] = replace(value, type=type_, role="activation", follows=source(value))
            self.builder.place(known[value], depth)
        return known[value]

    def with_collected(self, nodes: tuple[Node, ...]) -> list[Node]:
        """`nodes` with the loops collecting what has been asked for."""
        return [self._collecting(n) if isinstance(n, Repeat) else n for n in nodes]

    def _collecting(self, loop: Repeat) -> Repeat:
        more = tuple(Collected(a, b) for a, b in self.collected.get(loop, {}).items())
        body = tuple(self.with_collected(loop.body))
        return replace(loop, body=body, collected=(*loop.collected, *more))


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
        """A contribution to the gradient of `value`."""
        self.grads.setdefault(value, []).append(grad)

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
        reached = [v for v in op.outs if v in self.grads]
        wanted = frozenset(i for i, v in enumerate(op.ins) if v in self.tape.active)
        if not reached:
            return
        if wanted and lookup(op.name).gradient is None:
            self._defined(op)
            return
        grad = self.total(op.outs[0])
        gradient = lookup(op.name).gradient
        if not wanted or gradient is None or grad is None:
            return
        assert len(op.outs) == 1, f"{op.name} has several results and a gradient"
        call = Call(op, grad, wanted, self.available, self.tape.emitter(op.outs[0]))
        for index, part in gradient(call).items():
            if index in wanted:
                self.add(op.ins[index], call.emitter.follow(part, op.ins[index]))

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
        if value in self.slices:
            found = self.builder.reach(self.parent.available(self.slices[value]))
        elif value not in self.own:
            found = self.builder.reach(self.parent.available(value))
        elif self._is_free(value):
            return self._done_again(self.made[value])
        else:
            inside = self.tape.again.get(value, value)
            outer = self.tape.collect(self.loop, inside, self.depth - 1)
            found = self.builder.reach(outer)
        self.moved[value] = found
        return found

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

    # --- doing it again ------------------------------------------------------------------------

    def _compute_again(self, group: list[Node]) -> None:
        """Do a `recompute` block once more; what follows reads its values from here."""
        for node in group:
            if isinstance(node, Repeat):
                self.moved.update(self._loop_again(node, self.available))
            else:
                self._done_again(node)

    def _done_again(self, op: Op) -> Value:
        ins = tuple(self.available(v) for v in op.ins)
        self.moved.update(zip(op.outs, self._copied(op, ins), strict=True))
        return self.moved[op.outs[0]]

    def _copied(self, op: Op, ins: tuple[Value, ...]) -> tuple[Value, ...]:
        outs = self.tape.emitter(op.outs[0]).apply(op.name, ins, dict(op.attrs))
        named = [replace(old, role="activation", follows=source(old)) for old in op.outs]
        for value in named:
            self.builder.place(value, len(self.builder.frames) - 1)
        body = self.builder.frames[-1].body
        last = body[-1]
        assert isinstance(last, Op)
        assert last.outs == outs
        body[-1] = replace(last, outs=tuple(named))
        return tuple(named)

    def _loop_again(
        self, loop: Repeat, read: Callable[[Value], Value]
    ) -> dict[Value, Value]:
        """Emit a copy of a loop; what its results are there. `read` finds values from outside."""
        inits = [read(c.init) for c in loop.carries]
        self.builder.frames.append(Frame(loop.dim))
        new = {c.inside: self._new(c.inside) for c in loop.carries}
        slices = {s.inside: s.outer for s in loop.stacked}

        def look(value: Value) -> Value:
            if value not in new:
                new[value] = self.builder.reach(read(slices.get(value, value)))
            return new[value]

        for node in loop.body:
            if isinstance(node, Repeat):
                new.update(self._loop_again(node, look))
            else:
                copied = self._copied(node, tuple(look(v) for v in node.ins))
                new.update(zip(node.outs, copied, strict=True))
        nexts = [look(c.next) for c in loop.carries]
        kept = [look(c.inside) for c in loop.collected]
        frame = self.builder.frames.pop()
        made = {v: self._new(v) for v in results(loop)}
        carries = tuple(
            Carry(init, new[c.inside], next_, made[c.result])
            for c, init, next_ in zip(loop.carries, inits, nexts, strict=True)
        )
        pairs = zip(kept, loop.collected, strict=True)
        collected = tuple(Collected(inside, made[c.outer]) for inside, c in pairs)
        copy = replace(
            loop, carries=carries, stacked=self.builder.stacks(frame), body=tuple(frame.body),
            collected=collected, phase=self.builder.phase, block=None,
        )  # fmt: skip
        self.builder.frames[-1].body.append(copy)
        self.tape.twins[loop] = copy
        self.tape.again.update(new)
        return made

    def _new(self, value: Value) -> Value:
        """A copy of `value` under the same rules, made in the current block."""
        copy = replace(value, role="activation", follows=source(value))
        self.builder.place(copy, len(self.builder.frames) - 1)
        return copy

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


def feeding(nodes: Sequence[Node], needed: set[Value]) -> set[Value]:
    """Everything that the values `needed` are computed from in a block, and they themselves."""
    needed = set(needed)
    for node in reversed(nodes):
        if needed.isdisjoint(results(node)):
            continue
        if isinstance(node, Op):
            needed.update(node.ins)
            continue
        needed.update(v for c in node.carries for v in (c.init,))
        needed.update(s.outer for s in node.stacked)
        needed.update(v for op in walk(node.body) for v in op.ins)
    return needed
