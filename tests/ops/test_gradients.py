"""The gradient of every operator: against finite differences, and against torch's autograd."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshdsl.ir.types import BF16, BOOL, F32, F64, I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.opdef import (
    REGISTRY,
    Backward,
    NumpyCall,
    OpDef,
    Sample,
    Signature,
    load_all,
    lookup,
)
from meshdsl.ops.samples import SEQ
from tests.ops.cases import SAMPLES, of_each_operator
from tests.ops.numpy_backward import NumpyBackward, spread
from tests.ops.row_prover import draw, results, signature
from tests.ops.torch_run import TORCH, call, evaluate, retyped, several

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
    "sgd_update": "the last thing a training step does",
    "momentum_update": "the last thing a training step does",
    "adam_update": "the last thing a training step does",
}
EXPANDED = {
    *("layer_norm_grad", "rms_norm_grad", "cross_entropy_grad"),
    *("attention_grad", "batch_norm_grad"),
}
"""Composites that are differentiated by their definition in primitives."""


def _takes_floats(opdef: OpDef) -> bool:
    return any(t.dtype.kind == "float" for s in opdef.samples for t in s.ins)


def test_every_operator_on_floats_has_a_gradient_or_a_reason() -> None:
    without = {n for n, op in load_all().items() if _takes_floats(op) and op.gradient is None}
    assert without == {*CONSTANT, *EXPANDED}
    assert all(lookup(name).composite for name in EXPANDED)


def test_no_other_operator_has_one() -> None:
    needless = {n for n, op in load_all().items() if op.gradient and not _takes_floats(op)}
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


def _is_differentiated(opdef: OpDef, sample: Sample) -> bool:
    types = (*sample.ins, *signature(opdef, sample).outs)
    return any(t.dtype.kind == "float" for t in sample.ins) and types[-1].dtype.kind == "float"


CASES = {
    label: (name, sample)
    for label, (name, sample) in SAMPLES.items()
    if lookup(name).gradient is not None and _is_differentiated(lookup(name), sample)
}
BY_TORCH = {label: case for label, case in CASES.items() if case[0] not in NO_AUTOGRAD}


def _floats(sig: Signature) -> list[int]:
    return [i for i, t in enumerate(sig.ins) if t.dtype.kind == "float"]


def _drawn(sample: Sample, noise: float) -> list[np.ndarray]:
    """Random operands; with `noise` no two floats are equal, and none is at a corner."""
    rng = np.random.default_rng(3)
    found = []
    for type_, kind in zip(sample.ins, sample.values, strict=True):
        array = draw(type_, kind, rng)
        if type_.dtype.kind == "float":
            array = np.asarray(array + noise * rng.uniform(0.1, 1, array.shape))
        found.append(array)
    return found


def _subsets(dims: tuple[Dim, ...]) -> Iterator[tuple[Dim, ...]]:
    for count in range(len(dims) + 1):
        yield from itertools.combinations(dims, count)


def _gradient(
    name: str, sig: Signature, arrays: list[np.ndarray], grad: np.ndarray, dims: tuple[Dim, ...]
) -> dict[int, np.ndarray]:
    """The gradients of all float operands, full; their compact types are checked on the way."""
    opdef = lookup(name)
    assert opdef.gradient is not None
    backward = NumpyBackward(opdef, sig, arrays, grad, dims, frozenset(_floats(sig)))
    with np.errstate(all="ignore"):
        found = opdef.gradient(backward)
    full = {}
    for index, value in found.items():
        own = sig.ins[index]
        assert value.type.dtype == own.dtype
        assert set(value.type.dims) <= set(own.dims)
        full[index] = spread(backward.evaluator.arrays[value], value.type.dims, own)
    return full


def _close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


# --- finite differences -----------------------------------------------------------------------


def _jacobian(name: str, sig: Signature, arrays: list[np.ndarray], index: int) -> np.ndarray:
    """Central differences, [elements of operand `index`, dims of the result…]."""
    whole = NumpyCall(sig.ins, sig.outs, sig.attrs)
    step, rows = 1e-5, []
    for at in np.ndindex(arrays[index].shape):
        sides = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[index][at] += sign * step
            sides.append(results(lookup(name), whole, moved)[0])
        rows.append((sides[0] - sides[1]) / (2 * step))
    return np.array(rows)


def check_gradient(name: str, sample: Sample) -> None:
    """For cotangents with all dims of the result, and with every choice of them missing."""
    sig, arrays = signature(lookup(name), sample), _drawn(sample, 0.2)
    jacobians = {i: _jacobian(name, sig, arrays, i) for i in _floats(sig)}
    rng = np.random.default_rng(4)
    for dims in _subsets(sig.outs[0].dims):
        order = tuple(rng.permutation(np.array(dims, dtype=object))) if dims else ()
        grad = rng.normal(size=[d.size for d in order])
        whole = spread(grad, order, sig.outs[0])
        found = _gradient(name, sig, arrays, np.asarray(grad), order)
        for index, jacobian in jacobians.items():
            expected = (jacobian * whole).reshape(len(jacobian), -1).sum(1)
            own = found.get(index, np.zeros(sig.ins[index].shape))
            _close(own, expected.reshape(sig.ins[index].shape), 1e-6)


test_gradient_is_that_of_finite_differences = of_each_operator(CASES)(check_gradient)


@of_each_operator(CASES)
def test_each_operand_alone_gets_the_same(name: str, sample: Sample) -> None:
    sig, arrays = signature(lookup(name), sample), _drawn(sample, 0.2)
    grad, dims = np.ones(sig.outs[0].shape), sig.outs[0].dims
    every = _gradient(name, sig, arrays, grad, dims)
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


def _autograd(
    name: str, sig: Signature, arrays: list[np.ndarray], grad: np.ndarray
) -> dict[int, np.ndarray]:
    """The gradients of torch's autograd through the operator's text."""
    operands = [
        torch.tensor(a, dtype=TORCH[t.dtype.name], requires_grad=t.dtype.kind == "float")
        for a, t in zip(arrays, sig.ins, strict=True)
    ]
    found = several(evaluate(lookup(name), call(sig), operands))[0]
    cotangent = torch.tensor(grad).broadcast_to(found.shape).to(found.dtype)
    floats = _floats(sig)
    grads = torch.autograd.grad(
        found, [operands[i] for i in floats], cotangent, allow_unused=True, materialize_grads=True
    )
    return dict(zip(floats, (g.to(torch.float64).numpy() for g in grads), strict=True))


def _check_autograd(name: str, sample: Sample, arrays: list[np.ndarray]) -> None:
    sample = retyped(sample, F64)
    sig = signature(lookup(name), sample)
    grad = np.random.default_rng(5).normal(size=sig.outs[0].shape)
    expected = _autograd(name, sig, arrays, grad)
    found = _gradient(name, sig, arrays, np.asarray(grad), sig.outs[0].dims)
    narrow = {t.dtype for t in (*sig.ins, *sig.outs)} & {F32, BF16}
    for index, wanted in expected.items():
        own = found.get(index, np.zeros(wanted.shape))
        _close(own, wanted, 1e-2 if narrow else 1e-9)


@of_each_operator(BY_TORCH)
def test_gradient_is_that_of_autograd(name: str, sample: Sample) -> None:
    """On integers: equal values are frequent."""
    _check_autograd(name, sample, _drawn(sample, 0.0))


def _with_zeros(sample: Sample) -> list[np.ndarray]:
    """Random operands of small integers; every second float of those that may be so is 0."""
    arrays, rng = _drawn(sample, 0.0), np.random.default_rng(6)
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
    wants = frozenset(_floats(sig))
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
