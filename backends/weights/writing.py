"""Parameters written as the tensors of a model: the same records as for reading, backwards."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.backends.runtime.array_files import kind_of, safetensors_parts
from meshdsl.backends.runtime.user_files import (
    read_regular,
    replacing_for_good,
    sync_folder,
    write_file,
)
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.weights.model_files import CHECKPOINT, INDEX, TORCH
from meshdsl.backends.weights.reading import cast_notes
from meshdsl.diagnostics import Diagnostic, fail
from meshdsl.named.ir import NamedProgram
from meshdsl.named.weights import FilePlace, StoredParam, WeightMap, padding
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
"""The file of a model that is not cut into shards."""

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file, unless one tensor is larger: as in `transformers`."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of a model: its dtype, sizes, and the parameters in it with their indices."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[StoredParam, tuple[int, ...]], ...]

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters in it."""
        return tuple(param.name for param, _ in self.parts)


def check_writable(weights: WeightMap, program: NamedProgram) -> Iterator[Diagnostic]:
    """Refuse what could not be written after a run (MD0554); a note on what no key is for."""
    learned = {str(value.name) for value in program.learned}
    for name in weights.unmapped:
        help = f"write an entry for it, or `{name}: init` to leave it out of models"
        fail("MD0554", f"`weights {weights.name}` has no entry for `{name}`", help=help)
    for param in weights.params:
        if param.tied and param.name in learned and program.goal is not None:
            message = f"`{param.name}` is trained, and has no key of its own: it is `{param.tied}`"
            help = f'give it one: `{param.name}: "KEY"[…] or {param.tied}`'
            fail("MD0554", message, help=help)
    left = [param.name for param in weights.params if not param.places]
    if left:
        message = f"{', '.join(f'`{name}`' for name in left)}: no key, so not in the model"
        help = "`--out FILE.safetensors` without `--as` writes all parameters"
        yield Diagnostic("MD0554", message, severity="note", help=help)
    types = {str(p.value.name): p.value.type for p in program.params}
    places = {p.name: p.places[0] for p in weights.params if p.places and not p.tied}
    for name, place in places.items():
        yield from padding(name, types[name], place, "are not written", "are 0")
    dtypes = [str(types[name].dtype) for name in places]
    casts = Counter((dtype, written_dtype(dtype, weights)) for dtype in dtypes)
    yield from cast_notes(casts, "written")


def written_dtype(dtype: str, weights: WeightMap) -> str:
    """What a parameter of a dtype is written as."""
    return weights.dtype if weights.dtype and kind_of(dtype) == "float" else dtype


def model_dtype(weights: WeightMap, program: NamedProgram) -> str | None:
    """The dtype of all floats of a model, None where they have several."""
    types = {str(p.value.name): p.value.type for p in program.params}
    dtypes = {types[param.name].dtype for param in weights.params if param.places}
    written = {written_dtype(str(d), weights) for d in dtypes if d.kind == "float"}
    return written.pop() if len(written) == 1 else None


def check_model(path: str, force: bool) -> None:
    """Refuse a place for a model that cannot be written, or has one already. Raises MD0554."""
    out = Path(path)
    if out.suffix == ".npz":
        help = "name a folder, a .safetensors file or a .bin file"
        fail("MD0554", f"{path}: models are no .npz files", help=help)
    if out.is_file() and not is_folder(path) and not force:
        fail("MD0554", f"{path} exists", help="name another file, or add `--force`")
    if not out.absolute().parent.is_dir():
        fail("MD0554", f"there is no folder {out.parent}", help="make it first")
    if out.exists() and out.is_dir() != is_folder(path):
        fail("MD0554", f"{path} is {'no' if is_folder(path) else 'a'} folder", help="name another")
    if any((out / name).exists() for name in CHECKPOINT):
        fail("MD0554", f"{path} holds a checkpoint", help="name another folder for the model")
    held = [name for name in _model_files(out)] if out.is_dir() else []
    if held and not force:
        help = "name another folder, or add `--force` to replace it"
        fail("MD0554", f"{path} holds a model: {held[0]}", help=help)


def is_folder(path: str) -> bool:
    """Whether a model at this place is a folder."""
    return not path.endswith((".safetensors", *TORCH))


def _model_files(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder))
    kinds = (".safetensors", f".safetensors{INDEX}")
    return [name for name in names if name.endswith(kinds)]


def write_model(
    path: str,
    weights: WeightMap,
    specs: Mapping[str, Spec],
    whole: Callable[[str], torch.Tensor],
) -> None:
    """Write the parameters in `specs` to a folder or a file, by its suffix. Raises OSError, MD0554.

    `whole` yields a parameter. The parameters of one tensor of the model at a time are whole in
    memory; for a state dict of torch, all of them.
    """
    _check_tied(weights, specs, whole)
    tensors = _tensors(weights, specs)
    values = _ModelValues(specs, whole)
    if path.endswith(TORCH):
        import torch

        with replacing_for_good(path) as file:
            torch.save({key: values.tensor(tensor) for key, tensor in tensors.items()}, file)
    elif not is_folder(path):
        _write(Path(path), tensors, values)
    else:
        _write_folder(Path(path), tensors, values)


def _write_folder(folder: Path, tensors: Mapping[str, _Written], values: _ModelValues) -> None:
    """Write a model beside an older one, then replace that. A failure leaves it as it was."""
    folder.mkdir(exist_ok=True)
    before = _model_files(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
        names = _write_files(Path(unfinished), tensors, values)
        for name in before:
            if name.endswith(INDEX):  # it would list old shards beside new ones
                os.unlink(folder / name)
        for name in names:
            os.replace(os.path.join(unfinished, name), folder / name)
    for name in before:
        if name not in names and not name.endswith(INDEX):
            os.unlink(folder / name)
    sync_folder(folder)


def _write_files(
    folder: Path, tensors: Mapping[str, _Written], values: _ModelValues
) -> Sequence[str]:
    """Write `model.safetensors`, or shards and their index; yields the names, the index last."""
    shards = list(_shards(tensors))
    if len(shards) == 1:
        _write(folder / SINGLE, tensors, values)
        return [SINGLE]
    total = len(shards)
    names = [f"model-{n + 1:05}-of-{total:05}.safetensors" for n in range(total)]
    for name, keys in zip(names, shards, strict=True):
        _write(folder / name, {key: tensors[key] for key in keys}, values)
    where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    size = sum(_bytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_file(folder / f"{SINGLE}{INDEX}", json.dumps(index, indent=2) + "\n")
    return [*names, f"{SINGLE}{INDEX}"]


def _shards(tensors: Mapping[str, _Written]) -> Iterator[list[str]]:
    """The keys of each file."""
    keys, size = list[str](), 0
    for key, tensor in tensors.items():
        if keys and size + _bytes(tensor) > SHARD_BYTES:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += _bytes(tensor)
    yield keys


def _bytes(tensor: _Written) -> int:
    from meshdsl.ir.types import DTYPES

    return math.prod(tensor.shape) * DTYPES[tensor.dtype].bytes


def _write(path: Path, tensors: Mapping[str, _Written], values: _ModelValues) -> None:
    from meshdsl.backends.train.checkpoint import bytes_of

    shapes = {key: (tensor.dtype, list(tensor.shape)) for key, tensor in tensors.items()}

    def data(key: str) -> memoryview:
        return bytes_of(values.tensor(tensors[key]))

    with replacing_for_good(path) as file:
        file.writelines(safetensors_parts(shapes, data, {"format": "pt"}))


def _tensors(weights: WeightMap, specs: Mapping[str, Spec]) -> dict[str, _Written]:
    """The tensors of a model by key; those of the same parameters are neighbours.

    Raises MD0554 for one that parameters of the program fill only in part.
    """
    tensors: dict[str, _Written] = {}
    for param in weights.params:
        if param.tied or not param.places:
            continue
        place, dtype = param.places[0], written_dtype(specs[param.name].dtype, weights)
        for indices, key in place.keys():
            before = tensors.get(key)
            parts = before.parts if before else ()
            tensors[key] = _Written(dtype, place.shape, (*parts, (param, indices)))
    for key, tensor in tensors.items():
        _check_full(key, tensor, specs, weights)
    order = {name: number for number, name in enumerate(specs)}
    by_params = sorted(tensors.items(), key=lambda item: order[item[1].params[0]])
    return dict(by_params)


def _check_full(key: str, tensor: _Written, specs: Mapping[str, Spec], weights: WeightMap) -> None:
    sizes = (math.prod(a.room for a in p.places[0].axes) for p, _ in tensor.parts)
    if sum(sizes) != math.prod(tensor.shape):
        listed = ", ".join(f"`{name}`" for name in tensor.params)
        message = f"{listed} fill `{key}` only in part: the program lacks the other parameters"
        fail("MD0554", message, help="write the model from the program that has all of them")
    dtypes = {written_dtype(specs[name].dtype, weights) for name in tensor.params}
    if len(dtypes) > 1:
        message = f"the parameters in `{key}` have the dtypes {' and '.join(sorted(dtypes))}"
        fail("MD0554", message, help="declare them in one dtype")


def _check_tied(
    weights: WeightMap, specs: Mapping[str, Spec], whole: Callable[[str], torch.Tensor]
) -> None:
    for param in weights.params:
        if not param.tied:
            continue
        own, other = list(specs[param.name].dims), list(specs[param.tied].dims)
        tied = whole(param.tied).permute([other.index(dim) for dim in own])
        if not whole(param.name).equal(tied):
            message = f"`{param.name}` has other values than `{param.tied}`, whose tensor it is"
            help = f'give it a key of its own: `{param.name}: "KEY"[…] or {param.tied}`'
            fail("MD0554", message, help=help)


COPIED = (".json", ".txt", ".model", ".jinja")
"""The suffixes of files of a folder that describe its model: configuration and tokenizer."""


def copy_description(source: str, folder: str, dtype: str | None) -> None:
    """Copy the files beside the tensors of a model to the folder of the one made of it.

    Where they say in which dtype the tensors are, it is the `dtype` of those that were written.
    """
    import shutil

    if not os.path.isdir(source) or not os.path.isdir(folder):
        return
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        target = os.path.join(folder, entry.name)
        wanted = entry.name.endswith(COPIED) and not entry.name.endswith(INDEX)
        if wanted and entry.is_file() and not os.path.exists(target):
            shutil.copyfile(entry.path, target)
            if entry.name == "config.json" and dtype is not None:
                _correct_dtype(target, dtype)


def _correct_dtype(path: str, dtype: str) -> None:
    """Write the dtype of the tensors into a configuration that names another one."""
    from meshdsl.backends.engines.in_process import torch_dtype

    try:
        about = json.loads(read_regular(path))
    except (ValueError, RecursionError):
        return  # no JSON: copied as it is
    name = str(torch_dtype(dtype)).removeprefix("torch.")
    said = [k for k in ("dtype", "torch_dtype") if isinstance(about, dict) and k in about]
    if any(about[key] != name for key in said):
        about |= dict.fromkeys(said, name)
        write_file(path, json.dumps(about, indent=2) + "\n")


class _ModelValues:
    """The values of tensors of a model, made from whole parameters; the last ones are kept."""

    def __init__(self, specs: Mapping[str, Spec], whole: Callable[[str], torch.Tensor]) -> None:
        self.specs, self.whole = specs, whole
        self.held: dict[str, torch.Tensor] = {}

    def tensor(self, written: _Written) -> torch.Tensor:
        """One tensor, in row-major order."""
        if set(self.held) != set(written.params):
            self.held = {}
            self.held = {name: self.whole(name).detach().cpu() for name in written.params}
        from meshdsl.backends.engines.in_process import torch_dtype

        first = self.held[written.params[0]]
        tensor = first.new_zeros(written.shape, dtype=torch_dtype(written.dtype))
        for param, indices in written.parts:
            dims = list(self.specs[param.name].dims)
            _put(tensor, param.places[0], self.held[param.name], dims, indices)
        return tensor


def _put(
    tensor: torch.Tensor,
    place: FilePlace,
    values: torch.Tensor,
    dims: Sequence[str],
    indices: tuple[int, ...],
) -> None:
    """Copy the values of a parameter at some indices of its numbered dims to their place."""
    where = {number.dim: index for number, index in zip(place.numbers, indices, strict=True)}
    axes = {axis.dim: axis for axis in place.axes}
    block = values[tuple(where[d] if d in where else slice(axes[d].size) for d in dims)]
    within = [dim for dim in dims if dim not in where]
    strides = [axes[dim].step * tensor.stride(axes[dim].at) for dim in within]
    start = sum(n * step for n, step in zip(place.starts, tensor.stride(), strict=True))
    tensor.as_strided(block.shape, strides, start).copy_(block)
