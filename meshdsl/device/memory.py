"""The peak memory of one device, found by walking through its program as it runs.

It counts the memory that torch allocates for the emitted text: tensors from the statement of each
until the last variable or list that shows it is gone, the buffers of collectives, and the scratch
memory of an operator while it runs (`OpDef.scratch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from meshdsl.device.alike import alike_devices
from meshdsl.device.ir import (
    INPUTS,
    Bucket,
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    StageRows,
    Start,
    Var,
    Wait,
    arrives_in_place,
    is_on,
)
from meshdsl.device.live_memory import (
    NONE,
    Amounts,
    LiveMemory,
    MemoryBlock,
    MemoryKind,
    less,
    of_kind,
    plus,
)
from meshdsl.device.liveness import (
    collected,
    deaths,
    entered,
    given_up,
    is_constant,
    kept_after,
    kept_inside,
    last_readers,
    left_over,
    relabels,
    shown_by,
    shows_operand,
    sums,
    used_up,
    uses,
)
from meshdsl.device.offloaded_updates import streamed
from meshdsl.device.stored_blocks import home_of, of_other_stages
from meshdsl.diagnostics import fail
from meshdsl.ir.program import every
from meshdsl.ir.program import every as every_node
from meshdsl.ir.rewrite import free, reads_of
from meshdsl.ir.types import I32, I64, LARGE, TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.placed.placements import Mesh
from meshdsl.placed.strategies import flops
from meshdsl.schedule.table import Action


@functools.lru_cache(maxsize=16)  # a pass asks for it, and then whoever it lowers for
def memory(program: DeviceProgram) -> dict[str, int]:
    """Bytes of one device: stored tensors by role, the `peak`, its line, and what is there then.

    `grads` are the gradients of all parameters, as of the end of the backward pass, `grads_later`
    those that are not there yet at the peak. The other kinds (`MemoryKind`) are of the peak, so
    the kinds less `grads_later` add up to it.
    """
    each = (
        MemoryWalk(program, first, alike)
        for first, *alike in alike_devices(program, in_memory=True)
    )
    walk = max(each, key=lambda walk: sum(walk.stored.values()) + walk.walked().most)
    stored, held = walk.stored, walk.held
    kinds = {kind.name.lower(): held.at_peak[kind] for kind in MemoryKind}
    grads = max(kinds["grads"], walk.bytes(gradients(program)))
    later = grads - kinds["grads"]
    return {
        "params": stored["params"],
        "grads": grads,
        "state": stored["state"],
        "inputs": stored["inputs"],
        **{name: size for name, size in kinds.items() if name != "grads"},
        "grads_later": later,
        "peak": sum(stored.values()) + held.most,
        "peak_line": held.line,
    }


def walks(program: DeviceProgram) -> Iterator[MemoryWalk]:
    """A walk for each device along the axis of a pipeline; without one all are alike."""
    pipe = program.pipeline
    for device in range(1 if pipe is None else program.mesh.size(pipe.axis)):
        yield MemoryWalk(program, device)


def gradients(program: DeviceProgram) -> frozenset[Var]:
    """The gradients of parameters, in the placement they settle in."""
    updating = (op for op in every_node(program.placed.named.body) if op.phase == "update")
    # What compresses gradients has their role, for their rules, and is none.
    compressing = {value for op in updating for value in op.makes}
    tensors = (t for t in program.placed.tensors if t.value.role == "grad")
    settled = {t.value: t.placement for t in tensors if t.value not in compressing}
    every = (v for node in program.body for v in node.makes)
    taken = () if program.pipeline is None else program.pipeline.taken
    there = [v for v in every if settled.get(v.value) == v.placement]
    # What a loop has reduced is collected in another placement (`reduced_in_loops.py`).
    missing = settled.keys() - {v.value for v in (*taken, *there)}
    stacks = (c.outer for node in program.body for c in node.collected)
    return frozenset((*taken, *there, *(v for v in stacks if v.value in missing)))


# --- allocated memory --------------------------------------------------------------------------


MOST_TRIPS = 1_000_000
"""The iterations of a loop whose kept values are followed, in a few seconds."""


class MemoryWalk:
    """One device at work, from the first statement to the last; `held` is its memory.

    Inputs, parameters and states are counted elsewhere: here they take no memory. A subclass
    follows the statements in time (`simulate/device_run.py`). `device` is its coordinate on the
    axis of a pipeline; the peak is that of the devices that are `alike` (`alike_devices`), too.
    Nothing but memory depends on what was walked before: a loop `repeats` what it did.
    """

    repeats = True

    def __init__(self, program: DeviceProgram, device: int = 0, alike: Sequence[int] = ()) -> None:
        self.program, self.device, self.also = program, device, alike
        # The stage of a pass, and which of the device's it is, while it is walked.
        self.stage = self.chunk = 0
        self.passing = False
        # The micro-batch of a pass; the first one stands for all that are of one size.
        cut = None if (pipe := program.placed.pipe) is None else pipe.cut
        self.micro, self.micros = 0, range(cut.micro if cut is not None and cut.sizes else 1)
        self.others = of_other_stages(program)
        self.loops: dict[Node, int] = {}
        self.sizes: dict[tuple[Var, tuple[int, int], int], TensorType] = {}
        self.held = LiveMemory(line=program.placed.named.span.line)
        self.shown = shown_by(program) | dict(MemoryReuse(program).found())
        self.gradients = frozenset(map(self._first, gradients(program)))
        self.own = dict(self._kept_copies())
        # What an update rounds is there as it begins.
        self.streamed = streamed(program)
        self.rounded = {update.cast for update in self.streamed.values()}
        self.used_up, self.collected = used_up(program), collected(program)
        self.dying: dict[DeviceLoop, tuple[tuple[Var, ...], ...]] = {}
        self.is_last = False
        # How many loops are walked inside of each other.
        self.depth = 0
        self.numbers: dict[Var, Any] = {}
        # What dies after each statement of a pipeline.
        self.dead: dict[Node, tuple[Var, ...]] = {}

    def _kept_copies(self) -> Iterator[tuple[Var, Var]]:
        """What this device has all of in a sum over stages, and others have zeros for."""
        pipe = self.program.placed.pipe
        for node in self.program.body:
            if isinstance(node, Move) and node.step.kind == "zero_fill" and pipe is not None:
                if node.step.axes == (pipe.axis,) and node.step.at == self.device:
                    yield node.target, node.source

    def in_memory(self, variables: Iterable[Var]) -> tuple[Var, ...]:
        """The variables that are in the memory of the device between steps."""
        return tuple(v for v in variables if not v.away)

    @property
    def stored(self) -> dict[str, int]:
        """The bytes of parameters, states and inputs."""
        program = self.program
        roles = {"params": program.params, "state": program.states, "inputs": program.inputs}
        return {role: self.bytes(self.in_memory(each)) for role, each in roles.items()}

    def bytes(self, variables: Iterable[Var]) -> int:
        """The bytes of variables on this device."""
        return sum(self.local(v).bytes for v in variables)

    def local(self, var: Var) -> TensorType:
        """The local type of a variable: of this device, where stages have blocks of their own."""
        if var.on not in (None, self.device):
            return var.local.resized(dict.fromkeys(var.local.names, 0))
        if not self.program.mesh.given:
            return var.local
        key = var, self._place(var), self.micro
        if key not in self.sizes:
            mesh, at = self.program.mesh, dict[str, int]()
            if (pipe := self.program.placed.pipe) is not None:
                at.update(zip(pipe.axes(mesh), key[1], strict=False))
                if pipe.cut is not None:
                    at[pipe.cut.axis] = self.micro
            self.sizes[key] = var.placement.local_at(var.local, var.type, mesh, at)
        return self.sizes[key]

    def _place(self, var: Var) -> tuple[int, int]:
        """The coordinates of a block: of two stages in a pair, of that whose block it is."""
        pipe = self.program.placed.pipe
        if pipe is None or not pipe.others:
            return self.device, self.chunk
        if self.passing:
            return self.stage, 0
        return home_of(var, self.device, self.program, self.others), 0

    def sized(self, node: Compute) -> Compute:
        """An operator with what it has on this device."""
        if not self.program.mesh.given:
            return node
        ins, outs = (
            tuple(replace(v, local=self.local(v)) for v in vs) for vs in (node.ins, node.outs)
        )
        sized = replace(node, ins=ins, outs=outs)
        return replace(sized, flops=flops(lookup(sized.name), sized.local) if sized.flops else 0)

    def walked(self) -> LiveMemory:
        """The memory after the last statement, with its peak."""
        stored, program = MemoryBlock(0, 1), self.program
        for var in (*program.inputs, *program.params, *program.states):
            self.held.bind(var.name, stored)
        self._nodes(program.body, deaths(program.body, kept_after(program)))
        return self.held

    def _nodes(self, nodes: tuple[Node, ...], dying: tuple[tuple[Var, ...], ...]) -> None:
        for node, dead in zip(nodes, dying, strict=True):
            if not is_on(node, self.device):
                continue
            match node:
                case Pipeline():
                    self._pipeline(node)
                    self._drop(dead)
                case DeviceLoop():
                    self._loop(node, dead)
                    self._drop(dead)
                case _:
                    self.statement(node, dead)

    def statement(self, node: Compute | Collective | Start | Wait, dead: tuple[Var, ...]) -> None:
        """One statement, after which variables are `dead`."""
        match node:
            case Compute():
                self._compute(node)
            case Move() | Bucket():
                self._arrive(node, self._room(node))
            case Start() if not (node.ahead and self.is_last):
                self.issue(node.collective, node.work)
                if node.late:
                    self._keep_sources(node)
            case Wait():
                self._finish(node)
        self._drop(dead)

    def issue(self, collective: Collective, work: str) -> None:
        """Begin a collective, which is in flight until it is waited for."""
        self.held.lists[work] = self._room(collective)

    def _keep_sources(self, node: Start) -> None:
        """Let a collective keep what it sends: nothing else may, an iteration later."""
        for move in node.collective.moves:
            if not _is_sent_otherwise(move):
                self.held.append(node.work, self._memory_of(move.source))

    def _finish(self, node: Wait) -> None:
        """Wait for a collective; one of the iteration before has its results in stacks then."""
        blocks = self.held.lists.take_out(node.work) or []
        if not node.late:
            self._arrive(node.collective, blocks)
            return
        for block in blocks:
            self.held.release(block)

    def _drop(self, dead: tuple[Var, ...]) -> None:
        for var in dead:
            self.held.drop(var.name)

    def _memory(self, var: Var, line: int) -> MemoryBlock:
        """The memory of a new variable: its own, or that of one it shows or overwrites."""
        source = self.own.get(var) or self.shown.get(var)
        block = None if source is None else self.held.names.get(source.name)
        return block or self._take(var, line)

    def _take(self, var: Var, line: int) -> MemoryBlock:
        """Memory of its own for a variable."""
        size = 0 if var.away else self.local(var).bytes
        return self.held.take(size, line, self._kind(var))

    def _kind(self, var: Var) -> MemoryKind:
        """What a variable that has memory of its own is for."""
        if var.name in self.gradients:
            return MemoryKind.GRADS
        return _KINDS.get(var.value.role, MemoryKind.ACTIVATIONS)

    def _first(self, var: Var) -> str:
        """The name of the variable whose memory a variable shows or overwrites."""
        while var in self.shown:
            var = self.shown[var]
        return var.name

    # --- operators and collectives -------------------------------------------------------------

    def _compute(self, node: Compute) -> None:
        if is_constant(node):
            self.numbers[node.outs[0]] = node.attr("value")
            return
        if node in self.rounded:
            return
        scratch, line = self._scratch(node), node.span.line
        update = self.streamed.get(node)
        if update and (cast := update.cast) and update.written is None:
            self.held.bind(cast.outs[0].name, self._memory(cast.outs[0], line))
        if scratch and shows_operand(node):
            blocks = [self.held.take(scratch, line, self._kind(node.outs[0]))]
        else:
            blocks = [self._memory(v, line) for v in node.outs]
            self.held.mark(scratch, line)
        for var, block in zip(node.outs, blocks, strict=True):
            self.held.bind(var.name, block)

    def _scratch(self, node: Compute) -> int:
        """Scratch memory of an operator; a CPU widens an operand before it is added.

        So are indices of i32: a large tensor of them is made i64 for each that reads it.
        """
        record, wide = lookup(node.name), 0
        if record.indices is not None:
            index = self.local(node.ins[record.indices])
            wide = index.elements * I64.bytes * (index.dtype == I32)
            wide *= wide >= LARGE
        if record.scratch is not None:
            numbers = {i: self.numbers[v] for i, v in enumerate(node.ins) if v in self.numbers}
            update, sig = self.streamed.get(node), self.sized(node).local
            return wide + (update.scratch(sig, numbers) if update else record.scratch(sig, numbers))
        if wide:
            return wide
        if node.onto is None or node.name != "add":
            return 0
        total, part = map(self.local, node.ins)
        return part.elements * total.dtype.bytes if part.dtype != total.dtype else 0

    def _room(self, node: Collective) -> list[MemoryBlock]:
        """The memory of a collective: its buffers, then the results."""
        line = node.span.line
        mesh, buffers = self.program.mesh, MemoryKind.BUFFERS
        sizes = _worked_in(node, mesh, self.bytes)
        blocks = [self.held.take(size, line, buffers) for size in sizes]
        blocks += [self._memory(move.target, line) for move in node.moves]
        for block in blocks:
            block.holders += 1
        return blocks

    def _arrive(self, node: Collective, blocks: list[MemoryBlock]) -> None:
        """Bind the results, which are the last of the blocks."""
        for move, block in zip(node.moves, blocks[-len(node.moves) :], strict=True):
            self.held.bind(move.target.name, block)
        for block in blocks:
            self.held.release(block)

    # --- loops ---------------------------------------------------------------------------------

    def _loop(self, node: DeviceLoop, dead: tuple[Var, ...]) -> None:
        """Walk a loop; inside of another, do again what it did to memory that looked the same."""
        self.depth += 1
        iterations = partial(self._iterations, node, dead)
        if self.depth > 1 and self.repeats:
            about = node, self.stage, self.chunk, self.passing, self.micro
            self.held.again(about, iterations)
        else:
            iterations()
        self.depth -= 1

    def _iterations(self, node: DeviceLoop, dead: tuple[Var, ...]) -> None:
        """Walk the iterations, less those that leave the same behind as the ones before."""
        self._begin(node)
        self._drop(given_up(node, dead))
        trip, outside = 0, self.is_last
        count = self.trips(node)
        while trip < count:
            if alike := self.alike(node, trip):
                self._skip(node, alike)
                trip += alike
            self.is_last = trip == count - 1
            self._trip(node)
            trip += 1
        self.is_last = outside
        for wait in node.late:
            self.statement(wait, ())

    def trips(self, node: DeviceLoop) -> int:
        """How many iterations of a loop the device does: of those on the stages, the stage's."""
        return self.loops.get(node, node.dim.size)

    def alike(self, node: DeviceLoop, trip: int) -> int:
        """The iterations from `trip` on that are like those before and need not be walked.

        The first two are walked, and the last.
        """
        return max(self.trips(node) - 3, 0) if trip == 2 else 0

    def _begin(self, node: DeviceLoop) -> None:
        for carry in node.carries:
            if carry.init.name != carry.inside.name:
                self.held.bind(carry.inside.name, self._memory_of(carry.init))
        for item in node.collected:
            if item.is_list:
                self.held.lists[item.outer.name] = []
            elif item.stack is None:
                self.held.bind(item.outer.name, self._take(item.outer, node.span.line))
        for ahead in node.ahead:
            self.issue(ahead.collective, ahead.work)

    def _trip(self, node: DeviceLoop) -> None:
        for item in node.stacked:
            self._slice(item.outer, item.inside)
        if node not in self.dying:
            entering = entered(node, self.collected)
            self.dying[node] = deaths(node.body, kept_inside(node), entering)
        self._nodes(node.body, self.dying[node])
        for part in node.collected:
            if part.is_list:
                self.held.append(part.outer.name, self._memory_of(part.inside))
        for name, block in [(c.inside.name, self._memory_of(c.next)) for c in node.carries]:
            self.held.bind(name, block)
        self._drop(left_over(node, self.collected))

    # --- pipelines -----------------------------------------------------------------------------

    def _pipeline(self, node: Pipeline) -> None:
        """Walk the passes of one micro-batch of each size, then the row of the device."""
        self._begin(node)
        for item in node.stacked:
            self._slice(item.outer, item.inside)
        dying = deaths(node.body, kept_inside(node), entered(node, self.collected))
        self.dead = dict(zip(node.body, dying, strict=True))
        passes = {stage: self._passes(node, stage) for stage in node.known.held[self.device]}
        versions = {stage: _Versions(node, stage, self.local) for stage in passes}
        now = self._row(node, self.device, passes, versions)
        held = node.known.held
        for other in self.also:
            stages = dict(zip(held[other], held[self.device], strict=True))
            theirs = {stage: passes[ours] for stage, ours in stages.items()}
            self._row(node, other, theirs, {s: versions[ours] for s, ours in stages.items()})
        # What keeps versions is there to the end, as the functions of passes are.
        for kind_, size in zip(MemoryKind, less(now, tuple(self.held.by_kind)), strict=True):
            self.held.take(size, kind=kind_)

    def _row(
        self,
        node: Pipeline,
        device: int,
        passes: Mapping[int, Sequence[Mapping[str, PassMemory]]],
        versions: Mapping[int, _Versions],
    ) -> Amounts:
        """Note the peak of the row of a device; what there is of each kind at its end."""
        row, held = node.rows[device], self.held
        kinds = {action: node.passes_of(action) for action in {a.kind for a in row}}
        # Versions of parameters are of what only updates have.
        begun, updates = tuple(held.by_kind), sum(each.always for each in versions.values())
        left = {
            (s, k, number): each.left
            for s, alike in passes.items()
            for number, of in enumerate(alike)
            for k, each in of.items()
        }
        sizes, done = {about: sum(each) for about, each in left.items()}, dict.fromkeys(left, 0)
        size = sum(begun) + updates

        def now() -> Amounts:
            amounts = plus(begun, of_kind(updates, MemoryKind.UPDATES))
            for about, times in done.items():
                amounts = plus(amounts, tuple(times * each for each in left[about]))
            return amounts

        for action in row:
            stage = action.stage
            if grown := versions[stage].grown(action):
                updates, size = updates + grown, size + grown
            number = action.micro if len(passes[stage]) > 1 else 0
            for kind in kinds[action.kind]:
                each = passes[stage][number][kind]
                most = versions[stage].most(action, each.most)
                if size + most > held.most:
                    beside = of_kind(most - each.most, MemoryKind.UPDATES)
                    held.raise_to(size + most, each.line, plus(plus(now(), each.at_peak), beside))
                done[stage, kind, number] += 1
                size += sizes[stage, kind, number]
        return now()

    def _passes(self, node: Pipeline, stage: int) -> list[dict[str, PassMemory]]:
        """Walk the passes of a stage; the memory of each, by micro-batch where sizes differ."""
        each = []
        for number in self.micros:
            self.micro = number
            each.append(self._passes_of_one(node, stage))
        self.micro = 0
        return each

    def _passes_of_one(self, node: Pipeline, stage: int) -> dict[str, PassMemory]:
        self.stage, self.chunk = stage, node.known.held[self.device].index(stage)
        self.loops = {
            n: node.iterations(n, part, stage)
            for n, part in zip(node.body, node.parts, strict=True)
        }
        names, begun = set(self.held.names) | set(self.held.lists), self.held.now
        on_stage, passes, self.passing = node.on(stage), {}, True
        for kind, parts in node.passes.items():
            later = [n for n, p in zip(on_stage.body, on_stage.parts, strict=True) if p > parts[-1]]
            passes[kind] = self._pass(node, parts, names | _read_by(later))
        assert self.held.now == begun, "a micro-batch leaves memory behind"
        self.chunk, self.passing = 0, False
        return passes

    def _pass(self, node: Pipeline, parts: Sequence[StagePhase], kept: set[str]) -> PassMemory:
        """Walk a pass; its memory beside what there was."""
        held, before = self.held, tuple(self.held.by_kind)
        most, line, at_peak = held.most, held.line, held.at_peak
        held.most, held.at_peak = 0, NONE
        outside = {name: block for name, block in held.names.items() if name in kept}
        for block in outside.values():
            block.holders += 1
        for part in parts:
            if node.does(part, self.stage) and not part.sends:
                self._part(node, part)
        for name in [n for n in (*held.names, *held.lists) if n not in kept]:
            held.drop(name)
        for name, block in outside.items():
            # A value came under the name of a slice, or rows are gone, which each pass takes anew.
            if held.names.get(name) is not block:
                held.bind(name, block)
            held.release(block)
        left = less(tuple(held.by_kind), before)
        each = PassMemory(held.most - sum(before), held.line, less(held.at_peak, before), left)
        held.most, held.line, held.at_peak = most, line, at_peak
        return each

    def _part(self, node: Pipeline, part: StagePhase) -> None:
        """Walk a part of a pass; what a loop carries is received where it does not begin."""
        begins = {StagePhase.LOOP: 0, StagePhase.LOOP_BACKWARD: node.last}
        if not node.node_stages and begins.get(part, self.stage) != self.stage:
            loop = node.loop(part)
            for carry in loop.carries:
                received = self._take(carry.inside, loop.span.line)
                self.held.bind(carry.init.name, received)
        if node.node_stages and part in (StagePhase.LOOP, StagePhase.LOOP_BACKWARD):
            self._arrived(node, part is StagePhase.LOOP)
        nodes = node.of(part, stage=self.stage)
        self._nodes(nodes, tuple(self.dead[n] for n in nodes))

    def _arrived(self, node: Pipeline, forward: bool) -> None:
        """Take the memory of the messages that a pass begins with."""
        for move in node.arriving(self.stage, forward):
            self.held.bind(move.target.name, self._take(move.target, move.span.line))

    def _slice(self, stack: Var, inside: Var) -> None:
        blocks = self.held.lists.get(stack.name)
        self.held.bind(inside.name, blocks[-1] if blocks else self._memory_of(stack))
        if blocks and inside in self.used_up:
            self.held.release(blocks.pop())

    def _memory_of(self, var: Var) -> MemoryBlock:
        """The memory of a variable; of a number, none."""
        return self.held.names.get(var.name) or MemoryBlock(0)

    def _skip(self, node: DeviceLoop, trips: int) -> None:
        """Apply to lists the effect of iterations equal to the one before: take or add blocks.

        Raises MD0106 where the lists get too long.
        """
        if trips > MOST_TRIPS and any(c.is_list for c in node.collected):
            message = f"a loop keeps values of {self.trips(node):,} iterations of `{node.dim.name}`"
            message += f" on a device for its backward pass, more than {MOST_TRIPS:,}"
            fail("MD0106", message, node.span, help="choose a smaller size, or more stages")
        for item in node.stacked:
            if item.inside in self.used_up:
                for _ in range(trips):
                    self.held.release(self.held.lists[item.outer.name].pop())
        for part in (c for c in node.collected if c.is_list):
            blocks = self.held.lists[part.outer.name]
            is_new = blocks[-1] is not blocks[-2]
            for _ in range(trips):
                last = blocks[-1]
                more = self.held.take(last.bytes, kind=last.kind) if is_new else last
                self.held.append(part.outer.name, more)


class PassMemory(NamedTuple):
    """The memory of a pass, beside what there was before.

    The most, and the line of it; what there is of each kind then, and what the pass leaves.
    """

    most: int
    line: int
    at_peak: Amounts
    left: Amounts


_KINDS = {
    "param": MemoryKind.GATHERED,
    "grad": MemoryKind.NEW_GRADS,
    "state": MemoryKind.UPDATES,
}
"""By the role of a value, what the memory of a variable is for that is not stored."""


def _read_by(nodes: Iterable[Node]) -> set[str]:
    """The names of the variables that statements read before they make them anew."""
    read, defined = set[str](), set[str]()
    for node in nodes:
        read |= {v.name for v in free(node)} - defined
        defined |= {v.name for v in node.makes}
    return read


class _Versions:
    """The memory of versions of a stage's parameters beside those that it stores.

    `always` is there from the first pass on.
    """

    def __init__(self, node: Pipeline, stage: int, local: Callable[[Var], TensorType]) -> None:
        read = {v for n in node.of(*INPUTS) for v in reads_of(n)}
        variables = [vs for part, vs in node.versioned.items() if node.does(part, stage)]
        sizes = [[local(v).bytes for v in vs] for vs in variables]
        self.bytes, self.largest = sum(map(sum, sizes)), max(map(max, sizes), default=0)
        # Of what a part of an update makes, a pass reads a version of all or of none.
        pairs = zip(variables, sizes, strict=True)
        self.estimated = sum(sum(each) for vs, each in pairs if not read.isdisjoint(vs))
        corrected = bool(variables) and node.known.schedule.weights == "corrected"
        self.kept = iter(node.known.kept(stage) if variables and not corrected else ())
        self.rooms = 1
        self.reads = node.known.versions[stage] if corrected else None
        behind = self.reads is not None and max(self.reads.staleness) > 0
        self.always = self.bytes * behind

    def grown(self, action: Action) -> int:
        """The memory that is there from an action on."""
        if action.kind != "U" or not self.bytes or self.reads is not None:
            return 0
        before, self.rooms = self.rooms, next(self.kept)
        return self.bytes * (self.rooms - before)

    def most(self, action: Action, most: int) -> int:
        """The most memory of a pass: with what it estimates, or an update with what it corrects."""
        if self.reads is None or not self.always:
            return most
        read, before = self.reads.backward[action.micro], self.reads.forward[action.micro]
        estimates = action.kind in "BI" and read != before
        beside = {"U": self.bytes}.get(action.kind, self.estimated * estimates)
        return beside + max(most, self.largest) if beside else most


# --- buffers of collectives ----------------------------------------------------------------------


def _worked_in(
    node: Collective, mesh: Mesh, bytes: Callable[[Iterable[Var]], int]
) -> Iterator[int]:
    """Bytes of the buffers of a collective.

    A sent tensor has the dim that is gathered or scattered outermost. A result that is written into
    other memory may arrive beside it.
    """
    for move in node.moves:
        if _is_sent_otherwise(move):
            yield bytes((move.source,))
        if move.into is not None and not arrives_in_place(move, mesh):
            yield bytes((move.target,))


def _is_sent_otherwise(move: Move) -> bool:
    """Whether a copy of the source is sent."""
    kind, outermost = move.step.kind, move.source.local.names[:1]
    turned = kind in ("all_gather", "reduce_scatter") and outermost != (move.step.dim,)
    return turned or kind == "all_to_all"


# --- reuse of memory -----------------------------------------------------------------------------


class MemoryReuse:
    """The results that the emitted text writes over an operand (`OperatorText._in_place`)."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program, self.uses = program, uses(program)
        self.last_readers = last_readers(program, self.uses) if program.updates else {}
        # Variables whose memory is their own, and those that may show elements twice.
        self.fresh: set[Var] = set()
        self.views: set[Var] = set()
        self.numbers = {v for n in every(program.body) if is_constant(n) for v in n.makes}
        # What operators of loops write to their slices of stacks.
        self.into_slice: set[Var] = set()

    def found(self) -> Iterator[tuple[Var, Var]]:
        """Pairs of a result and the operand."""
        yield from self._block(self.program.body)

    def _block(self, nodes: Sequence[Node]) -> Iterator[tuple[Var, Var]]:
        for node in nodes:
            match node:
                case Compute():
                    yield from self._compute(node)
                case Move() | Bucket():
                    yield from (p for m in node.moves for p in self._move(m))
                case Start():
                    yield from (p for m in node.collective.moves for p in self._move(m))
                case DeviceLoop():
                    slices = own_slices(node, self.program, self._is_own, self.views)
                    outside, self.fresh = self.fresh, {*slices}
                    self.into_slice.update(node.in_slices)
                    yield from self._block(node.body)
                    stacks = {c.outer for c in node.collected if not c.is_list}
                    self.fresh = outside | stacks | sums(node)
            if isinstance(node, Move | Bucket | Wait):
                moves = (node.collective if isinstance(node, Wait) else node).moves
                self.fresh.update(m.target for m in moves if m.step.moves)

    def _compute(self, node: Compute) -> Iterator[tuple[Var, Var]]:
        if is_constant(node) or not self.into_slice.isdisjoint(node.outs):
            return
        if node.onto is not None:
            self.fresh.update(node.outs if node.ins[node.onto] in self.fresh else ())
            return
        shows = shows_operand(node)
        over = self._over(node) if self.program.updates and node.into is None else None
        if over is not None:
            yield node.outs[0], over
        self.views.update(node.outs if shows and not relabels(node, self.views) else ())
        if self._is_own(node.ins[0], node) if shows else not lookup(node.name).overwrites:
            self.fresh.update(node.outs)

    def _over(self, node: Compute) -> Var | None:
        ins = tuple(v.local for v in node.ins)
        numbers = frozenset(i for i, v in enumerate(node.ins) if v in self.numbers)
        indices = lookup(node.name).written_over(ins, numbers)
        for index in sorted(indices, key=lambda i: self.uses[node.ins[i]] > 1):
            var = node.ins[index]
            fits = var.local == node.outs[0].local and var not in self.views
            if fits and self._is_own(var, node):
                return var
        return None

    def _move(self, node: Move) -> Iterator[tuple[Var, Var]]:
        """An all_reduce works in memory that is its own; a zero fill for a maximum is no copy."""
        kind, op = node.step.kind, node.step.op
        if kind == "all_reduce" and self._is_own(node.source):
            yield node.target, node.source
        if kind == "zero_fill" and op in ("max", "min"):
            yield node.target, node.source

    def _is_own(self, var: Var, node: Node | None = None) -> bool:
        """Whether a variable has memory of its own and is read once, or by `node` last."""
        is_last = node is not None and self.last_readers.get(var) is node
        return var in self.fresh and (is_last or self.uses[var] == 1)


def own_slices(
    node: DeviceLoop,
    program: DeviceProgram,
    is_own: Callable[[Var], bool],
    views: Collection[Var],
) -> Iterator[Var]:
    """The slices that a loop may write over: of stacks that only it reads, in their own memory.

    `is_own` says which variables are read once and share no memory; `views` may show some twice.
    """
    for item in () if isinstance(node, Pipeline) else node.stacked:
        is_stack = not isinstance(item, StageRows) and item.outer not in program.lists
        if is_stack and item.outer not in views and is_own(item.outer):
            yield item.inside
