"""Beam search: what all texts are searched for, with enough beams, and what few beams find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.generate.text_codec import TextCodec

from .models import Oracle, programs, texts

LAYOUTS = {
    "batch -> data": "data:3",
    "megatron": "data:1,tp:2",
    "batch -> data, mem -> tp": "data:2,tp:2",
}


def exhaustive(
    oracle: Oracle, prompt: tuple[int, ...], steps: int, end: int | None, penalty: float
) -> tuple[int, ...]:
    """The best of all texts: those of `steps` tokens, and shorter ones that end."""
    open_texts: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended = list[tuple[float, tuple[int, ...]]]()
    for count in range(1, steps + 1):
        grown = [
            (likelihood + float(more), (*tokens, token))
            for likelihood, tokens in open_texts
            for token, more in enumerate(oracle.likelihoods((*prompt, *tokens)))
        ]
        is_last = count == steps
        ended += [(x / count**penalty, t) for x, t in grown if is_last or t[-1] == end]
        open_texts = [(x, t) for x, t in grown if t[-1] != end]
    return max(ended)[1]


def few(
    oracle: Oracle, prompt: tuple[int, ...], width: int, steps: int, end: int
) -> tuple[int, ...]:
    """Beam search as `transformers` does it, divided by the length."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended = list[tuple[float, tuple[int, ...]]]()
    for count in range(1, steps + 1):
        grown = [
            (likelihood + float(more), (*tokens, token))
            for likelihood, tokens in beams
            for token, more in enumerate(oracle.likelihoods((*prompt, *tokens)))
        ]
        grown = sorted(grown, reverse=True)[: 2 * width]
        is_last = count == steps
        ended += [(x / count, t) for x, t in grown[:width] if is_last or t[-1] == end]
        ended = sorted(ended, reverse=True)[:width]
        beams = [(x, t) for x, t in grown if t[-1] != end][:width]
        if len(ended) == width and ended[-1][0] >= beams[0][0] / count:
            break
    return ended[0][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_enough_beams_find_the_best_of_all_texts(tmp_path: Path, layout: str) -> None:
    """Two prompts of different length at once; rows move between the devices of a split batch."""
    oracle, prompts = Oracle(vocab=3), [(1, 2, 0), (2,)]
    sizes = {"vocab": 3, "batch": 18}
    found = programs(layout=layout, mesh=LAYOUTS[layout], sizes=sizes)
    for end, penalty in ((None, 1.0), (0, 0.0)):
        asked: dict[str, Any] = {
            "steps": 3,
            "beams": 9,
            "end_token": end,
            "length_penalty": penalty,
        }
        results, pieces = texts(found, tmp_path, prompts, vocab=3, **asked)
        best = [exhaustive(oracle, prompt, 3, end, penalty) for prompt in prompts]
        assert [t.tokens for t in results.texts] == best
        assert len(pieces) == 2


def test_few_beams(tmp_path: Path) -> None:
    """More prompts than the batch has rows for; one device has none; texts stop as others."""
    oracle, words = Oracle(), TextCodec("chars", "abcdefghijk")
    prompts = [(1, 2, 3), (4,), (5, 6, 7, 8)]
    found = programs(layout="batch -> data", mesh="data:3")
    ends = set[str]()
    for end in range(0, 11, 3):
        results, _ = texts(found, tmp_path, prompts, words, steps=6, beams=2, end_token=end)
        expected = [few(oracle, prompt, 2, 6, end) for prompt in prompts]
        assert [t.tokens for t in results.texts] == expected
        ends |= {t.end for t in results.texts}
        shown = [words.text([n for n in tokens if n != end]) for tokens in expected]
        assert [t.text for t in results.texts] == shown
    assert ends == {"end token", "length"}
    asked: dict[str, Any] = {"steps": 6, "beams": 2, "end_token": 3}
    lengths = [
        len(t.tokens)
        for penalty in (-1e5, 1e5)  # powers that no float has
        for t in texts(found, tmp_path, prompts, words, length_penalty=penalty, **asked)[0].texts
    ]
    assert lengths == [4, 1, 6, 4, 6, 6]
    plain, _ = texts(found, tmp_path, prompts[:1], words, steps=6, beams=2)
    stop = plain.texts[0].text[2:4]
    stopped, _ = texts(found, tmp_path, prompts[:1], words, steps=6, beams=2, stop=(stop,))
    assert stop not in stopped.texts[0].text
