"""The text of a device's coordinates, and of the blocks that it has of each dim.

Each text notes the names it has (`TextLines.mention`), so that a function begins with those that
its statements read: `lines_above`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from meshdsl.backends.torch.preamble import inert
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.backends.torch.text_state import TextState
from meshdsl.device.ir import DeviceLoop, Node, Var
from meshdsl.device.stored_blocks import of_other_stages
from meshdsl.ops.torch_expressions import atom, tuple_text
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Placement

SHOWN = 16
"""Block sizes that a note lists."""


class BlockKey(NamedTuple):
    """A dim of a size, and the axes over which it is split."""

    dim: str
    size: int
    axes: tuple[str, ...]


class BlockNames(NamedTuple):
    """The variables for the first index and the size of this device's block of an uneven dim."""

    first: str
    size: str


class BlockText:
    """Writes coordinates and blocks.

    `at` is the text of the coordinate along each axis. `of_device` and `elsewhere` are the blocks
    that the text has by now: of the device, and of its other stage, as a statement `elsewhere` is.
    """

    def __init__(self, state: TextState) -> None:
        self.state, self.out, self.mesh = state, state.out, state.mesh
        coordinates = state.program.coordinates.items()
        self.at = {axis: state.variables.word(name, axis) for axis, name in coordinates}
        self.blocks: dict[BlockKey, BlockNames] = {}
        self.other_blocks: dict[BlockKey, BlockNames] = {}
        self.others = of_other_stages(state.program)
        self.is_elsewhere = False

    # --- coordinates -----------------------------------------------------------------------------

    @property
    def pipe(self) -> Piped:
        """The stages of the program, which is a pipeline."""
        assert self.state.program.placed.pipe is not None
        return self.state.program.placed.pipe

    def coordinate(self, axis: str) -> str:
        """Text of the coordinate of the device along an axis; `elsewhere`, of its other stage's."""
        name = self.out.mention(self.at[axis])
        if self.is_elsewhere and axis == self.pipe.axis:
            return f"{self.pipe.others}[{name}]"
        return name

    def device(self, axis: str) -> str:
        """Text of the number of the device along an axis, whatever stage a statement is of."""
        name = self.state.variables.word(self.state.program.coordinates[axis])
        return self.out.mention(name)

    def index(self, axes: tuple[str, ...]) -> str:
        """Text of the block number of this device along `axes`, outer first."""
        text = self.coordinate(axes[0])
        for axis in axes[1:]:
            text = f"({text})" if " " in text else text
            text = f"{text} * {self.mesh.size(axis)} + {self.coordinate(axis)}"
        return text

    def times(self, axes: tuple[str, ...], extent: int) -> str:
        """Text of the index that this device's block along `axes` begins at."""
        index = self.index(axes)
        if extent == 1:
            return index
        return f"({index}) * {extent}" if " " in index else f"{index} * {extent}"

    # --- blocks ----------------------------------------------------------------------------------

    def block_of(self, var: Var, dim: str) -> BlockNames | None:
        """Variables for the first index and the size of a device's block, if sizes differ."""
        return self.block_along(dim, var.type.size(dim), var.placement.axes_of(dim))

    def block_along(self, dim: str, size: int, axes: tuple[str, ...]) -> BlockNames | None:
        """The same of a dim of a size over some axes; they are others `elsewhere`."""
        if not self.mesh.is_uneven(dim, size, axes):
            return None
        is_other = self.is_elsewhere and self.pipe.axis in axes
        blocks = self.other_blocks if is_other else self.blocks
        key = BlockKey(dim, size, axes)
        if key not in blocks:
            fresh = self.state.variables.names.fresh
            blocks[key] = BlockNames(fresh(f"at_{dim}"), fresh(f"n_{dim}"))
        return blocks[key]

    def extent(self, var: Var, dim: str) -> str:
        """Text of the local size of a dim."""
        block = self.block_of(var, dim)
        return self.out.mention(block.size) if block else str(var.local.size(dim))

    def shape(self, var: Var) -> str:
        """Text of the local shape of a variable, a tuple."""
        return tuple_text([self.extent(var, dim) for dim in var.local.names])

    def message(self, var: Var) -> str:
        """Text of the local shape of a message; a list by micro-batch where these differ."""
        pipe, names = self.pipe, var.local.names
        sizes = [self._extent_held(var, dim) for dim in names]
        if pipe.cut is None or not pipe.cut.sizes:
            return tuple_text(sizes)
        cut = [pipe.cut.axis in var.placement.axes_of(dim) for dim in names]
        if not any(cut):
            return tuple_text(sizes)
        sizes = ["n" if c else size for c, size in zip(cut, sizes, strict=True)]
        return f"[{tuple_text(sizes)} for n in {tuple_text(pipe.cut.sizes)}]"

    def _extent_held(self, var: Var, dim: str) -> str:
        """Text of the local size of a dim, or of the window in its place."""
        if all(window.dim != dim for window in var.placement.windows):
            return self.extent(var, dim)
        held = var.placement.held(dim, var.type.size(dim), self.mesh)
        sizes = [stop - start for start, stop in held]
        if len({*sizes}) == 1:
            return str(sizes[0])
        return f"{tuple_text([*map(str, sizes)])}[{self.index(var.placement.axes_of(dim))}]"

    def offset(self, dim: str, var: Var) -> str:
        """Text of the index that this device's block of a dim begins at, which `var` has."""
        block = self.block_of(var, dim)
        if block:
            return self.out.mention(block.first)
        blocks = var.placement.plain.local(var.type, self.mesh)
        return self.times(var.placement.axes_of(dim), blocks.size(dim))

    def start_in(self, part: Var, whole: Var, axes: tuple[str, ...], dim: str) -> str:
        """Text of the index in `whole`'s block that `part`'s begins at, split further by `axes`."""
        part_block, outer = self.block_of(part, dim), self.block_of(whole, dim)
        if part_block is None:
            return self.times(axes, part.local.size(dim))
        first = self.out.mention(part_block.first)
        before = whole.placement.axes_of(dim)
        if not before:
            return first
        if outer:
            return f"{first} - {atom(self.out.mention(outer.first))}"
        return f"{first} - {atom(self.times(before, whole.local.size(dim)))}"

    def count(self, node: DeviceLoop) -> str:
        """Text of the number of iterations of a loop: of one on the stages, the stage's."""
        block = self._iterations(node)
        return self.out.mention(block.size) if block else str(node.dim.size)

    def last(self, node: DeviceLoop) -> str:
        """Text of the index of the last iteration of a loop."""
        block = self._iterations(node)
        return f"{self.out.mention(block.size)} - 1" if block else str(node.dim.size - 1)

    def _iterations(self, node: DeviceLoop) -> BlockNames | None:
        pipe = self.state.program.placed.pipe
        if pipe is None or not pipe.sizes or not pipe.cuts(node):
            return None
        return self.block_along(pipe.dim, sum(pipe.sizes), pipe.axes(self.mesh))

    def may_be_empty(self, var: Var, dim: str) -> bool:
        """Whether some device has nothing of a dim."""
        blocks = var.placement.blocks(dim, var.type.size(dim), self.mesh)
        return any(start == stop for start, stop in blocks)

    def may_read_nothing(self, var: Var, dim: str) -> bool:
        """Whether some device has nothing of a dim, or of the window in its place."""
        held = var.placement.held(dim, var.type.size(dim), self.mesh)
        return any(start == stop for start, stop in held)

    @contextmanager
    def elsewhere(self, node: Node) -> Iterator[None]:
        """Write what makes a block of the device's other stage, which may have another size."""
        pipe = self.state.program.placed.pipe
        here = isinstance(node, DeviceLoop) or self.others.isdisjoint(v.name for v in node.makes)
        if here or pipe is None or not pipe.sizes:
            yield
            return
        before, self.is_elsewhere = {*self.other_blocks}, True
        for var in node.makes:
            self.block_of(var, pipe.dim)
        for key, names in self.other_blocks.items():
            if key not in before:
                self.out.add(self._block_line(key, names))
        yield
        self.is_elsewhere = False

    # --- the first lines of functions ------------------------------------------------------------

    def lines_above(self, start: int) -> list[TextLine]:
        """The lines for the coordinates and blocks that lines from number `start` on read.

        Those are of the device: those of a stage are in the passes.
        """
        used = self.out.names(start)
        blocks = {k: v for k, v in self.blocks.items() if self._is_of_device(k)}
        blocks = {k: v for k, v in blocks.items() if not used.isdisjoint(v)}
        used |= {self.at[axis] for key in blocks for axis in key.axes}
        coordinate_lines = []
        stride = self.mesh.devices
        for axis, size in self.mesh.axes:
            stride //= size
            text = "rank" if stride == 1 else f"rank // {stride}"
            is_outermost = stride * size == self.mesh.devices
            if (name := self.at[axis]) in used:
                line = f"{name} = {text}{'' if is_outermost else f' % {size}'}"
                coordinate_lines.append(self.out.line(line))
        return coordinate_lines + self._block_lines(blocks)

    def stage_lines(self, start: int) -> list[TextLine]:
        """The lines for which of the device's stages a pass is of, and what it has of a dim.

        The statements of the pass are the lines from number `start` on. What is bound here is none
        of the names that they read from around the pass.
        """
        *_, axis = self.pipe.axes(self.mesh)
        chunked = axis not in self.mesh.names
        staged = chunked or bool(self.pipe.others)
        read = self.out.names(start)
        of_stage = (
            k for k in self.blocks if (staged and axis in k.axes) or not self._is_of_device(k)
        )
        blocks = {k: self.blocks[k] for k in of_stage if not read.isdisjoint(self.blocks[k])}
        if not blocks and not (chunked and self.at[axis] in read):
            return []
        chunk = [self.out.line(f"{self.at[axis]} = stages.index(stage)")] if chunked else []
        lines = chunk + self._block_lines(blocks)
        bound = {self.at[axis]} if chunked else set()
        bound |= {name for names in blocks.values() for name in names}
        lines_of_pass = self.out.lines[start:]
        self.out.lines[start:] = [line._replace(names=line.names - bound) for line in lines_of_pass]
        return [line._replace(names=line.names - bound) for line in lines]

    def _is_of_device(self, key: BlockKey) -> bool:
        """Whether a block is one of the device: not of a point in time."""
        return set(key.axes) <= set(self.mesh.names)

    def _block_lines(self, blocks: Mapping[BlockKey, BlockNames]) -> list[TextLine]:
        return [self.out.line(self._block_line(*item)) for item in blocks.items()]

    def _block_line(self, key: BlockKey, names: BlockNames) -> str:
        """The line of a first index and a number of elements of an uneven dim."""
        dim, size, axes = key
        ways = self.mesh.ways(*key)
        outer_axes = ((way, axes[: n + 1]) for n, way in enumerate(ways))
        at = [self.index(over[-1:] if isinstance(way, int) else over) for way, over in outer_axes]
        split = Placement(((dim, axes),))
        sizes = [stop - start for start, stop in split.blocks(dim, size, self.mesh)]
        shown = ", ".join(map(str, sizes if len(sizes) <= SHOWN else [*sizes[:SHOWN], "…"]))
        call = f"{self.state.call('block')}({size}, {tuple_text(ways)}, {tuple_text(at)})"
        note = f"{inert(dim)}@{'+'.join(map(inert, axes))}: {shown}"
        return f"{names.first}, {names.size} = {call}  # {note}"
