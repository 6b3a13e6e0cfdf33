"""Every example under everything it declares, compiled and explained: as JSON on the output.

Run as a program in a folder with `examples` in it: `python -m tests.report.everything EVERY FIRST
STEP` takes of every EVERY-th case those at `[FIRST::STEP]`, in that order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Options, compile_source, front
from meshdsl.report.explanation import explain
from meshdsl.syntax.parse import read_source
from tests.garbage import look_seldom
from tests.report.golden import SIZES


def choices() -> Iterator[tuple[str, Options]]:
    """Each file with each layout, and each `sbp` block, that it declares; no plan is kept."""
    for path in sorted(Path("examples").rglob("*.mdsl")):
        sizes = SIZES.get(path.stem, {})
        declared = front(read_source(path), sizes, Diagnostics())
        for name in declared.layouts:
            yield path.as_posix(), Options(layout=name, set_dims=sizes, cache=False)
        for name in declared.sbps:
            yield path.as_posix(), Options(sbp=name, set_dims=sizes, cache=False)


def described(path: str, options: Options) -> dict[str, str]:
    """The emitted text and the report of one choice."""
    diagnostics = Diagnostics()
    made = compile_source(read_source(path), options, diagnostics)
    report = json.dumps(explain(made.device, diagnostics))
    return {"program": made.text, "report": report}


def everything(every: int, first: int, step: int) -> dict[str, dict[str, str]]:
    """The requested part, by file and layout."""
    chosen = list(choices())[::every][first::step]
    return {f"{path} {o.layout or o.sbp}": described(path, o) for path, o in chosen}


def main() -> None:
    """Compile the requested part, and print the results."""
    look_seldom()
    json.dump(everything(*map(int, sys.argv[1:])), sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
