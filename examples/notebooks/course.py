"""What the notebooks of this folder use over and over: `check` a text, and say what is `sent`."""

from meshdsl import Plan
from meshdsl.api.errors import shown
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source


def check(text: str) -> bool:
    """Print what `meshdsl check` says of a file with this text; whether it is fine."""
    diagnostics = Diagnostics()
    line = ""
    try:
        line = check_source(Source("mine.mdsl", text), Options(), diagnostics)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
    print("\n\n".join(shown(d).strip() for d in diagnostics) or line)
    return not diagnostics.errors


def sent(plan: Plan) -> None:
    """Print the collectives of a plan in one line each, and the bytes that one device sends."""
    for c in plan.explain().json["collectives"]:
        trips = f" × {c['count']}" if c["count"] > 1 else ""
        where = f"{c['kind']} over {', '.join(c['axes'])}{trips}"
        moved = c["to"] if "partial" in c["from"] else f"{c['from']} → {c['to']}"
        moved = f"{len(c['parts'])} tensors" if c["parts"] else moved
        print(f"{c['phase']:8} {where:26} {c['wire_bytes']:>14,} bytes  {moved}")
    print(f"{plan.cost().wire_bytes:,} bytes sent by each device")
