# mypy: disable-error-code="type-arg,valid-type,misc,no-untyped-def"
"""Arrays without a value for each element are refused with a reason, wherever Python gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdsl as md
from meshdsl.backends.engines.persistent import lacking
from meshdsl.backends.module.blocks import refuse_without_values
from meshdsl.diagnostics import DiagnosticError

batch, io = md.dims(batch=4, io=2)


@md.program
def learner(x: md.Tensor[batch, io]):
    w = md.param([batch, io])
    loss = md.mean(x * w)
    md.minimize(loss, md.sgd(lr=0.1))
    return loss


WHOLE = np.ones((4, 2), np.float32)
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "masked": (lambda: np.ma.masked_less(WHOLE, 0), "is a masked array"),
    "sparse": (lambda: torch.ones(4, 2).to_sparse(), "is sparse"),
    "rows": (lambda: torch.ones(4, 2).to_sparse_csr(), "is sparse"),
    "meta": (lambda: torch.ones(4, 2, device="meta"), "is a meta tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)] * 4), "is a nested tensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4, 2), 1.0, 0, torch.quint8),
        "is quantized",
    ),
}
OBJECTS = {"objects": (lambda: np.array([[object()] * 2] * 4), "is an array of Python objects")}


USES: dict[str, Callable[[md.Plan, Any], Any]] = {
    "called": lambda plan, array: plan(x=array),
    "parameters": lambda plan, array: setattr(plan, "params", {"w": array}),
    "trained": lambda plan, array: plan.train({"x": array}, steps=1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ODD | OBJECTS)
def test_a_plan_refuses_them(kind: str, use: str) -> None:
    make, reason = (ODD | OBJECTS)[kind]
    with pytest.raises(md.ProgramError, match=reason) as refused:
        USES[use](learner.compile(), make())
    assert refused.value.diagnostics[0].code == "MD0504"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_module_refuses_them(kind: str) -> None:
    make, reason = ODD[kind]
    with pytest.raises(DiagnosticError, match=reason):
        refuse_without_values("x", make(), "MD0561")


@pytest.mark.parametrize("array", [WHOLE, torch.ones(4, 2), [[1.0]], 3, None])
def test_others_are_as_they_are(array: Any) -> None:
    assert lacking(array) == ""
