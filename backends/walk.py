"""One walk of a device program: names, source lines, loops and literals.

Every emitter is a notation of it: it has the text of an entry, an operator, a collective and the
ends of a loop. Nothing of a `.mdsl` file becomes code: identifiers are allocated, strings are
written as literals, and source lines are comments with control characters escaped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from meshdsl.backends.torch.preamble import inert
from meshdsl.backends.torch.text_lines import TextLines
from meshdsl.device.ir import (
    Bucket,
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Start,
    Var,
    Wait,
)
from meshdsl.diagnostics import Span
from meshdsl.ir.program import Carry

NOWHERE = ("", 0, "")
"""The source place of no statement."""


class NotationWriter(ABC):
    """Writes one program in one notation, statement by statement.

    `constants` are the literals of constants, which are written where they are used. `phases`:
    comments name the phase of a statement other than the forward pass.
    """

    phases = False

    def __init__(self, program: DeviceProgram) -> None:
        self.program, self.mesh = program, program.mesh
        self.out = TextLines(depth=0)
        self.constants: dict[Var, str] = {}
        self.shown = NOWHERE

    # --- texts of a notation ---------------------------------------------------------------------

    @abstractmethod
    def entry(self, var: Var, kind: str) -> None:
        """An input tensor of the program: one of the `inputs`, `params` or `states`."""

    @abstractmethod
    def compute(self, node: Compute) -> None:
        """An operator other than a constant."""

    @abstractmethod
    def move(self, node: Move) -> None:
        """One step of a reshard."""

    def bucket(self, node: Bucket) -> None:
        """Moves done by one collective; only passes of the emitted program make one."""
        raise AssertionError(f"a notation without buckets was given one: {node.moves}")

    def start(self, node: Start) -> None:
        """The issue of a collective, which only the emitted program overlaps."""
        raise AssertionError(f"a notation without overlap was given {node.work}")

    def wait(self, node: Wait) -> None:
        """The end of a collective issued before."""
        raise AssertionError(f"a notation without overlap was given {node.work}")

    @abstractmethod
    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        """The slice of a stack at the index of a loop."""

    @abstractmethod
    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """The tensor that a loop fills with a slice in every iteration, before the loop."""

    def filled(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """The slice that a loop collects at the end of an iteration."""
        self.out.statement(f"{self.name(made.outer)}[{node.index}] = {self.ref(made.inside)}")

    def carried(self, carry: Carry[Var]) -> None:
        """The first value of a carried variable that has a name of its own."""
        self.out.assign((self.name(carry.inside),), self.ref(carry.init))

    def next_text(self, carry: Carry[Var]) -> str:
        """The text of the value that the next iteration begins with."""
        return self.ref(carry.next)

    # --- the walk --------------------------------------------------------------------------------

    def name(self, var: Var) -> str:
        """The identifier of a variable."""
        return var.name

    def ref(self, var: Var) -> str:
        """The text of a value: its identifier, or the literal of a constant."""
        return self.constants[var] if var in self.constants else self.name(var)

    def entries(self) -> None:
        """Everything that the program is given."""
        for var in self.program.inputs:
            self.entry(var, "inputs")
        for var in self.program.params:
            self.entry(var, "params")
        for var in self.program.states:
            self.entry(var, "states")

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        """The statements of a block, each under its source line.

        One that has no text has no source line either.
        """
        for node in nodes:
            begun, shown, place = len(self.out.lines), self.shown, self.out.place
            if self.headed(node):
                span = self._source(node) if isinstance(node, Bucket) else node.span
                self.source_line(span, node.phase)
            head = len(self.out.lines)
            self.node(node)
            if begun < head and not self.out.has_statements(head):
                del self.out.lines[begun:head]
                self.shown, self.out.place = shown, place
            self.end(node)

    def _source(self, node: Bucket) -> Span:
        """The source of a move whose line is above a bucket already, else of the first one."""
        spans = (move.span for move in node.moves)
        return next((s for s in spans if (s.file, s.line) == self.shown[:2]), node.span)

    def headed(self, node: Node) -> bool:
        """Whether a statement is written under its source line: no constant or part of another."""
        if isinstance(node, Start | Wait):  # these are among the statements that they overlap
            return self.shown == NOWHERE
        return not (isinstance(node, Compute) and node.name == "constant")

    def node(self, node: Node) -> None:
        """One statement, or a loop; the literal of a constant is noted."""
        match node:
            case Compute(name="constant"):
                self.constants[node.out] = self.literal(node.attr("value"))
            case Compute():
                self.compute(node)
            case Move():
                self.move(node)
            case Bucket():
                self.bucket(node)
            case Start():
                self.start(node)
            case Wait():
                self.wait(node)
            case DeviceLoop():
                self.loop(node)

    def end(self, node: Node) -> None:
        """What follows a statement, whatever the source line: nothing, where none is deleted."""
        del node

    # --- loops -----------------------------------------------------------------------------------

    def loop(self, node: DeviceLoop) -> None:
        """A `repeat` as a Python `for`."""
        self.enter(node)
        self.iterations(node)

    def iterations(self, node: DeviceLoop) -> None:
        """The `for` with its body, and before it the tensors that it collects."""
        for each in node.collected:
            self.begun(each, node)
        with self.out.under(self.header(node)):
            for item in node.stacked:
                self.stacked(item.outer, item.inside, node)
            self.body(node)
            for each in node.collected:
                self.filled(each, node)
            self.next(node)
        self.shown = NOWHERE

    def enter(self, node: DeviceLoop) -> None:
        """The initial values of carries."""
        for carry in node.carries:
            if carry.inside.name != carry.init.name:
                self.carried(carry)

    def header(self, node: DeviceLoop) -> str:
        """The line of the `for`; what has to stand before it is written."""
        indices = f"range({self.count(node)})"
        indices = f"reversed({indices})" if node.reverse else indices
        return f"for {self.counter(node)} in {indices}:"

    def count(self, node: DeviceLoop) -> str:
        """Text of the number of iterations of a loop."""
        return str(node.dim.size)

    def counter(self, node: DeviceLoop) -> str:
        """The identifier of the index of a loop."""
        return node.index

    def body(self, node: DeviceLoop) -> None:
        """The statements of an iteration."""
        self.nodes(node.body)

    def next(self, node: DeviceLoop) -> None:
        """The next values of carries, all at once: one may be another's old value."""
        pairs = [(self.name(c.inside), self.next_text(c)) for c in node.carries]
        pairs = [(a, b) for a, b in pairs if a != b]
        if pairs:
            names, values = zip(*pairs, strict=True)
            self.out.assign(names, ", ".join(values))

    def literal(self, value: object) -> str:
        """A number as Python source; infinities have no literal."""
        text = repr(value)
        return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text

    def source_line(self, span: Span, phase: str = "forward") -> None:
        """The source line of the next statements as a comment, unless it was the latest one."""
        phase = phase if self.phases else "forward"
        place = (span.file, span.line, phase)
        self.out.place = f"{span.file}:{span.line}"
        if place == self.shown:
            return
        self.shown = place
        if not self.out.lines[-1].opens:
            self.out.add()
        text = inert(f"{self.out.place}  {span.source.excerpt(span.line).strip()}")
        self.out.remark(text + (f"  [{phase}]" if phase != "forward" else ""))
