"""The meaning of every operator, in torch on float64, written by hand and by position.

Nothing here is taken from the compiler: these functions are the oracles of gradients. Operands come
in the order of dims of the sample; `sig` has the types, with dims by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meshdsl.ir.types import Dim
from meshdsl.ops.opdef import Signature, lookup
from tests.ops.torch_run import call, evaluate

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


def along(function: Callable[..., Tensor]) -> Oracle:
    """On tensors of one shape, and the position of the dim."""
    return lambda sig, *xs: function(*xs, at(sig))


def reduced(function: Callable[[Tensor, list[int]], Tensor]) -> Oracle:
    """Over the positions of the dims in brackets."""
    return lambda sig, x: function(x, [sig.ins[0].names.index(d.name) for d in sig.attrs["dims"]])


def letters(sig: Signature) -> Mapping[str, str]:
    """A letter for every dim."""
    names = dict.fromkeys(n for t in (*sig.ins, *sig.outs) for n in t.names)
    return {n: chr(ord("a") + i) for i, n in enumerate(names)}


def einsum(sig: Signature, *xs: Tensor) -> Tensor:
    known = letters(sig)
    terms = ["".join(known[n] for n in t.names) for t in (*sig.ins, *sig.outs)]
    return torch.einsum(f"{','.join(terms[:-1])}->{terms[-1]}", *xs)


def product(x: Tensor, dims: list[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim)
    return x


def turned(sig: Signature, x: Tensor) -> Tensor:
    return spread(x, sig.ins[0].names, sig.outs[0].dims)


def merged(sig: Signature, x: Tensor) -> Tensor:
    names = [d.name for d in sig.attrs["dims"]]
    order: list[str] = []
    for name in sig.outs[0].names:
        order += names if name == sig.attrs["into"].name else [name]
    return x.permute([sig.ins[0].names.index(n) for n in order]).reshape(sig.outs[0].shape)


def joined(sig: Signature, *xs: Tensor) -> Tensor:
    target, parts = sig.attrs["target"], []
    for x, type_, source in zip(xs, sig.ins, sig.attrs["sources"], strict=True):
        dims = [source if d.name == target.name else d for d in sig.outs[0].dims]
        parts.append(spread(x, type_.names, dims))
    return torch.cat(parts, sig.outs[0].names.index(target.name))


def padded(sig: Signature, x: Tensor) -> Tensor:
    (source,), attrs = sig.attrs["source"], sig.attrs
    where = sig.ins[0].names.index(source.name)
    shape = list(x.shape)
    sides = []
    for count in (attrs["before"], attrs["after"]):
        shape[where] = count
        sides.append(x.new_full(shape, attrs["value"]))
    return torch.cat([sides[0], x, sides[1]], where)


def shifted(sig: Signature, x: Tensor) -> Tensor:
    where, by = at(sig), sig.attrs["by"]
    index = torch.arange(x.shape[where]) - by
    inside = (index >= 0) & (index < x.shape[where])
    moved = x.index_select(where, index.clamp(0, x.shape[where] - 1))
    shape = [-1 if i == where else 1 for i in range(x.dim())]
    return torch.mul(moved, inside.reshape(shape))


def looked_up(sig: Signature, table: Tensor, ids: Tensor) -> Tensor:
    dim = sig.attrs["dim"]
    hot = functional.one_hot(ids.long(), dim.size).to(table.dtype)
    names = dict.fromkeys((*sig.ins[0].names, *sig.ins[1].names, *sig.outs[0].names))
    known = {n: chr(ord("a") + i) for i, n in enumerate(names)}
    terms = ["".join(known[n] for n in t.names) for t in (sig.ins[0], sig.ins[1], sig.outs[0])]
    return torch.einsum(f"{terms[0]},{terms[1]}{known[dim.name]}->{terms[2]}", table, hot)


def added_up(sig: Signature, dy: Tensor, ids: Tensor) -> Tensor:
    dim = sig.attrs["dim"]
    hot = functional.one_hot(ids.long(), dim.size).to(dy.dtype)
    known = letters(sig)
    terms = ["".join(known[n] for n in t.names) for t in (sig.ins[0], sig.ins[1], sig.outs[0])]
    return torch.einsum(f"{terms[0]},{terms[1]}{known[dim.name]}->{terms[2]}", dy, hot)


def unpicked(sig: Signature, x: Tensor) -> Tensor:
    dim, where = sig.attrs["dim"], sig.outs[0].names.index(sig.attrs["dim"].name)
    hot = functional.one_hot(torch.tensor(sig.attrs["index"]), dim.size).to(x.dtype)
    shape = [-1 if i == where else 1 for i in range(x.dim() + 1)]
    return x.unsqueeze(where) * hot.reshape(shape)


def normed(centred: bool, eps: float) -> Oracle:
    """X / deviation (of the mean, or of 0) * scale + shift along a dim."""

    def run(sig: Signature, x: Tensor, *scales: Tensor) -> Tensor:
        where = at(sig)
        z = x - x.mean(where, keepdim=True) if centred else x
        z = z / (z.square().mean(where, keepdim=True) + eps).sqrt()
        full = [
            spread(s, t.names, sig.ins[0].dims) for s, t in zip(scales, sig.ins[1:], strict=True)
        ]
        return (z * full[0] if full else z) + (full[1] if len(full) > 1 else 0.0)

    return run


def pulled_back(forward: Oracle) -> Oracle:
    """The gradient of `forward` by its first operand: of a cotangent, and the operands."""

    def run(sig: Signature, dy: Tensor, *xs: Tensor) -> Tensor:
        y = forward(Signature(sig.ins[1:], sig.outs, sig.attrs), *xs)
        (found,) = torch.autograd.grad(y, xs[0], dy, create_graph=True)
        return found

    return run


def cross_entropy(sig: Signature, logits: Tensor, targets: Tensor) -> Tensor:
    dim = sig.attrs["dim"]
    where = sig.ins[0].names.index(dim.name)
    rest = [d for d in sig.ins[0].dims if d.name != dim.name]
    hot = functional.one_hot(targets.long(), dim.size)
    full = spread(hot, (*sig.ins[1].names, dim.name), sig.ins[0].dims)
    found = -(torch.log_softmax(logits, where) * full).sum(where)
    return spread(found, [d.name for d in rest], rest)


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


def bell(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def gelu(sig: Signature, x: Tensor) -> Tensor:
    if sig.attrs["approximate"] == "none":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(sig: Signature, dy: Tensor, x: Tensor) -> Tensor:
    full = [spread(t, i.names, sig.outs[0].dims) for t, i in zip((dy, x), sig.ins, strict=True)]
    if sig.attrs["approximate"] == "none":
        return full[0] * (0.5 * (1 + torch.erf(full[1] / math.sqrt(2))) + full[1] * bell(full[1]))
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (full[1] + 0.044715 * full[1] ** 3))
    slope = k * (1 + 3 * 0.044715 * full[1] ** 2)
    return full[0] * (0.5 * (1 + t) + 0.5 * full[1] * (1 - t * t) * slope)


def softmax_slope(dy: Tensor, y: Tensor, where: int) -> Tensor:
    return y * (dy - (dy * y).sum(where, keepdim=True))


def log_softmax_slope(dy: Tensor, y: Tensor, where: int) -> Tensor:
    return dy - torch.exp(y) * dy.sum(where, keepdim=True)


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
        hidden = hidden | ~spread(x, type_.names, dims)
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


def running_sums(sig: Signature, x: Tensor) -> Tensor:
    """A product with a triangle of ones."""
    where, n = sig.ins[0].index(sig.attrs["dim"].name), sig.attrs["dim"].size
    ones = torch.ones(n, n, dtype=x.dtype).tril(-1 if sig.attrs["exclusive"] else 0)
    ones = ones.mT if sig.attrs["reverse"] else ones
    found: Tensor = torch.tensordot(x, ones, ([where], [1]))
    return found.movedim(-1, where)


def whether(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask, a, b)


def silu_slope(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


LAYER, ROOT_MEAN_SQUARE = normed(True, 1e-5), normed(False, 1e-6)

ORACLES: dict[str, Oracle] = {
    "abs": pointwise(torch.abs),
    "add": pointwise(lambda a, b: a + b),
    "attention": attention,
    "attention_grad": attention_slope,
    "attention_lse": attention,
    "broadcast": turned,
    "cast": lambda sig, x: x.double(),
    "concat": joined,
    "cos": pointwise(torch.cos),
    "cross_entropy": cross_entropy,
    "cross_entropy_grad": cross_entropy_slope,
    "cumsum": running_sums,
    "div": pointwise(lambda a, b: a / b),
    "mod": pointwise(torch.remainder),
    "dropout": dropped,
    "einsum": einsum,
    "erf": pointwise(torch.erf),
    "exp": pointwise(torch.exp),
    "gather": looked_up,
    "gelu": gelu,
    "gelu_grad": gelu_slope,
    "identity": lambda sig, x: x * 1.0,
    "layer_norm": LAYER,
    "layer_norm_grad": pulled_back(LAYER),
    "log": pointwise(torch.log),
    "log_softmax": along(lambda x, where: x - torch.logsumexp(x, where, keepdim=True)),
    "log_softmax_grad": along(log_softmax_slope),
    "logsumexp": reduced(torch.logsumexp),
    "max": reduced(lambda x, dims: torch.amax(x, dims)),
    "maximum": pointwise(torch.maximum),
    "mean": reduced(lambda x, dims: x.mean(dims)),
    "merge": merged,
    "min": reduced(lambda x, dims: torch.amin(x, dims)),
    "minimum": pointwise(torch.minimum),
    "mul": pointwise(lambda a, b: a * b),
    "neg": pointwise(lambda x: -x),
    "pad": padded,
    "pick": lambda sig, x: x.select(at(sig), sig.attrs["index"]),
    "pow": pointwise(torch.pow),
    "prod": reduced(product),
    "relu": pointwise(lambda x: x.clamp(min=0)),
    "relu_grad": pointwise(lambda dy, y: dy * (y > 0)),
    "rename": lambda sig, x: x * 1.0,
    "rms_norm": ROOT_MEAN_SQUARE,
    "rms_norm_grad": pulled_back(ROOT_MEAN_SQUARE),
    "rsqrt": pointwise(lambda x: x**-0.5),
    "scatter_add": added_up,
    "shift": shifted,
    "sigmoid": pointwise(torch.sigmoid),
    "sigmoid_grad": pointwise(lambda dy, y: dy * y * (1 - y)),
    "silu": pointwise(lambda x: x * torch.sigmoid(x)),
    "silu_grad": pointwise(silu_slope),
    "sin": pointwise(torch.sin),
    "slice": lambda sig, x: x.narrow(
        at(sig), sig.attrs["start"], sig.attrs["stop"] - sig.attrs["start"]
    ),
    "softmax": along(torch.softmax),
    "softmax_grad": along(softmax_slope),
    "softplus": pointwise(lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    "split": lambda sig, x: x.reshape(sig.outs[0].shape),
    "sqrt": pointwise(torch.sqrt),
    "square": pointwise(lambda x: x * x),
    "sub": pointwise(lambda a, b: a - b),
    "sum": reduced(lambda x, dims: x.sum(dims)),
    "tanh": pointwise(torch.tanh),
    "tanh_grad": pointwise(lambda dy, y: dy * (1 - y * y)),
    "transpose": turned,
    "unpick": unpicked,
    "where": pointwise(whether),
}
"""By the name of the operator."""


def oracle_of(name: str) -> Oracle:
    """The one written by hand; of an operator that has none, torch's own derivative of its text."""
    return ORACLES.get(name) or (lambda sig, *xs: evaluate(lookup(name), call(sig), list(xs)))
