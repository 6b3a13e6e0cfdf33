"""The same values in every kind of memory that a variable of an emitted program may show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch


def own(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of `x` in memory of their own: dims in any order, and with gaps between."""
    ranks = range(x.dim())
    by_kind = {"plain": x.clone(memory_format=torch.contiguous_format)}
    for order in itertools.islice(itertools.permutations(ranks), 1, None):
        back = [order.index(i) for i in ranks]
        by_kind[f"permuted {order}"] = x.permute(order).contiguous().permute(back)
    if x.dim():
        room = x.new_zeros([2 * n + 1 for n in x.shape])
        by_kind["sliced"] = room[tuple(slice(1, None, 2) for _ in ranks)].copy_(x)
    return by_kind


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, and broadcasts, which repeat the beginning of `x` along some dims."""
    by_kind = own(x)
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(x.dim()), n) for n in range(1, x.dim() + 1)
    )
    for dims in choices:
        first = x
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        by_kind[f"expanded {dims}"] = first.clone().expand(x.shape)
    return by_kind


def one_at_a_time(operands: list[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """All operands plain, then each in every kind of memory, then all of them at once."""
    every = [views(x) for x in operands]
    yield "plain", [x["plain"].clone() for x in every]
    for at, kinds in enumerate(every):
        for name, tensor in kinds.items():
            others = [x["plain"].clone() for x in every]
            yield f"{at} {name}", [*others[:at], tensor, *others[at + 1 :]]
    yield "last of each", [list(x.values())[-1].clone() for x in every]
    yield "all permuted", [list(own(x).values())[-1] for x in operands]


def overlaps(x: torch.Tensor) -> bool:
    """Whether elements of `x` share a place."""
    return any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
