"""Every example under layouts it declares, placed as `meshdsl run` does without options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import DEFAULT_POLICY, front
from meshdsl.placed.layout import resolve_mesh
from meshdsl.syntax.parse import read_source
from tests.covering import some
from tests.programs.harness import Case, run_case
from tests.project import matching

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {
    "context_parallel": {
        "batch": 2, "seq": 16, "model": 8, "key": 4, "vocab": 16,
    },
    "dlrm": {"batch": 8, "table": 4, "rows": 6, "dense": 3, "model": 4, "bottom": 6, "top": 6},
    "encdec": {
        "batch": 4, "source": 3, "target": 3, "model": 8, "heads": 2, "key": 4, "hidden": 8,
        "vocab": 6, "layers": 2,
    },
    "vit": {
        "batch": 4, "height": 4, "width": 4, "rows": 2, "columns": 2, "model": 8, "heads": 2,
        "key": 4, "hidden": 8, "layers": 2,
    },
    "matmul": {"rows": 8, "inner": 16, "cols": 8},
    "mlp": {"batch": 8, "io": 16},
    "transformer": {
        "batch": 4, "seq": 8, "model": 16, "heads": 4, "key": 4, "hidden": 16, "vocab": 16,
        "layers": 2,
    },
}  # fmt: skip
MADE_UP = ("moe", "moe_stages")
"""Run on values as the engines make them up: gates of large whole numbers are 1 and, in f32, 0.

The reference in f64 then has 1e-60 and sends a token to a second expert.
"""


def cases() -> Iterator[object]:
    """The cases, each under the mesh that the command line would take."""
    for path in matching("examples/*.mdsl"):
        # tests/training/test_curves.py runs them, tests/examples/test_digits_async.py the last.
        if path.stem in ("lm", "nmt", "resnet", "unet", "digits_async"):
            continue
        declarations = front(read_source(path), {}, Diagnostics())
        for layout in some(declarations.layouts):
            mesh = resolve_mesh(declarations, None, layout).name
            dims = SIZES.get(path.stem, {})
            text, drawn = path.read_text("utf-8"), path.stem in MADE_UP
            case = Case(text, mesh, layout, DEFAULT_POLICY, dims, made_up=drawn)
            yield pytest.param(case, id=f"{path.stem}-{layout}")


@pytest.mark.parametrize("case", list(cases()))
def test_it_runs_as_on_one_device(case: Case) -> None:
    run_case(case)
