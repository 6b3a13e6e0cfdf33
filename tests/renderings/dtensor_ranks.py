"""Runs DTensor renderings on gloo ranks: `python dtensor_ranks.py RANKS CASES RESULTS` (pickles).

A case is a dict with `text`, `inputs` and `params` (numpy arrays by name). Its result holds the
whole outputs, what every variable of the text held on rank 0 (`held`: name -> placements and local
shape), the shapes on all ranks, and the collectives that DTensor counted; or an `error`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

Case = dict[str, Any]


def run_case(case: Case, meshes: dict[str, Any]) -> dict[str, Any]:
    """One rendering on this rank; collective, so every rank must call it."""
    space: dict[str, Any] = {"__name__": "rendering"}
    exec(compile(case["text"], "rendering.py", "exec"), space)
    if case["mesh"] not in meshes:  # making the groups of a mesh takes longer than a small program
        meshes[case["mesh"]] = space["device_mesh"]("cpu")
    sides = ({n: torch.from_numpy(a) for n, a in case[s].items()} for s in ("inputs", "params"))
    seen: dict[str, Any] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is space["program"].__code__:
            seen.update(frame.f_locals)

    with CommDebugMode() as counted:
        sys.setprofile(watch)
        try:
            outputs = space["program"](meshes[case["mesh"]], *sides)
        finally:
            sys.setprofile(None)
    held = {n: _held(x) for n, x in seen.items() if isinstance(x, DTensor)}
    whole = {n: x.full_tensor().numpy() for n, x in outputs.items()}
    return {"outputs": whole, "held": held, "collectives": _reshards(counted)}


def _reshards(counted: CommDebugMode) -> int:
    """Collectives without those by which `distribute_tensor` hands out whole tensors."""
    handing_out = ("broadcast", "scatter_")
    counts = {str(name): n for name, n in counted.get_comm_counts().items()}
    return sum(n for name, n in counts.items() if not any(h in name for h in handing_out))


def _held(x: DTensor) -> tuple[str, tuple[int, ...]]:
    return str(list(x.placements)), tuple(x.to_local().shape)


def rank_main(rank: int, ranks: int, store: str, cases: str, results: str) -> None:
    """Run every case; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = []
    meshes: dict[str, Any] = {}
    for case in pickle.loads(Path(cases).read_bytes()):
        try:
            found.append(run_case(case, meshes))
        except Exception:
            found.append({"error": traceback.format_exc()})
        dist.barrier()
    if rank == 0:
        Path(results).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, so that torch is imported once."""
    ranks, cases, results = int(sys.argv[1]), *sys.argv[2:4]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        jobs = [
            context.Process(target=rank_main, args=(r, ranks, store, cases, results))
            for r in range(ranks)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    sys.exit(max(abs(job.exitcode or 0) for job in jobs))


if __name__ == "__main__":
    main()
