"""`linear_recurrence` on every split, against a loop over the steps and its autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.programs.harness import check_bytes

PROGRAM = """
dim batch = 3, time = 16, state = 4
program test(a[batch, time, state], gate[time, batch], b[batch, time, state], rate[state],
  drive[batch, state], h0[batch, state], level[state], c[batch, time, state]) {
  plain = linear_recurrence[time](a, b)
  back = linear_recurrence[time](a, b, reverse=1)
  from = linear_recurrence[time](gate, b, h0)
  all = linear_recurrence[time](gate, b, level, reverse=1)
  fixed = linear_recurrence[time](rate, b, h0)
  mean = linear_recurrence[time](0.5, b, reverse=1)
  held = linear_recurrence[time](gate, drive, level)
  loss = sum(c * (square(plain) + back * from + all * fixed + mean * held))
  da, dgate, db, drate, ddrive, dh0, dlevel = grad(loss, a, gate, b, rate, drive, h0, level)
  return plain, back, from, all, fixed, mean, held, da, dgate, db, drate, ddrive, dh0, dlevel
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
        "back": recurrence(x["a"], x["b"], 0, True),
        "from": recurrence(gate * one, x["b"], x["h0"]),
        "all": recurrence(gate * one, x["b"], x["level"], True),
        "fixed": recurrence(x["rate"] * one, x["b"], x["h0"]),
        "mean": recurrence(0.5 * one, x["b"], 0, True),
        "held": recurrence(gate * one, x["drive"][:, None] * one, x["level"]),
    }
    terms = y["plain"] ** 2 + y["back"] * y["from"] + y["all"] * y["fixed"] + y["mean"] * y["held"]
    names = ("a", "gate", "b", "rate", "drive", "h0", "level")
    grads = torch.autograd.grad((x["c"] * terms).sum(), [x[n] for n in names])
    y |= {f"d{n}": g for n, g in zip(names, grads, strict=True)}
    return {n: v.detach().numpy() for n, v in y.items()}


LAYOUTS = [
    ("p:1", "batch -> none", 40),
    ("p:2", "time -> p", 16),
    ("p:4", "time -> p", 13),
    ("p:4", "time -> p", 5),  # one device has no element
    ("p:3", "time -> p", 1),  # one has all
    ("p:3,q:2", "time -> (q, p)", 17),
    ("p:2,q:2", "time -> p, batch -> q", 9),
    ("p:2,q:3", "time -> p, state -> q", 7),
    ("p:4,q:1", "batch -> p", 5),
]


@pytest.mark.parametrize(("mesh", "rules", "time"), LAYOUTS)
def test_states_and_gradients_are_those_of_a_loop(mesh: str, rules: str, time: int) -> None:
    """And each device sends as many bytes as were predicted."""
    text = f"{PROGRAM}layout chosen {{ {rules} }}\n"
    made = compile_text(text, mesh=mesh, layout="chosen", set_dims={"time": time})
    arrays = drawn(time)
    run = run_local(made.emitted.text, arrays, lines=made.emitted.places)
    check_bytes(explain(made.device), run)
    for name, wanted in expected(arrays).items():
        found = run.outputs[name]
        found = found.transpose(0, 2, 1) if name == "held" else found  # of drive, then of gate
        scale = np.abs(wanted).max()
        assert found.shape == wanted.shape, name
        np.testing.assert_allclose(found, wanted, atol=2e-6 * scale, rtol=0, err_msg=name)
