"""Placing a program: the policies, and which walk or plan carries them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshdsl.diagnostics import fail
from meshdsl.ir import program as ir
from meshdsl.named import ir as named
from meshdsl.named.merge import merge
from meshdsl.placed import why
from meshdsl.placed.choose import Choice, Chooser
from meshdsl.placed.demands import BlockDemands, Demands, RuleDemands
from meshdsl.placed.from_named import Placer
from meshdsl.placed.from_sbp import AnnotatedPlacer
from meshdsl.placed.ir import EVERY, Found, Program, Reshard, Tensor, walk
from meshdsl.placed.layout import STORAGE, Layout
from meshdsl.placed.optimal import solve
from meshdsl.placed.plan import Plan, as_rewritten
from meshdsl.placed.reshard import MESSAGE_BYTES, Price, route
from meshdsl.placed.sbp import Placement
from meshdsl.placed.sbp_block import Annotations
from meshdsl.placed.storage import with_loads

WALKS = ("immediate", "mesh-tf", "deferred")
"""Policies that one walk in program order carries out."""

ONE_ORDER = "products of many operands in one order"
"""What is searched of an einsum that comes to several."""

POLICIES = (*WALKS, "optimal")
"""When partial values are reduced."""


WITH_MESSAGES = Price(MESSAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Search:
    """How the plan of `optimal` is found: by what `price`, and whether it is kept for next time."""

    price: Price = WITH_MESSAGES
    cache: bool = True

    def plan(self, program: named.Program, demands: Demands) -> Plan | None:
        """The plan of least cost; None where there is too much to search."""
        if not self.cache:
            return solve(program, demands, self.price)
        from meshdsl.placed.cache import Problem

        problem = Problem(program, demands, self.price)
        known = problem.load()
        if known is not None:
            return known
        found = solve(program, demands, self.price)
        if found is not None:
            problem.store(found)
        return found


DEFAULT = Search()


def place(program: named.Program, layout: Layout, policy: str, search: Search = DEFAULT) -> Program:
    """The placed program. Raises MD03xx for rules that cannot be met, MD0907 for a split loop.

    `search` is how `optimal` finds a plan.
    """
    assert policy in POLICIES
    _refuse_split_loops(program.body, layout)
    program = with_loads(program, layout)
    if policy == "optimal":
        return _place_optimally(program, layout, search)
    return _walk(program, lambda p: Placer(p, layout, policy))[1]


def place_annotated(
    program: named.Program, annotations: Annotations, policy: str, search: Search = DEFAULT
) -> Program:
    """The placed program under an `sbp` block; what it does not name is inferred by least cost."""
    assert policy in POLICIES

    def walked(policy: str) -> tuple[Placer, Program]:
        return _walk(program, lambda p: AnnotatedPlacer(p, annotations, policy))

    if policy != "optimal":
        return walked(policy)[1]
    placer, last = walked(WALKS[-1])
    rewritten = as_rewritten(last)

    def planned() -> Program | None:
        layout = placer.layout
        guided = _GuidedAnnotated(rewritten, annotations, last, layout, search.price)
        about = (guided.annotated, guided.pins, guided.settled)
        guided.plan = search.plan(rewritten, BlockDemands(layout, rewritten, *about))
        return guided.planned() if guided.plan else None

    return _least(program, last, planned, lambda policy: walked(policy)[1], search.price)


def _place_optimally(program: named.Program, layout: Layout, search: Search) -> Program:
    """The plan that costs least; where there is none, the best of the other policies."""

    def walked(policy: str) -> Program:
        return _walk(program, lambda p: Placer(p, layout, policy))[1]

    last = walked(WALKS[-1])
    rewritten = as_rewritten(last)

    def planned() -> Program | None:
        plan = search.plan(rewritten, RuleDemands(layout, rewritten))
        return _Guided(rewritten, layout, plan, search.price).planned() if plan else None

    return _least(program, last, planned, walked, search.price)


def _walk(
    program: named.Program, placer_of: Callable[[named.Program], Placer]
) -> tuple[Placer, Program]:
    """The placed program with equal operators done once, those too that placing it has made."""
    placer = placer_of(program)
    placer = placer_of(merge(program, placer.alike))
    placed = placer.program()
    rewritten = as_rewritten(placed)
    merged = merge(rewritten, placer.alike)
    if merged is rewritten:
        return placer, placed
    again = placer_of(merged)
    again.layout = placer.layout  # it has rules for the dims that rewriting made up
    return again, again.program()


def _least(
    program: named.Program,
    last: Program,
    plan: Callable[[], Program | None],
    walked: Callable[[str], Program],
    price: Price,
) -> Program:
    """The planned program, unless a walk needs nothing sent, or is better, or there is no plan.

    `last` is the walk that the plan is made for, with products of many operands in its order.
    Others are made where nothing is proven.
    """
    if not _cost(last, price)[0]:
        return replace(last, policy="optimal", plan=Found(price.message, EVERY, least=True))
    planned = plan()
    found = planned.plan if planned else None
    if planned is not None and found is not None:
        if any(op.name == "einsum" and len(op.ins) > 2 for op in named.walk(program.body)):
            found = replace(found, searched=f"{found.searched}, {ONE_ORDER}")
            planned = replace(planned, plan=found)
        elif found.proven and _cost(planned, price) <= _cost(last, price):
            return planned
    walks = (*(walked(policy) for policy in WALKS[:-1]), last)
    best = min(walks, key=lambda walked: _cost(walked, price))
    if planned is None or _cost(planned, price) > _cost(best, price):
        same = planned is not None and _cost(planned, price)[0] == _cost(best, price)[0]
        found = planned.plan if planned and same else Found(price.message, "the other policies")
        return replace(best, policy="optimal", plan=found)
    return planned


def _cost(program: Program, price: Price) -> tuple[int, int, int]:
    """What is minimised; then collectives, and steps that stay on the device."""
    moves = [(n.route, k) for n, k in walk(program.body) if isinstance(n, Reshard)]
    collectives = sum(r.collectives * k for r, k in moves)
    local = sum(r.kernels * k for r, k in moves)
    return sum(price.of(r) * k for r, k in moves), collectives, local


class _Guided(Placer):
    """Carries out a plan for a rewritten program."""

    reduces_once = False

    def __init__(
        self, program: named.Program, layout: Layout, plan: Plan | None, price: Price
    ) -> None:
        super().__init__(program, layout, "optimal")
        self.plan, self.price = plan, price

    def _rewritten(self, op: named.Op) -> tuple[named.Op, ...]:
        return (op,)

    def planned(self) -> Program:
        """The placed program, with how its plan was found."""
        assert self.plan is not None
        found = Found(self.price.message, self.plan.searched, self.plan.least)
        return replace(self.program(), plan=found)

    def _choose(self, op: named.Op, chooser: Chooser) -> Choice:
        assert self.plan is not None
        plan = self.plan.decisions[op]
        return Choice(plan.needs, plan.yields, plan.targets, 0, ())

    def _version(self, value: named.Value, need: Placement, ask: why.Ask) -> Tensor:
        """Where a planned version gives what is needed for nothing, that one is made first."""
        assert self.plan is not None
        here = self._placements(value)
        if need not in here and need not in (planned := self.plan.versions.get(value, ())):
            for other in planned:
                if other not in here and self._is_free(value, other, need):
                    super()._version(value, other, ask)
                    break
        return super()._version(value, need, ask)

    def _is_free(self, value: named.Value, source: Placement, need: Placement) -> bool:
        way = route(value.type, source, need, self.mesh, self.price)
        return way is not None and not way.wire_bytes

    def _repeat(self, node: named.Loop) -> None:
        assert self.plan is not None
        self._loop(node, {c.inside: self.plan.carries[c.inside] for c in node.carries})

    def _settle_collected(self, value: named.Value, node: named.Loop) -> None:
        """Readers take what they need; only a rule for the loop's dim is met at once."""
        if self._demanded(value).axes_of(node.dim.name):
            super()._settle_collected(value, node)

    def _kept(self, item: ir.Collected[named.Value], node: named.Loop) -> Tensor:
        assert self.plan is not None
        who = f"all of `{item.inside.label}` are kept so"
        ask = why.Ask("plan", who, node.span, phase=node.phase)
        return self._version(item.inside, self.plan.carries[item.outer], ask)


class _GuidedAnnotated(_Guided, AnnotatedPlacer):
    """Carries out a plan under annotations."""

    def __init__(
        self,
        program: named.Program,
        annotations: Annotations,
        walked: Program,
        layout: Layout,
        price: Price,
    ) -> None:
        AnnotatedPlacer.__init__(self, program, annotations, "optimal")
        self.price = price
        # It has rules for the dims that rewriting made up.
        self.layout = layout
        self.settled = {t.value: t.placement for _, t in walked.outputs}
        self.plan = None

    def _settled(self, value: named.Value) -> Placement:
        return self.settled[value]


def _refuse_split_loops(nodes: tuple[named.Node, ...], layout: Layout) -> None:
    for node in nodes:
        if not isinstance(node, named.Loop):
            continue
        for rule in (r for r in layout.rules if r.selector[:1] not in STORAGE):
            axes = layout.mesh.known(rule.axes)
            if rule.dim == node.dim.name and layout.mesh.size(*axes) > 1:
                message = (
                    f"splitting the `repeat` dim `{rule.dim}` (a pipeline) is not supported yet"
                )
                help = f"store it so with `params: {rule.dim} -> …`, or leave the rule out for now"
                fail("MD0907", message, rule.span, help=help)
        for pin in (p for s in node.stacked for p in s.outer.pins if p.dim == node.dim.name):
            if layout.mesh.size(*layout.mesh.known(pin.axes)) > 1:
                message = f"splitting the `repeat` dim `{pin.dim}` (a pipeline) is not built yet"
                fail("MD0907", message, pin.span, help="leave the `@` out for now")
        _refuse_split_loops(node.body, layout)
