"""`top_k[n -> k](x)` and `sort[n](x)`: elements in order, and the indices they come from.

Both are stable: of equal elements the first comes first, so that no layout changes the answer
(`torch.topk` promises no order). NaN is greater than any number, as in numpy, torch and `argmax`.
Where the own dim of `top_k` is split, every device ranks its own elements, and only the best of
each are exchanged (`named/expand.py`); `sort` needs it whole.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, views

# --- top_k -----------------------------------------------------------------------------------


def _top_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    if len(attrs["source"]) != 1 or len(attrs["target"]) != 1:
        message, help = "`top_k` takes one dim to another", "write `top_k[experts -> slots](x)`"
        raise kit.OpError("MD0252", message, help)
    (source,), (target,) = attrs["source"], attrs["target"]
    kit.need_dims("top_k", ins[0], (source,))
    kit.need_kind("top_k", "number", ins[0])
    if target.size > source.size:
        raise kit.OpError(
            "MD0235",
            f"`top_k` of {target.size} (`{target}`) among {source.size} elements (`{source}`)",
            None,
            kit.ResizeDim(target.name, source.size),
            also=f"`{target}` has {source.size} elements at most",
        )
    values = views.replaced("top_k", ins[0], source, (target,))
    return values, kit.TensorType(values.dims, kit.I32)


def _top_numpy(call: kit.NumpyCall, x: kit.Array) -> tuple[kit.Array, kit.Array]:
    """From the back, so that the last of equals in ascending order is the first there is."""
    axis, n = call.ins[0].index(call.attrs["source"][0].name), call.attrs["target"][0].size
    order = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    index = x.shape[axis] - 1 - np.flip(order, axis).take(range(min(n, x.shape[axis])), axis)
    return np.take_along_axis(x, index, axis), index.astype(np.int32)


def _top_torch(call: kit.TorchCall) -> str:
    axis, target = call.ins[0].index(call.attrs["source"][0].name), call.attrs["target"][0]
    return f"{call.use('top_k')}({call.tensor(0)}, {axis}, {target.size})"


def _top_gradient(call: kit.Backward) -> kit.Grads:
    """The cotangent of each value at the place that it comes from."""
    (source,), (target,) = call.attrs["source"], call.attrs["target"]
    return {0: _put_back(call, kit.with_dims(call, target), call.result(1), source)}


def _put_back(call: kit.Backward, grad: kit.Value, index: kit.Value, dim: kit.Dim) -> kit.Value:
    """`grad`, which may lack dims, added up at indices of `dim`, which have all of them.

    Places in the order that are a dim of the same name get another.
    """
    grad = call.full(grad, index.type.dims)
    if index.type.has(dim.name):
        places = kit.Dim(f"{dim.name}.places", dim.size)  # a user's name cannot contain a dot
        pairs = ((dim, places),)
        grad, index = (call.emit("rename", v, pairs=pairs) for v in (grad, index))
    return call.emit("scatter_add", grad, index, dim=dim, dims=call.ins[0].dims)


kit.operator(
    "top_k",
    kit.Surface("arrow", (1, 1)),
    _top_infer,
    lambda sig: kit.Factors(kit.loops(sig, without=(sig.attrs["target"][0].name,))),
    _top_numpy,
    _top_torch,
    kit.samples(
        "b h | source=(h) target=(top=2)",
        "s | source=(s) target=(top=4)",
        "b s h | source=(s) target=(top=2)",
        "h b | source=(h) target=(h)",
        "h b: i32 | source=(h) target=(top=4)",
        "b h: i64 | source=(h) target=(top=2)",
    ),
    flops=lambda sig: sig.ins[0].elements,
    gradient=_top_gradient,
    scratch=lambda sig, numbers: 2 * kit.I64.bytes * sig.ins[0].elements,  # keys, and bits before
    meaning="The greatest elements of a dim, as many as the new dim has, the greatest first, "
    "and their indices as i32; of equals, the first.",
)

# --- sort ------------------------------------------------------------------------------------


def _sort_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_dims("sort", ins[0], (attrs["dim"],))
    kit.need_kind("sort", "number", ins[0])
    return ins[0], kit.TensorType(ins[0].dims, kit.I32)


def _sort_numpy(call: kit.NumpyCall, x: kit.Array) -> tuple[kit.Array, kit.Array]:
    axis = kit.axis(call)
    index = np.argsort(x, axis=axis, kind="stable")
    return np.take_along_axis(x, index, axis), index.astype(np.int32)


def _sort_gradient(call: kit.Backward) -> kit.Grads:
    """As of `top_k`, of which this is the case that the dim is whole."""
    grad = kit.full_grad(call)
    return {0: _put_back(call, grad, call.result(1), call.attrs["dim"])}


kit.operator(
    "sort",
    kit.Surface("dim", (1, 1)),
    _sort_infer,
    kit.plain(whole=True),
    _sort_numpy,
    lambda call: f"{call.use('sort_along')}({call.tensor(0)}, {kit.axis(call)})",
    kit.samples("b h | dim=h", "s | dim=s", "b s h | dim=s", "h b: i32 | dim=h"),
    flops=lambda sig: sig.ins[0].elements,
    gradient=_sort_gradient,
    scratch=lambda sig, numbers: kit.I64.bytes * sig.ins[0].elements,
    meaning="The elements along a dim from the least on, NaN last, and their indices as i32; "
    "of equals, the first comes first.",
)
