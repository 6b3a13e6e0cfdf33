"""Networks without a loop that rules cut into stages: numbers of one device, bytes as said.

Each is compared with the same step on one device, under schedules of one stage a device and of
several, and one of them with torch's own gradients.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdsl as md
from meshdsl.backends.engines.asynchronous_reference import replay_of
from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.place import POLICIES
from meshdsl.placed.settings import NAMES, SETTINGS
from meshdsl.report.explanation import explain
from tests.covering import Case, covering, in_turn
from tests.pipelines.kinds import KINDS, devices_of, is_made, scheduled, stages_in
from tests.pipelines.test_programs import (
    OPTIMIZERS,
    compiled,
    hold,
    hold_in_turn,
    on_one_device,
    results,
)

PROGRAMS: dict[str, str] = {}
PROGRAMS["layers"] = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  param w3[m, o]
  param w4[m, o]
  h1 = tanh(einsum(x, w1 -> [b, o])[o -> m])
  h2 = tanh(einsum(h1, w2 -> [b, o])[o -> m])
  h3 = tanh(einsum(h2, w3 -> [b, o])[o -> m])
  h4 = einsum(h3, w4 -> [b, o])[o -> m]
  loss = mean(square(h4 - t))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["residual"] = """
dim b = 8, m = 6, o = m
def block(x[b, m]) -> [b, m] {
  param w[m, o]
  param s[m] = ones()
  y = relu(einsum(x * s, w -> [b, o])[o -> m])
  return y * 0.5
}
program p(x[b, m], t[b, m]) {
  h1 = x + block(x)
  h2 = h1 + block(h1)
  h3 = h2 + block(h2) + h1
  h4 = h3 + block(h3) * tanh(h1) + h2
  loss = mean(square(h4 - t))
  far = mean(h2)
  return loss, far
  minimize loss with OPT
}
"""
PROGRAMS["several values"] = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  param v[m]
  h1 = tanh(einsum(x, w1 -> [b, o])[o -> m])
  gate = sigmoid(x * v)
  same = x * 2 + h1
  h2 = gate * einsum(same, w2 -> [b, o])[o -> m]
  h3 = h2 + gate * same
  h4 = h3 * tanh(h1)
  loss = mean(square(h4 - t)) + 0.1 * mean(square(same))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["tied"] = """
dim b = 8, s = 3, m = 6, v = 5, o = m
program p(ids[b, s]: i32, to[b, s]: i32) {
  param embed[v, m]
  param w[m, o]
  param k[m, o]
  h1 = embed[v = ids]
  h2 = tanh(einsum(h1, w -> [b, s, o])[o -> m])
  h3 = h2 + tanh(einsum(h2, k -> [b, s, o])[o -> m]) * mean[s](h1)
  h4 = rms_norm[m](h3)
  logits = einsum(h4, embed -> [b, s, v])
  hot = cast(one_hot[v](to), f32)
  loss = mean(cross_entropy[v](logits, to)) + 0.1 * mean(square(softmax[v](logits) - hot))
  hit = mean(where(argmax[v](logits) == to, 1.0, 0.0))
  return loss, hit
  minimize loss with OPT
}
"""
PROGRAMS["penalties"] = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  h1 = tanh(einsum(x, w1 -> [b, o])[o -> m])
  h2 = dropout[b, m](h1, 0.25)
  h3 = einsum(h2, w2 -> [b, o])[o -> m]
  h4 = h3 + x * mean(square(w1))
  loss = mean(square(h4 - t)) + 0.1 * sum(square(w1)) + 0.01 * sum(w1 * w2)
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["recomputed"] = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  param w3[m, o]
  recompute {
    h1 = tanh(einsum(x, w1 -> [b, o])[o -> m])
    h2 = tanh(einsum(h1, w2 -> [b, o])[o -> m]) * sin(h1)
  }
  recompute {
    h3 = tanh(einsum(h2, w3 -> [b, o])[o -> m]) * h1
    h4 = h3 * gelu(h3)
  }
  loss = mean(square(h4 - t))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["loops inside"] = """
dim b = 8, m = 6, l = 3, o = m
def part(x[b, m]) -> [b, m] {
  repeat l {
    param w[m, o]
    x = x + tanh(einsum(x, w -> [b, o])[o -> m])
  }
  return x
}
program p(x[b, m], t[b, m]) {
  param v[m]
  h1 = part(x)
  h2 = h1 * v
  h3 = part(h2) + h1
  h4 = sigmoid(h3) * v
  loss = mean(square(h4 - t))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["states"] = """
dim b = 8, m = 6, o = m, l = 3
program p(x[b, m], t[b, m]) {
  h = x
  repeat l {
    param w[m]
    param e[m] = zeros()
    param seen[m] = zeros()
    y = h * w + stop_gradient(0.1 * e)
    h = tanh(y)
    e := 0.9 * e + 0.1 * w
    seen := 0.5 * seen + mean[b](y)
  }
  param v[m, o]
  param u[m] = zeros()
  h2 = tanh(einsum(h, v -> [b, o])[o -> m])
  h3 = h2 * h
  u := 0.5 * u + mean[b](h3)
  h4 = h3 + tanh(h2)
  loss = mean(square(h4 - t))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["scaled"] = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  h1 = einsum(x, w1 -> [b, o])[o -> m]
  h2 = h1 * tanh(mean(w1))
  h3 = einsum(h2, w2 -> [b, o])[o -> m]
  h4 = h3 * mean[m](w1)[o -> m] + mean(w2)
  loss = mean(square(h4 - t))
  return loss
  minimize loss with OPT
}
"""
PROGRAMS["images"] = """
dim b = 8, c = 2, h = 8, w = 8, kh = 3, kw = 3, c1 = 3, c2 = 4, h2 = 4, w2 = 4, v = 5
program p(x[b, c, h, w], t[b]: i32) {
  param k1[c1, c, kh, kw]
  param k2[c2, c1, kh, kw]
  param f[c2, h2, w2, v]
  param e[v] = zeros()
  h1 = relu(conv[h by kh, w by kw](x, k1, pad=1 -> [b, c1, h, w]))
  p1 = max_pool[h by 2 -> h2, w by 2 -> w2](h1, stride=2)
  h2_ = relu(conv[h2 by kh, w2 by kw](p1, k2, pad=1 -> [b, c2, h2, w2]))
  h3 = einsum(h2_, f -> [b, v])
  h4 = h3 + e
  loss = mean(cross_entropy[v](h4, t))
  return loss
  minimize loss with OPT
}
"""
FOUR = "h2: pipe = 1, h3: pipe = 2, h4: pipe = 3"
CUTS = {"images": ("h2_: pipe = 1", "p1: pipe = 1, h2_: pipe = 2, h3: pipe = 3")}
DIM = {"images": "c2"}

MESHES = {
    "pipe:2": "",
    "pipe:4": "",
    "d:2,pipe:2": "b -> d",
    "pipe:2,tp:2": "TP -> tp",
    "pipe:2,tp:4": "TP -> tp",
    "d:2,pipe:4": "b -> d",
    "d:2,pipe:2,tp:2": "b -> d, TP -> tp",
}


def rules_of(name: str, stages: int, mesh: str) -> str:
    """The rules of a program on a mesh: its cuts, and splits of the other axes."""
    cuts = CUTS.get(name, ("h3: pipe = 1", FOUR))[stages > 2]
    others = MESHES[mesh].replace("TP", DIM.get(name, "m"))
    return f"{cuts}, {others}" if others else cuts


STORAGES = {
    "where it is read": "",
    "parameters in parts": "params: TP -> d, grads: TP -> d",
    "states over data": "state: TP -> d",
    "states on the stages": "state: TP -> pipe",
    "parameters on the stages": "params: TP -> (pipe, d)",
    "gradients on the stages": "grads: TP -> pipe",
    "gradients over both": "grads: TP -> (pipe, d), state: TP -> d",
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "name": tuple(PROGRAMS),
    "kind": tuple(KINDS),
    "mesh": tuple(MESHES),
    "storage": tuple(STORAGES),
    "optimizer": OPTIMIZERS,
    "policy": POLICIES,
    "micro": (1, 2, 4, 8),
    "accumulate": (False, True),
    "recompute": (False, True),
}


RULES: dict[tuple[str, ...], Callable[[Case], bool]] = {
    ("kind", "mesh"): lambda case: stages_in(case) <= 4,  # into which the programs are cut
    ("kind", "mesh", "micro"): is_made,
    ("mesh", "storage"): lambda case: " d" not in STORAGES[case["storage"]] or "d:" in case["mesh"],
    ("name", "accumulate"): lambda case: not case["accumulate"] or case["name"] != "states",
    ("micro", "accumulate"): lambda case: not case["accumulate"] or case["micro"] > 1,
}
"""What is refused is no case here: that it is, is tested where it is refused."""


def program_of(case: Case) -> tuple[str, str]:
    """The text of a case, and its schedule."""
    optimizer, micro = case["optimizer"], case["micro"]
    options = ["recompute=stage"] if case["recompute"] else []
    if case["accumulate"]:
        optimizer = f"{optimizer[:-1]}, accumulate={micro})"
    else:
        options = [str(micro), *options]
    cut = "" if case["accumulate"] else "[b]"
    used = f"{case['schedule']}{cut}({', '.join(options)})".removesuffix("()")
    text = re.sub(r"\bb = \d+", "b = 16", PROGRAMS[case["name"]].replace("OPT", optimizer))
    return text, f"with {used}"


CASES = scheduled(covering(FACTORS, RULES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_step_is_that_of_one_device(case: Case) -> None:
    """With the bytes that are told; what is printed of some is read back, and lowered alike."""
    text, use = program_of(case)
    name, mesh = case["name"], case["mesh"]
    stored = STORAGES[case["storage"]].replace("TP", DIM.get(name, "m"))
    rules = ", ".join(filter(None, (rules_of(name, stages_in(case), mesh), stored)))
    made = compiled(text, mesh, rules, use, case["policy"])
    hold_in_turn(CASES.index(case), made, text)


def test_the_batch_is_over_two_axes() -> None:
    text = PROGRAMS["residual"].replace("OPT", "adamw(lr=0.01, clip=0.5)")
    rules = "h3: pipe = 1, b -> (d, e)"
    hold(compiled(text, "d:2,pipe:2,e:2", rules, "with one_f_one_b[b](2)"), text)


def test_states_of_each_batch_are_refused_where_the_optimizer_accumulates() -> None:
    text = PROGRAMS["states"].replace("OPT", "momentum(lr=0.1, accumulate=4, each=true)")
    with pytest.raises(DiagnosticError, match="MD0907"):
        compiled(text, "pipe:2,tp:2", rules_of("states", 2, "pipe:2,tp:2"), "").checked()


@in_turn(
    name=PROGRAMS,
    use=[
        (mesh, schedule)
        for mesh in ("pipe:4", "pipe:2,tp:2")
        for schedule in ("one_f_one_b", "zb_h1", "gpipe", "chimera")
    ],
)
def test_stages_that_are_computed_again_have_the_same_bits(name: str, use: tuple[str, str]) -> None:
    mesh, schedule = use
    text = PROGRAMS[name].replace("OPT", "adamw(lr=0.01)")
    rules = rules_of(name, devices_of(mesh), mesh)
    plain = compiled(text, mesh, rules, f"with {schedule}[b](4)")
    made = compiled(text, mesh, rules, f"with {schedule}[b](4, recompute=stage)")
    computed, expected = (results(run_local(m.text, seed=4)) for m in (made, plain))
    for key, array in expected.items():
        np.testing.assert_array_equal(computed[key], array, key)
    assert explain(made.device)["pipeline"]["recompute"] == "stage"


BITS = ("layers", "residual", "several values", "images")


@in_turn(name=BITS, schedule=("", "gpipe", "zb_h1", "eager"), stages=(2, 4))
def test_the_bits_of_one_device(name: str, schedule: str, stages: int) -> None:
    """With as many batches added up, by one stage each, in the same order."""
    text = PROGRAMS[name].replace("OPT", "adamw(lr=0.01, accumulate=4)")
    mesh, use = f"pipe:{stages}", f"with {schedule}" if schedule else ""
    made = compiled(text, mesh, rules_of(name, stages, mesh), use)
    alone = on_one_device(text)
    for key, array in results(run_local(made.text, seed=4)).items():
        np.testing.assert_array_equal(array, alone[key], key)


def test_gradients_are_those_of_torch() -> None:
    """With `sgd(lr=1)` a parameter changes by its gradient."""
    text = PROGRAMS["several values"].replace("OPT", "sgd(lr=1.0)")
    rng = np.random.default_rng(3)
    shapes = {"x": (8, 6), "t": (8, 6), "w1": (6, 6), "w2": (6, 6), "v": (6,)}
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, t, w1, w2, v = (torch.tensor(given[n], requires_grad=n not in "xt") for n in shapes)
    h1 = torch.tanh(x @ w1)
    gate, same = torch.sigmoid(x * v), x * 2 + h1
    h3 = gate * (same @ w2) + gate * same
    ((h3 * torch.tanh(h1) - t).square().mean() + 0.1 * same.square().mean()).backward()
    narrow = {name: array.astype("f4") for name, array in given.items()}
    inputs, params = ({n: narrow[n] for n in names} for names in (("x", "t"), ("w1", "w2", "v")))
    for mesh, use in (("pipe:2", "one_f_one_b[b](4)"), ("d:2,pipe:4", "zb_h1[b](2)")):
        rules = rules_of("several values", devices_of(mesh), mesh)
        made = compiled(text, mesh, rules, f"with {use}")
        updated = run_local(made.text, inputs, params).updated
        for name, parameter in (("w1", w1), ("w2", w2), ("v", v)):
            assert parameter.grad is not None
            change = params[name] - updated[name]
            np.testing.assert_allclose(change, parameter.grad, rtol=0, atol=1e-5)


BLOCK = "layer_norm[d](einsum(gelu(einsum(X, U -> [batch, e])), V -> [batch, d]))"
CALLED = f"""
def block(x[batch, d]) -> [batch, d] {{
  param u[d, e]
  param v[e, d]
  return {BLOCK.replace("X", "x").replace("U", "u").replace("V", "v")}
}}
"""


def written(inlined: bool) -> Compilation:
    """Four blocks on four stages, each a call of a function or written out."""
    names = ["x", "h1", "h2", "h3", "h4"]
    lines = []
    for number, (x, y) in enumerate(itertools.pairwise(names)):
        u, v = f"u{number}", f"v{number}"
        call = BLOCK.replace("X", x).replace("U", u).replace("V", v) if inlined else f"block({x})"
        lines += [f"param {u}[d, e]", f"param {v}[e, d]"] if inlined else []
        lines.append(f"{y} = {call}")
    body = "\n".join(lines)
    text = f"""
dim batch = 512, d = 1024, e = 4096
mesh m = {{ pipe: 4 }}
layout l {{ h2: pipe = 1, h3: pipe = 2, h4: pipe = 3 }} with one_f_one_b[batch](8)
{CALLED}
program p(x[batch, d]) {{
  {body}
  loss = mean(square(h4))
  minimize loss with adamw(lr=1e-3)
  return loss
}}
"""
    options = Options(cluster="h100", cache=False)
    return compile_source(Source("blocks.mdsl", text), options, Diagnostics())


def test_calls_on_several_stages_are_as_written_out() -> None:
    """All calls of a function have one place in the source, and each is on its own stage."""
    called, inlined = (written(inlined).report for inlined in (False, True))
    assert called["totals"] == inlined["totals"]
    assert called["memory"]["peak"] == inlined["memory"]["peak"]
    assert called["time"]["seconds"] == inlined["time"]["seconds"]
    assert called["totals"]["wire_bytes"] == 4 * 2**20 + 6  # and the loss
    assert round(called["memory"]["peak"] / 2**20, 1) == 140.5
    assert round(called["time"]["seconds"] * 1e3, 2) == 2.8


ORIGINS = """
dim b = 8, m = 6, o = m
program p(x[b, m], t[b, m]) {
  param s[m] = ones()
  param w[m, o]
  param v[m, o]
  BEFORE
  h1 = tanh(einsum(x, w -> [b, o])[o -> m])
  h3 = tanh(einsum(h1, v -> [b, o])[o -> m])
  loss = mean(square(h3 - t)) + 0.1 * sum(square(s - 0.5))
  BEHIND
  return loss, q
  minimize loss with adamw(lr=0.01, clip=0.5)
}
"""
OF = {
    "the input": ("q = mean(square(x))", ""),
    "the target": ("", "q = mean(square(t))"),
    "a parameter": ("q = sum(square(s))", ""),
    "a constant": ("q = 3.0 + 0.0 * sum(t)", ""),
    "the first stage": ("", "q = mean(h1)"),
    "both": ("", "q = mean(h3) + mean(h1)"),
    "both, in the loss": ("", "q = mean(h3) + mean(h1)\n  loss = loss + q"),
    "a counter": ("param n[]: i32 = zeros()\n  n := n + 1\n  q = mean(x)", ""),
    "an average of the input": (
        "param e[m] = zeros()\n  e := 0.9 * e + 0.1 * mean[b](x)\n  q = mean(x)", "",
    ),
    "an average of the last stage": (
        "param e[m] = zeros()", "e := 0.9 * e + 0.1 * mean[b](h3)\n  q = mean(h3)",
    ),
    "weights of the samples": (
        "", "n = mean[m](t * t)\n  q = sum(h3 * n) / (sum(n) + 1.0)\n  loss = loss + q",
    ),
    "a parameter on both stages": ("x = x * s", "loss = loss + mean(h3 * s)\n  q = mean(s)"),
}  # fmt: skip


@in_turn(
    name=OF,
    use=("with one_f_one_b[b](4)", "with zb_h1[b](2)"),
    mesh=("pipe:2", "d:2,pipe:2"),
)
def test_it_counts_once(name: str, mesh: str, use: str) -> None:
    before, behind = OF[name]
    text = ORIGINS.replace("BEFORE", before).replace("BEHIND", behind)
    hold(compiled(text, mesh, "h3: pipe = 1, b -> d", use), text)


def test_large_values_are_let_go_of_on_each_stage() -> None:
    """Those of more than a MiB are deleted behind their last use; a stage holds its own alone."""
    text = PROGRAMS["residual"].replace("OPT", "momentum(lr=0.1)")
    text = text.replace("b = 8, m = 6", "b = 1024, m = 544")
    made = compiled(text, "pipe:4", FOUR, "with zb_h1[b](2)")
    assert "del " in made.text
    hold(made, text, 2e-4)


def test_a_message_over_stages_is_one() -> None:
    """`h1` goes to stage 1 and to stage 3, straight: what is between does not hand it on."""
    made = compiled(PROGRAMS["several values"].replace("OPT", "sgd(lr=0.1)"), "pipe:4", FOUR,
                    "with one_f_one_b[b](4)")  # fmt: skip
    found = [c for c in explain(made.device)["collectives"] if c["kind"] == "send"]
    ways = {(c["tensor"], c["why"].split(" goes")[0]) for c in found if c["phase"] == "forward"}
    assert ("h1", "stage 3") in ways
    assert not any(tensor == "h1" and stage == "stage 2" for tensor, stage in ways)


def test_the_mesh_is_one_that_has_the_axis_of_the_stages() -> None:
    """Where none is named, a layout is for a mesh with its axes, those of stages among them."""
    text = PROGRAMS["layers"].replace("OPT", "sgd(lr=0.1)") + (
        "mesh one = { data: 2 }\nmesh two = { data: 2, pipe: 2 }\n"
        "layout cut { b -> data, h3: pipe = 1 } with gpipe[b](2)\n"
    )
    for layout in ("cut", "b -> data, h3: pipe = 1"):
        options = Options(layout=layout, schedule="gpipe[b](2)")
        made = Compilation(Source("p.mdsl", text), options)
        assert made.placed.mesh.name == "two"


def test_updates_on_the_way_are_refused() -> None:
    text = PROGRAMS["layers"].replace("OPT", "sgd(lr=0.1)")
    made = compiled(text, "pipe:2", "h3: pipe = 1", "with pipedream[b](4)")
    with pytest.raises(DiagnosticError, match="MD0335"):
        made.text  # noqa: B018
    with pytest.raises(DiagnosticError, match="needs the stages of a loop, not of rules"):
        replay_of(made)


def test_training_goes_on_under_any_layout(tmp_path: Path) -> None:
    """From stages to one device and back; layouts are written in Python."""
    (tmp_path / "p.mdsl").write_text(PROGRAMS["tied"].replace("OPT", "adamw(lr=0.01, clip=0.5)"))
    program, batch = md.load(tmp_path / "p.mdsl"), md.dim("b", 8)
    rng, folder = np.random.default_rng(3), str(tmp_path / "run")
    data = {name: rng.integers(0, 5, size=(32, 3), dtype=np.int32) for name in ("ids", "to")}
    used = md.scheduled("one_f_one_b", batch, micro=4)
    two = md.layout(["h3: pipe = 1", "b -> d"], schedule=used)
    four = md.layout(FOUR.split(", "), schedule="zb_h1[b](2)")
    plans = (program.compile({"d": 2, "pipe": 2}, two), program.compile(), program.compile(
        {"pipe": 4}, four))  # fmt: skip
    for steps, plan in zip((3, 6, 9), plans, strict=True):
        plan.train(data, steps, checkpoint=folder, resume=steps > 3, progress=False)
    whole = program.compile()
    whole.train(data, 9, progress=False)
    for name, array in whole.params.items():
        found = np.asarray(plans[-1].params[name])
        np.testing.assert_allclose(found, np.asarray(array), rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", NAMES)
def test_the_axis_may_be_called_as_a_setting_is(axis: str, tmp_path: Path) -> None:
    """`grads: reduce = bf16` is a setting; `h3: reduce = 1` gives a stage, in Python too."""
    text, use = PROGRAMS["layers"].replace("OPT", "sgd(0.1)"), "one_f_one_b[b](4)"
    made = compiled(text, f"{axis}:2", f"h3: {axis} = 1, grads: reduce = f32", f"with {use}")
    hold(made, text)
    (tmp_path / "p.mdsl").write_text(text, encoding="utf-8")
    program, costs = md.load(tmp_path / "p.mdsl"), []
    for name in (axis, "pipe"):
        layout = md.layout(f"h3: {name} = 1", schedule=use)
        costs.append(program.compile({name: 2}, layout).cost().wire_bytes)
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("name", "setting"), [(n, f"{s}: {n}") for s, n in SETTINGS])
def test_a_number_is_no_value_of_a_setting(name: str, setting: str) -> None:
    text = PROGRAMS["layers"].replace("OPT", "sgd(0.1)")
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, f"{name}:2", f"{setting} = 1", "").checked()
    assert [d.code for d in caught.value.diagnostics] == ["MD0314"]


IN_A_ROW = """
dim b = 8, m = 6, first = 2, second = 3, third = 2
program p(x[b, m], t[b, m]) {
  param v[m]
  repeat first {
    param w1[m]
    x = tanh(x * w1)
  }
  a = t * v
  repeat second {
    param w2[m]
    a = tanh(a * w2 + x)
  }
  d = a
  repeat third {
    param w3[m]
    d = tanh(d * w3 + x)
  }
  y = d * v
  loss = mean(square(y))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
"""Loops that go on with what the one before has left; the decoder's are two, as in the docs."""


@pytest.mark.parametrize(
    "rules", ["y: pipe = 1", "a: pipe = 1, y: pipe = 2", "a: pipe = 1, d: pipe = 2"]
)
@pytest.mark.parametrize(
    "use", ["gpipe[b](2)", "one_f_one_b[b](4, recompute=stage)", "zb_h1[b](4)"]
)
def test_loops_in_a_row(rules: str, use: str) -> None:
    stages = 2 + ("2" in rules)
    hold(compiled(IN_A_ROW, f"pipe:{stages}", rules, f"with {use}"), IN_A_ROW)


AGAIN = """
dim b = 4, d = 2, n = 2
program p(x[b, d], t[b, d]) {
  param a[d]
  e = tanh(x * a)
  BEFORE
  y = t
  repeat n {
    param w[d]
    y = tanh(y * w + e)
  }
  loss = mean(square(y)) + AFTER
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_what_a_loop_of_a_later_stage_reads_is_used_before_it() -> None:
    """Its gradient is added up from the last use to the first; the help is what works."""
    behind = AGAIN.replace("BEFORE\n", "\n").replace("AFTER", "0.1 * mean(square(e))")
    with pytest.raises(DiagnosticError) as caught:
        compiled(behind, "pipe:2", "y: pipe = 1", "with gpipe[b](2)").checked()
    (found,) = caught.value.diagnostics
    assert found.code == "MD0330"
    assert "use `e` before the loop" in (found.help or "")
    first = AGAIN.replace("BEFORE", "far = 0.1 * mean(square(e))").replace("AFTER", "far")
    hold(compiled(first, "pipe:2", "y: pipe = 1", "with gpipe[b](2)"), first)


VIEW = """
dim batch = 4, a = 2, d = 4, m = 2, e = 3
program p(x[batch, a, d], k[m, e]) {
  param w[a, d]
  param u[d]
  y = tanh(x * w)
  q = attention[d, m](w, w[a -> m], k)
  z = tanh(y * w)
  loss = mean(z * u) + mean(y * q)
  return loss
  minimize loss with sgd(lr=0.1, accumulate=2)
}
"""


@pytest.mark.parametrize("use", ["gpipe", "one_f_one_b", "zb_h1"])
def test_a_view_of_a_parameter_is_not_kept(use: str) -> None:
    """Under its name, that would hide the parameter from the other stage."""
    hold(compiled(VIEW, "pipe:2", "z: pipe = 1", f"with {use}"), VIEW)
