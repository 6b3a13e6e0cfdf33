"""`attention = ring` and `zigzag` against torch in float64, and what they send and compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.analysis import analyse
from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import Compute
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.ir.program import counted
from meshdsl.named.attention_fusion import ATTENTION
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.covering import covering
from tests.programs.harness import check_bytes

SIZES = {"batch": 2, "seq": 16, "kv": 2, "group": 2, "key": 3, "model": 4, "layers": 2}

MASKS = {
    "triangle": """
    s = einsum(q, k -> [batch, kv, group, seq, mem]) / sqrt(key)
    s = where(iota[seq] >= iota[mem], s, -1e9)
    o = einsum(softmax[mem](s), v -> [batch, kv, group, seq, key])""",
    "none": "o = attention[key, mem](q, k, v)",
}

# What sees the order of positions: a running sum, numbers of positions, a shift, a parameter.
PROGRAM = """
dim batch = 2, seq = 16, mem = seq, kv = 2, group = 2, key = 3, model = 4, layers = 2
program test(x[batch, seq, model], wq[layers, model, kv, group, key], wk[layers, model, kv, key],
  wv[layers, model, kv, key], wo[layers, kv, group, key, model], place[seq, model],
  weight[batch, seq, model]) {
  y = x + place * cast(iota[seq], f32) / 16 + 0.1 * cumsum[seq](x)
  repeat layers {
    q = einsum(y, wq -> [batch, kv, group, seq, key])
    k = einsum(y, wk -> [batch, kv, seq, key])[seq -> mem]
    v = einsum(y, wv -> [batch, kv, seq, key])[seq -> mem]
    ATTENTION
    y = y + einsum(o, wo -> [batch, seq, model])
  }
  z = y + shift[seq](y, 1)
  loss = sum(weight * z * z)
  dx, dq, dk, dv, do, dplace = grad(loss, x, wq, wk, wv, wo, place)
  return z, loss, dx, dq, dk, dv, do, dplace
}
"""


def drawn() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {
        "x": "batch seq model",
        "wq": "layers model kv group key",
        "wk": "layers model kv key",
        "wv": "layers model kv key",
        "wo": "layers kv group key model",
        "place": "seq model",
        "weight": "batch seq model",
    }
    return {n: 0.5 * rng.normal(size=[SIZES[d] for d in s.split()]) for n, s in shapes.items()}


def expected(arrays: dict[str, Any], causal: bool) -> dict[str, Any]:
    """The outputs by plain products and softmaxes, and gradients by autograd."""
    names = ("x", "wq", "wk", "wv", "wo", "place")
    t = {n: torch.tensor(a, requires_grad=n in names) for n, a in arrays.items()}
    at = torch.arange(SIZES["seq"], dtype=torch.float64)
    y = t["x"] + t["place"] * at[:, None] / 16 + 0.1 * t["x"].cumsum(1)
    for i in range(SIZES["layers"]):
        q = torch.einsum("bsm,mnge->bngse", y, t["wq"][i])
        k, v = (torch.einsum("bsm,mne->bnse", y, t[n][i]) for n in ("wk", "wv"))
        s = torch.einsum("bngse,bnte->bngst", q, k) / SIZES["key"] ** 0.5
        if causal:
            s = s.masked_fill(at[:, None] < at, -torch.inf)
        o = torch.einsum("bngst,bnte->bngse", s.softmax(-1), v)
        y = y + torch.einsum("bngse,ngem->bsm", o, t["wo"][i])
    z = y + torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
    loss = (t["weight"] * z * z).sum()
    grads = torch.autograd.grad(loss, [t[n] for n in names])
    named = zip(("dx", "dq", "dk", "dv", "do", "dplace"), grads, strict=True)
    results = {"z": z, "loss": loss, **dict(named)}
    return {n: r.detach().numpy() for n, r in results.items()}


LAYOUTS = {
    "two": ("c:2", "seq -> c"),
    "four": ("c:4", "seq -> c"),
    "over two axes": ("a:2,c:2", "seq -> (a, c)"),
    "beside others": ("a:2,c:2", "seq -> c, batch -> a"),
    "with heads": ("c:2,t:2", "seq -> c, kv -> t"),
    "with mem": ("c:2", "seq -> c, mem -> c"),
}
FACTORS = {
    "layout": LAYOUTS,
    "setting": ("ring", "zigzag"),
    "mask": MASKS,
    "policy": ("optimal", "deferred"),
}


@pytest.mark.parametrize("case", covering(FACTORS), ids=lambda c: " ".join(c.values()))
def test_results_and_gradients_are_torchs(case: dict[str, str]) -> None:
    """And every device sends the bytes that were predicted."""
    mesh, rules = LAYOUTS[case["layout"]]
    text = PROGRAM.replace("ATTENTION", MASKS[case["mask"]])
    text += f"layout l {{ {rules}, activations: attention = {case['setting']} }}\n"
    made = compile_text(text, mesh=mesh, layout="l", dtype="f64", reduce=case["policy"])
    arrays = drawn()
    run = run_local(made.emitted.text, arrays, lines=made.emitted.places)
    check_bytes(explain(made.device), run)
    for name, wanted in expected(arrays, case["mask"] != "none").items():
        error = np.abs(run.outputs[name] - wanted).max()
        assert error <= 1e-12 * np.abs(wanted).max(), name


BESIDE = """
dim seq = 16, mem = seq, key = 4
program test(x[seq, key], weight[seq, key]) {
  first = attention[key, mem](x, x[seq -> mem], x[seq -> mem], iota[seq] >= iota[mem])
  second = attention[key, mem](first, first[seq -> mem], first[seq -> mem], iota[seq] >= iota[mem])
  third = attention[key, mem](second, second[seq -> mem], second[seq -> mem])
  loss = sum(weight * third * third)
  dx = grad(loss, x)
  return third, dx
}
"""


@pytest.mark.parametrize("value", ["ring", "gather"])
def test_a_balanced_ring_beside_an_attention_that_takes_the_natural_order(value: str) -> None:
    """Positions of the second are put back for it; the third has no triangle, and any order."""
    text = f"{BESIDE}layout l {{ seq -> c, activations: attention = zigzag, second: attention = "
    made = compile_text(text + value + " }\n", mesh="c:2", layout="l", dtype="f64")
    rng = np.random.default_rng(4)
    arrays = {n: rng.normal(size=(16, 4)) for n in ("x", "weight")}
    run = run_local(made.emitted.text, arrays, lines=made.emitted.places)
    check_bytes(explain(made.device), run)
    x, weight = (torch.tensor(arrays[n], requires_grad=True) for n in ("x", "weight"))
    y = x
    for is_causal in (True, True, False):
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(1) & is_causal
        y = (y @ y.T / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ y
    (dx,) = torch.autograd.grad((weight * y * y).sum(), [x])
    for name, wanted in (("third", y.detach()), ("dx", dx)):
        error = np.abs(run.outputs[name] - wanted.numpy()).max()
        assert error <= 1e-12 * wanted.abs().max(), name


ALONE = """
dim batch = 2, seq = 32, mem = seq, heads = 3, key = 4
program test(q[batch, heads, seq, key], k[batch, heads, mem, key], v[batch, heads, mem, key],
  do[batch, heads, seq, key]) {
  o = attention[key, mem](q, k, v, iota[seq] >= iota[mem])
  RETURN
}
"""
BACK = "dq, dk, dv = grad(sum(o * do), q, k, v)\n  return dq, dk, dv"


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_blocks_go_round_and_no_more_is_sent(devices: int) -> None:
    """Keys and values go D - 1 steps, and back with their gradients: as a gather and its sums."""
    block = 2 * 3 * (32 // devices) * 4 * 4
    sent = {}
    for value in ("ring", "gather"):
        for what in ("return o", BACK):
            text = ALONE.replace("RETURN", what)
            text += f"layout l {{ seq -> c, mem -> c, activations: attention = {value} }}\n"
            text = text.replace("mem -> c, ", "" if value == "gather" else "mem -> c, ")
            made = compile_text(text, mesh=f"c:{devices}", layout="l")
            facts = explain(made.device)
            sent[value, what] = facts["totals"]["wire_bytes"]
    assert sent["ring", "return o"] == 2 * (devices - 1) * block
    assert sent["ring", BACK] == sent["ring", "return o"] + 4 * (devices - 1) * block


def scores(made: Compilation) -> int:
    """How many scores each device computes for a result, in all kernels; skipped ones count."""
    found = 0
    for node, times in counted(made.device.body):
        if isinstance(node, Compute) and node.name in ATTENTION:
            found += times * node.flops // (2 * 4 + 2 * 4 + 5)
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_a_balanced_ring_computes_nothing_that_is_masked(devices: int) -> None:
    """Beside the diagonal each device has the products of two pairs of half blocks in a step."""
    block, computed = 32 // devices, {}
    for value in ("gather", "ring", "zigzag"):
        text = ALONE.replace("RETURN", "return o")
        text += f"layout l {{ seq -> c, activations: attention = {value} }}\n"
        computed[value] = scores(compile_text(text, mesh=f"c:{devices}", layout="l"))
    heads, steps = 2 * 3, devices - 1
    assert computed["gather"] == computed["ring"] == heads * block * 32
    assert computed["zigzag"] == heads * (block**2 + steps * 2 * (block // 2) ** 2)


def said(text: str, rules: str, sizes: dict[str, int] | None = None, mesh: str = "c:4") -> str:
    """What is said of a layout: an error, or a note."""
    bag = Diagnostics()
    try:
        compile_text(
            text + f"layout l {{ {rules} }}\n", bag, mesh=mesh, layout="l", set_dims=sizes or {}
        )
    except DiagnosticError as error:
        bag.add(*error.diagnostics)
    about = [d for d in bag if d.code in ("MD0341", "MD0306")]
    return " ".join(f"{d.code} {d.message}; {d.help}" for d in about)


def test_what_cannot_be_a_ring_is_said_with_a_way_out() -> None:
    text = ALONE.replace("RETURN", "return o")
    ring, add = "seq -> c, activations: attention = ring", ", o: attention = gather"
    zigzag, masked = ring.replace("ring", "zigzag"), text.replace(">=", ">")
    for program, rules, why, sizes in (
        (text, ring, "`seq`, of size 30, does not divide into 4 equal blocks", {"seq": 30}),
        (text, zigzag, "`seq`, of size 36, does not divide into 8 equal half blocks", {"seq": 36}),
        (text, ring, "`seq` has 32 positions, and `mem` 16", {"mem": 16}),
        (masked, ring, "it has another mask than the causal one", {}),
    ):
        message = said(program, rules, sizes)
        assert why in message
        assert "add `o: attention = gather`" in message
        assert "MD0341" not in said(program, rules + add, sizes)
    assert "give `seq` the size 32 or 40" in said(text, zigzag, {"seq": 36})
    assert not said(text, zigzag, {"seq": 40})
    many = text.replace(
        "o = attention[key, mem](q, k, v, iota[seq] >= iota[mem])", "o = q"
    ).replace("return o", "p = attention[key, mem](q[heads -> many], k, v)\n  return p")
    both = "seq -> c, many -> d, activations: attention = ring"
    many = "dim many = 3\n" + many.replace("k[batch, heads,", "k[batch,").replace(
        "v[batch, heads,", "v[batch,"
    )
    assert "`many` and `seq` of its queries are split" in said(many, both, mesh="c:2,d:3")


def test_a_setting_without_effect_is_said() -> None:
    text = ALONE.replace("RETURN", "return o")
    assert "MD0306" in said(text, "batch -> c, activations: attention = ring", mesh="c:2")
    assert not said(text, "seq -> c, activations: attention = ring", mesh="c:1")
    plain = "dim seq = 8\nmesh m = { c: 2 }\nprogram p(x[seq]) {\n  y = relu(x)\n  return y\n}\n"
    for selector in ("activations", "y"):
        layout = f"layout l {{ seq -> c, {selector}: attention = ring }}\n"
        (found,) = analyse(Source("p.mdsl", plain + layout), Options()).diagnostics
        assert (found.code, found.severity, found.help) == ("MD0306", "note", "remove the setting")
