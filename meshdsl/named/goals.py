"""The statements of a program about its loss: `grad`, `minimize` and `recompute`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Edit, Fix, Related, Span, advice, all_of, both, fail
from meshdsl.named.activity import reaching
from meshdsl.named.builder import Operand, Scope, need_tensor
from meshdsl.named.ir import Goal, NamedOp, NamedProgram, Value
from meshdsl.named.loops import without_returns
from meshdsl.named.optimizers import COMMON, WrittenRule, resolve
from meshdsl.named.param_groups import GroupRule, group_rules, param_groups
from meshdsl.named.written_optimizers import options_of, written_step
from meshdsl.syntax import ast
from meshdsl.syntax.edits import around, shortened, without_line
from meshdsl.syntax.enclosing import enclosing

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

FORM = "`grad(loss, x, …)`"


class Goals:
    """The statements of a program about its loss: `grad`, `minimize` and `recompute`."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.pending: list[tuple[Goal, tuple[GroupRule, ...]]] = []
        self.blocks = 0

    # --- grad ----------------------------------------------------------------------------------

    def grad(self, node: ast.CallExpr, scope: Scope) -> tuple[Value, ...]:
        """The values of a call `grad(loss, x, …)`: one gradient per tensor after the loss."""
        if node.items is not None or node.keywords or node.out or len(node.args) < 2:
            fail("MD0252", "`grad` takes a loss and tensors", node.span, help=f"write {FORM}")
        evaluate = self.program.expressions.evaluate
        operands = all_of(partial(evaluate, arg, scope) for arg in node.args)
        spans = [arg.span for arg in node.args]
        return self.gradients(operands, spans, node.span)

    def gradients(
        self, operands: list[Operand], spans: list[Span], span: Span
    ) -> tuple[Value, ...]:
        """The gradients of the first operand by the others; `spans` are their places."""
        loss = need_loss("grad", operands[0], spans[0])
        wrt = [self._variable(x, s) for x, s in zip(operands[1:], spans[1:], strict=True)]
        outs = tuple(map(self._gradient, wrt))
        places = (("places", tuple(spans)),)
        node = NamedOp("grad", (loss, *wrt), outs, places, span, block=self.builder.block)
        self.builder.append(node)
        self.builder.nameless.update(outs)
        return outs

    def _gradient(self, value: Value) -> Value:
        """The gradient by `value`, written out later by `grad_operators.py`."""
        target = value.source
        role = "grad" if value.role == "param" else "activation"
        return Value(value.type, value.span, role=role, **target.as_gradient)

    def _variable(self, operand: Operand, span: Span) -> Value:
        if not isinstance(operand, Value):
            need_tensor(operand, span)
        if operand.type.dtype.kind != "float":
            message = f"there is no gradient with respect to {operand.type}"
            fixes = _as_float(operand)
            why = "gradients are of floats"
            help = advice(fixes, why) if fixes else f"{why}: `cast(x, f32)` first"
            fail("MD0291", message, span, help=help, fixes=fixes)
        return operand

    # --- minimize ------------------------------------------------------------------------------

    def minimize(self, node: ast.Minimize, scope: Scope) -> None:
        """Record the loss and the optimizer; `training_step.py` makes the training step of it."""
        if scope.path or len(self.builder.frames) > 1:
            fixes = _at_the_end(node.span)
            help = None if fixes else "write it at the end of the program"
            message = "`minimize` stands at the end of a program"
            fail("MD0296", message, node.span, help=help, fixes=fixes)
        evaluate = partial(self._constant, scope)
        loss, optimizer = both(
            partial(self._loss, node.value, scope),
            partial(resolve, node.optimizer, evaluate, self._written),
        )
        goal = Goal(loss, optimizer, node.span)
        if self.pending:
            _check_of_step(self.pending[0][0], goal, node)
        rules = group_rules(node, optimizer, evaluate, self._written, self.builder.diagnostics)
        self.pending.append((goal, rules))

    def written(self) -> Goal:
        """The goals as they are written; `finish` says which parameters they are of."""
        first, *others = (goal for goal, _ in self.pending)
        return replace(first, others=tuple(others))

    def finish(self, program: NamedProgram) -> NamedProgram:
        """The whole program with the parameters that each loss depends on, and their groups.

        Of a program with errors a loss may depend on all of them.
        """
        assert program.goal is not None
        rules = (rules for _, rules in self.pending)
        goals = (replace(goal, others=()) for goal in program.goal.all)
        first, *others = (
            self._with_params(goal, rules_of_goal, program)
            for goal, rules_of_goal in zip(goals, rules, strict=True)
        )
        return replace(program, goal=replace(first, others=tuple(others)))

    def _with_params(self, goal: Goal, rules: tuple[GroupRule, ...], program: NamedProgram) -> Goal:
        reached, diagnostics = reaching(program.body, goal.loss), self.builder.diagnostics
        depended_on = {*program.trainable} if diagnostics.errors else reached
        params = tuple(p for p in program.trainable if p in depended_on)
        unreached = tuple(p for p in program.trainable if p not in depended_on)
        groups = param_groups(goal.optimizer, rules, params, unreached, diagnostics)
        goal = replace(goal, params=params, groups=groups)
        for param in goal.trained:
            if param in reached:
                self._check_written(goal, param)
        return goal

    def _written(self, name: ast.Name) -> WrittenRule | None:
        """The function of the file that is called as an optimizer, if there is one."""
        function = self.program.declarations.functions.get(name.text)
        if function is None:
            return None
        return WrittenRule(function, options_of(function), self.program.apart)

    def _check_written(self, goal: Goal, param: Value) -> None:
        """Report what is wrong with the function that is the optimizer of a parameter."""
        optimizer = goal.optimizer_of(param)
        if optimizer.written is not None:
            dims = param.positions
            build = partial(written_step, optimizer, str(param.name), param.type, dims)
            self.builder.diagnostics.of(build)

    def _constant(self, scope: Scope, node: ast.Expr) -> Operand:
        """The value of an option, computed as anywhere in the program."""
        return self.program.expressions.evaluate(node, scope)

    def _loss(self, node: ast.Expr, scope: Scope) -> Value:
        return need_loss("minimize", self.program.expressions.evaluate(node, scope), node.span)

    # --- recompute -----------------------------------------------------------------------------

    def recompute(self, node: ast.Recompute, scope: Scope) -> None:
        """Build a block with numbered operators; one inside another belongs to the outer one."""
        body = without_returns(node.body, "block", self.builder.diagnostics)
        if self.builder.block is not None:
            self.program.body(body, scope)
            return
        self.blocks += 1
        self.builder.block = self.blocks
        try:
            self.program.body(body, scope)
        finally:
            self.builder.block = None


def _at_the_end(minimize: Span) -> tuple[Fix, ...]:
    """The fix that moves a statement to the end of its program."""
    program = enclosing(minimize, ast.ProgramDecl)
    if program is None:
        return ()
    end = program.span.end - 1
    moved = Edit(Span(minimize.source, end, end), f"  {minimize.text}\n")
    edits = (Edit(without_line(minimize), ""), moved)
    return (Fix("move it to the end of the program", edits, safe=False),)


def _check_of_step(first: Goal, other: Goal, node: ast.Minimize) -> None:
    """Refuse options of the whole step that a further `minimize` has of its own (MD0295)."""
    where = Related(first.span, "the first one")
    if first.optimizer.compress is not None or other.optimizer.compress is not None:
        message = "`compress` is for the gradients of one loss"
        fail("MD0295", message, node.span, where, help="leave it out, or add the losses up")
    for name, option in COMMON.items():
        value = other.optimizer.option(name)
        if name != "clip" and value not in (option.default, first.optimizer.option(name)):
            message = f"`{name}` is of the whole step, and the first `minimize` says it"
            fail("MD0295", message, node.span, where, help=f"write `{name}` there")


def need_loss(said: str, operand: Operand, span: Span) -> Value:
    """The loss; anything but one float is refused."""
    if not isinstance(operand, Value):
        need_tensor(operand, span)
    type_ = operand.type
    if type_.dims:
        message = f"`{said}` needs a single number, and this is {type_}"
        fixes = tuple(
            around(span, f"{name}(", ")", f"write `{name}({shortened(span)})`", safe=False)
            for name in ("mean", "sum")
        )
        fail("MD0290", message, span, fixes=fixes)
    if type_.dtype.kind != "float":
        help = "gradients are of floats: `cast(x, f32)` before it is reduced"
        fail("MD0290", f"`{said}` needs a float, and this is {type_}", span, help=help)
    return operand


def _as_float(value: Value) -> tuple[Fix, ...]:
    """The fix that declares an input as floats."""
    program = enclosing(value.span, ast.ProgramDecl) if value.role == "input" else None
    params = () if program is None else program.params
    dtypes = (param.dtype for param in params if param.span == value.span)
    return tuple(
        Fix(f"declare `{value.label}: f32`", (Edit(dtype.span, "f32"),), safe=False)
        for dtype in dtypes
        if dtype is not None
    )
