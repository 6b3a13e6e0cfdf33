"""Passes of a pipeline in the text: nested functions, and the loop over the actions of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from meshdsl.backends.torch.statement_writer import StatementWriter
from meshdsl.backends.walk import NOWHERE
from meshdsl.device.ir import Move, Pipeline, Var
from meshdsl.device.liveness import sums, totals
from meshdsl.device.pass_values import Where

KEEPERS: dict[Where, str] = {"every": "kept", "first": "kept_first", "last": "kept_last"}
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


class PassText:
    """Writes the functions of the passes of one pipeline, by the means of a writer of statements.

    Where a device has `several` stages, a pass names its own. `micro` is the word for a
    micro-batch.
    """

    def __init__(self, writer: StatementWriter, node: Pipeline, several: bool) -> None:
        self.writer, self.node, self.several = writer, node, several
        self.state, self.blocks, self.out = writer.state, writer.blocks, writer.out
        self.variables = writer.state.variables
        self.micro = self.variables.word(node.index, "micro")
        self.arguments = f"{self.micro}, {STAGE}" if several else self.micro
        self.state.used |= {"Line", "pairs_of"}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Write the step: what is before the passes, they, and the loop over the actions."""
        node, state = self.node, self.state
        self.writer.enter(node)
        self.writer.operators.check_ahead(node)
        state.totals = frozenset(map(state.identifier, _summed(node)))
        self.writer.loops.append(node)
        outside, state.fresh = state.fresh, set()
        yield
        self.writer.loops.pop()
        state.totals, self.writer.shown = frozenset(), NOWHERE
        state.fresh = outside | sums(node)

    def end(self, lines: Iterable[str]) -> None:
        """Write what follows the passes: the loop over actions, and the ends of the lines."""
        self._row()
        for name in lines:
            self.out.statement(f"{name}.close()")

    @property
    def key(self) -> str:
        """The key of what is kept for a pass, between parentheses."""
        return f"({self.arguments})" if self.several else self.arguments

    def stage(self) -> str:
        """The word for the stage of a pass."""
        return STAGE if self.several else self.blocks.device(self.node.axis)

    # --- messages --------------------------------------------------------------------------------

    def line(self, hint: str, group: str, kind: str, var: Var, more: str) -> str:
        """Write the line over which a value goes from stage to stage; its name.

        `group` and `more` are the text of its first and last arguments, `kind` is the action that
        it belongs to.
        """
        name = self.variables.names.fresh(f"{hint}_line")
        way = f'SCHEDULE, "{kind}", {self.blocks.device(self.node.axis)}'
        what = f"{self.blocks.message(var)}, {var.local.dtype.torch}"
        self.out.assign((name,), f"Line({group}, {way}, {what}{more})")
        return name

    def received(self, line: str) -> str:
        """The text of what a line brings."""
        return f"{line}.receive({self.micro}, {self.stage()})"

    def send(self, move: Move, line: str, value: Var | None = None) -> None:
        """Write that a value goes to another stage: the source of a move, or one in its place."""
        self.out.place = f"{move.span.file}:{move.span.line}"
        if value is None:
            self.variables.reach(move)
        sent = self.state.tensor(value or move.source)
        self.out.statement(f"{line}.send({sent}, {self.micro}, {self.stage()})")

    # --- functions -------------------------------------------------------------------------------

    def _row(self) -> None:
        """Write the loop over the actions of the device."""
        node, device = self.node, self.blocks.device(self.node.axis)
        action = "_" if node.is_forward else "action"
        names = ", ".join((action, self.micro, STAGE if self.several else "_"))
        calls = {action: f"{FUNCTIONS[action]}({self.arguments})" for action in node.passes}
        self.out.add()
        actions = f"{self.state.call('actions')}(SCHEDULE[{device}], {device})"
        with self.out.under(f"for {names} in {actions}:"):
            if node.is_forward:
                self.out.add(calls["F"])
            else:
                is_one_of_two = [*calls] == ["F", "B"]
                for action, call in calls.items():
                    test = f'in "B{action}"' if action in "IW" else f'== "{action}"'
                    is_other = is_one_of_two and action == "B"
                    with self.out.under("else:" if is_other else f"if action {test}:"):
                        self.out.add(call)

    @contextmanager
    def function(self, action: str) -> Iterator[None]:
        """Write the function of a pass, with what it has to know of the device's stages."""
        self.out.add()
        axis, at = self.node.axis, self.blocks.at
        head = f"def {FUNCTIONS[action]}({self.arguments}):"
        with self.variables.function(), self.under(head):
            begun, device = len(self.out.lines), at[axis]
            if self.blocks.pipe.others:  # where another device's stage is, an index is that of it
                at[axis] = STAGE if self.several else device
            yield
            self.out.lines[begun:begun] = self.blocks.stage_lines(begun)
            at[axis] = device

    @contextmanager
    def under(self, head: str, optional: bool = False) -> Iterator[int]:
        """Write a block of no source line, as `TextLines.under` does."""
        self.out.place = ""
        self.writer.shown = NOWHERE
        with self.out.under(head, optional) as before:
            yield before
        self.writer.shown = NOWHERE

    # --- what is kept ----------------------------------------------------------------------------

    def names(self, variables: Iterable[Var]) -> list[str]:
        """The identifiers of variables, each once."""
        return list(dict.fromkeys(self.state.identifier(v) for v in variables))

    def _kept(self, variables: Iterable[Var]) -> list[str]:
        """What is kept of variables: no view that has the name of a parameter or a state."""
        program = self.state.program
        stored = {*self.names((*program.params, *program.states))}
        return [name for name in self.names(variables) if name not in stored]

    def put_in(self, keeper: str, kept: list[Var]) -> None:
        """Write that a pass keeps variables for a later one."""
        if names := self._kept(kept):
            self.out.place = ""
            kept_names = ", ".join(map(self.out.mention, names))
            self.out.statement(f"{keeper}[{self.arguments}] = {kept_names}")

    def take_from(self, keeper: str, kept: list[Var]) -> None:
        """Write that a pass takes what an earlier one has kept."""
        if names := self._kept(kept):
            self.out.place = ""
            self.out.assign(names, f"{keeper}.pop({self.key})")


def _summed(node: Pipeline) -> Iterator[Var]:
    """The sums that passes add to, and their rows."""
    yield from (c.inside for c in node.carries)
    yield from (s.inside for s in node.stacked if s.inside.name in totals(node))
