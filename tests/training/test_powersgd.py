"""`compress=powersgd(r)`: an oracle in numpy, every layout alike, the bytes, states in parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.runtime.values import local_part, spec_of
from meshdsl.backends.torch.preamble import spec_text
from meshdsl.named.compress import PRIME, halves
from meshdsl.ops.samples import BATCH, HIDDEN, SEQ
from meshdsl.placed.printer import print_program
from meshdsl.report.explanation_document import compressed
from tests.covering import in_turn
from tests.ir_text.placed import parse_program
from tests.programs.harness import Case
from tests.programs.harness import compiled as compiled_case
from tests.training.stepping import Compiled, compiled_step

TEXT = """
dim batch = 8, a = 12, b = 10, layers = 3
layout dp { batch -> data }
layout pod { batch -> (pod, data) }
layout tp { batch -> data, a -> tp }
layout both { batch -> data, b -> tp }
layout zero1 extends dp { state: a -> data }
program p(x[batch, a, b], z[batch, layers, a, b], y[batch, b]) {
  param w[a, b]
  param c[b]
  total = mean(x * w) * 120 + mean(y * c)
  repeat layers {
    param u[a, b]
    s = mean(z * u)
    total = total + s
  }
  loss = total
  return loss
  minimize loss with sgd(lr=0.5, compress=powersgd(RANK))
}
""".replace("s = mean(z * u)\n    total = total + s", "total = total + mean(x * u) * 7")
TEXT = TEXT.replace(", z[batch, layers, a, b]", "")
LAYOUTS = {
    "dp": "data:4", "pod": "pod:2,data:2", "tp": "data:2,tp:2", "both": "data:2,tp:2",
    "zero1": "data:2", "one": "data:1",
}  # fmt: skip
STEPS = 5


def made(layout: str, rank: int = 2, policy: str = "deferred", dtype: str = "f64") -> Compiled:
    text = TEXT.replace("RANK", str(rank))
    name = "dp" if layout == "one" else layout
    return compiled_step(Case(text, LAYOUTS[layout], name, policy), dtype)


def batches() -> list[Any]:
    rng = np.random.default_rng(3)
    shapes = {"x": (8, 12, 10), "y": (8, 10)}
    return [{n: rng.normal(size=s) for n, s in shapes.items()} for _ in range(STEPS)]


def trained(compiled: Compiled) -> list[Any]:
    """Parameters and states after every step."""
    rng = np.random.default_rng(4)
    kept: Any = {"w": rng.normal(size=(12, 10)), "c": rng.normal(size=10)}
    kept["u"] = rng.normal(size=(3, 12, 10))
    found = []
    for batch in batches():
        kept = compiled.step(batch, kept).run.updated
        found.append(kept)
    return found


def start(size: int, index: int) -> Any:
    number = np.arange(size) % PRIME * 31 % PRIME
    return (number * number % PRIME * (3 + index) + number * 7) % PRIME * 2 / PRIME - 1


class Oracle:
    """Algorithm 2 of Vogels et al. 2019 for one matrix, by QR."""

    def __init__(self, rank: int) -> None:
        self.error = np.zeros((12, 10))
        self.q = np.stack([start(10, i) for i in range(rank)], 1)

    def __call__(self, gradient: Any) -> Any:
        whole = gradient + self.error
        p, upper = np.linalg.qr(whole @ self.q)
        p = p * np.sign(np.diag(upper))
        self.q = whole.T @ p
        self.error = whole - p @ self.q.T
        return p @ self.q.T


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_steps_are_those_of_the_paper(rank: int) -> None:
    oracles = {"w": Oracle(rank), **{f"u{i}": Oracle(rank) for i in range(3)}}
    rng = np.random.default_rng(4)
    w, c, u = rng.normal(size=(12, 10)), rng.normal(size=10), rng.normal(size=(3, 12, 10))
    for batch, kept in zip(batches(), trained(made("dp", rank)), strict=True):
        gradient = batch["x"].mean(0)
        w = w - 0.5 * oracles["w"](gradient)
        c = c - 0.5 * batch["y"].mean(0) / 10
        step = np.stack([oracles[f"u{i}"](gradient * 7 / 120) for i in range(3)])
        u = u - 0.5 * step
        for name, wanted in {"w": w, "c": c, "u": u, "w.error": oracles["w"].error}.items():
            np.testing.assert_allclose(kept[name], wanted, rtol=1e-9, atol=1e-9)


@in_turn(layout=LAYOUTS, policy=("deferred", "immediate", "optimal"))
def test_every_layout_has_the_numbers_of_one_device(layout: str, policy: str) -> None:
    alone = trained(made("one"))[-1]
    for name, array in trained(made(layout, policy=policy))[-1].items():
        np.testing.assert_allclose(array, alone[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(("rank", "devices"), [(1, 2), (2, 2), (2, 4), (3, 4)])
def test_devices_send_the_factors_alone(rank: int, devices: int) -> None:
    text = TEXT.replace("RANK", str(rank))
    step = compiled_step(Case(text, f"data:{devices}", "dp", "deferred"), "f32")
    matrices = 1 + 3  # w, and a slice of u for each layer
    factors = 4 * rank * (12 + 10) * matrices
    rest = 4 * (10 + 1)  # the gradient of c, and the loss
    sent = sum(c["wire_bytes"] for c in step.report["collectives"])
    assert sent == math.ceil(2 * (devices - 1) / devices * (factors + rest))


def test_explain_says_that_any_layout_has_the_same_numbers() -> None:
    report = made("dp").report
    assert report["compress"] == "powersgd(2)"
    (said,) = compressed(report)
    assert "under any layout the numbers are those of one device" in str(said)


def test_the_error_stays_in_parts_and_each_part_is_of_one_device() -> None:
    step = made("tp").step(batches()[0], {})
    spec = step.specs["w.error"]
    assert spec.parts == ("data",)
    assert spec_of(spec_text(spec)) == spec
    blocks = [held["w.error"] for held in step.held]
    whole = step.run.updated["w.error"]
    for rank, other in ((0, 2), (1, 3)):  # mesh data:2, tp:2
        part = local_part(spec, step.run.mesh, rank)
        np.testing.assert_allclose(blocks[rank] + blocks[other], whole[part], atol=1e-12)
        assert not np.allclose(blocks[rank], blocks[other])


def test_a_column_without_anything_in_it_begins_anew() -> None:
    kept: Any = {}
    zeros = {n: np.zeros_like(a) for n, a in batches()[0].items()}
    kept = made("dp").step(zeros, kept).run.updated
    np.testing.assert_allclose(kept["w.factor1"], start(10, 0))
    again = made("dp").step(batches()[0], kept).run.updated
    assert np.abs(again["w"] - kept["w"]).max() > 1e-3


def test_of_dependent_columns_the_later_are_dropped() -> None:
    """A gradient of rank 1 has one factor: what is left of others is rounding."""
    one = np.ones((8, 12, 10)) * np.arange(10)
    kept = made("dp").step({"x": one, "y": np.zeros((8, 10))}, {}).run.updated
    np.testing.assert_allclose(kept["w.factor2"], start(10, 1))
    np.testing.assert_allclose(kept["w.error"], 0, atol=1e-12)


def test_small_tensors_are_sent_whole_and_large_ones_cut_where_factors_are_thinnest() -> None:
    assert halves([BATCH], 1) is None
    assert halves([BATCH, HIDDEN], 10_000) is None
    dims = [BATCH, HIDDEN, SEQ]
    cut = halves(dims, 1)
    assert cut is not None
    sizes = [math.prod(d.size for d in half) for half in cut]
    every = [
        [math.prod(d.size for d in dims[:i]), math.prod(d.size for d in dims[i:])] for i in (1, 2)
    ]
    assert sum(sizes) == min(map(sum, every))


def test_programs_with_states_in_parts_are_read_back() -> None:
    program = compiled_case(Case(TEXT.replace("RANK", "1"), "data:2", "dp", "deferred"))
    text = print_program(program.placed)
    assert "w.error : f32[a 12, b 10] partial sum over data" in text
    assert print_program(parse_program(text)) == text
