"""All that can be said of a text before anything is placed: `analyse`.

An editor calls it after every keystroke, `check` before it places anything, and a compilation that
finds an error, to report all others with it. A part that is wrong does not hide the next: names,
meshes, layouts and expectations are resolved in a text with errors too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Diagnostic, Diagnostics, Source
from meshdsl.named.attention_fusion import Spoken, spoken_of
from meshdsl.named.declarations import Declarations, declare
from meshdsl.named.ir import NamedProgram
from meshdsl.named.program_choice import build_partly, choose_program, finish_named
from meshdsl.named.rematerialisation import without_effect
from meshdsl.named.unreached_functions import check_uncalled
from meshdsl.named.weights import check_weights
from meshdsl.placed.expect import lint_expect
from meshdsl.placed.layout import Layout, collect_axes, collect_declared, declared_layout
from meshdsl.placed.lint import lint
from meshdsl.placed.request import resolve
from meshdsl.placed.silent_rules import silent_rules
from meshdsl.records import dataclass
from meshdsl.schedule.declared import table_of
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse
from meshdsl.syntax.tokens import lex
from meshdsl.syntax.unused_names import lint_symbols

if TYPE_CHECKING:
    from meshdsl.pipeline import Options

_NAMES = ("MD0101", "MD0102", "MD0103", "MD0108", "MD0120", "MD0121", "MD0528")
_IN_LAYOUTS = ("MD0304", "MD0305", "MD0306", "MD0402")
NAMED_ELSEWHERE = (*_NAMES, *_IN_LAYOUTS)
"""Reports of a name whose definition may stand in a part of the text that was not parsed."""

STANDS_ELSEWHERE = ("MD0111", "MD0113", "MD0521", "MD0522", "MD0526")
"""Reports that something is missing, which may stand in such a part."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Analysis:
    """A text as far as it could be understood, without placing it.

    `diagnostics` are all of the text. `written` has each program as its text says, as far as it
    could be built: the types of what is right are known also where the rest is wrong (None where
    it is too large). `named` has each program as it is placed: simplified, with the training step;
    None where anything that it depends on is wrong.
    """

    tree: ast.SourceFile
    declarations: Declarations
    written: Mapping[str, NamedProgram | None]
    named: Mapping[str, NamedProgram | None]
    diagnostics: Diagnostics


def analyse(source: Source, options: Options) -> Analysis:
    """All that is wrong with a text, and what could be made of it. Raises nothing.

    With a layout, a mesh, a block or a program among the `options`, only these are looked at, else
    all of the text. Nothing is placed and no optimum is searched: whether expectations hold, and
    what only a placement shows, `check` adds.
    """
    tree, problems = parse(source)
    return analyse_tree(tree, options, problems)


def analyse_tree(
    tree: ast.SourceFile,
    options: Options,
    problems: Sequence[Diagnostic] = (),
    part: Source | None = None,
) -> Analysis:
    """`analyse` for a tree; `problems` are those of parsing it.

    With `part`, only what is declared in this source is reported on: a cell among others.
    """
    diagnostics = Diagnostics()
    diagnostics.add(*problems)
    declarations = declare(tree, diagnostics, options.set_dims, options.set_in)
    _check_declared(declarations, diagnostics)
    broken = bool(problems) or bool(declarations.unsized) or declarations.lacks_packages
    written: dict[str, NamedProgram | None] = {}
    named: dict[str, NamedProgram | None] = {}
    spoken = spoken_of(declarations, options.layout)
    for node in _programs(declarations, options, diagnostics):
        program_problems, name = Diagnostics(), node.name.text
        written[name] = build_partly(declarations, node, spoken, program_problems)
        named[name] = (
            None
            if program_problems.errors
            else _finished(written[name], options, spoken, program_problems)
        )
        named[name] = None if broken else named[name]
        if _is_in(part, node):
            diagnostics.add(*program_problems)
    functions = {n: f for n, f in declarations.functions.items() if _is_in(part, f)}
    check_uncalled(replace(declarations, functions=functions), diagnostics)
    programs = list(named.values()) or [None]
    _check_layouts(programs, declarations, options, part, diagnostics)
    blocks = {n: b for n, b in declarations.weights.items() if _is_in(part, b)}
    if None not in named.values():
        built = [program for program in named.values() if program is not None]
        check_weights(replace(declarations, weights=blocks), built, diagnostics)
    for expect in declarations.expects:
        lint_expect(expect, programs, declarations, diagnostics)
    if part is None and not diagnostics.errors:
        diagnostics.add(*lint_symbols(tree))
    return Analysis(
        tree, declarations, written, named, _without_consequences(diagnostics, problems, tree)
    )


def _is_in(part: Source | None, node: ast.Declaration) -> bool:
    return part is None or node.span.source is part


def _programs(
    declarations: Declarations, options: Options, diagnostics: Diagnostics
) -> Iterator[ast.ProgramDecl]:
    if options.program is None:
        yield from declarations.programs.values()
        return
    chosen = diagnostics.of(partial(choose_program, declarations, options.program))
    if chosen is not None:
        yield chosen


def _finished(
    program: NamedProgram | None,
    options: Options,
    spoken: Spoken,
    diagnostics: Diagnostics,
) -> NamedProgram | None:
    if program is None:
        return None
    finish = partial(finish_named, program, options.dtype, options.evaluate, spoken=spoken)
    finished = diagnostics.of(finish)
    if finished is not None:
        diagnostics.add(*without_effect(finished))
    return finished


# --- meshes and layouts ------------------------------------------------------------------------


def _check_declared(declarations: Declarations, diagnostics: Diagnostics) -> None:
    """Check meshes, schedules and layouts by themselves, unused ones too."""
    for mesh in declarations.meshes.values():
        collect_axes(mesh, declarations, diagnostics)
    for layout in declarations.layouts.values():
        collect_declared(layout, declarations, diagnostics)
    for schedule in declarations.schedules.values():
        diagnostics.of(partial(table_of, schedule))


def _check_layouts(
    programs: Sequence[NamedProgram | None],
    declarations: Declarations,
    options: Options,
    part: Source | None,
    diagnostics: Diagnostics,
) -> None:
    """Check that the chosen layout fits; note the others that do not fit their mesh.

    `programs` are those of the text, None for one with errors.
    """
    reported = {(d.code, d.span) for d in diagnostics}
    layouts = chosen_layouts(declarations, options)
    if part is not None:
        layouts = _layouts_in(part, declarations, options)
    for chosen, name in layouts:
        layout_problems = _check_layout(programs, declarations, chosen)
        for diagnostic in layout_problems:
            told = of_another_layout(name, diagnostic, options) if name else diagnostic
            # A rule inherited by many layouts is reported once.
            if (told.code, told.span) not in reported or told.severity == "error":
                diagnostics.add(told)
        reported |= {(d.code, d.span) for d in layout_problems}


def chosen_layouts(
    declarations: Declarations, options: Options
) -> Iterator[tuple[Options, str | None]]:
    """The options for the chosen layout, then for all others of the file with their names."""
    yield options, None
    if options.layout is not None or options.sbp is not None:
        return
    for name in list(declarations.layouts)[1:]:
        yield replace(options, layout=name, schedule=None), f"layout `{name}`"
    for name in declarations.sbps:
        yield replace(options, sbp=name, schedule=None), f"sbp `{name}`"


def _layouts_in(
    part: Source, declarations: Declarations, options: Options
) -> Iterator[tuple[Options, str | None]]:
    """The layouts of a cell: none is chosen yet, and meshes and programs may be in later ones."""
    if not declarations.meshes or not declarations.programs:
        return
    for name, layout in declarations.layouts.items():
        if _is_in(part, layout):
            yield replace(options, layout=name), f"layout `{name}`"
    for name, block in declarations.sbps.items():
        if _is_in(part, block):
            yield replace(options, sbp=name), f"sbp `{name}`"


def of_another_layout(name: str, diagnostic: Diagnostic, options: Options) -> Diagnostic:
    """A diagnostic of a layout that was not chosen: a note if another mesh or size resolves it."""
    on_chosen_mesh = diagnostic.code == "MD0304" and options.mesh is not None
    if diagnostic.severity != "error" and not on_chosen_mesh:
        return diagnostic
    message = f"{name} cannot be used as it is: {diagnostic.message}"
    return replace(diagnostic, severity="note", message=message)


def _check_layout(
    programs: Sequence[NamedProgram | None], declarations: Declarations, options: Options
) -> Diagnostics:
    """Errors of one layout in any program; warnings only if every program gives them."""
    result = Diagnostics()
    by_program = [Diagnostics() for _ in programs]
    for program, problems in zip(programs, by_program, strict=True):
        problems.of(partial(_lint, program, declarations, options, problems))
    for problems in by_program:
        result.add(*problems.errors)
    places = [{(d.code, d.span) for d in problems} for problems in by_program]
    for diagnostic in by_program[0] if by_program else ():
        if all((diagnostic.code, diagnostic.span) in problems for problems in places):
            result.add(diagnostic)
    if not result.errors:
        told = {diagnostic.span for diagnostic in result}
        silent = _silent_in_all(programs, declarations, options)
        result.add(*(diagnostic for diagnostic in silent if diagnostic.span not in told))
    return result


def _silent_in_all(
    programs: Sequence[NamedProgram | None], declarations: Declarations, options: Options
) -> Iterator[Diagnostic]:
    """The rules of a declared layout itself that change nothing of any program."""
    name = declared_layout(declarations, options.layout, options.sbp)
    is_whole = len(programs) == len(declarations.programs) > 0 and None not in programs
    if name is None or not is_whole:
        return
    names = (options.mesh, options.layout, options.sbp, options.schedule)
    spec = resolve(declarations, *names, Diagnostics())
    assert isinstance(spec, Layout)
    rule_spans = {rule.span for rule in declarations.layouts[name].rules}
    every = (program for program in programs if program is not None)
    first, *others = ({d.span: d for d in silent_rules(program, spec)} for program in every)
    for span, diagnostic in first.items():
        if span in rule_spans and all(span in silent for silent in others):
            yield diagnostic


def _lint(
    program: NamedProgram | None,
    declarations: Declarations,
    options: Options,
    diagnostics: Diagnostics,
) -> None:
    """Report what is wrong with the chosen layout or block in one program."""
    of_layout = Diagnostics()  # of the mesh and the layout by themselves
    names = (options.mesh, options.layout, options.sbp, options.schedule)
    spec = resolve(declarations, *names, of_layout)
    diagnostics.add(*lint(program, spec, declarations))


# --- texts that were not parsed whole ------------------------------------------------------------


def _without_consequences(
    found: Diagnostics, problems: Sequence[Diagnostic], tree: ast.SourceFile
) -> Diagnostics:
    """The diagnostics less those about names that may stand in a part that was not parsed."""
    if not problems:
        return found
    causes = Diagnostics()
    lost = _unparsed(tree)
    for diagnostic in found:
        code = diagnostic.code
        named = code in NAMED_ELSEWHERE and lost.intersection(_words(diagnostic))
        if not named and code not in STANDS_ELSEWHERE:
            causes.add(diagnostic)
    return causes


def _unparsed(tree: ast.SourceFile) -> set[str]:
    """The names that stand more often in the text than in its tree."""
    source = tree.span.source
    words = Counter(str(word) for word in lex(source) if word.type == "NAME")
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    words.subtract(name.text for name in names if name.span.source is source)
    return {word for word, count in words.items() if count > 0}


def _words(diagnostic: Diagnostic) -> set[str]:
    """The names at the place of a diagnostic."""
    return set(_WORD.findall(diagnostic.span.text)) if diagnostic.span else set()
