"""MD00xx: reading files, words, and the shape of the text."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES = (
    Code(
        "MD0001",
        "something else was expected here",
        "The text does not follow the grammar. The message names what could stand at this place "
        "and what was found instead. The parser then skips to the next line, entry or block, so "
        "one run shows every such place of the file.",
        "dim batch: 64",
        "Write what the message asks for; grammar/README.md shows every form of the language.",
    ),
    Code(
        "MD0002",
        "a character that the language does not know",
        "Outside of comments and strings, only ASCII letters, digits, spaces and the signs of the "
        "language may stand.",
        "dim batch = 64;",
        "Remove the character, or write the sign that the help line names. A statement ends with "
        "its line, without a semicolon.",
    ),
    Code(
        "MD0003",
        "brackets do not match",
        "A bracket or a block was opened and not closed, or closed by a bracket of another kind, "
        "or closed without having been opened.",
        "dim hidden = 4 * (batch + 1",
        "Add or remove the bracket. `( )` hold tensors, `[ ]` hold dims, `{ }` hold blocks.",
    ),
    Code(
        "MD0004",
        "a reserved word as a name",
        "Some words have a fixed meaning and cannot name anything: dim mesh layout sbp def program "
        "expect on extends at over by param repeat recompute return minimize with and or not.",
        "dim dim = 3",
        "Choose another name.",
    ),
    Code(
        "MD0005",
        "a line ends after an operator, or begins with one",
        "A new line ends a statement, except inside `( )` and `[ ]`. An expression cannot run on "
        "over the end of a line without brackets.",
        "dim hidden = 4 *\n  64",
        "Put the expression in parentheses, or write it on one line.",
    ),
    Code(
        "MD0006",
        "comparisons do not chain",
        "A comparison gives a tensor of truth values, which is not compared again.",
        "dim wide = 1 < 2 < 3",
        "Write two comparisons joined by `and`: `1 < x and x < 3`.",
    ),
    Code(
        "MD0007",
        "a number that cannot be read",
        "The word begins like a number but is none, is an integer of more than 20 digits, or is "
        "a float larger than any that a computer holds.",
        "dim hidden = 4x",
        "Write integers as `4096` or `4_096` and floats as `0.5` or `1e-3`; write products with "
        "`*`.",
    ),
    Code(
        "MD0008",
        "nested too deep",
        "More than 100 brackets are open at once, or more than 200 operators, calls and views "
        "stand inside each other.",
        "dim hidden = " + "(" * 101 + "1" + ")" * 101,
        "Give parts of the expression names of their own. A sum over many tensors is better "
        "written as one tensor with one more dim and `sum`.",
    ),
    Code(
        "MD0009",
        "a string that cannot be read",
        "The string is not closed on its line, or a backslash in it is followed by something other "
        'than `n`, `t`, `"` or another backslash.',
        'program p() {\n  x = f(pad="same)\n}',
        "Close the string, or double the backslash.",
    ),
    Code(
        "MD0010",
        "a file that cannot be read",
        "There is no such file, it is a folder, a device or a pipe, or the system refuses to read "
        "it.",
        "",
        "Check the path and the permissions.",
    ),
    Code(
        "MD0011",
        "a file that is not UTF-8",
        "The bytes of the file are not UTF-8 text. The message gives the offset of the first byte "
        "that is wrong.",
        "",
        "Save the file as UTF-8.",
    ),
    Code(
        "MD0012",
        "a file with a NUL byte",
        "Text files hold no NUL bytes; this may be a binary file, or UTF-16.",
        "",
        "Check that it is the right file, and save it as UTF-8.",
    ),
    Code(
        "MD0013",
        "a name with letters outside of ASCII",
        "Names become names in generated programs, files and reports of other tools, so they are "
        "made of the letters a to z and A to Z, digits and `_`.",
        "dim größe = 3",
        "Spell the name in ASCII. Comments and strings may hold any letters.",
    ),
    Code(
        "MD0014",
        "a declaration or a statement in the wrong place",
        "Declarations (dim, mesh, layout, sbp, def, program, expect) stand at the top of the file. "
        "Statements stand inside the braces of a program or a function.",
        "loss = 3",
        "Move the line.",
    ),
    Code(
        "MD0015",
        "arguments or brackets that make no sense",
        "An argument without a name follows one with a name, one name is given twice, or a view "
        "has empty brackets.",
        "program p(x[batch]) {\n  y = f(rate=1, x)\n}",
        "Put arguments without names first, name each argument once, and say in the brackets of a "
        "view what it does.",
    ),
    Code(
        "MD0016",
        "more syntax errors than are shown",
        "The parser stops after 20 errors in one file.",
        "a\n" * 20,
        "Mend the errors shown and run again.",
    ),
    Code(
        "MD0017",
        "a text that is too large",
        "A text has at most 500,000 words, which is more than any program that can be compiled, "
        "and a name at most 255 characters.",
        f"dim {'a' * 256} = 3",
        "Check that it is the right file. What is done many times is written once, with `repeat` "
        "and `def`; numbers are given as inputs or parameters.",
    ),
)
