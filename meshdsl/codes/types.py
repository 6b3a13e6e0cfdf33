"""MD02xx: types and dims."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0201",
        "operands of different dtypes",
        "Nothing is converted unasked, except literals: both operands must have one dtype.",
        "dim a = 4\nprogram p(x[a], n[a]: i32) { return x + n }",
        "Convert one of them: `cast(n, f32)`.",
    ),
    Code(
        "MD0202",
        "an operator that does not work on this dtype",
        "Some operators need floats, numbers, integers or truth values.",
        "dim a = 4\nprogram p(n[a]: i32) { return exp(n) }",
        "Convert the operand: `cast(n, f32)`; compare to get truth values: `n != 0`.",
    ),
    Code(
        "MD0203",
        "a division of integers",
        "`/` yields the exact quotient, which integers cannot hold.",
        "dim a = 4\nprogram p(n[a]: i32, m[a]: i32) { return n / m }",
        "Convert both with `cast(n, f32)`, and back with `cast(floor(…), i32)` where needed.",
    ),
    Code(
        "MD0204",
        "a dim that the tensor does not have",
        "The dims in the brackets of a reduction or a normaliser must be dims of its operand.",
        "dim a = 4, b = 3\nprogram p(x[a]) { return sum[b](x) }",
        "Name one of the dims of the tensor.",
    ),
    Code(
        "MD0205",
        "a dim twice in one tensor",
        "A tensor has every dim at most once; this operator would yield one with a dim twice.",
        "dim a = 4, b = 4\nprogram p(x[a, b]) { return x[a -> b] }",
        "Rename one of the two first: `dim other = b`, then `x[b -> other]`.",
    ),
    Code(
        "MD0206",
        "one dim with two sizes",
        "Two operands have a dim of the same name and different sizes. A file cannot write this; "
        "tensors that are made from Python can.",
        "",
        "Give the two dims different names.",
    ),
    Code(
        "MD0207",
        "a result dim that no operand has",
        "The dims on the right of the arrow of `einsum` come from its operands.",
        "dim a = 4, b = 3, c = 5\nprogram p(x[a], y[b]) { return einsum(x, y -> [a, c]) }",
        "Leave the dim out, or add an operand that has it, such as `ones[c]()`.",
    ),
    Code(
        "MD0209",
        "sizes that do not fit together",
        "A view, `concat` or `pad` yields a number of elements that is not the size of the dim "
        "they go into.",
        "dim a = 6, b = 2, c = 4\nprogram p(x[a]) { return x[a -> (b, c)] }",
        "Declare the dim with the size that the message names.",
    ),
    Code(
        "MD0210",
        "an index or a slice outside of its dim",
        "Indices of a dim run from 0 to its size less one; a slice holds at least one element.",
        "dim a = 4\nprogram p(x[a]) { return x[a = 4] }",
        "Correct the index. There are no negative indices.",
    ),
    Code(
        "MD0211",
        "indices that are no integers",
        "A tensor that indexes another holds i32 or i64.",
        "dim vocab = 8, seq = 4\nprogram p(table[vocab], ids[seq]) { return table[vocab = ids] }",
        "Declare the input as `ids[seq]: i32`, or convert: `cast(ids, i32)`.",
    ),
    Code(
        "MD0213",
        "an option or a constant that the operator cannot take",
        "The value is of the right kind, but this operator gives it no meaning.",
        'dim a = 4\nprogram p(x[a]) { return gelu(x, approximate="fast") }',
        "Use one of the values that the message names.",
    ),
    Code(
        "MD0214",
        "operands whose dims do not fit together",
        "The operator needs operands with certain dims: the targets of a cross entropy have those "
        "of the logits less the classes, tensors are joined that differ in one dim.",
        "dim a = 4, b = 3\nprogram p(x[a, b], g[b]) { return layer_norm[a](x, g, g) }",
        "Rename the dims of one of them: `x[a -> b]`.",
    ),
    Code(
        "MD0216",
        "a `concat` that cannot tell which dims to join",
        "`concat[all](x, y)` leaves it to the names: of each tensor, the only dim that not all of "
        "them have becomes the dim in the brackets, or the only dim there is. Sizes never say what "
        "is joined.",
        "dim a = 4, b = 3, all = 8\nprogram p(x[a, b], y[a, b]) { return concat[all](x, y) }",
        "Name the dim of each tensor that goes in, `concat[(a, a) -> all](x, y)`, or one for all: "
        "`concat[a -> all](x, y)`.",
    ),
    Code(
        "MD0250",
        "a tensor that is not as declared",
        "The dims or the dtype of a tensor are not those that its target, the function it is "
        "passed to or the result of the function declares; or what is declared has no meaning "
        "there.",
        "dim a = 4, b = 3\nprogram p(x[a]) {\n  y[b] = relu(x)\n  return y\n}",
        "Change the declaration or the tensor. The order of the dims does not matter.",
    ),
    Code(
        "MD0251",
        "too many tensors, or too few",
        "An operator or a function is called with a number of tensors, or with names of them, that "
        "it does not take.",
        "dim a = 4\nprogram p(x[a]) { return relu(x, x) }",
        "Write the call as the help line shows it.",
    ),
    Code(
        "MD0252",
        "brackets that do not say what this needs",
        "`[ ]` hold dims: those that a reduction sums, a normaliser works along, a function takes, "
        "or what a view does. This call or view needs others, or none.",
        "dim a = 4\nprogram p(x[a]) { return softmax(x) }",
        "Write the call as the help line shows it.",
    ),
    Code(
        "MD0253",
        "an option that is unknown, missing or no constant",
        "Options of operators, indices and the bounds of slices are numbers or strings known at "
        "compile time.",
        "dim a = 4\nprogram p(x[a]) { return relu(x, slope=2) }",
        "Use an option that the operator has, and give it a constant.",
    ),
    Code(
        "MD0254",
        "something that is no tensor where one is needed",
        "A string or the name of a dtype stands where a tensor is needed, or a program returns a "
        "number.",
        "dim a = 4\nprogram p(x[a]) { return 3 }",
        "Name a tensor, or make one.",
    ),
    Code(
        "MD0255",
        "a tensor with too many elements",
        "Tensors have fewer than 2^63 elements. Nothing of this size is ever made: sizes are "
        "checked before.",
        "dim a = 2^31 - 1, b = a, c = a\nprogram p(x[a, b, c]) { return x }",
        "Choose smaller dims.",
    ),
    Code(
        "MD0256",
        "a loop that changes what it carries",
        "A name that existed before a `repeat` and is assigned in it is carried from one iteration "
        "to the next, with the same dims and dtype, and without the dim of the loop.",
        "dim a = 4, b = 3, n = 2\nprogram p(x[a], y[b]) {\n  repeat n { x = x + y }\n  return x\n}",
        "Assign to another name inside the loop, or bring the tensor back to the type it had.",
    ),
    Code(
        "MD0257",
        "a number that does not go with the tensor",
        "A literal takes the dtype of the tensor it is combined with: a fraction cannot become an "
        "integer, nor can an integer that is too large, and no number becomes a truth value.",
        "dim a = 4\nprogram p(n[a]: i32) { return n + 0.5 }",
        "Convert the tensor: `cast(n, f32) + 0.5`.",
    ),
    Code(
        "MD0258",
        "a number of names that is not the number of tensors",
        "Each tensor that the right side yields gets one name.",
        "dim a = 4\nprogram p(x[a]) {\n  y, z = relu(x)\n  return y\n}",
        "Write as many names as there are tensors.",
    ),
    Code(
        "MD0259",
        "a dim twice in one list",
        "A tensor has every dim at most once. A parameter inside `repeat` gains the dim of the "
        "loop by itself.",
        "dim a = 4\nprogram p(x[a, a]) { return x }",
        "Declare another name for the second: `dim other = a`.",
    ),
    Code(
        "MD0260",
        "an initialiser that does not exist, or not with these arguments",
        "Parameters begin as `zeros()`, `ones()`, `normal(0.02)`, `uniform(-1, 1)`, `glorot()` or "
        "`he()`; without one as `normal(1/sqrt(fan_in))`.",
        "dim a = 4\nprogram p(x[a]) {\n  param w[a] = zeroes()\n  return x * w\n}",
        "Write one of these.",
    ),
    Code(
        "MD0261",
        "a constant that cannot be computed",
        "Numbers among themselves are computed at compile time, and the result is not a finite "
        "number.",
        "dim a = 4\nprogram p(x[a]) { return x * (1 / 0) }",
        "Correct the expression.",
    ),
)
