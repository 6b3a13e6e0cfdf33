"""Training on real processes: few tests, since each start takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines import watchdog
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.backends.train.devices import train_local, train_torchrun
from meshdsl.backends.train.job import DataFiles, Event, Job
from meshdsl.backends.train.training_run import train, troubled
from tests.backends.training_text import LINE, LINE_TABLES, line, training_text
from tests.waiting import until, until_gone

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are tethered on Linux only")


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Points on a line, 40 of them."""
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=x @ np.array([1, -2, 3], np.float32))
    return str(tmp_path / "d.npz")


def never() -> bool:
    return False


TIMED = ("seconds", "path", "samples_per_s", "memory", "measured")


def alike(records: list[Any]) -> list[dict[str, Any]]:
    """Records without what differs from run to run."""
    return [{k: v for k, v in record.items() if k not in TIMED} for record in records]


@pytest.mark.usefixtures("forked_ranks")
def test_processes_train_as_threads_do(data, tmp_path):
    found = {}
    for engine in (train_local, train_torchrun):
        folder = tmp_path / engine.__name__
        folder.mkdir()
        names = {"log": "log", "out": "o.npz", "checkpoint": "ck"}
        written: Any = {option: f"{folder}/{name}" for option, name in names.items()}
        files = DataFiles(data, fraction=0.5)
        job = Job(files, 9, seed=4, eval_every=4, checkpoint_every=5, **written)
        events: list[Event] = []
        ending = engine(line(evaluated=True), job, events.append, never)
        assert (ending.how, ending.step) == ("finished", 9)
        log = [json.loads(text) for text in (folder / "log").read_text().splitlines()]
        assert [record["step"] for record in log] == list(range(1, 10))
        with np.load(folder / "o.npz") as out:
            told = (alike(events), alike(log), out["w"].tolist(), ending.evaluated)
        found[engine.__name__] = told
    assert found["train_local"] == found["train_torchrun"]


@pytest.mark.usefixtures("forked_ranks")
def test_trouble_is_found_as_among_threads(data):
    told = []
    for engine in (train_local, train_torchrun):
        emitted = line(rate=4)
        ending = engine(emitted, Job(DataFiles(data), 200), lambda event: None, never)
        assert ending.trouble is not None
        told.append(troubled(ending, ending.trouble, emitted.places, None).message)
    assert told[0] == told[1]
    assert "`loss` became inf first" in told[0]


# --- killed --------------------------------------------------------------------------------------

SLOW = """
import os, time
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{rank} {os.getpid()}\\n")
time.sleep(0.05)
""" + LINE.format(rate=0.01)


def slow() -> Emitted:
    """A line through points, in steps of a twentieth of a second that write down who runs."""
    return Emitted(training_text(SLOW, LINE_TABLES, groups=[("d",)]))


def at_work(path: Path) -> dict[int, int]:
    """The process of each device, once they have made some steps."""
    until(lambda: path.exists() and path.read_text().count("\n") > 12)
    lines = (text.split() for text in path.read_text().splitlines()[:12])
    return {int(rank): int(pid) for rank, pid in sorted(lines)}


@pytest.mark.usefixtures("temporary")
def test_a_process_that_is_killed_is_named_and_the_run_resumed(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    victim: dict[int, int] = {}

    def kill() -> None:
        victim.update(at_work(tmp_path / "pids"))
        os.kill(victim[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    job = Job(DataFiles(data), 10**6, checkpoint=str(tmp_path / "ck"), checkpoint_every=2)
    with pytest.raises(RunError) as caught:
        train_torchrun(slow(), job, lambda event: None, never)
    killer.join()
    error = caught.value
    assert (error.code, error.device) == ("MD0721", 1)
    assert error.message.startswith("the process of device 1 was killed")
    until_gone(victim.values())
    last = Checkpoints(str(tmp_path / "ck")).latest()
    assert last is not None
    assert last.step >= 2
    job = Job(DataFiles(data), last.step + 2, checkpoint=str(tmp_path / "ck"), resume=True)
    ending = train_local(line(rate=0.01), job, lambda event: None, never)
    assert (ending.start, ending.step) == (last.step, last.step + 2)
    assert ending.start % 2 == 0


PARENT = """
import signal
from meshdsl.backends.train.job import DataFiles, Job
from meshdsl.backends.train.training_run import train
from tests.backends.test_train_torchrun import slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground of a terminal
ending = train(slow(), "torchrun", Job(DataFiles("d.npz"), 10**6, checkpoint="ck"), print)
print("ENDED", ending.how, ending.step)
"""


@linux
@pytest.mark.usefixtures("data")
def test_no_process_outlives_an_interrupted_parent(forks, tmp_path):
    """Nor one that is killed: see `test_torchrun.py`."""
    (tmp_path / "parent.py").write_text(PARENT)
    log, pids = tmp_path / "printed", tmp_path / "pids"
    with forks.ranks(0, ["parent.py"], tmp_path, log, PIDS=str(pids)) as parent:
        workers = at_work(pids).values()
        os.kill(parent.pid, signal.SIGINT)
        until_gone(workers)
        parent.wait()
    words = log.read_text().split()[-3:]  # it ended after a step, with a checkpoint
    assert words[:2] == ["ENDED", "interrupted"]
    assert (tmp_path / "ck" / f"step-{words[2]}").is_dir()


@linux
@pytest.mark.usefixtures("forked_ranks")
def test_a_process_that_is_stopped_is_told_and_can_go_on(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv(watchdog.SETTING, "2")
    told: list[str] = []
    monkeypatch.setattr(watchdog, "say", lambda diagnostic: told.append(diagnostic.message))
    victim: list[int] = []

    def expected(text: str) -> bool:
        stopped = f"device 1 is stopped (process {victim[0]})"
        return stopped in text and "device 0 is waiting in all_reduce" in text

    def stop() -> None:
        """Stop device 1, and let it go on when that is reported."""
        victim.append(at_work(tmp_path / "pids")[1])
        os.kill(victim[0], signal.SIGSTOP)
        until(lambda: any(map(expected, told)))
        os.kill(victim[0], signal.SIGCONT)

    other = threading.Thread(target=stop)
    other.start()
    job, going = Job(DataFiles(data), 10**6), other.is_alive
    ending = train_torchrun(slow(), job, lambda event: None, lambda: not going())
    assert ending.how == "interrupted"
    assert any(map(expected, told))


def test_mistakes_are_told_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.delattr(subprocess, "Popen")
    with pytest.raises(Exception, match="cannot read"):
        train(line(), "torchrun", Job(DataFiles(str(tmp_path / "none.npz")), 3), lambda event: None)
