"""Pointwise operators: broadcasting by name, the result's dims in order of first appearance."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import arithmetic_gradients as grads
from meshdsl.ops import kit, zeros

# --- arithmetic ------------------------------------------------------------------------------

_FALLS = "a falling function turns a partial maximum into a minimum; a row keeps one op"
_NOT_NAN = "so for numbers; of a NaN in one part, the others must not make a number"
_NEGATIVE = "so where it is defined; a negative part yields NaN, and a maximum may be positive"
_ENDS = "so inside the range; integers wrap at its end, and infinities of both signs make NaN"
_BOTH = "two partial operands at once come from two different reductions; one is enough"


def _power(base: int | float, exponent: int | float) -> int | float:
    """A power; one of integers that has more digits than any float is never computed."""
    bits = max(abs(base), 1).bit_length() if isinstance(base, int) else 1
    if isinstance(exponent, int) and bits * abs(exponent) > 2048 and abs(base) > 1:
        return float(base) ** exponent
    return base**exponent


def _falling(*rows: str) -> dict[str, str]:
    return kit.rows_with_reason(_FALLS, *rows)


def _rising(why: str, *rows: str) -> dict[str, str]:
    """Rows of a rising function with `{}` for the op, one for maxima and one for minima."""
    return kit.rows_with_reason(why, *(row.format(op, op) for row in rows for op in ("max", "min")))


def _no_integers(*ins: kit.TensorType) -> None:
    """MD0203 for a quotient of integers."""
    if all(t.dtype.kind == "int" for t in ins):
        raise kit.OpError(
            "MD0203",
            f"`/` of integers ({ins[0]} and {ins[1]}) is not defined",
            "`//` rounds down; or convert both with `cast(x, f32)`",
            kit.CastAll("f32"),
            also="`//` rounds down",
        )


def _power_text(call: kit.TorchCall, texts: list[str]) -> str:
    del call
    # `-2.0 ** x` is -(2.0 ** x) in Python.
    base = f"({texts[0]})" if texts[0].startswith("-") else texts[0]
    return f"{base} ** {texts[1]}"


def _extreme(function: str, bound: str) -> Callable[[kit.TorchCall, list[str]], str]:
    def write(call: kit.TorchCall, texts: list[str]) -> str:
        for literal, other in ((1, 0), (0, 1)):
            if call.is_constant(literal):
                return f"{call.tensor(other)}.clamp({bound}={call.args[literal]})"
        return f"{function}({texts[0]}, {texts[1]})"

    return write


kit.pointwise(
    "add", 2, lambda x, y: np.add(x, y), "{0} + {1}", infix="+", linear=[(0, 1)],
    gradient=grads.add_gradient,
    zeros=zeros.union, keeps_zero=True,
    true_rows=_rising(_ENDS, "P({}), B -> P({})", "B, P({}) -> P({})"),
    in_place=["{0}.add_({1})", "{1}.add_({0})"], fold=operator.add, lazy=True,
    meaning="The sum of two tensors, element by element.",
)  # fmt: skip
kit.pointwise(
    "sub", 2, lambda x, y: np.subtract(x, y), "{0} - {1}", infix="-", linear=[(0, 1)],
    gradient=grads.sub_gradient,
    zeros=zeros.union, keeps_zero=True,
    true_rows=_falling("B, P(max) -> P(min)", "B, P(min) -> P(max)")
    | _rising(_ENDS, "P({}), B -> P({})"),
    in_place=["{0}.sub_({1})"], fold=operator.sub,
    meaning="The first tensor less the second, element by element.",
)  # fmt: skip
kit.pointwise(
    "mul", 2, lambda x, y: np.multiply(x, y), "{0} * {1}", infix="*", linear=[(0,), (1,)],
    gradient=grads.mul_gradient,
    in_place=["{0}.mul_({1})", "{1}.mul_({0})"], fold=operator.mul, zeros=zeros.passes(0, 1),
    meaning="The product of two tensors, element by element.",
)  # fmt: skip
kit.pointwise(
    "div", 2, lambda x, y: np.divide(x, y), "{0} / {1}", infix="/", accept="float",
    check=_no_integers, exact=False,
    linear=[(0,)], gradient=grads.div_gradient, in_place=["{0}.div_({1})"], fold=operator.truediv,
    scratch=lambda sig, numbers: sig.outs[0].bytes if 0 in numbers else 0,  # reciprocals
    zeros=zeros.passes(0),
    meaning="The first tensor over the second, element by element; of floats only.",
)  # fmt: skip
kit.pointwise(
    "pow", 2, lambda x, y: np.power(x, y), _power_text, infix="^", accept="float", exact=False,
    values="positive int", gradient=grads.pow_gradient, fold=_power, precision="f32",
    meaning="The first tensor to the power of the second, element by element.",
)  # fmt: skip
kit.pointwise(
    "maximum", 2, lambda x, y: np.maximum(x, y), _extreme("torch.maximum", "min"), monotone=[0, 1],
    true_rows=kit.rows_with_reason(_BOTH, "P(max), P(max) -> P(max)"),
    in_place=["{0}.clamp_(min={1})", "{1}.clamp_(min={0})"],
    gradient=grads.extreme_gradient("lt", "le"), fold=max,
    meaning="The larger of two elements.",
)  # fmt: skip
kit.pointwise(
    "minimum", 2, lambda x, y: np.minimum(x, y), _extreme("torch.minimum", "max"), monotone=[0, 1],
    true_rows=kit.rows_with_reason(_BOTH, "P(min), P(min) -> P(min)"),
    in_place=["{0}.clamp_(max={1})", "{1}.clamp_(max={0})"],
    gradient=grads.extreme_gradient("gt", "ge"), fold=min,
    meaning="The smaller of two elements.",
)  # fmt: skip

# --- comparisons and logic -------------------------------------------------------------------


def _compare(
    name: str,
    sign: str,
    numpy: str,
    accept: str,
    rises: int | None,
    meaning: str,
    zero: kit.ZeroRule | None = None,
) -> None:
    """Register a comparison that numpy calls `numpy`.

    It rises in operand `rises` and falls in the other (None: neither).
    """
    rows = {0: ("B, P({}) -> P({})"), 1: ("P({}), B -> P({})")}
    true: Mapping[str, str] = {}
    if rises in rows:
        falls = [rows[rises].format(*p) for p in (("max", "min"), ("min", "max"))]
        true = _falling(*falls) | _rising(_NOT_NAN, rows[1 - rises])
    kit.pointwise(
        name, 2, lambda x, y: getattr(np, numpy)(x, y), f"{{0}} {sign} {{1}}", infix=sign,
        accept=accept, result=kit.BOOL, true_rows=true, zeros=zero, meaning=f"Whether {meaning}.",
    )  # fmt: skip


_compare("eq", "==", "equal", "any", None, "two elements are equal", zeros.equality)
_compare("ne", "!=", "not_equal", "any", None, "two elements differ")
_compare("lt", "<", "less", "number", 1, "the first element is less than the second")
_compare(
    "le",
    "<=",
    "less_equal",
    "number",
    1,
    "the first element is at most the second",
)
_compare(
    "gt",
    ">",
    "greater",
    "number",
    0,
    "the first element is greater than the second",
    zeros.above,
)
_compare(
    "ge",
    ">=",
    "greater_equal",
    "number",
    0,
    "the first element is at least the second",
)
kit.pointwise(
    "logical_and", 2, lambda x, y: np.logical_and(x, y), "{0} & {1}", infix="and", accept="bool",
    monotone=[0, 1],
    zeros=zeros.passes(0, 1),
    true_rows=kit.rows_with_reason(_BOTH, "P(min), P(min) -> P(min)"),
    meaning="Whether both elements are true.",
)  # fmt: skip
kit.pointwise(
    "logical_or", 2, lambda x, y: np.logical_or(x, y), "{0} | {1}", infix="or", accept="bool",
    monotone=[0, 1],
    true_rows=kit.rows_with_reason(_BOTH, "P(max), P(max) -> P(max)"),
    meaning="Whether at least one of two elements is true.",
)  # fmt: skip
kit.pointwise(
    "logical_not", 1, lambda x: np.logical_not(x), "~{0}", said="not", accept="bool",
    true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"),
    meaning="Whether the element is false.",
)  # fmt: skip

# --- functions of one operand ----------------------------------------------------------------

_UNDEFINED = _rising(_NEGATIVE, "P({}) -> P({})")
kit.pointwise(
    "neg", 1, lambda x: np.negative(x), "-{0}", said="-", linear=[(0,)],
    true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"), gradient=grads.neg_gradient,
    in_place=["torch.neg_({0})"], fold=operator.neg,
    keeps_zero=True,
    meaning="The element with the other sign.",
)  # fmt: skip
kit.pointwise(
    "abs", 1, lambda x: np.abs(x), "torch.abs({0})",
    gradient=kit.factor_of(lambda call: call.emit("sign", call.operand(0))), fold=abs,
    keeps_zero=True,
    meaning="The element without its sign.",
)  # fmt: skip
kit.pointwise(
    "sign", 1, lambda x: np.where(x != x, 0, np.sign(x)), "torch.sign({0})",
    true_rows=_rising(_NOT_NAN, "P({}) -> P({})"),
    keeps_zero=True,
    meaning="-1, 0 or 1, as the element is negative, zero or positive; 0 for NaN.",
)  # fmt: skip
kit.pointwise(
    "square", 1, lambda x: np.square(x), "torch.square({0})", gradient=grads.square_gradient,
    in_place=["torch.square_({0})"], fold=lambda x: x * x, precision="f32",
    keeps_zero=True,
    meaning="x * x, element by element.",
)  # fmt: skip
kit.pointwise(
    "floor",
    1,
    lambda x: np.floor(x),
    "torch.floor({0})",
    accept="float",
    monotone=[0],
    values="half",
    fold=math.floor,
    keeps_zero=True,
    meaning="The largest integer that is not above the element, as a float.",
)
kit.smooth(
    "exp",
    lambda x: np.exp(x),
    "torch.exp({0})",
    kit.factor_of(lambda call: call.result()),
    fold=math.exp,
    precision="f32",
    meaning="e to the power of each element.",
)
kit.smooth(
    "log",
    lambda x: np.log(x),
    "torch.log({0})",
    grads.log_gradient,
    values="positive",
    rises=False,
    true_rows=_UNDEFINED,
    fold=math.log,
    precision="f32",
    meaning="The natural logarithm of each element.",
)
kit.smooth(
    "sqrt",
    lambda x: np.sqrt(x),
    "torch.sqrt({0})",
    grads.sqrt_gradient,
    values="positive",
    rises=False,
    true_rows=_UNDEFINED,
    fold=math.sqrt,
    keeps_zero=True,
    meaning="The square root of each element.",
)
kit.smooth(
    "sin",
    lambda x: np.sin(x),
    "torch.sin({0})",
    kit.factor_of(lambda call: call.emit("cos", call.operand(0))),
    rises=False,
    keeps_zero=True,
    meaning="The sine of each element, in radians.",
)
kit.smooth(
    "cos",
    lambda x: np.cos(x),
    "torch.cos({0})",
    grads.cos_gradient,
    rises=False,
    meaning="The cosine of each element, in radians.",
)
kit.pointwise(
    "rsqrt", 1, lambda x: 1 / np.sqrt(x), "torch.rsqrt({0})", accept="float", exact=False,
    values="positive", true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"),
    gradient=grads.rsqrt_gradient, fold=lambda x: 1 / math.sqrt(x), precision="f32",
    in_place=["torch.rsqrt_({0})"],
    meaning="1 / sqrt(x), element by element.",
)  # fmt: skip
kit.pointwise(
    "stop_gradient", 1, lambda x: np.asarray(x), "{0}.detach()", accept="any", linear=[(0,)],
    monotone=[0],
    view=True, lazy=True,
    keeps_zero=True,
    meaning="The tensor itself, through which no gradient flows.",
)  # fmt: skip
kit.pointwise(
    "identity", 1, lambda x: np.asarray(x), "{0}", accept="any", linear=[(0,)], monotone=[0],
    view=True,
    lazy=True, gradient=kit.passed,
    keeps_zero=True,
    meaning="The tensor itself.",
)  # fmt: skip

# --- where -----------------------------------------------------------------------------------


def _where_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    del attrs
    kit.need_kind("where", "bool", ins[0])
    dtype = kit.need_one_dtype("where", *ins[1:])
    # The values come first, so that a mask with few dims does not transpose the memory layout.
    return (kit.TensorType(kit.merged_dims("where", *ins[1:], ins[0]), dtype),)


def _where_numpy(mask: kit.Array, x: kit.Array, y: kit.Array) -> kit.Array:
    return np.where(mask, x, y)


def _where_torch(call: kit.TorchCall) -> str:
    dims = call.outs[0].dims
    texts = [call.aligned(i, dims) for i in range(3)]
    texts[0] = call.tensor(0) if call.is_constant(0) else texts[0]
    if call.is_constant(1) and call.is_constant(2):
        if [float(call.args[i]) for i in (1, 2)] == [1.0, 0.0] and not call.is_constant(0):
            return f"{texts[0]}.to({call.outs[0].dtype.torch})"
        texts[1] = call.tensor(1)  # two literals would get torch's default dtype
    return f"torch.where({', '.join(texts)})"


def _over(index: int) -> kit.InPlace:
    """Write into the values of operand `index` where the condition says the other."""

    def write(call: kit.TorchCall) -> str:
        mask = call.aligned(0, call.outs[0].dims)
        replaced = f"~{mask}" if index == 1 else mask
        return f"{call.args[index]}.masked_fill_({replaced}, {call.args[3 - index]})"

    return write


kit.operator(
    "where",
    kit.Surface("none", (3, 3)),
    _where_infer,
    kit.plain(linear=[(1, 2)], monotone=[1, 2]),
    kit.numpy_pointwise(_where_numpy),
    _where_torch,
    kit.samples("b h: bool; b h; h b", "s: bool; b s h; h", "s b: bool; (); b", "(): bool; (); ()"),
    true_rows=kit.rows_with_reason(
        _BOTH, "B, P(max), P(max) -> P(max)", "B, P(min), P(min) -> P(min)"
    ),
    gradient=grads.where_gradient,
    in_place={1: _over(1), 2: _over(2)},
    fits_in=lambda index, ins, numbers: (
        3 - index in numbers and 0 not in numbers
    ),  # beside a number,
    zeros=zeros.choice,
    meaning="The element of x where the condition c is true, else that of y.",
)

# --- cast ------------------------------------------------------------------------------------


def _cast_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    if attrs.get("dtype") not in kit.DTYPES.values():
        raise kit.OpError(
            "MD0213",
            "`cast` needs a dtype",
            f"write `cast(x, f32)`; there are {', '.join(kit.DTYPES)}",
        )
    if attrs["dtype"] == kit.BOOL and ins[0].dtype != kit.BOOL:
        raise kit.OpError(
            "MD0202", f"`cast` of {ins[0]} to bool is not defined", "compare: `x != 0`"
        )
    return (kit.TensorType(ins[0].dims, attrs["dtype"]),)


def _is_widening(old: kit.DType, new: kit.DType) -> bool:
    """Whether a sum of `old` values is the same after the cast; integers wrap before it."""
    if old.kind != "float":
        return old == new and old.kind == "int"
    return old.kind == new.kind and new.bytes >= old.bytes and {old, new} != _HALVES


def _keeps_order(old: kit.DType, new: kit.DType) -> bool:
    """Whether the cast is monotone: it never reverses the order of two values."""
    return new.kind != "int" or (old.kind != "float" and new.bytes >= old.bytes)


_HALVES = {kit.DTYPES["bf16"], kit.DTYPES["f16"]}


def _cast_factors(sig: kit.Signature) -> kit.Factors:
    types = sig.ins[0].dtype, sig.outs[0].dtype
    linear = (frozenset({0}),) if _is_widening(*types) else ()
    return kit.Factors(kit.loops(sig), linear, (0,) if _keeps_order(*types) else ())


def _cast_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    old, new = call.ins[0].dtype, call.outs[0].dtype
    if old.kind == new.kind == "float":
        return x  # the numpy engine computes all floats in the dtype it was given
    return x.astype(np.float64 if new.kind == "float" else new.numpy)


kit.operator(
    "cast",
    kit.Surface("none", (1, 1), (("dtype", None),)),
    _cast_infer,
    _cast_factors,
    _cast_numpy,
    lambda call: f"{call.tensor(0)}.to({call.outs[0].dtype.torch})",
    kit.samples(
        "b h | dtype=f64",
        "s b h: f32 half | dtype=i32",
        "b h: i32 | dtype=f32",
        "b: i32 | dtype=i64",
        "b h | dtype=bf16",
        "h s: bool | dtype=f32",
        "(): i64 | dtype=f64",
    ),
    view=True,
    converts=True,
    keeps_zeros=True,
    shows=lambda ins, attrs: ins[0].dtype == attrs["dtype"],  # to another dtype it copies
    flops=kit.no_flops,
    true_rows={"P -> P": "to a narrower dtype it rounds, and integers wrap before it"}
    | _rising("so in range; integers wrap, and what is no number has none", "P({}) -> P({})"),
    gradient=grads.cast_gradient,
    zeros=zeros.passes(0),
    meaning="The tensor in another dtype.",
)
