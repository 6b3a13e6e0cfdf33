"""Programs made of the samples of the registry: each trains the operands of many calls at once.

A term applies one operator to parameters whose dims stand in some order, and makes a number of the
result in one of a few ways, so that its cotangent comes in every kind of memory. The loss is the
sum of the terms.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from meshdsl.backends.runtime.values import Array
from meshdsl.device.ir import DeviceProgram as DeviceProgram
from meshdsl.diagnostics import Diagnostics, Source, Span
from meshdsl.ir.types import F64, Dim, TensorType
from meshdsl.named.autodiff import gradients
from meshdsl.named.builder import Builder
from meshdsl.named.declarations import Declarations
from meshdsl.named.emit import Emit
from meshdsl.named.ir import Goal, Init, NamedProgram, Output, Param, Value
from meshdsl.named.optimizers import Optimizer
from meshdsl.named.program_choice import finish_named
from meshdsl.ops.opdef import Sample, Signature, load_all, lookup
from meshdsl.pipeline import front, lower_placed
from meshdsl.placed.layout import resolve_layout
from meshdsl.placed.place import place
from meshdsl.placed.placements import Mesh
from meshdsl.prove.sample_values import draw, signature
from meshdsl.prove.torch_run import retyped, to_torch
from tests.compiling import named
from tests.training.oracles import letters, oracle_of

SPAN = Span(Source("registry.mdsl", "x"), 0, 0)
ROOM = Dim("room", 3)
"""The dim that a result gains where it is multiplied by a matrix."""

WAYS = ("squares", "rectified", "weights", "matrix")
"""The losses of a result: the mean of its squares, or of those of its positive part (by an operator
that may work in place), a weighted sum, the mean of the squares of its product with a matrix."""

AGAIN = "gradient"
"""One more: the sum of the squares of the gradients of the first, by every operand."""

TERMS = 24
"""Terms in one program."""


@dataclass(frozen=True, slots=True)
class Term:
    """One call: the sample, the order of the dims of each operand, and what becomes of the result.

    `turn` numbers the order of dims of what comes after the result.
    """

    name: str
    sample: Sample
    orders: tuple[tuple[int, ...], ...]
    way: str
    turn: int

    @property
    def canonical(self) -> Signature:
        """The types as the sample has them."""
        return signature(lookup(self.name), self.sample)

    @property
    def ins(self) -> tuple[TensorType, ...]:
        """The types of the operands, dims turned round."""
        pairs = zip(self.sample.ins, self.orders, strict=True)
        return tuple(TensorType(tuple(t.dims[i] for i in o), t.dtype) for t, o in pairs)

    @property
    def after(self) -> tuple[Dim, ...]:
        """The dims, in some order, that a weight has, or the product with a matrix."""
        dims = self.canonical.outs[0].dims
        if self.way == "matrix":
            dims = (*dims[:-1], ROOM)
        orders = list(itertools.permutations(dims))
        return orders[self.turn % len(orders)]


def samples_of(name: str) -> Iterator[Sample]:
    """The samples that are differentiated, in f64."""
    for own in lookup(name).samples:
        sample = retyped(own, F64)
        types = (*sample.ins, *signature(lookup(name), sample).outs)
        floats = {t.dtype for t in types if t.dtype.kind == "float"}
        if floats == {F64} and types[-1].dtype == F64 and any(t.dtype == F64 for t in sample.ins):
            yield sample


def trained_operators() -> list[str]:
    """The operators that gradients pass through."""
    every = load_all().items()
    return [n for n, o in sorted(every) if (o.gradient or o.composite) and any(samples_of(n))]


def terms_of(name: str, most: int, ways: Sequence[str]) -> Iterator[Term]:
    """Terms with all orders of the dims of each operand, up to `most` for each sample.

    The first order comes in all `ways`; of many samples, in every other one.
    """
    samples = list(samples_of(name))
    for number, sample in enumerate(samples):
        orders = [list(itertools.permutations(range(len(t.dims)))) for t in sample.ins]
        rank = len(signature(lookup(name), sample).outs[0].dims)
        turns = len(list(itertools.permutations(range(rank))))
        count = min(most, max(len(WAYS), turns, *map(len, orders)))
        for n in range(count):
            # Steps that have no divisor in common with 2 or 3 meet every order.
            steps = [1] * len(orders) if _is_fused(name) else [1, 5, 7, 11, 13]
            own = tuple(o[n * k % len(o)] for o, k in zip(orders, steps, strict=False))
            first = ways[number % 2 :: 2] if len(samples) > 2 and len(ways) > 1 else ways
            for way in first if n == 0 else ("matrix",):
                yield Term(name, sample, own, way if rank or way == AGAIN else "rectified", n)


def _is_fused(name: str) -> bool:
    """Whether it is the gradient of a composite, and has operands of one type."""
    return lookup(name).composite and lookup(name).surface.items == "view"


def programs_of(name: str, most: int, ways: Sequence[str] = WAYS) -> Iterator[Built]:
    """Programs of all terms of an operator."""
    terms = list(terms_of(name, most, ways))
    for start in range(0, len(terms), TERMS):
        yield Built.of(terms[start : start + TERMS])


# --- one program ------------------------------------------------------------------------------


@dataclass(slots=True)
class Built:
    """A training step of the sum of some terms, its values, and the gradients by torch.

    `arrays` are inputs and parameters by name.
    """

    terms: Sequence[Term]
    builder: Builder = field(default_factory=lambda: Builder(Diagnostics()))
    inputs: list[Value] = field(default_factory=list)
    params: list[Value] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    program: NamedProgram | None = None

    @classmethod
    def of(cls, terms: Sequence[Term]) -> Built:
        """The program of `terms`."""
        built = cls(terms)
        total: Value | None = None
        for number, term in enumerate(terms):
            loss = built._term(term, f"t{number}")
            total = loss if total is None else built.emit("add", total, loss)
        assert total is not None
        built.program = step_of(built.builder, built.inputs, built.params, total)
        return built

    @property
    def emit(self) -> Emit:
        """What makes operators at the end of the program so far."""
        return Emit(self.builder, SPAN, None)

    @property
    def gradients(self) -> dict[str, Array]:
        """Torch's gradients of the sum of all terms by every parameter."""
        found = torch.autograd.grad(
            torch.stack(self.losses).sum(),
            list(self.leaves.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        return {n: (g + 0.0).numpy() for n, g in zip(self.leaves, found, strict=True)}

    @property
    def even_dims(self) -> list[str]:
        """The dims of operands and results that two devices can split."""
        types = (t for term in self.terms for t in (*term.ins, *term.canonical.outs))
        return sorted({d.name for t in types for d in t.dims if d.size % 2 == 0})

    def _term(self, term: Term, label: str) -> Value:
        rng = np.random.default_rng(len(self.arrays))
        kinds = zip(term.sample.ins, term.sample.values, strict=True)
        given = [to_torch(draw(t, kind, rng), t) for t, kind in kinds]
        operands = []
        for i, (type_, order) in enumerate(zip(term.ins, term.orders, strict=True)):
            name = f"{label}_{i}"
            operands.append(self._tensor(name, type_, given[i].permute(order)))
            if type_.dtype == F64:
                given[i] = given[i].clone().requires_grad_()
                self.leaves[name] = given[i].permute(order).detach().contiguous().requires_grad_()
                back = [order.index(k) for k in range(len(order))]
                given[i] = self.leaves[name].permute(back)
        y = self.emit(term.name, *operands, **dict(term.sample.attrs))
        found = oracle_of(term.name)(term.canonical, *given)
        number = self._number(term, label, y, found)
        return self._gradients(number, operands) if term.way == AGAIN else number

    def _number(self, term: Term, label: str, y: Value, found: torch.Tensor) -> Value:
        """A number made of a result: the value, and by torch."""
        dims, rng = term.canonical.outs[0].dims, np.random.default_rng(5)
        if term.way == "rectified":
            y, found = self.emit("relu", y), found.clamp(min=0)
        if term.way in ("squares", "rectified", AGAIN):
            self.losses.append((found * found).mean())
            return self._mean(self.emit("square", y))
        known = letters(Signature((), (TensorType((*dims, ROOM), F64),), {}))
        names = ["".join(known[d.name] for d in ds) for ds in (dims, term.after)]
        if term.way == "weights":
            weight = torch.tensor(rng.normal(size=[d.size for d in term.after]))
            self.losses.append(torch.einsum(f"{names[0]},{names[1]}->", found, weight))
            other = self._tensor(f"{label}_weight", TensorType(term.after, F64), weight)
            return self.emit("sum", self.emit("mul", y, other), dims=y.type.dims)
        matrix = TensorType((dims[-1], ROOM), F64)
        array = torch.tensor(rng.normal(size=matrix.shape))
        made = torch.einsum(f"{names[0]},{known[dims[-1].name]}{known['room']}->{names[1]}", found,
                            array)  # fmt: skip
        self.losses.append((made * made).mean())
        other = self._tensor(f"{label}_matrix", matrix, array)
        turned = self.emit("einsum", y, other, dims=term.after)
        return self._mean(self.emit("square", turned))

    def _gradients(self, loss: Value, operands: Sequence[Value]) -> Value:
        """The squares of the gradients of the last loss, which they take the place of."""
        last, wrt = self.losses.pop(), [v for v in operands if v.type.dtype == F64]
        leaves = [self.leaves[str(v.name)] for v in wrt]
        by_torch = torch.autograd.grad(last, leaves, create_graph=True, materialize_grads=True)
        self.losses.append(torch.stack([(g * g).sum() for g in by_torch]).sum())
        total = self.emit("mul", loss, 0.0)
        for grad in (g for g in gradients(self.builder, loss, wrt) if g is not None):
            square = self.emit("square", grad)
            dims = square.type.dims
            total = self.emit("add", total, self.emit("sum", square, dims=dims) if dims else square)
        return total

    def _mean(self, value: Value) -> Value:
        return self.emit("mean", value, dims=value.type.dims) if value.type.dims else value

    def _tensor(self, name: str, type_: TensorType, values: torch.Tensor) -> Value:
        """An input, or of floats that are operands a parameter."""
        trained = type_.dtype == F64 and name.rpartition("_")[2].isdigit()
        role, into = ("param", self.params) if trained else ("input", self.inputs)
        into.append(self.builder.value(type_, SPAN, name=name, role=role))
        self.arrays[name] = values.detach().contiguous().numpy()
        return into[-1]


def step_of(
    builder: Builder, inputs: Sequence[Value], params: Sequence[Value], loss: Value
) -> NamedProgram:
    """The program built so far, as a step that subtracts the gradient of `loss`."""
    learned = tuple(Param(v, Init("normal"), 1, 1) for v in params)
    body, outputs = tuple(builder.frames[0].body), (Output("loss", loss, SPAN),)
    goal = Goal(loss, _descent(), SPAN, params=tuple(params))
    program = NamedProgram("step", tuple(inputs), learned, body, outputs, SPAN, goal=goal)
    return finish_named(program, None, evaluate=False)


def placed_on(program: NamedProgram, mesh: str, rules: str, policy: str) -> DeviceProgram:
    """The program of each device, on a mesh `axis:size` under rules `dim:axis,…`."""
    axis, _, size = mesh.partition(":")
    layout = resolve_layout(_no_declarations(), rules or None, Mesh("m", ((axis, int(size)),)))
    return lower_placed(place(program, layout, policy))


@functools.cache
def _descent() -> Optimizer:
    """Steps that subtract the gradient."""
    text = "program p() {\n param w[]\n return w\n minimize w with sgd(lr=1.0)\n}\n"
    goal = named(text).goal
    assert goal is not None
    assert isinstance(goal.optimizer, Optimizer)
    return goal.optimizer


@functools.cache
def _no_declarations() -> Declarations:
    return front(Source("none.mdsl", "program p(x[]) {\n return x\n}\n"), {}, Diagnostics())
