"""The text of a network that rules cut into stages: in each pass a branch for every stage.

A branch begins with what it receives and ends with what it sends, a backward pass with the
gradients of the stage's parameters, for which nobody waits.
"""

from __future__ import annotations

from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.move_text import typed
from meshdsl.backends.torch.passes import Passes
from meshdsl.backends.torch.preamble import messages
from meshdsl.device.ir import FORWARD, INPUTS, WEIGHTS, Move, Node, Pipeline, StagePhase, Var
from meshdsl.device.liveness import is_constant, reads, sums, totals


class CutNetworks(Passes):
    """Writes networks in stages; a subclass writes their statements."""

    def cut_network(self, node: Pipeline) -> None:
        """Write the passes of all stages, and the loop over the actions of the device."""
        one_each = tuple((stage,) for stage in range(len(node.rows)))
        micro = self.begin(node, node.known.held != one_each)
        outside, self.fresh = self.fresh, set()
        self.nodes(node.of(StagePhase.EVERY))
        lines = self._cut_lines(node)
        halves = "I" in node.passes
        if any(self._kept_on(node, stage) for stage in range(node.last + 1)):
            self.out.statement("kept = {}")
        if halves and any(self._left_on(node, stage) for stage in range(node.last + 1)):
            self.out.statement("kept_weights = {}")
        with self._function("F"):
            self._branches(node, "F", lines)
        if not node.is_forward:
            action = "I" if halves else "B"
            with self._function(action):
                self._branches(node, action, lines)
        if halves:
            with self._function("W"):
                self._branches(node, "W", lines)
        self.end(node, micro, lines.values())
        self.fresh = outside | sums(node)

    def _cut_lines(self, node: Pipeline) -> dict[Move, str]:
        """Write a line for each message; their names."""
        lines = {}
        for move, ends, names in messages(node):
            kind = "F" if move.phase == "forward" else "B"
            local = move.target.local
            name = self.variables.names.fresh(f"{move.source.hint or move.source.name}_line")
            what = f"{self.shape(move.target)}, {local.dtype.torch}, ends={ends}"
            way = f'SCHEDULE, "{kind}", {self.at[node.axis]}'
            group, *back = (f"groups[{quoted(name)}]" for name in names)
            what += "".join(f", back={name}" for name in back)
            self.out.place = f"{move.span.file}:{move.span.line}"
            self.out.statement(f"{name} = Line({group}, {way}, {what})")
            lines[move] = name
        return lines

    # --- passes ----------------------------------------------------------------------------------

    def _branches(self, node: Pipeline, kind: str, lines: dict[Move, str]) -> None:
        """Write a pass, with a branch for each stage that does something in it."""
        word = "if"
        stages = range(node.last + 1)
        for stage in stages if kind == "F" else reversed(stages):
            with self._under(f"{word} {self.stage} == {stage}:", optional=True) as begun:
                if kind == "F":
                    self._forward_of(node, stage, lines)
                if kind in "IB":
                    self._inputs_of(node, stage, lines, kind == "B")
                if kind == "W":
                    self._taken_from("kept_weights", self._left_on(node, stage))
                    self._stage_nodes(node, stage, WEIGHTS)
            if len(self.out.lines) > begun:
                word = "elif"

    def _forward_of(self, node: Pipeline, stage: int, lines: dict[Move, str]) -> None:
        self._receive(node, stage, lines, forward=True)
        self._stage_nodes(node, stage, FORWARD)
        self._put_in("kept", self._kept_on(node, stage))
        self._send_on(node, stage, lines, forward=True)

    def _inputs_of(self, node: Pipeline, stage: int, lines: dict[Move, str], whole: bool) -> None:
        """Write what other stages wait for, and if it is the `whole` pass the rest of it."""
        self._taken_from("kept", self._kept_on(node, stage))
        self._receive(node, stage, lines, forward=False)
        parts = (*INPUTS, *WEIGHTS) if whole else INPUTS
        self._slices_of(node, stage, parts)
        self._stage_nodes(node, stage, INPUTS, sliced=True)
        self._send_on(node, stage, lines, forward=False)
        if whole:
            self._stage_nodes(node, stage, WEIGHTS, sliced=True)
        else:
            self._put_in("kept_weights", self._left_on(node, stage))

    def _stage_nodes(
        self, node: Pipeline, stage: int, parts: tuple[StagePhase, ...], sliced: bool = False
    ) -> None:
        """Write the statements of a stage, under the slices of inputs that they read."""
        if not sliced:
            self._slices_of(node, stage, parts)
        computed = tuple(part for part in parts if not part.sends and part is not StagePhase.EVERY)
        self.nodes(node.of(*computed, stage=stage))

    def _slices_of(self, node: Pipeline, stage: int, parts: tuple[StagePhase, ...]) -> None:
        read = {v for n in node.of(*parts, stage=stage) for v in reads(n)}
        for item in node.stacked:
            if item.inside in read:
                self.stacked(item.outer, item.inside, node)

    # --- messages --------------------------------------------------------------------------------

    def _receive(self, node: Pipeline, stage: int, lines: dict[Move, str], forward: bool) -> None:
        place = f"{self.variables.word(node.index)}, {self.stage}"
        for move in node.arriving(stage, forward):
            self.out.place = f"{move.span.file}:{move.span.line}"
            self.variables.reach(move)
            name = self.variables.assign(move.target)
            text = f"{name} = {lines[move]}.receive({place})"
            self.out.statement(text, typed(move.target))
            self.fresh.add(move.target)

    def _send_on(self, node: Pipeline, stage: int, lines: dict[Move, str], forward: bool) -> None:
        place = f"{self.variables.word(node.index)}, {self.stage}"
        for move in node.leaving(stage, forward):
            self.out.place = ""
            self.out.comment(f"send, {move.wire:,} B: {move.why}")
            self.out.place = f"{move.span.file}:{move.span.line}"
            self.variables.reach(move)
            self.out.statement(f"{lines[move]}.send({self._tensor(move.source)}, {place})")

    # --- what is kept ----------------------------------------------------------------------------

    def _kept_on(self, node: Pipeline, stage: int) -> list[Var]:
        """What the backward pass of a stage reads of its forward pass."""
        results = [m.target for m in node.arriving(stage, forward=True)]
        results += [v for n in node.of(*FORWARD, stage=stage) for v in _made_by(n)]
        return self._read_later(node, stage, results, (*INPUTS, *WEIGHTS))

    def _left_on(self, node: Pipeline, stage: int) -> list[Var]:
        """What the first half of a backward pass keeps for the second, which comes later."""
        results = [m.target for m in node.arriving(stage, forward=False)]
        results += [v for n in node.of(*INPUTS, stage=stage) for v in _made_by(n)]
        return self._read_later(node, stage, [*self._kept_on(node, stage), *results], WEIGHTS)

    def _read_later(
        self, node: Pipeline, stage: int, made: list[Var], parts: tuple[StagePhase, ...]
    ) -> list[Var]:
        read = {v for n in node.of(*parts, stage=stage) for v in reads(n)}
        return [v for v in dict.fromkeys(made) if v in read and v.name not in totals(node)]


def _made_by(node: Node) -> tuple[Var, ...]:
    """What a statement makes; of a message the target is elsewhere, a number has no variable."""
    if is_constant(node) or (isinstance(node, Move) and node.step.kind == "send"):
        return ()
    return node.makes
