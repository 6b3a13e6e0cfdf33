"""Definitions of the `%%mdsl` cells so far. A cell adds all of its definitions, or none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import partial

from meshdsl.analysis import analyse_tree
from meshdsl.api.programs import Program
from meshdsl.diagnostics import Diagnostic, Diagnostics, Source, Span, fail
from meshdsl.named.declarations import Declarations, declare
from meshdsl.named.program_choice import finish_named
from meshdsl.pipeline import Compilation, Known, Options
from meshdsl.records import dataclass
from meshdsl.report.checks import check_expect
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse

Key = tuple[str, str]
"""A definition: its keyword, and its name."""


class CellProgram(Program):
    """A program of a cell. It sees meshes and layouts of later cells too.

    Definitions of a later cell replace earlier ones here as well; if a program itself is
    redefined, this one stays as it was.
    """

    def __init__(self, node: ast.ProgramDecl, defined: Defined) -> None:
        super().__init__(node.name.text, self._build)
        self._node, self._defined = node, defined

    def _build(self) -> Compilation:
        source = self._node.span.source
        declarations = replace(self._defined.declarations, source=source)
        known_stages = Known(self._defined.tree, declarations)
        options = Options(program=self.name, set_dims=self._defined.sizes)
        return Compilation(source, options, known=known_stages)

    def renew(self, defined: Defined) -> None:
        """Update to the current definitions."""
        self._defined = defined
        self._forget()


@dataclass(frozen=True, slots=True)
class Defined:
    """All definitions of cells: as one file, and by name; `sizes` override those of dims."""

    tree: ast.SourceFile
    declarations: Declarations
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tree: ast.SourceFile, diagnostics: Diagnostics, sizes: Mapping[str, int] | None = None
    ) -> Defined:
        """The definitions of a file; errors go to `diagnostics`."""
        return cls(tree, declare(tree, diagnostics, sizes), sizes or {})


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell: names it defined, its programs, warnings, and failed expectations."""

    defined: tuple[str, ...]
    programs: tuple[Program, ...]
    diagnostics: tuple[Diagnostic, ...]


class Session:
    """The definitions of all cells together, the latest of each name."""

    def __init__(self) -> None:
        self.nodes: dict[Key, ast.Declaration] = {}
        self.programs: dict[str, CellProgram] = {}
        self.declarations = Declarations(Source("no cell", ""))

    def run(self, source: Source) -> CellResult:
        """Add a cell. Its `expect`s are about the program they name, its programs, or the last one.

        Raises:
            DiagnosticError: all errors of the cell; then none of its definitions is added.
        """
        tree, problems = parse(source)
        new = {_key(node): node for node in tree.declarations if not isinstance(node, ast.Expect)}
        analysis = analyse_tree(self._with(tree, new), Options(), problems, part=source)
        diagnostics, declarations = analysis.diagnostics, analysis.declarations
        diagnostics.raise_all()
        defined = Defined(analysis.tree, declarations)
        nodes = (node for node in tree.declarations if isinstance(node, ast.ProgramDecl))
        programs = [CellProgram(node, defined) for node in nodes]
        self._keep(new, programs, defined)
        for expect in declarations.expects:
            name = expect.program.text if expect.program is not None else None
            asked = programs if programs and name is None else [self.program(name)]
            named = [finish_named(p._written().written, None, False) for p in asked]
            diagnostics.of(partial(check_expect, expect, named, declarations, diagnostics))
        return CellResult(tuple(name for _, name in new), tuple(programs), tuple(diagnostics))

    def _with(self, tree: ast.SourceFile, new: Mapping[Key, ast.Declaration]) -> ast.SourceFile:
        """The definitions so far less those replaced, and all of a cell, also what it repeats."""
        kept = tuple(node for key, node in self.nodes.items() if key not in new)
        return ast.SourceFile((*kept, *tree.declarations), tree.span)

    def _keep(
        self,
        new: Mapping[Key, ast.Declaration],
        programs: list[CellProgram],
        defined: Defined,
    ) -> None:
        for key, node in new.items():
            self.nodes.pop(key, None)
            self.nodes[key] = node
        for program in programs:
            self.programs.pop(program.name, None)
            self.programs[program.name] = program
        self.declarations = defined.declarations
        for program in self.programs.values():
            program.renew(defined)

    # --- look-up -----------------------------------------------------------------------------

    def program(self, name: str | None) -> CellProgram:
        """A program by its name; the last one for None.

        Raises:
            DiagnosticError: there is none (MD0111, MD0108).
        """
        if not self.programs:
            help = "write a cell that begins with `%%mdsl` and has a `program` in it"
            fail("MD0111", "no cell has defined a program yet", help=help)
        if name is None:
            return next(reversed(self.programs.values()))
        if name not in self.programs:
            names = ", ".join(f"`{n}`" for n in self.programs)
            fail("MD0108", f"no cell has defined the program `{name}`", help=f"known: {names}")
        return self.programs[name]

    def resized(self, program: CellProgram, sizes: Mapping[str, int]) -> CellProgram:
        """The same program with other sizes of dims."""
        if not sizes:
            return program
        diagnostics = Diagnostics()
        span = Span(program._node.span.source, 0, 0)
        tree = ast.SourceFile(tuple(self.nodes.values()), span)
        defined = Defined.of(tree, diagnostics, sizes)
        diagnostics.raise_errors()
        return CellProgram(program._node, defined)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs of a keyword and a name, in the order of the cells."""
        return iter(self.nodes)


def _key(node: ast.Declaration) -> Key:
    assert not isinstance(node, ast.Expect), "an expectation has no name"
    return ast.KEYWORDS[type(node)], node.name.text
