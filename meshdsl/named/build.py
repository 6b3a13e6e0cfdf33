"""From the syntax tree of a program to the named program."""

from __future__ import annotations

from meshdsl.diagnostics import Diagnostics
from meshdsl.named.autodiff import with_gradients
from meshdsl.named.builder import TooLarge
from meshdsl.named.declarations import Declarations
from meshdsl.named.from_syntax import ProgramBuilder
from meshdsl.named.ir import Program
from meshdsl.syntax import ast


def build(
    declarations: Declarations, program: ast.Program, diagnostics: Diagnostics
) -> Program | None:
    """The named program, its gradients written out; None when it has errors.

    Those go to `diagnostics`.
    """
    before = len(diagnostics.errors)
    try:
        built = ProgramBuilder(declarations, diagnostics).build(program)
        if len(diagnostics.errors) == before:
            built = with_gradients(built, diagnostics)
    except TooLarge as error:
        diagnostics.add(*error.diagnostics)
        return None
    return built if len(diagnostics.errors) == before else None
