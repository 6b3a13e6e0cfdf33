"""Arrays from .npz and .safetensors files, read slice by slice and checked before anything runs.

Nothing here can run code from a file: pickled objects are refused.
"""

import json
import math
import os
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from meshdsl.backends.runtime.mapped_arrays import SUFFIX, read_mapped
from meshdsl.backends.runtime.stored import StoredArray as StoredArray
from meshdsl.backends.runtime.user_files import Refused as Refused
from meshdsl.backends.runtime.user_files import regular, replacing, replacing_for_good
from meshdsl.backends.runtime.values import NUMPY_DTYPES, Array, Spec

PARSING = threading.Lock()
"""Lock around parsing a text, as that of a .npy header: CPython 3.11 fails in two threads."""

SAFETENSORS_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "|u1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"},
}

READ_AT_ONCE = 1 << 20
"""Bytes that are read at once for a checksum."""

PICKLED = "is pickled Python objects; unpickling can run code hidden in a file, so it is refused"


NO_SIZES: Mapping[str, int] = MappingProxyType({})


class ArraysRefused(Refused):
    """Arrays that do not fit the program: `table` of all of them, and the list of `problems`.

    With dims of other `sizes` they would; empty where that is not all.
    """

    def __init__(
        self, what: str, table: str, problems: list[str], sizes: Mapping[str, int] = NO_SIZES
    ) -> None:
        super().__init__(f"the {what} do not fit the program\n{table}")
        self.table, self.problems, self.sizes = table, problems, sizes


def read_arrays(path: str, proven: bool = False) -> dict[str, Any]:
    """The arrays of a .npz or .safetensors file by name; Refused when it cannot be read.

    They are `StoredArray`s, or of a table of parameters in other files `MappedArray`s.

    Every member of a .npz file is compared with its checksum, unless `proven` says that another
    process of this run has done so.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            if path.endswith(".safetensors"):
                return dict(read_safetensors(file, path))
            if path.endswith(".npz"):
                return dict(read_npz(file, path, proven))
            if path.endswith(SUFFIX):
                return dict(read_mapped(file.read()))
            refuse_other(file, path)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror or error}") from None
    return {}


def what_writes(path: str) -> str:
    """For a help: how arrays are saved in the format that `path` is named after."""
    if path.endswith(".safetensors"):
        return "save arrays by safetensors.numpy.save_file({name: array, …}, path)"
    return "save arrays by numpy.savez(path, name=array, …)"


def refuse_other(file: IO[bytes], path: str) -> None:
    """Refuse a file that is neither .npz nor .safetensors, saying what to do instead."""
    start = file.read(8)
    if start.startswith(b"\x93NUMPY"):
        file.seek(0)
        read_npy_header(file, path)
        raise Refused(f"{path} holds one array without a name; save it with numpy.savez(path, x=…)")
    if start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise Refused(f"{path} {PICKLED}; use .npz or .safetensors")
    raise Refused(f"{path} is neither .npz nor .safetensors")


def read_npz(file: IO[bytes], path: str, proven: bool) -> Iterator[tuple[str, StoredArray]]:
    """The arrays of an open .npz file; `proven` is as of `read_arrays`."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = set()
            for info in archive.infolist():
                if info.filename in names:
                    raise Refused(f"{path} is damaged: it holds {info.filename} twice")
                names.add(info.filename)
                if info.filename.endswith(".npy"):
                    yield info.filename[:-4], read_member(archive, info, file, path, proven)
    except (Refused, OSError):
        raise
    except Exception as error:  # a damaged archive: zipfile and zlib do not say which there are
        file.seek(0)
        reason = PICKLED if file.read(1) == b"\x80" else f"is not a sound .npz archive: {error}"
        raise Refused(f"{path} {reason}") from None


def read_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes], path: str, proven: bool
) -> StoredArray:
    """One array of a .npz file, from its header; the values are read for their checksum alone."""
    label = f"array {info.filename[:-4]} in {path}"
    with archive.open(info) as member:
        shape, fortran, dtype = read_npy_header(member, label)
        header = member.tell()
        if math.prod(shape) * dtype.itemsize != info.file_size - header:
            raise Refused(f"{label} is damaged: its header says {shape} of {dtype}, not its size")
        while not proven and member.read(READ_AT_ONCE):  # at the end it compares the checksum
            pass
    array = StoredArray(path, npy_dtype(dtype), shape, dtype.str, order="F" if fortran else "C")
    if info.compress_type != zipfile.ZIP_STORED:
        return replace(array, member=info.filename)
    return replace(array, offset=member_start(file, info) + header)


def member_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The byte of an open archive at which a member begins that is not compressed."""
    file.seek(info.header_offset + 26)  # lengths of the name and of the extra field before the data
    lengths = np.frombuffer(file.read(4), "<u2")
    return info.header_offset + 30 + int(lengths.sum())


def read_npy_header(file: IO[bytes], label: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and dtype, from the header of a .npy file."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} of the format is not known")
        old, new = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
        with PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that is hardly Python
            shape, fortran, dtype = old(file) if version == (1, 0) else new(file)
    except (zipfile.BadZipFile, OSError):
        raise
    except Exception as error:  # a header is parsed as Python, with errors of all kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Refused(f"{label} is damaged: its header cannot be read: {reason}") from None
    if dtype.hasobject:
        raise Refused(f"{label} {PICKLED}; save numbers instead")
    if dtype.names or dtype.subdtype or any(size < 0 for size in shape):
        raise Refused(f"{label} is damaged: it holds {dtype} of shape {shape}")
    return shape, fortran, dtype


def npy_dtype(dtype: np.dtype[Any]) -> str:
    """The language's name of a numpy dtype, or numpy's own where it has none (`int8`)."""
    plain = str(dtype.newbyteorder("="))
    return next((name for name, other in NUMPY_DTYPES.items() if other == plain), plain)


def read_safetensors(file: IO[bytes], path: str) -> Iterator[tuple[str, StoredArray]]:
    """The arrays of an open .safetensors file; every number in its header is checked."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, 100_000_000):
        raise Refused(f"{path} is damaged: its header would be longer than the file")
    end = 0
    header = read_json(file.read(length), path)
    entries = [read_entry(name, entry, path) for name, entry in header.items()]
    for name, array in sorted(entries, key=lambda entry: entry[1].offset):
        bytes_ = math.prod(array.shape) * np.dtype(array.stored).itemsize
        if array.offset < end or array.offset + bytes_ > size - 8 - length:
            raise Refused(f"{path} is damaged: array {name} lies outside the file or over another")
        end = array.offset + bytes_
        yield name, replace(array, offset=array.offset + 8 + length)


def read_json(text: bytes, path: str) -> dict[str, Any]:
    """The header of a .safetensors file, less its free-form metadata."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(names) != len(set(names)):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise ValueError("it is not a table of arrays")
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"{path} is damaged: its header cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return header


def read_entry(name: str, entry: Any, path: str) -> tuple[str, StoredArray]:
    """One entry of the header of a .safetensors file; its offset is still counted from the data."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or not are_sizes(shape) or not are_sizes(ends) or len(ends) != 2:
        raise Refused(f"{path} is damaged: array {name} has no sound dtype, shape and offsets")
    if kind not in SAFETENSORS_DTYPES:
        raise Refused(f"{path}: array {name} is {kind}, which is not supported")
    stored = np.dtype(SAFETENSORS_DTYPES[kind])
    if ends[1] - ends[0] != math.prod(shape) * stored.itemsize:
        raise Refused(f"{path} is damaged: array {name} has not the size its shape says")
    dtype = {"BF16": "bf16", "BOOL": "bool"}.get(kind) or npy_dtype(stored)
    return name, StoredArray(path, dtype, tuple(shape), stored.str, ends[0])


def are_sizes(value: Any) -> bool:
    """Whether `value` is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def safetensors_parts(
    shapes: Mapping[str, tuple[str, list[int]]],
    data: Callable[[str], Any],
    about: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """The bytes of a .safetensors file one tensor after the other; alike for alike tensors.

    `shapes` are the language's dtype and the sizes of each, `data` yields its bytes in row-major
    order, little-endian; `about` is free-form metadata. The header is padded with spaces to a
    length that keeps the data aligned to 8 bytes.
    """
    table: dict[str, Any] = {"__metadata__": about} if about else {}
    end = 0
    for name, (dtype, sizes) in shapes.items():
        kind, start = dtype.upper(), end
        end += math.prod(sizes) * np.dtype(SAFETENSORS_DTYPES[kind]).itemsize
        table[name] = {"dtype": kind, "shape": sizes, "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for name in shapes:
        yield data(name)


def check_arrays(arrays: Mapping[str, Any], specs: Mapping[str, Spec], what: str) -> list[str]:
    """Check names, shapes and kinds of number of all arrays; returns notes on what gets rounded.

    `what` is `inputs` or `parameters`. Raises ArraysRefused with a table of everything.
    """
    rows: list[tuple[str, ...]] = [("name", "expected", "found", "")]
    problems, notes = [], []
    for name, spec in specs.items():
        if spec.draw == ("seed",) and name not in arrays:  # every run has one
            continue
        described = describe(arrays[name]) if name in arrays else "missing"
        problem, note = ("missing", "") if name not in arrays else compare(arrays[name], spec)
        expected = f"{spec.dtype}[{', '.join(f'{d}={n}' for d, n in spec.dims.items())}]"
        rows.append((name, expected, described, problem or note))
        problems += [f"{name}: {problem}"] if problem else []
        notes += [f"{name}: {note}"] if note else []
    for name in arrays:
        if name not in specs:
            rows.append((name, "-", describe(arrays[name]), "the program has no such name"))
            problems.append(f"{name}: the program has no such name")
    if problems:
        raise ArraysRefused(what, show_table(rows), problems, _other_sizes(arrays, specs))
    return notes


def _other_sizes(arrays: Mapping[str, Any], specs: Mapping[str, Spec]) -> Mapping[str, int]:
    """The sizes of dims under which all arrays fit, those that differ; empty where there are none.

    Dims that one array says, another may not contradict.
    """
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        shape = tuple(arrays[name].shape) if name in arrays else ()
        if name not in arrays or len(shape) != len(spec.dims):
            return NO_SIZES
        for dim, size in zip(spec.dims, shape, strict=True):
            if size < 1 or sizes.setdefault(dim, size) != size:
                return NO_SIZES
        sized = spec._replace(dims=dict(zip(spec.dims, shape, strict=True)))
        if compare(arrays[name], sized)[0]:
            return NO_SIZES
    stated = {dim: size for spec in specs.values() for dim, size in spec.dims.items()}
    surplus = any(name not in specs for name in arrays)
    return NO_SIZES if surplus else {d: n for d, n in sizes.items() if n != stated[d]}


def compare(array: Any, spec: Spec) -> tuple[str, str]:
    """What is wrong with one array, and what is worth a note about it (both empty when fine)."""
    shape, expected = tuple(array.shape), tuple(spec.dims.values())
    dtype, kind = dtype_of(array), kind_of(dtype_of(array))
    if len(shape) != len(expected):
        return f"has {len(shape)} dims, not {len(expected)}", ""
    for (dim, size), actual in zip(spec.dims.items(), shape, strict=True):
        if actual != size:
            return f"dim {dim} is {actual}, not {size}", ""
    if kind != kind_of(spec.dtype):
        return f"is {kind}, not {kind_of(spec.dtype)}; convert it first", ""
    if kind == "float" and width_of(dtype) > width_of(spec.dtype):
        return "", f"rounded from {dtype} to {spec.dtype}"
    return "", ""


def describe(array: Any) -> str:
    """Dtype and shape of an array."""
    return f"{dtype_of(array)}[{', '.join(map(str, array.shape))}]"


def dtype_of(array: Any) -> str:
    """The language's name of the dtype of a stored or numpy array."""
    return array.dtype if isinstance(array.dtype, str) else npy_dtype(array.dtype)


def kind_of(dtype: str) -> str:
    """`float`, `int` or `bool`; the dtype itself when it is none of them."""
    if dtype == "bf16":
        return "float"
    letter = np.dtype(NUMPY_DTYPES.get(dtype, dtype)).kind
    return {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(letter, dtype)


def width_of(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "bf16" else np.dtype(NUMPY_DTYPES.get(dtype, dtype)).itemsize


def show_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_npz(path: str, arrays: Mapping[str, Array], durable: bool = True) -> None:
    """Write a .npz file, whole or not at all; the same arrays give the same bytes.

    Unless `durable`, it may not be on the disk at once: a file for another process of this run.
    Raises OSError.
    """
    into = replacing_for_good(path) if durable else replacing(path, sync=False)
    with into as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
