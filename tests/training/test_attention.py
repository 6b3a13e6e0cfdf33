"""A block of attention, its logits and its result with their dims in 24 x 24 orders.

One step must subtract exactly the gradient: that of torch, of the same block written by hand.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.runtime import softmax, updates
from meshdsl.backends.runtime.values import Array
from meshdsl.backends.torch.head import RUNTIME
from meshdsl.backends.torch.text import emit
from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.types import F64, Dim, TensorType
from meshdsl.named.builder import Builder, Scope
from meshdsl.named.ir import Value
from meshdsl.named.prelude import prelude
from tests.training.registry import SPAN, placed_on, step_of

SIZES = {"b": 2, "s": 4, "m": 4, "h": 3, "k": 5, "d": 6}
Arrays = dict[str, Array]


def dims(names: str) -> tuple[Dim, ...]:
    return tuple(Dim(n, SIZES[n]) for n in names)


@functools.cache
def arrays() -> Arrays:
    rng = np.random.default_rng(1)
    shapes = {"x": "bsd", "wq": "dhk", "wk": "dhk", "wv": "dhk"}
    return {n: rng.normal(size=[SIZES[c] for c in names]) for n, names in shapes.items()}


@functools.cache
def gradients(masked: bool) -> Arrays:
    """Torch's."""
    leaves = {n: torch.tensor(a, requires_grad=n != "x") for n, a in arrays().items()}
    q, k, v = (torch.einsum("bsd,dhk->bshk", leaves["x"], leaves[n]) for n in ("wq", "wk", "wv"))
    logits = torch.einsum("bshk,bmhk->bshm", q, k)
    if masked:
        inside = torch.ones(SIZES["s"], SIZES["m"], dtype=torch.bool).tril()
        logits = logits.masked_fill(~inside[:, None], -1e9)
    o = torch.einsum("bshm,bmhk->bshk", torch.softmax(logits, 3), v)
    (o * o).mean().backward()
    return {n: t.grad.numpy() for n, t in leaves.items() if t.grad is not None}


def block(logits: str, out: str, masked: bool) -> Callable[..., dict[str, Any]]:
    """The emitted step of the block on one device."""
    builder, scope = Builder(Diagnostics()), Scope({}, {}, prelude())

    def do(name: str, *ins: Value, **attrs: Any) -> Value:
        return builder.emit(name, ins, attrs, SPAN, scope)[0]

    x = builder.value(TensorType(dims("bsd"), F64), SPAN, scope, name="x", role="input")
    wq, wk, wv = (
        builder.value(TensorType(dims("dhk"), F64), SPAN, scope, name=n, role="param")
        for n in ("wq", "wk", "wv")
    )
    q, k, v = (do("einsum", x, w, dims=dims("bshk")) for w in (wq, wk, wv))
    k, v = (do("rename", y, pairs=((dims("s")[0], dims("m")[0]),)) for y in (k, v))
    s = do("einsum", q, k, dims=dims(logits))
    if masked:
        inside = do("ge", do("iota", dim=dims("s")[0]), do("iota", dim=dims("m")[0]))
        s = do("where", inside, s, builder.constant(-1e9, F64, SPAN, scope))
    o = do("einsum", do("softmax", s, dim=dims("m")[0]), v, dims=dims(out))
    loss = do("mean", do("square", o), dims=o.type.dims)
    program = step_of(builder, [x], [wq, wk, wv], loss)
    text = emit(placed_on(program, "d:1", "", "deferred"), {}).text
    names: dict[str, Any] = {"torch": torch, **vars(softmax), **vars(updates)}
    exec(text[text.index("def device(") : text.index(RUNTIME)], names)
    found: Callable[..., dict[str, Any]] = names["device"]
    return found


ORDERS = ["".join(order) for order in itertools.permutations("bshm")]


def check(logits: str, out: str, masked: bool) -> None:
    device = block(logits, out, masked)
    tensors = {n: torch.tensor(a) for n, a in arrays().items()}
    params = {n: t for n, t in tensors.items() if n != "x"}
    with torch.inference_mode():
        device(0, {}, {"x": tensors["x"]}, params, {"step": torch.tensor(0)})
    for name, gradient in gradients(masked).items():
        update = arrays()[name] - params[name].numpy()
        error = float(np.max(np.abs(update - gradient)) / np.max(np.abs(gradient)))
        assert error < 1e-9, f"{name} with {logits}, {out} is off by {error:.1e}"


@pytest.mark.parametrize("logits", ORDERS)
def test_a_step_subtracts_the_gradient(logits: str) -> None:
    """For orders of the result in turns, all of them with `MESHDSL_CASES`; some with a mask."""
    for number, out in enumerate(itertools.permutations("bshk")):
        turn = number + ORDERS.index(logits)
        if turn % 3 == 0 or "MESHDSL_CASES" in os.environ:
            check(logits, "".join(out), masked=False)
        if turn % 6 == 0:
            check(logits, "".join(out), masked=True)
