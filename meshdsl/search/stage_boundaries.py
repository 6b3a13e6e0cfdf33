"""Where the stages of a network without a loop may begin, and the cuts that divide its work evenly.

A stage begins with a tensor, or with the call of a function: `conv3: pipe = 1`
(`placed/stage_rules.py`). Of those that the program names once the places in program order are
known, with the work of the forward pass before each; even stages are those whose largest is least.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from meshdsl.ir.program import counted
from meshdsl.ir.rewrite import makes_of, reads_of
from meshdsl.named import ir as named
from meshdsl.named.ir import NamedOp, Value
from meshdsl.placed.sharding_rules import call_of
from meshdsl.records import dataclass
from meshdsl.search.candidate import StageStart
from meshdsl.search.space import Weigh

Path = tuple[str, ...]
"""A tensor or a call, by the names of the calls that it is in, outermost first."""

Chosen = tuple[int, ...]
"""The places at which the stages behind the first begin, in order."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A tensor or a call by name, and the work of the forward pass that comes before it."""

    selector: Path
    before: float


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The places where stages may begin, in program order, and the work of the forward pass."""

    places: tuple[Beginning, ...]
    work: float

    def cuts(self, chosen: Chosen, axis: str) -> tuple[StageStart, ...]:
        """Stages that begin at some places, as the language says it."""
        return tuple(
            StageStart(self.places[at].selector, axis, i + 1) for i, at in enumerate(chosen)
        )

    def every(self, stages: int) -> Iterator[Chosen]:
        """All ways to divide the network into so many stages."""
        return itertools.combinations(range(len(self.places)), stages - 1)

    def ways(self, stages: int) -> int:
        """How many ways there are."""
        return math.comb(len(self.places), stages - 1)

    def even(self, stages: int) -> Chosen | None:
        """The way whose largest stage has the least work; None where there are too few places."""
        if len(self.places) < stages - 1:
            return None
        ends = [place.before for place in self.places]

        @functools.cache
        def least(first: int, left: int) -> tuple[float, Chosen]:
            """For what begins at a place, -1 for the first operator, with so many more stages."""
            begun = ends[first] if first >= 0 else 0.0
            if not left:
                return self.work - begun, ()
            ways = []
            for at in range(first + 1, len(ends) - left + 1):
                remaining, chosen = least(at, left - 1)
                ways.append((max(ends[at] - begun, remaining), (at, *chosen)))
            return min(ways)

        return least(-1, stages - 1)[1]

    def near(self, chosen: Chosen) -> Iterator[Chosen]:
        """The ways in which one stage begins one or two places earlier or later."""
        for i, at in enumerate(chosen):
            low = chosen[i - 1] + 1 if i else 0
            high = chosen[i + 1] if i + 1 < len(chosen) else len(self.places)
            for other in (at - 1, at + 1, at - 2, at + 2):
                if low <= other < high:
                    yield (*chosen[:i], other, *chosen[i + 1 :])


def beginnings(program: named.NamedProgram, weigh: Weigh) -> Beginnings:
    """The places where stages of a program may begin."""
    nodes = [n for n in passes(program) if n.phase == "forward"]
    times = Counter(v.name for n in nodes for v in makes_of(n))
    shared = _shared(v for n in nodes for v in makes_of(n))
    batch = set(program.inputs)
    done_before: dict[Path, float] = {}
    done = 0.0
    statement: dict[Path, float] = {}  # by call, the work before the statement that is under way
    for node in nodes:
        makes = makes_of(node)
        depends = not batch.isdisjoint(reads_of(node))
        batch.update(makes if depends else ())
        for value in makes if depends else ():
            for count in range(1, len(value.path) + 1):
                if value.path[:count] not in shared:
                    done_before.setdefault(value.path[:count], done)
            if value.name and times[value.name] == 1:
                before = statement.get(value.path, done_before.get(value.path, 0.0))
                done_before.setdefault(tuple(value.name.split(".")), before)
        done += _work(node, weigh)
        statement.update((value.path, done) for value in makes if value.name)
    # Before the first place something has to be left for the first stage. Of several names of one
    # place the shortest is taken.
    names: dict[float, Path] = {}
    for name, before in sorted(done_before.items(), key=lambda place: len(place[0])):
        names.setdefault(before, name)
    places = (Beginning(names[before], before) for before in sorted(names) if before)
    return Beginnings(tuple(places), done)


def _shared(values: Iterable[Value]) -> set[Path]:
    """The calls whose name means others, too: the first of several has that of the function."""
    calls: dict[Path, set[Path]] = {}
    for value in values:
        for count in range(1, len(value.path) + 1):
            calls.setdefault(value.functions[:count], set()).add(value.path[:count])
    return {name for name, paths in calls.items() if len(paths) > 1}


def passes(program: named.NamedProgram) -> tuple[named.Node, ...]:
    """The passes of a step: those of one batch, where the optimizer accumulates several."""
    if program.goal is None or program.goal.optimizer.accumulate == 1:
        return program.body
    return tuple(n for loop in program.body for n in loop.body)


def _work(node: named.Node, weigh: Weigh) -> float:
    calls = ((call_of(op), trips) for op, trips in counted((node,)) if isinstance(op, NamedOp))
    return sum(weigh(call, call.signature) * trips for call, trips in calls)
