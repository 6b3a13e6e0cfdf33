"""A block of attention, its operands, logits and result with their dims in all orders.

One step must subtract exactly the gradient: that of torch, of the same block written by hand.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.runtime import attention_kernels, softmax, update_kernels
from meshdsl.backends.runtime.values import Array
from meshdsl.backends.torch.emitter import emit
from meshdsl.backends.torch.preamble import RUNTIME
from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.types import BOOL, F64, Dim, TensorType
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import walk
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
def allowed() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Who may look where, by batch; one row may look nowhere."""
    seen = np.random.default_rng(2).random([SIZES[c] for c in "bsm"]) < 0.6
    seen[1, 2] = False
    return seen


@functools.cache
def gradients(mask: str) -> tuple[Arrays, Any]:
    """Torch's, and the loss."""
    leaves = {n: torch.tensor(a, requires_grad=n != "x") for n, a in arrays().items()}
    q, k, v = (torch.einsum("bsd,dhk->bshk", leaves["x"], leaves[n]) for n in ("wq", "wk", "wv"))
    logits = torch.einsum("bshk,bmhk->bshm", q, k)
    if mask:
        inside = torch.ones(SIZES["s"], SIZES["m"], dtype=torch.bool).tril()[None]
        inside = torch.tensor(allowed()) if mask == "given" else inside
        logits = logits.masked_fill(~inside[:, :, None], -1e9)
    o = torch.einsum("bshm,bmhk->bshk", torch.softmax(logits, 3), v)
    weight = torch.arange(float(o[0].numel()), dtype=torch.float64).reshape(o[0].shape)
    loss = (o * o * weight).mean()
    loss.backward()
    return {n: t.grad.numpy() for n, t in leaves.items() if t.grad is not None}, loss.item()


def block(
    logits: str, out: str, mask: str, orders: tuple[str, str, str] = ("bshk", "bmhk", "bmhk")
) -> Callable[..., dict[str, Any]]:
    """The emitted step of the block on one device; `orders` are those of q, k and v."""
    builder = Builder(Diagnostics())
    do = Emit(builder, SPAN, None)
    x = builder.value(TensorType(dims("bsd"), F64), SPAN, name="x", role="input")
    wq, wk, wv = (
        builder.value(TensorType(dims("dhk"), F64), SPAN, name=n, role="param")
        for n in ("wq", "wk", "wv")
    )
    seen = builder.value(TensorType(dims("mbs"), BOOL), SPAN, name="seen", role="input")
    q, k, v = (
        do("einsum", x, w, dims=dims(order.replace("m", "s")))
        for w, order in zip((wq, wk, wv), orders, strict=True)
    )
    k, v = (do("rename", y, pairs=((dims("s")[0], dims("m")[0]),)) for y in (k, v))
    s = do("einsum", q, k, dims=dims(logits))
    if mask:
        inside = do("ge", do("iota", dim=dims("s")[0]), do("iota", dim=dims("m")[0]))
        inside = seen if mask == "given" else inside
        s = do("where", inside, s, -1e9)
    o = do("einsum", do("softmax", s, dim=dims("m")[0]), v, dims=dims(out))
    numbers = [do("cast", do("iota", dim=d), dtype=F64) for d in dims("shk")]
    weight = numbers[0]
    for number in numbers[1:]:
        weight = do("add", do("mul", weight, number.type.dims[0].size), number)
    loss = do("mean", do("mul", do("square", o), weight), dims=o.type.dims)
    program = step_of(builder, [x, seen], [wq, wk, wv], loss)
    assert {"attention_lse", "attention_grad"} <= {op.name for op in walk(program.body)}
    text = emit(placed_on(program, "d:1", "", "deferred"), {}).text
    names: dict[str, Any] = {
        "torch": torch,
        **vars(attention_kernels),
        **vars(softmax),
        **vars(update_kernels),
    }
    exec(text[text.index("def device(") : text.index(RUNTIME)], names)
    found: Callable[..., dict[str, Any]] = names["device"]
    return found


ORDERS = ["".join(order) for order in itertools.permutations("bshm")]


def check(
    logits: str, out: str, mask: str, orders: tuple[str, str, str] = ("bshk", "bmhk", "bmhk")
) -> None:
    device = block(logits, out, mask, orders)
    tensors = {n: torch.tensor(a) for n, a in arrays().items()}
    params = {n: t for n, t in tensors.items() if n != "x"}
    inputs = {"x": tensors["x"], "seen": torch.tensor(allowed()).permute(2, 0, 1)}
    with torch.inference_mode():
        outputs = device(0, {}, inputs, params, {"step": torch.tensor(0)})
    wanted, loss = gradients(mask)
    (found,) = outputs.values()
    assert abs(float(found) / loss - 1) < 1e-12
    for name, gradient in wanted.items():
        update = arrays()[name] - params[name].numpy()
        error = float(np.max(np.abs(update - gradient)) / np.max(np.abs(gradient)))
        assert error < 1e-9, f"{name} with {logits}, {out}, {orders}, {mask} is off by {error:.1e}"


MASKS = ("", "triangle", "given")


@pytest.mark.parametrize("logits", ORDERS)
def test_a_step_subtracts_the_gradient(logits: str) -> None:
    """For orders of the result in turns, all of them with `MESHDSL_CASES`; some with a mask."""
    for number, out in enumerate(itertools.permutations("bshk")):
        turn = number + ORDERS.index(logits)
        if turn % 6 == 0 or "MESHDSL_CASES" in os.environ:
            check(logits, "".join(out), MASKS[turn // 6 % 3])


@pytest.mark.parametrize("operand", range(3))
def test_an_operand_may_have_any_order(operand: int) -> None:
    """Each operand in its 24 orders beside others in some; in all with `MESHDSL_CASES`."""
    rng = np.random.default_rng(operand)
    every = [["".join(p) for p in itertools.permutations(n)] for n in ("bshk", "bmhk", "bmhk")]
    more = 10 if "MESHDSL_CASES" in os.environ else 1
    for turn, order in enumerate(every[operand] * more):
        q, k, v = (
            order if i == operand else str(rng.choice(orders)) for i, orders in enumerate(every)
        )
        out = "".join(rng.permutation(list("bshk")))
        check(str(rng.choice(ORDERS)), out, MASKS[turn % 3], (q, k, v))


@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
def test_the_gradients_of_other_devices(kind: str) -> None:
    """They come from autograd, in a program that runs in inference mode: not only on this one."""
    shape, scale, causal = (2, 3, 4, 5), 0.4, kind == "causal"
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    with torch.inference_mode():
        q, k, v, do = (draw(shape) for _ in range(4))
        drawn = (draw(2, 1, 4, 4) > -0.5) | torch.eye(4, dtype=torch.bool)
        mask = drawn if kind == "masked" else None
        scores = attention_kernels._scores(q, k, mask, causal, scale)
        lse = torch.logsumexp(scores, -1)
        o = torch.exp(scores - lse[..., None]) @ v
        expected = attention_kernels._written_out(do, q, k, v, o, lse, scores, scale)
        found = attention_kernels._by_autograd(do, q, k, v, mask, causal, scale)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        do, q, k, v, o, lse = (x.to("meta") for x in (do, q, k, v, o, lse))
        there = mask if mask is None else mask.to("meta")
        made = attention_kernels.attention_grad(do, q, k, v, o, lse, there, causal, scale)
    assert [(g.shape, g.device.type) for g in made] == [(q.shape, "meta")] * 3


@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
def test_a_block_beside_a_cpu_is_written_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both results, and gradients where another block has as much: as the kernels have them."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(4))
    q, k, v, do = (draw(2, 3, 4, 5, dtype=torch.float64) for _ in range(4))
    mask = torch.eye(4, dtype=torch.bool) | (draw(4, 4) > 0) if kind == "masked" else None
    options: dict[str, Any] = {"mask": mask, "causal": kind == "causal", "scale": 0.4}
    there = q.to("meta"), k.to("meta"), v.to("meta")
    shapes = attention_kernels.attention_block(*there, **{**options, "mask": None})
    o, lse = attention_kernels.attention_block(q, k, v, **options)
    assert [s.shape for s in shapes] == [o.shape, lse.shape]
    all_of_them = do, q, k, v, o / 2, lse + math.log(2)
    wanted = o, lse, *attention_kernels.attention_block_grad(*all_of_them, **options)

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    q = q.as_subclass(Elsewhere)
    monkeypatch.setattr(attention_kernels, "_scores", _scores_here)
    found = attention_kernels.attention_block(q, k, v, **options)
    grads = attention_kernels.attention_block_grad(do, q, *all_of_them[2:], **options)
    for one, other in zip((*found, *grads), wanted, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other, rtol=1e-9, atol=1e-9)


def _scores_here(q: Any, k: Any, mask: Any, causal: bool, scale: float) -> Any:
    scores = (q.as_subclass(torch.Tensor) @ k.mT) * scale
    mask = torch.ones(4, 4, dtype=torch.bool).tril() if causal else mask
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
