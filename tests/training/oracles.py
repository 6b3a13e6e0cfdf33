"""The meaning of operators whose text torch cannot derive, on float64, by hand and by position.

That texts have the numpy meaning of their operators is proved in `tests/ops`. Nothing written here
is taken from the compiler. Operands come in the order of dims of the sample; `sig` has the types,
with dims by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meshdsl.ir.types import Dim
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.prove.torch_run import call, evaluate

Oracle = Callable[..., Tensor]


def spread(x: Tensor, names: Sequence[str], dims: Sequence[Dim]) -> Tensor:
    """`x`, whose dims are called `names`, with all of `dims` in their order."""
    present = [d.name for d in dims if d.name in names]
    x = x.permute([list(names).index(n) for n in present])
    for at, dim in enumerate(dims):
        x = x if dim.name in names else x.unsqueeze(at)
    return x.expand([d.size for d in dims])


def at(sig: Signature, name: str = "dim") -> int:
    """The position of the dim of an attribute in the first operand."""
    return sig.ins[0].names.index(sig.attrs[name].name)


def pointwise(function: Callable[..., Tensor]) -> Oracle:
    """On operands that have all dims of the result."""

    def run(sig: Signature, *xs: Tensor) -> Tensor:
        full = [spread(x, t.names, sig.outs[0].dims) for x, t in zip(xs, sig.ins, strict=True)]
        return function(*full)

    return run


def letters(sig: Signature) -> Mapping[str, str]:
    """A letter for every dim."""
    names = dict.fromkeys(n for t in (*sig.ins, *sig.outs) for n in t.names)
    return {n: chr(ord("a") + i) for i, n in enumerate(names)}


def normed(centred: bool, eps: float) -> Oracle:
    """X / deviation (of the mean, or of 0) * scale + shift along a dim; `eps` is the usual one."""

    def run(sig: Signature, x: Tensor, *scales: Tensor) -> Tensor:
        where = at(sig)
        z = x - x.mean(where, keepdim=True) if centred else x
        above: float = sig.attrs.get("eps", eps)
        z = z / (z.square().mean(where, keepdim=True) + above).sqrt()
        full = [
            spread(s, t.names, sig.ins[0].dims) for s, t in zip(scales, sig.ins[1:], strict=True)
        ]
        return (z * full[0] if full else z) + (full[1] if len(full) > 1 else 0.0)

    return run


def batch_normed(sig: Signature, x: Tensor, *channels: Tensor) -> Tensor:
    """X less its mean, over its deviation, scaled and shifted; both may be given."""
    scales = [spread(c, sig.ins[1].names, sig.ins[0].dims) for c in channels]
    if len(scales) == 2:
        where = [sig.ins[0].names.index(d.name) for d in sig.attrs["dims"]]
        mean = x.mean(where, keepdim=True)
        scales = [mean, (x - mean).square().mean(where, keepdim=True), *scales]
    mean, variance, scale, shift = scales
    eps: float = sig.attrs["eps"]
    return (x - mean) / (variance + eps).sqrt() * scale + shift


def batch_norm_slope(
    sig: Signature, dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """The gradient by x; mean and variance are any numbers here."""
    channel = sig.ins[2].names
    where = [sig.ins[0].names.index(d.name) for d in sig.attrs["dims"]]
    scale, mean, variance = (spread(c, channel, sig.ins[0].dims) for c in (scale, mean, variance))
    eps: float = sig.attrs["eps"]
    inverse = (variance + eps).rsqrt()
    z = (x - mean) * inverse
    means = dy.mean(where, keepdim=True) + z * (dy * z).mean(where, keepdim=True)
    return scale * inverse * (dy - means)


def batch_norm_sums(
    sig: Signature, dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """The gradient by scale: of dy times the normalised x."""
    channel = sig.ins[2].names
    where = [i for i, n in enumerate(sig.ins[0].names) if n not in channel]
    mean, variance = (spread(c, channel, sig.ins[0].dims) for c in (mean, variance))
    eps: float = sig.attrs["eps"]
    return (dy * (x - mean) / (variance + eps).sqrt()).sum(where)


def batch_norm_input(sig: Signature, dy: Tensor, x: Tensor, *channels: Tensor) -> Tensor:
    """The gradient by x, from those by scale and shift, which are any numbers here."""
    scale, mean, variance, dscale, dshift = (
        spread(c, sig.ins[2].names, sig.ins[0].dims) for c in channels
    )
    eps, count = float(sig.attrs["eps"]), int(sig.attrs["count"])
    deviation = (variance + eps).sqrt()
    terms = dshift + (x - mean) / deviation * dscale
    return scale / deviation * (dy - terms / count)


def pulled_back(forward: Oracle) -> Oracle:
    """The gradient of `forward` by its first operand: of a cotangent, and the operands."""

    def run(sig: Signature, dy: Tensor, *xs: Tensor) -> Tensor:
        y = forward(Signature(sig.ins[1:], sig.outs, sig.attrs), *xs)
        (found,) = torch.autograd.grad(y, xs[0], dy, create_graph=True)
        return found

    return run


def cross_entropy_slope(sig: Signature, dy: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    dim = sig.attrs["dim"]
    where = sig.ins[1].names.index(dim.name)
    hot = functional.one_hot(targets.long(), dim.size)
    full = spread(hot, (*sig.ins[2].names, dim.name), sig.ins[1].dims)
    return spread(dy, sig.ins[0].names, sig.ins[1].dims) * (torch.softmax(logits, where) - full)


def dropped(sig: Signature, x: Tensor, *numbers: Tensor) -> Tensor:
    """Times what the same draw makes of ones."""
    ones = torch.ones_like(x)
    factors: Tensor = evaluate(lookup("dropout"), call(sig), [ones, *numbers]).detach()
    return x * factors


def _scored(
    sig: Signature, q: Tensor, k: Tensor, *mask: Tensor
) -> tuple[Tensor, Tensor, list[str]]:
    """The scores along `mem`, last of their dims; where they are hidden; the names of the dims."""
    key, mem = (d.name for d in sig.attrs["dims"])
    types, known = (*sig.ins[:2], *sig.ins[3:]), letters(sig)
    rows = [n for n in dict.fromkeys(n for t in types for n in t.names) if n not in (key, mem)]
    sizes = {d.name: d for t in types for d in t.dims}
    dims = [sizes[n] for n in (*rows, mem)]
    terms = ["".join(known[n] for n in t.names) for t in sig.ins[:2]]
    small = [n for n in (*rows, mem) if any(t.has(n) for t in sig.ins[:2])]
    scores = torch.einsum(f"{','.join(terms)}->{''.join(known[n] for n in small)}", q, k)
    scores = spread(scores * sig.attrs["scale"], small, dims)
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    for x, type_ in zip(mask, sig.ins[3:], strict=True):
        if x.dtype == torch.bool:
            hidden = hidden | ~spread(x, type_.names, dims)
        else:  # the last position that is seen
            hidden = hidden | (torch.arange(sizes[mem].size) > x)
    for dim in sig.attrs["causal"]:
        later = torch.arange(dim.size)[:, None] < torch.arange(sizes[mem].size)
        hidden = hidden | spread(later, (dim.name, mem), dims)
    return scores, hidden, [*rows, mem]


def attention(sig: Signature, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    scores, hidden, names = _scored(sig, q, k, *mask)
    weights = torch.softmax(torch.where(hidden, -1e9, scores), -1)
    known = letters(sig)
    terms = ["".join(known[n] for n in ns) for ns in (names, sig.ins[2].names, sig.outs[0].names)]
    return torch.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", weights, v)


def attention_slope(
    sig: Signature,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *mask: Tensor,
) -> Tensor:
    """The gradient by q; o and lse are any numbers here, and no row sees nothing."""
    own = Signature((*sig.ins[1:4], *sig.ins[6:]), sig.outs, sig.attrs)
    scores, hidden, names = _scored(own, q, k, *mask)
    known = letters(sig)

    def term(names: Sequence[str]) -> str:
        return "".join(known[n] for n in names)

    out, rows = term(sig.ins[0].names), term(names[:-1])
    p = torch.where(hidden, 0.0, torch.exp(scores - torch.einsum(
        f"{term(sig.ins[5].names)}->{rows}", lse).unsqueeze(-1)))  # fmt: skip
    dp = torch.einsum(f"{out},{term(sig.ins[3].names)}->{term(names)}", do, v)
    along = torch.einsum(f"{out},{out}->{rows}", do, o).unsqueeze(-1)
    ds = p * (dp - along) * sig.attrs["scale"]
    ends = term(sig.ins[2].names), term(sig.ins[1].names)
    return torch.einsum(f"{term(names)},{ends[0]}->{ends[1]}", ds, k)


def recurrence(sig: Signature, *xs: Tensor) -> Tensor:
    """One step after the other."""
    names = dict.fromkeys(d.name for t in (sig.ins[1], sig.ins[0], *sig.ins[2:]) for d in t.dims)
    assert tuple(names) == sig.outs[0].names
    full = [spread(x, t.names, sig.outs[0].dims) for x, t in zip(xs, sig.ins, strict=True)]
    along = sig.outs[0].names.index(sig.attrs["dim"].name)
    a, b = (x.unbind(along) for x in full[:2])
    h = full[2].select(along, 0) if len(full) > 2 else torch.zeros_like(b[0])
    states, order = list(b), range(len(b))
    for t in reversed(order) if sig.attrs["reverse"] else order:
        h = states[t] = a[t] * h + b[t]
    return torch.stack(states, along)


def silu_slope(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


ORACLES: dict[str, Oracle] = {
    "attention": attention,
    "attention_grad": attention_slope,
    "attention_lse": attention,
    "batch_norm_stats": batch_normed,
    "batch_norm_grad": batch_norm_slope,
    "batch_norm_input_grad": batch_norm_input,
    "batch_norm_sums": batch_norm_sums,
    "cross_entropy_grad": cross_entropy_slope,
    "dropout": dropped,
    "frozen_batch_norm": batch_normed,
    "layer_norm_grad": pulled_back(normed(True, 1e-5)),
    "linear_recurrence": recurrence,
    "rms_norm_grad": pulled_back(normed(False, 1e-6)),
    "silu_grad": pointwise(silu_slope),
}
"""By the name of the operator."""


def oracle_of(name: str) -> Oracle:
    """The one written by hand; of an operator that has none, its text, which torch derives."""
    return ORACLES.get(name) or (lambda sig, *xs: evaluate(lookup(name), call(sig), list(xs)))
