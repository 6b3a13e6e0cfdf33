"""Full disks, interrupts and kills at any moment of a save leave a whole checkpoint."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.train import checkpoint as disk
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.diagnostics import DiagnosticError
from tests.backends.test_checkpoint_folder import MESH, SPECS, latest, listing, save

ROOT = Path(__file__).resolve().parent.parent.parent
CALLS = ("mkdir", "rename", "replace", "fsync")
"""The calls of the system that a save makes in an order that matters."""


def at_call(monkeypatch, number, act):
    """Let the `number`-th call of a save (from 0) be `act` instead; returns the calls made."""
    made = []

    def replaced(name, real):
        def call(*args, **kwargs):
            made.append(name)
            if len(made) - 1 == number:
                act()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, replaced(name, getattr(os, name)))
    return made


def calls_of_a_save(tmp_path, monkeypatch, again):
    """The number of calls of a save, of a new step or of an existing one."""
    with monkeypatch.context() as patch:
        for step in (10, 20, 30):
            save(tmp_path / "count", step)
        made = at_call(patch, -1, None)
        save(tmp_path / "count", 30 if again else 40)
    assert {"mkdir", "rename", "replace", "fsync"} == set(made)
    return len(made)


def test_every_file_is_on_the_disk_before_its_folder_gets_its_name(tmp_path, monkeypatch):
    synced, named = set(), []
    fsync, rename = os.fsync, os.rename

    def syncing(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def renaming(source, target, **options):
        inside = [p for p in Path(source).rglob("*") if p.is_file()]
        named.append(len(inside))
        late = [p.name for p in (*inside, Path(source)) if p.stat().st_ino not in synced]
        assert not late, f"not on the disk when it is renamed: {late}"
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    save(tmp_path, 10)
    assert max(named) > 1


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step again"])
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=["full", "broken", "forbidden"]
)
def test_an_error_at_any_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, number, again):
    step = 30 if again else 40
    failed = 0
    for at in range(calls_of_a_save(tmp_path, monkeypatch, again)):
        folder = tmp_path / str(at)
        for earlier in (10, 20, 30):
            save(folder, earlier)

        def act():
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            at_call(patch, at, act)
            try:
                save(folder, step, 99)
            except DiagnosticError as error:
                failed += 1
                (told,) = error.diagnostics
                assert told.code == "MD0540"
                assert os.strerror(number) in told.message
                assert "as it was" in (told.help or "")
        assert latest(folder) in [(30, 30), (step, 99)], at
        assert not [name for name in listing(folder) if name.startswith(".")], at
        save(folder, 50)
        assert listing(folder)[:1] + listing(folder)[-1:] == ["latest", "step-50"]
        assert len(listing(folder)) == 4, (at, listing(folder))
    assert failed > 5


def test_an_interrupt_leaves_nothing_half_written_and_goes_on(tmp_path, monkeypatch):
    for at in range(calls_of_a_save(tmp_path, monkeypatch, again=False)):
        folder = tmp_path / str(at)
        for earlier in (10, 20, 30):
            save(folder, earlier)

        def act():
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            at_call(patch, at, act)
            with pytest.raises(KeyboardInterrupt):
                save(folder, 40)
        assert latest(folder) in [(30, 30), (40, 40)]
        assert ".step-40.partial" not in listing(folder)


def forked(work):
    """Do `work` in a child process; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
    return child


def killed_at_every_call(folder: Path, again: bool) -> None:
    """Kill a saving process at its first call of the system, its second, and so on to its end."""
    step = 30 if again else 40
    for at in range(1000):
        here = folder / str(at)
        for earlier in (10, 20, 30):
            save(here, earlier)

        def work(here=here, at=at):
            at_call(pytest.MonkeyPatch(), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(here, step, 99)

        _, status = os.waitpid(forked(work), 0)
        assert latest(here) in [(30, 30), (step, 99)], (at, latest(here))
        save(here, 50)
        assert latest(here) == (50, 50)
        assert len(listing(here)) == 4, (at, listing(here))
        if status == 0:
            assert at > 8, at
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, (at, status)


def killed_at_random(folder: Path, wanted: int) -> None:
    """Kill a process that saves without pause until `wanted` died while they were saving.

    Each goes on from the last whole checkpoint. They get longer when they come to nothing, so that
    a busy machine needs more time and fails no more.
    """
    chance, longest, hits = random.Random(3), 0.02, 0
    save(folder, 1)
    while hits < wanted or latest(folder)[0] < 10:
        before, _ = latest(folder)
        child = forked(lambda: saving_on(folder))
        time.sleep(chance.uniform(0.2, 1) * longest)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        step, number = latest(folder)
        assert number == step >= before
        longest *= 1.5 if step == before else 0.9
        hits += any(name.startswith(".step") for name in listing(folder))


def saving_on(folder: Path) -> None:
    """Save one step after the other."""
    step, _ = latest(folder)
    while True:
        step += 1
        save(folder, step)


def too_large(folder: Path) -> None:
    """Save more than the limit on the size of a file allows."""
    save(folder, 10)
    wanted = {n: spec._replace(dims={"a": 300_000}) for n, spec in SPECS.items()}
    blocks = {"w": torch.zeros(150_000), "m": torch.zeros(300_000).bfloat16()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    checkpoints = Checkpoints(str(folder))
    try:
        checkpoints.save(20, {0: blocks, 1: blocks}, wanted, {}, Ranks(MESH))
    except DiagnosticError as error:
        (told,) = error.diagnostics
        assert told.code == "MD0540", told
        print(told.message)
    else:
        raise AssertionError("it was written")
    assert latest(folder) == (10, 10)
    assert listing(folder) == ["latest", "step-10"]


@pytest.fixture
def in_a_process(forks, tmp_path_factory):
    """Runs this file as a program: what forks, or limits itself, has a process of its own."""
    log = tmp_path_factory.mktemp("logs") / "log"
    return lambda *words: forks.run_script(__file__, *words, log=log)


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step again"])
def test_killed_at_any_call_the_last_whole_one_is_found(tmp_path, in_a_process, again):
    assert in_a_process("every", tmp_path, int(again)) == ""


def test_killed_at_random_the_last_whole_one_is_found(tmp_path, in_a_process):
    assert in_a_process("random", tmp_path, 12) == ""


def test_a_write_that_the_system_refuses_is_told(tmp_path, in_a_process):
    assert "could not be written" in in_a_process("large", tmp_path)
    assert disk.names(tmp_path) == ["step-10"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "every":
        killed_at_every_call(where, sys.argv[3] == "1")
    elif what == "random":
        killed_at_random(where, int(sys.argv[3]))
    else:
        too_large(where)
