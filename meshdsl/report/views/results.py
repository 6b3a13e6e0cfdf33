"""The results and views of a plan: outputs, the report, the comparison, the costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Source
from meshdsl.records import dataclass
from meshdsl.report.comparison import comparison
from meshdsl.report.document import Document, Picture
from meshdsl.report.focus import Focus, focused
from meshdsl.report.gantt import gantt_picture, gantt_text
from meshdsl.report.schema import ComparisonFacts, ReportFacts
from meshdsl.report.simulation import TOP, simulated, simulation
from meshdsl.report.views.parts import WIDTH, Memory, View, of_columns
from meshdsl.simulate.trace import simulated_trace, trace_text

if TYPE_CHECKING:
    from meshdsl.simulate.timeline import Timeline

REST = 'explain(all=True) shows every line; line=N, tensor="NAME" and top=N a part of them.'


class Outputs:
    """The outputs of a plan, in the order of `return`.

    By name (`out.y`, `out["y"]`), unpacked (`loss, y = plan(x=x)`), or as `dict(out)`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
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
    """The report of a plan that `meshdsl explain` prints. `.json` is the same as data (version 1).

    `sources` are the texts, by name, whose tensors a notebook shows; `focus` is the part to show.

    Raises:
        DiagnosticError: there is no such part (MD0601, MD0607).
    """

    width = WIDTH

    def __init__(
        self,
        json: ReportFacts,
        source: Source,
        sources: Mapping[str, Source] | None = None,
        focus: Focus | None = None,
    ) -> None:
        self.json, self.source = json, source
        self.sources = sources or {source.name: source}
        self.focus = focus or Focus()
        self._document = focused({**json, "warnings": []}, self.sources, self.focus, REST)

    @property
    def document(self) -> Document:
        """The document of what is to be shown, local tensors and collectives."""
        return self._document

    def text(self, width: int | None = None) -> str:
        """The report of the program's own text, of at most `width` columns where words allow it.

        A tensor that is asked for is shown wherever it is made.
        """
        if len(self.sources) > 1 and self.focus.tensor is None:
            return Explanation(self.json, self.source, focus=self.focus).text(width)
        return super().text(width)


class Comparison(View):
    """The table that `meshdsl compare` prints. `.json` is the same as data; `.same`: all agree.

    Columns are side by side, or one below the other where the text is too narrow.
    """

    width = WIDTH

    def __init__(self, json: ComparisonFacts, source: Source) -> None:
        self.json, self.source = json, source

    @property
    def same(self) -> bool:
        """Whether placements, routes and bytes of all columns agree."""
        return bool(self.json["same"])

    @property
    def memory(self) -> Memory:
        """The memory of a device under each column, as bars to one scale."""
        return of_columns(self.json)

    @property
    def document(self) -> Document:
        """The document of all lines, tensors and reshards column beside column."""
        return comparison(self.json, self.source)

    def page(self) -> str:
        """The interactive page that `meshdsl compare --html` writes."""
        from meshdsl.report.page import page

        return page(self.json, self.source)


class Simulation(View):
    """A predicted step, as `meshdsl simulate` prints it; in a notebook a picture of it, too.

    `json` is the same as data (version 1), and `timeline` the events of every stream. `seconds` is
    the step, `compute` what of it is not waiting; `exposed` are seconds of waiting by mesh axes.
    `mfu` is the part of the devices' peak that the program needs; `peak` the most bytes of a device
    and the second at which it first holds them.

    >>> import meshdsl as md
    >>> found = md.load("examples/mlp.mdsl").compile("square", "hybrid").simulate("h100")
    >>> found.peak[0] == found.timeline.peak[0], sorted(found.exposed)
    (True, ['cols', 'rows'])
    """

    width = WIDTH

    def __init__(self, timeline: Timeline, source: Source, top: int = TOP) -> None:
        self.timeline, self.source, self._top = timeline, source, top
        self.json = simulation(timeline)
        self.seconds, self.compute, self.mfu = timeline.seconds, timeline.compute, timeline.mfu
        self.exposed, self.peak = dict(timeline.exposed), timeline.peak

    @property
    def document(self) -> Document:
        """The step, its streams and its memory over time, and the slowest lines."""
        drawn = Picture(
            partial(gantt_picture, self.timeline), gantt_text(self.timeline), extra=True
        )
        sources = {self.source.name: self.source}
        first, *others = simulated(self.json, sources, self._top)
        return (first, drawn, *others)

    @property
    def memory(self) -> tuple[tuple[float, dict[str, int]], ...]:
        """Seconds, and the bytes of each kind (as in `Plan.memory`) from then on until the next.

        >>> import meshdsl as md
        >>> found = md.load("examples/mlp.mdsl").compile("square", "hybrid").simulate("h100")
        >>> max(sum(kinds.values()) for _, kinds in found.memory) == found.peak[0]
        True
        """
        return tuple(self.timeline.memory_by_kind)

    def trace(self, path: str) -> None:
        """Write the step as a trace, which https://ui.perfetto.dev shows.

        Raises:
            ProgramError: the system refuses to write there (MD0501).
        """
        self._write(path, trace_text(simulated_trace(self.timeline)))


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a run per device: bytes sent (ring algorithms), FLOPs, bytes of memory.

    `cluster_wire_bytes` is the sum over the devices; collectives in loops are counted each time.
    `memory` is by kind: `params`, `grads`, `state`, `inputs`, and at the peak `activations`,
    `gathered` parameters, gradients of a layer (`new_grads`), values of `updates`, and workspace
    (`buffers`).
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
    def of(cls, report: ReportFacts) -> Cost:
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
