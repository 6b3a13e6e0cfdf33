"""From a program and what was chosen for it to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.api.errors import warn
from meshdsl.api.layouts import Place, with_layout, with_mesh, with_sbp
from meshdsl.api.places import Site
from meshdsl.api.plan import Plan
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, fail
from meshdsl.named import ir
from meshdsl.pipeline import Options

if TYPE_CHECKING:
    from meshdsl.api.program import Program
    from meshdsl.named.declarations import Declarations

NO_AXIS = "MD0304"


def planned(program: Program, chosen: Mapping[str, Any], strict: bool, site: Site) -> Plan:
    """Compile a program for what was chosen; `site` is the call."""
    made = program.compilation(*_asked(program, chosen, site))
    try:
        made.checked()
    except DiagnosticError as error:
        raise DiagnosticError(*(_in_python(d, site) for d in error.diagnostics)) from None
    _refuse_missing_axes(made.diagnostics, made.options, program)
    if strict:
        made.diagnostics.promote_warnings()
        made.diagnostics.raise_errors()
    frame = site.frame
    assert frame is not None, "a call comes from somewhere"
    warn(made.diagnostics, frame.f_code.co_filename, frame.f_lineno)
    return Plan(program, made)


def _asked(program: Program, chosen: Mapping[str, Any], site: Site) -> tuple[Declarations, Options]:
    """What the pipeline is asked for: layouts that were given beside those of the program."""
    declarations = program.declarations
    dtype = chosen["dtype"] and str(chosen["dtype"])
    if dtype is not None and (dtype not in ir.DTYPES or ir.DTYPES[dtype].kind != "float"):
        help = "there are f32, f64, bf16 and f16"
        fail("MD0602", f"`{dtype}` is no float type", site.argument("dtype"), help=help)
    if chosen["layout"] is not None and chosen["sbp"] is not None:
        fail("MD0601", "a layout and `sbp` are both given", site.span, help="choose one of them")
    declarations, mesh = with_mesh(declarations, chosen["mesh"], Place(site, "mesh", 0))
    place = Place(site, "layout", 1)
    declarations, layout = with_layout(declarations, chosen["layout"], place)
    declarations, sbp = with_sbp(declarations, chosen["sbp"], site.argument("sbp"))
    options = Options(
        program=program.name,
        mesh=mesh,
        layout=layout,
        sbp=sbp,
        reduce=chosen["reduce"],
        message_bytes=chosen["message_bytes"],
        cache=chosen["cache"],
        dtype=dtype,
    )
    return declarations, options


# --- pickles ---------------------------------------------------------------------------------

TABLES = ("meshes", "layouts", "sbps")


def chosen_of(plan: Plan) -> tuple[Options, dict[str, dict[str, Any]]]:
    """What a plan was made for: options, and the declarations that its program's text lacks."""
    made, known = plan._made.declarations, plan.program.declarations
    is_text = plan.program._read_from is not None
    added = {
        table: {
            name: node
            for name, node in getattr(made, table).items()
            if not is_text or getattr(known, table).get(name) is not node
        }
        for table in TABLES
    }
    return replace(plan.options, strict=False), added


def again(
    program: Program,
    options: Options,
    added: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, Any] | None,
) -> Plan:
    """The plan that was pickled, compiled anew; what there was to say has been said."""
    known = program.declarations
    tables: dict[str, Any] = {t: {**getattr(known, t), **added[t]} for t in TABLES}
    plan = Plan(program, program.compilation(replace(known, **tables), options).checked())
    if params is not None:
        plan.params = params
    return plan


def _in_python(diagnostic: Diagnostic, site: Site) -> Diagnostic:
    """A diagnostic about an option, at the argument that stands for it."""
    positions = {"mesh": 0, "layout": 1}
    span = diagnostic.span
    if span is None or not span.file.startswith("--"):
        return diagnostic
    name = span.file.removeprefix("--")
    return replace(diagnostic, span=site.argument(name, positions.get(name)))


def _refuse_missing_axes(diagnostics: Diagnostics, options: Options, program: Program) -> None:
    """A layout written in Python for this mesh has no use for an axis that the mesh lacks."""
    if options.layout is None or options.layout in program.declarations.layouts:
        return
    missing = [d for d in diagnostics if d.code == NO_AXIS]
    if missing:
        raise DiagnosticError(*(replace(d, severity="error") for d in missing))
