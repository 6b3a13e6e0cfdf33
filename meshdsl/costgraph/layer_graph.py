"""Graphs of layers, each with its times and sizes, and their down-sets.

A down-set holds with each layer all that it reads: what the first stages of a pipeline compute.
Times are in seconds a micro-batch, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from meshdsl.records import dataclass

MOST_SETS = 3_000
"""Down-sets of a graph that may be cut: the pairs of them are what is searched."""


class GraphTooLarge(Exception):
    """The graph has more down-sets, or with its devices more states, than are looked at."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A node: seconds forward and backward, bytes of its output and of its parameters."""

    name: str
    forward: float
    backward: float
    output: float
    parameters: float

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
    def down_sets(self) -> tuple[int, ...]:
        """The sets that hold with each layer all that it reads, small ones first.

        Raises GraphTooLarge.
        """
        sets = {0}
        last = [0]
        while last:
            grown = {
                held | 1 << i
                for held in last
                for i in range(len(self.layers))
                if not held >> i & 1 and self.before[i] & ~held == 0
            }
            sets |= grown
            if len(sets) > MOST_SETS:
                raise GraphTooLarge(f"the layers have more than {MOST_SETS:,} down-sets")
            last = sorted(grown)
        return tuple(sorted(sets, key=lambda s: (s.bit_count(), s)))

    def crossing(self, source: int, target: int) -> float:
        """Bytes of the layers in one set that some layer of the other reads, each once."""
        return math.fsum(self.layers[i].output for i in members(source) if self.after[i] & target)


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

    Only layers without time and parameters are merged, `free` ones, and only where moving them to
    the other stage lets no stage or link carry more:

    - without input and output: to its first reader, whichever stage that is in;
    - read by none, with one input: to that one;
    - whose one input only it reads, and is no smaller than its output: to that input;
    - with one reader, whose inputs only it reads, and together are no larger: to that reader.
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
        return Layer(self.graph.layers[node].name, forward, backward, self.output[node], parameters)

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
        layers = (self.graph.layers[i] for i in self.held[node])
        return not any(layer.seconds or layer.parameters for layer in layers)

    def _narrows(self, node: int) -> bool:
        (source,) = self.reads[node]
        return len(self.readers[source]) == 1 and self.output[node] <= self.output[source]

    def _widens(self, node: int) -> bool:
        sources = self.reads[node]
        read = math.fsum(self.output[i] for i in sources)
        return all(len(self.readers[i]) == 1 for i in sources) and read <= self.output[node]

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
