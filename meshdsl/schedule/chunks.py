"""Schedules with several stages on each device: chunks in a ring, V shapes, replicas."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from meshdsl.diagnostics import counted
from meshdsl.schedule.laws import Law
from meshdsl.schedule.list_scheduling import backward_first, in_order
from meshdsl.schedule.one_stage import Step
from meshdsl.schedule.registry import Rows, needs, schedule
from meshdsl.schedule.table import Kind
from meshdsl.schedule.times import Times


@schedule(
    "Narayanan et al. 2021, interleaved 1F1B in Megatron-LM; rounds as in torch",
    idle=Law("(D - 1) / (chunks*N + D - 1)", "N % D == 0"),
    in_flight=Law("min(chunks*N, 2*(D - 1 - s) + (chunks - 1)*D + 1)", "N % D == 0"),
    also=("interleaved_1f1b", "virtual_stages", "virtual_pipeline", "vpp"),
)
def interleaved(devices: int, micro: int, chunks: int = 2) -> Rows:
    """1F1B with several stages per device: less idle.

    Stage s is on device s mod D. Micro-batches go through in rounds of D, or a few more: N / max(1,
    N // D), which has to be a whole number.
    """
    rounds = max(1, micro // devices)
    help = f"use a multiple of {devices}"
    sizes = f"{counted(micro, 'micro-batch')} on {counted(devices, 'device')}"
    what = f"{sizes}: {micro} cannot be divided into {micro} // {devices} = {rounds} equal rounds"
    needs(micro % rounds == 0, what, help)
    size = micro // rounds
    total = chunks * micro

    for device in range(devices):
        warm = min(total, (chunks - 1) * size + 2 * (devices - 1 - device))
        yield _ringed(device, devices, chunks, size, warm, total)


def _ringed(
    device: int, devices: int, chunks: int, size: int, warm: int, total: int
) -> Iterator[Step]:
    """The row of a device: number k of a direction is of round k // (v·size)."""

    def step(kind: Kind, number: int) -> Step:
        cycle, position = divmod(number, chunks * size)
        chunk, micro = divmod(position, size)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return kind, cycle * size + micro, chunk * devices + device

    for number in range(warm):
        yield step("F", number)
    for number in range(total):
        if number + warm < total:
            yield step("F", number + warm)
        yield step("B", number)


@schedule(
    "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism",
    idle=Law("(D - 1) / (chunks*N + D - 1)", "N >= D"),
    in_flight=Law("chunks*N"),
    also=("looped_bfs", "bfs", "looped"),
)
def breadth_first(devices: int, micro: int, chunks: int = 2) -> Rows:
    """All micro-batches in a chunk, then the next one.

    As idle as interleaved from N = D on, and each chunk's gradients are whole at once.
    """
    for device in range(devices):
        stages = range(device, chunks * devices, devices)
        forward: list[Step] = [("F", m, stage) for stage in stages for m in range(micro)]
        yield [*forward, *(("B", m, stage) for stage in reversed(stages) for m in range(micro))]


@schedule(
    "Li and Hoefler 2021, Chimera; forward doubling and backward halving by their section 3.5",
    idle=(
        Law("(D - 2) / (2*N + D - 2)", "forward == 1 and N % D == 0", "equal"),
        Law(
            "(D - 2)*(N/D + 1) / (3*N + (D - 2)*(N/D + 1))",
            "forward == 1 and N % D == 0",
            "twice",
            derived=True,
        ),
        Law("(D - 2) / (3*N/2 + D - 2)", "forward == 2 and N % (2*D) == 0", "doubled"),
    ),
    in_flight=Law("D/2 + 1 + min(s, D - 1 - s)", "forward == 1 and N % D == 0"),
    also=("bidirectional",),
)
def chimera(devices: int, micro: int, forward: int = 1) -> Rows:
    """Two pipelines in opposite directions.

    Device p has the stages p and D - 1 - p. Of every D micro-batches half go down, half go up. Each
    stage is on two devices, which add up their gradients at the end.

    `forward=2` is for backward passes that take twice as long as forward passes. Forward passes of
    two micro-batches in turn take as long as one backward pass, so no bubbles are left in the
    middle; up to 2D micro-batches are in flight. The table is that of forward doubling where
    micro-batches are as large as before, and of backward halving where they are half as large.
    """
    needs(devices % 2 == 0, f"{devices} devices", f"use an even number, such as {devices + 1}")
    needs(forward <= 2, f"{forward} forward passes in a row", "use 1 or 2")
    unit, least = forward * devices, 2 * forward
    fits = micro % least == 0 if micro <= unit else micro % unit == 0
    below = f", or {f'a multiple of {least}' if forward > 1 else 'an even number'} below {unit}"
    help = f"use a multiple of {unit}{below if devices > 2 else ''}"
    needs(fits, f"{counted(micro, 'micro-batch')} on {devices} devices", help)
    return _doubled(devices, micro) if forward == 2 else _concatenated(devices, micro)


def _concatenated(devices: int, micro: int) -> Rows:
    """Units of D micro-batches one behind the other."""
    unit = min(micro, devices)
    for device in range(devices):
        every = [
            slot
            for first in range(0, micro, unit)
            for slot in _unit(device, devices, first, unit // 2)
        ]
        yield [step for _, step in sorted(every)]


def _doubled(devices: int, micro: int) -> Rows:
    """Pairs of micro-batches, one down, one up, in the order of passes with B = 2F."""
    down = tuple(range(devices))
    ways = [down if pair % 2 == 0 else down[::-1] for pair in range(micro // 2)]
    return in_order(ways, Times(early=False), devices, backward_first, group=2)


def _unit(device: int, devices: int, first: int, half: int) -> Iterator[tuple[int, Step]]:
    """The actions of a unit, `half` micro-batches each way, with the times they are nominally at.

    Down enter at even times, up at odd ones, as seen from a device: it never has two at once.
    """
    begin = 2 * first
    for m in range(half):
        for stage, micro in ((device, first + m), (devices - 1 - device, first + half + m)):
            yield begin + stage + 2 * m, ("F", micro, stage)
            yield begin + 2 * devices - 1 - stage + 2 * m, ("B", micro, stage)


@schedule(
    "Qi et al. 2023, ZB-V; as in torch's ZBVZeroBubble",
    idle=Law("0", "N >= 2*D - 1", "window"),
    in_flight=Law("2*D", "N >= 2*D - 1"),
    also=("zero_bubble", "zero_bubble_v", "zbv"),
)
def zb_v(devices: int, micro: int) -> Rows:
    """Stages p and 2D - 1 - p on device p: no waiting.

    No device waits between its first action and its last one, from 2D - 1 micro-batches on, where
    F, I and W take equally long, in the memory of 1F1B: chunks are half a stage.
    """
    most = max(micro, 2 * devices - 1)
    for device in range(devices):
        yield [step for step in _v_row(device, devices, most) if step[1] < micro]


def _v_row(device: int, devices: int, micro: int) -> Iterator[Step]:
    """The row of a device in phases: down fills, up comes back, steady state, drain."""
    left = devices - device
    steady = (
        "FIWfiw" if 2 * devices - 1 - device + number < micro else "IWfiw"
        for number in range(micro - devices)
    )
    phases = (
        "F" * (2 * left - 1),
        "fF" * device,
        "fiw" * left,
        *steady,
        "Ii" * device,
        "IW" * left,
        "w" * device,
        "W" * device,
    )
    return _numbered("".join(phases), device, devices)


DUAL = "(F&B + B - 3*W)"
"""What a device of DualPipe waits for each device that is nearer to the middle."""


@schedule(
    "DeepSeek-AI 2024, DualPipeV; as in torch's DualPipeV",
    idle=Law("(D - 1) / (3*N + D - 1)", passes="pairs", published=f"(D - 1) * {DUAL}"),
    in_flight=Law("2*D + 1"),
    also=("dual_pipe_v",),
)
def dualpipe_v(devices: int, micro: int) -> Rows:
    """Stages p and 2D - 1 - p, passes in pairs.

    Device p has the stages p and 2D - 1 - p. A pair is a forward pass of one micro-batch and a
    backward pass of another, so that the messages of one are hidden behind the other. It takes 2D
    micro-batches at least.
    """
    help = f"use {2 * devices} or more"
    needs(micro >= 2 * devices, f"{counted(micro, 'micro-batch')} on {devices} devices", help)
    for device in range(devices):
        yield _dual_row(device, devices, micro)


@schedule(
    "DeepSeek-AI 2024, DualPipe in DeepSeek-V3; phases as in their DualPipe",
    idle=Law("(D/2 - 1) / (3*N/2 + D/2 - 1)", passes="pairs", published=f"(D/2 - 1) * {DUAL}"),
    in_flight=Law("D + 1"),
    also=("dual_pipe",),
)
def dualpipe(devices: int, micro: int) -> Rows:
    """Two opposite pipelines, passes in pairs.

    As in Chimera device p has the stages p and D - 1 - p, and each stage is on two devices: twice
    the parameters. As in DualPipeV the messages of one pass of a pair are hidden behind the other.
    Half of the micro-batches go down, half go up: an even number of them, 2D at least.
    """
    needs(devices % 2 == 0, f"{devices} devices", f"use an even number, such as {devices + 1}")
    fits = micro % 2 == 0 and micro >= 2 * devices
    help = f"use an even number from {2 * devices} on"
    needs(fits, f"{counted(micro, 'micro-batch')} on {devices} devices", help)
    half = micro // 2
    for device in range(devices):
        # A device and its mirror image have the same row, the one's way down being the other's up.
        near = min(device, devices - 1 - device)
        for_down = device == near
        row = []
        for kind, number, stage in _dual_row(near, devices // 2, half):
            first = stage == near
            down = first == for_down
            row.append(
                (kind, number + (0 if down else half), near if first else devices - 1 - near)
            )
        yield row


def _dual_row(device: int, devices: int, micro: int) -> Iterator[Step]:
    """The row of a device in the eight phases of the authors."""
    below, drain = devices - 1 - device, device + 1
    phases = (
        "F" * (2 * below),
        "Ff" * drain,
        "i.f" * below,
        "FbfB" * (micro - 2 * devices + drain),
        "bfB" * below,
        # From the middle of the drain on, the gradients of parameters are put off.
        ("bB" * drain)[:drain] + ("iI" * drain)[drain:],
        ".I" * below,
        "." * drain,
    )
    return _numbered("".join(phases), device, devices)


@schedule(
    "Liu et al. 2023, Hanayo",
    idle=(
        Law("(D - 1) / (2*waves*N + D - 1)", "N % D == 0", "equal", derived=True),
        Law(
            "(D - 1)*(N/D + 1) / (3*waves*N + (D - 1)*(N/D + 1))",
            "N % D == 0",
            "twice",
            "(2*D - 2) / (3*waves*D + D - 1) for N = D, with half of the idle time in the step",
            derived=True,
        ),
    ),
    in_flight=Law("2*waves*D - (D - 1 - s)", "N % D == 0"),
    also=("wave", "wave_pipeline"),
)
def hanayo(devices: int, micro: int, waves: int = 1) -> Rows:
    """Stages go down and up the devices, `waves` times.

    No message is needed where they turn. No stage is on two devices as in Chimera, and D
    micro-batches are in flight at most, each in 2 * `waves` chunks. The order is that of passes
    with B = F, the most advanced ones first.
    """
    down = tuple(range(devices))
    way = (down + down[::-1]) * waves
    even = Times(weights=(0,), early=False)
    return in_order([way] * micro, even, devices, backward_first)


def _numbered(letters: str, device: int, devices: int) -> Iterator[Step]:
    """The actions of letters, each for the next micro-batch of its kind and stage.

    Capital letters are on the stage on the way down, small ones on that on the way up, `.` is the W
    of the oldest I that has none yet.
    """
    count: Counter[tuple[str, int]] = Counter()
    owed: deque[int] = deque()
    for letter in letters:
        stage = device if letter.isupper() else 2 * devices - 1 - device
        kind = _LETTERS[letter.upper()]
        if kind == "I":
            owed.append(stage)
        if kind == "W":
            stage = _oldest(owed, None if letter == "." else stage)
        halves = ("I", "W") if kind == "B" else (kind,)
        yield kind, count[halves[0], stage], stage
        count.update((half, stage) for half in halves)


_LETTERS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W", ".": "W"}


def _oldest(owed: deque[int], stage: int | None) -> int:
    """Take the oldest stage that is owed a W, or the oldest entry of a stage."""
    taken = owed[0] if stage is None else stage
    owed.remove(taken)
    return taken
