"""How OneFlow 0.9 writes each operator, on global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshdsl.backends.peers.call import PeerCall, Table, concat_parts, padded, shape_text
from meshdsl.ir.types import DType
from meshdsl.ops.einsum_text import letters_for
from meshdsl.ops.text import tuple_text

_DTYPES = {
    "f32": "flow.float32",
    "f64": "flow.float64",
    "bf16": "flow.bfloat16",
    "f16": "flow.float16",
    "i32": "flow.int32",
    "i64": "flow.int64",
    "bool": "flow.bool",
}


def dtype_text(dtype: DType) -> str:
    """`flow.float32`."""
    return _DTYPES[dtype.name]


def _tensor(call: PeerCall, index: int) -> str:
    """Operand `index`, a literal as a tensor."""
    if not call.constants[index]:
        return call.aligned(index)
    whole = call.where.partition("sbp=")[2].count("flow.sbp.")
    sbp = tuple_text(["flow.sbp.broadcast"] * whole)
    dtype = dtype_text(call.ins[index].dtype)
    return f"flow.tensor({call.args[index]}, dtype={dtype}, placement=placement, sbp={sbp})"


def _einsum(call: PeerCall) -> str:
    names = [t.names for t in call.ins]
    if len(names) == 2 and _is_product(names[0], names[1], call.out.names):
        return f"flow.matmul({', '.join(call.args)})"
    letters = letters_for(tuple(dict.fromkeys(n for ns in names for n in ns)))
    ins = ",".join("".join(letters[n] for n in ns) for ns in names)
    out = "".join(letters[n] for n in call.out.names)
    args = ", ".join(_tensor(call, i) if c else a for i, (a, c) in enumerate(_operands(call)))
    return f'flow.einsum("{ins}->{out}", {args})'


def _operands(call: PeerCall) -> Iterator[tuple[str, bool]]:
    return zip(call.args, call.constants, strict=True)


def _is_product(a: tuple[str, ...], b: tuple[str, ...], out: tuple[str, ...]) -> bool:
    """`[…, k] @ [k, n]`."""
    return len(a) > 1 and len(b) == 2 and a[-1] == b[0] and out == (*a[:-1], b[1]) and b[1] not in a


def _extreme(name: str, bound: str) -> Callable[[PeerCall], str]:
    def write(call: PeerCall) -> str:
        for literal, other in ((1, 0), (0, 1)):
            if call.constants[literal]:
                return f"flow.clamp({_tensor(call, other)}, {bound}={call.args[literal]})"
        return f"flow.{name}({call.aligned(0)}, {call.aligned(1)})"

    return write


def _power(call: PeerCall) -> str:
    return f"flow.pow({', '.join(call.aligned(i) for i in range(2))})"


def _where(call: PeerCall) -> str:
    return f"flow.where({', '.join(_tensor(call, i) for i in range(3))})"


def _gelu(call: PeerCall) -> str:
    if call.attrs["approximate"] == "tanh":
        return f'flow.nn.GELU(approximate="tanh")({call.args[0]})'
    return f"F.gelu({call.args[0]})"


def _cast(call: PeerCall) -> str:
    return f"{_tensor(call, 0)}.to({dtype_text(call.out.dtype)})"


# --- makers and indices ------------------------------------------------------------------------


def _iota(call: PeerCall) -> str:
    return f"flow.arange({call.out.shape[0]}, dtype=flow.int32, {call.where})"


def _filled(name: str) -> Callable[[PeerCall], str]:
    def write(call: PeerCall) -> str:
        return (
            f"flow.{name}({shape_text(call.out)}, dtype={dtype_text(call.out.dtype)}, {call.where})"
        )

    return write


def _gather(call: PeerCall) -> str:
    """Empty where table and indices share some dims, but not all of the indices'."""
    table, ids = call.ins
    at = call.axis
    if not any(table.has(n) for n in ids.names):
        if not ids.dims:
            return (
                f"flow.index_select({call.args[0]}, {at}, {call.args[1]}.reshape(1)).squeeze({at})"
            )
        if len(ids.dims) == 1:
            return f"flow.index_select({call.args[0]}, {at}, {call.args[1]})"
        picked = f"flow.index_select({call.args[0]}, {at}, {call.args[1]}.flatten())"
        return f"{picked}.reshape({shape_text(call.out)})"
    if set(ids.names) == set(table.names) - {call.attrs["dim"].name}:
        index = call.full(1, table.names)
        return f"flow.gather({call.args[0]}, {at}, {index}.to(flow.int64)).squeeze({at})"
    return ""


def _one_hot(call: PeerCall) -> str:
    size = call.attrs["dim"].size
    return f"F.one_hot({call.args[0]}, {size}).to({dtype_text(call.out.dtype)})"


def _cross_entropy(call: PeerCall) -> str:
    dim, out = call.attrs["dim"].name, call.out.names
    logits = call.permuted(call.args[0], call.ins[0].names, (*out, dim))
    index = call.aligned(1)
    suffix = ""
    if len(out) != 1:
        logits, index = f"{logits}.reshape(-1, {call.ins[0].size(dim)})", f"{index}.reshape(-1)"
        suffix = f".reshape({shape_text(call.out)})"
    return f'F.cross_entropy({logits}, {index}, reduction="none"){suffix}'


# --- reductions and what goes along a dim ------------------------------------------------------


def _sum(call: PeerCall) -> str:
    return f"flow.sum({call.args[0]}, dim={tuple_text(call.axes)})"


def _mean(call: PeerCall) -> str:
    count = 1
    for dim in call.attrs["dims"]:
        count *= dim.size
    return f"{_sum(call)} / {count}"


def _extremum(name: str) -> Callable[[PeerCall], str]:
    return lambda call: f"flow.{name}({call.args[0]}, dim={tuple_text(call.axes)})"


def _one_by_one(name: str) -> Callable[[PeerCall], str]:
    """One dim at a time, the last first, so that positions hold."""

    def write(call: PeerCall) -> str:
        text = call.args[0]
        for axis in reversed(call.axes):
            text = f"flow.{name}({text}, dim={axis})"
        return text

    return write


def _along(name: str) -> Callable[[PeerCall], str]:
    return lambda call: f"{name}({call.args[0]}, dim={call.axis})"


def _layer_norm(call: PeerCall) -> str:
    dim, names = call.attrs["dim"], call.ins[0].names
    last = (*(n for n in names if n != dim.name), dim.name)
    x = call.permuted(call.args[0], names, last)
    scales = "".join(f", {a}" for a in call.args[1:])
    return call.permuted(f"F.layer_norm({x}, ({dim.size},){scales}, eps=1e-05)", last, names)


def _rms_norm(call: PeerCall) -> str:
    scale = [call.aligned(1, call.ins[0].dims)] if len(call.ins) > 1 else []
    return f"rms_norm({', '.join([call.args[0], str(call.axis), *scale])})"


# --- views -------------------------------------------------------------------------------------


def _merge(call: PeerCall) -> str:
    names = [d.name for d in call.attrs["dims"]]
    first = next(i for i, n in enumerate(call.ins[0].names) if n in names)
    rest = [n for n in call.ins[0].names if n not in names]
    order = (*rest[:first], *names, *rest[first:])
    text = call.permuted(call.args[0], call.ins[0].names, order)
    return f"{text}.reshape({shape_text(call.out)})"


def _pick(call: PeerCall) -> str:
    return f"{call.args[0]}[{':, ' * call.axis}{call.attrs['index']}]"


def _slice(call: PeerCall) -> str:
    part = f"{call.attrs['start'] or ''}:{call.attrs['stop']}"
    return f"{call.args[0]}[{':, ' * call.axis}{part}]"


def _concat(call: PeerCall) -> str:
    parts, at = concat_parts(call)
    return f"flow.cat([{', '.join(parts)}], dim={at})"


def _pad(call: PeerCall) -> str:
    at, before, after = padded(call)
    widths = [0, 0] * (len(call.ins[0].dims) - 1 - at) + [before, after]
    return f"F.pad({call.args[0]}, {tuple_text(widths)}, value={call.attrs.get('value', 0)!r})"


# --- gradients -----------------------------------------------------------------------------------


def _softmax_grad(call: PeerCall) -> str:
    dy, y = call.args
    return f"{y} * ({dy} - flow.sum({dy} * {y}, dim={call.axis}, keepdim=True))"


def _log_softmax_grad(call: PeerCall) -> str:
    dy, y = call.args
    return f"{dy} - flow.exp({y}) * flow.sum({dy}, dim={call.axis}, keepdim=True)"


def _cumsum_grad(call: PeerCall) -> str:
    at = tuple_text([call.axis])
    return f"flow.flip(flow.cumsum(flow.flip({call.args[0]}, {at}), dim={call.axis}), {at})"


def _broadcast(call: PeerCall) -> str:
    wide = _tensor(call, 0) if call.constants[0] else call.full(0, call.out.names)
    return f"{wide}.expand({', '.join(map(str, call.out.shape))})"


REFUSED = frozenset(
    "gelu_grad layer_norm_grad rms_norm_grad cross_entropy_grad unpick scatter_add sgd_update "
    "momentum_update adam_update".split()
)
"""Operators of gradients and updates that are not written: OneFlow differentiates by itself."""

ONEFLOW: Table = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": _power,
    "maximum": _extreme("maximum", "min"),
    "minimum": _extreme("minimum", "max"),
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "flow.logical_and({0}, {1})",
    "logical_or": "flow.logical_or({0}, {1})",
    "logical_not": "flow.logical_not({0})",
    "neg": "-{0}",
    "abs": "flow.abs({0})",
    "sign": "flow.sign({0})",
    "square": "flow.square({0})",
    "relu": "flow.relu({0})",
    "floor": "flow.floor({0})",
    "tanh": "flow.tanh({0})",
    "sigmoid": "flow.sigmoid({0})",
    "silu": "F.silu({0})",
    "exp": "flow.exp({0})",
    "log": "flow.log({0})",
    "sqrt": "flow.sqrt({0})",
    "rsqrt": "flow.rsqrt({0})",
    "sin": "flow.sin({0})",
    "cos": "flow.cos({0})",
    "erf": "flow.erf({0})",
    "softplus": "F.softplus({0}, beta=1.0, threshold=40.0)",
    "stop_gradient": "{0}.detach()",
    "identity": "{0}",
    "gelu": _gelu,
    "where": _where,
    "cast": _cast,
    "einsum": _einsum,
    "iota": _iota,
    "zeros": _filled("zeros"),
    "ones": _filled("ones"),
    "gather": _gather,
    "one_hot": _one_hot,
    "sum": _sum,
    "mean": _mean,
    "max": _extremum("amax"),
    "min": _extremum("amin"),
    "prod": _one_by_one("prod"),
    "any": _one_by_one("any"),
    "all": _one_by_one("all"),
    "cumsum": _along("flow.cumsum"),
    "concat": _concat,
    "pad": _pad,
    "shift": _pad,
    "softmax": _along("flow.softmax"),
    "log_softmax": _along("flow.log_softmax"),
    "logsumexp": lambda call: f"logsumexp({call.args[0]}, {call.axis})",
    "argmax": lambda call: f"flow.argmax({call.args[0]}, dim={call.axis}).to(flow.int32)",
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
    "rename": lambda call: call.args[0],
    "transpose": lambda call: call.permuted(call.args[0], call.ins[0].names, call.out.names),
    "split": lambda call: f"{call.args[0]}.reshape({shape_text(call.out)})",
    "merge": _merge,
    "pick": _pick,
    "slice": _slice,
    "relu_grad": "({1} > 0) * {0}",
    "tanh_grad": "{0} * (1 - flow.square({1}))",
    "sigmoid_grad": "{0} * ({1} * (1 - {1}))",
    "silu_grad": "{0} * (flow.sigmoid({1}) * (1 + {1} * (1 - flow.sigmoid({1}))))",
    "softmax_grad": _softmax_grad,
    "log_softmax_grad": _log_softmax_grad,
    "cumsum_grad": _cumsum_grad,
    "broadcast": _broadcast,
}

_HELPERS = {
    "rms_norm": '''
def rms_norm(x, dim, scale=1.0):
    """`x` divided by the root of the mean of its squares."""
    mean = flow.mean(flow.square(x), dim=dim, keepdim=True)
    return x * flow.rsqrt(mean + 1e-6) * scale
''',
    "logsumexp": '''
def logsumexp(x, dim):
    """The logarithm of the sum of exponentials, without overflow."""
    top = flow.amax(x, dim=dim, keepdim=True)
    return (flow.log(flow.sum(flow.exp(x - top), dim=dim, keepdim=True)) + top).squeeze(dim)
''',
}


def helpers(text: str) -> Iterator[str]:
    """The functions that a text calls and OneFlow does not have."""
    for name, body in _HELPERS.items():
        if f" {name}(" in text:
            yield body.strip("\n")
