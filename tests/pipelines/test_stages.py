"""Values of every origin behind a pipeline: of all stages, of one, of parameters alone, of stacks.

Each program gives the numbers of one device, or is refused before it runs. What is the same on all
stages must count once, and what only one stage has must not be taken for what all have.
"""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.report.checks import check_source
from tests.covering import in_turn
from tests.pipelines.test_programs import compiled, hold

TEXT = """
dim b = 8, m = 6, l = 4, o = m, k = 3
program p(x[b, m], t[b, m]) {
  param s[m] = ones()
  BEFORE
  repeat l {
    param w[m, o]
    INSIDE
    x = tanh(einsum(x, w -> [b, o])[o -> m])
  }
  loss = mean(square(x - t)) + 0.1 * sum(square(s - 0.5))
  BEHIND
  return loss, q
  minimize loss with adamw(lr=0.01, clip=0.5)
}
"""
STACK = ("", "h = x * 2")
RIGHT = {
    "of the input": ("q = mean(square(x))", "", ""),
    "of the target": ("", "", "q = mean(square(t))"),
    "of a parameter": ("q = sum(square(s))", "", ""),
    "of a parameter that is read": ("q = sum(square(s))\n  x = x * s", "", ""),
    "of a constant": ("q = 3.0 + 0.0 * sum(t)", "", ""),
    "of the first stage": ("x = tanh(x)\n  q = mean(x)", "", ""),
    "of the last stage": ("", "", "q = mean(x)"),
    "of both": ("y = mean(x)", "", "q = mean(x) + y"),
    "of both, in the loss": ("y = tanh(x)", "", "q = mean(x) + mean(y)\n  loss = loss + q"),
    "of all stages": ("q = 0.0", "q = q + mean(square(x))", ""),
    "of all stages, in the loss": ("q = 0.0", "q = q + mean(x * x)", "loss = loss + 0.1 * q"),
    "of all parameters": ("q = 0.0", "q = q + sum(square(w))", "loss = loss + 0.1 * q"),
    "a counter": ("param n[]: i32 = zeros()\n  n := n + 1\n  q = mean(x)", "", ""),
    "an average of a parameter": (
        "param e[m] = zeros()\n  e := 0.9 * e + 0.1 * s\n  x = x * s\n  q = mean(x)", "", "",
    ),
    "an average of the input": (
        "param e[m] = zeros()\n  e := 0.9 * e + 0.1 * mean[b](x)\n  q = mean(x)", "", "",
    ),
    "an average of the last stage": (
        "param e[m] = zeros()", "", "e := 0.9 * e + 0.1 * mean[b](x)\n  q = mean(x)",
    ),
    "a penalty behind the loop": (
        "", "", "loss = loss + 0.01 * sum(square(w)) + sqrt(sum(w * w))\n  q = mean(x)",
    ),
    "weights of the samples": (
        "", "", "n = mean[m](t * t)\n  q = sum(x * n) / (sum(n) + 1.0)\n  loss = loss + q",
    ),
    "a root of a mean": ("", "", "q = sqrt(mean(x * x))"),
    "a parameter in the loop": ("x = x * s", "x = x * s", "q = mean(x)"),
    "a parameter on three kinds of stages": (
        "x = x * s", "x = x * s", "x = x * s\n  loss = loss + mean(x * x)\n  q = mean(x)",
    ),
    "a parameter on both ends": ("x = x * s", "", "x = x * s\n  q = mean(x)"),
}  # fmt: skip
INPUT = "z[l, b, m]"
SLICED = {
    "a sliced input": ("q = mean(x)", "x = x + z", ""),
    "what is computed of it": ("u = tanh(z)\n  q = mean(square(u))", "x = x + u", ""),
    "that and a parameter": ("u = tanh(z * s)\n  q = mean(square(u))", "x = x + u", ""),
    "a parameter for all iterations": ("v = broadcast[l](s)\n  q = mean(x)", "x = x + v * z", ""),
    "a product of parameters": (
        "param y[l, m, k]\n  param f[k]\n  v = einsum(y, f -> [l, m])\n  q = mean(x)",
        "x = x + v",
        "",
    ),
}
REFUSED = {
    "MD0330 a stack": (*STACK, "q = mean(square(h))"),
    "MD0330 a stack in the loss": (*STACK, "q = mean(h)\n  loss = loss + mean(square(h))"),
    "MD0330 a sum of a stack": (*STACK, "q = mean(square(sum[l](h)))"),
    "MD0330 a maximum of a stack": (*STACK, "q = mean(max[l](h))"),
    "MD0330 a stack and the last stage": (*STACK, "q = mean(x * sum[l](h))"),
    "MD0330 a stack and an input": (*STACK, "q = mean(sum[l](h) + t)"),
    "MD0330 a slice of a stack": (*STACK, "q = mean(h[l = 2])"),
    "MD0330 a sum along a stack": (*STACK, "q = mean(square(cumsum[l](h)))"),
    "MD0330 a table of all layers behind the loop": (
        "param a[l, m]",
        "",
        "loss = loss + mean(x * sum[l](a))\n  q = mean(x)",
    ),
    "MD0330 a slice of it before the loop": (
        "param a[l, m]\n  x = x * a[l = 0]",
        "",
        "q = mean(x)",
    ),
    "MD0330 a state of all layers of the last stage": (
        "param e[l, m] = zeros()",
        "",
        "e := e + mean[b](x)\n  q = mean(x)",
    ),
    "MD0330 a sum along the loop in another loop": (
        "param a[k, l, m]",
        "",
        "repeat k { x = x + sum[l](a) }\n  loss = loss + mean(x)\n  q = loss",
    ),
    "MD0330 a mean along the loop": (
        "param a[l]\n  v = a - mean[l](a)",
        "x = x * v",
        "q = mean(x)",
    ),
    "MD0907 all iterations in one": (
        "",
        "x = einsum(x, cast(iota[l], f32) -> [b, m])",
        "q = mean(x)",
    ),
    "MD0333 a maximum": ("", "", "q = max(x)"),
    "MD0333 a product": ("", "", "q = prod(1.0 + 0.01 * x)"),
}


RIGHT |= SLICED


BY_EACH_BATCH = [name for name, lines in RIGHT.items() if ":=" in "".join(lines)]
"""What is refused where each batch that is accumulated assigns a state, one after the other."""


def written(parts: tuple[str, str, str]) -> str:
    """The program with lines before the loop, inside of it and behind it."""
    text = TEXT.replace("t[b, m])", f"t[b, m], {INPUT})") if parts in SLICED.values() else TEXT
    for word, lines in zip(("BEFORE", "INSIDE", "BEHIND"), parts, strict=True):
        text = text.replace(word, lines)
    return text


@in_turn(
    name=RIGHT,
    mesh=("pipe:2", "d:2,pipe:4"),
    use=("with one_f_one_b[b](4)", "with chimera[b](4)", ""),
)
def test_it_counts_once(name: str, mesh: str, use: str) -> None:
    text = written(RIGHT[name])
    if not use:  # batches that the optimizer accumulates are the micro-batches
        text = text.replace("clip=0.5", "clip=0.5, accumulate=4")
    made = compiled(text, mesh, "l -> pipe, b -> d", use)
    hold(made, text)


@pytest.mark.parametrize("name", BY_EACH_BATCH)
def test_batches_of_their_own_assign_no_state_in_stages(name: str) -> None:
    text = written(RIGHT[name]).replace("clip=0.5", "clip=0.5, accumulate=4, each=true")
    with pytest.raises(DiagnosticError, match="MD0907") as caught:
        compiled(text, "pipe:2", "l -> pipe", "").text  # noqa: B018
    assert "each=true" in str(caught.value.diagnostics[0].help)


@in_turn(name=REFUSED, mesh=("pipe:2", "d:2,pipe:4"))
def test_it_is_refused(name: str, mesh: str) -> None:
    text = written(REFUSED[name])
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, mesh, "l -> pipe, b -> d", "with gpipe[b](2)").text  # noqa: B018
    assert {d.code for d in caught.value.diagnostics} == {name.split(" ")[0]}
    assert all(d.span and d.help for d in caught.value.diagnostics)


@pytest.mark.parametrize("name", RIGHT | REFUSED)
def test_check_refuses_what_compiling_does(name: str) -> None:
    made = compiled(written((RIGHT | REFUSED)[name]), "pipe:2", "l -> pipe", "with gpipe[b](2)")
    found = Diagnostics()
    check_source(made.source, made.options, found)
    refused = {name.split(" ")[0]} if name in REFUSED else set()
    assert {d.code for d in found.errors} == refused
