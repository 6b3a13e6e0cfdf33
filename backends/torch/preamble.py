"""The top of the emitted program (comments, imports, tables), and its support library."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.torch.inliner import Pasted
from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, quoted, statement
from meshdsl.backends.torch.state_table import StateRow, state_table
from meshdsl.device.ir import (
    Bucket,
    DeviceProgram,
    Move,
    Pipeline,
    StagePhase,
    Stages,
    Var,
    walk,
)
from meshdsl.device.stored_blocks import lying
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.named.training_step import loss_name
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.schedule.table import row_text
from meshdsl.version import __version__

Draws = Mapping[Value, tuple[object, ...]]
PROVIDED = ("import numpy as np", "import torch", "import torch.distributed as dist")


class HeadName(StrEnum):
    """The names that the top of a text assigns; nothing else is assigned there."""

    MESH = "MESH"
    GROUPS = "GROUPS"
    INPUTS = "INPUTS"
    PARAMS = "PARAMS"
    STATES = "STATES"
    OUTPUTS = "OUTPUTS"
    LOSS = "LOSS"
    NORM = "NORM"
    ASSIGNED = "ASSIGNED"
    SCHEDULE = "SCHEDULE"
    COTANGENTS = "COTANGENTS"
    PARAM_GRADS = "PARAM_GRADS"
    INPUT_GRADS = "INPUT_GRADS"


RUNTIME = f"# {' the runtime: functions that the program calls ':-^98}"
"""The line between the program and the functions it calls."""


def head(program: DeviceProgram, draws: Draws, bare: bool = False) -> list[str]:
    """The lines above the function `device`, the two blank ones before it included."""
    tables = [
        *_table(HeadName.INPUTS, [(v.value.label, v) for v in program.inputs], draws, program),
        *_table(HeadName.PARAMS, [(p.value.name or "", p) for p in program.params], draws, program),
        *_states(program, draws),
        *_table(HeadName.OUTPUTS, list(program.outputs), {}, program),
        *_loss(program),
        *_assigned(program),
        *_schedule(program),
    ]
    about = _about(program, bare)
    if bare:
        schedule = _schedule(program)
        return [*about, *([""] if schedule else []), *schedule, "", ""]
    return _top(program, about, tables)


def module_head(
    program: DeviceProgram,
    draws: Draws,
    named: Mapping[HeadName, list[tuple[str, Var]]],
) -> list[str]:
    """The lines above the functions of a module; `named` are its tables of variables."""
    source = program.placed
    of = (_table(name, items, draws, program) for name, items in named.items())
    tables = [line for lines in of for line in lines]
    about = [
        f"# {inert(source.named.span.file)}, program {source.named.name}: its forward and backward "
        f"pass on each of {program.mesh.devices} devices.",
        _placed(program),
        f"# made by meshdsl {__version__}",
    ]
    return _top(program, about, tables)


def foot(pasted: Pasted, call: str = "") -> list[str]:
    """The lines below the functions of a program: the support library, and the starting `call`."""
    texts = list(pasted.texts)
    if texts and pasted.imports:
        blank = "" if texts[0].startswith(("def ", "class ", "@")) else "\n"
        texts = ["\n".join(pasted.imports) + blank, *texts]
    run = ["", "", 'if __name__ == "__main__":', INDENT + call] if call else []
    return ["", "", RUNTIME, *_spaced(texts), *run] if texts else run


def _top(program: DeviceProgram, about: Iterable[str], tables: list[str]) -> list[str]:
    """Comments, imports and tables."""
    mesh = _dict((a, str(n)) for a, n in program.mesh.axes)
    groups = _tuple(_strings(axes) for axes in _groups(program))
    tables = [*_set(HeadName.MESH, mesh), *_set(HeadName.GROUPS, groups), *tables]
    return [*about, "", *PROVIDED, "", *tables, "", ""]


def _about(program: DeviceProgram, bare: bool) -> Iterator[str]:
    """The comments at the top; not a docstring, which a quote in a file name could end."""
    source, devices = program.placed, program.mesh.devices
    file = inert(source.named.span.file)
    yield f"# {file}, program {source.named.name}: what each of {devices} devices does."
    yield _placed(program)
    yield (
        "# This is for reading: `meshdsl compile` without --bare writes a program that runs."
        if bare
        else f"# torchrun --nproc-per-node {devices} THIS_FILE "
        "[--inputs F] [--params F] [--seed S] [--out F.npz]"
    )
    yield f"# made by meshdsl {__version__}"


def _placed(program: DeviceProgram) -> str:
    source, mesh = program.placed, program.mesh
    axes = ", ".join(f"{a}: {n}" for a, n in mesh.declared)
    name = f"{inert(mesh.name)} " if mesh.name.isidentifier() else ""
    where = f"{name}{{ {axes} }}" if axes else "one device"
    return f"# mesh {where}, layout {inert(source.layout)}, partial values reduced: {source.policy}"


def _spaced(parts: list[str]) -> Iterator[str]:
    """Top-level statements, two blank lines around every definition."""
    before = True
    for text in parts:
        defines = "\ndef " in f"\n{text}" or "\nclass " in f"\n{text}"
        if before or defines:
            yield from ("", "")
        before = defines
        yield from text.split("\n")


def _groups(program: DeviceProgram) -> list[tuple[str, ...]]:
    """The sets of mesh axes that collectives run over."""
    steps = {node.step for node, _ in walk(program.body) if isinstance(node, Move | Bucket)}
    pipes = [node for node in program.body if isinstance(node, Pipeline)]
    ways = (groups for node in pipes if node.node_stages for *_, groups in messages(node))
    cut = dict.fromkeys(itertools.chain.from_iterable(ways))
    lines = [
        (line_group(node.axis, part, number, back),)
        for node in pipes
        if not node.node_stages
        for part in node.staged
        for number in range(len(node.loop(part).carries))
        for back in ((False, True) if goes_back(node) else (False,))
    ]
    moved = [step for step in steps if step.moves and not step.tier and step.kind != "send"]
    axes = {program.mesh.written(step.axes) for step in moved}
    return [*sorted(axes), *lines, *((group,) for group in cut)]


def messages(node: Pipeline) -> Iterator[tuple[Move, Stages, tuple[str, ...]]]:
    """The messages of a network that is cut: their stages, and the groups of the line of each.

    Between two devices each has a group of its own; other devices may use it as well. Where
    micro-batches go both ways, the second group is that of those which go `back`.
    """
    taken: Counter[tuple[str, int, int]] = Counter()
    device_of = node.known.device_of
    for move, part, ends in node.places:
        if not (part.sends and isinstance(move, Move)):
            continue
        is_forward = part is StagePhase.SENT
        kind = StagePhase.LOOP if is_forward else StagePhase.LOOP_BACKWARD
        ways = {tuple(device_of[m, stage] for stage in ends) for m in range(node.dim.size)}
        backs = {(s, t): (t > s) != is_forward and s != t for s, t in ways}
        keys = [(line_group(node.axis, kind, 0, back), *way) for way, back in backs.items()]
        number = max(taken[key] for key in keys)
        taken |= dict.fromkeys(keys, number + 1)
        groups = (line_group(node.axis, kind, number, back) for back in sorted({*backs.values()}))
        yield move, ends, tuple(groups)


def line_group(axis: str, part: StagePhase, number: int, back: bool = False) -> str:
    """The name of the process groups of a line, which are its own.

    Where devices have several stages, some of it goes `back` to a device before the stage's own.
    """
    direction = "backward" if part is StagePhase.LOOP_BACKWARD else "forward"
    return f"{axis}:{direction}" + (f":{number}" if number else "") + (":back" if back else "")


def pairs_text(name: str) -> str:
    """Text of the process groups of a line."""
    return f"pairs_of(groups, {quoted(name)})"


def goes_back(node: Pipeline) -> bool:
    """Whether a stage is on a device before that of the stage before it."""
    device_of = node.known.device_of
    follow = ((device_of[m, s], device_of.get((m, s + 1))) for m, s in device_of)
    return any(other is not None and one > other for one, other in follow)


def _states(program: DeviceProgram, draws: Draws) -> list[str]:
    """The table of optimizer states; a copy of a parameter is drawn under the parameter's name.

    The only state of no parameter counts the steps.
    """
    if not program.updates:
        return []
    states = {s.value: s for s in program.placed.named.states}
    table = []
    for var in program.states:
        state = states[var.value]
        draw: tuple[object, ...] | None = ("zeros",) if state.of is not None else ("steps",)
        copied = state.of if state.is_copy else None
        if copied is not None:
            draw = draws.get(copied)
        text = _spec(var, draw, program, copied.name if copied else None)
        param = state.of.name if state.of is not None else ""
        table.append(StateRow(var.value.name or "", text, param or ""))
    params = {p.value.name or "": _spec(p, ("zeros",), program) for p in program.params}
    return state_table(table, params, lambda items: _rows(HeadName.STATES, items))


def _loss(program: DeviceProgram) -> list[str]:
    """The names of the output that is minimised, and of the measured norm of the gradient."""
    goal = program.placed.named.goal
    if goal is None:
        return []
    norm = _set(HeadName.NORM, quoted(goal.norm)) if goal.norm else []
    return [*_set(HeadName.LOSS, quoted(loss_name(program.placed.named))), *norm]


def assigned(program: DeviceProgram) -> tuple[str, ...]:
    """The parameters that a program without an optimizer assigns (`:=`)."""
    if program.placed.named.goal is not None:
        return ()
    return tuple(old.value.name or "" for old, _ in program.updates if old in program.params)


def _assigned(program: DeviceProgram) -> list[str]:
    names = assigned(program)
    return _set(HeadName.ASSIGNED, _strings(names)) if names else []


def _schedule(program: DeviceProgram) -> list[str]:
    """The order in which each stage of a pipeline does its passes."""
    table = next((node.table for node in program.body if isinstance(node, Pipeline)), None)
    if table is None:
        return []
    schedule = table.schedule
    about = f"{schedule.name}, {schedule.stages} stages, {schedule.micro} micro-batches"
    rows = (f"{INDENT}{quoted(row_text(n, row))}," for n, row in enumerate(schedule.rows))
    return [f"{HeadName.SCHEDULE} = (  # {about}", *rows, ")"]


def _set(name: HeadName, text: str) -> list[str]:
    return statement(f"{name} = {text}")


# --- tables ------------------------------------------------------------------------------------


def _table(
    name: HeadName, items: list[tuple[str, Var]], draws: Draws, program: DeviceProgram
) -> list[str]:
    """A dict of `Spec`s of variables."""
    return _rows(name, [(key, _spec(var, draws.get(var.value), program)) for key, var in items])


def _rows(name: HeadName, items: Sequence[tuple[str, str]]) -> list[str]:
    """A dict of texts, one entry a line."""
    if not items:
        return [f"{name} = {{}}"]
    rows = (line for key, text in items for line in _row(f"{INDENT}{quoted(key)}: {text},"))
    return [f"{name} = {{", *rows, "}"]


def _row(line: str) -> list[str]:
    """An entry on one line where it fits; else its text as two."""
    first, equals, value = line.rpartition(" = ")
    if len(line) <= WIDTH or not equals:
        return [line]
    return [f'{first}"', f'{INDENT}"{equals}{value}']


def _spec(
    var: Var,
    draw: tuple[object, ...] | None,
    program: DeviceProgram,
    under: str | None = None,
) -> str:
    """The text of a variable's `Spec`, the same for all devices."""
    type_, (split, blocks) = var.value.type, lying(var, program)
    dims, parts = {dim.name: dim.size for dim in type_.dims}, var.placement.partial
    about = (dims, split, draw, under or "", parts, blocks, var.away)
    return quoted(spec_text(Spec(str(type_.dtype), *about)))


def spec_text(spec: Spec) -> str:
    """`f32[vocab=512@tp, model=256] = normal(0.02)`, which `spec_of` of the runtime reads."""
    axes = {dim: f"@{'+'.join(axes)}" for dim, axes in spec.split.items()}
    lying = {dim: f":{'|'.join(map(_indices, each))}" for dim, each in (spec.blocks or {}).items()}
    each = (f"{d}={n}{lying.get(d, '')}{axes.get(d, '')}" for d, n in spec.dims.items())
    dims = ", ".join(each)
    how, *numbers = spec.draw or ("",)
    drawn = f" = {how}({', '.join(map(repr, numbers))})" if how else ""
    parts = f" over {' '.join(spec.parts)}" if spec.parts else ""
    parts += f" on {spec.away}" if spec.away else ""
    return f"{spec.dtype}[{dims}]{parts}{drawn}{f' as {spec.key}' if spec.key else ''}"


def _indices(indices: Iterable[int]) -> str:
    """`0.2.3` and `0-3.8-11`, which `spec_of` of the runtime reads."""
    runs = itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    return ".".join(_run([index for _, index in run]) for _, run in runs)


def _run(indices: list[int]) -> str:
    """Indices that follow one another."""
    first, *_, last = indices[0], *indices
    return f"{first}-{last}" if len(indices) > 2 else ".".join(map(str, indices))


def _dict(items: Iterator[tuple[str, str]]) -> str:
    """A dict of texts by strings."""
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in items) + "}"


def _strings(items: tuple[str, ...]) -> str:
    return _tuple(map(quoted, items))


def _tuple(items: Iterator[str]) -> str:
    found = list(items)
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


# --- comments ----------------------------------------------------------------------------------


def type_text(type_: TensorType, placement: Placement, mesh: Mesh | None = None) -> str:
    """The text of a type with its splits, as `f32[batch@rows, io]`, and its partial axes."""
    return f"{type_.dtype}{placement.show(type_, mesh)}"


def inert(text: str) -> str:
    """`text` for a comment: one line, control and format characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
