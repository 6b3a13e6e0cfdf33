"""MD09xx: what is not supported yet."""

from __future__ import annotations

from meshdsl.codes.record import Code

_MESH = "dim batch = 4, n = 4\nmesh pod = { data: 2 }\n"

CODES: tuple[Code, ...] = (
    Code(
        "MD0901",
        "an operator that is not supported yet",
        "`conv`, `max_pool`, `avg_pool`, `top_k`, `dropout` and the random makers `normal` and "
        "`uniform` are part of the language, and not built yet.",
        f"{_MESH}program p(x[batch]) {{ return dropout(x, 0.1, 3) }}",
        "Compute it outside and pass the tensor as an input.",
    ),
    Code(
        "MD0906",
        "cluster profiles are not supported yet",
        "`mesh … on PROFILE` names the hardware for costs in seconds, which are not built yet. It "
        "is read and left aside with a warning.",
        "mesh pod = { data: 2 } on h100",
        "Leave `on` out, or live with the warning.",
    ),
    Code(
        "MD0907",
        "a loop over devices is not supported yet",
        "A layout splits the dim of a `repeat` over a mesh axis, which makes a pipeline; that is "
        "not built yet.",
        f"{_MESH}layout l {{ n -> data }}\n"
        "program p(x[batch]) {\n  repeat n { x = x + 1 }\n  return x\n}",
        "Leave the rule out for now.",
    ),
    Code(
        "MD0909",
        "a command that is not supported yet",
        "The command is part of the language's reference, and not built yet.",
        "",
        "`meshdsl --help` lists the commands there are.",
    ),
    Code(
        "MD0910",
        "an operator that a rendering cannot write",
        "`meshdsl render --as jax` and `--as oneflow` write operators in those systems' own words, "
        "and have none for this one yet, or not for operands of these dims. No such program has "
        "words for the update of a training step.",
        "",
        "`meshdsl compile` writes every operator as torch; `--as dtensor` all but updates. Without "
        "`--step`, gradients and update are left out.",
    ),
)
