"""What passes share: reads of a node with its body, slices of a program, rules, and rebuilding.

Everything is generic in the stage: nodes differ by their type alone. A pass is a rule for operators
(`rewritten`), one for blocks (`in_blocks`), or a `Rebuild` that overrides what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from meshdsl.ir.program import Leaf, Loop, Node, Op

N = TypeVar("N", bound=Node)

# --- the values of a node ------------------------------------------------------------------------


def reads_of(node: Node) -> tuple[Any, ...]:
    """The values that a node reads, those that its body reads or ends with included."""
    if not node.body:
        return (*node.reads, *node.ends)
    return (*node.reads, *(v for inner in node.body for v in reads_of(inner)), *node.ends)


def makes_of(node: Node) -> tuple[Any, ...]:
    """The values that a node makes, and those that the nodes of its body make."""
    if not node.body:
        return node.makes
    return (*node.makes, *(v for inner in node.body for v in makes_of(inner)))


def defined(node: Node) -> tuple[Any, ...]:
    """The values that a node defines: its results, and what each of its iterations begins with."""
    return (*node.makes, *node.enters) if node.enters else node.makes


def free(node: Node) -> tuple[Any, ...]:
    """The values from outside that a node reads, those that its body reads included, each once."""
    return tuple(dict.fromkeys(_free(node)))


def _free(node: Node) -> Iterator[Any]:
    yield from node.reads
    if node.body or node.ends:
        inside = {*node.enters, *(v for inner in node.body for v in inner.makes)}
        yield from (v for inner in node.body for v in _free(inner) if v not in inside)
        yield from (v for v in node.ends if v not in inside)


def flows(node: Node) -> Iterator[tuple[Any, Any]]:
    """Each operand of a node with each value that is made of it, without those of its body.

    A value that a loop carries comes from the initial one; the result, from that of an iteration.
    """
    if isinstance(node, Leaf):
        yield from ((v, result) for v in node.reads for result in node.makes)
    for carry in node.carries:
        yield from ((carry.init, carry.inside), (carry.next, carry.result))
    yield from ((s.outer, s.inside) for s in node.stacked)
    yield from ((c.inside, c.outer) for c in node.collected)


def makers(nodes: Iterable[Any]) -> dict[Any, Any]:
    """The operator of a block that makes each value; a value that a loop makes has none."""
    return {v: node for node in nodes if isinstance(node, Op) for v in node.makes}


# --- backward slices -----------------------------------------------------------------------------


def feeding(nodes: Sequence[Node], values: Iterable[Any]) -> set[Any]:
    """Every value that `values` are computed from in a block, and they themselves."""
    needed = set(values)
    for node in reversed(nodes):
        if not needed.isdisjoint(node.makes):
            needed.update(reads_of(node))
    return needed


def needed(nodes: Sequence[N], wanted: set[Any]) -> tuple[N, ...]:
    """The nodes that the values `wanted` are computed from; `wanted` gains what these read.

    Of a loop remain the carries, slices and collections that are read, inside or after it.
    """
    backwards: list[N] = []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.makes):
            continue
        if isinstance(node, Leaf):
            wanted.update(node.reads)
            backwards.append(node)
        else:
            backwards.append(_narrowed(node, wanted))
    return tuple(reversed(backwards))


def _narrowed(loop: Any, wanted: set[Any]) -> Any:
    """The loop with the carries and collected values that are read; `wanted` gains its reads."""
    carries = {c for c in loop.carries if c.result in wanted}
    collected = tuple(c for c in loop.collected if c.outer in wanted)
    while True:
        inner = {c.next for c in carries} | {c.inside for c in collected}
        body = needed(loop.body, inner)
        more = {c for c in loop.carries if c.inside in inner} | carries
        if more == carries:
            break
        carries = more
    wanted.update(inner.difference(loop.enters))
    parts: dict[str, tuple[Any, ...]] = {
        "carries": tuple(c for c in loop.carries if c in carries),
        "stacked": tuple(s for s in loop.stacked if s.inside in inner),
        "body": body,
        "collected": collected,
    }
    wanted.update(c.init for c in parts["carries"])
    wanted.update(s.outer for s in parts["stacked"])
    unchanged = all(getattr(loop, name) == part for name, part in parts.items())
    return loop if unchanged else replace(loop, **parts)


# --- other values --------------------------------------------------------------------------------


def mapped(node: N, of: Callable[[Any], Any]) -> N:
    """A copy of a node on the values that `of` gives for its own, those of its body included.

    Origins stay.
    """
    if isinstance(node, Leaf):
        return node.with_values(of)
    return node.with_values(of, body=tuple([mapped(inner, of) for inner in node.body]))


def substitute(
    nodes: Iterable[N], new: Mapping[Any, Any], origins: Mapping[Any, Any] | None = None
) -> tuple[N, ...]:
    """`nodes` with every mention of a value in `new` replaced, in definitions and origins too.

    `origins` are the values that replace those named by origins, where these are others.
    """
    origins = new if origins is None else origins
    return tuple([_substituted(node, new, origins) for node in nodes] if new or origins else nodes)


def _substituted(node: Any, new: Mapping[Any, Any], origins: Mapping[Any, Any]) -> Any:
    origin, is_leaf = getattr(node, "origin", None), isinstance(node, Leaf)
    fields: dict[str, Any] = {}
    if origin is not None and origin.of in origins:
        fields["origin"] = origin.on(origins.__getitem__)
    if is_leaf and (not new or new.keys().isdisjoint((*node.reads, *node.makes))):
        return replace(node, **fields) if fields else node
    if not is_leaf:
        fields["body"] = substitute(node.body, new, origins)
    return node.with_values(lambda value: new.get(value, value), **fields)


# --- rules ---------------------------------------------------------------------------------------


def rewritten(nodes: Iterable[N], rule: Callable[[Any], Iterable[N]]) -> tuple[N, ...]:
    """`nodes` with the nodes that `rule` gives for each operator, bodies of loops too."""
    return in_blocks(nodes, lambda block: rewritten_block(block, rule))


def rewritten_block(nodes: Iterable[N], rule: Callable[[Any], Iterable[N]]) -> tuple[N, ...]:
    """A block with the nodes that `rule` gives for each of its operators; loops stay."""
    return tuple(
        [new for node in nodes for new in (rule(node) if isinstance(node, Leaf) else (node,))]
    )


def in_blocks(nodes: Iterable[N], rule: Callable[[tuple[N, ...]], Iterable[N]]) -> tuple[N, ...]:
    """`nodes` with each block rewritten by `rule`, the innermost first."""
    return tuple(rule(tuple([_inside(node, rule) if node.body else node for node in nodes])))


def _inside(loop: Any, rule: Callable[[Any], Iterable[Any]]) -> Any:
    body = in_blocks(loop.body, rule)
    return loop if body == loop.body else replace(loop, body=body)


# --- passes as classes ---------------------------------------------------------------------------


class Visitor:
    """A pass that does one thing with operators, another with loops."""

    def visit(self, node: Any, /, *args: Any) -> Any:
        """Do what the node's kind asks for."""
        return self.loop(node, *args) if isinstance(node, Loop) else self.op(node, *args)

    def op(self, op: Any, /, *args: Any) -> Any:
        """Visit a node without a body."""
        raise NotImplementedError

    def loop(self, loop: Any, /, *args: Any) -> Any:
        """Visit a loop; its body is the visitor's to walk."""
        raise NotImplementedError


class Rebuild(Visitor):
    """A program built anew, node by node; a pass overrides what it changes.

    `new` has the value in place of each one that has been replaced so far.
    """

    def __init__(self) -> None:
        self.new: dict[Any, Any] = {}

    def value(self, value: Any) -> Any:
        """The value in place of one."""
        return self.new.get(value, value)

    def nodes(self, nodes: Iterable[Any]) -> tuple[Any, ...]:
        """A block."""
        return tuple([new for node in nodes for new in self.visit(node)])

    def op(self, op: Any) -> Iterable[Any]:
        """The nodes in place of an operator."""
        return (self.on_new(op),)

    def loop(self, loop: Any) -> Iterable[Any]:
        """The nodes in place of a loop."""
        self.enter(loop)
        body = self.nodes(loop.body)
        body = (*body, *self.leave(loop))
        return (self.on_new(loop, body=body),)

    def enter(self, loop: Any) -> None:
        """Replace the values that an iteration begins with."""

    def leave(self, loop: Any) -> Iterable[Any]:
        """Replace the results of a loop; what it gives is added to the end of its body."""
        return ()

    def on_new(self, node: N, **fields: Any) -> N:
        """The node on new values, and with other `fields`; its origin names a new one too."""
        origin = getattr(node, "origin", None)
        if origin is not None:
            fields["origin"] = origin.on(self.value)
        return node.with_values(self.value, **fields)
