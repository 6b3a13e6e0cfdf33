"""Passes of a pipeline in the text: nested functions, and the loop over the actions of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from meshdsl.backends.torch.line_breaks import INDENT
from meshdsl.backends.torch.loop_text import LoopWriter
from meshdsl.backends.walk import NOWHERE
from meshdsl.device.ir import Compute, DeviceProgram, Pipeline, Var
from meshdsl.device.liveness import totals

KEEPERS = {"every": "kept", "first": "kept_first", "last": "kept_last"}
"""By stages, where they keep what a backward pass needs of its forward pass."""

STAGE = "stage"
"""The argument of a pass that says which of its device's stages it is of."""

FUNCTIONS = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights", "U": "update"}
"""The name of the function of each pass, by the action of the schedule."""

OWN_NAMES = frozenset(
    (
        *FUNCTIONS.values(),
        *"action kept_weights stages".split(),
        *"versions versions_first versions_last".split(),
        *KEEPERS.values(),
        STAGE,
    )
)
"""What is defined for a pipeline, under no name of the source."""


class Passes(LoopWriter):
    """Writes the functions of passes; a subclass writes what is in them."""

    def __init__(self, program: DeviceProgram, taken: frozenset[str] = frozenset()) -> None:
        piped = any(isinstance(node, Pipeline) for node in program.body)
        super().__init__(program, taken | OWN_NAMES if piped else taken)

    # The identifiers of the sums that passes add to: they belong to the function around them.
    totals: frozenset[str] = frozenset()
    # The words for the device and for the stage of a pass, and the arguments of a pass.
    home, stage, arguments = "", "", ""

    def begin(self, node: Pipeline, several: bool) -> str:
        """Write what is before the passes; where a device has `several` stages, a pass names its.

        The word for a micro-batch.
        """
        self.used.update(("Line", "actions"))
        micro = self.variables.word(node.index, "micro")
        self.home = self.at[node.axis]
        self.stage = STAGE if several else self.home
        self.arguments = f"{micro}, {STAGE}" if several else micro
        self.enter(node)
        self.totals = frozenset(self.name(v) for v in _summed(node))
        self.loops.append(node)
        return micro

    def end(self, node: Pipeline, micro: str, lines: Iterable[str]) -> None:
        """Write what is behind the passes: the loop over actions, and the ends of the lines."""
        self._row(node, micro)
        for name in lines:
            self.out.statement(f"{name}.close()")
        self.loops.pop()
        self.totals, self.shown = frozenset(), NOWHERE

    def _key(self) -> str:
        """The key of what is kept for a pass, between parentheses."""
        return f"({self.arguments})" if "," in self.arguments else self.arguments

    def _row(self, node: Pipeline, micro: str) -> None:
        """Write the loop over the actions of the device."""
        device, arguments = self.at[node.axis], self.arguments
        stage = STAGE if "," in arguments else "_"
        self.out.add()
        action = "_" if node.is_forward else "action"
        self.out.add(f"for {action}, {micro}, {stage} in actions(SCHEDULE[{device}], {device}):")
        calls = {action: f"{FUNCTIONS[action]}({arguments})" for action in node.passes}
        if node.is_forward:
            self.out.add(f"{INDENT}{calls['F']}")
            return
        if [*calls] == ["F", "B"]:
            self.out.add(f'{INDENT}{calls["F"]} if action == "F" else {calls["B"]}')
            return
        for action, call in calls.items():
            test = f'in "B{action}"' if action in "IW" else f'== "{action}"'
            self.out.add(f"{INDENT}if action {test}:")
            self.out.add(f"{2 * INDENT}{call}")

    @contextmanager
    def _function(self, action: str) -> Iterator[None]:
        """Write the function of a pass, by its action."""
        self.out.add()
        with self._under(f"def {FUNCTIONS[action]}({self.arguments}):"):
            yield

    @contextmanager
    def _under(self, head: str, optional: bool = False) -> Iterator[int]:
        """Write what stands under a line; where that is nothing, `pass`, or none of it if optional.

        Yields the number of lines before it.
        """
        self.out.place = ""
        before = len(self.out.lines)
        self.out.add(head)
        self.out.depth += 1
        self.shown = NOWHERE
        yield before
        if self.out.only_comments(before + 1):
            if optional:
                del self.out.lines[before:]
            else:
                self.out.add("pass")
        self.out.depth -= 1
        self.shown = NOWHERE

    # --- what is kept ----------------------------------------------------------------------------

    def _names(self, kept: list[Var]) -> list[str]:
        return list(dict.fromkeys(self.variables.of(v) for v in kept))

    def _put_in(self, keeper: str, kept: list[Var]) -> None:
        if kept:
            self.out.place = ""
            names = ", ".join(self._names(kept))
            self.out.statement(f"{keeper}[{self.arguments}] = {names}")

    def _taken_from(self, keeper: str, kept: list[Var]) -> None:
        if kept:
            self.out.place = ""
            names = ", ".join(self._names(kept))
            self.out.statement(f"{names} = {keeper}.pop({self._key()})")

    # --- statements ------------------------------------------------------------------------------

    def _write_onto(self, node: Compute) -> None:
        """Write an operator in the memory of its operand; a pass assigns no sum of the step."""
        name = self.name(node.outs[0])
        if name in self.totals and self.name(node.ins[0]) == name:
            self.out.statement(self._text_onto(node))
            self.variables.assign(node.outs[0])
        else:
            super()._write_onto(node)


def _summed(node: Pipeline) -> Iterator[Var]:
    """The sums that passes add to, and their rows."""
    yield from (c.inside for c in node.carries)
    yield from (s.inside for s in node.stacked if s.inside.name in totals(node))
