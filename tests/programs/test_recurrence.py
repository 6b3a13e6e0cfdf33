"""`linear_recurrence` on every split, against a loop over the steps and its autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.recurrence import linear_recurrence
from meshdsl.diagnostics import DiagnosticError
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.pipelines.test_programs import compiled, hold
from tests.programs.harness import check_bytes

PROGRAM = """
dim batch = 3, time = 16, state = 4
program test(a[batch, time, state], gate[time, batch], b[batch, time, state], rate[state],
  drive[batch, state], h0[batch, state], level[state], c[batch, time, state]) {
  plain = linear_recurrence[time](a, b)
  back = linear_recurrence[time](gate, b, h0, reverse=1)
  fixed = linear_recurrence[time](rate, b, level)
  held = linear_recurrence[time](gate, drive)
  mean = linear_recurrence[time](0.5, b, reverse=1)
  loss = sum(c * (square(plain) + back * fixed + held))
  da, dgate, db, drate, ddrive, dh0, dlevel = grad(loss, a, gate, b, rate, drive, h0, level)
  return plain, back, fixed, held, mean, da, dgate, db, drate, ddrive, dh0, dlevel
}
"""


def recurrence(a, b, h, reverse=False):
    """The states of a[batch, time, state] and b alike, one after the other."""
    states = {}
    for t in reversed(range(b.shape[1])) if reverse else range(b.shape[1]):
        h = states[t] = a[:, t] * h + b[:, t]
    return torch.stack([states[t] for t in range(b.shape[1])], 1)


def drawn(time, batch=3, state=4):
    """The inputs; some `a` are 0, some are more than 1."""
    rng = np.random.default_rng(5)
    full, some = (batch, time, state), (batch, state)
    shapes = {"a": full, "gate": (time, batch), "b": full, "rate": (state,), "drive": some}
    shapes |= {"h0": some, "level": (state,), "c": full}
    arrays = {n: rng.uniform(-1.1, 1.1, s).astype(np.float32) for n, s in shapes.items()}
    for name in ("a", "gate"):
        arrays[name][rng.random(arrays[name].shape) < 0.2] = 0
    return arrays


def expected(arrays):
    """The outputs of the program by a loop in float64, and its gradients by autograd."""
    x = {n: torch.tensor(v, dtype=torch.float64, requires_grad=n != "c") for n, v in arrays.items()}
    gate, one = x["gate"].T[:, :, None], torch.ones_like(x["b"])
    y = {
        "plain": recurrence(x["a"], x["b"], 0),
        "back": recurrence(gate * one, x["b"], x["h0"], True),
        "fixed": recurrence(x["rate"] * one, x["b"], x["level"]),
        "held": recurrence(gate * one, x["drive"][:, None] * one, 0),
        "mean": recurrence(0.5 * one, x["b"], 0, True),
    }
    terms = y["plain"] ** 2 + y["back"] * y["fixed"] + y["held"]
    names = ("a", "gate", "b", "rate", "drive", "h0", "level")
    grads = torch.autograd.grad((x["c"] * terms).sum(), [x[n] for n in names])
    y |= {f"d{n}": g for n, g in zip(names, grads, strict=True)}
    return {n: v.detach().numpy() for n, v in y.items()}


LAYOUTS = [
    ("p:1", "batch -> none", 40, "deferred"),
    ("p:4", "time -> p", 13, "deferred"),
    ("p:4", "time -> p", 5, "immediate"),  # one device has no element
    ("p:3,q:2", "time -> (q, p)", 17, "deferred"),
    ("p:2,q:2", "time -> p, batch -> q", 9, "optimal"),
]


@pytest.mark.parametrize(("mesh", "rules", "time", "policy"), LAYOUTS)
def test_states_and_gradients_are_those_of_a_loop(
    mesh: str, rules: str, time: int, policy: str
) -> None:
    """And each device sends as many bytes as were predicted."""
    text = f"{PROGRAM}layout chosen {{ {rules} }}\n"
    sizes = {"time": time}
    made = compile_text(text, mesh=mesh, layout="chosen", reduce=policy, set_dims=sizes)
    arrays = drawn(time)
    run = run_local(made.emitted.text, arrays, lines=made.emitted.places)
    check_bytes(explain(made.device), run)
    for name, wanted in expected(arrays).items():
        found = run.outputs[name]
        found = found.transpose(0, 2, 1) if name == "held" else found  # of drive, then of gate
        assert found.shape == wanted.shape, name
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, atol=2e-6 * scale, rtol=0, err_msg=name)


SHORT = """
dim time = 16, state = 3
layout chosen { time -> p }
program test(a[time], b[time, state], h0[state]) {
  h = linear_recurrence[time](a, b, h0)
  RETURN
}
"""


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 8])
def test_one_state_is_sent_at_each_step_of_the_tree(devices: int) -> None:
    """The state of one block, then of twice as many each time, and so their product of `a`."""
    made = compile_text(SHORT.replace("RETURN", "return h"), mesh=f"p:{devices}", layout="chosen")
    reach = [1, *(2**k for k in range(16) if 2**k < devices - 1)]
    sent = [c for c in explain(made.device)["collectives"] if c["phase"] != "output"]
    assert {c["kind"] for c in sent} == {"halo"}
    assert len(sent) == 2 * len(reach) - 1
    bytes_of = [sum(4 * s for r in reach for s in [3] if d + r < devices) for d in range(devices)]
    for d in range(devices):
        bytes_of[d] += sum(4 for r in reach[:-1] if d + r < devices)
    rng = np.random.default_rng(1)
    arrays = {"a": rng.normal(size=16), "b": rng.normal(size=(16, 3)), "h0": rng.normal(size=3)}
    run = run_local(made.emitted.text, {n: x.astype(np.float32) for n, x in arrays.items()})
    assert [run.wire_bytes(d) for d in range(devices)] == bytes_of


@pytest.mark.parametrize(("dtype", "error"), [("f64", 1e-14), ("bf16", 1e-2)])
def test_other_floats(dtype: str, error: float) -> None:
    """Of two bytes they are added up as f32: only the result is rounded."""
    text = SHORT.replace("RETURN", "da, db, dh0 = grad(sum(h), a, b, h0)\n  return h, da, db, dh0")
    rng = np.random.default_rng(2)
    a = np.sign(rng.normal(size=50)) * rng.uniform(0.7, 1, 50)
    arrays = {"a": a, "b": rng.normal(size=(50, 3)), "h0": rng.normal(size=3)}
    torch_type = {"f64": torch.float64, "bf16": torch.bfloat16}[dtype]
    x = {n: torch.tensor(v).to(torch_type).double().requires_grad_() for n, v in arrays.items()}
    h = recurrence(x["a"][None, :, None], x["b"][None], x["h0"][None])[0]
    wanted = h, *torch.autograd.grad(h.sum(), [x["a"], x["b"], x["h0"]])
    made = compile_text(text, mesh="p:3", layout="chosen", dtype=dtype, set_dims={"time": 50})
    given = {n: v.detach().numpy() for n, v in x.items()}
    run = run_local(made.emitted.text, {n: v.astype(made_type(dtype)) for n, v in given.items()})
    for found, exact in zip(run.outputs.values(), wanted, strict=True):
        off = np.abs(np.asarray(found, np.float64) - exact.detach().numpy()).max()
        assert off <= error * exact.abs().max().item()


def made_type(dtype: str) -> str:
    """What numpy has for a dtype."""
    return "float64" if dtype == "f64" else "float32"


@pytest.mark.parametrize("reverse", [False, True])
def test_every_length_is_scanned_right(reverse: bool) -> None:
    """On small integers, exactly: pairs, odd ends, and the steps that are done one by one."""
    for length in (0, 1, 16, 17, 18, 33, 34, 35, 66, 67, 300):
        rng = torch.Generator().manual_seed(length)
        a, b = (torch.randint(-1, 2, (2, length, 3), generator=rng).double() for _ in range(2))
        h0 = torch.ones(1, 1, 3, dtype=torch.float64)
        found = linear_recurrence(a, b, 1, h0, reverse)
        if length:
            assert torch.equal(found, recurrence(a, b, h0[0, 0], reverse))
        assert found.shape == b.shape


def test_products_that_vanish_do_no_harm() -> None:
    """Where the product of many `a` underflows, states are still those of the last steps."""
    a, b = torch.full((1, 4096, 1), 1e-30), torch.ones(1, 4096, 1)
    assert torch.equal(linear_recurrence(a, b, 1), b)


def test_a_pipeline_of_micro_batches_with_its_time_split() -> None:
    hold(compiled(STAGES, "pipe:2,t:2", "l -> pipe, time -> t", "with one_f_one_b[b](2)"), STAGES)


STAGES = """
dim b = 4, time = 5, m = 2, l = 2
program p(x[b, time, m]) {
  repeat l {
    param w[m]
    x = x + linear_recurrence[time](sigmoid(x * w), x * w)
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("linear_recurrence[time](a, h0)", None),
        ("linear_recurrence[state](a, a)", "MD0204"),
        ("linear_recurrence[time](a, b, b)", "MD0214"),
        ("linear_recurrence[time](a, b, reverse=2)", "MD0213"),
        ("linear_recurrence[time](cast(a, i32), cast(b, i32))", "MD0202"),
        ("linear_recurrence[time](cast(a, f64), b)", "MD0201"),
        ("linear_recurrence(a, b)", "MD0252"),
        ("linear_recurrence[time](a)", "MD0251"),
    ],
)
def test_what_is_refused(call: str, code: str | None) -> None:
    text = SHORT.replace("linear_recurrence[time](a, b, h0)", call).replace("RETURN", "return h")
    if code is None:
        assert compile_text(text, mesh="p:2", layout="chosen").named
        return
    with pytest.raises(DiagnosticError) as refused:
        compile_text(text, mesh="p:2", layout="chosen").named  # noqa: B018
    assert [d.code for d in refused.value.diagnostics] == [code]
    assert refused.value.diagnostics[0].help


@pytest.mark.parametrize(("mesh", "time"), [("p:1", 300), ("p:3", 300), ("p:8", 301)])
@pytest.mark.parametrize("careful", [False, True])
def test_products_that_overflow_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, mesh: str, time: int, careful: bool
) -> None:
    """The states are small or 0 where a product of `a` is infinite; a reset follows.

    An accelerator is `careful` at once, since asking it for a result makes the host wait.
    """
    text = SHORT.replace("h0[state])", "h0[state], c[time])").replace("RETURN", GRADIENTS)
    made = compile_text(text, mesh=mesh, layout="chosen", set_dims={"time": time})
    program = made.emitted.text
    if careful:
        program = program.replace('on_host = b.device.type == "cpu"', "on_host = False")
        assert program != made.emitted.text
    a, b, h0, c = np.full(time, 64.0), np.zeros((time, 3)), np.zeros(3), np.zeros(time)
    for t in (5, time - 20):
        b[t], c[t + 5], a[t + 10] = 1, 1, 0
    a[time - 30] = 0  # the product of the steps between is at least 64 ** 250
    x = [torch.tensor(v, requires_grad=True) for v in (a, b, h0)]
    h = recurrence(x[0][None, :, None], x[1][None], x[2][None])[0]
    wanted = h, *torch.autograd.grad((torch.tensor(c)[:, None] * h).sum(), x)
    inputs = {"a": a, "b": b, "h0": h0, "c": c}
    run = run_local(program, {n: v.astype(np.float32) for n, v in inputs.items()})
    for found, exact in zip(run.outputs.values(), wanted, strict=True):
        np.testing.assert_allclose(found, exact.detach().numpy(), rtol=1e-6)


GRADIENTS = "da, db, dh0 = grad(sum(c * h), a, b, h0)\n  return h, da, db, dh0"
