"""Small training programs in the form of emitted text, written by hand.

What the loop, the data and the engines promise is tested on them whatever the compiler does.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator

from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.torch.inliner import paste
from meshdsl.backends.torch.preamble import foot, spec_text

FILE = "line.mdsl"


def training_text(
    body: str,
    tables: str,
    mesh: dict[str, int] | None = None,
    groups: Iterable[tuple[str, ...]] = (),
    states: bool = True,
) -> ProgramText:
    """A program whose `device` has the given body; its line n is of line n of the source."""
    pasted = paste({"all_reduce", "check_index"})
    head = [
        "import numpy as np",
        "import torch",
        "import torch.distributed as dist",
        f"MESH = {mesh or {'d': 2}}",
        f"GROUPS = {tuple(groups)}",
        'LOSS = "loss"',
        *tables_text(tables),
    ]
    arguments = "rank, groups, inputs, params" + ", states" * states
    lines = textwrap.dedent(body).strip("\n").split("\n")
    text = "\n".join([*head, f"def device({arguments}):"])
    first = text.count("\n") + 2
    places = {first + n: f"{FILE}:{n + 1}" for n in range(len(lines))}
    below = "\n".join([*(f"    {line}" for line in lines), *foot(pasted), ""])
    return ProgramText(f"{text}\n{below}", places)


def tables_text(tables: str) -> Iterator[str]:
    """Tables as they are emitted, of the text of dicts of `Spec`s."""
    for node in ast.parse(textwrap.dedent(tables).strip()).body:
        assert isinstance(node, ast.Assign)
        specs = eval(ast.unparse(node.value), {"Spec": Spec})
        texts = {name: spec_text(spec) for name, spec in specs.items()}
        yield " = ".join([*map(ast.unparse, node.targets), repr(texts)])


# A line through points, y = x w, by momentum; the batch is split over two devices.
LINE_TABLES = """
INPUTS = {
    "x": Spec("f32", {"batch": 8, "io": 3}, {"batch": ("d",)}),
    "y": Spec("f32", {"batch": 8}, {"batch": ("d",)}),
}
PARAMS = {"w": Spec("f32", {"io": 3}, {}, ("normal", 1.0))}
STATES = {
    "w.v": Spec("f32", {"io": 3}, {}, ("zeros",)),
    "w.master": Spec("f64", {"io": 3}, {}, ("normal", 1.0), "w"),
}
OUTPUTS = {
    "loss": Spec("f32", {}, {}),
    "error": Spec("f32", {"batch": 8}, {"batch": ("d",)}),
    "largest": Spec("f32", {}, {}),
}
"""
LINE = """
x, y = inputs["x"], inputs["y"]
w = params["w"]
error = x @ w - y
largest = all_reduce(error.abs().max(), groups["d"], "max")
loss = all_reduce((error * error).sum(), groups["d"], "sum") / 8
dw = all_reduce(2 * error @ x, groups["d"], "sum") / 8
v = states["w.v"]
v.mul_(0.9).add_(dw)
master = states["w.master"]
master.sub_({rate} * v)
w.copy_(master)
return {{"loss": loss, "error": error, "largest": largest}}
"""
LINE_EVALUATED = """
x, y = inputs["x"], inputs["y"]
w = params["w"]
error = x @ w - y
loss = all_reduce((error * error).sum(), groups["d"], "sum") / 8
return {"loss": loss, "error": error}
"""


def line(rate: float = 0.05, evaluated: bool = False) -> Emitted:
    """The line through points on two devices."""
    training = training_text(LINE.format(rate=rate), LINE_TABLES, groups=[("d",)])
    if not evaluated:
        return Emitted(training)
    tables = LINE_TABLES.replace('    "largest": Spec("f32", {}, {}),\n', "")
    return Emitted(training, training_text(LINE_EVALUATED, tables, groups=[("d",)], states=False))


# The next character from this one: a table of logits, its columns split over two devices' rows.
PAIRS_TABLES = """
INPUTS = {
    "tokens": Spec("i32", {"batch": 4, "seq": 6}, {"batch": ("d",)}, ("below", 16)),
    "targets": Spec("i32", {"batch": 4, "seq": 6}, {"batch": ("d",)}, ("below", 16)),
}
PARAMS = {"table": Spec("f32", {"vocab": 16, "next": 16}, {}, ("zeros",))}
STATES = {}
OUTPUTS = {"loss": Spec("f32", {}, {})}
"""
PAIRS = """
tokens, targets = inputs["tokens"].reshape(-1).long(), inputs["targets"].reshape(-1).long()
table = params["table"]
logits = torch.log_softmax(table[tokens], 1)
picked = logits.gather(1, targets[:, None])
loss = all_reduce(-picked.sum(), groups["d"], "sum") / 24
back = logits.exp() - torch.nn.functional.one_hot(targets, 16)
dtable = torch.zeros_like(table).index_add(0, tokens, back)
dtable = all_reduce(dtable, groups["d"], "sum") / 24
table.sub_(2 * dtable)
return {"loss": loss}
"""


def pairs() -> Emitted:
    """The next character from this one, on two devices."""
    return Emitted(training_text(PAIRS, PAIRS_TABLES, groups=[("d",)]))
