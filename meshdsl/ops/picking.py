"""Picking and slicing, `x[seq = 0]` and `x[seq = 0:128 -> prefix]`; `unpick` puts back."""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, moving, views, zeros

# --- pick ------------------------------------------------------------------------------------


def _pick_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dim, index = attrs["dim"], attrs["index"]
    kit.need_dims("pick", ins[0], (dim,))
    if not 0 <= index < dim.size:
        raise kit.OpError(
            "MD0210",
            f"index {index} is out of range for dim `{dim}` of size {dim.size}",
            None,
            kit.SetOption("index", str(0 if index < 0 else dim.size - 1)),
            also=f"indices of `{dim}` run from 0 to {dim.size - 1}",
        )
    return (ins[0].without(dim.name),)


def _pick_gradient(call: kit.Backward) -> kit.Grads:
    dim = call.attrs["dim"]
    before = call.ins[0].dims[: call.ins[0].index(dim.name)]
    at = sum(call.grad.type.has(d.name) for d in before)
    return {0: call.emit("unpick", call.grad, dim=dim, index=call.attrs["index"], at=at)}


views.view(
    "pick",
    _pick_infer,
    kit.plain(linear=[(0,)], monotone=[0]),
    lambda call, x: np.asarray(np.take(x, call.attrs["index"], axis=kit.axis(call))),
    lambda call: kit.indexed(call.tensor(0), kit.axis(call), call.attrs["index"]),
    kit.samples(
        "s | dim=s index=1",
        "b s h | dim=s index=0",
        "b h: i32 | dim=h index=5",
        "h b: bool | dim=h index=2",
    ),
    _pick_gradient,
    meaning="The part of a tensor at one index of a dim.",
)

# --- unpick: the gradient of a pick ------------------------------------------------------------


def _unpick_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """`dim` at position `at`, zero but at `index`."""
    at, dims = attrs["at"], ins[0].dims
    widened = (*dims[:at], attrs["dim"], *dims[at:])
    kit.need_distinct("unpick", widened)
    return (kit.TensorType(widened, ins[0].dtype),)


def _unpick_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    dim, at = call.attrs["dim"].name, call.attrs["at"]
    is_picked = np.arange(call.extent(dim)) + call.offset(dim) == call.attrs["index"]
    is_picked = is_picked.reshape(-1, *(1,) * (x.ndim - at))
    return np.where(is_picked, np.expand_dims(x, at), np.zeros((), x.dtype))


def _unpick_text(call: kit.TorchCall) -> str:
    dim, at, index = (call.attrs[k] for k in ("dim", "at", "index"))
    x = f"{call.tensor(0)}.unsqueeze({at})"
    tail = len(call.ins[0].dims) - at
    if not call.is_split(dim.name):
        return kit.padded_at(x, at + tail + 1, at, index, dim.size - index - 1)
    is_picked = f"({kit.range_text(call, dim.name, 'torch.int64')} == {index})"
    widened = f"{is_picked}[{', '.join([':', *['None'] * tail])}]" if tail else is_picked
    return f"torch.where({widened}, {x}, 0)"


def _unpick_gradient(call: kit.Backward) -> kit.Grads:
    dim = call.attrs["dim"]
    if not call.grad.type.has(dim.name):
        return {0: call.grad}
    return {0: call.emit("pick", call.grad, dim=dim, index=call.attrs["index"])}


kit.operator(
    "unpick",
    kit.Surface("view", (1, 1)),
    _unpick_infer,
    kit.plain(linear=[(0,)], monotone=[0]),
    _unpick_numpy,
    _unpick_text,
    kit.samples(
        "() | dim=s index=1 at=0",
        "b h | dim=s index=0 at=1",
        "b h | dim=s index=3 at=2",
        "h | dim=s index=2 at=0",
    ),
    flops=kit.no_flops,
    gradient=_unpick_gradient,
    ordered="dim",
    meaning="The gradient of `pick`: the cotangent at one index of a dim, zeros elsewhere.",
)

# --- stack: the gradient of the picks of all indices ---------------------------------------------


def _stack_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """`dim` at position `at`: at each index an operand."""
    assert len(set(ins)) == 1, f"stack of {ins}"
    return _unpick_infer(ins, attrs)


def _stack_factors(sig: kit.Signature) -> kit.Factors:
    every = range(len(sig.ins))
    without = [sig.attrs["dim"].name]
    return kit.Factors(kit.loops(sig, without=without), (frozenset(every),), tuple(every))


def _stack_text(call: kit.TorchCall) -> str:
    tensors = [call.tensor(i) for i in range(len(call.ins))]
    return f"torch.stack({kit.tuple_text(tensors)}, {call.attrs['at']})"


def _filling_text(call: kit.TorchCall, whole: str) -> str:
    return f"{_stack_text(call).removesuffix(')')}, out={whole})"


def _stack_gradient(call: kit.Backward) -> kit.Grads:
    dim, every = call.attrs["dim"], range(len(call.ins))
    if not call.grad.type.has(dim.name):
        return {i: call.grad for i in every if call.wanted(i)}
    return {i: call.emit("pick", call.grad, dim=dim, index=i) for i in every if call.wanted(i)}


kit.operator(
    "stack",
    kit.Surface("view", (1, None)),
    _stack_infer,
    _stack_factors,
    lambda call, *arrays: np.stack(arrays, call.attrs["at"]),
    _stack_text,
    kit.samples(
        "b h; b h; b h | dim=parts=3 at=1",
        "(); () | dim=parts=2 at=0",
    ),
    flops=kit.no_flops,
    true_rows=kit.rows_with_reason(
        "several partial operands come from as many reductions; one is enough",
        *moving.joint_extremes(3),
    ),
    gradient=_stack_gradient,
    fills=_filling_text,
    meaning="The gradient of `pick`s of every index: the cotangents, one at each index of a dim.",
)

# --- slice -----------------------------------------------------------------------------------


def _slice_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dim, start, stop, target = (attrs[k] for k in ("dim", "start", "stop", "target"))
    kit.need_dims("slice", ins[0], (dim,))
    if not 0 <= start < stop <= dim.size:
        raise kit.OpError(
            "MD0210",
            f"the slice {start}:{stop} does not lie in dim `{dim}` of size {dim.size}",
            f"a slice holds at least one element, and 0 <= start < stop <= {dim.size}",
        )
    views.need_size(f"the slice {start}:{stop}", stop - start, target)
    return (views.replaced("slice", ins[0], dim, (target,)),)


def _slice_factors(sig: kit.Signature) -> kit.Factors:
    dim, start, target = (sig.attrs[k] for k in ("dim", "start", "target"))
    return kit.moving(sig, target, [dim], kit.Reads(lo=start, hi=start))


def _slice_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    at = kit.axis(call)
    if call.is_split(call.attrs["target"].name):
        return x  # a window: the range itself
    return x[(*(slice(None),) * at, slice(call.attrs["start"], call.attrs["stop"]))]


def _slice_text(call: kit.TorchCall) -> str:
    if call.is_split(call.attrs["target"].name):
        return call.tensor(0)
    at = kit.axis(call)
    return kit.indexed(call.tensor(0), at, f"{call.attrs['start'] or ''}:{call.attrs['stop']}")


def _slice_gradient(call: kit.Backward) -> kit.Grads:
    dim, start, target = (call.attrs[k] for k in ("dim", "start", "target"))
    after = dim.size - start - target.size
    attrs = {"source": (target,), "target": (dim,), "before": start, "after": after, "value": 0}
    return {0: call.emit("pad", kit.with_dims(call, target), **attrs)}


views.view(
    "slice",
    _slice_infer,
    _slice_factors,
    _slice_numpy,
    _slice_text,
    kit.samples(
        "s | dim=s start=1 stop=3 target=part=2",
        "b h s | dim=h start=0 stop=2 target=part=2",
        "h s: i32 | dim=s start=2 stop=4 target=part=2",
    ),
    _slice_gradient,
    zero=zeros.renamed(lambda sig: {sig.attrs["dim"].name: sig.attrs["target"].name}),
    meaning="A range of indices of a dim, under a new name.",
)
