"""The text of a pipeline: a function for each pass of a micro-batch, and the order of its device.

The text is one for all devices: what only the first or the last stage does stands below an `if`.
Passes are nested functions, so the variables of a micro-batch end with a call; what its backward
pass needs of its forward pass is in `kept` meanwhile. A stage is known by its device, or where one
has several, named in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from meshdsl.backends.torch.cut_networks import CutNetworkText
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.passes import KEEPERS, PassText
from meshdsl.backends.torch.preamble import goes_back, line_group, pairs_text
from meshdsl.backends.torch.statement_writer import StatementWriter
from meshdsl.backends.torch.text_state import typed
from meshdsl.device.ir import (
    UPDATE,
    DeviceLoop,
    Move,
    Node,
    Pipeline,
    StagePhase,
    StageRows,
    Var,
)
from meshdsl.device.liveness import given_up, totals
from meshdsl.device.pass_values import kept_for_backward, kept_for_weights
from meshdsl.device.stage_phases import read_in
from meshdsl.ir.rewrite import reads_of

Lines = dict[Var, str]
"""The line of each value that a loop carries from stage to stage."""

NO_VALUES: Mapping[Var, Var] = {}

VERSIONS = {
    StagePhase.UPDATE: "versions",
    StagePhase.FIRST_UPDATE: "versions_first",
    StagePhase.LAST_UPDATE: "versions_last",
}
"""What keeps the versions of the parameters that a part of an update makes."""


def write_pipeline(writer: StatementWriter, node: Pipeline) -> None:
    """Write a pipeline, by the means of a writer of statements."""
    if node.node_stages:
        one_each = tuple((stage,) for stage in range(len(node.rows)))
        CutNetworkText(PassText(writer, node, node.known.held != one_each)).write()
        return
    pipe = writer.blocks.pipe
    PipelineText(PassText(writer, node, bool(pipe.order or pipe.others))).write()


class PipelineText:
    """Writes the pipeline of loops on the stages.

    `lines` are the names of those of each value that a loop carries from stage to stage, `kept` is
    by stages what backward passes read of forward passes, and `halves` what the first half of a
    backward pass keeps for the second, None where there are no halves.
    """

    def __init__(self, passes: PassText) -> None:
        self.passes, self.node, self.writer = passes, passes.node, passes.writer
        self.state, self.blocks, self.out = passes.state, passes.blocks, passes.out
        self.kept = kept_for_backward(self.node)
        has_halves = "I" in self.node.passes
        self.halves = kept_for_weights(self.node).get("every", []) if has_halves else None

    def write(self) -> None:
        """Write the passes, and the loop over the actions of the device."""
        node, passes = self.node, self.passes
        with passes.step():
            lines = {part: self._lines(part, node.loop(part)) for part in node.staged}
            if self.blocks.pipe.order:
                device = self.blocks.device(node.axis)
                stages = f"{self.state.call('stages_of')}(SCHEDULE[{device}], {device})"
                self.out.assign(("stages",), stages)
            for where in self.kept:
                self.out.assign((KEEPERS[where],), "{}")
            if self.halves:
                self.out.assign(("kept_weights",), "{}")
            self._begin_versions()
            with passes.function("F"), self._reading("stashed", "buffered"):
                self._forward_pass(lines[StagePhase.LOOP])
            if not node.is_forward:
                self._backward_passes(lines[StagePhase.LOOP_BACKWARD])
            if "U" in node.passes:
                self._update()
            passes.end(name for by_carry in lines.values() for name in by_carry.values())

    def _backward_passes(self, lines: Lines) -> None:
        """Write the backward pass, or its halves, between which some variables are kept."""
        passes, back = self.passes, self._reading("stashed", "buffered", "corrected")
        with passes.function("B" if self.halves is None else "I"), back:
            self._inputs_pass(lines)
            if self.halves is None:
                self._weights_pass()
            else:
                passes.put_in("kept_weights", self.halves)
        if self.halves is not None:
            with passes.function("W"), self._reading("stashed", "buffered"):
                passes.take_from("kept_weights", self.halves)
                self._weights_pass()

    # --- lines -----------------------------------------------------------------------------------

    def _lines(self, part: StagePhase, loop: DeviceLoop) -> Lines:
        """Write a line for each carry of a loop on the stages; their names, by carry."""
        axis, back = self.node.axis, ""
        by_carry = {}
        for number, carry in enumerate(loop.carries):
            group = pairs_text(line_group(axis, part, number))
            if goes_back(self.node):
                back = f", {pairs_text(line_group(axis, part, number, back=True))}"
            kind = "F" if part is StagePhase.LOOP else "B"
            hint = carry.inside.hint or carry.inside.value.label
            by_carry[carry.inside] = self.passes.line(hint, group, kind, carry.inside, back)
        return by_carry

    # --- passes ----------------------------------------------------------------------------------

    def _forward_pass(self, lines: Lines) -> None:
        node, last = self.node, self.node.last
        self._slices(StagePhase.EVERY)
        self.writer.nodes(node.of(StagePhase.EVERY))
        loop = node.loop(StagePhase.LOOP)
        with self._entered(loop, 0, lines):
            self._slices(StagePhase.FIRST)
            computed = (n for n in node.of(StagePhase.FIRST) if node.received.isdisjoint(n.makes))
            self.writer.nodes(tuple(computed))
            self._put("first")
        self._iterate(loop)
        self.writer.nodes(node.of(StagePhase.COLLECTED))
        self._put("every")
        self._send(StagePhase.SENT, lines, f"{self.passes.stage()} < {last}")
        nodes = node.of(StagePhase.LAST)
        if nodes or self.kept.get("last"):
            with self.passes.under(f"if {self.passes.stage()} == {last}:"):
                self._slices(StagePhase.LAST)
                self.writer.nodes(nodes)
                self._put("last")

    def _inputs_pass(self, lines: Lines) -> None:
        """Write what the stage before waits for, and what that depends on."""
        node, last = self.node, self.node.last
        self._slices(StagePhase.EVERY_AGAIN)
        self._taken("every")
        again = (StagePhase.EVERY_AGAIN, StagePhase.LOOP_AGAIN, StagePhase.COLLECTED_AGAIN)
        self.writer.nodes(node.of(*again, StagePhase.EVERY_BACKWARD))
        loop = node.loop(StagePhase.LOOP_BACKWARD)
        with self._entered(loop, last, lines):
            self._slices(StagePhase.LAST_AGAIN, StagePhase.LAST_BACKWARD)
            self._taken("last")
            self.writer.nodes(node.of(StagePhase.LAST_AGAIN, StagePhase.LAST_BACKWARD))
        early = node.sends_after
        if early is not None:
            self.writer.behind[early] = partial(self._send_in, loop, lines)
        self._iterate(loop)
        if early is None:
            self._send(StagePhase.SENT_BACKWARD, lines, f"{self.passes.stage()} > 0")

    def _weights_pass(self) -> None:
        """Write the gradients of parameters, for which no stage waits."""
        node = self.node
        self._slices(StagePhase.WEIGHTS)
        self.writer.nodes(node.of(StagePhase.WEIGHTS, StagePhase.COLLECTED_BACKWARD))
        nodes = node.of(StagePhase.FIRST_AGAIN, StagePhase.FIRST_BACKWARD)
        if nodes or self.kept.get("first"):
            with self.passes.under(f"if {self.passes.stage()} == 0:"):
                self._slices(StagePhase.FIRST_AGAIN, StagePhase.FIRST_BACKWARD)
                self._taken("first")
                self.writer.nodes(nodes)

    # --- asynchronous updates --------------------------------------------------------------------

    def _begin_versions(self) -> None:
        """Write what keeps the versions of parameters that passes read."""
        use, rule = self.blocks.pipe.use, self.node.known.schedule.weights
        for part, params in self.node.versioned.items():
            kind, how = "Versions", quoted(rule)
            if rule == "corrected":
                assert use is not None, "a schedule says when stages update"
                kind, how = "Corrected", str(use.anneal)
            names = map(self.out.mention, self.passes.names(params))
            with self._of_part(part):
                row = f"SCHEDULE[{self.blocks.device(self.node.axis)}]"
                versions = f"{self.state.call(kind)}({', '.join([row, how, *names])})"
                self.out.assign((VERSIONS[part],), versions)

    @contextmanager
    def _reading(self, *rules: str) -> Iterator[None]:
        """Write a pass; under some rules it begins with the versions of parameters that it reads.

        Those stand under the names of the newest ones.
        """
        start = len(self.out.lines)
        yield
        if self.node.known.schedule.weights not in rules:
            return
        read = self.out.names(start)
        pass_lines, self.out.lines[start:] = self.out.lines[start:], []
        for part, params in self.node.versioned.items():
            names = [name if name in read else "_" for name in self.passes.names(params)]
            if {*names} == {"_"}:
                continue
            with self._of_part(part):
                self.out.unpack(names, f"{VERSIONS[part]}.read({self.passes.micro})")
        self.out.lines += pass_lines

    @contextmanager
    def _of_part(self, part: StagePhase) -> Iterator[None]:
        """Write what the stages of a part of an update do."""
        ends = {"first": 0, "last": self.node.last}
        if part.stages not in ends:
            yield
            return
        with self.passes.under(f"if {self.passes.stage()} == {ends[part.stages]}:"):
            yield

    def _update(self) -> None:
        """Write the update of a stage: what it stores is new then, and its sums begin anew."""
        node = self.node
        with self.passes.function("U"):
            start = len(self.out.lines)
            for part in UPDATE:
                if nodes := node.of(part):
                    with self._of_part(part):
                        self._update_of(part, nodes)
            self.out.place = ""
            for total in node.taken:
                self.out.statement(f"{self.state.name(total)}.zero_()")
            bound = self.out.binds(start)
            stored = (c.inside for c in node.carries if c.next not in node.taken)
            names = (self.state.identifier(var) for var in stored)
            if anew := [name for name in names if name in bound]:
                self.out.lines.insert(start, self.out.line(f"nonlocal {', '.join(anew)}"))

    def _update_of(self, part: StagePhase, nodes: tuple[Node, ...]) -> None:
        """Write the update of a part, in the memory of what is stored."""
        node, state = self.node, self.state
        versions, rule = VERSIONS[part], node.known.schedule.weights
        params = node.versioned.get(part, ())
        self.out.place = ""
        if params and rule in ("stashed", "buffered"):
            self.out.unpack(self.passes.names(params), f"{versions}.next()")
        if params and rule == "corrected":
            self.out.statement(f"{versions}.begin()")
        self.writer.nodes(nodes)
        results = {v for n in nodes for v in n.makes}
        for carry in node.carries:
            is_new = carry.next in results
            if is_new and state.identifier(carry.next) != state.identifier(carry.inside):
                new = state.tensor(carry.next)
                self.out.statement(f"{state.name(carry.inside)}.copy_({new})")
        if params and rule == "corrected":
            counter = state.program.placed.named.counter
            count = next(c for c in node.carries if c.inside.value is counter)
            self.out.statement(f"{versions}.end(int({state.name(count.inside)}) - 1)")

    def _slices(self, *parts: StagePhase) -> None:
        """Write the slices of inputs that parts read, and no part before them in their function.

        And the rows of stacks that a stage has.
        """
        for item in self.node.stacked:
            if self._first_reads(item.inside).isdisjoint(parts):
                continue
            if isinstance(item, StageRows):
                self._rows(item)
            else:
                self.writer.stacked(item.outer, item.inside, self.node)

    def _rows(self, item: StageRows) -> None:
        pipe, state, inside = self.blocks.pipe, self.state, item.inside
        self.out.place = ""
        name = state.name(item.outer)
        if item.other is not None:
            other, home = state.name(item.other), self.blocks.device(self.node.axis)
            state.let(inside, f"{name} if {self.passes.stage()} == {home} else {other}")
            return
        first = self.blocks.start_in(inside, item.outer, pipe.axes(state.mesh)[1:], pipe.dim)
        position, size = inside.local.index(pipe.dim), self.blocks.extent(inside, pipe.dim)
        state.let(inside, f"{name}.narrow({position}, {first}, {size})")

    def _first_reads(self, var: Var) -> set[StagePhase]:
        """The parts in which a slice is written: one of each pass, or several of other stages."""
        node = self.node
        sums = totals(node)  # what is added to rows has their name, and is added to again
        read = {
            read_in(reader, part, var)
            for reader, part in zip(node.body, node.parts, strict=True)
            if any(v is var or v.name == var.name in sums for v in reads_of(reader))
        }
        for rows in node.stacked:
            if isinstance(rows, StageRows) and var in (rows.outer, rows.other):
                read |= self._first_reads(rows.inside)
        parts_read = set()
        for parts in node.passes.values():
            every = parts[0]
            here = read.intersection(parts)
            parts_read |= {every} if any(p.stages == "every" for p in here) else here
        return parts_read

    @contextmanager
    def _entered(self, loop: DeviceLoop, stage: int, lines: Lines) -> Iterator[None]:
        """Write what the loop begins with: made on one stage, received on the others.

        What is kept of it for the backward pass has a name of its own.
        """
        node, state, start = self.node, self.state, len(self.out.lines)
        begun = {v: n for n in node.of(StagePhase.FIRST) for v in n.makes if v in node.received}
        saved = [c for c in loop.carries if c.init in begun]
        with self.passes.under(f"if {self.passes.stage()} == {stage}:", optional=True):
            yield
            state.variables.reach(loop)
            for carry in loop.carries:
                target, source = carry.inside, carry.init
                if carry in saved:
                    target, (source,) = carry.init, begun[carry.init].reads
                text = state.tensor(source)
                if state.variables.assign(target) != text:
                    state.let(target, text)
            self.writer.let_go(given_up(loop, self.writer.dead[loop]))
        nothing = len(self.out.lines) == start
        other = f"if {self.passes.stage()} != {stage}:" if nothing else "else:"
        with self.out.under(other):
            self.out.place = f"{loop.span.file}:{loop.span.line}"
            for carry in loop.carries:
                name = state.variables.of(carry.init if carry in saved else carry.inside)
                received = self.passes.received(lines[carry.inside])
                self.out.assign((name,), received, typed(carry.inside, state.mesh))
        for carry in saved:
            state.let(carry.inside, state.tensor(carry.init))

    def _iterate(self, loop: DeviceLoop) -> None:
        if self.writer.headed(loop):
            self.writer.source_line(loop.span, loop.phase)
        self.state.variables.reach(loop)
        self.writer.iterations(loop)

    def _send_in(self, loop: DeviceLoop, lines: Lines) -> None:
        """Write that the last iteration of a loop sends what the stage before goes on with."""
        last = "0" if loop.reverse else self.blocks.last(loop)
        test = f"{self.state.variables.word(loop.index)} == {last} and {self.passes.stage()} > 0"
        ends = {c.inside: c.next for c in loop.carries}
        self._send(StagePhase.SENT_BACKWARD, lines, test, ends)

    def _send(
        self, part: StagePhase, lines: Lines, test: str, values: Mapping[Var, Var] = NO_VALUES
    ) -> None:
        """Write what is sent to another stage, where there is one.

        Inside of a loop these are the `values` that its carries will have.
        """
        moves = self.node.of(part)
        if not moves:
            return
        place, self.out.place = self.out.place, ""
        for move in moves:
            assert isinstance(move, Move)
            self.out.comment(f"send, {move.wire:,} B: {move.why}")
        with self.out.under(f"if {test}:"):
            for move, (carried, line) in zip(moves, lines.items(), strict=True):
                assert isinstance(move, Move)
                self.passes.send(move, line, values.get(carried))
        self.out.place = place

    # --- what is kept ----------------------------------------------------------------------------

    def _put(self, stages: str) -> None:
        self.passes.put_in(KEEPERS[stages], self.kept.get(stages, []))

    def _taken(self, stages: str) -> None:
        self.passes.take_from(KEEPERS[stages], self.kept.get(stages, []))
