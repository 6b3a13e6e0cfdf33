"""The text of the emitted program: plain torch with explicit collectives, a statement per operator.

Nothing of a `.mdsl` file becomes code: identifiers come from `identifiers.py`, strings are written
as literals, and source lines are in comments with control characters escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import NoReturn

from meshdsl.backends.torch.bindings import ComparedValues, check_bindings
from meshdsl.backends.torch.identifiers import module_names
from meshdsl.backends.torch.inliner import bound_names, paste
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.operator_text import store
from meshdsl.backends.torch.passes import OWN_NAMES, STAGE
from meshdsl.backends.torch.pipeline_text import write_pipeline
from meshdsl.backends.torch.preamble import PROVIDED, Draws, assigned, foot, head
from meshdsl.backends.torch.statement_writer import StatementWriter
from meshdsl.backends.torch.text_lines import TextLine
from meshdsl.device.aliases import shared
from meshdsl.device.ir import Compute, DeviceProgram, Node, Pipeline, Var
from meshdsl.device.liveness import kept_after, unchanged
from meshdsl.diagnostics import fail
from meshdsl.ir.program import every
from meshdsl.ops.opdef import ADDED
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The program, with the source place (`file:line`) and the statement of each line."""

    text: str
    places: dict[int, str]
    nodes: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenFunctions:
    """The functions of a text, written.

    used:        the support functions that they call.
    imports:     the modules of packages of operators whose functions they call.
    identifiers: their variables, by their names in the device program.
    reserved:    all names that the emitter has allocated or keeps.
    compared:    what their tests of devices and stages are about.
    """

    program: DeviceProgram
    lines: tuple[TextLine, ...]
    used: frozenset[str]
    identifiers: Mapping[str, str]
    reserved: Collection[str]
    compared: ComparedValues
    imports: frozenset[str] = frozenset()

    @classmethod
    def of(cls, writer: StatementWriter) -> WrittenFunctions:
        """What a writer has written."""
        variables = writer.state.variables
        return cls(
            writer.program,
            tuple(writer.out.lines),
            frozenset(writer.state.used),
            variables.chosen,
            variables.names.known,
            _compared(writer),
            frozenset(writer.state.imports),
        )

    def text(self, draws: Draws) -> ProgramText:
        """The standalone program; `draws` are the distributions of values not given."""
        program, away = self.program, self.program.away
        states = ", STATES" if program.updates else ""
        begun = ", assigned=ASSIGNED" if assigned(program) else ""
        begun += f", local={store(away)}().local_value" if away else ""
        call = f"main(MESH, GROUPS, device, OUTPUTS, INPUTS, PARAMS{states}{begun})"
        needed = {"main", store(away)} if away else {"main"}
        return self.under(head(program, draws), needed, call)

    def bare(self) -> ProgramText:
        """The function `device` alone, for reading; checked where it stands in the whole text."""
        self.text({})
        return self._between(head(self.program, {}, bare=True), [])

    def under(
        self,
        above: list[str],
        used: Collection[str] = (),
        call: str = "",
    ) -> ProgramText:
        """The checked text: under lines `above`, and above the support functions.

        `used` are support functions that the `call` at the end needs.
        """
        if self.imports:
            above = _with_imports(above, self.imports)
        pasted = paste(self.used.union(used))
        imported = bound_names("\n".join(pasted.imports))
        self._check(above, (*imported, *pasted.names))
        return self._between(above, foot(pasted, call))

    def _check(self, above: list[str], pasted: tuple[str, ...]) -> None:
        """Check that functions read what is bound, under lines `above` and beside what is pasted.

        The check is of the text itself: a mistake here would be a crash of a device, or worse.
        """
        module = {*bound_names("\n".join(above)), *pasted}
        roots = {name.partition(".")[0] for name in self.imports}
        unlisted = ", ".join(sorted(module - module_names() - roots))
        assert not unlisted, f"the text defines {unlisted}, which variables may have as names"
        lines = [line.text for line in self.lines]
        try:
            check_bindings(lines, len(above) + 1, module, self.compared, self.reserved)
        except (AssertionError, SyntaxError) as error:
            if not self.imports and not ADDED:
                raise
            _refuse(self.program, error)

    def _between(self, above: list[str], below: list[str]) -> ProgramText:
        """The text of the functions, with lines `above` and `below`."""
        lines = [*map(TextLine, above), *self.lines, *map(TextLine, below)]
        places = {n: line.place for n, line in enumerate(lines, 1) if line.place}
        nodes = {n: line.node for n, line in enumerate(lines, 1) if line.node is not None}
        return ProgramText("\n".join(line.text for line in lines) + "\n", places, nodes)


def _with_imports(above: list[str], modules: Collection[str]) -> list[str]:
    """The lines above a program, with the imports of packages below those of torch."""
    after = above.index(PROVIDED[-1]) + 1
    return [*above[:after], *(f"import {name}" for name in sorted(modules)), *above[after:]]


def _refuse(program: DeviceProgram, error: AssertionError | SyntaxError) -> NoReturn:
    """Raise MD0164 for a text that is wrong, where operators of packages have written of it."""
    computed = (node for node in every(program.body) if isinstance(node, Compute))
    written = sorted({node.name for node in computed if node.name in ADDED})
    if not written:
        raise error
    said = " ".join(str(error).split())
    message = (
        f"the emitted program is not valid with {', '.join(f'`{n}`' for n in written)}: {said}"
    )
    help = "their torch text may use only operands, `torch` and modules among their `imports`"
    fail("MD0164", message, help=help)


def emit(program: DeviceProgram, draws: Draws) -> ProgramText:
    """The standalone program; `draws` are the distributions of values not given (`Spec.draw`)."""
    return write(program).text(draws)


def write(program: DeviceProgram) -> WrittenFunctions:
    """The function `device` of a program."""
    is_piped = any(isinstance(node, Pipeline) for node in program.body)
    writer = StatementWriter(program, write_pipeline, OWN_NAMES if is_piped else frozenset())
    out = writer.out
    arguments = "rank, groups, inputs, params" + (", states" if program.updates else "")
    with out.under(f"def device({arguments}):"):
        does = f"What device `rank` of {program.mesh.devices} does; the same text for all of them."
        out.add(f'"""{does}"""')
        start = len(out.lines)
        writer.entries()
        writer.block(program.body, kept_after(program))
        _updates(writer)
        _return(writer)
        out.lines[start:start] = writer.blocks.lines_above(start)
        if writer.moves.tiers:
            out.lines[start:start] = writer.moves.tier_lines()
    return WrittenFunctions.of(writer)


def _compared(writer: StatementWriter) -> ComparedValues:
    """The coordinates that the text tests, and the stages of a device."""
    at = writer.blocks.at
    sizes = {at[axis]: size for axis, size in writer.mesh.axes if axis in at}
    pipe = next((n for n in writer.program.body if isinstance(n, Pipeline)), None)
    if pipe is None:
        return ComparedValues(sizes)
    return ComparedValues(sizes, at[pipe.axis], STAGE, pipe.known.held)


def _updates(writer: StatementWriter) -> None:
    """Write the values that the next step begins with."""
    writer.out.place = ""
    stores = [*_stores(writer)] if writer.program.updates else []
    if stores:
        writer.out.add()
    for device, group in itertools.groupby(stores, lambda store: store[0].on):
        with writer.alone(device):
            for old, text in group:
                where = "params" if old in writer.program.params else "states"
                writer.out.statement(f"{where}[{quoted(old.value.name or '')}] = {text}")


def _stores(writer: StatementWriter) -> Iterator[tuple[Var, str]]:
    """Parameters and states with the text of their new values, unless these are there already."""
    program = writer.program
    owners = shared(program)
    entering = {owners.get(v, v) for v in (*program.inputs, *program.params, *program.states)}
    largest: dict[Var, int] = {}
    for var, owner in owners.items():
        largest[owner] = max(largest.get(owner, 0), var.local.bytes, owner.local.bytes)
    there = unchanged(program) - writer.operators.copied_first | program.away.keys()
    for old, new in program.updates:
        if old in there:
            continue
        # What is stored has memory of its own, or that of the tensor it replaces; a part of a
        # larger one would keep all of that.
        owner = owners.get(new, new)
        copied = owner in entering or largest.get(owner, 0) > new.local.bytes
        copied = copied and owner is not owners.get(old, old)
        yield old, f"{writer.state.tensor(new)}{'.clone()' if copied else ''}"


def _return(writer: StatementWriter) -> None:
    program, out = writer.program, writer.out
    out.place = ""
    out.add()
    owners, updates = shared(program), program.updates
    onto = (old for old, new in updates if old is not new and old.name == new.name)
    stored = {owners.get(old, old) for old in onto}
    items = []
    for name, var in program.outputs:
        # Of a parameter that each step writes `onto`, a copy is returned.
        copy = ".clone()" if owners.get(var, var) in stored else ""
        items.append(f"{quoted(name)}: {writer.state.tensor(var)}{copy}")
    out.statement(f"return {{{', '.join(items)}}}")
