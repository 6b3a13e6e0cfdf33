"""From the syntax tree of a program to the named program, and on to its training step."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Related, Source, Span
from meshdsl.ir.types import DTYPES
from meshdsl.named.attention_fusion import Spoken, fuse_attention
from meshdsl.named.batch_norm_fusion import fuse_batch_norms
from meshdsl.named.builder import ProgramTooLarge
from meshdsl.named.declarations import Declarations, unknown
from meshdsl.named.from_syntax import ProgramBuilder
from meshdsl.named.grad_operators import with_gradients
from meshdsl.named.ir import NamedProgram, walk
from meshdsl.option_edits import one_of
from meshdsl.syntax import ast


def build(
    declarations: Declarations, program: ast.ProgramDecl, spoken: Spoken, diagnostics: Diagnostics
) -> NamedProgram | None:
    """The named program, its gradients written out; None when it has errors.

    Those go to `diagnostics`. Tensors that are `spoken` of stay. Beside one that trains, a program
    that does not has no dropout: it uses what that one has learned.
    """
    from meshdsl.named.random_streams import without_dropout

    before = len(diagnostics.errors)
    built = build_partly(declarations, program, spoken, diagnostics)
    if built is None or len(diagnostics.errors) > before:
        return None
    if is_trained(program) or not any(map(is_trained, declarations.programs.values())):
        return built
    return without_dropout(built)


def build_partly(
    declarations: Declarations, program: ast.ProgramDecl, spoken: Spoken, diagnostics: Diagnostics
) -> NamedProgram | None:
    """The named program as far as it could be built; None when it is too large.

    Errors go to `diagnostics`. Gradients are written out where there are none.
    """
    from meshdsl.named.training_step import check_minimised

    before = len(diagnostics.errors)
    try:
        builder = ProgramBuilder(declarations, diagnostics)
        built = builder.build(program)
        if len(diagnostics.errors) == before:
            built = with_gradients(_fused(built, spoken), diagnostics)
        if built.goal is not None:
            built = builder.goals.finish(built)
            if len(diagnostics.errors) == before:
                check_minimised(built, diagnostics)
    except ProgramTooLarge as error:
        diagnostics.add(*error.diagnostics)
        return None
    return built


def _fused(program: NamedProgram, spoken: Spoken) -> NamedProgram:
    """The program with attentions and batch norms fused, if it takes gradients: they keep less."""
    if not any(op.name == "grad" for op in walk(program.body)):
        return program
    return fuse_batch_norms(fuse_attention(program, spoken), spoken)


def choose_program(declarations: Declarations, name: str | None) -> ast.ProgramDecl:
    """The program called `name`; without it the only one, or the only one that minimises a loss.

    Anything else is an error: beside a program that trains, there may be others that use what it
    has learned.
    """
    programs = declarations.programs
    trains = [p for p in programs.values() if is_trained(p)]
    for candidates in (list(programs.values()), trains) if name is None else ():
        if len(candidates) == 1:
            return candidates[0]
    everything = Span(declarations.source, 0, 0)
    if not programs:
        message = "this file declares no program"
        help = "add one: `program NAME(x[dim]) { … return … }`"
        raise DiagnosticError(Diagnostic("MD0111", message, everything, help=help))
    if name is None:
        message = f"this file has {len(programs)} programs"
        first, *others = (node.name.span for node in programs.values())
        related = tuple(Related(span, "and here") for span in others[:3])
        fixes = one_of("--program", programs)
        raise DiagnosticError(Diagnostic("MD0111", message, first, related=related, fixes=fixes))
    if name not in programs:
        wrong = ast.Name(name, Span(Source("--program", name), 0, len(name)))
        raise DiagnosticError(unknown("MD0108", "program", wrong, list(programs)))
    return programs[name]


def is_trained(program: ast.ProgramDecl) -> bool:
    """Whether a program says what to minimise."""
    return any(isinstance(statement, ast.Minimize) for statement in program.body)


def finish_named(
    program: NamedProgram,
    dtype: str | None,
    evaluate: bool,
    measured: bool = False,
    spoken: Spoken | None = (),
    warmup: bool = False,
) -> NamedProgram:
    """Retype, verify and simplify a built program; with `minimize`, make its training step.

    Where that is only to be evaluated, it has no dropout. `spoken` are the tensors that layouts
    speak of: they stay. With None, attentions and batch norms are written in primitives.
    A step of the `warmup` compresses nothing.
    """
    from meshdsl.named.dtype_override import retype
    from meshdsl.named.random_streams import without_dropout
    from meshdsl.named.simplify import drop_unused
    from meshdsl.named.training_step import training_step, with_loss

    if dtype is not None:
        program = retype(program, DTYPES[dtype])
    if evaluate and program.goal is not None:
        # No product becomes narrow: what would wait for it is contracted now.
        program = replace(without_dropout(program), goal=program.goal.without_mixed())
    program = _simplified(program, spoken)
    if program.goal is None:
        return program
    if evaluate:
        return drop_unused(replace(with_loss(program), goal=None, updates=()))
    compress = program.goal.optimizer.compress
    # No device has the norm of gradients of which only the momentum is sent.
    measured = measured and (compress is None or not compress.is_of_momentum)
    if warmup:
        program = replace(program, goal=program.goal.uncompressed())
    return _simplified(training_step(program, measured), spoken, is_step=True)


def _simplified(
    program: NamedProgram, spoken: Spoken | None, is_step: bool = False
) -> NamedProgram:
    from meshdsl.named.expand import in_primitives
    from meshdsl.named.passes import simplify
    from meshdsl.named.verify import verify

    verify(program)
    program = simplify(program, spoken, is_step)
    if spoken is None:
        program = simplify(in_primitives(program), None, is_step)
    verify(program)
    return program
