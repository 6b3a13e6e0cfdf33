"""Attention and its gradient by torch's kernels, on tensors [batch, batch, position, feature].

`scaled_dot_product_attention` keeps what its gradient reads only for autograd. So on a CPU the
kernels behind it are called, which yield and take the logarithm of the sums of the exponentials;
they read their operands as if the last dim had stride 1, want one size for all features, and
divide by zero where a tensor is empty (torch 2.13). On other devices autograd computes the
gradient; what these kernels cannot do is written out.
"""

import math

import torch

from meshdsl.backends.runtime.private_kernels import agrees, waves

MASKED = -1e9


def attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q·k)·v, and the logarithm of the sums of the exponentials.

    A row of q that may look nowhere by `mask` (bools) looks everywhere alike, as one of scores of
    -1e9 each. Where torch has no kernel that tells the sums, the second result tells only the rows
    that may look somewhere (0).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = _dense(q), _dense(k), _dense(v)
    is_fused = _has_kernel(q, k, v)
    # Beside the number that hides a position, scores vanish: such a row is uniform by itself.
    is_uniform = is_fused and q.dtype != torch.float16
    sees = None if mask is None or is_uniform else mask.any(-1)
    if mask is not None and sees is not None:
        q, mask = q * sees[..., None], mask | ~sees[..., None]
    if is_fused:
        bias = None if mask is None else _bias(mask, q)
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel := _gpu_kernel(q, k, v, mask, causal, scale):
        o, lse = _on_gpu(kernel, q, k, v, causal, scale)
    elif q.device.type != "cpu":
        o = _public(q, k, v, mask, causal, scale)
        lse = torch.zeros(q.shape[:-1], dtype=_wide(q), device=q.device)
    else:
        scores = _scores(q, k, mask, causal, scale)
        lse = torch.logsumexp(scores, -1)
        o = (torch.exp(scores - lse[..., None]) @ v.to(scores.dtype)).to(q.dtype)
    if mask is None:
        return o, lse
    nothing = MASKED + math.log(max(k.shape[-2], 1))
    if sees is None:
        return o, lse.masked_fill(lse < MASKED / 2, nothing)
    return o, torch.where(sees, lse, nothing)


def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_lse` of one of several blocks: the second result is right on every device.

    Each row may look somewhere. On other devices than a CPU the scores of the block are stored.
    """
    if q.device.type == "cpu":
        return attention_lse(q, k, v, mask, causal, scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = _scores(q, k, mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]) @ v.to(scores.dtype)).to(q.dtype), lse


def attention_block_grad(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention_grad` of one of several blocks: `o` and `lse` are those of all blocks."""
    if q.device.type == "cpu":
        return attention_grad(do, q, k, v, o, lse, mask, causal, scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _written_out(do, q, k, v, o, lse, _scores(q, k, mask, causal, scale), scale)


def attention_of_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The first result of `attention_lse`."""
    if not _has_kernel(q, k, v) or q.dtype == torch.float16:
        return attention_lse(q, k, v, mask, causal, scale)[0]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    operands = (_dense(q), _dense(k), _dense(v))
    o: torch.Tensor = kernel(*operands, 0.0, causal, attn_mask=_bias(mask, q), scale=scale)[0]
    return o


def attention_up_to(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention to the positions up to `last`; what is behind is not read.

    Below 0 there is none, and all rows are uniform.
    """
    if last < 0:
        q, last = torch.zeros_like(q), k.shape[2]
    k, v = k[:, :, : last + 1], v[:, :, : last + 1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def attention_grad(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `attention_lse` by q, k and v, from `do`, that by its first result `o`."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # The kernel is chosen by strides, too: so both passes choose alike.
    q, k, v = _dense(q), _dense(k), _dense(v)
    sees = None
    if mask is not None:
        sees = (lse > MASKED / 2)[..., None]
        q, mask = q * sees, mask | ~sees
        lse = torch.where(sees[..., 0], lse, math.log(max(k.shape[-2], 1)))
    if _has_kernel(q, k, v):
        bias = None if mask is None else _bias(mask, q)
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = (_dense(do), q, k, v, _dense(o), lse.contiguous())
        dq, dk, dv = on_cpu(*operands, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel := _gpu_kernel(q, k, v, mask, causal, scale):
        dq, dk, dv = _grad_on_gpu(kernel, do, q, k, v, o, lse, causal, scale)
    elif q.device.type != "cpu":
        dq, dk, dv = _by_autograd(do, q, k, v, mask, causal, scale)
    else:
        dq, dk, dv = _written_out(do, q, k, v, o, lse, _scores(q, k, mask, causal, scale), scale)
    return dq if sees is None else dq * sees, dk, dv


# --- kernels of a GPU ----------------------------------------------------------------------------

FLASH = 1
EFFICIENT = 2
CUDNN = 3  # each as in torch's `SDPBackend`


def _gpu_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> int:
    """The kernel that torch would choose, if it tells the sums of exponentials; else 0.

    With it the backward pass needs no forward pass of its own, as it does `_by_autograd`.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if q.device.type == "cpu" or mask is not None or choose is None or q.dim() != 4:
        return 0
    features, batches = {x.shape[-1] for x in (q, k, v)}, {x.shape[:2] for x in (q, k, v)}
    if len(features) > 1 or len(batches) > 1 or features.pop() % 8 or not k.numel():
        return 0
    chosen = choose(q, k, v, None, 0.0, causal, scale=scale)
    if chosen not in (FLASH, EFFICIENT, CUDNN):
        return 0
    tried = ("attention", chosen, q.dtype, q.shape[-1], causal)
    return chosen if agrees(tried, lambda: _trial(chosen, q, causal, scale)) else 0


def _trial(
    kernel: int, like: torch.Tensor, causal: bool, scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a kernel yields on a few operands, and what the definition does; 40 fill no block."""
    several = waves(4, 2, 2, 40, like.shape[-1], dtype=like.dtype, device=like.device)
    q, k, v, do = several.unbind()
    o, lse = _on_gpu(kernel, q, k, v, causal, scale)
    by_kernel = [o, lse, *_grad_on_gpu(kernel, do, q, k, v, o, lse, causal, scale)]
    scores = _scores(q, k, None, causal, scale)
    lse = torch.logsumexp(scores, -1)
    o = (torch.exp(scores - lse[..., None]) @ v.to(scores.dtype)).to(q.dtype)
    return by_kernel, [o, lse, *_written_out(do, q, k, v, o, lse, scores, scale)]


def _on_gpu(
    kernel: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    aten = torch.ops.aten
    if kernel == FLASH:
        o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    elif kernel == EFFICIENT:
        efficient = aten._scaled_dot_product_efficient_attention
        o, lse = efficient(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        lse = lse[..., : q.shape[-2]]  # it has room for a whole number of blocks
    else:
        cudnn = aten._scaled_dot_product_cudnn_attention
        o, lse = cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    return o, lse.reshape(q.shape[:-1])


def _grad_on_gpu(
    kernel: int,
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    aten = torch.ops.aten
    lengths = (q.shape[-2], k.shape[-2])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    if kernel == EFFICIENT:
        room = -lengths[0] % 32
        lse = torch.nn.functional.pad(lse, (0, room), value=math.inf) if room else lse.contiguous()
        every = [True, True, True, False]  # not the gradient of a bias
        efficient = aten._scaled_dot_product_efficient_attention_backward
        read = (_dense(do), q, k, v, None, o, lse, seed, seed)
        dq, dk, dv, _ = efficient(*read, 0.0, every, causal, scale=scale)
        return dq, dk, dv
    if do.stride() != o.stride():
        # In bf16 the kernel of cuDNN reads `do` as if it lay in memory as `o` does (torch 2.11).
        do = torch.empty_like(o).copy_(do)
    lse, tensors = lse.contiguous(), (do, q, k, v, o)
    if kernel == FLASH:
        flash = aten._scaled_dot_product_flash_attention_backward
        options = (None, None, *lengths, 0.0, causal, seed, seed)
        dq, dk, dv = flash(*tensors, lse, *options, scale=scale)
    else:
        cudnn = aten._scaled_dot_product_cudnn_attention_backward
        arguments = (seed, seed, None, None, None, *lengths, 0.0, causal)
        dq, dk, dv = cudnn(*tensors, lse[..., None], *arguments, scale=scale)
    return dq, dk, dv


def _by_autograd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Tensors of inference mode, in which programs run, record nothing: these are copies outside.
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = _public(q, k, v, mask if mask is None else mask.clone(), causal, scale)
        # In bf16 the kernel of cuDNN reads `do` as if it lay in memory as `made` does (torch 2.11).
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.empty_like(out).copy_(do))
    return dq, dk, dv


def _written_out(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scores: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = torch.exp(scores - lse[..., None])
    do, wide = do.to(p.dtype), p.dtype
    along = (do * o).sum(-1, keepdim=True)
    ds = p * (do @ v.to(wide).mT - along) * scale
    dq, dk, dv = ds @ k.to(wide), ds.mT @ q.to(wide), p.mT @ do
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    scores = (q.to(_wide(q)) @ k.to(_wide(q)).mT) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else torch.where(mask, scores, -math.inf)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _public(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the CPU's kernels take these operands."""
    there = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    is_full = q.numel() and k.numel() and v.numel()
    return bool(there and is_full) and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What is added to scores: nothing, or so much less that nothing remains of them.

    Not -inf: a block of memory that a row does not see at all would become NaN.
    """
    hidden = max(-1e30, torch.finfo(q.dtype).min)
    bias = torch.where(mask, 0.0, hidden)
    return bias if q.dtype == bias.dtype else bias.to(q.dtype)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
