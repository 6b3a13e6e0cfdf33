"""The collectives of a plan: what each does to its tensor, and who sends to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from meshdsl.backends.runtime.values import group_members, source_rank
from meshdsl.device.ir import Bucket, Move, Program, Var, walk
from meshdsl.notebook.held import Holding
from meshdsl.notebook.views import View
from meshdsl.placed.sbp import Mesh

Json = dict[str, Any]
MOST_GROUPS = 12
"""Groups that are listed in a text; of more the first few."""


class CollectiveView(View):
    """One collective. `json` is what `explain` says of it; `before` and `after` are its tensor's.

    Of a bucket of several tensors they are those of the first.
    """

    def __init__(self, json: Json, node: Move | Bucket, mesh: Mesh) -> None:
        self.json, self.mesh = json, mesh
        self._node = node
        move = node.moves[0]
        self.before, self.after = holding(move.source, mesh), holding(move.target, mesh)

    @property
    def kind(self) -> str:
        """What it does: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `permute`."""
        return str(self.json["kind"])

    @property
    def tensor(self) -> str:
        """What is sent, a subexpression under its name in the program text; of a bucket all."""
        return str(self.json["tensor"])

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices talk."""
        return tuple(self.json["axes"])

    @property
    def line(self) -> int:
        """The source line that needs it."""
        return int(self.json["line"])

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends, all trips of a loop together."""
        return int(self.json["wire_bytes"])

    @property
    def groups(self) -> list[list[int]]:
        """The ranks that talk to each other."""
        return group_members(dict(self.mesh.axes), self.axes)

    @property
    def sends(self) -> list[tuple[int, int]]:
        """Pairs of ranks along which data moves: around a ring, each to each, or where it goes."""
        from meshdsl.notebook.arrows import pairs

        if self.kind == "permute":
            mesh, splits = dict(self.mesh.axes), self._node.step.changed()
            return [(source_rank(mesh, r, *splits), r) for r in range(self.mesh.devices)]
        return [pair for group in self.groups for pair in pairs(self.kind, group)]

    @property
    def title(self) -> str:
        """`all_reduce sum of y over cols: 64 KiB (65,536 B) sent per device`."""
        from meshdsl.report.terminal import _sent

        op = f" {self.json['op']}" if self.json["op"] else ""
        over = "+".join(self.axes)
        named = any(move.target.value.name for move in self._node.moves)
        what = self.tensor if named else f"a subexpression (`{self.tensor}`)"
        return f"{self.kind}{op} of {what} over {over}: {_sent(self.json)}"

    def __str__(self) -> str:
        groups = [" ".join(map(str, g)) for g in self.groups]
        more = f" … ({len(groups):,} groups)" if len(groups) > MOST_GROUPS else ""
        return (
            f"line {self.line}: {self.title}\n  from {self.json['from']} to {self.json['to']}\n"
            f"  groups: {' | '.join(groups[:MOST_GROUPS])}{more}"
        )

    def html(self) -> str:
        """The tensor before, the mesh with arrows, the tensor after."""
        from meshdsl.notebook import arrows, tensor
        from meshdsl.notebook.html import CODE, small
        from meshdsl.notebook.svg import image, tag
        from meshdsl.report.figures import counted

        groups = counted(len(self.groups), "group")
        note = f"{groups} of {self.json['group_size']:,}; each sends {self.json['formula']}"
        mesh = arrows.picture(self.mesh, self.kind, self.groups, self.sends, note)
        figures = (
            ("before", self.json["from"], tensor.picture(self.before)),
            (self.kind, "+".join(self.axes), mesh),
            ("after", self.json["to"], tensor.picture(self.after)),
        )
        found = (
            tag(
                "div",
                tag("div", small(when), " ", tag("code", what, style=CODE)),
                image(picture, f"{when}: {what}"),
                style="display:inline-block;vertical-align:top;margin:0 10px 8px 0",
            )
            for when, what, picture in figures
        )
        head = tag("div", small(f"line {self.line}"), " ", tag("b", self.title))
        return tag("div", head, *found)


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

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing is sent"

    def html(self) -> str:
        """All of them below each other."""
        from meshdsl.notebook.svg import Markup, tag

        return tag("div", *(Markup(c.html()) for c in self)) if self else "<p>Nothing is sent.</p>"


def collectives(program: Program, report: Mapping[str, Any]) -> Collectives:
    """The collectives of a device program, and what its report says of each."""
    nodes = [n for n, _ in walk(program.body) if isinstance(n, Move | Bucket) and n.step.moves]
    told = zip(report["collectives"], nodes, strict=True)
    return Collectives([CollectiveView(json, node, program.mesh) for json, node in told])


def holding(var: Var, mesh: Mesh) -> Holding:
    """A version of a tensor as it lies on the mesh."""
    type_, p = var.value.type, var.placement
    return Holding(
        var.value.name or var.name,
        str(type_.dtype),
        tuple(type_.names),
        tuple(type_.shape),
        dict(p.splits),
        p.partial,
        p.op or "sum",
        mesh,
    )
