"""The text of a program for a `torch.nn.Module`: its forward and its backward pass as functions.

The statements are those of `backends/torch/emitter.py`. The forward pass returns what the
backward pass reads as `saved`; neither function writes into its arguments or into saved values.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.backends.module.split import SplitPasses
from meshdsl.backends.torch.emitter import ProgramText, TextEmitter
from meshdsl.backends.torch.inliner import paste
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.preamble import HeadName, foot, module_head
from meshdsl.backends.walk import NOWHERE
from meshdsl.device.ir import DeviceProgram, Node, Var
from meshdsl.device.liveness import reads
from meshdsl.named.ir import Value

NAMES = frozenset({"forward", "backward", "saved", "cotangents"})
"""Names that the text uses for itself, beside those of every emitted text."""


def emit_module(
    program: DeviceProgram, cut: SplitPasses, draws: dict[Value, tuple[object, ...]]
) -> ProgramText:
    """The text with the functions `forward` and `backward`; nothing runs by itself.

    ::

        forward(rank, groups, inputs, params) -> outputs, saved
        backward(rank, groups, saved, cotangents) -> gradients of params, gradients of inputs

    All of them are dicts by name, of the local blocks of device `rank`.
    """
    return _ModuleEmitter(program, cut, draws).emit()


class _ModuleEmitter(TextEmitter):
    def __init__(
        self, program: DeviceProgram, cut: SplitPasses, draws: dict[Value, tuple[object, ...]]
    ) -> None:
        super().__init__(program, NAMES)
        self.cut, self.draws = cut, draws
        self.used = set()

    def emit(self) -> ProgramText:
        """The text."""
        self._forward()
        self._backward()
        pasted = paste(self.used)
        above = self._head(pasted.imports)
        self.check_names(above, pasted.names)
        return self.under(above, foot(pasted.texts))

    def _head(self, imports: Iterable[str]) -> list[str]:
        cut, program = self.cut, self.program
        arguments = program.inputs[: len(program.inputs) - len(cut.cotangents)]
        tables = {
            HeadName.INPUTS: [(v.value.label, v) for v in arguments],
            HeadName.PARAMS: [(v.value.name or "", v) for v in program.params],
            HeadName.OUTPUTS: list(cut.outputs),
            HeadName.COTANGENTS: list(cut.cotangents),
            HeadName.PARAM_GRADS: list(cut.params),
            HeadName.INPUT_GRADS: list(cut.inputs),
        }
        draws = {v: draw for v, draw in self.draws.items() if v.role in ("input", "seed", "param")}
        return module_head(program, draws, imports, tables)

    # --- the functions -------------------------------------------------------------------------

    def _forward(self) -> None:
        program, cut = self.program, self.cut
        does = f"The forward pass of device `rank` of {self.mesh.devices}, and what is kept of it."
        start = self._begin("forward", "inputs, params", does)
        seeds = {v for _, v in cut.cotangents}
        inputs = [(v.value.label, v) for v in program.inputs if v not in seeds]
        params = [(v.value.name or "", v) for v in program.params]
        read = _read_by(cut.forward) | {*cut.saved, *(v for _, v in cut.outputs)}
        self._take("inputs", ((n, v) for n, v in inputs if v in read))
        self._take("params", ((n, v) for n, v in params if v in read))
        live = frozenset((*(v for _, v in cut.outputs), *cut.saved))
        self.block(cut.forward, live)
        self._blank()
        saved = ", ".join(f"{quoted(v.name)}: {self.name(v)}" for v in cut.saved)
        self.out.statement(f"saved = {{{saved}}}")
        outputs = ", ".join(f"{quoted(n)}: {self._tensor(v)}" for n, v in cut.outputs)
        self.out.statement(f"return {{{outputs}}}, saved")
        self._end(start)
        self.out.depth = 0
        self.out.add()
        self.out.add()

    def _backward(self) -> None:
        cut = self.cut
        start = self._begin("backward", "saved, cotangents", "From gradients of outputs to others.")
        # Another backward pass may read saved values again: they are not to be overwritten.
        self.fresh = set()
        read = _read_by(cut.backward) | cut.returned
        self._take("saved", ((v.name, v) for v in cut.saved if v not in self.program.lists))
        for var in (v for v in cut.saved if v in self.program.lists):
            # A loop pops from the end of its list, which must not be the saved one.
            self._let(var, f"list(saved[{quoted(var.name)}])")
        self._take("cotangents", ((n, v) for n, v in cut.cotangents if v in read))
        self.block(cut.backward, cut.returned)
        self._blank()
        # Autograd may keep a gradient and add to it in place later: it must not share memory.
        taken: set[Var] = set()
        params, inputs = (self._gradients(pairs, taken) for pairs in (cut.params, cut.inputs))
        self.out.statement(f"return {params}, {inputs}")
        self._end(start)

    def _gradients(self, pairs: Iterable[tuple[str, Var]], taken: set[Var]) -> str:
        items = []
        for name, var in pairs:
            is_fresh = (var in self.fresh and var not in taken) or var in self.constants
            taken.add(var)
            items.append(f"{quoted(name)}: {self._tensor(var)}{'' if is_fresh else '.clone()'}")
        return f"{{{', '.join(items)}}}"

    # --- their frames --------------------------------------------------------------------------

    def _begin(self, name: str, arguments: str, does: str) -> int:
        """Write the first lines of a function; returns where its statements begin."""
        self.last, self.shown = None, NOWHERE
        self.out.place, self.out.depth = "", 0
        self.out.add(f"def {name}(rank, groups, {arguments}):")
        self.out.depth = 1
        self.out.add(f'"""{does}"""')
        return len(self.out.lines)

    def _take(self, table: str, items: Iterable[tuple[str, Var]]) -> None:
        for name, var in items:
            self._let(var, f"{table}[{quoted(name)}]")

    def _blank(self) -> None:
        self.out.place = ""
        self.out.add()

    def _end(self, start: int) -> None:
        """Put the coordinates of this device that the statements use before them."""
        heading = 2
        self.out.lines[start:start] = self._coordinates(self.out.lines[start - heading :])


def _read_by(nodes: tuple[Node, ...]) -> set[Var]:
    return {v for node in nodes for v in reads(node)}
