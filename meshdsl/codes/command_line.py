"""MD06xx: the command line."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0601",
        "an option that is not written as it should be",
        "`--set` takes `DIM=N`, `--mesh` a name or `axis:size,axis:size`, `--layout` a name or "
        "`dim:axis,dim:axis`.",
        "",
        "Write it so.",
    ),
    Code(
        "MD0602",
        "an option with a value that it does not know",
        "`--dtype` takes a float type, `--engine` one of local, torchrun and reference, `--out` a "
        "file whose name ends in .npz.",
        "",
        "Use one of these.",
    ),
    Code(
        "MD0603",
        "a code that does not exist",
        "`meshdsl explain` was asked about a code that no message has.",
        "",
        "Codes stand in front of every message: `error[MD0301]`.",
    ),
    Code(
        "MD0604",
        "a command that cannot be read",
        "A command or an option does not exist, an argument is missing, or a value is not of the "
        "kind that the option takes.",
        "",
        "`meshdsl --help` lists the commands, `meshdsl COMMAND --help` its options.",
    ),
    Code(
        "MD0605",
        "an operator that does not exist",
        "`meshdsl rows` was asked about an operator that the language does not have.",
        "",
        "Use the name by which programs call it, or a sign such as `+`.",
    ),
    Code(
        "MD0606",
        "a column that is asked for twice",
        "`meshdsl compare` was asked for the same layout, `sbp` block or policy twice.",
        "",
        "Name it once.",
    ),
)
