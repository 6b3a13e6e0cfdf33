"""Options of a written call that fixes add, replace or leave out, whatever stands in the call."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import Source, Span
from meshdsl.syntax.call_edits import with_option, without_option, written_anew
from meshdsl.syntax.edits import apply

CALLS = {
    "sgd()": ("sgd(clip=2.0)", None),
    "sgd(lr=0.1)": ("sgd(lr=0.1, clip=2.0)", None),
    "sgd(lr=0.1,)": ("sgd(lr=0.1, clip=2.0,)", None),
    "sgd(lr=f(1, 2), clip=1.0)": ("sgd(lr=f(1, 2), clip=2.0)", "sgd(lr=f(1, 2))"),
    "s[a]": ("s[a](clip=2.0)", None),
    's[a](4, layers="1, (2")': ('s[a](4, layers="1, (2", clip=2.0)', None),
    "sgd(\n  lr=1.0, # clip=3, (\n  clip=1.0)": ("sgd(\n  lr=1.0, # clip=3, (\n  clip=2.0)", None),
    "md.sgd(lr=0.1)": (None, None),
}
"""Of each call: it with `clip=2.0`, and without `clip`. None: there is no such fix."""


@pytest.mark.parametrize("text", CALLS)
def test_an_option_of_a_call(text: str) -> None:
    with_it, without_it = CALLS[text]
    source = Source("f.mdsl", f"with {text} after")
    call = Span(source, 5, 5 + len(text))
    added = [apply(source.text, fix.edits) for fix in with_option(call, "clip", "2.0")]
    assert added == ([] if with_it is None else [f"with {with_it} after"])
    gone = [apply(source.text, fix.edits) for fix in without_option(call, "clip")]
    assert len(gone) == ("clip=1.0" in text)
    assert without_it is None or gone == [f"with {without_it} after"]
    assert bool(written_anew(call, "other")) == (with_it is not None)
