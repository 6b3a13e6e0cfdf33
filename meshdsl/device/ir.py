"""The device program: the statements of every device of the mesh, on local tensors, in order.

All devices run the same text. A variable is the local block of one version of a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from itertools import groupby
from typing import Any, ClassVar, Self, TypeVar

from meshdsl.device.counted_rows import CountedRows
from meshdsl.diagnostics import Span
from meshdsl.ir import program as ir
from meshdsl.ir.program import Stacked
from meshdsl.ir.rewrite import mapped
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import Step
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.records import dataclass
from meshdsl.schedule.table import Row
from meshdsl.schedule.verification import Verified


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """One local tensor, compared by identity.

    `name` is its own in the device program, but variables that share one piece of memory in turn
    share one name. `hint` is the word a reader knows it by. Of those along the axis of a pipeline's
    stages, device number `on` alone has it; None: each has one (`stage_local.py`). One that is
    `away` is stored on `disk` or on the `host`: it takes no memory of the device.
    """

    name: str
    value: Value
    placement: Placement
    local: TensorType
    hint: str = ""
    on: int | None = None
    away: str = ""

    @property
    def type(self) -> TensorType:
        """The type of the whole tensor."""
        return self.value.type


class Statement(ir.Leaf):
    """A node of a device without a body; what only loops have is empty."""

    __slots__ = ()
    slices: ClassVar[tuple[()]] = ()
    in_slices: ClassVar[Mapping[Var, Var]] = {}

    @property
    def other_names(self) -> tuple[str, ...]:
        """The names that it assigns, those of variables apart."""
        return ()

    def with_body(self, block: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Self:
        """Itself: there is no block in it."""
        del block
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Compute(Statement, ir.Op[Var]):
    """An operator on local tensors.

    `onto` is the operand that the result overwrites and shares the name of, if there is one. A cast
    may write its result `into` the memory of a variable that nothing reads any more: it has the
    name of that, too. An operator whose record `adds` adds its result to the variable `into`.
    """

    flops: int = 0
    onto: int | None = None
    into: Var | None = None

    @property
    def adds(self) -> bool:
        """Whether it adds its result to a variable."""
        return self.into is not None and lookup(self.name).adds is not None

    @property
    def reads(self) -> tuple[Var, ...]:
        """The operands, and the variable that it adds to."""
        return (*self.ins, self.into) if self.into is not None and self.adds else self.ins

    @property
    def over(self) -> Var | None:
        """The variable that it adds to or overwrites, sharing its name; a dead one apart."""
        if self.onto is not None:
            return self.ins[self.onto]
        return self.into if self.into is not None and self.adds else None

    @property
    def local(self) -> Signature:
        """The types of the operands and results on one device, and the attributes."""
        ins, outs = (tuple(v.local for v in vs) for vs in (self.ins, self.outs))
        return Signature(ins, outs, dict(self.attrs))

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Compute:
        """The operator on the variables that `of` gives, also the one it writes into."""
        fields = {"into": self.into and of(self.into), **fields}
        # `super()` names no class here: with slots, the decorator makes another one of it.
        return ir.Op.with_values(self, of, **fields)


def known_words(cause: str = "") -> placed.Words:
    """The words of a step whose cause is known as soon as it is emitted."""
    return lambda: (cause,)


@dataclass(frozen=True, slots=True, eq=False)
class Move(Statement):
    """One step of a reshard: a collective, or a slice or zero-fill that stays on the device.

    `payload` is the size of the local input in bytes, `wire` the most bytes sent by a device
    (`traffic.py`: those of each). `words` finds its cause when that is first read.
    A gather may write `into` the memory of a variable that nothing reads any more; the target has
    the name of that. An all_to_all may send `rows` by number: `wire` is then the most.
    """

    step: Step
    source: Var
    target: Var
    payload: int
    wire: int
    span: Span
    words: placed.Words
    phase: str
    into: Var | None = None
    rows: CountedRows | None = None

    @property
    def why(self) -> str:
        """The cause of the step, who needs it, and the cheapest alternative."""
        return "; ".join(self.words())

    @property
    def cause(self) -> str:
        """The cause of the step alone."""
        return self.words()[0]

    def counted(self, mesh: Mesh) -> Move:
        """The move with the bytes of its step on a mesh."""
        of = (self.source.value.type, mesh)
        wire = self.step.wire(*of) if self.rows is None else self.rows.most
        return replace(self, payload=self.step.payload(*of), wire=wire)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves in it: itself, as a bucket has several."""
        return (self,)

    @property
    def reads(self) -> tuple[Var, ...]:
        """The source, and the numbers of rows."""
        return (self.source,) if self.rows is None else (self.source, *self.rows.reads)

    @property
    def makes(self) -> tuple[Var, ...]:
        """The target."""
        return (self.target,)

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Move:
        """The move between the variables that `of` gives for its own."""
        fields = {"into": self.into and of(self.into), **fields}
        fields = fields if self.rows is None else {"rows": self.rows.on(of), **fields}
        return replace(self, source=of(self.source), target=of(self.target), **fields)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket(Statement):
    """Moves of one kind, over the same axes, done by one collective on several tensors.

    `payload` and `wire` are those of all tensors together.
    """

    moves: tuple[Move, ...]
    payload: int
    wire: int

    @property
    def step(self) -> Step:
        """The step of the first move; the others differ in dims and placements."""
        return self.moves[0].step

    @property
    def span(self) -> Span:
        """The source of the move with the most bytes."""
        return max(self.moves, key=lambda move: move.payload).span

    @property
    def phase(self) -> str:
        """The phase of the last move, for which the bucket waits."""
        return self.moves[-1].phase

    @property
    def reads(self) -> tuple[Var, ...]:
        """The sources."""
        return tuple(m.source for m in self.moves)

    @property
    def makes(self) -> tuple[Var, ...]:
        """The targets."""
        return tuple(m.target for m in self.moves)

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Bucket:
        """The bucket of the moves between the variables that `of` gives for theirs."""
        return replace(self, moves=tuple(m.with_values(of) for m in self.moves), **fields)


Collective = Move | Bucket


@dataclass(frozen=True, slots=True, eq=False)
class Start(Statement):
    """Issues a collective; `work` is the variable that names it while it is in flight.

    One issued `ahead` is that of the loop's next iteration, and does nothing in the last one. One
    that is `late` is waited for in the next iteration, or after the loop (`Wait`).
    """

    collective: Collective
    work: str
    ahead: bool = False
    late: bool = False

    @property
    def span(self) -> Span:
        """The source of the collective."""
        return self.collective.span

    @property
    def phase(self) -> str:
        """That of the collective."""
        return self.collective.phase

    @property
    def reads(self) -> tuple[Var, ...]:
        """The sources; slices of the next iteration are read by the loop."""
        return () if self.ahead else self.collective.reads

    @property
    def other_names(self) -> tuple[str, ...]:
        """The collective in flight."""
        return (self.work,)

    @property
    def makes(self) -> tuple[Var, ...]:
        """The targets, allocated at the start; the loop makes those of another iteration."""
        return () if self.ahead or self.late else self.collective.makes

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Start:
        """The start of the collective on the variables that `of` gives."""
        return replace(self, collective=self.collective.with_values(of), **fields)


@dataclass(frozen=True, slots=True, eq=False)
class Wait(Statement):
    """Waits for a collective issued before; its targets are available from here on.

    One that is `late` waits for the collective of the iteration before, and does nothing in the
    first one; that of the last iteration is waited for after the loop. Its targets are collected by
    the loop, and by nothing else.
    """

    collective: Collective
    work: str
    late: bool = False

    @property
    def span(self) -> Span:
        """The source of the collective."""
        return self.collective.span

    @property
    def phase(self) -> str:
        """That of the collective."""
        return self.collective.phase

    @property
    def reads(self) -> tuple[Var, ...]:
        """The targets, and the sources that are live until the collective is over.

        An all_reduce works in the memory of its target. Of the iteration before, the collective
        itself keeps them.
        """
        if self.late:
            return ()
        in_place = self.collective.step.kind == "all_reduce"
        return (*self.makes, *(() if in_place else self.collective.reads))

    @property
    def makes(self) -> tuple[Var, ...]:
        """The targets; the loop makes those of the iteration before."""
        return () if self.late else self.collective.makes

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Wait:
        """The wait for the collective on the variables that `of` gives."""
        return replace(self, collective=self.collective.with_values(of), **fields)


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A collective on slices of stacks that is issued one iteration ahead, first before the loop.

    `slices` has one per move. The body has a `Wait`, and behind it the `Start` for the next
    iteration.
    """

    collective: Collective
    work: str
    slices: tuple[Stacked[Var], ...]

    def on(self, of: Callable[[Var], Var]) -> Ahead:
        """The same collective on the variables that `of` gives."""
        slices = tuple(s.on(of) for s in self.slices)
        return Ahead(self.collective.with_values(of), self.work, slices)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCollected(ir.Collected[Var]):
    """All iterations' `inside`. One that only loops read is a list, which need not be copied.

    Where each is written over its slice of an existing stack, that is `stack`: then `outer` has
    its memory and its name, and nothing is left to be collected. With `into_slice` nothing is
    copied: the operator of `inside` writes its result to its slice of the new stack.
    """

    is_list: bool = False
    stack: Var | None = None
    into_slice: bool = False

    def on(self, of: Callable[[Var], Any]) -> Any:
        """The collection among the variables that `of` gives for its own."""
        stack = self.stack and of(self.stack)
        inside, outer = of(self.inside), of(self.outer)
        return DeviceCollected(inside, outer, self.is_list, stack, self.into_slice)


@dataclass(frozen=True, slots=True, eq=False)
class StageRows(Stacked[Var]):
    """Of a stack, or of a sum that is stacked, the rows that the stage of a pass has.

    Where devices have each other's stages in pairs, these are all of the device's own, or all of
    the `other`.
    """

    other: Var | None = None

    def on(self, of: Callable[[Var], Any]) -> Any:
        """The rows among the variables that `of` gives for its own."""
        return StageRows(of(self.outer), of(self.inside), self.other and of(self.other))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLoop(ir.Loop[Var, "Node"]):
    """`repeat dim`; `index` is the loop variable.

    The `inside` and `result` of a carry share a name. So does `init` where nothing else reads it,
    and `next` where it is written over `inside`.
    """

    collected: tuple[DeviceCollected, ...] = ()
    index: str = ""
    ahead: tuple[Ahead, ...] = ()

    def with_values(self, of: Callable[[Var], Var], **fields: Any) -> Self:
        """The loop on the variables that `of` gives, also ahead; with other `fields`."""
        ahead = tuple(item.on(of) for item in self.ahead)
        return ir.Loop.with_values(self, of, ahead=ahead, **fields)

    def with_body(self, block: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> DeviceLoop:
        """The loop with another block for its body."""
        return replace(self, body=block(self.body))

    @property
    def late(self) -> tuple[Wait, ...]:
        """The collectives that are waited for an iteration later, the last ones after the loop."""
        return tuple(node for node in self.body if isinstance(node, Wait) and node.late)

    @property
    def in_slices(self) -> dict[Var, Var]:
        """The variables in the memory of their slice of a stack, with that.

        What an operator writes there, and what an all_reduce that comes late makes of it.
        """
        there = {c.inside: c.outer for c in self.collected if c.into_slice}
        late = (move for wait in self.late for move in wait.collective.moves if there)
        sources = ((m.source, m.target) for m in late if m.step.kind == "all_reduce")
        return there | {source: there[var] for source, var in sources if var in there}

    @property
    def ends(self) -> tuple[Var, ...]:
        """The values for the next iteration, and those to be collected, unless they come late."""
        late = {var for wait in self.late for var in wait.collective.makes}
        collected = (c.inside for c in self.collected if c.inside not in late)
        return (*(c.next for c in self.carries), *collected)

    @property
    def other_names(self) -> tuple[str, ...]:
        """The index, and the collectives in flight before the first iteration."""
        return (self.index, *(ahead.work for ahead in self.ahead))

    @property
    def slices(self) -> tuple[Stacked[Var], ...]:
        """Stacks and their slices, also those only read ahead."""
        return (*self.stacked, *(item for ahead in self.ahead for item in ahead.slices))

    @property
    def reads(self) -> tuple[Var, ...]:
        """Stacks, and initial values of carries; the body reads more."""
        inside = {*(c.inside for c in self.carries), *(s.inside for s in self.stacked)}
        stacks = [s.outer for s in self.slices]
        stacks += [s.other for s in self.stacked if isinstance(s, StageRows) and s.other]
        return (*(c.init for c in self.carries), *(v for v in stacks if v not in inside))


class StagePhase(IntEnum):
    """The part of a micro-batch to which a statement belongs, in the order in which they run.

    Those of `LOOP` are the stage's own iterations. What `EVERY` stage does has the operands on each
    of them: inputs, parameters, what the loop collects. Those of `FIRST` and `LAST` are the first
    and the last stage's. `SENT` is what another stage goes on with, `WEIGHTS` the half of the
    stage's iterations for which none waits. Up to `LAST` it is the forward pass; `AGAIN` is what
    the backward pass computes of it a second time (`recompute.py`). `UPDATE` and those behind it
    are the update of a stage where that is made on the way.

    Where rules cut a network into stages, the statements of each stage are in `LOOP`,
    `LOOP_BACKWARD` and `WEIGHTS`, and what it sends behind them.
    """

    EVERY = 0
    FIRST = 1
    LOOP = 2
    SENT = 3
    COLLECTED = 4
    LAST = 5
    EVERY_AGAIN = 6
    LOOP_AGAIN = 7
    COLLECTED_AGAIN = 8
    EVERY_BACKWARD = 9
    LAST_AGAIN = 10
    LAST_BACKWARD = 11
    LOOP_BACKWARD = 12
    SENT_BACKWARD = 13
    WEIGHTS = 14
    COLLECTED_BACKWARD = 15
    FIRST_AGAIN = 16
    FIRST_BACKWARD = 17
    UPDATE = 18
    FIRST_UPDATE = 19
    LAST_UPDATE = 20

    @property
    def stages(self) -> str:
        """The stages that do it: `first`, `last` or `every`."""
        return "first" if self in AT_FIRST else "last" if self in AT_LAST else "every"

    @property
    def sends(self) -> bool:
        """Whether its statements send values to another stage."""
        return self in (StagePhase.SENT, StagePhase.SENT_BACKWARD)


FORWARD = tuple(part for part in StagePhase if part <= StagePhase.LAST)
INPUTS = tuple(part for part in StagePhase if StagePhase.LAST < part < StagePhase.WEIGHTS)
WEIGHTS = tuple(part for part in StagePhase if StagePhase.WEIGHTS <= part < StagePhase.UPDATE)
"""The passes of a micro-batch: forward, and the halves of the backward one."""

UPDATE = tuple(part for part in StagePhase if part >= StagePhase.UPDATE)
"""The update of a stage, on the way."""

Stages = tuple[int, ...]
"""The stage of a statement, or the two of a message; empty where the part says which."""

STAGED = frozenset(
    (StagePhase.LOOP, StagePhase.LOOP_AGAIN, StagePhase.LOOP_BACKWARD, StagePhase.WEIGHTS)
)
"""The parts that are loops over the iterations of a stage."""

AT_FIRST = frozenset(
    (
        StagePhase.FIRST,
        StagePhase.FIRST_AGAIN,
        StagePhase.FIRST_BACKWARD,
        StagePhase.FIRST_UPDATE,
    )
)
AT_LAST = frozenset(
    (StagePhase.LAST, StagePhase.LAST_AGAIN, StagePhase.LAST_BACKWARD, StagePhase.LAST_UPDATE)
)
ENDS = AT_FIRST | AT_LAST
"""The parts of the first stage alone, of the last stage alone, and of either."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline(DeviceLoop):
    """The loop over micro-batches of a pipeline: each stage does its part of each.

    `parts` are those of the statements of the body, which stand in their order; `table` says which
    stages device `axis=k` has, and in which order it does forward and backward passes. `stages`
    are those that are looked at, of a `device` or of all that have them; empty: of any device.
    `sizes` are the iterations of each stage, where these are not as many as its loops say: then
    that is the largest of them. Where rules cut a network, `node_stages` has the stages of each
    statement, and the statements are ordered by stage.
    """

    axis: str = ""
    parts: tuple[StagePhase, ...] = ()
    table: Verified | None = None
    stages: tuple[int, ...] = ()
    node_stages: tuple[Stages, ...] = ()
    sizes: tuple[int, ...] = ()
    device: int | None = None

    def of(self, *parts: StagePhase, stage: int | None = None) -> tuple[Node, ...]:
        """The statements of some parts; of a network that is cut, those of one stage."""
        return tuple(
            node
            for node, part, ends in self.places
            if part in parts and (stage is None or not ends or ends[0] == stage)
        )

    @property
    def places(self) -> Iterator[tuple[Node, StagePhase, Stages]]:
        """Every statement, with its part, and of a network that is cut its stages."""
        node_stages = self.node_stages or ((),) * len(self.body)
        yield from zip(self.body, self.parts, node_stages, strict=True)

    @property
    def known(self) -> Verified:
        """The table."""
        assert self.table is not None
        return self.table

    @property
    def last(self) -> int:
        """The last stage."""
        return self.known.schedule.stages - 1

    def does(self, part: StagePhase, stage: int, ends: Stages = ()) -> bool:
        """Whether a stage does a part: what all do, what its end does, what leaves its device.

        Of a network that is cut, `ends` are the stages of a statement.
        """
        behind = {StagePhase.SENT: stage + 1, StagePhase.SENT_BACKWARD: stage - 1}.get(part)
        if ends:
            if stage != ends[0]:
                return False
            behind = ends[1] if part.sends else None
        if behind is not None:
            device_of = self.known.device_of
            return 0 <= behind <= self.last and device_of[0, stage] != device_of[0, behind]
        return bool(ends) or stage == {"first": 0, "last": self.last}.get(part.stages, stage)

    def times(self, part: StagePhase, ends: Stages = ()) -> int:
        """How often a part is done in a step; of all devices, as often as one does."""
        return self._most(part, lambda stage: 1, ends)

    def trips(self, node: Node, part: StagePhase) -> int:
        """As `times`, of the iterations of a loop on the stages."""
        return self._most(part, lambda stage: self.iterations(node, part, stage))

    def iterations(self, node: Node, part: StagePhase, stage: int) -> int:
        """How many iterations of a loop of a part a stage has."""
        return self.sizes[stage] if self.sizes and part in STAGED else node.repeats

    def _most(self, part: StagePhase, count: Callable[[int], int], ends: Stages = ()) -> int:
        """The most that is counted of a device, for the micro-batches that it does a part of.

        Or for its updates, which belong to the stages of one device.
        """
        taken = self.known.updates if part in UPDATE else self.known.taken
        if self.stages and self.device is None:  # of all devices that have them
            in_all = Counter[int]()
            for (_, stage), number in taken.items():
                in_all[stage] += number
            each = [{stage: in_all[stage] for stage in self.stages}]
        else:
            devices = range(len(self.rows)) if self.device is None else (self.device,)
            each = [{s: taken[d, s] for s in self.stages or self.known.held[d]} for d in devices]
        done = (((s, n) for s, n in counts.items() if self.does(part, s, ends)) for counts in each)
        return max(sum(count(s) * n for s, n in counts) for counts in done)

    def on(self, *stages: int, device: int | None = None) -> Pipeline:
        """What is done on some stages, of a device or of all that have them."""
        restricted = replace(self, stages=stages, device=device)
        times = {at: restricted.times(*at) for at in {(p, e) for _, p, e in self.places}}
        places = [(n, p, e) for n, p, e in self.places if times[p, e]]
        node_stages = tuple(ends for *_, ends in places) if self.node_stages else ()
        body, parts = tuple(n for n, *_ in places), tuple(p for _, p, _ in places)
        return replace(restricted, body=body, parts=parts, node_stages=node_stages)

    def arriving(self, stage: int, forward: bool) -> tuple[Move, ...]:
        """The messages to a stage of a network that is cut, which its pass begins with."""
        part = StagePhase.SENT if forward else StagePhase.SENT_BACKWARD
        sends = (n for n, p, ends in self.places if p is part and ends[1:] == (stage,))
        return tuple(n for n in sends if isinstance(n, Move))

    def leaving(self, stage: int, forward: bool) -> tuple[Move, ...]:
        """What a stage sends in a pass, in that order."""
        part = StagePhase.SENT if forward else StagePhase.SENT_BACKWARD
        return tuple(n for n in self.of(part, stage=stage) if isinstance(n, Move))

    @property
    def rows(self) -> tuple[Row, ...]:
        """What each device does, in its order."""
        return self.known.schedule.rows

    @property
    def passes(self) -> dict[str, tuple[StagePhase, ...]]:
        """The parts of each pass by its action: those of B are in halves where the table has I."""
        if self.is_forward:
            return {"F": FORWARD}
        update = {"U": UPDATE} if self.table and self.table.schedule.updates else {}
        if self.table is not None and self.table.schedule.halves:
            return {"F": FORWARD, "I": INPUTS, "W": WEIGHTS, **update}
        return {"F": FORWARD, "B": INPUTS + WEIGHTS, **update}

    def passes_of(self, kind: str) -> tuple[str, ...]:
        """What a stage does for an action: B is both halves where there are halves."""
        return (kind,) if kind in self.passes else ("I", "W")

    @property
    def taken(self) -> tuple[Var, ...]:
        """The sums that an update on the way takes: behind it they begin anew."""
        read = {v for n in self.of(*UPDATE) for v in n.reads}
        sums = (c.next for c in self.carries if c.inside.value.role == "activation")
        return tuple(v for v in sums if v in read)

    @property
    def versioned(self) -> dict[StagePhase, tuple[Var, ...]]:
        """By part of an update, the parameters that it makes where passes may read older ones."""
        if not self.known.schedule.updates or self.known.schedule.weights == "latest":
            return {}
        part_of = {v: p for n, p, _ in self.places if p in UPDATE for v in n.makes}
        by_part: dict[StagePhase, tuple[Var, ...]] = {}
        for carry in self.carries:
            if carry.inside.value.role == "param" and carry.next in part_of:
                part = part_of[carry.next]
                by_part[part] = (*by_part.get(part, ()), carry.inside)
        return dict(sorted(by_part.items()))

    @property
    def recomputes(self) -> bool:
        """Whether a stage computes again what it does not keep, not just what weights determine."""
        return StagePhase.LOOP_AGAIN in self.parts and not self.known.changes

    @property
    def received(self) -> frozenset[Var]:
        """What a stage keeps of a micro-batch, where it computes the rest again."""
        if not self.recomputes or self.node_stages:
            return frozenset()
        return frozenset(c.init for c in self.loop(StagePhase.LOOP).carries)

    @property
    def is_forward(self) -> bool:
        """Whether there is no backward pass."""
        return self.table is not None and self.table.schedule.is_forward

    @property
    def staged(self) -> tuple[StagePhase, ...]:
        """The parts that are loops whose carries go from stage to stage."""
        return tuple(p for p in (StagePhase.LOOP, StagePhase.LOOP_BACKWARD) if p in self.parts)

    def loop(self, part: StagePhase) -> DeviceLoop:
        """The loop whose iterations are on the stages, of the forward or the backward pass."""
        (loop,) = ir.block_loops(self.of(part), DeviceLoop)
        return loop

    @property
    def sends_after(self) -> Node | None:
        """The statement behind which the last iteration of a backward pass sends what it carries.

        None where nothing is computed after it: then the stage sends behind its loop.
        """
        if self.node_stages or StagePhase.SENT_BACKWARD not in self.parts:
            return None
        loop = self.loop(StagePhase.LOOP_BACKWARD)
        ends = {c.next for c in loop.carries}
        makers_of_ends = [i for i, node in enumerate(loop.body) if not ends.isdisjoint(node.makes)]
        if not makers_of_ends:
            return None
        last = makers_of_ends[-1]
        later = ir.every(loop.body[last + 1 :])
        computes = any(isinstance(node, Compute) and node.flops > 0 for node in later)
        return loop.body[last] if computes else None

    def with_body(self, block: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Pipeline:
        """The pipeline with another block for that of each part, and each stage."""
        places = []
        for (part, ends), group in groupby(self.places, lambda place: place[1:]):
            places += [(node, part, ends) for node in block(tuple(node for node, *_ in group))]
        body, parts, stages = zip(*places, strict=True)
        return replace(self, body=body, parts=parts, node_stages=stages if self.node_stages else ())


Node = Compute | Move | Bucket | Start | Wait | DeviceLoop
N = TypeVar("N", bound=Node)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProgram:
    """The program of each device. `outputs` are in the order of `return`.

    `updates` are pairs of a parameter or state and its new value. `lists` are the variables that
    are lists of slices.
    """

    placed: placed.PlacedProgram
    mesh: Mesh
    inputs: tuple[Var, ...]
    params: tuple[Var, ...]
    body: tuple[Node, ...]
    outputs: tuple[tuple[str, Var], ...]
    coordinates: dict[str, str]
    states: tuple[Var, ...] = ()
    updates: tuple[tuple[Var, Var], ...] = ()
    lists: frozenset[Var] = frozenset()

    @property
    def pipeline(self) -> Pipeline | None:
        """Its loop over the micro-batches of a pipeline, if it has one."""
        return next(ir.block_loops(self.body, Pipeline), None)

    @property
    def away(self) -> Mapping[Var, str]:
        """The parameters and states that lie elsewhere between steps, and where.

        Passes load the parameters; updates read and write both in chunks.
        """
        return {v: v.away for v in (*self.params, *self.states) if v.away}


def written_into(node: Node) -> dict[Var, Var]:
    """The results that a statement writes into the memory of other variables, with these."""
    if isinstance(node, Compute):
        return {} if node.into is None else {node.outs[0]: node.into}
    collective = node.collective if isinstance(node, Start | Wait) else node
    moves = collective.moves if isinstance(collective, Move | Bucket) else ()
    return {move.target: move.into for move in moves if move.into is not None}


def arrives_in_place(move: Move, mesh: Mesh) -> bool:
    """Whether what a gather writes into another variable arrives there, not in a buffer first."""
    outermost = move.target.local.names[:1] == (move.step.dim,)
    return outermost and not move.step.is_uneven(move.source.type, mesh)


def renamed(node: N, new: Mapping[Var, Var]) -> N:
    """The node with new variables in the place of some, those of its body included."""
    return mapped(node, lambda var: new.get(var, var))


def on_device(program: DeviceProgram, device: int) -> tuple[Node, ...]:
    """The statements of one device along the axis of a pipeline."""
    return tuple(
        node.on(*node.known.held[device], device=device) if isinstance(node, Pipeline) else node
        for node in program.body
        if is_on(node, device)
    )


def only_on(node: Node) -> int | None:
    """The device along the axis of a pipeline's stages that alone does a statement, if one does."""
    if isinstance(node, Pipeline):
        return None
    return next((var.on for var in node.makes if var.on is not None), None)


def is_on(node: Node, device: int) -> bool:
    """Whether a device along the axis of a pipeline's stages does a statement."""
    return only_on(node) in (None, device)


def walk(nodes: tuple[Node, ...], trips: int = 1) -> Iterator[tuple[Compute | Collective, int]]:
    """Every operator and collective in order, with how often a device does it.

    A collective that is issued ahead counts at its `Wait`.
    """
    for node in nodes:
        match node:
            case Pipeline():
                for inner, part, ends in node.places:
                    if part in STAGED and node.sizes:
                        yield from walk(inner.body, trips * node.trips(inner, part))
                    else:
                        times = trips * node.times(part, ends)
                        # What stages of one device hand on is not sent.
                        yield from walk((inner,), times) if times else ()
            case DeviceLoop():
                yield from walk(node.body, trips * node.repeats)
            case Wait():
                yield node.collective, trips
            case Compute() | Move() | Bucket():
                yield node, trips
