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
    on_host = b.device.type == "cpu"
    recur_into(h, a, b.to(wide), dim, before, reverse, careful=not on_host)
    if on_host and not h.sum().isfinite():  # asking an accelerator would make the host wait
        recur_into(h, a, b.to(wide), dim, before, reverse, careful=True)
    return h.to(b.dtype)


def recur_into(
    h: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dim: int,
    before: torch.Tensor,
    reverse: bool,
    careful: bool,
    combined: bool = False,
) -> None:
    """Write the recurrence into `h`: the second of each two steps, then the others.

    Two steps are one: a2 * (a1 * h + b1) + b2. Of an odd number the last to be done has no pair.
    Where steps are `combined`, an `a` is a product of others, and may have overflowed. If
    `careful`, infinity times 0 is 0 there: a loop over the steps forms no such product.
    """
    n = h.shape[dim]
    may_be_infinite = careful and combined
    if n <= 16:
        for t in reversed(range(n)) if reverse else range(n):
            parts = [x.narrow(dim, t, 1) for x in (h, a, b)]
            before = step_into(parts, before, may_be_infinite)
        return
    early, late = (ending, beginning) if reverse else (beginning, ending)
    first, pairs, between = (n - 1) % 2 if reverse else 0, n // 2, (n - 1) // 2
    h1, a1, b1 = (every_other(x, dim, first) for x in (h, a, b))
    h2, a2, b2 = (every_other(x, dim, 1 - first) for x in (h, a, b))
    both = step_into([torch.empty_like(b2), a2, b2], early(b1, dim, pairs), may_be_infinite)
    product = a2 * early(a1, dim, pairs)
    if may_be_infinite:
        product.masked_fill_((a2 == 0) | (early(a1, dim, pairs) == 0), 0)
    recur_into(h2, product, both, dim, before, reverse, careful, True)
    step_into([early(x, dim, 1) for x in (h1, a1, b1)], before, may_be_infinite)
    later = [late(x, dim, between) for x in (h1, a1, b1)]
    step_into(later, early(h2, dim, between), may_be_infinite)


def step_into(
    parts: list[torch.Tensor], before: torch.Tensor, may_be_infinite: bool
) -> torch.Tensor:
    """Write `a * before + b` into `h`, where the parts are h, a and b.

    Where `a` may be infinite, it is `b` if `before` is 0.
    """
    h, a, b = parts
    torch.addcmul(b, a, before, out=h)
    return torch.where(before == 0, b, h, out=h) if may_be_infinite else h


def every_other(x: torch.Tensor, dim: int, first: int) -> torch.Tensor:
    """Every other element along `dim`, from `first` on."""
    return x[(slice(None),) * dim + (slice(first, None, 2),)]


def beginning(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The first `count` elements along `dim`."""
    return x.narrow(dim, 0, count)


def ending(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The last `count` elements along `dim`."""
    return x.narrow(dim, x.shape[dim] - count, count)
