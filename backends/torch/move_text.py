"""The text of moves: collectives, blocking or issued and waited for, and local moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshdsl.backends.runtime.values import Way
from meshdsl.backends.torch.identifiers import Variables
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.preamble import inert, type_text
from meshdsl.backends.walk import NotationWriter
from meshdsl.device.ir import (
    Bucket,
    Collective,
    DeviceProgram,
    Move,
    Start,
    Var,
    Wait,
)
from meshdsl.device.liveness import uses
from meshdsl.diagnostics import Span
from meshdsl.ops.opdef import Reads
from meshdsl.ops.torch_expressions import atom, scalar, tuple_text
from meshdsl.placed.placements import Mesh, Placement, Window

SHOWN = 16
"""Block sizes that a note lists."""

MOST_SHOWN = 8
"""Windows that a comment lists."""


class MoveWriter(NotationWriter):
    """The state of a text that is being written; writes moves."""

    def __init__(self, program: DeviceProgram, taken: frozenset[str] = frozenset()) -> None:
        super().__init__(program)
        self.variables = Variables(program, taken)
        self.at = {a: self.variables.word(name, a) for a, name in program.coordinates.items()}
        self.used: set[str] = set()
        self.uses = uses(program)
        # Variables whose memory no other one shares.
        self.fresh: set[Var] = set()
        # Variables that are not written by name: prefetched slices.
        self.texts: dict[Var, str] = {}
        # Variables for the first index and the size of this device's block of an uneven dim.
        self.blocks: dict[tuple[str, int, tuple[str, ...]], tuple[str, str]] = {}

    # --- collectives -------------------------------------------------------------------------

    def move(self, node: Move) -> None:
        """Write a blocking move."""
        self._collective(node)

    def bucket(self, node: Bucket) -> None:
        """Write a bucket: one call for all targets."""
        self._collective(node)

    def _collective(self, node: Collective) -> None:
        if node.step.moves:
            self._about(node)
        self._assign_targets(node, self._text(node))

    def start(self, node: Start) -> None:
        """Write `w_work = all_gather_start(…)`."""
        with self._at(node.span):
            if not node.ahead:
                self._about(node.collective)
            work = self.variables.word(node.work)
            self.out.statement(f"{work} = {self._text(node.collective, '_start')}")

    def wait(self, node: Wait) -> None:
        """Write `w_full = w_work.wait()`."""
        with self._at(node.span):
            self._assign_targets(node.collective, f"{self.variables.word(node.work)}.wait()")

    @contextmanager
    def _at(self, span: Span) -> Iterator[None]:
        """Give the statements inside the source place `span`."""
        before, self.out.place = self.out.place, f"{span.file}:{span.line}"
        yield
        self.out.place = before

    def _about(self, node: Collective) -> None:
        """Write comments: the bytes sent, and why."""
        sent = f"{node.step.kind}, {node.wire:,} B sent"
        if isinstance(node, Move):
            self.out.comment(f"{sent}: {_cause(node)}")
            return
        self.out.comment(f"{sent} in a bucket of {len(node.moves)}:")
        whys: dict[str, list[str]] = {}
        for move in node.moves:
            whys.setdefault(_cause(move), []).append(self.variables.of(move.target))
        for why, names in whys.items():
            self.out.comment(f"{', '.join(names)}: {why}")

    def _assign_targets(self, node: Collective, text: str) -> None:
        if node.step.moves or node.step.kind == "window":
            self.fresh.update(m.target for m in node.moves)
        if isinstance(node, Move):
            if not self.variables.share(node.target, text):
                self._let(node.target, text)
            return
        names = [self.variables.assign(move.target) for move in node.moves]
        for name, move in zip(names, node.moves, strict=True):
            self.out.comment(f"{name}: {typed(move.target)}")
        self.out.statement(f"{', '.join(names)} = {text}")

    def _let(self, var: Var, text: str) -> None:
        """Write `x = text`, with the type of `x` as its note."""
        self.out.statement(f"{self.variables.assign(var)} = {text}", typed(var))

    def _text(self, node: Collective, suffix: str = "") -> str:
        """The text of the call; `suffix` is `_start` for one that does not wait."""
        if isinstance(node, Bucket):
            return self._bucket(node, suffix)
        if node.step.moves:
            self.used.add(_function(node, self.mesh) + suffix)
        return {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "permute": self._permute,
            "exchange": self._exchange,
            "halo": self._halo,
            "window": self._halo,
            "slice": self._slice,
            "zero_fill": self._zero_fill,
        }[node.step.kind](node, suffix)

    def _bucket(self, node: Bucket, suffix: str) -> str:
        call, step = f"{node.step.kind}_bucket{suffix}", node.step
        self.used.add(call)
        args = [f"[{', '.join(self._tensor(m.source) for m in node.moves)}]"]
        if step.kind != "all_reduce":
            dims = (self._position(m.source, m.step.dim) for m in node.moves)
            args.append(f"[{', '.join(map(str, dims))}]")
        args.append(self._group(node))
        args += [f'"{step.op}"'] if step.op else []
        return f"{call}({', '.join(args)})"

    def _group(self, node: Collective) -> str:
        return f'groups["{"+".join(node.step.axes)}"]'

    def _all_reduce(self, node: Move, suffix: str) -> str:
        """The call, on a copy if the memory is shared; an extreme of floats is made anew anyway."""
        anew = node.step.op in ("max", "min") and node.source.local.dtype.kind == "float"
        may_overwrite = anew or (node.source in self.fresh and self.uses[node.source] == 1)
        x = self._tensor(node.source) + ("" if may_overwrite else ".clone()")
        return f'all_reduce{suffix}({x}, {self._group(node)}, "{node.step.op}")'

    def _all_gather(self, node: Move, suffix: str) -> str:
        dim = self._position(node.source, node.step.dim)
        call = _function(node, self.mesh) + suffix
        sizes = ""
        if "uneven" in call:
            ways = tuple_text(self._ways(node, node.source, node.step.dim))
            sizes = f"{self._joined(node)}, {ways}, "
        return f"{call}({self.name(node.source)}, {dim}, {sizes}{self._group(node)})"

    def _reduce_scatter(self, node: Move, suffix: str) -> str:
        dim = self._position(node.source, node.step.dim)
        x, group = self._tensor(node.source), self._group(node)
        call = _function(node, self.mesh) + suffix
        ways = ""
        if "uneven" in call:
            ways = f"{tuple_text(self._ways(node, node.target, node.step.dim))}, "
        return f'{call}({x}, {dim}, {ways}{group}, "{node.step.op}")'

    def _all_to_all(self, node: Move, suffix: str) -> str:
        split = self._position(node.source, node.step.to_dim)
        concat = self._position(node.source, node.step.dim)
        call = _function(node, self.mesh)
        sizes = ""
        if "uneven" in call:
            leaving = self._ways(node, node.target, node.step.to_dim)
            coming = self._ways(node, node.source, node.step.dim)
            ways = f"({tuple_text(leaving)}, {tuple_text(coming)})"
            sizes = f"{self._joined(node)}, {ways}, "
        x, group = self.name(node.source), self._group(node)
        return f"{call}({x}, {split}, {concat}, {sizes}{group})"

    def _joined(self, node: Move) -> str:
        """Text of the size of the dim that is joined."""
        assert node.step.dim is not None
        return self.extent(node.target, node.step.dim)

    def _ways(self, node: Move, split: Var, dim: str | None) -> tuple[Way, ...]:
        """How a dim is split over the axes of a collective, which are the innermost of it."""
        assert dim is not None
        ways = self.mesh.ways(dim, split.type.size(dim), split.placement.axes_of(dim))
        return ways[-len(node.step.axes) :]

    def _permute(self, node: Move, suffix: str) -> str:
        # Dicts of strings and tuples of them: their `repr` is their text.
        before, after = (repr(splits) for splits in node.step.changed())
        shape = ""
        if node.step.is_uneven(node.source.type, self.mesh):
            shape = f", {self.shape(node.target)}"
        return f"permute({self.name(node.source)}, rank, MESH, {before}, {after}, groups{shape})"

    def _exchange(self, node: Move, suffix: str) -> str:
        (axis,) = node.step.axes
        device = self.variables.word(self.program.coordinates[axis])
        args = f"SCHEDULE[{device}], {device}, {self._group(node)}"
        if node.step.is_uneven(node.source.type, self.mesh):
            args += f", {self.shape(node.target)}"
        return f"exchange({self._tensor(node.source)}, {args})"

    def _halo(self, node: Move, suffix: str) -> str:
        """The call; a window of which nothing is sent is cut from the block, or from the whole."""
        window, placed = node.step.window, node.step.after
        reads, position = window.reads, self._position(node.source, window.dim)
        self.used.add(node.step.kind)
        self._about_windows(node)
        args = self.window_text(window, placed.axes_of(window.dim))
        fill = self._filling(node.source, reads.fill)
        where = "rank, MESH" + (", groups" if node.step.moves else "")
        if (wider := node.step.wider) is not None:
            where += f", {(_numbers(wider.reads), wider.reads.fill is None)}"
        return f"{node.step.kind}({self._tensor(node.source)}, {position}, {args}, {fill}, {where})"

    def window_text(self, window: Window, axes: tuple[str, ...]) -> str:
        """Text of the axes of a window, the sizes of its dim and its loop, and what is read."""
        return f"{axes!r}, {(window.size, window.loop)}, {_numbers(window.reads)}"

    def _about_windows(self, node: Move) -> None:
        """Write a comment: what each device has of the dim, of many the first and the last."""
        window = node.step.window
        held = [f"{a}:{b}" for a, b in node.step.after.held(window.dim, window.size, self.mesh)]
        shown = held if len(held) <= MOST_SHOWN else [*held[: MOST_SHOWN - 2], "…", held[-1]]
        axes = " and ".join(node.step.after.axes_of(window.dim))
        self.out.comment(f"along {axes}, of {window.dim}: {', '.join(shown)}")

    def _filling(self, var: Var, fill: float | str | None) -> str:
        if not isinstance(fill, float | int):
            return quoted(fill) if fill else "None"
        return self.literal(fill if var.local.dtype.kind == "float" else int(fill))

    # --- local moves -------------------------------------------------------------------------

    def _slice(self, node: Move, suffix: str) -> str:
        dim = node.step.dim
        assert dim is not None
        extent = self.extent(node.target, dim)
        start = self._start_in(node.target, node.source, node.step.axes, dim)
        position = self._position(node.source, dim)
        return f"{self.name(node.source)}.narrow({position}, {start}, {extent})"

    def _zero_fill(self, node: Move, suffix: str) -> str:
        """One device of the axis keeps its replica; for partial maxima and minima all may."""
        if node.step.op in ("max", "min"):
            return self._tensor(node.source)
        if node.step.dim is not None:
            return self._embed(node)
        keeps = f"{self.at[node.step.axes[0]]} == {node.step.at}"
        if node.source in self.constants:
            number = f"{self.constants[node.source]} if {keeps} else 0"
            return scalar(number, node.source.local.dtype)
        x = self.name(node.source)
        if node.source.on is not None:
            zero = f"torch.zeros({self.shape(node.source)}, dtype={node.source.local.dtype.torch})"
            return f"{x} if {keeps} else {zero}"
        return f"{x} if {keeps} else torch.zeros_like({x})"

    def _embed(self, node: Move) -> str:
        """The text of the block at its place in a tensor of zeros."""
        dim = node.step.dim
        assert dim is not None
        size = self.extent(node.target, dim)
        self.used.add("embed_block")
        start = self._start_in(node.source, node.target, node.step.axes, dim)
        position = self._position(node.source, dim)
        return f"embed_block({self.name(node.source)}, {position}, {start}, {size})"

    # --- parts of calls ----------------------------------------------------------------------

    def _position(self, var: Var, dim: str | None) -> int:
        assert dim is not None
        return var.local.index(dim)

    def name(self, var: Var) -> str:
        """The identifier of a variable, or the text of a prefetched slice."""
        return self.texts[var] if var in self.texts else self.variables.of(var)

    def _tensor(self, var: Var) -> str:
        """The text of a variable; of a constant that of a tensor."""
        if var not in self.constants:
            return self.name(var)
        return scalar(self.constants[var], var.local.dtype)

    def block_of(self, var: Var, dim: str) -> tuple[str, str] | None:
        """Variables for the first index and the size of a device's block, if sizes differ."""
        return self.block_along(dim, var.type.size(dim), var.placement.axes_of(dim))

    def block_along(self, dim: str, size: int, axes: tuple[str, ...]) -> tuple[str, str] | None:
        """The same of a dim of a size over some axes."""
        if not self.mesh.is_uneven(dim, size, axes):
            return None
        key = (dim, size, axes)
        if key not in self.blocks:
            fresh = self.variables.names.fresh
            self.blocks[key] = fresh(f"at_{dim}"), fresh(f"n_{dim}")
        return self.blocks[key]

    def _is_of_device(self, key: tuple[str, int, tuple[str, ...]]) -> bool:
        """Whether a block is one of the device: not of a point in time."""
        return set(key[2]) <= set(self.mesh.names)

    def block_line(self, dim: str, size: int, axes: tuple[str, ...], first: str, n: str) -> str:
        """The line of a first index and a number of elements of an uneven dim."""
        self.used.add("block")
        ways = self.mesh.ways(dim, size, axes)
        outer_axes = ((way, axes[: n + 1]) for n, way in enumerate(ways))
        at = [self._index(over[-1:] if isinstance(way, int) else over) for way, over in outer_axes]
        split = Placement(((dim, axes),))
        sizes = [stop - start for start, stop in split.blocks(dim, size, self.mesh)]
        shown = ", ".join(map(str, sizes if len(sizes) <= SHOWN else [*sizes[:SHOWN], "…"]))
        text = f"{first}, {n} = block({size}, {tuple_text(ways)}, {tuple_text(at)})"
        return f"{text}  # {inert(dim)}@{'+'.join(map(inert, axes))}: {shown}"

    def may_be_empty(self, var: Var, dim: str) -> bool:
        """Whether some device has nothing of a dim."""
        blocks = var.placement.blocks(dim, var.type.size(dim), self.mesh)
        return any(start == stop for start, stop in blocks)

    def may_read_nothing(self, var: Var, dim: str) -> bool:
        """Whether some device has nothing of a dim, or of the window in its place."""
        held = var.placement.held(dim, var.type.size(dim), self.mesh)
        return any(start == stop for start, stop in held)

    def extent(self, var: Var, dim: str) -> str:
        """Text of the local size of a dim."""
        found = self.block_of(var, dim)
        return found[1] if found else str(var.local.size(dim))

    def shape(self, var: Var) -> str:
        """Text of the local shape of a variable, a tuple."""
        return tuple_text([self.extent(var, dim) for dim in var.local.names])

    def _start_in(self, part: Var, whole: Var, axes: tuple[str, ...], dim: str) -> str:
        """Text of the index in `whole`'s block that `part`'s begins at, split further by `axes`."""
        part_block, outer = self.block_of(part, dim), self.block_of(whole, dim)
        if part_block is None:
            return self._times(axes, part.local.size(dim))
        if not whole.placement.axes_of(dim):
            return part_block[0]
        before = whole.placement.axes_of(dim)
        begins = outer[0] if outer else self._times(before, whole.local.size(dim))
        return f"{part_block[0]} - {atom(begins)}"

    def _times(self, axes: tuple[str, ...], extent: int) -> str:
        """Text of the index that this device's block along `axes` begins at."""
        index = self._index(axes)
        if extent == 1:
            return index
        return f"({index}) * {extent}" if " " in index else f"{index} * {extent}"

    def _index(self, axes: tuple[str, ...]) -> str:
        """Text of the block number of this device along `axes`, outer first."""
        text = self.at[axes[0]]
        for axis in axes[1:]:
            text = f"({text})" if " " in text else text
            text = f"{text} * {self.mesh.size(axis)} + {self.at[axis]}"
        return text


def _numbers(reads: Reads) -> tuple[int, int, int, int, bool]:
    return reads.mul, reads.div, reads.lo, reads.hi, reads.flip


def _function(node: Move, mesh: Mesh) -> str:
    """The function of the support library for a collective."""
    step, type_ = node.step, node.source.type
    ends = {"all_gather": [step.before], "reduce_scatter": [step.after]}
    both = ends.get(step.kind, [step.before, step.after])
    dims = [d for d in (step.dim, step.to_dim) if d is not None]
    differ = any(p.is_uneven(d, type_.size(d), mesh) for p in both for d in dims)
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    return f"{step.kind}_uneven" if differ and step.kind in kinds else step.kind


def _cause(move: Move) -> str:
    """The first clause of a move's reason; `explain` has the rest."""
    return move.why.partition(";")[0]


def typed(var: Var) -> str:
    """The note of a statement: the type with its local shape."""
    return type_text(var.value.type, var.placement)
