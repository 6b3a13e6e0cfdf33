"""What one stage alone reads lies there alone: the table of a program, and laws of all programs.

That the numbers are those of one device, and the bytes those that are told, is held for the same
programs in `test_cuts.py` and `test_programs.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import load, local_tensors, run_local
from meshdsl.backends.runtime.values import coordinates, local_part, shape_of
from meshdsl.device.ir import Bucket, DeviceProgram, Move, Pipeline, Wait
from meshdsl.pipeline import Compilation
from meshdsl.placed.place import POLICIES
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation, type_text
from tests.covering import in_turn
from tests.ir.test_text import read_again
from tests.pipelines import test_cuts as cuts
from tests.pipelines import test_programs as programs
from tests.pipelines.kinds import devices_of
from tests.pipelines.test_programs import (
    compiled,
    hold,
    hold_bytes,
    hold_to,
    on_one_device,
    results,
)

SHARED = """
dim b = 8, m = 6, v = 10, l = 4, o = m, r = 2
program p(ids[b]: i32, t[b, m], z[b, r]) {
  param embed[v, m]
  param unread[m]
  param tied[m]
  param drop[m]
  h = embed[v = ids] * tied
  repeat l {
    param w[m, o]
    h = tanh(einsum(h, w -> [b, o])[o -> m]) + drop
  }
  param scale[m] = ones()
  param weights[r, m]
  param narrow[m, o]: bf16
  y = h * scale * tied + einsum(z, weights -> [b, m])
  y = einsum(y, cast(narrow, f32) -> [b, o])[o -> m]
  loss = mean(square(y - t)) + 0.1 * sum(square(embed)) + 0.01 * sum(square(unread))
  return loss
  minimize loss with OPT
}
"""

HOMES: dict[str, int | None] = {
    "embed": 0,
    "unread": None,
    "tied": None,
    "drop": None,
    "scale": -1,
    "weights": -1,
    "narrow": -1,
}
"""The device of each parameter outside of the loop; -1 is the last one, None all of them."""

OPTIMIZERS = (
    "sgd(lr=0.1)",
    "momentum(lr=0.1, clip=0.2)",
    "adamw(lr=0.01, clip=0.3)",
    "adafactor(lr=0.01, clip=0.3)",
    "adamw(lr=0.01, clip=0.3, compress=powersgd(2))",
)
MESHES = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "d:2,pipe:2": "l -> pipe, b -> d, state: m -> d",
    "pipe:2,tp:3": "l -> pipe, m -> tp",
    "d:2,pipe:2,tp:2": "l -> pipe, b -> d, m -> tp, grads: o -> d",
}
SCHEDULES = ("gpipe[b](4)", "one_f_one_b[b](4)", "zb_h1[b](2)", "interleaved[b](2)")


def on(program: DeviceProgram) -> dict[str, int | None]:
    """The device along the axis of the stages that alone has a parameter or state."""
    return {v.value.name or "": v.on for v in (*program.params, *program.states)}


@in_turn(mesh=MESHES, schedule=SCHEDULES, optimizer=OPTIMIZERS)
def test_the_table_of_a_program(mesh: str, schedule: str, optimizer: str) -> None:
    """Each parameter is where it is read, its states with it; a step is that of one device."""
    devices = int(mesh.partition("pipe:")[2][0])
    text = SHARED.replace("OPT", optimizer)
    if schedule.startswith("interleaved") and devices == 4:  # there are four layers
        schedule = "one_f_one_b[b](8)"
    made = compiled(text, mesh, MESHES[mesh], f"with {schedule}")
    found = on(made.device)
    for name, home in HOMES.items():
        wanted = devices - 1 if home == -1 else home
        own = {d for n, d in found.items() if n == name or n.startswith(f"{name}.")}
        assert own == {wanted}, name
    run = run_local(made.text, seed=4)
    step, alone = results(run), on_one_device(text)
    # What compression leaves is a small difference of large numbers: it is as exact as those.
    left = {name for name in alone if name.endswith(".error")}
    for name in left:
        most = np.abs(alone[name.replace(".error", ".factor2")]).max()
        assert np.abs(step[name] - alone[name]).max() < 5e-5 * most, name
    kept = alone.keys() - left
    hold_to({name: step[name] for name in kept}, {name: alone[name] for name in kept})
    assert not run.disagreements()
    hold_bytes(run, made)
    read_again("device", made.device)


def test_it_is_told() -> None:
    """A line of `explain`, the JSON, and the note of the text say which devices have it."""
    text = SHARED.replace("OPT", "adamw(lr=0.01)")
    made = compiled(text, "pipe:2", "l -> pipe", "with one_f_one_b[b](4)")
    report = explain(made.device)
    tensors = {t["name"]: t for t in report["tensors"]}
    assert tensors["scale"]["placement"] == {"pipe": "A(1)"}
    assert tensors["scale"]["local_shapes"] == [[0], [6]]
    uneven = compiled(text, "pipe:2,d:4", "l -> pipe, b -> d, params: m -> d", "with gpipe[b](2)")
    told = {t["name"]: t for t in explain(uneven.device)["tensors"]}
    assert told["scale"]["local_shapes"] == [*[[0]] * 4, [2], [2], [2], [0]]
    assert tensors["tied"]["placement"] == {"pipe": "B"}
    assert type_text(tensors["scale"]) == "f32[m 6], only where pipe = 1"
    assert 'scale = params["scale"]  # f32[m] where pipe == 1' in made.text


def every_program() -> Iterator[tuple[str, Compilation]]:
    """The programs with loops, and those that rules cut, on meshes and as many stages in turn."""
    for number, (name, text) in enumerate(programs.PROGRAMS.items()):
        mesh = [*programs.MESHES][number % len(programs.MESHES)]
        if mesh not in programs.BY_ROWS.get(name, ()):
            yield name, _made(text, mesh, programs.MESHES[mesh])
    for number, (name, text) in enumerate(cuts.PROGRAMS.items()):
        stages = (2, 4)[number % 2]
        mesh = [m for m in cuts.MESHES if devices_of(m) == stages][number // 2 % 2]
        yield f"{name} {stages}", _made(text, mesh, cuts.rules_of(name, stages, mesh))


def _made(text: str, mesh: str, rules: str) -> Compilation:
    text = text.replace("OPT", "adamw(lr=0.01, clip=0.3)")
    return compiled(text, mesh, rules, "with gpipe[b](4)")


EVERY = dict(every_program())


@pytest.mark.parametrize("name", EVERY)
def test_laws(name: str) -> None:
    """Every element is stored once along the stages, and only numbers are added up for it.

    States are with their parameters, and a forward pass has these where the training step does.
    """
    made = EVERY[name]
    program = made.device
    (pipe,) = (n for n in program.body if isinstance(n, Pipeline))
    owners = {p.value: p.on for p in program.params}
    named = made.placed.named
    for state in program.states:
        of = next(s.of for s in named.states if s.value is state.value)
        if of is not None and state.local.dims:
            assert state.on == owners[of.source], state.name
    mesh = dict(program.mesh.axes)
    module = load(made.text)
    for var in program.params:
        spec, size = module.PARAMS[var.value.name or ""], 0
        for rank in range(program.mesh.devices):
            here = int(np.prod(shape_of(local_part(spec, mesh, rank))))
            assert var.on in (None, coordinates(mesh, rank)[pipe.axis]) or not here
            size += here
        split = {a for axes in spec.split.values() for a in axes}
        replicas = int(np.prod([n for a, n in mesh.items() if a not in split]))
        assert size == var.type.elements * replicas, var.name
    for node in program.body:
        for move in node.collective.moves if isinstance(node, Wait) else _moves(node):
            if pipe.axis in move.step.axes and move.step.moves:
                assert move.source.on is None, f"{move.source.name} is on one device"
    assert load(made.evaluation.text).PARAMS == module.PARAMS
    alone = Compilation(made.source, replace(made.options, mesh="one:1", layout=""))
    forward, wanted = (run_local(m.evaluation.text, seed=4) for m in (made, alone))
    hold_to(forward.outputs, wanted.outputs)


def _moves(node: object) -> tuple[Move, ...]:
    return node.moves if isinstance(node, Move | Bucket) else ()


def test_some_are_alone_and_some_are_not() -> None:
    """The laws are of both kinds."""
    found = [p.on for made in EVERY.values() for p in made.device.params]
    assert len(found) / 4 < sum(device is not None for device in found) < len(found)


def test_all_of_a_network_is_stored_once() -> None:
    """Four stages with a layer each hold a quarter of the parameters each, and reduce numbers."""
    text = cuts.PROGRAMS["layers"].replace("OPT", "adamw(lr=0.01)")
    made = compiled(text, "pipe:4", cuts.FOUR, "with one_f_one_b[b](4)")
    module = load(made.text)
    held = local_tensors(module.MESH, module.PARAMS, {}, 0, range(4))
    assert [sum(x.numel() for x in own.values()) for own in held] == [36] * 4
    reduced = [c for c in explain(made.device)["collectives"] if c["kind"] != "send"]
    assert [c["payload_bytes"] for c in reduced] == [4]


def test_what_two_stages_read_together_stays_on_all() -> None:
    """A penalty on a product of parameters of two stages is computed of both."""
    text = cuts.PROGRAMS["penalties"].replace("OPT", "sgd(lr=0.1)")
    made = compiled(text, "pipe:2", "h3: pipe = 1", "with gpipe[b](4)")
    assert {*on(made.device).values()} == {None}


# --- weights that are read as a whole ------------------------------------------------------------

READ_TWICE = """
dim b = 8, m = 4, o = m
program p(x[b, m], t[b, m]) {
  param w1[m, o]
  param w2[m, o]
  param s[]
  h1 = FIRST
  h2 = SECOND
  loss = mean(square(h2 - t)) + PENALTY + 0.1 * s * s
  return loss
  minimize loss with OPT
}
"""
LAYERS = (
    "tanh(einsum(X, W -> [b, o])[o -> m])",
    "X * mean[o](W)",
    "X * mean[m](W)[o -> m]",
    "X * sum(W) * mean[o](W)",
    "X * W[o = 1]",
    "X * sum(W) + tanh(X) * mean(W)",
)
PENALTIES = (
    "0.01 * sum(W * W)",
    "0.02 * sum(abs(W))",
    "0.3 * mean(W) * s",
    "0.02 * sum(square(mean[o](W)))",
    "0.1 * sum(W) * sum(W)",
)
USED_BY = (
    "sgd(lr=0.1)", "sgd(lr=0.1, clip=0.2)", "adamw(lr=0.01)", "adafactor(lr=0.01)",
    "sgd(lr=0.1, compress=powersgd(1))",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(int(os.environ.get("MESHDSL_CASES", "6"))))
def test_weights_in_layers_and_penalties(seed: int) -> None:
    """Gradients with all dims are added to others: where there is none, zeros are as many."""
    rng = random.Random(seed)
    text = READ_TWICE.replace("OPT", rng.choice(USED_BY))
    text = text.replace("FIRST", rng.choice(LAYERS).replace("X", "x").replace("W", "w1"))
    text = text.replace("SECOND", rng.choice(LAYERS).replace("X", "h1").replace("W", "w2"))
    penalties = rng.sample(PENALTIES, rng.choice((1, 2)))
    used = " + ".join(p.replace("W", rng.choice(("w1", "w2"))) for p in penalties)
    text = text.replace("PENALTY", used)
    mesh = rng.choice(("pipe:2", "d:2,pipe:2", "pipe:2,tp:2", "d:2,pipe:2,tp:2"))
    rules = ["h2: pipe = 1"]
    rules += ["b -> d"] if "d:2" in mesh else []
    rules += [rng.choice(("o -> tp", "m -> tp"))] if "tp" in mesh else []
    if "d:2" in mesh:
        dim = rng.choice("mo")
        rules += [f"{r}: {dim} -> d" for r in ("params", "grads", "state") if rng.random() < 0.5]
    schedule = rng.choice(("one_f_one_b", "gpipe", "zb_h1"))
    use = f"with {schedule}[b](4{rng.choice((', reduce=each', ''))})"
    made = compiled(text, mesh, ", ".join(rules), use, rng.choice(POLICIES))
    run = run_local(made.text, seed=4)
    alone = results(run_local(compiled(text, "one:1", "", "").text, seed=4))
    names = [n for n in alone if not n.endswith((".error", ".factor1", ".factor2"))]
    step = results(run)
    hold_to({n: step[n] for n in names}, {n: alone[n] for n in names})
    assert not run.disagreements()
    hold_bytes(run, made)


# --- parameters that the program assigns ---------------------------------------------------------

ASSIGNED = """
dim b = 8, m = 6
program p(x[b, m], t[b, m]) {
  param w[m]
  param v[m]
  param u[m]
  param r[m]
  param k[]
  h = tanh(x * w * stop_gradient(r))
  y = h * v * stop_gradient(u)
  LINES
  loss = mean(square(y - t)) + PENALTY
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
LINES = {
    "a number of one stage fills a tensor of another": "u := broadcast[m](sum(w))",
    "it is where a condition says": "r := where(iota[m] > 2, 1.0, sum(u))",
    "both have the same new value": "u := broadcast[m](k * 2 + 1)\n  r := broadcast[m](k * 2 + 1)",
    "one of numbers alone": "q = broadcast[m](k * 2)\n  u := q + 1.0\n  r := q * r",
    "a number has a name": "n = sum(square(w))\n  u := u * n",
    "a maximum of both": "u := u * maximum(max(w), max(v))",
    "a minimum of one": "r := r * min(abs(u))",
}
MEETING = {
    "nothing": "0.0 * k",
    "maxima": "0.1 * maximum(max(abs(w)), max(abs(v)))",
    "a maximum and a sum": "0.1 * max(abs(w)) * sum(v)",
}


@in_turn(lines=LINES, policy=POLICIES, penalty=MEETING)
def test_what_is_assigned_or_meets(lines: str, penalty: str, policy: str) -> None:
    text = ASSIGNED.replace("LINES", LINES[lines]).replace("PENALTY", MEETING[penalty])
    for mesh, more in (("pipe:2", ""), ("pipe:2,q:2", ", m -> q")):
        made = compiled(text, mesh, f"y: pipe = 1{more}", "with gpipe[b](2)", policy)
        hold(made, text)
        explanation(explain(made.device), {"p.mdsl": made.source})
