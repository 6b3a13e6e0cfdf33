"""Small emitted texts, written by hand: what the backends promise whatever the compiler does."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

import pytest

from meshdsl.backends.torch.paste import paste

Emit = Callable[..., str]


def emitted(
    body: str,
    mesh: dict[str, int],
    *,
    groups: Iterable[tuple[str, ...]] = (),
    inputs: str = "{}",
    params: str = "{}",
    outputs: str = "{}",
    use: Iterable[str] = (),
) -> str:
    """A program whose `device` has the given body; tables are texts, since they name `Spec`."""
    pasted = paste({"Spec", "main", *use})
    head = [
        *pasted.imports,
        "import numpy as np",
        "import torch",
        "import torch.distributed as dist",
    ]
    tables = [f"MESH = {mesh}", f"GROUPS = {tuple(groups)}", f"INPUTS = {inputs}"]
    tables += [f"PARAMS = {params}", f"OUTPUTS = {outputs}"]
    device = "def device(rank, groups, inputs, params):\n" + textwrap.indent(
        textwrap.dedent(body).strip("\n"), "    "
    )
    run = 'if __name__ == "__main__":\n    main(MESH, GROUPS, INPUTS, PARAMS, OUTPUTS, device)\n'
    return "\n\n".join(["\n".join(head), *pasted.texts, "\n".join(tables), device, run])


@pytest.fixture
def emit() -> Emit:
    """Makes an emitted text."""
    return emitted
