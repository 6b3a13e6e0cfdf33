"""Assumptions of texts about memory: none on strides; and the declared memory of their results.

`device/aliases.py` states the rules that these tests check for every record of the registry.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshdsl.ir.types import F64
from meshdsl.ops.opdef import REGISTRY, Sample, lookup
from meshdsl.prove.memory_checks import drawn, in_place, meaning_of, on_any_memory, unlike_on_memory
from meshdsl.prove.memory_kinds import one_at_a_time, own
from meshdsl.prove.sample_values import draw, signature
from meshdsl.prove.torch_run import call, evaluate, retyped, run_lines, to_torch
from meshdsl.prove.wrong_cases import found
from tests.ops.cases import SAMPLES, of_each_operator
from tests.ops.test_in_place import CASES as IN_PLACE

WITH_OPERANDS = {
    label: (name, retyped(sample, F64)) for label, (name, sample) in SAMPLES.items() if sample.ins
}


def check_memory(name: str, sample: Sample) -> None:
    """On operands that lie anyhow: the values, and which results show which operands."""
    assert not found(on_any_memory(lookup(name), sample))


test_texts_are_right_on_any_memory = of_each_operator(WITH_OPERANDS)(check_memory)


def check_in_place(name: str, index: int, sample: Sample, literal: frozenset[int]) -> None:
    """The result of an operand written over, on operands that lie anyhow."""
    assert not found(in_place(lookup(name), index, sample, literal))


test_texts_in_place_are_right_on_any_memory = of_each_operator(IN_PLACE)(check_in_place)

ADDING = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if (adds_to := lookup(name).adds_to) is not None
    and adds_to(signature(lookup(name), sample), frozenset(), frozenset())
}


@of_each_operator(ADDING)
def test_texts_that_add_to_a_sum_are_right_on_any_memory(name: str, sample: Sample) -> None:
    """On a sum that lies anyhow, unless it has to be contiguous."""
    opdef, sig = lookup(name), signature(lookup(name), sample)
    assert opdef.adds is not None
    assert opdef.adds_to is not None
    result, operands = sig.outs[0], drawn(sig, sample)
    total = to_torch(draw(result, "int", np.random.default_rng(5)), result)
    is_any = opdef.adds_to(sig, frozenset(), frozenset(range(1, len(result.dims))))
    for kind, memory in own(total).items() if is_any else {"plain": total}.items():
        for said, given in one_at_a_time(operands):
            there, text = memory.clone(), call(sig)
            run_lines(text, opdef.adds(text, "total"), given, names={"total": there})
            expected = total.double().numpy() + meaning_of(opdef, sig, given)[0]
            assert not unlike_on_memory(there, expected), f"{kind}, {said}"


FILLING = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if lookup(name).fills is not None
    and ((fills_to := lookup(name).fills_to) is None or fills_to(signature(lookup(name), sample)))
}


@of_each_operator(FILLING)
def test_texts_that_fill_a_tensor_are_right_on_any_memory(name: str, sample: Sample) -> None:
    """On the memory of operands; what is filled is contiguous, and had other numbers before."""
    opdef, sig = lookup(name), signature(lookup(name), sample)
    assert opdef.fills is not None
    result, operands = sig.outs[0], drawn(sig, sample)
    for said, given in one_at_a_time(operands):
        there = to_torch(np.full(result.shape, np.nan), result)
        text = call(sig)
        run_lines(text, opdef.fills(text, "there"), given, names={"there": there})
        assert not unlike_on_memory(there, meaning_of(opdef, sig, given)[0]), said


CONTIGUOUS = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if lookup(name).contiguous(signature(lookup(name), sample))
}


@of_each_operator(CONTIGUOUS)
def test_results_that_are_said_to_be_contiguous_are(name: str, sample: Sample) -> None:
    opdef, sig = lookup(name), signature(lookup(name), sample)
    for said, operands in one_at_a_time(drawn(sig, sample)):
        assert evaluate(opdef, call(sig), operands).is_contiguous(), said


def test_there_are_texts_that_add() -> None:
    assert {name for name, _ in ADDING.values()} == {"einsum", "scatter_add"}

    assert sum(name == "einsum" for name, _ in ADDING.values()) >= 10


PLANTED = {
    "softmax_grad": "torch.ops.aten._softmax_backward_data.out({0}, {1}, {2}, torch.float32, "
    "grad_input={0})",
    "log_softmax_grad": "torch.ops.aten._log_softmax_backward_data.out({0}, {1}, {2}, "
    "torch.float32, out={0})",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_kernel_that_does_not_mind_strides_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(text: object) -> str:
        at = text.ins[0].index(text.attrs["dim"].name)  # type: ignore[attr-defined]
        return PLANTED[name].format(text.tensor(0), text.tensor(1), at)  # type: ignore[attr-defined]

    monkeypatch.setitem(REGISTRY, name, replace(lookup(name), in_place={0: write}))
    with pytest.raises(AssertionError):
        check_in_place(name, 0, lookup(name).samples[1], frozenset())


VIEWS = [("gather", 2), ("einsum", 23), ("transpose", 0)]


@pytest.mark.parametrize(("name", "number"), VIEWS)
def test_a_view_that_is_not_told_is_caught(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, name, replace(lookup(name), view=False, shows=None))
    sample = lookup(name).samples[number]
    with pytest.raises(AssertionError, match="in the memory of operand 0"):
        check_memory(name, sample)
