"""What takes a block of a split parameter for all of it is refused; elementwise uses are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshdsl.api.errors import ProgramError
from meshdsl.backends.module.guard import guard

ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}
WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": lambda p: torch.optim.Muon(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def parameter(*, split: bool) -> torch.nn.Parameter:
    """A parameter with a gradient: a block, or whole."""
    param = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    if split:
        guard(param, "w")
    (param**2).sum().backward()
    return param


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_have_the_numbers_of_plain_parameters(name: str) -> None:
    block, plain = parameter(split=True), parameter(split=False)
    for param in (block, plain):
        optimizer = ELEMENTWISE[name]([param])
        for _ in range(2):
            (param**2).sum().backward()
            torch.nn.utils.clip_grad_value_([param], 3.0)
            optimizer.step()
    assert torch.equal(block, plain)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_tensors_refuse_blocks_alone(name: str) -> None:
    step(WHOLE[name]([parameter(split=False)]))
    with pytest.raises(ProgramError, match="each device has a block of `w`"):
        step(WHOLE[name]([parameter(split=True)]))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_of_blocks_is_refused(foreach: bool | None) -> None:
    torch.nn.utils.clip_grad_norm_([parameter(split=False)], 1.0, foreach=foreach)
    with pytest.raises((ProgramError, RuntimeError)):
        torch.nn.utils.clip_grad_norm_([parameter(split=True)], 1.0, foreach=foreach)
    grad = parameter(split=True).grad
    assert grad is not None
    with pytest.raises(ProgramError, match=r"model\.clip_grad_norm_"):
        torch.nn.utils.get_total_norm([grad])


def test_a_copy_of_a_gradient_and_what_is_made_of_it_are_plain() -> None:
    grad = parameter(split=True).grad
    assert grad is not None
    assert type(grad * 2) is torch.Tensor
    assert torch.equal(copy.deepcopy(grad), grad)


MIXING: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda g: g.sum(),
    "sum of a function": lambda g: torch.sum(g, 0),
    "mean": lambda g: g.mean(),
    "norm": lambda g: g.norm(),
    "linalg.norm": lambda g: torch.linalg.norm(g),
    "vector_norm": lambda g: torch.linalg.vector_norm(g),
    "matrix_norm": lambda g: torch.linalg.matrix_norm(g),
    "svd": lambda g: torch.linalg.svd(g),
    "max": lambda g: g.max(),
    "amax": lambda g: torch.amax(g, 1),
    "argmax": lambda g: g.argmax(),
    "std": lambda g: g.std(),
    "matmul": lambda g: g @ torch.ones(4, 2),
    "rmatmul": lambda g: torch.ones(2, 3) @ g,
    "mm": lambda g: torch.mm(g, g.mT),
    "einsum": lambda g: torch.einsum("ij,ij->i", g, g),
    "softmax": lambda g: torch.softmax(g, 0),
}
EVERY_ELEMENT: dict[str, Callable[[torch.Tensor], object]] = {
    "abs": lambda g: g.abs().sum(),
    "detach": lambda g: g.detach().sum(),
    "clamp": lambda g: g.clamp(-1, 1),
    "max of two": lambda g: torch.max(g, torch.zeros_like(g)),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "equal": lambda g: torch.equal(g, g),
    "add": lambda g: g.add_(1.0),
    "print": repr,
    "clone": lambda g: g.clone().norm(),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_of_a_block_is_refused(name: str) -> None:
    """Of the gradient of a split parameter, and of no other."""
    for split in (False, True):
        grad = parameter(split=split).grad
        assert grad is not None
        if not split:
            MIXING[name](grad)
            continue
        with pytest.raises(ProgramError, match="this device's block of a gradient"):
            MIXING[name](grad)


@pytest.mark.parametrize("name", EVERY_ELEMENT)
def test_what_works_element_by_element_is_not(name: str) -> None:
    grad = parameter(split=True).grad
    assert grad is not None
    EVERY_ELEMENT[name](grad)
