"""Helpers of the operator files: checks with their messages, shape rules, factors, numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ir.types import I32, Dim, DType, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    Factor,
    Factors,
    Infer,
    NumpyCall,
    OpError,
    Reads,
    ReduceOp,
    Signature,
    TorchCall,
    Types,
)
from meshdsl.ops.ways import Cast, DropDim, NonZero, SwapDim, Way

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

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

_CASTS = {"float": ("f32",), "number": ("f32", "i32"), "int": ("i32",), "bool": ()}

# --- checks ----------------------------------------------------------------------------------


def need_kind(said: str, accept: str, *types: TensorType) -> None:
    """MD0202 unless every operand is of the kind `accept` (a key of `KINDS`)."""
    for type_ in types:
        if type_.dtype.kind not in KINDS[accept]:
            raise OpError(
                "MD0202",
                f"`{said}` works on {_WANTED[accept]}, not on {type_}",
                _WAY_OUT[accept],
                *(Cast(type_, dtype) for dtype in _CASTS[accept]),
                *([NonZero(type_)] if accept == "bool" else []),
            )


def need_one_dtype(said: str, *types: TensorType) -> DType:
    """The dtype of all operands; MD0201 when they differ."""
    for type_ in types[1:]:
        if type_.dtype != types[0].dtype:
            raise OpError(
                "MD0201",
                f"`{said}` needs operands of one dtype, not {types[0]} and {type_}",
                f"convert one of them: `cast(x, {types[0].dtype})` or `cast(x, {type_.dtype})`",
                *_one_dtype(types[0], type_),
            )
    return types[0].dtype


def _one_dtype(first: TensorType, second: TensorType) -> list[Way]:
    """Either of two operands cast to the dtype of the other, to a float first, to no bool."""
    pairs = [(first, second.dtype), (second, first.dtype)]
    pairs.sort(key=lambda pair: pair[1].kind != "float")
    return [Cast(type_, dtype.name) for type_, dtype in pairs if dtype.kind != "bool"]


def need_dims(said: str, type_: TensorType, dims: Sequence[Dim]) -> None:
    """MD0204 unless the operand has every one of `dims`; MD0205 when one is listed twice."""
    for i, dim in enumerate(dims):
        if dim in dims[:i]:
            message = f"`{said}` lists the dim `{dim}` twice"
            raise OpError("MD0205", message, "name it once", DropDim(dim.name))
    for dim in dims:
        if not type_.has(dim.name):
            raise OpError(
                "MD0204",
                f"`{said}` names the dim `{dim}`, which {type_} does not have",
                None,
                *([DropDim(dim.name)] if len(dims) > 1 else []),
                *(SwapDim(dim.name, n) for n in type_.names if n not in [d.name for d in dims]),
                also=f"its dims are {listed(type_.names)}" if type_.dims else "it is a scalar",
            )


def own_dims(attrs: Attrs) -> tuple[Dim, ...]:
    """The dims that an operator works along: its attribute `dims`, or `dim` alone."""
    dims: tuple[Dim, ...] = attrs["dims"] if "dims" in attrs else (attrs["dim"],)
    return dims


def need_distinct(said: str, dims: Sequence[Dim]) -> None:
    """MD0205 when a dim occurs twice in `dims`."""
    for i, dim in enumerate(dims):
        if dim.name in [d.name for d in dims[:i]]:
            raise OpError(
                "MD0205",
                f"`{said}` has the dim `{dim}` twice",
                f"rename one of them first: `x[{dim} -> other]`",
                DropDim(dim.name),
                also=f"or rename one of them first: `x[{dim} -> other]`",
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


# --- shape rules -----------------------------------------------------------------------------


def same_type(name: str, accept: str) -> Infer:
    """The shape rule of an operator along `dim` that keeps all dims of its only operand."""

    def infer(ins: Types, attrs: Attrs) -> Types:
        need_dims(name, ins[0], (attrs["dim"],))
        need_kind(name, accept, ins[0])
        return (ins[0],)

    return infer


def dropped(name: str, accept: str) -> Infer:
    """The shape rule of a reduction over `dims`."""

    def infer(ins: Types, attrs: Attrs) -> Types:
        need_dims(name, ins[0], attrs["dims"])
        need_kind(name, accept, ins[0])
        return (ins[0].without(*(d.name for d in attrs["dims"])),)

    return infer


def index_type(ins: Types, attrs: Attrs) -> Types:
    """The shape rule of a maker of indices along `dim`."""
    del ins
    return (TensorType((attrs["dim"],), I32),)


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


def plain(
    *, linear: Sequence[Sequence[int]] = (), monotone: Sequence[int] = (), whole: bool = False
) -> Callable[[Signature], Factors]:
    """The factors of an operator that works element by element over the dims of its outputs.

    With `whole`, its own dims (see `own_dims`) are in no loop.
    """
    groups = tuple(frozenset(g) for g in linear)

    def factors(sig: Signature) -> Factors:
        without = [d.name for d in own_dims(sig.attrs)] if whole else ()
        return Factors(loops(sig, without=without), groups, tuple(monotone))

    return factors


def moving(
    sig: Signature, target: Dim, sources: Sequence[Dim], *reads: Reads, linear: bool = True
) -> Factors:
    """The factors of an operator that moves elements along a dim, `target` in the result.

    Every dim is a loop; that of `target` reads a window of a dim of each operand. Partial sums of
    all operands pass if it is `linear`, partial extremes always.
    """
    every = range(len(sources))
    moved = Factor(target.name, tuple(s.name for s in sources), (target.name,), reads=reads)
    groups = (frozenset(every),) if linear else ()
    return Factors((*loops(sig, without=(target.name,)), moved), groups, tuple(every))


# --- numpy -----------------------------------------------------------------------------------


def axis(call: NumpyCall | TorchCall) -> int:
    """The position of the attribute `dim` in the first operand."""
    return call.ins[0].index(call.attrs["dim"].name)


def align(array: Array, type_: TensorType, dims: Sequence[Dim]) -> Array:
    """`array`, whose dims are those of `type_`, transposed and widened to broadcast over `dims`."""
    return fitted(array, type_.names, [d.name for d in dims])


def fitted(array: Array, names: Sequence[str], target: Sequence[str]) -> Array:
    """`array` over dims `names`, transposed and with dims of size 1 where `target` has others."""
    array = array.transpose([names.index(n) for n in target if n in names])
    return np.expand_dims(array, tuple(i for i, n in enumerate(target) if n not in names))


def einsum_by_name(
    *operands: tuple[Array, Sequence[str]], to: Sequence[str], optimize: bool = False
) -> Array:
    """The einsum of arrays, each with the names of its dims, to the dims `to`."""
    numbers = {n: i for i, n in enumerate(dict.fromkeys(n for _, names in operands for n in names))}
    spec: list[object] = []
    for array, names in operands:
        spec += [array, [numbers[n] for n in names]]
    product = np.einsum(*spec, [numbers[n] for n in to], optimize=optimize)  # type: ignore[call-overload]
    return np.asarray(product, dtype=np.result_type(*(array for array, _ in operands)))


def own_block(call: NumpyCall, array: Array, dim: str) -> Array:
    """What this part has of `array`, whose last dim is all of `dim`."""
    return array[..., call.offset(dim) :][..., : call.extent(dim)]


def numpy_padded(array: Array, at: int, before: int, after: int, fill: float = 0.0) -> Array:
    """`array` with margins of `fill` along dim `at`."""
    widths = [(0, 0)] * array.ndim
    widths[at] = (before, after)
    return np.pad(array, widths, constant_values=fill)


def numpy_dtype(dtype: DType) -> np.typing.DTypeLike:
    """The numpy engine's dtype: all floats are float64 there, integers are exact."""
    return np.float64 if dtype.kind == "float" else dtype.numpy


def axes(type_: TensorType, dims: Sequence[Dim]) -> tuple[int, ...]:
    """Positions of `dims` in `type_`, ascending."""
    return tuple(sorted(type_.index(d.name) for d in dims))


# --- rows and costs --------------------------------------------------------------------------

NO_TRUE_ROWS: Mapping[str, str] = {}


def rows_with_reason(why: str, *rows: str) -> dict[str, str]:
    """Entries of `OpDef.true_rows`: several undeclared rows with the same reason."""
    return dict.fromkeys(rows, why)


def no_flops(sig: Signature) -> int:
    """The flops of operators that only move or relabel data: 0."""
    del sig
    return 0
