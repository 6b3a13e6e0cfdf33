"""The placed program as text: every tensor with its placement, every reshard with its route.

```
program mlp, mesh square { rows: 2, cols: 2 }, layout hybrid, reduce deferred
  # 18 | y = einsum(h, v -> [batch, io])
  %8 y = einsum %7 %4 : f32[batch@rows 64, io 512] partial sum over cols
  %9 y = reshard %8 : f32[batch@rows 64, io 512]
    all_reduce sum over cols
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from meshdsl.ir.printer import INDENT, Numbers, Printer, constants, phase_text
from meshdsl.ir.program import every
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.named.printer import called, label
from meshdsl.ops.opdef import Reads
from meshdsl.placed.collectives import Step
from meshdsl.placed.ir import PlacedProgram, PlacedTensor, Reshard
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh, Placement, Window


def print_program(program: PlacedProgram) -> str:
    """The text of a placed program. Sizes are those of the named program."""
    return "\n".join(_PlacedPrinter().program(program)) + "\n"


def mesh_text(mesh: Mesh) -> str:
    """`square { rows: 2, cols: 2 }`; `line { pipe: 4; micro: 8 }` with axes in time.

    Blocks of given sizes follow: `line { pipe: 2 } (layers over pipe 3 5)`.
    """
    axes = (mesh.axes, mesh.moments) if mesh.moments else (mesh.axes,)
    texts = (", ".join(f"{axis}: {size}" for axis, size in part) for part in axes)
    blocks = (
        f"{dim} over {' '.join(over)} {' '.join(map(str, sizes))}"
        for dim, over, sizes in mesh.given
    )
    # One without a name of its own is called by the word of the language.
    is_named = mesh.name.isidentifier() and mesh.name != "mesh"
    name = f"{mesh.name} " if is_named else ""
    sizes = f"{name}{{ {'; '.join(texts)} }}" if mesh.axes else f"{name}{{}}"
    return f"{sizes} ({', '.join(blocks)})" if mesh.given else sizes


def step_text(step: Step) -> str:
    """`all_to_all heads to seq over tp`; `slice batch over data`."""
    if step.tier:
        return f"{step.kind} {step.streams[0]}"
    if step.kind in ("halo", "window"):
        over = ", ".join(step.after.axes_of(step.window.dim))
        return f"{step.kind} {_window(step.window)} over {over}"
    moved = _splits(step.after) if step.kind == "permute" else None
    if step.partners:
        moved = f"with {' '.join(map(str, step.partners))}"
    words = [step.kind, step.op, step.dim, f"to {step.to_dim}" if step.to_dim else None, moved]
    position = f" at {step.at}" if step.at else ""
    return f"{' '.join(w for w in words if w)} over {', '.join(step.axes)}{position}"


NO_WHOLES: Mapping[str, int] = {}


def placed_type_text(type_: TensorType, p: Placement, wholes: Mapping[str, int] = NO_WHOLES) -> str:
    """`f32[batch@rows 64, io 512] partial sum over cols`.

    Where blocks differ in size, `batch@rows 3 of 5`: the largest, and the dim in `wholes`.
    """
    of = {d: f" of {n}" for d, n in wholes.items()}
    dims = (f"{d.name}{_axes(p.axes_of(d.name))} {d.size}{of.get(d.name, '')}" for d in type_.dims)
    tail = f" partial {p.op} over {', '.join(p.partial)}" if p.partial else ""
    windows = "".join(f" window {_window(w)}" for w in p.windows)
    return f"{type_.dtype}[{', '.join(dims)}]{windows}{tail}"


def _window(window: Window) -> str:
    """`(h 32, mul 2, lo -1, hi 1, loop 16)`: what differs from a block read as it is."""
    pairs = ((f.name, getattr(window.reads, f.name), f.default) for f in fields(Reads))
    said = [f"{name} {value}" for name, value, default in pairs if value != default]
    return f"({', '.join([f'{window.dim} {window.size}', *said, f'loop {window.loop}'])})"


def _axes(axes: tuple[str, ...]) -> str:
    if not axes:
        return ""
    return f"@{axes[0]}" if len(axes) == 1 else f"@({', '.join(axes)})"


def _splits(p: Placement) -> str:
    return f"into {' '.join(f'{dim}{_axes(axes)}' for dim, axes in p.splits)}"


def _pipeline(pipe: Piped) -> Iterator[str]:
    """`pipeline layers over pipe, micro-batches micro`, and the schedule of the layout."""
    order = f" stages {' '.join(map(str, pipe.order))}" if pipe.order else ""
    sizes = f" sizes {' '.join(map(str, pipe.sizes))}" if pipe.sizes else ""
    sizes += f" others {' '.join(map(str, pipe.others))}" if pipe.others else ""
    of = f"in {pipe.count} stages" if pipe.count else pipe.dim
    yield f"pipeline {of} over {pipe.axis}, {pipe.micro}{order}{sizes}"
    use = pipe.use
    if use is None:
        return
    of = f" of {' '.join(use.dims)} in {use.micro}" if pipe.cut else ""
    alone = "forward " if use.forward else ""
    yield f"{INDENT}{alone}with {use.name}{of}{constants(use.options.items())}"
    if use.table is not None:
        yield from (f"{2 * INDENT}{line}" for line in use.table.schedule.text.splitlines())


class _PlacedPrinter(Printer[PlacedTensor]):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()
        self.numbered: dict[Value, str] = {}

    def program(self, program: PlacedProgram) -> Iterator[str]:
        head = f"program {program.named.name}, mesh {mesh_text(program.mesh)}"
        yield f"{head}, layout {program.layout}, reduce {program.policy}"
        if program.pipe is not None:
            yield from (INDENT + line for line in _pipeline(program.pipe))
        for tensor in program.inputs:
            yield f"{INDENT}input  {self.typed(tensor)}"
        away = program.away
        for param in program.params:
            where = f" on {away[param.tensor]}" if param.tensor in away else ""
            yield f"{INDENT}param  {self.typed(param.tensor)}{where}"
        for state in program.states:
            where = f" on {away[state]}" if state in away else ""
            yield f"{INDENT}state  {self.typed(state)}{where}"
        yield from self.nodes(program.body, 1)
        for name, tensor in program.outputs:
            yield f"{INDENT}return {name} = {self.numbers[tensor]}"
        for old, new in program.updates:
            yield f"{INDENT}update {self.numbers[old]} = {self.numbers[new]}"
        yield from self._stages(program)

    def _stages(self, program: PlacedProgram) -> Iterator[str]:
        """`on stage 1: %5 %6`, of a network that rules cut into stages."""
        stage_of = {} if program.pipe is None else program.pipe.stage_of
        tensors = (t for n in every(program.body) if not isinstance(n, Reshard) for t in n.makes)
        by_stage: dict[int, list[str]] = {}
        for tensor in dict.fromkeys(tensors):
            if tensor.value in stage_of:
                by_stage.setdefault(stage_of[tensor.value], []).append(self.numbers[tensor])
        for stage, numbers in sorted(by_stage.items()):
            yield f"{INDENT}on stage {stage}: {' '.join(numbers)}"

    def name(self, value: PlacedTensor) -> str:
        return self.numbers[value]

    def origin(self, of: Value) -> str:
        return self.numbered[of]

    def defined(self, value: PlacedTensor) -> str:
        self.numbered.setdefault(value.value, self.numbers[value])
        return f"{self.numbers[value]}{label(value.value)}"

    def type(self, value: PlacedTensor) -> str:
        load = " param" if value.value.is_loaded else ""
        return f"{placed_type_text(value.type, value.placement)}{load}{called(value.value)}"

    def leaf(self, node: Reshard) -> Iterator[str]:
        source, tags = self.numbers[node.source], phase_text(node.phase)
        narrow = f" in {node.dtype}" if node.dtype is not None else ""
        target = self.defined(node.target)
        yield f"{target} = reshard {source}{narrow}{tags} : {self.type(node.target)}"
        for step in node.route.steps:
            yield INDENT + step_text(step)
