"""The first calls of MKL's vector functions, made on one thread."""

import torch

VECTOR_FUNCTIONS = (
    "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc".split()
)
"""The functions of torch that call MKL's vector math on a processor (ATen's `cpu/vml.h`)."""


def choose_vector_kernels() -> None:
    """Call every vector function once, before several threads do.

    MKL before 2025 chooses the kernel of a function in its first call. Where several threads make
    that call at once, one of them may get a kernel with errors of 1e-3 (PyTorch issue 188792).
    """
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(torch.zeros(1, dtype=dtype, device="cpu"))
