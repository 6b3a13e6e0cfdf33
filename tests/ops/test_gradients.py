"""The gradient of every operator: against finite differences, and against torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshdsl.ir.types import BF16, BOOL, F32, I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.opdef import (
    REGISTRY,
    Backward,
    OpDef,
    Sample,
    load_all,
    lookup,
)
from meshdsl.ops.samples import SEQ
from meshdsl.prove.gradient_checks import (
    against_autograd,
    against_differences,
    drawn,
    floats,
    gradient_of,
    is_differentiated,
)
from meshdsl.prove.numpy_backward import NumpyBackward, spread
from meshdsl.prove.sample_values import signature
from meshdsl.prove.torch_run import call, evaluate
from meshdsl.prove.wrong_cases import found
from tests.ops.cases import SAMPLES, of_each_operator

# --- which operators have one -----------------------------------------------------------------

CONSTANT = {
    "sign": "constant between its jumps",
    "floor": "constant between its jumps",
    "floordiv": "constant between its jumps",
    "eq": "yields booleans",
    "ne": "yields booleans",
    "lt": "yields booleans",
    "le": "yields booleans",
    "gt": "yields booleans",
    "ge": "yields booleans",
    "argmax": "yields indices",
    "max_pool_at": "yields indices",
    "stop_gradient": "what it is for",
    "parts": "gradients are compressed with it, and not differentiated",
    "scatter_parts": "gradients are compressed with it, and not differentiated",
    "pack_signs": "yields bits",
    "pack_int8": "yields bits",
    "f8_scale": "stands in training steps that have their gradients",
    "to_f8": "as `f8_scale`",
    "f8_einsum": "as `f8_scale`",
    "sgd_update": "the last thing a training step does",
    "momentum_update": "the last thing a training step does",
    "adam_update": "the last thing a training step does",
}
EXPANDED = {
    *("layer_norm_grad", "rms_norm_grad", "cross_entropy_grad"),
    *("attention_grad", "batch_norm_grad", "batch_norm_sums", "batch_norm_input_grad"),
}
"""Composites that are differentiated by their definition in primitives."""


def _takesfloats(opdef: OpDef) -> bool:
    return any(t.dtype.kind == "float" for s in opdef.samples for t in s.ins)


def test_every_operator_on_floats_has_a_gradient_or_a_reason() -> None:
    without = {n for n, op in load_all().items() if _takesfloats(op) and op.gradient is None}
    assert without == {*CONSTANT, *EXPANDED}
    assert all(lookup(name).composite for name in EXPANDED)


def test_no_other_operator_has_one() -> None:
    needless = {n for n, op in load_all().items() if op.gradient and not _takesfloats(op)}
    assert not needless


def test_gradients_cannot_be_called_by_name() -> None:
    made = {n for n in load_all() if n.endswith("_grad")} | {"unpick"}
    assert len(made) > 10
    assert {lookup(n).surface.items for n in made} == {"view"}


NO_AUTOGRAD = {
    *("silu_grad", "dropout", "batch_norm_stats", "frozen_batch_norm", "linear_recurrence")
}
"""Kernels, or texts, that torch cannot differentiate."""

# --- cases ------------------------------------------------------------------------------------


CASES = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if lookup(name).gradient is not None and is_differentiated(lookup(name), sample)
}
BY_TORCH = {label: case for label, case in CASES.items() if case[0] not in NO_AUTOGRAD}


# --- finite differences -----------------------------------------------------------------------


def check_gradient(name: str, sample: Sample) -> None:
    """For cotangents with all dims of the result, and with every choice of them missing."""
    assert not found(against_differences(lookup(name), sample))


test_gradient_is_that_of_finite_differences = of_each_operator(CASES)(check_gradient)


@of_each_operator(CASES)
def test_each_operand_alone_gets_the_same(name: str, sample: Sample) -> None:
    sig, arrays = signature(lookup(name), sample), drawn(sample, 0.2)
    grad, dims = np.ones(sig.outs[0].shape), sig.outs[0].dims
    every = gradient_of(lookup(name), sig, arrays, grad, dims)
    gradient = lookup(name).gradient
    assert gradient is not None
    for index in every:
        backward = NumpyBackward(lookup(name), sig, arrays, grad, dims, frozenset({index}))
        value = gradient(backward)[index]
        found = spread(backward.evaluator.arrays[value], value.type.dims, sig.ins[index])
        np.testing.assert_array_equal(found, every[index])


def _to_all(call: Backward) -> Mapping[int, Value]:
    return {i: call.grad for i in range(len(call.ins))}


WRONG = {
    "relu": _to_all,
    "mean": _to_all,
    "add": _to_all,
    "max": _to_all,
    "exp": lambda call: {0: call.emit("mul", call.grad, call.operand(0))},
    "sub": lambda call: {0: call.sized(call.grad, 0)},
    "where": lambda call: {i: call.sized(call.grad, i) for i in (1, 2)},
    "split": _to_all,
    "shift": lambda call: {0: call.emit("shift", with_dims(call, SEQ), **call.attrs)},
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_planted_wrong_gradient_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, name, replace(lookup(name), gradient=WRONG[name]))
    with pytest.raises(AssertionError):
        check_gradient(name, lookup(name).samples[0])


# --- torch's autograd -------------------------------------------------------------------------


def _check_autograd(name: str, sample: Sample, arrays: list[np.ndarray]) -> None:
    cases = [*against_autograd(lookup(name), sample, arrays)]
    assert cases, "torch does not differentiate it"
    assert not any(cases)


@of_each_operator(BY_TORCH)
def test_gradient_is_that_of_autograd(name: str, sample: Sample) -> None:
    """On integers: equal values are frequent."""
    _check_autograd(name, sample, drawn(sample, 0.0))


def _with_zeros(sample: Sample) -> list[np.ndarray]:
    """Random operands of small integers; every second float of those that may be so is 0."""
    arrays, rng = drawn(sample, 0.0), np.random.default_rng(6)
    for i, (type_, kind) in enumerate(zip(sample.ins, sample.values, strict=True)):
        if type_.dtype.kind == "float" and kind in ("int", "positive"):
            arrays[i] = np.where(rng.random(arrays[i].shape) < 0.5, 0.0, arrays[i])
    return arrays


@of_each_operator(BY_TORCH)
def test_gradient_at_zeros_is_that_of_autograd(name: str, sample: Sample) -> None:
    """Infinite or NaN where torch's is: a division by zero, the root of zero."""
    with np.errstate(all="ignore"):
        _check_autograd(name, sample, _with_zeros(sample))


A, B, C = Dim("a", 3), Dim("b", 4), Dim("c", 2)
_X = TensorType((A, B), F32)


def _one(name: str, *arrays: object, **attrs: object) -> object:
    values = [np.array(a, float) for a in arrays]
    ins = tuple(TensorType((A, B)[: v.ndim], F32) for v in values)
    return pytest.param(name, Sample(ins, tuple(attrs.items())), values)


_ZERO = [[0, 2, 3, 4], [0, 5, 0, 2], [1, 2, 3, 4]]
_TIED = [[1, 3, 3, 2], [2, 2, 2, 2], [4, 1, 0, 4]]
CORNERS = [
    _one("relu", [-1, 0, 2]),
    _one("abs", [-1, 0, 2]),
    _one("prod", _ZERO, dims=(B,)),
    _one("prod", _ZERO, dims=(A, B)),
    _one("prod", _ZERO, dims=(A,)),
    _one("max", _TIED, dims=(B,)),
    _one("max", _TIED, dims=(A, B)),
    _one("min", _TIED, dims=(A,)),
    _one("maximum", _TIED, [2, 2, 3]),
    _one("minimum", _TIED, _ZERO),
    _one("maximum", [-np.inf, 1, np.inf], [-np.inf, np.inf, np.inf]),
    _one("pow", [0, 2, -3], 2),
    _one("pow", [0, 2, -3], 1),
    _one("pow", [0, 0, 0], [0, 1, 2]),
    _one("pow", [2, 3, 4], [0, -1, 0.5]),
    _one("where", [1, 2, 3], [3, 2, 1]),
    _one("softmax", [[0, -1e9, 3, 3]] * 3, dim=B),
]


@pytest.mark.parametrize(("name", "sample", "arrays"), CORNERS)
def test_corners_are_those_of_autograd(name: str, sample: Sample, arrays: list[np.ndarray]) -> None:
    if name == "where":
        sample = Sample((TensorType((A,), BOOL), *sample.ins), sample.attrs)
        arrays = [np.array([True, False, True]), *arrays]
    _check_autograd(name, sample, arrays)


# --- what is kept, and what is emitted ---------------------------------------------------------

IDS = TensorType((A,), I32)


def _t(*dims: Dim) -> TensorType:
    return TensorType(dims, F32)


TELLING = [
    ("add", [_X, _t(B)], {}, (A, B), [], ["sum"]),
    ("sub", [_X, _X], {}, (A, B), [], ["neg"]),
    ("mul", [_X, _t(B)], {}, (A, B), ["0", "1"], ["einsum", "mul"]),
    ("mul", [_t(A), _t(B)], {}, (), ["0", "1"], ["mul", "mul", "sum", "sum"]),
    ("einsum", [_X, _t(B, C)], {"dims": (A, C)}, (A, C), ["0", "1"], ["einsum", "einsum"]),
    ("einsum", [_X, _t(B, C)], {"dims": (A, C)}, (C,), ["0", "1"], ["einsum", "einsum"]),
    ("einsum", [_X], {"dims": (B,)}, (B,), [], []),
    ("relu", [_X], {}, (A, B), ["result"], ["relu_grad"]),
    ("gelu", [_X], {"approximate": "none"}, (A, B), ["0"], ["gelu_grad"]),
    ("exp", [_X], {}, (A, B), ["result"], ["mul"]),
    ("sqrt", [_X], {}, (A, B), ["result"], ["constant", "div", "mul"]),
    ("identity", [_X], {}, (A,), [], []),
    ("cast", [_X], {"dtype": BF16}, (A,), [], ["cast"]),
    ("cast", [_X], {"dtype": F32}, (A,), [], []),
    ("sum", [_X], {"dims": (B,)}, (A,), [], []),
    ("mean", [_X], {"dims": (B,)}, (A,), [], ["constant", "div"]),
    ("softmax", [_X], {"dim": B}, (A, B), ["result"], ["softmax_grad"]),
    ("softmax", [_X], {"dim": B}, (A,), ["result"], ["broadcast", "softmax_grad"]),
    ("logsumexp", [_X], {"dims": (B,)}, (A,), ["0", "result"], ["exp", "mul", "sub"]),
    (
        "layer_norm",
        [_X, _t(B), _t(B)],
        {"dim": B},
        (A, B),
        ["0", "0", "1"],
        ["einsum", "layer_norm", "layer_norm_grad", "sum"],
    ),
    ("cross_entropy", [_X, IDS], {"dim": B}, (), ["0", "1"], ["cross_entropy_grad"]),
    ("gather", [_t(B, C), IDS], {"dim": B}, (A, C), ["1"], ["scatter_add"]),
    ("gather", [_t(B, C), IDS], {"dim": B}, (A,), ["1"], ["scatter_add"]),
    ("transpose", [_X], {"dims": (B, A)}, (B, A), [], []),
    ("pick", [_X], {"dim": B, "index": 1}, (A,), [], ["unpick"]),
    ("slice", [_X], {"dim": B, "start": 1, "stop": 3, "target": C}, (A, C), [], ["pad"]),
    ("broadcast", [_t(A)], {"dims": (A, B)}, (A, B), [], ["sum"]),
    ("concat", [_X, _t(A, C)], {"target": Dim("t", 6), "sources": (B, C)}, (A,), [], []),
]


@pytest.mark.parametrize(("name", "ins", "attrs", "dims", "kept", "emitted"), TELLING)
def test_little_is_kept_and_little_is_done(
    name: str,
    ins: list[TensorType],
    attrs: dict[str, object],
    dims: tuple[Dim, ...],
    kept: list[str],
    emitted: list[str],
) -> None:
    """Products are contracted, and dims that the cotangent lacks are not added."""
    sig = signature(lookup(name), Sample(tuple(ins), tuple(attrs.items())))
    arrays = [np.ones(t.shape, int if t.dtype == I32 else float) for t in ins]
    arrays = [a.astype(np.int32) if t.dtype == I32 else a for a, t in zip(arrays, ins, strict=True)]
    grad = np.ones([d.size for d in dims])
    wants = frozenset(floats(sig))
    backward = NumpyBackward(lookup(name), sig, arrays, grad, dims, wants)
    gradient = lookup(name).gradient
    assert gradient is not None
    gradient(backward)
    assert sorted(backward.kept) == kept
    assert sorted(backward.evaluator.names) == emitted


def test_a_scatter_in_half_precision_does_not_stop_growing() -> None:
    """1000 ones added up in bf16 would stay at 256."""
    many, row, opdef = Dim("many", 1000), Dim("row", 2), lookup("scatter_add")
    ins = (TensorType((many,), BF16), TensorType((many,), I32))
    sig = signature(opdef, Sample(ins, (("dim", row), ("dims", (row,)))))
    operands = [torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.int32)]
    assert evaluate(opdef, call(sig), operands).tolist() == [1000.0, 0.0]
