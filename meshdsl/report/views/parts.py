"""Views of plans: text with `print`, pictures in a notebook.

Each is a document, written as text and as HTML.
"""

from __future__ import annotations

import ast as python
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from meshdsl.backends.runtime.values import group_members, source_rank
from meshdsl.device.ir import Bucket, DeviceProgram, Move, Var, walk
from meshdsl.output_files import write_whole
from meshdsl.placed.collectives import senders
from meshdsl.placed.placements import Mesh
from meshdsl.report.document import (
    Beside,
    Document,
    Item,
    Note,
    Picture,
    Piece,
    Section,
    Table,
    aligned,
    counted,
    line,
    plain,
)
from meshdsl.report.document import mesh_text as axes_text
from meshdsl.report.explanation_document import sending, tensor_item, typed
from meshdsl.report.running import run_report
from meshdsl.report.schema import CollectiveFacts, ReportFacts, TableFacts, TensorFacts
from meshdsl.report.shard_view import Holding
from meshdsl.report.terminal import ENDLESS, text

if TYPE_CHECKING:
    from meshdsl.backends.engines.against_reference import TensorComparison
    from meshdsl.backends.engines.execution import Result
    from meshdsl.pipeline import Compilation
    from meshdsl.report.html import Markup

WIDTH = 100
"""Columns to which a text is wrapped."""


class View:
    """A view. `str(view)` is its text, `view.html()` the HTML that a notebook shows.

    `view.save("x.svg")` writes its pictures, `view.save("x.html")` all of it as a page.
    """

    width = ENDLESS
    """The columns of the text."""

    @property
    def document(self) -> Document:
        """The document from which text and HTML are written."""
        raise NotImplementedError

    def html(self) -> str:
        """The view as HTML without scripts or external resources."""
        from meshdsl.report.html import html

        return html(self.document)

    def page(self) -> str:
        """The view as a page of its own, which needs no other file."""
        from meshdsl.report.views.saving import page

        return page(self.document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the view: a name in `.svg` takes its pictures, one in `.html` all of it as a page.

        A file of this name is replaced.

        Raises:
            ProgramError: the name has another ending, or the view has no picture (MD0602); the
                system refuses to write there (MD0501).
        """
        from meshdsl.api.errors import told
        from meshdsl.report.views.saving import save

        told(save)(self, path)

    def _write(self, path: str | os.PathLike[str], content: str) -> None:
        """Write another file of this view, with the errors of `save`."""
        from meshdsl.api.errors import told

        told(write_whole)(path, content)

    def text(self, width: int | None = None) -> str:
        """The document as text of at most `width` columns where words allow it."""
        return text(self.document, width or self.width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


class DocumentView(View):
    """A document, and the same as data: `json`."""

    width = WIDTH

    def __init__(self, document: Document, json: Any) -> None:
        self._document, self.json = document, json

    @property
    def document(self) -> Document:
        """The document."""
        return self._document


# --- meshes and tensors ----------------------------------------------------------------------


class MeshView(View):
    """The devices of a mesh by their coordinates."""

    def __init__(self, name: str, axes: tuple[tuple[str, int], ...]) -> None:
        self.mesh = Mesh(name, axes)

    @property
    def document(self) -> Document:
        """A box for every device, with its rank."""
        from meshdsl.report.pictures import mesh_picture, mesh_text

        axes = axes_text(dict(self.mesh.axes))
        name = "" if self.mesh.name == "mesh" else f"{self.mesh.name} "
        caption = (Piece("mesh "), Piece(f"{name}{axes}", "code"))
        return (Picture(lambda: mesh_picture(self.mesh), mesh_text(self.mesh), caption),)


class TensorView(View):
    """The layout of a tensor: `placement` per axis, `shape`, `local_shape`; `json` has all of it.

    >>> import meshdsl as md
    >>> plan = md.load("examples/mlp.mdsl").compile("square", "hybrid")
    >>> h = plan.tensor("h")
    >>> h.placement, h.local_shape
    ({'rows': 'S(batch)', 'cols': 'S(hidden)'}, (32, 1024))
    """

    def __init__(self, json: TensorFacts, mesh: Mapping[str, int]) -> None:
        self.json, self.mesh = json, dict(mesh)
        self.held = Holding.of(json, mesh)

    @property
    def name(self) -> str:
        """The name in layouts and reports."""
        return self.held.name

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims, in order."""
        return self.held.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.held.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's block."""
        return tuple(self.json["local_shape"])

    @property
    def placement(self) -> dict[str, str]:
        """The placement per mesh axis, `S(dim)`, `B` or `P`."""
        return dict(self.json["placement"])

    @property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The ranks that have each block; the key is the block's index along every dim."""
        return self.held.holders(self.held.dims)

    @property
    def document(self) -> Document:
        """The tensor in blocks, coloured by devices."""
        from meshdsl.report.pictures import tensor_picture, tensor_text

        head = Item((Piece(f"{self.name}  ", "code"),), typed(self.json))
        return (head, Picture(lambda: tensor_picture(self.held), tensor_text(self.held)))


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

    @property
    def document(self) -> Document:
        """A line with a small picture for each tensor."""
        width = max(map(len, self), default=0)
        items = (tensor_item(t.json, t.mesh, width=width) for t in self.values())
        return (Table((Section(None, tuple(items)),)),)


LATEST = ("result", "stacked", "", "carried")
"""The roles of a loop's tensors of one name, the latest first: those after it, those in it."""


def placements(report: ReportFacts) -> Placements:
    """The named tensors of a report in order, one for each name: the one made last."""
    by_name: dict[str, TensorFacts] = {}
    for tensor in report["tensors"]:
        name = tensor["name"]
        if name and _rank(tensor) <= _rank(by_name.setdefault(name, tensor)):
            by_name[name] = tensor
    return Placements({name: TensorView(t, report["mesh"]) for name, t in by_name.items()})


def _rank(tensor: TensorFacts) -> int:
    """The order in which a tensor is made among those of its name: 0 is the latest."""
    what = tensor["loop"]["as"] if tensor["loop"] else ""
    return LATEST.index(what) if what in LATEST else len(LATEST)


# --- collectives -----------------------------------------------------------------------------

MOST_GROUPS = 12
"""The most groups that a text lists."""


class CollectiveView(View):
    """One collective. `json` is its entry in `explain`; `before` and `after` show its tensor.

    For a bucket of several tensors they show the first.
    """

    def __init__(self, json: CollectiveFacts, node: Move | Bucket, mesh: Mesh) -> None:
        self.json, self.mesh = json, mesh
        self._node = node
        move = node.moves[0]
        self.before, self.after = holding(move.source, mesh), holding(move.target, mesh)

    @property
    def kind(self) -> str:
        """The kind, as `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `halo`."""
        return str(self.json["kind"])

    @property
    def tensor(self) -> str:
        """The tensor, a subexpression by its name in the program text; all tensors of a bucket."""
        return str(self.json["tensor"])

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the collective."""
        return tuple(self.json["axes"])

    @property
    def line(self) -> int:
        """The source line that needs it."""
        return int(self.json["line"])

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends, all iterations of a loop together."""
        return int(self.json["wire_bytes"])

    @property
    def groups(self) -> list[list[int]]:
        """The groups of ranks."""
        return group_members(dict(self.mesh.axes), self._node.step.axes)

    @property
    def sends(self) -> list[tuple[int, int]]:
        """Pairs of ranks (source, target), around a ring, all to all, or one to the other."""
        from meshdsl.report.pictures import pairs

        if self.kind == "permute":
            mesh, splits = dict(self.mesh.axes), self._node.step.changed()
            return [(source_rank(mesh, r, *splits), r) for r in range(self.mesh.devices)]
        if self.kind == "exchange":
            partners = self._node.step.partners
            return [(g[i], g[other]) for g in self.groups for i, other in enumerate(partners)]
        if self.kind == "halo":
            return senders(self._node.step, self.mesh)
        return [pair for group in self.groups for pair in pairs(self.kind, group)]

    @property
    def title(self) -> str:
        """The collective in a sentence, with the bytes that each device sends."""
        named = any(move.target.value.name for move in self._node.moves)
        whose = self.tensor if named else f"a subexpression (`{self.tensor}`)"
        return plain(sending(self.json, whose))

    @property
    def document(self) -> Document:
        """The tensor before, the mesh with arrows, the tensor after."""
        from meshdsl.report.pictures import collective_picture, tensor_picture

        head = (Piece(f"line {self.line}: ", "muted"), Piece(self.title, "strong"))
        ways = f"{self.json['from']} to {self.json['to']}"
        groups = [" ".join(map(str, g)) for g in self.groups]
        more = f" … ({len(groups):,} groups)" if len(groups) > MOST_GROUPS else ""
        listed = f"{' | '.join(groups[:MOST_GROUPS])}{more}"
        details = (("from ", ways), ("groups: ", listed))
        items = (Item((Piece(label, "muted"),), (Piece(t),), indent=2) for label, t in details)
        number = counted(len(groups), "group")
        note = f"{number} of {self.json['group_size']:,}; each sends {self.json['formula']}"
        pictures = (
            _captioned("before", self.json["from"], lambda: tensor_picture(self.before)),
            _captioned(
                self.kind,
                "+".join(self.axes),
                lambda: collective_picture(self.mesh, self.kind, self.groups, self.sends, note),
            ),
            _captioned("after", self.json["to"], lambda: tensor_picture(self.after)),
        )
        return (Note(head, tuple(items)), Beside(pictures))


def _captioned(when: str, what: str, draw: Callable[[], Markup]) -> Picture:
    caption = (Piece(f"{when} ", "muted"), Piece(what, "code"))
    return Picture(draw, f"{when}: {what}", caption, extra=True)


class Collectives(View, Sequence[CollectiveView]):
    """Every collective of a plan, in order."""

    def __init__(self, found: Sequence[CollectiveView]) -> None:
        self._found = tuple(found)

    @overload
    def __getitem__(self, index: int) -> CollectiveView: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: int | slice) -> CollectiveView | Collectives:
        found = self._found[index]
        return found if isinstance(found, CollectiveView) else Collectives(found)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[CollectiveView]:
        return iter(self._found)

    @property
    def document(self) -> Document:
        """The collectives, one below the other."""
        found = tuple(block for c in self for block in c.document)
        return found or (line("nothing is sent"),)


def collectives(program: DeviceProgram, report: ReportFacts) -> Collectives:
    """The collectives of a device program, with their entries in its report."""
    nodes = [
        n
        for n, _ in walk(program.body)
        if isinstance(n, Move | Bucket) and n.step.moves and not n.step.tier
    ]
    told = zip(report["collectives"], nodes, strict=True)
    return Collectives([CollectiveView(json, node, program.mesh) for json, node in told])


def holding(var: Var, mesh: Mesh) -> Holding:
    """The blocks of a tensor's version on the mesh; of all micro-batches together."""
    type_, p = var.value.type, var.placement
    shown = p.written(mesh)
    if {a for _, axes in shown.splits for a in axes} | {*shown.partial} <= {*mesh.whole.names}:
        p, mesh = shown, mesh.whole  # else the picture has the parts of an axis
    splits = {dim: mesh.known(axes) for dim, axes in p.splits}
    return Holding(
        var.value.name or var.name,
        str(type_.dtype),
        tuple(type_.names),
        tuple(type_.shape),
        {dim: axes for dim, axes in splits.items() if axes},
        p.partial,
        p.op or "sum",
        mesh,
    )


# --- memory ----------------------------------------------------------------------------------


class Memory(View):
    """Bytes of memory per device, by kind; for several plans a row each.

    `json` maps a title to the `memory` of `explain`; `memory["params"]` is that of the first.
    """

    def __init__(self, json: Mapping[str, Mapping[str, int]]) -> None:
        self.json = dict(json)

    def __getitem__(self, kind: str) -> int:
        return int(next(iter(self.json.values()))[kind])

    def beside(self, **others: Memory) -> Memory:
        """A view with this one (the first row) and others below it, under the names given."""
        rows = {name: next(iter(other.json.values())) for name, other in others.items()}
        return Memory({**self.json, **rows})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that any row has."""
        from meshdsl.report.pictures import kinds_held

        return kinds_held(self.json)

    def table(self) -> list[list[str]]:
        """The header and a line for each row: every kind, and the total."""
        from meshdsl.report.pictures import memory_table

        return memory_table(self.json)

    @property
    def document(self) -> Document:
        """The bars, to one scale."""
        from meshdsl.report.pictures import memory_picture

        return (Picture(lambda: memory_picture(self.json), "\n".join(aligned(self.table()))),)


def of_columns(compared: TableFacts) -> Memory:
    """The memory of every column of a comparison that compiled."""
    return Memory(
        {f"{c['letter']}: {c['title']}": c["memory"] for c in compared["columns"] if "memory" in c}
    )


# --- runs ------------------------------------------------------------------------------------


class Ran(View):
    """A run: `outputs` by name, whole; `seconds`; `ok`: equal to the reference, if compared.

    On real ranks (`torchrun`) it was a process of its own: interrupting the kernel ends it.
    """

    width = WIDTH

    def __init__(
        self, made: Compilation, engine: str, result: Result, checked: Sequence[TensorComparison]
    ) -> None:
        self.outputs = dict(result.outputs)
        self.seconds: float = result.seconds
        self.ok: bool | None = all(c.ok for c in checked) if checked else None
        self._document = tuple(run_report(made, engine, result, checked))

    @property
    def document(self) -> Document:
        """The devices, the outputs, and how they compare."""
        return self._document


# --- code ------------------------------------------------------------------------------------

STYLE = "default"
"""A style of Pygments with colours that are legible on the card."""


class Code(str):
    """The text of a program in Python: a `str`, and highlighted in a notebook."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """The function that every device runs; the rest reads values and launches it."""
        lines = self.splitlines()
        for node in python.parse(self).body:
            if isinstance(node, python.FunctionDef) and node.name == "device":
                return "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"
        return str(self)

    @property
    def rest(self) -> str:
        """A comment in place of the lines that a notebook does not show."""
        return f"# print(plan.code) has the whole program, {len(self.splitlines()):,} lines\n"

    def html(self) -> str:
        """The function of every device, in colours, on its own card."""
        return highlighted(self.device + self.rest, "python")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.device + self.rest, "text/html": self.html()}


def highlighted(text: str, language: str) -> Markup:
    """`text` in a frame, with inline colours."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    from meshdsl.report.html import MONO, Markup, tag
    from meshdsl.report.palette import BACK, EDGE, INK

    card = (
        f"background:{BACK};color:{INK};border:1px solid {EDGE};border-radius:6px;"
        f"padding:8px 12px;max-height:32em;overflow:auto;font-family:{MONO};font-size:12.5px;"
        "line-height:1.4;margin:0;white-space:pre"
    )
    formatter = HtmlFormatter(noclasses=True, nowrap=True, style=STYLE)
    inside = highlight(text, _lexer(language), formatter)
    return tag("pre", Markup(inside), style=card)


def _lexer(language: str) -> Any:
    if language == "python":
        from pygments.lexers import PythonLexer

        return PythonLexer(stripnl=False)
    from meshdsl.lexer import MdslLexer

    return MdslLexer(stripnl=False)
