"""Forward operators done once more in the backward pass: what a `recompute` block comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshdsl.named.autodiff_call import source
from meshdsl.named.autodiff_tape import Tape
from meshdsl.named.builder import Frame
from meshdsl.named.ir import Carry, Collected, Op, Repeat, Value, results

Read = Callable[[Value], Value]
"""What stands in the backward pass for a value of the forward one."""


def copied(tape: Tape, op: Op, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """Emit a copy of `op` on `ins`; its results, bound by the same rules."""
    tape.emitter(op.outs[0]).apply(op.name, ins, dict(op.attrs))
    outs = tuple(_copy(tape, value) for value in op.outs)
    body = tape.builder.frames[-1].body
    last = body[-1]
    assert isinstance(last, Op)
    body[-1] = replace(last, outs=outs)
    return outs


def copied_loop(tape: Tape, loop: Repeat, read: Read) -> dict[Value, Value]:
    """Emit a copy of a loop; what its results are there."""
    return _Copy(tape, loop, read).made()


def _copy(tape: Tape, value: Value) -> Value:
    """A new value under the same rules, made in the current block."""
    copy = replace(value, role="activation", follows=source(value))
    tape.builder.originals[copy] = tape.builder.originals.get(value, value)
    tape.builder.place(copy, len(tape.builder.frames) - 1)
    return copy


class _Copy:
    """One loop being copied."""

    def __init__(self, tape: Tape, loop: Repeat, read: Read) -> None:
        self.tape, self.builder, self.loop, self.read = tape, tape.builder, loop, read
        self.slices = {s.inside: s.outer for s in loop.stacked}
        self.new: dict[Value, Value] = {}
        self.depth = len(tape.builder.frames)

    def made(self) -> dict[Value, Value]:
        """The results of the original and those of the copy."""
        loop = self.loop
        inits = [self.read(c.init) for c in loop.carries]
        self.builder.frames.append(Frame(loop.dim))
        self.new = {c.inside: _copy(self.tape, c.inside) for c in loop.carries}
        for node in loop.body:
            if isinstance(node, Repeat):
                self.new.update(copied_loop(self.tape, node, self.look))
            else:
                outs = copied(self.tape, node, tuple(map(self.look, node.ins)))
                self.new.update(zip(node.outs, outs, strict=True))
        nexts = [self.look(c.next) for c in loop.carries]
        kept = [self.look(c.inside) for c in loop.collected]
        frame = self.builder.frames.pop()
        made = {value: _copy(self.tape, value) for value in results(loop)}
        carries = tuple(
            Carry(init, self.new[c.inside], next_, made[c.result])
            for c, init, next_ in zip(loop.carries, inits, nexts, strict=True)
        )
        pairs = zip(kept, loop.collected, strict=True)
        copy = replace(
            loop,
            carries=carries,
            stacked=self.builder.stacks(frame),
            body=tuple(frame.body),
            collected=tuple(Collected(inside, made[c.outer]) for inside, c in pairs),
            phase=self.builder.phase,
            block=None,
        )
        self.builder.frames[-1].body.append(copy)
        self.tape.twins[loop] = copy
        self.tape.again.update(self.new)
        return made

    def look(self, value: Value) -> Value:
        """What stands for a value that the body reads."""
        if value not in self.new:
            with self.builder.at(self.depth):
                self.new[value] = self.builder.reach(self.read(self.slices.get(value, value)))
        return self.new[value]
