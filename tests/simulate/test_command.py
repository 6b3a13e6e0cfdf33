"""`meshdsl simulate`, and the measured traces of `run` and `train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import Cli, write
from tests.project import ROOT
from tests.report.golden import PIPELINE, source
from tests.simulate.test_trace import checked

TEXT = """\
dim batch = 16, io = 8, hidden = 12, layers = 6
dim io2 = io
mesh two = { d: 2 }
mesh four = { d: 2, t: 2 }
layout zero3 { batch -> d, params: io2 -> d, state: io2 -> d }
layout square { batch -> d, hidden -> t }
program p(x[batch, io], y[batch, io]) {
  h = x
  repeat layers {
    param w1[io, hidden]
    param w2[hidden, io2]
    h = h + einsum(relu(einsum(h, w1 -> [batch, hidden])), w2 -> [batch, io2])[io2 -> io]
  }
  loss = mean((h - y)^2)
  return loss
  minimize loss with adam(lr=0.02)
}
"""
LAYOUTS = {"zero3": ("--mesh", "two"), "square": ("--mesh", "four")}


@pytest.fixture
def program(cli: Cli) -> str:
    """The program of a file."""
    return write(TEXT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_table_and_the_facts_agree(layout: str, program: str, cli: Cli) -> None:
    where = ("f.mdsl", "--layout", layout, *LAYOUTS[layout], "--cluster", "h100")
    found = json.loads(cli("simulate", *where, "--json").out)
    assert found["seconds"] == pytest.approx(
        found["compute"] + found.get("idle", 0) + sum(found["exposed"].values())
    )
    assert found["seconds"] == pytest.approx(sum(e["seconds"] for e in found["lines"]))
    assert found["peak"]["bytes"] < found["peak"]["limit"]
    told = cli("simulate", *where, "--top", "2").out
    assert f"p under layout {layout} on mesh" in told
    assert "The 2 slowest of" in told
    for figure in found["sending"]:
        assert f"exposed, {figure} " in told
    unrolled = json.loads(cli("simulate", *where, "--json", "--unroll").out)
    assert unrolled == found


def test_a_trace_is_written_once(program: str, cli: Cli) -> None:
    given = ("simulate", "f.mdsl", "--layout", "square", *LAYOUTS["square"], "--cluster", "h100")
    assert "wrote t.json" in cli(*given, "--trace", "t.json").out
    checked(json.loads(Path("t.json").read_text()))
    before = Path("t.json").read_bytes()
    assert cli(*given, "--trace", "t.json").codes == ["error[MD0503]"]
    assert cli(*given, "--trace", "t.json", "--force").code == 0
    assert Path("t.json").read_bytes() == before
    assert cli(*given, "--trace", "none/t.json").codes == ["error[MD0502]"]
    assert cli(*given, "--trace", "f.mdsl", "--force").codes == ["error[MD0502]"]


BAD = {
    "--cluster h1000": "MD0320",
    "--cluster none.toml": "MD0320",
    "--cluster h100 --against none.json": "MD0631",
    "--cluster h100 --against f.mdsl": "MD0631",
    "--cluster h100 --against t.json --trace u.json": "MD0601",
    "--cluster h100 --top 0": "MD0604",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options(options: str, program: str, cli: Cli) -> None:
    done = cli("simulate", "f.mdsl", *options.split())
    assert done.code == 2
    assert done.codes == [f"error[{BAD[options]}]"]


def test_a_pipeline_is_that_of_a_stage(cli: Cli) -> None:
    path = write(source(PIPELINE.example).text)
    where = ("simulate", path, "--layout", PIPELINE.layout, "--cluster", "h100")
    step = " ".join(cli(*where).out.split())
    assert "a device of stage 0 waits for other stages" in step
    assert "a step takes" in step
    assert "stage 1 ends after" in " ".join(cli(*where, "--stage", "1").out.split())
    facts = json.loads(cli(*where, "--stage", "2", "--json", "--trace", "t.json").out)
    assert facts["stage"] == 2
    assert 0 < facts["bubble"] < 1
    assert checked(json.loads(Path("t.json").read_text()))


@pytest.mark.parametrize("layout", [PIPELINE.layout, "zero3"])
def test_a_stage_that_there_is_not(layout: str, cli: Cli) -> None:
    path = write(source(PIPELINE.example).text)
    done = cli("simulate", path, "--layout", layout, "--cluster", "h100", "--stage", "3")
    assert done.code == 1
    assert done.codes == ["error[MD0336]"]


# --- measured traces -----------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_is_measured_and_compared(program: str, cli: Cli) -> None:
    where = ("f.mdsl", "--layout", "square", *LAYOUTS["square"])
    run = ("run", *where, "--engine", "torchrun", "--seed", "3")
    assert cli(*run, "--out", "plain.npz").code == 0
    done = cli(*run, "--out", "timed.npz", "--trace", "t.json")
    assert done.code == 0, done.err
    assert "wrote t.json" in done.out
    same_outputs("plain.npz", "timed.npz")
    trace = json.loads(Path("t.json").read_text())
    found = checked(trace)
    assert {pid for pid, _ in found} == {0, 1, 2, 3}
    steps = [e for e in found[0, 0] if e["args"]["op"] == "relu"]
    assert len(steps) == 6
    assert trace["otherData"]["evaluate"] is True
    compared = ("simulate", *where, "--cluster", "cpu", "--against", "t.json")
    facts = json.loads(cli(*compared, "--json").out)
    assert {e["name"] for e in facts["kinds"]} >= {"einsum", "relu", "all_reduce"}
    assert all(e["ratio"] is None or e["ratio"] > 0 for e in facts["kinds"])
    told = cli(*compared).out
    assert "by kind of operator" in told
    other = cli(
        "simulate", "f.mdsl", "--layout", "zero3", "--cluster", "cpu", "--against", "t.json"
    )
    assert other.codes == ["error[MD0632]"]


def same_outputs(*paths: str) -> None:
    """Timing changes no number."""
    one, other = (dict(np.load(path)) for path in paths)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.usefixtures("forked_ranks")
def test_a_step_of_a_training_is_measured(program: str, cli: Cli) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((64, 8)).astype(np.float32) for _ in range(2))
    np.savez("d.npz", x=x, y=y)
    where = ("f.mdsl", "--layout", "zero3", *LAYOUTS["zero3"])
    train = ("train", *where, "--data", "d.npz", "--steps", "5", "--seed", "3")
    assert cli(*train, "--out", "plain.npz").code == 0
    done = cli(*train, "--out", "timed.npz", "--engine", "torchrun", "--trace", "t.json")
    assert done.code == 0, done.err
    assert "wrote t.json" in done.out
    one, other = (dict(np.load(path)) for path in ("plain.npz", "timed.npz"))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
    found = checked(json.loads(Path("t.json").read_text()))
    phases = {e["args"]["phase"] for e in found[1, 0]}
    assert phases == {"forward", "backward", "update"}
    facts = cli("simulate", *where, "--cluster", "cpu", "--against", "t.json", "--json")
    kinds = {e["name"] for e in json.loads(facts.out)["kinds"]}
    assert "adam_update" in kinds


@pytest.mark.parametrize("command", ["run f.mdsl", "train f.mdsl --data d.npz --steps 2"])
def test_threads_are_not_timed(command: str, program: str, cli: Cli) -> None:
    done = cli(*command.split(), "--trace", "t.json")
    assert done.codes == ["error[MD0633]"]
    assert not Path("t.json").exists()


def test_the_same_for_any_hash_seed(program: str, cli: Cli) -> None:
    """Facts and trace of two processes that order sets differently."""
    given = ["simulate", "f.mdsl", "--layout", "square", *LAYOUTS["square"], "--cluster", "h100"]
    told = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "meshdsl", *given, "--trace", f"{seed}.json", "--no-cache"]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told.append(done.stdout.partition("wrote ")[0] + Path(f"{seed}.json").read_text())
    assert told[0] == told[1]
