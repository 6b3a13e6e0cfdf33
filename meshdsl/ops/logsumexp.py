"""logsumexp[d](x) = log of the sum of exponentials over any dims, without overflow."""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, normalise, reduce


def _numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    """An infinite maximum is not subtracted: inf - inf would be NaN."""
    over = kit.axes(call.ins[0], call.attrs["dims"])
    top = x.max(over, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    return np.asarray((top + np.log(np.exp(x - top).sum(over, keepdims=True))).squeeze(over))


def _text(call: kit.TorchCall) -> str:
    over = kit.one_or_tuple(kit.axes(call.ins[0], call.attrs["dims"]))
    return f"torch.logsumexp({normalise.wide(call)}, {over}){normalise.narrow(call)}"


def _gradient(call: kit.Backward) -> kit.Grads:
    """The cotangent times the softmax, computed from the result without another reduction."""
    share = call.emit("exp", call.emit("sub", call.operand(0), call.result()))
    return {0: kit.product(call, call.grad, share)}


normalise.composite(
    "logsumexp",
    (1, 1),
    kit.dropped("logsumexp", "float"),
    _numpy,
    _text,
    reduce.samples_over("float"),
    gradient=_gradient,
    reduces=True,
    meaning="The logarithm of the sum of e^x over the dims, computed without overflow.",
)
