"""Steps of optimizers, in place: `w`, `m` and `v` are overwritten and returned.

`w` is a parameter, `g` its gradient, perhaps of a narrower dtype. `lr`, `scale` (a factor of the
gradient) and `step` (1, 2, …) are numbers or tensors; nothing here waits for the values of tensors.

A gradient that has to be widened, scaled or decayed is copied for that piece by piece, into the
same memory: an update takes no memory of the size of the parameter.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from meshdsl.backends.runtime.pieces import in_pieces

PIECE = 1 << 22
"""The most elements of a gradient that are copied at once.

Few beside a large parameter, and enough to keep a GPU busy. A multiple of what a processor's
vectors hold, so that a kernel rounds each element as in one go.
"""


def sgd_(w: torch.Tensor, g: torch.Tensor, lr: Any, scale: Any, weight_decay: float) -> Any:
    """Gradient descent: w -= lr * (scale * g + weight_decay * w)."""
    for w_, full in full_gradients([w], g, scale, weight_decay, (lr, scale)):
        step_along_(w_, full, lr)
    return w


def momentum_(
    w: torch.Tensor,
    g: torch.Tensor,
    v: torch.Tensor,
    lr: Any,
    scale: Any,
    beta: float,
    nesterov: bool,
    weight_decay: float,
) -> Any:
    """Gradient descent with the velocity v = beta * v + gradient; `nesterov` looks one step on."""
    for w_, v_, full in full_gradients([w, v], g, scale, weight_decay, (lr, scale), nesterov):
        v_.mul_(beta).add_(full)
        step_along_(w_, full.add_(v_, alpha=beta) if nesterov else v_, lr)
    return w, v


def adam_(
    w: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: Any,
    scale: Any,
    step: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    fused: bool = True,
) -> Any:
    """Adam; `decoupled` makes it AdamW: by torch's kernel, in one pass over the memory.

    It needs contiguous tensors, and its name is private: a torch may lack it. Chunks of one that
    is not contiguous are not to be `fused`, for its rounding is another. Otherwise
    lr * (m / c1) / (sqrt(v / c2) + eps) is computed as (lr * r / c1) * m / (sqrt(v) + eps * r) with
    r = sqrt(c2), which saves a pass.
    """
    update = getattr(torch, "_fused_adamw_" if decoupled else "_fused_adam_", None)
    scalars = (lr, scale, step)
    if update and fused and all(x.is_contiguous() for x in (w, m, v)):
        steps = torch.as_tensor(step, dtype=torch.float32, device=w.device)
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        options |= {"weight_decay": weight_decay, "amsgrad": False, "maximize": False}
        for w_, m_, v_, full in full_gradients([w, m, v], g, scale, 0.0, scalars):
            update([w_], [full.contiguous()], [m_], [v_], [], [steps], **options)
        return w, m, v
    decay = 0.0 if decoupled else weight_decay
    copied = copies(w, g, scale, decay)
    root = one_less_power(beta2, step) ** 0.5
    size = lr * root / one_less_power(beta1, step)
    for w_, m_, v_, full in full_gradients([w, m, v], g, scale, decay, scalars):
        if decoupled and weight_decay:
            w_.mul_(1 - lr * weight_decay)
        m_.lerp_(full, 1 - beta1)
        v_.mul_(beta2).addcmul_(full, full, value=1 - beta2)
        direction = torch.sqrt(v_, out=full if copied else None).add_(eps * root)
        torch.div(m_, direction, out=direction)
        step_along_(w_, direction, size)
    return w, m, v


def full_gradients(
    tensors: list[torch.Tensor],
    g: torch.Tensor,
    scale: Any,
    weight_decay: float,
    scalars: tuple[Any, ...],
    anew: bool = False,
) -> Iterator[list[torch.Tensor]]:
    """Pieces of tensors, the first of them `w`, each with that of scale * g + weight_decay * w.

    That is `g` itself where this is all, unless it is wanted `anew`, to be overwritten. Where one
    of the `scalars` differs from slice to slice, there is one piece.
    """
    w = tensors[0]
    if not (anew or copies(w, g, scale, weight_decay)):
        yield [*tensors, g]
        return
    differ = any(isinstance(x, torch.Tensor) and x.dim() for x in scalars)
    most = w.numel() if differ else min(PIECE, w.numel())
    room = w.new_empty(most)
    for *pieces, part in in_pieces(tensors, [g], most):
        full = room[: part.numel()].view(part.shape).copy_(part)
        if not (isinstance(scale, float) and scale == 1):
            full.mul_(scale)
        if weight_decay:
            full.add_(pieces[0], alpha=weight_decay)
        yield [*pieces, full]


def copies(w: torch.Tensor, g: torch.Tensor, scale: Any, weight_decay: float) -> bool:
    """Whether scale * g + weight_decay * w, in the dtype of `w`, is another tensor than `g`."""
    scaled = not (isinstance(scale, float) and scale == 1)
    return g.dtype != w.dtype or scaled or bool(weight_decay)


def step_along_(w: torch.Tensor, direction: torch.Tensor, size: Any) -> torch.Tensor:
    """Take size * direction from `w`, in one pass over the memory."""
    if isinstance(size, torch.Tensor):
        return w.addcmul_(direction, size, value=-1)
    return w.sub_(direction, alpha=size)


def one_less_power(beta: float, step: Any) -> Any:
    """1 - beta**step without the cancellation that costs f32 four digits in the first steps."""
    if not beta:
        return 1.0
    exponent = step * math.log(beta)
    if isinstance(exponent, torch.Tensor):
        return -torch.expm1(exponent)
    return -math.expm1(exponent)
