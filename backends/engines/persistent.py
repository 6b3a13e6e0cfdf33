"""The local engine for a program that runs repeatedly: loaded once, its devices kept.

A run shards the inputs, wakes the threads of the devices, and assembles the outputs. Devices share
the memory of inputs and parameters: the emitted text never writes to either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.backends.engines.in_process import (
    Emitted,
    LocalSession,
    Tensors,
    call_device,
    moved_away,
    torch_dtype,
)
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.array_files import ArraysRefused, check_arrays
from meshdsl.backends.runtime.values import (
    NUMPY_DTYPES,
    Array,
    Part,
    Spec,
    cast,
    has_sum,
    local_part,
)
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.torch.emitter import ProgramText

Blocks = list[Tensors]
"""Per device, its block of every tensor."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of a tensor: its distinct blocks, and which one each device has."""

    parts: tuple[Part, ...]
    block_of: tuple[int, ...]

    @classmethod
    def of(cls, spec: Spec, mesh: dict[str, int]) -> Sharding:
        """The blocks of a declared tensor."""
        each = [local_part(spec, mesh, rank) for rank in range(math.prod(mesh.values()))]
        parts = {str(part): part for part in each}
        return cls(tuple(parts.values()), tuple([*parts].index(str(part)) for part in each))


class PersistentEngine:
    """A loaded program with its devices. Runs one at a time."""

    def __init__(self, emitted: ProgramText) -> None:
        self.session = LocalSession(Emitted(emitted).load(), lasting=True)
        self.program = self.session.programs.program
        mesh = self.program.MESH
        self._inputs = {n: Sharding.of(s, mesh) for n, s in self.program.INPUTS.items()}
        self._states = getattr(self.program, "STATES", None)
        self._kept = {**self.program.PARAMS, **(self._states or {})}
        self._params = {n: Sharding.of(s, mesh) for n, s in self._kept.items()}
        self._outputs = {n: Sharding.of(s, mesh) for n, s in self.program.OUTPUTS.items()}

    def parameters(self, arrays: Mapping[str, Any]) -> Blocks:
        """The local blocks of the parameters on each device; `arrays` are all of them, whole.

        States that the program assigns are among them.
        """
        blocks = self._blocks(self._kept, self._params, arrays)
        moved_away(self._kept, blocks)
        return blocks

    def run(self, inputs: Mapping[str, Any], params: Blocks) -> dict[str, torch.Tensor]:
        """The whole outputs; `inputs` are all inputs, whole.

        Raises ArraysRefused where an input does not fit, LocalRunError where a device fails.
        """
        blocks = self._blocks(self.program.INPUTS, self._inputs, inputs)

        def call(ranks: Ranks) -> Tensors:
            tables = [blocks[ranks.rank], params[ranks.rank]]
            if self._states is not None:  # what is assigned to them is not kept
                tables.append({n: tables[1][n].clone() for n in self._states})
            return call_device(ranks, self.program, tables)

        outputs = self.session.run(call)
        return {n: self._whole(n, cut, outputs) for n, cut in self._outputs.items()}

    def _blocks(
        self, specs: Mapping[str, Spec], cuts: Mapping[str, Sharding], arrays: Mapping[str, Any]
    ) -> Blocks:
        import torch

        blocks: Blocks = [{} for _ in range(self.session.programs.devices)]
        for name, cut in cuts.items():
            tensor = as_tensor(arrays[name], specs[name], name)
            parts = [tensor[part].contiguous() for part in cut.parts]
            for rank, index in enumerate(cut.block_of):
                takes = has_sum(specs[name], self.program.MESH, rank)
                # Not `* 0`, which is NaN of an infinity.
                blocks[rank][name] = parts[index] if takes else torch.zeros_like(parts[index])
        return blocks

    def _whole(self, name: str, cut: Sharding, held: Sequence[Tensors]) -> torch.Tensor:
        import torch

        first = held[0][name]
        tensor = torch.empty(tuple(self.program.OUTPUTS[name].dims.values()), dtype=first.dtype)
        for index, part in enumerate(cut.parts):
            # Not `whole[part].copy_(…)`: where stages are in several ranges that is a copy itself.
            tensor[part] = held[cut.block_of.index(index)][name]
        return tensor


def as_tensor(array: Any, spec: Spec, name: str) -> torch.Tensor:
    """A whole array or tensor in the dtype of `spec`. Raises ArraysRefused if it does not fit."""
    import torch

    dtype, shape = torch_dtype(spec.dtype), tuple(spec.dims.values())
    refuse_without_values(array, name)
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        if tensor.dtype == dtype and tuple(tensor.shape) == shape:
            return tensor
    values = as_numpy(array, name)
    if values.shape != shape or str(values.dtype) != NUMPY_DTYPES[spec.dtype]:
        check_arrays({name: values}, {name: spec}, "arrays")
        try:
            values = cast(values, spec.dtype)
        except ValueError as error:
            raise _refused(name, str(error)) from None
    elif spec.dtype == "bf16":
        values = cast(values, spec.dtype)
    if not values.flags.writeable:
        values = values.copy()
    # Not `ascontiguousarray`, which gives a scalar a dim.
    converted: torch.Tensor = torch.from_numpy(np.asarray(values, order="C")).to(dtype)
    return converted


def as_numpy(array: Any, name: str) -> Array:
    """A numpy array: a tensor's memory, or the `numpy.asarray` of anything else.

    Raises ArraysRefused where there is none.
    """
    refuse_without_values(array, name)
    try:
        if is_torch(array):
            tensor = array.detach().cpu()
            array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        values: Array = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(name, f"is no array: {error}") from None
    if values.dtype.hasobject:
        raise _refused(name, "is an array of Python objects, not of numbers")
    return values


def refuse_without_values(array: Any, name: str) -> None:
    """Refuse an array whose values do not all lie in memory. Raises ArraysRefused."""
    if problem := lacking(array):
        raise _refused(name, problem)


def lacking(array: Any) -> str:
    """Why an array or tensor does not have a value for each element; empty where it has."""
    if isinstance(array, np.ma.MaskedArray):
        return "is a masked array: `.filled(value)` gives what is masked a value"
    if not is_torch(array) or not hasattr(array, "layout"):
        return ""
    if array.is_nested:
        return "is a nested tensor: `.to_padded_tensor(value)` makes it rectangular"
    if str(array.layout) != "torch.strided":
        return f"is sparse ({array.layout}): `.to_dense()` has all of its elements"
    if array.is_meta:
        return "is a meta tensor, which has a shape and no values"
    if array.is_quantized:
        return "is quantized: `.dequantize()` gives numbers"
    return ""


def is_torch(array: Any) -> bool:
    """Whether `array` is a tensor; torch is not imported to find out."""
    return type(array).__module__.partition(".")[0] == "torch"


def _refused(name: str, problem: str) -> ArraysRefused:
    return ArraysRefused("arrays", f"  {name}: {problem}", [f"{name}: {problem}"])
