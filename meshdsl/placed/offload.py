"""`state: memory = disk`, `params: memory = host`: what is stored in another memory between steps.

Around the update of each parameter a device reads its states in chunks and writes them back. So
only an update that goes element by element can have its states there: what reads a whole one, as
the factors of Adafactor, is refused. (ZeRO-Infinity, Rajbhandari et al. 2021.)

Parameters that are stored there are loaded for each use (`storage.py`), slices of a loop one
iteration ahead (`device/overlap.py`). Their update writes them in the chunks of its states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Related, fail
from meshdsl.ir.program import every
from meshdsl.named.ir import NamedOp, NamedProgram, Param, Value
from meshdsl.ops.opdef import lookup
from meshdsl.placed.layout import Layout
from meshdsl.placed.settings import Setting

MEMORY = "memory"
"""The name of the settings."""


def with_tiers(program: NamedProgram, layout: Layout) -> NamedProgram:
    """The program with the parameters and states marked that a layout stores elsewhere.

    The counter of steps stays in memory. Raises MD0317 where there is none, or one cannot.
    """
    return _with_params_away(_with_states_away(program, layout), layout)


def _with_states_away(program: NamedProgram, layout: Layout) -> NamedProgram:
    setting = layout.setting("state", MEMORY)
    if setting is None or not program.states:
        return program
    away = [s.value for s in program.states if s.of is not None]
    if not away:
        _refuse_states(program, setting, "the optimizer keeps no state of a parameter")
    undivided = next((v for v in away if not _is_in_chunks(v, program)), None)
    if undivided is not None:
        _refuse_states(program, setting, f"the update reads `{undivided.name}` as a whole")
    states = tuple(
        replace(s, away=setting.value if s.value in away else "") for s in program.states
    )
    return replace(program, states=states)


def _with_params_away(program: NamedProgram, layout: Layout) -> NamedProgram:
    setting = layout.setting("params", MEMORY)
    if setting is None:
        return program
    if layout.schedule is not None or layout.cuts:
        _refuse(setting, "the stages of a pipeline keep their parameters in memory", NO_STAGES)
    updated = {u.old for u in program.updates}
    for param in program.params:
        if param.value in updated:
            _check_update(program, layout, setting, param)
    params = tuple(replace(p, away=setting.value) for p in program.params)
    return replace(program, params=params)


def refuse_module(layout: Layout) -> None:
    """Raise MD0317: the parameters of a module are torch's, in the memory of the device."""
    setting = layout.setting("params", MEMORY)
    if setting is not None:
        why = "the parameters of a module are those of torch, in memory"
        _refuse(setting, why, "leave the setting out, or train with `meshdsl train`")


NO_STAGES = "leave the setting out, or the schedule and the stages"


def _check_update(program: NamedProgram, layout: Layout, setting: Setting, param: Param) -> None:
    """Raise MD0317 unless the update of a parameter writes it in the chunks of its states."""
    value, name = param.value, param.value.name
    states = [s for s in program.states if s.of is value]
    for state in states:
        if state.away != setting.value:
            why = f"states of `{name}` are stored in another memory than the parameter"
            _refuse(setting, why, f"add `state: memory = {setting.value}`")
        ends = (layout.bind(v, stored=True).placement(layout.mesh) for v in (value, state.value))
        if len(set(ends)) > 1:
            why = f"`{name}` is split otherwise than its state `{state.value.name}`"
            _refuse(setting, why, "give `params:` and `state:` the same rules")
    if not any(s.is_copy for s in states) and not _is_in_chunks(value, program):
        goal = program.goal
        where = goal.span if goal is not None else value.span
        help = "leave the setting out, or take `sgd`, `momentum`, `adam` or `adamw`: "
        help += "their updates go element by element"
        related = Related(where, "the update is chosen here")
        _refuse(setting, f"the update reads `{name}` as a whole", help, related)


def _is_in_chunks(value: Value, program: NamedProgram) -> bool:
    """Whether one update alone reads it, element by element, and overwrites it."""
    readers = tuple(_updates_of(program, value))
    if len(readers) != 1:
        return False
    (op,) = readers
    over = lookup(op.name).overwrites
    # All but the gradient are numbers.
    others = (v for i, v in enumerate(op.ins) if i != 1 and i not in over)
    return op.ins.index(value) in over and not any(v.type.dims for v in others)


def _updates_of(program: NamedProgram, value: Value) -> Iterator[NamedOp]:
    """What reads a state, or a parameter in its update."""
    nodes = (n for n in every(program.body) if isinstance(n, NamedOp) and value in n.ins)
    return (n for n in nodes if value.role != "param" or n.phase == "update")


def _refuse(setting: Setting, why: str, help: str, *related: Related) -> NoReturn:
    fail("MD0317", f"`{setting}`: {why}", setting.span, *related, help=help)


def _refuse_states(program: NamedProgram, setting: Setting, why: str) -> None:
    goal = program.goal
    assert goal is not None, "only an optimizer has states"
    help = "leave the setting out, or take `momentum`, `adam` or `adamw` without `compress`: "
    help += "their updates go element by element"
    _refuse(setting, why, help, Related(goal.span, "the optimizer is chosen here"))
