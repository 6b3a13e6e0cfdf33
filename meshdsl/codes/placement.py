"""MD03xx: layouts, placement, divisibility."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0301",
        "a dim does not divide over its mesh axis",
        "A layout splits the dim over a mesh axis (or over the product of some axes) whose size "
        "does not divide the dim's size, so the devices would hold pieces of different sizes.",
        "dim heads = 6\n"
        "mesh pod = { tp: 4 }\n"
        "layout megatron { heads -> tp }\n"
        "program p(x[heads]) { return x }",
        "Choose one of the sizes that the help line names, split the dim over another axis, or "
        "leave it whole with `heads -> none`.",
    ),
)
