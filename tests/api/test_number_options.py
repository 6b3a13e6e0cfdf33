# mypy: disable-error-code="type-arg,valid-type"
"""Options of operators that Python alone can write: they are refused, or mean a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshdsl as md

b, h, groups, m = md.dims(b=4, h=6, groups=2, m=3)

CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "an eps of no number": lambda x, t, w, s: md.layer_norm[h](x, eps=float("nan")),
    "an eps without an end": lambda x, t, w, s: md.rms_norm[h](x, eps=float("inf")),
    "an eps that is a truth value": lambda x, t, w, s: md.rms_norm[h](x, eps=True),
    "an eps of a batch that is no number": lambda x, t, w, s: md.batch_norm[b, h, m](
        x * md.cast(md.iota[m], "f32"), eps=float("nan")
    ),
    "an eps of a group without an end": lambda x, t, w, s: md.group_norm[b, h, m](
        x * md.cast(md.iota[m], "f32"), eps=float("inf")
    ),
    "an eps of a batch that is a truth value": lambda x, t, w, s: md.batch_norm[b, h, m](
        x * md.cast(md.iota[m], "f32"), eps=True
    ),
    "a target that is a truth value": lambda x, t, w, s: md.cross_entropy[h](
        x, t, ignore_index=True
    ),
    "rows that are a truth value": lambda x, t, w, s: md.grouped_einsum(
        x, w, s, rows=True, out=[b, m]
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_refused(what: str) -> None:
    def called(
        x: md.Tensor[b, h], t: md.i32[b], w: md.Tensor[groups, h, m], s: md.i32[groups]
    ) -> Any:
        return CALLS[what](x, t, w, s)

    with pytest.raises(md.ProgramError, match="MD0213"):
        md.program(called).compile()
