"""Graphs with costs as JSON: read with a message for all that is wrong, as other people write them.

`"kind": "placement"` has nodes with a cost, and maybe memory, for each choice, and edges with a
table of costs by the choices of two or more nodes. `"kind": "stages"` has layers with times and
sizes, and which reads which. `"kind": "transformer"` has the sizes of equal layers, `"devices"`
operators in groups that go to a device each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from meshdsl.costgraph.device_placement import GraphOperator
from meshdsl.costgraph.graph import CostFactor, CostGraph, Variable
from meshdsl.costgraph.layer_graph import Layer, LayerGraph, LayerWay
from meshdsl.costgraph.transformer import STATES, Experts, Transformer
from meshdsl.diagnostics import Fix, Source, Span, did_you_mean, fail
from meshdsl.records import dataclass
from meshdsl.syntax.parse import read_source

MOST = 1e100
"""The greatest number of a graph: sums and products of such are numbers still."""

SIZES = tuple(f.name for f in fields(Transformer) if f.default is MISSING)
"""The fields that every transformer has: whole numbers."""

MOST_SIZE = 1 << 32
"""The greatest size of a transformer: all its divisors are found at once."""

FIELDS = {
    "placement": ("nodes", "edges", "memory_limit"),
    "stages": ("layers", "edges", "micro_batches"),
    "transformer": (*(f.name for f in fields(Transformer)), "micro_batches", "groups"),
    "devices": ("operators", "transfer", "expert", "published"),
}
"""The kinds of graphs, and the fields of each beside `version`, `kind` and `source`."""


class DuplicateField(str):
    """The name that a JSON object has twice: stands for the object, of which nothing is read."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GraphObject:
    """A JSON object of a file and where it is in it: `nodes[3].cost`."""

    source: Source
    path: str
    value: Any

    def __post_init__(self) -> None:
        """Raise MD0660 where two fields of the object have one name."""
        if isinstance(self.value, DuplicateField):
            self.refuse(f"the field `{self.value}` is written twice", help="remove one of them")

    def refuse(
        self,
        message: str,
        code: str = "MD0660",
        help: str | None = None,
        fixes: tuple[Fix, ...] = (),
    ) -> NoReturn:
        """Say what is wrong here."""
        place = f"`{self.path}`: " if self.path else ""
        fail(code, place + message, Span(self.source, 0, 0), help=help, fixes=fixes)

    def field(self, name: str, default: Any = ...) -> GraphObject:
        """A field of an object; without a `default` it has to be there."""
        if not isinstance(self.value, dict):
            self.refuse("this should be an object with names and values")
        path = f"{self.path}.{name}" if self.path else name
        if name not in self.value and default is ...:
            misspelt = set(self.value).difference(*FIELDS.values(), ("version", "kind", "source"))
            near = did_you_mean(name, sorted(misspelt))
            self.refuse(f"the field `{name}` is missing", help=near or f'write `"{name}": …`')
        return GraphObject(self.source, path, self.value.get(name, default))

    def only(self, *names: str) -> GraphObject:
        """This object, of which no other fields are read. Raises MD0660 where it has others."""
        for name in self.value if isinstance(self.value, dict) else ():
            if name not in names:
                near = did_you_mean(name, list(names))
                self.refuse(f"there is no field `{name}`", help=near or f"{', '.join(names)}")
        return self

    def items(self) -> list[GraphObject]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            self.refuse("this should be a list")
        return [
            GraphObject(self.source, f"{self.path}[{i}]", item) for i, item in enumerate(self.value)
        ]

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str) or not self.value:
            self.refuse("this should be a text")
        return self.value

    def count(self) -> int:
        """A whole number from 1."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 1:
            self.refuse("this should be a whole number from 1")
        return self.value

    def cost(self, infinite: bool = False) -> float:
        """A number that is not negative; `null` forbids a choice where it may be `infinite`."""
        if self.value is None and infinite:
            return math.inf
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.refuse("this should be a number" + (", or null" if infinite else ""))
        if not 0 <= self.value <= MOST:
            help = f"costs, times and sizes are from 0 to {MOST:g}; null forbids a choice"
            huge = isinstance(self.value, int) and self.value > MOST  # it may be beyond any float
            shown = "this number" if huge else f"{self.value:.6g}"
            self.refuse(f"{shown} is not a cost", "MD0662", help)
        return float(self.value)


def read_graph(path: Path) -> GraphObject:
    """The JSON of a file. Raises MD0660 where it is none, or of no known kind."""
    source = read_source(path)
    try:
        value = json.loads(source.text, object_pairs_hook=_fields)
    except json.JSONDecodeError as error:
        fail("MD0660", f"this is not JSON: {error.msg}", Span(source, error.pos, error.pos + 1))
    except (RecursionError, ValueError):
        message = "this is no graph: lists in lists without end, or a number of thousands of digits"
        fail("MD0660", message, Span(source, 0, 1))
    top = GraphObject(source, "", value)
    kind = top.field("kind")
    if kind.value not in FIELDS:
        near = did_you_mean(str(kind.value), list(FIELDS))
        kind.refuse(f"there is no graph of kind {kind.value!r}", help=near or ", ".join(FIELDS))
    if (version := top.field("version", 1)).value != 1:
        version.refuse(f"version {version.value} of graphs is not known", help="write version 1")
    return top.only("version", "kind", "source", *FIELDS[kind.value])


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any] | DuplicateField:
    """The fields of a JSON object, or the first name that it has twice."""
    counts = Counter(name for name, _ in pairs)
    twice = next((name for name, count in counts.items() if count > 1), None)
    return dict(pairs) if twice is None else DuplicateField(twice)


# --- graphs of placements ------------------------------------------------------------------------


def costs_of(top: GraphObject) -> CostGraph:
    """The graph of `"kind": "placement"`."""
    nodes = top.field("nodes").items()
    if not nodes:
        top.field("nodes").refuse("there is no node")
    variables, factors, memory = [], [], []
    for i, node in enumerate(nodes):
        node.only("name", "choices", "cost", "memory")
        choices = tuple(c.text() for c in node.field("choices").items())
        if not choices:
            node.field("choices").refuse("there is nothing to choose from")
        for name in (name for name, count in Counter(choices).items() if count > 1):
            node.field("choices").refuse(f"there are two choices `{name}`")
        variables.append(Variable(node.field("name").text(), choices))
        sizes = [len(choices)]
        factors.append(CostFactor((i,), _table(node.field("cost"), sizes)))
        if (held := node.field("memory", None)).value is not None:
            memory.append(CostFactor((i,), _table(held, sizes, infinite=False)))
    places = _places(nodes, [v.name for v in variables])
    for edge in top.field("edges", []).items():
        factors.append(_edge(edge, places, variables))
    limit = top.field("memory_limit", None)
    if limit.value is not None and not memory:
        limit.refuse("no node says how much memory its choices take", help='write `"memory": […]`')
    most = math.inf if limit.value is None else limit.cost()
    source = top.field("source", "").value
    return CostGraph(tuple(variables), tuple(factors), tuple(memory), most, source)


def _edge(
    edge: GraphObject, places: Mapping[str, int], variables: Sequence[Variable]
) -> CostFactor:
    """The table of an edge, its axes in the order of the nodes."""
    between = edge.only("between", "cost").field("between").items()
    at = [_place(name, places) for name in between]
    if len(set(at)) < max(2, len(at)):
        edge.field("between").refuse("an edge is between two nodes or more, each once")
    table = _table(edge.field("cost"), [len(variables[i].choices) for i in at])
    order = sorted(range(len(at)), key=lambda k: at[k])
    return CostFactor(tuple(sorted(at)), table.transpose(order))


def _table(
    written: GraphObject, sizes: Sequence[int], infinite: bool = True
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A table of costs, one list within another for each size; null forbids if `infinite`."""
    rows = written.items()
    if len(rows) != sizes[0]:
        written.refuse(f"{len(rows)} values for {sizes[0]} choices")
    if len(sizes) == 1:
        return np.array([row.cost(infinite) for row in rows])
    return np.stack([_table(row, sizes[1:], infinite) for row in rows])


def _places(written: Iterable[GraphObject], names: Sequence[str]) -> dict[str, int]:
    """The places of nodes by their names, which are all different."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    for item, name in zip(written, names, strict=True):
        if name in twice:
            item.refuse(f"there are two nodes `{name}`")
    return {name: i for i, name in enumerate(names)}


def _place(name: GraphObject, places: Mapping[str, int]) -> int:
    said = name.text()
    if said not in places:
        near = did_you_mean(said, list(places))
        name.refuse(f"there is no node `{said}`", help=near)
    return places[said]


# --- graphs of layers ----------------------------------------------------------------------------

LAYER = ("forward", "backward", "output", "parameters")
"""The numbers of a layer."""
PASSES = ("forward", "backward")
"""What the field `pass` of a layer may say."""


def layers_of(top: GraphObject) -> LayerGraph:
    """The graph of `"kind": "stages"`, its layers in topological order."""
    written = top.field("layers").items()
    if not written:
        top.field("layers").refuse("there is no layer")
    layers = [_layer(layer) for layer in written]
    groups = {layer.group for layer in layers if not layer.is_backward}
    for place, layer in zip(written, layers, strict=True):
        if layer.is_backward and (not layer.group or layer.group not in groups):
            help = 'write its `"group"`, with a layer of the forward pass in it'
            place.refuse("a layer of the backward pass is where its group is", help=help)
    places = _places(written, [layer.name for layer in layers])
    edges = []
    for edge in top.field("edges").items():
        ends = [_place(name, places) for name in edge.items()]
        if len(ends) != 2:
            edge.refuse("an edge is from one layer to another")
        edges.append((ends[0], ends[1]))
    order = _ordered(top, len(layers), edges, [layer.name for layer in layers])
    new = {old: place for place, old in enumerate(order)}
    moved = tuple(sorted({(new[a], new[b]) for a, b in edges}))
    source = top.field("source", "").value
    return LayerGraph(tuple(layers[i] for i in order), moved, source)


def _layer(written: GraphObject) -> Layer:
    written.only("name", *LAYER, "memory", "group", "pass", "ways")
    forward, backward, output, parameters = (written.field(name).cost() for name in LAYER)
    group, which = written.field("group", None), written.field("pass", "forward")
    if which.value not in PASSES:
        which.refuse(f"there is no pass {which.value!r}", help=" or ".join(PASSES))
    return Layer(
        written.field("name").text(),
        forward,
        backward,
        output,
        parameters,
        memory=written.field("memory", 0).cost(),
        group="" if group.value is None else group.text(),
        is_backward=which.value == "backward",
        ways=tuple(_way(way) for way in written.field("ways", []).items()),
    )


def _way(written: GraphObject) -> LayerWay:
    written.only("name", "tensor", "seconds", "parameters", "memory", "in_flight")
    name = written.field("name", None)
    return LayerWay(
        "" if name.value is None else name.text(),
        written.field("tensor", 1).count(),
        written.field("seconds").cost(),
        written.field("parameters").cost(),
        written.field("memory", 0).cost(),
        written.field("in_flight", 0).cost(),
    )


def _ordered(
    top: GraphObject, count: int, edges: Sequence[tuple[int, int]], names: Sequence[str]
) -> list[int]:
    """The layers in topological order, else in the file's; MD0661 for a cycle."""
    reads: dict[int, set[int]] = {i: set() for i in range(count)}
    for a, b in edges:
        reads[b].add(a)
    order: list[int] = []
    while reads:
        ready = next((i for i, sources in reads.items() if not sources), None)
        if ready is None:
            cycle = " -> ".join(names[i] for i in _cycle(reads))
            help = "stages only read what earlier ones have made: remove an edge of the cycle"
            top.field("edges").refuse(f"the layers form a cycle: {cycle}", "MD0661", help)
        del reads[ready]
        for sources in reads.values():
            sources.discard(ready)
        order.append(ready)
    return order


def _cycle(reads: Mapping[int, set[int]]) -> list[int]:
    """One cycle among layers that all read another, in the direction of the edges."""
    path = [min(reads)]
    while (source := min(reads[path[-1]])) not in path:
        path.append(source)
    cycle = path[path.index(source) :]
    return [source, *reversed(cycle)]


# --- transformers --------------------------------------------------------------------------------


def transformer_of(top: GraphObject) -> Transformer:
    """The sizes of `"kind": "transformer"`."""
    optimizer = top.field("optimizer", "adam")
    if optimizer.text() not in STATES:
        near = did_you_mean(optimizer.text(), list(STATES))
        message = f"there is no optimizer `{optimizer.text()}` here"
        optimizer.refuse(message, help=near or ", ".join(STATES))
    layers, hidden, heads, seq, vocab, batch = (_size(top.field(name)) for name in SIZES)
    model = Transformer(
        layers,
        hidden,
        heads,
        seq,
        vocab,
        batch,
        mlp=_size(top.field("mlp", 4)),
        experts=_experts(top.field("experts", None)),
        optimizer=optimizer.text(),
    )
    if model.hidden % model.heads:
        top.field("heads").refuse(f"{model.heads} heads do not divide the width {model.hidden}")
    tokens, experts = model.batch * model.seq, model.experts
    if experts and tokens % experts.group:
        message = f"groups of {experts.group} tokens do not divide the {tokens} of the batch"
        top.field("experts").field("group", experts.group).refuse(message, "MD0666")
    return model


def _size(written: GraphObject) -> int:
    """A size of a transformer."""
    if (size := written.count()) > MOST_SIZE:
        written.refuse(f"this should be at most {MOST_SIZE:,}")
    return size


def _experts(written: GraphObject) -> Experts | None:
    """The experts of a transformer, if it has any."""
    if written.value is None:
        return None
    defaults = {f.name: f.default for f in fields(Experts)}
    written.only(*defaults)
    count = _size(written.field("count"))
    every, top_k, group = (written.field(n, defaults[n]) for n in ("every", "top_k", "group"))
    capacity = written.field("capacity", defaults["capacity"])
    experts = Experts(count, _size(every), _size(top_k), _size(group), capacity.cost())
    if experts.top_k > count:
        top_k.refuse(f"a token cannot go to {experts.top_k} of {count} experts", "MD0666")
    if not experts.places:
        message = f"an expert takes none of the {experts.group} tokens of a group"
        where = capacity if experts.capacity < 1 else group
        where.refuse(message, "MD0666", "make the group or the capacity larger")
    return experts


# --- operators on devices ------------------------------------------------------------------------


def operators_of(top: GraphObject) -> tuple[tuple[str, ...], list[GraphOperator]]:
    """The groups of `"kind": "devices"`, and the operators: each reads only what stands before."""
    written = top.field("operators").items()
    if not written:
        top.field("operators").refuse("there is no operator")
    groups: dict[str, int] = {}
    places: dict[str, int] = {}
    operators = []
    for operator in written:
        operator.only("name", "group", "reads", "seconds", "output")
        group = groups.setdefault(operator.field("group").text(), len(groups))
        reads = [_place(name, places) for name in operator.field("reads", []).items()]
        seconds, output = (operator.field(name).cost() for name in ("seconds", "output"))
        operators.append(GraphOperator(group, seconds, output, tuple(dict.fromkeys(reads))))
        name = operator.field("name").text()
        if name in places:
            operator.refuse(f"there are two operators `{name}`")
        places[name] = len(places)
    return tuple(groups), operators


def expert_of(top: GraphObject, groups: Sequence[str], devices: int) -> list[int]:
    """The device of each group as an expert has placed them on so many devices.

    Raises MD0665 where the graph has no such placement.
    """
    shape = ", ".join(f'"{group}": 0' for group in groups[:2])
    help = f'write `"expert": {{"{devices}": {{{shape}, …}}}}`, or take another method'
    written = top.field("expert", {})
    if not isinstance(written.value, dict) or f"{devices}" not in written.value:
        written.refuse(f"no expert's placement on {devices} devices is written", "MD0665", help)
    places = written.field(f"{devices}").only(*groups)
    fields = [places.field(group) for group in groups]
    for place in fields:
        is_integer = isinstance(place.value, int) and not isinstance(place.value, bool)
        if not is_integer or not 0 <= place.value < devices:
            place.refuse(f"this should be a device, from 0 to {devices - 1}")
    return [place.value for place in fields]


def published_of(
    top: GraphObject, devices: int | None, methods: Iterable[str]
) -> dict[str, float | None]:
    """Published seconds by method on so many devices, where the graph has such; null: not found."""
    written = top.field("published", {})
    if written.value == {} or devices is None:
        return {}
    row = written.field(f"{devices}", {}).only(*methods)
    if not isinstance(row.value, dict):
        row.refuse("this should be an object: seconds by method")
    figures = {name: row.field(name) for name in row.value}
    return {name: None if f.value is None else f.cost() for name, f in figures.items()}
