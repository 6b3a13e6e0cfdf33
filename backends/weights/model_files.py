"""Tensors in the files of other programs: Hugging Face folders, and state dicts of torch.

Only headers are read here. Nothing can run code from a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from meshdsl.backends.runtime.array_files import member_start, read_arrays
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.mapped_arrays import FileElements, end_of
from meshdsl.backends.runtime.stored import StoredArray
from meshdsl.backends.runtime.user_files import Refused, read_regular, regular
from meshdsl.records import dataclass

TORCH = (".bin", ".pt", ".pth")
"""The suffixes of files that `torch.save` has written."""

INDEX = ".index.json"
"""The suffix of a file that says which file of a folder has which tensor."""

CHECKPOINT = ("latest", "manifest.json")
"""Files of a folder of checkpoints, or of one of them: these hold parameters under their names."""

_TORCH_DTYPES = {
    **{"float64": ("f64", "<f8"), "float32": ("f32", "<f4"), "float16": ("f16", "<f2")},
    **{"bfloat16": ("bf16", "<u2"), "bool": ("bool", "|u1"), "uint8": ("uint8", "|u1")},
    **{"int64": ("i64", "<i8"), "int32": ("i32", "<i4"), "int16": ("int16", "<i2")},
    **{"int8": ("int8", "|i1")},
}
"""The language's and numpy's names for dtypes of torch."""


class ModelRefused(Refused):
    """A model that cannot be read as it is, and what makes it one that can."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


SAVE_STATE = "save the `state_dict()` of the model alone"


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor in a file, whose elements begin at byte `offset`; `strides` are in bytes."""

    path: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def is_model(path: str) -> bool:
    """Whether `path` names a folder or a file of another program's tensors."""
    if not os.path.isdir(path):
        return path.endswith(TORCH)
    if any(os.path.exists(os.path.join(path, name)) for name in CHECKPOINT):
        return False
    return any(True for _ in _candidates(Path(path)))


def is_of_torch(path: str) -> bool:
    """Whether the tensors of a folder or a file are read by torch. Raises OSError."""
    names = [path] if not os.path.isdir(path) else list(_candidates(Path(path)))
    return any(name.removesuffix(INDEX).endswith(TORCH) for name in names)


def tensors_of(path: str) -> dict[str, ModelTensor]:
    """The tensors of a folder or a file by their keys.

    Raises Refused for what cannot be read, is damaged, or ends early.
    """
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise Refused(f"there is no {path}")
        return _tensors_in(path)
    try:
        names = list(_candidates(Path(path)))
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror or error}") from None
    if not names:
        kinds = "`model.safetensors`, `model.safetensors.index.json` or `pytorch_model.bin`"
        raise Refused(f"there is no model in {path}: no {kinds}")
    if len(names) > 1:
        raise Refused(f"{path} holds several models: {', '.join(names)}; name one of the files")
    if names[0].endswith(INDEX):
        return _indexed(Path(path), names[0])
    return _tensors_in(os.path.join(path, names[0]))


def _candidates(folder: Path) -> Iterator[str]:
    """The files of a folder that stand for a whole model, in the order of `transformers`."""
    names = sorted(entry.name for entry in os.scandir(folder))
    for suffix in (".safetensors", f".safetensors{INDEX}", ".bin", f".bin{INDEX}"):
        found = [name for name in names if name.endswith(suffix)]
        preferred = [n for n in found if n in (f"model{suffix}", f"pytorch_model{suffix}")]
        if preferred:
            yield preferred[0]
            return
    if not any(name.endswith(INDEX) for name in names):  # else they are shards
        yield from (name for name in names if name.endswith(".safetensors"))


def _indexed(folder: Path, name: str) -> dict[str, ModelTensor]:
    """The tensors of the shards that an index lists."""
    where = _index(folder / name)
    shards = {shard: _tensors_in(str(folder / shard)) for shard in dict.fromkeys(where.values())}
    missing = [key for key, shard in where.items() if key not in shards[shard]]
    if missing:
        key = missing[0]
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise Refused(f"{folder / where[key]} has no {key}, which {name} says is there{more}")
    tensors: dict[str, ModelTensor] = {}
    for shard, found in shards.items():
        for key, tensor in found.items():
            if where.get(key, shard) == shard:
                if key in tensors:
                    raise Refused(f"{folder} holds {key} twice, and {name} does not list it")
                tensors[key] = tensor
    return tensors


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor, of an index; they are files of its folder."""
    try:
        where = json.loads(read_regular(path))["weight_map"]
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused(f"{path} is damaged: it has no table `weight_map`") from None
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise Refused(f"{path} is damaged: its `weight_map` is not a table of file names")
    for file in where.values():
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise Refused(f"{path} is damaged: `{file}` is not the name of a file beside it")
    return where


def _tensors_in(path: str) -> dict[str, ModelTensor]:
    if path.endswith(TORCH):
        return dict(_of_torch(path))
    if not path.endswith(".safetensors"):
        kinds = "a folder, a .safetensors file or a state dict of torch (.bin, .pt, .pth)"
        raise Refused(f"{path} is no file of another program's tensors: name {kinds}")
    return {name: _row_major(array) for name, array in read_arrays(path).items()}


def _row_major(array: StoredArray) -> ModelTensor:
    width = np.dtype(array.stored).itemsize
    strides = [width * math.prod(array.shape[i + 1 :]) for i in range(len(array.shape))]
    place = (array.shape, array.offset, tuple(strides))
    return ModelTensor(array.path, array.dtype, array.stored, *place)


# --- state dicts of torch ------------------------------------------------------------------------


def _of_torch(path: str) -> Iterator[tuple[str, ModelTensor]]:
    """The tensors of a file that `torch.save` has written, none of whose values is read."""
    state, records = _state_dict(path)
    for key, tensor in state.items():
        if not hasattr(tensor, "untyped_storage"):
            kind = type(tensor).__name__
            raise ModelRefused(f"{path} holds a {kind} under `{key}`, not a tensor", SAVE_STATE)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _TORCH_DTYPES or not _is_plain(tensor):
            raise Refused(f"{path}: tensor {key} is {dtype}, {tensor.layout}: not supported")
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is None:
            help = "save it again with today's `torch.save`, or as .safetensors"
            raise ModelRefused(f"{path} does not say where its tensors are", help)
        language, stored = _TORCH_DTYPES[dtype]
        width, shape = tensor.element_size(), tuple(tensor.shape)
        strides = tuple(width * step for step in tensor.stride())
        offset = begin + width * tensor.storage_offset()
        end = end_of(FileElements(path, language, stored, offset, strides), shape)
        if any(step < 0 for step in strides) or end > begin + records.get(begin, 0):
            raise Refused(f"{path} is damaged: tensor {key} lies outside of its bytes")
        yield key, ModelTensor(path, language, stored, shape, offset, strides)


def _is_plain(tensor: Any) -> bool:
    """Whether the bytes in the file are the values: strided, and not of the opposite sign."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_neg()


def _state_dict(path: str) -> tuple[Mapping[str, Any], Mapping[int, int]]:
    """The table of tensors in a file of torch, with the places of their values alone.

    Beside it: how many bytes begin at each of these places.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with open(path, "rb", opener=regular) as file:
            begins_archive = file.read(4) == b"PK\x03\x04"
            if not begins_archive:
                form = "is not an archive, the format of `torch.save` since 2020"
                raise ModelRefused(f"{path} {form}", "save it again, or as .safetensors")
            if not zipfile.is_zipfile(file):
                raise Refused(f"{path} is damaged: it ends early")
            records = _records(file, path)
        with FakeTensorMode(), _without_a_word():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Refused:
        raise
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged archive or pickle: errors of all kinds
        if "Unsupported global" in str(error):
            raise ModelRefused(f"{path} holds objects other than tensors", SAVE_STATE) from None
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise Refused(f"{path} is not a sound state dict of torch: {reason}") from None
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        kind = type(state).__name__
        raise ModelRefused(f"{path} holds a {kind}, not a table of tensors", SAVE_STATE)
    return state, records


@contextlib.contextmanager
def _without_a_word() -> Iterator[None]:
    """Keep torch from logging tracebacks and warnings: what is wrong with a file is refused."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def _records(file: IO[bytes], path: str) -> dict[int, int]:
    """The bytes of each record of an archive of torch, by the byte at which they begin.

    Refuses numbers in big-endian order: without values, torch would swap bytes that are not there.
    """
    records = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise ModelRefused(f"{path} is big-endian", "save it again as .safetensors")
            if info.compress_type == zipfile.ZIP_STORED:
                records[member_start(file, info)] = info.file_size
    return records
