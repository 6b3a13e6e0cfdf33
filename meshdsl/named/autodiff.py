"""Reverse mode on the named program: the gradient of a scalar, written in the same operators.

The backward pass is more of the same program, so that it is placed, reduced, costed and printed
like everything else. A loop is differentiated by a loop that runs from the last iteration to the
first; the values it reads of the forward one are collected there. Contributions to a gradient are
summed as they are, still partial if so. (Griewank and Walther 2008; for loops as here: JAX scan.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Related, Span, fail
from meshdsl.ir.program import Carry, Collected, Origin
from meshdsl.ir.rewrite import substitute
from meshdsl.ir.types import BOOL, Dim, DType, TensorType
from meshdsl.named.builder import Builder, Frame, Scope
from meshdsl.named.expand import expand
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, walk
from meshdsl.named.prelude import prelude
from meshdsl.ops.opdef import Attrs, lookup


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
    with in_phase(builder, "backward"):
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
            (grad,) = tape.emitter(value, value.source).apply("identity", (grad,), {})
        found[index] = grad
        taken.update([grad] if grad is not None else [])
    return found


def _marked(
    builder: Builder, start: int, found: list[Value | None], wrt: Sequence[Value]
) -> list[Value | None]:
    """The gradients of parameters, marked as such, each a value of its own."""
    body = builder.frames[-1].body
    results = {v for n in body[start:] for v in n.makes}
    new: dict[Value, Value] = {}
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is None or value.role != "param":
            continue
        if grad not in results:
            with in_phase(builder, "backward"):
                scope = Scope({}, {}, prelude(), value.path, value.functions)
                origin = Origin(value)
                grad = builder.emit("identity", (grad,), {}, grad.span, scope, origin=origin)[0]
        for part in (grad, *_parts(body, grad)):
            new[part] = replace(part, role="grad", **value.source.as_gradient)
            builder.place(new[part], len(builder.frames) - 1)
        found[index] = new[grad]
    body[start:] = substitute(body[start:], new)
    return found


def _parts(nodes: Sequence[Node], grad: Value) -> Iterator[Value]:
    """The values that a loop collects as `grad`, if it does: gradients as well, slice by slice."""
    for loop in (n for n in nodes if isinstance(n, NamedLoop)):
        for inside in (c.inside for c in loop.collected if c.outer is grad):
            if any(inside in op.outs for op in loop.body if isinstance(op, NamedOp)):
                yield inside


@contextmanager
def in_phase(builder: Builder, phase: str) -> Iterator[None]:
    """Emit operators in `phase`, outside of any `recompute` block."""
    before = builder.phase, builder.block
    builder.phase, builder.block = phase, None
    try:
        yield
    finally:
        builder.phase, builder.block = before


# --- `grad` in a program ------------------------------------------------------------------------


def with_gradients(program: NamedProgram, diagnostics: Diagnostics) -> NamedProgram:
    """Replace each `grad` by its operators, in order: one may be of the result of another.

    A loss that does not depend on a tensor is MD0292, one that may do so through an earlier
    iteration of a loop MD0293.
    """
    if not any(op.name == "grad" for op in walk(program.body)):
        return program
    return _Gradients(diagnostics).program(program)


class _Gradients:
    """Builds the program anew; `new` are values in place of those of the `grad` nodes."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.builder = Builder(diagnostics)
        self.new: dict[Value, Value] = {}

    def program(self, program: NamedProgram) -> NamedProgram:
        for value in (*program.inputs, *(p.value for p in program.params)):
            self.builder.place(value, 0)
        self._block(program.body)
        outputs = tuple(replace(o, value=self.new.get(o.value, o.value)) for o in program.outputs)
        goal = program.goal
        goal = goal and replace(goal, loss=self.new.get(goal.loss, goal.loss))
        body = tuple(self.builder.frames[0].body)
        updates = tuple(replace(u, new=self.new.get(u.new, u.new)) for u in program.updates)
        return replace(program, body=body, outputs=outputs, goal=goal, updates=updates)

    def _block(self, nodes: tuple[Node, ...]) -> None:
        for old in nodes:
            (node,) = substitute((old,), self.new)
            if isinstance(node, NamedLoop):
                self._loop(node)
            elif node.name == "grad":
                self._grad(node)
            else:
                self.builder.append(node)

    def _loop(self, loop: NamedLoop) -> None:
        if not any(op.name == "grad" for op in walk(loop.body)):
            self.builder.append(loop)
            return
        frame = Frame(loop.dim, stacked={s.outer: s.inside for s in loop.stacked})
        self.builder.frames.append(frame)
        for value in loop.enters:
            self.builder.place(value, len(self.builder.frames) - 1)
        self._block(loop.body)
        self.builder.frames.pop()
        body, stacked = tuple(frame.body), self.builder.stacks(frame)
        (substituted,) = substitute((replace(loop, body=(), stacked=stacked),), self.new)
        assert isinstance(substituted, NamedLoop)
        self.builder.append(replace(substituted, body=body))

    def _grad(self, node: NamedOp) -> None:
        """The gradients of the first operand by the others, named as the program names them."""
        (loss, *wrt), places = node.ins, node.attr("places")
        try:
            for value, place in zip(wrt, places[1:], strict=True):
                self._need_clear(loss, value, place)
            body = self.builder.frames[-1].body
            start, grads = len(body), gradients(self.builder, loss, wrt)
            results = {v for n in body[start:] for v in n.makes}
            for value, grad, place, out in zip(wrt, grads, places[1:], node.outs, strict=True):
                if grad is None:
                    _refuse(value, place, places[0])
                self._named(grad, out, value, start if grad in results else None)
        except DiagnosticError as error:
            self.builder.diagnostics.add(*error.diagnostics)
            for out in node.outs:
                self.builder.place(out, len(self.builder.frames) - 1)

    def _named(self, grad: Value, out: Value, value: Value, start: int | None) -> None:
        """Put `grad` in place of `out`, under that name; `start`: where its operators begin."""
        body = self.builder.frames[-1].body
        if (out.name, out.pins) == (value.source.as_gradient["name"], ()):
            self.new[out] = grad
        elif start is not None and grad.follows is not None:
            self.new[out] = replace(grad, name=out.name, pins=out.pins)
            self.builder.place(self.new[out], len(self.builder.frames) - 1)
            body[start:] = substitute(body[start:], {grad: self.new[out]})
        else:
            self.builder.append(NamedOp("identity", (grad,), (out,), (), out.span))

    def _need_clear(self, loss: Value, value: Value, span: Span) -> None:
        """Raise MD0293 where earlier iterations of a loop may lead from `value` to the loss."""
        carried = self.builder.carried(feeding(self.builder.frames[-1].body, {loss}), value)
        if carried is None:
            return
        message = (
            f"`{value.label}` is made outside of this `repeat`, which carries `{carried.label}`"
        )
        help = "let the loop carry it too (assign to it inside), or take the gradient after it"
        fail("MD0293", message, span, Related(value.span, "made here"), help=help)


def _refuse(value: Value, place: Span, loss: Span) -> NoReturn:
    help = "integers, comparisons and `stop_gradient` pass no gradient on; leave it out"
    message = f"the loss does not depend on `{value.label}`"
    fail("MD0292", message, place, Related(loss, "this loss"), help=help)


# --- blocks and loops ---------------------------------------------------------------------------


FREE = ("cast", "identity")
"""Beside views: operators rematerialised rather than stored, if that stores no operand."""


class BackwardBlock:
    """The backward pass of one block of nodes: of a program, or of the body of a loop."""

    def __init__(
        self,
        tape: Tape,
        nodes: tuple[Node, ...],
        loop: NamedLoop | None = None,
        parent: BackwardBlock | None = None,
    ) -> None:
        self.tape, self.builder = tape, tape.builder
        self.nodes, self.loop, self.parent = nodes, loop, parent
        self.depth = len(tape.builder.frames) - 1
        self.grads: dict[Value, list[Value]] = {}
        self.moved: dict[Value, Value] = {}
        self.made = {v: n for n in nodes if isinstance(n, NamedOp) for v in n.outs}
        self.own = {v for n in nodes for v in n.makes}
        self.slices: dict[Value, Value] = {}
        if loop is not None:
            self.own.update(c.inside for c in loop.carries)
            self.slices = {s.inside: s.outer for s in loop.stacked}

    # --- gradients ---------------------------------------------------------------------------

    def add(self, value: Value, grad: Value) -> None:
        """Add a contribution to the gradient of `value`; a rematerialised copy is its original."""
        original = self.tape.builder.originals.get(value)
        target = value if original is None or original not in self.own else original
        self.grads.setdefault(target, []).append(grad)

    def total(self, value: Value) -> Value | None:
        """The sum of all contributions so far; some dims may be missing."""
        parts = self.grads.pop(value, [])
        if not parts:
            return None
        emit = self.tape.emitter(value, value.source)
        total = parts[0]
        for part in parts[1:]:
            total = emit.emit("add", total, part)
        if value in self.tape.wrt:
            self.add(value, total)
        return total

    def whole(self, value: Value) -> Value:
        """The sum of all contributions, of the type of `value`; zeros where there are none."""
        emit = self.tape.emitter(value, value.source)
        total = self.total(value)
        if total is None:
            return emit.zeros(value.type)
        return emit.full(total, value.type.dims)

    # --- reverse walk over the nodes --------------------------------------------------------

    def reverse(self) -> None:
        """Differentiate the nodes from the last to the first."""
        groups = [(b, list(g)) for b, g in itertools.groupby(self.nodes, lambda n: n.block)]
        for block, group in reversed(groups):
            if not any(v in self.grads for n in group for v in n.makes):
                continue
            if block is not None:
                self._compute_again(group)
            for node in reversed(group):
                if isinstance(node, NamedLoop):
                    self._loop(node)
                else:
                    self._op(node)

    def _op(self, op: NamedOp) -> None:
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
        call = BackwardCall(op, grad, wanted, self.available, self.tape.emitter(op.outs[0]))
        labelled: dict[Value, Value] = {}  # one part may be that of two operands
        for index, part in gradient(call).items():
            if index in wanted:
                followed = call.emitter.follow(labelled.get(part, part), op.ins[index])
                labelled[part] = followed
                self.add(op.ins[index], followed)

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
            self._op(inner)

    # --- forward values in the backward pass --------------------------------------------------

    def available(self, value: Value) -> Value:
        """The value that replaces a value of the forward block here."""
        if value in self.moved:
            return self.moved[value]
        if self.loop is None or self.parent is None:
            return value
        with self.builder.at(self.depth):
            if value in self.own and self._is_free(value):
                return self._done_again(self.made[value])
            if value in self.own:
                replacement = self._collected(value, self.loop, self.parent)
            else:
                replacement = self.parent.available(self.slices.get(value, value))
            self.moved[value] = self.builder.reach(replacement)
        return self.moved[value]

    def _collected(self, value: Value, loop: NamedLoop, parent: BackwardBlock) -> Value:
        """The values of `value` in all iterations of the forward loop, as the parent reads them."""
        outer = self.tape.collect(loop, self.tape.again.get(value, value), self.depth - 1)
        if loop in self.tape.twins:  # it was rematerialised beside the loop that is being built
            return outer
        parent.own.add(outer)
        return parent.available(outer)

    def _is_free(self, value: Value) -> bool:
        """Whether rematerialising the value is free, so that it need not be stored."""
        assert self.loop is not None
        op = self.made.get(value)
        if op is None:
            return False
        if not op.ins or value.type.has(self.loop.dim.name):
            return True
        light = lookup(op.name).view or op.name in FREE
        return light and all(v not in self.own or self._is_free(v) for v in op.ins)

    def _compute_again(self, group: list[Node]) -> None:
        """Rematerialise a `recompute` block; the rest of the backward pass reads these values."""
        for node in group:
            if isinstance(node, NamedLoop):
                self.moved.update(copied_loop(self.tape, node, self.available))
            else:
                self._done_again(node)

    def _done_again(self, op: NamedOp) -> Value:
        ins = tuple(self.available(v) for v in op.ins)
        self.moved.update(zip(op.outs, copied(self.tape, op, ins), strict=True))
        return self.moved[op.outs[0]]

    # --- loops ---------------------------------------------------------------------------------

    def _loop(self, loop: NamedLoop) -> None:
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
        emit = self.tape.emitter(value, value.source)
        return inside, emit.full(emit.emit("add", inside, grad), inside.type.dims)

    def _gradient(self, value: Value, dims: tuple[Dim, ...] | None = None) -> Value:
        """A new value for the gradient of `value`."""
        type_ = TensorType(value.type.dims if dims is None else dims, value.type.dtype)
        plain = Value(type_, value.span, path=value.path, functions=value.functions)
        grad = replace(plain, **value.source.as_gradient)
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


# --- one operator -------------------------------------------------------------------------------


class OpEmitter:
    """Emits operators at the place of `at`, for an `origin`; arithmetic on numbers is folded.

    `numbers` are the constants emitted so far. Results follow `follows`, where it is given.
    """

    def __init__(
        self,
        builder: Builder,
        numbers: dict[Value, float],
        at: Value,
        origin: Origin,
        follows: Value | None,
    ) -> None:
        self.builder, self.numbers, self.follows = builder, numbers, follows
        self.origin = origin
        self.span = at.span
        self.scope = Scope({}, {}, prelude(), at.path, at.functions)
        self.start = len(builder.frames[-1].body)

    def apply(
        self, name: str, ins: tuple[Value, ...], attrs: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """Emit an operator without folding."""
        fields = {} if self.follows is None else self.follows.as_gradient
        about = (self.span, self.scope)
        return self.builder.emit(name, ins, attrs, *about, fields=fields, origin=self.origin)

    def number(self, number: float, dtype: DType) -> Value:
        """Emit a constant without dims."""
        value = self.builder.constant(number, dtype, self.span, self.scope, self.origin)
        self.numbers[value] = number
        return value

    def zeros(self, type_: TensorType) -> Value:
        """A tensor of zeros."""
        return self.apply("zeros", (), {"dims": type_.dims, "dtype": type_.dtype})[0]

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` with all of `dims`, in this order: broadcast over those it lacks."""
        if value.type.dims == dims:
            return value
        name = "transpose" if len(value.type.dims) == len(dims) else "broadcast"
        return self.apply(name, (value,), {"dims": dims})[0]

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator of one result; numbers take the dtype of the first tensor."""
        if name == "constant":
            return self.number(attrs["value"], attrs["dtype"])
        if not operands:
            return self.apply(name, (), attrs)[0]
        dtype = next(v.type.dtype for v in operands if isinstance(v, Value))
        if name == "einsum":
            return self._einsum([self._value(v, dtype) for v in operands], attrs["dims"])
        numbers = [self.numbers.get(v) if isinstance(v, Value) else v for v in operands]
        folded = self._folded(name, numbers, operands)
        if isinstance(folded, Value):
            return folded
        if folded is not None:
            return self.number(folded, attrs.get("dtype", dtype))
        ins = tuple(self._value(v, dtype) for v in operands)
        return self.apply(name, ins, attrs)[0]

    def _value(self, operand: Value | float, dtype: DType) -> Value:
        return operand if isinstance(operand, Value) else self.number(float(operand), dtype)

    def _folded(
        self, name: str, known: list[float | None], operands: tuple[Value | float, ...]
    ) -> Value | float | None:
        """The folded result of a call: an operand, a number, or None where it needs an operator."""
        if name in ("cast", "neg", *_ARITHMETIC) and all(k is not None for k in known):
            return _arithmetic(name, [k for k in known if k is not None])
        if name == "eq" and all(k is not None for k in known):
            (same,) = self.apply("constant", (), {"value": known[0] == known[1], "dtype": BOOL})
            self.numbers[same] = float(known[0] == known[1])
            return same
        if name == "where" and known[0] is not None:
            return operands[1 if known[0] else 2]
        for one, other in {"mul": ((0, 1), (1, 0)), "div": ((1, 0),)}.get(name, ()):
            if known[one] == 1 and isinstance(operand := operands[other], Value):
                return operand
        return None

    def _einsum(self, operands: list[Value], dims: tuple[Dim, ...]) -> Value:
        """A contraction; the numbers among its operands are multiplied onto the result."""
        tensors = [v for v in operands if v not in self.numbers]
        number = math.prod(self.numbers[v] for v in operands if v in self.numbers)
        if not tensors:
            return self.number(number, operands[0].type.dtype)
        product = tensors[0]
        if len(tensors) > 1 or len(product.type.dims) != len(dims):
            product = self.apply("einsum", tuple(tensors), {"dims": dims})[0]
        return self.emit("mul", product, number)

    # --- labels ------------------------------------------------------------------------------

    def follow(self, value: Value, target: Value) -> Value:
        """`value` as the gradient of `target`: bound by its rules, if it was made here."""
        body = self.builder.frames[-1].body
        results = {v for n in body[self.start :] if isinstance(n, NamedOp) for v in n.outs}
        if value not in results or value.follows is not None or value in self.numbers:
            return value
        labelled = replace(value, **target.source.as_gradient)
        self.builder.place(labelled, len(self.builder.frames) - 1)
        body[self.start :] = substitute(body[self.start :], {value: labelled})
        return labelled


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else math.nan,
    "square": lambda a: a * a,
}


def _arithmetic(name: str, numbers: list[float]) -> float | None:
    if name in ("cast", "neg"):
        return numbers[0] if name == "cast" else -numbers[0]
    number = _ARITHMETIC[name](*numbers)
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A `Backward` (see `ops/opdef.py`) for one operator of a program."""

    op: NamedOp
    grad: Value
    wants: frozenset[int]
    available: Callable[[Value], Value]
    emitter: OpEmitter

    @property
    def ins(self) -> tuple[TensorType, ...]:
        """Global types of the operands."""
        return tuple(v.type for v in self.op.ins)

    @property
    def outs(self) -> tuple[TensorType, ...]:
        """Global types of the results."""
        return tuple(v.type for v in self.op.outs)

    @property
    def attrs(self) -> Attrs:
        """The attributes of the operator."""
        return dict(self.op.attrs)

    def wanted(self, index: int) -> bool:
        """Whether the gradient of operand `index` is used."""
        return index in self.wants

    def operand(self, index: int) -> Value:
        """Operand `index` as the backward pass reads it."""
        return self.available(self.op.ins[index])

    def result(self, index: int = 0) -> Value:
        """Result `index` as the backward pass reads it."""
        return self.available(self.op.outs[index])

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator of one result."""
        return self.emitter.emit(name, *operands, **attrs)

    def emit_all(self, name: str, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator of several results."""
        return self.emitter.apply(name, operands, attrs)

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` broadcast to `dims`."""
        return self.emitter.full(value, dims)

    def sized(self, value: Value, index: int) -> Value:
        """`value`, given per element of the result, summed and scaled for operand `index`."""
        type_, every = self.op.ins[index].type, self.op.out.type
        extra = tuple(d for d in value.type.dims if not type_.has(d.name))
        lost = [d for d in every.dims if not type_.has(d.name) and not value.type.has(d.name)]
        if extra:
            value = self.emit("sum", value, dims=extra)
        return self.emit("mul", value, float(math.prod(d.size for d in lost)))


# --- state shared by the blocks of one backward pass ----------------------------------------


class Tape:
    """State shared by the blocks of one backward pass.

    `inside` has the composite's result for each value of its definition, which the program does not
    have.
    """

    def __init__(self, builder: Builder, active: set[Value], wrt: frozenset[Value]) -> None:
        self.builder, self.active, self.wrt = builder, active, wrt
        self.numbers: dict[Value, float] = {}
        self.collected: dict[NamedLoop, dict[Value, Value]] = {}
        self.twins: dict[NamedLoop, NamedLoop] = {}
        self.again: dict[Value, Value] = {}
        self.inside: dict[Value, Value] = {}

    def origin(self, value: Value, is_copy: bool = False) -> Origin:
        """The origin of what is made for the gradient of a value, or to have it once more."""
        return Origin(self.inside.get(value, value), is_copy)

    def emitter(self, at: Value, follows: Value | None = None) -> OpEmitter:
        """An emitter for the gradient of `at`, at its place in the source."""
        return OpEmitter(self.builder, self.numbers, at, self.origin(at), follows)

    def collect(self, loop: NamedLoop, value: Value, depth: int) -> Value:
        """All iterations' `value` of a forward loop, as a tensor outside it, `depth` loops deep.

        A value that is collected anyway, as for an earlier gradient or by another name, is not
        stored twice.
        """
        loop = self.twins.get(loop, loop)
        collections = self.collected.setdefault(loop, _collections(loop))
        if value not in collections:
            type_ = TensorType((loop.dim, *value.type.dims), value.type.dtype)
            collections[value] = replace(value, type=type_, role="activation", follows=value.source)
        self.builder.place(collections[value], depth)
        return collections[value]

    def with_collected(self, nodes: tuple[Node, ...]) -> list[Node]:
        """`nodes` with the loops that collect the requested values."""
        return [self._collecting(n) if isinstance(n, NamedLoop) else n for n in nodes]

    def _collecting(self, loop: NamedLoop) -> NamedLoop:
        there = {c.outer for c in loop.collected}
        collections = self.collected.get(loop, {}).items()
        more = (Collected(inside, outer) for inside, outer in collections if outer not in there)
        body = tuple(self.with_collected(loop.body))
        return replace(loop, body=body, collected=(*loop.collected, *more))


def _collections(loop: NamedLoop) -> dict[Value, Value]:
    """What a loop collects, by the value in an iteration; a copy of a value stands for it too."""
    collections = {c.inside: c.outer for c in loop.collected}
    for op in reversed(loop.body):
        if isinstance(op, NamedOp) and op.name == "identity" and op.out in collections:
            collections.setdefault(op.ins[0], collections[op.out])
    return collections


def saving(
    builder: Builder, nodes: tuple[Node, ...], alive: set[Value], depth: int
) -> tuple[Node, ...]:
    """`nodes` with operators in `alive` that also yield what their gradients read (`saving`)."""
    rewritten: list[Node] = []
    for node in nodes:
        if isinstance(node, NamedLoop):
            rewritten.append(replace(node, body=saving(builder, node.body, alive, depth + 1)))
        elif (name := lookup(node.name).saving) is None or alive.isdisjoint(node.outs):
            rewritten.append(node)
        else:
            rewritten.append(_saving(node, name))
            for value in rewritten[-1].makes[1:]:
                builder.place(value, depth)
                alive.add(value)
    return tuple(rewritten)


def _saving(op: NamedOp, name: str) -> NamedOp:
    (_, *types) = lookup(name).infer(tuple(v.type for v in op.ins), dict(op.attrs))
    plain: dict[str, Any] = {"name": None, "pins": (), "follows": None, "declared": None}
    return replace(op, name=name, outs=(op.out, *(replace(op.out, type=t, **plain) for t in types)))


# --- activity: which values depend on which -----------------------------------------------------


NOTHING: Mapping[Value, Value] = MappingProxyType({})


def active(
    nodes: Sequence[Node], seeds: set[Value], originals: Mapping[Value, Value] = NOTHING
) -> set[Value]:
    """Floats that depend on `seeds` in a differentiable way, those inside loops too.

    A rematerialised copy depends on the seeds as its original in `originals` does.
    """
    dependent = {v for v in seeds if v.type.dtype.kind == "float"}
    for node in nodes:
        if isinstance(node, NamedLoop):
            dependent |= _active_loop(node, dependent)
        elif is_differentiable(node) and not dependent.isdisjoint(node.ins):
            dependent.update(v for v in node.outs if v.type.dtype.kind == "float")
        dependent.update(v for v in node.makes if originals.get(v) in dependent)
    return dependent


def is_differentiable(op: NamedOp) -> bool:
    """Whether the operator has a gradient: its own rule, or those of its definition."""
    opdef = lookup(op.name)
    return opdef.gradient is not None or opdef.composite


def _active_loop(loop: NamedLoop, outside: set[Value]) -> set[Value]:
    reached = outside | {s.inside for s in loop.stacked if s.outer in outside}
    reached |= {c.inside for c in loop.carries if c.init in outside}
    while True:
        inner = active(loop.body, reached)
        more = {c.inside for c in loop.carries if c.next in inner} - inner
        if not more:
            break
        reached = inner | more
    inner |= {c.result for c in loop.carries if c.next in inner}
    return inner | {c.outer for c in loop.collected if c.inside in inner}


def feeding(nodes: Sequence[Node], needed: set[Value]) -> set[Value]:
    """Every value that the values `needed` are computed from in a block, and they themselves."""
    needed = set(needed)
    for node in reversed(nodes):
        if needed.isdisjoint(node.makes):
            continue
        if isinstance(node, NamedOp):
            needed.update(node.ins)
            continue
        needed.update(v for c in node.carries for v in (c.init,))
        needed.update(s.outer for s in node.stacked)
        needed.update(v for op in walk(node.body) for v in op.ins)
    return needed


# --- rematerialisation --------------------------------------------------------------------------


Read = Callable[[Value], Value]
"""Maps a value of the forward pass to its replacement in the backward pass."""


def copied(tape: Tape, op: NamedOp, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """Emit a copy of `op` on `ins`; its results are bound by the same rules."""
    tape.emitter(op.outs[0]).apply(op.name, ins, dict(op.attrs))
    outs = tuple(_copy(tape, value) for value in op.outs)
    body = tape.builder.frames[-1].body
    last = body[-1]
    assert isinstance(last, NamedOp)
    body[-1] = replace(last, outs=outs, origin=tape.origin(op.outs[0], is_copy=True))
    return outs


def copied_loop(tape: Tape, loop: NamedLoop, read: Read) -> dict[Value, Value]:
    """Emit a copy of a loop; the new value of each of its results."""
    return _Copy(tape, loop, read).made()


def _copy(tape: Tape, value: Value) -> Value:
    """A new value under the same rules, made in the current block."""
    copy = replace(value, role="activation", follows=value.source)
    tape.builder.originals[copy] = tape.builder.originals.get(value, value)
    tape.builder.place(copy, len(tape.builder.frames) - 1)
    return copy


class _Copy:
    """One loop being copied."""

    def __init__(self, tape: Tape, loop: NamedLoop, read: Read) -> None:
        self.tape, self.builder, self.loop, self.read = tape, tape.builder, loop, read
        self.slices = {s.inside: s.outer for s in loop.stacked}
        self.new: dict[Value, Value] = {}
        self.depth = len(tape.builder.frames)

    def made(self) -> dict[Value, Value]:
        """Emit the copy; the results of the original, mapped to those of the copy."""
        loop = self.loop
        inits = [self.read(c.init) for c in loop.carries]
        self.builder.frames.append(Frame(loop.dim))
        self.new = {c.inside: _copy(self.tape, c.inside) for c in loop.carries}
        for node in loop.body:
            if isinstance(node, NamedLoop):
                self.new.update(copied_loop(self.tape, node, self.look))
            else:
                outs = copied(self.tape, node, tuple(map(self.look, node.ins)))
                self.new.update(zip(node.outs, outs, strict=True))
        nexts = [self.look(c.next) for c in loop.carries]
        collected = [self.look(c.inside) for c in loop.collected]
        frame = self.builder.frames.pop()
        results = {value: _copy(self.tape, value) for value in loop.makes}
        carries = tuple(
            Carry(init, self.new[c.inside], next_, results[c.result])
            for c, init, next_ in zip(loop.carries, inits, nexts, strict=True)
        )
        pairs = zip(collected, loop.collected, strict=True)
        copy = replace(
            loop,
            carries=carries,
            stacked=self.builder.stacks(frame),
            body=tuple(frame.body),
            collected=tuple(Collected(inside, results[c.outer]) for inside, c in pairs),
            phase=self.builder.phase,
            block=None,
            origin=self.tape.origin(loop.makes[0], is_copy=True),
        )
        self.builder.frames[-1].body.append(copy)
        self.tape.twins[loop] = copy
        self.tape.again.update(self.new)
        return results

    def look(self, value: Value) -> Value:
        """The replacement of a value that the body reads."""
        if value not in self.new:
            with self.builder.at(self.depth):
                self.new[value] = self.builder.reach(self.read(self.slices.get(value, value)))
        return self.new[value]
