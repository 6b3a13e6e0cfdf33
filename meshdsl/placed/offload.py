"""`state: memory = disk`, or `host`: where the states of an optimizer lie between steps.

Around the update of each parameter a device reads its states in chunks and writes them back. So
only an update that goes element by element can have its states there: what reads a whole one, as
the factors of Adafactor, is refused. (ZeRO-Infinity, Rajbhandari et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.diagnostics import Related, fail
from meshdsl.ir.program import every
from meshdsl.named.ir import NamedOp, NamedProgram, Value
from meshdsl.ops.opdef import lookup
from meshdsl.placed.layout import Layout
from meshdsl.placed.settings import Setting


def with_states_away(program: NamedProgram, layout: Layout) -> NamedProgram:
    """The program with the states marked that lie elsewhere, where the layout has them there.

    The counter of steps stays in memory. Raises MD0317 where there is none, or one cannot.
    """
    setting = layout.setting("state", "memory")
    if setting is None or not program.states:
        return program
    away = [s.value for s in program.states if s.of is not None]
    if not away:
        _refuse(program, setting, "the optimizer keeps no state of a parameter")
    readers = {value: tuple(_readers(program, value)) for value in away}
    undivided = next((v for v in away if not _is_in_chunks(v, readers[v])), None)
    if undivided is not None:
        _refuse(program, setting, f"the update reads `{undivided.name}` as a whole")
    states = tuple(
        replace(s, away=setting.value if s.value in away else "") for s in program.states
    )
    return replace(program, states=states)


def _readers(program: NamedProgram, value: Value) -> Iterator[NamedOp]:
    return (n for n in every(program.body) if isinstance(n, NamedOp) and value in n.ins)


def _is_in_chunks(state: Value, readers: tuple[NamedOp, ...]) -> bool:
    """Whether a state is read by one update alone, which overwrites it."""
    if len(readers) != 1:
        return False
    (op,) = readers
    over = lookup(op.name).overwrites
    # All but the gradient are numbers.
    others = (v for i, v in enumerate(op.ins) if i != 1 and i not in over)
    return op.ins.index(state) in over and not any(v.type.dims for v in others)


def _refuse(program: NamedProgram, setting: Setting, why: str) -> None:
    goal = program.goal
    assert goal is not None, "only an optimizer has states"
    help = "leave the setting out, or take `momentum`, `adam` or `adamw` without `compress`: "
    help += "their updates go element by element"
    where = Related(goal.span, "the optimizer is chosen here")
    fail("MD0317", f"`{setting}`: {why}", setting.span, where, help=help)
