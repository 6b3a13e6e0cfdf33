# mypy: disable-error-code="type-arg,valid-type"
"""`md.use`: operators of packages in Python, and in the text of a program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.operator_packages import Operators
from tests.packages import EXAMPLE, KERNELS, example, installed

RECORD = """
from meshdsl.ops import kit
OPERATORS = (kit.pointwise_record("doubled", 1, lambda x: x * 2, "{0} * 2", linear=[[0]]),)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[Operators]:
    with example(tmp_path):
        yield md.use(KERNELS)


def test_it_is_called_traced_and_written_as_text(kernels: Operators, tmp_path: Path) -> None:
    batch, hidden = md.dims(batch=4, hidden=6)

    @md.program
    def gated(x: md.Tensor[batch, hidden], up: md.Tensor[batch, hidden]):
        return kernels.swiglu(x, up, alpha=1.5)

    text = gated.to_mdsl()
    assert text.startswith(f"use {KERNELS}\n\ndim batch = 4, hidden = 6\n")
    Path(tmp_path / "gated.mdsl").write_text(text)
    assert md.load(tmp_path / "gated.mdsl").to_mdsl() == text
    plan = gated.compile(md.mesh(d=2), md.layout(hidden="d"))
    x, up = np.ones((4, 6), np.float32), np.full((4, 6), 2, np.float32)
    (y,) = plan(x=x, up=up)
    np.testing.assert_allclose(y, 2 / (1 + np.exp(-1.5)) * x, rtol=1e-6)


def test_what_it_has_is_shown(kernels: Operators) -> None:
    assert dir(kernels) == ["swiglu"]
    assert repr(kernels) == f"<operators of {KERNELS}: swiglu>"
    assert "sigmoid(alpha" in (kernels.swiglu.__doc__ or "")
    with pytest.raises(AttributeError, match="has no `swigl`; did you mean `swiglu`"):
        _ = kernels.swigl
    assert not hasattr(md, "swiglu")


def test_a_module_is_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_doubles.py").write_text(RECORD)
    with installed(tmp_path, "other", "my_doubles:OPERATORS"):
        module = importlib.import_module("my_doubles")
        assert repr(md.use(module)) == "<operators of other: doubled>"
    monkeypatch.syspath_prepend(str(EXAMPLE))
    with example(tmp_path / "again"):
        assert md.use(importlib.import_module(KERNELS)).swiglu.__module__ == KERNELS


@pytest.mark.parametrize(
    ("given", "code"), [("nobody_has_it", "MD0160"), (3, "MD0815"), (sys, "MD0163")]
)
def test_what_is_no_package_is_refused(given: object, code: str) -> None:
    with pytest.raises(md.ProgramError, match=code):
        md.use(given)  # type: ignore[arg-type]
