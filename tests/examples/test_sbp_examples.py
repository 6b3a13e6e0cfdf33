"""The programs of `examples/sbp`: each runs as it must under every layout, sbp block and policy.

Values are those of the reference, to the bit where every operator is exact, and the bytes that
devices send are those that were predicted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, front
from meshdsl.placed.place import POLICIES
from meshdsl.report.check import check_source
from meshdsl.syntax.format import format_source
from tests.programs.harness import Case, compiled, explained, run_case

FOLDER = Path(__file__).parents[2] / "examples" / "sbp"
FILES = sorted(FOLDER.glob("*.mdsl"))
SMALL = {"block": {"batch": 4, "seq": 8, "model": 16, "heads": 4, "key": 4, "hidden": 32}}
EXACT = {
    "accumulate", "any", "megatron", "summa", "summa_panels", "summa_renamed", "sums", "total",
    "two_axes", "uvw",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chosen(Case):
    """A case under a layout or an sbp block of its file, on the mesh that suits it."""

    kind: str = "layout"

    @property
    def options(self) -> Options:
        layout, sbp = (self.layout, None) if self.kind == "layout" else (None, self.layout)
        return Options(layout=layout, sbp=sbp, reduce=self.reduce, set_dims=self.dims)
