"""A process of a job under torchrun: the work of one device. `python -m` runs it.

It reads the emitted texts, joins the other processes, and reports how it failed, if it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from meshdsl.backends.engines.execution import InputSource
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.in_process import (
    LoadedProgram,
    Programs,
    Tensors,
    as_array,
    call_device,
    emitted_in,
    given_tables,
)
from meshdsl.backends.engines.line_profiler import timer
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.stack_sampler import (
    WAITING,
    called,
    collective_of,
    is_of_device,
    place_in,
    stand,
)
from meshdsl.backends.engines.torchrun import JOB, OVER, TERMINATED, TOLD, Report
from meshdsl.backends.generate.generation import Speaker
from meshdsl.backends.generate.task import Task
from meshdsl.backends.runtime.array_files import Refused, read_arrays, write_npz
from meshdsl.backends.runtime.communication import make_groups
from meshdsl.backends.runtime.main import on_device, start
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.evaluation import EvaluationJob, evaluate_process
from meshdsl.backends.train.exported_params import export_params
from meshdsl.backends.train.job import Job
from meshdsl.backends.train.trainer import Control, Trainer
from meshdsl.diagnostics import DiagnosticError
from meshdsl.disk_cache import from_json

T = TypeVar("T")

WARMING = 2
"""Runs before one that is timed."""

FAILED = 3
"""The exit code of a process that has failed."""

EVERY, PATIENCE = 0.025, 20.0
"""Seconds between two looks at the parent, and the most that a failed process waits for it."""


def main(kind: str, folder: Path) -> None:
    """Do one device's work on the job in `folder`, or write its failure there.

    `kind` is one of `WORK`. The parent ends processes: by SIGTERM, never by Ctrl-C.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _, frame: _terminated(folder, rank, frame))
    try:
        programs = emitted_in(folder).load()
        where = start(rank, world)
        groups = make_groups(programs.mesh, programs.groups, rank)
        with torch.inference_mode():
            WORK[kind](folder, Ranks(programs.mesh, rank, dist, groups, where), programs)
    except Exception as error:  # whatever it is, the parent reports it
        leave(folder, describe_error(rank, error))
        linger(folder)
        os._exit(FAILED)  # without waiting for others to close connections
    # Without the barrier gloo may abort when one process closes while others still read.
    dist.barrier()
    dist.destroy_process_group()


# --- kinds of work -------------------------------------------------------------------------------


def run(folder: Path, ranks: Ranks, programs: Programs) -> None:
    """Run the program once, and write its outputs."""
    job, program, where = _job(folder, InputSource), programs.program, ranks.where
    inputs, params = (
        read_arrays(path, proven=True) if path else {} for path in (job.inputs, job.params)
    )
    (blocks,), _ = given_tables(program, inputs, params, job.seed, [ranks.rank])
    of_tables = [program.INPUTS, program.PARAMS, getattr(program, "STATES", {})]
    tables = on_device(blocks, of_tables, where)
    if job.timed:
        outputs = _timed(ranks, program, tables, job.timed)
    else:
        outputs = call_device(ranks, program, tables)
    _write(folder / "out.npz", ranks, program.OUTPUTS, outputs)
    if specs := program.updated:
        held = {name: x for table in tables[1:] for name, x in table.items()}
        held |= {name: held[name].cpu().to(where) for name, spec in specs.items() if spec.away}
        _write(folder / "updated.npz", ranks, specs, held)


def train(folder: Path, ranks: Ranks, programs: Programs) -> None:
    """Train to the end, and write the outcome."""
    job = _job(folder, Job)
    data = open_data(job.data, programs.program.INPUTS, job.seed, proven=True)
    control = Control(_teller(folder, ranks.rank), (folder / "stop").exists)
    trainer = Trainer(ranks, programs, job, data, control)
    ending = trainer.run()
    path, specs = job.out, trainer.held.value_specs
    if path is not None and ending.trouble is None:
        values = {0: _gathered(ranks, specs, trainer.held.values())}
        undivided = {name: spec._replace(split={}) for name, spec in specs.items()}
        ranks.first_does(lambda: export_params(values, path, undivided, {}, job.weights))
    if ranks.rank == 0:
        (folder / "ending.json").write_text(json.dumps(asdict(ending)), encoding="utf-8")


def evaluate(folder: Path, ranks: Ranks, programs: Programs) -> None:
    """Evaluate on all samples, and write the averages."""
    evaluate_process(folder, ranks, programs, _job(folder, EvaluationJob))


def generate(folder: Path, ranks: Ranks, programs: Programs) -> None:
    """Generate, and tell every piece of text."""
    tell = _teller(folder, ranks.rank)
    Speaker(ranks, programs, _job(folder, Task), lambda piece: tell(asdict(piece))).run()


WORK: Mapping[str, Callable[[Path, Ranks, Programs], None]] = {
    "run": run,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
}
"""The kinds of work that processes do on one device."""


def _job(folder: Path, type_: type[T]) -> T:
    """The job as the parent has written it."""
    return from_json((folder / JOB).read_text(encoding="utf-8"), type_)


def _teller(folder: Path, rank: int) -> Callable[[Any], None]:
    """Tells the parent something: a line of JSON, from device 0 alone."""
    if rank:
        return lambda fact: None
    file = open(folder / TOLD, "a", encoding="utf-8", buffering=1)

    def tell(fact: Any) -> None:
        file.write(json.dumps(fact) + "\n")

    return tell


def _timed(ranks: Ranks, program: LoadedProgram, tables: list[Tensors], folder: str) -> Tensors:
    """The outputs of a run that is timed after others, which connect the processes.

    Those before it work on copies: a step changes what it is given.
    """
    for _ in range(WARMING):
        copies = [{name: x.clone() for name, x in table.items()} for table in tables]
        call_device(ranks, program, copies)
    dist.barrier()
    timing = timer(program.device, ranks.where)
    outputs = timing.device(ranks.rank, ranks.groups(program.GROUPS), *tables)
    timing.write(folder, ranks.rank)
    return outputs


def _gathered(
    ranks: Ranks, specs: Mapping[str, Spec], local: Mapping[str, torch.Tensor]
) -> Tensors:
    """Whole tensors on device 0, none on the others."""
    parts = {name: ranks.whole_on_first(spec, local[name]) for name, spec in specs.items()}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _write(
    path: Path, ranks: Ranks, specs: Mapping[str, Spec], local: Mapping[str, torch.Tensor]
) -> None:
    """Write whole tensors on device 0."""
    gathered = _gathered(ranks, specs, local)
    if ranks.rank == 0:
        write_npz(str(path), {n: as_array(x) for n, x in gathered.items()}, durable=False)


# --- failures ------------------------------------------------------------------------------------


def describe_error(rank: int, error: Exception) -> Report:
    """An error as data: its line of `device`, the counters of the loops around it, the collective.

    What refuses the run has a code, or diagnostics.
    """
    line, loops = place_in(traceback.walk_tb(error.__traceback__))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    sends = [frame.f_code.co_filename.endswith("distributed_c10d.py") for frame in frames]
    in_collective = any(sends) or frames[-1].f_code.co_qualname in WAITING
    calls = [inner for outer, inner in pairwise(frames) if is_of_device(outer.f_code)]
    told = error.diagnostics if isinstance(error, DiagnosticError) else ()
    return {
        "rank": rank,
        "kind": type(error).__name__,
        "message": str(error),
        "code": _code(error),
        "line": line,
        "loops": loops,
        "position": getattr(error, "position", None),
        "in_collective": in_collective,
        "collective": called(calls[-1]) if calls and in_collective else "",
        "diagnostics": [{"code": d.code, "message": d.message, "help": d.help} for d in told],
    }


def _code(error: Exception) -> str | None:
    """The code of the diagnostic of a run that is refused."""
    if isinstance(error, RunError):
        return error.code
    return "MD0501" if isinstance(error, Refused) else None


def _terminated(folder: Path, rank: int, frame: FrameType | None) -> NoReturn:
    """End on torchrun's signal: another process has failed. Report the activity of this one."""
    leave(
        folder,
        {
            "rank": rank,
            "kind": TERMINATED,
            "message": "",
            "code": None,
            "line": stand(frame)[0],
            "loops": {},
            "position": None,
            "in_collective": True,
            "collective": collective_of(frame),
            "diagnostics": [],
        },
    )
    os._exit(FAILED)


def leave(folder: Path, report: Report) -> None:
    """Write the report of a failure, the first of this process."""
    path = folder / f"report.rank{report['rank']}"
    if not path.exists():
        path.write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()


def linger(folder: Path) -> None:
    """Wait, briefly, for the parent's signal that no other process will fail."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not (folder / OVER).exists():
        time.sleep(EVERY)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
