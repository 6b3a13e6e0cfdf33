"""In what slices a sequence is best cut, where slices are the micro-batches of a pipeline.

A slice of l tokens that comes after c others takes longer than the first slice of l tokens, as its
attention reads c more keys. Of slices that take t_1, …, t_M on each of D stages, a pass of N
sequences takes N · (t_1 + … + t_M) + (D - 1) · max t: many slices fill the pipeline fast, few use
the devices well. `best_slices` finds the least of these by dynamic programming (Li et al. 2021,
TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from fractions import Fraction

from meshdsl.diagnostics import fail
from meshdsl.records import dataclass
from meshdsl.schedule.table import Action, Kind
from meshdsl.schedule.times import Times, entries, parse_time

SliceTime = Callable[[int, int], Fraction]
"""How long a stage takes for a slice: of its tokens, and of the tokens before it."""

MOST_UNITS = 512
"""The most places where a sequence may be cut: the work grows with their third power at least."""


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """The time of a slice as a sum, in any unit.

    slice:  of every slice, however short, as of launching its kernels.
    token:  of each of its tokens.
    before: of each token before the slice, whose keys and values are read.
    pair:   of each pair of one of its tokens and a token that this one attends to.
    """

    slice: Fraction = Fraction(1)
    token: Fraction = Fraction(1)
    before: Fraction = Fraction(0)
    pair: Fraction = Fraction(0)

    def of(self, tokens: int, before: int) -> Fraction:
        """The time of a slice of so many tokens, of a causal model, after so many others."""
        pairs = tokens * before + tokens * (tokens + 1) // 2
        return self.slice + self.token * tokens + self.before * before + self.pair * pairs


SLICE_TIMES = tuple(field.name for field in fields(SliceTimes))
"""The names of the parts of the time of a slice."""


def parse_slice_times(text: str) -> SliceTimes:
    """The times of `slice=8,token=1,before=0,pair=1/32`. Raises MD0530."""
    usual = "slice=1,token=1,before=0,pair=0"
    time_entries = entries(text, "--slice-times", SLICE_TIMES, usual)
    return SliceTimes(**{name: parse_time(value, span) for name, value, span in time_entries})


@dataclass(frozen=True, slots=True)
class Slicing:
    """A sequence in slices: how many tokens each has, and how long it takes on a stage.

    `makespan` is how long the pass of all sequences through all stages takes.
    """

    sizes: tuple[int, ...]
    times: tuple[Fraction, ...]
    stages: int
    sequences: int

    @property
    def busy(self) -> Fraction:
        """How long each device works."""
        return self.sequences * sum(self.times, Fraction(0))

    @property
    def makespan(self) -> Fraction:
        """From the beginning of the first slice to the end of the last one."""
        return self.busy + (self.stages - 1) * max(self.times)

    @property
    def passes(self) -> Times:
        """The times of a schedule whose micro-batches are the slices of each sequence in turn.

        A third of a slice's time is its forward pass; a backward pass sends when it is whole.
        """
        third = Fraction(1, 3)
        kinds: dict[Kind, Fraction] = {"F": third, "B": 2 * third, "I": third, "W": third}
        unlike = {
            Action(kind, number, stage): (share * time,) * 2
            for kind, share in kinds.items()
            for number, time in enumerate(self.times * self.sequences)
            for stage in range(self.stages)
        }
        return Times(early=False, unlike=unlike)

    @property
    def bubble(self) -> Fraction:
        """The share of the devices' time that is idle."""
        return 1 - self.busy / self.makespan if self.makespan else Fraction(0)


def sliced(sizes: tuple[int, ...], stages: int, sequences: int, time: SliceTime) -> Slicing:
    """The slicing of these sizes, with the times of its slices."""
    before, times = 0, []
    for tokens in sizes:
        times.append(time(tokens, before))
        before += tokens
    return Slicing(sizes, tuple(times), stages, sequences)


def even_slicings(
    tokens: int, stages: int, sequences: int, time: SliceTime, unit: int = 1
) -> Iterator[Slicing]:
    """The slicings into 1, 2, 4, … slices as equal as they can be, in multiples of `unit`."""
    units, count = tokens // unit, 1
    while count <= units:
        each, more = divmod(units, count)
        sizes = tuple(unit * (each + (at < more)) for at in range(count))
        yield sliced(sizes, stages, sequences, time)
        count *= 2


def best_slices(
    tokens: int, stages: int, sequences: int, time: SliceTime, unit: int = 1
) -> Slicing:
    """The slicing with the least makespan, of slices that are multiples of `unit`.

    For a longest time that is allowed, the least sum of times is found from the front of the
    sequence: the least one up to a token is that up to an earlier one and the slice in between.
    Every time of a slice may be the longest. Those between two of them are left out only where the
    least sum that the longer one allows, with the shorter one, is no better than the best so far:
    the shorter the longest time, the larger the sum.

    Raises MD0529 where `unit` does not divide the sequence, or cuts it too finely.
    """
    units = _units(tokens, unit)
    exact = [
        [time(unit * (end - start), unit * start) for start in range(end)]
        for end in range(1, units + 1)
    ]
    # Whole numbers are added up and compared many times faster than fractions.
    scale = math.lcm(*(t.denominator for row in exact for t in row))
    spent = [[int(t * scale) for t in row] for row in exact]
    longest = sorted({t for row in spent for t in row})
    best: tuple[int, tuple[int, ...]] | None = None

    def tried(at: int) -> tuple[int, int] | None:
        """The least sum where the time at an index is the longest, and the index it reaches."""
        nonlocal best
        if (sizes := _least_sum(spent, longest[at])) is None:
            return None
        ends = [*itertools.accumulate(sizes)]
        times = [spent[end - 1][end - size] for end, size in zip(ends, sizes, strict=True)]
        makespan = sequences * sum(times) + (stages - 1) * max(times)
        if best is None or makespan < best[0]:
            best = makespan, tuple(unit * n for n in sizes)
        return sum(times), bisect.bisect_left(longest, max(times))

    first = tried(len(longest) - 1)
    assert first is not None
    assert best is not None
    left = [(0, first[1], first[0])]
    while left:
        low, high, least_sum = left.pop()
        if low >= high or sequences * least_sum + (stages - 1) * longest[low] >= best[0]:
            continue
        middle = (low + high) // 2
        left.append((middle + 1, high, least_sum))
        if (reached := tried(middle)) is not None:
            left.append((low, reached[1], reached[0]))
    return sliced(best[1], stages, sequences, time)


def _units(tokens: int, unit: int) -> int:
    """How many units a sequence has. Raises MD0529 as `best_slices` does."""
    if tokens % unit:
        help = "write a divisor of it, or leave the option out"
        fail("MD0529", f"{tokens} tokens are not cut into multiples of {unit}", help=help)
    units = tokens // unit
    if units > MOST_UNITS:
        least = next(n for n in range(-(-tokens // MOST_UNITS), tokens + 1) if tokens % n == 0)
        help = f"cut into multiples of {least}: `--unit {least}`"
        fail("MD0529", f"a sequence is cut at {MOST_UNITS} places at most", help=help)
    return units


def _least_sum(spent: list[list[int]], longest: int) -> list[int] | None:
    """The sizes, in units, of slices with the least sum of times, none above `longest`.

    `spent[end - 1][start]` is the time of the slice from `start` to `end`. None where a unit takes
    longer.
    """
    least: list[int | None] = [0]
    begins: list[int] = [0]
    for row in spent:
        lowest, begin = None, 0
        for start, taken in enumerate(row):
            if taken <= longest and (prior := least[start]) is not None:
                if lowest is None or prior + taken < lowest:
                    lowest, begin = prior + taken, start
        least.append(lowest)
        begins.append(begin)
    if least[-1] is None:
        return None
    sizes: list[int] = []
    end = len(spent)
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return sizes[::-1]
