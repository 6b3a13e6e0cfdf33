"""Functions of the prelude that programs call: their meaning, under any layout and from Python."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.in_process import run_local
from meshdsl.named.ir import walk
from meshdsl.named.prelude import library
from meshdsl.pipeline import Compilation
from tests.compiling import compile_text, named, run_text
from tests.covering import in_turn

CALLS = {
    "top2_gating": "combine, dispatch, loss = top2_gating[token, experts, slot](x, noise)",
    "top_k_gating": "combine, dispatch, loss = top_k_gating[token, experts, choice, slot](x)",
    "top_k_routing": "shares, to, source, full, loss = "
    "top_k_routing[token, experts, choice, slot, pairs, slots, places](x)",
    "sorted_routing": "shares, source, to, sizes, loss = "
    "sorted_routing[token, experts, choice, blocks, each, row, pairs, rows](x)",
    "batch_norm": "y = batch_norm[group, token, experts](x)",
    "group_norm": "y = group_norm[group, token, experts](x)",
    "leaky_relu": "y = leaky_relu(x, 0.1)",
    "elu": "y = elu(x)",
    "hard_swish": "y = hard_swish(x)",
    "sample": "y = sample[experts](x, 3)",
    "bincount": "y = bincount[experts](argmax[experts](x))",
}
"""A call of every function; what it yields is returned."""

PROGRAM = """
dim group = 2, token = 8, experts = 4, slot = {slot}, choice = {choice}
dim pairs = token * choice, slots = experts * slot, places = slots + 1
dim blocks = 2, each = experts / blocks, row = pairs, rows = blocks * row
mesh grid = {{ p: 2, q: 2 }}
layout whole {{ group -> p }}
layout experts {{ experts -> (q, p) }}
layout tokens {{ token -> p, slot -> q }}
program test(x[group, token, experts], noise[group, token]) {{
  {call}
  return {names}
}}
"""
LAYOUTS = ("whole", "experts", "tokens")


@functools.cache
def compiled(text: str, layout: str) -> Compilation:
    """A program under a layout, which several tests run."""
    return compile_text(text, layout=layout)


def outputs(text: str, inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    """What a program yields under a layout."""
    emitted = compiled(text, layout).emitted
    return run_local(emitted.text, inputs, lines=emitted.places).outputs


def text(call: str, slot: int = 2, choice: int = 2) -> str:
    return PROGRAM.format(call=call, names=call.partition(" = ")[0], slot=slot, choice=choice)


def test_every_function_is_tried():
    assert set(CALLS) == set(library())


@pytest.mark.parametrize("name", CALLS)
def test_it_is_built_of_operators(name):
    """A composite that it calls is one operator, as in a program."""
    program = named(text(CALLS[name]))
    assert {v.functions for op in walk(program.body) for v in op.outs if v.functions} == {(name,)}
    assert {op.span.file for op in walk(program.body)} == {"test.mdsl"}, "it is where it is called"


def gating(logits, noise, slots, choices=2):
    """GShard's gating of one group, token by token; any but the first choice is above the noise."""
    tokens, experts = logits.shape
    gates = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    combine = np.zeros((tokens, experts, slots))
    taken = np.zeros(experts, int)
    chosen = np.argsort(-gates, axis=1, kind="stable")[:, :choices].T
    shares = np.take_along_axis(gates, chosen.T, 1).T
    shares /= shares.sum(0)
    for choice in range(choices):
        for t in range(tokens):
            e = chosen[choice, t]
            if choice and not 2 * shares[choice, t] > noise[t]:
                continue
            if taken[e] < slots:
                combine[t, e, taken[e]] = shares[choice, t]
            taken[e] += 1
    density = np.eye(experts)[chosen[0]].mean(0)
    return combine, combine > 0, (density * gates.mean(0)).mean() * experts**2


@in_turn(kind=("any", "ties", "starved"), slot=(8, 2))
def test_top2_gating_is_gshards(kind, slot):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 8, 4)).astype(np.float32)
    x = np.round(x) if kind == "ties" else x
    x = x - np.array([0, 0, 9, 9], np.float32) if kind == "starved" else x
    noise = rng.uniform(size=(2, 8)).astype(np.float32)
    expected = [gating(*group, slot) for group in zip(x.astype(np.float64), noise, strict=True)]
    for layout in LAYOUTS:
        program = text(CALLS["top2_gating"], slot)
        found = outputs(program, {"x": x, "noise": noise}, layout)
        np.testing.assert_allclose(found["combine"], [e[0] for e in expected], atol=1e-6)
        np.testing.assert_array_equal(found["dispatch"], [e[1] for e in expected])
        np.testing.assert_allclose(found["loss"], np.mean([e[2] for e in expected]), rtol=1e-5)


@pytest.mark.parametrize("choices", [1, 3])
def test_top_k_gating_is_the_same_for_any_number(choices):
    x = np.round(np.random.default_rng(6).normal(size=(2, 8, 4))).astype(np.float32)
    nothing = np.full((2, 8), -1.0, np.float32)
    expected = [
        gating(g.astype(np.float64), n, 3, choices) for g, n in zip(x, nothing, strict=True)
    ]
    for layout in ("whole", "experts"):
        program = text(CALLS["top_k_gating"], 3, choices)
        found = outputs(program, {"x": x, "noise": nothing}, layout)
        np.testing.assert_allclose(found["combine"], [e[0] for e in expected], atol=1e-6)
        np.testing.assert_array_equal(found["dispatch"], [e[1] for e in expected])
        np.testing.assert_allclose(found["loss"], np.mean([e[2] for e in expected]), rtol=1e-5)


@pytest.mark.parametrize("choices", [1, 3])
def test_routing_is_the_gating_as_indices(choices):
    x = np.round(np.random.default_rng(6).normal(size=(2, 8, 4))).astype(np.float32)
    for layout in LAYOUTS:
        names = ("top_k_gating", "top_k_routing")
        both = [outputs(text(CALLS[n], 3, choices), {"x": x}, layout) for n in names]
        gating, routing = both
        shares = np.zeros((2, 8, 12))
        for group, token in np.ndindex(2, 8):
            np.add.at(
                shares[group, token], routing["to"][group, token], routing["shares"][group, token]
            )
        np.testing.assert_allclose(shares, gating["combine"].reshape(2, 8, 12), atol=1e-6)
        dispatch = gating["dispatch"].reshape(2, 8, 12)
        np.testing.assert_array_equal(routing["full"], dispatch.sum(1))
        assert (np.where(routing["full"] > 0, dispatch.argmax(1), 0) == routing["source"]).all()
        np.testing.assert_allclose(routing["loss"], gating["loss"], rtol=1e-6)


def test_what_is_wrong_with_a_call_stands_at_the_call():
    with pytest.raises(Exception, match="takes 3 dims"):
        compile_text(text("combine, dispatch, loss = top2_gating[token, experts](x, noise)"))


def test_python_calls_it_by_its_name():
    group, token, experts, slot = (md.dim(n, 4) for n in ("group", "token", "experts", "slot"))

    @md.program
    def test(x: md.Tensor[group, token, experts]):  # type: ignore[type-arg,valid-type]
        combine, dispatch, loss = md.top2_gating[token, experts, slot](x)
        return combine, dispatch, loss

    assert "top2_gating[token, experts, slot](x)" in test.to_mdsl()
    function: Any = md.top2_gating
    assert "noise=0.0" in str(inspect.signature(function))
    assert "GShard" in (md.top2_gating.__doc__ or "")


def _normal(x):
    """A tensor with mean 0 and deviation 1."""
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


MEANINGS = {
    "batch_norm": _normal,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.1 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MEANINGS)
def test_layers_of_images(name, layout):
    x = np.random.default_rng(3).normal(size=(2, 8, 4)) * 4
    inputs = {"x": x.astype(np.float32), "noise": np.zeros((2, 8), np.float32)}
    found = run_text(text(CALLS[name]), inputs, mesh="grid", layout=layout)["y"]
    np.testing.assert_allclose(found, MEANINGS[name](x), rtol=1e-5, atol=1e-5)


def test_batch_norm_scales_every_channel():
    program = """
    dim batch = 4, c = 3, h = 2, w = 2
    program p(x[batch, c, h, w], g[c], b[c]) { return batch_norm[batch, h, w](x, g, b) }
    """
    rng = np.random.default_rng(3)
    x, g, b = (rng.normal(size=s).astype(np.float32) for s in ((4, 3, 2, 2), (3,), (3,)))
    (found,) = run_text(program, {"x": x, "g": g, "b": b}).values()
    each = [_normal(x[:, i]) * g[i] + b[i] for i in range(3)]
    np.testing.assert_allclose(found, np.stack(each, 1), rtol=1e-4, atol=1e-5)
