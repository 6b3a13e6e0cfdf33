"""What an emitted program is to a reader and to the interpreter: its lines, its calls of torch.

`python -m benchmarks.emitted` prints the lines of programs above their runtime, and the operators
that torch runs in a step of the same program on one device. Programs of one's own:
`python -m benchmarks.emitted FILE PROGRAM MESH LAYOUT`, without MESH and LAYOUT the first of both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshdsl.backends.engines.in_process import given_tables, load
from meshdsl.backends.torch.preamble import RUNTIME
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Row(NamedTuple):
    """A program, on a mesh under a layout; None: the first ones."""

    file: Path
    program: str
    mesh: str | None = None
    layout: str | None = None


ROWS = (
    Row(EXAMPLES / "lm.mdsl", "lm", "four", "zero3"),
    Row(EXAMPLES / "lm.mdsl", "lm", "four", "zero1"),
    Row(EXAMPLES / "lm.mdsl", "lm", "stages", "pipeline"),
    Row(EXAMPLES / "resnet.mdsl", "resnet"),
    Row(EXAMPLES / "moe.mdsl", "moe"),
    Row(EXAMPLES / "transformer.mdsl", "lm"),
)


def compiled(row: Row, mesh: str | None, layout: str | None) -> Compilation:
    """The program of a row, compiled without what is kept of before."""
    options = Options(program=row.program, mesh=mesh, layout=layout, cache=False)
    source = Source(f"examples/{row.file.name}", row.file.read_text(encoding="utf-8"))
    return Compilation(source, options, Diagnostics())


def lines(text: str) -> int:
    """The lines of a program above the functions that it calls, with comments and blank lines."""
    return text.partition(RUNTIME)[0].rstrip().count("\n") + 1


class _Calls(TorchDispatchMode):
    """Counts the operators that torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(text: str) -> int:
    """The operators of a step on one device."""
    program = load(text)
    ((tables,), _) = given_tables(program, {}, {}, 0, [0])
    with torch.inference_mode(), _Calls() as mode:
        program.device(0, {}, *tables)
    return mode.count


def main() -> None:
    """Print a line for each row."""
    given = (Row(Path(sys.argv[1]), *sys.argv[2:]),) if sys.argv[1:] else ROWS
    print(f"{'program':34} {'lines':>6} {'calls of torch on one device':>30}")
    for row in given:
        text = compiled(row, row.mesh, row.layout).text
        alone = calls(compiled(row, "one:1", None).text)
        print(f"{' '.join((row.program, row.layout or '')):34} {lines(text):6} {alone:30}")


if __name__ == "__main__":
    main()
