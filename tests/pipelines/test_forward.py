"""Programs that only go forward, in stages: the numbers of one device, by forward passes alone."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import Move, Pipeline, walk
from meshdsl.device.printer import print_program
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.verification import verify
from tests.covering import in_turn
from tests.ir_text.device import parse_program
from tests.pipelines.test_programs import hold_bytes, hold_to

PLAIN = """
dim batch = 16, model = 8, hidden = model, layers = 8
program net(x[batch, model]) {
  repeat layers {
    param w[model, hidden]
    x = tanh(einsum(x, w -> [batch, hidden]))[hidden -> model]
  }
  return x
}
"""
MANY = """
dim batch = 16, model = 8, hidden = 4, layers = 8, seq = 3, vocab = 4
program net(x[seq, batch, model], ids[batch, seq]) {
  param emb[vocab, model]
  param scale[batch]
  x = x + ids * 0.5
  first = x * 2.0
  repeat layers {
    param w[model, hidden]
    param v[hidden, model]
    x = x + einsum(tanh(einsum(x, w -> [seq, hidden, batch])), v -> [seq, batch, model])
    each = x * 0.5
  }
  logits = einsum(x, emb -> [vocab, batch, seq])
  picked = argmax[vocab](logits)
  positive = logits > 0.0
  m = mean[seq, vocab](logits)
  q = mean(logits)
  s = emb * 2.0
  given = mean(ids)
  return logits, picked, positive, m, q, s, first, each, ids, scale, given
}
"""
NETWORK = """
dim batch = 16, io = 8, model = 8, out = 4, o = model
program net(x[batch, io], target[batch, out]) {
  param w1[io, model]
  param w2[model, o]
  param w3[model, out]
  h1 = tanh(einsum(x, w1 -> [batch, model]))
  h2 = tanh(einsum(h1, w2 -> [batch, o])[o -> model]) + h1
  h3 = tanh(h2) + h1
  h4 = h3 * 2.0
  y = einsum(h4, w3 -> [out, batch])
  loss = mean(square(y - target))
  given = mean(target)
  return loss, y, h1, target, given
}
"""
LOOP = "layers -> pipe"
MESHES = {
    "pipe:2": "",
    "pipe:4": "",
    "data:2,pipe:2": ", batch -> data",
    "pipe:2,tp:2": ", hidden -> tp, vocab -> tp",
    "pipe:2,data:2,tp:2": ", batch -> data, hidden -> tp, vocab -> tp",
}
SCHEDULES = (
    *(f"{name}[batch]({8 if name.startswith('dualpipe') else 4})" for name in schedules()),
    'one_f_one_b[batch](4, layers="LAYERS")',
    "zb_h1[batch](2, recompute=stage)",
    "mine[batch]",
)
MINE = """
schedule mine(stages=DEVICES, micro=2) {
ROWS
}
"""


def compiled(text: str, mesh: str, rules: str, use: str, **options: object) -> Compilation:
    sizes = {"2": "3 5", "4": "1 2 4 1"}
    devices = mesh.split("pipe:")[1][:1]
    use = use.replace("LAYERS", sizes[devices])
    rows = "\n".join(f"  {device}: F0 F1 B0 B1" for device in range(int(devices or 1)))
    own = MINE.replace("DEVICES", devices).replace("ROWS", rows)
    text += f"{own}\nlayout chosen {{ {rules} }} {use and f'with {use}'}\n"
    made = Options(mesh=mesh, layout="chosen", **options)  # type: ignore[arg-type]
    return Compilation(Source("net.mdsl", text), made)


def hold(made: Compilation, text: str) -> None:
    """Outputs are those of one device, bytes those that are told, passes forward ones alone."""
    run = run_local(made.text, seed=3)
    assert not run.disagreements()
    alone = run_local(Compilation(Source("net.mdsl", text), Options(mesh="pipe:1")).text, seed=3)
    assert {k: (v.dtype, v.shape) for k, v in run.outputs.items()} == {
        k: (v.dtype, v.shape) for k, v in alone.outputs.items()
    }
    exact = {k for k, v in alone.outputs.items() if v.dtype.kind != "f"}
    assert all((run.outputs[k] == alone.outputs[k]).all() for k in exact)
    found, one = ({k: v for k, v in o.outputs.items() if k not in exact} for o in (run, alone))
    hold_to(found, one, 1e-5)
    hold_bytes(run, made)
    (pipe,) = (node for node in made.device.body if isinstance(node, Pipeline))
    assert {action.kind for row in pipe.rows for action in row} == {"F"}
    moves = [n for n, _ in walk(made.device.body) if isinstance(n, Move)]
    assert all(m.step.kind != "all_gather" for m in moves if "pipe" in m.step.axes)


@in_turn(use=SCHEDULES, name=("many", "plain", "many"), mesh=MESHES)
def test_the_numbers_of_one_device(use: str, mesh: str, name: str) -> None:
    text = MANY if name == "many" else PLAIN
    own = MESHES[mesh] if text is MANY else MESHES[mesh].replace(", vocab -> tp", "")
    hold(compiled(text, mesh, LOOP + own, use), text)


@in_turn(
    use=("gpipe", "one_f_one_b", "zb_h1", "eager"),
    cut=[
        ("pipe:2", "h2: pipe = 1"),
        ("pipe:4", "h2: pipe = 1, h3: pipe = 2, h4: pipe = 3"),
        ("data:2,pipe:2", "h3: pipe = 1, batch -> data"),
        ("pipe:2,tp:2", "h2: pipe = 1, model -> tp"),
    ],
)
def test_a_network_that_rules_cut(use: str, cut: tuple[str, str]) -> None:
    hold(compiled(NETWORK, *cut, f"{use}[batch](4)"), NETWORK)


MADE = {
    "a sum of several stages": (
        "h1 = tanh(x)\n h2 = tanh(h1)\n return h1 + h2, x * w1 + h2, h1 - target",
        "pipe:2",
        "h2: pipe = 1",
    ),
    "what is equal": (
        "a = cumsum[io](x)\n b = cumsum[io](x)\n h2 = tanh(x)\n return b, h2, a, exp(x), exp(x)",
        "pipe:2",
        "h2: pipe = 1",
    ),
    "parameters with the batch": (
        "param c[batch, io]\n h1 = tanh(x)\n h2 = h1 + c\n return h2, c, c * 2.0",
        "pipe:2,tp:2",
        "h2: pipe = 1, params: io -> tp",
    ),
    "neighbours in the batch": (
        "b = shift[batch](exp(target), by=1)\n h1 = tanh(x)\n h2 = h1 + b\n return h2, b",
        "data:2,pipe:2",
        "h2: pipe = 1, batch -> data",
    ),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_what_is_returned_of_what(name: str, trains: bool) -> None:
    body, mesh, rules = MADE[name]
    if trains:
        loss = "loss = mean(square(h2))\n return loss,"
        body = body.replace("return", loss) + "\n minimize loss with sgd(lr=0.1)"
    text = (
        "dim batch = 16, io = 8\nprogram p(x[batch, io], target[batch, io]) {\n param w1[io]\n "
        f"x = x * w1\n {body}\n}}\n"
    )
    made = compiled(text, mesh, rules, "one_f_one_b[batch](4)")
    alone = Compilation(Source("net.mdsl", text), Options(mesh="pipe:1"))
    piped, one = (run_local(c.text, seed=3) for c in (made, alone))
    hold_to(piped.outputs | piped.updated, one.outputs | one.updated)
    hold_bytes(piped, made)


@pytest.mark.parametrize("use", ["interleaved[batch](4)", "zb_v[batch](4)"])
def test_outputs_with_the_dim_of_the_loop_in_python(use: str, tmp_path: Path) -> None:
    """What is in several ranges of a device is put together: a matrix for each layer."""
    text = PLAIN.replace("return x", "return x, w")
    made = compiled(text, "pipe:2", LOOP, use)
    weights = np.arange(8 * 8 * 8, dtype="f4").reshape(8, 8, 8) / 512
    (tmp_path / "net.mdsl").write_text(made.source.text, encoding="utf-8")
    plan = md.load(tmp_path / "net.mdsl").compile("pipe:2", "chosen")
    plan.params = {"w": weights}
    np.testing.assert_array_equal(plan(np.ones((16, 8), "f4"))["w"], weights)


def test_numpy_in_float64() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 8)), rng.normal(size=(8, 8, 8)) / 3
    made = compiled(PLAIN, "pipe:4", LOOP, "one_f_one_b[batch](8)", dtype="f64")
    found = run_local(made.text, {"x": x}, {"w": w}).outputs["x"]
    for each in w:
        x = np.tanh(x @ each)
    np.testing.assert_allclose(found, x, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", schedules())
def test_every_table_has_its_forward_passes(name: str) -> None:
    whole = verify(generate(name, 4, 8))
    found = whole.forward
    sent = [m for line in whole.lines if line.kind == "F" for m in line.messages]
    assert sorted(m for line in found.lines for m in line.messages) == sorted(sent)
    assert len(found.order) == found.schedule.stages * 8
    assert found.device_of == whole.device_of
    assert set(found.peaks) == {1}


def test_what_is_told() -> None:
    made = compiled(PLAIN, "pipe:4", LOOP, "one_f_one_b[batch](8)")
    told = explain(made.device)["pipeline"]
    assert Fraction(told["bubble"]) == Fraction(3, 11)
    assert told["in_flight"] == [1] * 4
    text = print_program(made.device)
    assert print_program(parse_program(text)) == text


def test_iterations_of_uneven_stages_are_read_back() -> None:
    made = compiled(PLAIN, "pipe:2", LOOP, 'gpipe[batch](4, layers="LAYERS")')
    again = parse_program(print_program(made.device))
    assert [n.sizes for n in again.body if isinstance(n, Pipeline)] == [(3, 5)]


STEP = (
    PLAIN.replace("x[batch, model])", "x[batch, model], t[batch, model])")
    .replace(
        "  return x\n",
        "  each = mean[model](square(x - t))\n  loss = mean(each)\n  seen := each\n"
        "  return loss, x, each\n  minimize loss with adamw(lr=0.01)\n",
    )
    .replace("  repeat", "  param seen[batch] = zeros()\n  repeat")
)


@in_turn(use=("gpipe", "interleaved", "chimera", "zb_h2"), mesh=("pipe:2", "data:2,pipe:2"))
def test_a_step_returns_the_whole_batch_and_is_evaluated(mesh: str, use: str) -> None:
    rules = LOOP + MESHES[mesh]
    made = compiled(STEP, mesh, rules, f"{use}[batch](4)")
    alone = Compilation(Source("net.mdsl", STEP), Options(mesh="pipe:1"))
    piped, one = (run_local(c.text, seed=3) for c in (made, alone))
    hold_to(piped.outputs | piped.updated, one.outputs | one.updated)
    made, alone = (
        Compilation(Source("net.mdsl", c.source.text.replace("  seen := each\n", "")), c.options)
        for c in (made, alone)
    )
    assert made.forward.placed.pipe is not None
    piped, one = (run_local(c.forward.text, seed=3) for c in (made, alone))
    hold_to(piped.outputs, one.outputs)


def test_recomputed_steps_return_the_whole_batch() -> None:
    made = compiled(STEP, "pipe:2", LOOP, "one_f_one_b[batch](4, recompute=stage)")
    alone = Compilation(Source("net.mdsl", STEP), Options(mesh="pipe:1"))
    piped, one = (run_local(c.text, seed=3) for c in (made, alone))
    hold_to(piped.outputs | piped.updated, one.outputs | one.updated)


@pytest.mark.parametrize(
    ("line", "code"),
    [("x = max(x)", "MD0333"), ("x = prod(x)", "MD0333")],
)
def test_what_cannot_be_cut(line: str, code: str) -> None:
    text = PLAIN.replace("  return", f"  {line}\n  return")
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, "pipe:2", LOOP, "gpipe[batch](4)").checked()
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_mean_over_the_batch() -> None:
    """On its way through the stages no sample waits for it; behind them it is there."""
    centred = "x = x - mean[batch](x)"
    text = PLAIN.replace("model]\n  }", f"model]\n    {centred}\n  }}")
    with pytest.raises(DiagnosticError, match="MD0332"):
        compiled(text, "pipe:2", LOOP, "gpipe[batch](4)").checked()
    text = PLAIN.replace("  return", f"  {centred}\n  return")
    made = compiled(text, "pipe:2", LOOP, "gpipe[batch](4)")
    alone = Compilation(Source("net.mdsl", text), Options(mesh="pipe:1"))
    piped, one = (run_local(c.text, seed=3) for c in (made, alone))
    hold_to(piped.outputs, one.outputs)


@pytest.mark.parametrize(
    ("use", "code"),
    [
        ("gpipe[batch](3)", "MD0534"),
        ("gpipe[layers](2)", "MD0534"),
        ("chimera[batch](1)", "MD0529"),
        ('gpipe[batch](4, layers="3 4")', "MD0538"),
    ],
)
def test_a_schedule_that_does_not_fit(use: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        compiled(PLAIN, "pipe:2", LOOP, use).checked()
    assert [d.code for d in caught.value.diagnostics] == [code]


@pytest.mark.parametrize(
    ("text", "use"),
    [
        (PLAIN, ""),
        (PLAIN, "one_f_one_b"),
        (PLAIN.replace("  repeat", "  param n[] = zeros()\n  n := n + 1.0\n  repeat"), "gpipe"),
    ],
    ids=["no schedule", "no cut", "a state"],
)
def test_only_stored(text: str, use: str) -> None:
    made = compiled(text, "pipe:2", LOOP, f"{use}[batch](4)" if use == "gpipe" else use)
    assert made.placed.pipe is None
