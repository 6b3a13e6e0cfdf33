"""A program with `minimize` as one training step: forward, backward, update.

All of it is one named program, so that a layout places the gradients' reductions and the
optimizer's states like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NoReturn

from meshdsl.diagnostics import Diagnostic, Diagnostics, Edit, Fix, Related, Span, advice, fail
from meshdsl.ir.program import loops
from meshdsl.ir.rewrite import Rebuild
from meshdsl.ir.types import DType, TensorType
from meshdsl.named.accumulate import accumulated, goal_gradients
from meshdsl.named.activity import reaching
from meshdsl.named.autocast import mixed
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import (
    Goal,
    NamedLoop,
    NamedOp,
    NamedProgram,
    Node,
    Output,
    State,
    Update,
    Value,
)
from meshdsl.named.optimizer_updates import emit_updates
from meshdsl.named.scaled_products import scaled_products
from meshdsl.records import dataclass
from meshdsl.syntax.edits import without_line


def training_step(program: NamedProgram, measured: bool = False) -> NamedProgram:
    """The training step of a program with a goal: gradients and updates added.

    Where `measured`, it returns the norm of the whole gradient, too: `goal.norm` is the output.

    Raises MD0294 when the loss depends on no parameter that is trained.
    """
    program = with_loss(program)
    goal = program.goal
    assert goal is not None
    optimizer = goal.optimizer
    if optimizer.compute is not None:
        depended_on = {p for each in goal.all for p in each.params}
        program = mixed(program, optimizer.compute, depended_on)
    goal, params = program.goal, program.params
    assert goal is not None
    builder = Builder(Diagnostics())
    if optimizer.accumulate > 1:
        program, grad_of = accumulated(program, builder, optimizer.accumulate)
    else:
        builder.adopt(program)
        grad_of = goal_gradients(builder, goal, program.learned)
    for each in goal.all:
        if grad_of.keys().isdisjoint(each.trained):
            _refuse_constant(each)
    emitter = _Emitter(builder, goal.span, {str(p.value.name) for p in program.params})
    stacked = _stacked(program.body)
    with builder.in_phase("update"):
        norm = emit_updates(emitter, goal, grad_of, stacked, measured)
    if norm is not None:
        program = _with_norm(program, norm)
    step = replace(
        program,
        body=tuple(builder.frames[0].body),
        states=tuple(emitter.states),
        updates=(*program.updates, *emitter.updates),
    )
    if optimizer.eight_bits is None:
        return step
    depended_on = {p for each in goal.all for p in each.params}
    weights = [p.value for p in params if p.value in depended_on and not p.typed]
    return scaled_products(step, optimizer.eight_bits, weights)


def _refuse_constant(goal: Goal) -> NoReturn:
    """MD0294: nothing that is trained has a gradient."""
    if goal.frozen:
        help = "say which parameters are `trained`, or leave out what freezes all of them"
        fail("MD0294", "every parameter that the loss depends on is frozen", goal.span, help=help)
    help = "declare what is to be learned with `param`, and use it on the way to the loss"
    fail("MD0294", "the loss depends on no parameter", goal.span, help=help)


def check_minimised(program: NamedProgram, diagnostics: Diagnostics) -> None:
    """Report what no step could do.

    MD0141 is for each state through which a minimised loss has a gradient, MD0295 for each
    parameter that two losses train.
    """
    assert program.goal is not None
    goals = program.goal.all
    reached = set[Value]().union(*(reaching(program.body, goal.loss) for goal in goals))
    for update in program.updates:
        if update.old in reached:
            name, where = update.old.label, Related(program.goal.span, "minimised here")
            message = f"`{name}` is assigned, and the loss has a gradient with respect to it"
            help = f"assign or minimise; `stop_gradient({name})` is its value alone"
            diagnostics.add(
                Diagnostic("MD0141", message, update.old.span, related=(where,), help=help)
            )
    for param in program.learned:
        owners = [goal for goal in goals if param in goal.trained]
        if len(owners) > 1:
            diagnostics.add(_of_two_losses(param, *owners[:2]))


def _of_two_losses(param: Value, first: Goal, second: Goal) -> Diagnostic:
    message = f"`{param.name}` is minimised by two losses"
    where = Related(first.span, "by this one"), Related(param.span, "declared here")
    fixes = (Fix("remove the second one", (Edit(without_line(second.span), ""),), safe=False),)
    freeze = f"or freeze it for one of them: `{{ {param.name}: frozen }}`"
    help = advice(fixes, "or add the losses up", freeze)
    return Diagnostic("MD0295", message, second.span, related=where, help=help, fixes=fixes)


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
    """The program with the losses among its outputs."""
    assert program.goal is not None
    for goal in program.goal.all:
        if any(o.value is goal.loss for o in program.outputs):
            continue
        name = _unused(goal.loss.label if goal.loss.name else "loss", program)
        output = Output(name, goal.loss, goal.span)
        program = replace(program, outputs=(*program.outputs, output))
    return program


def loss_name(program: NamedProgram) -> str:
    """The name of the output that is minimised, of several the first."""
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

    def at(self, span: Span) -> _Emitter:
        return replace(self, span=span)

    def splice(
        self, nodes: Sequence[Node], new: Mapping[Value, Value], of: Value
    ) -> Mapping[Value, Value]:
        splicing = _Splicing(new, of)
        for node in splicing.nodes(nodes):
            self.builder.append(node)
        return splicing.new

    def constant(self, number: float, dtype: DType) -> Value:
        return Emit(self.builder, self.span, None).number(number, dtype)

    def update(self, old: Value, new: Value) -> None:
        self.updates.append(Update(old, new))


class _Splicing(Rebuild):
    """Nodes of another program as part of the update of the parameter `of`."""

    def __init__(self, new: Mapping[Value, Value], of: Value) -> None:
        super().__init__()
        self.new.update(new)
        self.of = of

    def value(self, value: Value) -> Value:
        if value not in self.new:
            self.new[value] = Value(
                value.type, value.span, role="state", rules_from=self.of, name_hint=value.label
            )
        spliced: Value = self.new[value]
        return spliced

    def op(self, op: NamedOp) -> tuple[NamedOp]:
        if op.name == "constant":  # it follows no tensor
            self.new[op.outs[0]] = Value(op.outs[0].type, op.span)
        return (replace(self.on_new(op), phase="update", block=None),)

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        (spliced,) = super().loop(loop)
        return (replace(spliced, phase="update", block=None),)
