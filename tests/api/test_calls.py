# mypy: disable-error-code="type-arg,valid-type,misc"
"""Mistakes that no text is to blame for stand at the user's call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import meshdsl as md

batch, io = md.dims(batch=4, io=6)


@md.program
def learner(x: md.Tensor[batch, io]):
    w = md.param([io])
    loss = md.mean(x * w)
    md.minimize(loss, md.sgd(lr=0.1))
    return loss


MISTAKES: list[tuple[str, str, Callable[[md.Plan], Any]]] = [
    ("MD0010", "no_such.mdsl", lambda plan: md.load("no_such.mdsl")),
    ("MD0010", "no_such.mdsl", lambda plan: md.check("no_such.mdsl")),
    ("MD0607", "explain(line=9_999)", lambda plan: plan.explain(line=9_999)),
    ("MD0607", "explain(tensor=", lambda plan: plan.explain(tensor="none")),
    ("MD0504", "train({}", lambda plan: plan.train({}, steps=2)),
    ("MD0505", "no_such.npz", lambda plan: plan.train("no_such.npz", steps=2)),
]
"""The code of each, and a part of the call."""


@pytest.mark.parametrize(("code", "text", "mistake"), MISTAKES, ids=[t for _, t, _ in MISTAKES])
def test_the_call_is_underlined(code, text, mistake) -> None:
    with pytest.raises(md.ProgramError) as caught:
        mistake(learner.compile())
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert found.span is not None
    assert found.span.file == "test_calls.py"
    assert text in found.span.text


def test_a_call_by_an_installed_package_has_no_place() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(md.ProgramError) as caught:
        pool.submit(md.load, "no_such.mdsl").result()
    assert caught.value.diagnostics[0].span is None
