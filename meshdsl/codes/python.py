"""MD0810 to MD0829: programs written in Python."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0810",
        "a dim with two sizes in one program",
        "Two dims of one name and different sizes meet in a program that is written in Python. A "
        "dim has one size in a program; its name is what layouts know it by.",
        "",
        'Give one of them another name: `short = md.dim("short", 64)`.',
    ),
    Code(
        "MD0811",
        "a tensor of another program",
        "A tensor that was made while one program was traced is used while another one is. Each "
        "program has tensors of its own, and they have no values that could be passed on.",
        "",
        "Make it an input of the program that uses it, or compute it there again.",
    ),
    Code(
        "MD0812",
        "a Python condition on a traced tensor",
        "`if`, `while`, `assert`, `and`, `or` and `not` of Python decide at once, and a tensor has "
        "no values while the program is traced. Chained comparisons such as `a < b < c` are such "
        "decisions too.",
        "",
        "Choose per element with `md.where(condition, a, b)`; write `& | ~` for `and or not`.",
    ),
    Code(
        "MD0813",
        "an operator outside of any program",
        "Operators, parameters and loops stand in functions under `@md.program`, and in functions "
        "that these call. A tensor that was kept from a trace is of no use after it.",
        "",
        "Move the expression into a program; compute with the arrays that a plan yields outside.",
    ),
    Code(
        "MD0814",
        "values of a traced tensor",
        "`len`, iteration, `float`, numpy and torch ask for the values of a tensor. It has none "
        "while the program is traced; they come when a plan is called.",
        "",
        "Use the operators of `md`; sizes are `x.shape`, and `int(batch)` is the size of a dim.",
    ),
    Code(
        "MD0815",
        "a value that does not belong here",
        "An operator takes tensors, numbers and dims; brackets and lists of dims take dims made by "
        "`md.dims` or `md.dim`; a mesh is one of `md.mesh`. Something else was given. An array "
        "cannot stand in a program either: its values would become part of it.",
        "",
        "Give arrays to the program as inputs, or as its parameters; use dims, not their names.",
    ),
    Code(
        "MD0816",
        "a loop body that returns another number of tensors",
        "What `md.repeat` carries goes into the body as arguments and comes out as its results, "
        "the same number in the same order.",
        "",
        "Return what the body takes: `def body(x, state): …; return x, state`.",
    ),
    Code(
        "MD0817",
        "no name, or one that the language does not have",
        "Parameters, programs, functions, dims, mesh axes and the keys of a returned dict have "
        "names that layouts and files can write: ASCII letters, digits and `_`, and no word of the "
        "language. A parameter that is not assigned to a variable needs its name as first "
        "argument.",
        "",
        'Choose another name, or give one: `md.param("w", [io, hidden])`, `@md.program(name="f")`.',
    ),
    Code(
        "MD0818",
        "no rule of a layout",
        'A layout in Python is a dict (`{"batch": "rows"}`), the string of Mesh-TensorFlow '
        '(`"batch:rows,hidden:cols"`), or rules of the language (`"params: model -> data"`). An '
        "`sbp` block is a dict of components.",
        "",
        "Write it in one of these forms.",
    ),
    Code(
        "MD0819",
        "an input without dims",
        "The inputs of a program written in Python are the parameters of its function; each says "
        "in its annotation which dims it has, and of which element type it is.",
        "",
        "Annotate it: `x: md.Tensor[batch, io]`, or `ids: md.i32[batch]`.",
    ),
    Code(
        "MD0820",
        "a plan called with other inputs or parameters",
        "A plan is called with every input of its program, in order or by name, and with nothing "
        "else. Parameters are set by the names that `plan.params` has.",
        "",
        "Call it with all inputs; `plan.sample()` makes some up.",
    ),
    Code(
        "MD0821",
        "a program that cannot be written as text",
        "`to_mdsl` writes what a text could have said. What `grad` has computed is operators that "
        "no text calls, and two functions of one name cannot both be defined. Sizes are written as "
        "what they were made of, `sqrt(key)`, so that `--set` means the same; that is not known "
        "where Python took a size for a plain number: `math.sqrt(key)`, `key.size`, `int(key)`, "
        "`range(heads)`, `if seq > 128`, in the program, or before a number that it uses.",
        "",
        "Write the program without `grad`; rename one of the functions; compute with the dims: "
        "`md.sqrt(key)`, `key ** -0.5`, `4 * io`, or write the number out.",
    ),
)
