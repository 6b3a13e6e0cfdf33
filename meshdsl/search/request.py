"""What a user asks of a search: one record for the command line, Python and graphs with costs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Literal, NoReturn

from meshdsl.diagnostics import Source, Span
from meshdsl.option_edits import give, refuse
from meshdsl.records import dataclass

REPLICATED = 0.15
"""The part of the least work per device by which a layout may exceed it.

Bytes alone are least where nothing is split. Tofu assumes that work is divided; Alpa forces it
(`allow_recompute_heavy_op=False`)."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts as a user writes them: `80GB`, `15%`, `10s`, `1.25GB/s`; or as numbers."""

    memory: str | int | None = None
    replicated: str | float = REPLICATED
    budget: str | float | None = None
    bandwidth: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A request, its fields named as on the command line; None: the default.

    `memory` is in bytes per device, `replicated` a part of 1 (see `REPLICATED`), `budget` in
    seconds, `bandwidth` in bytes a second. `fix` and `start` are layouts, by name or as text.
    `storage`: rules for `params`, `grads` and `state` are searched too (space L1, else L0);
    `selectors`: those for functions and parameters, by steps (L2); `per_tensor`: those for all
    tensors with a name (L3). Without `partial` sums are reduced where they appear. `pipeline` is an
    axis that stages may be on. With `front`, layouts that need less memory are searched too,
    however much they send. With `devices`, every mesh of so many with the axes of the mesh is
    searched; graphs with costs are solved for so many. `bandwidth` and `stages` are of such alone.
    """

    method: str | None = None
    objective: str | None = None
    cluster: str | None = None
    memory: int | None = None
    replicated: float = REPLICATED
    fix: str | None = None
    max_rules: int | None = None
    storage: bool = True
    selectors: bool = False
    partial: bool = True
    per_tensor: bool = False
    front: bool = False
    budget: float | None = None
    devices: int | None = None
    certificate: bool = False
    start: str | None = None
    pipeline: str | None = None
    bandwidth: float | None = None
    stages: int | None = None

    @property
    def by_steps(self) -> bool:
        """Whether rules for functions and parameters, or for all tensors, are searched."""
        return self.selectors or self.per_tensor

    def with_amounts(self, amounts: Amounts) -> SearchRequest:
        """This request with amounts, some of them texts. Raises MD0601."""
        return replace(
            self,
            memory=_bytes("memory", amounts.memory, "80GB"),
            replicated=_part(amounts.replicated),
            budget=_seconds(amounts.budget),
            bandwidth=_bytes("bandwidth", amounts.bandwidth, "1.25GB/s", per="/s"),
        )


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|min|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}


def _bytes(
    option: str, text: str | int | None, example: str, per: Literal["", "/s"] = ""
) -> int | None:
    """Bytes of `80GB` or `64 GiB`, or bytes a second (`per`). Raises MD0601."""
    if text is None or isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip().removesuffix(per))
    if match is None:
        _refuse(option, text, example)
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    amount = float(number) * base ** (" KMGTP".index(prefix.upper()) if prefix else 0)
    if math.isinf(amount) or (per and amount < 1):
        _refuse(option, text, example)
    return int(amount)


def _part(text: str | float) -> float:
    """A part of 1 of `15%`. Raises MD0601."""
    if not isinstance(text, str):
        return text
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        _refuse("replicated", text, "15%")
    return float(match[1]) / 100


def _seconds(text: str | float | None) -> float | None:
    """Seconds of `10s`. Raises MD0601."""
    if text is None:
        return None
    match = _TIME.fullmatch(str(text).strip())
    if match is None:
        _refuse("budget", str(text), "10s")
    return float(match[1]) * _UNITS[match[2]]


def _refuse(option: str, text: str, example: str) -> NoReturn:
    span = Span(Source(f"--{option}", text), 0, len(text))
    fix = give(f"--{option}", example, safe=False)
    refuse("MD0601", f"this is no value of `--{option}`", fix, span=span)
