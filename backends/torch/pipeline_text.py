"""The text of a pipeline: a function for each pass of a micro-batch, and the order of its device.

The text is one for all devices: what only the first or the last stage does stands below an `if`.
Passes are nested functions, so the variables of a micro-batch end with a call; what its backward
pass needs of its forward pass is in `kept` meanwhile. A stage is known by its device, or where one
has several, named in each call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from meshdsl.backends.torch.cut_networks import CutNetworks
from meshdsl.backends.torch.line_breaks import INDENT, quoted
from meshdsl.backends.torch.move_text import typed
from meshdsl.backends.torch.passes import KEEPERS
from meshdsl.backends.torch.preamble import goes_back, line_group
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.device.ir import (
    FORWARD,
    INPUTS,
    UPDATE,
    WEIGHTS,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    StageRows,
    Var,
    of_other_stages,
)
from meshdsl.device.liveness import given_up, is_constant, reads, sums, totals
from meshdsl.device.stage_phases import read_in
from meshdsl.placed.pipelined import Piped

Lines = dict[Var, str]
"""The line of each value that a loop carries from stage to stage."""

VERSIONS = {
    StagePhase.UPDATE: "versions",
    StagePhase.FIRST_UPDATE: "versions_first",
    StagePhase.LAST_UPDATE: "versions_last",
}
"""What keeps the versions of the parameters that a part of an update makes."""

Kept = dict[str, list[Var]]
"""By stages, what backward passes read of forward passes."""


class Pipelines(CutNetworks):
    """Writes pipelines; a subclass writes their statements."""

    def __init__(self, program: DeviceProgram, taken: frozenset[str] = frozenset()) -> None:
        super().__init__(program, taken)
        self.others = of_other_stages(program)
        # As `blocks`, of what is of the device's other stage, as a statement `elsewhere` is.
        self.other_blocks: dict[tuple[str, int, tuple[str, ...]], tuple[str, str]] = {}
        self.is_elsewhere = False

    def loop(self, node: DeviceLoop) -> None:
        """Write a loop."""
        if isinstance(node, Pipeline) and node.homes:
            self.cut_network(node)
        elif isinstance(node, Pipeline):
            self._pipeline(node)
        else:
            super().loop(node)

    def _pipeline(self, node: Pipeline) -> None:
        device, several = self.at[node.axis], bool(self._pipe.order or self._pipe.others)
        micro = self.begin(node, several)
        outside, self.fresh = self.fresh, set()
        lines = {part: self._lines(node, part, node.loop(part)) for part in node.staged}
        saved = self._kept(node)
        if self._pipe.order:
            self.used.add("stages_of")
            self.out.statement(f"stages = stages_of(SCHEDULE[{device}], {device})")
        for stages in saved:
            self.out.statement(f"{KEEPERS[stages]} = {{}}")
        halves = self._halves(node, saved) if "I" in node.passes else None
        if halves:
            self.out.statement("kept_weights = {}")
        self._begin_versions(node)
        with self._function("F"), self._reading(node, "stashed", "buffered"):
            self._forward_pass(node, lines[StagePhase.LOOP], saved)
        if not node.is_forward:
            self._backward_passes(node, lines[StagePhase.LOOP_BACKWARD], saved, halves)
        if "U" in node.passes:
            self._update(node)
        self.end(node, micro, (name for by_carry in lines.values() for name in by_carry.values()))
        self.fresh = outside | sums(node)

    def _backward_passes(
        self, node: Pipeline, lines: Lines, kept: Kept, halves: list[Var] | None
    ) -> None:
        """Write the backward pass, or its halves, between which some variables are kept."""
        back = self._reading(node, "stashed", "buffered", "corrected")
        with self._function("B" if halves is None else "I"), back:
            self._inputs_pass(node, lines, kept)
            if halves is None:
                self._weights_pass(node, kept)
            elif halves:
                self.out.place = ""
                names = ", ".join(self._names(halves))
                self.out.statement(f"kept_weights[{self.arguments}] = {names}")
        if halves is not None:
            with self._function("W"), self._reading(node, "stashed", "buffered"):
                if halves:
                    names = ", ".join(self._names(halves))
                    self.out.statement(f"{names} = kept_weights.pop({self._key()})")
                self._weights_pass(node, kept)

    @contextmanager
    def elsewhere(self, node: Node) -> Iterator[None]:
        """Write what makes a block of the device's other stage, which may have another size."""
        pipe = self.program.placed.pipe
        here = isinstance(node, DeviceLoop) or self.others.isdisjoint(v.name for v in node.makes)
        if here or pipe is None or not pipe.sizes:
            yield
            return
        device, before = self.at[pipe.axis], {*self.other_blocks}
        self.at[pipe.axis], self.is_elsewhere = f"{pipe.others}[{device}]", True
        for var in node.makes:
            self.block_of(var, pipe.dim)
        for key, names in self.other_blocks.items():
            if key not in before:
                self.out.add(self.block_line(*key, *names))
        yield
        self.at[pipe.axis], self.is_elsewhere = device, False

    def block_along(self, dim: str, size: int, axes: tuple[str, ...]) -> tuple[str, str] | None:
        """Variables for a block of a dim: of another stage than the device's they are others."""
        if not self.is_elsewhere or self._pipe.axis not in axes:
            return super().block_along(dim, size, axes)
        here, self.blocks = self.blocks, self.other_blocks
        names = super().block_along(dim, size, axes)
        self.blocks = here
        return names

    @contextmanager
    def _function(self, action: str) -> Iterator[None]:
        """Write the function of a pass, with what it has to know of the device's stages."""
        axis = self._pipe.axis
        device = self.at[axis]
        with super()._function(action):
            begun = len(self.out.lines)
            if self._pipe.others:  # where another device's stage is, an index is that of it
                self.at[axis] = self.stage
            yield
            self.out.lines[begun:begun] = self._of_stage(self.out.lines[begun:])
            self.at[axis] = device

    def _of_stage(self, lines: list[TextLine]) -> list[TextLine]:
        """The lines for which of the device's stages a pass is of, and what that has of a dim."""
        *_, axis = self._pipe.axes(self.mesh)
        chunked = axis not in self.mesh.names
        if not chunked and not self._pipe.others:
            return []
        text = "\n".join(line.text for line in lines)

        def is_read(*names: str) -> bool:
            return any(_is_in(name, text) for name in names)

        of_stage = (k for k in self.blocks if axis in k[2] or not self._is_of_device(k))
        blocks = {k: self.blocks[k] for k in of_stage if is_read(*self.blocks[k])}
        if not blocks and not (chunked and is_read(self.at[axis])):
            return []
        stage_lines = [f"{self.at[axis]} = stages.index(stage)"] if chunked else []
        stage_lines += [self.block_line(*key, *names) for key, names in blocks.items()]
        return [TextLine(INDENT * self.out.depth + line) for line in stage_lines]

    # --- lines -----------------------------------------------------------------------------------

    def _lines(self, node: Pipeline, part: StagePhase, loop: DeviceLoop) -> Lines:
        """Write a line for each carry of a loop on the stages; their names, by carry."""
        way = f'SCHEDULE, "{"F" if part is StagePhase.LOOP else "B"}", {self.at[node.axis]}'
        back = ""
        by_carry = {}
        for number, carry in enumerate(loop.carries):
            group = f"groups[{quoted(line_group(node.axis, part, number))}]"
            if goes_back(node):
                back = f", groups[{quoted(line_group(node.axis, part, number, back=True))}]"
            local = carry.inside.local
            name = self.variables.names.fresh(
                f"{carry.inside.hint or carry.inside.value.label}_line"
            )
            what = f"{self.shape(carry.inside)}, {local.dtype.torch}"
            self.out.statement(f"{name} = Line({group}, {way}, {what}{back})")
            by_carry[carry.inside] = name
        return by_carry

    # --- passes ----------------------------------------------------------------------------------

    def _forward_pass(self, node: Pipeline, lines: Lines, kept: Kept) -> None:
        last = node.last
        self._slices(node, StagePhase.EVERY)
        self.nodes(node.of(StagePhase.EVERY))
        loop = node.loop(StagePhase.LOOP)
        with self._entered(node, loop, 0, lines):
            self._slices(node, StagePhase.FIRST)
            computed = (n for n in node.of(StagePhase.FIRST) if node.received.isdisjoint(n.makes))
            self.nodes(tuple(computed))
            self._put(node, kept, "first")
        self._iterate(loop)
        self.nodes(node.of(StagePhase.COLLECTED))
        self._put(node, kept, "every")
        self._send(node, StagePhase.SENT, lines, f"< {last}")
        nodes = node.of(StagePhase.LAST)
        if nodes or kept.get("last"):
            with self._under(f"if {self.stage} == {last}:"):
                self._slices(node, StagePhase.LAST)
                self.nodes(nodes)
                self._put(node, kept, "last")

    def _inputs_pass(self, node: Pipeline, lines: Lines, kept: Kept) -> None:
        """Write what the stage before waits for, and what is done on the way to it."""
        last = node.last
        self._slices(node, StagePhase.EVERY_AGAIN)
        self._taken(node, kept, "every")
        again = (StagePhase.EVERY_AGAIN, StagePhase.LOOP_AGAIN, StagePhase.COLLECTED_AGAIN)
        self.nodes(node.of(*again, StagePhase.EVERY_BACKWARD))
        loop = node.loop(StagePhase.LOOP_BACKWARD)
        with self._entered(node, loop, last, lines):
            self._slices(node, StagePhase.LAST_AGAIN, StagePhase.LAST_BACKWARD)
            self._taken(node, kept, "last")
            self.nodes(node.of(StagePhase.LAST_AGAIN, StagePhase.LAST_BACKWARD))
        self._iterate(loop)
        self._send(node, StagePhase.SENT_BACKWARD, lines, "> 0")

    def _weights_pass(self, node: Pipeline, kept: Kept) -> None:
        """Write the gradients of parameters, for which no stage waits."""
        self._slices(node, StagePhase.WEIGHTS)
        self.nodes(node.of(StagePhase.WEIGHTS, StagePhase.COLLECTED_BACKWARD))
        nodes = node.of(StagePhase.FIRST_AGAIN, StagePhase.FIRST_BACKWARD)
        if nodes or kept.get("first"):
            with self._under(f"if {self.stage} == 0:"):
                self._slices(node, StagePhase.FIRST_AGAIN, StagePhase.FIRST_BACKWARD)
                self._taken(node, kept, "first")
                self.nodes(nodes)

    # --- updates on the way ----------------------------------------------------------------------

    def _begin_versions(self, node: Pipeline) -> None:
        """Write what keeps the versions of parameters that passes read."""
        device, rule = self.at[node.axis], node.known.schedule.weights
        for part, params in node.versioned.items():
            how = quoted(rule)
            if rule == "corrected":
                assert self._pipe.use is not None, "updates on the way are those of a schedule"
                how = str(self._pipe.use.anneal)
            self.used.add(kind := "Corrected" if rule == "corrected" else "Versions")
            names = ", ".join([f"SCHEDULE[{device}]", how, *self._names([*params])])
            with self._of_part(node, part):
                self.out.statement(f"{VERSIONS[part]} = {kind}({names})")

    @contextmanager
    def _reading(self, node: Pipeline, *rules: str) -> Iterator[None]:
        """Write a pass; under some rules it begins with the versions of parameters that it reads.

        Those stand under the names of the newest ones.
        """
        start = len(self.out.lines)
        yield
        if node.known.schedule.weights not in rules:
            return
        written = "\n".join(line.text for line in self.out.lines[start:])
        pass_lines, self.out.lines[start:] = self.out.lines[start:], []
        for part, params in node.versioned.items():
            names = [n if _is_in(n, written) else "_" for n in self._names([*params])]
            if {*names} == {"_"}:
                continue
            with self._of_part(node, part):
                micro = self.variables.word(node.index)
                targets = f"{', '.join(names)}{',' * (len(names) == 1)}"
                targets = f"({targets})" if len(names) == 1 else targets
                self.out.statement(f"{targets} = {VERSIONS[part]}.read({micro})")
        self.out.lines += pass_lines

    @contextmanager
    def _of_part(self, node: Pipeline, part: StagePhase) -> Iterator[None]:
        """Write what the stages of a part of an update do."""
        ends = {"first": 0, "last": node.last}
        if part.stages not in ends:
            yield
            return
        with self._under(f"if {self.stage} == {ends[part.stages]}:"):
            yield

    def _update(self, node: Pipeline) -> None:
        """Write the update of a stage: what it stores is new then, and its sums begin anew."""
        with self._function("U"):
            start = len(self.out.lines)
            for part in UPDATE:
                if nodes := node.of(part):
                    with self._of_part(node, part):
                        self._update_of(node, part, nodes)
            self.out.place = ""
            for total in node.taken:
                self.out.statement(f"{self.name(total)}.zero_()")
            written = "\n".join(line.text for line in self.out.lines[start:])
            stored = (self.name(c.inside) for c in node.carries if c.next not in node.taken)
            if anew := [name for name in stored if _is_assigned(name, written)]:
                head = f"{INDENT * self.out.depth}nonlocal {', '.join(anew)}"
                self.out.lines.insert(start, TextLine(head))

    def _update_of(self, node: Pipeline, part: StagePhase, nodes: tuple[Node, ...]) -> None:
        """Write the update of a part, in the memory of what is stored."""
        versions, rule = VERSIONS[part], node.known.schedule.weights
        params = node.versioned.get(part, ())
        self.out.place = ""
        if params and rule in ("stashed", "buffered"):
            names = self._names([*params])
            targets = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
            self.out.statement(f"{targets} = {versions}.next()")
        if params and rule == "corrected":
            self.out.statement(f"{versions}.begin()")
        self.nodes(nodes)
        results = {v for n in nodes for v in n.makes}
        for carry in node.carries:
            if carry.next in results and self.name(carry.next) != self.name(carry.inside):
                text = f"{self.name(carry.inside)}.copy_({self._tensor(carry.next)})"
                self.out.statement(text)
        if params and rule == "corrected":
            count = next(
                c
                for c in node.carries
                if c.inside.value.role == "state" and not c.inside.value.follows
            )
            self.out.statement(f"{versions}.end(int({self.name(count.inside)}) - 1)")

    def _slices(self, node: Pipeline, *parts: StagePhase) -> None:
        """Write the slices of inputs that parts read, and no part before them in their function.

        And the rows of stacks that a stage has.
        """
        for item in node.stacked:
            if self._first_reads(node, item.inside).isdisjoint(parts):
                continue
            if isinstance(item, StageRows):
                self._rows(item)
            else:
                self.stacked(item.outer, item.inside, node)

    def _rows(self, item: StageRows) -> None:
        pipe, inside = self._pipe, item.inside
        self.out.place = ""
        if item.other is not None:
            name, other = self.variables.of(item.outer), self.variables.of(item.other)
            self._let(inside, f"{name} if {self.stage} == {self.home} else {other}")
            return
        first = self._start_in(inside, item.outer, pipe.axes(self.mesh)[1:], pipe.dim)
        position, size = inside.local.index(pipe.dim), self.extent(inside, pipe.dim)
        self._let(inside, f"{self.variables.of(item.outer)}.narrow({position}, {first}, {size})")

    def count(self, node: DeviceLoop) -> str:
        """Text of the number of iterations of a loop: of one on the stages, the stage's."""
        pipe = self.program.placed.pipe
        if pipe is None or not pipe.sizes or not pipe.cuts(node):
            return super().count(node)
        block = self.block_along(pipe.dim, sum(pipe.sizes), pipe.axes(self.mesh))
        return block[1] if block else super().count(node)

    @property
    def _pipe(self) -> Piped:
        assert self.program.placed.pipe is not None
        return self.program.placed.pipe

    def _first_reads(self, node: Pipeline, var: Var) -> set[StagePhase]:
        """The parts in which a slice is written: one of each pass, or several of other stages."""
        sums = totals(node)  # what is added to rows has their name, and is added to again
        read = {
            read_in(reader, part, var)
            for reader, part in zip(node.body, node.parts, strict=True)
            if any(v is var or v.name == var.name in sums for v in reads(reader))
        }
        for rows in node.stacked:
            if isinstance(rows, StageRows) and var in (rows.outer, rows.other):
                read |= self._first_reads(node, rows.inside)
        parts_read = set()
        for parts in node.passes.values():
            every = parts[0]
            here = read.intersection(parts)
            parts_read |= {every} if any(p.stages == "every" for p in here) else here
        return parts_read

    @contextmanager
    def _entered(
        self, node: Pipeline, loop: DeviceLoop, stage: int, lines: Lines
    ) -> Iterator[None]:
        """Write what the loop begins with: made on one stage, received on the others.

        What is kept of it for the backward pass has a name of its own.
        """
        start = len(self.out.lines)
        begun = {v: n for n in node.of(StagePhase.FIRST) for v in n.makes if v in node.received}
        saved = [c for c in loop.carries if c.init in begun]
        with self._under(f"if {self.stage} == {stage}:"):
            inside = len(self.out.lines)
            yield
            self.variables.reach(loop)
            for carry in loop.carries:
                target, source = carry.inside, carry.init
                if carry in saved:
                    target, (source,) = carry.init, begun[carry.init].reads
                text = self._tensor(source)
                if self.variables.assign(target) != text:
                    self._let(target, text)
            self._let_go(given_up(loop, self.dead[loop]))
            nothing = self.out.only_comments(inside)
        if nothing:
            del self.out.lines[start:]
            self.out.add(f"if {self.stage} != {stage}:")
        else:
            self.out.add("else:")
        self.out.depth += 1
        place = f"{self.variables.word(node.index)}, {self.stage}"
        self.out.place = f"{loop.span.file}:{loop.span.line}"
        for carry in loop.carries:
            name = self.variables.of(carry.init if carry in saved else carry.inside)
            received = f"{lines[carry.inside]}.receive({place})"
            self.out.statement(f"{name} = {received}", typed(carry.inside))
        self.out.depth -= 1
        for carry in saved:
            self._let(carry.inside, self._tensor(carry.init))

    def _iterate(self, loop: DeviceLoop) -> None:
        if self.headed(loop):
            self.source_line(loop.span, loop.phase)
        self.variables.reach(loop)
        self.iterations(loop)

    def _send(self, node: Pipeline, part: StagePhase, lines: Lines, test: str) -> None:
        """Write what is sent to another stage, where there is one."""
        moves = node.of(part)
        if not moves:
            return
        self.out.place = ""
        for move in moves:
            assert isinstance(move, Move)
            self.out.comment(f"send, {move.wire:,} B: {move.why}")
        self.out.add(f"if {self.stage} {test}:")
        self.out.depth += 1
        place = f"{self.variables.word(node.index)}, {self.stage}"
        for move, line in zip(moves, lines.values(), strict=True):
            assert isinstance(move, Move)
            self.out.place = f"{move.span.file}:{move.span.line}"
            self.variables.reach(move)
            self.out.statement(f"{line}.send({self._tensor(move.source)}, {place})")
        self.out.depth -= 1

    # --- what is kept ----------------------------------------------------------------------------

    def _kept(self, node: Pipeline) -> Kept:
        """By stages, what backward passes read of forward passes."""
        read = {v for n in node.of(*INPUTS, *WEIGHTS) for v in reads(n)}
        by_stages: Kept = {}
        for n, part in zip(node.body, node.parts, strict=True):
            if part not in FORWARD or is_constant(n):
                continue
            results = {c.result for c in n.carries} if isinstance(n, DeviceLoop) else set()
            for var in n.makes:
                if var in read and var.name not in totals(node):
                    stages = "last" if part is StagePhase.LOOP and var in results else part.stages
                    stages = "every" if var in node.received else stages
                    by_stages.setdefault(stages, []).append(var)
        return by_stages

    def _halves(self, node: Pipeline, kept: Kept) -> list[Var]:
        """What the first half of a backward pass keeps for the second, which comes later."""
        read = {v for n in node.of(*WEIGHTS) for v in reads(n)}
        results = [v for n in node.of(*INPUTS) if not is_constant(n) for v in n.makes]
        candidates = [v for v in (*kept.get("every", ()), *results) if v in read]
        return [v for v in candidates if v.name not in totals(node)]

    def _put(self, node: Pipeline, kept: Kept, stages: str) -> None:
        self._put_in(KEEPERS[stages], kept.get(stages, []))

    def _taken(self, node: Pipeline, kept: Kept, stages: str) -> None:
        self._taken_from(KEEPERS[stages], kept.get(stages, []))


def _is_in(name: str, text: str) -> bool:
    """Whether statements have a name; what stands in comments does not count."""
    return re.search(rf"(?m)^[^#\n]*\b{re.escape(name)}\b", text) is not None


def _is_assigned(name: str, text: str) -> bool:
    """Whether statements assign a name."""
    return re.search(rf"(?m)^[\w (,]*\b{re.escape(name)}\b[\w ,)]* = ", text) is not None
