"""The facts of one version of a document: `read` at every keystroke, `place` when it is quiet.

`read` parses, declares and types, and places nothing. `place` finds placements and bytes under the
chosen layout, and checks what only they show; a plan is searched for nowhere else, with the limits
of every other command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from meshdsl.analysis import Analysis, analyse
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source, Span
from meshdsl.editor.daemon_thread import Stale
from meshdsl.editor.text import LineMap, Text
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import DEFAULT_POLICY, Compilation, Known, Options
from meshdsl.placed.place import POLICIES
from meshdsl.records import dataclass
from meshdsl.report.checks import placement_checks
from meshdsl.report.schema import ReportFacts
from meshdsl.syntax import ast
from meshdsl.syntax.symbols import Symbols, symbols


@dataclass(frozen=True, slots=True)
class Wishes:
    """The layout, mesh and policy chosen in the editor; None: the first of the file.

    `model` is a folder or a file whose keys blocks of weights are completed with.
    """

    layout: str | None = None
    mesh: str | None = None
    reduce: str = DEFAULT_POLICY
    model: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DocumentFacts:
    """A version of a document as far as it could be understood, and the names in it."""

    text: Text
    analysis: Analysis
    symbols: Symbols

    @property
    def tree(self) -> ast.SourceFile:
        """The syntax tree of what could be parsed."""
        return self.analysis.tree

    @property
    def declarations(self) -> Declarations:
        """The declarations of the file."""
        return self.analysis.declarations

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All that is wrong, and can be known before anything is placed."""
        return tuple(self.analysis.diagnostics)

    @property
    def wrong(self) -> bool:
        """Whether there are errors; then nothing is placed."""
        return any(d.severity == "error" for d in self.diagnostics)


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """The reports of a version's programs, by name, under the layout that was chosen.

    `layout` is its name, empty where the file has none; `missing` one that was wished for and is
    not in the file. `diagnostics` are those that only placing shows: of this layout, or of all once
    they are `checked`.
    """

    text: Text
    layout: str = ""
    missing: str = ""
    reports: Mapping[str, ReportFacts] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()

    def lines(self, now: Text) -> LineMap:
        """The lines of this version in another one."""
        return LineMap.between(self.text.source, now.source)


def read(text: Text) -> DocumentFacts:
    """A version of a document, understood as far as it can be. Nothing is placed."""
    if text.refusal is None:
        analysis = analyse(text.source, Options())
    else:
        empty = ast.SourceFile((), Span(text.source, 0, 0))
        analysis = Analysis(empty, Declarations(text.source), {}, {}, Diagnostics())
        analysis.diagnostics.add(text.refusal)
    return DocumentFacts(text, analysis, symbols(analysis.tree))


def check(source: Source) -> Diagnostics:
    """All that is wrong with a text, and can be known before anything is placed."""
    return analyse(source, Options()).diagnostics


def place(known: DocumentFacts, wishes: Wishes, stale: Stale) -> Placing:
    """The programs of a version under the layout wished for; `checked` finds what is wrong.

    What is `stale` in the middle comes back unfinished: nobody looks at it.
    """
    layouts = [*known.declarations.layouts, *known.declarations.sbps]
    wished = wishes.layout or ""
    missing = "" if wished in layouts or ":" in wished else wished
    layout = wished if wished and not missing else next(iter(layouts), "")
    options = _options(known.declarations, wishes, layout)
    problems = Diagnostics()
    reports = {}
    written = known.analysis.written
    for name, program in known.analysis.named.items():
        if program is None or stale():
            continue
        parts = Known(known.tree, known.declarations, written[name], program)
        chosen = replace(options, program=name)
        try:
            reports[name] = Compilation(known.text.source, chosen, Diagnostics(), parts).advised
        except DiagnosticError as error:
            problems.add(*error.diagnostics)
    return Placing(known.text, layout, missing, reports, tuple(problems))


def checked(known: DocumentFacts, placing: Placing, stale: Stale) -> Placing:
    """The placing with what is wrong with any layout of the file, which takes longer to find."""
    problems = Diagnostics()
    problems.add(*placing.diagnostics)
    for step in placement_checks(known.analysis, Options()):
        problems.add(*step)
        if stale():
            break
    return replace(placing, diagnostics=tuple(problems))


def _options(known: Declarations, wishes: Wishes, layout: str) -> Options:
    """The options of a placement; a mesh that the file does not have is not wished for."""
    mesh = wishes.mesh
    if mesh is not None and mesh not in known.meshes and ":" not in mesh:
        mesh = None
    is_sbp = layout in known.sbps
    return Options(
        mesh=mesh,
        layout=None if is_sbp or not layout else layout,
        sbp=layout if is_sbp else None,
        reduce=wishes.reduce if wishes.reduce in POLICIES else DEFAULT_POLICY,
    )
