"""The Python reference: the public names of `import meshdsl as md`, by autodoc."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import meshdsl
from docs._ext.markdown import code, fenced
from meshdsl.api.dims import DType
from meshdsl.api.signatures import RATES, describe
from meshdsl.named.from_syntax import INITS
from meshdsl.named.optimizers import CALLS, OPTIMIZERS
from meshdsl.ops.opdef import load_all

PARTS = {
    "program": "Programs and functions",
    "functions": "Programs and functions",
    "statements": "Programs and functions",
    "module": "Programs and functions",
    "plan": "Plans",
    "dims": "Dims, tensors, dtypes",
    "tensor": "Dims, tensors, dtypes",
    "layouts": "Meshes and layouts",
    "errors": "Errors",
}
"""The heading above the names of each module in `meshdsl/api`; other names stand at the end."""

VIEWS = (
    "TensorView",
    "Placements",
    "Collectives",
    "CollectiveView",
    "Memory",
    "Ran",
    "MeshView",
    "Code",
)
"""What plans draw; of `meshdsl.report.views.parts`."""


def reference() -> str:
    """Every public name that is no operator, under its heading."""
    homes = {name: module for module, names in meshdsl._PUBLIC.items() for name in names.split()}
    by_title: dict[str, list[str]] = {title: [] for title in (*PARTS.values(), "More")}
    for name in sorted(meshdsl.__all__, key=str.lower):
        by_title[PARTS.get(homes.get(name, ""), "More")].append(f"meshdsl.{name}")
    by_title["What plans draw"] = [f"meshdsl.report.views.parts.{name}" for name in VIEWS]
    dtypes = [name for name in meshdsl.__all__ if isinstance(getattr(meshdsl, name), DType)]
    plain = by_title[PARTS["dims"]]
    by_title[PARTS["dims"]] = [each for each in plain if each.rpartition(".")[2] not in dtypes]
    listed = "\n\n".join(
        f"## {title}\n\n"
        + "\n\n".join([*map(_entry, names), *([_dtypes(dtypes)] if title == PARTS["dims"] else [])])
        for title, names in by_title.items()
        if names
    )
    python = fenced("{highlight} python", "")
    return f"{python}\n\n{listed}\n\n## Initialisers, optimizers, schedules\n\n{_makers()}"


def _dtypes(names: list[str]) -> str:
    """The element types, in one entry."""
    entries = [fenced(f"{{py:data}} meshdsl.{name}\n:no-typesetting:", "") for name in names]
    listed = ", ".join(code(f"md.{name}") for name in names)
    meaning = inspect.cleandoc(DType.__doc__ or "").partition("\n")[0]
    return "\n\n".join([*entries, f"### Element types\n\n{listed}: {meaning}"])


def _makers() -> str:
    """What `md.param` and `md.minimize` take, from the tables that check the arguments."""
    taken = {name: ("std",) if n == 1 else ("a", "b")[:n] for name, n in INITS.items()}
    for name in RATES:
        options = {**OPTIMIZERS, **CALLS}[name]
        taken[name] = tuple(_parameter(option, o.default) for option, o in options.items())
    entries = [
        fenced(f"{{py:function}} meshdsl.{name}({', '.join(given)})", describe(name))
        for name, given in taken.items()
        if name not in load_all()
    ]
    about = "[Training](training.md#optimizers) says what each option does."
    return "\n\n".join([about, *entries])


def _parameter(name: str, default: Any) -> str:
    return name if default is ... else f"{name}={default!r}"


def _entry(path: str) -> str:
    module, _, name = path.rpartition(".")
    found: Any = getattr(import_module(module), name)
    if inspect.isclass(found):
        base = ["   :show-inheritance:"] if issubclass(found, Exception) else []
        options = ["   :members:", *base]
        return fenced("{eval-rst}", "\n".join([f".. autoclass:: {path}", *options]))
    kind = "autofunction" if callable(found) else "autodata"
    return fenced("{eval-rst}", f".. {kind}:: {path}")


def unlinked(app: Sphinx, tree: nodes.document) -> None:
    """Types of annotations that no module is known of are no links.

    Python's `bool` would lead to `meshdsl.bool`, and every class called Program to the public one.
    """
    for node in list(tree.findall(pending_xref)):
        if (node.get("refdomain"), node.get("reftype")) == ("py", "class"):
            if "." not in node["reftarget"]:
                node.replace_self(node.children)


def resolved(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """A reference to `meshdsl.api.plan.Plan`, where it is defined, as one to `meshdsl.Plan`."""
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2]
    if not target.startswith("meshdsl.api.") or name not in meshdsl.__all__:
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"meshdsl.{name}", node, content
    )
