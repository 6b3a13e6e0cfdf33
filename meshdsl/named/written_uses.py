"""What the writer of `.mdsl` asks of a piece of a named program: calls, uses, and when they end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshdsl.named.ir import Loop, Node, Op, Program, Value, walk

AT_THE_END = 1 << 60
"""The position of what is returned."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The operators of one inlined call, in a row. `path` ends in the name of the call."""

    path: tuple[str, ...]
    function: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledSum:
    """`sum[…](x * y * 2.0)` after it became an einsum whose result is multiplied by the numbers."""

    einsum: Op
    factors: tuple[Op, ...]


Item = Op | Loop | Group | ScaledSum

# --- calls -----------------------------------------------------------------------------------


def items(nodes: Sequence[Node], path: tuple[str, ...]) -> tuple[Item, ...]:
    """The nodes of a function body whose path is `path`, those of each call inside it together."""
    found: list[Item] = []
    for key, run in itertools.groupby(nodes, lambda n: path_of(n)[: len(path) + 1]):
        if len(key) > len(path):
            members = tuple(run)
            found.append(Group(key, _functions(members[0])[len(path)], members))
        else:
            found += with_scaled_sums(tuple(run))
    return tuple(found)


def path_of(node: Node) -> tuple[str, ...]:
    """The calls that a node was written inside of.

    A loop stands where the names it carries are assigned; its body may be nothing but a call.
    """
    if isinstance(node, Op):
        return node.outs[0].path
    shared = path_of(node.body[0]) if node.body else ()
    for path in (*map(path_of, node.body), *_places_of_carries(node)):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shared, path, strict=False))
        shared = tuple(a for a, _ in same)
    return shared


def scope_of(value: Value) -> tuple[str, ...]:
    """The calls inside of which a named value got its name; a returned value gets it outside."""
    assert value.name is not None
    return tuple(value.name.split(".")[:-1])


def _places_of_carries(loop: Loop) -> list[tuple[str, ...]]:
    made = {v: op for op in loop.body if isinstance(op, Op) for v in op.outs}
    found = []
    for carry in loop.carries:
        op = made.get(carry.next)
        value = op.ins[0] if op and op.name == "transpose" and not carry.next.name else carry.next
        if value.name:
            found.append(scope_of(value))
        elif op is not None and op.name == "constant":
            found.append(path_of(op))
    return found


def _functions(node: Node) -> tuple[str, ...]:
    if isinstance(node, Op):
        return node.outs[0].functions
    return max((_functions(n) for n in node.body), key=len)


def with_scaled_sums(nodes: Sequence[Node]) -> list[Op | Loop | ScaledSum]:
    """The nodes, each einsum with the multiplications that simplification put behind it."""
    before: set[Value] = set()
    found: list[Op | Loop | ScaledSum] = []
    rest = list(reversed(nodes))
    while rest:
        node = rest.pop()
        factors: list[Op] = []
        if isinstance(node, Op) and node.name == "constant":
            before.add(node.out)
        last = node
        while isinstance(last, Op) and rest and _scales(rest[-1], last, before):
            last = rest.pop()
            assert isinstance(last, Op)
            factors.append(last)
        found.append(ScaledSum(node, tuple(factors)) if isinstance(node, Op) and factors else node)
    return found


def _scales(node: Node, last: Op, constants: set[Value]) -> bool:
    """Whether `node` multiplies the einsum just made by a number from before it."""
    is_sum = last.name == "einsum" or (last.name == "mul" and last.ins[1] in constants)
    if not is_sum or last.out.name or not isinstance(node, Op) or node.name != "mul":
        return False
    return node.ins[0] is last.out and node.ins[1] in constants


# --- uses ------------------------------------------------------------------------------------


def nodes_of(item: Item) -> tuple[Node, ...]:
    """The nodes that an item stands for."""
    if isinstance(item, Group):
        return item.nodes
    return (item.einsum, *item.factors) if isinstance(item, ScaledSum) else (item,)


def defined(nodes: Iterable[Node]) -> set[Value]:
    """What the nodes make, inside loops too."""
    found: set[Value] = set()
    for node in nodes:
        found.update(node.makes)
        if isinstance(node, Loop):
            found |= defined(node.body) | {s.inside for s in node.stacked}
            found |= {c.inside for c in node.carries}
    return found


def used(nodes: Iterable[Node]) -> Counter[Value]:
    """How often the nodes read each value, in order of first use."""
    found: Counter[Value] = Counter()
    for node in nodes:
        if isinstance(node, Op):
            found.update(node.ins)
            continue
        outer = {s.inside: s.outer for s in node.stacked}
        found.update(c.init for c in node.carries)
        for value, count in used(node.body).items():
            found[outer.get(value, value)] += count
        found.update(c.next for c in node.carries)
    return found


def free(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """What the nodes read and do not make, in order of first use."""
    own = defined(nodes)
    return tuple(v for v in used(nodes) if v not in own)


@dataclass(slots=True)
class Lives:
    """Where in a function body each node stands and each value is last read.

    `before` is the node before a node in the same loop, `start` where a loop begins.
    A loop reads until its end what comes from outside of it.
    """

    at: dict[Node, int] = field(default_factory=dict)
    last: dict[Value, int] = field(default_factory=dict)
    before: dict[Node, Node] = field(default_factory=dict)
    start: dict[Loop, int] = field(default_factory=dict)
    _count: int = 0

    def read(self, nodes: Sequence[Node]) -> None:
        """Take in the nodes of one block."""
        for previous, node in itertools.pairwise(nodes):
            self.before[node] = previous
        for node in nodes:
            self._count += 1
            if isinstance(node, Op):
                self.last.update(dict.fromkeys(node.ins, self._count))
            else:
                self._loop(node)
            self.at[node] = self._count

    def _loop(self, loop: Loop) -> None:
        self._count += 1
        start = self.start[loop] = self._count
        self.read(loop.body)
        self._count += 1
        body = free(loop.body)
        outer = {s.inside: s.outer for s in loop.stacked}
        entering = {c.inside for c in loop.carries}
        for carry in loop.carries:
            self.last[carry.init] = max(self.last.get(carry.init, 0), start)
            self.last[carry.next] = self._count
        for value in body:
            if value not in entering:
                self.last[outer.get(value, value)] = self._count


def phases(program: Program) -> set[str]:
    """The phases of all operators and loops."""
    return {op.phase for op in walk(program.body)} | _loop_phases(program.body)


def _loop_phases(nodes: Iterable[Node]) -> set[str]:
    loops = [n for n in nodes if isinstance(n, Loop)]
    return {n.phase for n in loops}.union(*(_loop_phases(n.body) for n in loops))


def blocks_of(nodes: Iterable[Node]) -> set[int | None]:
    """The `recompute` blocks that the nodes stand in; None for those in none."""
    found: set[int | None] = set()
    for node in nodes:
        found |= {node.block} if isinstance(node, Op) else {node.block} | blocks_of(node.body)
    return found


def instances(nodes: Iterable[Node]) -> set[tuple[str, ...]]:
    """The paths of every call that has operators."""
    paths = {op.outs[0].path for op in walk(tuple(nodes))}
    return {path[:n] for path in paths for n in range(1, len(path) + 1)}


def slices(nodes: Iterable[Node]) -> dict[Value, Value]:
    """What each slice that a loop takes is taken of."""
    found: dict[Value, Value] = {}
    for node in nodes:
        if isinstance(node, Loop):
            found |= {s.inside: s.outer for s in node.stacked} | slices(node.body)
    return found


Loops = tuple[Loop, ...]
"""Loops inside each other, outermost first."""


def loops_around(program: Program) -> dict[Value, Loops]:
    """For each parameter that is read, the loops around all that reads it."""
    found: dict[Value, Loops] = {}
    known = {p.value: p.value for p in program.params}
    for output in program.outputs:
        if output.value in known:
            found[output.value] = ()
    _find_reads(program.body, known, (), found)
    return found


def shared(left: Loops, right: Loops) -> Loops:
    """The loops around both of two places."""
    pairs = itertools.takewhile(lambda p: p[0] is p[1], zip(left, right, strict=False))
    return tuple(a for a, _ in pairs)


def _find_reads(
    nodes: Iterable[Node], known: dict[Value, Value], loops: Loops, found: dict[Value, Loops]
) -> None:
    """`known` maps a parameter, and its slices inside loops, to the parameter."""
    for node in nodes:
        reads = node.ins if isinstance(node, Op) else [c.init for c in node.carries]
        for value in reads:
            if value in known:
                param = known[value]
                found[param] = shared(found.get(param, loops), loops)
        if isinstance(node, Loop):
            inner = (*loops, node)
            slices = {s.inside: known[s.outer] for s in node.stacked if s.outer in known}
            _find_reads(node.body, known | slices, inner, found)
