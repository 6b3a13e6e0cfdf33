"""The text of loops: carried, sliced and collected values, and prefetch by one iteration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from meshdsl.backends.torch.move_text import MoveWriter
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, DeviceProgram, Node, Start, Var
from meshdsl.device.liveness import (
    collected,
    given_up,
    left_over,
    overwrites,
    shows_operand,
    sums,
    used_up,
)
from meshdsl.ir.program import Carry, Stacked
from meshdsl.ops.opdef import lookup


class LoopWriter(MoveWriter):
    """Writes loops; a subclass writes their statements."""

    def __init__(self, program: DeviceProgram, taken: frozenset[str] = frozenset()) -> None:
        super().__init__(program, taken)
        # The variables to delete after each statement.
        self.dead: dict[Node, tuple[Var, ...]] = {}
        # Variables that may be views of another, perhaps with elements that share a location.
        self.views: set[Var] = set()
        # The stacks that loops collect, and whether from the last to the first.
        self.backwards: dict[Var, bool] = {}
        self.loops: list[DeviceLoop] = []
        self.collected, self.used_up = collected(program), used_up(program)

    @abstractmethod
    def _call(self, node: Compute) -> TorchText:
        """The argument with which a record writes `node`."""

    @abstractmethod
    def _let_go(self, dead: tuple[Var, ...]) -> None:
        """Delete variables."""

    def enter(self, node: DeviceLoop) -> None:
        """Write the initial values, and delete those of their operands that the loop takes over."""
        for carry in node.carries:
            text = self._tensor(carry.init)
            if self.variables.assign(carry.inside) != text:
                self._let(carry.inside, text)
        self._let_go(given_up(node, self.dead[node]))

    def header(self, node: DeviceLoop) -> None:
        """Write the `for`, after the issue of collectives that the first iteration waits for."""
        first = self._last(node) if node.reverse else "0"
        for ahead in node.ahead:
            with self._reading_ahead(ahead.slices, node, first):
                self.start(Start(ahead.collective, ahead.work))
        super().header(node)

    def counter(self, node: DeviceLoop) -> str:
        """The counter of a loop: that of an earlier loop, where that one does not enclose it."""
        return self.variables.counter(node.index, node.dim.name, {n.index for n in self.loops})

    def _last(self, node: DeviceLoop) -> str:
        """Text of the index of the last iteration."""
        count = self.count(node)
        return str(int(count) - 1) if count.isdigit() else f"{count} - 1"

    def body(self, node: DeviceLoop) -> None:
        """Write the statements of an iteration."""
        # Values from outside are needed again in the next iteration: not to be overwritten inside.
        outside, self.fresh = self.fresh, set(self._own(node))
        self.loops.append(node)
        super().body(node)
        self.loops.pop()
        self.fresh = outside | {c.outer for c in node.collected if not c.is_list} | sums(node)

    def next(self, node: DeviceLoop) -> None:
        """Write the next values, delete large tensors of this iteration, and write the results."""
        super().next(node)
        # The next value of a carry may have been computed under the identifier of the last one.
        carried = {self.name(c.inside) for c in node.carries}
        left = left_over(node, self.collected)
        self._let_go(tuple(v for v in left if self.name(v) not in carried))
        for var in node.makes:
            self.variables.assign(var)

    def _own(self, node: DeviceLoop) -> Iterator[Var]:
        """The carried variables in memory of their own: each iteration makes the next ones anew."""
        makers = {var: maker for maker in node.body for var in maker.makes}
        for carry in node.carries:
            begun, maker = carry.init in self.fresh - self.views, makers.get(carry.next)
            alone = self.uses[carry.init] == self.uses[carry.next] == 1
            if begun and alone and isinstance(maker, Compute):
                if not shows_operand(maker) and not overwrites(maker):
                    yield carry.inside

    # --- prefetch ----------------------------------------------------------------------------

    def start(self, node: Start) -> None:
        """Write the issue of a collective; one for the next iteration is conditional."""
        if node.ahead:
            self._ahead(node)
        else:
            super().start(node)

    def _ahead(self, start: Start) -> None:
        """Issue the collective that the next iteration waits for, if there is one."""
        node = self.loops[-1]
        (ahead,) = (a for a in node.ahead if a.collective is start.collective)
        test, step = ("> 0", "- 1") if node.reverse else (f"< {self._last(node)}", "+ 1")
        counter = self.variables.word(node.index)
        self.out.add(f"if {counter} {test}:")
        self.out.depth += 1
        with self._reading_ahead(ahead.slices, node, f"{counter} {step}"):
            super().start(start)
        self.out.depth -= 1

    @contextmanager
    def _reading_ahead(
        self, slices: tuple[Stacked[Var], ...], node: DeviceLoop, index: str
    ) -> Iterator[None]:
        """Meanwhile, slices are those of another iteration: the one at `index`."""
        for item in slices:
            position = item.outer.local.index(node.dim.name)
            picked = f".select({position}, {index})" if position else f"[{index}]"
            self.texts[item.inside] = f"{self.variables.of(item.outer)}{picked}"
        yield
        for item in slices:
            del self.texts[item.inside]

    # --- sliced, collected and carried values ------------------------------------------------

    def _write_onto(self, node: Compute) -> None:
        """Write an operator in the memory of its operand."""
        self._let(node.outs[0], self._text_onto(node))

    def _text_onto(self, node: Compute) -> str:
        assert node.onto is not None
        call = self._call(node)
        text = lookup(node.name).in_place[node.onto](call)
        for line in call.lines:
            self.out.statement(line)
        return text

    def _slice_of(self, stack: Var, inside: Var, node: DeviceLoop) -> str:
        """The text of the current slice; a list that one loop reads from the end is popped."""
        position = stack.local.index(node.dim.name)
        name, counter = self.variables.of(stack), self.variables.word(node.index)
        if position:
            return f"{name}.select({position}, {counter})"
        if stack not in self.program.lists:
            return f"{name}[{counter}]"
        if inside in self.used_up:
            return f"{name}.pop()"
        return f"{name}[{'~' * self.backwards[stack]}{counter}]"

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        """Write the current slice of a stack."""
        self._let(inside, self._slice_of(stack, inside, node))

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """Write the place of a collected stack: a list, in the order of the iterations."""
        if made.stack is not None:
            return
        self.backwards[made.outer] = node.reverse
        text = "[]"
        if not made.is_list:
            sizes = ", ".join(self.extent(made.outer, dim) for dim in made.outer.local.names)
            text = f"torch.empty([{sizes}], dtype={made.outer.local.dtype.torch})"
        self._let(made.outer, text)

    def filled(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """Write the collected slice, unless it is written over its place already."""
        if made.stack is not None:
            return
        name, item = self.variables.of(made.outer), self._tensor(made.inside)
        text = f"{name}[{self.variables.word(node.index)}] = {item}"
        if made.is_list:
            text = f"{name}.append({item})"
        self.out.statement(text)

    def next_text(self, carry: Carry[Var]) -> str:
        """The text of the next value, as a tensor."""
        return self._tensor(carry.next)
