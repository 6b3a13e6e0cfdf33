"""`linear_recurrence[t](a, b, h0)`: h[i] = a[i] * h[i-1] + b[i], the scan of linear state spaces.

Such steps are associative: (a1, b1) and then (a2, b2) is one step (a2*a1, a2*b1 + b2). So it is a
scan of logarithmic depth (Blelloch 1990), and a dim that is split sends one state at each step of a
tree over the blocks (`named/expand.py`). Nothing is divided: an `a` of 0 is as good as others.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit

_SERIAL = 16  # of backends/runtime/recurrence.py: so many steps are done one by one


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dim, said = attrs["dim"], "linear_recurrence"
    if attrs["reverse"] not in (0, 1):
        message = f"`reverse` of `{said}` must be 0 or 1, not {attrs['reverse']}"
        help, way = "write `reverse=1`, or leave it out", kit.SetOption("reverse", "1")
        raise kit.OpError("MD0213", message, help, way, also="or leave it out")
    kit.need_kind(said, "float", *ins)
    dtype = kit.need_one_dtype(said, *ins)
    a, b, *initial = ins
    kit.need_dims(said, kit.TensorType(kit.merged_dims(said, b, a), dtype), (dim,))
    if initial and initial[0].has(dim.name):
        message = (
            f"the initial state of `{said}` cannot have `{dim}`, along which it runs, and is "
            f"{initial[0]}"
        )
        raise kit.OpError("MD0214", message, f"give one state: `h0[{dim} = 0]`")
    return (kit.TensorType(kit.merged_dims(said, b, a, *initial), dtype),)


def _factors(sig: kit.Signature) -> kit.Factors:
    """Linear in `b` and the initial state together; the steps need their dim whole."""
    loops = kit.loops(sig, without=(sig.attrs["dim"].name,))
    return kit.Factors(loops, (frozenset(range(1, len(sig.ins))),))


def _numpy(call: kit.NumpyCall, *arrays: kit.Array) -> kit.Array:
    dims = call.outs[0].dims
    a, b, *initial = (kit.align(x, t, dims) for x, t in zip(arrays, call.ins, strict=True))
    shape = np.broadcast_shapes(a.shape, b.shape, *(x.shape for x in initial))
    at = call.outs[0].index(call.attrs["dim"].name)
    a, b = (np.moveaxis(np.broadcast_to(x, shape), at, 0) for x in (a, b))
    h = np.moveaxis(initial[0], at, 0)[0] if initial else np.zeros((), b.dtype)
    states = np.empty(b.shape, b.dtype)
    steps = range(len(b))
    for t in reversed(steps) if call.attrs["reverse"] else steps:
        h = states[t] = a[t] * h + b[t]
    return np.moveaxis(states, 0, at)


def _torch(call: kit.TorchCall) -> str:
    dims = call.outs[0].dims
    names = tuple(d.name for d in dims)

    def text(index: int) -> str:
        return kit.aligned(call.tensor(index), call.ins[index].names, names, full=True)

    at = call.outs[0].index(call.attrs["dim"].name)
    args = [text(0), kit.expanded(call, 1, dims), str(at)]
    args += [text(2)] if len(call.ins) > 2 else []
    args += ["reverse=True"] if call.attrs["reverse"] else []
    return f"{call.use('linear_recurrence')}({', '.join(args)})"


def _gradient(call: kit.Backward) -> kit.Grads:
    """The gradient by h is a recurrence from the other end, with the `a` of the next element.

    That by `a` is its product with the state before, by the initial state that of the first step.
    """
    dim, reverse = call.attrs["dim"], call.attrs["reverse"]
    by = -1 if reverse else 1
    a = later = call.operand(0)
    if a.type.has(dim.name):
        later = call.emit("shift", a, dim=dim, by=-by)
    lacking = (
        [] if len(call.ins) < 3 else [d for d in call.outs[0].dims if not call.ins[2].has(d.name)]
    )
    grad = kit.with_dims(call, dim, *(lacking if call.wanted(2) else ()))
    back = call.emit("linear_recurrence", later, grad, dim=dim, reverse=1 - reverse)
    grads = {}
    if call.wanted(0):
        grads[0] = kit.contracted(call, 0, back, _before(call, by))
    if call.wanted(1):
        grads[1] = call.sized(back, 1)
    if call.wanted(2):
        one = kit.number(call, 1.0, a.type.dtype)
        first = call.emit("unpick", one, dim=dim, index=0 if by > 0 else dim.size - 1, at=0)
        grads[2] = kit.contracted(call, 2, first, a, back)
    return grads


def _before(call: kit.Backward, by: int) -> kit.Value:
    """The state before each step."""
    dim = call.attrs["dim"]
    before = call.emit("shift", call.result(), dim=dim, by=by)
    if len(call.ins) < 3:
        return before
    place = call.emit("iota", dim=dim)
    is_first = call.emit("eq", place, 0 if by > 0 else dim.size - 1)
    return call.emit("where", is_first, call.operand(2), before)


def _scratch(sig: kit.Signature, numbers: object) -> int:
    """The pairs at each depth; f32 of all operands and the result where they are narrower."""
    del numbers
    (out,), dim = sig.outs, sig.attrs["dim"]
    left = size = out.size(dim.name)
    pairs = 0
    while left > _SERIAL:
        left //= 2
        pairs += left
    width = max(out.dtype.bytes, kit.F32.bytes)
    of_a = sig.ins[0].without(*[dim.name] if sig.ins[0].has(dim.name) else []).elements
    of_b = out.without(dim.name).elements
    scratch = pairs * (of_a + of_b)
    if out.dtype.bytes < width:
        scratch += sum(t.elements for t in sig.ins if t is not sig.ins[1]) + 2 * size * of_b
    return width * scratch


kit.operator(
    "linear_recurrence",
    kit.Surface("dim", (2, 3), (("reverse", 0),)),
    _infer,
    _factors,
    _numpy,
    _torch,
    kit.samples(
        "s; s | dim=s reverse=0",
        "b s h; b s h | dim=s reverse=0",
        "s b; h s b | dim=s reverse=1",
        "b s; s h b; h b | dim=s reverse=0",
        "h; b s; b | dim=s reverse=1",
        "s; b; () | dim=s reverse=0",
    ),
    exact=False,
    flops=lambda sig: 2 * sig.outs[0].elements,
    gradient=_gradient,
    scratch=_scratch,
    precision="f32",
    meaning="The states of a linear recurrence along a dim: h[i] = a[i] * h[i-1] + b[i], "
    "element by element, from 0 or an initial state on; with `reverse=1`, from the end.",
)
