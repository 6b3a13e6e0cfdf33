"""What a program is trained on: which samples make the batch of a step, read part by part.

The order depends on the seed and the step alone. A device reads only its own part of a batch.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshdsl.backends.runtime.files import (
    ArraysRefused,
    Refused,
    StoredArray,
    check_arrays,
    from_stored,
    read_arrays,
)
from meshdsl.backends.runtime.values import Array, Spec, cast, drawn, unit_interval
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import Diagnostic, counted, did_you_mean, fail

Part = tuple[slice, ...]
NAMED = "arrays are named like the inputs, with any number of samples along the batch"
ROUNDED = "`--dtype f64` computes with all digits"


def random_key(*words: object) -> Array:
    """The key of a stream of random numbers, from a seed and whatever tells streams apart."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


# --- orders: which samples make a batch ----------------------------------------------------------


class Order(Protocol):
    """Which samples a step takes. `passes` is the number of batches in one pass over them."""

    passes: int

    def rows(self, step: int) -> Array:
        """The indices of the samples of step `step` (from 0), int64."""


class Shuffled:
    """Every sample once per epoch, in an order of each epoch's own; an incomplete batch is left."""

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
    """The samples from `first` on, `stride` apart, as they come; an incomplete batch is left."""

    def __init__(self, first: int, count: int, batch: int, stride: int = 1) -> None:
        self.first, self.batch, self.stride = first, batch, stride
        self.passes = count // batch

    def rows(self, step: int) -> Array:
        """The indices of the samples of batch `step`."""
        batch = step % self.passes
        rows = np.arange(batch * self.batch, (batch + 1) * self.batch)
        return self.first + self.stride * rows


class Anywhere:
    """Samples anywhere among the first `count`, each step's drawn anew."""

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
    """Reads samples of each input. `batch` is the dim that tells samples apart."""

    batch: str

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the samples `rows` (a device's own ones)."""


class Arrays:
    """Named arrays of a file: input `x[batch, …]` is drawn from an array of N samples.

    An input without the dim `batch` is given whole.
    """

    def __init__(self, arrays: Mapping[str, StoredArray], batch: str) -> None:
        self.arrays, self.batch = arrays, batch
        self._opened: dict[str, Array] = {}
        self._lock = threading.Lock()

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the samples `rows`."""
        with self._lock:  # a compressed array is unpacked once, for all devices
            if name not in self._opened:
                self._opened[name] = self.arrays[name].whole()
        which = tuple(
            rows if dim == self.batch else block for dim, block in zip(spec.dims, part, strict=True)
        )
        return cast(from_stored(self._opened[name][which], self.arrays[name].dtype), spec.dtype)


@dataclass(frozen=True)
class Batches:
    """What steps read: `amount` samples or tokens (`unit`) each.

    Where a step takes several batches, inputs have the dim `several` for that, before the others.
    """

    reader: Reader
    order: Order
    amount: int
    unit: str
    several: str | None = None

    def block(self, name: str, spec: Spec, step: int, part: Part) -> Array:
        """What a device that holds `part` of input `name` reads in step `step` (from 0)."""
        if self.several not in spec.dims:
            return self._one(name, spec, step, 0, part)
        one = one_batch(spec, self.several)
        blocks = [
            self._one(name, one, step, number, part[1:])
            for number in range(part[0].start, part[0].stop)
        ]
        return np.stack(blocks)

    def _one(self, name: str, spec: Spec, step: int, number: int, part: Part) -> Array:
        """The block of batch `number` of a step."""
        rows, batch = np.empty(0, np.int64), self.reader.batch
        if batch in spec.dims:
            first = number * spec.dims[batch]
            mine = part[list(spec.dims).index(batch)]
            rows = self.order.rows(step)[first + mine.start : first + mine.stop]
        return self.reader.read(name, spec, rows, part)


def one_batch(spec: Spec, several: str | None) -> Spec:
    """An input as it is of one batch, without the dim that counts several."""
    return spec._replace(dims={d: n for d, n in spec.dims.items() if d != several})


@dataclass(frozen=True)
class Data:
    """The batches to train on, those to evaluate on, and what is worth saying about them.

    `size` counts the samples or tokens to train on. `vocabulary` are the characters of a text, in
    the order of their numbers.
    """

    training: Batches
    held_out: Batches | None
    size: int
    notes: tuple[Diagnostic, ...] = ()
    vocabulary: str | None = None


# --- opening -------------------------------------------------------------------------------------


def open_data(files: DataFiles, inputs: Mapping[str, Spec], seed: int) -> Data:
    """The data of a run for a program with these inputs. Raises DiagnosticError."""
    from meshdsl.backends.train.text import is_text, open_text

    times = max((spec.dims.get(files.accumulate or "", 1) for spec in inputs.values()), default=1)
    declared = {name: one_batch(spec, files.accumulate) for name, spec in inputs.items()}
    try:
        opened = open_text if is_text(files.path) else open_arrays
        return opened(files, declared, seed, times)
    except ArraysRefused as refused:
        fail("MD0504", str(refused), help=NAMED)
    except Refused as refused:
        help = "numpy.savez(path, name=array, …) writes a file that is read; so is any text"
        fail("MD0505", str(refused), help=help)


def open_arrays(files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int) -> Data:
    """The data of a file of arrays; a step takes `times` batches. Raises Refused as well."""
    batch = batch_dim(files, inputs)
    size = next(spec.dims[batch] for spec in inputs.values() if batch in spec.dims)
    arrays, notes = fitting_arrays(files.path, inputs, batch)
    count, held_out = sample_count(arrays, inputs, batch), None
    reader = Arrays(arrays, batch)
    if files.held_out is not None:
        other, more = fitting_arrays(files.held_out, inputs, batch)
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
    """The dim that samples are drawn along: the first of the first input, or as `--batch` says."""
    known = [dim for spec in inputs.values() for dim in spec.dims]
    if files.batch is None and known:
        return known[0]
    if files.batch not in known:
        names = ", ".join(dict.fromkeys(known)) or "none: the program has no input with dims"
        help = did_you_mean(str(files.batch), known) or f"there are {names}"
        fail("MD0602", f"`--batch {files.batch}`: no input has this dim", help=help)
    return str(files.batch)


def fitting_arrays(
    path: str, inputs: Mapping[str, Spec], batch: str
) -> tuple[dict[str, StoredArray], list[Diagnostic]]:
    """The arrays of a file that the program reads, and notes. Raises Refused."""
    arrays = read_arrays(path)
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
    """How many samples there are, as the first array that is drawn from says."""
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
