"""The distance that a program travels: the functions and files that a compile enters.

`python -m benchmarks.distance [--list]` compiles `examples/mlp.mdsl` under `hybrid` twice, so that
tables are filled and the plan is cached, and a third time counts the distinct functions of this
project that are entered, and the files that they are in: down to the device program, and with the
emitted text and the report. `--list` prints them file by file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "mlp.mdsl"
OURS = tuple(str(ROOT / folder) for folder in ("meshdsl", "backends", "grammar"))


def entered(run: Callable[[], object]) -> tuple[CodeType, ...]:
    """The functions of the project that a run enters, in the order of their first entry.

    What has no name of its own, as a comprehension, is a part of the function that it stands in.
    """
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.setdefault(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    named = (code for code in codes if not code.co_name.startswith("<"))
    return tuple(code for code in named if file_of(code).startswith(OURS))


def file_of(code: CodeType) -> str:
    """The file that a function is in, whatever links lead to it."""
    return os.path.realpath(code.co_filename)


def compiled(*stages: str) -> Callable[[], None]:
    """A compile of the example as far as some stages of a `Compilation`."""
    text = EXAMPLE.read_text(encoding="utf-8")

    def run() -> None:
        source = Source(EXAMPLE.name, text)  # a new one: trees are kept by their source
        compilation = Compilation(source, Options(layout="hybrid"), Diagnostics())
        for stage in stages:
            getattr(compilation, stage)

    return run


WAYS = {
    "to the device program": compiled("device"),
    "with text and report": compiled("device", "text", "report"),
}
"""What is counted."""


def distance(run: Callable[[], None]) -> tuple[CodeType, ...]:
    """The functions that a warm run enters."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("MESHDSL_CACHE")
        os.environ["MESHDSL_CACHE"] = folder
        try:
            run()
            run()
            return entered(run)
        finally:
            if before is None:
                del os.environ["MESHDSL_CACHE"]
            else:
                os.environ["MESHDSL_CACHE"] = before


def main() -> None:
    """Print the counts."""
    for way, run in WAYS.items():
        codes = distance(run)
        files = Counter(Path(file_of(code)).relative_to(ROOT) for code in codes)
        print(f"{way:24} {len(codes):5} functions in {len(files):3} files")
        for file, count in sorted(files.items()) if "--list" in sys.argv else ():
            print(f"    {file!s:44} {count:4}")


if __name__ == "__main__":
    main()
