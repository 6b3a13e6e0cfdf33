"""A step that accumulates K batches is that of one batch K times as large: numbers and gradients.

Losses that are means over weights, whose sums differ from batch to batch, and what `:=` makes of
all samples. What no batch alone has a gradient of is refused; `each=true` has each on its own.
"""

from __future__ import annotations

import os
import random
import re

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from tests.covering import in_turn, some
from tests.pipelines.test_programs import hold_bytes, hold_to, results
from tests.training.stepping import on_devices

TEXT = """
dim b = 4, m = 4, layers = 2, o = m
program p(x[b, m], t[b, m], w[b]) {
  param v[m, o]
  param bias[m] = zeros()
  param n[] = zeros()
  repeat layers {
    param u[m]
    x = tanh(x * u)
  }
  s = tanh(einsum(x, v -> [b, o])[o -> m]) + stop_gradient(bias)
  l = mean[m](square(s - t))
  BODY
  return loss
  minimize loss with sgd(lr=0.5OPTIONS)
}
"""
EXACT = {
    "a mean": "loss = mean(l)",
    "a mean over weights": "loss = sum(l * w) / sum(w)",
    "with a least sum": "loss = sum(l * w) / maximum(sum(w), 1.0)",
    "with a small number": "loss = sum(l * w) / (sum(w) + 0.01)",
    "weights on average": "loss = mean(l * w) / mean(w)",
    "weights that add up to one": "loss = sum(l * (w / sum(w)))",
    "a number over a sum": "loss = sum(l * w) * (1.0 / sum(w))",
    "samples that count": "k = w > 0.2\n  "
    "loss = sum(where(k, l, 0.0)) / cast(maximum(sum(cast(k, i32)), 1), f32)",
    "a mean for each feature": "loss = mean(sum[b](square(s - t) * w) / sum[b](w * t))",
    "two terms": "loss = mean(l) + 0.1 * sum(l * w) / sum(w)",
    "a bias moved by a mean": "loss = mean(l)\n  bias := bias + 0.1 * sign(mean[b](s) - 0.3)",
    "an average": "loss = mean(l)\n  bias := 0.9 * bias + 0.1 * mean[b](s)",
    "an average of the weights": "loss = mean(l)\n  bias := 0.9 * bias + 0.1 * sum[o](v)",
    "a counter": "loss = mean(l)\n  n := n + 1.0",
    "the loss": "loss = sum(l * w) / sum(w)\n  n := n + loss",
    "a mean as it is": "loss = mean(l)\n  bias := mean[b](s)",
    "a mean over a sum": "loss = mean(l / sum(w))",
    "a root of a sum": "loss = sum(l) / sqrt(sum(w))",
    "squares of quotients": "loss = sum(square(l / sum(w)))",
    "a mean over squares": "loss = mean(l) / mean(square(w))",
    "a sum with weights of positions": "k = cast(iota[m] + 1, f32)\n  "
    "loss = sum(l) / sum(square(t) * k)",
    "a product of means": "loss = mean(l) + sum(mean[b](s) * mean[b](t))",
}
REFUSED = {
    "weights that are learned": "loss = sum(l * s[m = 0]) / sum(s[m = 0])",
    "a sum that is learned": "loss = sum(l) / sum(l * w + 1.0)",
    "a root of a quotient": "loss = sqrt(sum(l * w) / sum(w))",
    "a quotient of a root": "loss = sqrt(sum(l)) / sum(w)",
    "a sum and a mean": "loss = (sum(l) + mean(l)) / sum(w)",
    "a product of quotients": "loss = sum(l * w) / sum(w) * mean(l)",
    "the largest quotient": "loss = max(l / sum(w))",
    "a sum of what is divided by a sum": "loss = mean(l) / mean(square(w / (sum(w) + 1.0)))",
    "shares of a batch": "loss = sum(l) / sum(softmax[b](w))",
    "integers": "loss = mean(l)\n  n := n + cast(sum(cast(s > 0.2, i32)), f32)",
}
LAYOUTS = {
    "d:1": "",
    "d:2": "{ b -> d }",
    "d:2,t:2": "{ b -> d, m -> t, params: m -> d }",
    "pipe:2": "{ layers -> pipe } with one_f_one_b",
    "d:2,pipe:2": "{ layers -> pipe, b -> d } with zb_h1",
}


def compiled(
    name: str, options: str, mesh: str, size: int = 4, layout: str | None = None
) -> Compilation:
    body = {**EXACT, **REFUSED}.get(name, name)
    text = TEXT.replace("BODY", body).replace("OPTIONS", options)
    if layout is None:
        layout = LAYOUTS[mesh] if "accumulate" in options else ""
    source = Source("p.mdsl", f"{text}layout chosen {layout or '{}'}\n")
    chosen = Options(mesh=mesh, layout="chosen", dtype="f64", set_dims={"b": size})
    return Compilation(source, chosen)


def inputs(size: int) -> dict[str, Array]:
    """Samples with weights of very different sums in each batch."""
    rng = np.random.default_rng(5)
    x, t = rng.normal(size=(2, size, 4))
    return {"x": x, "t": abs(t), "w": rng.uniform(size=size) ** 4 + 0.01}


@in_turn(name=some(EXACT), mesh=LAYOUTS, count=(2, 4))
def test_it_is_one_batch(name: str, mesh: str, count: int) -> None:
    samples = inputs(4 * count)
    alone = run_local(compiled(name, "", "d:1", 4 * count).text, samples, seed=3)
    made = compiled(name, f", accumulate={count}", mesh)
    batches = {n: a.reshape(count, 4, *a.shape[1:]) for n, a in samples.items()}
    found = run_local(made.text, batches, seed=3)
    hold_to(results(found), results(alone), 1e-11)
    assert not found.disagreements()
    hold_bytes(found, made)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_is_refused(name: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        compiled(name, ", accumulate=2", "d:1").checked()
    assert [d.code for d in caught.value.diagnostics] == ["MD0297"]
    assert "each=true" in str(caught.value.diagnostics[0].help)
    compiled(name, ", accumulate=2, each=true", "d:1").checked()  # as the help says


NUMBERS = ("sum(w)", "mean(w)", "(mean(w * w) + 0.5)", "sqrt(sum(w))", "maximum(sum(w), max(w))")
OF_SAMPLES = ("l", "l * w", "square(l / {n})", "l * (w / {n})", "{n} * tanh(l)")
TERMS = ("{sum} / {n}", "{n} * {sum}", "{sum} * ({m} / {n})", "0.1 * mean({of}) - mean(l)")


def drawn(rng: random.Random) -> str:
    """A loss of terms that are linear in sums over samples, by numbers that inputs alone make."""

    def term() -> str:
        of = rng.choice(OF_SAMPLES).format(n=rng.choice(NUMBERS))
        words = {"n": rng.choice(NUMBERS), "m": rng.choice(NUMBERS), "of": of}
        words["sum"] = f"{rng.choice(('sum', 'mean'))}({of})"
        return rng.choice(TERMS).format(**words)

    return " + ".join(term() for _ in range(rng.choice((1, 2, 3))))


PROGRAMS = int(os.environ.get("MESHDSL_CASES", "8"))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_loss_is_that_of_one_batch(seed: int) -> None:
    text, samples = f"loss = {drawn(random.Random(seed))}", inputs(8)
    alone = run_local(compiled(text, "", "d:1", 8).text, samples, seed=3)
    made = compiled(text, ", accumulate=2", "d:1")
    batches = {n: a.reshape(2, 4, *a.shape[1:]) for n, a in samples.items()}
    hold_to(results(run_local(made.text, batches, seed=3)), results(alone), 1e-9)
    cut = compiled(text, "", "pipe:2", 8, "{ layers -> pipe } with gpipe[b](2)")
    hold_to(results(run_local(cut.text, samples, seed=3)), results(alone), 1e-9)


PRODUCTS = (
    "mean(l) + sum(mean[b](s) * mean[b](stop_gradient(s)))",
    "mean(l) + mean(l) * mean(l * w)",
    "sqrt(mean(l))",
    "sqrt(sum(l * w) / sum(w))",
    "sum(l) / sum(l * w)",
)


@pytest.mark.parametrize("loss", PRODUCTS)
def test_what_micro_batches_do_not_have_is_had_by_batches_as_the_help_says(loss: str) -> None:
    layout = "{ layers -> pipe } with gpipe[b](2)"
    with pytest.raises(DiagnosticError) as caught:
        compiled(f"loss = {loss}", "", "pipe:2", 8, layout).checked()
    (found,) = caught.value.diagnostics
    assert found.code == "MD0332"
    schedule, options = re.findall(r"`(with \w+|accumulate=[^`]+)`", str(found.help))
    layout = f"{{ layers -> pipe }} {schedule}"
    compiled(f"loss = {loss}", f", {options}", "pipe:2", layout=layout).checked()


INTEGERS = """
dim b = 4, m = 2
program p(x[b, m]) {
  param w[m]
  param n[]: i32 = zeros()
  more = MORE
  n := NEXT
  loss = mean(x * w)
  return loss
  minimize loss with sgd(lr=0.1, accumulate=2)
}
"""


def test_a_mean_of_integers_is_cast_and_cast_back() -> None:
    text = INTEGERS.replace("MORE", "sum(cast(x > 0, i32))").replace("NEXT", "n + more")
    with pytest.raises(DiagnosticError) as caught:
        Compilation(Source("p.mdsl", text), Options()).checked()
    (found,) = caught.value.diagnostics
    assert "to f32, and cast the result back to i32" in str(found.help)
    text = INTEGERS.replace("MORE", "sum(cast(x > 0, f32))").replace("NEXT", "n + cast(more, i32)")
    Compilation(Source("p.mdsl", text), Options()).checked()  # as the help says


def test_what_a_batch_is_normalised_by_is_its_own_in_any_form() -> None:
    """The sum over samples, divided by their number, is as little of the step as their mean is."""
    body = "z = s - MEAN\n  d = t - MEAN\n  loss = mean(z / sqrt(mean[b](square(d)) + 0.1))"
    found = []
    for mean in ("mean[b](t)", "sum[b](t) / 4.0"):
        made = compiled(body.replace("MEAN", mean), ", accumulate=2", "d:1")
        batches = {n: a.reshape(2, 4, *a.shape[1:]) for n, a in inputs(8).items()}
        found.append(results(run_local(made.text, batches, seed=3)))
    hold_to(found[1], found[0], 1e-11)


def test_each_batch_on_its_own() -> None:
    """The mean of what the batches have alone, which weights do not count in."""
    samples, name = inputs(8), "a mean over weights"
    parts = [{n: a[k : k + 4] for n, a in samples.items()} for k in (0, 4)]
    losses = [run_local(compiled(name, "", "d:1").text, p, seed=3).outputs["loss"] for p in parts]
    batches = {n: a.reshape(2, 4, *a.shape[1:]) for n, a in samples.items()}
    made = compiled(name, ", accumulate=2, each=true", "d:1")
    found = run_local(made.text, batches, seed=3).outputs["loss"]
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-12)


MULTIPLIED_BY = {
    "a gradient": "g, h = grad(mean(tanh(x * s)), x, s)\n  t[b] = h + zeros[b]()\n  "
    "y, z = grad(mean(tanh(h * t)), x, t)\n  loss = mean(z) + sum(tanh(w))",
    "one of several results": "t, i = top_k[b -> best](x)\n  "
    "loss = mean(x * sum(t)) + sum(tanh(w))",
}
"""What inputs alone make, and the loss is multiplied by, in more ways than a sum."""


@pytest.mark.parametrize("body", MULTIPLIED_BY.values(), ids=MULTIPLIED_BY)
def test_numbers_of_inputs_may_be_made_in_any_way(body: str) -> None:
    text = f"""dim b = 4, m = 2, best = 1
program p(x[b], s) {{
  param w[m]
  {body}
  return loss
  minimize loss with sgd(lr=0.5, accumulate=2)
}}
"""
    made = Compilation(Source("p.mdsl", text), Options(mesh="d:2", layout="b:d", dtype="f64"))
    found = run_local(made.text, {"x": np.arange(8.0).reshape(2, 4), "s": np.ones(2)}, seed=3)
    assert not found.disagreements()
    assert np.isfinite(found.outputs["loss"])


def test_parameters_are_returned_and_trained() -> None:
    """Of each batch; a number as a mean of equal ones."""
    text = """dim b = 2, m = 4
program p(x[b, m]) {
  param w[m]
  param n[]
  loss = mean((x * w + n)^2)
  return loss, w, n
  minimize loss with sgd(lr=0.5, accumulate=2)
}
"""
    made = Compilation(Source("p.mdsl", text), Options(mesh="d:2", layout="b:d"))
    w, n = np.arange(4, dtype=np.float32), np.float32(0.5)
    run = on_devices(made.emitted, {}, {"w": w, "n": n}).run
    np.testing.assert_array_equal(run.outputs["w"], [w, w])
    np.testing.assert_array_equal(run.outputs["n"], n)
    assert (run.updated["w"] != w).all()
    assert run.updated["n"] != n


def test_batches_of_one_stage_after_the_other_are_on_their_own() -> None:
    """Of updates on the way each micro-batch is a batch: it is divided by its own weights."""
    text = TEXT.replace("BODY", EXACT["a mean over weights"]).replace("OPTIONS", "")
    source = Source("p.mdsl", f"{text}layout own {{ layers -> pipe }} with pipedream[b](2)\n")
    made = Compilation(source, Options(mesh="pipe:2", layout="own")).checked()
    assert "accumulate" not in made.bare.split("def forward")[0]
