"""The memory that is held at a moment of a walk, and what a loop does to it, done again.

A loop inside of another is walked for each iteration of that. What it does depends on the variables
and lists it looks at, so where these are as they were before, its effect is applied instead: loops
inside of each other are walked a few times each, not for every combination of iterations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import field
from enum import IntEnum
from typing import TypeVar

from meshdsl.records import dataclass

V = TypeVar("V")


class MemoryKind(IntEnum):
    """What memory is for, beside the tensors that are stored from step to step.

    GRADS are the gradients of parameters where they stay until the update, NEW_GRADS those of a
    layer, or of a batch, before they get there. GATHERED are parameters as used, where they are
    stored otherwise. UPDATES are values that only the update has, BUFFERS what a collective or an
    operator works in. All else are ACTIVATIONS, and what the backward pass makes of them.
    """

    ACTIVATIONS = 0
    GRADS = 1
    NEW_GRADS = 2
    GATHERED = 3
    UPDATES = 4
    BUFFERS = 5


Amounts = tuple[int, ...]
"""Bytes of each kind."""


def plus(one: Amounts, other: Amounts) -> Amounts:
    """The sum, kind by kind."""
    return tuple(map(operator.add, one, other))


def less(one: Amounts, other: Amounts) -> Amounts:
    """The difference, kind by kind."""
    return tuple(map(operator.sub, one, other))


def of_kind(size: int, kind: MemoryKind) -> Amounts:
    """So many bytes of one kind."""
    return (*NONE[:kind], size, *NONE[kind + 1 :])


NONE: Amounts = (0,) * len(MemoryKind)


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One piece of memory, and the number of variables and lists that refer to it."""

    bytes: int
    holders: int = 0
    kind: MemoryKind = MemoryKind.ACTIVATIONS


class AccessNotes(dict[str, V]):
    """A dict that notes which names are looked at, so also which are changed."""

    noted: set[str]

    def get(self, name: str, default: V | None = None) -> V | None:  # type: ignore[override]
        """What has the name."""
        self.noted.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.noted.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> V:
        self.noted.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, found: V) -> None:
        self.noted.add(name)
        super().__setitem__(name, found)

    def take_out(self, name: str) -> V | None:
        """Remove a name, and return what had it."""
        self.noted.add(name)
        return super().pop(name, None)


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a walk did to memory in some state, whose blocks are numbered; new ones follow.

    `most`, `high` and `now` count from what was held before, and so does what is held of each kind
    at the peak, at `high`, and after the walk. `holders` are those that a known block has more, and
    all of a new one.
    """

    most: int
    line: int
    high: int
    now: int
    at_peak: Amounts
    at_high: Amounts
    after: Amounts
    sizes: tuple[tuple[int, MemoryKind], ...]
    holders: tuple[int, ...]
    names: tuple[tuple[str, int | None], ...]
    lists: tuple[tuple[str, tuple[int, ...] | None], ...]


@dataclass(slots=True)
class LiveMemory:
    """The memory of variables and lists at a moment, by their names, and the peak so far.

    `high` is the most since the last `begin_high`. `by_kind` is what there is of each kind,
    `at_peak` and `at_high` what there was. `looked` are the names that a walk looks at.
    """

    now: int = 0
    most: int = 0
    line: int = 0
    high: int = 0
    by_kind: list[int] = field(default_factory=lambda: list(NONE))
    at_peak: Amounts = NONE
    at_high: Amounts = NONE
    names: AccessNotes[MemoryBlock] = field(default_factory=AccessNotes)
    lists: AccessNotes[list[MemoryBlock]] = field(default_factory=AccessNotes)
    looked: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    effects: dict[Hashable, _Effect] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._note_in(set())

    def _note_in(self, noted: set[str]) -> None:
        self.names.noted = self.lists.noted = noted

    def take(
        self, size: int, line: int = 0, kind: MemoryKind = MemoryKind.ACTIVATIONS
    ) -> MemoryBlock:
        """Allocate memory, to which nothing refers yet."""
        self.now += size
        self.by_kind[kind] += size
        self.mark(0, line)
        return MemoryBlock(size, kind=kind)

    def mark(self, scratch: int, line: int) -> None:
        """Note a moment at which `scratch` bytes more are allocated."""
        size = self.now + scratch
        if size <= self.high and size <= self.most:
            return
        amounts = list(self.by_kind)
        amounts[MemoryKind.BUFFERS] += scratch
        kinds = tuple(amounts)
        if size > self.high:
            self.high, self.at_high = size, kinds
        self.raise_to(size, line, kinds)

    def begin_high(self) -> None:
        """Count `high` from now on."""
        self.high, self.at_high = self.now, tuple(self.by_kind)

    def raise_to(self, most: int, line: int, at_peak: Amounts) -> None:
        """Note a moment with `most` bytes, if there was none with as many."""
        if most > self.most:
            self.most, self.line, self.at_peak = most, line, at_peak

    def bind(self, name: str, block: MemoryBlock) -> None:
        """Make a variable refer to `block`, and no longer to its former one."""
        block.holders += 1
        self.drop(name)
        self.names[name] = block

    def append(self, name: str, block: MemoryBlock) -> None:
        """Make a list refer to `block` as well."""
        block.holders += 1
        self.lists[name].append(block)

    def drop(self, name: str) -> None:
        """Delete a variable or a list."""
        blocks = self.lists.take_out(name) or []
        block = self.names.take_out(name)
        for each in [*blocks, *([] if block is None else [block])]:
            self.release(each)

    def release(self, block: MemoryBlock) -> None:
        """Remove one reference."""
        block.holders -= 1
        if not block.holders:
            self.now -= block.bytes
            self.by_kind[block.kind] -= block.bytes

    # --- the same again ------------------------------------------------------------------------

    def again(self, about: Hashable, walk: Callable[[], None]) -> None:
        """Walk, or do what the same walk did to a state that looked the same to it.

        `about` is everything else on which the walk depends. The first walk shows what it looks at.
        """
        looked = self.looked.get(about)
        blocks, state = self._state(looked) if looked is not None else ([], None)
        effect = self.effects.get((about, state))
        if looked is not None and effect is not None:
            self.names.noted.update(looked)
            self._apply(effect, blocks)
            return
        before, most, line, high = self.now, self.most, self.line, self.high
        begun, at_peak, at_high = tuple(self.by_kind), self.at_peak, self.at_high
        holders, outside = [block.holders for block in blocks], self.names.noted
        self.most, self.high, self.at_high = -1, 0, NONE
        self._note_in(set())
        walk()
        noted = self.names.noted
        self._note_in(outside | noted)
        change = self.most - before, self.line, self.high - before, self.now - before
        at_peaks = less(self.at_peak, begun), less(self.at_high, begun)
        kinds = *at_peaks, less(tuple(self.by_kind), begun)
        if looked is not None and noted.issubset(looked):
            self.effects[about, state] = self._effect(change, kinds, looked, blocks, holders)
        else:
            self.looked[about] = tuple(sorted(noted.union(looked or ())))
        highest, at, here = self.most, self.line, self.at_peak
        self.most, self.line, self.at_peak = most, line, at_peak
        if high >= self.high:
            self.high, self.at_high = high, at_high
        self.raise_to(highest, at, here)

    def _state(self, looked: tuple[str, ...]) -> tuple[list[MemoryBlock], Hashable]:
        """The blocks of names, and all that a walk depends on which looks at no others.

        Who else holds a block does not matter, only whether somebody does.
        """
        numbers: dict[MemoryBlock, int] = {}
        seen: dict[MemoryBlock, int] = {}

        def number(block: MemoryBlock) -> int:
            seen[block] = seen.get(block, 0) + 1
            return numbers.setdefault(block, len(numbers))

        names, lists = self._named(looked, number)
        about = tuple((b.bytes, b.kind, b.holders > count) for b, count in seen.items())
        return list(numbers), (names, lists, about)

    def _named(
        self, looked: tuple[str, ...], number: Callable[[MemoryBlock], int]
    ) -> tuple[tuple[tuple[str, int | None], ...], tuple[tuple[str, tuple[int, ...] | None], ...]]:
        """The numbers of the blocks that names and lists refer to; None: there is no such name."""
        names, lists = [], []
        for name in looked:
            block, blocks = dict.get(self.names, name), dict.get(self.lists, name)
            names.append((name, None if block is None else number(block)))
            lists.append((name, None if blocks is None else tuple(map(number, blocks))))
        return tuple(names), tuple(lists)

    def _effect(
        self,
        found: tuple[int, int, int, int],
        kinds: tuple[Amounts, Amounts, Amounts],
        looked: tuple[str, ...],
        blocks: list[MemoryBlock],
        holders: list[int],
    ) -> _Effect:
        """What was done to the `blocks` of a state, which had as many `holders`."""
        numbers = {block: i for i, block in enumerate(blocks)}
        names, lists = self._named(looked, lambda block: numbers.setdefault(block, len(numbers)))
        fresh = list(numbers)[len(blocks) :]
        more = [b.holders - count for b, count in zip(blocks, holders, strict=True)]
        every = (*more, *(b.holders for b in fresh))
        sizes = tuple((b.bytes, b.kind) for b in fresh)
        return _Effect(*found, *kinds, sizes, every, names, lists)

    def _apply(self, effect: _Effect, blocks: list[MemoryBlock]) -> None:
        every = [*blocks, *(MemoryBlock(size, kind=kind) for size, kind in effect.sizes)]
        for block, more in zip(every, effect.holders, strict=True):
            block.holders += more
        for name, number in effect.names:
            self.names.take_out(name)
            if number is not None:
                self.names[name] = every[number]
        for name, numbers in effect.lists:
            self.lists.take_out(name)
            if numbers is not None:
                self.lists[name] = [every[i] for i in numbers]
        now = tuple(self.by_kind)
        if self.now + effect.high > self.high:
            self.high, self.at_high = self.now + effect.high, plus(now, effect.at_high)
        self.raise_to(self.now + effect.most, effect.line, plus(now, effect.at_peak))
        self.now += effect.now
        self.by_kind = list(plus(now, effect.after))
