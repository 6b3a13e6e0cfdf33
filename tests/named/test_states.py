"""State of a program's own, `name := value`: in loops, functions, training steps and modules."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from meshdsl.api.module import module
from meshdsl.backends.engines.execution import InputSource, run, verify
from meshdsl.cli.app import app
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import NamedProgram
from tests.compiling import compile_text, named

POLICIES = ("optimal", "immediate", "mesh-tf", "deferred")

CACHE = """
dim batch = 8, c = 4, layers = 3, mem = 6
mesh pair = { data: 2 }
layout whole {}
layout by_batch { batch -> data }
layout by_c { c -> data }
layout by_mem { mem -> data }
layout stored { params: c -> data, params: mem -> data, cache: c -> none }
program p(x[batch, c]) {
  param cache[mem, batch, c] = zeros()
  param n[]: i32 = zeros()
  param seen[mem]: bool = zeros()
  param a[c] = ones()
  param b[c] = zeros()
  param last[c, batch]
  param first[batch, c]
  param z[c, layers, batch] = zeros()
  param q[layers]: i32 = zeros()
  param number[] = ones()
  new = where(iota[mem] == n, x, cache)
  cache := new
  seen := seen or iota[mem] == n
  n := n + 1
  a := b
  b := a
  last := x
  first := first
  number := 0.5
  repeat layers {
    param h[c] = ones()
    param u[batch] = ones()
    param k[c] = ones()
    h := b
    u := u * 2 + sum[c](x)
    z := z + x
    q := q + n
  }
  k := 2 * k + b
  y = sum[mem](new)
  return y, a
}
"""
"""Caches and counters: every dtype, views, exchanged states, slices along any dim, no loss."""

TRAINED = """
dim batch = 8, c = 4, layers = 3, model = 6
mesh pair = { data: 2 }
layout by_batch { batch -> data }
layout by_c { c -> data }
layout zero { params: c -> data, state: model -> data }
def normed(x[batch, c]) -> [batch, c] {
  param mean_[c] = zeros()
  mu = mean[batch](x)
  mean_ := 0.9 * mean_ + 0.1 * mu
  return x - mu + stop_gradient(mean_)
}
program p(x[batch, c]) {
  param n[]: i32 = zeros()
  param carried[batch, c] = ones()
  param ema[c, model] = ones()
  param w[c, model] = normal(0.5)
  param v[model, c] = normal(0.5)
  h = normed(x + stop_gradient(carried))
  repeat layers {
    param g[c] = ones()
    recompute {
      t = normed(tanh(h * g))
      h = h + einsum(relu(einsum(t, w -> [batch, model])), v -> [batch, c])
    }
  }
  carried := h
  ema := 0.9 * ema + 0.1 * w
  n := n + 1
  loss = mean(square(h - x * x))
  return loss, n, h
  minimize loss with adamw(lr=0.1, OPTIONS)
}
"""
"""Running averages in a function and in a loop, the last batch's values, an average of weights."""


def checked(text: str, **options: Any) -> dict[str, Any]:
    """What a step of `text` stores, equal to the reference's."""
    made = compile_text(text, **options)
    result = run(made, "local", InputSource())
    found = verify(made, InputSource(), result.outputs, result.updated)
    assert {c.name for c in found} >= {str(u.old.name) for u in made.named.updates}
    assert all(c.ok for c in found), [c for c in found if not c.ok]
    assert result.disagreements == ()
    return dict(result.updated)


@pytest.mark.parametrize("layout", ["whole", "by_batch", "by_c", "by_mem", "stored"])
@pytest.mark.parametrize("policy", POLICIES)
def test_states_without_a_loss(layout: str, policy: str) -> None:
    stored = checked(CACHE, layout=layout, reduce=policy)
    assert stored["n"] == 1
    assert stored["number"] == 0.5
    assert list(stored["seen"]) == [True, *[False] * 5]
    assert (stored["a"] == 0).all()
    assert (stored["b"] == 1).all()  # both are read before either is stored
    assert (stored["k"] == np.full((3, 4), 2)).all()  # after its loop, for all layers
    assert (stored["cache"][0] == stored["last"].T).all()


@pytest.mark.parametrize("layout", ["by_batch", "by_c", "zero"])
@pytest.mark.parametrize(
    "options",
    [
        "clip=1.0",
        "each=true, accumulate=2",
        'compute="bf16"',
        'compute="bf16", each=true, accumulate=3',
    ],
)
def test_states_of_a_training_step(layout: str, options: str) -> None:
    stored = checked(TRAINED.replace("OPTIONS", options), layout=layout)
    assert stored["n"] == (int(options[-1]) if "accumulate" in options else 1)
    assert stored["normed_2.mean_"].dtype == np.float32  # also where products are in bf16


@pytest.mark.parametrize("layout", ["by_batch", "by_c", "zero"])
@pytest.mark.parametrize("options", ["accumulate=2", 'compute="bf16", accumulate=3'])
def test_batches_of_a_step_are_one(layout: str, options: str) -> None:
    """Each state is assigned once: of means over the batches."""
    text = TRAINED.replace("OPTIONS", options).replace("carried := h", "")
    assert (
        checked(
            re.sub("param carried.*", "param one[] = ones()", text).replace(
                "stop_gradient(carried)", "stop_gradient(one)"
            ),
            layout=layout,
        )["n"]
        == 1
    )


def test_a_state_with_the_samples_of_a_batch_is_of_each_batch() -> None:
    with pytest.raises(DiagnosticError, match="MD0297") as caught:
        named(TRAINED.replace("OPTIONS", "accumulate=2"))
    assert "each=true" in str(caught.value.diagnostics[0].help)


@pytest.mark.parametrize("dtype", ["f64", "f16", None])
def test_a_step_in_another_dtype(dtype: str | None) -> None:
    checked(TRAINED.replace("OPTIONS", "clip=1.0"), layout="by_batch", dtype=dtype)


def test_what_is_evaluated_stores_nothing() -> None:
    text = TRAINED.replace("OPTIONS", "clip=1.0")
    assert named(text, evaluate=True).updates == ()
    assert len(named(CACHE, evaluate=True).updates) == 13


def test_an_assigned_parameter_has_no_state_of_the_optimizer() -> None:
    program = named(TRAINED.replace("OPTIONS", "clip=1.0"))
    assert isinstance(program, NamedProgram)
    assert {str(s.value.name) for s in program.states} == {
        "step",
        *(f"{name}.{state}" for name in ("w", "v", "g") for state in "mv"),
    }


def test_states_of_a_module_are_buffers(tmp_path: Any) -> None:
    """They follow the program's own steps in training mode, and stay in evaluation mode."""
    path = tmp_path / "p.mdsl"
    path.write_text(TRAINED.replace("OPTIONS", "clip=1.0"))
    made: Any = module(str(path), dtype="f64")
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert {name for name, _ in made.named_parameters()} == {"w", "v", "g"}
    compiled = compile_text(path.read_text(), dtype="f64")
    stored = {n: t.numpy().copy() for n, t in made.whole_state_dict().items()}
    for _ in range(3):
        after = _stepped(compiled, x, stored)
        loss = made(x).loss
        loss.backward()
        found = {n: t.numpy() for n, t in made.whole_state_dict().items()}
        for name in ("normed.mean_", "normed_2.mean_", "carried", "ema", "n"):
            assert np.allclose(found[name], after[name]), name
        stored = {n: t.copy() for n, t in found.items()}
    made.eval()
    made(x)
    with torch.no_grad():
        made(x)
    kept = made.whole_state_dict()
    assert all((kept[n].numpy() == t).all() for n, t in stored.items())
    made.load_state_dict(made.state_dict())


def _stepped(compiled: Any, x: torch.Tensor, stored: dict[str, Any]) -> dict[str, Any]:
    from meshdsl.backends.engines.reference import reference_step

    return reference_step(compiled.named, {"x": x.numpy()}, stored, {})[1]


def test_dead_reads_of_a_state_leave_its_assignment() -> None:
    """Nothing reads the state but its own assignment, which is hoisted out of no loop."""
    text = """
dim a = 2, layers = 3
program p(x[a]) {
  param last[a]
  repeat layers {
    param s[a] = ones()
    param t[a] = zeros()
    s := relu(x)
    t := s
  }
  last := last
  return x
}
"""
    stored = checked(text)
    assert stored["s"].shape == (3, 2)
    assert (stored["s"][0] == stored["s"][2]).all()
    assert (stored["t"] == 1).all()


@pytest.mark.parametrize("dims", list(itertools.permutations("amn")), ids="".join)
def test_loops_in_loops(dims: tuple[str, ...]) -> None:
    """A state of two loops, declared in the inner one or before both, in any order of dims."""
    text = f"""
dim a = 2, m = 3, n = 4
program p(x[a]) {{
  param s[{", ".join(dims)}] = ones()
  y = x
  repeat m {{
    repeat n {{
      param t[a] = zeros()
      y = y * 0.5 + t
      t := t + y
      s := s + y
    }}
  }}
  return y
}}
"""
    checked(text)


def test_a_training_run_resumes_with_its_states(tmp_path: Any) -> None:
    """Bit for bit as without the interruption; the export has them, too."""
    text = TRAINED.replace("OPTIONS", "clip=1.0").replace("return loss, n, h", "return loss, n")
    (tmp_path / "p.mdsl").write_text(text)
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=generator.normal(size=(32, 4)).astype(np.float32))
    found = []
    for folder, parts in (("a", ["4"]), ("b", ["2", "4"])):
        for steps in parts:
            where = ["--checkpoint", f"{tmp_path}/{folder}", "--out", f"{tmp_path}/{folder}.npz"]
            resume = ["--resume", "--force"] if steps != parts[0] else []
            words = ["train", f"{tmp_path}/p.mdsl", "--data", f"{tmp_path}/x.npz", "--steps", steps]
            words += ["--layout", "zero", "--reduce", "immediate", *where, *resume]
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
        with np.load(tmp_path / f"{folder}.npz") as arrays:
            found.append({n: arrays[n] for n in arrays.files})
    assert found[0]["n"] == 4
    assert found[0].keys() == found[1].keys() >= {"normed.mean_", "normed_2.mean_", "ema"}
    assert all((found[0][n] == found[1][n]).all() for n in found[0])
