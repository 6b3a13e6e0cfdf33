"""What a plan shows of itself: tensors, collectives, memory. All of it is drawn from the report."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshdsl.api.errors import told
from meshdsl.api.places import here
from meshdsl.diagnostics import Diagnostics, Source, did_you_mean, fail

if TYPE_CHECKING:
    from meshdsl.api.program import Program
    from meshdsl.notebook.views import Placements, TensorView
    from meshdsl.pipeline import Options


class Looks:
    """The side of a plan that is looked at; `_made` holds what the pipeline made."""

    program: Program
    options: Options
    _made: dict[str, Any]
    _diagnostics: Diagnostics

    @cached_property
    def _report(self) -> dict[str, Any]:
        from meshdsl.report.explain import explain

        return explain(self._made["device"], self._diagnostics)

    @property
    def _sources(self) -> dict[str, Source]:
        """The texts that lines of a report may be of, that of the program first."""
        source: Source = self._made["source"]
        return {source.name: source}

    @property
    def placements(self) -> Placements:
        """Every named tensor with where it lies, by name."""
        from meshdsl.notebook.views import placements

        return placements(self._report)

    @told
    def tensor(self, name: str) -> TensorView:
        """Who holds what of a tensor, as a picture and as text; see `TensorView`.

        Raises:
            ProgramError: the program has no tensor of this name (MD0102).
        """
        found = self.placements
        if name not in found:
            help = did_you_mean(name, list(found)) or f"there are {', '.join(found)}"
            message = f"`{self.program.name}` has no tensor `{name}`"
            fail("MD0102", message, here().argument("name", 0), help=help)
        return found[name]
