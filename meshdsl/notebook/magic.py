"""`%%mdsl` cells and the `%mdsl` line, for IPython and Jupyter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from meshdsl.api.errors import ProgramError, as_command, shown, told
from meshdsl.api.plan import Plan
from meshdsl.api.programs import Program
from meshdsl.api.schedules import Schedule
from meshdsl.api.searched import ComparedMethods, Searched
from meshdsl.api.source_location import cell_of
from meshdsl.api.timelines import ScheduleTimeline, SlicedTimeline
from meshdsl.cli import schedule, search, simulate
from meshdsl.cli.compare import compare_columns
from meshdsl.cli.explain import focus_of
from meshdsl.cli.options import pipeline_options
from meshdsl.cli.run import asked, check_engine, run
from meshdsl.diagnostics import Diagnostic, Diagnostics, Source, did_you_mean, fail
from meshdsl.notebook.magic_lines import MagicLine, read_cell, read_line
from meshdsl.notebook.session import CellProgram, Session
from meshdsl.placed.layout import mesh_of
from meshdsl.report.views.parts import DocumentView, MeshView, Ran
from meshdsl.report.views.results import Comparison, Simulation
from meshdsl.schedule.requested import drawn, of_declaration, sliced


@magics_class
class MdslMagics(Magics):
    """The magics of one shell, with one session of cells."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.ipython = shell
        self.session = Session()

    @line_cell_magic
    @as_command()
    @told
    def mdsl(self, line: str, cell: str | None = None) -> Any:
        """`%%mdsl [--layout L] [--mesh M] …`: define what the cell declares.

        Definitions stay for later cells; a redefined name is replaced. A program is bound to its
        name in Python (`--as NAME`: to another one). With a layout, a mesh or a policy, the cell
        shows the report of `explain`.

        `%mdsl explain|compare|run|code|collectives|memory [PROGRAM] [options]`,
        `%mdsl search|simulate [PROGRAM] [options]`, `%mdsl schedule NAME [options]`,
        `%mdsl tensor NAME`, `%mdsl mesh [NAME]`, `%mdsl show`, `%mdsl reset`.
        """
        if cell is None:
            words = read_line(line)
            return getattr(self, f"_{words.verb}")(words)
        return self._cell(line, cell)

    # --- cells -------------------------------------------------------------------------------

    def _cell(self, line: str, cell: str) -> Any:
        options, explained = read_cell(line)
        # The line of the magic is the first line of the cell.
        done = self.session.run(Source(self._cell_name(), f"\n{cell.rstrip()}\n"))
        for program in done.programs:
            self.ipython.user_ns[program.name] = program
        if done.programs and options.name:
            self.ipython.user_ns[options.name] = done.programs[-1]
        tell(done.diagnostics)
        if explained:
            return self._explain(MagicLine("explain", None, options))
        return done.programs[-1] if done.programs and not options.quiet else None

    def _cell_name(self) -> str:
        """The name of the running cell by its number in the notebook: `In[3]`."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            cell = cell_of(frame.f_code.co_filename)
            if cell is not None:
                return cell
            frame = frame.f_back
        return f"In[{self.ipython.execution_count}]"

    # --- verbs -------------------------------------------------------------------------------

    def _plan(self, line: MagicLine, name: str | None) -> Plan:
        """The program as the command line compiles it: of a trained one, the step."""
        options = pipeline_options(line.given)
        program = self._program(name, options.set_dims)
        compilation = program.compilation(program.declarations, options).checked()
        tell(compilation.diagnostics)
        return Plan(program, compilation)

    def _program(self, name: str | None, sizes: Mapping[str, int]) -> Program:
        """The program of this name, defined in a cell or bound in Python."""
        bound = self.ipython.user_ns.get(name) if name else None
        if isinstance(bound, Program) and not isinstance(bound, CellProgram):
            if sizes:
                help = "give the dims other sizes in Python"
                fail("MD0602", f"`--set` cannot change the Python program `{name}`", help=help)
            return bound
        return self.session.resized(self.session.program(name), sizes)

    def _named(self, line: MagicLine) -> Plan:
        return self._plan(line, line.name or line.given.program)

    def _explain(self, line: MagicLine) -> Any:
        focus = focus_of(line.given)
        plan = self._named(line)
        return plan.explain(all=focus.whole, top=focus.top, line=focus.line, tensor=focus.tensor)

    def _view(self, line: MagicLine) -> Any:
        return getattr(self._named(line), line.verb)

    _code = _collectives = _memory = _view

    def _tensor(self, line: MagicLine) -> Any:
        plan = self._plan(line, line.given.program)
        return plan.placements if line.name is None else plan.tensor(line.name)

    def _compare(self, line: MagicLine) -> Any:
        options = pipeline_options(line.given)
        program = self._program(line.name or line.given.program, options.set_dims)
        compilation = program.compilation(program.declarations, options)
        diagnostics = Diagnostics()
        compared = compare_columns(compilation, line.given, diagnostics, measured=line.given.run)
        tell(diagnostics)
        return Comparison(compared, compilation.source)

    def _run(self, line: MagicLine) -> Any:
        check_engine(line.given)
        compilation = asked(self._named(line)._made, line.given)
        diagnostics = Diagnostics()
        result, checked = run(compilation, line.given, diagnostics)
        tell(diagnostics)
        return Ran(compilation, line.given.engine, result, checked)

    def _search(self, line: MagicLine) -> Any:
        search.refuse_meaningless(line.given)
        options = pipeline_options(line.given)
        program = self._program(line.name or line.given.program, options.set_dims)
        compilation = program.compilation(program.declarations, options)
        tell(compilation.diagnostics)
        if line.given.compare_methods:
            return ComparedMethods(search.methods_compared(compilation, line.given))
        return Searched(program, *search.searched(compilation, line.given))

    def _simulate(self, line: MagicLine) -> Any:
        compilation = self._named(line)._made
        if line.given.against is not None:
            return DocumentView(
                *simulate.compared_with(compilation, line.given.against, line.given)
            )
        return Simulation(
            simulate.timeline_of(compilation, line.given), compilation.source, line.given.top
        )

    def _schedule(self, line: MagicLine) -> Any:
        if line.given.list:
            return DocumentView(*schedule.listing(line.name, line.given))
        name = schedule.named(line.name)
        which = schedule.which(name)
        request = schedule.request_of(line.given)
        bound = self.ipython.user_ns.get(name)
        declared = self.session.declarations.schedules.get(name)
        declared = bound.table if isinstance(bound, Schedule) else declared
        if declared is not None:
            which = of_declaration(declared, request)
        if request.tokens is not None:
            return SlicedTimeline(sliced(which, request.tokens, request))
        return ScheduleTimeline(drawn(which, request))

    def _mesh(self, line: MagicLine) -> Any:
        declared = self.session.declarations
        name = line.name or next(iter(declared.meshes), "")
        if name not in declared.meshes:
            help = (
                did_you_mean(name, list(declared.meshes)) or "define one: `mesh pod = { data: 4 }`"
            )
            fail("MD0108", f"no cell has defined the mesh `{name}`", help=help)
        mesh = mesh_of(declared.meshes[name], declared)
        return MeshView(mesh.name, mesh.axes)

    def _show(self, _line: MagicLine) -> None:
        kinds: dict[str, list[str]] = {}
        for kind, name in self.session:
            kinds.setdefault(kind, []).append(name)
        for kind, names in kinds.items():
            print(f"{kind:8}{', '.join(names)}")

    def _reset(self, _line: MagicLine) -> None:
        self.session = Session()


def tell(diagnostics: Iterable[Diagnostic]) -> None:
    """Show warnings and notes below the cell; errors are raised, all of them together."""
    listed = list(diagnostics)
    errors = [d for d in listed if d.severity == "error"]
    for d in listed:
        if d.severity != "error":
            print(shown(d), file=sys.stderr)
    if errors:
        raise ProgramError(*errors)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext meshdsl`. Loading it again begins a new session."""
    shell.register_magics(MdslMagics(shell))
