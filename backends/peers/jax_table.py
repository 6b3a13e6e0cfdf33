"""How JAX writes each operator, on whole arrays of explicit types."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshdsl.backends.peers.call import PeerCall, Table, concat_parts, padded, shape_text
from meshdsl.ir.types import DType
from meshdsl.ops.einsum_text import letters_for
from meshdsl.ops.text import tuple_text

_DTYPES = {
    "f32": "jnp.float32",
    "f64": "jnp.float64",
    "bf16": "jnp.bfloat16",
    "f16": "jnp.float16",
    "i32": "jnp.int32",
    "i64": "jnp.int64",
    "bool": "jnp.bool_",
}


def dtype_text(dtype: DType) -> str:
    """`jnp.float32`."""
    return _DTYPES[dtype.name]


def _einsum(call: PeerCall) -> str:
    names = [t.names for t in call.ins]
    letters = letters_for(tuple(dict.fromkeys(n for ns in names for n in ns)))
    ins = ",".join("".join(letters[n] for n in ns) for ns in names)
    out = "".join(letters[n] for n in call.out.names)
    return f'jnp.einsum("{ins}->{out}", {", ".join(call.args)}, out_sharding={call.where})'


def _cast(call: PeerCall) -> str:
    return f"{_array(call, 0)}.astype({dtype_text(call.out.dtype)})"


def _array(call: PeerCall, index: int) -> str:
    """Operand `index`, a literal as an array."""
    if not call.constants[index]:
        return call.args[index]
    return f"jnp.asarray({call.args[index]}, dtype={dtype_text(call.ins[index].dtype)})"


def _power(call: PeerCall) -> str:
    # `-2.0 ** x` is -(2.0 ** x) in Python.
    base = call.aligned(0)
    return f"{f'({base})' if base.startswith('-') else base} ** {call.aligned(1)}"


def _where(call: PeerCall) -> str:
    return f"jnp.where({', '.join(_typed(call, i) for i in range(3))})"


def _typed(call: PeerCall, index: int) -> str:
    return _array(call, index) if call.constants[index] else call.aligned(index)


def _gelu(call: PeerCall) -> str:
    return f"jax.nn.gelu({call.args[0]}, approximate={call.attrs['approximate'] == 'tanh'})"


# --- makers and indices ------------------------------------------------------------------------


def _iota(call: PeerCall) -> str:
    return f"jnp.arange({call.out.shape[0]}, dtype=jnp.int32, out_sharding={call.where})"


def _filled(name: str) -> Callable[[PeerCall], str]:
    def write(call: PeerCall) -> str:
        dtype = dtype_text(call.out.dtype)
        return f"jnp.{name}({shape_text(call.out)}, dtype={dtype}, out_sharding={call.where})"

    return write


def _gather(call: PeerCall) -> str:
    table, ids = call.ins
    dim = call.attrs["dim"].name
    if any(ids.has(n) for n in table.names):
        index = ", ".join(_index(call, n) for n in table.names)
    else:
        index = ", ".join(call.args[1] if n == dim else ":" for n in table.names)
    return f"{call.args[0]}.at[{index}].get(out_sharding={call.where})"


def _index(call: PeerCall, name: str) -> str:
    """The index of one dim of a table that shares dims with the indices."""
    out = call.out.names
    if name == call.attrs["dim"].name:
        return call.full(1, out)
    marks = [":" if n == name else "None" for n in out]
    return f"jnp.arange({call.ins[0].size(name)})[{', '.join(marks)}]"


def _one_hot(call: PeerCall) -> str:
    dim = call.attrs["dim"]
    own = f"jnp.arange({dim.size}, dtype=jnp.int32)"
    hot = f"({call.args[0]}[..., None] == {own}).astype({dtype_text(call.out.dtype)})"
    return f"reshard({hot}, {call.where})"


# --- reductions and what goes along a dim ------------------------------------------------------


def _sum(call: PeerCall) -> str:
    return f"jax.lax.reduce_sum({call.args[0]}, {tuple_text(call.axes)}, out_sharding={call.where})"


def _reduction(name: str) -> Callable[[PeerCall], str]:
    return lambda call: f"jnp.{name}({call.args[0]}, axis={tuple_text(call.axes)})"


def _along(name: str) -> Callable[[PeerCall], str]:
    return lambda call: f"{name}({call.args[0]}, axis={call.axis})"


def _cumsum(call: PeerCall) -> str:
    return f"jnp.cumsum({call.args[0]}, axis={call.axis}, dtype={dtype_text(call.out.dtype)})"


def _norm(name: str) -> Callable[[PeerCall], str]:
    def write(call: PeerCall) -> str:
        scales = [call.aligned(i, call.ins[0].dims) for i in range(1, len(call.ins))]
        return f"{name}({', '.join([call.args[0], str(call.axis), *scales])})"

    return write


def _cross_entropy(call: PeerCall) -> str:
    return f"cross_entropy({call.args[0]}, {call.axis}, {call.aligned(1)})"


# --- views -------------------------------------------------------------------------------------


def _reshape(call: PeerCall, text: str) -> str:
    return f"jax.lax.reshape({text}, {shape_text(call.out)}, out_sharding={call.where})"


def _merge(call: PeerCall) -> str:
    names = [d.name for d in call.attrs["dims"]]
    first = next(i for i, n in enumerate(call.ins[0].names) if n in names)
    rest = [n for n in call.ins[0].names if n not in names]
    order = (*rest[:first], *names, *rest[first:])
    return _reshape(call, call.permuted(call.args[0], call.ins[0].names, order))


def _pick(call: PeerCall) -> str:
    index = call.attrs["index"]
    return f"jax.lax.index_in_dim({call.args[0]}, {index}, {call.axis}, keepdims=False)"


def _slice(call: PeerCall) -> str:
    start, stop = call.attrs["start"], call.attrs["stop"]
    return f"jax.lax.slice_in_dim({call.args[0]}, {start}, {stop}, axis={call.axis})"


def _concat(call: PeerCall) -> str:
    parts, at = concat_parts(call)
    return f"jnp.concatenate({tuple_text(parts)}, axis={at})"


def _pad(call: PeerCall) -> str:
    at, before, after = padded(call)
    widths = ["(0, 0, 0)"] * len(call.ins[0].dims)
    widths[at] = f"({before}, {after}, 0)"
    fill = f"jnp.asarray({call.attrs.get('value', 0)!r}, dtype={dtype_text(call.out.dtype)})"
    return f"jax.lax.pad({call.args[0]}, {fill}, {tuple_text(widths)})"


# --- gradients -----------------------------------------------------------------------------------


def _gelu_grad(call: PeerCall) -> str:
    form = call.attrs["approximate"] == "tanh"
    return f"gelu_grad({_typed(call, 0)}, {call.aligned(1)}, {form})"


def _softmax_grad(call: PeerCall) -> str:
    dy, y = call.args
    return f"{y} * ({dy} - jnp.sum({dy} * {y}, axis={call.axis}, keepdims=True))"


def _log_softmax_grad(call: PeerCall) -> str:
    dy, y = call.args
    return f"{dy} - jnp.exp({y}) * jnp.sum({dy}, axis={call.axis}, keepdims=True)"


def _norm_grad(name: str) -> Callable[[PeerCall], str]:
    """The function is linear in neither operand: JAX differentiates the forward one."""

    def write(call: PeerCall) -> str:
        scales = [call.aligned(i, call.ins[0].dims) for i in range(2, len(call.ins))]
        forward = f"lambda x: {name}({', '.join(['x', str(call.axis), *scales])})"
        return f"jax.vjp({forward}, {call.args[1]})[1]({call.args[0]})[0]"

    return write


def _cross_entropy_grad(call: PeerCall) -> str:
    at, size = call.out.index(call.attrs["dim"].name), call.attrs["dim"].size
    own = f"jnp.arange({size}).reshape({tuple_text([size, *[1] * (len(call.out.dims) - at - 1)])})"
    hot = f"({_wide(call, 2)} == {own})"
    return f"{_wide(call, 0)} * (jax.nn.softmax({call.args[1]}, axis={at}) - {hot})"


def _wide(call: PeerCall, index: int) -> str:
    """An operand with every dim of the result, of size 1 where it has none."""
    return call.args[index] if call.constants[index] else call.full(index, call.out.names)


def _broadcast(call: PeerCall) -> str:
    names = tuple(n for n in call.out.names if call.ins[0].has(n))
    text = call.permuted(_array(call, 0), call.ins[0].names, names)
    at = tuple_text([call.out.index(n) for n in names])
    shape = shape_text(call.out)
    return f"jax.lax.broadcast_in_dim({text}, {shape}, {at}, out_sharding={call.where})"


def _unpick(call: PeerCall) -> str:
    at, size, index = call.attrs["at"], call.attrs["dim"].size, call.attrs["index"]
    own = f"jnp.arange({size}) == {index}"
    mask = f"({own}).reshape({tuple_text([size, *[1] * (len(call.out.dims) - at - 1)])})"
    picked = f"jnp.where({mask}, jnp.expand_dims({_array(call, 0)}, {at}), 0)"
    return f"reshard({picked}, {call.where})"


REFUSED = frozenset({"scatter_add", "sgd_update", "momentum_update", "adam_update"})
"""Operators of gradients and updates that are not written: JAX has transformations of its own."""

JAX: Table = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": _power,
    "maximum": "jnp.maximum({0}, {1})",
    "minimum": "jnp.minimum({0}, {1})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "~{0}",
    "neg": "-{0}",
    "abs": "jnp.abs({0})",
    "sign": "jnp.sign({0})",
    "square": "jnp.square({0})",
    "relu": "jax.nn.relu({0})",
    "floor": "jnp.floor({0})",
    "tanh": "jnp.tanh({0})",
    "sigmoid": "jax.nn.sigmoid({0})",
    "silu": "jax.nn.silu({0})",
    "exp": "jnp.exp({0})",
    "log": "jnp.log({0})",
    "sqrt": "jnp.sqrt({0})",
    "rsqrt": "jax.lax.rsqrt({0})",
    "sin": "jnp.sin({0})",
    "cos": "jnp.cos({0})",
    "erf": "jax.lax.erf({0})",
    "softplus": "jax.nn.softplus({0})",
    "stop_gradient": "jax.lax.stop_gradient({0})",
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
    "mean": _reduction("mean"),
    "max": _reduction("max"),
    "min": _reduction("min"),
    "prod": _reduction("prod"),
    "any": _reduction("any"),
    "all": _reduction("all"),
    "cumsum": _cumsum,
    "concat": _concat,
    "pad": _pad,
    "shift": _pad,
    "softmax": _along("jax.nn.softmax"),
    "log_softmax": _along("jax.nn.log_softmax"),
    "logsumexp": _along("jax.nn.logsumexp"),
    "argmax": lambda call: f"jnp.argmax({call.args[0]}, axis={call.axis}).astype(jnp.int32)",
    "layer_norm": _norm("layer_norm"),
    "rms_norm": _norm("rms_norm"),
    "cross_entropy": _cross_entropy,
    "rename": lambda call: call.args[0],
    "transpose": lambda call: call.permuted(call.args[0], call.ins[0].names, call.out.names),
    "split": lambda call: _reshape(call, call.args[0]),
    "merge": _merge,
    "pick": _pick,
    "slice": _slice,
    "relu_grad": "jnp.where({1} > 0, {0}, 0)",
    "tanh_grad": "{0} * (1 - jnp.square({1}))",
    "sigmoid_grad": "{0} * ({1} * (1 - {1}))",
    "silu_grad": "{0} * (jax.nn.sigmoid({1}) * (1 + {1} * (1 - jax.nn.sigmoid({1}))))",
    "gelu_grad": _gelu_grad,
    "softmax_grad": _softmax_grad,
    "log_softmax_grad": _log_softmax_grad,
    "cumsum_grad": lambda call: f"jax.lax.cumsum({call.args[0]}, {call.axis}, reverse=True)",
    "layer_norm_grad": _norm_grad("layer_norm"),
    "rms_norm_grad": _norm_grad("rms_norm"),
    "cross_entropy_grad": _cross_entropy_grad,
    "broadcast": _broadcast,
    "unpick": _unpick,
}

_HELPERS = {
    "gelu_grad": '''
def gelu_grad(dy, x, approximate):
    """`dy` times the slope of gelu at `x`."""
    def curve(x):
        return jax.nn.gelu(x, approximate=approximate)

    return dy * jax.jvp(curve, (x,), (jnp.ones_like(x),))[1]
''',
    "layer_norm": '''
def layer_norm(x, axis, scale=1.0, shift=0.0):
    """`x` less its mean, divided by its standard deviation."""
    x = x - jnp.mean(x, axis=axis, keepdims=True)
    spread = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(spread + 1e-5) * scale + shift
''',
    "rms_norm": '''
def rms_norm(x, axis, scale=1.0):
    """`x` divided by the root of the mean of its squares."""
    mean = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * scale
''',
    "cross_entropy": '''
def cross_entropy(logits, axis, targets):
    """Minus the logarithm of the softmax at the targets."""
    at = jnp.expand_dims(targets, axis)
    picked = jnp.take_along_axis(logits, at, axis=axis)
    return jax.nn.logsumexp(logits, axis=axis) - jnp.squeeze(picked, axis)
''',
}


def helpers(text: str) -> Iterator[str]:
    """The functions that a text calls and JAX does not have."""
    for name, body in _HELPERS.items():
        if f" {name}(" in text:
            yield body.strip("\n")
