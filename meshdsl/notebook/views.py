"""Objects that plans are looked at by: as text with `print`, as pictures in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshdsl.notebook.held import Holding
from meshdsl.placed.sbp import Mesh

Json = dict[str, Any]
Bundle = dict[str, str]


class View:
    """Something to look at. `str(view)` is its text, `view.html()` what a notebook shows."""

    def html(self) -> str:
        """HTML that needs neither a script nor anything from elsewhere."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return bundle(str(self), self.html())


def bundle(text: str, html: str) -> Bundle:
    """What IPython asks an object for; both are always given."""
    return {"text/plain": text, "text/html": html}


class MeshView(View):
    """The devices of a mesh where they stand."""

    def __init__(self, name: str, axes: tuple[tuple[str, int], ...]) -> None:
        self.mesh = Mesh(name, axes)

    def __str__(self) -> str:
        from meshdsl.notebook.mesh import text

        return text(self.mesh)

    def html(self) -> str:
        """A box for every device, with its rank."""
        from meshdsl.notebook.html import CODE
        from meshdsl.notebook.mesh import picture
        from meshdsl.notebook.svg import image, tag

        axes = f"{{ {', '.join(f'{a}: {n}' for a, n in self.mesh.axes)} }}"
        name = "" if self.mesh.name == "mesh" else f"{self.mesh.name} "
        head = tag("div", "mesh ", tag("code", f"{name}{axes}", style=CODE))
        return tag("div", head, image(picture(self.mesh), str(self)))


class TensorView(View):
    """Where a tensor lies: `placement` per axis, `shape`, `local_shape`, and `json` with all of it.

    >>> import meshdsl as md
    >>> plan = md.load("examples/mlp.mdsl").compile("square", "hybrid")
    >>> h = plan.tensor("h")
    >>> h.placement, h.local_shape
    ({'rows': 'S(batch)', 'cols': 'S(hidden)'}, (32, 1024))
    """

    def __init__(self, json: Json, mesh: Mapping[str, int]) -> None:
        self.json, self.mesh = json, dict(mesh)
        self.held = Holding.of(json, mesh)

    @property
    def name(self) -> str:
        """As layouts and reports call it."""
        return self.held.name

    @property
    def dims(self) -> tuple[str, ...]:
        """Its dims, in order."""
        return self.held.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """Whole sizes."""
        return self.held.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The sizes that one device holds."""
        return tuple(self.json["local_shape"])

    @property
    def placement(self) -> dict[str, str]:
        """Per axis of the mesh: `S(dim)`, `B` or `P`."""
        return dict(self.json["placement"])

    @property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The devices that hold each block; a block is its number along every dim."""
        return self.held.holders(self.held.dims)

    def __str__(self) -> str:
        from meshdsl.notebook.tensor import text
        from meshdsl.report.terminal import type_text

        return f"{self.name}  {type_text(self.json)}\n{text(self.held)}"

    def html(self) -> str:
        """The tensor in blocks, coloured by who holds them."""
        from meshdsl.notebook.html import CODE, split_dims
        from meshdsl.notebook.svg import image, tag
        from meshdsl.notebook.tensor import picture

        name = tag("b", tag("code", self.name, style=CODE))
        head = tag("div", name, " ", split_dims(self.json, self.mesh))
        return tag("div", head, image(picture(self.held), str(self)))


class Placements(View, Mapping[str, TensorView]):
    """Every named tensor, by name."""

    def __init__(self, tensors: Mapping[str, TensorView]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> TensorView:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __str__(self) -> str:
        from meshdsl.report.terminal import type_text

        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {type_text(t.json)}" for name, t in self.items())

    def html(self) -> str:
        """A line with a small picture for each."""
        from meshdsl.notebook.html import TABLE
        from meshdsl.notebook.lines import tensor_row
        from meshdsl.notebook.svg import tag

        rows = (tensor_row(t.json, t.mesh) for t in self.values())
        return tag("table", tag("tbody", *rows), style=TABLE)


LATEST = ("result", "", "carried")
"""What stands for a name that a loop uses too: what comes out, what is computed or carried."""


def placements(report: Json) -> Placements:
    """The named tensors of a report in order, one for each name; of several the last made."""
    found: dict[str, Json] = {}
    for tensor in report["tensors"]:
        old = found.setdefault(tensor["name"], tensor) if tensor["name"] else None
        if old is not None and _rank(tensor) <= _rank(old):
            found[tensor["name"]] = tensor
    return Placements({name: TensorView(t, report["mesh"]) for name, t in found.items()})


def _rank(tensor: Json) -> int:
    """How late a tensor is made among those of its name: 0 is the latest."""
    what = (tensor["loop"] or {"as": ""})["as"]
    return LATEST.index(what) if what in LATEST else len(LATEST)
