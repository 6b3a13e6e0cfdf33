"""MD01xx: names and declarations."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0101",
        "an unknown dim",
        "The name stands where a dim is needed, and no `dim` of this file and no dim parameter of "
        "the function is called so.",
        "dim d_model = 4\nprogram p(x[d_modle]) { return x }",
        "Correct the name, or declare the dim: `dim d_modle = 4`.",
    ),
    Code(
        "MD0102",
        "an unknown tensor",
        "The name stands in an expression, and no input, parameter or statement before it is "
        "called so.",
        "dim a = 4\nprogram p(hidden[a]) { return hiden }",
        "Correct the name, or give it a value before it is used.",
    ),
    Code(
        "MD0103",
        "an unknown function or operator",
        "Something is called that is no operator of the language, no function of its library and "
        "no `def` of this file.",
        "dim a = 4\nprogram p(x[a]) { return rellu(x) }",
        "Correct the name, or define it; grammar/README.md lists the operators.",
    ),
    Code(
        "MD0104",
        "a name declared twice",
        "Two dims, meshes, layouts, functions or programs of a file, two inputs or outputs of a "
        "program, two parameters of a function or two axes of a mesh have one name.",
        "dim a = 4\ndim a = 5\nprogram p(x[a]) { return x }",
        "Remove one of them, or give it another name.",
    ),
    Code(
        "MD0105",
        "a size that is no whole number of 1 or more",
        "Sizes of dims and mesh axes are computed by constant integer arithmetic over numbers and "
        "dims: `+ - * / ^`. A division must leave no remainder.",
        "dim a = 7 / 2",
        "Write an expression that yields a whole number of 1 or more.",
    ),
    Code(
        "MD0106",
        "a size that is too large",
        "A dim or a mesh axis is at most 2147483647 (2^31 - 1) long.",
        "dim a = 10^13",
        "Choose a smaller size. A tensor of several dims may have up to 2^63 - 1 elements.",
    ),
    Code(
        "MD0107",
        "a declaration that depends on itself",
        "The size of a dim is computed from its own size, or a layout extends itself, perhaps "
        "over others.",
        "dim a = b + 1, b = a - 1",
        "Break the circle: give one of them a size, or rules, of its own.",
    ),
    Code(
        "MD0108",
        "an unknown mesh, layout, program or reduction policy",
        "An option of the command line, an `extends` or an `expect` names what the file does not "
        "declare.",
        "dim a = 4\nlayout two extends one { a -> none }",
        "Correct the name, or declare what it should mean.",
    ),
    Code(
        "MD0109",
        "a name that has a meaning already",
        "`params`, `grads` and `state` are selectors of layouts and cannot name a tensor; `none` "
        "means no axis in a layout and cannot name an axis.",
        "dim a = 4\nprogram p(params[a]) { return params }",
        "Choose another name.",
    ),
    Code(
        "MD0110",
        "a function that calls itself",
        "Functions are put in place of their calls before anything else happens, so a function "
        "cannot call itself, nor can two call each other.",
        "dim a = 4\ndef f(x[a]) -> [a] { return f(x) }\nprogram p(x[a]) { return f(x) }",
        "Write the repetition as `repeat`.",
    ),
    Code(
        "MD0111",
        "no program, or several to choose from",
        "The command works on one program, and the file has none, or more than one and "
        "`--program` does not choose.",
        "",
        "Declare a program, or choose one: `--program NAME`.",
    ),
    Code(
        "MD0112",
        "a name that exists only inside a loop",
        "What is assigned inside `repeat` for the first time belongs to one iteration; only names "
        "that existed before are carried out of the loop.",
        "dim a = 4, n = 2\nprogram p(x[a]) {\n  repeat n { h = relu(x) }\n  return h\n}",
        "Give the name a value before the loop.",
    ),
    Code(
        "MD0113",
        "a `return` that is missing or in the wrong place",
        "Every program and every function ends with one `return`; nothing stands after it, and it "
        "does not stand inside `repeat`.",
        "dim a = 4\nprogram p(x[a]) { y = relu(x) }",
        "End the block with `return NAME, …`.",
    ),
    Code(
        "MD0114",
        "an unknown dtype",
        "The dtypes are f32 (the default), f64, bf16, f16, i32, i64 and bool.",
        "dim a = 4\nprogram p(x[a]: f31) { return x }",
        "Use one of them.",
    ),
    Code(
        "MD0115",
        "`--set` of a dim that the file does not declare",
        "`--set DIM=N` gives a declared dim another size.",
        "",
        "Correct the name.",
    ),
    Code(
        "MD0116",
        "a function of this file stands before one of the library",
        "A `def` has the name of an operator or of a library function. Calls in this file mean the "
        "`def`. This is only a note.",
        "dim a = 4\n"
        "def relu(x[a]) -> [a] { return maximum(x, 0) }\n"
        "program p(x[a]) { return relu(x) }",
        "Rename the function if the library's was meant.",
    ),
    Code(
        "MD0117",
        "a program with too many operators",
        "Functions are put in place of their calls; where functions call functions several times "
        "each, the program grows beyond all measure.",
        "dim a = 4\n"
        "def f0(x[a]) -> [a] { return x + x }\n"
        + "".join(
            f"def f{n}(x[a]) -> [a] {{ return {'+'.join([f'f{n - 1}(x)'] * 10)} }}\n"
            for n in range(1, 7)
        )
        + "program p(x[a]) { return f6(x) }",
        "Use `repeat` for what is done many times.",
    ),
    Code(
        "MD0118",
        "loops nested too deep",
        "More than 12 `repeat` stand inside each other, those of called functions counted.",
        "dim a = 4, n = 2\n"
        "program p(x[a]) {\n" + "repeat n {\n" * 13 + "x = x + 1\n" + "}\n" * 13 + "return x\n}",
        "Merge the dims of two loops into one: `dim nm = n * m`.",
    ),
)
