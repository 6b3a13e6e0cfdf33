"""What a plan yields and shows: outputs, the report, the comparison, the costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.diagnostics import Source
from meshdsl.notebook.views import WIDTH, Memory, View, of_columns
from meshdsl.report.compare import comparison
from meshdsl.report.document import Document
from meshdsl.report.explain import explanation
from meshdsl.report.html import html

Json = dict[str, Any]


class Outputs:
    """What a plan yields, in the order of `return`.

    By name (`out.y`, `out["y"]`), unpacked (`loss, y = plan(x=x)`), or as `dict(out)`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def keys(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._values)

    def __getitem__(self, name: str | int) -> Any:
        return self._values[name] if isinstance(name, str) else tuple(self)[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._values:
            raise AttributeError(f"there is no output `{name}`: {', '.join(self._values)}")
        return self._values[name]

    def __repr__(self) -> str:
        shown = (f"{n}: {v.dtype}{list(v.shape)}" for n, v in self._values.items())
        return f"<outputs {', '.join(shown)}>"


class Explanation(View):
    """What `meshdsl explain` prints of a plan. `.json` is the same as data (version 1).

    `sources` are the texts, by name, whose tensors a notebook shows.
    """

    width = WIDTH

    def __init__(
        self, json: Json, source: Source, sources: Mapping[str, Source] | None = None
    ) -> None:
        self.json, self.source = json, source
        self.sources = sources or {source.name: source}

    @property
    def document(self) -> Document:
        """Every line with what it holds and sends."""
        return explanation(self.json | {"warnings": []}, self.sources)

    def text(self, width: int | None = None) -> str:
        """The report of the program's own text, of at most `width` columns where words allow it."""
        if len(self.sources) > 1:
            return Explanation(self.json, self.source).text(width)
        return super().text(width)


class Comparison(View):
    """What `meshdsl compare` prints. `.json` is the same as data; `.same`: whether all agree.

    Columns are beside each other, or below each other where the width of the text is too small.
    """

    width = WIDTH

    def __init__(self, json: Json, source: Source) -> None:
        self.json, self.source = json, source

    @property
    def same(self) -> bool:
        """Whether placements, routes and bytes of all columns agree."""
        return bool(self.json["same"])

    @property
    def memory(self) -> Memory:
        """What a device holds under each column, as bars to one scale."""
        return of_columns(self.json)

    @property
    def document(self) -> Document:
        """Tensors and what is sent of each line, one column beside the other."""
        return comparison(self.json, self.source)

    def html(self) -> str:
        """The page that `meshdsl compare --html` writes."""
        from meshdsl.report.page import page

        return page(self.json, self.source)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": html(self.document)}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one device does in a run: bytes it sends by ring algorithms, FLOPs, bytes it holds.

    `cluster_wire_bytes` is the sum over the devices; collectives in loops are counted each time.
    `memory` tells by role what is held: `params`, `grads`, `state`, `inputs`, and `activations` at
    the worst line.
    """

    wire_bytes: float
    cluster_wire_bytes: float
    collectives: int
    flops: int
    peak_memory: int
    by_kind: dict[str, float]
    by_axis: dict[str, float]
    memory: dict[str, int]

    @classmethod
    def of(cls, report: Json) -> Cost:
        """The costs in a report."""
        totals = report["totals"]
        return cls(
            totals["wire_bytes"],
            totals["cluster_wire_bytes"],
            totals["collectives"],
            totals["flops_per_device"],
            report["memory"]["peak"],
            dict(totals["by_kind"]),
            dict(totals["by_axis"]),
            {role: size for role, size in report["memory"].items() if not role.startswith("peak")},
        )
