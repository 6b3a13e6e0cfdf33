"""The top of the emitted program: what it is for, imports, tables, and the support library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from meshdsl.backends.torch.format import quoted, statement
from meshdsl.backends.torch.paste import Pasted
from meshdsl.device.ir import Bucket, Move, Program, Var, walk
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.named.training import loss_name
from meshdsl.placed.sbp import Placement
from meshdsl.version import __version__

Draws = Mapping[Value, tuple[object, ...]]
PROVIDED = ("import numpy as np", "import torch", "import torch.distributed as dist")


def head(program: Program, draws: Draws, pasted: Pasted) -> list[str]:
    """The lines above the function `device`, the two blank ones before it included."""
    tables = [
        *_table("INPUTS", [(v.value.label, v) for v in program.inputs], draws),
        *_table("PARAMS", [(p.value.name or "", p) for p in program.params], draws),
        *_states(program, draws),
        *_table("OUTPUTS", list(program.outputs), {}),
        *_loss(program),
    ]
    return _top(program, _about(program), tables, pasted)


def module_head(
    program: Program, draws: Draws, pasted: Pasted, named: Mapping[str, list[tuple[str, Var]]]
) -> list[str]:
    """The same above the functions of a module; `named` are its tables of variables."""
    tables = [line for name, items in named.items() for line in _table(name, items, draws)]
    source = program.placed
    about = [
        f"# {inert(source.named.span.file)}, program {source.named.name}: its forward and backward "
        f"pass on each of {program.mesh.devices} devices.",
        _placed(program),
        f"# made by meshdsl {__version__}",
    ]
    return _top(program, about, tables, pasted)


def _top(program: Program, about: Iterable[str], tables: list[str], pasted: Pasted) -> list[str]:
    """Comments, imports, tables, and the support library."""
    tables = [
        *statement(f"MESH = {_dict((a, str(n)) for a, n in program.mesh.axes)}"),
        *statement(f"GROUPS = {_tuple(_strings(axes) for axes in _groups(program))}"),
        *tables,
    ]
    first = [text for text in pasted.texts if text.startswith("class Spec")]
    rest = [text for text in pasted.texts if not text.startswith("class Spec")]
    parts = [*first, "\n".join(tables), *rest]
    return [*about, "", *pasted.imports, "", *PROVIDED, *_spaced(parts), "", ""]


def _about(program: Program) -> Iterator[str]:
    """Comments, not a string: no quote in a file name can end them."""
    source, devices = program.placed, program.mesh.devices
    file = inert(source.named.span.file)
    yield f"# {file}, program {source.named.name}: what each of {devices} devices does."
    yield _placed(program)
    yield (
        f"# torchrun --nproc-per-node {devices} THIS_FILE "
        "[--inputs F] [--params F] [--seed S] [--out F.npz]"
    )
    yield f"# made by meshdsl {__version__}"


def _placed(program: Program) -> str:
    source, mesh = program.placed, program.mesh
    axes = " x ".join(f"{a} {n}" for a, n in mesh.axes) or "one device"
    return (
        f"# mesh {inert(mesh.name)} ({axes}), layout {inert(source.layout)}, "
        f"partial values reduced: {source.policy}"
    )


def _spaced(parts: list[str]) -> Iterator[str]:
    """Top-level statements, two blank lines around every definition."""
    before = True
    for text in parts:
        defines = "\ndef " in f"\n{text}" or "\nclass " in f"\n{text}"
        if before or defines:
            yield from ("", "")
        before = defines
        yield from text.split("\n")


def _groups(program: Program) -> list[tuple[str, ...]]:
    """The sets of axes that collectives run over."""
    steps = {node.step for node, _ in walk(program.body) if isinstance(node, Move | Bucket)}
    return sorted({step.axes for step in steps if step.moves})


def _states(program: Program, draws: Draws) -> list[str]:
    """What an optimizer keeps; a state that copies its parameter is drawn under that one's name."""
    if not program.updates:
        return []
    copies = {s.value: s.copies for s in program.placed.named.states}
    rows = []
    for var in program.states:
        copied = copies[var.value]
        draw = ("zeros",) if copied is None else draws.get(copied)
        rows.append((var.value.name or "", var, draw, copied.name if copied else None))
    return _rows("STATES", [(key, _spec(var, draw, under)) for key, var, draw, under in rows])


def _loss(program: Program) -> list[str]:
    """The name of the output that is minimised."""
    goal = program.placed.named.goal
    if goal is None:
        return []
    return statement(f"LOSS = {quoted(loss_name(program.placed.named))}")


# --- tables ------------------------------------------------------------------------------------


def _table(name: str, items: list[tuple[str, Var]], draws: Draws) -> list[str]:
    """A dict of `Spec`s of variables."""
    return _rows(name, [(key, _spec(var, draws.get(var.value))) for key, var in items])


def _rows(name: str, items: list[tuple[str, str]]) -> list[str]:
    """A dict of texts, one entry a line."""
    if not items:
        return [f"{name} = {{}}"]
    rows = (f"{quoted(key)}: {text}" for key, text in items)
    lines = (line for row in rows for line in statement(row, 1, tail=","))
    return [f"{name} = {{", *lines, "}"]


def _spec(var: Var, draw: tuple[object, ...] | None, under: str | None = None) -> str:
    dims = _dict((d.name, str(d.size)) for d in var.value.type.dims)
    split = _dict((d, _strings(axes)) for d, axes in var.placement.splits)
    drawn = "" if draw is None else f", {_tuple(_literal(x) for x in draw)}"
    key = "" if under is None else f", {quoted(under)}"
    return f'Spec("{var.value.type.dtype}", {dims}, {split}{drawn}{key})'


def _literal(value: object) -> str:
    return quoted(value) if isinstance(value, str) else repr(value)


def _dict(items: Iterator[tuple[str, str]]) -> str:
    """A dict of texts by strings."""
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in items) + "}"


def _strings(items: tuple[str, ...]) -> str:
    return _tuple(map(quoted, items))


def _tuple(items: Iterator[str]) -> str:
    found = list(items)
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


# --- comments ----------------------------------------------------------------------------------


def type_text(type_: TensorType, placement: Placement) -> str:
    """`f32[batch@rows, io]`, and what is partial."""
    return f"{type_.dtype}{placement.show(type_)}"


def inert(text: str) -> str:
    """`text` for a comment: one line, control and format characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
