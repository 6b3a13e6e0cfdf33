"""`plan.generate`: the same texts as on the command line, from tokens, text and arrays."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.plan_generation import programs_of
from tests.project import ROOT

from .models import SIZES, Oracle, params

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8)]
LETTERS = "abcdefghijk"


@pytest.fixture(scope="module")
def step() -> md.Plan:
    return plan("lm_step", "megatron")


def plan(program: str, layout: Any) -> md.Plan:
    loaded = md.load(ROOT / "examples/lm.mdsl", program=program, dims=SIZES)
    made = loaded.compile("data:2,tp:2", layout, dtype="f64", reduce="immediate")
    made.params = {n: a for n, a in params().items() if n in made.params}
    return made


def test_texts_of_a_plan(step: md.Plan) -> None:
    """Tokens, text and arrays; a program of prompts with other blocks of the states."""
    oracle = Oracle()
    expected = [oracle.likeliest(prompt, 4) for prompt in PROMPTS]
    grown = defaultdict[int, str](str)

    def on_text(number: int, text: str) -> None:
        grown[number] += text

    by_text = step.generate(
        ["".join(LETTERS[n] for n in prompt) for prompt in PROMPTS],
        4,
        tokens=LETTERS,
        on_text=on_text,
    )
    assert [t.tokens for t in by_text.texts] == expected
    assert [t.text for t in by_text.texts] == [grown[n] for n in range(3)]
    assert str(by_text) == "\n".join(t.prompt + t.text for t in by_text.texts)
    assert 0 < (by_text.first_token_seconds or 0) <= by_text.seconds
    assert programs_of(step._made.forward, None).contract.prefill is not None
    for prefill in ("none", plan("lm_prompt", {"batch": "data", "mem": "tp"})):
        assert [t.tokens for t in step.generate(PROMPTS, 4, prefill=prefill).texts] == expected
    (one,) = step.generate(np.array(PROMPTS[0]), 4, end_token=int(expected[0][1])).texts
    assert (one.tokens, one.end, one.text) == (expected[0][:2], "end token", "")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"prompts": "abc"}, "MD0626"),
        ({"prompts": 3}, "MD0626"),
        ({"prompts": [[1], "a"]}, "MD0626"),
        ({"prompts": [[1], 2]}, "MD0626"),
        ({"prompts": [[[1]]]}, "MD0626"),
        ({"prompts": [[3]], "tokens": "abc"}, "MD0626"),
        ({"prompts": "\ud800", "tokens": "bytes"}, "MD0626"),
        ({"prefill": 3}, "MD0624"),
        ({"tokenizer": 3}, "MD0583"),
        ({"tokens": 3}, "MD0627"),
        ({"tokens": "aba"}, "MD0627"),
        ({"stop": 3}, "MD0627"),
        ({"prompts": []}, "MD0626"),
        ({"prefill": "none such"}, "MD0624"),
        ({"prefill": "lm_step"}, "MD0624"),
        ({"engine": "reference"}, "MD0602"),
        ({"seed": 0.5}, "MD0604"),
        ({"tokens": "ab", "tokenizer": "t.json"}, "MD0601"),
        ({"top_p": 0.5}, "MD0627"),
    ],
    ids=str,
)
def test_what_is_refused_in_python(step: md.Plan, asked: dict[str, Any], code: str) -> None:
    with pytest.raises(md.ProgramError) as error:
        step.generate(**{"prompts": [(1,)], **asked})
    assert [d.code for d in error.value.diagnostics] == [code]


def test_an_error_of_the_caller_is_raised_as_it_is(step: md.Plan) -> None:
    def on_text(number: int, text: str) -> None:
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError):
        step.generate("ab", 2, tokens=LETTERS, on_text=on_text)


def test_a_plan_of_another_form() -> None:
    with pytest.raises(md.ProgramError, match="`lm_prompt` does not give the next token"):
        plan("lm_prompt", "megatron").generate([(1,)])
