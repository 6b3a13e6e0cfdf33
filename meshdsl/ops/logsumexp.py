"""logsumexp[d](x) = log of the sum of exponentials over any dims, without overflow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.named.ir import Value
from meshdsl.ops.gradients import product
from meshdsl.ops.normalise import composite, narrow, wide
from meshdsl.ops.opdef import Backward, NumpyCall, TorchCall
from meshdsl.ops.reduce import dropped, samples_over
from meshdsl.ops.requirements import Array, axes
from meshdsl.ops.torch_expressions import one_or_tuple


def _numpy(call: NumpyCall, x: Array) -> Array:
    """An infinite maximum is not subtracted: inf - inf would be NaN."""
    over = axes(call.ins[0], call.attrs["dims"])
    top = x.max(over, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    return np.asarray((top + np.log(np.exp(x - top).sum(over, keepdims=True))).squeeze(over))


def _text(call: TorchCall) -> str:
    over = one_or_tuple(axes(call.ins[0], call.attrs["dims"]))
    return f"torch.logsumexp({wide(call)}, {over}){narrow(call)}"


def _gradient(call: Backward) -> Mapping[int, Value]:
    """The cotangent times the softmax, computed from the result without another reduction."""
    share = call.emit("exp", call.emit("sub", call.operand(0), call.result()))
    return {0: product(call, call.grad, share)}


composite(
    "logsumexp",
    (1, 1),
    dropped("logsumexp", "float"),
    _numpy,
    _text,
    samples_over("float"),
    gradient=_gradient,
    reduces=True,
    meaning="The logarithm of the sum of e^x over the dims, computed without overflow.",
)
