"""Tensors of torch with named dims: what the operators mean, written apart from the language."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Dims = tuple[str, ...]
NEAR = 1e-7
"""Numbers nearer than this may be told apart otherwise elsewhere: the answer jumps there."""


class Corner(Exception):
    """A value so near to a corner (equal maxima, a comparison) that rounding decides."""


@dataclass(frozen=True, eq=False)
class Named:
    """A tensor and the names of its dims."""

    data: torch.Tensor
    dims: Dims

    def __post_init__(self) -> None:
        assert self.data.dim() == len(self.dims) == len(set(self.dims)), (
            self.data.shape,
            self.dims,
        )

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.dims, self.data.shape, strict=True))

    def at(self, dim: str) -> int:
        return self.dims.index(dim)

    def without(self, *dims: str) -> Dims:
        return tuple(d for d in self.dims if d not in dims)


def aligned(x: Named, dims: Sequence[str]) -> torch.Tensor:
    """`x` with just these dims in this order; those it lacks are of size 1."""
    data = x.data.permute([x.at(d) for d in dims if d in x.dims])
    for place, dim in enumerate(dims):
        if dim not in x.dims:
            data = data.unsqueeze(place)
    return data


def ordered(x: Named, dims: Sequence[str]) -> Named:
    """`x` with its dims in another order."""
    assert set(dims) == set(x.dims)
    return Named(aligned(x, dims), tuple(dims))


def union(*xs: Named) -> Dims:
    return tuple(dict.fromkeys(d for x in xs for d in x.dims))


def pointwise(f: Callable[..., torch.Tensor], *xs: Named) -> Named:
    dims = union(*xs)
    found = f(*(aligned(x, dims) for x in xs))
    return Named(found, dims)


def expanded(x: Named, dims: Sequence[str], sizes: dict[str, int]) -> torch.Tensor:
    return aligned(x, dims).expand([sizes[d] for d in dims])


def apart(difference: torch.Tensor, exact: bool = False) -> None:
    """Raise Corner if a difference is nearly 0; just 0 may be `exact`."""
    near = difference.detach().abs() < NEAR
    if exact:
        near &= difference.detach() != 0
    if bool(near.any()):
        raise Corner


def compared(f: Callable[..., torch.Tensor], x: Named, y: Named) -> Named:
    dims = union(x, y)
    a, b = aligned(x, dims), aligned(y, dims)
    if a.is_floating_point() or b.is_floating_point():
        apart(a - b)
    return Named(f(a, b), dims)


def extremes(f: Callable[..., torch.Tensor], x: Named, y: Named) -> Named:
    dims = union(x, y)
    a, b = aligned(x, dims), aligned(y, dims)
    apart(a - b)
    return Named(f(a, b), dims)


def where(c: Named, x: Named, y: Named) -> Named:
    dims = union(x, y, c)
    return Named(torch.where(aligned(c, dims), aligned(x, dims), aligned(y, dims)), dims)


def cornered(f: Callable[[torch.Tensor], torch.Tensor], x: Named) -> Named:
    """A function with a corner at 0."""
    apart(x.data, exact=True)
    return Named(f(x.data), x.dims)


def reduced(kind: str, x: Named, dims: Sequence[str]) -> Named:
    rest = x.without(*dims)
    flat = aligned(x, (*rest, *dims)).reshape([*(x.sizes[d] for d in rest), -1])
    if kind in ("max", "min"):
        alone(flat)
    made = {
        "sum": lambda: flat.sum(-1),
        "mean": lambda: flat.mean(-1),
        "max": lambda: flat.amax(-1),
        "min": lambda: flat.amin(-1),
        "prod": lambda: flat.prod(-1),
        "logsumexp": lambda: flat.logsumexp(-1),
        "argmax": lambda: alone(flat).argmax(-1),
    }[kind]()
    return Named(made, rest)


def alone(flat: torch.Tensor) -> torch.Tensor:
    """`flat`, of which no two numbers are nearly equal along the last dim."""
    if flat.shape[-1] > 1:
        apart(flat.sort(-1).values.diff(dim=-1))
    return flat


def along(f: Callable[..., torch.Tensor], x: Named, dim: str) -> Named:
    """`f(tensor, dim=…)` that keeps the shape."""
    return Named(f(x.data, dim=x.at(dim)), x.dims)


def rms_norm(x: Named, dim: str) -> Named:
    at = x.at(dim)
    return Named(x.data / ((x.data**2).mean(at, keepdim=True) + 1e-6).sqrt(), x.dims)


def layer_norm(x: Named, dim: str) -> Named:
    at = x.at(dim)
    z = x.data - x.data.mean(at, keepdim=True)
    return Named(z / ((z**2).mean(at, keepdim=True) + 1e-5).sqrt(), x.dims)


def shifted(x: Named, dim: str, by: int) -> Named:
    at, size = x.at(dim), x.sizes[dim]
    by = max(-size, min(size, by))
    kept = x.data.narrow(at, max(-by, 0), size - abs(by))
    fill = torch.zeros_like(x.data.narrow(at, 0, abs(by)))
    return Named(torch.cat([fill, kept] if by > 0 else [kept, fill], at), x.dims)


def padded(x: Named, dim: str, to: str, before: int, after: int, value: float) -> Named:
    at, sizes = x.at(dim), list(x.data.shape)
    sides = []
    for count in (before, after):
        sizes[at] = count
        sides.append(torch.full(sizes, value, dtype=x.data.dtype))
    data = torch.cat([sides[0], x.data, sides[1]], at)
    return renamed(Named(data, x.dims), dim, to)


def renamed(x: Named, dim: str, to: str) -> Named:
    return Named(x.data.view_as(x.data), tuple(to if d == dim else d for d in x.dims))


def sliced(x: Named, dim: str, start: int, stop: int, to: str) -> Named:
    return renamed(Named(x.data.narrow(x.at(dim), start, stop - start), x.dims), dim, to)


def stacked(xs: Sequence[Named], dim: str) -> Named:
    return Named(torch.stack([ordered(x, xs[0].dims).data for x in xs]), (dim, *xs[0].dims))


def picked(x: Named, dim: str, index: int) -> Named:
    return Named(x.data.select(x.at(dim), index), x.without(dim))


def merged(x: Named, dims: Sequence[str], to: str) -> Named:
    """`dims` become one where the first of them (as `x` has them) stood."""
    at = min(x.at(d) for d in dims)
    rest = x.without(*dims)
    before = sum(1 for d in x.dims[:at] if d in rest)
    order = (*rest[:before], *dims, *rest[before:])
    sizes = [x.sizes[d] for d in rest]
    sizes.insert(before, math.prod(x.sizes[d] for d in dims))
    return Named(aligned(x, order).reshape(sizes), (*rest[:before], to, *rest[before:]))


def split(x: Named, dim: str, parts: dict[str, int]) -> Named:
    at = x.at(dim)
    shape = [*x.data.shape[:at], *parts.values(), *x.data.shape[at + 1 :]]
    return Named(x.data.reshape(shape), (*x.dims[:at], *parts, *x.dims[at + 1 :]))


def joined(x: Named, y: Named, dims: tuple[str, str], to: str) -> Named:
    a, b = renamed(x, dims[0], to), renamed(y, dims[1], to)
    return Named(torch.cat([a.data, aligned(b, a.dims)], a.at(to)), a.dims)


def gathered(table: Named, dim: str, ids: Named) -> Named:
    table = renamed(table, dim, "looked up")
    rest = table.without("looked up")
    dims = tuple(dict.fromkeys((*rest, *ids.dims)))
    sizes = {**table.sizes, **ids.sizes}
    spread = expanded(table, (*dims, "looked up"), sizes)
    which = expanded(ids, dims, sizes).long().unsqueeze(-1)
    return Named(spread.gather(-1, which).squeeze(-1), dims)


def one_hot(ids: Named, dim: str, size: int) -> Named:
    return Named((ids.data.unsqueeze(-1) == torch.arange(size)).double(), (*ids.dims, dim))


def einsum(xs: Sequence[Named], out: Sequence[str]) -> Named:
    letters = {d: chr(ord("a") + i) for i, d in enumerate(union(*xs))}
    lefts = ",".join("".join(letters[d] for d in x.dims) for x in xs)
    right = "".join(letters[d] for d in out)
    return Named(torch.einsum(f"{lefts}->{right}", *(x.data for x in xs)), tuple(out))


def iota(dim: str, size: int) -> Named:
    return Named(torch.arange(size), (dim,))


def number(value: float) -> Named:
    return Named(torch.tensor(value, dtype=torch.float64), ())


def one_like(x: Named, dim: str) -> Named:
    """Ones along a dim of `x`."""
    return Named(torch.ones(x.sizes[dim], dtype=torch.float64), (dim,))
