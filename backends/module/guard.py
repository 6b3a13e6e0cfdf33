"""What takes the block of a split parameter for all of it is refused: norms, some optimizers.

The parameters of a module are this device's blocks. What works element by element is right of
blocks. The norm of a block is not that of the parameter, and an optimizer that multiplies or sums
gradients would update each block by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshdsl.api.errors import told
from meshdsl.diagnostics import fail

_BY_NAME = (
    *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "std_mean", "var_mean"),
    *("norm", "dist", "cdist", "renorm", "max", "min", "amax", "amin", "aminmax"),
    *("argmax", "argmin", "median", "nanmedian", "mode", "quantile", "nanquantile"),
    *("logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk"),
    *("kthvalue", "count_nonzero", "histc", "dot", "vdot", "inner", "mv", "mm", "bmm", "matmul"),
    *("__matmul__", "__rmatmul__", "einsum", "tensordot", "trace", "_foreach_norm"),
)

MIXING = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in _BY_NAME
    if hasattr(place, name)
) | frozenset(f for n, f in vars(torch.linalg).items() if callable(f) and n[0] != "_")
"""Functions that add up, compare or multiply elements with one another: norms, sums, products."""

OF_WHOLE_TENSORS = ("Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")
"""Optimizers, by the names of their classes and of those they are derived from, whose update of an
element depends on the other elements of its tensor."""

_MARK = "_meshdsl_split"


class BlockGradient(torch.Tensor):
    """This device's block of a gradient.

    What mixes its elements is refused; all else yields plain tensors.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain copy."""
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Apply a function to the block. Raises ProgramError (MD0561) for what mixes elements."""
        if func in MIXING and not _is_of_pairs(func, args):
            _refuse(func.__name__.removeprefix("linalg_"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def guard(param: torch.nn.Parameter, name: str) -> None:
    """Refuse norms of the gradients of a split parameter, and optimizers that mix its elements."""
    setattr(param, _MARK, name)
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(_as_block)  # type: ignore[no-untyped-call]


def _as_block(param: torch.Tensor) -> None:
    if param.grad is not None and not isinstance(param.grad, BlockGradient):
        param.grad = param.grad.as_subclass(BlockGradient)


def _is_of_pairs(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a maximum or minimum is that of two tensors, element by element."""
    return func.__name__ in ("max", "min") and any(isinstance(x, torch.Tensor) for x in args[1:])


@told
def _refuse(name: str) -> None:
    message = f"`{name}` has this device's block of a gradient, not the gradient"
    help = (
        "`model.clip_grad_norm_(max_norm)` has the norm over all devices, and returns it; "
        "`grad.detach()` is the block as a plain tensor"
    )
    fail("MD0561", message, help=help)


@told
def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of an optimizer that needs whole tensors, where it has blocks."""
    del args, kwargs
    kinds = {base.__name__ for base in type(optimizer).__mro__}
    if kinds.isdisjoint(OF_WHOLE_TENSORS):
        return
    params = (p for group in optimizer.param_groups for p in group["params"])
    name = next((getattr(p, _MARK) for p in params if hasattr(p, _MARK)), None)
    if name is None:
        return
    kind = type(optimizer).__name__
    message = f"`{kind}` needs whole gradients, and each device has a block of `{name}`"
    help = (
        "use an optimizer that works element by element (`SGD`, `AdamW`), or give it only "
        "parameters that the layout leaves whole"
    )
    fail("MD0561", message, help=help)


register_optimizer_step_pre_hook(_check_optimizer)
