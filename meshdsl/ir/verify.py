"""The rules for a program of any stage: values are made once, before they are read.

A violation is our mistake, hence an assert with a message. A stage adds rules of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from meshdsl.ir.program import Loop, kind_of
from meshdsl.ir.rewrite import Visitor

V = TypeVar("V")


class Verifier(Visitor, Generic[V]):
    """Walks a program in order; `known` are the values defined so far, and `made` all of them.

    Those are values of the named program, also of loops that have ended: origins may name them.
    """

    def __init__(self) -> None:
        self.known: set[V] = set()
        self.made: set[Any] = set()

    # --- hooks of a stage ---------------------------------------------------------------------

    def label(self, value: V) -> str:
        """The name of a value in a message."""
        raise NotImplementedError

    def named(self, value: V) -> Any:
        """The value of the named program."""
        return value

    def check_value(self, value: V) -> None:
        """Check a value at its definition."""

    def check(self, node: Any) -> None:
        """Check a node that is no loop; its operands are known."""

    def check_loop(self, node: Any) -> None:
        """Check a loop except its body."""

    # --- common to all stages -----------------------------------------------------------------

    def define(self, values: Iterable[V]) -> None:
        """Add `values` to the known ones."""
        for value in values:
            assert value not in self.known, f"{self.label(value)} is made twice"
            self.check_value(value)
            self.known.add(value)
            self.made.add(self.named(value))

    def need(self, values: Iterable[V], who: str) -> None:
        """Assert that `values` are known."""
        for value in values:
            assert value in self.known, f"{who} reads {self.label(value)}, which is not made"

    def nodes(self, nodes: Iterable[Any]) -> None:
        """Check a block."""
        for node in nodes:
            self.visit(node)

    def check_origin(self, node: Any) -> None:
        """Check that an operator or a loop of the backward pass says what it was made for."""
        if node.origin is not None:
            of = getattr(node.origin.of, "label", "a value")
            assert node.origin.of in self.made, f"the origin {of} is not in the program"
        else:
            assert node.phase != "backward", f"an operator for {node.span} has no origin"

    def check_kind(self, op: Any) -> None:
        """Check that an operator of a kind is the one of the registry that computes that kind."""
        kind = kind_of(op)
        assert kind is None or op.name == kind.operator, f"a {kind} is no {op.name}"

    def op(self, op: Any) -> None:
        """Check a node that is no loop."""
        self.need(op.reads, getattr(op, "name", type(op).__name__))
        self.check_kind(op)
        self.check(op)
        self.define(op.makes)

    def loop(self, loop: Loop[V, Any]) -> None:
        """Check a loop; values made in its body are unknown after it."""
        who = f"repeat {loop.dim}"
        self.need(loop.reads, who)
        outside = set(self.known)
        self.define(loop.enters)
        self.check_loop(loop)
        self.nodes(loop.body)
        self.need(loop.ends, who)
        self.known = outside
        self.define(loop.makes)
