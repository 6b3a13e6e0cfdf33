"""ZeRO's memory: Rajbhandari et al. 2020, Fig. 1, to the byte, and what there is beside it.

7.5 B parameters (Ψ) on N = 64 devices, Adam with K = 12 bytes of states a parameter: 2Ψ + 2Ψ + KΨ
without ZeRO, then with states, gradients and parameters split: 120, 31.4, 16.6 and 1.9 GB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training_memory import allocated
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime import update_kernels
from meshdsl.device.ir import Compute, DeviceLoop, Move, written_into
from meshdsl.device.updates_in_place import updated_in_place
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.program import every
from meshdsl.ir.types import LARGE
from meshdsl.ops import update
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.explanation import explain
from tests.covering import covered, in_turn
from tests.device.alone import first_device
from tests.device.steps import plain

LAYOUTS = """
layout dp { batch -> data }
layout z1 extends dp { state: SPLIT -> data }
layout z2 extends z1 { grads: SPLIT -> data }
layout z3 extends z2 { params: SPLIT -> data }
"""
STACKED = """
dim batch = 64, model = 3125, hidden = 40000, layers = 30
LAYOUTS
program net(x[batch, model], target[batch, model]) {
  repeat layers {
    param up[model, hidden]
    param down[hidden, model]
    x = x + einsum(tanh(einsum(x, up -> [batch, hidden])), down -> [batch, model])
  }
  loss = mean((x - target)^2)
  return loss
  minimize loss with adamw(lr=1e-4)
}
"""
APART = "".join(f"  param w{n}[io, out]\n" for n in range(8))
APART += "".join(f"  x = x + tanh(einsum(x, w{n} -> [batch, out]))[out -> io]\n" for n in range(8))
SEPARATE = f"""
dim batch = 64, io = 1024, out = io
LAYOUTS
program net(x[batch, io], target[batch, io]) {{
{APART}  loss = mean((x - target)^2)
  return loss
  minimize loss with adamw(lr=1e-4)
}}
"""
PSI, N, K, COUNTER = 7_500_000_000, 64, 12, 4
TABLE = {
    "dp": (2 * PSI, 2 * PSI, K * PSI),
    "z1": (2 * PSI, 2 * PSI, K * PSI // N),
    "z2": (2 * PSI, 2 * PSI // N, K * PSI // N),
    "z3": (2 * PSI // N, 2 * PSI // N, K * PSI // N),
}
PUBLISHED = {"dp": "120.0", "z1": "31.4", "z2": "16.6", "z3": "1.9"}


def made(
    text: str, layout: str, devices: int = 4, split: str = "hidden", **how: Any
) -> Compilation:
    text = text.replace("LAYOUTS", LAYOUTS.replace("SPLIT", split))
    options = Options(mesh=f"data:{devices}", layout=layout, **{"dtype": "bf16", **how})
    return compile_source(Source("case.mdsl", text), options, Diagnostics())


@pytest.mark.parametrize("layout", TABLE)
def test_the_table_is_exact_and_all_else_is_named(layout: str) -> None:
    memory = explain(made(STACKED, layout, N).device)["memory"]
    stored = memory["params"], memory["grads"], memory["state"] - COUNTER
    assert stored == TABLE[layout]
    assert f"{sum(stored) / 1e9:.1f}" == PUBLISHED[layout]
    # Of x and the tanh of each layer a device has one row, and a few more of these.
    row, inner = 3125 * 2, 40_000 * 2
    kept = 30 * (row + inner)
    assert memory["activations"] < kept + 10 * (row + inner)
    # Beside that there is what one layer needs: its gradients, and its parameters where gathered.
    layer = PSI // 30 * 2
    beside = sum(memory[kind] for kind in ("new_grads", "gathered", "updates", "buffers"))
    assert beside <= (2.1 if layout == "z3" else 1.1) * layer
    assert memory["peak"] == sum(memory[k] for k in ("params", "grads", "state", "inputs")) + (
        memory["activations"] + beside - memory["grads_later"]
    )


SMALL = {"batch": 16, "model": 512, "hidden": 2048, "layers": 6}
SMALLER = {"batch": 4, "model": 128, "hidden": 512, "layers": 6}


@pytest.fixture
def large_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large (`ir.types.LARGE`) has a sixteenth of the bytes: the tests are as quick."""
    for module in (
        "placed.gather_again",
        "device.liveness",
        "device.sums",
        "device.updates_in_place",
    ):
        monkeypatch.setattr(f"meshdsl.{module}.LARGE", LARGE // 16)
    monkeypatch.setattr("meshdsl.device.buckets.SMALL", LARGE // 16)
    for module in ("update_text", "operator_text"):
        monkeypatch.setattr(f"meshdsl.backends.torch.{module}.LARGE", LARGE // 16)


@pytest.mark.usefixtures("large_is_smaller")
@in_turn(layout=TABLE, dtype=("bf16", "f32", "bf16"), split=("hidden", "model"))
def test_torch_allocates_what_is_reported(layout: str, dtype: str, split: str) -> None:
    compiled = made(STACKED, layout, dtype=dtype, set_dims=SMALLER, split=split)
    peak = explain(compiled.device)["memory"]["peak"]
    held, run = first_device(compiled)
    assert held + allocated(run) == pytest.approx(peak, rel=0.05)


def test_zero_2_of_separate_parameters_is_below_zero_1() -> None:
    peaks = [explain(made(SEPARATE, x, split="io").device)["memory"]["peak"] for x in TABLE]
    psi = 8 * 1024 * 1024
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] - peaks[2] > 0.9 * psi  # of the gradients, which are 2Ψ
    for peak, formula in zip(peaks, (16, 7, 5.5, 4), strict=True):
        assert formula * psi < peak < formula * psi + 8 * 1024 * 1024


@pytest.mark.usefixtures("large_is_smaller")
@covered(layout=TABLE, dtype=("f32", "bf16"), clip=("", ", clip=1.0"))
def test_numbers_are_those_of_updates_apart(
    layout: str, dtype: str, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, but for slices in f32: torch has another kernel for what is contiguous."""
    text = STACKED.replace("lr=1e-4", f"lr=1e-2{clip}")
    dims = {"batch": 8, "model": 64, "hidden": 256, "layers": 3}
    after = made(text, layout, dtype=dtype, set_dims=dims)
    monkeypatch.setattr("meshdsl.device.passes.updated_in_place", lambda program: program)
    before = made(text, layout, dtype=dtype, set_dims=dims)
    rng = np.random.default_rng(1)
    inputs = {k: rng.standard_normal((8, 64)).astype("f4") for k in ("x", "target")}
    shapes = {"up": (3, 64, 256), "down": (3, 256, 64)}
    params = {k: (rng.standard_normal(s) / 16).astype("f4") for k, s in shapes.items()}
    runs = [run_local(each.text, inputs, params) for each in (before, after)]
    assert runs[0].outputs["loss"] == runs[1].outputs["loss"]
    assert sum(map(runs[0].wire_bytes, range(4))) == sum(map(runs[1].wire_bytes, range(4)))
    for name, value in runs[0].updated.items():
        exact = dtype == "bf16" or layout in ("dp", "z3")
        rtol = 0 if exact else 1e-5
        np.testing.assert_allclose(runs[1].updated[name], value, rtol=rtol, atol=rtol, err_msg=name)


STAGES = {
    "pipe": ("pipe:2,data:2", "batch -> data, layers -> pipe, state: hidden -> data", "gpipe"),
    "turned": ("pipe:2,data:2", "batch -> data, layers -> pipe, state: model -> data", "gpipe"),
    "tensor": ("data:2,tp:2", "batch -> data, hidden -> tp, state: model -> data", ""),
}
OPTIMIZERS = ("adamw(lr=1e-3, clip=1.0)", "adafactor()", "momentum(lr=0.1, nesterov=true)")


@pytest.mark.usefixtures("large_is_smaller")
@in_turn(stages=STAGES, optimizer=OPTIMIZERS, dtype=("bf16", "f32", "bf16"))
def test_with_other_parallelism_too(
    stages: str, optimizer: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of updates apart, the bytes, and no more memory but for what is in flight."""
    mesh, rules, schedule = STAGES[stages]
    layout = f"layout l {{ {rules} }}" + (f" with {schedule}[batch](2)" if schedule else "")
    text = STACKED.replace("LAYOUTS", layout).replace("adamw(lr=1e-4)", optimizer)
    dims = {"batch": 8, "model": 64, "hidden": 256, "layers": 4}
    options = Options(mesh=mesh, layout="l", dtype=dtype, set_dims=dims)
    after = compile_source(Source("case.mdsl", text), options, Diagnostics())
    assert any(written_into(n) for n in every(after.device.body))
    text_after, peak = after.text, explain(after.device)["memory"]["peak"]
    monkeypatch.setattr("meshdsl.device.passes.updated_in_place", lambda program: program)
    before = compile_source(Source("case.mdsl", text), options, Diagnostics())
    assert peak <= 1.05 * explain(before.device)["memory"]["peak"]
    rng = np.random.default_rng(1)
    inputs = {k: rng.standard_normal((8, 64)).astype("f4") for k in ("x", "target")}
    shapes = {"up": (4, 64, 256), "down": (4, 256, 64)}
    params = {k: (rng.standard_normal(s) / 16).astype("f4") for k, s in shapes.items()}
    one, other = (run_local(each, inputs, params) for each in (text_after, before.text))
    assert [*map(one.wire_bytes, range(4))] == [*map(other.wire_bytes, range(4))]
    rtol = 0 if dtype == "bf16" else 1e-5
    for name, value in other.updated.items():
        np.testing.assert_allclose(one.updated[name], value, rtol=rtol, atol=rtol, err_msg=name)


def test_the_norm_of_all_gradients_is_between_two_loops() -> None:
    """Reductions have their own, as each update waits for the norm."""
    program = made(STACKED.replace("1e-4", "1e-4, clip=1.0"), "z1", set_dims=SMALL).device
    loops = [n for n in program.body if isinstance(n, DeviceLoop) and n.phase == "update"]
    kinds = [[n.step.kind for n in loop.body if isinstance(n, Move)] for loop in loops]
    assert kinds[0] == ["reduce_scatter"] * 2
    names = [n.name for n in program.body if isinstance(n, Compute)]
    assert "squared_norm" in names


ONCE = """
  param once[hidden, model]
  first = transpose[model, hidden](once)
  x = x + sum[hidden](once)
"""


@pytest.mark.usefixtures("large_is_smaller")
@pytest.mark.parametrize("layout", ["dp", "z1"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_parameter_that_is_returned_is_the_old_one(layout: str, dtype: str) -> None:
    text = SEPARATE.replace("return loss", "return loss, w0")
    dims = {"batch": 8, "io": 192}
    rng = np.random.default_rng(1)
    params = {f"w{n}": rng.standard_normal((192, 192)).astype("f4") for n in range(8)}
    params = {k: torch.tensor(v).bfloat16().float().numpy() for k, v in params.items()}
    inputs = {k: rng.standard_normal((8, 192)).astype("f4") for k in ("x", "target")}
    found = run_local(
        made(text, layout, dtype=dtype, set_dims=dims, split="io").text, inputs, params
    )
    np.testing.assert_array_equal(found.outputs["w0"], params["w0"])
    assert (found.updated["w1"] != params["w1"]).any()


def test_without_an_update_there_is_nothing_to_do() -> None:
    program = plain("zero1")
    assert updated_in_place(program) is program


def test_pieces_are_as_large_as_is_counted() -> None:
    assert update_kernels.PIECE == update.PIECE


@pytest.mark.parametrize("kernel", ["sgd_", "momentum_", "adam_", "adamw_"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_in_pieces_makes_the_same_update(
    kernel: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def updated(piece: int) -> list[torch.Tensor]:
        monkeypatch.setattr(update_kernels, "PIECE", piece)
        torch.manual_seed(1)
        w, m, v = (torch.randn(130, 97).abs_() for _ in range(3))
        g = torch.randn(97, 130).mT if turned else torch.randn(130, 97)
        g, scale = g.bfloat16(), torch.tensor(0.25)
        if kernel == "sgd_":
            update_kernels.sgd_([w], [g], 0.1, scale, 0.01)
        elif kernel == "momentum_":
            update_kernels.momentum_([w], [g], [v], 0.1, scale, 0.9, True, 0.01)
        else:
            about = (0.9, 0.99, 1e-8, 0.01, kernel == "adamw_")
            update_kernels.adam_([w], [g], [m], [v], 0.1, scale, torch.tensor(3.0), *about)
        return [w, m, v]

    for one, other in zip(updated(1 << 20), updated(4096), strict=True):
        assert torch.equal(one, other)


def test_gathers_name_the_memory_that_they_write() -> None:
    text = made(STACKED, "z1", set_dims=SMALL).text
    assert "into=up" in text
    assert "into=down" in text
