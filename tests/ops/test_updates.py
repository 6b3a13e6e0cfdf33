"""Updates: what is overwritten, literals as scalars, and precision in the first steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshdsl.backends.runtime.update_kernels import adam_
from meshdsl.ir.types import BF16, F32, F64, I32, Dim, DType, TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature, load_all, lookup
from meshdsl.prove.sample_values import draw, results, signature
from meshdsl.prove.torch_run import call, evaluate, to_torch

A, B = Dim("a", 4), Dim("b", 6)
UPDATES = [name for name, opdef in sorted(load_all().items()) if opdef.overwrites]
CASES = [(name, sample) for name in UPDATES for sample in lookup(name).samples]


def _drawn(sample: Sample) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [draw(t, kind, rng) for t, kind in zip(sample.ins, sample.values, strict=True)]


def test_there_are_updates() -> None:
    assert {"sgd_update", "momentum_update", "adam_update"} <= set(UPDATES)


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_the_results_stand_where_the_operands_were(name: str, sample: Sample) -> None:
    opdef, sig = lookup(name), signature(lookup(name), sample)
    operands = [to_torch(a, t) for a, t in zip(_drawn(sample), sig.ins, strict=True)]
    before = [x.clone() for x in operands]
    evaluate(opdef, call(sig), operands)
    assert len(opdef.overwrites) == len(sig.outs)
    for i in opdef.overwrites:
        assert not torch.equal(operands[i], before[i])
    for i in set(range(len(operands))) - set(opdef.overwrites):
        assert torch.equal(operands[i], before[i]), f"operand {i} is changed"


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_the_numpy_meaning_changes_nothing(name: str, sample: Sample) -> None:
    opdef, sig = lookup(name), signature(lookup(name), sample)
    arrays = _drawn(sample)
    before = [a.copy() for a in arrays]
    found = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
    assert [f.shape for f in found] == [t.shape for t in sig.outs]


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_no_call_of_the_language_reaches_them(name: str, sample: Sample) -> None:
    del sample
    assert lookup(name).surface.items == "view"
    assert lookup(name).gradient is None


def test_the_text_is_one_call() -> None:
    w, scalar = TensorType((A, B), F32), TensorType((), F32)
    attrs = {"weight_decay": 0.0}
    g = TensorType((B, A), BF16)
    sig = Signature((w, g, scalar, scalar), (w,), attrs)
    text = call(sig, constants=(False, False, True, True), args=("w", "g", "0.5", "1.0"))
    assert (
        lookup("sgd_update").torch(text) == "sgd_([w], [g.mT], lr=0.5, scale=1.0, weight_decay=0.0)"
    )
    assert text.used == {"sgd_"}


# --- formulas by hand --------------------------------------------------------------------------


def _adam(dtype: DType, **attrs: object) -> tuple[OpDef, Signature]:
    opdef, w, scalar = lookup("adam_update"), TensorType((A,), dtype), TensorType((), dtype)
    ins = (w, w, w, w, scalar, scalar, TensorType((), I32))
    return opdef, Signature(ins, opdef.infer(ins, attrs), attrs)


BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_first_step_of_adam_goes_by_the_sign(
    dtype: DType, decoupled: bool, literal: bool
) -> None:
    """From zero states both corrections cancel: only the sign of the gradient is left.

    In f32, 1 - 0.999 computed by subtraction would be wrong in the fifth digit.
    """
    opdef, sig = _adam(dtype, **BETAS, weight_decay=0.5, decoupled=decoupled)
    w, g = np.array([1.0, -2.0, 3.0, 4.0]), np.array([0.3, 5.0, -0.01, -70.0])
    total = g if decoupled else g + 0.5 * w
    expected = w - 0.25 * np.sign(total) - (0.125 * w if decoupled else 0)
    zero, scalars = np.zeros(4), (0.25, 1.0, np.int32(1))
    whole = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs),
                    [w, g, zero, zero, *map(np.asarray, scalars)])  # fmt: skip
    np.testing.assert_allclose(whole[0], expected, rtol=1e-5)
    operands = [to_torch(x, sig.ins[0]) for x in (w, g, zero, zero)]
    operands += [torch.tensor(x, dtype=operands[0].dtype) for x in scalars[:2]]
    operands.append(torch.tensor(1, dtype=torch.int32))
    names = tuple(f"x{i}" for i in range(4))
    text = call(sig)
    if literal:
        text = call(sig, constants=(False,) * 4 + (True,) * 3, args=(*names, "0.25", "1.0", "1"))
    evaluate(opdef, text, operands)
    found = [operands[i] for i in opdef.overwrites]
    rtol = 1e-12 if dtype == F64 else 5e-7
    for got, wanted in zip(found, whole, strict=True):
        np.testing.assert_allclose(got.double().numpy(), wanted, rtol=rtol)


class _Operators(TorchDispatchMode):
    """The names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_goes_over_the_memory_once(decoupled: bool, number: Callable[[float], Any]) -> None:
    """Torch's kernel takes numbers and tensors of one, but nothing that is not contiguous."""
    options = {**BETAS, "weight_decay": 0.0, "decoupled": decoupled}
    for turned, kernels in ((False, 1), (True, 0)):
        tensors = [torch.ones(2, 3).mT if turned else torch.ones(3, 2) for _ in range(4)]
        step: Callable[..., None] = adam_
        with _Operators() as run:
            step(*([x] for x in tensors), number(0.1), 1.0, number(1.0), **options)
        name = "aten::_fused_adamw_" if decoupled else "aten::_fused_adam_"
        assert run.names.count(name) == kernels


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 1_000_000])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
def test_one_less_a_power_is_exact(step: int, beta: float) -> None:
    from meshdsl.backends.runtime.update_kernels import one_less_power

    exact = 1.0 if beta == 0 else -math.expm1(step * math.log(beta))
    assert one_less_power(beta, step) == exact


@pytest.mark.parametrize("steps", [1, 3])
def test_momentum_is_a_sum_over_past_gradients(steps: int) -> None:
    opdef, w, scalar = lookup("momentum_update"), TensorType((A,), F64), TensorType((), F64)
    attrs = {"beta": 0.5, "nesterov": False, "weight_decay": 0.0}
    ins = (w, w, w, scalar, scalar)
    numpy_call = NumpyCall(ins, opdef.infer(ins, attrs), attrs)
    grads = [np.arange(4.0) + n for n in range(steps)]
    x, v = np.zeros(4), np.zeros(4)
    for grad in grads:
        x, v = opdef.numpy(numpy_call, x, grad, v, np.asarray(0.1), np.asarray(2.0))
    velocities = [sum(2 * g * 0.5 ** (n - m) for m, g in enumerate(grads[: n + 1])) for n in
                  range(steps)]  # fmt: skip
    np.testing.assert_allclose(v, velocities[-1])
    np.testing.assert_allclose(x, -0.1 * sum(velocities))


# --- our own mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ins", "said"),
    [
        ((TensorType((A,), F32), TensorType((A, B), F32)), "g is f32[a, b]"),
        ((TensorType((A, B), F32), TensorType((A,), F32)), "the gradient is f32[a]"),
        ((TensorType((A,), F32), TensorType((A,), F64)), "g is f64[a]"),
    ],
)
def test_what_does_not_fit_is_our_mistake(ins: tuple[TensorType, ...], said: str) -> None:
    scalars = (TensorType((), F32),) * 2
    with pytest.raises(AssertionError, match=said.replace("[", r"\[")):
        lookup("sgd_update").infer((*ins, *scalars), {"weight_decay": 0.0})


def test_states_have_the_type_of_the_parameter() -> None:
    w, other, scalar = TensorType((A,), F32), TensorType((), F32), TensorType((), F32)
    with pytest.raises(AssertionError, match="states are not of the type"):
        lookup("momentum_update").infer((w, w, other, scalar, scalar), {})
