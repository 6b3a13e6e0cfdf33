"""The text of the emitted program: plain torch with explicit collectives, a statement per operator.

Nothing of a `.mdsl` file becomes code: identifiers come from `names.py`, strings are written
as literals, and source lines are in comments with control characters escaped.
"""

from __future__ import annotations

import functools
import itertools
import re
import symtable
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from meshdsl.backends.torch.bindings import ComparedValues, check_bindings
from meshdsl.backends.torch.identifiers import module_names
from meshdsl.backends.torch.inliner import bound_names, paste
from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, quoted
from meshdsl.backends.torch.move_text import typed
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.backends.torch.passes import STAGE
from meshdsl.backends.torch.pipeline_text import Pipelines
from meshdsl.backends.torch.preamble import assigned, foot, head
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.backends.walk import NOWHERE
from meshdsl.device import offloaded_updates
from meshdsl.device.aliases import copied_first, shared
from meshdsl.device.ir import (
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    Var,
    only_on,
)
from meshdsl.device.liveness import (
    LARGE,
    deaths,
    entered,
    given_up,
    is_constant,
    kept_after,
    kept_inside,
    overwrites,
    shows_operand,
)
from meshdsl.device.offloaded_updates import Streamed, streamed
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.placements import Window


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The program, and what stands behind its lines.

    That is the source place (`file:line`), and the statement of the device program.
    """

    text: str
    places: dict[int, str]
    nodes: dict[int, Node] = field(default_factory=dict)


def emit(
    program: DeviceProgram, draws: dict[Value, tuple[object, ...]], bare: bool = False
) -> ProgramText:
    """The standalone program; with `bare`, its function `device` alone.

    `draws` are the distributions of values not given (`Spec.draw`).
    """
    return _written(program).whole(draws, bare)


def identifiers(program: DeviceProgram) -> Mapping[str, str]:
    """The variables of the text, by their names in the device program."""
    return _written(program).variables.chosen


@functools.lru_cache(maxsize=2)
def _written(program: DeviceProgram) -> TextEmitter:
    """The statements of a program: once for its text and for a report, which names variables."""
    emitter = TextEmitter(program)
    emitter.device()
    return emitter


class TextEmitter(Pipelines):
    """Writes a program's text; `module/module_text.py` writes another of the same statements."""

    def __init__(self, program: DeviceProgram, taken: frozenset[str] = frozenset()) -> None:
        super().__init__(program, taken)
        self.used = {"main"}
        self.copied_first = copied_first(program)
        self.away = program.away
        self.streamed = streamed(program)
        self.rounded = {update.cast for update in self.streamed.values()}
        # The last assignment: the first and last of its lines, the variable, the text.
        self.last: tuple[int, int, Var, str] | None = None
        self.renamed: set[Var] = set()
        self.checked: set[tuple[Var, str, int | None]] = set()
        # The helper variables of the last statement, if they may be large.
        self.helpers: list[str] = []
        # The device along the axis of the stages that alone does what is written, if one does.
        self.device_alone: int | None = None

    def whole(self, draws: dict[Value, tuple[object, ...]], bare: bool) -> ProgramText:
        """The text; `bare` is the function `device` alone."""
        pasted = paste(self.used)
        states = ", STATES" if self.program.updates else ""
        begun = ", assigned=ASSIGNED" if assigned(self.program) else ""
        begun += f", local={_store(self.away)}().local_value" if self.away else ""
        call = f"main(MESH, GROUPS, device, OUTPUTS, INPUTS, PARAMS{states}{begun})"
        above = head(self.program, draws, pasted.imports)
        self.check_names(above, pasted.names)
        if bare:
            return self.under(head(self.program, draws, pasted.imports, bare), [])
        return self.under(above, foot(pasted.texts, call))

    def check_names(self, above: list[str], pasted: tuple[str, ...]) -> None:
        """Check that functions read what is bound, under lines `above` and beside what is pasted.

        The check is of the text itself: a mistake here would be a crash of a device, or worse.
        """
        module = {*bound_names("\n".join(above)), *pasted}
        unlisted = ", ".join(sorted(module - module_names()))
        assert not unlisted, f"the text defines {unlisted}, which variables may have as names"
        lines = [line.text for line in self.out.lines]
        check_bindings(lines, len(above) + 1, module, self._devices(), self.variables.names.known)

    def _devices(self) -> ComparedValues:
        """The coordinates that the text tests, and the stages of a device."""
        sizes = {self.at[axis]: size for axis, size in self.mesh.axes if axis in self.at}
        pipe = next((n for n in self.program.body if isinstance(n, Pipeline)), None)
        if pipe is None:
            return ComparedValues(sizes)
        return ComparedValues(sizes, self.at[pipe.axis], STAGE, pipe.known.held)

    def under(self, above: list[str], below: list[str]) -> ProgramText:
        """The text of the functions written so far, with lines `above` and `below`."""
        lines = [*map(TextLine, above), *self.out.lines, *map(TextLine, below)]
        places = {n: line.place for n, line in enumerate(lines, 1) if line.place}
        nodes = {n: line.node for n, line in enumerate(lines, 1) if line.node is not None}
        return ProgramText("\n".join(line.text for line in lines) + "\n", places, nodes)

    # --- the device function -------------------------------------------------------------------

    def device(self) -> None:
        """Write the function `device`."""
        out, program = self.out, self.program
        out.depth = 0
        trained = ", states" if program.updates else ""
        out.add(f"def device(rank, groups, inputs, params{trained}):")
        out.depth = 1
        out.add(
            f'"""What device `rank` of {self.mesh.devices} does; the same text for all of them."""'
        )
        start = len(out.lines)
        self.entries()
        self.block(program.body, kept_after(program))
        self._updates()
        self._return()
        out.lines[start:start] = self._coordinates(out.lines)

    def _coordinates(self, lines: list[TextLine]) -> list[TextLine]:
        """The lines of this device's coordinates on each axis that a function's lines use."""
        text = "\n".join(line.text for line in lines)
        blocks = {k: v for k, v in self.blocks.items() if self._is_of_device(k)}
        names = {*self.at.values(), *itertools.chain(*blocks.values())}
        if not any(re.search(rf"\b{name}\b", text) for name in names):
            return []
        used = set(_globals(symtable.symtable(text, "text", "exec")))
        blocks = {k: v for k, v in blocks.items() if not used.isdisjoint(v)}
        used |= {self.at[axis] for _, _, axes in blocks for axis in axes}
        coordinate_lines = []
        stride = self.mesh.devices
        for axis, size in self.mesh.axes:
            stride //= size
            name = self.at[axis]
            text = "rank" if stride == 1 else f"rank // {stride}"
            is_outermost = stride * size == self.mesh.devices
            if name in used:
                coordinate_lines.append(
                    TextLine(f"{INDENT}{name} = {text}{'' if is_outermost else f' % {size}'}")
                )
        return coordinate_lines + [
            TextLine(INDENT + self.block_line(*k, *v)) for k, v in blocks.items()
        ]

    def entry(self, var: Var, kind: str) -> None:
        """Write the line of a given tensor, if it is read."""
        key = var.value.label if kind == "inputs" else var.value.name or ""
        if self.uses[var] and var not in self.away:
            alone = "" if var.on is None else f" where {self.at[self._pipe.axis]} == {var.on}"
            text = f"{self.variables.assign(var)} = {kind}[{quoted(key)}]"
            self.out.statement(text, typed(var) + alone)

    def block(self, nodes: tuple[Node, ...], kept: frozenset[Var]) -> None:
        """Write the statements of a function; `kept` are read after them."""
        self._mark(nodes, kept, frozenset())
        for device, group in _by_device(nodes):
            with self.alone(device):
                self.nodes(group)

    @contextmanager
    def alone(self, device: int | None) -> Iterator[None]:
        """Write what a device along the axis of the stages does alone; None: what all do."""
        if device is None:
            yield
            return
        self.last, self.device_alone, before = None, device, len(self.out.lines)
        self.out.add(f"if {self.at[self._pipe.axis]} == {device}:")
        self.out.depth += 1
        yield
        self.out.depth -= 1
        self.last = self.device_alone = None
        if self.out.only_comments(before + 1):
            del self.out.lines[before:]
            self.shown = NOWHERE

    def _mark(self, nodes: tuple[Node, ...], kept: frozenset[Var], own: frozenset[Var]) -> None:
        """Note which large tensors are deleted after each statement, and in loops."""
        for node, dead in zip(nodes, deaths(nodes, kept, own), strict=True):
            self.dead[node] = dead
            if isinstance(node, DeviceLoop):
                self._mark(node.body, kept_inside(node), entered(node, self.collected))

    def headed(self, node: Node) -> bool:
        """Whether a node has its source line above it; a constant has, too."""
        return super().headed(node) or isinstance(node, Compute)

    def node(self, node: Node) -> None:
        """Write one statement; large tensors are deleted after their last use."""
        self.variables.reach(node)
        outside, self.out.node = self.out.node, None if isinstance(node, DeviceLoop) else node
        with self.elsewhere(node):
            super().node(node)
        self.out.node = outside
        dead = self.dead[node]
        gone = given_up(node, dead) if isinstance(node, DeviceLoop) else ()
        self._let_go(tuple(v for v in dead if v not in gone))

    def _let_go(self, dead: tuple[Var, ...]) -> None:
        """Delete variables, in as many statements as fit a line; each where there is one."""
        for device in dict.fromkeys(v.on for v in dead if v.on not in (None, self.device_alone)):
            with self.alone(device):
                self._let_go(tuple(v for v in dead if v.on == device))
        dead = tuple(v for v in dead if v.on in (None, self.device_alone))
        gone = (self.variables.let_go(v) for v in dead if v not in self.renamed)
        names = [*self.helpers, *(name for name in gone if name)]
        self.helpers = []
        room = WIDTH - len(INDENT) * self.out.depth - len("del ")
        while names:
            count = len(names)
            while count > 1 and len(", ".join(names[:count])) > room:
                count -= 1
            self.out.statement(f"del {', '.join(names[:count])}")
            names = names[count:]

    def compute(self, node: Compute) -> None:
        """Write an operator, in place where no other variable shares the memory."""
        if node.onto is not None:
            self._write_onto(node)
            self.fresh.update(node.outs if node.ins[node.onto] in self.fresh else ())
            return
        if node in self.streamed:
            self._in_chunks(self.streamed[node])
        if node in self.streamed or node in self.rounded:
            self._has_memory(node)
            return
        opdef = lookup(node.name)
        call = self._call(node)
        text = self._in_place(node, call) or opdef.torch(call)
        for line in call.lines:
            self.out.statement(line)
        self._assign(node, text)
        # They may be twice as wide as their operands.
        if any(2 * v.local.bytes >= LARGE for v in (*node.ins, *node.outs)):
            self.helpers = call.helpers
        self._has_memory(node)

    def _in_chunks(self, found: Streamed) -> None:
        """Write an update of states that lie elsewhere as a loop over chunks of them."""
        node, call = found.update, self._call(found.update)
        first, dims = self._updated(found), call.ins[0].dims
        gradient = call.tensor(1) if call.is_constant(1) else call.aligned(1, dims)
        for var, index in zip(found.new, found.states, strict=True):
            self.variables.follow(var, node.ins[index])
        states = dict(zip(found.states, map(self.variables.assign, found.new), strict=True))
        stored = ", ".join(_stored(node.ins[i]) for i in found.states)
        hints = (first, "gradient" if call.is_constant(1) else call.args[1])
        pieces = [self.variables.names.fresh(f"{hint}_chunk") for hint in hints]
        self.helpers = [*pieces, *states.values()]
        self.used.update(("chunks", _store(self.away)))
        of = f"[{first}, {gradient}], [{stored}], {offloaded_updates.CHUNK:_}"
        self.out.statement(f"for {', '.join(self.helpers)} in chunks({of}):")
        self.out.depth += 1
        args = tuple(states.get(i, text) for i, text in enumerate((*pieces, *call.args[2:])))
        chunk = replace(
            call,
            args=args,
            constants=(False, False, *call.constants[2:]),
            ins=(call.ins[0], TensorType(dims, call.ins[1].dtype), *call.ins[2:]),
            whole="" if 0 in states else first,
        )
        new = ", ".join(args[i] for i in lookup(node.name).overwrites)
        self.out.statement(f"{new} = {lookup(node.name).torch(chunk)}")
        if found.cast is not None:
            self.out.statement(f"{pieces[0]}.copy_({states[0]})")
        self.out.depth -= 1

    def _updated(self, found: Streamed) -> str:
        """The identifier of the parameter that an update writes, made anew where it is a cast's."""
        node, cast = found.update, found.cast
        if cast is not None:
            name = self.variables.assign(cast.outs[0])
            dtype = cast.outs[0].local.dtype.torch
            text = f"torch.empty({_stored(node.ins[0])}.shape, dtype={dtype})"
            self.out.statement(f"{name} = {text}", typed(cast.outs[0]))
            return name
        self.variables.follow(node.outs[0], node.ins[0])
        argument, name = self._argument(node.ins[0], 0, node), self.variables.assign(node.outs[0])
        if argument != name:
            self.out.statement(f"{name} = {argument}", typed(node.outs[0]))
        return name

    def _has_memory(self, node: Compute) -> None:
        """Note whether the results of a statement have memory of their own or are views."""
        if not shows_operand(node):
            has_memory = not lookup(node.name).overwrites
            self.fresh.update(node.outs if has_memory else ())
            return
        self.views.update(node.outs)
        # A view is fresh, too, if its operand is and has no other use.
        if node.ins[0] in self.fresh and self.uses[node.ins[0]] == 1:
            self.fresh.update(node.outs)

    def _in_place(self, node: Compute, call: TorchText) -> str | None:
        """Text that writes over an operand that is dead and shares no memory, if there is one.

        Only in a training step: torch's autograd may differentiate a forward pass.
        """
        if not self.program.updates:
            return None
        opdef = lookup(node.name)
        numbers = frozenset(i for i, var in enumerate(node.ins) if var in self.constants)
        for index in opdef.written_over(call.ins, numbers):
            var = node.ins[index]
            may_overwrite = var in self.fresh - self.views and self.uses[var] == 1
            if may_overwrite and var.local == node.outs[0].local:
                return opdef.in_place[index](call)
        return None

    def _assign(self, node: Compute, text: str) -> None:
        """Write `name = text`; where that only renames the last result, that one gets the name."""
        target, before = node.outs[0], None
        if self.last and node.ins and self._only_renames(node, text):
            start, _, source, text = self.last
            self.out.node = self.out.lines[start].node
            del self.out.lines[start:]
            self.renamed.add(source)
            self.variables.forget(source)
            before = source
        elif len(node.outs) == 1 and self.variables.share(target, text):
            return
        start = len(self.out.lines)
        for var, index in zip(node.outs, overwrites(node), strict=False):
            self.variables.follow(var, node.ins[index])
        names = [self.variables.assign(var) for var in node.outs]
        if before is not None:
            self.variables.known_as(before, names[0])
        self.out.statement(f"{', '.join(names)} = {text}", typed(target))
        self.last = (start, len(self.out.lines), target, text) if len(names) == 1 else None

    def _assign_targets(self, node: Collective, text: str) -> None:
        """Write what a collective makes; a window may get the name of a result that it is."""
        start = len(self.out.lines)
        super()._assign_targets(node, text)
        if isinstance(node, Move) and node.step.after.windows:
            self.last = (start, len(self.out.lines), node.target, text)

    def _only_renames(self, node: Compute, text: str) -> bool:
        assert self.last is not None
        _, end, source, _ = self.last
        alone = source is node.ins[0] and self.uses[source] == 1 and text == self.name(source)
        return alone and end == len(self.out.lines)

    def _call(self, node: Compute) -> TorchText:
        splits = {d: v for v in (*node.ins, *node.outs) for d, _ in v.placement.splits}
        blocks = {d: block for d, v in splits.items() if (block := self.block_of(v, d))}
        offsets = {d: self._offset(d, v) for d, v in splits.items()}
        starts = self._starts(node)
        empty = (d for d in blocks if self.may_be_empty(splits[d], d))
        none_read = ((i, d) for i, d in starts if self.may_read_nothing(node.ins[i], d))
        return TorchText(
            args=tuple(self._argument(v, i, node) for i, v in enumerate(node.ins)),
            constants=tuple(v in self.constants for v in node.ins),
            ins=tuple(v.local for v in node.ins),
            outs=tuple(v.local for v in node.outs),
            global_ins=tuple(v.value.type for v in node.ins),
            global_outs=tuple(v.value.type for v in node.outs),
            attrs=dict(node.attrs),
            fresh=self.variables.names.fresh,
            checked=lambda index, dim: self._seen(node.ins[index], dim),
            place=repr(self.out.place),
            offsets=offsets,
            starts=starts,
            splits=frozenset(splits),
            extents={d: extent for d, (_, extent) in blocks.items()},
            empty=frozenset((*empty, *none_read)),
            used=self.used,
        )

    def _seen(self, var: Var, dim: str) -> bool:
        """Whether a variable has been checked to be indices of a dim; from now on, it is.

        What one device checks alone is known there alone.
        """
        is_checked = not self.checked.isdisjoint(((var, dim, None), (var, dim, self.device_alone)))
        self.checked.add((var, dim, self.device_alone))
        return is_checked

    def _argument(self, var: Var, index: int, node: Compute) -> str:
        """The text of an operand; one that is overwritten and shared is copied first."""
        if index in lookup(node.name).overwrites and var in self.copied_first:
            return f"{self.name(var)}.clone()"
        return self.ref(var)

    def _offset(self, dim: str, var: Var) -> str:
        """Text of the index that this device's block of a dim begins at, which `var` has."""
        block = self.block_of(var, dim)
        if block:
            return block[0]
        blocks = var.placement.plain.local(var.type, self.mesh)
        return self._times(var.placement.axes_of(dim), blocks.size(dim))

    def _starts(self, node: Compute) -> dict[tuple[int, str], Callable[[], str]]:
        """What writes the index that each window begins at, by operand and dim.

        Also of one that is no more than the block, and so has not been made.
        """
        ins, outs = (tuple(v.type for v in vs) for vs in (node.ins, node.outs))
        loops = lookup(node.name).factors(Signature(ins, outs, dict(node.attrs))).loops
        starts: dict[tuple[int, str], Callable[[], str]] = {}
        for index, dim in ((i, f.ins[i]) for f in loops for i, r in enumerate(f.reads) if r):
            placed = node.ins[index].placement
            if dim is None or not (axes := placed.axes_of(dim)):
                continue
            window = next((w for w in placed.windows if w.dim == dim), None)
            starts[index, dim] = (
                functools.partial(self._offset, dim, node.ins[index])
                if window is None
                else functools.partial(self._start, window, axes)
            )
        return starts

    def _start(self, window: Window, axes: tuple[str, ...]) -> str:
        """Text of the index that a window begins at: below 0 where that is fill."""
        reads, ways = window.reads, self.mesh.size(*axes)
        if reads.flip or reads.fill is None or window.loop % ways:
            self.used.add("window_start")
            text = self.window_text(window, axes)
            return f"window_start({text}, {reads.fill is None}, rank, MESH)"
        first = self._times(axes, window.loop // ways * reads.mul)
        sign = "-" if reads.lo < 0 else "+"
        text = f"{first} {sign} {abs(reads.lo)}" if reads.lo else first
        return text if reads.div == 1 else f"-(-({text}) // {reads.div})"

    def literal(self, value: object) -> str:
        """A number as Python source, `-1e9` where that is much shorter than its digits."""
        text = repr(value)
        if text.lstrip("-") in ("inf", "nan"):
            return f'float("{text}")'
        if not isinstance(value, float):
            return text
        mantissa, _, exponent = f"{value:.16e}".partition("e")
        short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
        shorter = "e" in text or len(short) + 5 < len(text)
        return short if shorter and float(short) == value and len(short) <= len(text) else text

    # --- end ---------------------------------------------------------------------------------

    def _updates(self) -> None:
        """Write the values that the next step begins with."""
        self.out.place = ""
        if self.program.updates:
            self.out.add()
        program, owners = self.program, shared(self.program)
        params = set(program.params)
        entering = {owners.get(v, v) for v in (*program.inputs, *program.params, *program.states)}
        largest: dict[Var, int] = {}
        for var, owner in owners.items():
            largest[owner] = max(largest.get(owner, 0), var.local.bytes, owner.local.bytes)
        stored = (pair for pair in program.updates if pair[0] not in self.away)
        for device, pairs in itertools.groupby(stored, lambda pair: pair[0].on):
            with self.alone(device):
                for old, new in pairs:
                    where = "params" if old in params else "states"
                    owner = owners.get(new, new)
                    # What is stored has memory of its own, or that of the tensor it replaces; a
                    # part of a larger one would keep all of that.
                    copied = owner in entering or largest.get(owner, 0) > new.local.bytes
                    copied = copied and owner is not owners.get(old, old)
                    text = f"{self._tensor(new)}{'.clone()' if copied else ''}"
                    self.out.statement(f"{where}[{quoted(old.value.name or '')}] = {text}")

    def _return(self) -> None:
        self.out.place = ""
        self.out.add()
        owners, updates = shared(self.program), self.program.updates
        onto = (old for old, new in updates if old is not new and old.name == new.name)
        stored = {owners.get(old, old) for old in onto}
        items = []
        for name, var in self.program.outputs:
            # Of a parameter that each step writes `onto`, a copy is returned.
            copy = ".clone()" if owners.get(var, var) in stored else ""
            items.append(f"{quoted(name)}: {self._tensor(var)}{copy}")
        self.out.statement(f"return {{{', '.join(items)}}}")


def _by_device(nodes: tuple[Node, ...]) -> Iterator[tuple[int | None, tuple[Node, ...]]]:
    """Statements that follow each other on one device; constants, which have no text, join any."""
    group: list[Node] = []
    device: int | None = None
    for node in nodes:
        if not is_constant(node) and (alone := only_on(node)) != device:
            yield device, tuple(group)
            group, device = [], alone
        group.append(node)
    yield device, tuple(group)


def _store(away: Mapping[Var, str]) -> str:
    """The class of the runtime that keeps the states that lie elsewhere."""
    return next(iter(away.values())).title()


def _stored(state: Var) -> str:
    """Text of a state as it is given."""
    return f"states[{quoted(state.value.name or '')}]"


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that functions of a text read and do not assign."""
    if isinstance(table, symtable.Function):
        yield from table.get_globals()
    for inner in table.get_children():
        yield from _globals(inner)
