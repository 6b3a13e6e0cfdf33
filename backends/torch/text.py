"""The text of the emitted program: plain torch with explicit collectives, a statement per operator.

Nothing of a `.mdsl` file becomes code: identifiers come from `device/names.py`, strings are written
as literals, and source lines stand in comments with control characters escaped.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from meshdsl.backends.torch.call import TorchText
from meshdsl.backends.torch.format import INDENT, WIDTH, quoted
from meshdsl.backends.torch.head import head, inert
from meshdsl.backends.torch.loops import NOWHERE, Loops
from meshdsl.backends.torch.moves import typed
from meshdsl.backends.torch.paste import defined, paste
from meshdsl.device.aliases import copied_first
from meshdsl.device.ir import Bucket, Compute, Loop, Move, Node, Program, Start, Var, Wait
from meshdsl.device.liveness import LARGE, deaths, given_up, kept_after, shows_operand
from meshdsl.device.names import Names, identifiers
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
    return defined()


def emit(program: Program, draws: dict[Value, tuple[object, ...]]) -> ProgramText:
    """The standalone program. `draws` says how values not given are made up (`Spec.draw`)."""
    return Emitter(program, draws).emit()


class Emitter(Loops):
    """Writes one text; `module_text.py` writes another one of the same statements."""

    def __init__(self, program: Program, draws: dict[Value, tuple[object, ...]]) -> None:
        super().__init__(program)
        self.draws = draws
        self.used = {"main", "Spec"}
        self.names = Names(taken_names() | identifiers(program))
        self.copied_first = copied_first(program)
        # The last assignment: where its lines begin and end, the variable, the text.
        self.last: tuple[int, int, Var, str] | None = None
        self.renamed: set[Var] = set()
        # What the last statement has put into variables of its own, if that may be large.
        self.helpers: list[str] = []
        # What may show memory of another variable, with elements that lie in one place as well.
        self.views: set[Var] = set()

    def emit(self) -> ProgramText:
        """The text."""
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
                out.statement(f"{var.name} = inputs[{quoted(var.value.label)}]", typed(var))
        for var in program.params:
            if self.uses[var]:
                out.statement(f"{var.name} = params[{quoted(var.value.name or '')}]", typed(var))
        for var in program.states:
            if self.uses[var]:
                out.statement(f"{var.name} = states[{quoted(var.value.name or '')}]", typed(var))
        self._nodes(program.body, kept_after(program))
        self._updates()
        self._return()
        out.lines[start:start] = self._coordinates(out.lines)

    def _coordinates(self, lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Where this device stands on each axis that a function's lines ask for, as lines."""
        text = "\n".join(line for line, _ in lines)
        names = self.program.coordinates.values()
        if not any(re.search(rf"\b{name}\b", text) for name in names):
            return []
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        found = []
        stride = self.mesh.devices
        for axis, size in self.mesh.axes:
            stride //= size
            name = self.program.coordinates[axis]
            text = "rank" if stride == 1 else f"rank // {stride}"
            whole = stride * size == self.mesh.devices
            if name in used:
                found.append((f"{INDENT}{name} = {text}{'' if whole else f' % {size}'}", ""))
        return found

    def _nodes(
        self, nodes: tuple[Node, ...], kept: frozenset[Var], own: frozenset[Var] = frozenset()
    ) -> None:
        """The statements of a block; large tensors are let go after their last use."""
        for node, dead in zip(nodes, deaths(nodes, kept, own), strict=True):
            if not isinstance(node, Start | Wait) or self.shown == NOWHERE:
                self._source_line(node.span)
            match node:
                case Compute(onto=int()):
                    self._add_onto(node)
                case Compute():
                    self._compute(node)
                case Move() | Bucket():
                    self._collective(node)
                case Start(ahead=True):
                    self._next(node)
                case Start():
                    self._start(node)
                case Wait():
                    self._wait(node)
                case Loop():
                    self._loop(node, dead)
                    dead = tuple(v for v in dead if v not in given_up(node, dead))
            self._let_go(dead)

    def _let_go(self, dead: tuple[Var, ...]) -> None:
        """Delete variables, in as many statements as fit a line."""
        names = [*self.helpers, *(v.name for v in dead if v not in self.renamed)]
        self.helpers = []
        room = WIDTH - len(INDENT) * self.out.depth - len("del ")
        while names:
            count = len(names)
            while count > 1 and len(", ".join(names[:count])) > room:
                count -= 1
            self.out.statement(f"del {', '.join(names[:count])}")
            names = names[count:]

    def _source_line(self, span: Span) -> None:
        """The source line that the next statements come from, as a comment."""
        place = (span.file, span.line)
        self.out.place = f"{span.file}:{span.line}"
        if place == self.shown:
            return
        self.shown = place
        if not self.out.lines[-1][0].endswith(":"):
            self.out.add()
        self.out.add(f"# {inert(self.out.place)}  {inert(span.source.excerpt(span.line).strip())}")

    def _compute(self, node: Compute) -> None:
        if node.name == "constant":
            self.constants[node.outs[0]] = _literal(node.attr("value"))
            return
        opdef = lookup(node.name)
        call = self._call(node)
        text = self._in_place(node, call) or opdef.torch(call)
        for line in call.lines:
            self.out.statement(line)
        self._assign(node, text)
        # They may be twice as wide as what they are made of.
        if any(2 * v.local.bytes >= LARGE for v in (*node.ins, *node.outs)):
            self.helpers = call.helpers
        self._has_memory(node)

    def _has_memory(self, node: Compute) -> None:
        """Note whose memory the results of a statement are: nobody else's, or that of others."""
        if not shows_operand(node):
            own = not lookup(node.name).overwrites
            self.fresh.update(node.outs if own else ())
            return
        self.views.update(node.outs)
        # A view is nobody else's memory either, if its operand is not and has no other use.
        if node.ins[0] in self.fresh and self.uses[node.ins[0]] == 1:
            self.fresh.update(node.outs)

    def _in_place(self, node: Compute, call: TorchText) -> str | None:
        """Text that writes over an operand nobody else sees or needs again, if there is one.

        Only in a training step: a forward pass may be put through torch's autograd.
        """
        if not self.program.updates:
            return None
        for index, write in lookup(node.name).in_place.items():
            var = node.ins[index]
            own = var in self.fresh - self.views and self.uses[var] == 1
            if own and var.local == node.outs[0].local and (text := write(call)) is not None:
                return text
        return None

    def _assign(self, node: Compute, text: str) -> None:
        """`name = text`; where it would only rename the last result, that one gets the name."""
        target = node.outs[0]
        if self.last and node.ins and self._only_renames(node, text):
            start, _, source, text = self.last
            del self.out.lines[start:]
            self.renamed.add(source)
        start = len(self.out.lines)
        self.out.statement(f"{', '.join(v.name for v in node.outs)} = {text}", typed(target))
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
            attrs=dict(node.attrs),
            fresh=self.names.fresh,
            place=repr(self.out.place),
            offsets=offsets,
            splits=frozenset(splits),
            used=self.used,
        )

    def _argument(self, var: Var, index: int, node: Compute) -> str:
        """The text of an operand; one that is overwritten and shown elsewhere is copied first."""
        if index in lookup(node.name).overwrites and var in self.copied_first:
            return f"{var.name}.clone()"
        return self.constants.get(var, var.name)

    def _offset(self, dim: str, axes: tuple[str, ...], node: Compute) -> str:
        holders = [v for v in (*node.ins, *node.outs) if v.placement.axes_of(dim)]
        return self._times(axes, holders[0].local.size(dim))

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


def _literal(value: object) -> str:
    """A number as Python source; infinities have no literal."""
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text
