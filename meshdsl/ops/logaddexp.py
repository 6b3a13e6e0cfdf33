"""logaddexp(a, b) = log(e^a + e^b), without overflow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.named.ir import Value
from meshdsl.ops.gradients import contracted
from meshdsl.ops.opdef import Backward, Spelling, TorchCall
from meshdsl.ops.pointwise import pointwise


def _torch(call: TorchCall, texts: list[str]) -> str:
    """The torch text; `torch.logaddexp` takes tensors only."""
    found = [call.tensor(i) if call.is_constant(i) else text for i, text in enumerate(texts)]
    return f"torch.logaddexp({', '.join(found)})"


def _gradient(call: Backward) -> Mapping[int, Value]:
    """The share of each operand in the sum of exponentials: the sigmoid of the difference."""
    grads = {}
    for index in (0, 1):
        if call.wanted(index):
            larger = call.emit("sub", call.operand(index), call.operand(1 - index))
            grads[index] = contracted(call, index, call.grad, call.emit("sigmoid", larger))
    return grads


pointwise(
    "logaddexp",
    2,
    np.logaddexp,
    _torch,
    accept="float",
    exact=False,
    monotone=[0, 1],  # it never falls in either
    precision="f32",
    gradient=_gradient,
    spelled={"dtensor": Spelling(extremes=True), "jax": Spelling("jnp.logaddexp({0}, {1})")},
    meaning="log(e^x + e^y), element by element, without overflow.",
)
