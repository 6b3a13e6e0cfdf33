"""The new values of parameters and of an optimizer's states in a training step, as operators.

The update is part of the program, so that it is placed, reduced and costed like everything else:
the norm of split gradients is reduced over their devices, a split state is updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from meshdsl.ir.types import I32, DType, TensorType
from meshdsl.named.compress import approximated
from meshdsl.named.ir import Goal, Value
from meshdsl.named.optimizers import (
    Arithmetic,
    Compression,
    LearningRate,
    Optimizer,
    UpdateEmitter,
    emit_rate,
    master_dtype,
    widened,
)
from meshdsl.named.workers import PER_WORKER, one_bit_momentum
from meshdsl.named.written_optimizers import written_step
from meshdsl.records import dataclass

CLIP_EPS = 1e-6
"""Added to the norm in gradient clipping, as `torch.nn.utils.clip_grad_norm_` does."""


def emit_updates(
    emitter: UpdateEmitter,
    goal: Goal,
    grads: Mapping[Value, Value],
    stacked: Mapping[Value, tuple[str, ...]] | None = None,
    measured: bool = False,
) -> Value | None:
    """Write one step of the optimizers for all parameters, each with the options of its group.

    Each gradient has the dims of its parameter.

    States are named after their parameter (`w.m`, `w.v`), and `step` counts the steps done. A
    parameter narrower than f32 is a rounded copy of its state `w.master` in f32. `stacked` gives
    the dims that parameters have gained from a `repeat`: each slice is then updated like a
    parameter of its own, which makes a difference to Adafactor.

    Where `measured`, returns the norm of all gradients together, before any clipping; `clip` and
    it share the norm.
    """
    counter = _Counter.begun(emitter)
    each_shared = []
    for each in goal.all:
        pairs = tuple((p, grads[p]) for p in each.trained if p in grads)
        shared = _Shared(emitter.at(each.span), each, counter, pairs)
        compress = each.optimizer.compress
        if compress is not None and not compress.is_of_momentum:
            shared.pairs = _compressed(shared, compress, stacked or {})
        each_shared.append(shared)
    # Before the updates: they may overwrite the gradients.
    norm = _whole_norm(emitter, [s.norm for s in each_shared]) if measured else None
    for shared in each_shared:
        for param, grad in shared.pairs:
            optimizer = shared.goal.optimizer_of(param)
            _update_parameter(shared, optimizer, param, grad, _own_dims(param, stacked or {}))
    return norm


def _whole_norm(emitter: UpdateEmitter, norms: Sequence[Value]) -> Value:
    """The norm of all gradients, of the norms of those of each goal."""
    if len(norms) == 1:
        return norms[0]
    widest = max((norm.type.dtype for norm in norms), key=lambda d: d.bytes)
    do = Arithmetic(emitter, widest, name_hint="grad_norm")
    total = do.number(0.0)
    for norm in norms:
        total = do("add", total, do("square", widened(do, norm)))
    return do("sqrt", total)


def _own_dims(param: Value, stacked: Mapping[Value, tuple[str, ...]]) -> tuple[str, ...]:
    """The dims of a parameter without those of the loops around it."""
    around = stacked.get(param, ())
    return tuple(d for d in param.type.names if d not in around)


def _compressed(
    shared: _Shared, compression: Compression, stacked: Mapping[Value, tuple[str, ...]]
) -> tuple[tuple[Value, Value], ...]:
    """The parameters, and their gradients as they are sent."""
    grads = [(param, grad, _own_dims(param, stacked)) for param, grad in shared.pairs]
    decompressed = _COMPRESSIONS[compression.name](shared.emitter, compression, shared.done, grads)
    return tuple((param, new) for (param, _, _), new in zip(grads, decompressed, strict=True))


_COMPRESSIONS = {"powersgd": approximated, **PER_WORKER}


# --- scalars -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Counter:
    """The number of steps: `done` before this one, and `count` with it."""

    done: Value
    count: Value

    @classmethod
    def begun(cls, emitter: UpdateEmitter) -> _Counter:
        """The counter of a training step, as a state."""
        done = emitter.state("step", TensorType((), I32), None)
        (count,) = emitter.emit("step_update", done, of=None)
        emitter.update(done, count)
        return cls(done, count)


class _Shared:
    """Operators shared by the updates of all parameters of a goal: scalars in each dtype.

    `done` counts the steps before this one, and `count` this one, too.
    """

    def __init__(
        self,
        emitter: UpdateEmitter,
        goal: Goal,
        counter: _Counter,
        pairs: tuple[tuple[Value, Value], ...],
    ) -> None:
        self.emitter = emitter
        self.goal = goal
        self.pairs = pairs
        self.done, self.count = counter.done, counter.count
        self._made: dict[tuple[str | LearningRate, DType], Value] = {}

    def lr(self, rate: LearningRate, dtype: DType) -> Value:
        """The learning rate of this step, of the parameters that have this one."""
        if (rate, dtype) not in self._made:
            do = Arithmetic(self.emitter, dtype)
            self._made[rate, dtype] = emit_rate(rate, do, self.count)
        return self._made[rate, dtype]

    def number(self, dtype: DType) -> Value:
        """The number of this step, from 1, for arithmetic."""
        if ("number", dtype) not in self._made:
            do = Arithmetic(self.emitter, dtype)
            self._made["number", dtype] = do("cast", self.count, dtype=dtype)
        return self._made["number", dtype]

    def scale(self, dtype: DType) -> Value:
        """The factor of gradients: 1, or less where their norm is above `clip`."""
        if ("scale", dtype) not in self._made:
            self._made["scale", dtype] = self._scale(dtype)
        return self._made["scale", dtype]

    def _scale(self, dtype: DType) -> Value:
        clip = self.goal.optimizer.clip
        if clip is None:
            return self.emitter.constant(1.0, dtype)
        widest = self.norm.type.dtype
        do = Arithmetic(self.emitter, widest)
        if dtype != widest:
            return do("cast", self.scale(widest), dtype=dtype)
        norm = do.known_as("grad_norm")("add", self.norm, CLIP_EPS)
        factor = do.known_as("clip_scale")
        return factor("minimum", factor("div", clip, norm), 1.0)

    @cached_property
    def norm(self) -> Value:
        """The norm of all gradients together, in the widest dtype of an update."""
        widest = max((master_dtype(p) for p, _ in self.pairs), key=lambda d: d.bytes)
        do = Arithmetic(self.emitter, widest, name_hint="grad_norm")
        return do("sqrt", self._square_of_norm(widest))

    def _square_of_norm(self, dtype: DType) -> Value:
        """The sum of squares over all elements of all gradients."""
        do = Arithmetic(self.emitter, dtype)
        summed = do.known_as("grad_norm")
        total: Value | None = None
        for param, grad in self.pairs:
            near = dataclasses.replace(do, of=param)
            square = near("square", widened(near, grad))
            if square.type.dims:
                square = do("sum", square, dims=square.type.dims)
            total = square if total is None else summed("add", total, square)
        assert total is not None, "nothing is trained"
        return total


# --- one parameter -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter `w` (its master copy, where it has one) and its gradient, during its update."""

    shared: _Shared
    optimizer: Optimizer
    param: Value
    w: Value
    grad: Value
    dims: tuple[str, ...]
    """Its dims without those of loops around it."""

    @property
    def dtype(self) -> DType:
        """The dtype in which it is updated."""
        return self.w.type.dtype

    @property
    def do(self) -> Arithmetic:
        """Arithmetic whose results follow the parameter."""
        return Arithmetic(self.shared.emitter, self.dtype, self.param)

    @property
    def scalars(self) -> tuple[Value, Value]:
        """The learning rate and the factor of the gradient."""
        return self.shared.lr(self.optimizer.lr, self.dtype), self.shared.scale(self.dtype)

    def option(self, name: str) -> float:
        """An option of the optimizer."""
        value: float = self.optimizer.option(name)
        return value

    def state(self, name: str, *without: str) -> Value:
        """A state `PARAM.name` of the type of `w`, less the dims `without`."""
        return _state(self.shared, self.param, name, self.w.type.without(*without))

    def fused(self, name: str, *operands: Value, states: Sequence[Value], **attrs: Any) -> Value:
        """Emit an update operator, which yields the new `states` too; the new `w`."""
        new, *new_states = self.shared.emitter.emit(name, *operands, of=self.param, **attrs)
        for old, value in zip(states, new_states, strict=True):
            self.shared.emitter.update(old, value)
        return new


def _state(
    shared: _Shared, param: Value, name: str, type_: TensorType, is_copy: bool = False
) -> Value:
    assert param.name is not None, "a parameter has a name"
    return shared.emitter.state(f"{param.name}.{name}", type_, param, is_copy)


def _update_parameter(
    shared: _Shared, optimizer: Optimizer, param: Value, grad: Value, dims: tuple[str, ...]
) -> None:
    """Emit the update of one parameter: of itself, or of its master copy and then a cast."""
    dtype, rule = master_dtype(param), _written if optimizer.written else _RULES[optimizer.name]
    if dtype == param.type.dtype:
        new = rule(_Parameter(shared, optimizer, param, param, grad, dims))
        shared.emitter.update(param, new)
        return
    type_ = dataclasses.replace(param.type, dtype=dtype)
    master = _state(shared, param, "master", type_, is_copy=True)
    this = _Parameter(shared, optimizer, param, master, grad, dims)
    new = rule(this)
    shared.emitter.update(master, new)
    shared.emitter.update(param, this.do("cast", new, dtype=param.type.dtype))


# --- rules -------------------------------------------------------------------------------------


def _sgd(p: _Parameter) -> Value:
    decay = p.option("weight_decay")
    return p.fused("sgd_update", p.w, p.grad, *p.scalars, states=(), weight_decay=decay)


def _momentum(p: _Parameter) -> Value:
    v = p.state("v")
    options = {n: p.option(n) for n in ("beta", "nesterov", "weight_decay")}
    return p.fused("momentum_update", p.w, p.grad, v, *p.scalars, states=(v,), **options)


def _adam(p: _Parameter) -> Value:
    compress = p.shared.goal.optimizer.compress
    if compress is not None and compress.is_of_momentum:
        return _frozen_adam(p, compress)
    m, v = p.state("m"), p.state("v")
    options = {n: p.option(n) for n in ("beta1", "beta2", "eps", "weight_decay")}
    operands = (p.w, p.grad, m, v, *p.scalars, p.shared.count)
    decoupled = p.optimizer.name == "adamw"
    return p.fused("adam_update", *operands, states=(m, v), **options, decoupled=decoupled)


def _frozen_adam(p: _Parameter, compress: Compression) -> Value:
    """The compression stage of 1-bit Adam (Tang et al. 2021), algorithm 1.

    The mean square `v` stays that of the last step of the warm-up, and its correction with it. An
    element whose gradient was 0 up to then has no scale of its own, and its momentum stays 0.
    """
    do, (lr, _) = p.do, p.scalars
    m, v = p.state("m"), p.state("v")
    decoupled, decay = p.optimizer.name == "adamw", p.option("weight_decay")
    beta1, beta2 = p.option("beta1"), p.option("beta2")
    old_momentum = do("mul", m, beta1)
    if decay and not decoupled:
        old_momentum = do("add", old_momentum, do("mul", p.w, (1 - beta1) * decay))
    momentum = one_bit_momentum(p.shared.emitter, p.param, p.grad, p.dims, beta1, old_momentum)
    momentum = do("mul", momentum, do("cast", do("gt", v, 0.0), dtype=p.dtype))
    p.shared.emitter.update(m, momentum)
    corrected = do("sub", 1.0, do("pow", beta1, p.shared.number(p.dtype)))
    root = do("sqrt", do("div", v, 1 - beta2**compress.warmup))
    step = do("div", do("div", momentum, corrected), do("add", root, p.option("eps")))
    if decay and decoupled:
        step = do("add", step, do("mul", p.w, decay))
    return p.fused("sgd_update", p.w, step, lr, do.number(1.0), states=(), weight_decay=0.0)


def _adafactor(p: _Parameter) -> Value:
    """Shazeer and Stern 2018, algorithms 4 and 5; `lr` and weight decay as torch has them."""
    do, (lr, scale), number = p.do, p.scalars, p.shared.number(p.dtype)
    grad = widened(do, p.grad)
    if p.shared.goal.optimizer.clip is not None:
        grad = do("mul", grad, scale)
    step = _normalised(p, grad, do("pow", number, -p.option("decay")))
    size = lr
    if p.option("relative"):
        length = do("maximum", _root_mean_square(p, p.w), p.option("eps2"))
        size = do("mul", length, do("minimum", lr, do("rsqrt", number)))
    excess = do("div", _root_mean_square(p, step), p.option("threshold"))
    size = do("div", size, do("maximum", excess, 1.0))
    w = p.w
    if p.option("weight_decay"):
        remaining = do("sub", do.number(1.0), do("mul", lr, p.option("weight_decay")))
        w = do("mul", w, remaining)
    return p.fused("sgd_update", w, step, size, do.number(1.0), states=(), weight_decay=0.0)


def _normalised(p: _Parameter, grad: Value, weight: Value) -> Value:
    """The gradient divided by the root of the running mean of its square.

    For a matrix only the means of rows and columns are stored: their product, divided by the mean
    of all, replaces the whole.
    """
    do, square = p.do, p.do("square", grad)
    if len(p.dims) < 2:
        return do("mul", grad, do("rsqrt", _running(p, "v", square, weight)))
    row, column = (d for d in p.w.type.dims if d.name in p.dims[-2:])
    by_row = _running(p, "row", do("mean", square, dims=(column,)), weight, column.name)
    by_column = _running(p, "col", do("mean", square, dims=(row,)), weight, row.name)
    by_row = do("div", by_row, do("mean", by_row, dims=(row,)))
    return do("mul", do("mul", grad, do("rsqrt", by_row)), do("rsqrt", by_column))


def _running(p: _Parameter, name: str, square: Value, weight: Value, *without: str) -> Value:
    """The new value of a running mean kept in the state `name`; `weight` is that of `square`."""
    old = p.state(name, *without)
    change = p.do("sub", p.do("add", square, p.option("eps1")), old)
    new = p.do("add", old, p.do("mul", change, weight))
    p.shared.emitter.update(old, new)
    return new


def _root_mean_square(p: _Parameter, x: Value) -> Value:
    square = p.do("square", x)
    over = tuple(d for d in x.type.dims if d.name in p.dims)
    return p.do("sqrt", p.do("mean", square, dims=over) if over else square)


def _written(p: _Parameter) -> Value:
    """The step of an optimizer that is a function of the file, with its states."""
    assert p.optimizer.written is not None
    do, emitter = p.do, p.shared.emitter
    grad = widened(do, p.grad)
    if grad.type.dims != p.w.type.dims:
        grad = do("transpose", grad, dims=p.w.type.dims)
    if p.shared.goal.optimizer.clip is not None:
        grad = do("mul", grad, p.shared.scale(p.dtype))
    step = written_step(p.optimizer, str(p.param.name), p.w.type, p.dims)
    rate, number = p.shared.lr(p.optimizer.lr, p.dtype), p.shared.number(p.dtype)
    operands = dict(zip(step.inputs, (p.w, grad, rate, number), strict=True))
    states = {s.value: _state(p.shared, p.param, s.value.label, s.value.type) for s in step.params}
    new = emitter.splice(step.body, {**operands, **states}, p.param)
    for update in step.updates:
        emitter.update(states[update.old], new[update.new])
    return new[step.outputs[0].value]


_RULES = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adam,
    "adafactor": _adafactor,
}
