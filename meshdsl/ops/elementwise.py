"""Pointwise operators: broadcasting by name, the result's dims in order of first appearance."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from meshdsl.ir.types import BF16, BOOL, DTYPES, F32, F64, I32, I64, DType, TensorType
from meshdsl.ops.arithmetic_gradients import (
    add_gradient,
    cast_gradient,
    cos_gradient,
    div_gradient,
    extreme_gradient,
    log_gradient,
    mul_gradient,
    neg_gradient,
    pow_gradient,
    rsqrt_gradient,
    sqrt_gradient,
    square_gradient,
    sub_gradient,
    where_gradient,
)
from meshdsl.ops.gradients import factor_of, passed
from meshdsl.ops.opdef import (
    Attrs,
    Factors,
    Gradient,
    NumpyCall,
    OpDef,
    OpError,
    Sample,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.pointwise import (
    numpy_pointwise,
    pointwise,
    pointwise_samples,
    torch_pointwise,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    Array,
    loops,
    merged_dims,
    need_kind,
    need_one_dtype,
    no_flops,
    plain,
    sample,
    swapped,
    tensor,
)

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
    return swapped(_FALLS, *rows)


def _rising(why: str, *rows: str) -> dict[str, str]:
    """Rows of a rising function with `{}` for the op, one for maxima and one for minima."""
    return swapped(why, *(row.format(op, op) for row in rows for op in ("max", "min")))


def _divide_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    del attrs
    if all(t.dtype.kind == "int" for t in ins):
        raise OpError(
            "MD0203",
            f"`/` of integers ({ins[0]} and {ins[1]}) is not defined",
            "`//` rounds down; or convert both with `cast(x, f32)`",
        )
    need_kind("/", "float", *ins)
    dtype = need_one_dtype("/", *ins)
    return (TensorType(merged_dims("/", *ins), dtype),)


def _power_text(call: TorchCall, texts: list[str]) -> str:
    del call
    # `-2.0 ** x` is -(2.0 ** x) in Python.
    base = f"({texts[0]})" if texts[0].startswith("-") else texts[0]
    return f"{base} ** {texts[1]}"


def _extreme(function: str, bound: str) -> Callable[[TorchCall, list[str]], str]:
    def write(call: TorchCall, texts: list[str]) -> str:
        for literal, other in ((1, 0), (0, 1)):
            if call.is_constant(literal):
                return f"{call.tensor(other)}.clamp({bound}={call.args[literal]})"
        return f"{function}({texts[0]}, {texts[1]})"

    return write


pointwise(
    "add", 2, np.add, "{0} + {1}", infix="+", linear=[(0, 1)], gradient=add_gradient,
    true_rows=_rising(_ENDS, "P({}), B -> P({})", "B, P({}) -> P({})"),
    in_place=["{0}.add_({1})", "{1}.add_({0})"], fold=operator.add, lazy=True,
    meaning="The sum of two tensors, element by element.",
)  # fmt: skip
pointwise(
    "sub", 2, np.subtract, "{0} - {1}", infix="-", linear=[(0, 1)], gradient=sub_gradient,
    true_rows=_falling("B, P(max) -> P(min)", "B, P(min) -> P(max)")
    | _rising(_ENDS, "P({}), B -> P({})"),
    in_place=["{0}.sub_({1})"], fold=operator.sub,
    meaning="The first tensor less the second, element by element.",
)  # fmt: skip
pointwise(
    "mul", 2, np.multiply, "{0} * {1}", infix="*", linear=[(0,), (1,)], gradient=mul_gradient,
    in_place=["{0}.mul_({1})", "{1}.mul_({0})"], fold=operator.mul,
    meaning="The product of two tensors, element by element.",
)  # fmt: skip
register(
    OpDef(
        "div",
        Surface("none", (2, 2)),
        _divide_infer,
        plain(linear=[(0,)]),
        numpy_pointwise(np.divide),
        torch_pointwise("{0} / {1}"),
        pointwise_samples(2, "float", "int"),
        exact=False,
        gradient=div_gradient,
        in_place={0: torch_pointwise("{0}.div_({1})")},
        infix="/",
        fold=operator.truediv,
        meaning="The first tensor over the second, element by element; of floats only.",
    )
)
pointwise(
    "pow", 2, np.power, _power_text, infix="^", accept="float", exact=False,
    values=("positive", "int"), gradient=pow_gradient, fold=_power, precision="f32",
    meaning="The first tensor to the power of the second, element by element.",
)  # fmt: skip
pointwise(
    "maximum", 2, np.maximum, _extreme("torch.maximum", "min"), monotone=[0, 1],
    true_rows=swapped(_BOTH, "P(max), P(max) -> P(max)"), gradient=extreme_gradient("lt", "le"),
    fold=max,
    meaning="The larger of two elements.",
)  # fmt: skip
pointwise(
    "minimum", 2, np.minimum, _extreme("torch.minimum", "max"), monotone=[0, 1],
    true_rows=swapped(_BOTH, "P(min), P(min) -> P(min)"), gradient=extreme_gradient("gt", "ge"),
    fold=min,
    meaning="The smaller of two elements.",
)  # fmt: skip

# --- comparisons and logic -------------------------------------------------------------------


def _compare(
    name: str, sign: str, numpy: Any, accept: str, rises: int | None, *, meaning: str
) -> None:
    """Register a comparison, rising in operand `rises` and falling in the other (None: neither)."""
    rows = {0: ("B, P({}) -> P({})"), 1: ("P({}), B -> P({})")}
    true: Mapping[str, str] = {}
    if rises in rows:
        falls = [rows[rises].format(*p) for p in (("max", "min"), ("min", "max"))]
        true = _falling(*falls) | _rising(_NOT_NAN, rows[1 - rises])
    pointwise(
        name, 2, numpy, f"{{0}} {sign} {{1}}", infix=sign, accept=accept, result=BOOL,
        true_rows=true, meaning=meaning,
    )  # fmt: skip


_compare("eq", "==", np.equal, "any", None, meaning="Whether two elements are equal.")
_compare("ne", "!=", np.not_equal, "any", None, meaning="Whether two elements differ.")
_compare(
    "lt", "<", np.less, "number", 1, meaning="Whether the first element is less than the second."
)
_compare(
    "le",
    "<=",
    np.less_equal,
    "number",
    1,
    meaning="Whether the first element is at most the second.",
)
_compare(
    "gt",
    ">",
    np.greater,
    "number",
    0,
    meaning="Whether the first element is greater than the second.",
)
_compare(
    "ge",
    ">=",
    np.greater_equal,
    "number",
    0,
    meaning="Whether the first element is at least the second.",
)
pointwise(
    "logical_and", 2, np.logical_and, "{0} & {1}", infix="and", accept="bool", monotone=[0, 1],
    true_rows=swapped(_BOTH, "P(min), P(min) -> P(min)"),
    meaning="Whether both elements are true.",
)  # fmt: skip
pointwise(
    "logical_or", 2, np.logical_or, "{0} | {1}", infix="or", accept="bool", monotone=[0, 1],
    true_rows=swapped(_BOTH, "P(max), P(max) -> P(max)"),
    meaning="Whether at least one of two elements is true.",
)  # fmt: skip
pointwise(
    "logical_not", 1, np.logical_not, "~{0}", said="not", accept="bool",
    true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"),
    meaning="Whether the element is false.",
)  # fmt: skip

# --- functions of one operand ----------------------------------------------------------------


def _smooth(
    name: str,
    numpy: Any,
    torch: str,
    gradient: Gradient,
    *,
    meaning: str,
    rises: bool = True,
    values: str = "int",
    fold: Callable[[float], float] | None = None,
    precision: Literal["widest", "f32"] = "widest",
) -> None:
    """A function of floats that rounds; `rises`: it never falls, if it is defined everywhere."""
    true = _rising(_NEGATIVE, "P({}) -> P({})") if rises and values == "positive" else {}
    pointwise(
        name, 1, numpy, torch, accept="float", exact=False, values=values,
        monotone=[0] if rises and not true else [], gradient=gradient, true_rows=true,
        in_place=[torch.replace("(", "_(")], fold=fold, precision=precision,
        meaning=meaning,
    )  # fmt: skip


pointwise(
    "neg", 1, np.negative, "-{0}", said="-", linear=[(0,)],
    true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"), gradient=neg_gradient,
    fold=operator.neg,
    meaning="The element with the other sign.",
)  # fmt: skip
pointwise(
    "abs", 1, np.abs, "torch.abs({0})",
    gradient=factor_of(lambda call: call.emit("sign", call.operand(0))), fold=abs,
    meaning="The element without its sign.",
)  # fmt: skip
pointwise(
    "sign", 1, lambda x: np.where(x != x, 0, np.sign(x)), "torch.sign({0})",
    true_rows=_rising(_NOT_NAN, "P({}) -> P({})"),
    meaning="-1, 0 or 1, as the element is negative, zero or positive; 0 for NaN.",
)  # fmt: skip
pointwise(
    "square", 1, np.square, "torch.square({0})", gradient=square_gradient,
    in_place=["torch.square_({0})"], fold=lambda x: x * x, precision="f32",
    meaning="x * x, element by element.",
)  # fmt: skip
pointwise(
    "floor",
    1,
    np.floor,
    "torch.floor({0})",
    accept="float",
    monotone=[0],
    values="half",
    fold=math.floor,
    meaning="The largest integer that is not above the element, as a float.",
)
_smooth(
    "exp",
    np.exp,
    "torch.exp({0})",
    factor_of(lambda call: call.result()),
    fold=math.exp,
    precision="f32",
    meaning="e to the power of each element.",
)
_smooth(
    "log",
    np.log,
    "torch.log({0})",
    log_gradient,
    values="positive",
    fold=math.log,
    precision="f32",
    meaning="The natural logarithm of each element.",
)
_smooth(
    "sqrt",
    np.sqrt,
    "torch.sqrt({0})",
    sqrt_gradient,
    values="positive",
    fold=math.sqrt,
    meaning="The square root of each element.",
)
_smooth(
    "sin",
    np.sin,
    "torch.sin({0})",
    factor_of(lambda call: call.emit("cos", call.operand(0))),
    rises=False,
    meaning="The sine of each element, in radians.",
)
_smooth(
    "cos",
    np.cos,
    "torch.cos({0})",
    cos_gradient,
    rises=False,
    meaning="The cosine of each element, in radians.",
)
pointwise(
    "rsqrt", 1, lambda x: 1 / np.sqrt(x), "torch.rsqrt({0})", accept="float", exact=False,
    values="positive", true_rows=_falling("P(max) -> P(min)", "P(min) -> P(max)"),
    gradient=rsqrt_gradient, fold=lambda x: 1 / math.sqrt(x), precision="f32",
    meaning="1 / sqrt(x), element by element.",
)  # fmt: skip
pointwise(
    "stop_gradient", 1, np.asarray, "{0}.detach()", accept="any", linear=[(0,)], monotone=[0],
    view=True, lazy=True,
    meaning="The tensor itself, through which no gradient flows.",
)  # fmt: skip
pointwise(
    "identity", 1, np.asarray, "{0}", accept="any", linear=[(0,)], monotone=[0], view=True,
    lazy=True, gradient=passed,
    meaning="The tensor itself.",
)  # fmt: skip

# --- where -----------------------------------------------------------------------------------


def _where_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    del attrs
    need_kind("where", "bool", ins[0])
    dtype = need_one_dtype("where", *ins[1:])
    # The values come first, so that a mask with few dims does not transpose the memory layout.
    return (TensorType(merged_dims("where", *ins[1:], ins[0]), dtype),)


def _where_torch(call: TorchCall) -> str:
    dims = call.outs[0].dims
    texts = [call.aligned(i, dims) for i in range(3)]
    texts[0] = call.tensor(0) if call.is_constant(0) else texts[0]
    if call.is_constant(1) and call.is_constant(2):
        texts[1] = call.tensor(1)  # two literals would get torch's default dtype
    return f"torch.where({', '.join(texts)})"


def _where_fits(index: int, ins: tuple[TensorType, ...], numbers: frozenset[int]) -> bool:
    """Values are written into where the others are a number, and the condition is none."""
    del ins
    return 3 - index in numbers and 0 not in numbers


def _where_first(call: TorchCall) -> str:
    """Write into the values where the condition is true."""
    mask = call.aligned(0, call.outs[0].dims)
    return f"{call.args[1]}.masked_fill_(~{mask}, {call.args[2]})"


def _where_second(call: TorchCall) -> str:
    """Write into the values where the condition is false."""
    mask = call.aligned(0, call.outs[0].dims)
    return f"{call.args[2]}.masked_fill_({mask}, {call.args[1]})"


def _where_samples() -> tuple[Sample, ...]:
    shapes = (
        ((BATCH, HIDDEN), (BATCH, HIDDEN), (HIDDEN, BATCH)),
        ((SEQ,), (BATCH, SEQ, HIDDEN), (HIDDEN,)),
        ((SEQ, BATCH), (), (BATCH,)),
        ((), (), ()),
    )
    kinds = ("bool", "int", "int")
    return tuple(
        sample(tensor(*c, dtype=BOOL), tensor(*x), tensor(*y), values=kinds) for c, x, y in shapes
    )


register(
    OpDef(
        "where",
        Surface("none", (3, 3)),
        _where_infer,
        plain(linear=[(1, 2)], monotone=[1, 2]),
        numpy_pointwise(np.where),
        _where_torch,
        _where_samples(),
        true_rows=swapped(_BOTH, "B, P(max), P(max) -> P(max)", "B, P(min), P(min) -> P(min)"),
        gradient=where_gradient,
        in_place={1: _where_first, 2: _where_second},
        fits_in=_where_fits,
        meaning="The element of x where the condition c is true, else that of y.",
    )
)

# --- cast ------------------------------------------------------------------------------------


def _cast_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    if attrs.get("dtype") not in DTYPES.values():
        raise OpError(
            "MD0213", "`cast` needs a dtype", f"write `cast(x, f32)`; there are {', '.join(DTYPES)}"
        )
    if attrs["dtype"] == BOOL and ins[0].dtype != BOOL:
        raise OpError("MD0202", f"`cast` of {ins[0]} to bool is not defined", "compare: `x != 0`")
    return (TensorType(ins[0].dims, attrs["dtype"]),)


def _is_widening(old: DType, new: DType) -> bool:
    """Whether a sum of `old` values is the same after the cast; integers wrap before it."""
    if old.kind != "float":
        return old == new and old.kind == "int"
    return old.kind == new.kind and new.bytes >= old.bytes and {old, new} != _HALVES


def _keeps_order(old: DType, new: DType) -> bool:
    """Whether the cast is monotone: it never reverses the order of two values."""
    return new.kind != "int" or (old.kind != "float" and new.bytes >= old.bytes)


_HALVES = {DTYPES["bf16"], DTYPES["f16"]}


def _cast_factors(sig: Signature) -> Factors:
    types = sig.ins[0].dtype, sig.outs[0].dtype
    linear = (frozenset({0}),) if _is_widening(*types) else ()
    return Factors(loops(sig), linear, (0,) if _keeps_order(*types) else ())


def _cast_numpy(call: NumpyCall, x: Array) -> Array:
    old, new = call.ins[0].dtype, call.outs[0].dtype
    if old.kind == new.kind == "float":
        return x  # the numpy engine computes all floats in the dtype it was given
    return x.astype(np.float64 if new.kind == "float" else new.numpy)


def _cast_torch(call: TorchCall) -> str:
    return f"{call.tensor(0)}.to({call.outs[0].dtype.torch})"


register(
    OpDef(
        "cast",
        Surface("none", (1, 1), (("dtype", None),)),
        _cast_infer,
        _cast_factors,
        _cast_numpy,
        _cast_torch,
        (
            sample(tensor(BATCH, HIDDEN), dtype=F64),
            sample(tensor(SEQ, BATCH, HIDDEN), values="half", dtype=I32),
            sample(tensor(BATCH, HIDDEN, dtype=I32), dtype=F32),
            sample(tensor(BATCH, dtype=I32), dtype=I64),
            sample(tensor(BATCH, HIDDEN), dtype=BF16),
            sample(tensor(HIDDEN, SEQ, dtype=BOOL), values="bool", dtype=F32),
            sample(tensor(dtype=I64), dtype=F64),
        ),
        view=True,
        shows=lambda ins, attrs: ins[0].dtype == attrs["dtype"],  # to another dtype it copies
        flops=no_flops,
        true_rows={"P -> P": "to a narrower dtype it rounds, and integers wrap before it"}
        | _rising("so in range; integers wrap, and what is no number has none", "P({}) -> P({})"),
        gradient=cast_gradient,
        meaning="The tensor in another dtype.",
    )
)
