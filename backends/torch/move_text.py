"""The text of moves: collectives, blocking or issued and waited for, and local moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshdsl.backends.runtime.values import Way
from meshdsl.backends.torch.block_text import BlockText
from meshdsl.backends.torch.line_breaks import MANY, quoted
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.backends.torch.text_state import LastAssignment, TextState, literal
from meshdsl.device.counted_rows import CountedRows
from meshdsl.device.ir import Bucket, Collective, Move, Start, Var, Wait
from meshdsl.diagnostics import Span
from meshdsl.ops.opdef import Reads
from meshdsl.ops.torch_expressions import grouped, scalar, tuple_text, ungrouped
from meshdsl.placed.collectives import padding_windows
from meshdsl.placed.placements import Mesh, Window
from meshdsl.records import dataclass

MOST_SHOWN = 8
"""Windows that a comment lists."""


@dataclass(frozen=True, slots=True)
class _Extents:
    """The local sizes of a variable, as text."""

    blocks: BlockText
    var: Var

    def extent(self, dim: str, /) -> str:
        """Text of the local size of `dim`."""
        return self.blocks.extent(self.var, dim)


class MoveText:
    """Writes moves."""

    def __init__(self, state: TextState, blocks: BlockText) -> None:
        self.state, self.blocks = state, blocks
        self.out, self.mesh = state.out, state.mesh
        # By bucket, the variable of the list of stacks that it reads slices of; that of each stack.
        self.stacks: dict[Collective, str] = {}
        self.stack = ""
        # By tier, the variable of what keeps activations there.
        self.tiers: dict[str, str] = {}
        # The stack that collects what arrives an iteration later.
        self.stack_of: dict[Var, Var] = {}

    # --- collectives -------------------------------------------------------------------------

    def collective(self, node: Collective) -> None:
        """Write a blocking move, or a bucket: one call for all targets."""
        if node.step.moves:
            self._about(node)
        self._assign_targets(node, self._text(node))

    def start(self, node: Start) -> None:
        """Write `w_work = all_gather_start(…)`."""
        with self._at(node.span):
            if not node.ahead:
                self._list_stacks(node.collective)
                self._about(node.collective)
            self.out.assign((self.work(node),), self._text(node.collective, "_start"))

    def work(self, node: Start | Wait) -> str:
        """The identifier of a collective in flight."""
        moved, variables = node.collective, self.state.variables
        hint = "bucket" if isinstance(moved, Bucket) else f"{variables.hint(moved.target)}_work"
        return variables.word(node.work, hint)

    def wait(self, node: Wait) -> None:
        """Write `w_full = w_work.wait()`."""
        with self._at(node.span):
            self._assign_targets(node.collective, f"{self.work(node)}.wait()")

    def collect(self, node: Wait, index: str) -> None:
        """Write `dw[index] = dw_work.wait()`, of what arrives an iteration later."""
        with self._at(node.span):
            stacks = (self.state.name(self.stack_of[var]) for var in node.collective.makes)
            places = ", ".join(f"{stack}[{index}]" for stack in stacks)
            self.out.statement(f"{places} = {self.work(node)}.wait()")

    def _list_stacks(self, node: Collective) -> None:
        """Write the list of the stacks of parameters that a bucket reads slices of, if it is long.

        What a loop gathers ahead is issued twice: before the loop, and in it.
        """
        slices = [self.state.prefetched.get(move.source) for move in node.moves]
        stacks = [s.stack for s in slices if s is not None and s.stack in self.state.program.params]
        if MANY <= len(stacks) == len(node.moves) and len({s and s.at for s in slices}) == 1:
            fresh = self.state.variables.names.fresh
            self.stack = self.stack or fresh("stack")
            self.stacks[node] = fresh("stacks")
            names = ", ".join(self.out.mention(self.state.variables.of(v)) for v in stacks)
            self.out.assign((self.stacks[node],), f"[{names}]")

    @contextmanager
    def _at(self, span: Span) -> Iterator[None]:
        """Give the statements inside the source place `span`."""
        before, self.out.place = self.out.place, f"{span.file}:{span.line}"
        yield
        self.out.place = before

    def _about(self, node: Collective) -> None:
        """Write comments: the bytes sent, and why."""
        most = "at most " if isinstance(node, Move) and node.rows is not None else ""
        sent = f"{node.step.kind}, {most}{node.wire:,} B sent"
        if node.step.tier:
            way = node.step.streams[0].replace(" ", " the ")
            sent = f"{node.step.kind}, {node.payload:,} B {way}"
        if isinstance(node, Move):
            self.out.comment(f"{sent}: {node.cause}")
            return
        self.out.comment(f"{sent} in a bucket of {len(node.moves)}:")
        whys: dict[str, list[Move]] = {}
        for move in node.moves:
            whys.setdefault(_cause_of_each(move), []).append(move)
        for why, moves in whys.items():
            targets = (self.stack_of.get(move.target, move.target) for move in moves)
            names = ", ".join(map(self.state.variables.of, targets))
            self.out.comment(f"{names}: {why if len(moves) > 1 else moves[0].cause}")

    def _assign_targets(self, node: Collective, text: str) -> None:
        if node.step.moves or node.step.kind == "window":
            self.state.fresh.update(m.target for m in node.moves)
        if isinstance(node, Move):
            self._assign_target(node, text)
            return
        names = [self.state.variables.assign(move.target) for move in node.moves]
        self.state.notes(names, (move.target for move in node.moves))
        self.out.assign(names, text)

    def _assign_target(self, node: Move, text: str) -> None:
        """Write what a move makes; a window may get the name of a result that it is."""
        start = len(self.out.lines)
        if not self.state.variables.share(node.target, text):
            self.state.let(node.target, text)
        last = LastAssignment(start, len(self.out.lines), node.target, text)
        if node.step.after.windows:
            self.state.last = last
        elif node.step.kind == "zero_fill" and self._is_kept_by_one(node):
            alone = self.state.name(node.source), self._keeps(node)
            self.state.last = last._replace(alone=alone)

    def _text(self, node: Collective, suffix: str = "") -> str:
        """The text of the call; `suffix` is `_start` for one that does not wait."""
        if isinstance(node, Bucket):
            return self._bucket(node, suffix)
        call = _function(node, self.mesh) + suffix
        if node.step.moves:
            self.state.used.add(call)
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
            "load": self._load,
            "store": self._store,
        }[node.step.kind](node, call)

    def _bucket(self, node: Bucket, suffix: str) -> str:
        call, step = f"{node.step.kind}_bucket{suffix}", node.step
        self.state.used.add(call)
        is_in_place = step.kind == "all_reduce"
        args = [f"[{self._sources(node, is_in_place)}]"]
        if not is_in_place:
            dims = (self._position(m.source, m.step.dim) for m in node.moves)
            args.append(f"[{', '.join(map(str, dims))}]")
        args.append(self._group(node))
        args += [f'"{step.op}"'] if step.op else []
        return f"{call}({', '.join(args)})"

    def _sources(self, node: Bucket, is_in_place: bool) -> str:
        if node in self.stacks:
            index = self.state.prefetched[node.moves[0].source].at
            return f"{self.stack}{index} for {self.stack} in {self.stacks[node]}"
        sources = (self._own(m) if is_in_place else self.state.tensor(m.source) for m in node.moves)
        return ", ".join(sources)

    def _group(self, node: Collective) -> str:
        return f'groups["{"+".join(self.mesh.written(node.step.axes))}"]'

    def _all_reduce(self, node: Move, call: str) -> str:
        return f'{call}({self._own(node)}, {self._group(node)}, "{node.step.op}")'

    def _own(self, node: Move) -> str:
        """The source of an all_reduce, which overwrites it: a copy if the memory is shared.

        An extreme of floats is made anew anyway.
        """
        anew = node.step.op in ("max", "min") and node.source.local.dtype.kind == "float"
        may_overwrite = anew or self.state.may_overwrite(node.source)
        may_overwrite = may_overwrite or node.source in self.state.places
        return self.state.tensor(node.source) + ("" if may_overwrite else ".clone()")

    def _all_gather(self, node: Move, call: str) -> str:
        dim = self._position(node.source, node.step.dim)
        sizes = ""
        if _is_uneven(node, self.mesh):
            ways = tuple_text(self._ways(node, node.source, node.step.dim))
            sizes = f"{self._joined(node)}, {ways}, "
        x, group = self.state.name(node.source), self._group(node)
        into = "" if node.into is None else f", into={self.state.name(node.into)}"
        return f"{call}({x}, {dim}, {sizes}{group}{into})"

    def _reduce_scatter(self, node: Move, call: str) -> str:
        dim = self._position(node.source, node.step.dim)
        x, group = self.state.tensor(node.source), self._group(node)
        ways = ""
        if _is_uneven(node, self.mesh):
            ways = f"{tuple_text(self._ways(node, node.target, node.step.dim))}, "
        return f'{call}({x}, {dim}, {ways}{group}, "{node.step.op}")'

    def _all_to_all(self, node: Move, call: str) -> str:
        if node.rows is not None:
            return self._all_to_all_counted(node, node.rows, call)
        split = self._position(node.source, node.step.to_dim)
        concat = self._position(node.source, node.step.dim)
        sizes = ""
        if _is_uneven(node, self.mesh):
            leaving = self._ways(node, node.target, node.step.to_dim)
            coming = self._ways(node, node.source, node.step.dim)
            ways = f"({tuple_text(leaving)}, {tuple_text(coming)})"
            sizes = f"{self._joined(node)}, {ways}, "
        x, group = self.state.name(node.source), self._group(node)
        return f"{call}({x}, {split}, {concat}, {sizes}{group})"

    def _all_to_all_counted(self, node: Move, rows: CountedRows, call: str) -> str:
        """The call on five dims: those exchanged, other batches, rows, and what a row has."""
        step, x, sizes = node.step, node.source.local.names, rows.leaving.local.names
        assert step.to_dim is not None
        assert step.dim is not None
        exchanged = ((step.to_dim,), (step.dim,))
        others = tuple(n for n in sizes if n in x and (n,) not in exchanged)
        placed_first = {step.to_dim, step.dim, rows.row, *others}
        dims = (*exchanged, others, (rows.row,), tuple(n for n in x if n not in placed_first))
        groups = (*exchanged, others, tuple(n for n in sizes if n not in x))
        numbers = [grouped(self.state.tensor(v), sizes, groups) for v in rows.reads]
        if rows.promise is not None:
            promise, span = rows.promise, rows.promise.span
            about = f"{promise.most}, {promise.room}, {f'{span.file}:{span.line}'!r}"
            numbers[0] = f"{self.state.call('check_rows')}({numbers[0]}, {about})"
        text = f"{call}({grouped(self.state.tensor(node.source), x, dims)}, {', '.join(numbers)}"
        target = _Extents(self.blocks, node.target)
        return ungrouped(target, f"{text}, {self._group(node)})", dims, x)

    def _joined(self, node: Move) -> str:
        """Text of the size of the dim that is joined."""
        assert node.step.dim is not None
        return self.blocks.extent(node.target, node.step.dim)

    def _ways(self, node: Move, split: Var, dim: str | None) -> tuple[Way, ...]:
        """How a dim is split over the axes of a collective, which are the innermost of it."""
        assert dim is not None
        ways = self.mesh.ways(dim, split.type.size(dim), split.placement.axes_of(dim))
        return ways[-len(node.step.axes) :]

    def _permute(self, node: Move, call: str) -> str:
        # Dicts of strings and tuples of them: their `repr` is their text.
        before, after = (repr(splits) for splits in node.step.changed())
        shape = ""
        if node.step.is_uneven(node.source.type, self.mesh):
            shape = f", {self.blocks.shape(node.target)}"
        return (
            f"{call}({self.state.name(node.source)}, rank, MESH, {before}, {after}, groups{shape})"
        )

    def _exchange(self, node: Move, call: str) -> str:
        (axis,) = node.step.axes
        device = self.blocks.device(axis)
        args = f"SCHEDULE[{device}], {device}, {self._group(node)}"
        if node.step.is_uneven(node.source.type, self.mesh):
            args += f", {self.blocks.shape(node.target)}"
        return f"{call}({self.state.tensor(node.source)}, {args})"

    def _halo(self, node: Move, call: str) -> str:
        """The call; a window of which nothing is sent is cut from the block, or from the whole."""
        window, placed = node.step.window, node.step.after
        reads, position = window.reads, self._position(node.source, window.dim)
        self.state.used.add(call)
        self._about_windows(node)
        args = window_text(window, placed.axes_of(window.dim))
        fill = _filling(node.source, reads.fill)
        where = "rank, MESH" + (", groups" if node.step.moves else "")
        if (wider := node.step.wider) is not None:
            where += f", {(_numbers(wider.reads), wider.reads.fill is None)}"
        if node.step.moves and (padded := padding_windows(node.step.before, self.mesh)):
            where += f", {tuple_text([self._padded(node, each) for each in padded])}"
        return f"{call}({self.state.tensor(node.source)}, {position}, {args}, {fill}, {where})"

    def _padded(self, node: Move, window: Window) -> str:
        """Text of an earlier window whose fill is not sent."""
        position = self._position(node.source, window.dim)
        args = window_text(window, node.step.before.axes_of(window.dim))
        return f"({position}, {args}, {_filling(node.source, window.reads.fill)})"

    def _about_windows(self, node: Move) -> None:
        """Write a comment: what each device has of the dim, of many the first and the last."""
        window = node.step.window
        held = [f"{a}:{b}" for a, b in node.step.after.held(window.dim, window.size, self.mesh)]
        shown = held if len(held) <= MOST_SHOWN else [*held[: MOST_SHOWN - 2], "…", held[-1]]
        axes = " and ".join(node.step.after.axes_of(window.dim))
        self.out.comment(f"along {axes}, of {window.dim}: {', '.join(shown)}")

    def _load(self, node: Move, call: str) -> str:
        return f"{call}({self.state.name(node.source)})"

    def _store(self, node: Move, call: str) -> str:
        tier = node.step.tier
        if tier not in self.tiers:
            self.tiers[tier] = self.state.variables.names.fresh(tier)
        return f"{call}({self.out.mention(self.tiers[tier])}, {self.state.tensor(node.source)})"

    def tier_lines(self) -> list[TextLine]:
        """The lines that make what keeps the activations of a step elsewhere."""
        made = ((name, self.state.call(tier.title())) for tier, name in self.tiers.items())
        return [self.out.line(f"{name} = {call}()") for name, call in made]

    # --- local moves -------------------------------------------------------------------------

    def _slice(self, node: Move, call: str) -> str:
        dim = node.step.dim
        assert dim is not None
        extent = self.blocks.extent(node.target, dim)
        start = self.blocks.start_in(node.target, node.source, node.step.axes, dim)
        position = self._position(node.source, dim)
        return f"{self.state.name(node.source)}.narrow({position}, {start}, {extent})"

    def _zero_fill(self, node: Move, call: str) -> str:
        """One device of the axis keeps its replica; for partial maxima and minima all may."""
        if node.step.op in ("max", "min"):
            return self.state.tensor(node.source)
        if node.step.dim is not None:
            return self._embed(node)
        keeps = self._keeps(node)
        if node.source in self.state.constants:
            number = f"{self.state.constants[node.source]} if {keeps} else 0"
            return scalar(number, node.source.local.dtype)
        x = self.state.name(node.source)
        if node.source.on is not None:
            shape, dtype = self.blocks.shape(node.source), node.source.local.dtype.torch
            zero = f"torch.zeros({shape}, dtype={dtype})"
            return f"{x} if {keeps} else {zero}"
        return f"{x} if {keeps} else torch.zeros_like({x})"

    def _keeps(self, node: Move) -> str:
        """Text of whether a device keeps its replica."""
        return f"{self.blocks.coordinate(node.step.axes[0])} == {node.step.at}"

    def _is_kept_by_one(self, node: Move) -> bool:
        """Whether a tensor goes on as it is on one device, as zeros on the others."""
        is_of_sum = node.step.op == "sum" and node.step.dim is None
        return is_of_sum and node.source not in self.state.constants

    def _embed(self, node: Move) -> str:
        """The text of the block at its place in a tensor of zeros."""
        dim = node.step.dim
        assert dim is not None
        size = self.blocks.extent(node.target, dim)
        start = self.blocks.start_in(node.source, node.target, node.step.axes, dim)
        position = self._position(node.source, dim)
        source, embed = self.state.name(node.source), self.state.call("embed_block")
        return f"{embed}({source}, {position}, {start}, {size})"

    # --- parts of calls ----------------------------------------------------------------------

    def _position(self, var: Var, dim: str | None) -> int:
        assert dim is not None
        return var.local.index(dim)


def window_text(window: Window, axes: tuple[str, ...]) -> str:
    """Text of the axes of a window, the sizes of its dim and its loop, and what is read."""
    return f"{axes!r}, {(window.size, window.loop)}, {_numbers(window.reads)}"


def _numbers(reads: Reads) -> tuple[int, int, int, int, bool]:
    return reads.mul, reads.div, reads.lo, reads.hi, reads.flip


def _filling(var: Var, fill: float | str | None) -> str:
    if not isinstance(fill, float | int):
        return quoted(fill) if fill else "None"
    return literal(fill if var.local.dtype.kind == "float" else int(fill))


def _function(node: Move, mesh: Mesh) -> str:
    """The function of the support library for a collective."""
    if node.rows is not None:
        return f"{node.step.kind}_counted"
    return f"{node.step.kind}_uneven" if _is_uneven(node, mesh) else node.step.kind


def _is_uneven(node: Move, mesh: Mesh) -> bool:
    """Whether a collective joins or makes blocks of several sizes, and has a function for that."""
    step, type_ = node.step, node.source.type
    if step.kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return False
    ends = {"all_gather": [step.before], "reduce_scatter": [step.after]}
    both = ends.get(step.kind, [step.before, step.after])
    dims = [d for d in (step.dim, step.to_dim) if d is not None]
    return any(p.is_uneven(d, type_.size(d), mesh) for p in both for d in dims)


def _cause_of_each(move: Move) -> str:
    """The same for one of several moves: where it says how the source is stored, without its name.

    So moves of tensors that are stored alike have one cause.
    """
    cause, said = move.cause, f"`{move.source.value.label}` is stored "
    return f"each is stored {cause.removeprefix(said)}" if cause.startswith(said) else cause
