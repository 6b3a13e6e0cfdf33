"""Selectors: the tensors that a dotted name means, before the colon of a rule or a group."""

from __future__ import annotations

from meshdsl.named.ir import Value

GENERAL, STORED, ROLE, FUNCTION, TENSOR, PIN = range(6)
"""Levels of precedence of a rule for a tensor: the narrowest wins."""


def selects(selector: tuple[str, ...], value: Value) -> int | None:
    """The level at which a selector names a value: TENSOR, FUNCTION, or None if it does not."""
    parts = tuple((value.name or "").split("."))
    # `w.m` is a state of `w`; `m` alone is a tensor of that name.
    alone = parts if value.role == "state" else (value.label,)
    if value.name is not None and selector in (parts, alone):
        return TENSOR
    for names in (value.path, value.functions):
        for start in range(len(names) - len(selector) + 1):
            if names[start : start + len(selector)] == selector:
                return FUNCTION
    inner = (*value.functions, value.label)
    if value.name is not None and len(selector) > 1:
        for names in (parts, inner):
            if names[-len(selector) :] == selector:
                return TENSOR
    return None


def selected(selector: tuple[str, ...], value: Value) -> int | None:
    """The level at which a selector names a value, or the one whose rules bind it."""
    levels = [selects(selector, v) for v in (value, value.rules_from) if v is not None]
    return max((level for level in levels if level is not None), default=None)
