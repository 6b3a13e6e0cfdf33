"""Random expressions of what goes along a dim: ranks, sums, windows, writing at indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tests.training import named_torch as nt
from tests.training.independent_expressions import Env, Expr, Expressions, Unfit
from tests.training.named_torch import Named

Pad = str | int


class Orders(Expressions):
    """Draws them from what there is so far."""

    @property
    def kinds(self) -> Mapping[str, float]:
        return {**super().kinds, **KINDS}

    def ordered(self, depth: int) -> Expr:
        """The same elements, or running sums and products, in one direction or the other."""
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        by = self.rng.choice([-7, -1, 1, 2, 5])
        turned = {"exclusive": self.rng.choice([0, 1]), "reverse": self.rng.choice([0, 1])}
        options = ", ".join(f"{name}={value}" for name, value in turned.items())
        text, function = self.rng.choice(
            [
                (f"reverse[{dim}]({x.text})", lambda t, dim: t.flip(dim)),
                (f"roll[{dim}]({x.text}, {by})", lambda t, dim: t.roll(by, dim)),
                (f"cumprod[{dim}]({x.text})", torch.cumprod),
                (f"cumsum[{dim}]({x.text}, {options})", lambda t, dim: sums(t, dim, **turned)),
            ]
        )
        return self.made(text, lambda env: nt.along(function, x.run(env), dim))

    def added_in_logs(self, depth: int) -> Expr:
        x, y = self.operand(depth), self.operand(depth)
        return self.made(
            f"logaddexp({x.text}, {y.text})",
            lambda env: nt.pointwise(torch.logaddexp, x.run(env), y.run(env)),
        )

    def written(self, depth: int) -> Expr:
        """`put` at a number, or at a tensor of indices that are paired or listed."""
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        rest = x.sample.without(dim)
        if self.chance(2):
            index = self.rng.randrange(self.sizes[dim])
            y = self.fitted(self.operand(depth), self.some(rest, 0, len(rest)))
            where = nt.number(index)
            text = f"put[{dim} = {index}]({x.text}, {y.text})"
            return self.made(text, lambda env: put(x.run(env), dim, where, y.run(env)))
        ids = self.indices(self.sizes[dim])
        listed = [d for d in ids.dims if d not in rest]
        if dim in ids.dims or len(listed) > 1:
            raise Unfit
        y = self.fitted(self.operand(depth), (*rest, *listed))
        text = f"put[{dim} = {ids.text}]({x.text}, {y.text})"
        return self.made(text, lambda env: put(x.run(env), dim, ids.run(env), y.run(env)))

    # windows

    def windowed(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        size = self.rng.randint(1, 3)
        before = self.rng.randrange(size)
        part = self.dim(size, x.dims)
        return self.made(
            f"window[{dim} by {size} -> {part}]({x.text}, before={before})",
            lambda env: windows(x.run(env), dim, part, dim, (size, 1, 1, before, self.sizes[dim])),
        )

    def pooled(self, depth: int) -> Expr:
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        window, stride, pad = self.slide(self.sizes[dim])
        kind, counts = self.rng.choice([("max", 1), ("avg", 1), ("avg", 0)])
        before, count = spans(self.sizes[dim], window, stride, pad, 1)
        to = self.dim(count, x.sample.without(dim))
        way = (window, stride, 1, before, count)
        options = f"stride={stride}, pad={shown(pad)}{'' if counts else ', pad_counts=0'}"

        def run(env: Env) -> Named:
            fill = -torch.inf if kind == "max" else 0.0
            found = windows(x.run(env), dim, "window", to, way, fill)
            if kind == "max":
                return nt.reduced("max", found, ["window"])
            ones = windows(nt.one_like(x.run(env), dim), dim, "window", to, way)
            share = nt.reduced("mean" if counts else "sum", ones, ["window"])
            whole = nt.number(window) if counts else share
            return nt.pointwise(torch.div, nt.reduced("sum", found, ["window"]), whole)

        return self.made(f"{kind}_pool[{dim} by {window} -> {to}]({x.text}, {options})", run)

    def filtered(self, depth: int) -> Expr:
        """A convolution along one dim, or its transpose."""
        x = self.operand(depth, 1)
        dim = self.rng.choice(x.dims)
        size, stride, pad = self.slide(self.sizes[dim])
        dilation = 1 if pad != "same" else self.rng.choice([1, 1, 2])
        tap = self.dim(size, x.dims)
        shared = self.some(x.sample.without(dim), 0, 2)
        more = self.some([d for d in self.usable() if d not in (*x.dims, tap)], 0, 1)
        k = self.fitted(self.operand(depth), (tap, *shared, *more))
        kept = (*more, *self.some(shared, 0, 2), *x.sample.without(dim, *shared))
        function = self.rng.choice(["conv", "upconv"])
        # The image of the one is the result of the other.
        wide = [self.sizes[dim]] if function == "conv" else range(1, 25)
        counts = {n: spans(n, size, stride, pad, dilation) for n in wide}
        fits = [n for n in wide if function == "conv" or counts[n][1] == self.sizes[dim]]
        if not fits:
            raise Unfit
        whole = self.rng.choice(fits)
        before, count = counts[whole]
        way = (size, stride, dilation, before, count)
        to = self.dim(count if function == "conv" else whole, (*x.dims, tap, *more))
        out = self.shuffled((*kept, to))

        def run(env: Env) -> Named:
            if function == "conv":
                return nt.einsum([windows(x.run(env), dim, tap, to, way), k.run(env)], out)
            made = nt.einsum([x.run(env), k.run(env)], (*kept, dim, tap))
            return nt.ordered(spread(made, dim, tap, to, way, whole), out)

        options = f"stride={stride}, pad={shown(pad)}, dilation={dilation}"
        call = f"{function}[{dim} by {tap} -> {to}]({x.text}, {k.text}, {options}"
        return self.made(f"{call} -> [{', '.join(out)}])", run)

    def slide(self, size: int) -> tuple[int, int, Pad]:
        """A window that fits into so many elements, its stride, and what is padded."""
        window = self.rng.randint(1, min(3, size))
        pads: list[Pad] = ["same", "valid", *range(window // 2 + 1)]
        return window, self.rng.choice([1, 1, 2, 3]), self.rng.choice(pads)


KINDS: Mapping[str, float] = {
    "ordered": 3,
    "added_in_logs": 1,
    "written": 3,
    "windowed": 2,
    "pooled": 2,
    "filtered": 4,
}

# --- what they mean ---------------------------------------------------------------------------

Way = tuple[int, int, int, int, int]
"""Of windows: taps, stride, dilation, the elements padded before, and how many windows."""


def shown(pad: Pad) -> str:
    return f'"{pad}"' if isinstance(pad, str) else str(pad)


def spans(size: int, window: int, stride: int, pad: Pad, dilation: int) -> tuple[int, int]:
    """The elements padded before, and the number of windows."""
    reach = (window - 1) * dilation + 1
    if pad == "same":
        count = -(-size // stride)
        return max((count - 1) * stride + reach - size, 0) // 2, count
    before = 0 if pad == "valid" else int(pad)
    return before, (size + 2 * before - reach) // stride + 1


def _taps(way: Way) -> torch.Tensor:
    """The element that each window reads at each tap."""
    window, stride, dilation, before, count = way
    return torch.arange(count)[:, None] * stride + torch.arange(window) * dilation - before


def windows(x: Named, dim: str, tap: str, to: str, way: Way, fill: float = 0.0) -> Named:
    """The elements of each window as the dims `to` and `tap`, in the place of `dim`."""
    at, size, taps = x.at(dim), x.sizes[dim], _taps(way)
    found = x.data.index_select(at, taps.clamp(0, size - 1).flatten()).unflatten(at, taps.shape)
    inside = _beside((taps >= 0) & (taps < size), at, found)
    found = torch.where(inside, found, torch.tensor(fill, dtype=found.dtype))
    return Named(found, (*x.dims[:at], to, tap, *x.dims[at + 1 :]))


def spread(x: Named, dim: str, tap: str, to: str, way: Way, size: int) -> Named:
    """The transpose of `windows`: elements are added where windows would read them."""
    x = nt.ordered(x, (*x.without(dim, tap), dim, tap))
    taps = _taps(way)
    inside = _beside((taps >= 0) & (taps < size), x.data.dim() - 2, x.data)
    parts = torch.where(inside, x.data, torch.zeros((), dtype=x.data.dtype)).flatten(-2)
    found = torch.zeros((*parts.shape[:-1], size), dtype=parts.dtype)
    found = found.index_add(-1, taps.clamp(0, size - 1).flatten(), parts)
    return Named(found, (*x.dims[:-2], to))


def _beside(mask: torch.Tensor, at: int, x: torch.Tensor) -> torch.Tensor:
    """A mask of two dims as one of all dims of `x`, where they are number `at` and the next."""
    return mask.reshape((1,) * at + mask.shape + (1,) * (x.dim() - at - 2))


def sums(x: torch.Tensor, dim: int, exclusive: int, reverse: int) -> torch.Tensor:
    x = x.flip(dim) if reverse else x
    found = x.cumsum(dim) - (x if exclusive else 0)
    return found.flip(dim) if reverse else found


def put(x: Named, dim: str, ids: Named, y: Named) -> Named:
    """`x` with `y` at the indices, one after the other along the dim of them that `x` lacks."""
    listed = [d for d in ids.dims if d not in x.dims]
    for index in range(ids.sizes[listed[0]] if listed else 1):
        at, new = ((nt.picked(t, listed[0], index) if listed else t) for t in (ids, y))
        here = nt.pointwise(torch.eq, nt.iota(dim, x.sizes[dim]), at)
        x = nt.ordered(nt.where(here, new, x), x.dims)
    return x


def ranked(x: Named, dim: str, to: str, count: int, largest: bool) -> tuple[Named, Named]:
    """The first `count` of the elements in order, and their indices. Raises Corner at ties."""
    at = x.at(dim)
    nt.alone(x.data.movedim(at, -1))
    order = x.data.detach().argsort(at, descending=largest).narrow(at, 0, count)
    dims: Sequence[str] = [to if d == dim else d for d in x.dims]
    return Named(x.data.gather(at, order), tuple(dims)), Named(order, tuple(dims))
