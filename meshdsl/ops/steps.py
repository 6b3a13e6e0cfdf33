"""The number of a training step, and the learning rate that a schedule has for it.

They are at the end of a training step (`named/optimizer_updates.py` emits them) and cannot be
called. The counter stays on the host, and the learning rate is a number of Python: no device is
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.learning_rates import cosine_rate, linear_rate, warmup_rate
from meshdsl.ops import kit

RATES: Mapping[str, Callable[..., float]] = {
    "constant": warmup_rate,
    "linear": linear_rate,
    "cosine": cosine_rate,
}
"""The function of each shape of a schedule; it takes the step and the attributes."""


def _options(attrs: kit.Attrs) -> kit.Attrs:
    """The arguments of the function of a schedule."""
    return {name: value for name, value in attrs.items() if name not in ("shape", "dtype")}


def _rate_factors(sig: kit.Signature) -> kit.Factors:
    """A learning rate that only rises passes the greatest of partial values on."""
    return kit.plain(monotone=[0] if sig.attrs["shape"] == "constant" else [])(sig)


def _rate_numpy(call: kit.NumpyCall, step: kit.Array) -> kit.Array:
    rate = RATES[call.attrs["shape"]](step, **_options(call.attrs))
    return np.asarray(rate, kit.numpy_dtype(call.outs[0].dtype))


def _rate_number(call: kit.TorchCall) -> str:
    """`cosine_rate(step, peak=0.003, steps=1000, warmup=50, final=0.0)`."""
    function = call.use(RATES[call.attrs["shape"]].__name__)
    options = (f"{name}={value!r}" for name, value in _options(call.attrs).items())
    return f"{function}({', '.join([call.tensor(0), *options])})"


kit.operator(
    "step_update",
    kit.Surface("view", (1, 1)),
    lambda ins, attrs: ins,
    kit.plain(monotone=[0]),
    lambda call, step: np.asarray(step + 1, step.dtype),
    lambda call: f"{call.tensor(0)}.add_(1)",
    kit.samples("(): i32", values="int"),
    overwrites=(0,),
    each=1,
    meaning="The number of a training step: the number of those before it, and one.",
)
kit.operator(
    "learning_rate",
    kit.Surface("view", (1, 1)),
    lambda ins, attrs: (kit.TensorType((), attrs["dtype"]),),
    _rate_factors,
    _rate_numpy,
    lambda call: kit.scalar(_rate_number(call), call.outs[0].dtype),
    kit.samples(
        "(): i32 | shape='constant' peak=0.5 warmup=4 dtype=f32",
        "(): i32 | shape='linear' peak=0.5 steps=9 warmup=2 final=0.25 dtype=f32",
        "(): i32 | shape='cosine' peak=0.5 steps=9 warmup=2 final=0.25 dtype=f32",
        values="int",
    ),
    exact=False,
    number=_rate_number,
    meaning="The learning rate of a training step, by its number from 1.",
)
