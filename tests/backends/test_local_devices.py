"""The threads of a local run: their cores, which ones are waited for, and the stall warning."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from meshdsl.backends.engines import local_devices, local_dist, watchdog
from meshdsl.backends.engines.failures import Failure
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.local_devices import DeviceThreads, Late
from meshdsl.backends.engines.local_dist import LocalDist, Released
from meshdsl.backends.engines.watchdog import Doing, Watchdog, stall_seconds, stalled
from meshdsl.diagnostics import Diagnostic, DiagnosticError
from tests.project import ROOT
from tests.waiting import release, until

# --- cores ---------------------------------------------------------------------------------------

CORES = """
import os, torch
from meshdsl.backends.engines.local_devices import DeviceThreads
from meshdsl.backends.engines.local_dist import LocalDist
count = max(2, len(os.sched_getaffinity(0)))
x = torch.ones(512, 512)
dist = LocalDist({"r": count}, (("r",),))
tasks = lambda: len(os.listdir("/proc/self/task"))
before = tasks()

def call(rank):
    x @ x  # the first that a device does: torch has not counted threads here yet
    dist.all_reduce(torch.ones(1), group=dist.groups(rank)["r"])
    return tasks()

found = DeviceThreads(count, dist, call).run()
assert not found.failures, found.failures
assert torch.get_num_threads() == 2, torch.get_num_threads()
print(max(found.outputs) - before - count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_device_takes_its_share_of_the_cores() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORES],
        env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


# --- who computes for the others ----------------------------------------------------------------


@pytest.mark.parametrize("early", [0, 1])
def test_a_device_that_is_stopped_while_it_computes_for_all_releases_them(
    monkeypatch: pytest.MonkeyPatch, early: int
) -> None:
    """The last to arrive computes; Ctrl-C may reach it there, with no member absent any more."""
    dist = LocalDist({"r": 2}, (("r",),))
    first = threading.Event()

    def stopped(calls: object) -> None:
        raise Released

    def call(rank: int) -> None:
        if rank != early:
            first.wait()
            until(lambda: dist.waits(early) != "")
        first.set()
        dist.all_reduce(torch.ones(1), group=dist.groups(rank)["r"])
        raise AssertionError("nobody computed it")

    monkeypatch.setattr(local_dist, "perform", stopped)
    found = DeviceThreads(2, dist, call).run()
    assert (found.failures, found.outputs) == ([], [{}, {}])


# --- who is waited for after a failure -----------------------------------------------------------

TEXT = """\
def device(rank):
    for layer in range(3):
        a = rank
        b = a
    return b
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time as the test has it, for who looks at devices."""
    time = SimpleNamespace(now=0.0)
    for module in (local_devices, watchdog):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.now))
    return time


def at(line: int, layer: int = 0, step: int = 0, device: int = 0) -> Failure:
    """The position of a device, or of its failure."""
    return Failure(device, "ValueError", "", line, {"layer": layer}, step=step)


FAILED = at(4, layer=1, step=5)
EARLIER = [at(3, 1, 5), at(4, 0, 5), at(4, 1, 5), at(4, 2, 4), at(5, 2, 4)]
LATER = [at(3, 2, 5), at(5, 0, 5), at(3, 0, 6)]


def test_devices_that_may_still_fail_earlier_are_waited_for(clock: SimpleNamespace) -> None:
    late = Late(TEXT, patience=5.0)
    places = dict(enumerate([*EARLIER, *LATER]))
    assert late.among([FAILED], places) == list(range(len(EARLIER)))
    assert late.among([FAILED, at(2, 0, 0)], places) == []


def test_a_device_is_waited_for_as_long_as_it_gets_on(clock: SimpleNamespace) -> None:
    late = Late(TEXT, patience=5.0)
    for place in (at(3, 0, 4), at(4, 0, 4), at(3, 1, 4), at(3, 0, 5), at(3, 1, 5), at(4, 1, 5)):
        clock.now += 4
        assert late.among([FAILED], {0: place}) == [0]
    for now, expected in ((clock.now + 4, [0]), (clock.now + 6, [])):
        clock.now = now
        assert late.among([FAILED], {0: at(3, 1, 5)}) == expected, "it only goes in a circle"


# --- the stall warning ---------------------------------------------------------------------------


def test_a_device_that_hangs_is_told_and_left_alone(emit, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    body = f"""
    for layer in range(2):
        x = all_reduce(torch.ones(4), groups["r"], "sum")
        if rank == 1 and layer == 1:
            os.close(os.open({str(tmp_path / "pipe")!r}, os.O_RDONLY))
    return {{"y": all_reduce(x, groups["r"], "sum")}}
    """
    outputs = "{'y': Spec('f32', {'n': 4}, {})}"
    text = emit(body, {"r": 3}, groups=(("r",),), outputs=outputs, use=("all_reduce",))
    number = text.split("\n").index("def device(rank, groups, inputs, params):") + 1
    told: list[str] = []
    expected = (
        "no progress for 0.5 s: device 1 is at a.mdsl:4; devices 0 and 2 are waiting in all_reduce "
        "sum of float32[4] over r at a.mdsl:5"
    )

    def go_on(diagnostic: Diagnostic) -> None:
        told.append(diagnostic.message)
        if told[-1] == expected:
            release(tmp_path / "pipe")

    monkeypatch.setattr(watchdog, "say", go_on)
    monkeypatch.setenv(watchdog.SETTING, "0.5")
    found = run_local(text, lines={number + i: f"a.mdsl:{i}" for i in range(9)})
    assert found.outputs["y"].tolist() == [9] * 4
    assert expected in told


def test_it_is_told_again_after_twice_as_long(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watchdog.SETTING, "8")
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(watchdog, "say", lambda d: told.append((clock.now, d.message)))
    watch = Watchdog(lambda: {0: Doing(min(clock.now, 10), "at a.mdsl:1")})
    for second in range(1, 60):  # it gets on for ten seconds, then no more
        clock.now = float(second)
        watch.look()
    assert [now for now, _ in told] == [18, 26, 42]
    assert [text.split(":")[0] for _, text in told] == [
        f"no progress for {n} s" for n in (8, 16, 32)
    ]
    clock.now = 10_000.0  # the machine slept, or the whole process was stopped
    watch.look()
    assert len(told) == 3


def test_many_devices_are_counted() -> None:
    found = {rank: Doing(0, "waiting in a", waits=True) for rank in range(1024)}
    found[9] = Doing(0, "at b")
    assert stalled(found, 60).message == (
        "no progress for 60 s: device 9 is at b; "
        "devices 0, 1, 2, 3, 4, 5, 6, 7 and 1,015 more are waiting in a"
    )


def test_the_warning_is_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    watchdog.say(stalled({0: Doing(0, "at a.mdsl:1")}, 60))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warning[MD0723]: no progress for 60 s: device 0 is at a.mdsl:1\n")


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf"])
def test_what_is_no_number_of_seconds_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watchdog.SETTING, given)
    with pytest.raises(DiagnosticError, match=f"MD0602.*{given}"):
        stall_seconds()


def test_a_minute_is_long_unless_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(watchdog.SETTING)
    assert stall_seconds() == 60
    monkeypatch.setenv(watchdog.SETTING, "2.5")
    assert stall_seconds() == 2.5


def test_nothing_is_told_where_it_is_not_wanted(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watchdog.SETTING, "0")
    watch = Watchdog(lambda: pytest.fail("nobody looks"))
    clock.now = 1e9
    watch.look()
