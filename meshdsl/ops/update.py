"""Updates: one step of an optimizer on a parameter and its states.

They are at the end of a training step (`named/optimizers.py` emits them) and cannot be called.
`w` is the parameter, or its master copy where it is of a narrower dtype; `g`, its gradient, may be
of a narrower dtype and have its dims in another order. `scale` multiplies the gradient: the factor
of clipping by norm. All but `g` have the dtype of `w`, apart from `step`, an integer from 1. `lr`,
`scale` and `step` are scalars or, of a parameter stacked by a `repeat`, have some of its dims. The
torch text works in place.

An update of a device may be that of several parameters (`device/grouped_updates.py`): the operands
of one after the other, then the scalars. The torch text has a list of each. There the attribute
`room` is the most elements of gradients that are copied at once. One with the attribute `donated`
copies none: nothing reads its gradients any more, and it overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit

_Arrays = tuple[kit.Array, ...]

PIECE = 1 << 22
"""The most elements of a gradient that the torch text copies at once (`update_kernels.PIECE`)."""

_REDUCED = "parameters, states and scalars are never partial, and a gradient is reduced before"

# --- constructor -----------------------------------------------------------------------------


def update(
    name: str,
    operands: tuple[str, ...],
    numpy: Callable[..., _Arrays],
    samples: Sequence[kit.Sample],
    *,
    meaning: str,
    flops: int,
    true_rows: Mapping[str, str],
    short: Callable[[kit.TorchCall], str | None] = lambda call: None,
    fused: bool = False,
) -> kit.OpDef:
    """Register an update of the `operands`; those called `w`, `m` and `v` get a new value each.

    `numpy` takes the attributes and the aligned arrays. The torch text calls the support function
    `{name without _update}_` on lists of the operands before `lr`, on the scalars and attributes,
    or is `short` where that has one. `flops` counts per element. One that is `fused` rounds
    otherwise where `w` is contiguous: of chunks the text says whether the whole is.
    """
    new = tuple(i for i, o in enumerate(operands) if o in ("w", "m", "v"))
    each = operands.index("lr")

    def run(call: kit.NumpyCall, *arrays: kit.Array) -> _Arrays:
        dims = call.ins[0].dims
        aligned = [kit.align(a, t, dims) for a, t in zip(arrays, call.ins, strict=True)]
        return numpy(call.attrs, *aligned)

    text = _text(name.removesuffix("update"), operands, each, fused)
    return kit.operator(
        name,
        kit.Surface("view", (len(operands), len(operands))),
        _infer(name, operands, new),
        kit.plain(),
        run if len(new) > 1 else lambda call, *arrays: run(call, *arrays)[0],
        lambda call: short(call) or text(call),
        samples,
        exact=False,
        flops=lambda sig: sum(flops * one.ins[0].elements for one in _calls(sig, operands)),
        true_rows=true_rows,
        overwrites=new,
        each=each,
        scratch=_scratch(operands),
        meaning=meaning,
    )


def _calls(sig: kit.Signature, operands: tuple[str, ...]) -> list[kit.Signature]:
    """The updates in one of several parameters."""
    each, scalars = operands.index("lr"), sig.ins[operands.index("lr") - len(operands) :]
    starts = range(0, len(sig.ins) - len(scalars), each)
    new = len(sig.outs) // len(starts)
    return [
        kit.Signature(
            (*sig.ins[at : at + each], *scalars), sig.outs[n * new : (n + 1) * new], sig.attrs
        )
        for n, at in enumerate(starts)
    ]


def _scratch(operands: tuple[str, ...]) -> kit.Scratch:
    """The bytes of copies of gradients, if they are widened, scaled, decayed or looked ahead of.

    They are made piece by piece, unless a scalar has dims.
    """

    def count(sig: kit.Signature, numbers: Mapping[int, Any]) -> int:
        scale = numbers.get(len(sig.ins) - len(operands) + operands.index("scale"))
        first, *others = [of_one(one, scale) for one in _calls(sig, operands)]
        most = min(PIECE, sig.attrs.get("room", PIECE)) * sig.ins[0].dtype.bytes
        return min(first + sum(others), most) if others else first

    def of_one(sig: kit.Signature, scale: Any) -> int:
        w, g, attrs = sig.ins[0], sig.ins[1], sig.attrs
        decays = attrs.get("weight_decay") and "decoupled" not in attrs
        copied = decays or attrs.get("nesterov") or g.dtype != w.dtype or scale != 1
        if not copied or attrs.get("donated"):
            return 0
        scalars = sig.ins[operands.index("lr") :]
        differ = any(0 < len(type_.dims) < len(w.dims) for type_ in scalars)
        return w.bytes if differ else min(w.bytes, PIECE * w.dtype.bytes)

    return count


def _infer(name: str, operands: tuple[str, ...], new: tuple[int, ...]) -> kit.Infer:
    """The results have the type of `w`. These calls are only generated: an error is our mistake."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        del attrs
        w = ins[0]
        assert w.dtype.kind == "float", f"{name} of {w}"
        for operand, type_ in zip(operands, ins, strict=True):
            said = f"{name} of {w}: {operand} is {type_}"
            assert set(type_.dims) <= set(w.dims), said
            assert type_.dtype == w.dtype or operand in ("g", "step"), said
            assert type_.dtype.kind == ("int" if operand == "step" else "float"), said
            assert type_.dtype.bytes <= w.dtype.bytes or operand == "step", said
        assert set(ins[1].dims) == set(w.dims), f"{name} of {w}: the gradient is {ins[1]}"
        assert all(ins[i] == w for i in new), f"{name}: states are not of the type {w}"
        return (w,) * len(new)

    return infer


def _text(
    function: str, operands: tuple[str, ...], each: int, fused: bool
) -> Callable[[kit.TorchCall], str]:
    """`adam_([w], [g], [m], [v], lr=0.001, scale=1.0, step=step, beta1=0.9, …)`."""

    def write(call: kit.TorchCall) -> str:
        dims = call.ins[0].dims
        lists = [call.listed(i, dims) for i in range(each)]
        named = enumerate(operands[each:], each)
        scalars = [f"{name}={call.aligned(i, dims)}" for i, name in named]
        options = [f"{name}={value!r}" for name, value in call.attrs.items()]
        options += [f"fused={call.whole}.is_contiguous()"] if fused and call.whole else []
        return f"{call.use(function)}({', '.join([*lists, *scalars, *options])})"

    return write


def _extremes(*rows: str) -> tuple[str, ...]:
    """Each row for maxima (`{0}`, with minima in `{1}`) and for minima."""
    return tuple(row.format(*pair) for row in rows for pair in (("max", "min"), ("min", "max")))


# --- gradient descent ------------------------------------------------------------------------


def _sgd(attrs: kit.Attrs, w: kit.Array, g: kit.Array, lr: kit.Array, scale: kit.Array) -> _Arrays:
    return (np.asarray(w - lr * (scale * g + attrs["weight_decay"] * w)),)


def _plain_sgd(call: kit.TorchCall) -> str | None:
    """One call of torch, where the gradient is neither scaled nor widened, and nothing decays."""
    w, g = call.ins[:2]
    scale = call.args[3] if call.is_constant(3) else ""
    if scale != "1.0" or call.attrs["weight_decay"] or w.dtype != g.dtype or call.is_constant(1):
        return None
    if call.is_list and not call.is_constant(2):
        return None
    if call.is_list:
        lists = ", ".join(call.listed(i, w.dims) for i in (0, 1))
        return f"torch._foreach_sub_({lists}, alpha={call.args[2]})"
    along = call.aligned(1, w.dims)
    if call.is_constant(2):
        return f"{call.tensor(0)}.sub_({along}, alpha={call.args[2]})"
    return f"{call.tensor(0)}.addcmul_({along}, {call.aligned(2, w.dims)}, value=-1)"


def _momentum(
    attrs: kit.Attrs, w: kit.Array, g: kit.Array, v: kit.Array, lr: kit.Array, scale: kit.Array
) -> _Arrays:
    g = scale * g + attrs["weight_decay"] * w
    v = attrs["beta"] * v + g
    direction = g + attrs["beta"] * v if attrs["nesterov"] else v
    return np.asarray(w - lr * direction), np.asarray(v)


update(
    "sgd_update",
    ("w", "g", "lr", "scale"),
    _sgd,
    kit.samples(
        "b h; h b; (); () | weight_decay=0.0",
        "s; s: bf16; (); () | weight_decay=0.25",
        values="int int positive positive",
    ),
    flops=3,
    true_rows=kit.rows_with_reason(
        _REDUCED,
        "P, P, B, B -> P",
        "P, B, P, B -> P",
        "P, B, B, P -> P",
        *_extremes("P({0}), B, B, B -> P({0})", "B, P({0}), B, B -> P({1})"),
    ),
    short=_plain_sgd,
    meaning="A step of gradient descent: the new parameter.",
)
update(
    "momentum_update",
    ("w", "g", "v", "lr", "scale"),
    _momentum,
    kit.samples(
        "b h; h b; b h; (); () | beta=0.5 nesterov=False weight_decay=0.0",
        "s; s: bf16; s; (); () | beta=0.75 nesterov=True weight_decay=0.25",
        values="int int int positive positive",
    ),
    flops=5,
    true_rows=kit.rows_with_reason(
        _REDUCED,
        "P, P, P, B, B -> P, P",
        "P, B, P, B, P -> P, P",
        "P, B, B, P, B -> P, B",
        *_extremes(
            "P({0}), B, B, B, B -> P({0}), B",
            "B, P({0}), B, B, B -> P({1}), P({0})",
            "B, B, P({0}), B, B -> P({1}), P({0})",
        ),
    ),
    meaning="A step with momentum: the new parameter and its velocity.",
)

# --- Adam ------------------------------------------------------------------------------------


def _adam(
    attrs: kit.Attrs,
    w: kit.Array,
    g: kit.Array,
    m: kit.Array,
    v: kit.Array,
    lr: kit.Array,
    scale: kit.Array,
    step: kit.Array,
) -> _Arrays:
    """Kingma and Ba 2015; `decoupled`: with the weight decay of Loshchilov and Hutter 2019."""
    beta1, beta2, decay = attrs["beta1"], attrs["beta2"], attrs["weight_decay"]
    step = step.astype(w.dtype)
    g = scale * g if attrs["decoupled"] else scale * g + decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    direction = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + attrs["eps"])
    if attrs["decoupled"]:
        direction = direction + decay * w
    return np.asarray(w - lr * direction), np.asarray(m), np.asarray(v)


update(
    "adam_update",
    ("w", "g", "m", "v", "lr", "scale", "step"),
    _adam,
    kit.samples(
        "b h; h b; b h; b h; (); (); (): i32 | beta1=0.75 beta2=0.875 eps=1e-08 "
        "weight_decay=0.25 decoupled=True",
        values="int int int positive positive positive positive",
    ),
    flops=12,
    fused=True,
    true_rows=kit.rows_with_reason(
        _REDUCED,
        *_extremes(
            "P({0}), B, B, B, B, B, B -> P({0}), B, B",
            "B, B, P({0}), B, B, B, B -> P({1}), P({0}), B",
        ),
    ),
    meaning="A step of Adam or AdamW: the new parameter, mean and mean square of the gradient.",
)
