"""Gradients of records, against finite differences of the numpy meaning, and torch's autograd."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from meshdsl.ir.types import BF16, F32, F64, Dim
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature
from meshdsl.prove.numpy_backward import NumpyBackward, spread
from meshdsl.prove.sample_values import draw, results, signature
from meshdsl.prove.torch_run import TORCH, call, evaluate, retyped, several
from meshdsl.prove.wrong_cases import Cases, WrongCase, call_text, difference


def is_differentiated(opdef: OpDef, sample: Sample) -> bool:
    """Whether a call has floats as operands and as its last result."""
    types = (*sample.ins, *signature(opdef, sample).outs)
    return any(t.dtype.kind == "float" for t in sample.ins) and types[-1].dtype.kind == "float"


def floats(sig: Signature) -> list[int]:
    """The operands that are floats, by index."""
    return [i for i, t in enumerate(sig.ins) if t.dtype.kind == "float"]


def drawn(sample: Sample, noise: float) -> list[np.ndarray]:
    """Random operands; with `noise` no two floats are equal, and none is at a corner."""
    rng = np.random.default_rng(3)
    arrays = []
    for type_, kind in zip(sample.ins, sample.values, strict=True):
        array = draw(type_, kind, rng)
        if type_.dtype.kind == "float":
            array = np.asarray(array + noise * rng.uniform(0.1, 1, array.shape))
        arrays.append(array)
    return arrays


def _subsets(dims: tuple[Dim, ...]) -> Iterator[tuple[Dim, ...]]:
    for count in range(len(dims) + 1):
        yield from itertools.combinations(dims, count)


def gradient_of(
    opdef: OpDef,
    sig: Signature,
    arrays: list[np.ndarray],
    grad: np.ndarray,
    dims: tuple[Dim, ...],
) -> dict[int, np.ndarray]:
    """The gradients of all float operands, full; their compact types are checked on the way."""
    assert opdef.gradient is not None
    backward = NumpyBackward(opdef, sig, arrays, grad, dims, frozenset(floats(sig)))
    with np.errstate(all="ignore"):
        compact = opdef.gradient(backward)
    full = {}
    for index, value in compact.items():
        operand_type = sig.ins[index]
        fits = value.type.dtype == operand_type.dtype and {*value.type.dims} <= {*operand_type.dims}
        assert fits, f"the gradient of operand {index} is {value.type}, the operand {operand_type}"
        full[index] = spread(backward.evaluator.arrays[value], value.type.dims, operand_type)
    return full


# --- finite differences -----------------------------------------------------------------------


def _jacobian(opdef: OpDef, sig: Signature, arrays: list[np.ndarray], index: int) -> np.ndarray:
    """Central differences, [elements of operand `index`, dims of the result…]."""
    call = NumpyCall(sig.ins, sig.outs, sig.attrs)
    step, rows = 1e-5, []
    for at in np.ndindex(arrays[index].shape):
        sides = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[index][at] += sign * step
            sides.append(results(opdef, call, moved)[0])
        rows.append((sides[0] - sides[1]) / (2 * step))
    return np.array(rows)


def against_differences(opdef: OpDef, sample: Sample) -> Cases:
    """For cotangents with all dims of the result, and with every choice of them missing.

    The gradient of a record without one is 0.
    """
    sig, arrays = signature(opdef, sample), drawn(sample, 0.2)
    jacobians = {i: _jacobian(opdef, sig, arrays, i) for i in floats(sig)}
    rng = np.random.default_rng(4)
    for dims in _subsets(sig.outs[0].dims):
        order = tuple(rng.permutation(np.array(dims, dtype=object))) if dims else ()
        grad = np.asarray(rng.normal(size=[d.size for d in order]))
        full_grad = spread(grad, order, sig.outs[0])
        gradients = {} if opdef.gradient is None else gradient_of(opdef, sig, arrays, grad, order)
        for index, jacobian in jacobians.items():
            operand = sig.ins[index]
            wanted = (jacobian * full_grad).reshape(len(jacobian), -1).sum(1).reshape(operand.shape)
            got = gradients.get(index, np.zeros(operand.shape))
            said = difference(got, wanted, 1e-6, operand.names, floor=1e-3)
            yield _problem(sig, index, dims, said, "finite differences")
            if said:
                return


def _problem(
    sig: Signature, index: int, dims: tuple[Dim, ...], said: str, oracle: str
) -> WrongCase | None:
    """A gradient that differs from that of an oracle; None where nothing is said."""
    if not said:
        return None
    along = ", ".join(d.name for d in dims)
    case = f"{call_text(sig)}; cotangent over [{along}], operand {index}, by {oracle}"
    return WrongCase("MD0174", "gradient", case, said)


# --- torch's autograd -------------------------------------------------------------------------


def _autograd(
    opdef: OpDef, sig: Signature, arrays: list[np.ndarray], grad: np.ndarray
) -> dict[int, np.ndarray] | None:
    """The gradients of torch's autograd through the operator's text; None where it has none."""
    operands = [
        torch.tensor(a, dtype=TORCH[t.dtype.name], requires_grad=t.dtype.kind == "float")
        for a, t in zip(arrays, sig.ins, strict=True)
    ]
    result = several(evaluate(opdef, call(sig), operands))[0]
    if not result.requires_grad:
        return None
    cotangent = torch.tensor(grad).broadcast_to(result.shape).to(result.dtype)
    wanted = floats(sig)
    try:
        grads = torch.autograd.grad(
            result,
            [operands[i] for i in wanted],
            cotangent,
            allow_unused=True,
            materialize_grads=True,
        )
    except (RuntimeError, NotImplementedError):  # a kernel without a formula of torch's own
        return None
    return dict(zip(wanted, (g.to(torch.float64).numpy() for g in grads), strict=True))


def against_autograd(opdef: OpDef, sample: Sample, arrays: list[np.ndarray]) -> Cases:
    """On these operands; no case where torch does not differentiate the text."""
    sample = retyped(sample, F64)
    sig = signature(opdef, sample)
    grad = np.random.default_rng(5).normal(size=sig.outs[0].shape)
    expected = _autograd(opdef, sig, arrays, grad)
    if expected is None:
        return
    gradients = gradient_of(opdef, sig, arrays, np.asarray(grad), sig.outs[0].dims)
    narrow = {t.dtype for t in (*sig.ins, *sig.outs)} & {F32, BF16}
    for index, wanted in expected.items():
        gradient = gradients.get(index, np.zeros(wanted.shape))
        tolerance = 1e-2 if narrow else 1e-9
        said = difference(gradient, wanted, tolerance, sig.ins[index].names, floor=1e-3)
        yield _problem(sig, index, sig.outs[0].dims, said, "torch's autograd")
