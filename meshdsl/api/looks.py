"""What a plan shows of itself: tensors, collectives, memory. All of it is drawn from the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshdsl.api.errors import told
from meshdsl.api.places import here
from meshdsl.diagnostics import Source, did_you_mean, fail
from meshdsl.named.ir import walk

if TYPE_CHECKING:
    from meshdsl.api.program import Program
    from meshdsl.notebook.collectives import Collectives
    from meshdsl.notebook.memory import Memory
    from meshdsl.notebook.views import Placements, TensorView
    from meshdsl.pipeline import Compilation

PRELUDE = "<prelude>"
"""The file that library functions are of."""


class Looks:
    """The side of a plan that is looked at; `_made` is its compilation."""

    program: Program
    _made: Compilation

    @property
    def _report(self) -> dict[str, Any]:
        return self._made.report

    @property
    def _sources(self) -> dict[str, Source]:
        """The user's texts that lines of a report are of, that of the program first."""
        first: Source = self._made.source
        found = {first.name: first}
        for op in walk(self._made.named.body):
            found.setdefault(op.span.file, op.span.source)
        return {name: source for name, source in found.items() if name != PRELUDE}

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

    @property
    def collectives(self) -> Collectives:
        """What is sent, in order; each shows its tensor before and after, and who talks to whom."""
        from meshdsl.notebook.collectives import collectives

        return collectives(self._made.device, self._report)

    @property
    def memory(self) -> Memory:
        """Bytes that a device holds: parameters, gradients, state, inputs, activations."""
        from meshdsl.notebook.memory import Memory

        return Memory({self._made.placed.layout: self._report["memory"]})
