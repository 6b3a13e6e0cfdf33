"""Reverse mode on the named program: the gradient of a scalar, written in the same operators.

The backward pass is more of the same program, so that it is placed, reduced, costed and printed
like everything else. A loop is differentiated by a loop that runs from the last iteration to the
first; the values it reads of the forward one are collected there. Contributions to a gradient are
summed as they are, still partial if so. (Griewank and Walther 2008; for loops as here: JAX scan.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.ir.program import Carry, Collected, Origin
from meshdsl.ir.rewrite import Visitor, feeding, makers, substitute
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.activity import active
from meshdsl.named.backward_call import BackwardCall
from meshdsl.named.builder import Builder, Frame
from meshdsl.named.emit import Emit
from meshdsl.named.expand import expand
from meshdsl.named.ir import NamedLoop, NamedOp, Node, Value
from meshdsl.named.rematerialisation import copied
from meshdsl.named.tape import Tape, saving
from meshdsl.ops.opdef import lookup


def gradients(
    builder: Builder, loss: Value, wrt: Sequence[Value], seed: Value | None = None
) -> list[Value | None]:
    """The gradients of `loss` by the values `wrt`, emitted at the end of the current block.

    Differentiates the nodes of the block so far. Each gradient has the type of its tensor; None
    where the loss does not depend on it. `seed` is the cotangent of the loss, 1 by default.
    """
    return pulled_back(builder, [(loss, seed)], wrt)


def pulled_back(
    builder: Builder, seeds: Sequence[tuple[Value, Value | None]], wrt: Sequence[Value]
) -> list[Value | None]:
    """The same for a loss that depends on several values: pairs of a value and its cotangent."""
    nodes = tuple(builder.frames[-1].body)
    alive = active(nodes, set(wrt), builder.originals)
    nodes = saving(builder, nodes, alive, len(builder.frames) - 1)
    builder.frames[-1].body[:] = nodes
    tape = Tape(builder, alive, frozenset(wrt))
    start = len(builder.frames[-1].body)
    with builder.in_phase("backward"):
        block = BackwardBlock(tape, nodes)
        for value, seed in seeds:
            emit = tape.emitter(value)
            block.add(value, seed if seed is not None else emit.number(1.0, value.type.dtype))
        block.reverse()
        grads = _distinct(tape, [block.whole(v) if v in block.grads else None for v in wrt], wrt)
    body = builder.frames[-1].body
    body[:] = tape.with_collected(tuple(body))
    return _marked(builder, start, grads, wrt)


def _distinct(tape: Tape, found: list[Value | None], wrt: Sequence[Value]) -> list[Value | None]:
    """A gradient of its own for each tensor: a shared one is named for the first.

    A copy of a forward value is not used as a gradient either.
    """
    taken: set[Value] = set()
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is not None and (grad in taken or grad in tape.builder.originals):
            grad = tape.emitter(value, value.source)("identity", grad)
        found[index] = grad
        taken.update([grad] if grad is not None else [])
    return found


def _marked(
    builder: Builder, start: int, found: list[Value | None], wrt: Sequence[Value]
) -> list[Value | None]:
    """The gradients of parameters, marked as such, each a value of its own."""
    body = builder.frames[-1].body
    results = {v for n in body[start:] for v in n.makes}
    collecting = {c.outer: node for node in body for c in node.collected}
    new: dict[Value, Value] = {}
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is None or value.role != "param":
            continue
        if grad not in results:
            emit = Emit(builder, grad.span, value, origin=Origin(value), phase="backward")
            grad = emit("identity", grad)
        for part in (grad, *_parts(collecting.get(grad), grad)):
            new[part] = replace(part, role="grad", **value.source.as_gradient)
            builder.place(new[part], len(builder.frames) - 1)
        found[index] = new[grad]
    body[start:] = substitute(body[start:], new)
    return found


def _parts(loop: Node | None, grad: Value) -> Iterator[Value]:
    """The values that a loop collects as `grad`, if one does: gradients as well, slice by slice."""
    if loop is not None:
        results = makers(loop.body)
        yield from (c.inside for c in loop.collected if c.outer is grad and c.inside in results)


# --- blocks and loops ---------------------------------------------------------------------------


FREE = ("cast", "identity")
"""Beside views: operators rematerialised rather than stored, if that stores no operand."""


class BackwardBlock(Visitor):
    """The backward pass of one block of nodes: of a program, or of the body of a loop."""

    def __init__(
        self,
        tape: Tape,
        nodes: tuple[Node, ...],
        loop: NamedLoop | None = None,
        parent: BackwardBlock | None = None,
    ) -> None:
        self.tape, self.builder = tape, tape.builder
        self.nodes, self.forward, self.parent = nodes, loop, parent
        self.depth = len(tape.builder.frames) - 1
        self.grads: dict[Value, list[Value]] = {}
        self.moved: dict[Value, Value] = {}
        self.made: dict[Value, NamedOp] = makers(nodes)
        self.own = {v for n in nodes for v in n.makes}
        self.slices: dict[Value, Value] = {}
        # The `recompute` block right before the operators being differentiated, by its values.
        self.block_before: dict[Value, list[Node]] = {}
        self.computed_again: set[Value] = set()
        self.kept: set[Value] = set()
        self.carried = {c.inside for c in loop.carries} if loop is not None else set()
        if loop is not None:
            self.own |= self.carried
            self.slices = {s.inside: s.outer for s in loop.stacked}
            self.kept.update(c.inside for c in loop.collected)

    # --- gradients ---------------------------------------------------------------------------

    def add(self, value: Value, grad: Value) -> None:
        """Add a contribution to the gradient of `value`; a rematerialised copy is its original."""
        original = self.tape.builder.originals.get(value)
        target = value if original is None or original not in self.own else original
        self.grads.setdefault(target, []).append(grad)

    def total(self, value: Value) -> Value | None:
        """The sum of all contributions so far; some dims may be missing.

        One with more dims comes first: the sum has them in its order, not in that of fewer.
        """
        parts = self.grads.pop(value, [])
        if not parts:
            return None
        emit = self.tape.emitter(value, value.source)
        total = parts[0]
        for part in parts[1:]:
            is_wider = len(part.type.dims) > len(total.type.dims)
            both = (part, total) if is_wider else (total, part)
            total = self._beside(part, emit, value)("add", *both)
        if value in self.tape.wrt:
            self.add(value, total)
        return total

    def _beside(self, part: Value, emit: Emit, value: Value) -> Emit:
        """What emits the sum with a contribution to the gradient of `value`.

        What a loop carries is made in front of it: there the sum is at the contribution's place.
        """
        return replace(emit, span=part.span) if value in self.carried else emit

    def whole(self, value: Value) -> Value:
        """The sum of all contributions, of the type of `value`; zeros where there are none."""
        emit = self.tape.emitter(value, value.source)
        total = self.total(value)
        if total is None:
            return emit.zeros(value.type)
        return emit.full(total, value.type.dims)

    # --- reverse walk over the nodes --------------------------------------------------------

    def reverse(self) -> None:
        """Differentiate the nodes from the last to the first.

        A `recompute` block is computed again before its own backward pass, or, where the operators
        right after it read its values for their gradients, before that of these. Operators further
        on read what is kept: all that the block computes would be live until its turn.
        """
        groups = [(b, list(g)) for b, g in itertools.groupby(self.nodes, lambda n: n.block)]
        before: list[tuple[int | None, list[Node]]] = [(None, []), *groups[:-1]]
        pairs = [*zip(groups, before, strict=True)] if groups else []
        for (block, group), (block_before, group_before) in reversed(pairs):
            if not any(v in self.grads for n in group for v in n.makes):
                continue
            follows = block is None and block_before is not None
            values = (v for n in group_before for v in n.makes) if follows else ()
            self.block_before = dict.fromkeys(values, group_before)
            if block is not None:
                self._compute_again(group)
            for node in reversed(group):
                self.visit(node)

    def op(self, op: NamedOp) -> None:
        """Add the gradients of an operator's operands, where they are wanted."""
        wanted = frozenset(i for i, v in enumerate(op.ins) if v in self.tape.active)
        if not wanted or not any(v in self.grads for v in op.outs):
            return
        gradient = lookup(op.name).gradient
        if gradient is None:
            self._defined(op)
            return
        if any(v in self.grads for v in op.outs[1:]):  # what was saved for a gradient has one
            self._defined(op)
            return
        grad = self.total(op.outs[0])
        assert grad is not None
        start = len(self.builder.frames[-1].body)
        call = BackwardCall(op, grad, wanted, self.available, self.tape.emitter(op.outs[0]))
        labelled: dict[Value, Value] = {}  # one part may be that of two operands
        for index, part in gradient(call).items():
            if index in wanted:
                followed = self._labelled(labelled.get(part, part), op.ins[index], start)
                labelled[part] = followed
                self.add(op.ins[index], followed)

    def _labelled(self, value: Value, target: Value, start: int) -> Value:
        """`value` as the gradient of `target`: bound by its rules, if made from `start` on.

        Copies of the forward pass among these nodes read no gradient, and stay what they are: the
        tape knows them by identity.
        """
        body = self.builder.frames[-1].body
        is_bound = value.rules_from is not None or value in self.tape.numbers
        if is_bound or value not in makers(n for n in body[start:] if not _is_copy(n)):
            return value
        labelled = replace(value, **target.source.as_gradient)
        self.builder.place(labelled, len(self.builder.frames) - 1)
        new = {value: labelled}
        body[start:] = [n if _is_copy(n) else substitute((n,), new)[0] for n in body[start:]]
        return labelled

    def _defined(self, op: NamedOp) -> None:
        """Differentiate a composite by its definition in the prelude, rematerialised for that."""
        if not lookup(op.name).composite:
            return
        expansion = expand(op, {})
        assert expansion is not None
        self.tape.active |= active(expansion.ops, self.tape.active)
        inside = (v for inner in expansion.ops for v in inner.outs)
        self.tape.inside.update(dict.fromkeys(inside, self.tape.origin(op.outs[0]).of))
        for inner in expansion.ops:
            self.made.update({v: inner for v in inner.outs})
            self.own.update(inner.outs)
            self._done_again(inner)
        for inner in reversed(expansion.ops):
            self.op(inner)

    # --- forward values in the backward pass --------------------------------------------------

    def available(self, value: Value) -> Value:
        """The value that replaces a value of the forward block here."""
        if value in self.block_before and value not in self.kept:
            self._compute_again(self.block_before[value])
        return self.stored(value)

    def stored(self, value: Value) -> Value:
        """The same, of a block that is not computed again for that."""
        if value in self.moved:
            return self.moved[value]
        self.kept.add(value)
        if self.forward is None or self.parent is None:
            return value
        with self.builder.at(self.depth):
            if value in self.own and self._is_free(value):
                return self._done_again(self.made[value])
            if value in self.own:
                replacement = self._collected(value, self.forward, self.parent)
            else:
                replacement = self.parent.stored(self.slices.get(value, value))
            self.moved[value] = self.builder.reach(replacement)
        return self.moved[value]

    def _collected(self, value: Value, loop: NamedLoop, parent: BackwardBlock) -> Value:
        """The values of `value` in all iterations of the forward loop, as the parent reads them."""
        outer = self.tape.collect(loop, self.tape.again.get(value, value), self.depth - 1)
        if loop in self.tape.twins:  # it was rematerialised beside the loop that is being built
            return outer
        parent.own.add(outer)
        return parent.stored(outer)

    def _is_free(self, value: Value) -> bool:
        """Whether rematerialising the value is free, so that it need not be stored."""
        assert self.forward is not None
        op = self.made.get(value)
        if op is None:
            return False
        if not op.ins or value.type.has(self.forward.dim.name):
            return True
        narrow, wide = op.ins[0].type.dtype, value.type.dtype
        if op.name == "cast" and narrow.kind == wide.kind == "float" and narrow.bytes < wide.bytes:
            return True  # what it widens has the same numbers in less memory
        light = lookup(op.name).view or op.name in FREE
        return light and all(
            v not in self.own or v in self.block_before or self._is_free(v) for v in op.ins
        )

    def _compute_again(self, group: list[Node]) -> None:
        """Rematerialise a `recompute` block; the rest of the backward pass reads these values."""
        values = {v for node in group for v in node.makes}
        if not self.computed_again.isdisjoint(values):
            return
        self.computed_again |= values
        for node in group:
            self.moved.update(copied(self.tape, node, self.available))

    def _done_again(self, op: NamedOp) -> Value:
        self.moved.update(copied(self.tape, op, self.available))
        return self.moved[op.outs[0]]

    # --- loops ---------------------------------------------------------------------------------

    def loop(self, loop: NamedLoop) -> None:
        """Append a loop from the last iteration to the first that carries the cotangents."""
        if not any(v in self.grads for v in loop.makes):
            return
        carries = self._reached(loop)
        inits = [self.whole(c.result) for c in carries]
        seeds = [(c.inside, self.total(c.outer)) for c in loop.collected if c.outer in self.grads]
        self.builder.frames.append(Frame(loop.dim))
        child = BackwardBlock(self.tape, loop.body, loop, self)
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
        self,
        loop: NamedLoop,
        child: BackwardBlock,
        carried: list[tuple[Carry[Value], Value, Value, Value]],
    ) -> None:
        """Append the backward loop, and pass the gradients of the forward loop's operands on."""
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
            init = self._begun(value, inside.type)
            result = self._gradient(value, inside.type.dims)
            carries.append(Carry(init, inside, next_, result))
            self.add(value, result)
        for carry, init, inside, next_ in carried:
            result = self._gradient(carry.init)
            carries.append(Carry(init, inside, next_, result))
            self.add(carry.init, result)
        backward = NamedLoop(
            loop.dim, tuple(carries), self.builder.stacks(frame), tuple(frame.body), loop.span,
            tuple(collected), not loop.reverse, self.builder.phase,
            origin=self.tape.origin(loop.makes[0]),
        )  # fmt: skip
        self.builder.frames[-1].body.append(backward)

    def _begun(self, value: Value, type_: TensorType) -> Value:
        """What the sum over the iterations begins with: the gradient of what is behind the loop.

        That of a parameter is added behind: a device may have its addends at other times.
        """
        emit = self.tape.emitter(value, value.source)
        behind = None if value in self.tape.wrt else self.total(value)
        if behind is not None and {*behind.type.dims} <= {*type_.dims}:
            return emit.full(behind, type_.dims)
        if behind is not None:
            self.add(value, behind)
        return emit.zeros(type_)

    def summed(self, value: Value) -> tuple[Value, Value]:
        """The gradient of an outer value, summed over the iterations: carry and next."""
        grad = self.total(value)
        assert grad is not None
        inside = self._gradient(value, grad.type.dims)
        emit = replace(self.tape.emitter(value, value.source), span=grad.span)
        return inside, emit.full(emit("add", inside, grad), inside.type.dims)

    def _gradient(self, value: Value, dims: tuple[Dim, ...] | None = None) -> Value:
        """A new value for the gradient of `value`."""
        type_ = TensorType(value.type.dims if dims is None else dims, value.type.dtype)
        grad = Value(type_, value.span, **value.source.as_gradient)
        self.builder.place(grad, len(self.builder.frames) - 1)
        return grad

    def _reached(self, loop: NamedLoop) -> list[Carry[Value]]:
        """The carries whose cotangents are carried: those that reach a value with a gradient."""
        reached = {c for c in loop.carries if c.result in self.grads}
        ends = {c.inside for c in loop.collected if c.outer in self.grads}
        while True:
            needed = feeding(loop.body, {c.next for c in reached} | ends)
            more = {c for c in loop.carries if c.inside in needed} | reached
            if more == reached:
                return [c for c in loop.carries if c in reached and c.inside in self.tape.active]
            reached = more


def _is_copy(node: Node) -> bool:
    return node.origin is not None and node.origin.is_copy
