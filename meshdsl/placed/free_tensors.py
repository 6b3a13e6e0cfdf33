"""The ways out where two rules split one tensor over one axis: free it of one of them.

A rule of its own frees a tensor, `h: hidden -> none`. What the library computes goes by its
function, and a subexpression is named first, since rules bind names.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.named.ir import Value

if TYPE_CHECKING:
    from meshdsl.placed.layout import Rule

LONGEST_SHOWN = 60
"""Characters of a subexpression that a way out repeats."""


def way_free(value: Value, rule: Rule) -> str:
    """How to free a tensor of a rule; a subexpression is named first, since rules bind names."""
    unsplit = f"do not split `{rule.dim}`"
    if function := _library_function(value):
        return f"{unsplit} in this function: `{function}: {rule.dim} -> none`"
    if value.name:
        return f"{unsplit} in this tensor: `{value.label}: {rule.dim} -> none`"
    text = " ".join(value.span.text.split())
    # An item of a view, `[c = ids]`, is no expression of its own.
    is_item = "->" in _outside_brackets(text) or re.match(r"\w+ *=(?!=)", text)
    shown = "…" if is_item or len(text) > LONGEST_SHOWN else text
    words = set(re.findall(r"\w+", re.sub(r"#.*", "", value.span.source.text)))
    names = itertools.chain(["part"], (f"part{i}" for i in itertools.count(2)))
    name = next(n for n in names if n not in words)
    return (
        f"{unsplit} here: write `{name} = {shown}` on a line before, `{name}` here, "
        f"and in the layout `{name}: {rule.dim} -> none`"
    )


def freed(value: Value, rule: Rule) -> tuple[Fix, ...]:
    """The fix that adds a rule which leaves a dim of one tensor whole, behind the other rule.

    Of what a definition of the library makes, a rule for that function: its names are not the
    user's. A subexpression has to be named first.
    """
    name = _library_function(value) or (value.label if value.name else "")
    if not (rule.is_in_layout and name):
        return ()
    text = f"{name}: {rule.dim} -> none"
    edit = Edit(Span(rule.span.source, rule.span.end, rule.span.end), f", {text}")
    return (Fix(f"add `{text}`", (edit,), safe=False),)


def _library_function(value: Value) -> str:
    """The library function whose definition makes a value: a rule can name no more of it."""
    return value.functions[-1] if value.in_library else ""


def _outside_brackets(text: str) -> str:
    while (shorter := re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", text)) != text:
        text = shorter
    return text
