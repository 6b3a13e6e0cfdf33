"""`state: memory = disk`, `params: memory = host`: what is stored in another memory between steps.

Around the update of each parameter a device reads its states in chunks and writes them back. So
only an update that goes element by element can have its states there: what reads a whole one, as
the factors of Adafactor, is refused. (ZeRO-Infinity, Rajbhandari et al. 2021.)

Parameters that are stored there are loaded for each use (`storage.py`), slices of a loop one
iteration ahead (`device/overlap.py`). What loops keep for the backward pass may be stored there
(`device/offloaded_activations.py`). An update writes parameters in the chunks of its states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Diagnostic, Related, advice, fail
from meshdsl.ir.program import Collected, every, loops, uses
from meshdsl.named.ir import NamedOp, NamedProgram, Param, Value
from meshdsl.named.selectors import TENSOR, selected, selects
from meshdsl.ops.opdef import lookup
from meshdsl.placed.ir import PlacedLoop, PlacedProgram, PlacedTensor
from meshdsl.placed.layout import Layout
from meshdsl.placed.settings import Setting
from meshdsl.syntax.edits import removal
from meshdsl.syntax.symbols import ACTIVATIONS

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
        _refuse_states(program, setting, f"the update reads all of `{undivided.name}` at once")
    states = tuple(
        replace(s, away=setting.value if s.value in away else "") for s in program.states
    )
    return replace(program, states=states)


def _with_params_away(program: NamedProgram, layout: Layout) -> NamedProgram:
    settings = {param: _setting_of(param.value, layout) for param in program.params}
    away = {param: setting for param, setting in settings.items() if setting is not None}
    if not away:
        return program
    updated = {u.old for u in program.updates}
    first = next(iter(away.values()))
    for param, setting in away.items():
        if layout.schedule is not None or layout.cuts:
            _refuse(setting, "the stages of a pipeline keep their parameters in memory", NO_STAGES)
        if setting.value != first.value:
            why = f"a device has one other memory for what it stores, by `{first}`"
            _refuse(setting, why, f"write `{setting.selector}: memory = {first.value}`")
        if param.value in updated:
            _check_update(program, layout, setting, param)
    params = tuple(replace(p, away=away[p].value) if p in away else p for p in program.params)
    return replace(program, params=params)


def _setting_of(param: Value, layout: Layout) -> Setting | None:
    """The setting of a parameter: of its own name, or that of all."""
    named = (s for s in layout.settings if s.name == MEMORY and selects(s.path, param) == TENSOR)
    by_name = [s for s in named if not s.is_of_kind]
    return by_name[-1] if by_name else layout.setting("params", MEMORY)


def kept_away(program: PlacedProgram, layout: Layout) -> PlacedProgram:
    """The program with the memories of what its loops keep for the backward pass.

    Raises MD0317 for the stages of a pipeline, which keep it in memory.
    """
    settings = [s for s in layout.settings if s.name == MEMORY and s.selector not in STORED]
    if not settings:
        return program
    values = {c.inside.value for c in _kept(program)}
    chosen = {value: layout.setting_for(value, MEMORY) for value in values}
    offloaded = {value: setting for value, setting in chosen.items() if setting is not None}
    if program.pipe is not None and offloaded:
        setting = next(iter(offloaded.values()))
        _refuse(setting, "the stages of a pipeline keep what they compute in memory", NO_STAGES)
    return replace(program, kept={value: setting.value for value, setting in offloaded.items()})


STORED = ("params", "state")
"""The selectors of what is stored between steps."""


def without_effect(program: PlacedProgram, layout: Layout) -> Iterator[Diagnostic]:
    """A note for each setting of activations, or by name, for which nothing is stored elsewhere.

    `lint` tells what names no tensor of the program.
    """
    settings = [s for s in layout.settings if s.name == MEMORY and s.selector not in STORED]
    names = {v for t in program.tensors for v in (t.value, t.value.source)}
    for setting in settings:
        path, of_all = setting.path, setting.selector == ACTIVATIONS
        is_kept = any(of_all or selected(path, value) is not None for value in program.kept)
        is_param = any(selects(path, p.value) == TENSOR for p in program.named.params)
        is_known = of_all or any(selected(path, value) is not None for value in names)
        if is_kept or is_param or not is_known:
            continue
        which = "an activation" if of_all else f"`{setting.selector}`"
        message = f"`{setting}` changes nothing: no loop keeps {which} for a backward pass"
        fixes = (removal(setting.span, "remove the setting"),)
        yield Diagnostic("MD0306", message, setting.span, "note", fixes=fixes)


def _kept(program: PlacedProgram) -> Iterator[Collected[PlacedTensor]]:
    """What loops of the forward pass collect for loops of the backward pass alone."""
    read = uses(program.body)
    read.update(t for _, t in (*program.outputs, *program.updates))
    sliced = Counter(
        item.outer
        for loop in loops(program.body, PlacedLoop)
        if loop.phase == "backward"
        for item in loop.stacked
    )
    for loop in loops(program.body, PlacedLoop):
        for item in loop.collected if loop.phase == "forward" else ():
            is_kept = 0 < sliced[item.outer] == read[item.outer]
            if is_kept and item.inside.value.role == "activation":
                yield item


def refuse_module(layout: Layout) -> None:
    """Raise MD0317: torch has what a module stores and keeps, in the memory of the device."""
    settings = (s for s in layout.settings if s.name == MEMORY and s.selector != "state")
    if (setting := next(settings, None)) is not None:
        why = "what a module stores and keeps is torch's, in memory"
        _refuse(setting, why, "leave the setting out, or train with `meshdsl train`")


NO_ASSIGNED = "leave the setting out, or name other parameters in place of `params`"

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
        goals = program.goal.all if program.goal is not None else ()
        if not any(value in goal.trained for goal in goals):
            _refuse(setting, f"the program assigns `{name}`, which stays in memory", NO_ASSIGNED)
        help = "leave the setting out, or take `sgd`, `momentum`, `adam` or `adamw`: "
        help += "their updates go element by element"
        related = Related(where, "the update is chosen here")
        _refuse(setting, f"the update reads all of `{name}` at once", help, related)


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
    leave = "leave the setting out"
    fixes = (removal(setting.span, leave),)
    other = help.removeprefix(leave).removeprefix(", ")
    told = advice(fixes, other if help.startswith(leave) else f"or {other}")
    fail("MD0317", f"`{setting}`: {why}", setting.span, *related, help=told, fixes=fixes)


def _refuse_states(program: NamedProgram, setting: Setting, why: str) -> None:
    goal = program.goal
    assert goal is not None, "only an optimizer has states"
    help = "leave the setting out, or take `momentum`, `adam` or `adamw` without `compress`: "
    help += "their updates go element by element"
    _refuse(setting, why, help, Related(goal.span, "the optimizer is chosen here"))
