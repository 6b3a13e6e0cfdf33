"""Pictures of the examples, drawn by what draws them in notebooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import meshdsl as md
from meshdsl.api.plan import Plan
from meshdsl.report.views.parts import MeshView

_ROOT = Path(md.__file__).resolve().parents[1]


@cache
def _plan(example: str, mesh: str, chosen: str) -> Plan:
    """An example under a layout, or under the `sbp` block `sbp:NAME`."""
    kind, _, name = chosen.rpartition(":")
    given: dict[str, Any] = {"sbp" if kind == "sbp" else "layout": name}
    return md.load(_ROOT / example).compile(mesh, cache=False, **given)


def _shown(view: Any) -> str:
    """A view as a block of HTML: it has no blank line, at which Markdown would go on."""
    lines = [line for line in view.html().splitlines() if line.strip()]
    return "\n".join(['<div class="made">', *lines, "</div>"])


def mesh(*axes: str) -> str:
    """The devices of a mesh: `rows:2 cols:2`."""
    sizes = {name: int(size) for name, _, size in (axis.partition(":") for axis in axes)}
    return _shown(MeshView("mesh", tuple(sizes.items())))


def tensor(example: str, mesh: str, chosen: str, *names: str) -> str:
    """What each device holds of some tensors."""
    plan = _plan(example, mesh, chosen)
    return "\n\n".join(_shown(plan.tensor(name)) for name in names)


def collectives(example: str, mesh: str, chosen: str) -> str:
    """What is sent."""
    return _shown(_plan(example, mesh, chosen).collectives)


def memory(example: str, mesh: str, first: str, *others: str) -> str:
    """What a device holds under some layouts, to one scale."""
    rows = {name: _plan(example, mesh, name).memory for name in others}
    return _shown(_plan(example, mesh, first).memory.beside(**rows))
