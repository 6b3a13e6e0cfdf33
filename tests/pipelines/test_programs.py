"""Programs of many kinds in stages: several carries, penalties, dropout, inner loops, odd orders.

Each is compared with the same step on one device, and one of them with torch's own gradients.
"""

from __future__ import annotations

import functools
import itertools
import os
from fractions import Fraction

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.device import microbatching
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.microbatching import NotCut
from meshdsl.device.traffic import senders
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options, lower_placed
from meshdsl.placed.place import POLICIES
from meshdsl.report.explanation import explain
from tests.covering import in_turn
from tests.ir.test_text import read_again, statements

PROGRAMS: dict[str, str] = {}
PROGRAMS["two carries"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  y = x * 2
  aux = 0.0
  repeat l {
    param w[m, o]
    param v[m]
    h = tanh(einsum(x, w -> [b, o])[o -> m] + y * v)
    y = y + 0.5 * h
    aux = aux + mean(square(h))
    x = h
  }
  loss = mean(square(x - t)) + 0.1 * aux
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["batch last"] = """
dim m = 6, b = 8, l = 4, o = m
program p(x[m, b], t[m, b]) {
  repeat l {
    param w[o, m]
    x = tanh(einsum(w, x -> [o, b])[o -> m])
  }
  loss = sum(square(x - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["penalty inside"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  pen = 0.0
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m])
    pen = pen + sum(square(w))
  }
  loss = mean(square(x - t)) + 0.01 * pen
  return loss, pen
  minimize loss with OPT
  }
"""
PROGRAMS["dropout"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, o]
    x = tanh(einsum(dropout[b, m](x, 0.25), w -> [b, o])[o -> m])
  }
  loss = mean(square(dropout[b, m](x, 0.5) - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["merged"] = """
dim b = 8, s = 3, n = b * s, m = 6, l = 4, o = m
program p(x[b, s, m], t[b, s, m]) {
  y = x[(b, s) -> n]
  repeat l {
    param w[m, o]
    y = tanh(einsum(y, w -> [n, o])[o -> m])
  }
  z = y[n -> (b, s)]
  loss = mean(square(z - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["iota"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  r = cast(iota[b], f32) * 0.1
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m] + r)
  }
  loss = mean(square(x - t) * cast(iota[b], f32))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["attention"] = """
dim b = 8, s = 4, k = s, m = 6, h = 2, d = 3, l = 4
program p(x[b, s, m], t[b, s, m]) {
  param g[m] = ones()
  repeat l {
    param wq[m, h, d]
    param wk[m, h, d]
    param wv[m, h, d]
    param wo[h, d, m]
    z = rms_norm[m](x, g)
    q = einsum(z, wq -> [b, h, s, d])
    kk = einsum(z, wk -> [b, h, s, d])[s -> k]
    v = einsum(z, wv -> [b, h, s, d])[s -> k]
    a = softmax[k](where(iota[s] >= iota[k], einsum(q, kk -> [b, h, s, k]), -1e9))
    x = x + einsum(einsum(a, v -> [b, h, s, d]), wo -> [b, s, m])
  }
  loss = mean(square(x - t))
  most = max(abs(x))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["inner loop"] = """
dim b = 8, m = 6, l = 4, j = 3, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, o]
    repeat j {
      param c[m] = ones()
      x = tanh(x * c)
  }
    x = x + einsum(x, w -> [b, o])[o -> m]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["frozen"] = """
dim b = 8, m = 6, l = 4, o = m, v = 5
program p(ids[b]: i32, t[b]: i32) {
  param e[v, m]
  param f[m, v]
  x = e[v = ids]
  base = stop_gradient(x)
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m])
  }
  loss = mean(cross_entropy[v](einsum(x, f -> [b, v]), t))
  hit = mean(where(argmax[v](einsum(x, f -> [b, v])) == t, 1.0, 0.0))
  return loss, hit
  minimize loss with OPT
  }
"""
PROGRAMS["penalties outside"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  param v[m]
  x = x * v
  repeat l {
    param w[m]
    x = tanh(x * w)
  }
  loss = mean(square(x - t)) + 0.1 * sum(square(w)) + 0.1 * sum(square(v))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["penalty in another order"] = """
dim b = 8, m = 6, l = 4, o = m, s = 3
program p(x[b, m, s], t[b, m, s]) {
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o, s])[o -> m])
  }
  param v[s, m]
  loss = mean(square(x + v - t)) + 0.1 * sum(square(v))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["scaled"] = """
dim b = 8, m = 6, l = 4, o = m, q = m
program p(x[b, m], t[b, m]) {
  param v[m, q]
  param u[m]
  x = einsum(x, v -> [b, q])[q -> m] * mean(u)
  repeat l {
    param w[m]
    x = tanh(x * w)
  }
  loss = mean(square(x * tanh(mean(v)) * u - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["read before and inside"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[m, b]) {
  param v[m]
  penalty = sum(square(v)) * 0.01
  repeat l {
    param w[m]
    x = x * w * tanh(v)
  }
  loss = mean(square(x - t)) + penalty
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["numbers of both halves"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    recompute {
      param w[m, o]
      x = einsum(where(x > 0.1, x * 0.5, sin(x)), w -> [b, o])[o -> m]
    }
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["rolled"] = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m]
    x = tanh(roll[m](x, by=1) * w)
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["states of layers"] = """
dim b = 8, m = 6, l = 4
program p(x[b, m], t[b, m]) {
  param f[m]
  param g[m] = zeros()
  repeat l {
    param w[m]
    param e[m] = zeros()
    param seen[m] = zeros()
    param n[] = zeros()
    y = x * w + stop_gradient(0.1 * e)
    x = tanh(y) * f
    e := 0.9 * e + 0.1 * w
    seen := 0.5 * seen + mean[b](y)
    n := n + 1.0
  }
  g := 0.9 * g + f
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["from the first stage to the last"] = """
dim b = 8, m = 6, l = 4
program p(x[b, m], t[b, m]) {
  param v[m]
  param u[m]
  f = tanh(x * v)
  g = sigmoid(x * u)
  h = f
  repeat l {
    param w[m]
    h = tanh(h * w) + f
  }
  loss = mean(square(h * g + f - t)) + mean(g * mean[m](f))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["a loop behind with the same name"] = """
dim b = 8, m = 6, l = 4, j = 2
program p(x[b, m], t[b, m]) {
  h = x
  repeat j { h = 0.5 * h + sin(h) }
  repeat l {
    param w[m]
    h = tanh(h * w)
  }
  repeat j {
    param v[m]
    h = h + tanh(h * v)
  }
  loss = mean(square(h - t))
  return loss
  minimize loss with OPT
  }
"""
PROGRAMS["a table read everywhere"] = """
dim b = 8, m = 6, l = 4, v = 5
program p(ids[b]: i32, t[b]: i32) {
  param e[v, m]
  x = e[v = ids]
  repeat l {
    param w[m]
    x = tanh(x * w) + e[v = ids]
  }
  loss = mean(cross_entropy[v](einsum(x, e -> [b, v]), t)) + mean(square(e))
  return loss
  minimize loss with OPT
  }
"""

OPTIMIZERS = (
    "momentum(lr=0.1)", "adamw(lr=0.01, clip=0.3)", "adafactor(lr=0.01)", "sgd(lr=0.1)",
)  # fmt: skip
MESHES = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "d:2,pipe:2": "l -> pipe, b -> d",
    "pipe:2,tp:2": "l -> pipe, m -> tp",
    "d:2,pipe:2,tp:2": "l -> pipe, b -> d, m -> tp, state: m -> d",
}
SCHEDULES = ("gpipe[b](4)", "one_f_one_b[b](2)", "eager[b](4)", "one_f_one_b[b](4)")
BY_ROWS = {"merged": {"d:2,pipe:2", "d:2,pipe:2,tp:2"}}
"""Meshes on which blocks of a merged dim are not those of the inputs, which is refused (MD0331)."""


BY_BATCH = {"states of layers": "MD0907"}
"""Programs that are not built where each batch assigns a state: it goes from batch to batch."""


def compiled(text: str, mesh: str, rules: str, use: str, policy: str = "optimal") -> Compilation:
    """A program under one layout, which `use` may end with a schedule."""
    source = Source("p.mdsl", f"{text}\nlayout chosen {{ {rules} }} {use}\n")
    return Compilation(source, Options(mesh=mesh, layout="chosen", reduce=policy))


def results(run: LocalRun) -> dict[str, Array]:
    """What a step returns and updates."""
    return {**run.outputs, **run.updated}


@functools.cache
def on_one_device(text: str) -> dict[str, Array]:
    """What a step of a program returns and updates without a pipeline."""
    return results(run_local(compiled(text, "pipe:1", "l -> pipe", "").text, seed=4))


def hold_to(
    found: dict[str, Array], alone: dict[str, Array], part: float = 5e-5, least: float = 1e-30
) -> None:
    """Each array differs from that of one device by less than a part of its largest element.

    Or of `least`, where all of its elements are smaller.
    """
    assert found.keys() == alone.keys()
    for key, array in alone.items():
        most = max(float(np.abs(array).max(initial=0)), least)
        assert np.abs(found[key].astype(float) - array).max(initial=0) < part * most, key


def hold_bytes(run: LocalRun, made: Compilation, reported: bool = True) -> None:
    """Each device sends as much as is told of it; the report has the most, and the sum."""
    sent = [run.wire_bytes(rank) for rank in range(len(run.sent))]
    each = ((sender.bytes,) * sender.alike for sender in senders(made.device))
    assert sorted(sent) == sorted(itertools.chain(*each))
    if reported:
        told = explain(made.device)["totals"]
        assert (max(sent), sum(sent)) == (told["wire_bytes"], told["cluster_wire_bytes"])


def hold(made: Compilation, text: str, part: float = 5e-5, reported: bool = True) -> LocalRun:
    """A step has the numbers of one device, equal on all devices, and sends the told bytes."""
    run = run_local(made.text, seed=4)
    hold_to(results(run), on_one_device(text), part)
    assert not run.disagreements()
    hold_bytes(run, made, reported)
    return run


def hold_in_turn(number: int, made: Compilation, text: str) -> None:
    """Of every eighth case of a covering array, also what is printed and reported."""
    looked_at = number % PRINTED == 0
    hold(made, text, reported=looked_at)
    if looked_at:
        hold_text(made)


PRINTED = 1 if "MESHDSL_CASES" in os.environ else 8
"""Of how many cases of a covering array the text of one is read back, and its report is made."""


def hold_text(made: Compilation) -> None:
    """What is printed is read back, and lowered alike."""
    device = read_again("device", made.device)
    assert statements(device) == statements(lower_placed(read_again("placed", made.placed)))


@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name, meshes in BY_ROWS.items() for mesh in sorted(meshes)]
)
def test_blocks_that_inputs_do_not_have_are_refused(name: str, mesh: str) -> None:
    text = PROGRAMS[name].replace("OPT", OPTIMIZERS[0])
    with pytest.raises(DiagnosticError, match="MD0331"):
        compiled(text, mesh, MESHES[mesh], "with gpipe[b](4)").checked()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_whose_walk_cannot_be_cut_takes_another_one(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When sums are reduced is a matter of cost: it does not make a layout illegal."""
    text = next(iter(PROGRAMS.values())).replace("OPT", OPTIMIZERS[0])
    cut = microbatching.in_micro_batches

    def refused(program: DeviceProgram) -> DeviceProgram:
        if program.placed.policy == policy:
            raise NotCut(Diagnostic("MD0331", "not on the devices of the inputs"))
        return cut(program)

    with monkeypatch.context() as patched:
        patched.setattr(microbatching, "in_micro_batches", refused)
        made = compiled(text, "d:2,pipe:2", MESHES["d:2,pipe:2"], "with gpipe[b](4)", policy)
        placed = made.placed
    assert placed.policy == policy
    assert placed.plan is None or not placed.plan.least
    hold(made, text)


@pytest.mark.parametrize("name", BY_BATCH)
def test_what_each_batch_does_of_its_own_is_refused(name: str) -> None:
    optimizer = "adamw(lr=0.01, clip=0.3, accumulate=4)"
    text = PROGRAMS[name].replace("OPT", optimizer.replace(")", ", each=true)"))
    with pytest.raises(DiagnosticError, match=BY_BATCH[name]):
        compiled(text, "pipe:2", "l -> pipe", "with chimera").checked()
    text = PROGRAMS[name].replace("OPT", optimizer)  # as its help says
    hold(compiled(text, "pipe:2", "l -> pipe", "with chimera"), text)


HALVES = {"pipe:2": "zb_h1[b](4)", "pipe:4": "zb_h2[b](8)", "d:2,pipe:2,tp:2": "zb_h1[b](2)"}


IDLE = [name for name in PROGRAMS if name not in BY_ROWS]
IDLE = IDLE if "MESHDSL_CASES" in os.environ else IDLE[:: len(IDLE) // 3]


@in_turn(name=IDLE, mesh=HALVES)
def test_backward_passes_in_halves_are_idle_as_the_schedule_says(name: str, mesh: str) -> None:
    """Whatever the program is: its table decides."""
    text = PROGRAMS[name].replace("OPT", "sgd(lr=0.1)")
    made = compiled(text, mesh, MESHES[mesh], f"with {HALVES[mesh]}")
    stages, micro = made.device.mesh.size("pipe"), int(HALVES[mesh].split("(")[1][:-1])
    bubble = Fraction(explain(made.device)["pipeline"]["bubble"])
    assert bubble <= Fraction(stages - 1, 3 * micro + stages - 1)


USES = {
    "pipe:2": "dualpipe_v[b](4)",
    "pipe:4": "chimera[b](8)",
    "d:2,pipe:2": "one_f_one_b[b](4)",
    "d:2,pipe:2,tp:2": "zb_v[b](4)",
}


def test_gradients_are_those_of_torch() -> None:
    """With `sgd(lr=1)` a parameter changes by its gradient."""
    text = PROGRAMS["two carries"].replace("OPT", "sgd(lr=1.0)")
    rng = np.random.default_rng(3)
    shapes = {"x": (8, 6), "t": (8, 6), "w": (4, 6, 6), "v": (4, 6)}
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, t, w, v = (torch.tensor(given[n], requires_grad=n in "wv") for n in shapes)
    y, aux = 2 * x, torch.zeros(())
    for layer in range(4):
        h = torch.tanh(x @ w[layer] + y * v[layer])
        y, aux, x = y + 0.5 * h, aux + h.square().mean(), h
    ((x - t).square().mean() + 0.1 * aux).backward()
    narrow = {name: array.astype("f4") for name, array in given.items()}
    inputs, params = ({n: narrow[n] for n in names} for names in ("xt", "wv"))
    for mesh, schedule in USES.items():
        made = compiled(text, mesh, MESHES[mesh], f"with {schedule}")
        updated = run_local(made.text, inputs, params).updated
        for name, parameter in (("w", w), ("v", v)):
            assert parameter.grad is not None
            change = params[name] - updated[name]
            np.testing.assert_allclose(change, parameter.grad, rtol=0, atol=1e-5)


SIZES = {
    "as many as samples": ("pipe:4", "l -> pipe", "one_f_one_b[b](8)"),
    "one": ("pipe:2", "l -> pipe", "gpipe[b](1)"),
    "fewer than stages": ("pipe:4", "l -> pipe", "one_f_one_b[b](2)"),
    "parameters in parts": (
        "d:2,pipe:2", "l -> pipe, b -> d, params: m -> d, grads: m -> d", "gpipe[b](4)",
    ),
    "sequences": ("pipe:2,tp:2", "l -> pipe, s -> tp", "gpipe[b](4)"),
    "two axes": ("d:2,pipe:2,e:2", "l -> pipe, b -> (d, e)", "gpipe[b](2)"),
    "uneven": ("pipe:2,tp:4", "l -> pipe, m -> tp", "gpipe[b](4)"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_and_splits(case: str) -> None:
    mesh, rules, schedule = SIZES[case]
    text = PROGRAMS["attention"].replace("OPT", "adamw(lr=0.01, clip=0.5)")
    hold(compiled(text, mesh, rules, f"with {schedule}"), text)


TABLE = """
schedule mine(stages=2, micro=4) {
  0: F0 F1 F2 B0 F3 B1 B2 B3
  1: F0 B0 F1 B1 F2 B2 F3 B3
}
"""


def test_a_table_of_its_own() -> None:
    text = PROGRAMS["frozen"].replace("OPT", "adamw(lr=0.01, clip=0.5)")
    made = compiled(text + TABLE, "pipe:2", "l -> pipe", "with mine[b]")
    hold(made, text)
    hold_text(made)


def test_a_step_is_cut_or_accumulates() -> None:
    text = PROGRAMS["frozen"].replace("OPT", "adamw(lr=0.01, accumulate=2)")
    with pytest.raises(DiagnosticError, match="MD0907"):
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](2)").checked()
