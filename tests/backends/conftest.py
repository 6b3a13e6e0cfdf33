"""Small emitted texts, written by hand: what the backends promise whatever the compiler does."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.torch.inliner import paste
from meshdsl.backends.torch.preamble import foot
from tests.backends.training_text import tables_text
from tests.backends.weight_models import params_and_files

Emit = Callable[..., str]


def emitted(
    body: str,
    mesh: dict[str, int],
    *,
    groups: Iterable[tuple[str, ...]] = (),
    use: Iterable[str] = (),
    **tables: str,
) -> str:
    """A program whose `device` has the given body; tables are texts, since they name `Spec`."""
    pasted = paste({"main", *use})
    head = [
        "import numpy as np",
        "import torch",
        "import torch.distributed as dist",
        f"MESH = {mesh}",
        f"GROUPS = {tuple(groups)}",
        *tables_text("\n".join(f"{name.upper()} = {tables.get(name, '{}')}" for name in TABLES)),
    ]
    device = "def device(rank, groups, inputs, params):\n" + textwrap.indent(
        textwrap.dedent(body).strip("\n"), "    "
    )
    return "\n".join(["\n".join(head), "", "", device, *foot(pasted, RUN), ""])


TABLES = ("inputs", "params", "outputs")
RUN = "main(MESH, GROUPS, device, OUTPUTS, INPUTS, PARAMS)"


@pytest.fixture
def emit() -> Emit:
    """Makes an emitted text."""
    return emitted


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder for temporary files is one of the test, and in the end there is nothing in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Path]]:
    """The values of the parameters, and the model that has them in each form that is read."""
    return params_and_files(tmp_path_factory.mktemp("models"))
