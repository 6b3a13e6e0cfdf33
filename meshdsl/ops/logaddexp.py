"""logaddexp(a, b) = log(e^a + e^b), without overflow."""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit


def _torch(call: kit.TorchCall, texts: list[str]) -> str:
    """The torch text; `torch.logaddexp` takes tensors only."""
    tensors = [call.tensor(i) if call.is_constant(i) else text for i, text in enumerate(texts)]
    return f"torch.logaddexp({', '.join(tensors)})"


def _share(call: kit.Backward, index: int) -> kit.Value:
    """The share of an operand in the sum of exponentials: the sigmoid of the difference."""
    return call.emit("sigmoid", call.emit("sub", call.operand(index), call.operand(1 - index)))


kit.pointwise(
    "logaddexp",
    2,
    lambda x, y: np.logaddexp(x, y),
    _torch,
    accept="float",
    exact=False,
    monotone=[0, 1],  # it never falls in either
    precision="f32",
    gradient=kit.shared(_share),
    spelled={
        "dtensor": kit.Spelling(extremes=True),
        "jax": kit.Spelling("jnp.logaddexp({0}, {1})"),
    },
    meaning="log(e^x + e^y), element by element, without overflow.",
)
