"""Training data: opened from files of arrays, texts, or tokens."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshdsl.backends.data.token_files import token_files
from meshdsl.backends.data.wrong_data import refuse_arrays, refuse_file, rounded_note
from meshdsl.backends.runtime.array_files import (
    ArraysRefused,
    Refused,
    check_arrays,
    read_arrays,
    what_writes,
)
from meshdsl.backends.runtime.stored import StoredArray, from_stored
from meshdsl.backends.runtime.user_files import regular
from meshdsl.backends.runtime.values import Array, Part, Spec, cast
from meshdsl.backends.train.batches import (
    HOLD_OUT_MORE,
    Batches,
    Data,
    Everything,
    InOrder,
    enough,
    one_batch,
    order_of,
)
from meshdsl.backends.train.document_rows import every_row, open_rows
from meshdsl.backends.train.job import DataFiles
from meshdsl.backends.train.token_data import every_window, is_tokens, open_tokens
from meshdsl.diagnostics import Diagnostic, counted, did_you_mean, fail

NAMED = "name arrays like the inputs, with any number of samples along the batch"


def open_data(
    files: DataFiles, inputs: Mapping[str, Spec], seed: int, proven: bool = False
) -> Data:
    """The data of a run for a program with these inputs. Raises DiagnosticError.

    `proven` is as of `read_arrays`.
    """
    inputs = {name: spec for name, spec in inputs.items() if spec.draw != ("seed",)}
    times = max((spec.dims.get(files.accumulate or "", 1) for spec in inputs.values()), default=1)
    declared = {name: one_batch(spec, files.accumulate) for name, spec in inputs.items()}
    with _refusals(files.path):
        if files.rows:
            return open_rows(files, declared, seed, times)
        if is_tokens(files):
            return open_tokens(files, declared, seed, times)
        return open_arrays(files, declared, seed, times, proven)


def open_everything(files: DataFiles, inputs: Mapping[str, Spec], proven: bool) -> Everything:
    """All samples of a run's files, each once and in order. Raises DiagnosticError.

    Of a folder with files for validation these are taken. `proven` is as of `read_arrays`.
    """
    inputs = {name: spec for name, spec in inputs.items() if spec.draw != ("seed",)}
    with _refusals(files.path):
        if files.rows:
            return every_row(files, inputs)
        if is_tokens(files):
            return every_window(files, inputs)
        batch = batch_dim(files, inputs)
        size = next(spec.dims[batch] for spec in inputs.values() if batch in spec.dims)
        arrays, notes = fitting_arrays(files.path, inputs, batch, proven)
        count = sample_count(arrays, inputs, batch)
        return Everything(Arrays(arrays, batch), count, size, notes=tuple(notes))


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Raise what is refused as a diagnostic."""
    try:
        yield
    except ArraysRefused as refused:
        refuse_arrays(refused, NAMED)
    except Refused as refused:
        refuse_file(refused, path, what_writes(path), "name a file of text")


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
        what = f"{files.fraction:g} of {files.path} is {counted(held, 'sample')}"
        enough(held, size, what, batch, more=HOLD_OUT_MORE)
        held_out = Batches(reader, InOrder(count, held, size), size, "samples")
    what = f"{files.path} holds {counted(count, 'sample')} to train on"
    enough(count, size * times, what, batch, times)
    order = order_of(files.order, seed, count, size * times)
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
    notes = [*map(rounded_note, rounded)]
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


# --- arrays --------------------------------------------------------------------------------------


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

    def weight(self, rows: Array) -> int:
        """The number of samples."""
        return len(rows)


SAMPLED = 64
"""Blocks of a large file that its fingerprint reads, of `BLOCK` bytes each."""
BLOCK = 1 << 16


def fingerprints(files: DataFiles) -> dict[str, str | None]:
    """A hash of every file that a run trains on, by its name: the folder may be moved.

    Files of one name go by their paths.
    """
    paths = list(files.sources) or [files.path]
    if not files.sources and os.path.isdir(files.path):
        paths = [file.path for file in token_files(files.path, files.tokens)]
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        names = paths
    hashes = [fingerprint(path, max(SAMPLED // len(paths), 2)) for path in paths]
    return dict(zip(names, hashes, strict=True))


def fingerprint(path: str, sampled: int = SAMPLED) -> str | None:
    """A hash of a file's size and content; None where it cannot be read.

    Of a large file it reads `sampled` blocks that lie evenly in it, the first and the last among
    them: a change elsewhere goes unseen, and data of any size cost about 4 MiB.
    """
    hashed = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            hashed.update(f"{size}\0".encode())
            last = max(size - BLOCK, 0)
            count = min(sampled, -(-size // BLOCK))
            for number in range(count):
                file.seek(last * number // max(count - 1, 1))
                hashed.update(file.read(BLOCK))
    except OSError:
        return None
    return hashed.hexdigest()
