"""Steps of optimizers, in place: the tensors of the lists `ws`, `ms` and `vs` are overwritten.

`ws` are parameters, `gs` their gradients, perhaps of a narrower dtype. `lr` and `scale` (a factor
of the gradients) are numbers or tensors, whose values nothing here waits for. `step` (1, 2, …) is a
number, or a tensor on the host.

Gradients that have to be widened, scaled or decayed are copied for that: all at once where they are
few, otherwise piece by piece, into the same memory. Those that are `donated` are overwritten:
nothing reads them any more, and they have the dtype of their parameters.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshdsl.backends.runtime.pieces import in_pieces

PIECE = 1 << 22
"""The most elements of gradients that are copied at once.

Few beside a large parameter, and enough to keep a GPU busy. A multiple of what a processor's
vectors hold, so that a kernel rounds each element as in one go.
"""

TensorList = list[torch.Tensor]
TensorsOf = tuple[torch.Tensor, ...]
"""Those of one parameter."""


def sgd_(
    ws: TensorList,
    gs: TensorList,
    lr: Any,
    scale: Any,
    weight_decay: float,
    room: int = PIECE,
    donated: bool = False,
) -> None:
    """Gradient descent: w -= lr * (scale * g + weight_decay * w)."""
    for ws_, full in full_gradients([ws], gs, scale, weight_decay, (lr, scale), room, donated):
        step_along_(ws_, full, lr)


def momentum_(
    ws: TensorList,
    gs: TensorList,
    vs: TensorList,
    lr: Any,
    scale: Any,
    beta: float,
    nesterov: bool,
    weight_decay: float,
    room: int = PIECE,
    donated: bool = False,
) -> None:
    """Gradient descent with the velocity v = beta * v + gradient; `nesterov` looks one step on."""
    batches = full_gradients(
        [ws, vs], gs, scale, weight_decay, (lr, scale), room, donated, nesterov
    )
    for ws_, vs_, full in batches:
        torch._foreach_mul_(vs_, beta)
        torch._foreach_add_(vs_, full)
        if nesterov:
            torch._foreach_add_(full, vs_, alpha=beta)
        step_along_(ws_, full if nesterov else vs_, lr)


def adam_(
    ws: TensorList,
    gs: TensorList,
    ms: TensorList,
    vs: TensorList,
    lr: Any,
    scale: Any,
    step: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    room: int = PIECE,
    fused: bool = True,
    donated: bool = False,
) -> None:
    """Adam; `decoupled` makes it AdamW: by torch's kernel, in one pass over the memory.

    It needs contiguous tensors, and its name is private: a torch may lack it. Chunks of one that
    is not contiguous are not to be `fused`, for its rounding is another. It scales gradients that
    are `donated`, in f32, by itself.
    """
    step = int(step)  # it is counted on the host: nothing is waited for
    update = getattr(torch, "_fused_adamw_" if decoupled else "_fused_adam_", None)
    options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps}
    options["weight_decay"] = weight_decay
    alone: list[TensorsOf] = []
    together: list[TensorsOf] = []
    for tensors in zip(ws, gs, ms, vs, strict=True):
        w, g, m, v = tensors
        fits = update and fused and all(x.is_contiguous() for x in (w, m, v))
        (together if fits else alone).append(tensors)
    for w, g, m, v in alone:
        by_operators_(w, g, m, v, lr, scale, step, decoupled=decoupled, donated=donated, **options)
    if not together:
        return
    number = torch.full((), step, dtype=torch.float32, device=together[0][0].device)
    options |= {"lr": lr, "amsgrad": False, "maximize": False}
    if donated and isinstance(scale, torch.Tensor) and scale.dtype == torch.float32:
        options["grad_scale"], scale = scale.reciprocal(), 1.0  # the kernel divides by it
    # A gradient that lies otherwise is copied: one at a time.
    calls = [[t for t in together if t[1].is_contiguous()]]
    calls += [[t] for t in together if not t[1].is_contiguous()]
    for call in filter(None, calls):
        ws, gs, ms, vs = map(list, zip(*call, strict=True))
        batches = full_gradients([ws, ms, vs], gs, scale, 0.0, (lr, scale), room, donated)
        for ws_, ms_, vs_, full in batches:
            full = [g.contiguous() for g in full]
            update(ws_, full, ms_, vs_, [], [number] * len(ws_), **options)  # type: ignore[misc]


def by_operators_(
    w: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: Any,
    scale: Any,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    donated: bool = False,
) -> None:
    """Adam without its kernel.

    lr * (m / c1) / (sqrt(v / c2) + eps) is computed as (lr * r / c1) * m / (sqrt(v) + eps * r) with
    r = sqrt(c2), which saves a pass.
    """
    decay = 0.0 if decoupled else weight_decay
    may_overwrite = donated or copies(w, g, scale, decay)
    root = one_less_power(beta2, step) ** 0.5
    size = lr * root / one_less_power(beta1, step)
    batches = full_gradients([[w], [m], [v]], [g], scale, decay, (lr, scale), PIECE, donated)
    for (w_,), (m_,), (v_,), (full,) in batches:
        if decoupled and weight_decay:
            w_.mul_(1 - lr * weight_decay)
        m_.lerp_(full, 1 - beta1)
        v_.mul_(beta2).addcmul_(full, full, value=1 - beta2)
        direction = torch.sqrt(v_, out=full if may_overwrite else None).add_(eps * root)
        torch.div(m_, direction, out=direction)
        step_along_([w_], [direction], size)


def full_gradients(
    written: list[TensorList],
    gs: TensorList,
    scale: Any,
    weight_decay: float,
    scalars: tuple[Any, ...],
    room: int,
    donated: bool,
    anew: bool = False,
) -> Iterator[list[TensorList]]:
    """Lists of tensors, the first of them `ws`, with those of scale * g + weight_decay * w.

    These are `gs` themselves where this is all, unless they are wanted `anew`, to be overwritten;
    and where they are `donated`. Otherwise there is one list after the other, each of no more
    elements than there is `room` for, and than `PIECE`: a parameter with more is in pieces. Where
    one of the `scalars` differs from slice to slice, there is room for all of the largest.
    """
    ws = written[0]
    if not anew and not any(copies(w, g, scale, weight_decay) for w, g in zip(ws, gs, strict=True)):
        yield [*written, gs]
        return
    if donated:
        add_decay_(ws, gs, scale, weight_decay)
        yield [*written, gs]
        return
    differ = any(isinstance(x, torch.Tensor) and x.dim() for x in scalars)
    elements = sum(w.numel() for w in ws)
    most = max(w.numel() for w in ws) if differ else min(PIECE, room, elements)
    if elements <= most and all(g.dtype == ws[0].dtype and g.is_contiguous() for g in gs):
        copied = list(torch._foreach_mul(gs, scale))
        if weight_decay:
            torch._foreach_add_(copied, ws, alpha=weight_decay)
        yield [*written, copied]
        return
    memory = ws[0].new_empty(most)
    for batch in gradient_batches(list(zip(*written, strict=True)), gs, most):
        *lists, parts = (list(each) for each in zip(*batch, strict=True))
        full = views_like(parts, memory)
        torch._foreach_copy_(full, parts)
        add_decay_(lists[0], full, scale, weight_decay)
        yield [*lists, full]


def add_decay_(ws: TensorList, gs: TensorList, scale: Any, weight_decay: float) -> None:
    """Make scale * g + weight_decay * w of each of `gs`."""
    if not (isinstance(scale, float) and scale == 1):
        torch._foreach_mul_(gs, scale)
    if weight_decay:
        torch._foreach_add_(gs, ws, alpha=weight_decay)


def gradient_batches(
    written: list[TensorsOf], gs: TensorList, most: int
) -> Iterator[list[Sequence[torch.Tensor]]]:
    """What is written of each parameter, and its gradient, in lists of at most `most` elements."""
    batch: list[Sequence[torch.Tensor]] = []
    elements = 0
    for tensors, g in zip(written, gs, strict=True):
        for pieces in in_pieces(tensors, [g], most):
            size = pieces[0].numel()
            if elements + size > most:
                yield batch
                batch, elements = [], 0
            batch.append(pieces)
            elements += size
    yield batch


def views_like(tensors: TensorList, room: torch.Tensor) -> TensorList:
    """Tensors of the shapes of others, one behind the other in the elements of `room`."""
    sizes = [x.numel() for x in tensors]
    parts = torch.split(room[: sum(sizes)], sizes)
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def copies(w: torch.Tensor, g: torch.Tensor, scale: Any, weight_decay: float) -> bool:
    """Whether scale * g + weight_decay * w, in the dtype of `w`, is another tensor than `g`."""
    scaled = not (isinstance(scale, float) and scale == 1)
    return g.dtype != w.dtype or scaled or bool(weight_decay)


def step_along_(ws: TensorList, directions: TensorList, size: Any) -> None:
    """Take size * direction from each of `ws`, in one pass over the memory."""
    if isinstance(size, torch.Tensor):
        for w, direction in zip(ws, directions, strict=True):
            w.addcmul_(direction, size, value=-1)
        return
    torch._foreach_sub_(ws, directions, alpha=size)


def one_less_power(beta: float, step: int) -> float:
    """1 - beta**step without cancellation."""
    return -math.expm1(step * math.log(beta)) if beta else 1.0
