"""Selectors of layouts: whether a dotted path means a tensor."""

from __future__ import annotations

from meshdsl.named.ir import Value

GENERAL, STORED, ROLE, FUNCTION, TENSOR, PIN = range(6)
"""How narrowly a rule speaks of a tensor: the narrowest wins."""


def selects(selector: tuple[str, ...], value: Value) -> int | None:
    """How a dotted selector means this value: as TENSOR, as one in a FUNCTION, or not (None)."""
    parts = tuple((value.name or "").split("."))
    # `w.m` is a state of `w`; `m` alone is a tensor that the program calls so.
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
