"""The form of every declaration and statement, for the help of a syntax error without a hint."""

from __future__ import annotations

FORMS = {
    "USE": "a package of operators is used by `use kernels`, on a line of its own",
    "DIM": "a dim is written `dim batch = 64`",
    "MESH": "a mesh is written `mesh pod = { data: 2, model: 4 }`, or with `on a100_dgx` after it",
    "LAYOUT": "a layout is written `layout name { batch -> data, hidden -> model }`",
    "SBP": "an `sbp` block is written `sbp name { x: (S(0), B) }`",
    "SCHEDULE": "a schedule is written `schedule mine(stages=2, micro=2) { 0: F0 F1 B0 B1 … }`",
    "WEIGHTS": 'weights are written `weights hf { w: "layer.weight"[hidden, io] }`',
    "DEF": "a function is written `def f(x[batch]) -> [batch] { return … }`",
    "PROGRAM": "a program is written `program name(x[batch]) { return … }`",
    "EXPECT": "an expectation is written `expect layout for program on mesh { y: [batch@data] }`",
    "PARAM": "a parameter is written `param w[io, hidden] = normal(0.02)`",
    "REPEAT": "a loop is written `repeat layers { … }`",
    "RECOMPUTE": "a block is written `recompute { … }`",
    "RETURN": "results are written `return loss, y`",
    "MINIMIZE": "training is written `minimize loss with adam(lr=1e-3)`, or with groups after it: "
    "`{ norm: weight_decay = 0, base: frozen }`",
    "NAME": "a statement is written `y = relu(x)`",
}
ENTRIES = {
    "MESH": "an axis is written `data: 2`",
    "LAYOUT": "a rule is written `batch -> data`, or `h: batch -> none`",
    "SBP": "a tensor is written `x: (S(0), B)`",
    "SCHEDULE": "a row is written `0: F0 F1 B0 B1`, the actions of device 0 with blanks between",
    "WEIGHTS": 'a parameter is written `w: "layer.weight"[hidden, io]`, with the dims of the file',
    "MINIMIZE": "a group is written `norm: weight_decay = 0`, or `base: frozen`",
    "EXPECT": "an entry is written `h: [batch@data]`, or `all_reduce over data: 1`",
}


def form_of(head: str, inside: str | None = None) -> str:
    """The form of the construct that begins with `head`, in the block of a declaration `inside`."""
    if inside == "SCHEDULE" or (head == "NAME" and inside in ENTRIES):
        return ENTRIES[inside or ""]
    if head == "NAME" and inside is None:
        return FORMS["DIM"]
    return FORMS.get(head, "grammar/README.md shows every form of the language")
