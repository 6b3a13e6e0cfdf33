"""Flat files of tokens: raw ones of a stated dtype, `.npy`, of llm.c and Megatron, and folders.

A file is never read as a whole: a window is one read of its own bytes.
"""

from __future__ import annotations

import copy
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any, Protocol

from meshdsl.backends.runtime.array_files import read_npy_header
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.stored import FileBlocks, StoredArray
from meshdsl.backends.runtime.user_files import Refused, regular
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import advice, fail
from meshdsl.option_edits import one_of
from meshdsl.records import dataclass

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""The dtypes that the tokens of a raw file may have, as numpy calls them; little-endian."""

SUFFIXES = (".bin", ".npy")
"""Files of tokens in a folder, by their names."""

NPY = b"\x93NUMPY"

LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""The dtypes of llm.c's files, by the magic number and the version of their headers."""
LLM_C_HEADER = 1024
"""The bytes of such a header: 256 int32 numbers, of which the third counts the tokens."""

MEGATRON = b"MMIDIDX\x00\x00"
"""The first bytes of the index of a file of Megatron-LM."""
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The dtypes of its tokens, by their codes."""

OPEN = 64
"""The most files of one source that are open at a time."""

SCANNED = 1 << 26
"""The bytes up to which the tokens of files are compared with the vocabulary beforehand."""

RAW = ("uint16", "uint32")
"""The dtypes that files of tokens without a header mostly have."""

STATED = "nanoGPT writes uint16"


@dataclass(frozen=True, slots=True)
class TokenFile:
    """`count` tokens of a numpy dtype in a file, from byte `offset` on.

    `name` is what messages call the file; empty: `path`. `is_raw`: `--tokens` states the dtype.
    """

    path: str
    dtype: str
    count: int
    offset: int = 0
    name: str = ""
    is_raw: bool = False

    @property
    def label(self) -> str:
        """The name of the file in messages."""
        return self.name or self.path


class TokenSequence(Protocol):
    """A sequence of tokens; `tokens[start:stop]` is an array of some of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Array: ...


class FlatTokens:
    """The tokens of files, one file after the other, or a part of them.

    Raises Refused where a file cannot be read, or is no longer what it was at first.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = tuple(files)
        self._ends = np.cumsum([file.count for file in self.files], dtype=np.int64)
        self._range = range(sum(file.count for file in self.files))
        self._first = [_identity(file.path) for file in self.files]
        self._open: OrderedDict[int, FileBlocks] = OrderedDict()
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> FlatTokens:
        """The tokens from `start` to `stop`."""
        view = copy.copy(self)
        view._range = self._range[start:stop]
        return view

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, part: slice) -> Array:
        selected = self._range[part]
        assert selected.step == 1, "a range of tokens"
        parts, at = [], selected.start
        while at < selected.stop:
            number = int(np.searchsorted(self._ends, at, "right"))
            stop = min(selected.stop, int(self._ends[number]))
            begin = int(self._ends[number]) - self.files[number].count
            parts.append(self._read(number, at - begin, stop - begin))
            at = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def place(self, index: int) -> tuple[TokenFile, int]:
        """Where a token is: its file, and its index in it."""
        at = self._range[index]
        number = int(np.searchsorted(self._ends, at, "right"))
        file = self.files[number]
        return file, at - (int(self._ends[number]) - file.count)

    def may_exceed(self, bound: int) -> bool:
        """Whether the dtype of a file has numbers that are no tokens below `bound`."""
        ranges = [np.iinfo(file.dtype) for file in self.files]
        return any(r.min < 0 or r.max >= bound for r in ranges)

    @property
    def is_small(self) -> bool:
        """Whether reading all of it is nothing beside starting a run."""
        return sum(file.count * np.dtype(file.dtype).itemsize for file in self.files) <= SCANNED

    def _read(self, number: int, start: int, stop: int) -> Array:
        file, blocks = self.files[number], self._blocks(number)
        tokens = np.empty(stop - start, np.dtype(file.dtype).newbyteorder("<"))
        room: Any = tokens.view(np.uint8)
        blocks.fill(memoryview(room), file.offset + start * tokens.itemsize)
        return tokens

    def _blocks(self, number: int) -> FileBlocks:
        """The open file of a number: the last few are kept open."""
        with self._lock:
            blocks = self._open.pop(number, None)
            if blocks is None:
                file = self.files[number]
                blocks = FileBlocks(StoredArray(file.path, file.dtype, (file.count,), "|u1"))
                if blocks.identity != self._first[number]:
                    raise Refused(f"{file.label} has changed since the run began")
            self._open[number] = blocks
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
            return blocks


def _identity(path: str) -> tuple[int, ...]:
    return FileBlocks(StoredArray(path, "u8", (0,), "|u1")).identity


def first_beyond(tokens: Array, bound: int) -> int | None:
    """The index of the first number that is no token below `bound`."""
    if not tokens.size or (tokens.max() < bound and tokens.min() >= 0):
        return None
    return int(np.argmax((tokens >= bound) | (tokens < 0)))


# --- which files ---------------------------------------------------------------------------------


def is_dtype(tokens: str | None) -> bool:
    """Whether `--tokens` states the dtype of a raw file."""
    return tokens in DTYPES


def holds_tokens(path: str, tokens: str | None) -> bool:
    """Whether `--data` names flat files of tokens: by the option, its name, or its first bytes.

    Raises Refused where it cannot be read.
    """
    if os.path.isdir(path):
        return any(name.endswith(SUFFIXES) for name in _names(path))
    if path.endswith((".npz", ".safetensors")):
        return False
    if is_dtype(tokens) or (path.endswith(".bin") and tokens is None):
        return True
    with _opened(path) as file:
        return file.read(len(NPY)) == NPY


def token_files(path: str, tokens: str | None, held_out: bool = False) -> tuple[TokenFile, ...]:
    """The flat files of tokens that a file or a folder stands for, in the order of their names.

    Of a folder with files for training and for validation, those of one kind: see `shards`. Raises
    MD0580 and MD0581, and Refused where one cannot be read.
    """
    names = shards(path, SUFFIXES, held_out) if os.path.isdir(path) else [path]
    return tuple(token_file(name, tokens) for name in names)


def shards(folder: str, suffixes: Sequence[str], held_out: bool = False) -> list[str]:
    """The files of a folder to train on, or those that are `held_out`, sorted by name.

    A folder whose files are all of one kind has these for both. Raises MD0580, as `_by_use`.
    """
    training, validation = _by_use(folder, suffixes)
    if not training and not held_out:
        help = "name a folder that has files to train on, too; `--val F` names what is held out"
        fail("MD0580", f"{folder} has files for validation alone: {validation[0]}", help=help)
    names = (validation or training) if held_out else training
    return [os.path.join(folder, name) for name in names]


VALIDATION = {"val", "valid", "validation"}
"""Words in the names of files that are held out."""


def has_validation(path: str, suffixes: Sequence[str] = SUFFIXES) -> bool:
    """Whether a folder has files that are held out beside those to train on."""
    return os.path.isdir(path) and all(_by_use(path, suffixes))


def _by_use(folder: str, suffixes: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of a folder to train on, and those for validation, by the words in their names.

    All are of one of the suffixes, and to train on if none has the word `train` or one of
    `VALIDATION`. Raises MD0580 for other folders: a file without such a word may be of either use.
    """
    names = [name for name in _names(folder) if name.endswith(tuple(suffixes))]
    kinds = sorted({os.path.splitext(name)[1] for name in names})
    if len(kinds) != 1:
        there = f"files of several kinds: {' and '.join(kinds)}"
        there = there if kinds else f"no file that ends in {' or '.join(suffixes)}"
        help = f"name a folder with files of one of {', '.join(suffixes)}"
        fail("MD0580", f"{folder} has {there}", help=help)
    words = {name: set(re.findall(r"[a-z]+", name.lower())) for name in names}
    training = [name for name in names if "train" in words[name]]
    validation = [name for name in names if words[name] & VALIDATION]
    if not training and not validation:
        return names, []
    for name in names:
        if (name in training) == (name in validation):
            is_both = name in training
            message = f"of {folder} some files are for training or validation by name: {name} is"
            help = "files without `train` or `val` in their names go into another folder"
            help = "leave one of the words out of its name" if is_both else help
            fail("MD0580", f"{message} {'both' if is_both else 'neither'}", help=help)
    return training, validation


def token_file(path: str, tokens: str | None) -> TokenFile:
    """A flat file of tokens. Raises MD0580 and MD0581, and Refused where it cannot be read."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(12)
        if start.startswith(NPY):
            file.seek(0)
            return _of_npy(file, path, tokens, size)
    index = f"{path.removesuffix('.bin')}.idx"
    if path.endswith(".bin") and os.path.exists(index):
        return _of_megatron(path, index, tokens, size)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0"), "<i4").tolist()
    if (magic, version) in LLM_C and size >= LLM_C_HEADER:
        dtype = LLM_C[magic, version]
        _agrees(path, tokens, dtype)
        return _whole(path, dtype, size, LLM_C_HEADER, count)
    if not is_dtype(tokens):
        message = f"{path} has tokens of a dtype that nothing states"
        fixes = one_of("--tokens", RAW)
        fail("MD0581", message, help=advice(fixes, STATED), fixes=fixes)
    assert tokens is not None
    return replace(_whole(path, tokens, size), is_raw=True)


def _of_npy(file: IO[bytes], path: str, tokens: str | None, size: int) -> TokenFile:
    shape, _, dtype = read_npy_header(file, path)
    if dtype.kind not in "iu" or len(shape) != 1:
        message = f"{path} holds {dtype} of shape {shape}, and tokens are whole numbers in one dim"
        whole = "" if dtype.kind in "iu" else ".astype('uint32')"
        help = f"save them so: `numpy.save(path, tokens{whole}.reshape(-1))`"
        help += "; several arrays go into a .npz"
        fail("MD0580", message, help=help)
    if dtype.byteorder == ">" and dtype.itemsize > 1:
        help = "`numpy.save(path, tokens.astype(tokens.dtype.newbyteorder('<')))`"
        fail("MD0580", f"{path} holds big-endian numbers", help=help)
    _agrees(path, tokens, dtype.name)
    return _whole(path, dtype.name, size, file.tell(), shape[0])


def _of_megatron(path: str, index: str, tokens: str | None, size: int) -> TokenFile:
    """A file of Megatron, whose index beside it has the dtype and the length of each sequence."""
    with _opened(index) as file:
        head = file.read(len(MEGATRON) + 25)
        magic, numbers = head[: len(MEGATRON)], head[len(MEGATRON) :].ljust(25, b"\0")
        version, code, sequences = struct.unpack("<QBQ", numbers[:17])
        if magic != MEGATRON or version != 1 or code not in MEGATRON_DTYPES:
            help = (
                "it is no index of Megatron: move it elsewhere if it does not belong to the tokens"
            )
            fail("MD0580", f"{index} beside {path} says nothing of its tokens", help=help)
        room = (os.fstat(file.fileno()).st_size - file.tell()) // 4
        lengths = np.frombuffer(file.read(4 * min(sequences, room)), "<i4")
    dtype = MEGATRON_DTYPES[code]
    _agrees(path, tokens, dtype)
    count = int(lengths.sum(dtype=np.int64)) if len(lengths) == sequences else -1
    return _whole(path, dtype, size, count=count)


def _agrees(path: str, tokens: str | None, dtype: str) -> None:
    """Refuse another dtype than that of the header."""
    if tokens is not None and tokens != dtype:
        message = f"`--tokens {tokens}`: the header of {path} says {dtype}"
        fail("MD0580", message, help="leave `--tokens` out: the file says what it holds")


def _whole(
    path: str, dtype: str, size: int, offset: int = 0, count: int | None = None
) -> TokenFile:
    """The file, which holds whole tokens, as many as its header says."""
    width = np.dtype(dtype).itemsize
    there, left = divmod(size - offset, width)
    if left:
        message = f"{path} has {size - offset} bytes of tokens, and {dtype} takes {width} for each"
        help = "the file ends within a token: it is cut short, or of another dtype"
        fail("MD0580", message, help=help)
    if count not in (None, there):
        message = f"{path} has {there} tokens, and its header says {max(count or 0, 0)}"
        fail("MD0580", message, help="a file is cut short or damaged: fetch it again")
    return TokenFile(path, dtype, there, offset)


def _names(folder: str) -> list[str]:
    """The files of a folder, and links that lead nowhere: who opens them says so.

    Hidden files are not data: some systems leave one beside each file that they copy.
    """
    try:
        return sorted(
            entry.name
            for entry in os.scandir(folder)
            if not entry.name.startswith(".")
            and (entry.is_file() or (entry.is_symlink() and not entry.is_dir()))
        )
    except OSError as error:
        raise Refused(f"cannot read {folder}: {error.strerror}") from None


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb", opener=regular)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
