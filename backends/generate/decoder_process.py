"""Generating in a process of its own: one device, started by torchrun. `python -m` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshdsl.backends.engines.in_process import load
from meshdsl.backends.engines.process import main
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.generate.decoding import Speaker, groups_of
from meshdsl.backends.generate.task import task_from_json
from meshdsl.backends.runtime.communication import make_groups
from meshdsl.backends.runtime.main import start


def speak(folder: Path, rank: int, world: int) -> None:
    """Generate on one device of the job in `folder`; device 0 writes a line for every token."""
    task = task_from_json((folder / "job.json").read_text(encoding="utf-8"))
    program = load((folder / "prog.py").read_text(encoding="utf-8"))
    where = start(rank, world)
    ranks = Ranks(
        program.MESH, rank, dist, make_groups(program.MESH, groups_of(program), rank), where
    )
    with open(folder / "tokens", "a", encoding="utf-8", buffering=1) as tokens:
        with torch.inference_mode():
            Speaker(ranks, program, task, lambda t: print(json.dumps(t), file=tokens)).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), speak)
