"""The one way through the compiler: a table of stages, each a pure function of what came before.

The command line and every other door go through `compile_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshdsl.device import ir as device
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Related, Source, Span
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations, declare, unknown
from meshdsl.named.from_syntax import build
from meshdsl.placed import ir as placed
from meshdsl.placed.place import POLICIES, Search
from meshdsl.placed.reshard import MESSAGE_BYTES, Price
from meshdsl.syntax import ast

DEFAULT_POLICY = "optimal"


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses beside the file, named as on the command line; None: the default.

    `message_bytes` is what a collective counts beside its bytes where the policy is `optimal`;
    with `cache`, plans are kept in the user's cache folder. `evaluate` leaves out what `minimize`
    adds: gradients and update.
    """

    program: str | None = None
    mesh: str | None = None
    layout: str | None = None
    sbp: str | None = None
    reduce: str = DEFAULT_POLICY
    message_bytes: int = MESSAGE_BYTES
    cache: bool = True
    set_dims: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    strict: bool = False
    evaluate: bool = False

    @property
    def search(self) -> Search:
        """How a plan is searched for."""
        return Search(Price(self.message_bytes), self.cache)


def front(source: Source, set_dims: Mapping[str, int], diagnostics: Diagnostics) -> Declarations:
    """Read and declare a file; errors go to `diagnostics`."""
    from meshdsl.syntax.parse import parse

    tree, problems = parse(source)
    diagnostics.add(*problems)
    return declare(tree, diagnostics, set_dims)


def build_named(
    declarations: Declarations,
    name: str | None,
    dtype: str | None,
    diagnostics: Diagnostics,
    evaluate: bool = False,
) -> named.Program:
    """The named program called `name` (the only one for None), verified and simplified.

    One with `minimize` becomes a training step, unless it is only to be evaluated.
    """
    node = choose_program(declarations, name)
    program = build(declarations, node, diagnostics)
    diagnostics.raise_errors()
    assert program is not None
    return finish_named(program, dtype, evaluate)


def finish_named(program: named.Program, dtype: str | None, evaluate: bool) -> named.Program:
    """What is made of a program that has been built, from text or in Python."""
    from meshdsl.named.retype import retype
    from meshdsl.named.training import training_step, with_loss

    if dtype is not None:
        program = retype(program, named.DTYPES[dtype])
    program = _simplified(program)
    if program.goal is None:
        return program
    if evaluate:
        return replace(with_loss(program), goal=None)
    return _simplified(training_step(program))


def _simplified(program: named.Program) -> named.Program:
    from meshdsl.named.simplify import simplify
    from meshdsl.named.verify import verify

    verify(program)
    program = simplify(program)
    verify(program)
    return program


def choose_program(declarations: Declarations, name: str | None) -> ast.Program:
    """The program a command is about."""
    programs = declarations.programs
    if name is None and len(programs) == 1:
        return next(iter(programs.values()))
    whole = Span(declarations.source, 0, 0)
    if not programs:
        message = "this file declares no program"
        help = "add one: `program NAME(x[dim]) { … return … }`"
        raise DiagnosticError(Diagnostic("MD0111", message, whole, help=help))
    if name is None:
        message = f"this file has {len(programs)} programs"
        help = f"choose one with `--program`: {', '.join(programs)}"
        first, *others = (node.name.span for node in programs.values())
        related = tuple(Related(span, "and here") for span in others[:3])
        raise DiagnosticError(Diagnostic("MD0111", message, first, related=related, help=help))
    if name not in programs:
        wrong = ast.Name(name, Span(Source("--program", name), 0, len(name)))
        raise DiagnosticError(unknown("MD0108", "program", wrong, list(programs)))
    return programs[name]


def place_named(
    program: named.Program, declarations: Declarations, options: Options, diagnostics: Diagnostics
) -> placed.Program:
    """The placed program under the chosen mesh, layout and policy, verified."""
    from meshdsl.placed.layout import resolve_layout, resolve_mesh
    from meshdsl.placed.lint import lint
    from meshdsl.placed.place import place, place_annotated
    from meshdsl.placed.sbp_block import lint_sbp, resolve_sbp
    from meshdsl.placed.verify import verify

    check_policy(options.reduce)
    mesh = resolve_mesh(declarations, options.mesh, options.layout, options.sbp)
    if options.sbp is not None:
        annotations = resolve_sbp(declarations, options.sbp, mesh)
        lint_sbp(program, annotations, diagnostics)
        annotated = place_annotated(program, annotations, options.reduce, options.search)
        verify(annotated)
        return annotated
    layout = resolve_layout(declarations, options.layout, mesh)
    lint(program, layout, diagnostics)
    result = place(program, layout, options.reduce, options.search)
    verify(result)
    return result


def check_policy(policy: str, span: Span | None = None) -> None:
    """Refuse a reduction policy that does not exist."""
    span = span or Span(Source("--reduce", policy), 0, len(policy))
    if policy not in POLICIES:
        name = ast.Name(policy, span)
        raise DiagnosticError(unknown("MD0108", "reduction policy", name, list(POLICIES)))


def lower_placed(program: placed.Program) -> device.Program:
    """The device program, verified: small collectives in buckets, others under way early."""
    from meshdsl.backends.torch_text import taken_names
    from meshdsl.device.buckets import in_buckets
    from meshdsl.device.from_placed import lower
    from meshdsl.device.overlap import overlapped
    from meshdsl.device.sums import summed_in_place
    from meshdsl.device.verify import verify

    taken = taken_names()
    result = lower(program, taken)
    verify(result)
    for made in (
        in_buckets,
        lambda p: summed_in_place(p, taken),
        lambda p: overlapped(p, taken),
    ):
        result = made(result)
        verify(result)
    return result


Stage = Callable[[dict[str, Any], Options, Diagnostics], Any]

STAGES: dict[str, Stage] = {
    "declarations": lambda made, o, d: front(made["source"], o.set_dims, d),
    "named": lambda made, o, d: build_named(
        made["declarations"], o.program, o.dtype, d, o.evaluate
    ),
    "placed": lambda made, o, d: place_named(made["named"], made["declarations"], o, d),
    "device": lambda made, o, d: lower_placed(made["placed"]),
}
"""What is made of a source, in order; errors are raised after each stage."""


def compile_source(
    source: Source, options: Options, diagnostics: Diagnostics, until: str = "device"
) -> dict[str, Any]:
    """Run the stages up to `until`; what each made, by name. Raises `DiagnosticError`.

    Under `strict`, warnings are errors.
    """
    made: dict[str, Any] = {"source": source}
    for name, stage in STAGES.items():
        made[name] = stage(made, options, diagnostics)
        diagnostics.raise_errors()
        if name == until:
            break
    if options.strict:
        diagnostics.promote_warnings()
        diagnostics.raise_errors()
    return made
