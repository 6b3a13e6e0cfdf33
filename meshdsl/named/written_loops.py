"""`repeat` written back: what it carries is a name that exists before and is assigned inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.ir.program import Carry
from meshdsl.ir.types import F32
from meshdsl.named.ir import Loop, Op, Value
from meshdsl.named.written_expressions import Written, marked
from meshdsl.named.written_names import is_speakable

if TYPE_CHECKING:
    from meshdsl.named.written_blocks import Block
    from meshdsl.named.written_names import Names

INDENT = "  "


def write_loop(block: Block, loop: Loop) -> None:
    """Append `repeat dim { … }` to the block, and before it the values that enter it."""
    from meshdsl.named.written_blocks import Block

    names = block.names
    carried = _enter(block, loop)
    inner = names.enter(loop.dim, carried.values())
    for carry, name in carried.items():
        inner.put(carry.inside, name)
    nexts = [c.next for c in loop.carries]
    enclosing = loop.block if loop.block is not None else block.block
    body = Block(
        block.writer,
        inner,
        loop.body,
        nexts,
        loops=(*block.loops, loop),
        block=enclosing,
        transposes=True,
    )
    body.write()
    _carry_on(body, [carried[c] for c in loop.carries])
    for carry, name in carried.items():
        names.put(carry.result, name)
    lines = [INDENT + line for line in body.lines()]
    block.say(f"repeat {marked(loop.dim)} {{", *lines, "}")


def carried_name(carry: Carry[Value], loop: Loop, names: Names) -> str:
    """The name that a loop assigns to carry this value."""
    made = {v: op for op in loop.body if isinstance(op, Op) for v in op.outs}
    op = made.get(carry.next)
    copied = op.ins[0] if op is not None and op.name == "transpose" else carry.next
    for value in (carry.next, copied, carry.result, carry.init):
        if names.has(value) and is_speakable(value.label):
            return value.label
    return "x"


def _enter(block: Block, loop: Loop) -> dict[Carry[Value], str]:
    """The names of what the loop carries, each assigned before it if it does not exist."""
    start = block.names.lives.start[loop]
    inits = [c.init for c in loop.carries]
    written = [_typed(w, v) for w, v in zip(block.operands(inits), inits, strict=True)]
    block.flush()
    waiting, block.waiting = block.waiting, frozenset()
    found: dict[Carry[Value], str] = {}
    for carry, text in zip(loop.carries, written, strict=True):
        found[carry] = _entering(block, carry, carried_name(carry, loop, block.names), text, start)
    block.waiting = waiting
    return found


def _typed(written: Written, init: Value) -> Written:
    """A number that enters a loop is an f32 unless it is cast."""
    is_number = written.text.lstrip("-")[:1].isdecimal()
    if not is_number or init.type.dtype == F32:
        return written
    return Written(f"cast({written.text}, {init.type.dtype})")


def _entering(block: Block, carry: Carry[Value], wanted: str, written: Written, start: int) -> str:
    names = block.names
    is_own = names.meaning.get(wanted) is carry.init and written.text == wanted
    if is_own and names.lives.last[carry.init] <= start:
        return wanted
    # At this point nothing that enters the loop may lose its name.
    name = names.bind(carry.inside, wanted, start - 1)
    block.say(f"{name} = {written.text}")
    return name


def _carry_on(body: Block, wanted: list[str]) -> None:
    """Assign at the end what has another name than the loop carries it by."""
    names = body.names
    written = body.operands(body.finals)
    body.flush()
    body.waiting = frozenset()
    wrong = [
        (name, text.text)
        for name, text, value in zip(wanted, written, body.finals, strict=True)
        if text.text != name or names.meaning.get(name) is not value
    ]
    if len(wrong) > 1:
        wrong = [(name, body.copied(text)) for name, text in wrong]
    for name, text in wrong:
        body.say(f"{name} = {text}")
