"""The slices of a sequence: the dynamic program against every slicing, and its command."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.slicing import (
    MOST_UNITS,
    SliceTimes,
    best_slices,
    even_slicings,
    parse_slice_times,
    sliced,
)
from meshdsl.schedule.times import timed
from meshdsl.schedule.verification import verify
from tests.cli.command import Cli
from tests.cli.conftest import cli

__all__ = ["cli"]


def compositions(n: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write a number as a sum."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [0, *(at for at, cut in enumerate(cuts, 1) if cut), n]
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def passed(times: list[Fraction], stages: int) -> Fraction:
    """When the last job leaves the last stage: each begins where stage and job are free."""
    free = [Fraction(0)] * stages
    for taken in times:
        done = Fraction(0)
        for stage in range(stages):
            done = free[stage] = max(free[stage], done) + taken
    return free[-1]


def test_the_best_slices_are_those_of_all_slicings() -> None:
    random_numbers = random.Random(38)
    for case in range(200):
        units, unit = random_numbers.randint(1, 6), random_numbers.randint(1, 3)
        stages, sequences = random_numbers.randint(1, 6), random_numbers.randint(1, 3)
        if case % 2:
            parts = (Fraction(random_numbers.randint(0, 12), 4) for _ in range(4))
            time = SliceTimes(*parts).of
        else:  # measured: any numbers, also such that longer slices take less

            def time(tokens: int, before: int, case: int = case) -> Fraction:
                return Fraction(random.Random(1000 * case + 50 * tokens + before).randint(1, 20))

        best = best_slices(units * unit, stages, sequences, time, unit)
        assert sum(best.sizes) == units * unit
        assert all(size % unit == 0 for size in best.sizes)
        every = (
            sliced(tuple(unit * n for n in sizes), stages, sequences, time)
            for sizes in compositions(units)
        )
        least = min(passed([*each.times] * sequences, stages) for each in every)
        assert best.makespan == least == passed([*best.times] * sequences, stages)
        assert best.busy == sequences * sum(best.times)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_slices_that_take_as_long_have_the_bubble_of_the_pipeline(stages: int) -> None:
    """N slices and micro-batches of the batch: (D - 1) / (N + D - 1)."""
    for sequences in (1, 3):
        for slicing in even_slicings(16, stages, sequences, SliceTimes().of):
            n = sequences * len(slicing.sizes)
            assert slicing.bubble == Fraction(stages - 1, n + stages - 1)


def test_which_schedules_go_back_in_reverse() -> None:
    reverse = {n for n in schedules() if verify(generate(n, 4, 8)).reverses}
    assert reverse == {"terapipe"}


def test_long_sequences() -> None:
    """Longer ones than GPT-3's, whose best slices grow shorter with the tokens before them."""
    time = SliceTimes(Fraction(8), Fraction(1), Fraction(0), Fraction(1, 500)).of
    best = best_slices(4096, 8, 1, time, 32)
    assert best.sizes[0] > best.sizes[-1]
    assert best.makespan < min(each.makespan for each in even_slicings(4096, 8, 1, time, 32))


@pytest.mark.parametrize(
    ("tokens", "unit", "words", "help"),
    [
        (10, 3, "10 tokens are not cut into multiples of 3", "divisor"),
        (4 * MOST_UNITS, 2, "512 places at most", "--unit 4"),
        (1021, 1, "512 places at most", "--unit 1021"),
    ],
)
def test_sequences_that_are_not_cut_so(tokens: int, unit: int, words: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        best_slices(tokens, 2, 1, SliceTimes().of, unit)
    (found,) = caught.value.diagnostics
    assert found.code == "MD0529"
    assert words in found.message
    assert help in (found.help or "")


SIZE = ("--stages", "4", "--micro", "2", "--tokens", "16")


def test_the_command_prints_the_best_slices(cli: Cli) -> None:
    text = "slice=2,pair=1/4"
    told = json.loads(cli("schedule", "terapipe", *SIZE, "--slice-times", text, "--json").out)
    best = best_slices(16, 4, 2, parse_slice_times(text).of)
    assert told["best"]["slices"] == [*best.sizes]
    assert Fraction(told["best"]["makespan"]) == best.makespan
    assert [len(each["slices"]) for each in told["even"]] == [1, 2, 4, 8, 16]
    drawn = timed(verify(generate("terapipe", 4, 2 * len(best.sizes))), best.passes)
    assert (drawn.makespan, drawn.bubble) == (best.makespan, best.bubble)
    shown = cli(
        "schedule", "terapipe", *SIZE, "--slice-times", text, "--unit", "2", "--svg", "a.svg"
    )
    assert shown.out.endswith("wrote a.svg\n")
    best = best_slices(16, 4, 2, parse_slice_times(text).of, 2)
    head = f"terapipe: 2 sequences, each of 16 tokens on 4 stages, best in {len(best.sizes)} slices"
    assert shown.out.startswith(head)
    assert shown.out.splitlines()[4].split()[:2] == ["best", f"{float(best.makespan):.6g}"]


@pytest.mark.parametrize(
    ("arguments", "code", "help"),
    [
        (("gpipe", *SIZE), "MD0532", "use `terapipe`"),
        (("interleaved", *SIZE, "--chunks", "2"), "MD0532", "leave out `--chunks`"),
        (("terapipe", *SIZE, "--times", "F=2"), "MD0532", "leave out `--times`"),
        (("terapipe", *SIZE[:4], "--unit", "2"), "MD0532", "write `--tokens 2048`"),
        (("terapipe", *SIZE, "--slice-times", "slices=2"), "MD0530", "write `slice`"),
        (("terapipe", *SIZE, "--slice-times", "pair=1,pair=2"), "MD0530", "leave out `pair=2`"),
        (("terapipe", "--tokens", "16"), "MD0532", "write `--stages 4` and `--micro 8`"),
    ],
)
def test_options_that_mean_nothing(
    arguments: tuple[str, ...], code: str, help: str, cli: Cli
) -> None:
    done = cli("schedule", *arguments)
    assert done.codes == [f"error[{code}]"]
    assert help in done.err
