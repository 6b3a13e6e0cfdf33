"""A plan: rules of the language on a mesh, and what they cost when a walk places the program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from meshdsl.cluster.timing import Timing
from meshdsl.device.alike import computed
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.memory import memory
from meshdsl.device.traffic import busiest
from meshdsl.diagnostics import Source, Span
from meshdsl.named import ir as named
from meshdsl.pipeline import lower_placed
from meshdsl.placed import ir as placed
from meshdsl.placed import layout as layouts
from meshdsl.placed.pipelined import stored
from meshdsl.placed.place import place
from meshdsl.placed.placements import Mesh
from meshdsl.placed.settings import Setting, StageRule
from meshdsl.records import dataclass
from meshdsl.schedule.use import ScheduleUse
from meshdsl.search.lower_bounds import ROUNDING, Beyond, Sent
from meshdsl.simulate.engine import simulate

POLICIES = ("deferred", "immediate")
"""The walks that a layout is evaluated by; of equals the first is taken."""

AT_ONCE = ("immediate",)
"""Those that reduce every sum where it appears."""

NAME = "searched"
"""The name of a layout that has been searched for."""


@dataclass(frozen=True, slots=True)
class SearchRule:
    """`selector: dim -> axes`, compared by what it says; `axes` are outer first."""

    dim: str
    axes: tuple[str, ...]
    selector: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.placed)

    @property
    def placed(self) -> layouts.Rule:
        """The rule as layouts have it."""
        span = Span(Source("--layout", self.dim), 0, len(self.dim))
        return layouts.Rule(self.selector, self.dim, self.axes, False, span)


Rules = tuple[SearchRule, ...]


@dataclass(frozen=True, slots=True)
class StageStart:
    """`selector: axis = stage`: where a stage of a network without a loop begins."""

    selector: tuple[str, ...]
    axis: str
    stage: int

    def __str__(self) -> str:
        return str(self.placed)

    @property
    def placed(self) -> StageRule:
        """The rule as layouts have it."""
        span = Span(Source("--layout", self.axis), 0, len(self.axis))
        return StageRule(self.selector, self.axis, self.stage, span)


@dataclass(frozen=True, slots=True)
class Execution:
    """What a layout has beside its rules.

    The schedule of its pipeline, where the stages of a network without a loop begin, and settings.
    """

    schedule: ScheduleUse | None = None
    cuts: tuple[StageStart, ...] = ()
    settings: tuple[Setting, ...] = ()

    def __str__(self) -> str:
        used = (f"with {self.schedule}",) if self.schedule else ()
        return ", ".join([*map(str, (*self.cuts, *self.settings)), *used])


PLAIN = Execution()
"""One after the other, on all devices alike."""


@dataclass(frozen=True, slots=True)
class StartLayout:
    """A layout of the file, or of an option, on the mesh of a search."""

    name: str
    rules: Rules
    execution: Execution = PLAIN


def layout_of(rules: Rules, mesh: Mesh, execution: Execution = PLAIN) -> layouts.Layout:
    """Rules as a layout, executed so."""
    placed = tuple(rule.placed for rule in rules)
    cuts = tuple(cut.placed for cut in execution.cuts)
    settings, schedule = execution.settings, execution.schedule
    return layouts.Layout(NAME, placed, mesh, schedule=schedule, settings=settings, cuts=cuts)


Asked = tuple[Rules, str]
"""Rules, and the execution as text."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """`program` on `mesh` under `rules`, placed by the walk `policy`. Figures are per device.

    `timing` is the cluster that its seconds are those of.
    """

    program: named.NamedProgram
    mesh: Mesh
    rules: Rules
    policy: str
    timing: Timing | None = None
    execution: Execution = PLAIN

    def __str__(self) -> str:
        used = f" with {self.schedule}" if self.schedule else ""
        said = (*self.rules, *self.execution.cuts, *self.execution.settings)
        return (", ".join(map(str, said)) or "nothing split") + used

    @property
    def asked(self) -> Asked:
        """What is placed, whatever the walk."""
        return self.rules, str(self.execution)

    @property
    def schedule(self) -> ScheduleUse | None:
        """The schedule of a pipeline."""
        return self.execution.schedule

    @property
    def cuts(self) -> tuple[StageStart, ...]:
        """Where the stages of a network without a loop begin."""
        return self.execution.cuts

    @property
    def layout(self) -> layouts.Layout:
        """The rules as a layout."""
        return layout_of(self.rules, self.mesh, self.execution)

    @cached_property
    def placed(self) -> placed.PlacedProgram:
        """The placed program. Raises a diagnostic where the rules cannot be followed."""
        return place(self.program, self.layout, self.policy)

    @property
    def is_known(self) -> bool:
        """Whether what it sends needs no placing any more."""
        return "placed" in self.__dict__ or "_sent" in self.__dict__

    def within(
        self, most: float, computing: float | None, kept: float = -math.inf
    ) -> Beyond | None:
        """Place the program, unless it sends more than so many bytes: then, when.

        With `computing`, what operators take at least, unless a step takes more seconds: then, by
        when those that no rules for storage change are more than `kept`, or all that there are.
        Raises what placing it raises.
        """
        if "placed" in self.__dict__ or most == math.inf:
            self.placed  # noqa: B018
            return None
        timing = None if computing is None else self.timing
        watches = list[Sent]()

        def watch() -> Sent:
            watches.append(Sent(self.mesh, timing, computing or 0.0, most, kept))
            return watches[-1]

        try:
            placed = place(self.program, self.layout, self.policy, watch=watch)
        except Beyond as beyond:
            return beyond
        self.__dict__["placed"] = placed
        if timing is self.timing:
            complete = (watched for watched in watches if watched.body is placed.body)
            self.__dict__.update(("_sent", watched) for watched in complete)
        return None if kept == -math.inf else self.beyond(most, computing)

    def beyond(self, most: float, computing: float | None) -> Beyond | None:
        """What is known of a plan that is placed, where it is beyond a limit (`within`)."""
        if most == math.inf:
            return None
        reached = self.sent_at_least if computing is None else self.seconds_at_least(computing)
        return Beyond(self.sent_at_least, self.kept_at_least) if reached > most else None

    @cached_property
    def device(self) -> DeviceProgram:
        """The program of each device, without the causes of its collectives."""
        return lower_placed(self.placed, verified=False)

    # --- figures -------------------------------------------------------------------------------

    @property
    def known(self) -> dict[str, object]:
        """The figures that are known, to be learnt by an equal plan of another process."""
        figures: dict[str, object] = {
            name: self.__dict__[name] for name in _FIGURES if name in self.__dict__
        }
        sent = replace(self._sent, timing=None, blocks=[], body=None)
        return figures | {"_sent": sent, "is_piped": self.is_piped}

    def learn(self, known: dict[str, object]) -> None:
        """Take the figures of an equal plan."""
        self.__dict__.update(known)

    @cached_property
    def is_piped(self) -> bool:
        """Whether the plan runs in stages."""
        return self.placed.pipe is not None

    @cached_property
    def held_at_least(self) -> int:
        """A lower bound of `peak` that needs no placing: parameters, states and inputs."""
        if self.execution != PLAIN:
            return 0
        program, layout = self.program, self.layout
        layout = layout if program.updates else stored(program, layout)
        params, states = (p.value for p in program.params), (s.value for s in program.states)
        values = (*program.inputs, *params, *states)
        there = ((v, layout.bind(v, stored=v.role != "input")) for v in values)
        held = (p.placement(self.mesh).local(v.type, self.mesh).bytes for v, p in there)
        return sum(held)

    @cached_property
    def sent_at_least(self) -> int:
        """A lower bound of `sent` that needs no device program: buckets round up less often."""
        return 0 if self.is_piped else self._sent.bytes

    @property
    def sent_at_most(self) -> int:
        """An upper bound of `sent`, likewise."""
        return self._sent.wire

    def seconds_at_least(self, computing: float) -> float:
        """A lower bound of `seconds` that needs no device program.

        `computing` is what the operators take at least.
        """
        if self.is_piped:
            return 0.0
        return replace(self._sent, computing=computing).seconds * (1 - ROUNDING)

    @property
    def kept_at_least(self) -> float:
        """Seconds of the step that no rules for storage change, at least."""
        return self._sent.kept.seconds

    @cached_property
    def _sent(self) -> Sent:
        found = Sent(self.mesh, self.timing)
        found.replay(self.placed.body)
        return found

    @cached_property
    def sent(self) -> int:
        """Bytes sent in a step: the `wire_bytes` of `explain`, of the device that sends most."""
        return busiest(self.device).bytes

    @cached_property
    def compiled_flops(self) -> int:
        """Floating-point operations of a step of the emitted program: those that `explain` says."""
        return computed(self.device)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of a step, of the stage that has most.

        Counted before the program is lowered, which does a few of them in other operators.
        """
        if self.is_piped:
            return computed(self.device)
        operators = (
            (n, k) for n, k in placed.walk(self.placed.body) if not isinstance(n, _RESHARD)
        )
        return sum(node.flops(self.mesh) * trips for node, trips in operators)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step, simulated."""
        assert self.timing is not None, "no cluster is named"
        return simulate(self.device, self.timing, events=False).seconds

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes held: `device.memory`'s, by role, and the `peak`."""
        return memory(self.device)

    @property
    def peak(self) -> int:
        """Bytes held at the worst moment."""
        return self.memory["peak"]


def first_of_each(plans: Iterable[Candidate]) -> list[Candidate]:
    """The first plan of each that was asked for: the better walk, where they are in order."""
    first: dict[Asked, Candidate] = {}
    for plan in plans:
        first.setdefault(plan.asked, plan)
    return [*first.values()]


_RESHARD = placed.Reshard
_FIGURES = ("flops", "sent", "seconds", "memory")
