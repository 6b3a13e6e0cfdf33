"""What is legal in a program of any stage: values are made once, before they are read.

A violation is our mistake, hence an assert with a message. A stage adds what is legal in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from meshdsl.ir.program import Loop

V = TypeVar("V")


class Verifier(Generic[V]):
    """Walks a program in order; `known` are the values that are there."""

    def __init__(self) -> None:
        self.known: set[V] = set()

    # --- what a stage says --------------------------------------------------------------------

    def label(self, value: V) -> str:
        """How a value is called in a message."""
        raise NotImplementedError

    def check_value(self, value: V) -> None:
        """What is legal for a value where it is made."""

    def check(self, node: Any) -> None:
        """What is legal for a node that is no loop; what it reads is there."""

    def check_loop(self, node: Any) -> None:
        """What is legal for a loop beside its body."""

    # --- what is the same everywhere ----------------------------------------------------------

    def define(self, values: Iterable[V]) -> None:
        """`values` are there from here on."""
        for value in values:
            assert value not in self.known, f"{self.label(value)} is made twice"
            self.check_value(value)
            self.known.add(value)

    def need(self, values: Iterable[V], who: str) -> None:
        """`values` must be there."""
        for value in values:
            assert value in self.known, f"{who} reads {self.label(value)}, which is not made"

    def nodes(self, nodes: Iterable[Any]) -> None:
        """Check a block."""
        for node in nodes:
            if isinstance(node, Loop):
                self.loop(node)
            else:
                self.node(node)

    def node(self, node: Any) -> None:
        """Check a node that is no loop."""
        self.need(node.reads, getattr(node, "name", type(node).__name__))
        self.check(node)
        self.define(node.makes)

    def loop(self, node: Loop[V, Any]) -> None:
        """Check a loop; what its body makes is not there after it."""
        who = f"repeat {node.dim}"
        self.need(node.reads, who)
        outside = set(self.known)
        self.define(node.enters)
        self.check_loop(node)
        self.nodes(node.body)
        self.need(node.ends, who)
        self.known = outside
        self.define(node.makes)
