"""Assumptions of texts about memory: none on strides; and the declared memory of their results.

`device/aliases.py` states the rules that these tests check for every record of the registry.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshdsl.ir.types import F64
from meshdsl.ops.opdef import REGISTRY, NumpyCall, OpDef, Sample, Signature, lookup
from tests.ops.cases import SAMPLES, of_each_operator
from tests.ops.memories import one_at_a_time, overlaps, own, share, views
from tests.ops.row_prover import draw, results, signature
from tests.ops.test_in_place import CASES as IN_PLACE
from tests.ops.torch_run import call, evaluate, retyped, run_lines, several, to_torch

WITH_OPERANDS = {
    label: (name, retyped(sample, F64)) for label, (name, sample) in SAMPLES.items() if sample.ins
}


def drawn(sig: Signature, sample: Sample) -> list[torch.Tensor]:
    rng = np.random.default_rng(12)
    arrays = [draw(t, kind, rng) for t, kind in zip(sig.ins, sample.values, strict=True)]
    return [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]


def meaning(opdef: OpDef, sig: Signature, operands: list[torch.Tensor]) -> tuple[np.ndarray, ...]:
    """The numpy meaning of a call, of the values that the tensors have now."""
    arrays = [x.double().numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in operands]
    whole = NumpyCall(sig.ins, sig.outs, sig.attrs)
    return results(opdef, whole, [a.copy() for a in arrays])


def close(found: torch.Tensor, expected: np.ndarray, said: str) -> None:
    """Equal up to rounding, also where broadcast operands cancel to nothing."""
    most = {torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(found.dtype, 1e-11)
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    got = found.double().numpy()
    np.testing.assert_allclose(got, expected, rtol=most, atol=most * scale, err_msg=said)


def check_memory(name: str, sample: Sample) -> None:
    """On operands that lie anyhow: the values, and which results show which operands."""
    opdef, sig = lookup(name), signature(lookup(name), sample)
    shows = opdef.shows_operand(sig.ins, sig.attrs)
    for said, operands in one_at_a_time(drawn(sig, sample)):
        if any(overlaps(operands[i]) for i in opdef.overwrites):
            continue  # never requested
        expected, before = meaning(opdef, sig, operands), [x.clone() for x in operands]
        found = several(evaluate(opdef, call(sig), operands))
        for got, wanted in zip(found, expected, strict=True):
            close(got, wanted, said)
        for i, (now, then) in enumerate(zip(operands, before, strict=True)):
            assert i in opdef.overwrites or torch.equal(now, then), f"{said}: {i} is changed"
            shared = i in opdef.overwrites or (shows and i == 0)
            assert shared or not any(share(x, now) for x in found), f"{said}: it shows {i}"
        assert shows or not any(map(overlaps, found)), f"{said}: elements share a place"


test_texts_are_right_on_any_memory = of_each_operator(WITH_OPERANDS)(check_memory)


def check_in_place(name: str, index: int, sample: Sample, literal: frozenset[int]) -> None:
    """The result of an operand written over, on operands that lie anyhow."""
    sig = signature(lookup(name), sample)
    operands = drawn(sig, sample)
    args = tuple(repr(x.item()) if i in literal else f"x{i}" for i, x in enumerate(operands))
    constants = tuple(i in literal for i in range(len(operands)))
    for said, target in own(operands[index]).items():
        for other in (i for i in range(len(operands)) if i != index):
            for kind, view in views(operands[other]).items():
                given = list(operands)
                given[index], given[other] = target.clone(), view
                _check_in_place(name, index, sig, given, (args, constants), f"{said}, {kind}")
        _check_in_place(
            name, index, sig, [*operands[:index], target, *operands[index + 1 :]],
            (args, constants), said,
        )  # fmt: skip


test_texts_in_place_are_right_on_any_memory = of_each_operator(IN_PLACE)(check_in_place)


def _check_in_place(
    name: str,
    index: int,
    sig: Signature,
    operands: list[torch.Tensor],
    how: tuple[tuple[str, ...], tuple[bool, ...]],
    said: str,
) -> None:
    opdef, text = lookup(name), call(sig, args=how[0], constants=how[1])
    written = opdef.in_place[index](text)
    if written is None:
        return
    expected, before = meaning(opdef, sig, operands), [x.clone() for x in operands]
    found = run_lines(text, written, operands)
    close(found, expected[0], said)
    close(operands[index], expected[0], f"{said}: the operand")
    for i, x in enumerate(operands):
        assert i == index or torch.equal(x, before[i]), f"{said}: operand {i} is changed"
        assert i == index or not share(found, x), f"{said}: the result shows operand {i}"


ADDING = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if (adds_to := lookup(name).adds_to) is not None
    and adds_to(signature(lookup(name), sample), frozenset(), True)
}


@of_each_operator(ADDING)
def test_texts_that_add_to_a_sum_are_right_on_any_memory(name: str, sample: Sample) -> None:
    """On a sum that lies anyhow, unless it has to be contiguous."""
    opdef, sig = lookup(name), signature(lookup(name), sample)
    assert opdef.adds is not None
    assert opdef.adds_to is not None
    result, operands = sig.outs[0], drawn(sig, sample)
    total = to_torch(draw(result, "int", np.random.default_rng(5)), result)
    is_any = opdef.adds_to(sig, frozenset(), False)
    for kind, memory in own(total).items() if is_any else {"plain": total}.items():
        for said, given in one_at_a_time(operands):
            there, text = memory.clone(), call(sig)
            run_lines(text, opdef.adds(text, "total"), given, names={"total": there})
            expected = total.double().numpy() + meaning(opdef, sig, given)[0]
            close(there, expected, f"{kind}, {said}")


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
    with pytest.raises(AssertionError, match="it shows 0"):
        check_memory(name, sample)
