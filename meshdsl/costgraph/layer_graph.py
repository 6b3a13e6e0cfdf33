"""Graphs of layers, each with its times and sizes, and their down-sets.

A down-set holds with each layer all that it reads: what the first stages of a pipeline compute.
Times are in seconds a micro-batch, sizes in bytes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from meshdsl.records import dataclass

MOST_SETS = 3_000
"""Down-sets of a graph that may be cut: the pairs of them are what is searched."""


class GraphTooLarge(Exception):
    """The graph has more down-sets, or with its devices more states, than are looked at."""


@dataclass(frozen=True, slots=True)
class LayerWay:
    """A way to compute a layer on `tensor` devices together: seconds of both passes.

    Bytes on each of them: `parameters`, `memory` whatever is in flight, and `in_flight` for each
    micro-batch.
    """

    name: str
    tensor: int
    seconds: float
    parameters: float
    memory: float
    in_flight: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A node: seconds forward and backward, bytes of its output and of its parameters.

    `memory`: bytes on each device that has it. Layers of one `group` are in one stage; one that
    computes gradients, `is_backward`, is where its group is, whatever it reads.
    """

    name: str
    forward: float
    backward: float
    output: float
    parameters: float
    memory: float = 0.0
    group: str = ""
    is_backward: bool = False
    ways: tuple[LayerWay, ...] = ()

    @property
    def all_ways(self) -> tuple[LayerWay, ...]:
        """Its ways: where none are given, on one device."""
        return self.ways or (LayerWay("", 1, self.seconds, self.parameters, self.memory, 0.0),)

    @property
    def is_free(self) -> bool:
        """Whether it takes no time and memory, on however many devices."""
        return not (self.seconds or self.parameters or self.memory or self.ways)

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layers in topological order, and the edges between their places in it."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    source: str = ""

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The layers that each one reads, as a set of bits."""
        masks = [0] * len(self.layers)
        for a, b in self.edges:
            masks[b] |= 1 << a
        return tuple(masks)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """The layers that read each one, as a set of bits."""
        masks = [0] * len(self.layers)
        for a, b in self.edges:
            masks[a] |= 1 << b
        return tuple(masks)

    @cached_property
    def every_layer(self) -> int:
        """All layers, as a set of bits."""
        return (1 << len(self.layers)) - 1

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The layers that are in one stage whichever it is, and those that have to be in front.

        Sets of bits, in topological order. A block is a group, or all groups of a cycle among them.
        """
        held: dict[str | int, int] = {}
        for i, layer in enumerate(self.layers):
            key = layer.group or i
            held[key] = held.get(key, 0) | 1 << i
        backward = sum(1 << i for i, layer in enumerate(self.layers) if layer.is_backward)
        masks = list(held.values())
        # What a block needs, and what that needs, until nothing is added.
        needed = [self._read_by(mask & ~backward) & ~backward | mask for mask in masks]
        grown = True
        while grown:
            wider = []
            for need in needed:
                inside = [k for k, mask in enumerate(masks) if mask & need]
                wider.append(functools.reduce(operator.or_, (needed[k] for k in inside)))
            grown, needed = wider != needed, wider
        cycles = dict.fromkeys(needed)
        merged = [
            functools.reduce(
                operator.or_, (m for m, n in zip(masks, needed, strict=True) if n == need)
            )
            for need in cycles
        ]
        blocks = [(mask, need & ~mask) for mask, need in zip(merged, cycles, strict=True)]
        return tuple(sorted(blocks, key=lambda block: (block[1].bit_count(), block[0])))

    def _read_by(self, held: int) -> int:
        return functools.reduce(operator.or_, (self.before[i] for i in members(held)), 0)

    @cached_property
    def down_sets(self) -> tuple[int, ...]:
        """The sets that hold with each block all that has to be in front, small ones first.

        Raises GraphTooLarge.
        """
        sets = {0}
        last = [0]
        while last:
            grown = {held | mask for held in last for mask in self._next(held)}
            last = sorted(grown - sets)
            sets |= grown
            if len(sets) > MOST_SETS:
                raise GraphTooLarge(f"the layers have more than {MOST_SETS:,} down-sets")
        return _by_size(sets)

    def _next(self, held: int) -> list[int]:
        """The blocks that may be added to a down-set."""
        return [mask for mask, need in self.blocks if not held & mask and not need & ~held]

    @cached_property
    def some_down_sets(self) -> tuple[int, ...]:
        """Those along a few topological orders, and with one more block, where all are too many.

        The orders take the block after which the fewest bytes are read later, that which was ready
        last (one branch after another), the first one that is ready, and the last one.
        """
        orders: tuple[Callable[[int, list[int], list[int]], int], ...] = (
            lambda held, ready, seen: min(ready, key=lambda m: self._added(held, m)),
            lambda held, ready, seen: max(ready, key=seen.index),
            lambda held, ready, seen: ready[0],
            lambda held, ready, seen: ready[-1],
        )
        sets, wider = {0, self.every_layer}, list[int]()
        for choose in orders:
            held, seen, along = 0, list[int](), list[int]()
            while ready := self._next(held):
                seen += [mask for mask in ready if mask not in seen]
                wider += [held | mask for mask in ready]
                held |= choose(held, ready, seen)
                along.append(held)
            if len(sets) + len(along) <= MOST_SETS or len(sets) == 2:
                sets.update(along)
        for held in wider:
            if len(sets) >= MOST_SETS:
                break
            sets.add(held)
        return _by_size(sets)

    def _added(self, held: int, mask: int) -> float:
        """By how much a block changes what later layers read of a down-set, in bytes."""
        later = self.every_layer & ~(held | mask)
        more = (self.layers[i].output for i in members(mask) if self.after[i] & later)
        sources = members(self._read_by(mask) & held)
        fewer = (self.layers[i].output for i in sources if not self.after[i] & later)
        return math.fsum(more) - math.fsum(fewer)

    def leaving(self, held: int) -> float:
        """Bytes that other layers read of some."""
        return self.crossing(held, self.every_layer & ~held)

    def crossing(self, source: int, target: int) -> float:
        """Bytes of the layers in one set that some layer of the other reads, each once."""
        return math.fsum(self.layers[i].output for i in members(source) if self.after[i] & target)


def _by_size(sets: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(sets, key=lambda s: (s.bit_count(), s)))


def members(held: int) -> Iterator[int]:
    """The places of the bits of a set."""
    while held:
        low = held & -held
        yield low.bit_length() - 1
        held ^= low


# --- contraction ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Contracted:
    """A smaller graph whose best stages cost the same, and the layers that each of its nodes has.

    `floating` layers have no time, parameters, input or output: each is where it is read first.
    """

    original: LayerGraph
    graph: LayerGraph
    members: tuple[tuple[int, ...], ...]
    floating: tuple[int, ...]

    def expanded(self, stages: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The layers of stages, from the nodes of the smaller graph in each."""
        stage_of = {i: k for k, held in enumerate(stages) for n in held for i in self.members[n]}
        for i in reversed(self.floating):
            stage_of[i] = min((stage_of[j] for j in members(self.original.after[i])), default=0)
        return [tuple(sorted(i for i in stage_of if stage_of[i] == k)) for k in range(len(stages))]


def contracted(graph: LayerGraph) -> Contracted:
    """A graph without the layers that some best stages have beside one of their neighbours.

    Only layers without time, parameters, memory and group are merged, and only where moving them to
    the other stage lets no stage or link carry more:

    - without input and output: to its first reader, whichever stage that is in;
    - read by none, with one input: to that one;
    - whose one input only it reads, and is no smaller than its output: to that input;
    - with one reader, whose inputs together are no larger than its output: to that reader.
    """
    return _Contraction(graph).result()


class _Contraction:
    """Nodes by their first place, and what they hold, read, and are read by."""

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        nodes = range(len(graph.layers))
        self.held = {i: [i] for i in nodes}
        self.output = {i: graph.layers[i].output for i in nodes}
        self.reads = {i: set(members(graph.before[i])) for i in nodes}
        self.readers = {i: set(members(graph.after[i])) for i in nodes}
        self.floating: list[int] = []
        sizes = Counter(layer.group for layer in graph.layers)
        self.fixed = {
            i for i, layer in enumerate(graph.layers) if layer.group and sizes[layer.group] > 1
        }

    def result(self) -> Contracted:
        """The graph when nothing is left to merge."""
        while any([self._merges(i) for i in list(self.held) if len(self.held) > 1]):
            pass
        order = self._order()
        place = {node: k for k, node in enumerate(order)}
        edges = sorted((place[a], place[b]) for b in order for a in self.reads[b])
        layers = tuple(self._layer(node) for node in order)
        held = tuple(tuple(sorted(self.held[node])) for node in order)
        graph = LayerGraph(layers, tuple(edges), self.graph.source)
        return Contracted(self.graph, graph, held, tuple(sorted(self.floating)))

    def _order(self) -> list[int]:
        """The nodes in topological order, else in that of their first layers."""
        order: list[int] = []
        left = dict(self.reads)
        while left:
            node = next(n for n in left if self.reads[n].isdisjoint(left))
            order.append(node)
            del left[node]
        return order

    def _layer(self, node: int) -> Layer:
        layers = [self.graph.layers[i] for i in self.held[node]]
        forward, backward, parameters = (
            math.fsum(getattr(layer, field) for layer in layers)
            for field in ("forward", "backward", "parameters")
        )
        representative = self.graph.layers[node]
        return replace(
            representative,
            forward=forward,
            backward=backward,
            output=self.output[node],
            parameters=parameters,
            memory=math.fsum(layer.memory for layer in layers),
        )

    def _merges(self, node: int) -> bool:
        """Whether a node was merged with a neighbour."""
        if node not in self.held or not self._is_free(node):
            return False
        reads, readers, output = self.reads[node], self.readers[node], self.output[node]
        if not reads and not (output and readers):
            self.floating += self.held[node]
            self._remove(node)
        elif len(reads) == 1 and (not readers or self._narrows(node)):
            self._into_input(node, next(iter(reads)))
        elif len(readers) == 1 and reads and self._widens(node):
            self._into_reader(node, next(iter(readers)))
        else:
            return False
        return True

    def _is_free(self, node: int) -> bool:
        free = all(self.graph.layers[i].is_free for i in self.held[node])
        return free and self.fixed.isdisjoint(self.held[node])

    def _narrows(self, node: int) -> bool:
        (source,) = self.reads[node]
        return len(self.readers[source]) == 1 and self.output[node] <= self.output[source]

    def _widens(self, node: int) -> bool:
        read = math.fsum(self.output[i] for i in self.reads[node])
        return read <= self.output[node]

    def _remove(self, node: int) -> None:
        for source in self.reads.pop(node):
            self.readers[source].discard(node)
        for reader in self.readers.pop(node):
            self.reads[reader].discard(node)
        del self.held[node], self.output[node]

    def _into_input(self, node: int, source: int) -> None:
        self.held[source] += self.held[node]
        readers = self.readers[node]
        if readers:
            self.output[source] = self.output[node]
        self._remove(node)
        for reader in readers:
            self.reads[reader].add(source)
            self.readers[source].add(reader)

    def _into_reader(self, node: int, reader: int) -> None:
        self.held[reader] += self.held[node]
        reads = self.reads[node]
        self._remove(node)
        for source in reads:
            self.reads[reader].add(source)
            self.readers[source].add(reader)
