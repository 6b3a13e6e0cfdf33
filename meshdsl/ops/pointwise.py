"""Constructors of pointwise operators: broadcasting is by name only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ir.types import BOOL, F32, I32, DType, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    Gradient,
    Infer,
    NumpyCall,
    OpDef,
    Scratch,
    Spelling,
    Surface,
    TorchCall,
    Types,
    ZeroRule,
    registering,
)
from meshdsl.ops.requirements import (
    NO_TRUE_ROWS,
    Array,
    align,
    merged_dims,
    need_kind,
    need_one_dtype,
    plain,
)
from meshdsl.ops.samples import SampleList, samples
from meshdsl.ops.zeros import passes

Text = str | Callable[[TorchCall, list[str]], str]
NOT_SPELLED: Mapping[str, Spelling] = {}


def pointwise_record(
    name: str,
    arity: int,
    numpy: Callable[..., Array],
    torch: Text,
    *,
    meaning: str = "",
    said: str | None = None,
    accept: str = "number",
    check: Callable[..., None] | None = None,
    result: DType | None = None,
    linear: Sequence[Sequence[int]] = (),
    monotone: Sequence[int] = (),
    exact: bool = True,
    view: bool = False,
    values: str = "int",
    true_rows: Mapping[str, str] = NO_TRUE_ROWS,
    gradient: Gradient | None = None,
    internal: bool = False,
    in_place: Sequence[Text] = (),
    infix: str | None = None,
    fold: Callable[..., float] | None = None,
    precision: Literal["widest", "f32"] = "widest",
    lazy: bool = False,
    spelled: Mapping[str, Spelling] = NOT_SPELLED,
    zeros: ZeroRule | None = None,
    keeps_zero: bool = False,
    imports: tuple[str, ...] = (),
    scratch: Scratch | None = None,
) -> OpDef:
    """The record of a pointwise operator on operands of one dtype.

    `numpy` takes aligned arrays. `torch` is a template over aligned texts, or a function of the
    call and those texts. `accept` is a key of `KINDS`; `result`, where given, the result's dtype.
    `check` is called with the types of the operands before other checks.
    An `internal` one cannot be called by name. `in_place` are texts, for each operand, that leave
    the result in its memory. `said` is its name in messages, `infix` its sign in the language.
    One that is 0 where all operands are `keeps_zero`: of one operand, that is its rule of `zeros`.
    """
    return OpDef(
        name,
        Surface("view" if internal else "none", (arity, arity)),
        pointwise_type(said or infix or name, accept, check, result),
        plain(linear=linear, monotone=monotone),
        numpy_pointwise(numpy),
        torch_pointwise(torch),
        pointwise_samples(arity, accept, values),
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
        zeros=passes(0) if keeps_zero and zeros is None else zeros,
        keeps_zeros=keeps_zero,
        meaning=meaning,
        imports=imports,
        scratch=scratch,
    )


pointwise = registering(pointwise_record)
"""Put the record that `pointwise_record` makes into the registry."""


def pointwise_type(
    said: str,
    accept: str,
    check: Callable[..., None] | None = None,
    result: DType | None = None,
) -> Infer:
    """The shape rule of a pointwise operator: all dims of the operands, and their one dtype.

    `accept`, `check` and `result` are those of `pointwise`; `said` is the name in messages.
    """

    def infer(ins: Types, attrs: Attrs) -> Types:
        del attrs
        if check is not None:
            check(*ins)
        need_kind(said, accept, *ins)
        dtype = need_one_dtype(said, *ins)
        return (TensorType(merged_dims(said, *ins), result or dtype),)

    return infer


def smooth(
    name: str,
    numpy: Callable[[Array], Array],
    torch: str,
    gradient: Gradient,
    *,
    meaning: str,
    rises: bool = True,
    values: str = "int",
    true_rows: Mapping[str, str] = NO_TRUE_ROWS,
    in_place: bool = True,
    fold: Callable[[float], float] | None = None,
    precision: Literal["widest", "f32"] = "widest",
    keeps_zero: bool = False,
) -> None:
    """Register a function of floats that rounds.

    One that `rises` is defined everywhere and never falls, so that partial extremes pass. Torch has
    a form of it with `_` behind its name that works `in_place`.
    """
    pointwise(
        name,
        1,
        numpy,
        torch,
        accept="float",
        exact=False,
        values=values,
        monotone=[0] if rises else [],
        gradient=gradient,
        true_rows=true_rows,
        in_place=[torch.replace("(", "_(")] if in_place else [],
        fold=fold,
        precision=precision,
        keeps_zero=keeps_zero,
        meaning=meaning,
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


def pointwise_samples(arity: int, accept: str, values: str = "int") -> SampleList:
    """Samples of one or two operands of the kind `accept`, drawn from the distribution `values`."""
    dtype = {"bool": BOOL, "float": F32, "number": F32, "any": I32}[accept]
    shapes = {1: UNARY, 2: BINARY}[arity]
    other = {"number": I32, "any": F32}.get(accept)
    first = samples(*shapes, values=values, dtype=dtype)
    if other is None:
        return first
    return SampleList(lambda: (*first, *samples(shapes[0], values=values, dtype=other)))


UNARY = ("b h", "()", "s b h")
BINARY = ("b h; h", "h s; s b h", "b; s", "(); b", "h b; ()", "(); ()")
