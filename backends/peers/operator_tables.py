"""The table of other systems' texts for each operator, and of the partial values it accepts there.

A cell is a template in the words of `peer_call.py`, or a function of the call where none suffices.

The record of an operator that is not in the table has all this (`OpDef.spelled`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from meshdsl.backends.peers import window_spellings
from meshdsl.backends.peers.peer_call import PeerCall, Text
from meshdsl.ops.normalise import eps_of
from meshdsl.ops.opdef import Spelling, lookup
from meshdsl.ops.torch_expressions import Names, tuple_text


def spelling(operator: str, system: str) -> Spelling:
    """The text of an operator in `system` (`dtensor`, `jax`, `oneflow`); by default it refuses."""
    spelled = lookup(operator).spelled.get(system)
    if spelled is not None:
        return spelled
    return Spelling(
        _text(operator, system),
        sums=operator in SUMS[system],
        extremes=operator in EXTREMES[system],
        becomes=operator in BECOMES[system],
        why=REASONS[system].get(operator, ""),
    )


def _text(operator: str, system: str) -> Text | None:
    cell = TABLE.get(operator) if system in COLUMNS else None
    return cell[COLUMNS.index(system)] if isinstance(cell, tuple) else cell


# --- functions where no template suffices --------------------------------------------------------


def _power(call: PeerCall) -> str:
    # `-2.0 ** x` is -(2.0 ** x) in Python.
    base = call.aligned(0)
    return f"{f'({base})' if base.startswith('-') else base} ** {call.aligned(1)}"


def _extreme(name: str, bound: str) -> Text:
    """A comparison with a number, for which OneFlow has another function."""

    def write(call: PeerCall) -> str | None:
        for literal, other in ((1, 0), (0, 1)):
            if literal in call.literals:
                return f"flow.clamp({call.tensor(other)}, {bound}={call.args[literal]})"
        return call.write(f"flow.{name}({{0}}, {{1}})")

    return write


def _flow_einsum(call: PeerCall) -> str | None:
    """`[…, k] @ [k, n]` where the einsum is exactly that."""
    a, b = call.ins[0].names, call.ins[-1].names
    plain = len(call.ins) == 2 and len(a) > 1 and len(b) == 2 and a[-1] == b[0]
    if plain and call.out.names == (*a[:-1], b[1]) and b[1] not in a:
        return f"flow.matmul({', '.join(call.args)})"
    return call.write("flow.einsum({letters}, {operands})")


def _one_by_one(name: str) -> Text:
    """One dim at a time, the last first, so that positions stay valid."""

    def write(call: PeerCall) -> str:
        text = call.args[0]
        for at in reversed(call.positions):
            text = f"flow.{name}({text}, dim={at})"
        return text

    return write


def _flow_gelu(call: PeerCall) -> str:
    tanh = call.attrs["approximate"] == "tanh"
    name = 'flow.nn.GELU(approximate="tanh")' if tanh else "F.gelu"
    return f"{name}({call.args[0]})"


def _jax_einsum(call: PeerCall) -> str | None:
    """Of one tensor, the sum over its last dims: JAX may place a transposed one otherwise."""
    if len(call.ins) > 1:
        return call.write("jnp.einsum({letters}, {operands}, {where})")
    gone = [n for n in call.ins[0].names if not call.out.has(n)]
    positions = tuple_text(range(len(call.out.dims), len(call.ins[0].dims)))
    x = call.ordered(0, (*call.out.names, *gone))
    return call.write(f"jax.lax.reduce_sum({x}, {positions}, {{where}})")


def _jax_gather(call: PeerCall) -> str:
    table, dim = call.ins[0].names, call.attrs["dim"].name
    if any(call.ins[1].has(n) for n in table):
        index = ", ".join(_own_index(call, n) for n in table)
    else:
        index = ", ".join(call.args[1] if n == dim else ":" for n in table)
    return f"{call.args[0]}.at[{index}].get({call.where})"


def _own_index(call: PeerCall, name: str) -> str:
    """The index of one dim of a table that shares dims with the indices."""
    if name == call.attrs["dim"].name:
        return call.aligned(1, full=True)
    marks = [":" if n == name else "None" for n in call.out.names]
    return f"jnp.arange({call.ins[0].size(name)})[{', '.join(marks)}]"


def _flow_gather(call: PeerCall) -> str | None:
    """None where table and indices share some dims, but not all of the indices'."""
    (table, ids), at = call.ins, call.at
    if set(ids.names) == set(table.names) - {call.attrs["dim"].name} and ids.dims:
        index = call.aligned(1, table.names, full=True)
        return f"flow.gather({call.args[0]}, {at}, {index}.to(flow.int64)).squeeze({at})"
    if any(table.has(n) for n in ids.names):
        return None
    shape = {0: ".reshape(1)", 1: ""}.get(len(ids.dims), ".flatten()")
    after = {0: f".squeeze({at})", 1: ""}.get(len(ids.dims), f".reshape({call.out.shape})")
    return f"flow.index_select({call.args[0]}, {at}, {call.args[1]}{shape}){after}"


def _flow_cross_entropy(call: PeerCall) -> str:
    dim, out = call.attrs["dim"], call.out.names
    logits, index, suffix = call.ordered(0, (*out, dim.name)), call.aligned(1), ""
    if len(out) != 1:
        logits, index = f"{logits}.reshape(-1, {dim.size})", f"{index}.reshape(-1)"
        suffix = f".reshape({call.out.shape})"
    return f'F.cross_entropy({logits}, {index}, reduction="none"){suffix}'


def _flow_layer_norm(call: PeerCall) -> str:
    dim, names = call.attrs["dim"], call.ins[0].names
    last = (*(n for n in names if n != dim.name), dim.name)
    args = ", ".join([call.ordered(0, last), f"({dim.size},)", *call.args[1:]])
    eps = eps_of("layer_norm", call.attrs)
    return call.permuted(f"F.layer_norm({args}, eps={eps!r})", last, names)


def _concat(start: str, end: str) -> Text:
    """The operands with the dims of the result, and the position they join at."""

    def write(call: PeerCall) -> str:
        target, parts = call.attrs["target"], []
        for i, source in enumerate(call.attrs["sources"]):
            dims = tuple(source.name if n == target.name else n for n in call.out.names)
            parts.append(call.aligned(i, dims))
        return f"{start}{', '.join(parts)}{end}={call.out.index(target.name)})"

    return write


def _stack(start: str, end: str) -> Text:
    """The operands, and the position of their dim."""
    return lambda call: f"{start}{', '.join(call.args)}{end}={call.attrs['at']})"


def _padded(call: PeerCall) -> tuple[int, int, int, str]:
    """The position that `pad` or `shift` is about, the padding before and after, and the value."""
    attrs = call.attrs
    if "by" not in attrs:
        at = call.ins[0].index(attrs["source"][0].name)
        return at, attrs["before"], attrs["after"], repr(attrs.get("value", 0))
    size = attrs["dim"].size
    by = max(-size, min(size, attrs["by"]))
    return call.at, by, -by, "0"


def _jax_pad(call: PeerCall) -> str:
    at, before, after, value = _padded(call)
    widths = ["(0, 0, 0)"] * len(call.ins[0].dims)
    widths[at] = f"({before}, {after}, 0)"
    fill = f"jnp.asarray({value}, dtype={call.dtype})"
    return f"jax.lax.pad({call.args[0]}, {fill}, {tuple_text(widths)})"


def _flow_pad(call: PeerCall) -> str:
    at, before, after, value = _padded(call)
    widths = [0, 0] * (len(call.ins[0].dims) - 1 - at) + [before, after]
    return f"F.pad({call.args[0]}, {tuple_text(widths)}, value={value})"


def _jax_cumsum(call: PeerCall) -> str | None:
    by = -1 if call.attrs["reverse"] else 1
    x = _jax_pad(_shifted(call, by)) if call.attrs["exclusive"] else call.args[0]
    if call.attrs["reverse"]:
        return f"jax.lax.cumsum({x}, {call.at}, reverse=True)"
    return call.write(f"jnp.cumsum({x}, {{dim}}, dtype={{dtype}})")


def _jax_recurrence(call: PeerCall) -> str:
    """Two steps (a, b) are one; with an initial state, that times all `a` so far is added."""
    dim = call.attrs["dim"].name
    at = call.out.names.index(dim)
    reverse = ", reverse=True" if call.attrs["reverse"] else ""
    a, b = (
        f"jnp.broadcast_to({call.tensor(i)}, {call.out.shape}, out_sharding={call.spec})"
        for i in (0, 1)
    )
    step = "(lambda s, t: (t[0] * s[0], t[0] * s[1] + t[1]))"
    scan = f"jax.lax.associative_scan({step}, ({a}, {b}), axis={at}{reverse})"
    if len(call.ins) == 2:
        return f"{scan}[1]"
    return f"(lambda s: s[0] * {call.aligned(2, full=True)} + s[1])({scan})"


def _flow_cumsum(call: PeerCall) -> str | None:
    at, by = call.at, -1 if call.attrs["reverse"] else 1
    x = _flow_pad(_shifted(call, by)) if call.attrs["exclusive"] else call.args[0]
    if call.attrs["reverse"]:
        return call.write(f"flow.flip(flow.cumsum(flow.flip({x}, ({at},)), {{dim}}), ({at},))")
    return call.write(f"flow.cumsum({x}, {{dim}})")


def _shifted(call: PeerCall, by: int) -> PeerCall:
    """The call as that of a `shift`."""
    return replace(call, attrs={**call.attrs, "by": by})


def _flow_broadcast(call: PeerCall) -> str:
    wide = call.literals.get(0) or call.aligned(0, full=True)
    return f"{wide}.expand({', '.join(map(str, call.out.shape))})"


def broadcast_in_dim(call: PeerCall, index: int = 0) -> str:
    """An operand with the shape and the type of the result, in JAX."""
    text = call.literals.get(index) or call.ordered(index, call.out.names)
    at = tuple_text([i for i, n in enumerate(call.out.names) if call.ins[index].has(n)])
    return f"jax.lax.broadcast_in_dim({text}, {call.out.shape}, {at}, {call.where})"


def _norm_grad(name: str) -> Text:
    """The pullback of the forward function, by JAX's differentiation."""

    def write(call: PeerCall) -> str:
        scales = "".join(f", {call.aligned(i)}" for i in range(2, len(call.ins)))
        eps = f", eps={call.attrs['eps']!r}" if "eps" in call.attrs else ""
        forward = f"lambda x: {name}(x, {call.at}{scales}{eps})"
        return f"jax.vjp({forward}, {call.args[1]})[1]({call.args[0]})[0]"

    return write


def _along_out(call: PeerCall, at: int, text: str) -> str:
    """A tensor of one dim, written `text`, along dim `at` of the result."""
    sizes = [call.attrs["dim"].size, *[1] * (len(call.out.dims) - at - 1)]
    return f"{text}.reshape({tuple_text(sizes)})"


def _jax_cross_entropy_grad(call: PeerCall) -> str:
    at = call.out.index(call.attrs["dim"].name)
    hot = f"({call.aligned(2, full=True)} == {_along_out(call, at, f'jnp.arange({call.count})')})"
    return f"{call.aligned(0, full=True)} * (jax.nn.softmax({call.args[1]}, axis={at}) - {hot})"


def _jax_unpick(call: PeerCall) -> str:
    at, index, x = call.attrs["at"], call.attrs["index"], call.literals.get(0, call.args[0])
    mask = _along_out(call, at, f"(jnp.arange({call.count}) == {index})")
    return f"reshard(jnp.where({mask}, jnp.expand_dims({x}, {at}), 0), {call.spec})"


def _jax_top_k(call: PeerCall) -> str:
    (source,), (target,) = call.attrs["source"], call.attrs["target"]
    return f"jax.lax.top_k({call.args[0]}, {target.size}, axis={call.ins[0].index(source.name)})"


def _jax_put(call: PeerCall) -> str | None:
    """None for several positions: of equal ones the last has to be written."""
    if any(not call.ins[0].has(n) for n in call.ins[2].names):
        return None
    positions = _along_out(call, call.at, f"jnp.arange({call.count})")
    return f"jnp.where({positions} == {call.aligned(2)}, {call.aligned(1)}, {call.tensor(0)})"


def _jax_scatter_add(call: PeerCall) -> str:
    """Where no dim of the indices stays, a slice for each of them; else an index for each dim."""
    (x, ids), dim, out = call.ins, call.attrs["dim"].name, call.out.names
    every = tuple(dict.fromkeys((*out, *x.names, *ids.names)))
    at = out.index(dim)
    names = (*out[:at], *(n for n in every if n not in out), *out[at + 1 :])
    if not any(ids.has(n) for n in out):
        index = ", ".join(call.ordered(1, names) if n == dim else ":" for n in out)
    else:
        index = ", ".join(_place_in(call, n, names) for n in out)
    zeros = f"jnp.zeros({call.out.shape}, dtype={call.dtype})"
    return f"{zeros}.at[{index}].add({call.aligned(0, names)}, {call.where})"


def _place_in(call: PeerCall, name: str, names: Names) -> str:
    """The index along one dim of the result of a `scatter_add`, over the dims `names`."""
    if name == call.attrs["dim"].name:
        return call.aligned(1, names, full=True)
    marks = [":" if n == name else "None" for n in names]
    return f"jnp.arange({call.out.size(name)})[{', '.join(marks)}]"


def _flow_scatter_add(call: PeerCall) -> str:
    """All positions along one dim, that of the result."""
    (x, ids), dim, out = call.ins, call.attrs["dim"].name, call.out.names
    sizes = {d.name: d.size for t in (call.out, x, ids) for d in t.dims}
    positions = tuple(n for n in dict.fromkeys((*ids.names, *x.names)) if n not in out)
    at = out.index(dim)
    names = (*out[:at], *positions, *out[at + 1 :])
    shape = [sizes[n] for n in names]
    merged = [*shape[:at], math.prod(sizes[n] for n in positions), *shape[at + len(positions) :]]
    merge = "" if len(positions) == 1 else f".reshape({tuple_text(merged)})"
    added, index = (
        (call.literals.get(i) or call.aligned(i, names, full=True))
        + ("" if {*names} <= {*call.ins[i].names} else f".expand({tuple_text(shape)})")
        + merge
        for i in (0, 1)
    )
    zeros = f"flow.zeros({call.out.shape}, dtype={call.dtype}, {call.where})"
    return f"flow.scatter_add({zeros}, {at}, {index}.to(flow.int64), {added})"


# --- the table -----------------------------------------------------------------------------------

COLUMNS = ("jax", "oneflow")
TABLE: dict[str, Text | tuple[Text | None, Text | None]] = {
    # One text, or those of JAX 0.10 and of OneFlow 0.9.
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "floordiv": "{0} // {1}",
    "mod": "{0} % {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "neg": "-{0}",
    "pow": (_power, "flow.pow({0}, {1})"),
    "maximum": ("jnp.maximum({0}, {1})", _extreme("maximum", "min")),
    "minimum": ("jnp.minimum({0}, {1})", _extreme("minimum", "max")),
    "logical_and": ("{0} & {1}", "flow.logical_and({0}, {1})"),
    "logical_or": ("{0} | {1}", "flow.logical_or({0}, {1})"),
    "logical_not": ("~{0}", "flow.logical_not({0})"),
    "abs": "{lib}.abs({0})",
    "sign": "{lib}.sign({0})",
    "square": "{lib}.square({0})",
    "floor": "{lib}.floor({0})",
    "exp": "{lib}.exp({0})",
    "log": "{lib}.log({0})",
    "sqrt": "{lib}.sqrt({0})",
    "sin": "{lib}.sin({0})",
    "cos": "{lib}.cos({0})",
    "tanh": "{lib}.tanh({0})",
    "rsqrt": ("jax.lax.rsqrt({0})", "flow.rsqrt({0})"),
    "erf": ("jax.lax.erf({0})", "flow.erf({0})"),
    "relu": ("jax.nn.relu({0})", "flow.relu({0})"),
    "sigmoid": ("jax.nn.sigmoid({0})", "flow.sigmoid({0})"),
    "silu": ("jax.nn.silu({0})", "F.silu({0})"),
    "softplus": ("jax.nn.softplus({0})", "F.softplus({0}, beta=1.0, threshold=40.0)"),
    "gelu": ("jax.nn.gelu({x}, approximate={tanh})", _flow_gelu),
    "stop_gradient": ("jax.lax.stop_gradient({0})", "{0}.detach()"),
    "identity": "{0}",
    "where": "{lib}.where({tensors})",
    "cast": ("{tensor}.astype({dtype})", "{tensor}.to({dtype})"),
    "einsum": (_jax_einsum, _flow_einsum),
    "iota": "{lib}.arange({count}, dtype={dtype}, {where})",
    "zeros": "{lib}.zeros({shape}, dtype={dtype}, {where})",
    "ones": "{lib}.ones({shape}, dtype={dtype}, {where})",
    "gather": (_jax_gather, _flow_gather),
    "one_hot": (
        "reshard(({x}[..., None] == jnp.arange({count}, dtype=jnp.int32)).astype({dtype}), {spec})",
        "F.one_hot({x}, {count}).to({dtype})",
    ),
    "sum": ("jax.lax.reduce_sum({x}, {positions}, {where})", "flow.sum({x}, {dims})"),
    "mean": ("jnp.mean({x}, {dims})", "flow.sum({x}, {dims}) / {count}"),
    "max": ("jnp.max({x}, {dims})", "flow.amax({x}, {dims})"),
    "min": ("jnp.min({x}, {dims})", "flow.amin({x}, {dims})"),
    "prod": ("jnp.prod({x}, {dims})", _one_by_one("prod")),
    "any": ("jnp.any({x}, {dims})", _one_by_one("any")),
    "all": ("jnp.all({x}, {dims})", _one_by_one("all")),
    "cumsum": (_jax_cumsum, _flow_cumsum),
    "linear_recurrence": (_jax_recurrence, None),
    "cumprod": ("jax.lax.cumprod({x}, {at})", "flow.cumprod({x}, {dim})"),
    "conv": (window_spellings.jax_conv, window_spellings.flow_as_torch("conv")),
    "upconv": (window_spellings.jax_upconv, window_spellings.flow_as_torch("upconv")),
    "max_pool": (
        window_spellings.jax_pool("-jnp.inf", "jax.lax.max", mean=False),
        window_spellings.flow_as_torch("max_pool"),
    ),
    "avg_pool": (
        window_spellings.jax_pool("0", "jax.lax.add", mean=True),
        window_spellings.flow_as_torch("avg_pool"),
    ),
    "window": (window_spellings.shifted_copies, window_spellings.flow_as_torch("window")),
    "top_k": (_jax_top_k, None),
    "sort": (
        "jax.lax.sort(({x}, jax.lax.broadcasted_iota(jnp.int32, {shape}, {at}, {where})), "
        "dimension={at}, num_keys=1)",
        None,
    ),
    "put": (_jax_put, None),
    "scatter_add": (_jax_scatter_add, _flow_scatter_add),
    "concat": (_concat("jnp.concatenate((", "), axis"), _concat("flow.cat([", "], dim")),
    "pad": (_jax_pad, _flow_pad),
    "shift": (_jax_pad, _flow_pad),
    "softmax": ("jax.nn.softmax({x}, {dim})", "flow.softmax({x}, {dim})"),
    "log_softmax": ("jax.nn.log_softmax({x}, {dim})", "flow.log_softmax({x}, {dim})"),
    "logsumexp": ("jax.nn.logsumexp({x}, axis={over})", "logsumexp({x}, {over})"),
    "argmax": (
        "jnp.argmax({flat}, {flat_dim}).astype({dtype})",
        "flow.argmax({flat}, {flat_dim}).to({dtype})",
    ),
    "layer_norm": ("layer_norm({x}, {at}{rest}{eps})", _flow_layer_norm),
    "rms_norm": "rms_norm({x}, {at}{rest}{eps})",
    "cross_entropy": ("cross_entropy({x}, {at}, {1})", _flow_cross_entropy),
    "rename": "{x}",
    "transpose": "{0}",
    "split": ("jax.lax.reshape({x}, {shape}, {where})", "{x}.reshape({shape})"),
    "merge": ("jax.lax.reshape({merged}, {shape}, {where})", "{merged}.reshape({shape})"),
    "pick": ("jax.lax.index_in_dim({x}, {index}, {at}, keepdims=False)", "{x}[{skip}{index}]"),
    "slice": ("jax.lax.slice_in_dim({x}, {start}, {stop}, {dim})", "{x}[{skip}{first}:{stop}]"),
    "broadcast": (broadcast_in_dim, _flow_broadcast),
    # The operators of gradients; OneFlow lacks some, since it differentiates by itself.
    "relu_grad": ("jnp.where({1} > 0, {0}, 0)", "({1} > 0) * {0}"),
    "tanh_grad": "{0} * (1 - {lib}.square({1}))",
    "sigmoid_grad": "{0} * ({1} * (1 - {1}))",
    "silu_grad": (
        "{0} * (jax.nn.sigmoid({1}) * (1 + {1} * (1 - jax.nn.sigmoid({1}))))",
        "{0} * (flow.sigmoid({1}) * (1 + {1} * (1 - flow.sigmoid({1}))))",
    ),
    "softmax_grad": "{y} * ({x} - {lib}.sum({x} * {y}, {kept}))",
    "log_softmax_grad": "{x} - {lib}.exp({y}) * {lib}.sum({x}, {kept})",
    "gelu_grad": ("gelu_grad({tensor}, {1}, {tanh})", None),
    "layer_norm_grad": (_norm_grad("layer_norm"), None),
    "rms_norm_grad": (_norm_grad("rms_norm"), None),
    "cross_entropy_grad": (_jax_cross_entropy_grad, None),
    "unpick": (_jax_unpick, None),
    "stack": (_stack("jnp.stack((", "), axis"), _stack("flow.stack([", "], dim")),
}
"""By operator the texts of JAX and of OneFlow; DTensor has the torch texts of the records."""


def _of(names: str) -> frozenset[str]:
    return frozenset(names.split())


_LINEAR = _of(
    "add cast concat identity mul pad pick rename slice split stop_gradient sum transpose"
)
SUMS: Mapping[str, frozenset[str]] = {
    "dtensor": _LINEAR | _of("broadcast div einsum neg shift sub"),
    "jax": _LINEAR | _of("merge shift"),
    # `-x` has no signature for partial sums, where `x * -1` has.
    "oneflow": _LINEAR | _of("div einsum gather mean merge sub"),
}
"""By system the operators through which a partial sum passes; before others it is reduced."""

EXTREMES: Mapping[str, frozenset[str]] = {
    "dtensor": _of(
        "broadcast cast concat einsum erf exp floor identity maximum minimum pad pick "
        "relu relu_grad rename shift sigmoid slice split stop_gradient tanh transpose unpick"
    ),
    "jax": frozenset(),
    "oneflow": frozenset(),
}
"""By system the operators through which partial maxima and minima pass."""

BECOMES: Mapping[str, frozenset[str]] = {
    "dtensor": _of("einsum max mean min prod sum"),
    "jax": _of("einsum gather scatter_add sum"),
    "oneflow": _of("einsum gather mean sum"),
}
"""By system the operators that leave a result partial where a loop that it lacks is split."""

_WRITTEN = "it leaves open which of equal positions is written"
_SCANNED = "there is no operator there that scans with a function of two steps"
_CUT = "it promises nothing of margins that are negative"
_ORDERED = "it promises no order of equal elements"
REASONS: Mapping[str, Mapping[str, str]] = {
    "dtensor": {"put": _WRITTEN, "linear_recurrence": _SCANNED},
    "jax": {"put": _WRITTEN},
    "oneflow": {
        "top_k": _ORDERED,
        "sort": _ORDERED,
        "upconv": _CUT,
        "linear_recurrence": _SCANNED,
    },
}
"""By system and operator, why a call is refused where it is."""
