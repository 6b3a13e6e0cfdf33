"""Several prompts in one call: each continued as it is alone, under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdsl.backends.generate.contract import NO_PREFILL
from tests.covering import covered

from .models import LM, ROWS, Oracle, programs, texts

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10), (2, 2), (3, 1, 4), (10,)]
LAYOUTS = {
    "data_parallel": "data:2",
    "megatron": "data:2,tp:2",
    "zero3": "data:2",
    "sequence": "data:1,tp:2",
    "batch -> data, mem -> tp": "data:2,tp:2",
    "batch -> data, layers -> pipe": "data:2,pipe:2",
}


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    oracle = Oracle()
    found = [oracle.likeliest(prompt, 5) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) > 5
    return found


@covered(positions=("one", "of each row"), prefill=(None, NO_PREFILL), layout=LAYOUTS)
def test_each_prompt_as_alone(
    tmp_path: Path,
    expected: list[tuple[int, ...]],
    positions: str,
    prefill: str | None,
    layout: str,
) -> None:
    text = LM if positions == "one" else ROWS
    found = programs(text, prefill, layout=layout, mesh=LAYOUTS[layout])
    assert (found.prefill is None) == (prefill is not None)
    results, _ = texts(found, tmp_path, PROMPTS, steps=5)
    assert [t.tokens for t in results.texts] == expected
