"""How long a training step takes: ours beside others, in one run.

`python -m benchmarks.training [--quick] [--only WORD…] [--rounds N]` times forward, backward and
update of an MLP (B = 512, io = hidden) and of a two-layer transformer on two gloo processes with
one thread each, and on one: the program we emit, the same program on the local engine (devices are
threads of one process, as those of JAX are), the same step written by hand with torch autograd,
fused attention and `torch.distributed`, with DTensor, and in JAX on two host devices where it is
installed. No variant has more processors than devices. The variants take turns, so that a busy
moment of the machine hits all of them. Printed are the median time of a step and, of the others,
the median ratios to ours in the same round (above 1: ours is faster), by the clock and by the time
of all processors. Before, the losses of the first steps are compared.
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.training_cases import Case, cases
from benchmarks.training_jax import is_there
from benchmarks.training_worker import run_jax, run_local, run_torch

COLUMNS = ("emitted", "local", "hand", "hand flat", "hand each", "DTensor", "JAX")
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
        pipes, text = self.pipes, case.emitted()
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
    return f"{case.name:31}" + "".join(f"{cell(found, name):>20}" for name in COLUMNS)


def cell(found: Times, name: str) -> str:
    """The median time and, of others, the ratios to ours."""
    if name not in found:
        return ""
    text = f"{1e3 * statistics.median(wall for wall, _ in found[name]):.3f}"
    if name == "emitted":
        return text
    pairs = list(zip(found["emitted"], found[name], strict=True))
    ratios = (statistics.median(b[i] / a[i] for a, b in pairs) for i in range(2))
    return f"{text} ({', '.join(f'{r:.2f}' for r in ratios)})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--only", nargs="*", default=[], help="cases with all of these words")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 15)
    chosen = [c for c in cases(options.quick) if set(options.only) <= set(c.name.split())]
    print(machine())
    print("milliseconds per step, median (times ours: by the clock, by processor time)")
    print(f"{'':31}" + "".join(f"{name:>20}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(folder)
        for case in chosen:
            print(row(case, measure(workers, case, rounds)), flush=True)
        workers.stop()


if __name__ == "__main__":
    main()
