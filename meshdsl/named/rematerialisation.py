"""Rematerialisation: copies of operators and loops of the forward pass in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, advice
from meshdsl.ir.program import Carry, Collected, every
from meshdsl.ir.rewrite import Visitor
from meshdsl.named.builder import Frame
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.named.tape import Tape
from meshdsl.syntax import ast
from meshdsl.syntax.enclosing import enclosing, unwrapped

Read = Callable[[Value], Value]
"""Maps a value of the forward pass to its replacement in the backward pass."""


def without_effect(program: NamedProgram) -> Iterator[Diagnostic]:
    """MD0144 for each `recompute` block of which nothing that is kept would be kept without it.

    A value that is computed again saves nothing where it is kept all the same.
    """
    nodes = list(every(program.body))
    blocks: dict[int, list[Node]] = {}
    for node in nodes:
        if node.block is not None:
            blocks.setdefault(node.block, []).append(node)
    if not blocks or not any(node.phase == "backward" for node in nodes):
        return
    read = {v for n in nodes if n.phase == "backward" for v in (*n.reads, *n.ends)}
    read |= {c.inside for n in nodes for c in n.collected if c.outer in read}
    spared = _spared(nodes, read)
    for block in blocks.values():
        values = {v for node in block for v in node.makes}
        if not values.isdisjoint(spared):
            continue
        labels = sorted({f"`{v.label}`" for v in values & read if v.name})
        why = "the backward pass reads none of its values"
        help = "remove the block"
        if not values.isdisjoint(read):
            which = " and ".join(labels) or "what the backward pass reads of it"
            why = f"{which} {'are' if len(labels) > 1 else 'is'} kept for statements further on"
            help = "put these statements into the block, or remove the block"
        message = f"this `recompute` block changes nothing: {why}"
        written = enclosing(block[0].span, ast.Recompute)
        fixes = () if written is None else (unwrapped(written),)
        other = "or put these statements into the block" if "put" in help else None
        help = advice(fixes, other) or help
        yield Diagnostic("MD0144", message, block[0].span, "note", help=help, fixes=fixes)


def _spared(nodes: list[Node], read: Set[Value]) -> set[Value]:
    """The first results of what is computed again for gradients, and not kept all the same."""
    copies = {n: n.origin.of for n in nodes if n.origin is not None and n.origin.is_copy}
    gradients = (n for n in nodes if n.phase == "backward" and n not in copies)
    needed = {v for node in gradients for v in (*node.reads, *node.ends)}
    again = {n: of for n, of in copies.items() if not needed.isdisjoint(n.makes)}
    return {of for n, of in again.items() if n.body or of not in read}


def copied(tape: Tape, node: Node, read: Read) -> dict[Value, Value]:
    """Emit a copy of a node at the end of the current block; the new value of each of its results.

    The copy reads what `read` gives for the values of the original, and is bound by its rules.
    """
    copies: dict[Value, Value] = _Copies(tape, read).visit(node)
    return copies


class _Copies(Visitor):
    def __init__(self, tape: Tape, read: Read) -> None:
        self.tape, self.builder, self.read = tape, tape.builder, read

    def op(self, op: NamedOp) -> dict[Value, Value]:
        ins = tuple(map(self.read, op.ins))
        self.tape.emitter(op.outs[0]).apply(op.name, ins, dict(op.attrs))
        outs = tuple(_copy(self.tape, value) for value in op.outs)
        body = self.builder.frames[-1].body
        last = body[-1]
        assert isinstance(last, NamedOp)
        body[-1] = replace(last, outs=outs, origin=self.tape.origin(op.outs[0], is_copy=True))
        return dict(zip(op.outs, outs, strict=True))

    def loop(self, loop: NamedLoop) -> dict[Value, Value]:
        return _LoopCopy(self.tape, loop, self.read).emit()


def _copy(tape: Tape, value: Value) -> Value:
    """A new value under the same rules, made in the current block."""
    copy = value.alike()
    tape.builder.originals[copy] = tape.builder.originals.get(value, value)
    tape.builder.place(copy, len(tape.builder.frames) - 1)
    return copy


class _LoopCopy:
    """One loop being copied."""

    def __init__(self, tape: Tape, loop: NamedLoop, read: Read) -> None:
        self.tape, self.builder, self.loop, self.read = tape, tape.builder, loop, read
        self.slices = {s.inside: s.outer for s in loop.stacked}
        self.new: dict[Value, Value] = {}
        self.depth = len(tape.builder.frames)

    def emit(self) -> dict[Value, Value]:
        """Emit the copy; the results of the original, mapped to those of the copy."""
        loop = self.loop
        inits = [self.read(c.init) for c in loop.carries]
        self.builder.frames.append(Frame(loop.dim))
        self.new = {c.inside: _copy(self.tape, c.inside) for c in loop.carries}
        for node in loop.body:
            self.new.update(copied(self.tape, node, self.look))
        nexts = [self.look(c.next) for c in loop.carries]
        collected = [self.look(c.inside) for c in loop.collected]
        frame = self.builder.frames.pop()
        results = {value: _copy(self.tape, value) for value in loop.makes}
        carries = tuple(
            Carry(init, self.new[c.inside], next_, results[c.result])
            for c, init, next_ in zip(loop.carries, inits, nexts, strict=True)
        )
        pairs = zip(collected, loop.collected, strict=True)
        copy = replace(
            loop,
            carries=carries,
            stacked=self.builder.stacks(frame),
            body=tuple(frame.body),
            collected=tuple(Collected(inside, results[c.outer]) for inside, c in pairs),
            phase=self.builder.phase,
            block=None,
            origin=self.tape.origin(loop.makes[0], is_copy=True),
        )
        self.builder.frames[-1].body.append(copy)
        self.tape.twins[loop] = copy
        self.tape.again.update(self.new)
        return results

    def look(self, value: Value) -> Value:
        """The replacement of a value that the body reads."""
        if value not in self.new:
            with self.builder.at(self.depth):
                self.new[value] = self.builder.reach(self.read(self.slices.get(value, value)))
        return self.new[value]
