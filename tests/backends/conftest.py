"""Small emitted texts, written by hand: what the backends promise whatever the compiler does."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

import pytest

from meshdsl.backends.torch.head import foot
from meshdsl.backends.torch.paste import paste
from tests.backends.training_text import tables_text

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
        *pasted.imports,
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
    return "\n".join(["\n".join(head), "", "", device, *foot(pasted.texts, RUN), ""])


TABLES = ("inputs", "params", "outputs")
RUN = "main(MESH, GROUPS, device, OUTPUTS, INPUTS, PARAMS)"


@pytest.fixture
def emit() -> Emit:
    """Makes an emitted text."""
    return emitted
