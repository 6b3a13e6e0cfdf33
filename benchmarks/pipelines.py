"""How long a step of a pipeline takes: ours beside torch's, and beside the schedule's own time.

`python -m benchmarks.pipelines [--rounds N]` runs gloo processes, one a stage with one thread each.

- Sleeps as work: the rows of a schedule are carried out by the functions that every emitted program
  has, with sleeps for passes. Printed is the time from the first action to the last one, as a
  multiple of what `schedule/times.py` says: what messages and waiting add; and, for one, what it
  gains that the gradient of a stage's input is sent before those of its weights are computed.
- A language model of four layers, as `examples/lm.mdsl` but with a head of its own, on two
  processes: the emitted program by 1F1B, interleaved and ZB-H1, and the same model in
  `torch.distributed.pipelining`. They take turns; printed are medians, and ratios to ours by 1F1B
  in the same round. The losses of the first steps are compared before.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.training_cases import first_values
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.schedule.registry import generate
from meshdsl.schedule.table import row_text
from meshdsl.schedule.times import Times, timed
from meshdsl.schedule.verification import Verified, verify

LM = """
dim batch = 32, seq = 64, mem = seq, model = 128, heads = 4, key = 32, hidden = 512, vocab = 256
dim layers = 4
program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model] = normal(0.05)
  param head[model, vocab]
  x = embed[vocab = tokens]
  repeat layers {
    param g1[model] = ones()
    param g2[model] = ones()
    param wq[model, heads, key]
    param wk[model, heads, key]
    param wv[model, heads, key]
    param wo[heads, key, model]
    param w1[model, hidden]
    param w2[hidden, model]
    z = rms_norm[model](x, g1)
    q = einsum(z, wq -> [batch, heads, seq, key])
    k = einsum(z, wk -> [batch, heads, seq, key])
    v = einsum(z, wv -> [batch, heads, seq, key])
    s = einsum(q, k[seq -> mem] -> [batch, heads, seq, mem]) / sqrt(key)
    s = where(iota[seq] >= iota[mem], s, -1e9)
    o = einsum(softmax[mem](s), v[seq -> mem] -> [batch, heads, seq, key])
    x = x + einsum(o, wo -> [batch, seq, model])
    z = rms_norm[model](x, g2)
    x = x + einsum(gelu(einsum(z, w1 -> [batch, seq, hidden])), w2 -> [batch, seq, model])
  }
  logits = einsum(rms_norm[model](x), head -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
MICRO, RATE, KEY = 8, 0.1, 32
OURS = {"1F1B": "one_f_one_b", "interleaved": "interleaved", "ZB-H1": "zb_h1"}
THEIRS = {"torch 1F1B": 1, "torch interleaved": 2}
"""Torch's schedules, and how many stages a process has."""
SLEPT = (
    ("one_f_one_b", 2, True), ("one_f_one_b", 4, True), ("one_f_one_b", 4, False),
    ("interleaved", 2, True), ("interleaved", 4, True),
)  # fmt: skip
"""Schedules, processes, and whether a backward pass sends before its second half."""
UNIT = 0.01
"""Seconds of a forward pass, and of either half of a backward pass, as sleeps."""
CHECKED = 3


def emitted(schedule: str) -> str:
    """The text of the language model by a schedule."""
    text = f"{LM}layout staged {{ layers -> pipe }} with {schedule}[batch]({MICRO})\n"
    options = Options(layout="staged", mesh="pipe:2")
    return compile_source(Source("pipelines.mdsl", text), options, Diagnostics()).text


# --- processes -----------------------------------------------------------------------------------


def worker(pipe: Connection, rank: int, world: int, store: str) -> None:
    """Be one process: make, take steps, or sleep, as is asked, until None is."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    variants: dict[str, Callable[[], Any]] = {}
    while (asked := pipe.recv()) is not None:
        match asked:
            case "make", name, str(text):
                variants[name] = ours(text, rank)
            case "make", name, int(chunks):
                variants[name] = theirs(chunks, rank)
            case "steps", name, count:
                dist.barrier()
                started = time.perf_counter()
                found = [variants[name]() for _ in range(count)]
                pipe.send((time.perf_counter() - started, found))
            case "sleep", rows, early:
                pipe.send(slept(rows, rank, early))
    dist.barrier()
    dist.destroy_process_group()


def ours(text: str, rank: int) -> Callable[[], Any]:
    """A step of the emitted program."""
    import torch

    from benchmarks.training_worker import tensors
    from meshdsl.backends.engines.in_process import load

    program = load(text)
    groups = program.make_groups(program.MESH, program.GROUPS, rank)
    held = [tensors(program, specs, rank) for specs in (program.INPUTS, program.PARAMS)]
    states = tensors(program, program.STATES, rank)

    def step() -> float:
        with torch.inference_mode():
            return float(program.device(rank, groups, *held, states)["loss"])

    return step


def theirs(chunks: int, rank: int) -> Callable[[], Any]:
    """A step of the same model with `torch.distributed.pipelining`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    from benchmarks.pipelines_torch import Part
    from meshdsl.backends.engines.in_process import load

    whole = load(emitted("one_f_one_b"))
    specs = {name: spec._replace(split={}) for name, spec in (whole.PARAMS | whole.INPUTS).items()}
    given = {n: torch.from_numpy(a) for n, a in first_values(specs, {"pipe": 1}, 0).items()}
    count = 2 * chunks
    parts = [Part(given, stage, count) for stage in range(rank, count, 2)]
    stages = [
        PipelineStage(part, part.stage, count, torch.device("cpu"), group=dist.group.WORLD)
        for part in parts
    ]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())

    schedule: Any = (
        Schedule1F1B(stages[0], MICRO, loss)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, MICRO, loss)
    )
    params = [p for part in parts for p in part.parameters()]

    def step() -> float:
        losses: list[torch.Tensor] = []
        feed = (given["tokens"],) if rank == 0 else ()
        last = rank == 1
        schedule.step(*feed, target=given["targets"] if last else None, losses=losses)
        with torch.no_grad():
            for p in params:
                assert p.grad is not None
                p.sub_(p.grad, alpha=RATE)
                p.grad = None
        return float(torch.stack(losses).detach().mean()) if last else 0.0

    return step


def slept(rows: tuple[str, ...], rank: int, early: bool) -> float:
    """Carry a row out with sleeps for passes; the seconds that it took.

    A backward pass sends as soon as its first half is done, or, if not `early`, behind both.
    """
    import torch
    import torch.distributed as dist

    from meshdsl.backends.runtime.line import Line, actions

    shape, dtype = (64, 64), torch.float32
    groups = [dist.new_group() for _ in range(4)]
    forward = Line(groups[0], rows, "F", rank, shape, dtype, groups[1])
    backward = Line(groups[2], rows, "B", rank, shape, dtype, groups[3])
    last = max(stage for n, row in enumerate(rows) for _, _, stage in actions(row, n))
    value = torch.zeros(shape)
    dist.barrier()
    started = time.perf_counter()
    for action, micro, stage in actions(rows[rank], rank):
        if action == "F":
            _ = forward.receive(micro, stage) if stage else None
            time.sleep(UNIT)
            _ = forward.send(value, micro, stage) if stage < last else None
            continue
        _ = backward.receive(micro, stage) if stage < last else None
        time.sleep(UNIT if early else 2 * UNIT)
        _ = backward.send(value, micro, stage) if stage else None
        time.sleep(UNIT if early else 0)
    ended = time.perf_counter() - started
    forward.close(), backward.close()
    return ended


class Team:
    """So many processes, and what they are asked."""

    def __init__(self, count: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(Path(folder) / f"store{count}")
        self.pipes, self.processes = [], []
        for rank in range(count):
            mine, its = context.Pipe()
            process = context.Process(target=worker, args=(its, rank, count, store), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def ask(self, *asked: Any, answers: bool = True) -> list[Any]:
        """Ask all; their answers, in the order of ranks."""
        for pipe in self.pipes:
            pipe.send(asked)
        return [pipe.recv() for pipe in self.pipes] if answers else []

    def stop(self) -> None:
        """End all."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


# --- tables --------------------------------------------------------------------------------------


def texts_of(table: Verified) -> tuple[str, ...]:
    """The rows of a table as an emitted program has them."""
    return tuple(row_text(n, row) for n, row in enumerate(table.schedule.rows))


def sleeps(rounds: int, folder: str) -> None:
    """Print the table of schedules with sleeps as work."""
    print(f"\nSleeps of {1000 * UNIT:.0f} ms as work, {MICRO} micro-batches\n")
    print("| schedule | processes | gradients are sent | its time | measured | ratio |")
    print("|---|---|---|---|---|---|")
    teams = {count: Team(count, folder) for count in sorted({n for _, n, _ in SLEPT})}
    for name, count, early in SLEPT:
        table = verify(generate(name, count, MICRO))
        whole = float(timed(table, Times(early=early)).makespan * Fraction(UNIT))
        asked = "sleep", texts_of(table), early
        found = statistics.median(max(teams[count].ask(*asked)) for _ in range(rounds))
        sent = "between the halves" if early else "behind both"
        cells = f"{name} | {count} | {sent} | {whole:.3f} s | {found:.3f} s | {found / whole:.3f}"
        print(f"| {cells} |")
    for team in teams.values():
        team.stop()


def models(rounds: int, folder: str) -> None:
    """Print the table of the language model."""
    made: dict[str, str | int] = {name: emitted(schedule) for name, schedule in OURS.items()}
    made |= THEIRS
    team = Team(2, folder)
    losses = {}
    for name, what in made.items():
        team.ask("make", name, what, answers=False)
        losses[name] = team.ask("steps", name, CHECKED)[1][1]
        first = losses["1F1B"]
        assert all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(first, losses[name], strict=True)
        ), losses
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name in made:
            taken[name].append(max(seconds for seconds, _ in team.ask("steps", name, 5)) / 5)
    team.stop()
    print(f"\nA language model of 4 layers on 2 processes, {MICRO} micro-batches\n")
    print("| | ms a step | times ours by 1F1B |\n|---|---|---|")
    for name, seconds in taken.items():
        ratio = statistics.median(s / o for s, o in zip(seconds, taken["1F1B"], strict=True))
        print(f"| {name} | {1000 * statistics.median(seconds):.1f} | {ratio:.2f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        sleeps(rounds, folder)
    with tempfile.TemporaryDirectory() as folder:
        models(rounds, folder)


if __name__ == "__main__":
    main()
