"""Training data: the samples of each step's batch, read part by part."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from meshdsl.backends.runtime.array_files import (
    ArraysRefused,
    Refused,
    check_arrays,
    read_arrays,
)
from meshdsl.backends.runtime.stored import FileBytes, StoredArray, from_stored
from meshdsl.backends.runtime.user_files import read_regular, regular
from meshdsl.backends.runtime.values import (
    NUMPY_DTYPES,
    Array,
    Part,
    Spec,
    cast,
    drawn,
    unit_interval,
)
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import Diagnostic, counted, did_you_mean, fail
from meshdsl.records import dataclass

# --- samples and batches ------------------------------------------------------------------------


CHANGED = "something else changes this file: train on a copy, or replace it by renaming a new one"
NAMED = "arrays are named like the inputs, with any number of samples along the batch"
ROUNDED = "`--dtype f64` computes with all digits"


def random_key(*words: object) -> Array:
    """The key of a stream of random numbers, from a seed and words that identify the stream."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


# --- orders: the samples of each batch -----------------------------------------------------------


class Order(Protocol):
    """The samples of each step. `passes` is the number of batches in one pass over them."""

    passes: int

    def rows(self, step: int) -> Array:
        """The indices of the samples of step `step` (from 0), int64."""


class Shuffled:
    """Every sample once per epoch, shuffled anew in each; an incomplete batch is dropped."""

    def __init__(self, seed: int, count: int, batch: int) -> None:
        self.seed, self.count, self.batch = seed, count, batch
        self.passes = count // batch
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._lock = threading.Lock()

    def rows(self, step: int) -> Array:
        """The indices of the samples of step `step`."""
        epoch, batch = divmod(step, self.passes)
        with self._lock:
            if epoch != self._epoch:
                key = random_key(self.seed, "epoch", epoch)
                numbers = unit_interval(key, np.arange(self.count))
                self._epoch, self._order = epoch, np.argsort(numbers, kind="stable")
            return self._order[batch * self.batch : (batch + 1) * self.batch]


class InOrder:
    """The samples from `first` on, `stride` apart, in order; an incomplete batch is dropped."""

    def __init__(self, first: int, count: int, batch: int, stride: int = 1) -> None:
        self.first, self.batch, self.stride = first, batch, stride
        self.passes = count // batch

    def rows(self, step: int) -> Array:
        """The indices of the samples of batch `step`."""
        batch = step % self.passes
        rows = np.arange(batch * self.batch, (batch + 1) * self.batch)
        return self.first + self.stride * rows


class Anywhere:
    """Samples drawn anew for each step among the first `count`."""

    def __init__(self, seed: int, count: int, batch: int) -> None:
        self.count, self.batch = count, batch
        self.passes = max(1, count // batch)
        self._key = random_key(seed, "windows")

    def rows(self, step: int) -> Array:
        """The indices of the samples of step `step`."""
        counter = np.arange(step * self.batch, (step + 1) * self.batch)
        return drawn(("below", self.count), self._key, counter).astype(np.int64)


# --- readers: the values of samples --------------------------------------------------------------


class Reader(Protocol):
    """Reads samples of each input. `batch` is the dim of the samples."""

    batch: str

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the samples `rows` (a device's own ones)."""


class Arrays:
    """Named arrays of a file: input `x[batch, …]` is drawn from an array of N samples.

    An input without the dim `batch` is given whole.
    """

    def __init__(self, arrays: Mapping[str, StoredArray], batch: str) -> None:
        self.arrays, self.batch = arrays, batch
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the samples `rows`."""
        with self._lock:  # a compressed array is unpacked once, for all devices
            if name not in self._opened:
                self._opened[name] = self.arrays[name].whole()
        which = tuple(
            rows if dim == self.batch else block if isinstance(block, slice) else slice(None)
            for dim, block in zip(spec.dims, part, strict=True)
        )
        array = self._opened[name][which]
        for at, (dim, block) in enumerate(zip(spec.dims, part, strict=True)):
            # Two lists of indices in one bracket would be pairs.
            if isinstance(block, list) and dim != self.batch:
                array = np.take(array, block, at)
        return cast(from_stored(array, self.arrays[name].dtype), spec.dtype)


@dataclass(frozen=True)
class Batches:
    """The batches of steps: `amount` samples or tokens (`unit`) each.

    Where a step takes several batches, inputs have the dim `several` for them, before the others.
    """

    reader: Reader
    order: Order
    amount: int
    unit: str
    several: str | None = None

    def block(self, name: str, spec: Spec, step: int, part: Part) -> Array:
        """The values of `part` of input `name` in step `step` (from 0).

        Raises MD0505 where the file is no longer what it was when it was opened.
        """
        try:
            return self._block(name, spec, step, part)
        except Refused as refused:
            fail("MD0505", str(refused), help=CHANGED)

    def _block(self, name: str, spec: Spec, step: int, part: Part) -> Array:
        if self.several not in spec.dims:
            return self._one(name, spec, step, 0, part)
        one, mine = one_batch(spec, self.several), np.arange(spec.dims[self.several])[part[0]]
        return np.stack([self._one(name, one, step, number, part[1:]) for number in mine])

    def _one(self, name: str, spec: Spec, step: int, number: int, part: Part) -> Array:
        """The block of batch `number` of a step."""
        rows, batch = np.empty(0, np.int64), self.reader.batch
        if batch in spec.dims:
            first = number * spec.dims[batch]
            mine = part[list(spec.dims).index(batch)]
            rows = self.order.rows(step)[first : first + spec.dims[batch]][mine]
        return self.reader.read(name, spec, rows, part)


def one_batch(spec: Spec, several: str | None) -> Spec:
    """The spec of an input for one batch, without the dim `several`."""
    return spec._replace(dims={d: n for d, n in spec.dims.items() if d != several})


@dataclass(frozen=True)
class Data:
    """The batches to train on, those to evaluate on, and notes about them.

    `size` counts the samples or tokens to train on. `vocabulary` are the characters of a text, in
    the order of their numbers.
    """

    training: Batches
    held_out: Batches | None
    size: int
    notes: tuple[Diagnostic, ...] = ()
    vocabulary: str | None = None


# --- opening -------------------------------------------------------------------------------------


def open_data(
    files: DataFiles, inputs: Mapping[str, Spec], seed: int, proven: bool = False
) -> Data:
    """The data of a run for a program with these inputs. Raises DiagnosticError.

    `proven` is as of `read_arrays`.
    """
    inputs = {name: spec for name, spec in inputs.items() if spec.draw != ("seed",)}
    times = max((spec.dims.get(files.accumulate or "", 1) for spec in inputs.values()), default=1)
    declared = {name: one_batch(spec, files.accumulate) for name, spec in inputs.items()}
    try:
        if is_text(files.path):
            return open_text(files, declared, seed, times)
        return open_arrays(files, declared, seed, times, proven)
    except ArraysRefused as refused:
        fail("MD0504", str(refused), help=NAMED)
    except Refused as refused:
        help = "numpy.savez(path, name=array, …) writes a file that is read; so is any text"
        fail("MD0505", str(refused), help=help)


def open_arrays(
    files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int, proven: bool
) -> Data:
    """The data of a file of arrays; a step takes `times` batches. Raises Refused as well."""
    batch = batch_dim(files, inputs)
    size = next(spec.dims[batch] for spec in inputs.values() if batch in spec.dims)
    arrays, notes = fitting_arrays(files.path, inputs, batch, proven)
    count, held_out = sample_count(arrays, inputs, batch), None
    reader = Arrays(arrays, batch)
    if files.held_out is not None:
        other, more = fitting_arrays(files.held_out, inputs, batch, proven)
        notes += more
        held = sample_count(other, inputs, batch)
        enough(held, size, f"{files.held_out} holds {counted(held, 'sample')}", batch)
        held_out = Batches(Arrays(other, batch), InOrder(0, held, size), size, "samples")
    elif files.fraction:
        held = math.floor(count * files.fraction)
        count -= held
        enough(
            held, size, f"{files.fraction:g} of {files.path} is {counted(held, 'sample')}", batch
        )
        held_out = Batches(reader, InOrder(count, held, size), size, "samples")
    what = f"{files.path} holds {counted(count, 'sample')} to train on"
    enough(count, size * times, what, batch, times)
    order = Shuffled(seed, count, size * times)
    training = Batches(reader, order, size * times, "samples", files.accumulate)
    return Data(training, held_out, count, tuple(notes))


def batch_dim(files: DataFiles, inputs: Mapping[str, Spec]) -> str:
    """The dim that samples are drawn along: that of `--batch`, or the first of the first input."""
    dims = [dim for spec in inputs.values() for dim in spec.dims]
    if files.batch is None and dims:
        return dims[0]
    if files.batch not in dims:
        names = ", ".join(dict.fromkeys(dims)) or "none: the program has no input with dims"
        help = did_you_mean(str(files.batch), dims) or f"there are {names}"
        fail("MD0602", f"`--batch {files.batch}`: no input has this dim", help=help)
    return str(files.batch)


def fitting_arrays(
    path: str, inputs: Mapping[str, Spec], batch: str, proven: bool
) -> tuple[dict[str, StoredArray], list[Diagnostic]]:
    """The arrays of a file that the program reads, and notes. Raises Refused."""
    arrays = read_arrays(path, proven)
    used = {name: array for name, array in arrays.items() if name in inputs}
    count = sample_count(used, inputs, batch)
    specs = {
        name: spec._replace(dims={d: count if d == batch else n for d, n in spec.dims.items()})
        for name, spec in inputs.items()
    }
    rounded = check_arrays(used, specs, f"arrays of {path}")
    notes = [Diagnostic("MD0506", text, severity="note", help=ROUNDED) for text in rounded]
    unused = sorted(set(arrays) - set(used))
    if unused:
        message = f"the program does not read {', '.join(unused)} of {path}"
        notes.append(
            Diagnostic("MD0517", message, severity="note", help="nothing else depends on it")
        )
    return used, notes


def sample_count(arrays: Mapping[str, Any], inputs: Mapping[str, Spec], batch: str) -> int:
    """The number of samples, by the first array that is drawn from."""
    for name, spec in inputs.items():
        position = list(spec.dims).index(batch) if batch in spec.dims else None
        if position is None or name not in arrays:
            continue
        shape = arrays[name].shape
        if len(shape) == len(spec.dims):
            return int(shape[position])
    return next(spec.dims[batch] for spec in inputs.values() if batch in spec.dims)


def enough(count: int, batch: int, what: str, dim: str, times: int = 1) -> None:
    """Refuse data of fewer samples than a step takes."""
    if count < batch:
        help = (
            f"give more samples there, or a smaller batch: `--set {dim}={max(count // times, 1)}`"
        )
        fail("MD0511", f"{what}, and a step takes {batch}", help=help)


SAMPLED = 64
"""Blocks of a large file that its fingerprint reads, of `BLOCK` bytes each."""
BLOCK = 1 << 16


def fingerprint(path: str) -> str | None:
    """A hash of a file's size and content; None where it cannot be read.

    Of a large file it reads blocks that lie evenly in it, the first and the last among them: a
    change elsewhere goes unseen, and a file of any size costs 4 MiB.
    """
    hashed = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            hashed.update(f"{size}\0".encode())
            last = max(size - BLOCK, 0)
            count = min(SAMPLED, -(-size // BLOCK))
            for number in range(count):
                file.seek(last * number // max(count - 1, 1))
                hashed.update(file.read(BLOCK))
    except OSError:
        return None
    return hashed.hexdigest()


# --- texts, as tokens in windows ----------------------------------------------------------------


MAGIC = (b"PK\x03\x04", b"\x93NUMPY", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of files of arrays and of pickles."""

CODES = 0x110000
"""The number of code points of Unicode."""

TOKENS = ("chars", "bytes")


def is_text(path: str) -> bool:
    """Whether a file is to be read as text. Raises Refused when it cannot be read at all."""
    if path.endswith((".npz", ".safetensors")):
        return False
    try:
        with open(path, "rb", opener=regular) as file:
            start = file.read(8)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    if start.startswith(MAGIC):
        read_arrays(path)  # raises what is wrong with it
    return True


class Windows:
    """Windows of a text: row r of the first input begins at token `rows[r]`.

    The second input, where there is one, is the first shifted by a token: the next tokens.
    """

    def __init__(self, ids: Tokens, names: tuple[str, ...], batch: str) -> None:
        self.ids, self.names, self.batch = ids, names, batch

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the windows that begin at `rows`."""
        columns = np.arange([*spec.dims.values()][1])[part[1]] + self.names.index(name)
        dtype = NUMPY_DTYPES[spec.dtype]
        tokens = np.empty((len(rows), len(columns)), dtype)
        if tokens.size:
            first, end = int(columns.min()), int(columns.max()) + 1
            for number, row in enumerate(rows.tolist()):
                tokens[number] = self.ids[row + first : row + end][columns - first]
        return tokens


def open_text(files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int) -> Data:
    """The data of a text file; a step takes `times` batches. Raises Refused as well."""
    names = text_inputs(files, inputs)
    spec = inputs[names[0]]
    (batch, rows), (_, length) = spec.dims.items()
    bound = min(_bound(inputs[name]) for name in names)
    ids, vocabulary = tokens_of(files.path, files.tokens, files.vocabulary, bound)
    held_out_size = math.floor(len(ids) * files.fraction)
    training = _part(ids, 0, len(ids) - held_out_size)
    held_out = _part(ids, len(ids) - held_out_size, len(ids))
    if files.held_out is not None:
        held_out = _held_out(files, vocabulary, bound)
    window = length + len(names) - 1
    _long_enough(training, window, files.path)
    order = Anywhere(seed, len(training) - window + 1, rows * times)
    amount, reader = rows * length, Windows(training, names, batch)
    batches = Batches(reader, order, amount * times, "tokens", files.accumulate)
    if not files.fraction and files.held_out is None:
        return Data(batches, None, len(training), (), vocabulary)
    windows = (len(held_out) - len(names) + 1) // length
    _enough_windows(windows, rows, length, files)
    reader = Windows(held_out, names, batch)
    evaluated = Batches(reader, InOrder(0, windows, rows, length), amount, "tokens")
    return Data(batches, evaluated, len(training), (), vocabulary)


def _enough_windows(windows: int, rows: int, length: int, files: DataFiles) -> None:
    """Refuse a text to evaluate on that is too short for a batch."""
    if windows >= rows:
        return
    where = files.held_out or f"the last {files.fraction:g} of {files.path}"
    message = f"{where} has {counted(windows, 'window')} of {length} tokens, and a batch {rows}"
    help = "give a longer text, hold out more of it, or make the batch smaller"
    fail("MD0511", message, help=help)


def text_inputs(files: DataFiles, inputs: Mapping[str, Spec]) -> tuple[str, ...]:
    """The inputs that a text fills: tokens, and next tokens. Raises DiagnosticError."""
    named = files.text_inputs
    for name in named or ():
        if name not in inputs:
            help = did_you_mean(name, list(inputs)) or f"there are {', '.join(inputs) or 'none'}"
            fail("MD0602", f"`--text-inputs`: the program has no input `{name}`", help=help)
    wanted = named or tuple(n for n, spec in inputs.items() if spec.dtype in ("i32", "i64"))
    shapes = {tuple(inputs[name].dims.items()) for name in wanted}
    fits = len(shapes) == 1 and len(next(iter(shapes))) == 2 and len(wanted) in (1, 2)
    others = [name for name in inputs if name not in wanted]
    if fits and not others and all(inputs[n].dtype in ("i32", "i64") for n in wanted):
        return wanted
    declared = ", ".join(_shown(name, spec) for name, spec in inputs.items()) or "no inputs"
    help = "declare `tokens[batch, seq]: i32, targets[batch, seq]: i32`, or give the data as .npz"
    message = f"{files.path} is a text, and the program takes {declared}"
    fail("MD0512", message, help=help)


def _shown(name: str, spec: Spec) -> str:
    return f"{name}[{', '.join(spec.dims)}]: {spec.dtype}"


def _bound(spec: Spec) -> int:
    """The size of the smallest dim that an input indexes."""
    how = spec.draw
    return int(how[1]) if how and how[0] == "below" else np.iinfo(np.int32).max


# --- tokens --------------------------------------------------------------------------------------


Tokens: TypeAlias = "Array | FileBytes"
"""The tokens of a text: in memory, or bytes that are read from the file where they are needed."""


def _part(ids: Tokens, start: int, stop: int) -> Tokens:
    return ids.part(start, stop) if isinstance(ids, FileBytes) else ids[start:stop]


def tokens_of(path: str, kind: str, known: str | None, bound: int) -> tuple[Tokens, str | None]:
    """The tokens of a text, all below `bound`, and the vocabulary if they are characters."""
    ids: Tokens
    vocabulary: str | None = None
    if kind == "bytes":
        ids = FileBytes(path)
    else:
        ids, vocabulary = _characters(path, known)
    _check_vocabulary(ids, vocabulary, bound, path)
    return ids, vocabulary


def _characters(path: str, known: str | None) -> tuple[Array, str]:
    """Every character as its number in the vocabulary: `known`, or the text's own, sorted."""
    codes = np.frombuffer(_decoded(path).encode("utf-32-le", "surrogatepass"), "<u4")
    if known is None:
        present = np.zeros(CODES, bool)
        present[codes] = True
        known = "".join(map(chr, np.flatnonzero(present)))
    numbers = np.full(CODES, -1, np.int32)
    numbers[[ord(c) for c in known]] = np.arange(len(known))
    ids = numbers[codes]
    if len(ids) and ids.min() < 0:
        at = int(np.argmax(ids < 0))
        message = f"{path}: {chr(codes[at])!r}, character {at}, is not among those trained on"
        help = "`--tokens bytes` reads any text; or train on a text that has all characters"
        fail("MD0513", message, help=help)
    return ids, known


def _decoded(path: str) -> str:
    try:
        data = read_regular(path)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        fail("MD0513", message, help="`--tokens bytes` reads any file")


def _check_vocabulary(ids: Tokens, vocabulary: str | None, bound: int, path: str) -> None:
    """Refuse tokens that are no index of the dims that the program indexes by them."""
    most = len(vocabulary) if vocabulary is not None else _largest(ids) + 1
    if most <= bound:
        return
    has = f"{most} different characters" if vocabulary is not None else f"bytes up to {most - 1}"
    message = f"{path} has {has}, and the program has room for {bound} tokens"
    help = f"make the dim that tokens index larger: `--set vocab={most}`, by whatever name it has"
    fail("MD0513", message, help=help)


def _largest(ids: Tokens) -> int:
    return ids.max() if isinstance(ids, FileBytes) else int(ids.max(initial=0))


def _held_out(files: DataFiles, vocabulary: str | None, bound: int) -> Tokens:
    """The tokens of the file to evaluate on."""
    assert files.held_out is not None
    if not is_text(files.held_out):
        help = "give a text to evaluate on, as to train on"
        fail("MD0512", f"{files.held_out} is not a text, and {files.path} is", help=help)
    return tokens_of(files.held_out, files.tokens, vocabulary, bound)[0]


def _long_enough(ids: Tokens, window: int, path: str) -> None:
    if len(ids) < window:
        message = (
            f"{path} has {counted(len(ids), 'token')} to train on, and a window takes {window}"
        )
        fail("MD0511", message, help="give a longer text, or make the windows shorter with `--set`")
