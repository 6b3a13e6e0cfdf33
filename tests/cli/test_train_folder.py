"""Two trainings in one folder, and signals that end one: whose the folder is, and when."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from meshdsl.backends.train.lock import NAME, locked
from meshdsl.backends.train.training_run import own_folder
from meshdsl.diagnostics import DiagnosticError
from tests.waiting import until

from .command import Cli
from .test_train import has_logged, logged, points, train, training

__all__ = ["points"]
LOCK = Path("ck") / NAME


def owner(pid: int, host: str) -> None:
    """Leave the lock file of a run behind."""
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(json.dumps({"pid": pid, "host": host, "since": "yesterday"}))


def dead() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_folder_is_one_runs_until_that_ends(how: signal.Signals, points: str, cli: Cli) -> None:
    with training(points, "--checkpoint", "ck", "--checkpoint-every", "1") as process:
        until(lambda: has_logged(3))
        command = ["train", points, "--data", "d.npz", "--steps", "9", "--checkpoint", "ck"]
        for options in (["--resume"], ["--force"]):
            done = cli(*command, *options)
            assert (done.code, done.codes) == (2, ["error[MD0518]"])
            assert f"ck is in use by process {process.pid}, since 20" in done.err
        process.send_signal(how)
        process.communicate()
    codes = {signal.SIGINT: 130, signal.SIGTERM: 128 + signal.SIGTERM}
    assert process.returncode == codes.get(how, -how)
    assert LOCK.exists() == (how == signal.SIGKILL)
    steps = len(logged("log")) + 1
    train(cli, "--steps", str(steps), "--resume", "--checkpoint", "ck", "--log", "log")
    assert len(logged("log")) == steps
    assert not LOCK.exists()


def test_a_run_that_is_ended_while_it_prepares_leaves_its_folder(cli: Cli) -> None:
    """Between the lock and the first step there are seconds, in which a plan is searched."""

    def prepares() -> None:
        with own_folder("ck", resume=False, force=False):
            assert LOCK.exists()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        prepares()
    assert ended.value.code == 128 + signal.SIGTERM
    assert not LOCK.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("left", ["", "{", "[]", "{}", "3"])
def test_a_lock_file_of_nobody_is_no_obstacle(left: str, points: str, cli: Cli) -> None:
    LOCK.parent.mkdir()
    LOCK.write_text(left)
    train(cli, "--steps", "1", "--checkpoint", "ck")
    assert not LOCK.exists()


def test_a_run_on_this_machine_that_is_no_more_is_no_obstacle(points: str, cli: Cli) -> None:
    for pid in (dead(), os.getpid()):  # a process of another time may have had our number
        owner(pid, socket.gethostname())
        train(cli, "--steps", "1", "--checkpoint", "ck", "--force")


def test_of_a_run_on_another_machine_nobody_can_know(points: str, cli: Cli) -> None:
    owner(dead(), "elsewhere")
    command = ["train", points, "--data", "d.npz", "--steps", "1", "--checkpoint", "ck"]
    done = cli(*command)
    assert done.codes == ["error[MD0518]"]
    assert "on elsewhere, since yesterday" in done.err
    assert f"remove {LOCK}" in done.err
    LOCK.unlink()
    assert cli(*command).code == 0


@pytest.mark.parametrize(("alive", "refused"), [(True, True), (False, False)])
def test_where_the_file_system_has_no_locks(
    alive: bool, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.chdir(tmp_path)
    owner(os.getppid() if alive else dead(), socket.gethostname())
    if refused:
        with pytest.raises(DiagnosticError, match="MD0518"), locked("ck"):
            pytest.fail("it is another's")
    else:
        with locked("ck"):
            assert json.loads(LOCK.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("there", [True, False], ids=["in a folder", "in none"])
def test_on_a_full_disk_there_is_no_lock_left(
    call: str, there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = [tmp_path / "ck"] if there else []
    for folder in before:
        folder.mkdir()
    monkeypatch.setattr(os, call, full)
    refused = pytest.raises(DiagnosticError, match=r"MD0502.*No space left on device")
    with refused, locked(str(tmp_path / "ck")):
        pytest.fail("nobody knows whose it is")
    assert list(tmp_path.rglob("*")) == before


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / NAME).symlink_to("other")
    with pytest.raises(DiagnosticError, match="is a link"), locked(str(tmp_path)):
        pytest.fail("there is no lock")
    assert (tmp_path / "other").read_text() == "mine"


def test_one_at_a_time_has_a_folder(tmp_path: Path) -> None:
    inside, most, won = [0], [0], [0] * 8

    def again_and_again(number: int) -> None:
        while won[number] < 20:
            with contextlib.suppress(DiagnosticError), locked(str(tmp_path / "ck")):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                won[number] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=again_and_again, args=(n,)) for n in range(len(won))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not list(tmp_path.rglob(NAME))


def test_a_run_that_fails_leaves_no_folder(points: str, cli: Cli) -> None:
    command = ["train", points, "--data", "none.npz", "--steps", "1", "--checkpoint", "a/b/ck"]
    assert cli(*command).codes == ["error[MD0505]"]
    assert not Path("a").exists()


def test_what_is_begun_with_ctrl_c_ignored_goes_on(points: str, cli: Cli) -> None:
    """As a shell does for what a script puts in the background: it is meant for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with training(points, "--checkpoint", "ck") as process:
            until(has_logged)
            process.send_signal(signal.SIGINT)
            steps = len(logged("log"))
            until(lambda: has_logged(steps + 20))
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate()
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 128 + signal.SIGTERM, err
