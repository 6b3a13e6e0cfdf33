"""MD08xx: values at run time."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0801",
        "an index out of range",
        "A tensor of indices holds a value below 0 or not below the size of the dim it indexes. "
        "The message names line, position and value, the same in every engine and layout.",
        "",
        "Correct the indices. There are no negative ones that count from the end.",
    ),
)
