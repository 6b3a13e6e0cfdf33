"""MD04xx: expectations."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0401",
        "an expectation that does not hold",
        "An `expect` block says how a tensor is placed, how often a collective runs or how many "
        "bytes are sent under a layout on a mesh, and the compiled program does otherwise.",
        "dim batch = 4\n"
        "mesh pod = { data: 2 }\n"
        "layout l { batch -> data }\n"
        "program p(x[batch]) {\n  y = relu(x)\n  return y\n}\n"
        "expect l on pod { y: [batch] }",
        "`meshdsl explain` shows what the program does and why; change the layout, or what is "
        "expected.",
    ),
    Code(
        "MD0402",
        "an expectation about nothing",
        "The block names a tensor that the program does not have (a warning), or a figure or an "
        "axis that does not exist.",
        "dim batch = 4\n"
        "mesh pod = { data: 2 }\n"
        "layout l { batch -> data }\n"
        "program p(x[batch]) {\n  y = relu(x)\n  return y\n}\n"
        "expect l on pod { all_reduc over data: 0 }",
        "Correct the name.",
    ),
)
