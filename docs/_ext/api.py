"""The Python reference: the public names of `import meshdsl as md`, by autodoc."""

from __future__ import annotations

import inspect
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import meshdsl
from docs._ext.markdown import fenced

PARTS = {
    "Dims, tensors, dtypes": ("dims", "tensor"),
    "Meshes and layouts": ("layouts",),
    "Programs and functions": ("program", "functions", "statements"),
    "Plans": ("plan",),
    "Errors": ("errors",),
}
"""The headings of the page, and the modules in `meshdsl/api` whose names are below them."""


def reference() -> str:
    """Every public name that is no operator, under its heading."""
    homes = {name: module for module, names in meshdsl._PUBLIC.items() for name in names.split()}
    titles = {module: title for title, modules in PARTS.items() for module in modules}
    by_title: dict[str, list[str]] = {title: [] for title in [*PARTS, "More"]}
    for name in sorted(homes, key=str.lower):
        by_title[titles.get(homes[name], "More")].append(name)
    return "\n\n".join(
        f"## {title}\n\n" + "\n\n".join(map(_entry, names))
        for title, names in by_title.items()
        if names
    )


def _entry(name: str) -> str:
    found: Any = getattr(meshdsl, name)
    if inspect.isclass(found):
        base = ["   :show-inheritance:"] if issubclass(found, Exception) else []
        options = ["   :members:", *base]
        return fenced("{eval-rst}", "\n".join([f".. autoclass:: meshdsl.{name}", *options]))
    kind = "autofunction" if callable(found) else "autodata"
    return fenced("{eval-rst}", f".. {kind}:: meshdsl.{name}")


def resolved(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """A reference to `meshdsl.api.plan.Plan`, where it is defined, as one to `meshdsl.Plan`."""
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in meshdsl.__all__ or target == f"meshdsl.{name}":
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"meshdsl.{name}", node, content
    )
