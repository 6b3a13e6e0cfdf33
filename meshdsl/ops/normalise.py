"""Composites: softmax and its kin, norms, cross-entropy.

Each is one operator, with torch's fused kernel, where its own dim is whole. Where that is split,
its definition of the same name in `prelude/` is used: primitives and a few small all_reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import indexing, kit

# --- constructors ----------------------------------------------------------------------------

NEVER: Mapping[int, kit.InPlace] = {}


def composite(
    name: str,
    arity: tuple[int, int],
    infer: kit.Infer,
    numpy: Callable[..., kit.Array],
    torch: Callable[[kit.TorchCall], str],
    samples: Sequence[kit.Sample],
    *,
    meaning: str,
    linear: Callable[[kit.Signature], Sequence[Sequence[int]]] = lambda sig: (),
    exact: bool = False,
    cost: int = 5,
    internal: bool = False,
    gradient: kit.Gradient | None = None,
    in_place: Mapping[int, kit.InPlace] = NEVER,
    fits_in: kit.FitsIn | None = None,
    true_rows: Mapping[str, str] = kit.NO_TRUE_ROWS,
    scratch: kit.Scratch | None = None,
    reduces: bool = False,
    indices: int | None = None,
    below: Callable[[kit.Signature], int] | None = None,
    leaves_long: bool = False,
    options: tuple[tuple[str, Any], ...] = (),
    bind: kit.Bind | None = None,
    prelude_lacks: str = "",
) -> kit.OpDef:
    """Register a composite along `dim`, which is in no loop; `cost` is its flops per element.

    One that `reduces` does so over `dims`, any number of them. An `internal` one cannot be called
    by name. Where its result is a float and it has no `gradient`, that of its definition in the
    prelude is used.
    """

    def factors(sig: kit.Signature) -> kit.Factors:
        return kit.plain(linear=linear(sig), whole=True)(sig)

    return kit.operator(
        name,
        kit.Surface("view" if internal else "dims?" if reduces else "dim", arity, options),
        infer,
        factors,
        numpy,
        torch,
        samples,
        exact=exact,
        composite=True,
        flops=lambda sig: cost * max(t.elements for t in sig.ins),
        gradient=gradient,
        in_place=in_place,
        fits_in=fits_in,
        true_rows=true_rows,
        scratch=scratch,
        bind=bind,
        prelude_lacks=prelude_lacks,
        indices=indices,
        below=below,
        leaves_long=leaves_long,
        precision="widest" if internal or exact else "f32",
        meaning=meaning,
    )


def wide(call: kit.TorchCall) -> str:
    """The first operand; f16 as f32, since torch's CPU kernels sum exponentials in f16."""
    return f"{call.tensor(0)}.float()" if call.ins[0].dtype == kit.F16 else call.tensor(0)


def narrow(call: kit.TorchCall) -> str:
    """The cast back where `wide` widened."""
    return ".half()" if call.ins[0].dtype == kit.F16 else ""


_SAMPLES = kit.samples("s | dim=s", "b s h | dim=s", "h v | dim=v")

# --- softmax and its kin ---------------------------------------------------------------------


def _log_softmax(x: kit.Array, axis: int) -> kit.Array:
    """log_softmax; an infinite maximum is subtracted, and makes all of a row NaN."""
    z = x - x.max(axis, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis, keepdims=True)))


def softmax_numpy(x: kit.Array, axis: int) -> kit.Array:
    """Softmax of `x` along `axis`."""
    return np.exp(_log_softmax(x, axis))


def _from_result(name: str) -> kit.Gradient:
    """The gradient as composite `name` of the cotangent with all its dims, and the result."""

    def gradient(call: kit.Backward) -> kit.Grads:
        grad = kit.full_grad(call)
        return {0: call.emit(name, grad, call.result(), dim=call.attrs["dim"])}

    return gradient


composite(
    "softmax",
    (1, 1),
    kit.same_type("softmax", "float"),
    lambda call, x: softmax_numpy(x, kit.axis(call)),
    lambda call: f"torch.softmax({call.tensor(0)}, {kit.axis(call)})",
    _SAMPLES,
    gradient=_from_result("softmax_grad"),
    meaning="e^x over the sum of e^x along a dim.",
)
composite(
    "log_softmax",
    (1, 1),
    kit.same_type("log_softmax", "float"),
    lambda call, x: _log_softmax(x, kit.axis(call)),
    lambda call: f"torch.log_softmax({wide(call)}, {kit.axis(call)}){narrow(call)}",
    _SAMPLES,
    gradient=_from_result("log_softmax_grad"),
    meaning="The logarithm of `softmax` along a dim, computed without overflow.",
)
# --- norms -----------------------------------------------------------------------------------

USUAL_EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6, "batch_norm": 1e-5}
"""What is added to a variance or mean square where a call does not say it, here and in torch."""


def eps_of(name: str, attrs: kit.Attrs) -> float:
    """The attribute `eps` of a norm or its gradient; a call with the usual one has none."""
    eps: float = attrs.get("eps", USUAL_EPS[name])
    return eps


def _is_number(value: object, *kinds: type) -> bool:
    """Whether an option is an integer, or of one of these kinds; Python's `True` is none."""
    return isinstance(value, (int, *kinds)) and not isinstance(value, bool)


def _norm_bind(name: str) -> kit.Bind:
    def bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
        del ins
        eps, others = attrs["eps"], {n: value for n, value in attrs.items() if n != "eps"}
        if not _is_number(eps, float) or not 0 <= eps < math.inf:
            message = f"`eps` of `{name}` cannot be {eps}"
            way, also = kit.SetOption("eps", "1e-5"), "`eps` is a number of 0 or more"
            raise kit.OpError("MD0213", message, None, way, also=also)
        return others if eps == USUAL_EPS[name] else {**others, "eps": float(eps)}

    return bind


def _along(ins: kit.Types) -> Iterator[kit.Way]:
    """The way out where scale and shift have another dim of the tensor: it is along that."""
    names = {type_.names for type_ in ins[1:]}
    if len(names) == 1 and len(only := names.pop()) == 1 and ins[0].has(only[0]):
        yield kit.Brackets(only[0])


def _norm_infer(name: str) -> kit.Infer:
    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        dim: kit.Dim = attrs["dim"]
        kit.need_dims(name, ins[0], (dim,))
        kit.need_kind(name, "float", *ins)
        kit.need_one_dtype(name, *ins)
        for type_ in ins[1:]:
            if type_.names != (dim.name,):
                raise kit.OpError(
                    "MD0214",
                    f"`{name}[{dim}]` takes a scale and shift of the dims [{dim}], not {type_}",
                    f"rename its dim to `{dim}`, or multiply and add outside",
                    *_along(ins),
                )
        return (ins[0],)

    return infer


def _layer_norm_numpy(call: kit.NumpyCall, x: kit.Array, *scales: kit.Array) -> kit.Array:
    axis = kit.axis(call)
    centred = x - x.mean(axis, keepdims=True)
    variance = np.square(centred).mean(axis, keepdims=True)
    return _scaled(call, centred / np.sqrt(variance + eps_of("layer_norm", call.attrs)), scales)


def _rms_norm_numpy(call: kit.NumpyCall, x: kit.Array, *scales: kit.Array) -> kit.Array:
    mean = np.square(x).mean(kit.axis(call), keepdims=True)
    return _scaled(call, x / np.sqrt(mean + eps_of("rms_norm", call.attrs)), scales)


def _scaled(call: kit.NumpyCall, x: kit.Array, scales: Sequence[kit.Array]) -> kit.Array:
    """`x * g + b`, with the operands that are given."""
    parts = [kit.align(s, t, call.ins[0].dims) for s, t in zip(scales, call.ins[1:], strict=True)]
    x = x * parts[0] if parts else x
    return np.asarray(x + parts[1] if len(parts) > 1 else x)


def _norm_text(function: str) -> Callable[[kit.TorchCall], str]:
    """A kernel that normalises the last dim; another dim is permuted there and back as a view."""

    def write(call: kit.TorchCall) -> str:
        dim, names = call.attrs["dim"], call.ins[0].names
        last, eps = (*(n for n in names if n != dim.name), dim.name), eps_of(function, call.attrs)
        scales = "".join(f", {call.tensor(i)}" for i in range(1, len(call.ins)))
        x = kit.permuted(call.tensor(0), names, last)
        text = f"torch.nn.functional.{function}({x}, ({dim.size},){scales}, eps={eps!r})"
        return kit.permuted(text, last, names)

    return write


def _norm_linear(sig: kit.Signature) -> Sequence[Sequence[int]]:
    """Linear in scale and shift together; in the scale alone where there is no shift."""
    return (tuple(range(1, len(sig.ins))),) if len(sig.ins) > 1 else ()


def _norm_gradient(name: str) -> kit.Gradient:
    """By x, one composite. By scale and shift, sums linear in a cotangent that may be partial."""

    def gradient(call: kit.Backward) -> kit.Grads:
        scales, grads = range(1, min(2, len(call.ins))), {}
        if call.wanted(0):
            grad = kit.full_grad(call)
            saved = [call.operand(i) for i in (0, *scales)]
            grads[0] = call.emit(f"{name}_grad", grad, *saved, **call.attrs)
        if len(call.ins) > 1 and call.wanted(1):
            plain = call.emit(name, call.operand(0), **call.attrs)
            grads[1] = kit.contracted(call, 1, call.grad, plain)
        if len(call.ins) > 2 and call.wanted(2):
            grads[2] = call.sized(call.grad, 2)
        return grads

    return gradient


def norm_samples(
    same: int, scales: int, values: str = "int", *, has_eps: bool = False
) -> kit.SampleList:
    """Calls of `same` operands of one type, and up to `scales` that have their own dim alone.

    With `has_eps` one more has all of them, and another `eps` than the usual.
    """
    cases = (("s", "s"), ("b s h", "s"), ("b h", "h"))
    texts = (
        "; ".join([dims] * same + [dim] * count) + f" | dim={dim}"
        for dims, dim in cases
        for count in range(scales + 1)
    )
    with_eps = "; ".join([*["b s h"] * same, *["h"] * scales]) + " | dim=h eps=0.01"
    return kit.samples(*texts, *([with_eps] if has_eps else []), values=values)


composite(
    "layer_norm",
    (1, 3),
    _norm_infer("layer_norm"),
    _layer_norm_numpy,
    _norm_text("layer_norm"),
    norm_samples(1, 2, has_eps=True),
    options=(("eps", USUAL_EPS["layer_norm"]),),
    bind=_norm_bind("layer_norm"),
    linear=_norm_linear,
    cost=8,
    true_rows={f"B, B, P({op}) -> P({op})": "as for `+`" for op in ("max", "min")},
    gradient=_norm_gradient("layer_norm"),
    meaning="The tensor less its mean along a dim, over its deviation; times g, plus b. "
    "The deviation is the root of the variance plus `eps`.",
)
composite(
    "rms_norm",
    (1, 2),
    _norm_infer("rms_norm"),
    _rms_norm_numpy,
    _norm_text("rms_norm"),
    norm_samples(1, 1, has_eps=True),
    options=(("eps", USUAL_EPS["rms_norm"]),),
    bind=_norm_bind("rms_norm"),
    linear=_norm_linear,
    gradient=_norm_gradient("rms_norm"),
    scratch=lambda sig, numbers: sig.ins[0].bytes,  # the squares, where torch has no kernel for it
    meaning="The tensor over the root of its mean square plus `eps` along a dim; times g.",
)

# --- cross-entropy ---------------------------------------------------------------------------


def _cross_entropy_bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """The attributes, `ignore_index` among them where a call has it."""
    del ins
    ignored = attrs["ignore_index"]
    if ignored is None:
        return {name: value for name, value in attrs.items() if name != "ignore_index"}
    if not _is_number(ignored):
        message = f"`ignore_index` of `cross_entropy` must be an integer, not {ignored}"
        raise kit.OpError(
            "MD0213", message, "write `ignore_index=-100`", kit.SetOption("ignore_index", "-100")
        )
    return attrs


def _cross_entropy_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dim: kit.Dim = attrs["dim"]
    out = kit.same_type("cross_entropy", "float")(ins[:1], attrs)[0].without(attrs["dim"].name)
    indexing.need_indices("cross_entropy", ins[1], dim)
    if set(ins[1].names) != set(out.names):
        wanted = kit.listed(out.names) if out.dims else "none"
        raise kit.OpError(
            "MD0214",
            f"`cross_entropy[{dim}]` of {ins[0]} takes targets for each position, not {ins[1]}",
            f"the dims of the targets are those of the logits without `{dim}`: {wanted}",
        )
    return (out,)


def _cross_entropy_numpy(call: kit.NumpyCall, logits: kit.Array, targets: kit.Array) -> kit.Array:
    dim = call.attrs["dim"]
    axis = kit.axis(call)
    ignored = call.attrs.get("ignore_index")
    index = indexing.checked_numpy(call, 1, targets, dim.name, ignored)
    index = kit.align(index, call.ins[1], call.outs[0].dims)
    counts = index != ignored
    at = np.expand_dims(np.where(counts, index, 0), axis)
    losses = -np.take_along_axis(_log_softmax(logits, axis), at, axis).squeeze(axis)
    return np.where(counts, losses, 0)


def _cross_entropy_text(call: kit.TorchCall) -> str:
    """Torch's kernel is fast on positions × classes; flattening to that is usually a view."""
    dim, out = call.attrs["dim"].name, call.outs[0].names
    ignored = call.attrs.get("ignore_index")
    checked = indexing.checked_text(call, 1, dim)
    index = kit.aligned(checked, call.ins[1].names, out)
    option = "" if ignored is None else f", ignore_index={ignored}"
    logits, suffix = kit.permuted(wide(call), call.ins[0].names, (*out, dim)), narrow(call)
    if len(out) > 1:
        logits, index = f"{logits}.flatten(0, -2)", f"{index}.flatten()"
        suffix = f".unflatten(0, {call.shape(0)}){suffix}"
    return f'torch.nn.functional.cross_entropy({logits}, {index}, reduction="none"{option}){suffix}'


def _cross_entropy_gradient(call: kit.Backward) -> kit.Grads:
    """Of an ignored target the cotangent is 0, and the index any."""
    grad, targets, attrs = call.grad, call.operand(1), dict(call.attrs)
    ignored = attrs.pop("ignore_index", None)
    if ignored is not None:
        is_ignored = call.emit("eq", targets, ignored)
        grad = call.emit("where", is_ignored, kit.zero_like(call, grad), grad)
        targets = call.emit("where", is_ignored, kit.number(call, 0, targets.type.dtype), targets)
    return {0: call.emit("cross_entropy_grad", grad, call.operand(0), targets, **attrs)}


composite(
    "cross_entropy",
    (2, 2),
    _cross_entropy_infer,
    _cross_entropy_numpy,
    _cross_entropy_text,
    kit.samples(
        "v; (): i32 | dim=v",
        "b v; b: i32 | dim=v",
        "b s v; s b: i32 | dim=v",
        "v s; s: i32 | dim=v",
        "b s v; s b: i32 | dim=v ignore_index=2",
        values="int index:v",
    ),
    cost=6,
    options=(("ignore_index", None),),
    bind=_cross_entropy_bind,
    prelude_lacks="ignore_index",
    gradient=_cross_entropy_gradient,
    scratch=lambda sig, numbers: sig.ins[0].bytes,  # the log_softmax
    indices=1,
    meaning="The negative logarithm of the softmax along a dim, at the index of the target; "
    "0 where that is `ignore_index`.",
)
