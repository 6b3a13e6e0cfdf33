"""Several prompts in one call: each continued as it is alone, under every layout."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.generate.contract import NO_PREFILL, chosen
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.covering import covered

from .models import LM, ROWS, Oracle, programs, texts

RECURRENT = """
dim batch = 3, seq = 4, h = 5, g = h, vocab = 6
program step(t[batch]: i32, pos[]: i32) {
  param e[vocab, h]
  param w[h, g]
  param o[h, vocab]
  param s[batch, h] = zeros()
  n = tanh(2.0 * einsum(s, w -> [batch, g])[g -> h] + e[vocab = t])
  s := n
  y = einsum(n, o -> [vocab, batch])
  return y
}
program read(t[seq, batch]: i32, count[batch]: i32) {
  param e[vocab, h]
  param w[h, g]
  param o[h, vocab]
  param s[batch, h] = zeros()
  n = zeros[batch, h]()
  x = e[vocab = t]
  k = cast(iota[seq], i32)
  repeat seq {
    n = where(k < count, tanh(2.0 * einsum(n, w -> [batch, g])[g -> h] + x), n)
  }
  s := n
  y = einsum(n, o -> [vocab, batch])
  return y
}
"""
"""No mask leaves out what follows a prompt: `count` does."""

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


@covered(
    batch=("batch", ""),
    prefill=(None, NO_PREFILL),
    layout=("h -> b, vocab -> a", "batch -> a, g -> b"),
)
def test_a_recurrent_model(tmp_path: Path, batch: str, prefill: str | None, layout: str) -> None:
    """Tokens of a batch or one at a time, dims in any order, prompts longer than one pass reads."""
    text = RECURRENT
    if not batch:
        text = re.sub(r", batch\b|\bbatch, |\bbatch\b(?! =)", "", text)
        layout = layout.replace("batch -> a, ", "")
    generator = np.random.default_rng(7)
    arrays = {n: generator.normal(size=s) for n, s in (("e", (6, 5)), ("w", (5, 5)), ("o", (5, 6)))}
    write_npz(str(tmp_path / "params.npz"), arrays)
    prompts = [(1, 2, 3), (4,), (5, 0, 1, 2, 3, 4), (3, 3)]
    expected = []
    for prompt in prompts:
        tokens, state = list(prompt), np.zeros(5)
        for at in range(len(prompt) + 5):
            state = np.tanh(2 * state @ arrays["w"] + arrays["e"][tokens[at]])
            if at + 1 >= len(prompt):
                tokens.append(int(np.argmax(state @ arrays["o"])))
        expected.append(tuple(tokens[len(prompt) :]))
    assert len(set(expected)) == len(prompts)
    given = Options(layout=layout, mesh="a:2,b:2", dtype="f64", reduce="immediate")
    found = chosen(Compilation(Source("r.mdsl", text), given), prefill)
    results, _ = texts(found, tmp_path, prompts, steps=6)
    assert [t.tokens for t in results.texts] == expected
