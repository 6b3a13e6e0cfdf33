"""The tables of figures in the documentation of `examples/sbp`, made from what is computed.

A page has `<!-- table uvw -->` or `<!-- table uvw: first, late -->` where a table begins, and
`<!-- end -->` behind it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import Options, front
from meshdsl.placed.place import POLICIES
from tests.programs.harness import Case, counts, explained
from tests.project import ROOT, matching

FILES = {path.stem: path for path in matching("examples/sbp/*.mdsl")}
PAGES = (ROOT / "docs" / "sbp" / "README.md", ROOT / "docs" / "comparison.md")
TABLE = re.compile(r"(<!-- (table|figures) ([\w, :]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = (
    "| | written | immediate | mesh-tf | deferred | optimal | collectives, `optimal` | memory |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Chosen(Case):
    """A case under a layout or, with `sbp`, a block of its file, on the mesh that suits it."""

    sbp: bool = False

    @property
    def options(self) -> Options:
        layout, sbp = (None, self.layout) if self.sbp else (self.layout, None)
        mesh = self.mesh or None
        return Options(
            mesh=mesh,
            layout=layout,
            sbp=sbp,
            reduce=self.reduce,
            message_bytes=0,
            set_dims=self.dims,
        )


@functools.cache
def declared(name: str) -> Declarations:
    path = FILES[name]
    return front(Source(path.name, path.read_text(encoding="utf-8")), {}, Diagnostics())


def blocks(name: str) -> list[str]:
    """Every layout and sbp block of an example."""
    return [*declared(name).layouts, *declared(name).sbps]


def chosen(name: str, block: str, policy: str) -> Chosen:
    text, sbp = declared(name).source.text, block in declared(name).sbps
    return Chosen(text, "", block, policy, name=f"{name}.mdsl", sbp=sbp)


@functools.cache
def figures(name: str, block: str, policy: str) -> Any:
    """The `explain --json` at the sizes of the file."""
    return explained(chosen(name, block, policy))


def renewed(page: str, others: dict[str, str]) -> str:
    """The page with its tables as they are now; `others` has those of other kinds by name."""

    def table(found: re.Match[str]) -> str:
        name, _, listed = found[3].partition(": ")
        if found[2] == "figures":
            made = others[name]
        else:
            made = made_table(name, listed.split(", ") if listed else blocks(name))
        return f"{found[1]}{made}\n{found[4]}"

    return TABLE.sub(table, page)


def made_table(name: str, listed: list[str]) -> str:
    """Bytes per device under every policy, for some layouts and sbp blocks of an example."""
    return "\n".join([*HEAD, *(_row(name, block) for block in listed)])


def _row(name: str, block: str) -> str:
    reports = [figures(name, block, policy) for policy in POLICIES]
    last = reports[-1]
    sent = [f"{r['totals']['wire_bytes']:,}" for r in reports]
    if not last["proven"]:
        sent[-1] += " (not proven least)"
    done = ", ".join(f"{n} {kind}" for kind, n in sorted(counts(last).items())) or "none"
    memory = f"{last['memory']['peak']:,}"
    return f"| `{block}` | {_written(name, block)} | {' | '.join(sent)} | {done} | {memory} |"


def _written(name: str, block: str) -> str:
    declarations = declared(name)
    if block in declarations.sbps:
        return _counted(len(declarations.sbps[block].entries), "signature")
    from meshdsl.placed.layout import collect_declared

    rules = collect_declared(declarations.layouts[block], declarations, Diagnostics()).rules
    return _counted(len(rules), "rule")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
