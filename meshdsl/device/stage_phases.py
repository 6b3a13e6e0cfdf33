"""The loop over micro-batches as a pipeline: which stage does which of its statements, and when.

The statements of an iteration keep their order, phase by phase (`ir.StagePhase`). One belongs to
the phase in which its operands exist; one that reads only inputs, parameters and the like is done
by those stages that read the result. A sum of a step that has addends on several stages is added
up on each of them apart: what leaves the loop is partial over the stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import field, replace

from meshdsl.device.async_updates import loop_of, sunk, updated_on_the_way
from meshdsl.device.costs import with_flops
from meshdsl.device.ir import (
    ENDS,
    FORWARD,
    WEIGHTS,
    Bucket,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    Var,
    known_words,
    renamed,
)
from meshdsl.device.liveness import blocks, is_constant, totals
from meshdsl.device.names import Names, names_of
from meshdsl.device.recompute import made_of_weights, recomputed, slices_cut_again
from meshdsl.device.split_backward import carried_first, halves
from meshdsl.device.stage_assignment import Cuts, Positions
from meshdsl.device.sums import is_cast_of_floats
from meshdsl.device.virtual_stages import in_chunks, in_pairs
from meshdsl.diagnostics import fail
from meshdsl.ir.program import Carry, Leaf, Stacked, block_loops, every, uses
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import TensorType
from meshdsl.placed.collectives import send
from meshdsl.placed.pipelined import Piped, not_built
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.schedule.registry import generate
from meshdsl.schedule.verification import Verified, verify

BACKWARD = {
    StagePhase.LAST: StagePhase.LAST_BACKWARD,
    StagePhase.COLLECTED: StagePhase.EVERY_BACKWARD,
}
"""Where the backward pass begins with what a part of the forward pass has made."""

RESULTS = {
    StagePhase.LOOP: (StagePhase.LAST, StagePhase.COLLECTED),
    StagePhase.LOOP_BACKWARD: (StagePhase.FIRST_BACKWARD, StagePhase.COLLECTED_BACKWARD),
}
"""The parts that read what a loop leaves: its carries, and what it collects."""

SENDS = {
    StagePhase.LOOP: ("next", StagePhase.SENT),
    StagePhase.LOOP_BACKWARD: ("previous", StagePhase.SENT_BACKWARD),
}
"""The stage that goes on with what a loop leaves, and the part that sends it there."""

STARTS = {StagePhase.LOOP: StagePhase.FIRST, StagePhase.LOOP_BACKWARD: StagePhase.LAST_BACKWARD}
"""The part that makes the initial values of a loop's carries."""


def pipelined(program: DeviceProgram) -> DeviceProgram:
    """The program with its loop over micro-batches as a pipeline, where its layout has one."""
    pipe = program.placed.pipe
    if pipe is None:
        return program
    program = _kept_in_sums(program, pipe)
    at, loop = loop_of(program, pipe)
    table = _table(program, pipe, loop.dim.size)
    if table.schedule.updates:
        program = sunk(program, pipe)
        at, loop = loop_of(program, pipe)
    _check_sums(loop)
    names = Names(names_of(program))
    program, loop = in_chunks(program, loop, pipe, names)
    before, loop, behind = in_pairs(program, loop, pipe, names)
    lists, body = set(program.lists), list(program.body)
    body[at : at + 1] = [*before, _pipeline(loop, pipe, program, table, names, lists), *behind]
    with_pipeline = replace(program, body=tuple(body), lists=frozenset(lists))
    at += len(before)
    return updated_on_the_way(with_pipeline, at) if table.schedule.updates else with_pipeline


def _kept_in_sums(program: DeviceProgram, pipe: Piped) -> DeviceProgram:
    """What the loop over micro-batches collects, as rows of zeros that each of them is added to.

    The stage that makes it has it then, as it has sums; on others it is 0.
    """
    at, loop = loop_of(program, pipe)
    if not loop.collected:
        return program
    names = Names(names_of(program))
    zeros, puts = list[Node](), list[Node]()
    carries, rows = list[Carry[Var]](), list[Stacked[Var]]()
    for item in loop.collected:
        outer, block = item.outer, item.inside
        attrs = (("dims", outer.value.type.dims), ("dtype", outer.local.dtype))
        about = (loop.span, loop.phase)
        inside, row = replace(outer), replace(block, name=names.fresh(f"{block.name}_row"))
        begun = with_flops(Compute("zeros", (), (replace(outer),), attrs, *about))
        zeros.append(begun)
        carries.append(Carry(begun.outs[0], inside, inside, outer))
        rows.append(Stacked(inside, row))
        puts.append(with_flops(Compute("add", (row, block), (replace(row),), (), *about, onto=0)))
    summing = replace(
        loop,
        carries=(*loop.carries, *carries),
        stacked=(*loop.stacked, *rows),
        body=(*loop.body, *puts),
        collected=(),
    )
    return replace(program, body=(*program.body[:at], *zeros, summing, *program.body[at + 1 :]))


def _pipeline(
    node: DeviceLoop,
    pipe: Piped,
    program: DeviceProgram,
    table: Verified,
    names: Names,
    lists: set[Var],
) -> Pipeline:
    body = _sums_apart(node, pipe, program.mesh, names)
    fields = {name: getattr(node, name) for name in DeviceLoop.__dataclass_fields__}
    if pipe.count:
        cuts = Cuts(replace(node, body=body), pipe, program.mesh, names, lists)
        nodes, parts, stages = zip(*cuts.placed(), strict=True)
        return Pipeline(
            **{**fields, "body": nodes},
            axis=pipe.axis,
            parts=parts,
            table=table,
            node_stages=stages,
        )
    pairs = _of_loop(replace(node, body=body), pipe, program, table, names, lists)
    fields["body"] = tuple(n for _, n in pairs)
    done = tuple(part for part, _ in pairs)
    return Pipeline(**fields, axis=pipe.axis, parts=done, table=table, sizes=pipe.sizes)


def _of_loop(
    node: DeviceLoop,
    pipe: Piped,
    program: DeviceProgram,
    table: Verified,
    names: Names,
    lists: set[Var],
) -> list[tuple[StagePhase, Node]]:
    """The statements of a pipeline whose stages are iterations of a loop, part by part."""
    _check_loops(node, pipe)
    node = _handed_back(node, pipe, names)
    parts = _PhaseAssignment(node, pipe).of_all()
    sends = _sends(node.body, parts, pipe, program.mesh, names)
    pairs = sorted([*zip(parts, node.body, strict=True), *sends], key=lambda pair: pair[0])
    if pipe.use is not None and pipe.use.recompute:
        pairs = recomputed(pairs, node, names, lists)
    else:
        pairs = slices_cut_again(pairs, program.inputs, names, lists)
        if table.changes:
            stored = frozenset(old for old, _ in program.updates if old.value.role == "param")
            pairs = made_of_weights(pairs, node, stored, names, lists)
    if table.schedule.halves or (pipe.use is not None and pipe.use.splits_backward):
        program = replace(program, lists=frozenset(lists))
        split = _in_halves(pairs, program, pipe, names, lists)
        pairs = sorted(split, key=lambda pair: pair[0])
    else:
        pairs = [*_sent_first(pairs)]
    return _blocks_by_pass(pairs, names, table.schedule.halves)


def _check_loops(micro: DeviceLoop, pipe: Piped) -> None:
    """Refuse a step whose micro-batches do not go once through the stages, and once back."""
    counts = Counter(n.phase for n in block_loops(micro.body, DeviceLoop) if pipe.cuts(n))
    alone = pipe.use is not None and pipe.use.forward
    if counts == {"forward": 1, **({} if alone else {"backward": 1})}:
        return
    if not counts["forward"]:
        message = f"the loop over `{pipe.dim}` reads nothing of a micro-batch"
        help = f"split only the stored parameters: `params: {pipe.dim} -> {pipe.axis}`"
    elif not counts["backward"] and not alone:
        message = f"no gradient of a micro-batch goes back through the loop over `{pipe.dim}`"
        help = f"split only the stored parameters: `params: {pipe.dim} -> {pipe.axis}`"
    else:
        message = f"a micro-batch goes through the loop over `{pipe.dim}` twice"
        help = "write `recompute` inside of the loop, and no `grad` of its results"
    fail("MD0907", message, pipe.span, help=help)


def _check_sums(loop: DeviceLoop) -> None:
    """Refuse what is carried from one micro-batch to the next other than by adding to it.

    Passes of several micro-batches are under way at once; each adds to a sum where that lies.
    """
    for carry in loop.carries:
        if carry.next.name != carry.inside.name:
            message = f"`{carry.inside.value.label}` is not added up in place over micro-batches"
            help = "remove the rule that places it differently from its summands"
            fail("MD0330", message, carry.next.value.span, help=help)


def _in_halves(
    pairs: list[tuple[StagePhase, Node]],
    program: DeviceProgram,
    pipe: Piped,
    names: Names,
    lists: set[Var],
) -> Iterator[tuple[StagePhase, Node]]:
    """The statements with the backward pass in halves: between them the stage sends."""
    for part, node in pairs:
        split = None
        if loop := _sending(part, node):
            split = halves(loop, program, pipe, names)
        if split is None:
            yield part, node
            continue
        lists |= split.lists
        yield part, split.inputs
        yield StagePhase.WEIGHTS, split.weights


def _sent_first(pairs: list[tuple[StagePhase, Node]]) -> Iterator[tuple[StagePhase, Node]]:
    """The statements with what a stage sends back made first in each iteration of its loop."""
    for part, node in pairs:
        loop = _sending(part, node)
        yield part, carried_first(loop) if loop else node


def _sending(part: StagePhase, node: Node) -> DeviceLoop | None:
    """A statement that is the loop of a backward pass, behind which a stage sends."""
    if part is not StagePhase.LOOP_BACKWARD:
        return None
    assert isinstance(node, DeviceLoop)
    return node


def _blocks_by_pass(
    pairs: list[tuple[StagePhase, Node]], names: Names, halves: bool
) -> list[tuple[StagePhase, Node]]:
    """The statements with the block of a sum that a micro-batch adds to cut in the pass that adds.

    Where several passes add to it, each cuts it anew: between them nothing is kept, and other
    micro-batches are under way.
    """
    cuts = {n.target: (p, n) for p, n in pairs if isinstance(n, Move) and n.step.kind == "slice"}
    root: dict[Var, Var] = {v: v for v in cuts}
    adders: dict[Var, dict[StagePhase, list[Node]]] = {}
    for part, node in pairs:
        if isinstance(node, Compute) and node.onto is not None and node.ins[node.onto] in root:
            cut = root[node.out] = root[node.ins[node.onto]]
            adders.setdefault(cut, {}).setdefault(_begins(part, halves), []).append(node)
    new: dict[Node, Node] = {}
    anew, gone = list[tuple[StagePhase, Node]](), set[Node]()
    for var, passes in adders.items():
        part, cut_here = cuts[var]
        for begins, nodes in passes.items():
            if begins is _begins(part, halves):
                continue
            name = names.fresh(var.name)
            versions = {v: replace(v, name=name) for v, r in root.items() if r is var}
            new.update((node, renamed(node, versions)) for node in nodes)
            anew.append((begins, renamed(cut_here, versions)))
        if _begins(part, halves) not in passes:
            gone.add(cut_here)
    others = ((part, new.get(node, node)) for part, node in pairs if node not in gone)
    return sorted([*anew, *others], key=lambda pair: pair[0])


def _begins(part: StagePhase, halves: bool) -> StagePhase:
    """The part that every stage does first in the pass of a part, once its loops are done."""
    if part in FORWARD:
        return StagePhase.EVERY
    return (
        StagePhase.COLLECTED_BACKWARD if halves and part in WEIGHTS else StagePhase.EVERY_BACKWARD
    )


def _sends(
    body: tuple[Node, ...],
    parts: list[StagePhase],
    pipe: Piped,
    mesh: Mesh,
    names: Names,
) -> Iterator[tuple[StagePhase, Move]]:
    """A message for each value that a loop carries from stage to stage, as the stage sends it."""
    for node, part in zip(body, parts, strict=True):
        if part not in RESULTS:
            continue
        to, behind = SENDS[part]
        for carry in node.carries:
            source = carry.result
            name = f"`{source.value.label}`" if source.value.name else "what is carried"
            target = replace(source, name=names.fresh(f"{source.name}_sent"))
            step = send(source.placement, pipe.axis)
            held, sent = step.payload(source.type, mesh), step.wire(source.type, mesh)
            why = f"the {to} stage goes on with {name} of a micro-batch"
            about = node.span, known_words(why), node.phase
            yield behind, Move(step, source, target, held, sent, *about)


def _table(program: DeviceProgram, pipe: Piped, micro: int) -> Verified:
    """The schedule of the layout; without one, 1F1B. Raises MD0335."""
    devices = program.mesh.size(pipe.axis)
    if pipe.use is None:
        return verify(generate("one_f_one_b", devices, micro))
    table, goal = pipe.use.verified(devices, micro), program.placed.named.goal
    if table.schedule.updates:
        # Else it is the step of one update, which `Compilation` makes another program of.
        if goal is None or goal.taken is None:
            message = f"`{pipe.use.name}` is asynchronous, which is not supported here yet"
            help = "`explain`, `run` and `train` support it; or use `one_f_one_b`"
            fail("MD0335", message, pipe.use.span, help=help)
    if missing := not_built(table, not pipe.count):
        message = f"devices cannot run `{pipe.use.name}` yet: {missing}"
        fail("MD0335", message, pipe.use.span, help="use `one_f_one_b`, `interleaved` or `zb_v`")
    return table


def _handed_back(micro: DeviceLoop, pipe: Piped, names: Names) -> DeviceLoop:
    """Gradients of the last stage that the first one reads go with what the loop hands back.

    So they do where a value of the first stages is read behind the loop: each iteration carries
    what it does not change.
    """
    parts = _PhaseAssignment(micro, pipe)
    for node in micro.body:
        parts.follow(node)
    first = {n for n in micro.body if parts.parts[n] is StagePhase.FIRST_BACKWARD}
    far = dict.fromkeys(
        v for n in first for v in reads_of(n) if parts.made.get(v) is StagePhase.LAST_BACKWARD
    )
    inside = {v: replace(v, name=names.fresh(v.name)) for v in far}
    new = {v: replace(inner) for v, inner in inside.items()}
    carries = tuple(Carry(v, inner, inner, new[v]) for v, inner in inside.items())
    body: list[Node] = []
    for node in micro.body:
        if isinstance(node, DeviceLoop) and parts.parts[node] is StagePhase.LOOP_BACKWARD:
            body.append(replace(node, carries=(*node.carries, *carries)))
        else:
            body.append(renamed(node, new) if node in first else node)
    return replace(micro, body=tuple(body))


class _PhaseAssignment:
    """The part of each statement of an iteration."""

    def __init__(self, loop: DeviceLoop, pipe: Piped) -> None:
        self.loop, self.pipe = loop, pipe
        self.parts: dict[Node, StagePhase | None] = {}
        # What a value has been made by; of a loop on the stages, what reads it. The sums of a step
        # are on every stage.
        self.totals = totals(loop)
        self.made: dict[Var, StagePhase | None] = dict.fromkeys(loop.enters)
        self.readers: dict[Var, list[Node]] = {}
        for node in loop.body:
            for var in reads_of(node):
                self.readers.setdefault(var, []).append(node)

    def joint_with(self, others: Iterable[int]) -> StagePhase:
        """The part that adds what is the same on all stages to a sum, with those of its addends."""
        stages = {StagePhase(other).stages for other in others}
        return StagePhase.FIRST_BACKWARD if stages == {"first"} else StagePhase.LAST

    def of_all(self) -> list[StagePhase]:
        """The parts of all statements, each of which has its operands there."""
        for node in self.loop.body:
            self.follow(node)
        for node in reversed(self.loop.body):
            if self.parts[node] is None:
                self.parts[node] = self._of_readers(node)
                self._made(node, self.parts[node])
        parts = [part for node in self.loop.body if (part := self.parts[node]) is not None]
        assert len(parts) == len(self.loop.body)
        for node, part in zip(self.loop.body, parts, strict=True):
            self._check_stages(node, part)
            for var in reads_of(node):
                self._check(node, part, var)
        return parts

    def _check_stages(self, node: Node, part: StagePhase) -> None:
        """Refuse what needs all stages at once, which are never at one micro-batch together."""
        within = [*every((node,))]
        moves = [m for n in within if isinstance(n, Move | Bucket) for m in n.moves]
        split = [v for n in within for v in n.makes if self._is_split(v)]
        undivided = [m.source for m in moves if self.pipe.axis in m.step.axes]
        stacks = [v for v in reads_of(node) if self.made.get(v) is StagePhase.COLLECTED]
        if stacks and node.phase == "forward" and isinstance(node, Leaf):
            undivided += [] if all(map(self._is_split, node.makes)) else stacks
        if undivided:
            message = (
                f"{_named(undivided[0])} is read after the loop: one value per layer, each on "
                "the stage of its layer"
            )
            help = "pass it through the loop: assign it before the loop, and in each iteration"
            if self.pipe.cut is None:  # else what depends on no sample is computed before them
                name = self.pipe.use.name if self.pipe.use else "one_f_one_b"
                help = (
                    f"divide the batch, `with {name}[batch](8)`, instead of `accumulate`; or {help}"
                )
            fail("MD0330", message, node.span, help=help)
        if part in ENDS and split:
            dim, stage = self.pipe.dim, part.stages
            message = (
                f"{_named(split[0])} has all of `{dim}`, and would be computed on the {stage} "
                "stage, which has only its own layers"
            )
            help = f"read such tensors inside of the loop, or give them another dim than `{dim}`"
            fail("MD0330", message, node.span, help=help)

    def _is_split(self, var: Var) -> bool:
        """Whether each stage has its own iterations of a value."""
        return self.pipe.axis in var.placement.axes_of(self.pipe.dim)

    def follow(self, node: Node) -> None:
        """Note the part of a statement by its operands; None where it depends on no stage."""
        if isinstance(node, DeviceLoop) and self.pipe.cuts(node):
            part = StagePhase.LOOP_BACKWARD if node.phase == "backward" else StagePhase.LOOP
            carried, collected = RESULTS[part]
            self.made.update((c.result, carried) for c in node.carries)
            self.made.update((c.outer, collected) for c in node.collected)
            self.parts[node] = part
            return
        after = [p for v in reads_of(node) if (p := self.made.get(v)) is not None]
        if any(self._has_part(v) for v in (*reads_of(node), *node.makes)):
            after.append(
                StagePhase.EVERY_BACKWARD if node.phase == "backward" else StagePhase.EVERY
            )
        latest = max(after, default=None)
        if latest is not None and node.phase == "backward":
            latest = BACKWARD.get(latest, latest)
        self.parts[node] = latest
        self._made(node, latest)

    def _has_part(self, var: Var) -> bool:
        """Whether each stage has a part of its own of a value: of a stack, or of a sum."""
        placed = var.placement
        return self.pipe.axis in (*placed.partial, *(a for _, axes in placed.splits for a in axes))

    def _made(self, node: Node, part: StagePhase | None) -> None:
        """Note where the values of a statement are; the sums of a step are on every stage."""
        self.made.update((v, None if v.name in self.totals else part) for v in node.makes)

    def _of_readers(self, node: Node) -> StagePhase:
        """The part of a statement that any stage can do: that of its readers."""
        if is_constant(node):
            return StagePhase.EVERY
        if any(v.name in self.totals for v in node.makes):
            # What is the same on all stages is added once. It belongs to the backward pass where an
            # update may come between the passes; else it does not matter.
            use = self.pipe.use
            late = use is not None and use.asynchronous and node.phase == "backward"
            names = {v.name for v in node.makes}
            adders = (n for n in self.loop.body if any(v.name in names for v in n.makes))
            joint = self.joint_with(p for n in adders if (p := self.parts[n]) is not None)
            return StagePhase.LAST_BACKWARD if late and joint is StagePhase.LAST else joint
        parts = {self._read_in(r, v) for v in node.makes for r in self.readers.get(v, ())}
        stages = {part.stages for part in parts}
        if not parts:
            return StagePhase.LAST
        if len(stages) == 1 and "every" not in stages:
            return min(parts)
        late = min(parts) >= StagePhase.EVERY_BACKWARD
        return StagePhase.EVERY_BACKWARD if late else StagePhase.EVERY

    def _read_in(self, reader: Node, var: Var) -> StagePhase:
        """The part that a value has to be there for."""
        part = self.parts[reader]
        assert part is not None
        return read_in(reader, part, var)

    def _check(self, node: Node, part: StagePhase, var: Var) -> None:
        """Refuse an operand that is made on another stage."""
        maker_part = self.made.get(var)
        if maker_part is None or (part in STARTS and _only_begins(node, var)):
            return
        if maker_part.stages in ("every", part.stages) or (
            part in STARTS and maker_part.stages == "every"
        ):
            return
        name = _named(var)
        readers = "all stages" if part.stages == "every" else f"the {part.stages} stage"
        fail(
            "MD0330",
            f"{name} is computed on the {maker_part.stages} stage, and read on {readers}",
            node.span,
            help="compute it inside of the loop, or do not split the loop's dim",
        )


def _named(var: Var) -> str:
    """A variable in a message."""
    if not var.value.name:
        return f"the result of `{var.hint}`"
    return f"{'the gradient ' if var.value.is_gradient else ''}`{var.value.label}`"


def read_in(reader: Node, part: StagePhase, var: Var) -> StagePhase:
    """The part in which a statement of `part` reads a value: its own, or that which begins it."""
    return STARTS[part] if part in STARTS and _only_begins(reader, var) else part


def _only_begins(node: Node, var: Var) -> bool:
    """Whether a loop reads a value only as the initial value of a carry."""
    if all(c.init is not var for c in node.carries):
        return False
    return all(v is not var for n in node.body for v in reads_of(n))


# --- sums ----------------------------------------------------------------------------------------


def _sums_apart(loop: DeviceLoop, pipe: Piped, mesh: Mesh, names: Names) -> tuple[Node, ...]:
    """The body, with the addends of each sum of a step added to it one by one.

    Only where they are made on several stages: an addition of its own joins them otherwise.
    """
    addends = _Addends(loop, pipe, mesh, names)
    body = list(loop.body)
    for node in loop.body:
        if not (isinstance(node, Compute) and addends.adds(node)):
            continue
        total, part = node.ins
        addend_set = addends.of(part)
        if len(addend_set.vars) < 2:
            continue
        body = [n for n in body if n not in (node, *addend_set.gone)] + addend_set.new
        parts = addend_set.parts(addends.parts)
        in_order = sorted(addend_set.vars, key=parts.__getitem__)
        for addend in in_order:
            partial_sum = node.outs[0] if addend is in_order[-1] else replace(node.outs[0])
            body.append(replace(node, ins=(total, addend), outs=(partial_sum,)))
            total = partial_sum
    return tuple(body)


@dataclass(slots=True)
class _AddendSet:
    """Addends, the nodes that join them, and those that make them where a move came behind that."""

    vars: list[Var]
    gone: list[Node] = field(default_factory=list)
    new: list[Node] = field(default_factory=list)

    def parts(self, of: _PhaseAssignment | Positions) -> dict[Var, int]:
        """The part in which each addend is made."""
        parts = {var: self._part(var, of) for var in self.vars}
        joint = of.joint_with(part for part in parts.values() if part is not None)
        return {var: joint if part is None else part for var, part in parts.items()}

    def _part(self, var: Var, of: _PhaseAssignment | Positions) -> int | None:
        """None of what is on all stages; a new node stands where its operand is made."""
        for node in self.new:
            if var in node.makes:
                return self._part(next(iter(reads_of(node))), of)
        return of.made.get(var)


class _Addends:
    """The values that additions of an iteration join, stage by stage."""

    def __init__(self, loop: DeviceLoop, pipe: Piped, mesh: Mesh, names: Names) -> None:
        self.mesh, self.names = mesh, names
        self.parts: _PhaseAssignment | Positions = (Positions if pipe.count else _PhaseAssignment)(
            loop, pipe
        )
        for node in loop.body:
            self.parts.follow(node)
        self.sums = self.parts.totals - {block.name for block in blocks(loop)}
        self.reads = uses(loop.body)
        self.makers = {v: node for node in loop.body for v in node.makes}

    def adds(self, node: Compute) -> bool:
        """Whether an operator adds to a sum of the step, and does not put a block at its place."""
        return node.onto == 0 and node.outs[0].name in self.sums

    def of(self, var: Var) -> _AddendSet:
        """The addends in a value that are made on several stages; a move is one of each of them."""
        maker = self.makers.get(var)
        if self.reads[var] != 1:
            return _AddendSet([var])
        match maker:
            case Compute(name="add"):
                one, other = map(self.of, maker.ins)
                gone = [maker, *one.gone, *other.gone]
                both = _AddendSet(one.vars + other.vars, gone, one.new + other.new)
                if len({*both.parts(self.parts).values()}) > 1:
                    return both
            case Move() if maker.step.op in (None, "sum"):
                inner = self.of(maker.source)
                if len(inner.vars) > 1:
                    wide = [self._widened(maker, v) for v in inner.vars]
                    sources = [w.outs[0] if w else v for w, v in zip(wide, inner.vars, strict=True)]
                    moves = [self._moved(maker, v) for v in sources]
                    new = [*inner.new, *filter(None, wide), *moves]
                    return _AddendSet([m.target for m in moves], [maker, *inner.gone], new)
            case Compute() if is_cast_of_floats(maker):
                # To be sent in fewer bits, each addend is rounded.
                inner = self.of(maker.ins[0])
                if len(inner.vars) > 1:
                    casts = [self._cast(maker, v) for v in inner.vars]
                    new = [*inner.new, *casts]
                    return _AddendSet([c.outs[0] for c in casts], [maker, *inner.gone], new)
        return _AddendSet([var])

    def _widened(self, move: Move, addend: Var) -> Compute | None:
        """An addend with all dims of the sum, where it lacks one that is split around a move."""
        before, after = move.source, move.target
        split = {dim for p in (before.placement, after.placement) for dim, _ in p.splits}
        if split <= set(addend.value.type.names):
            return None
        wide = replace(
            before,
            name=self.names.fresh(before.name),
            value=replace(before.value),
            hint=addend.hint,
        )
        attrs = (("dims", wide.value.type.dims),)
        return Compute("broadcast", (addend,), (wide,), attrs, move.span, move.phase)

    def _cast(self, cast: Compute, source: Var) -> Compute:
        return replace(cast, ins=(source,), outs=(self._of(cast.outs[0], source),))

    def _moved(self, move: Move, source: Var) -> Move:
        moved = replace(move, source=source, target=self._of(move.target, source))
        return moved.counted(self.mesh)

    def _of(self, var: Var, source: Var) -> Var:
        """What is made of one addend in place of all: with the dims of that, in its order."""
        sizes = {dim.name: dim for dim in var.local.dims}
        dtype, dims = var.local.dtype, source.value.type.dims
        return replace(
            var,
            name=self.names.fresh(var.name),
            value=replace(var.value, type=TensorType(dims, dtype)),
            local=TensorType(tuple(sizes[dim.name] for dim in dims), dtype),
        )
