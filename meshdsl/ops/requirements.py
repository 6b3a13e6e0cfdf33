"""Helpers of the operator files: checks with their messages, factors, numpy, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshdsl.ir.types import F32, Dim, DType, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    Factor,
    Factors,
    OpError,
    Reads,
    ReduceOp,
    Sample,
    Signature,
)

Array = npt.NDArray[Any]
Infer = Callable[[tuple[TensorType, ...], Attrs], tuple[TensorType, ...]]

KINDS: dict[str, frozenset[str]] = {
    "float": frozenset({"float"}),
    "number": frozenset({"float", "int"}),
    "int": frozenset({"int"}),
    "bool": frozenset({"bool"}),
    "any": frozenset({"float", "int", "bool"}),
}
_WANTED = {"float": "floats", "number": "numbers", "int": "integers", "bool": "booleans"}
_WAY_OUT = {
    "float": "convert it: `cast(x, f32)`",
    "number": "convert it: `cast(x, f32)` or `cast(x, i32)`",
    "int": "convert it: `cast(x, i32)`",
    "bool": "compare it: `x != 0`",
}

# --- checks ----------------------------------------------------------------------------------


def need_kind(said: str, accept: str, *types: TensorType) -> None:
    """MD0202 unless every operand is of the kind `accept` (a key of `KINDS`)."""
    for type_ in types:
        if type_.dtype.kind not in KINDS[accept]:
            raise OpError(
                "MD0202", f"`{said}` works on {_WANTED[accept]}, not on {type_}", _WAY_OUT[accept]
            )


def need_one_dtype(said: str, *types: TensorType) -> DType:
    """The dtype of all operands; MD0201 when they differ."""
    for type_ in types[1:]:
        if type_.dtype != types[0].dtype:
            raise OpError(
                "MD0201",
                f"`{said}` needs operands of one dtype, not {types[0]} and {type_}",
                f"convert one of them: `cast(x, {types[0].dtype})` or `cast(x, {type_.dtype})`",
            )
    return types[0].dtype


def need_dims(said: str, type_: TensorType, dims: Sequence[Dim]) -> None:
    """MD0204 unless the operand has every one of `dims`; MD0205 when one is listed twice."""
    for i, dim in enumerate(dims):
        if dim in dims[:i]:
            raise OpError("MD0205", f"`{said}` lists the dim `{dim}` twice", "name it once")
    for dim in dims:
        if not type_.has(dim.name):
            raise OpError(
                "MD0204",
                f"`{said}` names the dim `{dim}`, which {type_} does not have",
                f"its dims are {listed(type_.names)}" if type_.dims else "it is a scalar",
            )


def own_dims(attrs: Attrs) -> tuple[Dim, ...]:
    """The dims that an operator works along: its attribute `dims`, or `dim` alone."""
    found: tuple[Dim, ...] = attrs["dims"] if "dims" in attrs else (attrs["dim"],)
    return found


def need_distinct(said: str, dims: Sequence[Dim]) -> None:
    """MD0205 when a dim occurs twice in `dims`."""
    for i, dim in enumerate(dims):
        if dim.name in [d.name for d in dims[:i]]:
            raise OpError(
                "MD0205",
                f"`{said}` has the dim `{dim}` twice",
                f"rename one of them first: `x[{dim} -> other]`",
            )


def merged_dims(said: str, *types: TensorType) -> tuple[Dim, ...]:
    """All dims of the operands in order of first appearance; MD0206 when one has two sizes."""
    dims: dict[str, Dim] = {}
    for dim in (d for t in types for d in t.dims):
        first = dims.setdefault(dim.name, dim)
        if first.size != dim.size:
            sizes = f"{first.size} and {dim.size}"
            message = f"`{said}` meets the dim `{dim}` with two sizes: {sizes}"
            raise OpError("MD0206", message, "a dim has one size; rename one of them")
    return tuple(dims.values())


def listed(names: Sequence[str]) -> str:
    """`a`, `b` and `c`, for a message."""
    quoted = [f"`{n}`" for n in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


# --- factors ---------------------------------------------------------------------------------


def loop(sig: Signature, name: str, reduce: ReduceOp | None = None) -> Factor:
    """The loop over the dim `name`, under that name wherever it occurs."""
    ins = tuple(name if t.has(name) else None for t in sig.ins)
    outs = tuple(name if t.has(name) else None for t in sig.outs)
    return Factor(name, ins, outs, reduce)


def loops(sig: Signature, *, without: Sequence[str] = ()) -> tuple[Factor, ...]:
    """A loop for each dim of the outputs, less those in `without`."""
    names = dict.fromkeys(n for t in sig.outs for n in t.names if n not in without)
    return tuple(loop(sig, n) for n in names)


def reader(target: str, sources: Sequence[str], *reads: Reads) -> Factor:
    """A loop over dim `target` of the result, which reads a window of a dim of each operand."""
    return Factor(target, tuple(sources), (target,), reads=reads)


def plain(*, linear: Sequence[Sequence[int]] = (), monotone: Sequence[int] = ()) -> Any:
    """The factors of an operator that works element by element over the dims of its outputs."""
    groups = tuple(frozenset(g) for g in linear)

    def factors(sig: Signature) -> Factors:
        return Factors(loops(sig), groups, tuple(monotone))

    return factors


# --- numpy -----------------------------------------------------------------------------------


def align(array: Array, type_: TensorType, dims: Sequence[Dim]) -> Array:
    """`array`, whose dims are those of `type_`, transposed and widened to broadcast over `dims`."""
    wanted = [d.name for d in dims]
    order = [type_.index(n) for n in wanted if type_.has(n)]
    shape = array.transpose(order).shape
    sizes = dict(zip([n for n in wanted if type_.has(n)], shape, strict=True))
    return array.transpose(order).reshape([sizes.get(n, 1) for n in wanted])


def numpy_dtype(dtype: DType) -> npt.DTypeLike:
    """The numpy engine's dtype: all floats are float64 there, integers are exact."""
    return np.float64 if dtype.kind == "float" else dtype.numpy


def axes(type_: TensorType, dims: Sequence[Dim]) -> tuple[int, ...]:
    """Positions of `dims` in `type_`, ascending."""
    return tuple(sorted(type_.index(d.name) for d in dims))


def no_flops(sig: Signature) -> int:
    """The flops of operators that only move or relabel data: 0."""
    del sig
    return 0


# --- samples ---------------------------------------------------------------------------------

BATCH, SEQ, HIDDEN, VOCAB = Dim("b", 2), Dim("s", 4), Dim("h", 6), Dim("v", 8)
"""Dims of the samples; every size is even, so that two ranks can split each."""


def tensor(*dims: Dim, dtype: DType = F32) -> TensorType:
    """A type for a sample."""
    return TensorType(dims, dtype)


def sample(*ins: TensorType, values: str | tuple[str, ...] = "int", **attrs: Any) -> Sample:
    """A sample call; a single value kind applies to all operands."""
    kinds = (values,) * len(ins) if isinstance(values, str) else values
    return Sample(ins, tuple(attrs.items()), kinds)


def swapped(why: str, *rows: str) -> dict[str, str]:
    """One reason for several undeclared rows."""
    return dict.fromkeys(rows, why)
