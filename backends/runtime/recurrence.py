"""First-order linear recurrences: a scan of logarithmic depth whose work grows with the length.

Nothing is divided and no logarithm is taken: coefficients of 0, and products that vanish, are as
good as others.
"""

import torch


def linear_recurrence(
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    initial: torch.Tensor | None = None,
    reverse: bool = False,
) -> torch.Tensor:
    """h[t] = a[t] * h[t - 1] + b[t] along `dim`, or a[t] * h[t + 1] + b[t] if `reverse`.

    `b` has the shape of h. `a` and `initial`, h before the first step (0 if None), have as many
    dims, of which those of size 1 broadcast. Two bytes wide floats are computed as f32.
    """
    wide = torch.promote_types(b.dtype, torch.float32)
    h = torch.empty(b.shape, dtype=wide, device=b.device)
    a = a.to(wide).expand([n if i == dim else -1 for i, n in enumerate(b.shape)])
    before = h.new_zeros(()) if initial is None else initial.to(wide)
    recur_into(h, a, b.to(wide), dim, before, reverse)
    return h.to(b.dtype)


def recur_into(
    h: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    before: torch.Tensor,
    reverse: bool,
) -> None:
    """Write the recurrence into `h`: the second of each two steps, then the others.

    Two steps are one: a2 * (a1 * h + b1) + b2. Of an odd number the last to be done has no pair.
    """
    n = h.shape[dim]
    if n <= 16:
        for t in reversed(range(n)) if reverse else range(n):
            before = step_into([x.narrow(dim, t, 1) for x in (h, a, b)], before)
        return
    early, late = (ending, beginning) if reverse else (beginning, ending)
    first, pairs, between = (n - 1) % 2 if reverse else 0, n // 2, (n - 1) // 2
    h1, a1, b1 = (every_other(x, dim, first) for x in (h, a, b))
    h2, a2, b2 = (every_other(x, dim, 1 - first) for x in (h, a, b))
    both = torch.addcmul(b2, a2, early(b1, dim, pairs))
    recur_into(h2, a2 * early(a1, dim, pairs), both, dim, before, reverse)
    step_into([early(x, dim, 1) for x in (h1, a1, b1)], before)
    step_into([late(x, dim, between) for x in (h1, a1, b1)], early(h2, dim, between))


def step_into(parts: list[torch.Tensor], before: torch.Tensor) -> torch.Tensor:
    """Write `a * before + b` into `h`, where the parts are h, a and b."""
    h, a, b = parts
    return torch.addcmul(b, a, before, out=h)


def every_other(x: torch.Tensor, dim: int, first: int) -> torch.Tensor:
    """Every other element along `dim`, from `first` on."""
    return x[(slice(None),) * dim + (slice(first, None, 2),)]


def beginning(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The first `count` elements along `dim`."""
    return x.narrow(dim, 0, count)


def ending(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The last `count` elements along `dim`."""
    return x.narrow(dim, x.shape[dim] - count, count)
