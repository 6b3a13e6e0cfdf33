"""Runs the torch text of one operator: the operands, the statements, the expression."""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from meshdsl.backends import runtime
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.ir.types import F32, F64, DType, TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature
from meshdsl.prove.wrong_cases import difference

TORCH = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What numpy has in float32."""


SUPPORT = {
    name: found
    for info in pkgutil.iter_modules(runtime.__path__, f"{runtime.__name__}.")
    for name, found in vars(importlib.import_module(info.name)).items()
}
"""The support functions that operators use."""


def call(
    sig: Signature,
    *,
    constants: tuple[bool, ...] = (),
    extents: Mapping[str, int] | None = None,
    offsets: Mapping[str, int] | None = None,
    args: tuple[str, ...] = (),
) -> TorchText:
    """The call that a record's `torch` gets, its operands named `x0`, `x1` and so on."""
    extents, offsets = dict(extents or {}), dict(offsets or {})
    count = len(sig.ins)
    numbers = itertools.count()
    return TorchText(
        args=args or tuple(f"x{i}" for i in range(count)),
        constants=constants or (False,) * count,
        ins=tuple(t.resized(extents) for t in sig.ins),
        outs=tuple(t.resized(extents) for t in sig.outs),
        global_ins=sig.ins,
        global_outs=sig.outs,
        attrs=sig.attrs,
        fresh=lambda hint: f"{hint}_{next(numbers)}",
        place="'test.mdsl:1'",
        offsets={d: functools.partial(str, f"rank * {n} + 0") for d, n in offsets.items()},
        splits=frozenset(extents),
    )


def window_call(local: NumpyCall, shapes: tuple[tuple[int, ...], ...]) -> TorchText:
    """The call of one device with windows of operands, whose local shapes are given."""
    text = call(Signature(local.ins, local.outs, local.attrs), extents=local.extents)
    sized = zip(local.ins, shapes, strict=True)
    text.ins = tuple(t.resized(dict(zip(t.names, shape, strict=True))) for t, shape in sized)
    text.offsets = {d: functools.partial(str, n) for d, n in local.offsets.items()}
    windows = local.windows.items()
    text.starts = {of: functools.partial(str, start) for of, (start, _) in windows}
    text.empty |= {of for of, (start, stop) in windows if start == stop}
    return text


def evaluate(opdef: OpDef, text: TorchText, operands: list[torch.Tensor], rank: int = 0) -> Any:
    """The result of the text on `operands`."""
    value = run_lines(text, opdef.torch(text), operands, rank, imports=opdef.imports)
    return result_of(opdef, value, operands)


def result_of(opdef: OpDef, value: Any, operands: list[torch.Tensor]) -> Any:
    """The result of a call with a `value`: of an update, the operands that it writes over."""
    written = tuple(operands[i] for i in opdef.overwrites)
    return value if not written else written if len(written) > 1 else written[0]


def run_lines(
    text: TorchText,
    expression: str,
    operands: list[torch.Tensor],
    rank: int = 0,
    names: Mapping[str, Any] | None = None,
    imports: tuple[str, ...] = (),
) -> Any:
    """The value of an expression after the statements that precede it.

    `names` are further ones, `imports` the modules of the record.
    """
    scope = {"torch": torch, "rank": rank} | {name: SUPPORT[name] for name in text.used}
    scope |= {name.partition(".")[0]: _root(name) for name in imports}
    scope |= names or {}
    scope |= {f"x{i}": x for i, x in enumerate(operands)}
    for line in text.lines:
        exec(line, scope)
    return eval(expression, scope)


def _root(name: str) -> Any:
    """The first package of a module's name, which is imported."""
    importlib.import_module(name)
    return sys.modules[name.partition(".")[0]]


def several(found: Any) -> tuple[Any, ...]:
    """The results of an operator, always as a tuple."""
    return found if isinstance(found, tuple) else (found,)


def to_torch(array: np.ndarray, type_: TensorType, strided: bool = False) -> torch.Tensor:
    """The array in the dtype of `type_`; `strided`: with gaps and its dims reversed in memory."""
    tensor = torch.tensor(array, dtype=TORCH[type_.dtype.name])
    if not strided or tensor.dim() == 0:
        return tensor
    room = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype)
    view = room.permute(*reversed(range(tensor.dim())), tensor.dim())[..., 0]
    view.copy_(tensor)
    return view


def retyped(sample: Sample, floats: DType) -> Sample:
    """The sample with `floats` for f32."""
    change: Callable[[Any], Any] = lambda x: floats if x == F32 else x  # noqa: E731
    ins = tuple(TensorType(t.dims, change(t.dtype)) for t in sample.ins)
    return Sample(ins, tuple((k, change(v)) for k, v in sample.attrs), sample.values)


FLOATS = (F32, F64)
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f64": 1e-11}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The array of a result."""
    array: np.ndarray = (tensor.float() if tensor.dtype in WIDENED else tensor).numpy()
    return array


def unlike(found: torch.Tensor, expected: np.ndarray, type_: TensorType) -> str:
    """How a result differs from what is expected in dtype, shape or value; empty: it does not.

    Values are equal up to the rounding of the dtype.
    """
    if found.dtype != TORCH[type_.dtype.name]:
        return f"the dtype {found.dtype} instead of {type_.dtype}"
    tolerance = TOLERANCE.get(type_.dtype.name, 0)
    got = found.detach().to(torch.float64).numpy()
    return difference(got, expected, tolerance, type_.names)


def assert_same(found: torch.Tensor, expected: np.ndarray, type_: TensorType) -> None:
    """Equal dtype and shape, and values up to the rounding of the dtype."""
    said = unlike(found, expected, type_)
    assert not said, said
