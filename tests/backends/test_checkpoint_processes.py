"""Checkpoints of real processes over gloo: saved and loaded together, and failing together."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import local_part
from meshdsl.backends.train import checkpoint as disk
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.diagnostics import DiagnosticError
from tests.backends.test_checkpoint import MESHES, cut, found_in, loaded, placed, same, save, whole
from tests.project import ROOT
from tests.ranks import run_ranks
from tests.waiting import until

STATIONS = [("2x2", 1), ("4", 3), ("2x2", 5)]
"""Meshes, and the order of placements on them, that a state is carried through."""


def table(mesh: str, stride: int):
    return placed(MESHES[mesh], 14, stride)


def ranks_of(axes: dict[str, int], rank: int) -> Ranks:
    """A process, as it saves with all others."""
    return Ranks(axes, rank, dist, {"+".join(axes): dist.group.WORLD})


def carried(folder: Path, rank: int) -> None:
    """Load what the last station saved and save it under the next; bits are compared at each."""
    tensors = whole(table("1", 1))
    checkpoints = Checkpoints(str(folder))
    for step, (mesh, stride) in enumerate(STATIONS):
        specs, axes = table(mesh, stride), MESHES[mesh]
        found = found_in(folder)
        assert found.meta == {"at": step}
        held = loaded(folder, found, specs, axes, [rank])
        for name, block in held[rank].items():
            assert same(block, tensors[name][local_part(specs[name], axes, rank)]), name
        dist.barrier()  # nobody prunes what another still reads
        checkpoints.save(step + 1, held, specs, {"at": step + 1}, ranks_of(axes, rank))


def failing(folder: Path, rank: int) -> None:
    """One process cannot write: all raise the same error, and nothing of the checkpoint stays."""
    specs, axes = table("4", 1), MESHES["4"]
    held = loaded(folder, found_in(folder), specs, axes, [rank])
    dist.barrier()
    for broken in range(4):
        with pytest.MonkeyPatch.context() as patch:
            if rank == broken:
                patch.setattr(os, "fsync", refuse)
            with pytest.raises(DiagnosticError) as caught:
                Checkpoints(str(folder)).save(9, held, specs, {}, ranks_of(axes, rank))
        (told,) = caught.value.diagnostics
        assert told.code == "MD0540"
        assert os.strerror(errno.ENOSPC) in told.message
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-0"]
        dist.barrier()  # nobody begins anew while another still looks


def refuse(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forever(folder: Path, rank: int) -> None:
    """Save without pause until killed, or until another is."""
    specs, axes = table("4", 1), MESHES["4"]
    checkpoints = Checkpoints(str(folder))
    held = loaded(folder, found_in(folder), specs, axes, [rank])
    for step in range(1, 10**6):
        checkpoints.save(step, held, specs, {"at": step}, ranks_of(axes, rank))


SCENES = {"carried": carried, "failing": failing, "forever": forever}


@pytest.fixture
def begun(tmp_path):
    """A folder with the checkpoint of step 0, saved by one process."""
    specs = table("1", 1)
    save(tmp_path / "run", 0, whole(specs), specs, MESHES["1"], {"at": 0})
    return tmp_path / "run"


@pytest.mark.parametrize("scene", ["carried", "failing"])
def test_four_processes(begun, forks, tmp_path, scene):
    forks.run_script(__file__, scene, begun, log=tmp_path / "log")


def test_a_killed_process_leaves_the_last_whole_checkpoint(begun, forks, tmp_path):
    log = tmp_path / "log"
    with forks.ranks(0, [__file__, "forever", str(begun)], ROOT, log) as leader:
        until(lambda: len(disk.names(begun)) > 2)
        pids = log.read_text().split("\n")[0].split()
        os.kill(int(pids[2]), signal.SIGKILL)
        leader.wait()
    codes = [int(code) for code in log.read_text().splitlines()[-1].split()]
    assert codes[2] == -signal.SIGKILL
    assert 0 not in codes, "the others ended as if all were well"
    found = found_in(begun)
    assert found.step > 0
    assert found.meta == {"at": found.step}
    specs = table("1", 1)
    held = loaded(begun, found, specs, MESHES["1"], [0])[0]
    wanted = cut(whole(specs), specs, MESHES["1"])[0]
    assert all(same(held[name], tensor) for name, tensor in wanted.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    scene, where = sys.argv[1], Path(sys.argv[2])

    def take_part(rank: int) -> None:
        meeting = f"file://{where}.store.{scene}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=4)
        SCENES[scene](where, rank)
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(4, take_part, patient=scene == "forever")
