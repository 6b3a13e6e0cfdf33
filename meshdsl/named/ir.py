"""The named program: SSA operators over tensors with ordered named dims. No device, no layout.

Values are compared by identity. A `def` has been inlined: `Value.path` keeps the calls it came
through. A `repeat` stays a loop (`NamedLoop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from meshdsl.diagnostics import Span
from meshdsl.ir import program as ir
from meshdsl.ir.types import TensorType
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Pin:
    """`@` on one dim of one tensor: the axes it is split over (outer first), empty for `@none`."""

    dim: str
    axes: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor: the result of an operator, an input or a parameter.

    `name` is the dotted path the user would call it by (`attention_2.q`), or None for a
    subexpression.
    `path` has the instance names of the calls it was made inside, outermost first; `functions`,
    in parallel, the names of the `def`s. One that is `in_library` is made inside the definition of
    a function of the library: no name of it is the program's, and a rule that means it names that
    function. The result of a call, once the program names it, is the program's.
    `role` is `activation`, `input`, `seed` (an input that every run brings by itself), `param`,
    `grad` (the gradient of a parameter) or `state` (of an optimizer, and the intermediate values of
    its update).
    `rules_from` is the tensor whose rules and pins bind this one too: for a gradient, the tensor it
    is the gradient of; for a state, its parameter; for a copy, a slice or all slices of a tensor,
    that tensor. Whose state one is says `State`, and what an operator was made for its `Origin`.
    `is_gradient`: whether it is the gradient of `source`, or a part of that.
    `name_hint` names it in what is printed if it has no name; empty for that of its operator.
    `declared` are the names of the dims that the program gives it, where it has others: a loop adds
    its dim, or takes it away.
    """

    type: TensorType
    span: Span
    name: str | None = None
    path: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    role: str = "activation"
    rules_from: Value | None = None
    declared: tuple[str, ...] | None = None
    in_library: bool = False
    is_gradient: bool = False
    name_hint: str = ""

    @property
    def positions(self) -> tuple[str, ...]:
        """The names of its dims in the order used in the program."""
        return self.source.type.names if self.source.declared is None else self.source.declared

    @property
    def label(self) -> str:
        """The last part of the name, or `_` for a subexpression."""
        return self.name.rsplit(".", 1)[-1] if self.name else "_"

    @property
    def source(self) -> Value:
        """The tensor whose rules bind this one."""
        return self.rules_from or self

    def alike(self, **fields: Any) -> Value:
        """An activation under the rules of this value, with other fields."""
        return replace(self, role="activation", rules_from=self.source, **fields)

    @property
    def is_loaded(self) -> bool:
        """Whether it is a parameter as used, not as stored, where a layout tells these apart."""
        return self.role == "param" and self.rules_from is not None

    @property
    def is_nameable(self) -> bool:
        """Whether a rule can name it alone: it has a name, and the program gave it."""
        return self.name is not None and not self.in_library

    @property
    def as_gradient(self) -> dict[str, Any]:
        """The fields of a value that is the gradient of this one.

        It has the path of this one, also where it is made inside a function that reads it:
        selectors of that function do not mean it.
        """
        name = ".".join((*self.path, f"d_{self.label}")) if self.name else None
        return {
            "rules_from": self,
            "name": name,
            "is_gradient": True,
            **fields_inside(self),
        }


class InCalls(Protocol):
    """What is inside calls of functions, as a scope is and each value: their paths, outer first."""

    @property
    def path(self) -> tuple[str, ...]:
        """The instance names of the calls."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of their functions."""

    @property
    def in_library(self) -> bool:
        """Whether the innermost call is of a function of the library."""


def fields_inside(calls: InCalls) -> Mapping[str, Any]:
    """The fields of a value that is made inside the same calls."""
    return {"path": calls.path, "functions": calls.functions, "in_library": calls.in_library}


@dataclass(frozen=True, slots=True)
class Init:
    """The initial values of a parameter: `zeros ones normal(std) uniform(a, b) glorot he`.

    `args` is empty for `normal` without a standard deviation: 1/sqrt(fan_in) then, `fan_in` being
    the product of the dims that the parameter's first use sums over.
    """

    kind: str
    args: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A parameter of the program and how it is initialised; `fan_in`, `fan_out` count elements.

    `typed`: its declaration states its dtype, which mixed precision keeps. One that is `away` is
    stored on `disk` or on the `host`, where a layout says so.
    """

    value: Value
    init: Init
    fan_in: int
    fan_out: int
    typed: bool = False
    away: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class NamedOp(ir.Op[Value]):
    """An operator of a named program."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedLoop(ir.Loop[Value, "Node"]):
    """A `repeat` of a named program."""


Node = NamedOp | NamedLoop


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One returned tensor, the name it is returned under, and the place."""

    name: str
    value: Value
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A tensor that an optimizer keeps from step to step.

    `of` is its parameter; the counter of steps is of none. It begins with zeros, or with the values
    of its parameter, of which it `is_copy` in its own dtype. Of one kept in `parts` only the sum
    over devices counts: it is partial where what is added to it is. Between steps one that is
    `away` lies on `disk` or on the `host`, where a layout says so.
    """

    value: Value
    of: Value | None = None
    is_copy: bool = False
    parts: bool = False
    away: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """An update of a parameter or a state: `old` is `new` in the next step."""

    old: Value
    new: Value


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Parameters with an `Optimizer` of their own, of which `lr` and the like count.

    None: they are frozen, so they have no gradient, no state and no update.
    """

    params: tuple[Value, ...]
    optimizer: Any | None


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """`minimize loss with optimizer`; `optimizer` is an `Optimizer` of `optimizers.py`.

    `params` are those that the loss depends on. `groups` are those of them that it does not update
    as all others, each in one of them. `others` are further goals, each of which trains parameters
    of its own: all are updated in one step, by gradients at the same values. What is of the whole
    step (`COMMON` in `optimizers.py`) is said by the first one, apart from `clip`, which is of the
    gradients of each.
    `norm` is the name of the output that is the norm of the whole gradient, where it is measured.
    An update takes the mean gradient of all batches that are accumulated, or of so many of them as
    are `taken` where it is made on the way (`placed/async_checks.py`).
    """

    loss: Value
    optimizer: Any
    span: Span
    norm: str | None = None
    taken: int | None = None
    params: tuple[Value, ...] = ()
    groups: tuple[ParamGroup, ...] = ()
    others: tuple[Goal, ...] = ()

    @property
    def all(self) -> tuple[Goal, ...]:
        """This goal and the others."""
        return (self, *self.others)

    @property
    def losses(self) -> tuple[Value, ...]:
        """What all goals minimise."""
        return tuple(goal.loss for goal in self.all)

    @property
    def frozen(self) -> frozenset[Value]:
        """The parameters that the loss depends on and that this goal does not train."""
        return frozenset(p for g in self.groups if g.optimizer is None for p in g.params)

    @property
    def trained(self) -> tuple[Value, ...]:
        """The parameters that this goal trains."""
        frozen = self.frozen
        return tuple(p for p in self.params if p not in frozen)

    @property
    def untrained(self) -> frozenset[Value]:
        """The parameters that losses depend on and no goal trains: they have no gradient."""
        frozen = frozenset[Value]().union(*(goal.frozen for goal in self.all))
        return frozen.difference(*(goal.trained for goal in self.all))

    def optimizer_of(self, param: Value) -> Any:
        """The optimizer with the options for one parameter, which is not frozen."""
        optimizers = (g.optimizer for g in self.groups if param in g.params)
        return next(optimizers, self.optimizer)

    def on(self, of: Callable[[Value], Value]) -> Goal:
        """The goal on the values in place of those that it names."""
        params = tuple(map(of, self.params))
        groups = tuple(replace(g, params=tuple(map(of, g.params))) for g in self.groups)
        others = tuple(goal.on(of) for goal in self.others)
        return replace(self, loss=of(self.loss), params=params, groups=groups, others=others)

    def without_mixed(self) -> Goal:
        """The same goal in one precision, for `--dtype`."""
        return self._with_option("compute", None)

    def uncompressed(self) -> Goal:
        """The same goal with gradients that are sent whole."""
        return self._with_option("compress", None)

    def _with_option(self, name: str, value: object) -> Goal:
        options = {**self.optimizer.options, name: value}
        return replace(self, optimizer=replace(self.optimizer, options=options))


@dataclass(frozen=True, slots=True, eq=False)
class NamedProgram:
    """A whole named program. `inputs`, `params` and `outputs` are in order of declaration.

    `updates` are the new values of the parameters that the program assigns (`assignment.py`). One
    with a `goal` becomes a training step (`training_step.py`): `states` are the optimizer's, and
    `updates` those of these and of the minimised parameters, too. `unspoken` are the names of
    tensors that passes could only do without since no layout speaks of them, `kept_spoken` of those
    that stay since one does.
    """

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    body: tuple[Node, ...]
    outputs: tuple[Output, ...]
    span: Span
    states: tuple[State, ...] = ()
    updates: tuple[Update, ...] = ()
    goal: Goal | None = None
    unspoken: frozenset[str] = frozenset()
    kept_spoken: frozenset[str] = frozenset()

    @property
    def learned(self) -> tuple[Value, ...]:
        """The parameters that goals train; without a goal all that could be trained."""
        if self.goal is None:
            return self.trainable
        trained = {p for goal in self.goal.all for p in goal.trained}
        return tuple(v for v in self.trainable if v in trained)

    @property
    def trainable(self) -> tuple[Value, ...]:
        """The parameters that could be minimised by: floats that the program does not assign."""
        assigned = {update.old for update in self.updates}
        values = (p.value for p in self.params)
        return tuple(v for v in values if v.type.dtype.kind == "float" and v not in assigned)

    def rebuilt(self, body: Iterable[Node], of: Callable[[Value], Value]) -> NamedProgram:
        """The program with another body; `of` gives the values in place of those that it names."""
        return replace(
            self,
            inputs=tuple(map(of, self.inputs)),
            params=tuple(replace(p, value=of(p.value)) for p in self.params),
            body=tuple(body),
            outputs=tuple(replace(o, value=of(o.value)) for o in self.outputs),
            states=tuple(replace(s, value=of(s.value), of=s.of and of(s.of)) for s in self.states),
            updates=tuple(Update(of(u.old), of(u.new)) for u in self.updates),
            goal=self.goal and self.goal.on(of),
        )

    @property
    def counter(self) -> Value | None:
        """The state that counts steps, where the optimizer keeps one."""
        return next((s.value for s in self.states if s.of is None), None)


def kept(program: NamedProgram) -> list[Value]:
    """The values that are read after a program: outputs, new parameters and states, the loss."""
    values = [o.value for o in program.outputs] + [u.new for u in program.updates]
    return [*values, *program.goal.losses] if program.goal else values


def uses_of(program: NamedProgram) -> Counter[Value]:
    """The number of reads of each value, that after the program among them."""
    uses: Counter[Value] = ir.uses(program.body)
    uses.update(kept(program))
    return uses


def loops_of(program: NamedProgram) -> Iterator[NamedLoop]:
    """Every loop, those inside loops too."""
    return ir.loops(program.body, NamedLoop)


def values_of(program: NamedProgram) -> Iterator[Value]:
    """Every tensor of a program: inputs, stored values, results, carried and collected values."""
    yield from program.inputs
    yield from (p.value for p in program.params)
    yield from (s.value for s in program.states)
    for op in walk(program.body):
        yield from op.outs
    for loop in loops_of(program):
        yield from (c.inside for c in loop.carries)
        yield from (c.outer for c in loop.collected)


def walk(nodes: Iterable[Node]) -> Iterator[NamedOp]:
    """Every operator, those inside loops once, in program order."""
    return (node for node in ir.every(nodes) if isinstance(node, NamedOp))
