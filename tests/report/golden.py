"""Golden files: texts that are compared whole, in `tests/golden/`, and the cases they are made of.

`MESHDSL_UPDATE_GOLDEN=1 pytest tests/report` writes them anew and removes those of no case.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source, front
from tests.project import ROOT, matching

GOLDEN = ROOT / "tests" / "golden"
UPDATE = os.environ.get("MESHDSL_UPDATE_GOLDEN") == "1"
AGAIN = "if this is meant, MESHDSL_UPDATE_GOLDEN=1 pytest tests/report writes it anew"

SIZES = {"matmul": {"rows": 8, "inner": 16, "cols": 8}}
"""Sizes that every layout of an example divides, where its own do not."""

SELECTED = {
    "alexnet": ("towers",), "dlrm": ("tables",), "encdec": ("megatron",),
    "few_kv_heads": ("heads",), "lm": ("zero2", "megatron_zero3", "pipeline"), "nmt": ("states",),
    "resnet": ("two_d",), "unet": ("rows_of_images",), "vgg": ("halves",), "vit": ("megatron",),
}  # fmt: skip
"""The layouts of an example whose texts are long; all of them where it is not named."""


@dataclass(frozen=True, slots=True)
class Case:
    """An example under one of its layouts."""

    example: str
    layout: str

    @property
    def name(self) -> str:
        """`mlp.hybrid`."""
        return f"{self.example}.{self.layout}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of a command that choose this case, from the project's folder."""
        sizes = [f"--set={dim}={size}" for dim, size in SIZES.get(self.example, {}).items()]
        return [f"examples/{self.example}.mdsl", "--layout", self.layout, *sizes]


def source(example: str) -> Source:
    """An example's text under the name it has from the project's folder."""
    text = (ROOT / "examples" / f"{example}.mdsl").read_text(encoding="utf-8")
    return Source(f"examples/{example}.mdsl", text)


def broken(*layouts: str) -> Source:
    """The MLP with layouts that split two dims of one tensor over one axis."""
    text = source("mlp").text
    for layout in layouts:
        rule = re.compile(rf"(layout {layout} {{)[^}}]*-> (\w+) }}")
        text = rule.sub(r"\1 batch -> \2, io -> \2 }", text)
    return Source("examples/mlp.mdsl", text)


def layouts(example: str) -> list[str]:
    """The layouts an example declares, in order."""
    declared = list(front(source(example), {}, Diagnostics()).layouts)
    return [name for name in declared if name in SELECTED.get(example, declared)]


EXAMPLES = [path.stem for path in matching("examples/*.mdsl")]
ALL = "MESHDSL_CASES" in os.environ
_SOME = ("digits_async", "dlrm", "matmul", "moe")
SOME = EXAMPLES if ALL else [example for example in EXAMPLES if example in _SOME]
"""A pipeline, tables, few rules, and experts with sizes of their own.

For what each example shows alike; all of them with `MESHDSL_CASES`."""

PIPELINE = Case("lm", "pipeline")
"""A pipeline: of its plans none is searched."""
_EVERY = [Case(example, layout) for example in EXAMPLES for layout in layouts(example)]

_MOST = dict(
    digits=["megatron"],
    lm=["megatron_zero3", "pipeline"],
    matmul=["inner_cols"],
    mlp=["hybrid"],
    moe_stages=["staged"],
    transformer=["megatron"],
)
WHOLE = [case for case in _EVERY if case.layout in _MOST.get(case.example, [case.layout])]
"""The cases whose programs and reports are golden files: the layout that has most to say."""

PRINTED = [
    case
    for case in WHOLE
    if case.name
    in (
        "digits_async.staged",  # asynchronous updates
        "dlrm.tables",
        "lm.megatron_zero3",  # loops, and parameters that are stored in parts
        "lm.pipeline",
        "mlp.hybrid",
        "moe.gshard_tp",
        "nmt.states",  # recurrences, scans
        "unet.rows_of_images",  # halos
    )
]
"""One of each kind of program: what its representations print are golden files too.

Each pass is tested by itself (`tests/ir`), and each operator of an emitted program has its type and
placement beside it, so that the programs of all cases show what placing did."""

CASES = [case for case in _EVERY if ALL or case in WHOLE or case.example in ("matmul", "mlp")]
"""These, and all layouts of the smallest examples; with `MESHDSL_CASES` of all of them."""


@functools.cache
def made(case: Case) -> Compilation:
    """The compilation of a case."""
    options = Options(layout=case.layout, set_dims=SIZES.get(case.example, {}))
    return compile_source(source(case.example), options, Diagnostics())


def same_as_golden(name: str, text: str) -> None:
    """Compare `text` with the golden file `name`, or write that."""
    path = GOLDEN / name
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    assert path.exists(), f"there is no tests/golden/{name}; {AGAIN}"
    found = path.read_text(encoding="utf-8")
    assert text == found, f"tests/golden/{name} is another text; {AGAIN}"
