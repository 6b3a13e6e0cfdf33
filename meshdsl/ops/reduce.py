"""Reductions `sum[d](x)` and the like.

A mean divides by the global size, so that partial means of a split dim add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import einsum_text, kit, zeros

# --- constructors ----------------------------------------------------------------------------


def reduction(
    name: str,
    op: kit.ReduceOp,
    numpy: Callable[[kit.NumpyCall, kit.Array], kit.Array],
    torch: Callable[[kit.TorchCall, list[int]], str],
    *,
    meaning: str,
    accept: str = "number",
    linear: bool = False,
    exact: bool = True,
    true_rows: Mapping[str, str] | None = None,
    gradient: kit.Gradient | None = None,
    precision: Literal["widest", "f32"] = "widest",
    averages: bool = False,
    zero: kit.ZeroRule | None = None,
) -> kit.OpDef:
    """Register a reduction over `dims`; a part of a reduced dim yields a partial `op`.

    `torch` gets the positions of the reduced dims.
    """

    def factors(sig: kit.Signature) -> kit.Factors:
        gone = [d.name for d in sig.ins[0].dims if not sig.outs[0].has(d.name)]
        reduced = tuple(kit.loop(sig, n, op) for n in gone)
        return kit.Factors((*kit.loops(sig), *reduced), (frozenset({0}),) if linear else ())

    return kit.operator(
        name,
        kit.Surface("dims?", (1, 1)),
        kit.dropped(name, accept),
        factors,
        numpy,
        lambda call: torch(call, list(kit.axes(call.ins[0], call.attrs["dims"]))),
        samples_over(accept),
        exact=exact,
        flops=lambda sig: sig.ins[0].elements,
        true_rows=true_rows or {},
        gradient=gradient,
        precision=precision,
        averages=averages,
        zeros=zero,
        meaning=meaning,
    )


def samples_over(accept: str) -> kit.SampleList:
    """Samples of a reduction: over one dim, over two that lie in another order, over all dims."""
    dtype = kit.BOOL if accept == "bool" else kit.F32
    over = kit.samples(*(f"s b h | dims=({dims})" for dims in ("s", "h s", "s b h")), dtype=dtype)
    integers = kit.samples("h s: i32 | dims=(s)", "h s: i32 | dims=(h s)")
    return kit.SampleList(lambda: (*over, *integers)) if accept == "number" else over


def _over(function: Callable[..., Any]) -> Callable[[kit.NumpyCall, kit.Array], kit.Array]:
    def run(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
        return np.asarray(
            function(x, axis=kit.axes(call.ins[0], call.attrs["dims"])), dtype=x.dtype
        )

    return run


def _extreme(which: str) -> Callable[[kit.NumpyCall, kit.Array], kit.Array]:
    """The `max` or `min`; of no elements the least, or the most, of the dtype."""
    sign = 1 if which == "max" else -1

    def run(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
        over = kit.axes(call.ins[0], call.attrs["dims"])
        if x.dtype.kind == "f":
            none: float | int = -sign * np.inf
        else:
            none = np.iinfo(x.dtype).min if sign > 0 else np.iinfo(x.dtype).max
        return np.asarray(getattr(np, which)(x, axis=over, initial=none), dtype=x.dtype)

    return run


# --- sums ------------------------------------------------------------------------------------


def _sum_text(call: kit.TorchCall, positions: list[int]) -> str:
    is_i32 = call.ins[0].dtype == kit.I32
    return einsum_text.sum_text(call.tensor(0), positions, len(call.ins[0].dims), is_i32)


def _mean_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    count = math.prod(d.size for d in call.attrs["dims"])
    return np.asarray(x.sum(axis=kit.axes(call.ins[0], call.attrs["dims"])) / count, dtype=x.dtype)


def _mean_text(call: kit.TorchCall, positions: list[int]) -> str:
    dims = call.attrs["dims"]
    if any(call.is_split(d.name) for d in dims):
        return _mean_part_text(call, positions, math.prod(d.size for d in dims))
    over = "" if len(positions) == len(call.ins[0].dims) else kit.one_or_tuple(positions)
    return f"{call.tensor(0)}.mean({over})"


def _mean_part_text(call: kit.TorchCall, positions: list[int], count: int) -> str:
    """The part of a mean over a split dim, summed in f32 where two bytes may overflow."""
    dtype = call.ins[0].dtype
    if dtype.kind == "float" and dtype.bytes < kit.F32.bytes:
        over = "" if len(positions) == len(call.ins[0].dims) else f"{kit.one_or_tuple(positions)}, "
        total = f"{call.tensor(0)}.sum({over}dtype=torch.float32)"
        return f"({total} / {count}).to({dtype.torch})"
    return f"{_sum_text(call, positions)} / {count}"


def _mean_gradient(call: kit.Backward) -> kit.Grads:
    count = math.prod(d.size for d in call.attrs["dims"])
    return {0: call.emit("div", call.grad, float(count))}


reduction(
    "sum",
    "sum",
    _over(lambda x, axis: np.sum(x, axis=axis)),
    _sum_text,
    linear=True,
    gradient=kit.passed,
    precision="f32",
    zero=zeros.summed_product,
    meaning="The sum over the dims in brackets, or over all of them.",
)
reduction(
    "mean", "sum", _mean_numpy, _mean_text, accept="float", linear=True, exact=False,
    gradient=_mean_gradient, precision="f32", averages=True,
    meaning="The mean over the dims in brackets, or over all of them.",
)  # fmt: skip

# --- maxima, products, quantifiers -----------------------------------------------------------

_OUTER = "`monotone` stands for both extremes, and only one of them passes here"


def _method(whole: str, over: str) -> Callable[[kit.TorchCall, list[int]], str]:
    """`x.whole()` where every dim goes, else `x.over(positions)`.

    Torch has no extreme of nothing: where a device may have none, that is the least (or most) of
    the dtype.
    """

    def write(call: kit.TorchCall, positions: list[int]) -> str:
        extreme = over in ("amax", "amin")
        if extreme and any(call.may_be_empty(d.name) for d in call.attrs["dims"]):
            function = call.use("extreme")
            return f'{function}({call.tensor(0)}, {kit.tuple_text(positions)}, "{whole}")'
        if len(positions) == len(call.ins[0].dims):
            return f"{call.tensor(0)}.{whole}()"
        return f"{call.tensor(0)}.{over}({kit.one_or_tuple(positions)})"

    return write


def _prod_text(call: kit.TorchCall, positions: list[int]) -> str:
    """One dim at a time, since torch reduces only one; the last first, so positions stay valid."""
    dtype = "dtype=torch.int32" if call.ins[0].dtype == kit.I32 else ""
    if len(positions) == len(call.ins[0].dims):
        return f"{call.tensor(0)}.prod({dtype})"
    tail = f", {dtype}" if dtype else ""
    return call.tensor(0) + "".join(f".prod({i}{tail})" for i in reversed(positions))


def _extreme_gradient(call: kit.Backward) -> kit.Grads:
    """The cotangent in equal shares to the elements that attain the extreme; NaN to all if NaN.

    As `torch.amax`.
    """
    attains = call.emit("eq", call.operand(0), call.result())
    ones = call.emit("cast", attains, dtype=call.ins[0].dtype)
    count = call.emit("sum", ones, dims=call.attrs["dims"])
    return {0: call.emit("mul", ones, call.emit("div", call.grad, count))}


def _prod_gradient(call: kit.Backward) -> kit.Grads:
    """The product of the others: the zeros are counted, and left out of the product."""
    x, dims = call.operand(0), call.attrs["dims"]
    dtype = x.type.dtype
    is_zero = call.emit("eq", x, 0.0)
    safe = call.emit("where", is_zero, kit.number(call, 1.0, dtype), x)
    zeros = call.emit("cast", is_zero, dtype=dtype)
    no_other = call.emit("eq", zeros, call.emit("sum", zeros, dims=dims))
    scaled = call.emit("mul", call.grad, call.emit("prod", safe, dims=dims))
    others = call.emit("div", scaled, safe)
    return {0: call.emit("where", no_other, others, kit.zero_like(call, others))}


reduction(
    "max", "max", _extreme("max"), _method("max", "amax"),
    true_rows=kit.rows_with_reason(_OUTER, "P(max) -> P(max)"), gradient=_extreme_gradient,
    meaning="The largest element along the dims in brackets, or of all.",
)  # fmt: skip
reduction(
    "min", "min", _extreme("min"), _method("min", "amin"),
    true_rows=kit.rows_with_reason(_OUTER, "P(min) -> P(min)"), gradient=_extreme_gradient,
    meaning="The smallest element along the dims in brackets, or of all.",
)  # fmt: skip
reduction(
    "prod", "prod",
    _over(lambda x, axis: np.prod(x, axis=axis)), _prod_text, exact=False, gradient=_prod_gradient,
    precision="f32",
    meaning="The product along the dims in brackets, or of all elements.",
)  # fmt: skip
reduction(
    "any", "max", _over(lambda x, axis: np.any(x, axis=axis)), _method("any", "any"), accept="bool",
    true_rows=kit.rows_with_reason(_OUTER, "P(max) -> P(max)"),
    meaning="Whether any element along the dims in brackets, or at all, is true.",
)  # fmt: skip
reduction(
    "all", "min", _over(lambda x, axis: np.all(x, axis=axis)), _method("all", "all"), accept="bool",
    true_rows=kit.rows_with_reason(_OUTER, "P(min) -> P(min)"),
    meaning="Whether every element along the dims in brackets, or at all, is true.",
)  # fmt: skip

# --- sums of squares -------------------------------------------------------------------------


def _squares(name: str, meaning: str, elsewhere: Mapping[str, kit.Spelling], *, mean: bool) -> None:
    """Register the sum of the squares of all elements, or their mean; `named/simplify.py` has it.

    A program says `sum(square(x))`: the squares are never stored. A device may add up those of
    several tensors (`device/grouped_norms.py`).
    """

    def count(call: kit.NumpyCall | kit.TorchCall | kit.Backward) -> int:
        return math.prod(d.size for d in call.attrs["dims"]) if mean else 1

    def numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
        total = np.square(x).sum(kit.axes(call.ins[0], call.attrs["dims"])) / count(call)
        return np.asarray(total, dtype=x.dtype)

    def text(call: kit.TorchCall) -> str:
        if call.is_list:
            return f"{call.use('squared_norms')}({call.listed(0, call.ins[0].dims)})"
        if call.outs[0].dims:  # of several batches side by side
            positions = kit.axes(call.ins[0], call.attrs["dims"])
            total = f"{call.tensor(0)}.square().sum({positions})"
        else:
            total = f"{call.use('squared_norm')}({call.tensor(0)})"
        return f"{total} / {count(call)}" if mean else total

    def factors(sig: kit.Signature) -> kit.Factors:
        return kit.Factors(tuple(kit.loop(sig, d.name, "sum") for d in sig.ins[0].dims))

    def gradient(call: kit.Backward) -> kit.Grads:
        slope = call.emit("mul", call.grad, 2.0 / count(call))
        return {0: call.emit("mul", call.operand(0), slope)}

    kit.operator(
        name,
        kit.Surface("view", (1, 1)),
        kit.dropped(name, "float"),
        factors,
        numpy,
        text,
        kit.samples("s b h | dims=(s b h)", "h s: f64 | dims=(h s)", "s b h | dims=(s h)"),
        exact=not mean,
        flops=lambda sig: sum(2 * type_.elements for type_ in sig.ins),
        gradient=gradient,
        precision="f32",
        averages=mean,
        adds_up=not mean,
        spelled=elsewhere,
        meaning=meaning,
        words=f"the {'mean' if mean else 'sum'} of squares",
    )


_squares(
    "squared_norm",
    "The sum of the squares of all elements.",
    {
        "dtensor": kit.Spelling(becomes=True),
        "jax": kit.Spelling(
            "jax.lax.reduce_sum(jnp.square({x}), {positions}, {where})", becomes=True
        ),
        "oneflow": kit.Spelling("flow.sum(flow.square({x}), {dims})", becomes=True),
    },
    mean=False,
)
_squares(
    "mean_square",
    "The mean of the squares of all elements.",
    {
        "dtensor": kit.Spelling(becomes=True),
        "jax": kit.Spelling("jnp.mean(jnp.square({x}), {dims})"),
        "oneflow": kit.Spelling("flow.sum(flow.square({x}), {dims}) / {count}", becomes=True),
    },
    mean=True,
)
