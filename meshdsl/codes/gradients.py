"""MD029x: gradients and what is minimised."""

from __future__ import annotations

from meshdsl.codes.record import Code

_MESH = "dim batch = 4, n = 4\nmesh pod = { data: 2 }\n"


def _program(*lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"{_MESH}program p(x[batch], ids[batch]: i32) {{\n  param w[batch]\n{body}}}"


CODES: tuple[Code, ...] = (
    Code(
        "MD0290",
        "a loss that is not a single float",
        "Gradients are of one number: the loss of `grad` and `minimize` has no dims and is a "
        "float.",
        _program("return grad(x * w, x)"),
        "Reduce it: `mean(…)` or `sum(…)`; cast integers to floats before.",
    ),
    Code(
        "MD0291",
        "a gradient with respect to what is no float",
        "Integers and truth values do not change a little.",
        _program("return grad(sum(x * w), ids)"),
        "Take the gradient with respect to a float tensor.",
    ),
    Code(
        "MD0292",
        "a gradient with respect to something the loss does not depend on",
        "Nothing leads from the tensor to the loss, or only what passes no gradient on: integers, "
        "comparisons, `floor`, `argmax`, `stop_gradient`.",
        _program("return grad(sum(x), w)"),
        "Leave the tensor out, or let the loss depend on it.",
    ),
    Code(
        "MD0293",
        "a gradient inside a loop with respect to something outside of it",
        "Inside a `repeat`, earlier iterations may depend on a tensor from outside too; what its "
        "gradient in one iteration means would not be clear.",
        f"{_MESH}program p(x[batch], w[batch]) {{\n  h = x\n"
        "  repeat n {\n    h = h - grad(sum(h * w), w)\n  }\n  return h\n}",
        "Carry it through the loop by assigning to it, or take the gradient after the loop.",
    ),
    Code(
        "MD0294",
        "a loss that depends on no parameter",
        "`minimize` changes parameters, and none of them leads to the loss.",
        _program("loss = sum(x)", "return loss", "minimize loss with sgd(lr=0.1)"),
        "Declare `param`s and use them, or leave the statement out.",
    ),
    Code(
        "MD0295",
        "two losses",
        "A program minimises one loss.",
        _program(
            "loss = sum(x * w)",
            "return loss",
            "minimize loss with sgd(lr=0.1)",
            "minimize loss with sgd(lr=0.1)",
        ),
        "Add the losses up, or write two programs.",
    ),
    Code(
        "MD0296",
        "`minimize` in the middle of things",
        "`minimize` says what a program is for; it stands in the program, not in a function or a "
        "loop.",
        f"{_MESH}program p(x[batch]) {{\n  param w[batch]\n"
        "  repeat n {\n    minimize sum(x * w) with sgd(lr=0.1)\n  }\n  return sum(x * w)\n}",
        "Move it to the end of the program.",
    ),
)
