"""`grad` in a program: each is replaced by the operators of its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Related, Span, advice, fail
from meshdsl.ir.rewrite import Visitor, feeding, substitute
from meshdsl.named.autodiff import gradients
from meshdsl.named.builder import Builder, Frame
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, walk
from meshdsl.syntax.statement_edits import without_gradient


def with_gradients(program: NamedProgram, diagnostics: Diagnostics) -> NamedProgram:
    """Replace each `grad` by its operators, in order: one may be of the result of another.

    A loss that does not depend on a tensor is MD0292, one that may do so through an earlier
    iteration of a loop MD0293.
    """
    if not any(op.name == "grad" for op in walk(program.body)):
        return program
    return _Gradients(diagnostics).program(program)


class _Gradients(Visitor):
    """Builds the program anew; `new` are values in place of those of the `grad` nodes."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.builder = Builder(diagnostics)
        self.new: dict[Value, Value] = {}

    def program(self, program: NamedProgram) -> NamedProgram:
        for value in (*program.inputs, *(p.value for p in program.params)):
            self.builder.place(value, 0)
        self._block(program.body)
        return program.rebuilt(self.builder.frames[0].body, lambda v: self.new.get(v, v))

    def _block(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self.visit(*substitute((node,), self.new))

    def op(self, op: NamedOp) -> None:
        if op.name == "grad":
            self._grad(op)
        else:
            self.builder.append(op)

    def loop(self, loop: NamedLoop) -> None:
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
        elif start is not None and grad.rules_from is not None:
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
    why = "integers, comparisons and `stop_gradient` pass no gradient on"
    fixes = without_gradient(place)
    help = advice(fixes, why) if fixes else f"{why}; leave it out"
    message = f"the loss does not depend on `{value.label}`"
    fail("MD0292", message, place, Related(loss, "this loss"), help=help, fixes=fixes)
