"""Plans of pipelines: a plan of the program without stages, carried out on them.

Inside a micro-batch every operator has a stage, and all of its operands there. So a plan is
searched (`optimal.py`) as if the mesh had no axis of stages. It is carried out as it is where the
iterations of a loop are on the stages; elsewhere where these allow what it does over other axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from meshdsl.ir import program as ir
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Value, loops_of
from meshdsl.placed.optimal import PlacementPlan
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import B, Mesh, Partial, Placement, placement
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import Price
from meshdsl.placed.strategies import Choice, Chooser
from meshdsl.records import dataclass


def without_stages(request: Request, program: NamedProgram, pipe: Piped) -> Request:
    """The request for a program on the mesh of one stage."""
    axes = tuple((axis, size) for axis, size in request.mesh.axes if axis != pipe.axis)
    mesh = Mesh(request.mesh.name, axes, cut=request.mesh.cut)
    return Request(program, replace(request.layout, mesh=mesh), one_stage=pipe)


@dataclass(frozen=True)
class StagePlan:
    """A plan of a program without stages, carried out on those of a pipeline: a `Decider`."""

    plan: PlacementPlan
    program: NamedProgram
    pipe: Piped
    mesh: Mesh
    policy: ClassVar[str] = "optimal"
    foresees: ClassVar[bool] = True

    @property
    def price(self) -> Price:
        """The price of the plan."""
        return self.plan.price

    def choice(self, op: NamedOp, chooser: Chooser) -> Choice | None:
        """The planned choice where the stages allow it; else the cheapest."""
        planned, cheapest = self.plan.choices[op], next(iter(chooser.candidates()), None)
        if cheapest is None or chooser.misfit(cheapest):
            return cheapest
        if chooser.stages is None or chooser.stages.kind != "alone":
            planned = self._over_stages(planned, cheapest, chooser)
        return cheapest if chooser.misfit(planned) else planned

    def carries(self, loop: NamedLoop) -> Mapping[Value, Placement] | None:
        """As planned on the stages; by trial of loops around them."""
        return self.plan.carried if loop in self._on_stages else None

    def versions(self, value: Value) -> tuple[Placement, ...]:
        """The planned versions of what is made on the stages."""
        return self.plan.versions(value) if value in self._made_on_stages else ()

    def _over_stages(self, planned: Choice, cheapest: Choice, chooser: Chooser) -> Choice:
        """The candidate that is as planned over other axes, and as the cheapest over the stages.

        The cheapest one where there is none.
        """
        axis, ends = self.pipe.axis, (*planned.needs, *planned.yields)
        there = [p.component(axis) for p in (*cheapest.needs, *cheapest.yields)]
        for candidate in chooser.candidates():
            placed = (*candidate.needs, *candidate.yields)
            as_planned = tuple(p.without_axis(axis) for p in placed) == ends
            if as_planned and [p.component(axis) for p in placed] == there:
                triples = zip(planned.yields, planned.targets, candidate.targets, strict=True)
                targets = tuple(self._target(*each, chooser) for each in triples)
                return replace(candidate, targets=targets)
        return cheapest

    def _target(
        self, yielded: Placement, target: Placement, other: Placement, chooser: Chooser
    ) -> Placement:
        """A planned target that is over the stages what another one is; or that one."""
        component = other.component(self.pipe.axis)
        # After the passes, a sum is added up over all axes at once.
        is_together = chooser.stages is None and set(target.partial) < set(yielded.partial)
        if component == B or (is_together and isinstance(component, Partial)):
            return target
        if not isinstance(component, Partial) or target.op not in (None, component.op):
            return other
        partial = (*target.partial, self.pipe.axis)
        return placement(self.mesh, dict(target.splits), partial, component.op)

    @cached_property
    def _made_on_stages(self) -> frozenset[Value]:
        inside = (v for loop in self._on_stages for node in loop.body for v in node.makes)
        return frozenset((*inside, *(v for loop in self._on_stages for v in loop.enters)))

    @cached_property
    def _on_stages(self) -> frozenset[NamedLoop]:
        """The loops whose iterations are on the stages, and those inside of them."""
        piped = [loop for loop in loops_of(self.program) if self.pipe.cuts(loop)]
        inside = (inner for loop in piped for inner in ir.loops(loop.body, NamedLoop))
        return frozenset((*piped, *inside))
