"""The batches of steps: which samples each takes, and the readers of their values."""

from __future__ import annotations

import hashlib
import threading
from typing import Protocol

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.user_files import Refused
from meshdsl.backends.runtime.values import Array, Part, Spec, drawn, unit_interval
from meshdsl.diagnostics import Diagnostic, fail
from meshdsl.option_edits import refuse, set_size
from meshdsl.records import dataclass

CHANGED = "something else changes this file: train on a copy, or replace it by renaming a new one"


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


class Spaced:
    """An order of windows that lie end to end, `stride` apart: where each of them begins."""

    def __init__(self, order: Order, stride: int) -> None:
        self.order, self.stride, self.passes = order, stride, order.passes

    def rows(self, step: int) -> Array:
        """The first tokens of the windows of step `step`."""
        return self.stride * self.order.rows(step)


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


def order_of(kind: str | None, seed: int, count: int, batch: int) -> Order:
    """The order of `count` samples by its name; None: `shuffled`."""
    if kind == "random":
        return Anywhere(seed, count, batch)
    if kind == "sequential":
        return InOrder(0, count, batch)
    return Shuffled(seed, count, batch)


# --- readers: the values of samples --------------------------------------------------------------


class Reader(Protocol):
    """Reads samples of each input. `batch` is the dim of the samples."""

    batch: str

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the samples `rows` (a device's own ones)."""

    def weight(self, rows: Array) -> int:
        """How much a batch of these samples counts in an average."""


@dataclass(frozen=True)
class Batches:
    """The batches of steps: `amount` samples or tokens (`unit`) each.

    Where a step takes several batches, inputs have the dim `several` for them, before the others.
    Reading may find values that the program does not take: `may_refuse`.
    """

    reader: Reader
    order: Order
    amount: int
    unit: str
    several: str | None = None
    may_refuse: bool = False

    def weight(self, step: int) -> int:
        """How much the batch of a step counts in an average."""
        return self.reader.weight(self.order.rows(step))

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


@dataclass(frozen=True)
class Everything:
    """All `count` samples of some data, in order: `size` in a batch, the rest in a last one.

    The samples are `stride` apart for their reader, and `amount` (`unit`) each.
    """

    reader: Reader
    count: int
    size: int
    stride: int = 1
    amount: int = 1
    unit: str = "samples"
    may_refuse: bool = False
    vocabulary: str | None = None
    notes: tuple[Diagnostic, ...] = ()

    @property
    def rest(self) -> int:
        """The samples of the last batch, where it is short; else 0."""
        return self.count % self.size

    def batches(self, short: bool = False) -> Batches:
        """The whole batches, or the short one."""
        size, first = (self.rest, self.count - self.rest) if short else (self.size, 0)
        order = InOrder(self.stride * first, self.count - first, size, self.stride)
        amount = size * self.amount
        return Batches(self.reader, order, amount, self.unit, may_refuse=self.may_refuse)


GIVE_MORE = "give more samples there"
HOLD_OUT_MORE = "hold out more of it with `--eval-fraction`"


def enough(
    count: int, batch: int, what: str, dim: str, times: int = 1, more: str = GIVE_MORE
) -> None:
    """Refuse data of fewer samples than a step takes. `more` is the way to have more of them."""
    if count < batch:
        smaller = [set_size(dim, count // times)] if count >= times else []
        refuse("MD0511", f"{what}, and a step takes {batch}", smaller, more)
