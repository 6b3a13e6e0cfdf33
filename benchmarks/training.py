"""How long a training step takes: ours beside others, in one run.

`python -m benchmarks.training [--quick] [--only WORD…] [--rounds N] [--compile] [--at-once]` times
forward, backward and update of an MLP (512 samples, io = hidden) and of the model of
`examples/lm.mdsl` on two devices and on one: the program we emit on the local engine (devices are
threads of one process, as those of JAX are), as gloo processes, these with `torch.compile`, the
same step written by hand with torch autograd, fused attention and `torch.distributed`, with
DTensor, and in JAX on host devices where it is installed. Every device has one thread, and every
variant as many processors as devices. The variants take turns, so that a busy moment of the machine
hits all of them. Printed are the median time of a step and, of the others, their ratios to the
local engine (above 1: ours is faster): the median of those in the same round, that of the least
times, and that of the time of all processors. The last two hold on a busy machine, too. Before, the
losses of the first steps are compared.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.training_cases import Case, cases
from benchmarks.training_jax import is_there
from benchmarks.training_worker import run_jax, run_local, run_torch

COLUMNS = ("local", "emitted", "compiled", "hand", "DTensor", "JAX")
TURN = 0.15
"""Seconds that one turn of a variant takes, about."""
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
"""For glibc: freed memory is not given back, or the page faults of one variant drown the rest."""
TOLERANCE = 1e-3
"""How far two losses may lie apart, relative to how far the loss fell."""


class Workers:
    """The processes, and what they are asked."""

    def __init__(self, folder: str) -> None:
        os.environ |= KEEP_MEMORY
        self.context = multiprocessing.get_context("spawn")
        self.processes: list[BaseProcess] = []
        store = str(Path(folder) / "store")
        self.torch = [self.start(run_torch, rank, store) for rank in range(2)]
        self.local = [self.start(run_local)]
        self.jax = [self.start(run_jax)] if is_there() else []
        self.pipes = [*self.torch, *self.local, *self.jax]

    def start(self, target: Any, *arguments: Any) -> Connection:
        """A process that calls `target` with its end of a pipe."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        self.processes.append(process)
        return ours

    def make(self, case: Case) -> dict[str, list[float]]:
        """Set all variants of a case up; the losses of the first steps of each."""
        pipes, text = self.pipes, case.emitted().text
        for pipe in pipes:
            pipe.send(("make", case, text))
        found: dict[str, list[float]] = {}
        for pipe in pipes:
            for name, losses in pipe.recv().items():
                found.setdefault(name, losses)
        return found

    def seconds(self, case: Case, variant: str, steps: int) -> tuple[float, float]:
        """Seconds per step of the slowest device, and of the processors of all."""
        alone = {"JAX": self.jax, "local": self.local}
        pipes = alone.get(variant, self.torch[: case.devices])
        for pipe in pipes:
            pipe.send(("time", variant, steps))
        taken = [pipe.recv() for pipe in pipes]
        return max(wall for wall, _ in taken), sum(cpu for _, cpu in taken)

    def stop(self) -> None:
        """End all processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def check(losses: dict[str, list[float]]) -> None:
    """Refuse variants that do not compute the same, or do not learn."""
    ours = losses["emitted"]
    fell = ours[0] - ours[-1]
    assert fell > 1e-4 * ours[0], f"the loss does not fall: {ours}"
    for name, theirs in losses.items():
        for a, b in zip(ours, theirs, strict=True):
            assert math.isclose(a, b, abs_tol=TOLERANCE * fell), f"{name}: {theirs}, not {ours}"


Times = dict[str, list[tuple[float, float]]]


def measure(workers: Workers, case: Case, rounds: int) -> Times:
    """Seconds per step of every variant in every round."""
    losses = workers.make(case)
    check(losses)
    steps = {n: int(TURN / workers.seconds(case, n, 3)[0]) for n in losses}
    steps = {n: min(max(count, 2), 500) for n, count in steps.items()}
    found: Times = {n: [] for n in losses}
    for _ in range(rounds):
        for name, count in steps.items():
            found[name].append(workers.seconds(case, name, count))
    return found


def machine() -> str:
    """The processor, and how many GFLOP/s a core of it makes of a product of 1024 × 1024."""
    import torch

    torch.set_num_threads(1)
    x = torch.ones(1024, 1024)
    taken = []
    for _ in range(10):
        started = time.thread_time()
        _ = x @ x
        taken.append(time.thread_time() - started)
    return f"{processor()}: {2 * 1024**3 / min(taken) / 1e9:.0f} GFLOP/s a core"


def processor() -> str:
    """The name of the processor, with its vendor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    known = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    found = {name.strip(): value.strip() for name, value in known.items()}
    return ", ".join(found[n] for n in ("vendor_id", "model name") if n in found)


def row(case: Case, found: Times) -> str:
    """The line of the table."""
    return f"| {case.name:25} | {' | '.join(f'{cell(found, name):>23}' for name in COLUMNS)} |"


def cell(found: Times, name: str) -> str:
    """The median time and, of others, the ratios to ours."""
    if name not in found:
        return ""
    text = f"{1e3 * statistics.median(wall for wall, _ in found[name]):.3f}"
    if name == COLUMNS[0]:
        return text
    pairs = list(zip(found[COLUMNS[0]], found[name], strict=True))
    clock, work = (statistics.median(b[i] / a[i] for a, b in pairs) for i in range(2))
    least = min(wall for wall, _ in found[name]) / min(wall for wall, _ in found[COLUMNS[0]])
    return f"{text} ({clock:.2f}, {least:.2f}, {work:.2f})"


class Row(Protocol):
    """What has the name of a row."""

    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=Row)


def with_words(
    parser: argparse.ArgumentParser, rows: Sequence[Named], words: Sequence[str]
) -> list[Named]:
    """The rows whose names have all of some words, which may be quoted together.

    Where there is none, the command ends with the names of all.
    """
    asked = {word for each in words for word in each.split()}
    chosen = [row for row in rows if asked <= {*row.name.split()}]
    if not chosen:
        names = "".join(f"\n  {row.name}" for row in rows)
        parser.error(f"no row has the words {' '.join(sorted(asked))}; the rows are{names}")
    return chosen


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="the first eight cases only")
    parser.add_argument("--only", nargs="*", default=[], help="cases with all of these words")
    parser.add_argument("--rounds", type=int, default=0, help="rounds, interleaved (15)")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: minutes more")
    parser.add_argument("--at-once", action="store_true", help="local: devices take no turns")
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 15)
    chosen = with_words(parser, cases(options.quick), options.only)
    print(machine())
    print(
        "ms per step, median (times that of the local engine: by the clock, by the least, by CPU)"
    )
    print(f"\n| {'':25} | {' | '.join(f'{name:>23}' for name in COLUMNS)} |")
    print(f"|---|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(folder)
        for case in chosen:
            case = replace(case, compiled=options.compile, at_once=options.at_once)
            print(row(case, measure(workers, case, rounds)), flush=True)
        workers.stop()


if __name__ == "__main__":
    main()
