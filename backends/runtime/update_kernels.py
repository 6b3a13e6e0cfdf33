"""Steps of optimizers, in place: `w`, `m` and `v` are overwritten and returned.

`w` is a parameter, `g` its gradient, perhaps of a narrower dtype. `lr`, `scale` (a factor of the
gradient) and `step` (1, 2, …) are numbers or tensors; nothing here waits for the values of tensors.
"""

import math
from typing import Any

import torch


def sgd_(w: torch.Tensor, g: torch.Tensor, lr: Any, scale: Any, weight_decay: float) -> Any:
    """Gradient descent: w -= lr * (scale * g + weight_decay * w)."""
    return step_along_(w, full_gradient(w, g, scale, weight_decay), lr)


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
    full = full_gradient(w, g, scale, weight_decay)
    v.mul_(beta).add_(full)
    if not nesterov:
        return step_along_(w, v, lr), v
    ahead = full.add(v, alpha=beta) if full is g else full.add_(v, alpha=beta)
    return step_along_(w, ahead, lr), v


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
    if update and fused and all(x.is_contiguous() for x in (w, m, v)):
        full = full_gradient(w, g, scale, 0.0).contiguous()
        steps = torch.as_tensor(step, dtype=torch.float32, device=w.device)
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        options |= {"weight_decay": weight_decay, "amsgrad": False, "maximize": False}
        update([w], [full], [m], [v], [], [steps], **options)
        return w, m, v
    full = full_gradient(w, g, scale, 0.0 if decoupled else weight_decay)
    if decoupled and weight_decay:
        w.mul_(1 - lr * weight_decay)
    m.lerp_(full, 1 - beta1)
    v.mul_(beta2).addcmul_(full, full, value=1 - beta2)
    root = one_less_power(beta2, step) ** 0.5
    direction = torch.sqrt(v, out=None if full is g else full).add_(eps * root)
    torch.div(m, direction, out=direction)
    return step_along_(w, direction, lr * root / one_less_power(beta1, step)), m, v


def full_gradient(w: torch.Tensor, g: torch.Tensor, scale: Any, weight_decay: float) -> Any:
    """The sum scale * g + weight_decay * w in the dtype of `w`; `g` itself where that is all."""
    full = g if g.dtype == w.dtype else g.to(w.dtype)
    if not (isinstance(scale, float) and scale == 1):
        full = full * scale if full is g else full.mul_(scale)
    if weight_decay:
        full = full.add(w, alpha=weight_decay) if full is g else full.add_(w, alpha=weight_decay)
    return full


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
