"""`accumulate=K`: a training step reads K batches in a loop and adds their gradients up.

What the program assigns (`:=`) is assigned once, of the means over all batches; with `each`, by
each batch, one after the other (`one_batch.py`).

The sum is carried through the loop as it is, partial where it is: one reduction, not K. It is in
f32 at least, also where the gradients of a batch are narrower: in bf16 a sum of equal terms stops
growing at the 257th. (As Megatron's `main_grad`, and FSDP2's `reduce_dtype=torch.float32`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from meshdsl.ir.program import Carry, Collected, Origin, Stacked
from meshdsl.ir.rewrite import substitute
from meshdsl.ir.types import F32, Dim, DType
from meshdsl.named.autodiff import gradients
from meshdsl.named.builder import Builder, Frame
from meshdsl.named.emit import Emit, emit_at
from meshdsl.named.ir import Goal, NamedLoop, NamedProgram, Node, Output, Update, Value, walk
from meshdsl.named.one_batch import once
from meshdsl.named.step_numbers import with_step_numbers
from meshdsl.records import dataclass

DIM = "accumulate"
"""The dim that inputs gain, first of all; so do the outputs that are no scalars."""


def accumulated(
    program: NamedProgram, builder: Builder, count: int
) -> tuple[NamedProgram, dict[Value, Value]]:
    """The program in a loop over `count` batches, and the mean gradient of every parameter.

    Scalars among its outputs become means as well, the loss among them.
    """
    assert program.goal is not None
    dim = _dim(program, count)
    if program.goal.optimizer.option("each") or program.goal.taken is not None:
        return _Loop(*_apart(program), builder, dim, program.learned).build()
    return _Loop(program, {}, builder, dim, program.learned).build_as_one()


def _apart(program: NamedProgram) -> tuple[NamedProgram, dict[Value, Value]]:
    """The program of one batch, and the value there of each state that the program assigns."""
    states = {u.old: replace(u.old, role="activation", pins=()) for u in program.updates}
    outputs = tuple(replace(o, value=states.get(o.value, o.value)) for o in program.outputs)
    body = tuple(substitute(program.body, states))
    return replace(program, body=body, outputs=outputs), states


def _dim(program: NamedProgram, count: int) -> Dim:
    values = [*program.inputs, *(p.value for p in program.params)]
    values += [v for op in walk(program.body) for v in op.outs]
    taken = {name for v in values for name in v.type.names}
    name = DIM
    while name in taken:
        name += "_"
    return Dim(name, count)


@dataclass(slots=True)
class _Loop:
    program: NamedProgram
    states: Mapping[Value, Value]
    builder: Builder
    dim: Dim
    params: tuple[Value, ...]
    kept: list[Carry[Value]] = field(default_factory=list)
    carries: list[Carry[Value]] = field(default_factory=list)
    collected: list[Collected[Value]] = field(default_factory=list)
    ahead: tuple[Node, ...] = ()
    averaged: tuple[Value, ...] = ()
    totals: dict[Value, Value] = field(default_factory=dict)

    def build_as_one(self) -> tuple[NamedProgram, dict[Value, Value]]:
        """The step whose batches are one: its numbers before them, assignments after them."""
        inputs = {v: self._widened(v) for v in self.program.inputs}
        ahead = with_step_numbers(self.program, inputs, self.dim)
        without_updates = once(ahead.program)
        self.ahead, self.program = ahead.nodes, without_updates.program
        self.averaged = without_updates.means
        program, grads = self.build(tuple(inputs.values()))
        body = self.builder.frames[-1].body
        new = {v: self._mean(total, self.dim.size) for v, total in self.totals.items()}
        new = {v: self._cast_to(mean, v) for v, mean in new.items()}
        body += substitute(without_updates.later, new)
        for value in (v for n in without_updates.later for v in n.makes):
            self.builder.place(value, 0)
        updates = tuple(Update(u.old, new.get(u.new, u.new)) for u in without_updates.updates)
        return replace(program, updates=updates, body=tuple(body)), grads

    def _cast_to(self, mean: Value, value: Value) -> Value:
        return emit_at(self.builder, value, phase="forward").cast(mean, value.type.dtype)

    def build(self, inputs: tuple[Value, ...] = ()) -> tuple[NamedProgram, dict[Value, Value]]:
        """The step, and the mean gradient of every parameter; `inputs` are those of all batches."""
        program, builder = self.program, self.builder
        assert program.goal is not None
        inputs = inputs or tuple(self._widened(v) for v in program.inputs)
        for value in (*inputs, *(p.value for p in program.params)):
            builder.place(value, 0)
        builder.frames[-1].body += self.ahead
        for value in (v for n in self.ahead for v in n.makes):
            builder.place(value, 0)
        builder.frames.append(Frame(self.dim))
        builder.adopt(program)
        params = self.params
        for value in self.states.values():
            builder.place(value, 1)
        grads = goal_gradients(builder, program.goal, params)
        sums = {p: self._sum(p, g, "grad") for p, g in grads.items()}
        outputs = {o: self._output(o) for o in program.outputs}
        self.totals = {v: self._sum(v, v, "activation") for v in self.averaged}
        updates = tuple(self._kept(u) for u in program.updates)
        self._close(inputs)
        taken = program.goal.taken or self.dim.size
        means = {p: self._mean(v, taken, Origin(p)) for p, v in sums.items()}
        return replace(self._finish(inputs, outputs), updates=updates), means

    def _close(self, inputs: tuple[Value, ...]) -> None:
        """Append the loop, which takes a slice of every input."""
        assert self.program.goal is not None
        body = tuple(self.builder.frames.pop().body)
        self._zeros()
        stacked = tuple(Stacked(a, b) for a, b in zip(inputs, self.program.inputs, strict=True))
        carries = (*self.carries, *self.kept)
        parts = (carries, stacked, body, self.program.goal.span, tuple(self.collected))
        self.builder.frames[-1].body.append(NamedLoop(self.dim, *parts))

    def _finish(self, inputs: tuple[Value, ...], outputs: dict[Output, Value]) -> NamedProgram:
        """The program that returns the means of scalars, and every iteration of other outputs."""
        assert self.program.goal is not None
        finished = ((o, self._finished(v, o.value.type.dtype)) for o, v in outputs.items())
        returned = {o: replace(o, value=v) for o, v in finished}
        params = {param.value for param in self.program.params}
        means = {o.value: new.value for o, new in returned.items() if o.value not in params}
        goal = self.program.goal.on(lambda v: means.get(v, v))
        body, values = tuple(self.builder.frames[-1].body), tuple(returned.values())
        return replace(self.program, inputs=inputs, outputs=values, body=body, goal=goal)

    def _widened(self, value: Value) -> Value:
        """An input with one batch after the other along a new dim."""
        return replace(value, type=value.type.along(self.dim), declared=value.positions)

    def _sum(self, of: Value, part: Value, role: str) -> Value:
        """The sum of `part` over the iterations; `of` is `part`, or the tensor of this gradient."""
        fields = of.as_gradient if role == "grad" else {"name": None}
        origin = Origin(of) if role == "grad" else None
        type_ = replace(part.type, dtype=summed(part.type.dtype))
        inside = replace(part, type=type_, role="activation", **fields)
        self.builder.place(inside, 1)
        phase = "backward" if role == "grad" else "forward"
        emit = emit_at(self.builder, part, fields, origin, phase)
        next_ = emit("add", inside, emit.cast(part, type_.dtype))
        init, result = (replace(inside) for _ in range(2))
        for value in (init, result):
            self.builder.place(value, 0)
        self.carries.append(Carry(init, inside, next_, result))
        return result

    def _kept(self, update: Update) -> Update:
        """The update of a state by its value after the last batch."""
        inside = self.states[update.old]
        new = self.states.get(update.new, update.new)
        result = replace(inside)
        self.builder.place(result, 0)
        self.kept.append(Carry(update.old, inside, new, result))
        return Update(update.old, result)

    def _output(self, output: Output) -> Value:
        value = output.value
        if not value.type.dims and value.type.dtype.kind == "float":
            return self._sum(value, value, "activation")
        outer = self._widened(value)
        self.builder.place(outer, 0)
        self.collected.append(Collected(value, outer))
        return outer

    def _zeros(self) -> None:
        """Initialise the sums with zeros."""
        for index, carry in enumerate(self.carries):
            fields = {"rules_from": carry.inside.rules_from}
            emit = Emit(self.builder, carry.inside.span, None, fields)
            self.carries[index] = replace(carry, init=emit.zeros(carry.inside.type))

    def _finished(self, value: Value, dtype: DType) -> Value:
        """The final value of an output of `dtype`: a mean is cast back."""
        if all(c.result is not value for c in self.carries):
            return value
        mean = self._mean(value, self.dim.size)
        return emit_at(self.builder, value, {"name": value.name}, phase="forward").cast(mean, dtype)

    def _mean(self, value: Value, count: int, origin: Origin | None = None) -> Value:
        """The sum of a gradient, which has an origin, or of an output, divided by a number."""
        phase, role = ("forward", "activation") if origin is None else ("backward", "grad")
        fields = {"role": role, "rules_from": value.rules_from, "name": value.name}
        emit = emit_at(self.builder, value, fields, origin, phase)
        return emit("identity", value) if count == 1 else emit("mul", value, 1 / count)


def goal_gradients(builder: Builder, goal: Goal, params: Sequence[Value]) -> dict[Value, Value]:
    """The gradient of each of some parameters, by the loss that trains it.

    Parameters that their loss does not depend on are left out.
    """
    grad_of: dict[Value, Value] = {}
    for each in goal.all:
        grads = gradients(builder, each.loss, each.trained)
        grad_of.update((p, g) for p, g in zip(each.trained, grads, strict=True) if g is not None)
    return {p: grad_of[p] for p in params if p in grad_of}


def summed(dtype: DType) -> DType:
    """The dtype that values of `dtype` are added up in: f32 at least."""
    return max(dtype, F32, key=lambda d: d.bytes)
