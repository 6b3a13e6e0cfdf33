"""`run --verify` and `compare` of a training step: a wrong update fails, in every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ops.opdef import REGISTRY, TorchCall, lookup

from .command import Cli, write

CHECKED = ["run f.mdsl --step --verify", "compare f.mdsl --layouts split"]

STEP = """
dim b = 4, s = 4, m = s, h = 2, k = 2, d = 4
mesh pair = { x: 2 }
layout split { b -> x, state: d -> x }
layout one { h -> x }
program step(x[b, s, d]) {
  param wq[d, h, k]
  param wv[d, h, k]
  q = einsum(x, wq -> [b, s, h, k])
  v = einsum(x, wv -> [b, s, h, k])[s -> m]
  a = softmax[m](einsum(q, q[s -> m] -> [b, s, h, m]))
  o = einsum(a, v -> [b, s, h, k])
  loss = mean(o^2)
  return loss
  minimize loss with adam(lr=1e-4)
}
# What is asked for by name is computed: the softmax stays one of its own.
expect split on pair { a: [b@x, s, h, m] }
"""

ZERO = """
dim b = 8, d = 4
mesh pair = { x: 2 }
layout split { b -> x }
program centred(x[b, d]) {
  param bias[d] = ones()
  param w[d] = normal(1.0)
  z = x * w + bias
  loss = mean((z - mean[b](z))^3)
  d_bias = grad(loss, bias)
  return loss, d_bias
  minimize loss with adamw(lr=1e-3)
}
"""


def _as_if_contiguous(call: TorchCall) -> str:
    dy, y, at = call.tensor(0), call.tensor(1), call.ins[0].index(call.attrs["dim"].name)
    kernel = "torch.ops.aten._softmax_backward_data.out"
    return f"{kernel}({dy}, {y}, {at}, {call.outs[0].dtype.torch}, grad_input={dy})"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a softmax is written over a cotangent whatever its strides are."""
    wrong = replace(lookup("softmax_grad"), in_place={0: _as_if_contiguous})
    monkeypatch.setitem(REGISTRY, "softmax_grad", wrong)


@pytest.mark.parametrize("layout", ["split", "one"])
def test_a_step_is_verified(cli: Cli, layout: str) -> None:
    done = cli("run", write(STEP), "--layout", layout, "--step", "--verify")
    assert done.code == 0, done.err
    shown = [line.split() for line in done.out.splitlines()]
    heads = [line for line in shown if line[:1] == ["parameter"]]
    assert [line[-1] for line in heads] == ["error"]
    rows = {line[0]: line[-1] for line in shown if line[:1] in (["wq"], ["wv"])}
    rows["states"] = next(line[-1] for line in shown if line[1:2] == ["states"])
    assert all(float(error) < 1e-5 for error in rows.values())
    assert "verified: equal to the float64 reference up to rounding" in done.out


@pytest.mark.usefixtures("planted")
def test_a_wrong_update_fails(cli: Cli) -> None:
    """The loss is right: only what the step has made of `wq` tells."""
    done = cli("run", write(STEP), "--layout", "split", "--step", "--verify")
    assert done.code == 3
    assert set(done.codes) == {"error[MD0708]"}
    assert "`wq` after the step differs by" in done.err
    assert "`wq.m` after the step differs by" in done.err
    assert "`loss`" not in done.err
    assert "verified: NOT equal to the reference" in done.out


@pytest.mark.usefixtures("planted")
def test_it_says_so_as_data(cli: Cli) -> None:
    done = cli("run", write(STEP), "--layout", "split", "--step", "--verify", "--json")
    assert done.code == 3
    found = json.loads(done.out)
    assert [o["ok"] for o in found["outputs"]] == [True]
    wrong = {u["name"] for u in found["updated"] if not u["ok"]}
    assert {"wq", "wq.m", "wq.v"} == wrong
    assert {u["role"] for u in found["updated"]} == {"param", "state"}


@pytest.mark.usefixtures("forked_ranks")
def test_real_processes_bring_back_what_a_step_updates(cli: Cli) -> None:
    done = cli(
        "run",
        write(STEP),
        "--layout",
        "split",
        "--engine",
        "torchrun",
        "--step",
        "--verify",
        "--json",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    names = {u["name"] for u in found["updated"] if u["ok"]}
    assert names == {"step", "wq", "wv", "wq.m", "wq.v", "wv.m", "wv.v"}


@pytest.mark.usefixtures("planted")
def test_columns_with_a_wrong_update_are_not_called_equal(cli: Cli) -> None:
    done = cli("compare", write(STEP), "--layouts", "split,one")
    assert done.code == 3
    assert "`wq` after the step of column A differs by" in done.err
    said = " ".join(done.out.split())
    assert "(`wq` after the step), against the float64 reference." in said
    assert "A: NOT equal, by" in said
    assert "A and B: NOT equal, by" in said


def test_columns_of_a_step_are_compared_by_what_it_updates(cli: Cli) -> None:
    done = cli("compare", write(STEP), "--layouts", "split,one", "--json")
    assert done.code == 0, done.err
    (pair,) = json.loads(done.out)["run"]["between"]
    assert pair["ok"]
    assert pair["role"] in ("output", "param", "state")


def test_without_step_a_program_is_evaluated(cli: Cli) -> None:
    """With the given parameters; nothing is updated, and `--step` begins with the same outputs."""
    given: dict[str, Any] = {n: np.full((4, 2, 2), 0.5, np.float32) for n in ("wq", "wv")}
    np.savez("params.npz", **given)
    path = write(STEP)
    found = {}
    for words in ("", "--step"):
        done = cli(
            "run", path, *words.split(), *"--params params.npz --out out.npz --force".split()
        )
        assert done.code == 0, done.err
        found[words] = np.load("out.npz")["loss"]
        assert ("after one step" in done.out) is bool(words)
        assert ("nothing was updated" in done.out) is not bool(words)
    assert found[""] == pytest.approx(found["--step"], rel=1e-6)
    plan = md.load(path).compile("pair", "split")
    assert plan(**plan.sample(), params=given).loss == pytest.approx(found[""], rel=1e-6)


@pytest.mark.parametrize("words", ["--step", "--step --engine reference"])
def test_a_step_of_what_minimises_nothing_is_refused(cli: Cli, words: str) -> None:
    path = write(STEP.replace("  minimize loss with adam(lr=1e-4)\n", ""))
    done = cli("run", path, *words.split())
    assert (done.code, done.codes) == (2, ["error[MD0510]"])


# --- what cancels to nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["run f.mdsl --step --verify", "compare f.mdsl --layouts split"]
)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_a_gradient_that_is_0_by_cancellation_verifies(cli: Cli, command: str, dtype: str) -> None:
    write(ZERO)
    done = cli(*command.split(), "--dtype", dtype)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "command", ["run f.mdsl --step --verify", "compare f.mdsl --layouts split"]
)
def test_a_gradient_that_should_be_0_and_is_not_fails(
    cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what should cancel is off by a hundredth."""
    real = lookup("div").torch
    wrong = replace(lookup("div"), torch=lambda call: f"{real(call)} * 1.01", in_place={})
    monkeypatch.setitem(REGISTRY, "div", wrong)
    write(ZERO)
    done = cli(*command.split())
    assert done.code == 3
    assert "`d_bias`" in done.err
