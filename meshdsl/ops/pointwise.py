"""Constructors of pointwise operators: broadcasting is by name only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from meshdsl.ir.types import BOOL, F32, I32, DType, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    Gradient,
    NumpyCall,
    OpDef,
    Sample,
    Spelling,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    Array,
    align,
    merged_dims,
    need_kind,
    need_one_dtype,
    plain,
    sample,
    tensor,
)

Text = str | Callable[[TorchCall, list[str]], str]
NO_TRUE_ROWS: Mapping[str, str] = {}
NOT_SPELLED: Mapping[str, Spelling] = {}


def pointwise(
    name: str,
    arity: int,
    numpy: Callable[..., Array],
    torch: Text,
    *,
    meaning: str = "",
    said: str | None = None,
    accept: str = "number",
    result: DType | None = None,
    linear: Sequence[Sequence[int]] = (),
    monotone: Sequence[int] = (),
    exact: bool = True,
    view: bool = False,
    values: str | tuple[str, ...] = "int",
    samples: tuple[Sample, ...] = (),
    true_rows: Mapping[str, str] = NO_TRUE_ROWS,
    gradient: Gradient | None = None,
    internal: bool = False,
    in_place: Sequence[Text] = (),
    infix: str | None = None,
    fold: Callable[..., float] | None = None,
    precision: Literal["widest", "f32"] = "widest",
    lazy: bool = False,
    spelled: Mapping[str, Spelling] = NOT_SPELLED,
) -> OpDef:
    """Register a pointwise operator on operands of one dtype.

    `numpy` takes aligned arrays. `torch` is a template over aligned texts, or a function of the
    call and those texts. `accept` is a key of `KINDS`; `result`, where given, the result's dtype.
    An `internal` one cannot be called by name. `in_place` are texts, for each operand, that leave
    the result in its memory. `said` is its name in messages, `infix` its sign in the language.
    """
    said = said or infix or name

    def infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        del attrs
        need_kind(said, accept, *ins)
        dtype = need_one_dtype(said, *ins)
        return (TensorType(merged_dims(said, *ins), result or dtype),)

    return register(
        OpDef(
            name,
            Surface("view" if internal else "none", (arity, arity)),
            infer,
            plain(linear=linear, monotone=monotone),
            numpy_pointwise(numpy),
            torch_pointwise(torch),
            samples or pointwise_samples(arity, accept, values),
            exact=exact,
            view=view,
            true_rows=true_rows,
            gradient=gradient,
            in_place={i: torch_pointwise(text) for i, text in enumerate(in_place)},
            infix=infix,
            fold=fold,
            precision=precision,
            lazy=lazy,
            spelled=spelled,
            meaning=meaning,
        )
    )


def numpy_pointwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` on operands aligned to the output's dims."""

    def run(call: NumpyCall, *arrays: Array) -> Array:
        dims = call.outs[0].dims
        aligned = [align(a, t, dims) for a, t in zip(arrays, call.ins, strict=True)]
        return np.asarray(function(*aligned))

    return run


def torch_pointwise(text: Text) -> Callable[[TorchCall], str]:
    """A template (or a function) filled with operands aligned to the output's dims.

    Python does arithmetic on literals itself: where all are literals, the first becomes a tensor.
    """

    def write(call: TorchCall) -> str:
        texts = [call.aligned(i, call.outs[0].dims) for i in range(len(call.ins))]
        if all(call.is_constant(i) for i in range(len(call.ins))):
            texts[0] = call.tensor(0)
        return text(call, texts) if callable(text) else text.format(*texts)

    return write


def pointwise_samples(arity: int, accept: str, values: str | tuple[str, ...]) -> tuple[Sample, ...]:
    """Samples of one or two operands of the kind `accept`, drawn from the distribution `values`."""
    dtype = {"bool": BOOL, "float": F32, "number": F32, "any": I32}[accept]
    kinds = "bool" if accept == "bool" else values
    shapes = {1: UNARY, 2: BINARY}[arity]
    samples = [sample(*(tensor(*d, dtype=dtype) for d in dims), values=kinds) for dims in shapes]
    other = {"number": I32, "any": F32}.get(accept)
    if other is not None:
        samples.append(sample(*(tensor(*d, dtype=other) for d in shapes[0]), values=kinds))
    return tuple(samples)


UNARY = (((BATCH, HIDDEN),), ((),), ((SEQ, BATCH, HIDDEN),))
BINARY = (
    ((BATCH, HIDDEN), (HIDDEN,)),
    ((HIDDEN, SEQ), (SEQ, BATCH, HIDDEN)),
    ((BATCH,), (SEQ,)),
    ((), (BATCH,)),
    ((HIDDEN, BATCH), ()),
    ((), ()),
)
