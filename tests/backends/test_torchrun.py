"""Real processes: few tests, since each start takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines import torchrun, watchdog
from meshdsl.backends.engines.execution import InputSource, run_torchrun
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.in_process import Emitted, run_local
from meshdsl.backends.engines.stack_sampler import report_of
from meshdsl.backends.engines.torchrun import (
    OVER,
    Aftermath,
    Launcher,
    TorchrunError,
    devices_of,
)
from meshdsl.backends.torch.emitter import ProgramText
from tests.backends.training_text import training_text
from tests.ranks import run_script
from tests.waiting import release, until, until_gone

EVERYTHING = """
x, g = inputs["x"], groups["r"]
flags = x[0] > 0
return {
    "total": all_reduce((x * 2).mT, g, "sum").mT,
    "top": reduce_scatter(x * (1 + rank), 0, g, "max"),
    "whole": all_gather(x, 1, g),
    "turned": all_to_all(x, 0, 1, g),
    "any": all_reduce(flags, g, "sum"),
    "w": params["w"] * 1,
    "half": x.bfloat16(),
    "scalar": all_reduce(x.sum(), g, "sum"),
}
"""
TABLES = {
    "groups": (("r",),),
    "inputs": "{'x': Spec('f32', {'a': 4, 'b': 6}, {'b': ('r',)}, ('normal', 1.0))}",
    "params": "{'w': Spec('i32', {'k': 8}, {'k': ('r',)}, ('below', 9))}",
    "outputs": """{
        'total': Spec('f32', {'a': 4, 'c': 3}, {}),
        'top': Spec('f32', {'a': 4, 'c': 3}, {'a': ('r',)}),
        'whole': Spec('f32', {'a': 4, 'b': 6}, {}),
        'turned': Spec('f32', {'a': 4, 'b': 6}, {'a': ('r',)}),
        'any': Spec('bool', {'c': 3}, {}),
        'w': Spec('i32', {'k': 8}, {'k': ('r',)}),
        'half': Spec('bf16', {'a': 4, 'b': 6}, {'b': ('r',)}),
        'scalar': Spec('f32', {}, {}),
    }""",
    "use": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
}


@pytest.mark.usefixtures("temporary")
def test_two_processes_compute_what_the_local_engine_does(emit, forks, tmp_path, monkeypatch):
    """Started by torch's own launcher, with the packages that the user has on the path."""
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    text = emit(f"import beside{EVERYTHING}", {"r": 2}, **TABLES)
    local = run_local(text, seed=5)
    x = run_local(text, seed=5).outputs["whole"]
    np.testing.assert_array_equal(local.outputs["turned"], x)
    given = np.arange(8)
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "w.npz", w=given)
    real = run_torchrun(text, InputSource(str(tmp_path / "x.npz"), str(tmp_path / "w.npz")))
    assert devices_of(text) == 2
    assert set(real.outputs) == set(local.outputs)
    for name, array in real.outputs.items():
        expected = given if name == "w" else local.outputs[name]
        np.testing.assert_array_equal(array, expected, err_msg=name)
    # And by itself, without this package.
    local = run_local(text, {"x": x})
    for name, array in forks.run_gloo(text, {"x": x}, tmp_path, 2).items():
        np.testing.assert_array_equal(array, local.outputs[name], err_msg=name)


@pytest.mark.usefixtures("forked_ranks")
def test_parts_of_a_sum_are_added_up():
    body = """
    states["e"] += rank + 1
    states["n"] += rank // 2
    return {}
    """
    tables = """
INPUTS = PARAMS = OUTPUTS = {}
STATES = {
    "e": Spec("f32", {"a": 2}, {}, ("zeros",), parts=("x",)),
    "n": Spec("f32", {"a": 2}, {"a": ("y",)}, ("zeros",), parts=("x",)),
}
"""
    text = training_text(body, tables, {"x": 2, "y": 2}, [("x", "y")]).text
    for found in (run_local(text), run_torchrun(text, InputSource())):
        assert {n: x.tolist() for n, x in found.updated.items()} == {"e": [4, 4], "n": [1, 1]}


@pytest.mark.usefixtures("forked_ranks")
def test_errors_of_processes_are_told_like_those_of_the_local_engine(emit):
    body = """
    x = all_reduce(torch.ones(3), groups["r"], "sum")
    time.sleep(2 * rank)
    bad = torch.tensor([1, 7])
    check_index(bad, "v", 5, "a.mdsl:3", ("b",), (2 * (1 - rank),))
    return {"y": all_reduce(x, groups["r"], "sum")}
    """
    use = ("all_reduce", "check_index")
    text = emit(body, {"r": 2}, groups=(("r",),), use=use)
    told = []
    for run in (run_local, lambda text: run_torchrun(text, InputSource())):
        with pytest.raises(RunError) as caught:
            run(text)
        told.append((caught.value.code, caught.value.message, caught.value.device))
    # Of device 1, which is late.
    message = "a.mdsl:3: index 7 at [b=1] is out of range for dim `v` of size 5"
    assert told == [("MD0801", message, 1)] * 2


@pytest.mark.usefixtures("forked_ranks")
def test_refusals_come_before_any_collective(emit, tmp_path):
    text = emit(EVERYTHING, {"r": 2}, **TABLES)
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 1)), y=np.zeros(2))
    with pytest.raises(TorchrunError) as caught:
        run_torchrun(text, InputSource(str(tmp_path / "x.npz")))
    assert caught.value.code == "MD0501"
    assert "dim b is 1, not 6" in caught.value.message
    assert "the program has no such name" in caught.value.message


@pytest.mark.usefixtures("forked_ranks")
def test_a_process_that_hangs_is_told_and_left_alone(emit, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    body = f"""
    total = all_reduce(torch.ones(3), groups["r"], "sum")
    if rank == 1:
        os.close(os.open({str(tmp_path / "pipe")!r}, os.O_RDONLY))
    return {{"y": all_reduce(total, groups["r"], "sum")}}
    """
    outputs = "{'y': Spec('f32', {'n': 3}, {})}"
    text = emit(body, {"r": 2}, groups=(("r",),), outputs=outputs, use=("all_reduce",))
    number = text.split("\n").index("def device(rank, groups, inputs, params):") + 1
    expected = "s: device 1 is at a.mdsl:3; device 0 is waiting in all_reduce at a.mdsl:4"
    told = []

    def go_on(diagnostic):
        told.append(diagnostic.message)
        if told[-1].endswith(expected):
            release(tmp_path / "pipe")

    monkeypatch.setattr(watchdog, "say", go_on)
    monkeypatch.setenv(watchdog.SETTING, "1")
    found = run_torchrun(text, InputSource(), {number + i: f"a.mdsl:{i}" for i in range(9)})
    np.testing.assert_array_equal(found.outputs["y"], [4, 4, 4])
    assert any(text.endswith(expected) for text in told)


FAILS = "raise ValueError('no luck')"
SIX = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1"}
TOO_FEW = "error: this program is for 8 devices, { rows: 2, cols: 4 }, but 6 started\n"
RIGHT = "run: torchrun --nproc-per-node 8 prog.py --seed 7\n"
ALONE = {
    "too few": (["--seed", "7"], SIX, 2, TOO_FEW),
    "the right command": (["--seed", "7"], SIX, 2, RIGHT),
    "no folder": (["--out", "none/out.npz"], {}, 2, "there is no folder"),
    "another ending": (["--out", "out.txt"], {}, 2, "it is no .npz"),
    "a file": (["--out", "old.npz"], {}, 2, "--force overwrites it"),
    "no file": (["--inputs", "none.npz"], {}, 2, "No such file"),
    "no option": (["--nonsense"], {}, 2, "unrecognized arguments"),
    "a failure": ([], {}, 3, "error on device 0, line LINE of prog.py: no luck"),
}
"""Arguments and environment of one process, its exit code, and what it prints on errors."""


def test_what_one_process_is_told(emit, forks, tmp_path):
    """Its exit code, and a sentence without a traceback, whatever is wrong."""
    (tmp_path / "old.npz").write_bytes(b"")
    for name, (_, environment, _, _) in ALONE.items():
        mesh = {"rows": 2, "cols": 4} if environment else {"r": 1}
        text = emit(FAILS if name == "a failure" else "return {}", mesh)
        (tmp_path / f"{name}.py").write_text(text)
    told = json.loads(forks.run_script(__file__, tmp_path, log=tmp_path / "log"))
    line = (tmp_path / "a failure.py").read_text().split("\n").index(f"    {FAILS}") + 1
    for name, (_, _, expected, message) in ALONE.items():
        code, out, err = told[name]
        assert (code, out) == (expected, ""), name
        assert message.replace("LINE", str(line)) in err, name
        assert "Traceback" not in err, name
    assert told["too few"][2].count("\n") == 2
    assert told["a failure"][2].count("\n") == 1


def test_one_file_for_two_outputs_is_refused(monkeypatch):
    from meshdsl.backends.runtime.main import parse_options

    monkeypatch.setattr(sys, "argv", ["p.py", "--out", "n.npz", "--updated", "n.npz", "--force"])
    with pytest.raises(ValueError, match=r"n\.npz .* named twice"):
        parse_options({"x": 1}, trains=True)


def run_alone(folder):
    """The results of cases, each in a process of its own, forked from this one."""
    import torch.distributed  # noqa: F401  # once for all

    for name, (arguments, environment, _, _) in ALONE.items():
        (folder / f"{name}.py").replace(folder / "prog.py")
        yield name, run_script(folder / "prog.py", arguments, environment, folder)
        (folder / "prog.py").replace(folder / f"{name}.py")


SLEEPER = """
import os, time
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
return {}
"""


def workers(path):
    """The process ids of the workers that have started."""
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what became of a process")
def test_nobody_waits_for_an_error_of_a_process_that_is_gone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "report.rank0").write_text("{}")
    aftermath = Aftermath(watchdog.Processes(tmp_path, 2, {}))
    for pid, over in ((os.getpid(), False), (gone.pid, True)):
        doing = {"pid": pid, "collective": "", "mark": 1, "beat": 1, "line": None, "outside": "f"}
        (tmp_path / report_of(1)).write_text(json.dumps(doing))
        aftermath.look()
        assert (tmp_path / OVER).exists() is over


def test_an_error_of_the_parent_ends_all_processes(emit, tmp_path, monkeypatch):
    """Whatever the processes do: these import nothing, which is quicker."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    (tmp_path / "sleeper.py").write_text(SLEEPER.replace("return {}", ""))
    monkeypatch.setattr(torchrun, "WORKER", [str(tmp_path / "sleeper.py")])

    def look():
        if len(workers(tmp_path / "pids")) == 2:
            raise KeyboardInterrupt

    emitted = Emitted(ProgramText(emit(SLEEPER, {"r": 2}), {}))
    with pytest.raises(KeyboardInterrupt), Launcher("run", emitted) as launcher:
        launcher.run(InputSource(), look=look)
    until_gone(workers(tmp_path / "pids"))
    assert not launcher.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are tethered on Linux only")
def test_workers_do_not_outlive_a_parent_that_is_killed(emit, forks, tmp_path):
    (tmp_path / "prog.txt").write_text(emit(SLEEPER, {"r": 2}))
    (tmp_path / "parent.py").write_text(
        "from meshdsl.backends.engines.execution import InputSource, run_torchrun\n"
        "run_torchrun(open('prog.txt').read(), InputSource())"
    )
    log, pids = tmp_path / "log", tmp_path / "pids"
    with forks.ranks(0, ["parent.py"], tmp_path, log, PIDS=str(pids)) as parent:
        started = until(lambda: len(found := workers(pids)) == 2 and found)
        os.kill(parent.pid, signal.SIGKILL)
        until_gone(started)
        assert parent.wait() == -signal.SIGKILL


if __name__ == "__main__":
    print(json.dumps(dict(run_alone(Path(sys.argv[1])))))
