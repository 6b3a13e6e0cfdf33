"""What a user asks a search for, as text or numbers, and the problem that it is."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import Diagnostics, Source, Span, counted, did_you_mean, fail
from meshdsl.pipeline import Compilation, timing_of
from meshdsl.placed.layout import resolve_layout, resolve_mesh
from meshdsl.placed.lint import lint, lint_demands
from meshdsl.placed.sbp import Mesh
from meshdsl.placed.stages import piped
from meshdsl.search.plan import Rule, Rules
from meshdsl.search.problem import OBJECTIVES, REPLICATED, Limits, Problem
from meshdsl.search.shapes import shapes, timed
from meshdsl.search.staged import check


@dataclass(frozen=True, slots=True)
class Asked:
    """The wishes of a user, named as on the command line; None: the default.

    `memory` and `budget` may be numbers, of bytes and seconds; `replicated` a part of 1.
    With `devices`, every mesh of so many with the axes of the mesh is searched.
    """

    objective: str | None = None
    cluster: str | None = None
    memory: str | int | None = None
    replicated: str | float = REPLICATED
    fix: str | None = None
    max_rules: int | None = None
    storage: bool = True
    selectors: bool = False
    partial: bool = True
    per_tensor: bool = False
    front: bool = False
    budget: str | float | None = None
    devices: int | None = None
    certificate: bool = False
    start: str | None = None
    pipeline: str | None = None

    def problems(self, made: Compilation) -> tuple[Problem, ...]:
        """The problem on the mesh of a program's options, or on each shape of it of `devices`.

        Raises a diagnostic.
        """
        mesh = resolve_mesh(made.declarations, made.options.mesh, made.options.layout or "")
        meshes = [mesh] if self.devices is None else list(shapes(mesh, self.devices))
        if not meshes:
            message = f"{self.devices} devices need a mesh, and the program has none"
            fail("MD0645", message, help="name the axes: `--mesh data:1,model:1`")
        self._check_pipeline(made, mesh, meshes)
        options = replace(made.options, cluster=self.cluster)
        expired = _expired(self.budget)
        found = timed(meshes, lambda mesh: timing_of(made.declarations, options, mesh))
        return tuple(self._problem(made, mesh, timing, expired) for mesh, timing in found)

    def _problem(
        self, made: Compilation, mesh: Mesh, timing: Timing | None, expired: Callable[[], bool]
    ) -> Problem:
        limits = Limits(
            memory=amount("memory", self.memory, "80GB"),
            replicated=_part(self.replicated),
            fixed=self._fixed(made, mesh),
            rules=self.max_rules,
            storage=self.storage,
            selectors=self.selectors or self.per_tensor,
            partial=self.partial,
            tensors=self.per_tensor,
            pipeline=self.pipeline,
        )
        if limits.rules is not None and len(limits.fixed) > limits.rules:
            fixed = counted(len(limits.fixed), "rule")
            help = f"`--max-rules {len(limits.fixed)}` or more, or fewer rules by `--fix`"
            fail("MD0601", f"`--fix` has {fixed}, `--max-rules` allows {limits.rules}", help=help)
        objective = self._objective(timing)
        about = (objective, limits, timing, self.front)
        # By time few tensors are waited for: their bound takes no time to speak of.
        certificate = self.certificate or objective == "time"
        # What was not looked at has to be bounded by something.
        certificate |= objective == "bytes" and (self.budget is not None or self.per_tensor)
        if self.certificate and objective == "memory":
            help = "leave `--certificate` out, or take `--objective bytes`"
            fail("MD0646", "no bound of memory is known over per-tensor plans", help=help)
        start = self._rules(made, mesh, "--from", self.start) if self.start else None
        return Problem(made.named, mesh, *about, expired, certificate=certificate, start=start)

    def _check_pipeline(self, made: Compilation, mesh: Mesh, meshes: list[Mesh]) -> None:
        """Raise MD0647 where there can be no pipeline over the axis that is named, if one is."""
        if self.pipeline is None:
            return
        if self.pipeline not in mesh.names:
            known = list(mesh.names)
            help = did_you_mean(self.pipeline, known) or f"there are {', '.join(known) or 'none'}"
            message = f"`--pipeline {self.pipeline}`: the mesh has no such axis"
            fail("MD0647", message, help=help)
        if self.start is not None:
            help = "leave one of them out"
            fail("MD0601", "`--pipeline` looks for stages, `--from` begins without", help=help)
        check(made.named, self.pipeline, meshes)

    def _objective(self, timing: Timing | None) -> str:
        objective = self.objective or ("bytes" if timing is None else "time")
        if objective not in OBJECTIVES:
            help = did_you_mean(objective, list(OBJECTIVES)) or f"there are {', '.join(OBJECTIVES)}"
            fail("MD0602", f"`--objective {objective}`: there is no such objective", help=help)
        if objective == "time" and timing is None:
            help = "name one: `--cluster h100`, or `mesh … on h100`"
            fail("MD0324", "the least time is asked for, but no cluster is named", help=help)
        return objective

    def _fixed(self, made: Compilation, mesh: Mesh) -> Rules:
        """The general rules to be kept. Raises MD0302 for some that contradict."""
        return self._rules(made, mesh, "--fix", self.fix) if self.fix else ()

    def _rules(self, made: Compilation, mesh: Mesh, option: str, asked: str) -> Rules:
        """The rules of a layout by name, or as text. Raises MD0302 for some that contradict."""
        layout = resolve_layout(made.declarations, asked, mesh, option=option)
        if layout.schedule is not None or layout.cuts:
            help = "name a layout without a schedule; `--pipeline AXIS` searches for stages"
            fail("MD0601", f"`{option} {asked}`: the layout is that of a pipeline", help=help)
        found = Diagnostics()
        lint(made.named, layout, found)
        lint_demands(made.named, layout, found)
        found.raise_errors()
        made.diagnostics.add(*found)
        if made.named.goal is not None:  # stages are asked for by `--pipeline` alone
            free = tuple(r for r in layout.rules if r.axes != (self.pipeline,))
            piped(made.named, replace(layout, rules=free))
        known = ((r, mesh.known(r.axes)) for r in layout.rules)
        return tuple(Rule(r.dim, axes, r.selector) for r, axes in known if axes or not r.axes)


# --- numbers -------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|min|)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}


def amount(
    option: str, text: str | int | None, example: str, per: Literal["", "/s"] = ""
) -> int | None:
    """Bytes of `80GB` or `64 GiB`, or bytes a second (`per`). Raises MD0601."""
    if text is None or isinstance(text, int):
        return text
    found = _SIZE.fullmatch(text.strip().removesuffix(per))
    if found is None:
        _refuse(option, text, example)
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    amount = float(number) * base ** (" KMGTP".index(prefix.upper()) if prefix else 0)
    if math.isinf(amount) or (per and amount < 1):
        _refuse(option, text, example)
    return int(amount)


def _part(text: str | float) -> float:
    """A part of 1 of `15%`. Raises MD0601."""
    if not isinstance(text, str):
        return text
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        _refuse("replicated", text, "15%")
    return float(found[1]) / 100


def _expired(text: str | float | None) -> Callable[[], bool]:
    """Whether the time of `10s` is over, which begins now. Raises MD0601."""
    if text is None:
        return lambda: False
    found = _TIME.fullmatch(str(text).strip())
    if found is None:
        _refuse("budget", str(text), "10s")
    end = time.monotonic() + float(found[1]) * _SECONDS[found[2]]
    return lambda: time.monotonic() >= end


def _refuse(option: str, text: str, example: str) -> NoReturn:
    span = Span(Source(f"--{option}", text), 0, len(text))
    fail("MD0601", f"this is no value of `--{option}`", span, help=f"write `--{option} {example}`")
