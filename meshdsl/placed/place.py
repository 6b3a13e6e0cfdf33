"""Placing a program: the policy, the decider it selects, and the best of several results.

A layout or an `sbp` block becomes a `Request` (`request.py`); a `Walk` or a `PlacementPlan`
decides what it leaves open; `from_named.Placer` carries out the decisions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import ClassVar

from meshdsl.diagnostics import DiagnosticError, Source, Span
from meshdsl.ir import program as ir
from meshdsl.named import ir as named
from meshdsl.named.cse import cse
from meshdsl.named.declarations import unknown
from meshdsl.named.ir import Value, loops_of
from meshdsl.named.origins import with_kept_origins
from meshdsl.named.simplify import drop_unused
from meshdsl.named.workers import is_per_worker
from meshdsl.ops.opdef import lookup
from meshdsl.placed.cache import CachedProblem
from meshdsl.placed.from_named import Decider, Placer, WalkObserver
from meshdsl.placed.gather_again import with_gathers_again
from meshdsl.placed.ir import (
    EVERY,
    Apply,
    Node,
    PlacedProgram,
    PlanProvenance,
    Reshard,
    reduced_in,
    walk,
)
from meshdsl.placed.layout import Layout
from meshdsl.placed.offload import kept_away, with_tiers
from meshdsl.placed.optimal import PlacementPlan, solve
from meshdsl.placed.pipelined import Piped, in_each_batch, with_leaving
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.placed.request import BlockRequest, Request, ShardingSpec
from meshdsl.placed.reshard import (
    MESSAGE_BYTES,
    Price,
    Route,
    has_many_axes,
    route,
    with_sent,
)
from meshdsl.placed.rings import with_rings
from meshdsl.placed.sbp_block import Annotations
from meshdsl.placed.stage_order import in_stage_order
from meshdsl.placed.stage_plans import StagePlan, without_stages
from meshdsl.placed.stage_rules import pipeline_of, with_stages
from meshdsl.placed.stage_sums import terms_apart
from meshdsl.placed.stage_walk import NeededWhole
from meshdsl.placed.storage import with_loads
from meshdsl.placed.strategies import Choice, Chooser
from meshdsl.placed.verify import verify
from meshdsl.placed.whole_batch import after_batch
from meshdsl.placed.worker_parts import check_parts, with_workers
from meshdsl.records import dataclass
from meshdsl.syntax import ast

WALKS = ("immediate", "mesh-tf", "deferred")
"""Policies carried out by one walk in program order."""

ONE_ORDER = "products of many operands in one order"
"""The space searched where an einsum is split into several."""

ONE_STAGE = "as if there were no stages"
"""The space searched in a pipeline: what passes do over its stages is not planned."""

SOME_ROUTES = "on so many axes not every combination and route"
"""What was not looked at on a mesh of many axes (`reshard.has_many_axes`)."""

POLICIES = (*WALKS, "optimal")
"""Policies for when partial values are reduced."""

WITH_MESSAGES = Price(MESSAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Walk:
    """Decides operator by operator, in program order; `policy` is one of `WALKS`."""

    policy: str
    foresees: ClassVar[bool] = False

    @property
    def price(self) -> Price:
        """Bytes alone; Mesh-TensorFlow has no reduce_scatter."""
        return Price(scatter=self.policy != "mesh-tf")

    def choice(self, op: named.NamedOp, chooser: Chooser) -> Choice | None:
        """The cheapest candidate."""
        return next(iter(chooser.candidates()), None)

    def carries(self, loop: named.NamedLoop) -> Mapping[Value, Placement] | None:
        """As requested where partial values are reduced at once."""
        return {} if self.policy == "immediate" else None

    def versions(self, value: Value) -> tuple[Placement, ...]:
        """None before a reader needs one."""
        return ()


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """The search for the plan of `optimal`: its `price`, and whether the plan is cached."""

    price: Price = WITH_MESSAGES
    cache: bool = True

    def found(self, searched: str, least: bool = False) -> PlanProvenance:
        """What is known of a plan by this search."""
        return PlanProvenance(self.price.message, searched, least, self.price.clock is not None)

    def plans(self, request: Request) -> Iterator[tuple[PlacementPlan, bool]]:
        """The plan of least cost, and whether it is of the cache: then behind it, one that is not.

        None where the space is too large.
        """
        problem = CachedProblem(request, self.price) if self.cache else None
        if problem is not None and problem.has_no_plan:
            return
        cached = problem.load() if problem else None
        if cached is not None:
            yield cached, True
        plan = solve(request, self.price)
        if problem is not None:
            problem.store(plan)
        if plan is not None:
            yield plan, False


DEFAULT = PlanSearch()


def check_policy(policy: str, span: Span | None = None) -> None:
    """Refuse a reduction policy that does not exist."""
    span = span or Span(Source("--reduce", policy), 0, len(policy))
    if policy not in POLICIES:
        name = ast.Name(policy, span)
        raise DiagnosticError(unknown("MD0108", "reduction policy", name, list(POLICIES)))


def place(
    program: named.NamedProgram,
    spec: ShardingSpec,
    policy: str,
    search: PlanSearch = DEFAULT,
    watch: Callable[[], WalkObserver] | None = None,
) -> PlacedProgram:
    """The placed program under a layout or an `sbp` block; what that leaves open costs least.

    `search` is how `optimal` finds a plan; each pass of a walk has a `watch`. Raises MD03xx for
    what cannot be met, MD0907 for a split loop.
    """
    assert policy in POLICIES
    request = _requested(program, spec)
    if policy == "optimal":
        placed = _least(request, search)
    else:
        placed, _ = _walked(request, policy, watch)
    if is_per_worker(program):
        check_parts(placed)
    if isinstance(spec, Layout):
        placed = with_gathers_again(placed, spec, search.price)
        if spec.settings:
            placed = kept_away(placed, spec)
    if placed.pipe is not None:
        placed = replace(placed, pipe=with_stages(placed.rewritten, placed.pipe))
    # The search counts every tensor in its own dtype.
    if placed.plan is not None and reduced_in(placed):
        placed = replace(placed, plan=replace(placed.plan, least=False))
    return placed


def _requested(program: named.NamedProgram, spec: ShardingSpec) -> Request:
    """The placements that are requested of a program, with its stages and loads."""
    if isinstance(spec, Annotations):
        layout = Layout(spec.name, (), spec.mesh)
        request: Request = BlockRequest(program, layout, annotations=spec)
    else:
        pipe, is_away = None, False
        if spec.settings:
            program = with_tiers(program, spec)
            is_away = any(param.away for param in program.params)
            program, spec = with_rings(program, spec)
        if spec.schedule is not None or spec.cuts or any(loops_of(program)):
            program, spec, pipe = _on_stages(program, spec)
        if is_away or any(rule.selector == ("params",) for rule in spec.rules):
            program = with_loads(program, spec, pipe)
        request = Request(program, spec, pipe=pipe)
    in_parts = {s.value for s in request.program.states if s.parts}
    return with_workers(_with_parts(request, in_parts)) if in_parts else request


def _on_stages(
    program: named.NamedProgram, layout: Layout
) -> tuple[named.NamedProgram, Layout, Piped | None]:
    """The program with what leaves its stages, the layout on their mesh, and the pipeline.

    Without a pipeline, the program as it is.
    """
    layout, pipe = pipeline_of(program, layout)
    if pipe is None:
        return program, layout, None
    program = after_batch(program, pipe)
    program = terms_apart(in_stage_order(program, pipe), pipe)
    return with_leaving(program, pipe), replace(layout, mesh=pipe.on(layout.mesh)), pipe


_SCALED = ("cast", "mul")
"""What is done to the part of a gradient before it is added to the state of its worker."""


def _with_parts(request: Request, states: Set[Value]) -> Request:
    """The request with the placements of `states` kept in parts: those of what is added to them.

    A walk with these states whole tells them; what is added has not been reduced where it is made.
    Where workers add what they have (`named/workers.py`), it is that of which they have `parts`.
    """
    placed, _ = _walked(request, WALKS[-1])
    results = (n for n in ir.every(placed.body) if not isinstance(n, Reshard))
    placements = {t.value: t.placement for node in results for t in reversed(node.makes)}
    parts, owned = {}, dict[Value, Value]()
    for node, _ in walk(placed.body):
        if not isinstance(node, Apply):
            continue
        if node.name == "parts" or (node.name in _SCALED and node.ins[0].value in owned):
            source = node.ins[0].value
            owned[node.outs[0].value] = owned.get(source, source)
        elif node.name == "add":
            pair = [owned.get(t.value, t.value) for t in node.ins]
            for state, other in itertools.permutations(pair):
                if state in states and state not in parts:
                    parts[state] = placements[other]
    return request.with_parts(parts)


def _walked(
    request: Request, policy: str, watch: Callable[[], WalkObserver] | None = None
) -> tuple[PlacedProgram, Request]:
    """The placed program after common subexpression elimination, also of rewritten operators.

    And the request, which has rules for the dims that rewriting made up. Rewritten operators are
    merged on the way where that changes nothing of the request; else the program is walked again.
    """
    # A stage does its part of a loop alone: nothing is known of that.
    first, again = (watch(), watch()) if watch and not request.pipe else (None, None)
    merged = cse(request.program, request.alike)
    placer, placed = _placed(request.on(merged), Walk(policy), first, merges=request.is_of_values)
    rewritten = placed.rewritten
    # Large results that the walk has computed again stay: a watch has counted them.
    merged = cse(rewritten, placer.request.alike, only_light=True)
    if placer.merged:
        merged = with_kept_origins(request.program, drop_unused(merged))
    if merged is rewritten:
        return (replace(placed, named=rewritten) if placer.merged else placed), placer.request
    placer, placed = _placed(placer.request.on(merged), Walk(policy), again)
    return placed, placer.request


def _placed(
    request: Request, decider: Decider, watch: WalkObserver | None = None, merges: bool = False
) -> tuple[Placer, PlacedProgram]:
    """The program placed as is decided.

    Where stages read all of what they make parts of, it is placed again with that made whole.
    """
    while True:
        placer = Placer(request, decider, watch, merges)
        try:
            return placer, placer.program()
        except NeededWhole as needed:
            request = request.with_whole(needed.value)


def _least(request: Request, search: PlanSearch) -> PlacedProgram:
    """The planned program, unless a walk sends nothing, or is better, or there is no plan.

    The plan is made for the last walk's rewritten program, and of the rows that keep the splits of
    rules (`PlanSpace._rows`). A walk may rewrite operators otherwise, or take other rows, and cost
    less than a plan that is proven least: so all are run, each as far as it costs no more.
    """
    price = search.price
    last, walked_request = _walked(request, WALKS[-1])
    if price.clock is None and not cost(last, price)[0]:
        return replace(last, policy="optimal", plan=search.found(EVERY, least=True))
    if is_per_worker(request.program):  # others would reduce what workers compress
        return replace(last, policy="optimal", plan=search.found("no other policy"))
    planned = _planned(request, walked_request, last, search)
    least = min(cost(p, price)[0] for p in (planned, last) if p is not None)
    walks = [walked for policy in WALKS[:-1] for walked in _up_to(least, request, policy, price)]
    best = min((*walks, last), key=lambda walked: cost(walked, price))
    if planned is None or cost(planned, price)[0] > cost(best, price)[0]:
        searched = ", ".join(["the other policies"] + [SOME_ROUTES] * best.bounded)
        return replace(best, policy="optimal", plan=search.found(searched))
    assert planned.plan is not None
    # Of blocks of several sizes nothing is proven: there are rows that the search leaves out.
    proven = planned.plan.least and not _has_uneven(last)
    chosen = best if cost(planned, price) > cost(best, price) else planned
    return replace(chosen, policy="optimal", plan=replace(planned.plan, least=proven))


def _up_to(most: int, request: Request, policy: str, price: Price) -> Iterator[PlacedProgram]:
    """The placed program of a walk; nothing where it costs more than `most`."""
    with contextlib.suppress(OverLimit):
        yield _walked(request, policy, partial(CostLimit, price, request.mesh, most=most))[0]


class OverLimit(Exception):
    """A walk costs more than a limit."""


@dataclass(slots=True)
class SentCost:
    """The cost of what a program sends: bytes are those of the device that sends most in all.

    `alike` is the cost to every device, `apart` what each sends beside, in the order of ranks;
    `total` is the cost of all that was added.
    """

    price: Price
    mesh: Mesh
    alike: int = 0
    apart: tuple[int, ...] = ()
    total: int = 0

    def add(self, node: Reshard, way: Route, times: int) -> None:
        """The route that counts of a reshard, as often as it is taken."""
        self.alike += self.price.of(way, node.sent_type) * times
        if way.unlike and self.price.clock is None:
            self.alike -= way.wire_bytes * times
            self.apart = with_sent(self.apart, way, node.sent_type, self.mesh, times)
        self.total = self.alike + max(self.apart, default=0)


@dataclass(slots=True)
class CostLimit(SentCost):
    """A `WalkObserver` that ends a walk where it costs more than `most`."""

    most: int = 0

    def passes(self, node: Node, depth: int, times: int) -> None:
        """A node, as often as it runs."""
        if isinstance(node, Reshard):
            self.add(node, node.route, times)
            if self.total > self.most:
                raise OverLimit

    def replay(self, nodes: Iterable[Node], depth: int = 0, times: int = 1) -> None:
        """Nodes of a block, with the bodies of loops."""
        for node, repeats in walk(tuple(nodes)):
            self.passes(node, depth, times * repeats)

    def ends(self, body: tuple[Node, ...]) -> None:
        """The program costs no more."""


def _planned(
    request: Request, known: Request, last: PlacedProgram, search: PlanSearch
) -> PlacedProgram | None:
    """The program under a plan for the last walk's rewritten program and contraction order.

    None where there is none, or each stage has one device.
    """
    left = {tensor.value: tensor.placement for _, tensor in last.outputs}
    rewritten, pipe = known.on(last.rewritten, left), request.pipe
    wanted = without_stages(rewritten, rewritten.program, pipe) if pipe else rewritten
    if wanted.mesh.devices == 1:
        return None
    several = any(o.name == "einsum" and len(o.ins) > 2 for o in named.walk(request.program.body))
    left_out = {ONE_ORDER: several, SOME_ROUTES: has_many_axes(request.mesh), ONE_STAGE: bool(pipe)}
    for plan, is_kept in search.plans(wanted):
        on_stages = StagePlan(plan, rewritten.program, pipe, request.mesh) if pipe else plan
        placed = _carried_out(rewritten, on_stages, is_kept)
        if placed is None:
            continue
        searched = ", ".join([plan.searched, *(text for text, is_so in left_out.items() if is_so)])
        least = plan.least and not (left_out[SOME_ROUTES] or left_out[ONE_STAGE])
        return replace(placed, plan=search.found(searched, least))
    return None


def _carried_out(request: Request, plan: Decider, is_kept: bool) -> PlacedProgram | None:
    """The program under a plan; None where one of the cache turns out to be none of it.

    What was read was right for the operators one by one. Nobody but the walk knows whether it is
    right for all of them together: somebody may have written it by hand.
    """
    if not is_kept:
        return _placed(request, plan)[1]
    try:
        placed = _placed(request, plan)[1]
        verify(placed)
    except (AssertionError, LookupError, ValueError, DiagnosticError):
        return None
    return placed


def _has_uneven(program: PlacedProgram) -> bool:
    """Whether something is split into blocks of several sizes."""
    results = (t for node in ir.every(program.body) for t in node.makes)
    held = (*program.inputs, *(p.tensor for p in program.params), *program.states)
    every = itertools.chain(held, results)
    return any(t.placement.splits_unevenly(t.type, program.mesh) for t in every)


def cost(program: PlacedProgram, price: Price) -> tuple[int, int, int]:
    """The cost by which placed programs are compared; then collectives, and local steps."""
    moves = [(n, k, n.route) for n, k in walk(program.body) if isinstance(n, Reshard)]
    if program.pipe is not None:
        moves = _on_each_stage(moves, program, price)
    sent = SentCost(price, program.mesh)
    for node, times, way in moves:
        sent.add(node, way, times)
    computing = 0 if price.clock is None else _computing(program, price)
    collectives = sum(n.route.collectives * k for n, k, _ in moves)
    return sent.total + computing, collectives, sum(n.route.kernels * k for n, k, _ in moves)


Moves = list[tuple[Reshard, int, Route]]
"""Reshards, how often each runs, and the route that counts."""


def _on_each_stage(moves: Moves, program: PlacedProgram, price: Price) -> Moves:
    """The moves of a pipeline: as often as micro-batches send what they make as a whole."""
    each = in_each_batch(program.rewritten, program.pipe) if program.pipe else {}
    counted = ((n, k * each.get(n.source.value, 1)) for n, k, _ in moves)
    return [
        (n, k, n.route if n.source.value in each else _within(n, program, price))
        for n, k in counted
    ]


def _within(node: Reshard, program: PlacedProgram, price: Price) -> Route:
    """The route of a step without a sum over the stages of a tensor, of which mostly one has all.

    Where several have parts (`device/stage_local.py` tells), they are added up under any plan.
    """
    pipe, source, target = program.pipe, node.source.placement, node.target.placement
    if pipe is None or not node.source.type.dims or pipe.axis not in source.partial:
        return node.route
    ends = (p.less(pipe.axis, program.mesh) for p in (source, target))
    shorter = route(node.sent_type, *ends, program.mesh, price)
    return shorter or node.route


def _computing(program: PlacedProgram, price: Price) -> int:
    """The cost of all operators."""
    total = 0
    for node, trips in walk(program.body):
        if isinstance(node, Apply):
            local, flops = node.local(program.mesh), node.flops(program.mesh)
            total += price.operator(lookup(node.name), local, flops) * trips
    return total
