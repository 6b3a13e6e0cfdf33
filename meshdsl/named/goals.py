"""`grad(loss, x, …)`, `minimize loss with …` and `recompute { … }`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.diagnostics import Related, Span, fail
from meshdsl.named.autodiff import gradients
from meshdsl.named.autodiff_active import feeding
from meshdsl.named.builder import Operand, Scope, need_tensor
from meshdsl.named.ir import Goal, Value, results
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

FORM = "`grad(loss, x, …)`"


class Goals:
    """What a program says about its loss."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.goal: Goal | None = None
        self.blocks = 0

    # --- grad ----------------------------------------------------------------------------------

    def grad(self, node: ast.Call, scope: Scope) -> tuple[Value, ...]:
        """The values of a call `grad(loss, x, …)`: one gradient per tensor after the loss."""
        if node.items is not None or node.keywords or node.out or len(node.args) < 2:
            fail("MD0252", "`grad` takes a loss and tensors", node.span, help=f"write {FORM}")
        operands = [self.program.expressions.evaluate(arg, scope) for arg in node.args]
        spans = [arg.span for arg in node.args]
        return self.gradients(operands, spans, node.span)

    def gradients(
        self, operands: list[Operand], spans: list[Span], span: Span
    ) -> tuple[Value, ...]:
        """The gradients of the first operand by the others; `spans` are where they stand."""
        loss = need_loss("grad", operands[0], spans[0])
        wrt = [self._variable(x, s) for x, s in zip(operands[1:], spans[1:], strict=True)]
        for value, place in zip(wrt, spans[1:], strict=True):
            self._need_clear(loss, value, place)
        start = len(self.builder.frames[-1].body)
        found = gradients(self.builder, loss, wrt)
        for value, grad, place in zip(wrt, found, spans[1:], strict=True):
            if grad is None:
                message = f"the loss does not depend on `{value.label}`"
                where = Related(spans[0], "this loss")
                help = "integers, comparisons and `stop_gradient` pass no gradient on; leave it out"
                fail("MD0292", message, place, where, help=help)
        grads = tuple(g for g in found if g is not None)
        made = {v for node in self.builder.frames[-1].body[start:] for v in results(node)}
        self.builder.nameless.update(made.intersection(g for g in grads if g.follows is not None))
        return grads

    def _variable(self, operand: Operand, span: Span) -> Value:
        if not isinstance(operand, Value):
            need_tensor(operand, span)
        if operand.type.dtype.kind != "float":
            message = f"there is no gradient with respect to {operand.type}"
            fail("MD0291", message, span, help="gradients are of floats: `cast(x, f32)` first")
        return operand

    def _need_clear(self, loss: Value, value: Value, span: Span) -> None:
        """MD0293 where earlier iterations of a loop may lead from a value outside to the loss."""
        carried = self.builder.carried(feeding(self.builder.frames[-1].body, {loss}), value)
        if carried is not None:
            message = (
                f"`{value.label}` is made outside of this `repeat`, which carries `{carried.label}`"
            )
            help = "let the loop carry it too (assign to it inside), or take the gradient after it"
            fail("MD0293", message, span, Related(value.span, "made here"), help=help)

    # --- minimize ------------------------------------------------------------------------------

    def minimize(self, node: ast.Minimize, scope: Scope) -> None:
        """Note what is to be minimised, and how; `training.py` makes the training step of it."""
        from meshdsl.named.optimizers import optimizer_of

        if self.goal is not None:
            where = Related(self.goal.span, "the first one")
            message = "a program minimises one loss"
            help = "add the losses up, or make it another program"
            fail("MD0295", message, node.span, where, help=help)
        if scope.path or len(self.builder.frames) > 1:
            help = "write it at the end of the program"
            fail("MD0296", "`minimize` stands at the end of a program", node.span, help=help)
        operand = self.program.expressions.evaluate(node.value, scope)
        loss = need_loss("minimize", operand, node.value.span)
        optimizer = optimizer_of(node.optimizer, self.program.expressions, scope)
        self.goal = Goal(loss, optimizer, node.span)

    # --- recompute -----------------------------------------------------------------------------

    def recompute(self, node: ast.Recompute, scope: Scope) -> None:
        """A block whose operators are numbered; one inside another belongs to the outer one."""
        for statement in node.body:
            if isinstance(statement, ast.Return):
                help = "return after the block"
                fail("MD0113", "`return` inside `recompute`", statement.span, help=help)
        if self.builder.block is not None:
            self.program.body(node.body, scope)
            return
        self.blocks += 1
        self.builder.block = self.blocks
        try:
            self.program.body(node.body, scope)
        finally:
            self.builder.block = None


def need_loss(said: str, operand: Operand, span: Span) -> Value:
    """The loss; refused unless it is one float."""
    if not isinstance(operand, Value):
        need_tensor(operand, span)
    type_ = operand.type
    if type_.dims:
        help = f"reduce it first: `mean(…)`, or `sum(…)` over {', '.join(type_.names)}"
        fail("MD0290", f"`{said}` needs a single number, and this is {type_}", span, help=help)
    if type_.dtype.kind != "float":
        help = "gradients are of floats: `cast(x, f32)` before it is reduced"
        fail("MD0290", f"`{said}` needs a float, and this is {type_}", span, help=help)
    return operand
