"""Texts that leave the result in the memory of an operand: the same values, and really there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.ops.opdef import Sample, load_all, lookup
from meshdsl.prove.memory_checks import places_in_place
from meshdsl.prove.sample_values import draw, signature
from meshdsl.prove.torch_run import call, evaluate, run_lines, to_torch
from tests.ops.cases import SAMPLES, of_each_operator

CASES = {
    f"{label}-{index}-{sorted(literal)}": (name, index, sample, literal)
    for label, (name, sample) in SAMPLES.items()
    for index, literal in places_in_place(lookup(name), sample)
}
"""Every operand that may be written over, in every sample; the others as literals as well."""


def test_there_are_such_texts() -> None:
    names = {name for name, *_ in CASES.values()}
    assert {"add", "div", "relu", "relu_grad", "softmax_grad", "rms_norm_grad", "where"} <= names
    assert names == {name for name, opdef in load_all().items() if opdef.in_place}


@of_each_operator(CASES)
def test_the_result_is_the_same_and_stands_where_the_operand_was(
    name: str, index: int, sample: Sample, literal: frozenset[int]
) -> None:
    opdef, rng = lookup(name), np.random.default_rng(4)
    sig = signature(opdef, sample)
    arrays = [draw(t, kind, rng) for t, kind in zip(sig.ins, sample.values, strict=True)]
    operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
    args = tuple(repr(x.item()) if i in literal else f"x{i}" for i, x in enumerate(operands))
    constants = tuple(i in literal for i in range(len(operands)))
    expected = evaluate(opdef, call(sig, constants=constants, args=args), operands)
    text = call(sig, constants=constants, args=args)
    written = opdef.in_place[index](text)
    before = [x.clone() for x in operands]
    found = run_lines(text, written, operands)
    assert found.data_ptr() == operands[index].data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for i in set(range(len(operands))) - {index}:
        assert torch.equal(operands[i], before[i]), f"operand {i} is changed"


A, B = Dim("a", 4), Dim("b", 3)
TEXTS = [
    ("add", [(A, B), (B,)], 0, "x0.add_(x1)"),
    ("add", [(A,), (A, B)], 1, "x1.add_(x0[:, None])"),
    ("sub", [(A, B), (A,)], 0, "x0.sub_(x1[:, None])"),
    ("relu", [(A,)], 0, "torch.relu_(x0)"),
    ("exp", [(A,)], 0, "torch.exp_(x0)"),
    (
        "relu_grad",
        [(A, B), (A, B)],
        0,
        "torch.ops.aten.threshold_backward.grad_input(x0, x1, 0, grad_input=x0)",
    ),
]


@pytest.mark.parametrize(("name", "ins", "index", "text"), TEXTS)
def test_it_is_written_as_by_hand(
    name: str, ins: list[tuple[Dim, ...]], index: int, text: str
) -> None:
    opdef = lookup(name)
    sig = signature(opdef, Sample(tuple(TensorType(dims, F32) for dims in ins)))
    assert opdef.in_place[index](call(sig)) == text
