"""`StatementWriter`: the statements of a device program as torch text, with loops and deletions.

Moves, operators and passes have writers of their own, which share one `TextState`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from meshdsl.backends.torch.block_text import BlockText
from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, quoted
from meshdsl.backends.torch.move_text import MoveText
from meshdsl.backends.torch.operator_text import OperatorText
from meshdsl.backends.torch.text_state import PrefetchedSlice, TextState, literal, typed
from meshdsl.backends.walk import NOWHERE, NotationWriter
from meshdsl.device.ir import (
    Bucket,
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    Start,
    Var,
    Wait,
    only_on,
)
from meshdsl.device.liveness import (
    collected,
    deaths,
    entered,
    given_up,
    is_constant,
    kept_inside,
    left_over,
    overwrites,
    records,
    shows_operand,
    sums,
    unchanged,
    used_up,
    uses,
)
from meshdsl.device.memory import own_slices
from meshdsl.ir.program import Carry, Stacked, every, loops

WritePipeline = Callable[["StatementWriter", Pipeline], None]


class StatementWriter(NotationWriter):
    """Writes statements; `write_pipeline` those of a pipeline, by this writer's means.

    `taken` are names that the text uses for itself.
    """

    def __init__(
        self, program: DeviceProgram, write_pipeline: WritePipeline, taken: frozenset[str]
    ) -> None:
        super().__init__(program)
        self.write_pipeline = write_pipeline
        self.state = TextState(program, self.out, self.constants, taken)
        self.blocks = BlockText(self.state)
        self.moves = MoveText(self.state, self.blocks)
        self.operators = OperatorText(self.state, self.blocks)
        # The variables to delete after each statement.
        self.dead: dict[Node, tuple[Var, ...]] = {}
        # The stacks that loops collect, and whether from the last to the first.
        self.backwards: dict[Var, bool] = {}
        # What else is written behind a statement.
        self.behind: dict[Node, Callable[[], None]] = {}
        # The line behind the last block of one stage, and the source line that was shown in it.
        self._left = 0, NOWHERE
        self.loops: list[DeviceLoop] = []
        self.collected, self.used_up = collected(program), used_up(program)
        # By list, the name under which a loop takes its entries out again.
        self.names_again = _taken_out(program, self.used_up) if self.used_up else {}
        # The parameters that are loaded as tuples of their slices, with the dim of these.
        is_called_again = program.updates and program.placed.named.goal is None
        self.sliced = _sliced(program) if is_called_again else {}
        # By list, those that are one with it: a list of tuples.
        several = records(program) if len(program.lists) > 1 else ()
        self.records = {var: lists for lists in several for var in lists}

    # --- statements ------------------------------------------------------------------------------

    def entry(self, var: Var, kind: str) -> None:
        """Write the line of a given tensor, if it is read."""
        key = var.value.label if kind == "inputs" else var.value.name or ""
        by_name = self.operators.updates.by_name if self.program.updates else ()
        is_loaded = not var.away or var.value.role == "param"
        if self.state.uses[var] and is_loaded and var not in by_name:
            alone = ""
            if var.on is not None:
                alone = f" where {self.blocks.at[self.blocks.pipe.axis]} == {var.on}"
            name = self.state.variables.assign(var)
            text = f"{kind}[{quoted(key)}]"
            if var in self.sliced:
                at = var.local.index(self.sliced[var])
                text = f"{self.state.call('slices')}({text}{f', {at}' if at else ''})"
            self.out.assign((name,), text, typed(var, self.mesh) + alone)

    def block(self, nodes: tuple[Node, ...], kept: frozenset[Var]) -> None:
        """Write the statements of a function; `kept` are read after them."""
        self._mark(nodes, kept, frozenset())
        for device, group in _by_device(nodes):
            with self.alone(device):
                self.nodes(group)

    @contextmanager
    def alone(self, device: int | None) -> Iterator[None]:
        """Write what a device along the axis of the stages does alone; None: what all do."""
        if device is None:
            yield
            return
        self.state.last, self.state.device_alone = None, device
        shown = self.shown
        if self._left[0] == len(self.out.lines):  # right behind another such block
            self.shown = self._left[1]
        coordinate = self.blocks.coordinate(self.blocks.pipe.axis)
        with self.out.under(f"if {coordinate} == {device}:", optional=True) as before:
            yield
        self.state.last = self.state.device_alone = None
        if len(self.out.lines) == before or self.shown != shown:
            # A source line in the block is not above what all do next.
            self._left, self.shown = (len(self.out.lines), self.shown), NOWHERE

    def _mark(self, nodes: tuple[Node, ...], kept: frozenset[Var], own: frozenset[Var]) -> None:
        """Note which large tensors are deleted after each statement, and in loops."""
        for node, dead in zip(nodes, deaths(nodes, kept, own), strict=True):
            self.dead[node] = dead
            if isinstance(node, DeviceLoop):
                self._mark(node.body, kept_inside(node), entered(node, self.collected))

    def headed(self, node: Node) -> bool:
        """Whether a node has its source line above it; a constant has, too.

        One that adds to a sum what is made right above it belongs to that.
        """
        self.state.dying = self.dead[node]
        if isinstance(node, Compute) and node.onto == 0 and self.state.added_at_once(node):
            return False
        return super().headed(node) or isinstance(node, Compute)

    def node(self, node: Node) -> None:
        """Write one statement."""
        self.state.variables.reach(node)
        outside, self.out.node = self.out.node, None if isinstance(node, DeviceLoop) else node
        with self.blocks.elsewhere(node):
            super().node(node)
        self.out.node = outside

    def end(self, node: Node) -> None:
        """Delete large tensors after their last use."""
        if node in self.behind:
            self.behind[node]()
        dead = self.dead[node]
        gone = given_up(node, dead) if isinstance(node, DeviceLoop) else ()
        self.let_go(tuple(v for v in dead if v not in gone))

    def let_go(self, dead: tuple[Var, ...]) -> None:
        """Delete variables, in as many statements as fit a line; each where there is one."""
        state, alone = self.state, self.state.device_alone
        for device in dict.fromkeys(v.on for v in dead if v.on not in (None, alone)):
            with self.alone(device):
                self.let_go(tuple(v for v in dead if v.on == device))
        dead = tuple(v for v in dead if v.on in (None, self.state.device_alone))
        gone = (state.variables.let_go(v) for v in dead if v not in state.renamed)
        names = [*state.helpers, *(name for name in gone if name)]
        state.helpers = []
        room = WIDTH - len(INDENT) * self.out.depth - len("del ")
        while names:
            count = len(names)
            while count > 1 and len(", ".join(names[:count])) > room:
                count -= 1
            self.out.statement(f"del {', '.join(names[:count])}")
            names = names[count:]

    def compute(self, node: Compute) -> None:
        """Write an operator."""
        self.operators.write(node)

    def move(self, node: Move) -> None:
        """Write a blocking move."""
        self.moves.collective(node)

    def bucket(self, node: Bucket) -> None:
        """Write a bucket: one call for all targets."""
        self.moves.collective(node)

    def wait(self, node: Wait) -> None:
        """Write the end of a collective issued before."""
        if node.late:
            loop = self.loops[-1]
            before = f"{self.state.variables.word(loop.index)} {'+' if loop.reverse else '-'} 1"
            with self.out.under(f"if {self.moves.work(node)}:"):
                self.moves.collect(node, before)
        else:
            self.moves.wait(node)

    def name(self, var: Var) -> str:
        """The identifier of a variable, or the text of a prefetched slice."""
        return self.state.name(var)

    def literal(self, value: object) -> str:
        """A number as Python source."""
        return literal(value)

    # --- loops -----------------------------------------------------------------------------------

    def loop(self, node: DeviceLoop) -> None:
        """Write a loop, or a pipeline."""
        if isinstance(node, Pipeline):
            self.write_pipeline(self, node)
        else:
            super().loop(node)

    def iterations(self, node: DeviceLoop) -> None:
        """Write the `for` with its body; after it, what the last iteration has to wait for."""
        super().iterations(node)
        outside = self.out.node
        for wait in node.late:
            self.out.node = wait
            self.moves.collect(wait, "0" if node.reverse else self.blocks.last(node))
        self.out.node = outside

    def enter(self, node: DeviceLoop) -> None:
        """Write the initial values, and delete those of their operands that the loop takes over."""
        for carry in node.carries:
            text = self.state.tensor(carry.init)
            if self.state.variables.assign(carry.inside) != text:
                self.state.let(carry.inside, text)
        self.let_go(given_up(node, self.dead[node]))

    def header(self, node: DeviceLoop) -> str:
        """The `for`; collectives that the first iteration waits for are issued before it."""
        self.operators.check_ahead(node)
        first = self.blocks.last(node) if node.reverse else "0"
        for ahead in node.ahead:
            with self._reading_ahead(ahead.slices, node, first):
                self.start(Start(ahead.collective, ahead.work))
        self.moves.stack_of |= {c.inside: c.outer for c in node.collected if node.late}
        for wait in node.late:
            self.out.assign((self.moves.work(wait),), "None")
        return super().header(node)

    def count(self, node: DeviceLoop) -> str:
        """Text of the number of iterations of a loop."""
        return self.blocks.count(node)

    def counter(self, node: DeviceLoop) -> str:
        """The counter of a loop: that of an earlier loop, where that one does not enclose it."""
        around = {n.index for n in self.loops}
        return self.state.variables.counter(node.index, node.dim.name, around)

    def body(self, node: DeviceLoop) -> None:
        """Write the statements of an iteration."""
        # Values from outside are needed again in the next iteration: not to be overwritten inside.
        state, outside = self.state, self.state.fresh
        slices = own_slices(node, self.program, state.may_overwrite, state.views)
        state.fresh = {*slices, *self._fresh_carries(node, outside)}
        at = f"[{self.state.variables.word(node.index)}]"
        places = {v: PrefetchedSlice(stack, at) for v, stack in node.in_slices.items()}
        self.state.places.update(places)
        parts = {m.source for wait in node.late for m in wait.collective.moves}
        self.state.prefetched.update((v, at) for v, at in places.items() if v in parts)
        self.loops.append(node)
        super().body(node)
        self.loops.pop()
        for var in (*(item.inside for item in node.stacked), *parts):
            self.state.prefetched.pop(var, None)
        stacks = {c.outer for c in node.collected if not c.is_list}
        self.state.fresh = outside | stacks | sums(node)

    def next(self, node: DeviceLoop) -> None:
        """Write the next values, delete large tensors of this iteration, and write the results."""
        super().next(node)
        # The next value of a carry may have been computed under the identifier of the last one.
        carried = {self.state.identifier(c.inside) for c in node.carries}
        # What is taken out of its list again, under the same name, is there until then anyway.
        again = self.names_again
        listed = {c.inside for c in node.collected if again.get(c.outer) == c.inside.name}
        left = (v for v in left_over(node, self.collected) if v not in listed)
        self.let_go(tuple(v for v in left if self.state.identifier(v) not in carried))
        for var in node.makes:
            self.state.variables.assign(var)

    def _fresh_carries(self, node: DeviceLoop, outside: set[Var]) -> Iterator[Var]:
        """The carried variables whose next values have storage of their own."""
        makers = {var: maker for maker in node.body for var in maker.makes}
        for carry in node.carries:
            begun = carry.init in outside - self.state.views
            alone = self.state.uses[carry.init] == self.state.uses[carry.next] == 1
            maker = makers.get(carry.next)
            if begun and alone and isinstance(maker, Compute):
                if not shows_operand(maker) and not overwrites(maker):
                    yield carry.inside

    # --- prefetch --------------------------------------------------------------------------------

    def start(self, node: Start) -> None:
        """Write the issue of a collective; one for the next iteration is conditional."""
        if node.ahead:
            self._ahead(node)
        else:
            self.moves.start(node)

    def _ahead(self, start: Start) -> None:
        """Issue the collective that the next iteration waits for, if there is one."""
        node = self.loops[-1]
        (ahead,) = (a for a in node.ahead if a.collective is start.collective)
        test, step = ("> 0", "- 1") if node.reverse else (f"< {self.blocks.last(node)}", "+ 1")
        counter = self.state.variables.word(node.index)
        with (
            self.out.under(f"if {counter} {test}:"),
            self._reading_ahead(ahead.slices, node, f"{counter} {step}"),
        ):
            self.moves.start(start)

    @contextmanager
    def _reading_ahead(
        self, slices: tuple[Stacked[Var], ...], node: DeviceLoop, index: str
    ) -> Iterator[None]:
        """Meanwhile, slices are those of another iteration: the one at `index`."""
        for item in slices:
            position = item.outer.local.index(node.dim.name)
            picked = f".select({position}, {index})" if position else f"[{index}]"
            if self.backwards.get(item.outer):
                picked = f"[~({index})]"
            self.state.prefetched[item.inside] = PrefetchedSlice(item.outer, picked)
        yield
        for item in slices:
            del self.state.prefetched[item.inside]

    # --- sliced, collected and carried values ----------------------------------------------------

    def _slice_of(self, stack: Var, inside: Var, node: DeviceLoop) -> str:
        """The text of the current slice; a list that one loop reads from the end is popped."""
        position = stack.local.index(node.dim.name)
        name, counter = self.state.name(stack), self.state.variables.word(node.index)
        if position and stack not in self.sliced:
            return f"{name}.select({position}, {counter})"
        if stack not in self.program.lists:
            return f"{name}[{counter}]"
        if inside in self.used_up:
            return f"{name}.pop()"
        return f"{name}[{'~' * self.backwards[stack]}{counter}]"

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        """Write the current slice of a stack, or of all lists that are one with it."""
        record = self.records.get(stack, ())
        if record[:1] == (stack,):
            slices = {item.outer: item.inside for item in node.stacked}
            text = self._slice_of(stack, inside, node)
            names = [self.state.variables.assign(slices[var]) for var in record]
            self.out.assign(names, text)
        elif not record and self._is_added_to(inside, node):
            at = self._slice_of(stack, inside, node).removeprefix(self.state.name(stack))
            self.state.prefetched[inside] = PrefetchedSlice(stack, at)
        elif not record:
            self.state.let(inside, self._slice_of(stack, inside, node))

    def _is_added_to(self, inside: Var, node: DeviceLoop) -> bool:
        """Whether a slice is only written to, by one statement: that needs no name for it."""
        uses, stays = self.state.uses, {c.inside for c in node.collected if c.stack is not None}
        onto = (n for n in node.body if isinstance(n, Compute) and n.over is inside)
        is_left = any(stays.issuperset(n.outs) and uses[n.outs[0]] == 1 for n in onto)
        return is_left and uses[inside] == 1

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """Write the place of a collected stack: a list, in the order of the iterations."""
        if made.stack is not None:
            return
        self.backwards[made.outer] = node.reverse
        record = self.records.get(made.outer, ())
        if record[:1] == (made.outer,):
            self.out.assign(
                (self.state.variables.together(record, f"saved_{node.dim.name}"),), "[]"
            )
        if record:
            return
        text = "[]"
        if not made.is_list:
            shape = self.blocks.shape(made.outer)
            text = f"torch.empty({shape}, dtype={made.outer.local.dtype.torch})"
        self.state.let(made.outer, text)

    def filled(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """Write the collected slice, unless it is written over its place already, or comes late."""
        if made.stack is not None or made.into_slice or made.inside not in node.ends:
            return
        record = self.records.get(made.outer, (made.outer,))
        if record[0] is not made.outer:
            return
        insides = {each.outer: each.inside for each in node.collected}
        name = self.state.name(made.outer)
        item = ", ".join(self.state.tensor(insides[var]) for var in record)
        item = item if len(record) == 1 else f"({item})"
        text = f"{name}[{self.state.variables.word(node.index)}] = {item}"
        if made.is_list:
            text = f"{name}.append({item})"
        self.out.statement(text)

    def next_text(self, carry: Carry[Var]) -> str:
        """The text of the next value, as a tensor."""
        return self.state.tensor(carry.next)


def _taken_out(program: DeviceProgram, used_up: Collection[Var]) -> dict[Var, str]:
    """By list, the name of the slices that are taken from its end."""
    slices = (s for loop in loops(program.body, DeviceLoop) for s in loop.stacked)
    return {s.outer: s.inside.name for s in slices if s.inside in used_up}


def _sliced(program: DeviceProgram) -> dict[Var, str]:
    """The parameters that are loaded as tuples of slices along the dim of a loop, and that dim.

    The program has states, so it is called many times, but it does not train. Only loops over that
    dim read these parameters, as slices, which may be overwritten.
    """
    read: Counter[Var] = Counter()
    dims: defaultdict[Var, set[str]] = defaultdict(set)
    written: dict[Var, Var] = {}
    for node in every(program.body):
        if isinstance(node, DeviceLoop) and not isinstance(node, Pipeline):
            read.update(item.outer for item in node.stacked)
            for item in node.stacked:
                dims[item.outer].add(node.dim.name)
            written.update((c.stack, c.outer) for c in node.collected if c.stack is not None)
    counts, stay = uses(program), unchanged(program)
    updated = {old for old, new in program.updates if old is not new}

    def is_sliced(var: Var) -> bool:
        if var in updated and (var not in stay or counts[written.get(var, var)] != 1):
            return False
        floats = var.local.dtype.kind == "float"
        is_read_as_slices = counts[var] == read[var] > 0 and len(dims[var]) == 1
        return floats and is_read_as_slices and not var.away and var.on is None

    return {var: next(iter(dims[var])) for var in program.params if is_sliced(var)}


def _by_device(nodes: tuple[Node, ...]) -> Iterator[tuple[int | None, tuple[Node, ...]]]:
    """Statements that follow each other on one device; constants, which have no text, join any."""
    group: list[Node] = []
    device: int | None = None
    for node in nodes:
        if not is_constant(node) and (alone := only_on(node)) != device:
            yield device, tuple(group)
            group, device = [], alone
        group.append(node)
    yield device, tuple(group)
