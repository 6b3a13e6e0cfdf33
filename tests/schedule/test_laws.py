"""The laws of schedules as exact fractions: idle time, micro-batches in flight, messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.times import Each, TimedSchedule, Times, parse_times, timed
from meshdsl.schedule.verification import verify
from tests.together import together

SIZES = [(d, n) for d in (2, 4, 8) for n in (4, 8, 16)]
EQUAL = Times(weights=(Fraction(0),))
"""A backward pass as long as a forward pass, in one piece."""


def run(
    name: str, devices: int, micro: int, times: Times | None = None, **options: int
) -> TimedSchedule:
    return timed(verify(generate(name, devices, micro, options)), times)


def of(parts: Sequence[Each], early: bool = True) -> Times:
    """The times of F, I and W by stage."""
    forward, inputs, weights = parts
    return Times(forward, inputs, weights, early=early)


def units(made: TimedSchedule) -> int:
    """The idle time of every device, which is the same."""
    (idle,) = set(made.idle)
    assert idle.denominator == 1
    return int(idle)


# --- idle time, F = B = 1 ------------------------------------------------------------------------

BUBBLES = {
    "naive": "1/2 1/2 1/2 3/4 3/4 3/4 7/8 7/8 7/8",
    "gpipe": "1/5 1/9 1/17 3/7 3/11 3/19 7/11 7/15 7/23",
    "terapipe": "1/5 1/9 1/17 3/7 3/11 3/19 7/11 7/15 7/23",
    "one_f_one_b": "1/5 1/9 1/17 3/7 3/11 3/19 7/11 7/15 7/23",
    "eager": "1/5 1/9 1/17 3/7 3/11 3/19 7/11 7/15 7/23",
    "interleaved": "1/9 1/17 1/33 3/11 3/19 3/35 11/19 7/23 7/39",
    "breadth_first": "1/9 1/17 1/33 3/11 3/19 3/35 11/19 7/23 7/39",
    "chimera": "0 0 0 1/5 1/9 1/17 5/9 3/11 3/19",
    "zb_v": "1/9 1/17 1/33 3/11 3/19 3/35 11/19 7/23 7/39",
    "dualpipe_v": "1/9 1/17 1/33 - 3/19 3/35 - - 7/39",
    "dualpipe": "0 0 0 - 1/9 1/17 - - 3/19",
    "hanayo": "1/9 1/17 1/33 3/11 3/19 3/35 11/19 7/23 7/39",
}


@pytest.mark.parametrize("name", BUBBLES)
def test_the_bubble(name: str) -> None:
    for (devices, micro), bubble in zip(SIZES, BUBBLES[name].split(), strict=True):
        if bubble == "-":
            with pytest.raises(DiagnosticError):
                generate(name, devices, micro)
            continue
        for early in (True, False):
            made = run(name, devices, micro, Times(weights=(Fraction(0),), early=early))
            assert made.bubble == Fraction(bubble), (devices, micro)


FORMULAS: dict[str, Callable[[int, int], Fraction]] = {
    "naive": lambda d, n: Fraction(d - 1, d),
    "gpipe": lambda d, n: Fraction(d - 1, n + d - 1),
    "terapipe": lambda d, n: Fraction(d - 1, n + d - 1),
    "one_f_one_b": lambda d, n: Fraction(d - 1, n + d - 1),
    "eager": lambda d, n: Fraction(d - 1, n + d - 1),
    "interleaved": lambda d, n: Fraction(d - 1, 2 * n + d - 1),
    "breadth_first": lambda d, n: Fraction(d - 1, 2 * n + d - 1),
    "chimera": lambda d, n: Fraction(d - 2, 2 * n + d - 2),
}


@together(name=FORMULAS, devices=(2, 4, 6, 8, 12), rounds=(1, 2, 3))
def test_the_formula_of_the_bubble(name: str, devices: int, rounds: int) -> None:
    micro = devices * rounds
    assert run(name, devices, micro, EQUAL).bubble == FORMULAS[name](devices, micro)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_more_chunks_are_less_idle(chunks: int) -> None:
    for devices, micro in ((2, 4), (4, 8), (8, 8)):
        wanted = Fraction(devices - 1, chunks * micro + devices - 1)
        for name in ("interleaved", "breadth_first"):
            assert run(name, devices, micro, EQUAL, chunks=chunks).bubble == wanted


@pytest.mark.parametrize(("devices", "micro"), [(4, 2), (6, 2), (6, 4), (8, 2), (8, 4), (8, 6)])
def test_chimera_of_few_micro_batches(devices: int, micro: int) -> None:
    wanted = Fraction(2 * devices - 2 - micro, 2 * devices - 2 + micro)
    assert run("chimera", devices, micro, EQUAL).bubble == wanted


def test_pipelines_of_the_published_size() -> None:
    """64 stages and 512 micro-batches (Narayanan et al. 2021)."""
    assert run("one_f_one_b", 64, 512, EQUAL).bubble == Fraction(63, 575)


# --- idle time, F = I = W = 1 --------------------------------------------------------------------

LATE = Times(early=False)


@pytest.mark.parametrize(("devices", "micro"), [(d, n) for d, n in SIZES if n >= d])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "eager", "interleaved", "breadth_first"])
def test_sending_before_w_saves_the_w_of_every_stage(name: str, devices: int, micro: int) -> None:
    late, early = run(name, devices, micro, LATE), run(name, devices, micro)
    assert units(late) == 3 * (devices - 1)
    assert units(early) == 2 * (devices - 1)


@pytest.mark.parametrize(("devices", "micro"), [(4, 4), (4, 8), (4, 16), (8, 8), (8, 16)])
def test_chimera_has_no_bubbles_in_the_middle_where_it_sends_early(
    devices: int, micro: int
) -> None:
    late, early = run("chimera", devices, micro, LATE), run("chimera", devices, micro)
    assert units(early) == devices - 2
    assert units(late) == (devices - 2) * (micro // devices + 1)


@pytest.mark.parametrize(("devices", "micro"), [(d, n) for d, n in SIZES if n >= d])
def test_zb_h1_is_a_third_as_idle_in_the_same_memory(devices: int, micro: int) -> None:
    made = run("zb_h1", devices, micro)
    assert units(made) == devices - 1
    assert set(made.verified.peaks) == {devices}


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_no_device_waits_in_its_own_window(name: str, devices: int) -> None:
    peak = {"zb_h2": 2 * devices - 1, "zb_v": 2 * devices}[name]
    for micro in (2 * devices - 1, 2 * devices, 3 * devices):
        made = run(name, devices, micro)
        assert not any(made.waiting)
        assert set(made.verified.peaks) == {peak}
        assert units(made) == devices - 1, "with a barrier at the end of a step they do wait"
    assert any(run(name, devices, 2 * devices - 2).waiting)


# --- in flight -----------------------------------------------------------------------------------

Peak = Callable[[int, int, int], int]
PEAKS: dict[str, Peak] = {
    "naive": lambda d, n, s: 1,
    "gpipe": lambda d, n, s: n,
    "one_f_one_b": lambda d, n, s: min(n, d - s),
    "eager": lambda d, n, s: min(n, 2 * (d - 1 - s) + 1),
    "interleaved": lambda d, n, s: min(2 * n, 2 * (d - 1 - s) + min(d, n) + 1),
    "breadth_first": lambda d, n, s: 2 * n,
    "zb_h1": lambda d, n, s: min(n, d),
    "zb_h2": lambda d, n, s: min(n, 2 * d - 1),
    "dualpipe_v": lambda d, n, s: 2 * d + 1,
    "dualpipe": lambda d, n, s: d + 1,
    "ampnet": lambda d, n, s: min(n, d, 2 * (d - 1 - s) + 1),
    "pipedream": lambda d, n, s: min(n, d - s),
    "two_bw": lambda d, n, s: min(n, d - s),
    "pipemare": lambda d, n, s: min(n, d - s),
}


@pytest.mark.parametrize("name", PEAKS)
def test_micro_batches_in_flight(name: str) -> None:
    made = 0
    for devices, micro in SIZES:
        try:
            found = verify(generate(name, devices, micro))
        except DiagnosticError:
            continue
        made += 1
        assert found.peaks == tuple(PEAKS[name](devices, micro, s) for s in range(devices))
    assert made >= 6


def test_micro_batches_in_flight_of_chimera() -> None:
    for devices, peaks in ((2, (2, 2)), (4, (3, 4, 4, 3)), (8, (5, 6, 7, 8, 8, 7, 6, 5))):
        for rounds in (1, 2, 4):
            found = verify(generate("chimera", devices, rounds * devices))
            assert found.peaks == peaks
            assert all(len(held) == 2 for held in found.held)
            assert [sum(s in held for held in found.held) for s in range(devices)] == [2] * devices


# --- messages and order --------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_messages(name: str) -> None:
    made = 0
    for devices, micro in SIZES:
        try:
            table = generate(name, devices, micro)
        except DiagnosticError:
            continue
        made += 1
        found = verify(table)
        here = 2 if name in ("zb_v", "dualpipe_v", "hanayo") else 0
        assert found.sends == 2 * micro * (table.stages - 1) - micro * here
        assert all(line.buffers == 1 for line in found.lines)
        assert found.in_order == (name not in ("chimera", "dualpipe", "terapipe"))
    assert made >= 6


def test_messages_of_more_chunks() -> None:
    for chunks in (1, 2, 3, 4):
        for name in ("interleaved", "breadth_first"):
            found = verify(generate(name, 4, 8, {"chunks": chunks}))
            assert found.sends == 2 * 8 * (chunks * 4 - 1)


# --- uneven stages and slow links ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_uneven_stages(seed: int) -> None:
    """N·max c ≤ T ≤ Σ c + (N - 1)·max c for stages that take c, in all of their parts alike."""
    chance = random.Random(seed)
    for _ in range(50):
        devices, micro = chance.randint(1, 6), chance.randint(1, 12)
        size = [Fraction(chance.randint(0, 9)) for _ in range(devices)]
        share = [Fraction(chance.randint(0, 9), 3) for _ in range(3)]
        parts = [tuple(each * part for each in size) for part in share]
        times = of(parts, chance.random() < 0.5)
        each = [sum(part) for part in zip(*parts, strict=True)]
        for name in ("gpipe", "one_f_one_b", "eager", "zb_h1"):
            took = run(name, devices, micro, times).makespan
            assert micro * max(each) <= took <= sum(each) + (micro - 1) * max(each), (name, times)


@pytest.mark.parametrize("seed", range(4))
def test_stages_that_are_uneven_in_each_direction(seed: int) -> None:
    """Of gpipe, each direction has its bound; with late sends their sum is the time to a digit."""
    chance = random.Random(seed)
    for _ in range(50):
        devices, micro = chance.randint(1, 6), chance.randint(1, 12)
        parts = [tuple(Fraction(chance.randint(0, 9)) for _ in range(devices)) for _ in range(3)]
        forward, backward = parts[0], [i + w for i, w in zip(*parts[1:], strict=True)]
        bound = sum(sum(each) + (micro - 1) * max(each) for each in (forward, backward))
        assert run("gpipe", devices, micro, of(parts)).makespan <= bound
        assert run("gpipe", devices, micro, of(parts, False)).makespan <= bound


def test_one_f_one_b_has_no_such_bound_where_directions_differ() -> None:
    """The slowest stage is not all that counts: forward and backward passes wait for each other."""
    numbers = ((0, 8, 3, 2, 1), (7, 0, 5, 1, 1), (0, 0, 4, 9, 2))
    parts = [tuple(map(Fraction, each)) for each in numbers]
    each = [sum(part) for part in zip(*parts, strict=True)]
    took = run("one_f_one_b", 5, 5, of(parts, False)).makespan
    assert took > sum(each) + 4 * max(each)


def test_slow_links() -> None:
    """A message as long as a part: eager hides what 1F1B waits for."""
    taken = {
        (name, early, send): int(
            run(name, 4, 8, Times(send=(Fraction(send),), early=early)).makespan
        )
        for name in ("one_f_one_b", "eager")
        for early in (True, False)
        for send in (0, 1)
    }
    assert taken == {
        ("one_f_one_b", False, 0): 33,
        ("one_f_one_b", False, 1): 49,
        ("eager", False, 0): 33,
        ("eager", False, 1): 39,
        ("one_f_one_b", True, 0): 30,
        ("one_f_one_b", True, 1): 41,
        ("eager", True, 0): 30,
        ("eager", True, 1): 36,
    }


def test_a_line_carries_one_message_at_a_time() -> None:
    """Two stages, three micro-batches, messages of 4: the last of them arrives at 1 + 3 · 4."""
    made = run("gpipe", 2, 3, Times(send=(Fraction(4),)))
    assert [slot.start for slot in made.rows[1][:3]] == [5, 9, 13]


def test_times_by_stage() -> None:
    times = parse_times("F=1:2, I=1/2, W=0.5,send=3,U=1", 2)
    made = run("ampnet", 2, 1, times)
    assert [(str(s.action), s.start, s.end) for row in made.rows for s in row] == [
        ("F0@0", 0, 1),
        ("B0@0", Fraction(19, 2), Fraction(21, 2)),
        ("U0@0", Fraction(21, 2), Fraction(23, 2)),
        ("F0@1", 4, 6),
        ("B0@1", 6, 7),
        ("U0@1", 7, 8),
    ]


@pytest.mark.parametrize(
    "text",
    ["G=1", "F", "F=", "F=-1", "F=1e9", "F=1/0", "F=1:2", "send=1:2:3", "F=1,,I=1", "F=nan", "F=½"],
)
def test_times_that_cannot_be_read(text: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        parse_times(text, 3)
    (found,) = caught.value.diagnostics
    assert found.code == "MD0530"
    assert found.help
