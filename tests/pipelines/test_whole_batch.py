"""What is made once of a whole batch, after its last micro-batch: metrics, and states of a step."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import DiagnosticError
from tests.covering import in_turn, some
from tests.pipelines.test_programs import compiled, hold, hold_text
from tests.pipelines.test_stages import written

MADE = {
    "a bias moved by loads": (
        "",
        "param e[m] = zeros()\n    pick = one_hot[m](argmax[m](x + e))\n"
        "    e := e + 0.01 * sign(1 / m - mean[b](pick))\n    x = x + 0.1 * pick",
        "q = mean(x)",
    ),
    "an average of the weights": (
        "", "param e[m, o] = zeros()\n    e := 0.9 * e + 0.1 * stop_gradient(w)", "q = mean(x)",
    ),
    "a root of a mean": ("", "", "q = sqrt(mean(square(x)))"),
    "a ratio of sums": ("", "", "q = sum(x * t) / sum(x * x)"),
    "a deviation of the samples": ("", "", "c = x - mean[b](x)\n  q = mean(c * c)"),
    "added up over iterations": (
        "q = 0.0", "q = q + max(abs(mean[b](x) - 0.1))", "q = q + mean(x)",
    ),
    "a state, and a number of it": (
        "",
        "param e[m] = zeros()\n    v = square(mean[b](x))\n    e := 0.9 * e + v\n    h = sum(v)",
        "q = sum(h)",
    ),
    "a state of the last stage": (
        "param e[m] = zeros()", "", "v = sqrt(mean[b](x * x))\n  e := 0.9 * e + v\n  q = sum(v)",
    ),
    "a state of the first stage": (
        "param e[m] = zeros()\n  e := 0.9 * e + sqrt(mean[b](x * x))", "", "q = mean(x)",
    ),
    "a loop in the loop": (
        "", "repeat k {\n param u[m] = zeros()\n u := u + tanh(mean[b](x))\n }", "q = mean(x)",
    ),
    "a distribution of loads": (
        "",
        "param e[m] = zeros()\n    v = mean[b](x)\n    e := e + softmax[m](v) * cumsum[m](v)",
        "q = mean(x)",
    ),
    "loads and weights": (
        "",
        "param e[m] = zeros()\n    e := e + sign(mean[b](x) - einsum(w, w -> [m]))",
        "q = mean(x)",
    ),
    "a random state": (
        "",
        "param e[m] = zeros()\n    e := e + dropout(mean[b](x), 0.5) * sign(mean[b](x))",
        "q = mean(x)",
    ),
}  # fmt: skip
IN_ORDER = {"a carried number": ("q = 0.0", "q = q * 0.5 + sqrt(mean(x * x))", "q = q + mean(x)")}
"""Iterations that follow each other once more, in their own order."""

MESHES = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "d:2,pipe:2": "l -> pipe, b -> d",
    "pipe:2,tp:2": "l -> pipe, m -> tp",
    "d:2,pipe:2,tp:2": "l -> pipe, b -> d, m -> tp, params: m -> d",
}
SCHEDULES = (
    "one_f_one_b[b](4)", "gpipe[b](2)", "zb_h1[b](4)", "interleaved[b](4, chunks=2)", "zb_v[b](4)",
    "chimera[b](4)", "one_f_one_b[b](4, recompute=stage)", "gpipe[b](1)",
)  # fmt: skip


@in_turn(name=MADE, mesh=MESHES, use=SCHEDULES)
def test_the_numbers_of_the_whole_batch(name: str, mesh: str, use: str) -> None:
    if "chunks" in use or "zb_v" in use:
        mesh = "pipe:2" if mesh == "pipe:4" else mesh  # four iterations are two stages a device
    text = written(MADE[name])
    made = compiled(text, mesh, MESHES[mesh], f"with {use}")
    hold(made, text)
    hold_text(made)
    made.evaluation.checked()


@pytest.mark.parametrize("name", IN_ORDER)
def test_iterations_in_their_order(name: str) -> None:
    text = written(IN_ORDER[name])
    hold(compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](2)"), text)
    with pytest.raises(DiagnosticError, match="MD0338"):
        compiled(text, "pipe:2", "l -> pipe", "with interleaved[b](2, chunks=2)").checked()


def test_it_is_summed_in_the_passes_and_made_behind_them() -> None:
    made = compiled(
        written(MADE["a bias moved by loads"]), "pipe:2", "l -> pipe", "with gpipe[b](4)"
    )
    inside, behind = made.bare.split("\n    x_line.close()")
    assert "torch.sign" in behind
    assert "torch.sign" not in inside
    assert "e_stack[layers]" not in inside.split("def backward")[1]


def test_a_network_of_one_way_waits_for_nothing() -> None:
    """A forward pass is not taken for a metric: it would run outside of the stages."""
    text = written(("", "x = x - mean[b](x)", "q = mean(x)")).split("  minimize")[0] + "}\n"
    with pytest.raises(DiagnosticError, match="MD0332"):
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](2)").checked()


NETWORK = """
dim b = 8, m = 6, o = m, c = 4
program p(x[b, m], t[b, c], weight[b]) {
  param w1[m, o]
  param w2[m, o]
  param w3[m, c]
  param bias[m] = zeros()
  first = tanh(einsum(x, w1 -> [b, o])[o -> m])
  second = tanh(einsum(first, w2 -> [b, o])[o -> m])
  bias := bias + sign(mean[b](OF)) * tanh(mean[b](second))
  y = einsum(second, w3 -> [b, c])
  loss = sum(mean[c](square(y - t)) * weight) / sum(weight)
  q = sqrt(mean(square(second)))
  return loss, q
  minimize loss with sgd(lr=0.1ACCUMULATE)
}
"""


@in_turn(
    of=("first", "second"),
    mesh=("pipe:2", "pipe:2,d:2"),
    use=("one_f_one_b[b](4)", "zb_h1[b](2)", "one_f_one_b", "zb_h1"),
)
def test_a_network_that_rules_cut(of: str, mesh: str, use: str) -> None:
    accumulate = "" if "[" in use else ", accumulate=4"
    text = NETWORK.replace("OF", of).replace("ACCUMULATE", accumulate)
    rules = "second: pipe = 1, b -> d" if "d:" in mesh else "second: pipe = 1"
    made = compiled(text, mesh, rules, f"with {use}")
    hold(made, text)
    made.evaluation.checked()


BATCHES = [name for name in MADE if ":=" in "".join(MADE[name]) and "number" not in name]
"""Not the one whose output reads a stack behind the loop: an output is made by each batch."""


@in_turn(
    name=some(BATCHES),
    mesh=MESHES,
    use=("one_f_one_b", "zb_h1", "interleaved(chunks=2)", "chimera"),
)
def test_batches_that_a_step_accumulates(name: str, mesh: str, use: str) -> None:
    if "chunks" in use:
        mesh = "pipe:2" if mesh == "pipe:4" else mesh
    text = written(MADE[name]).replace("clip=0.5", "clip=0.5, accumulate=4")
    hold(compiled(text, mesh, MESHES[mesh], f"with {use}"), text)


def test_the_ways_out_of_a_mean_in_the_passes() -> None:
    """What the message about a normalised batch advises is accepted."""
    text = written(("", "x = x - mean[b](x)", "q = mean(x)"))
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](2)").checked()
    (found,) = caught.value.diagnostics
    assert found.code == "MD0332"
    assert "`with gpipe` and write `accumulate=2`" in str(found.help)
    hold(compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](1)"), text)
    text = text.replace("clip=0.5", "clip=0.5, accumulate=2")
    hold(compiled(text, "pipe:2", "l -> pipe", "with gpipe"), text)
