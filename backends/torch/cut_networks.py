"""The text of a network that rules cut into stages: in each pass a branch for every stage.

A branch begins with what it receives and ends with what it sends, a backward pass with the
gradients of the stage's parameters, for which nobody waits.
"""

from __future__ import annotations

from meshdsl.backends.torch.passes import PassText
from meshdsl.backends.torch.preamble import messages, pairs_text
from meshdsl.device.ir import FORWARD, INPUTS, WEIGHTS, Move, StagePhase
from meshdsl.device.pass_values import kept_for_backward, kept_for_weights
from meshdsl.ir.rewrite import reads_of


class CutNetworkText:
    """Writes the pipeline of a network in stages. `lines` are the names of those of messages."""

    def __init__(self, passes: PassText) -> None:
        self.passes, self.node, self.writer = passes, passes.node, passes.writer
        self.state, self.out = passes.state, passes.out
        self.lines: dict[Move, str] = {}
        self.kept = kept_for_backward(self.node)
        self.kept_weights = kept_for_weights(self.node) if "I" in self.node.passes else {}

    def write(self) -> None:
        """Write the passes of all stages, and the loop over the actions of the device."""
        node, passes = self.node, self.passes
        with passes.step():
            self.writer.nodes(node.of(StagePhase.EVERY))
            self._cut_lines()
            if self.kept:
                self.out.assign(("kept",), "{}")
            if self.kept_weights:
                self.out.assign(("kept_weights",), "{}")
            for kind in [kind for kind in "FBIW" if kind in node.passes]:
                with passes.function(kind):
                    self._branches(kind)
            passes.end(self.lines.values())

    def _cut_lines(self) -> None:
        """Write a line for each message."""
        for move, ends, names in messages(self.node):
            kind = "F" if move.phase == "forward" else "B"
            group, *back = map(pairs_text, names)
            more = f", ends={ends}" + "".join(f", back={name}" for name in back)
            hint = move.source.hint or move.source.name
            self.lines[move] = self.passes.line(hint, group, kind, move.target, more)

    # --- passes ----------------------------------------------------------------------------------

    def _branches(self, kind: str) -> None:
        """Write a pass, with a branch for each stage that does something in it."""
        word = "if"
        stages = range(self.node.last + 1)
        for stage in stages if kind == "F" else reversed(stages):
            test = f"{self.passes.stage()} == {stage}"
            with self.passes.under(f"{word} {test}:", optional=True) as begun:
                if kind == "F":
                    self._forward_of(stage)
                if kind in "IB":
                    self._inputs_of(stage, kind == "B")
                if kind == "W":
                    self.passes.take_from("kept_weights", self.kept_weights.get(stage, []))
                    self._stage_nodes(stage, WEIGHTS)
            if len(self.out.lines) > begun:
                word = "elif"

    def _forward_of(self, stage: int) -> None:
        self._receive(stage, forward=True)
        self._stage_nodes(stage, FORWARD)
        self.passes.put_in("kept", self.kept.get(stage, []))
        self._send_on(stage, forward=True)

    def _inputs_of(self, stage: int, whole: bool) -> None:
        """Write what other stages wait for, and if it is the `whole` pass the rest of it."""
        self.passes.take_from("kept", self.kept.get(stage, []))
        self._receive(stage, forward=False)
        parts = (*INPUTS, *WEIGHTS) if whole else INPUTS
        self._slices_of(stage, parts)
        self._stage_nodes(stage, INPUTS, sliced=True)
        self._send_on(stage, forward=False)
        if whole:
            self._stage_nodes(stage, WEIGHTS, sliced=True)
        else:
            self.passes.put_in("kept_weights", self.kept_weights.get(stage, []))

    def _stage_nodes(self, stage: int, parts: tuple[StagePhase, ...], sliced: bool = False) -> None:
        """Write the statements of a stage, under the slices of inputs that they read."""
        if not sliced:
            self._slices_of(stage, parts)
        computed = tuple(part for part in parts if not part.sends and part is not StagePhase.EVERY)
        self.writer.nodes(self.node.of(*computed, stage=stage))

    def _slices_of(self, stage: int, parts: tuple[StagePhase, ...]) -> None:
        read = {v for n in self.node.of(*parts, stage=stage) for v in reads_of(n)}
        for item in self.node.stacked:
            if item.inside in read:
                self.writer.stacked(item.outer, item.inside, self.node)

    # --- messages --------------------------------------------------------------------------------

    def _receive(self, stage: int, forward: bool) -> None:
        for move in self.node.arriving(stage, forward):
            self.out.place = f"{move.span.file}:{move.span.line}"
            self.state.variables.reach(move)
            self.state.let(move.target, self.passes.received(self.lines[move]))
            self.state.fresh.add(move.target)

    def _send_on(self, stage: int, forward: bool) -> None:
        for move in self.node.leaving(stage, forward):
            self.out.place = ""
            self.out.comment(f"send, {move.wire:,} B: {move.why}")
            self.passes.send(move, self.lines[move])
