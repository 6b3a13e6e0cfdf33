"""MD0270 to MD0289: optimizers and schedules of `minimize`."""

from __future__ import annotations

from meshdsl.codes.record import Code


def _example(optimizer: str) -> str:
    """A small program that is trained with `optimizer`."""
    return (
        "dim a = 4\n"
        "program p(x[a]) {\n"
        "  param w[a]\n"
        "  loss = sum((x - w)^2)\n"
        "  return loss\n"
        f"  minimize loss with {optimizer}\n"
        "}"
    )


CODES: tuple[Code, ...] = (
    Code(
        "MD0270",
        "an unknown optimizer",
        "After `with` stands one of `sgd`, `momentum`, `adam`, `adamw` and `adafactor`, with its "
        "options.",
        _example("addam(lr=1e-3)"),
        "Correct the name; docs/training.md lists what each of them can be told.",
    ),
    Code(
        "MD0271",
        "an unknown schedule of the learning rate",
        "`lr` is a number or one of `constant(value)`, `linear_warmup(peak, warmup)`, "
        "`cosine(peak, steps)` and `linear(peak, steps)`.",
        _example("adam(lr=cosinus(1e-3, 1000))"),
        "Correct the name.",
    ),
    Code(
        "MD0272",
        "an option that the optimizer or schedule does not have",
        "The name is none of its options, or more arguments stand without a name than it takes: an "
        "optimizer takes the learning rate so, everything else by name.",
        _example("adam(lr=1e-3, beta=0.9)"),
        "Correct the name, or leave the option out.",
    ),
    Code(
        "MD0273",
        "an option given twice",
        "A value stands in the place of the option, and again behind its name.",
        _example("sgd(0.1, lr=0.01)"),
        "Remove one of them.",
    ),
    Code(
        "MD0274",
        "a schedule that lacks an argument",
        "A schedule falls from its peak over a number of steps, and has no default for either.",
        _example("adam(lr=cosine(3e-4))"),
        "Give it: `cosine(3e-4, 1000)`.",
    ),
    Code(
        "MD0275",
        "an option of another kind than it must be",
        "Each option is a number, an integer, `true` or `false`, or a dtype in quotes. Constants "
        "are computed; a tensor is no option.",
        _example("adam(lr=1e-3, accumulate=2.5)"),
        "Write a value of the kind that the message names.",
    ),
    Code(
        "MD0276",
        "an option outside of its range",
        "The learning rate, `eps` and `clip` are above 0; `beta`, `beta1` and `beta2` at least 0 "
        "and below 1; `accumulate` is 1 or more; a schedule warms up in fewer steps than it has "
        "and ends no higher than its peak.",
        _example("adamw(lr=1e-3, beta2=1.0)"),
        "Write a value in the range that the message names.",
    ),
)
