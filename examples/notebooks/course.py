"""What the notebooks of this folder call: `check` a text, `attempt` an answer, bytes `sent`."""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from runpy import run_module
from typing import Any

from meshdsl import Plan, ProgramError

UNFIT = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""What a check raises for an answer of another kind than it takes, or for none."""

HERE = Path(__file__).resolve().parent
"""The folder of the notebooks."""


def example(name: str) -> str:
    """The path of a file of `examples`: in a copy of this folder those in `programs`."""
    copied = HERE / "programs" / name
    return os.path.relpath(copied if copied.exists() else HERE.parent / name)


def check(text: str) -> bool:
    """Print what `meshdsl check --strict` says of a file with this text; whether it is fine."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mine.mdsl").write_text(text, encoding="utf-8")
        line = [sys.executable, "-m", "meshdsl", "check", "--strict", "mine.mdsl"]
        plain = {k: v for k, v in os.environ.items() if "COLOR" not in k} | {"NO_COLOR": "1"}
        run = subprocess.run(line, cwd=folder, env=plain, capture_output=True, text=True)
    print((run.stdout + run.stderr).strip())
    return run.returncode == 0


@contextmanager
def attempt() -> Iterator[None]:
    """Say why an answer cannot be checked, in place of a traceback."""
    try:
        yield
    except ProgramError as error:
        print("Not yet:", error)
    except UNFIT as error:
        print(f"Not yet: {type(error).__name__}: {error}")


def sent(plan: Plan) -> None:
    """Print the collectives of a plan in one line each, and the bytes that one device sends."""
    for c in plan.explain().json["collectives"]:
        trips = f" × {c['count']}" if c["count"] > 1 else ""
        where = f"{c['kind']} over {', '.join(c['axes'])}{trips}"
        moved = c["to"] if "partial" in c["from"] else f"{c['from']} → {c['to']}"
        moved = f"{len(c['parts'])} tensors" if c["parts"] else moved
        print(f"{c['phase']:8} {where:26} {c['wire_bytes']:>14,} bytes  {moved}")
    print(f"{plan.cost().wire_bytes:,} bytes sent by each device")


def command(*words: str) -> Any:
    """What `meshdsl WORDS --json` answers, as data: where Python has no function for it.

    It runs in this process, which has imported everything, and so in a tenth of the time.
    """
    before, out = sys.argv, io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    sys.argv = ["meshdsl", *words, "--json"]
    try:
        with redirect_stdout(out):
            run_module("meshdsl", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"meshdsl {' '.join(words)} ended with {end.code}") from None
    finally:
        sys.argv = before
    out.flush()
    return json.loads(out.buffer.getvalue())
