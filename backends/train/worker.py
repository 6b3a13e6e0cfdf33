"""Training in a process of its own: one device, started by torchrun. `python -m` runs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshdsl.backends.engines.process import describe_error, leave
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.stack_sampler import called, collective_of, is_of_device, stand
from meshdsl.backends.runtime.communication import make_groups
from meshdsl.backends.runtime.main import start
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.export import export_params
from meshdsl.backends.train.job import Ending, Event, job_from_json
from meshdsl.backends.train.local import Emitted, groups_of
from meshdsl.backends.train.state import ShardedState
from meshdsl.backends.train.trainer import Control, Trainer
from meshdsl.carets import to_json
from meshdsl.diagnostics import DiagnosticError


def main(folder: Path) -> None:
    """Train one device of the job in `folder`, and write its outcome there."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _, frame: _terminated(folder, rank, frame))
    try:
        ending = _train(folder, rank)
        if rank == 0:
            (folder / "ending.json").write_text(json.dumps(asdict(ending)), encoding="utf-8")
    except Exception as error:  # whatever it is, the parent reports it
        leave(folder, rank, _described(error))
    # Without the barrier gloo may abort when one process closes while others still read.
    dist.barrier()
    dist.destroy_process_group()


def _train(folder: Path, rank: int) -> Ending:
    job = job_from_json((folder / "job.json").read_text(encoding="utf-8"))
    emitted = Emitted(*(ProgramText(text, {}) for text in _texts(folder)))
    texts = emitted.load()
    program, mesh = texts.training, texts.training.MESH
    where = start(rank, int(os.environ["WORLD_SIZE"]))
    groups = make_groups(mesh, groups_of(texts), rank)
    ranks = Ranks(mesh, rank, dist, groups, where)
    data = open_data(job.data, program.INPUTS, job.seed, proven=True)
    control = Control(_Events(folder / "events", rank).tell, (folder / "stop").exists)
    with torch.inference_mode():
        trainer = Trainer(ranks, texts, job, data, control)
        ending = trainer.run()
        if job.out is not None and ending.trouble is None:
            _write(job.out, trainer.held, ranks)
    return ending


def _texts(folder: Path) -> list[str]:
    names = ("train.py", "evaluate.py")
    return [(folder / n).read_text(encoding="utf-8") for n in names if (folder / n).exists()]


def _write(path: str, held: ShardedState, ranks: Ranks) -> None:
    """Gather the parameters, and write them on device 0."""
    values = held.values()
    parts = {n: ranks.whole_on_first(spec, values[n]) for n, spec in held.value_specs.items()}
    gathered = {name: tensor for name, tensor in parts.items() if tensor is not None}
    specs = {name: spec._replace(split={}) for name, spec in held.value_specs.items()}
    ranks.first_does(lambda: export_params({0: gathered}, path, specs, {}))


class _Events:
    """The events that device 0 sends to the parent: a line of a file each."""

    def __init__(self, path: Path, rank: int) -> None:
        self.file = open(path, "a", encoding="utf-8", buffering=1) if rank == 0 else None

    def tell(self, event: Event) -> None:
        """Write one event, on device 0."""
        if self.file is not None:
            self.file.write(json.dumps(event) + "\n")


# --- failures ------------------------------------------------------------------------------------


def _described(error: Exception) -> dict[str, Any]:
    """An error as data for the parent: with diagnostics, or with line and collective."""
    facts: dict[str, Any] = {"exit": 3, **describe_error(error), "collective": ""}
    if isinstance(error, DiagnosticError):
        facts["diagnostics"] = [to_json(d) for d in error.diagnostics]
    trace = error.__traceback__
    while trace is not None and facts["in_collective"]:
        if is_of_device(trace.tb_frame.f_code) and trace.tb_next is not None:
            facts["collective"] = called(trace.tb_next.tb_frame)
        trace = trace.tb_next
    return facts


def _terminated(folder: Path, rank: int, frame: FrameType | None) -> NoReturn:
    """End on torchrun's signal: another process has failed. Report the activity of this one."""
    (line, _), collective = stand(frame), collective_of(frame)
    facts = {"kind": "Terminated", "message": "", "line": line, "collective": collective}
    leave(folder, rank, {"exit": 3, "loops": {}, "position": None, "in_collective": True, **facts})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
