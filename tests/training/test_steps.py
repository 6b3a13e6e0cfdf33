"""Training steps: every optimizer under layouts that split its work, compared with one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.reference import reference_step
from meshdsl.named.optimizers import LearningRate
from tests.covering import in_turn
from tests.programs.harness import Case, compiled, explained
from tests.training.stepping import Arrays, compiled_step, hold_to, values, whole

PROGRAM = """
dim batch = 8, io = 8, hidden = 16, layers = 2

program mlp(x[batch, io], target[batch, io]) {{
  param g[io] = ones()
  h = x
  repeat layers {{
    param w[io, hidden]
    param b[hidden] = zeros()
    param v[hidden, io]
    h = h + einsum(gelu(einsum(h * g, w -> [batch, hidden]) + b), v -> [batch, io])
  }}
  loss = mean((h - target)^2)
  return loss, h
  minimize loss with {optimizer}
}}
"""

OPTIMIZERS = (
    "sgd(lr=0.1)",
    "sgd(lr=linear(0.2, 4, warmup=1, final=0.01), weight_decay=0.1, clip=0.3)",
    "momentum(lr=0.05)",
    "momentum(lr=linear_warmup(0.1, 2), nesterov=true, weight_decay=0.05)",
    "adam(lr=0.01)",
    "adam(lr=0.01, clip=0.5)",
    "adamw(lr=cosine(0.01, 5, warmup=2, final=1e-3), weight_decay=0.1, clip=1.0)",
    "adafactor(lr=0.01)",
    "adafactor(lr=0.02, relative=false, weight_decay=0.01, clip=0.2)",
)

LAYOUTS = {
    "data parallel": "data:4 { batch -> data }",
    "megatron": "tp:4 { hidden -> tp }",
    "two axes": "data:2,tp:2 { batch -> data, hidden -> tp }",
    "zero 1": "data:4 { batch -> data, state: io -> data }",
    "zero 2": "data:4 { batch -> data, state: io -> data, grads: io -> data }",
    "zero 3": "data:4 { batch -> data, state: io -> data, grads: io -> data, params: io -> data }",
    "zero 3, kept": "data:4 { batch -> data, params: io -> data keep }",
    "megatron and zero 3": "data:2,tp:2 { batch -> data, hidden -> tp, params: io -> data }",
    "states of one parameter": "data:4 { batch -> data, state: hidden -> data }",
    "contraction": "io:4 { io -> io }",
}
POLICIES = ("deferred", "immediate", "mesh-tf", "optimal")

STEPS = 3
MOST = 1e-9


def case(optimizer: str, layout: str, reduce: str = "deferred") -> Case:
    mesh, _, rules = LAYOUTS[layout].partition(" ")
    return Case(PROGRAM.format(optimizer=optimizer), mesh, rules, reduce)


def batches(inputs: Mapping[str, Any]) -> list[Arrays]:
    """The batches of the steps, drawn anew."""
    rng = np.random.default_rng(5)
    return [{n: rng.standard_normal(a.shape) for n, a in inputs.items()} for _ in range(STEPS)]


@in_turn(layout=LAYOUTS, optimizer=OPTIMIZERS, reduce=POLICIES)
def test_steps_are_those_of_one_device(optimizer: str, layout: str, reduce: str) -> None:
    made = compiled_step(case(optimizer, layout, reduce))
    inputs, params = values(made.named)
    kept, expected = dict(params), dict(params)
    for batch in batches(inputs):
        step = made.step(batch, kept)
        outputs, expected = reference_step(made.named, batch, expected, expected)
        hold_to(step, outputs, expected, MOST)
        kept = step.run.updated
    assert expected["step"] == STEPS
    assert {"w", "v", "g", "b"} <= {n.split(".")[0] for n in expected}


# --- what the steps do ------------------------------------------------------------------------


def stepped(optimizer: str, batch: Mapping[str, Any] | None = None) -> tuple[Arrays, Arrays]:
    """Parameters before and after one step on one device."""
    named = whole(PROGRAM.format(optimizer=optimizer)).named
    inputs, params = values(named)
    return params, reference_step(named, batch or inputs, params, {})[1]


def test_clipping_scales_all_gradients_by_their_common_norm() -> None:
    params, free = stepped("sgd(lr=1.0)")
    _, clipped = stepped("sgd(lr=1.0, clip=0.25)")
    gradients = {n: a - free[n] for n, a in params.items()}
    norm = np.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
    assert norm > 1
    for name, array in params.items():
        found = array - clipped[name]
        np.testing.assert_allclose(found, gradients[name] * 0.25 / (norm + 1e-6), rtol=1e-10)


def test_the_rate_follows_the_schedule() -> None:
    schedule = LearningRate("cosine", 0.5, 4, 2, 0.1)
    named = whole(PROGRAM.format(optimizer="sgd(lr=cosine(0.5, 4, 2, 0.1))")).named
    _, free = stepped("sgd(lr=1.0)")
    inputs, params = values(named)
    for step in range(6):
        _, updated = reference_step(named, inputs, params, {"step": np.array(step, np.int32)})
        for name, array in params.items():
            expected = schedule.at(step) * (array - free[name])
            np.testing.assert_allclose(array - updated[name], expected, rtol=1e-9, atol=1e-14)


# --- several batches in a step ----------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_accumulated_gradients_are_the_mean_of_those_of_the_batches(count: int) -> None:
    named = whole(PROGRAM.format(optimizer=f"sgd(lr=1.0, accumulate={count})")).named
    inputs, params = values(named)
    assert {a.shape for a in inputs.values()} == {(count, 8, 8)}
    outputs, updated = reference_step(named, inputs, params, {})
    single = whole(PROGRAM.format(optimizer="sgd(lr=1.0)")).named
    runs = [
        reference_step(single, {n: a[i] for n, a in inputs.items()}, params, {})
        for i in range(count)
    ]
    assert outputs["loss"] == pytest.approx(np.mean([r[0]["loss"] for r in runs]), rel=1e-12)
    np.testing.assert_allclose(outputs["h"], np.stack([r[0]["h"] for r in runs]), rtol=1e-12)
    for name, array in params.items():
        expected = np.mean([r[1][name] for r in runs], 0)
        assert not np.array_equal(expected, array)
        np.testing.assert_allclose(updated[name], expected, rtol=1e-10, atol=1e-14)


SUMMED = """
dim batch = 2, io = 4, layers = 2
program p(x[batch, io]) {{
  param w[io] = zeros()
  h = x
  repeat layers {{
    param u[io] = zeros()
    h = h + u
  }}
  loss = mean(sum[io](h + w))
  return loss
  minimize loss with sgd(lr=1.0, accumulate={count}, compute="bf16")
}}
"""


@in_turn(mesh=("data:1", "data:2"), count=(512, 1024))
def test_many_batches_in_bf16_are_summed_in_f32(count: int, mesh: str) -> None:
    """Each gradient is 1, which a sum in bf16 stops growing by at 256: its mean would be 0.25."""
    made = compiled_step(Case(SUMMED.format(count=count), mesh, "{ batch -> data }"), None)
    inputs = {"x": np.ones((count, 2, 4), np.float32)}
    _, params = values(made.named)
    step = made.step(inputs, params)
    learned = {n: a for n, a in step.run.updated.items() if n != "step"}
    assert set(learned) == {"w", "u", "w.master", "u.master"}
    for name, array in learned.items():
        np.testing.assert_array_equal(array, np.full(array.shape, -1, np.float32), name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_several_batches_are_those_of_one_device(layout: str) -> None:
    made = compiled_step(case("adam(lr=0.01, accumulate=3)", layout))
    inputs, params = values(made.named)
    outputs, kept = reference_step(made.named, inputs, params, {})
    hold_to(made.step(inputs, params), outputs, kept, MOST)


@pytest.mark.parametrize("layout", ["data parallel", "zero 1"])
def test_accumulated_gradients_are_reduced_once(layout: str) -> None:
    report = explained(case("adam(lr=0.01, accumulate=3)", layout))
    assert [c["count"] for c in report["collectives"]] == [1] * len(report["collectives"])


def test_gradients_that_are_kept_split_are_scattered_batch_by_batch() -> None:
    """A rule for `grads:` requests that: no device has a whole gradient. None is gathered."""
    report = explained(case("adam(lr=0.01, accumulate=3)", "zero 2", "optimal"))
    moved = {c["kind"] for c in report["collectives"] if c["tensor"] in ("d_w, d_v", "d_v, d_w")}
    assert moved == {"reduce_scatter"}
    gathered = sum(c["wire_bytes"] for c in report["collectives"] if c["kind"] == "all_gather")
    parameters = 8 + 2 * 2 * 8 * 16
    assert gathered == 3 * parameters * 4 // 4


# --- narrow floats ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["data parallel", "megatron", "zero 3", "two axes"])
def test_mixed_precision_keeps_parameters_in_f32(layout: str) -> None:
    """Products in bf16, states in f32: the loss falls as it does in f64, to bf16's precision."""
    optimizer = 'adamw(lr=0.01, compute="bf16")'
    made = compiled_step(case(optimizer, layout), None)
    widths = {v.value.name: str(v.value.type.dtype) for v in made.named.states}
    assert {n: w for n, w in widths.items() if n != "step"} == {
        f"{p}.{s}": "f32" for p in ("g", "w", "b", "v") for s in ("m", "v", "master")
    }
    assert {str(p.value.type.dtype) for p in made.named.params} == {"bf16"}
    wide = whole(PROGRAM.format(optimizer="adamw(lr=0.01)")).named
    inputs, params = values(wide)
    kept: Mapping[str, Any] = params
    expected: Arrays = dict(params)
    for _ in range(STEPS):
        step = made.step(inputs, kept)
        outputs, expected = reference_step(wide, inputs, expected, expected)
        kept = step.run.updated
        assert step.run.outputs["loss"] == pytest.approx(float(outputs["loss"]), rel=0.02)
    for name in params:
        master = kept[f"{name}.master"]
        assert np.abs(master - expected[name]).mean() < 0.005
        rounded = compiled_rounding(master)
        np.testing.assert_array_equal(kept[name], rounded)


def compiled_rounding(array: Any) -> Any:
    """`array` rounded to bf16, as float32."""
    import torch

    return torch.from_numpy(np.asarray(array)).to(torch.bfloat16).float().numpy()


def test_mixed_precision_halves_the_bytes_of_gradients() -> None:
    """But for those that sums in f32 make, which are reduced before they are rounded."""
    narrow = explained(case('adam(compute="bf16")', "data parallel"))
    wide = explained(case("adam()", "data parallel"))
    sent = [r["totals"]["wire_bytes"] for r in (narrow, wide)]
    assert sent[1] / 2 <= sent[0] < 0.53 * sent[1]


def test_states_lie_where_rules_say() -> None:
    made = compiled(case("adam()", "states of one parameter"))
    held = {v.value.name: dict(v.placement.splits) for v in made.device.states}
    assert held["w.m"] == held["w.v"] == {"hidden": ("data",)}
    assert held["g.m"] == {}


# --- names ------------------------------------------------------------------------------------


def test_a_parameter_may_be_called_what_a_state_is() -> None:
    text = """
dim a = 4
def w(x[a]) -> [a] {
  param m[a]
  return x * m
}
program p(x[a]) {
  param step[a]
  param w[a]
  loss = mean(square(w(x) * w + step))
  return loss
  minimize loss with adam(lr=0.1)
}
"""
    made = compiled_step(Case(text, "d:2", "{ a -> d }"))
    inputs, params = values(made.named)
    outputs, kept = reference_step(made.named, inputs, params, {})
    assert kept["step"].shape == kept["w.m"].shape == (4,)
    assert kept["step_"] == 1
    assert {"step_", "step.m", "w.m_", "w.m.m", "w.v"} <= set(kept)
    step = made.step(inputs, params)
    hold_to(step, outputs, kept, MOST)
    assert set(step.run.updated) == set(kept)
