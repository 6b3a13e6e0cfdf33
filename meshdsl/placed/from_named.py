"""From the named program to the placed program, in one walk in program order.

The `Request` has the placements requested of values (`request.py`: a layout, or an `sbp` block). A
`Decider` decides what it leaves open: a `Walk` (`place.py`), at each operator in turn, or the
`PlacementPlan` of a search (`optimal.py`). The `Placer` consults both, and emits the reshards that
follow.

A walk gives an operator the placement whose reshards send the fewest bytes (`strategies.py`); on
axes without a demand, a value is whole, or partial for as long as the policy allows. Once a
consumer has forced a reduction, later ones read the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import ClassVar, Protocol, assert_never

from meshdsl.ir.program import Carry, Collected, OpKind, Stacked, uses
from meshdsl.ir.rewrite import needed
from meshdsl.ir.types import DTYPES, TensorType
from meshdsl.named import ir as named
from meshdsl.named.cse import Merging
from meshdsl.named.expand import expand
from meshdsl.named.ir import Value
from meshdsl.placed import why
from meshdsl.placed.contraction import pairwise
from meshdsl.placed.ir import (
    Apply,
    Node,
    Parameter,
    PlacedLoop,
    PlacedProgram,
    PlacedTensor,
    Reshard,
    bytes_of,
)
from meshdsl.placed.layout import SplitCause
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import Price, route
from meshdsl.placed.sharding_rules import added_alone, call_of, needed_whole
from meshdsl.placed.stage_walk import CarriedInParts, StageWalk
from meshdsl.placed.strategies import (
    Choice,
    Chooser,
    Other,
    cheapest,
    choosers,
    never_partial,
)
from meshdsl.records import dataclass


class Decider(Protocol):
    """The decisions that a request leaves open: operator by operator, or for the whole program.

    `foresees`: whether every reader was known when the placement of a value was decided. Then each
    reads the version decided for it; else later readers share what was reduced for an earlier one.
    """

    foresees: ClassVar[bool]

    @property
    def policy(self) -> str:
        """One of `place.POLICIES`."""

    @property
    def price(self) -> Price:
        """The price of reshards, to be minimised."""

    def choice(self, op: named.NamedOp, chooser: Chooser) -> Choice | None:
        """The placements of an operator; None where its pins allow none."""

    def carries(self, loop: named.NamedLoop) -> Mapping[Value, Placement] | None:
        """Placements of carries and collected values, where not as requested; None: by trial."""

    def versions(self, value: Value) -> tuple[Placement, ...]:
        """The versions of a value that may be sent for; others are made of them locally."""


class WalkObserver(Protocol):
    """Follows a walk, and may end it by raising."""

    def passes(self, node: Node, depth: int, times: int) -> None:
        """A node that will be in the program, at the end of a block; a loop after its body."""

    def replay(self, nodes: Iterable[Node], depth: int = 0, times: int = 1) -> None:
        """Nodes of a block, with the bodies of loops."""

    def ends(self, body: tuple[Node, ...]) -> None:
        """The walk is over: all that is in the program has been seen."""


@dataclass(slots=True)
class _State:
    """The state a trial restores: versions per value, node lists per loop depth, known causes.

    `windows` are versions that only some operators may read. `merging` has the operators of every
    block, that of the innermost loop last.
    """

    versions: dict[Value, list[PlacedTensor]] = field(default_factory=dict)
    depth: dict[Value, int] = field(default_factory=dict)
    blocks: list[list[Node]] = field(default_factory=lambda: [[]])
    windows: dict[Value, list[PlacedTensor]] = field(default_factory=dict)
    partial_why: dict[Value, tuple[why.PartialCause, ...]] = field(default_factory=dict)
    settled: dict[Value, PlacedTensor] = field(default_factory=dict)
    merging: list[Merging] = field(default_factory=list)

    def copy(self) -> _State:
        return _State(
            {v: list(ts) for v, ts in self.versions.items()},
            dict(self.depth),
            [list(b) for b in self.blocks],
            {v: list(ts) for v, ts in self.windows.items()},
            dict(self.partial_why),
            dict(self.settled),
            [block.copy() for block in self.merging],
        )


class Placer:
    """One walk over the program of a request, extending it by rules for dims made up on the way.

    With `merges`, operators that are rewritten are merged with equal ones before them. `watch`
    follows what will be in the program for sure: no more where an operator of the program itself is
    merged, for what that has read may be unused then, though it has been placed.
    """

    def __init__(
        self,
        request: Request,
        decider: Decider,
        watch: WalkObserver | None = None,
        merges: bool = False,
    ) -> None:
        self.watch = watch
        self.trips, self.trials = [1], 0
        # Whether something was left out on many axes; a loop that is placed again says it again.
        self.bounded = False
        self.stages = None if request.pipe is None else StageWalk(request, request.pipe)
        self.source, self.request, self.decider = request.program, request, decider
        self.mesh: Mesh = request.mesh
        self.price = decider.price
        self.at_once = decider.policy == "immediate"
        policy = "deferred" if self.at_once else decider.policy
        self.choosers = choosers(self.mesh, policy, decider.price)
        self.returned = request.returned
        self.added = added_alone(request.program) if decider.policy == "deferred" else frozenset()
        self.state = _State()
        if merges:
            self.state.merging.append(Merging.of(request.program, self._alike))
        self.causes: dict[Value, dict[str, SplitCause]] = {}

    def _alike(self, one: named.NamedOp, other: named.NamedOp) -> bool:
        return self.request.alike(one, other)

    @property
    def merged(self) -> int:
        """How many operators were merged."""
        return sum(block.merged for block in self.state.merging)

    def program(self) -> PlacedProgram:
        """The placed program."""
        inputs = tuple(self._entering(v) for v in self.source.inputs)
        params = tuple(Parameter(p, self._entering(p.value)) for p in self.source.params)
        states = tuple(self._entering(s.value) for s in self.source.states)
        stored = {t.value: t for t in (*(p.tensor for p in params), *states)}
        for node in self.source.body:
            self._node(node)
        outputs = tuple((o.name, self._output(o)) for o in self.source.outputs)
        updates = tuple(self._update(u, stored[u.old]) for u in self.source.updates)
        body = tuple(self.state.blocks[0])
        if self.watch is not None:
            self.watch.ends(body)
        if self.stages is not None:
            self.request = replace(self.request, whole=frozenset(self.stages.whole))
        name, policy = self.request.layout.name, self.decider.policy
        tensors = tuple(t for v, t in self.state.settled.items() if not v.is_loaded)
        sections = (inputs, params, body, outputs, tensors, self.causes, states, updates)
        pipe, bounded = self.request.pipe, self.bounded
        return PlacedProgram(
            self.source, self.mesh, name, policy, *sections, pipe=pipe, bounded=bounded
        )

    # --- versions ----------------------------------------------------------------------------

    def _asked(self, value: Value) -> Placement:
        """The placement requested of a value, with the causes noted."""
        asked = self.request.asked(value)
        self.causes[value] = asked.causes
        return asked.placement

    def _entering(self, value: Value) -> PlacedTensor:
        """The blocks in which an input is given to the devices, or a parameter or state is stored.

        Where it is to be partial, all devices but one drop theirs.
        """
        asked = self._asked(value)
        stored = value in self.request.parts
        entered = self._enter(value, asked if stored else asked.reduced, 0)
        if stored:
            self.state.partial_why[value] = why.KEPT
        elif asked.partial:
            self.state.partial_why[value] = why.ANNOTATED
            # Whatever reads it begins with this: no other version is made of what was stored.
            partial = self._reshard(value, asked, why.Ask("rule", "", value.span))
            self.state.versions[value] = [partial]
        return entered

    def _enter(self, value: Value, placed: Placement, depth: int) -> PlacedTensor:
        tensor = PlacedTensor(value, placed)
        self.state.versions[value] = [tensor]
        self.state.depth[value] = depth
        self.state.settled[value] = tensor
        return tensor

    def _latest(self, value: Value) -> PlacedTensor:
        return self.state.versions[value][-1]

    def _placements(self, value: Value) -> tuple[Placement, ...]:
        return tuple([t.placement for t in self.state.versions[value]])

    def _available(self, value: Value) -> tuple[Placement, ...]:
        """The placements of a value's versions, windows included."""
        windows = self.state.windows.get(value, ())
        return tuple([t.placement for t in (*self.state.versions[value], *windows)])

    def _emit(self, node: Node, depth: int = -1) -> None:
        self.state.blocks[depth].append(node)
        if self.watch is not None and not self.trials:
            at = depth % len(self.state.blocks)
            self.watch.passes(node, at, self.trips[at])

    def _version(self, value: Value, need: Placement, ask: why.Ask) -> PlacedTensor:
        """The version for a reader; a decided one from which it is made locally is made first."""
        if (existing := self._there(value, need)) is not None:
            return existing
        decided = self.decider.versions(value)
        if decided and need not in decided:
            here = self._available(value)
            missing = [p for p in decided if p not in here and self._is_free(value, p, need)]
            # Of a wider window nothing more is sent; of blocks a halo.
            if missing:
                self._reshard(value, max(missing, key=lambda p: len(p.windows)), ask)
        return self._reshard(value, need, ask)

    def _there(self, value: Value, need: Placement) -> PlacedTensor | None:
        """The version placed as `need`, if it has been made."""
        versions = self.state.windows.get(value, ()) if need.windows else self.state.versions[value]
        for tensor in versions:
            if tensor.placement == need:
                return tensor
        return None

    def _is_free(self, value: Value, source: Placement, need: Placement) -> bool:
        if need.windows and source == need.plain:
            return True
        way = route(value.type, source, need, self.mesh, self.price)
        return way is not None and not way.wire_bytes

    def _reshard(self, value: Value, need: Placement, ask: why.Ask) -> PlacedTensor:
        """The version of `value` placed as `need`, made by the cheapest reshard if there is none.

        It is made where the value is defined: one from outside a loop is resharded before the loop.
        """
        if (existing := self._there(value, need)) is not None:
            return existing
        if need.windows:
            return self._window(value, need, ask)
        versions = self.state.versions[value]
        best = cheapest(value.type, self._placements(value), need, self.mesh, self.price)
        assert best is not None, f"no route to {need}"
        source = next(
            t
            for t in versions
            if route(value.type, t.placement, need, self.mesh, self.price) == best
        )
        if self.stages is not None:
            self.stages.check_reduced(value, source.placement, need)
        self.bounded = self.bounded or best.is_cut
        target = PlacedTensor(value, need)
        reasons = self.state.partial_why.get(value, ())
        facts = why.TensorCauses(self.causes.get(value, {}), reasons)
        words = functools.cache(functools.partial(why.explain, value, best, ask, facts))
        node = Reshard(source, target, best, ask.span, words, ask.phase)
        self._emit(self._in_its_dtype(node), self.state.depth[value])
        if best.reduces and not self.decider.foresees:
            versions[:] = [t for t in versions if not t.placement.partial]
            self.state.windows.pop(value, None)
            self.state.partial_why.pop(value, None)
        versions.append(target)
        return target

    def _in_its_dtype(self, node: Reshard) -> Reshard:
        """The reshard in the dtype that a layout sets for the reduction of gradients."""
        setting = self.request.reduced_in(node.source.value)
        if setting is None or not node.route.reduces:
            return node
        dtype, source_dtype = DTYPES[setting.value], node.source.type.dtype
        is_wider = source_dtype.bytes > dtype.bytes == 4  # f32 is for sums of narrower numbers
        if node.source.placement.op != "sum" or dtype == source_dtype or is_wider:
            return node
        words = functools.cache(functools.partial(why.in_dtype, node.words, setting))
        way = node.route.of_type(replace(node.source.type, dtype=dtype), self.mesh)
        return replace(node, route=way, dtype=dtype, words=words)

    def _window(self, value: Value, need: Placement, ask: why.Ask) -> PlacedTensor:
        """The version of a value with windows, cut from a wider one or made of blocks."""
        windowed = self.state.windows.setdefault(value, [])
        versions = self._available(value)
        best = cheapest(value.type, versions, need, self.mesh, self.price)
        assert best is not None, f"no route to {need}"
        first = next(i for i, step in enumerate(best.steps) if step.after.windows)
        source = self._reshard(value, best.steps[first].before, ask)
        way = route(value.type, source.placement, need, self.mesh, self.price)
        assert way is not None
        target = PlacedTensor(value, need)
        facts = why.TensorCauses(self.causes.get(value, {}), ())
        words = functools.cache(functools.partial(why.explain, value, way, ask, facts))
        self._emit(
            Reshard(source, target, way, ask.span, words, ask.phase), self.state.depth[value]
        )
        windowed.append(target)
        return target

    # --- nodes -------------------------------------------------------------------------------

    def _node(self, node: named.Node) -> None:
        """Place a node: a loop, or an operator that is not equal to one before it."""
        merging = self.state.merging[-1] if self.state.merging else None
        if isinstance(node, named.NamedLoop):
            self._repeat(merging.now(node) if merging else node)
            return
        op: named.NamedOp | None = node
        if merging:
            before = merging.merged
            op = merging.op(node)
            if merging.merged > before:
                self.watch = None
        if op is None:
            return
        match op.kind:
            case OpKind.LOAD:
                self._load(op)
            case OpKind.STAGE_OUTPUT:
                self._leaving(op)
            case OpKind.WORKER_PARTS:
                self._parts(op)
            case None:
                for each in self._rewritten(op):
                    self._apply(each)
            case _:
                assert_never(op.kind)

    def _rewritten(self, op: named.NamedOp) -> Iterator[named.NamedOp]:
        """What an operator is rewritten in, itself for most; each is placed before the next."""
        parts = self._rewrite(op)
        if parts[0] is op:
            yield op
            return
        if self.stages is not None:
            self.stages.note_rewritten(op, parts)
        for part in self._merged(parts, op):
            yield from self._rewritten(part)

    def _load(self, op: named.NamedOp) -> None:
        """Reshard a stored value to the placement of its use; the stored version stays apart."""
        stored, want = self._latest(op.ins[0]), self._asked(op.out)
        loaded = self._enter(op.out, stored.placement, len(self.state.blocks) - 1)
        self._emit(Apply.of(op, (stored,), (loaded,)))
        used, self.causes[op.out] = self.causes[op.out], self.causes[op.ins[0]]
        who = "the computation uses it as the other rules say"
        ask = why.Ask("storage", who, op.span, phase=op.phase)
        self._settle(op.out, want, ask)
        self.causes[op.out] = used

    def _leaving(self, op: named.NamedOp) -> None:
        """Each stage has a part of what leaves the loop over micro-batches."""
        assert self.stages is not None, "only stages are left"
        source = self._latest(op.ins[0])
        if source.placement.op not in (None, "sum"):  # other stages have zeros
            ask = why.Ask("storage", "it leaves its stage as a sum", op.span, phase=op.phase)
            self._settle(op.ins[0], source.placement.reduced, ask)
            source = self._latest(op.ins[0])
        placed = self.stages.leaving(source.placement)
        self.causes[op.out] = self.causes.get(op.ins[0], {})
        self.state.partial_why[op.out] = self.state.partial_why.get(op.ins[0], why.STAGED)
        result = self._enter(op.out, placed, len(self.state.blocks) - 1)
        self._emit(Apply.of(op, (source,), (result,)))
        self._settle_stack(op.out, op)

    def _parts(self, op: named.NamedOp) -> None:
        """The parts of a sum as blocks, each of which stays where it is."""
        want, parts_dim = self._asked(op.out), op.attr("dim").name
        around = {dim: axes for dim, axes in want.splits if dim != parts_dim}
        need = placement(self.mesh, around, want.axes_of(parts_dim), "sum")
        ask = why.Ask("operand", why.operator(op), op.span, phase=op.phase)
        source = self._version(op.ins[0], need, ask)
        blocks = self._enter(op.out, want, len(self.state.blocks) - 1)
        self._emit(Apply.of(op, (source,), (blocks,)))

    def _rewrite(self, op: named.NamedOp) -> tuple[named.NamedOp, ...]:
        """The operator; an n-ary einsum in pairs; a composite whose own dim is split, expanded.

        The program of a plan has been rewritten before.
        """
        if self.decider.foresees:
            return (op,)
        if op.name == "einsum" and len(op.ins) > 2:
            placed = tuple(self._latest(v).placement for v in op.ins)
            return pairwise(op, placed, self.mesh)
        split_dims = self._split_own_dims(op)
        if not split_dims:
            return (op,)
        sizes = {d: tuple((a, self.mesh.size(a)) for a in axes) for d, axes in split_dims.items()}
        expanded = expand(op, sizes)
        if expanded is None:
            return (op,)
        for dim, axes in expanded.rules:
            self.request = self.request.also(dim, axes, op.span)
        return expanded.ops

    def _merged(
        self, parts: tuple[named.NamedOp, ...], op: named.NamedOp
    ) -> tuple[named.NamedOp, ...]:
        """The operators that one is rewritten in, less those that equal others before them.

        And less those that nothing reads: of what an operator yields not all may be read.
        """
        if not self.state.merging:
            return parts
        merging = self.state.merging[-1]
        merging.rewrite()
        ends = self.read.intersection(op.outs) or {*op.outs}
        unequal = [p for part in needed(parts, {*ends}) if (p := merging.op(part)) is not None]
        left = needed(unequal, {*ends})
        for part in unequal:
            if part not in left:
                merging.forget(part)
        merging.drop([v for v in op.outs if v not in ends], next(v for v in op.outs if v in ends))
        self.read.update(v for part in left for v in part.ins)
        return left

    @functools.cached_property
    def read(self) -> set[Value]:
        """The values that the program reads, or keeps."""
        program = self.source
        results = {o.value for o in program.outputs} | {u.new for u in program.updates}
        return results.union(uses(program.body))

    def _split_own_dims(self, op: named.NamedOp) -> dict[str, tuple[str, ...]]:
        """Dims that the operator needs whole and that an operand has split, with their axes."""
        axes_of: dict[str, tuple[str, ...]] = {}
        for value, dims in needed_whole(op):
            splits = self._latest(value).placement.splits
            axes_of.update((dim, axes) for dim, axes in splits if dim in dims)
        return axes_of

    def _apply(self, op: named.NamedOp) -> None:
        chooser = self._chooser(op)
        best = self.decider.choice(op, chooser) or self.request.refuse(op)
        instead = functools.partial(chooser.next_best, best)
        if not self.decider.foresees:  # what a plan was searched among, it says itself
            self.bounded = self.bounded or chooser.is_bounded
        ins = tuple(
            [
                self._there(v, need) or self._version(v, need, self._ask_operand(op, instead))
                for v, need in zip(op.ins, best.needs, strict=True)
            ]
        )
        self._note_partial(op, best)
        depth = len(self.state.blocks) - 1
        outs = tuple([self._enter(v, p, depth) for v, p in zip(op.outs, best.yields, strict=True)])
        self._emit(Apply.of(op, ins, outs))
        for value, yielded, target in zip(op.outs, best.yields, best.targets, strict=True):
            target = target if self.stages is None else self.stages.off_stages(target, op)
            if value in self.added and self._is_added_first(value, yielded, target):
                continue
            if yielded != target and value in self.read:
                self._settle(value, target, self._ask_result(value, op, instead))

    def _is_added_first(self, value: Value, yielded: Placement, target: Placement) -> bool:
        """Whether a result is partial where rules split it, and may be reduced with another."""
        on_stages = self.stages is not None and self.stages.pipe.axis in yielded.partial
        return not (on_stages or self.request.is_settled(value)) and yielded.is_reduced_to(target)

    def _chooser(self, op: named.NamedOp) -> Chooser:
        """The chooser of `op`, with the versions of its operands and the demands on its results."""
        wants, pins = self.request.wants(op), self.request.pins(op)
        for value in op.outs:
            self.causes[value] = self.request.asked(value).causes
        versions = tuple([self._available(v) for v in op.ins])
        # Outputs force: a returned value is reduced at its definition, and all readers share that.
        forced = self.at_once or not self.returned.isdisjoint(op.outs)
        stages, call = None if self.stages is None else self.stages.of(op), call_of(op)
        if forced and stages is None and never_partial(call, versions, wants, pins):
            forced = False  # nothing is reduced: the choice is that of others
        return self.choosers(
            call, versions, wants, pins, forced, stages, self.request.added_first(op)
        )

    @property
    def _planned(self) -> str:
        """The kind of what a plan asks for: by what it minimises."""
        return "plan" if self.price.clock is None else "timed"

    def _ask_operand(self, op: named.NamedOp, instead: Callable[[], Other | None]) -> why.Ask:
        return why.Ask("operand", why.operator(op), op.span, instead, op.phase)

    def _ask_result(
        self, value: Value, op: named.NamedOp, instead: Callable[[], Other | None]
    ) -> why.Ask:
        if value in self.returned:
            who = f"`{value.label}` is an output"
            return why.Ask("output", who, op.span, instead, op.phase)
        kind = {"immediate": "policy", "optimal": self._planned}.get(self.decider.policy, "rule")
        return why.Ask(kind, "", op.span, instead, op.phase)

    def _settle(self, value: Value, target: Placement, ask: why.Ask) -> None:
        """Reshard a result to where it settles; its first version is dropped."""
        self._reshard(value, target, ask)
        self._keep_only(value, target)

    def _keep_only(self, value: Value, target: Placement) -> None:
        kept = [t for t in self.state.versions[value] if t.placement == target]
        self.state.versions[value] = kept
        self.state.settled[value] = kept[0]

    def _note_partial(self, op: named.NamedOp, choice: Choice) -> None:
        """Note why a result is partial, for the reshard that reduces it."""
        if not any([p.partial for p in choice.yields]):
            return
        pairs = zip(op.ins, choice.needs, strict=True)
        inherited = [self.state.partial_why.get(v, ()) for v, p in pairs if p.partial]
        causes = {d: c for v in op.ins for d, c in self.causes.get(v, {}).items()}
        reasons = (*(r for rs in inherited for r in rs), *why.summed(op, choice, causes))
        for value in op.outs:
            self.state.partial_why[value] = tuple(dict.fromkeys(reasons))

    # --- loops -------------------------------------------------------------------------------

    def _repeat(self, node: named.NamedLoop) -> None:
        """The loop with its carries as decided; by trial, partial where that sends fewer bytes."""
        if self.stages is None:
            self._repeat_with(node, {})
            return
        around, on_stages = (self.trips, self.trials), self.stages.depth
        partial_carries: dict[Value, Placement] = {}
        while True:
            before = self.state.copy()
            try:
                return self._repeat_with(node, partial_carries)
            except CarriedInParts as parts:
                self.state, (self.trips, self.trials) = before, around
                self.stages.depth = on_stages
                partial_carries |= parts.kept

    def _repeat_with(self, node: named.NamedLoop, kept: Mapping[Value, Placement]) -> None:
        """The loop with some carries as they have to be kept, others as decided or by trial."""
        decided = self.decider.carries(node)
        if decided is not None:
            self._loop(node, {**decided, **kept})
            return
        before = self.state.copy()
        sizes = [len(block) for block in before.blocks]
        self.trials += 1
        self._tried(node, before, kept)
        self.trials -= 1
        if self.watch is None or self.trials:
            return
        for depth, size in enumerate(sizes):
            self.watch.replay(self.state.blocks[depth][size:], depth, self.trips[depth])

    def _tried(
        self, node: named.NamedLoop, before: _State, kept: Mapping[Value, Placement]
    ) -> None:
        plain, natural = self._loop(node, kept)
        wait = {v: p for v, p in natural.items() if p.partial and p != kept.get(v)}
        if not wait:
            return
        first, self.state = self.state, before
        reduced = sum(self._reducing(v.type, p) for v, p in wait.items())
        tried = {**kept, **wait}
        partial = reduced if plain <= reduced else self._loop(node, tried, plain - reduced)[0]
        if plain <= partial:
            self.state = first

    def _loop(
        self, node: named.NamedLoop, decided: Mapping[Value, Placement], most: float = math.inf
    ) -> tuple[float, dict[Value, Placement]]:
        """One loop, carries as `decided`, others as requested; its bytes, and result placements.

        It is not placed to its end where its iterations send `most` bytes before: then it is dear.
        """
        entry = len(self.state.blocks[-1])
        wants = {c.inside: decided.get(c.inside, self._carried(c)) for c in node.carries}
        inits = [
            self._carry(c.init, f"`{c.inside.label}` enters", wants[c.inside], node)
            for c in node.carries
        ]
        self.state.blocks.append([])
        if merging := self.state.merging:
            merging.append(merging[-1].inside(node))
        self.trips = [*self.trips, self.trips[-1] * node.dim.size]
        if self.stages is not None:
            self.stages.enter(node, wants)
        depth = len(self.state.blocks) - 1
        stacked = tuple(self._stack(s, node, depth) for s in node.stacked)
        insides = [self._enter(c.inside, wants[c.inside], depth) for c in node.carries]
        for carry, want in wants.items():
            if want.partial:
                self.state.partial_why[carry] = why.carried(carry)
        sent, counted = 0, 0
        for inner in node.body:
            self._node(inner)
            if most < math.inf:
                block = self.state.blocks[-1]
                sent += bytes_of(block[counted:]) * node.dim.size
                counted = len(block)
                if sent >= most:
                    self._leave_iterations(node)
                    return math.inf, {}
        natural = {c.inside: self._placements(c.next)[0] for c in node.carries}
        if self.stages is not None:
            self.stages.check_carried(node, natural, wants)
        nexts = [
            self._carry(c.next, f"`{c.next.label}` goes round", wants[c.inside], node)
            for c in node.carries
        ]
        parts = [self._kept(c.inside, decided.get(c.outer), node) for c in node.collected]
        body = self.state.blocks.pop()
        self._leave_iterations(node)
        self._leave_block()
        results = [self._leave(c.result, c.inside, c.next, wants[c.inside]) for c in node.carries]
        carries = tuple(Carry(*v) for v in zip(inits, insides, nexts, results, strict=True))
        collected = tuple(
            Collected(part, self._leave(c.outer, c.inside, c.inside, self._all_of(part, node)))
            for part, c in zip(parts, node.collected, strict=True)
        )
        about = (node.span, collected, node.reverse, node.phase, node.block, node.origin)
        self._emit(PlacedLoop(node.dim, carries, stacked, tuple(body), *about))
        for item in node.collected:
            self._settle_collected(item.outer, node)
        return self._bytes(entry, results), natural

    def _leave_iterations(self, node: named.NamedLoop) -> None:
        self.trips = self.trips[:-1]
        if self.stages is not None:
            self.stages.leave(node)

    def _leave_block(self) -> None:
        """Go on in the block around a loop."""
        if merging := self.state.merging:
            inner = merging.pop()
            merging[-1].leave(inner)

    def _carry(
        self, value: Value, who: str, want: Placement, node: named.NamedLoop
    ) -> PlacedTensor:
        """The version of a value at the start or the end of an iteration."""
        ask = why.Ask("carry", f"{who} `repeat {node.dim}` so", node.span, phase=node.phase)
        return self._version(value, want, ask)

    def _kept(self, value: Value, decided: Placement | None, node: named.NamedLoop) -> PlacedTensor:
        """The version of a value that a loop collects."""
        if decided is None:
            return self.state.versions[value][0]
        who = f"all of `{value.label}` are kept so"
        ask = why.Ask(self._planned, who, node.span, phase=node.phase)
        return self._version(value, decided, ask)

    def _leave(self, value: Value, inside: Value, last: Value, placed: Placement) -> PlacedTensor:
        """A value that a loop leaves, placed as each part of it: for the same reasons.

        Each iteration begins with `inside` and ends with `last`.
        """
        self.causes[value] = self.causes.get(inside, {})
        if placed.partial:
            reasons = self.state.partial_why.get(last, why.carried(inside))
            self.state.partial_why[value] = reasons
        return self._enter(value, placed, len(self.state.blocks) - 1)

    def _settle_collected(self, value: Value, node: named.NamedLoop) -> None:
        """Reshard a collected value to the placement requested of the whole.

        Readers that are foreseen do that, unless the loop's dim is to be split otherwise.
        """
        split = self.request.demanded(value).axes_of(node.dim.name)
        here = self._latest(value).placement.axes_of(node.dim.name)
        if not self.decider.foresees or split not in ((), here):
            self._settle_stack(value, node)
        elif split:
            self._asked(value)  # notes what splits it

    def _settle_stack(self, value: Value, node: named.NamedOp | named.NamedLoop) -> None:
        """Reshard a value of all iterations to the placement requested of the whole."""
        want = self._asked(value)
        here = self._latest(value).placement
        if all(here.axes_of(d) == axes for d, axes in want.splits):
            return
        self._version(value, want, why.Ask("rule", "", node.span, phase=node.phase))
        self._keep_only(value, want)

    def _carried(self, carry: Carry[Value]) -> Placement:
        """The placement requested of a carried value, or that of its initial value."""
        value = self.request.carried(carry)
        return self._latest(carry.init).placement.reduced if value is None else self._asked(value)

    def _stack(
        self, item: Stacked[Value], node: named.NamedLoop, depth: int
    ) -> Stacked[PlacedTensor]:
        """A stack that is whole along the dim of its loop, and a slice of it."""
        loop = node.dim.name
        if self.stages is not None and self.stages.pipe.cuts(node):
            return self._staged(item, self.stages, depth)
        # An operator may have needed a version of it that is split along the loop.
        settled, *later = self.state.versions[item.outer]
        versions = [settled, *reversed(later)]
        unsplit = [t for t in versions if not t.placement.axes_of(loop)]
        ask = why.Ask("operand", f"`repeat {loop}`", node.span, phase=node.phase)
        need = settled.placement.without_dim(loop)
        outer = unsplit[0] if unsplit else self._version(item.outer, need, ask)
        inside = self._enter(item.inside, outer.placement.without_dim(loop), depth)
        self.causes[item.inside] = self.causes.get(item.outer, {})
        return Stacked(outer, inside)

    def _staged(self, item: Stacked[Value], stages: StageWalk, depth: int) -> Stacked[PlacedTensor]:
        """A stack of which each stage has a block, and a slice of that.

        Where rules for storage place it otherwise, it is moved before the first micro-batch.
        """
        need = stages.stacked(self.state.settled[item.outer].placement)
        outer = self._version(item.outer, need, why.Ask("rule", "", stages.pipe.span))
        placed = outer.placement.without_dim(stages.pipe.dim)
        inside = self._enter(item.inside, placed, depth)
        self.causes[item.inside] = self.causes.get(item.outer, {})
        return Stacked(outer, inside)

    def _all_of(self, part: PlacedTensor, node: named.NamedLoop) -> Placement:
        """The placement of all iterations of a value: with a pipeline, a block on each stage."""
        stages = self.stages
        if stages is None or not stages.pipe.cuts(node):
            return part.placement
        return stages.collected(part.placement)

    def _bytes(self, entry: int, results: list[PlacedTensor]) -> int:
        """Bytes sent since node `entry`, and by reducing what the loop leaves partial."""
        left = sum(self._reducing(tensor.type, tensor.placement) for tensor in results)
        return bytes_of(self.state.blocks[-1][entry:]) + left

    def _reducing(self, type_: TensorType, here: Placement) -> int:
        """The bytes of reducing what is partial."""
        reduced = route(type_, here, here.reduced, self.mesh)
        assert reduced is not None
        return reduced.wire_bytes

    # --- outputs -----------------------------------------------------------------------------

    def _output(self, output: named.Output) -> PlacedTensor:
        value = output.value
        want = self.request.output(value)
        if want is None:
            want = self.state.settled[value].placement.reduced
        else:
            self._asked(value)
        ask = why.Ask("output", f"`{output.name}` is an output", output.span)
        return self._version(value, want, ask)

    def _update(self, update: named.Update, old: PlacedTensor) -> tuple[PlacedTensor, PlacedTensor]:
        """A stored value and its new value, resharded to the stored placement."""
        who = f"the new `{update.old.label}` is stored so"
        ask = why.Ask("update", who, update.new.span, phase="update")
        return old, self._version(update.new, old.placement, ask)
