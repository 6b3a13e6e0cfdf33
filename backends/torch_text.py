"""The text of the emitted program: plain torch with explicit collectives, a statement per operator.

Nothing of a `.mdsl` file becomes code: identifiers come from `device/names.py`, strings are written
as literals, and source lines stand in comments with control characters escaped.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

from meshdsl.backends.format_text import INDENT, quoted
from meshdsl.backends.lines import Lines
from meshdsl.backends.paste import library, paste
from meshdsl.backends.torch_call import TorchText
from meshdsl.backends.torch_head import head, inert, type_text
from meshdsl.device.ir import Collected, Compute, Loop, Move, Node, Program, Var
from meshdsl.device.liveness import deaths, kept_after, kept_inside, owners
from meshdsl.device.names import Names
from meshdsl.diagnostics import Span
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import lookup


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The program, and the source place (`file:line`) behind each line of it that has one."""

    text: str
    places: dict[int, str]


def taken_names() -> frozenset[str]:
    """Names that the support library gives a meaning to."""
    return frozenset(library())


def emit(program: Program, draws: dict[Value, tuple[object, ...]]) -> ProgramText:
    """The standalone program. `draws` says how values not given are made up (`Spec.draw`)."""
    return _Emitter(program, draws).emit()


class _Emitter:
    def __init__(self, program: Program, draws: dict[Value, tuple[object, ...]]) -> None:
        self.program = program
        self.draws = draws
        self.mesh = program.mesh
        self.used: set[str] = {"main", "Spec"}
        self.out = Lines()
        self.names = Names(taken_names() | frozenset(_names(program)))
        self.constants: dict[Var, str] = {}
        self.uses = _uses(program)
        self.fresh: set[Var] = set()
        self.shown_outside = owners(program)
        self.shown: tuple[str, int] = ("", 0)
        # The last assignment: where its lines begin and end, the variable, the text.
        self.last: tuple[int, int, Var, str] | None = None
        self.renamed: set[Var] = set()

    def emit(self) -> ProgramText:
        self._device()
        top = head(self.program, self.draws, paste(self.used))
        lines = [(line, "") for line in top]
        lines += self.out.lines
        states = ", STATES" if self.program.updates else ""
        call = f"main(MESH, GROUPS, INPUTS, PARAMS, OUTPUTS, device{states})"
        tail = ["", "", 'if __name__ == "__main__":', INDENT + call]
        lines += [(line, "") for line in tail]
        places = {n: place for n, (_, place) in enumerate(lines, 1) if place}
        return ProgramText("\n".join(line for line, _ in lines) + "\n", places)

    # --- the device function -------------------------------------------------------------------

    def _device(self) -> None:
        out, program = self.out, self.program
        out.depth = 0
        trained = ", states" if program.updates else ""
        out.add(f"def device(rank, groups, inputs, params{trained}):")
        out.depth = 1
        out.add(
            f'"""What device `rank` of {self.mesh.devices} does; the same text for all of them."""'
        )
        start = len(out.lines)
        for var in program.inputs:
            if self.uses[var]:
                out.statement(f"{var.name} = inputs[{quoted(var.value.label)}]", _typed(var))
        for var in program.params:
            if self.uses[var]:
                out.statement(f"{var.name} = params[{quoted(var.value.name or '')}]", _typed(var))
        for var in program.states:
            if self.uses[var]:
                out.statement(f"{var.name} = states[{quoted(var.value.name or '')}]", _typed(var))
        self._nodes(program.body, kept_after(program))
        self._updates()
        self._return()
        out.lines[start:start] = self._coordinates()

    def _coordinates(self) -> list[tuple[str, str]]:
        """Where this device stands on each axis that the text asks for, as lines."""
        tree = ast.parse("\n".join(line for line, _ in self.out.lines))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        lines = []
        stride = self.mesh.devices
        for axis, size in self.mesh.axes:
            stride //= size
            name = self.program.coordinates[axis]
            text = "rank" if stride == 1 else f"rank // {stride}"
            whole = stride * size == self.mesh.devices
            if name in used:
                lines.append((f"{INDENT}{name} = {text}{'' if whole else f' % {size}'}", ""))
        return lines

    def _nodes(self, nodes: tuple[Node, ...], kept: frozenset[Var]) -> None:
        """The statements of a block; large tensors are let go after their last use."""
        for node, dead in zip(nodes, deaths(nodes, kept), strict=True):
            self._source_line(node.span)
            match node:
                case Compute():
                    self._compute(node)
                case Move():
                    self._move(node)
                case Loop():
                    self._loop(node)
            gone = [v.name for v in dead if v not in self.renamed]
            if gone:
                self.out.statement(f"del {', '.join(gone)}")

    def _source_line(self, span: Span) -> None:
        """The source line that the next statements come from, as a comment."""
        place = (span.file, span.line)
        self.out.place = f"{span.file}:{span.line}"
        if place == self.shown:
            return
        self.shown = place
        if not self.out.lines[-1][0].endswith(":"):
            self.out.add()
        self.out.add(f"# {inert(self.out.place)}  {inert(span.source.line(span.line).strip())}")

    def _compute(self, node: Compute) -> None:
        if node.op.name == "constant":
            self.constants[node.outs[0]] = _literal(node.op.attr("value"))
            return
        opdef = lookup(node.op.name)
        call = self._call(node)
        text = opdef.torch(call)
        for line in call.lines:
            self.out.statement(line)
        self._assign(node, text)
        # A view is nobody else's memory either, if its operand is not and has no other use.
        if not opdef.view or (node.ins[0] in self.fresh and self.uses[node.ins[0]] == 1):
            self.fresh.update(node.outs)

    def _assign(self, node: Compute, text: str) -> None:
        """`name = text`; where it would only rename the last result, that one gets the name."""
        target = node.outs[0]
        if self.last and node.ins and self._only_renames(node, text):
            start, _, source, text = self.last
            del self.out.lines[start:]
            self.renamed.add(source)
        start = len(self.out.lines)
        self.out.statement(f"{', '.join(v.name for v in node.outs)} = {text}", _typed(target))
        self.last = (start, len(self.out.lines), target, text)

    def _only_renames(self, node: Compute, text: str) -> bool:
        assert self.last is not None
        _, end, source, _ = self.last
        alone = source is node.ins[0] and self.uses[source] == 1 and text == source.name
        return alone and end == len(self.out.lines)

    def _call(self, node: Compute) -> TorchText:
        splits = {d: axes for v in (*node.ins, *node.outs) for d, axes in v.placement.splits}
        offsets = {d: self._offset(d, axes, node) for d, axes in splits.items()}
        return TorchText(
            args=tuple(self._argument(v, i, node) for i, v in enumerate(node.ins)),
            constants=tuple(v in self.constants for v in node.ins),
            ins=tuple(v.local for v in node.ins),
            outs=tuple(v.local for v in node.outs),
            global_ins=tuple(v.value.type for v in node.ins),
            global_outs=tuple(v.value.type for v in node.outs),
            attrs=dict(node.op.attrs),
            fresh=self.names.fresh,
            place=repr(self.out.place),
            offsets=offsets,
            splits=frozenset(splits),
            used=self.used,
        )

    def _argument(self, var: Var, index: int, node: Compute) -> str:
        """The text of an operand; one that is overwritten and returned as well is copied first."""
        if index in lookup(node.op.name).overwrites and var in self.shown_outside:
            return f"{var.name}.clone()"
        return self.constants.get(var, var.name)

    def _offset(self, dim: str, axes: tuple[str, ...], node: Compute) -> str:
        holders = [v for v in (*node.ins, *node.outs) if v.placement.axes_of(dim)]
        return self._times(axes, holders[0].local.size(dim))

    def _index(self, axes: tuple[str, ...]) -> str:
        """Text of the block number of this device along `axes`, outer first."""
        text = self.program.coordinates[axes[0]]
        for axis in axes[1:]:
            text = f"({text})" if " " in text else text
            text = f"{text} * {self.mesh.size(axis)} + {self.program.coordinates[axis]}"
        return text

    def _times(self, axes: tuple[str, ...], extent: int) -> str:
        index = self._index(axes)
        if extent == 1:
            return index
        return f"({index}) * {extent}" if " " in index else f"{index} * {extent}"

    # --- moves -------------------------------------------------------------------------------

    def _move(self, node: Move) -> None:
        text = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "permute": self._permute,
            "slice": self._slice,
            "zero_fill": self._zero_fill,
        }[node.step.kind](node)
        if node.step.moves:
            self.used.add(node.step.kind)
            self.fresh.add(node.target)
            n = self.mesh.size(*node.step.axes)
            self.out.comment(f"{node.step.kind} over {n} devices, {node.wire:,} B sent: {node.why}")
        if node.source in self.constants:
            self.constants[node.target] = node.target.name
        self.out.statement(f"{node.target.name} = {text}", _typed(node.target))

    def _group(self, node: Move) -> str:
        return f'groups["{"+".join(node.step.axes)}"]'

    def _all_reduce(self, node: Move) -> str:
        """In place where nobody else can see the memory."""
        own = node.source in self.fresh and self.uses[node.source] == 1
        x = node.source.name if own else f"{self._tensor(node.source)}.clone()"
        return f'all_reduce({x}, {self._group(node)}, "{node.step.op}")'

    def _all_gather(self, node: Move) -> str:
        dim = self._position(node.source, node.step.dim)
        return f"all_gather({node.source.name}, {dim}, {self._group(node)})"

    def _reduce_scatter(self, node: Move) -> str:
        dim = self._position(node.source, node.step.dim)
        x, group = self._tensor(node.source), self._group(node)
        return f'reduce_scatter({x}, {dim}, {group}, "{node.step.op}")'

    def _all_to_all(self, node: Move) -> str:
        split = self._position(node.source, node.step.to_dim)
        concat = self._position(node.source, node.step.dim)
        return f"all_to_all({node.source.name}, {split}, {concat}, {self._group(node)})"

    def _permute(self, node: Move) -> str:
        before, after = (_splits_text(splits) for splits in node.step.changed())
        return f"permute({node.source.name}, rank, MESH, {before}, {after}, groups)"

    def _slice(self, node: Move) -> str:
        dim = node.step.dim
        assert dim is not None
        extent = node.target.local.size(dim)
        start = self._times(node.step.axes, extent)
        return f"{node.source.name}.narrow({self._position(node.source, dim)}, {start}, {extent})"

    def _zero_fill(self, node: Move) -> str:
        """One device of the axis keeps its copy; partial maxima and minima may all keep theirs."""
        if node.step.op in ("max", "min"):
            return self.constants.get(node.source, node.source.name)
        if node.step.dim is not None:
            return self._embed(node)
        axis = self.program.coordinates[node.step.axes[0]]
        if node.source in self.constants:
            return f"{self.constants[node.source]} if {axis} == 0 else 0"
        x = node.source.name
        return f"{x} if {axis} == 0 else torch.zeros_like({x})"

    def _embed(self, node: Move) -> str:
        """The block at its place in a tensor of zeros."""
        dim = node.step.dim
        assert dim is not None
        extent, size = node.source.local.size(dim), node.target.local.size(dim)
        self.used.add("embed_block")
        start = self._times(node.step.axes, extent)
        position = self._position(node.source, dim)
        return f"embed_block({node.source.name}, {position}, {start}, {size})"

    def _position(self, var: Var, dim: str | None) -> int:
        assert dim is not None
        return var.local.index(dim)

    def _tensor(self, var: Var) -> str:
        if var not in self.constants:
            return var.name
        return f"torch.tensor({self.constants[var]}, dtype={var.local.dtype.torch})"

    # --- loops -------------------------------------------------------------------------------

    def _loop(self, node: Loop) -> None:
        for carry in node.carries:
            if carry.inside.name != carry.init.name:
                init = self._tensor(carry.init)
                self.out.statement(f"{carry.inside.name} = {init}", _typed(carry.inside))
        for made in node.collected:
            self._room(made)
        indices = f"range({node.dim.size})"
        self.out.add(f"for {node.index} in {f'reversed({indices})' if node.reverse else indices}:")
        self.out.depth += 1
        for stack, inside in node.stacked:
            self.out.statement(f"{inside.name} = {self._slice_of(stack, node)}", _typed(inside))
        # What is made outside is needed again in the next trip: it is nobody's to overwrite inside.
        outside, self.fresh = self.fresh, set()
        self._nodes(node.body, kept_inside(node))
        self.fresh = outside | {c.outer for c in node.collected if not c.is_list}
        for made in node.collected:
            self._collect(made, node)
        self._carry(node)
        self.out.depth -= 1
        self.shown = ("", 0)

    def _slice_of(self, stack: Var, node: Loop) -> str:
        """The text of the current slice; lists that one loop reads from the end are used up."""
        position = stack.local.index(node.dim.name)
        if position:
            return f"{stack.name}.select({position}, {node.index})"
        if stack in self.program.lists and node.reverse and self.uses[stack] == 1:
            return f"{stack.name}.pop()"
        return f"{stack.name}[{node.index}]"

    def _room(self, made: Collected) -> None:
        """Where a loop puts what it collects."""
        text = "[]"
        if not made.is_list:
            shape, dtype = list(made.outer.local.shape), made.outer.local.dtype.torch
            text = f"torch.empty({shape}, dtype={dtype})"
        self.out.statement(f"{made.outer.name} = {text}", _typed(made.outer))

    def _collect(self, made: Collected, node: Loop) -> None:
        text = f"{made.outer.name}[{node.index}] = {self._tensor(made.inside)}"
        if made.is_list:
            text = f"{made.outer.name}.append({self._tensor(made.inside)})"
        self.out.statement(text)

    def _carry(self, node: Loop) -> None:
        """What the next trip begins with; all at once, since one may be another's old value."""
        pairs = [(c.inside.name, self._tensor(c.next)) for c in node.carries]
        pairs = [(a, b) for a, b in pairs if a != b]
        if pairs:
            names, values = zip(*pairs, strict=True)
            self.out.statement(f"{', '.join(names)} = {', '.join(values)}")
        elif not node.body and not node.stacked and not node.collected:
            self.out.add("pass")

    # --- end ---------------------------------------------------------------------------------

    def _updates(self) -> None:
        """What the next step begins with."""
        self.out.place = ""
        if self.program.updates:
            self.out.add()
        params = set(self.program.params)
        for old, new in self.program.updates:
            where = "params" if old in params else "states"
            self.out.statement(f"{where}[{quoted(old.value.name or '')}] = {self._tensor(new)}")

    def _return(self) -> None:
        self.out.place = ""
        self.out.add()
        items = [f"{quoted(n)}: {self._tensor(var)}" for n, var in self.program.outputs]
        self.out.statement(f"return {{{', '.join(items)}}}")


def _typed(var: Var) -> str:
    """The note behind a statement: the type with what each device holds of it."""
    return type_text(var.value.type, var.placement)


def _splits_text(splits: dict[str, tuple[str, ...]]) -> str:
    """`{"batch": ("x", "y")}` as source."""
    return repr(splits)


def _literal(value: object) -> str:
    """A number as Python source; infinities have no literal."""
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text


# --- facts of a program ------------------------------------------------------------------------


def _uses(program: Program) -> Counter[Var]:
    uses: Counter[Var] = Counter(var for _, var in program.outputs)
    uses.update(new for _, new in program.updates)

    def count(nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case Compute():
                    uses.update(node.ins)
                case Move():
                    uses.update([node.source])
                case Loop():
                    uses.update(stack for stack, _ in node.stacked)
                    uses.update(v for c in node.carries for v in (c.init, c.next))
                    uses.update(c.inside for c in node.collected)
                    count(node.body)

    count(program.body)
    return uses


def _names(program: Program) -> list[str]:
    """Every identifier that lowering has given out."""
    found = [v.name for v in (*program.inputs, *program.params, *program.states)]
    found += list(program.coordinates.values())

    def collect(nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case Compute():
                    found.extend(v.name for v in node.outs)
                case Move():
                    found.append(node.target.name)
                case Loop():
                    found.append(node.index)
                    found.extend(c.inside.name for c in node.carries)
                    found.extend(v.name for _, v in node.stacked)
                    found.extend(c.outer.name for c in node.collected)
                    collect(node.body)

    collect(program.body)
    return found
