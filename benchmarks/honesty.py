"""Predicted beside measured times: eight layouts of `examples/lm.mdsl` on four processes.

`python -m benchmarks.honesty [--rounds N]` measures this machine as `meshdsl cluster measure` does,
predicts a training step under each layout, and times the emitted programs over gloo, one thread a
process. The layouts take turns, in another order every round, so that a busy moment of the machine
meets each of them; the median of the rounds counts. Printed are both times, and Spearman's rank
correlation: how well the model says which layout is faster, which is what it is for. It should be
0.8 or more.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshdsl.backends.engines.link_times import measure
from meshdsl.cluster.this_machine import keep, machine
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source

LM = Path(__file__).resolve().parent.parent / "examples" / "lm.mdsl"
LAYOUTS = (
    *("data_parallel", "zero1", "zero2", "zero3"),
    *("megatron", "megatron_zero3", "vocabulary", "sequence"),
)
WORLD = 4


def made(layout: str) -> Compilation:
    """The training step under a layout, planned for the fewest bytes."""
    source = Source(LM.name, LM.read_text(encoding="utf-8"))
    options = Options(program="lm", layout=layout, cluster="cpu", objective="bytes")
    return compile_source(source, options, Diagnostics())


def timed(texts: Sequence[str], rounds: int) -> list[float]:
    """Median seconds of a step of each program."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "seconds.json"
        # A process that fails ends the others, and its error is raised here.
        torch.multiprocessing.start_processes(
            _process, (folder, texts, rounds, kept), WORLD, start_method="fork"
        )
        found = json.loads(kept.read_text(encoding="utf-8"))
    return [statistics.median(seconds) for seconds in found]


def _process(rank: int, folder: str, texts: Sequence[str], rounds: int, kept: Path) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.training_worker import emitted
    from meshdsl.backends.engines.in_process import load

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    steps = [emitted(load(text), rank) for text in texts]
    taken: list[list[float]] = [[] for _ in steps]
    order, draw = list(range(len(steps))), random.Random(0)
    for turn in range(rounds + 1):
        draw.shuffle(order)
        for number in order:
            dist.barrier()
            started = time.perf_counter()
            steps[number]()
            dist.barrier()
            if turn:  # the first warms up
                taken[number].append(time.perf_counter() - started)
    if rank == 0:
        kept.write_text(json.dumps(taken), encoding="utf-8")
    dist.destroy_process_group()


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank correlation; without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    apart = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * apart / (len(one) * (len(one) ** 2 - 1))


def main() -> None:
    """Measure, predict, time and print."""
    parser = argparse.ArgumentParser(description="Predicted beside measured times of eight layouts")
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    print(machine())
    keep(measure())
    programs = [made(layout) for layout in LAYOUTS]
    predicted = [program.report["time"]["seconds"] for program in programs]
    measured = timed([program.text for program in programs], rounds)
    print(f"{'':16}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for layout, ours, theirs in sorted(
        zip(LAYOUTS, predicted, measured, strict=True), key=lambda row: row[2]
    ):
        print(f"{layout:16}{1e3 * ours:9.2f} ms{1e3 * theirs:9.2f} ms{theirs / ours:8.2f}")
    print(f"Spearman's rank correlation: {spearman(predicted, measured):.2f}")


if __name__ == "__main__":
    main()
