"""A process of a run under torchrun: one device of an emitted text. `python -m` runs it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshdsl.backends.engines.in_process import (
    LoadedProgram,
    as_array,
    check_given,
    load,
    local_tensors,
    moved_away,
)
from meshdsl.backends.engines.line_profiler import timer
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.stack_sampler import WAITING, place_in
from meshdsl.backends.engines.torchrun import OVER, RunJob
from meshdsl.backends.runtime.array_files import Refused, read_arrays, write_npz
from meshdsl.backends.runtime.communication import make_groups
from meshdsl.backends.runtime.main import start
from meshdsl.backends.runtime.values import Spec
from meshdsl.disk_cache import checked

Tensors = dict[str, torch.Tensor]

WARMING = 2
"""Runs before one that is timed."""

EVERY, PATIENCE = 0.025, 20.0
"""Seconds between two looks at the parent, and the most that a failed process waits for it."""


def main(folder: Path, work: Callable[[Path, int, int], None]) -> None:
    """Do one device's work on the job in `folder`, or write its failure there.

    `work` takes the folder, the rank and the number of devices.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        work(folder, rank, world)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:  # whatever it is, the parent reports it
        refused = isinstance(error, Refused | LocalRunError)
        about = {"exit": 2 if refused else 3, "code": getattr(error, "code", "MD0501")}
        leave(folder, rank, {**about, **describe_error(error)})
    # Without the barrier gloo may abort when one process closes while others still read.
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, rank: int, world: int) -> None:
    """Run the program once, and write its outputs."""
    job = checked(json.loads((folder / "job.json").read_text(encoding="utf-8")), RunJob)
    program = load((folder / "prog.py").read_text(encoding="utf-8"))
    mesh, states = program.MESH, getattr(program, "STATES", None)
    inputs, params = (
        read_arrays(path, proven=True) if path else {} for path in (job.inputs, job.params)
    )
    check_given(inputs, program.INPUTS, "inputs")
    check_given(params, program.PARAMS, "parameters")
    sides = [(program.INPUTS, inputs), (program.PARAMS, params), (states or {}, params)]
    blocks = [local_tensors(mesh, *side, job.seed, [rank])[0] for side in sides]
    moved_away(states or {}, blocks[2:])
    where = start(rank, world)
    held = [{name: block.to(where) for name, block in table.items()} for table in blocks]
    groups = make_groups(mesh, program.GROUPS, rank)
    arguments = held[: 2 if states is None else 3]
    with torch.inference_mode():
        if job.timed:
            outputs = _timed(program, arguments, (rank, groups, where), job.timed)
        else:
            outputs = program.device(rank, groups, *arguments)
    ranks = Ranks(mesh, rank, dist, groups, where)
    _write(folder / "out.npz", program.OUTPUTS, ranks, outputs)
    if states is not None:
        now = {name: x.cpu().to(where) if states[name].away else x for name, x in held[2].items()}
        _write(folder / "updated.npz", {**program.PARAMS, **states}, ranks, {**held[1], **now})


def _timed(
    program: LoadedProgram, held: list[Tensors], place: tuple[int, Any, torch.device], folder: str
) -> dict[str, torch.Tensor]:
    """The outputs of a run that is timed after others, which connect the processes.

    Those before it work on copies: a step changes what it is given.
    """
    rank, groups, where = place
    for _ in range(WARMING):
        copies = [{name: x.clone() for name, x in table.items()} for table in held]
        program.device(rank, groups, *copies)
    dist.barrier()
    timing = timer(program.device, where)
    outputs = timing.device(rank, groups, *held)
    timing.write(folder, rank)
    return outputs


def _write(
    path: Path, specs: Mapping[str, Spec], ranks: Ranks, local: Mapping[str, torch.Tensor]
) -> None:
    """Write whole tensors on device 0."""
    gathered = {n: ranks.whole_on_first(spec, local[n]) for n, spec in specs.items()}
    if ranks.rank == 0:
        write_npz(
            str(path), {n: as_array(x) for n, x in gathered.items() if x is not None}, durable=False
        )


# --- failures ------------------------------------------------------------------------------------


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as data: its line of `device`, and the counters of the loops around it."""
    trace, in_collective = error.__traceback__, False
    line, loops = place_in(traceback.walk_tb(trace))
    while trace is not None:
        code = trace.tb_frame.f_code
        waits = code.co_qualname in WAITING and trace.tb_next is None
        in_collective |= waits or code.co_filename.endswith("distributed_c10d.py")
        trace = trace.tb_next
    facts = {"kind": type(error).__name__, "message": str(error), "line": line, "loops": loops}
    position = getattr(error, "position", None)
    return {**facts, "position": position, "in_collective": in_collective}


def leave(folder: Path, rank: int, found: Mapping[str, Any]) -> NoReturn:
    """Write the report of a failure and exit, without waiting for others to close connections."""
    path = folder / f"report.rank{rank}"
    if not path.exists():
        path.write_text(json.dumps({**found, "rank": rank}), encoding="utf-8")
    sys.stdout.flush()
    linger(folder)
    os._exit(int(found["exit"]))


def linger(folder: Path) -> None:
    """Wait, briefly, for the parent's signal that no other process will fail."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not (folder / OVER).exists():
        time.sleep(EVERY)


if __name__ == "__main__":
    main(Path(sys.argv[1]), run)
