"""A program with `minimize` as one training step: forward, backward, update.

All of it is one named program, so that a layout places the gradients' reductions and the
optimizer's states like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any, NoReturn

from meshdsl.diagnostics import Diagnostic, Diagnostics, Related, Span, fail
from meshdsl.ir.program import loops
from meshdsl.ir.types import DType, TensorType
from meshdsl.named.accumulate import accumulated
from meshdsl.named.activity import active
from meshdsl.named.autocast import mixed
from meshdsl.named.autodiff import gradients
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import Goal, NamedLoop, NamedProgram, Node, Output, State, Update, Value
from meshdsl.named.optimizer_updates import emit_update
from meshdsl.records import dataclass


def training_step(program: NamedProgram, measured: bool = False) -> NamedProgram:
    """The training step of a program with a goal: gradients and updates added.

    Where `measured`, it returns the norm of the whole gradient, too: `goal.norm` is the output.

    Raises MD0294 when the loss depends on no parameter that is trained.
    """
    assert program.goal is not None
    optimizer = program.goal.optimizer
    program = with_loss(program)
    if optimizer.compute is not None:
        program = mixed(program, optimizer.compute)
    goal = program.goal
    assert goal is not None
    builder = Builder(Diagnostics())
    if optimizer.accumulate > 1:
        program, grad_of = accumulated(program, builder, optimizer.accumulate)
    else:
        builder.adopt(program)
        params = program.learned
        grad_of = dict(zip(params, gradients(builder, goal.loss, params), strict=True))
    pairs = [(p, g) for p, g in grad_of.items() if g is not None]
    if not pairs:
        _refuse_constant(goal)
    emitter = _Emitter(builder, goal.span, {str(p.value.name) for p in program.params})
    stacked = _stacked(program.body)
    with builder.in_phase("update"):
        trained, grads = zip(*pairs, strict=True)
        norm = emit_update(emitter, goal, trained, grads, stacked, measured)
    if norm is not None:
        program = _with_norm(program, norm)
    return replace(
        program,
        body=tuple(builder.frames[0].body),
        states=tuple(emitter.states),
        updates=(*program.updates, *emitter.updates),
    )


def _refuse_constant(goal: Goal) -> NoReturn:
    """MD0294: nothing that is trained has a gradient."""
    if goal.frozen:
        help = "say which parameters are `trained`, or leave out what freezes all of them"
        fail("MD0294", "every parameter that the loss depends on is frozen", goal.span, help=help)
    help = "declare what is to be learned with `param`, and use it on the way to the loss"
    fail("MD0294", "the loss depends on no parameter", goal.span, help=help)


def check_minimised(program: NamedProgram, diagnostics: Diagnostics) -> None:
    """Report MD0141 for each state through which a minimised loss has a gradient."""
    if program.goal is None:
        return
    for update in program.updates:
        if program.goal.loss in active(program.body, {update.old}):
            name, where = update.old.label, Related(program.goal.span, "minimised here")
            message = f"`{name}` is assigned, and the loss has a gradient with respect to it"
            help = f"assign or minimise; `stop_gradient({name})` is its value alone"
            diagnostics.add(
                Diagnostic("MD0141", message, update.old.span, related=(where,), help=help)
            )


def _with_norm(program: NamedProgram, norm: Value) -> NamedProgram:
    goal = program.goal
    assert goal is not None
    name = _unused("grad_norm", program)
    outputs = (*program.outputs, Output(name, norm, goal.span))
    return replace(program, outputs=outputs, goal=replace(goal, norm=name))


def _unused(name: str, program: NamedProgram) -> str:
    """`name`, or another one like it where an output of the program has it."""
    while any(o.name == name for o in program.outputs):
        name += "_minimized"
    return name


def with_loss(program: NamedProgram) -> NamedProgram:
    """The program with the loss among its outputs."""
    goal = program.goal
    assert goal is not None
    if any(o.value is goal.loss for o in program.outputs):
        return program
    name = _unused(goal.loss.label if goal.loss.name else "loss", program)
    return replace(program, outputs=(*program.outputs, Output(name, goal.loss, goal.span)))


def loss_name(program: NamedProgram) -> str:
    """The name of the minimised output."""
    assert program.goal is not None
    return next(o.name for o in program.outputs if o.value is program.goal.loss)


def _stacked(nodes: Iterable[Node]) -> dict[Value, tuple[str, ...]]:
    """The dims that parameters have from the loops around them."""
    stacked: dict[Value, tuple[str, ...]] = {}
    for loop in reversed([*loops(nodes, NamedLoop)]):  # an inner one first
        for item in loop.stacked:
            if item.outer.role == "param":
                stacked.setdefault(item.outer, (loop.dim.name, *stacked.get(item.inside, ())))
    return stacked


@dataclass(slots=True)
class _Emitter:
    """Writes the update at the end of a program; an `UpdateEmitter` of `optimizers.py`.

    Parameters (`taken`) and states are stored from step to step and have one name each.
    """

    builder: Builder
    span: Span
    taken: set[str]
    states: list[State] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)

    def emit(
        self,
        name: str,
        *ins: Value,
        of: Value | None,
        role: str = "state",
        name_hint: str = "",
        **attrs: Any,
    ) -> tuple[Value, ...]:
        fields = {"role": role, "rules_from": of, "name_hint": name_hint}
        return Emit(self.builder, self.span, of, fields).apply(name, ins, attrs)

    def state(
        self,
        name: str,
        type: TensorType,
        of: Value | None,
        is_copy: bool = False,
        parts: bool = False,
    ) -> Value:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        value = self.builder.value(type, self.span, of, name=name, role="state", rules_from=of)
        self.states.append(State(value, of, is_copy, parts))
        return value

    def constant(self, number: float, dtype: DType) -> Value:
        return Emit(self.builder, self.span, None).number(number, dtype)

    def update(self, old: Value, new: Value) -> None:
        self.updates.append(Update(old, new))
