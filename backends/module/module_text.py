"""The text of a program for a `torch.nn.Module`: its forward and its backward pass as functions.

The statements are those of `backends/torch/statement_writer.py`. The forward pass returns what the
backward pass reads as `saved`; neither function writes into its arguments or into saved values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from meshdsl.backends.module.split import SplitPasses
from meshdsl.backends.torch.emitter import ProgramText, WrittenFunctions
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.pipeline_text import write_pipeline
from meshdsl.backends.torch.preamble import HeadName, module_head
from meshdsl.backends.torch.statement_writer import StatementWriter
from meshdsl.backends.walk import NOWHERE
from meshdsl.device.ir import DeviceProgram, Node, Var
from meshdsl.ir.rewrite import reads_of
from meshdsl.named.ir import Value

NAMES = frozenset({"forward", "backward", "saved", "cotangents", "reduce_gradients", "partials"})
"""Names that the text uses for itself, beside those of every emitted text."""


def emit_module(
    program: DeviceProgram, cut: SplitPasses, draws: dict[Value, tuple[object, ...]]
) -> ProgramText:
    """The text with the functions `forward` and `backward`; nothing runs by itself.

    ::

        forward(rank, groups, inputs, params) -> outputs, saved
        backward(rank, groups, saved, cotangents) -> gradients of params, gradients of inputs
        reduce_gradients(rank, groups, partials) -> gradients of params

    The last one is there where the gradients of parameters that `backward` yields are partial sums;
    it may overwrite them. All of them are dicts by name, of the local blocks of device `rank`.
    """
    return _ModuleText(program, cut, draws).write()


class _ModuleText:
    def __init__(
        self, program: DeviceProgram, cut: SplitPasses, draws: dict[Value, tuple[object, ...]]
    ) -> None:
        self.writer = StatementWriter(program, write_pipeline, NAMES)
        self.program, self.cut, self.draws = program, cut, draws
        self.state, self.out = self.writer.state, self.writer.out

    def write(self) -> ProgramText:
        """The text."""
        self._forward()
        self.out.add()
        self.out.add()
        self._backward()
        if self.cut.reduced:
            self.out.add()
            self.out.add()
            self._reduction()
        return WrittenFunctions.of(self.writer).under(self._head())

    def _head(self) -> list[str]:
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
        return module_head(program, draws, tables)

    # --- the functions -------------------------------------------------------------------------

    def _forward(self) -> None:
        program, cut = self.program, self.cut
        does = (
            f"The forward pass of device `rank` of {program.mesh.devices}, and what is kept of it."
        )
        with self._function("forward", "inputs, params", does):
            seeds = {v for _, v in cut.cotangents}
            inputs = [(v.value.label, v) for v in program.inputs if v not in seeds]
            params = [(v.value.name or "", v) for v in program.params]
            read = _read_by(cut.forward) | {*cut.saved, *(v for _, v in cut.outputs)}
            self._take("inputs", ((n, v) for n, v in inputs if v in read))
            self._take("params", ((n, v) for n, v in params if v in read))
            live = frozenset((*(v for _, v in cut.outputs), *cut.saved))
            self.writer.block(cut.forward, live)
            self._blank()
            items = (v for v in cut.saved if self._stands_alone(v))
            saved = ", ".join(f"{quoted(v.name)}: {self.state.name(v)}" for v in items)
            self.out.assign(("saved",), f"{{{saved}}}")
            outputs = ", ".join(f"{quoted(n)}: {self.state.tensor(v)}" for n, v in cut.outputs)
            self.out.statement(f"return {{{outputs}}}, saved")

    def _backward(self) -> None:
        cut, lists = self.cut, self.program.lists
        does = "From gradients of outputs to others."
        with self._function("backward", "saved, cotangents", does):
            # Another backward pass may read saved values again: they are not to be overwritten.
            self.state.fresh = set()
            read = _read_by(cut.backward) | cut.returned
            self._take("saved", ((v.name, v) for v in cut.saved if v not in lists))
            for var in (v for v in cut.saved if v in lists and self._stands_alone(v)):
                # A loop pops from the end of its list, which must not be the saved one.
                self.state.let(var, f"list(saved[{quoted(var.name)}])")
            self._take("cotangents", ((n, v) for n, v in cut.cotangents if v in read))
            self.writer.block(cut.backward, cut.returned)
            self._blank()
            # Autograd may keep a gradient and add to it in place later: it must not share memory.
            taken: set[Var] = set()
            params, inputs = (self._gradients(pairs, taken) for pairs in (cut.params, cut.inputs))
            self.out.statement(f"return {params}, {inputs}")

    def _reduction(self) -> None:
        cut = self.cut
        does = "Gradients of parameters, of their partial sums over devices."
        with self._function("reduce_gradients", "partials", does):
            self.state.fresh = {v for _, v in cut.params}
            self._take("partials", cut.params)
            self.writer.block(cut.reduction, frozenset(v for _, v in cut.reduced))
            self._blank()
            self.out.statement(f"return {self._gradients(cut.reduced, set())}")

    def _stands_alone(self, var: Var) -> bool:
        """Whether a saved variable is no list that is one with an earlier one."""
        return self.writer.records.get(var, (var,))[0] is var

    def _gradients(self, pairs: Iterable[tuple[str, Var]], taken: set[Var]) -> str:
        items = []
        for name, var in pairs:
            is_fresh = (var in self.state.fresh and var not in taken) or var in self.state.constants
            taken.add(var)
            copy = "" if is_fresh else ".clone()"
            items.append(f"{quoted(name)}: {self.state.tensor(var)}{copy}")
        return f"{{{', '.join(items)}}}"

    # --- their frames --------------------------------------------------------------------------

    @contextmanager
    def _function(self, name: str, arguments: str, does: str) -> Iterator[None]:
        """Write a function, the coordinates of this device that its statements use before them."""
        self.state.last, self.writer.shown, self.out.place = None, NOWHERE, ""
        with self.out.under(f"def {name}(rank, groups, {arguments}):"):
            self.out.add(f'"""{does}"""')
            start = len(self.out.lines)
            yield
            self.out.lines[start:start] = self.writer.blocks.lines_above(start)

    def _take(self, table: str, items: Iterable[tuple[str, Var]]) -> None:
        for name, var in items:
            self.state.let(var, f"{table}[{quoted(name)}]")

    def _blank(self) -> None:
        self.out.place = ""
        self.out.add()


def _read_by(nodes: tuple[Node, ...]) -> set[Var]:
    return {v for node in nodes for v in reads_of(node)}
