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
    Code(
        "MD0302",
        "two dims of one tensor over one mesh axis",
        "A device has one place on an axis, so it can hold a part of one dim of a tensor by it, "
        "not of two. Rules of one layout ask for both.",
        "dim batch = 4, seq = 8\n"
        "mesh pod = { data: 2 }\n"
        "layout l { batch -> data, seq -> data }\n"
        "program p(x[batch, seq]) { return x }",
        "Split one of the dims over another axis, or free it for this tensor: `x: seq -> none`.",
    ),
    Code(
        "MD0303",
        "two rules that are equally narrow",
        "Of all rules for a dim of a tensor the narrowest wins: a rule for one tensor over one for "
        "a function, that over one for `params`, that over one without a selector. Two of the same "
        "kind disagree.",
        "dim batch = 4\n"
        "mesh pod = { data: 2, tp: 2 }\n"
        "layout l {\n  batch -> data\n  batch -> tp\n}\n"
        "program p(x[batch]) { return x }",
        "Keep one of them. Over both axes a dim is split by `batch -> (data, tp)`.",
    ),
    Code(
        "MD0304",
        "an axis that the mesh does not have",
        "A rule or an `@` names an axis that the mesh of this run does not have; it has no effect "
        "there. This is a warning, and an error under `--strict`.",
        "dim batch = 4\n"
        "mesh pod = { data: 2 }\n"
        "layout l { batch -> dta }\n"
        "program p(x[batch]) { return x }",
        "Correct the name, or choose a mesh that has the axis.",
    ),
    Code(
        "MD0305",
        "a rule for a dim that no tensor has",
        "No tensor of the program has the dim of this rule, so it has no effect. This is a "
        "warning, and an error under `--strict`.",
        "dim batch = 4\n"
        "mesh pod = { data: 2 }\n"
        "layout l { bach -> data }\n"
        "program p(x[batch]) { return x }",
        "Correct the name, or remove the rule.",
    ),
    Code(
        "MD0306",
        "a selector that selects nothing",
        "No tensor or function that has the dim is called as the selector says, so the rule has no "
        "effect. This is a warning, and an error under `--strict`.",
        "dim batch = 4\n"
        "mesh pod = { data: 2 }\n"
        "layout l { hidden: batch -> data }\n"
        "program p(x[batch]) {\n  hiden = relu(x)\n  return hiden\n}",
        "Correct the name: that of a tensor, of a function, or `params`.",
    ),
    Code(
        "MD0308",
        "an `sbp` block says what cannot be",
        "A component of the block is none there is, names a dim the tensor does not have, mixes "
        "reductions in one tensor, or there is not one component per mesh axis.",
        "dim a = 4\nmesh m = { x: 2 }\nprogram p(t[a]) { return t }\nsbp s { t: S(1) }",
        "Write one of `S(i)`, `B`, `P`, `P(max)`, `P(min)`, `P(prod)` per mesh axis, in mesh "
        "order; `i` counts the tensor's dims from 0.",
    ),
    Code(
        "MD0309",
        "an operator cannot read or yield it so",
        "`x at y: (…)` fixes how a tensor is read on the way to `y`, and `x: P` asks for a partial "
        "result. The operator that reads or makes it has no legal row with these components along "
        "the named mesh axis.",
        "dim a = 4\n"
        "mesh m = { x: 2 }\n"
        "program p(t[a]) {\n  y = relu(t)\n  return y\n}\n"
        "sbp s { t at y: P }",
        "Choose one of the legal rows that the help line lists; `meshdsl rows` prints them too.",
    ),
)
