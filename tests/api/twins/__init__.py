"""Examples of the language written in Python; the largest are in examples/ themselves."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from meshdsl.api.programs import Program

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"


def twin_of(example: Path) -> Path:
    """The Python file that says the same as `examples/….mdsl`."""
    folder = "" if example.parent == EXAMPLES else f"{example.parent.name}_"
    own = HERE / f"{folder}{example.stem}.py"
    return own if own.exists() else example.with_suffix(".py")


@functools.cache
def program_of(name: str) -> Program:
    """The program in the twin of `examples/NAME.mdsl`."""
    path = twin_of(EXAMPLES / f"{name}.mdsl")
    spec = importlib.util.spec_from_file_location(f"twin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (program,) = (v for v in vars(module).values() if isinstance(v, Program))
    return program
