"""Random numbers are those of a seed, a call and an index: under every layout and engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.backends.draws import draws
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.reference import made_up, run_reference, whole_specs
from meshdsl.backends.runtime.random_blocks import CHUNK, dropped, random_numbers
from meshdsl.backends.runtime.splitmix import normal_of, stream_key, uniform_of
from meshdsl.named.ir import walk
from tests.compiling import compile_text, named, run_text
from tests.ranks import Forks

LAYOUTS = {
    "whole": "", "rows": "batch -> p", "columns": "io -> q", "both": "batch -> q, io -> p",
    "nested": "io -> (p, q)", "other": "batch -> (q, p), hidden -> none",
}  # fmt: skip
TEXT = f"""
dim batch = 4, io = 8, hidden = 6, layers = 3, vocab = 8
mesh grid = {{ p: 2, q: 2 }}
{"".join(f"layout {name} {{ {rules} }}{chr(10)}" for name, rules in LAYOUTS.items())}
def block(x[batch, io]) -> [batch, io] {{
  return dropout(x, 0.25) + dropout[io](x, 0.5)
}}

program p(x[batch, io]) {{
  y = x
  repeat layers {{
    y = block(y) + block(x) + uniform[batch]()
  }}
  d = dropout(x, 0.5)
  g = grad(sum(d * d), x)
  u = uniform[batch, io](7)
  n = normal[io, batch](std=0.1)
  s = sample[io](x, temperature=0.7)
  return y, d, g, u, n, s
}}
"""
X = {"x": np.arange(1.0, 33.0, dtype=np.float32).reshape(4, 8)}


def test_every_layout_and_engine_draws_the_same_bits() -> None:
    program = named(TEXT)
    inputs, _ = whole_specs(program, draws(program))
    expected = run_reference(program, made_up(inputs, X, 5), {})
    first = None
    for layout in LAYOUTS:
        emitted = compile_text(TEXT, layout=layout).emitted
        found = run_local(emitted.text, X, seed=5).outputs
        first = first or found
        for name, wanted in expected.items():
            np.testing.assert_array_equal(found[name], first[name], err_msg=f"{layout} {name}")
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)
    assert first is not None
    for name in ("d", "g", "u", "s"):
        np.testing.assert_array_equal(first[name], expected[name])


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, where its value is not read."""

    is_cuda = property(lambda _: True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_key_of_numbers_on_a_gpu_is_the_same(dtype: torch.dtype) -> None:
    """Numbers of loops are i32 there: the key has 64 bits all the same."""
    for numbers in ((0,), (3, 1), (2**31 - 1, 7), (-5, 0)):
        there = [torch.tensor(n, dtype=dtype).as_subclass(OnGpu) for n in numbers]
        assert int(stream_key(-77, *there)) == stream_key(-77, *numbers)


def test_processes_draw_the_same_bits(forks: Forks, tmp_path) -> None:
    texts = {layout: compile_text(TEXT, layout=layout).emitted.text for layout in LAYOUTS}
    assert all("stream_key" in text for text in texts.values())
    expected = run_local(texts["whole"], X, seed=0).outputs
    # The seed is the run's, and in no file.
    for layout, text in texts.items():
        folder = tmp_path / layout
        folder.mkdir()
        found = forks.run_gloo(text, X, folder, 4)
        for name, wanted in expected.items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=f"{layout} {name}")


def test_another_seed_draws_others() -> None:
    text = compile_text(TEXT, layout="rows").emitted.text
    one, other = (run_local(text, X, seed=seed).outputs for seed in (5, 6))
    for name, value in one.items():
        assert np.array_equal(value, other[name]) == (name == "u"), name  # that one has its own


def test_no_two_calls_share_a_stream() -> None:
    """Two calls in one expression, of one function, in two iterations, of two library functions."""
    text = """
    dim n = 256, again = 3
    def twice(x[n]) -> [n] { return uniform[n]() - uniform[n]() }
    program p(x[n]) {
      a = uniform[n]()
      b = twice(x)
      c = twice(x)
      d = zeros[n]()
      repeat again { d = 8.0 * d + uniform[n]() }
      return a, b, c, d
    }
    """
    streams = [op.attr("stream") for op in walk(named(text).body) if op.name == "uniform"]
    assert len(streams) == len(set(streams)) == 6
    found = run_text(text, {"x": np.zeros(256, np.float32)})
    iterations = [found["a"], found["b"], found["c"]]
    for a, b in itertools.combinations(iterations, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.25
    assert len(np.unique(np.round(found["d"] % 1, 4))) > 200


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_rate_is_met(rate: float) -> None:
    x = torch.ones(1000, 1001)
    found = dropped(x, rate, 17, (1000, 1001), (0, 0))
    share, sigma = (found == 0).double().mean().item(), (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(share - rate) <= 4 * sigma
    assert set(found.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - rate or 1)).item()}


def test_rates_0_and_1_of_programs() -> None:
    text = "dim a = 8\nprogram p(x[a]) { y = dropout(x, 0)\n z = dropout(x, 1)\n return y, z }"
    x = np.array([np.nan, 1, 2, 3, 4, 5, 6, 7], np.float32)
    found = run_text(text, {"x": x})
    np.testing.assert_array_equal(found["y"], x)
    np.testing.assert_array_equal(found["z"], 0 * x)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_normal_numbers_are_those_of_box_and_muller(library: Any) -> None:
    """sqrt(-2 ln u) times the cosine and the sine of an angle, as f64 has them, to f32's digits."""
    words = np.random.default_rng(3).integers(-(2**31), 2**31, 4096, np.int32)
    found = normal_of(library.asarray(words), library)
    radius = np.sqrt(-2 * np.log(uniform_of(words[0::2], np).astype(np.float64)))
    quarters = (words[1::2] >> 30) & 3
    within = ((words[1::2] & 0x3FFFFFFF) >> 7) + 0.5 - 2.0**22
    angle = np.pi / 2 * (quarters + within * 2.0**-23)
    expected = np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).reshape(-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_numbers_are_uniform_and_normal() -> None:
    shares = {uniform_of: lambda x: x, normal_of: lambda x: (1 + torch.erf(x / 2**0.5)) / 2}
    for how, share in shares.items():
        x = random_numbers(how, 3, (300, 1001), (0, 0), (300, 1001)).double()
        found, count = share(x.flatten().sort().values), x.numel()  # Kolmogorov and Smirnov
        assert (found - (torch.arange(count) + 0.5) / count).abs().max() < 1.95 / count**0.5
        for a, b in ((x[:, :-1], x[:, 1:]), (x[:-1], x[1:])):
            assert (
                abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 4 / count**0.5
            )
    u = random_numbers(uniform_of, 3, (CHUNK * 4 + 3,), (0,), (CHUNK * 4 + 3,))
    assert 0 < u.min() < u.max() < 1


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 7, 2 * CHUNK + 1]), max_size=3), st.data())
def test_a_block_is_that_of_the_whole(listed: list[int], data: st.DataObject) -> None:
    """Blocks of any size and start, empty ones and such of uneven splits among them."""
    sizes, chosen = tuple(listed[:1] + [min(n, 7) for n in listed[1:]])[::-1], data.draw
    starts = tuple(chosen(st.integers(0, n)) for n in sizes)
    shape = tuple(chosen(st.integers(0, n - at)) for n, at in zip(sizes, starts, strict=True))
    part = tuple(slice(at, at + n) for at, n in zip(starts, shape, strict=True))
    for how in (uniform_of, normal_of):
        whole = random_numbers(how, 9, sizes, (0,) * len(sizes), sizes)
        assert torch.equal(random_numbers(how, 9, sizes, starts, shape), whole[part])
    whole = dropped(torch.ones(sizes), 0.3, 9, sizes, (0,) * len(sizes))
    assert torch.equal(dropped(torch.ones(shape), 0.3, 9, sizes, starts), whole[part])


# --- training ------------------------------------------------------------------------------------

TRAINED = """
dim batch = 8, io = 4, hidden = 16, layers = 2
mesh pair = { p: 2 }
layout rows { batch -> p }
layout inner { hidden -> p }
program p(x[batch, io], y[batch, io]) {
  repeat layers {
    param w[io, hidden]
    param v[hidden, io]
    recompute {
      x = x + einsum(dropout(relu(einsum(x, w -> [batch, hidden])), 0.25), v -> [batch, io])
    }
  }
  loss = mean(square(x - y))
  return loss
  minimize loss with sgd(lr=0.05, accumulate=2)
}
"""


@pytest.fixture
def data(tmp_path) -> str:
    rng = np.random.default_rng(0)
    path = tmp_path / "d.npz"
    x, y = rng.normal(size=(2, 64, 4)).astype(np.float32)
    np.savez(path, x=x, y=y)
    return str(path)


def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = md.load(_written(tmp_path))

    def losses(layout: str, *runs: int, folder: str) -> list[float]:
        found = []
        for number, steps in enumerate(runs):
            plan = program.compile(layout=layout)
            told = plan.train(
                data,
                steps=steps,
                checkpoint=folder,
                resume=number > 0,
                seed=3,
                eval_every=2,
                eval_data=data,
            )
            found.append(told.values["loss"])
        return [*found, told.evaluated["loss"]]

    whole, resumed = losses("rows", 4, folder="a"), losses("rows", 2, 4, folder="b")
    assert resumed[1:] == whole
    np.testing.assert_allclose(losses("inner", 4, folder="c"), whole, rtol=1e-5)


def _written(folder) -> str:
    path = folder / "p.mdsl"
    path.write_text(TRAINED)
    return str(path)


def test_steps_and_batches_draw_other_numbers() -> None:
    from meshdsl.backends.engines.ranks import Ranks
    from meshdsl.backends.runtime.values import Spec
    from meshdsl.backends.train.feed import Feed

    class Program:
        INPUTS = {"seed": Spec("i64", {"accumulate": 3}, {}, ("seed",))}  # noqa: RUF012

    class Nothing:
        may_refuse = False

    feed = Feed(Program(), Nothing(), Ranks({}, 0, None, {}), 3)  # type: ignore[arg-type]
    seeds = [n for step in range(4) for n in feed.batch(step)["seed"].tolist()]
    assert len(set(seeds)) == 12


def test_the_gradient_drops_what_the_forward_pass_dropped() -> None:
    text = "dim a = 64\nprogram p(x[a]) { y = dropout(x, 0.5)\n g = grad(sum(y), x)\n return y, g }"
    found = run_text(text, {"x": np.ones(64, np.float32)})
    np.testing.assert_array_equal(found["g"], found["y"])
    assert 10 < (found["y"] == 0).sum() < 54


def test_evaluation_drops_nothing() -> None:
    made = compile_text(TRAINED)
    assert any(op.name == "dropout" for op in walk(made.named.body))
    assert not any(op.name == "dropout" for op in walk(made.forward.named.body))
    assert [v.label for v in made.forward.named.inputs] == ["x", "y"]
    assert not any(op.name == "identity" for op in walk(made.forward.named.body))


BESIDE = """
dim batch = 2, io = 4
def net(x[batch, io]) -> [batch, io] { return dropout(x, 0.9) }
program learn(x[batch, io]) {
  param w[io] = ones()
  loss = mean(square(net(x) * w))
  return loss
  minimize loss with sgd(lr=0.1)
}
program use(x[batch, io]) { return net(x) }
program draw(x[batch, io]) { return net(x) + uniform[io]() }
"""


def test_a_program_beside_one_that_trains_drops_nothing() -> None:
    """It is the inference of what that one learns; alone in its file, it would drop."""
    made = compile_text(BESIDE, program="use")
    assert [v.label for v in made.named.inputs] == ["x"]
    x = np.ones((2, 4), np.float32)
    (found,) = run_local(made.emitted.text, {"x": x}).outputs.values()
    np.testing.assert_array_equal(found, x)
    assert [v.label for v in compile_text(BESIDE, program="draw").named.inputs] == ["x", "seed"]
    alone = BESIDE.replace("  minimize loss with sgd(lr=0.1)\n", "")
    assert [v.label for v in compile_text(alone, program="use").named.inputs] == ["x", "seed"]
