"""The text of a network that rules cut into stages: in each pass a branch for every stage.

A branch begins with what it receives and ends with what it sends, a backward pass with the
gradients of the stage's parameters, for which nobody waits.
"""

from __future__ import annotations

from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.passes import PassText
from meshdsl.backends.torch.preamble import messages
from meshdsl.device.ir import FORWARD, INPUTS, WEIGHTS, Move, Node, StagePhase, Var
from meshdsl.device.liveness import is_constant, totals
from meshdsl.ir.rewrite import reads_of


class CutNetworkText:
    """Writes the pipeline of a network in stages. `lines` are the names of those of messages."""

    def __init__(self, passes: PassText) -> None:
        self.passes, self.node, self.writer = passes, passes.node, passes.writer
        self.state, self.out = passes.state, passes.out
        self.lines: dict[Move, str] = {}

    def write(self) -> None:
        """Write the passes of all stages, and the loop over the actions of the device."""
        node, passes = self.node, self.passes
        stages = range(node.last + 1)
        with passes.step():
            self.writer.nodes(node.of(StagePhase.EVERY))
            self._cut_lines()
            halves = "I" in node.passes
            if any(map(self._kept_on, stages)):
                self.out.assign(("kept",), "{}")
            if halves and any(map(self._left_on, stages)):
                self.out.assign(("kept_weights",), "{}")
            for kind in [kind for kind in "FBIW" if kind in node.passes]:
                with passes.function(kind):
                    self._branches(kind)
            passes.end(self.lines.values())

    def _cut_lines(self) -> None:
        """Write a line for each message."""
        for move, ends, names in messages(self.node):
            self.out.place = f"{move.span.file}:{move.span.line}"
            kind = "F" if move.phase == "forward" else "B"
            group, *back = (f"groups[{quoted(name)}]" for name in names)
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
                    self.passes.take_from("kept_weights", self._left_on(stage))
                    self._stage_nodes(stage, WEIGHTS)
            if len(self.out.lines) > begun:
                word = "elif"

    def _forward_of(self, stage: int) -> None:
        self._receive(stage, forward=True)
        self._stage_nodes(stage, FORWARD)
        self.passes.put_in("kept", self._kept_on(stage))
        self._send_on(stage, forward=True)

    def _inputs_of(self, stage: int, whole: bool) -> None:
        """Write what other stages wait for, and if it is the `whole` pass the rest of it."""
        self.passes.take_from("kept", self._kept_on(stage))
        self._receive(stage, forward=False)
        parts = (*INPUTS, *WEIGHTS) if whole else INPUTS
        self._slices_of(stage, parts)
        self._stage_nodes(stage, INPUTS, sliced=True)
        self._send_on(stage, forward=False)
        if whole:
            self._stage_nodes(stage, WEIGHTS, sliced=True)
        else:
            self.passes.put_in("kept_weights", self._left_on(stage))

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

    # --- what is kept ----------------------------------------------------------------------------

    def _kept_on(self, stage: int) -> list[Var]:
        """What the backward pass of a stage reads of its forward pass."""
        results = [m.target for m in self.node.arriving(stage, forward=True)]
        results += [v for n in self.node.of(*FORWARD, stage=stage) for v in _made_by(n)]
        return self._read_later(stage, results, (*INPUTS, *WEIGHTS))

    def _left_on(self, stage: int) -> list[Var]:
        """What the first half of a backward pass keeps for the second, which comes later."""
        results = [m.target for m in self.node.arriving(stage, forward=False)]
        results += [v for n in self.node.of(*INPUTS, stage=stage) for v in _made_by(n)]
        return self._read_later(stage, [*self._kept_on(stage), *results], WEIGHTS)

    def _read_later(self, stage: int, made: list[Var], parts: tuple[StagePhase, ...]) -> list[Var]:
        read = {v for n in self.node.of(*parts, stage=stage) for v in reads_of(n)}
        return [v for v in dict.fromkeys(made) if v in read and v.name not in totals(self.node)]


def _made_by(node: Node) -> tuple[Var, ...]:
    """What a statement makes; of a message the target is elsewhere, a number has no variable."""
    if is_constant(node) or (isinstance(node, Move) and node.step.kind == "send"):
        return ()
    return node.makes
