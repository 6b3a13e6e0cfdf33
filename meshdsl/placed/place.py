"""Placing a program: the policies, and which walk or plan carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshdsl.diagnostics import fail
from meshdsl.named import ir as named
from meshdsl.named.merge import merge
from meshdsl.placed import why
from meshdsl.placed.choose import Choice, Want
from meshdsl.placed.from_named import Placer
from meshdsl.placed.from_sbp import AnnotatedPlacer
from meshdsl.placed.ir import Program, Reshard, Tensor, walk
from meshdsl.placed.layout import Layout
from meshdsl.placed.optimal import solve
from meshdsl.placed.optimal_sbp import AnnotatedModel
from meshdsl.placed.plan import Plan, as_rewritten
from meshdsl.placed.sbp import Placement
from meshdsl.placed.sbp_block import Annotations
from meshdsl.placed.storage import with_loads

WALKS = ("immediate", "mesh-tf", "deferred")
"""Policies that one walk in program order carries out."""

POLICIES = (*WALKS, "optimal")
"""When partial values are reduced."""


def place(program: named.Program, layout: Layout, policy: str) -> Program:
    """The placed program. Raises MD03xx for rules that cannot be met, MD0907 for a split loop."""
    assert policy in POLICIES
    _refuse_split_loops(program.body, layout)
    program = with_loads(program, layout)
    if policy == "optimal":
        return _place_optimally(program, layout)
    return _walk(program, lambda p: Placer(p, layout, policy))[1]


def place_annotated(program: named.Program, annotations: Annotations, policy: str) -> Program:
    """The placed program under an `sbp` block; what it does not name is inferred by least cost."""
    assert policy in POLICIES

    def walked(policy: str) -> tuple[Placer, Program]:
        return _walk(program, lambda p: AnnotatedPlacer(p, annotations, policy))

    if policy != "optimal":
        return walked(policy)[1]
    placers, walks = zip(*map(walked, WALKS), strict=True)
    rewritten = as_rewritten(walks[-1])

    def planned() -> Program | None:
        guided = _GuidedAnnotated(rewritten, annotations, walks[-1], placers[-1].layout)
        guided.plan = AnnotatedModel(rewritten, guided, guided.settled).plan()
        if guided.plan is None:
            return None
        return replace(guided.program(), proven=guided.plan.least)

    return _least(walks, planned)


def _place_optimally(program: named.Program, layout: Layout) -> Program:
    """The plan that sends the fewest bytes; without a proof, the best of the other policies."""

    def walked(policy: str) -> Program:
        return _walk(program, lambda p: Placer(p, layout, policy))[1]

    walks = [walked(policy) for policy in WALKS]
    rewritten = as_rewritten(walks[-1])

    def planned() -> Program | None:
        plan = solve(rewritten, layout)
        if plan is None:
            return None
        return replace(_Guided(rewritten, layout, plan).program(), proven=plan.least)

    return _least(walks, planned)


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


def _least(walks: Sequence[Program], plan: Callable[[], Program | None]) -> Program:
    """The planned program, unless a walk needs nothing sent, or is better, or there is no plan."""
    best = min(walks, key=_cost)
    if not _cost(best)[0]:
        return replace(best, policy="optimal", proven=True)
    planned = plan()
    if planned is None or _cost(planned) > _cost(best):
        proven = planned is not None and bool(planned.proven) and _same(planned, best)
        return replace(best, policy="optimal", proven=proven)
    return planned


def _cost(program: Program) -> tuple[int, int]:
    """Bytes that a device sends in all, and in how many collectives."""
    moves = [(n.route, k) for n, k in walk(program.body) if isinstance(n, Reshard)]
    return sum(r.wire_bytes * k for r, k in moves), sum(r.collectives * k for r, k in moves)


def _same(planned: Program, best: Program) -> bool:
    """Whether a plan sends as many bytes as the best walk: then that is the least, too."""
    return _cost(planned)[0] == _cost(best)[0]


class _Guided(Placer):
    """Carries out a plan for a rewritten program."""

    def __init__(self, program: named.Program, layout: Layout, plan: Plan | None) -> None:
        super().__init__(program, layout, "optimal")
        self.plan = plan

    def _rewritten(self, op: named.Op) -> tuple[named.Op, ...]:
        return (op,)

    def _choices(self, op: named.Op, wants: tuple[Want, ...]) -> list[Choice]:
        """The planned one; behind it what costs more here, for the explanation."""
        assert self.plan is not None
        plan = self.plan.decisions[op]
        chosen = Choice(plan.needs, plan.yields, plan.targets, 0, ())
        for other in (others := super()._choices(op, wants)):
            if (other.needs, other.yields) == (plan.needs, plan.yields):
                chosen = replace(chosen, cost=other.cost)
        return [chosen, *(c for c in others if c.cost > chosen.cost)]

    def _repeat(self, node: named.Repeat) -> None:
        assert self.plan is not None
        self._loop(node, {c.inside: self.plan.carries[c.inside] for c in node.carries})

    def _kept(self, item: named.Collected, node: named.Repeat) -> Tensor:
        assert self.plan is not None
        who = f"all of `{item.inside.label}` are kept so"
        ask = why.Ask("plan", who, node.span, phase=node.phase)
        return self._version(item.inside, self.plan.carries[item.outer], ask)


class _GuidedAnnotated(_Guided, AnnotatedPlacer):
    """Carries out a plan under annotations."""

    def __init__(
        self, program: named.Program, annotations: Annotations, walked: Program, layout: Layout
    ) -> None:
        AnnotatedPlacer.__init__(self, program, annotations, "optimal")
        # It has rules for the dims that rewriting made up.
        self.layout = layout
        self.settled = {t.value: t.placement for _, t in walked.outputs}
        self.plan = None

    def _settled(self, value: named.Value) -> Placement:
        return self.settled[value]


def _refuse_split_loops(nodes: tuple[named.Node, ...], layout: Layout) -> None:
    for node in nodes:
        if not isinstance(node, named.Repeat):
            continue
        for rule in layout.rules:
            axes = layout.mesh.known(rule.axes)
            if rule.dim == node.dim.name and layout.mesh.size(*axes) > 1:
                message = (
                    f"splitting the `repeat` dim `{rule.dim}` (a pipeline) is not supported yet"
                )
                fail("MD0907", message, rule.span, help="leave the rule out for now")
        for pin in (p for s in node.stacked for p in s.outer.pins if p.dim == node.dim.name):
            if layout.mesh.size(*layout.mesh.known(pin.axes)) > 1:
                message = f"splitting the `repeat` dim `{pin.dim}` (a pipeline) is not built yet"
                fail("MD0907", message, pin.span, help="leave the `@` out for now")
        _refuse_split_loops(node.body, layout)
