"""`cumsum[d](x)`: the sums of all elements of d up to each one, or from each one on.

`exclusive=1` leaves the element itself out: 0 stands first. Nothing is subtracted for it, which
would round, and be NaN from the first infinity on.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    for name in ("exclusive", "reverse"):
        if attrs[name] not in (0, 1):
            message = f"`{name}` of `cumsum` is 0 or 1, not {attrs[name]}"
            help, way = f"write `{name}=1`, or leave it out", kit.SetOption(name, "1")
            raise kit.OpError("MD0213", message, help, way, also="or leave it out")
    return kit.same_type("cumsum", "number")(ins, attrs)


def _numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    axis = kit.axis(call)
    x = np.flip(x, axis) if call.attrs["reverse"] else x
    if call.attrs["exclusive"]:
        zero = np.zeros_like(x.take([0], axis))
        x = np.concatenate([zero, x], axis).take(range(x.shape[axis]), axis)
    sums = np.cumsum(x, axis=axis, dtype=x.dtype)
    return np.flip(sums, axis) if call.attrs["reverse"] else sums


def _torch(call: kit.TorchCall) -> str:
    at, attrs = kit.axis(call), call.attrs
    x = call.tensor(0)
    if attrs["exclusive"]:
        by = -1 if attrs["reverse"] else 1
        x = kit.padded_at(x, len(call.ins[0].dims), at, by, -by)
    dtype = ", dtype=torch.int32" if call.ins[0].dtype == kit.I32 else ""
    if attrs["reverse"]:
        return f"{x}.flip({at}).cumsum({at}{dtype}).flip({at})"
    return f"{x}.cumsum({at}{dtype})"


def _gradient(call: kit.Backward) -> kit.Grads:
    """An element is in the sums behind it, so its gradient is summed from the other end."""
    attrs = {**call.attrs, "reverse": 1 - call.attrs["reverse"]}
    return {0: call.emit("cumsum", kit.with_dims(call, attrs["dim"]), **attrs)}


kit.operator(
    "cumsum",
    kit.Surface("dim", (1, 1), (("exclusive", 0), ("reverse", 0))),
    _infer,
    kit.plain(linear=[(0,)], whole=True),
    _numpy,
    _torch,
    kit.samples(
        "s | dim=s exclusive=0 reverse=0",
        "b s h | dim=s exclusive=0 reverse=0",
        "h s: i32 | dim=h exclusive=0 reverse=0",
        "b s h | dim=s exclusive=1 reverse=0",
        "b h | dim=h exclusive=0 reverse=1",
        "h s: i32 | dim=h exclusive=1 reverse=1",
    ),
    gradient=_gradient,
    precision="f32",
    meaning="The running sum along a dim: element i is the sum of elements 0 to i; with "
    "`exclusive=1` it is not of i itself, and `reverse=1` sums from the end.",
)
