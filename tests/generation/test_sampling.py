"""Tokens that are drawn: which ones may be, how often, and the same ones everywhere."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.generate.generation_request import GenerationRequest
from meshdsl.backends.generate.sampling import Sampling
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.backends.runtime.values import Array, Spec, drawn_part
from meshdsl.diagnostics import DiagnosticError

from .models import NUMBERS, SIZES, Oracle, params, programs, texts

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 0.0, -3.0, 1.0])


def probabilities(temperature: float, top_k: int | None, top_p: float) -> Array:
    """Those of each token, one after the other: the likeliest first, of equals the lower one."""
    weights = [math.exp(x / temperature) for x in LOGITS]
    order = sorted(range(len(weights)), key=lambda n: (-weights[n], n))[:top_k]
    total, chosen = sum(weights[n] for n in order), list[int]()
    for token in order:
        if sum(weights[n] for n in chosen) / total >= top_p:
            break
        chosen.append(token)
    kept = [w if n in chosen else 0.0 for n, w in enumerate(weights)]
    return np.array(kept) / sum(kept)


def test_what_is_drawn_is_of_these_probabilities() -> None:
    for temperature, top_k, top_p in itertools.product((0.5, 1.0, 3.0), (None, 1, 2, 4), (1, 0.6)):
        expected = probabilities(temperature, top_k, top_p)
        sampling = Sampling(temperature, top_k, top_p, seed=3)
        kept = sampling.kept(LOGITS / temperature)
        assert np.array_equal(np.isfinite(kept), expected > 0)
        drawn = [sampling.next(LOGITS, position) for position in range(400)]
        counts = np.bincount(drawn, minlength=len(LOGITS))
        assert not counts[expected == 0].any()
        spread = np.sqrt(400 * expected * (1 - expected))
        assert np.all(np.abs(counts - 400 * expected) <= 4 * spread + 1)


def test_a_probability_that_is_reached_exactly_leaves_out_what_follows() -> None:
    """Four tokens of a quarter each: of one half there are two, of a little more three."""
    kept = [np.isfinite(Sampling(1.0, None, p).kept(np.zeros(4))).sum() for p in (0.25, 0.5, 0.51)]
    assert kept == [1, 2, 3]


def test_draws_are_of_the_seed_the_text_and_the_position(tmp_path: Path) -> None:
    """The same under any layout, and the ones that an oracle draws of the whole sequence."""
    asked: dict[str, Any] = {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 11}
    prompts = [(1, 2, 3), (1, 2, 3), (4,)]
    oracle, sampling = Oracle(), Sampling(0.9, 6, 0.9, 11)
    expected = []
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(6):
            spec = Spec("f64", {"known": SIZES["vocab"]}, {}, ("uniform", 0.0, 1.0))
            name = f"token {len(tokens) - 1}" + (f" of text {number}" if number else "")
            chance = drawn_part(spec, name, 11, (slice(0, SIZES["vocab"]),))
            kept = sampling.kept(oracle.logits(tokens) / 0.9)
            tokens.append(int(np.argmax(kept - np.log(-np.log(chance)))))
        expected.append(tuple(tokens[len(prompt) :]))
    assert expected[0] != expected[1]
    for layout, mesh in (("megatron", "data:2,tp:2"), ("batch:device", "device:1")):
        results, _ = texts(programs(layout=layout, mesh=mesh), tmp_path, prompts, steps=6, **asked)
        assert [t.tokens for t in results.texts] == expected


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"prompts": ()}, "MD0626"),
        ({"prompts": ["a"]}, "MD0626"),
        ({"prompts": [()]}, "MD0626"),
        ({"prompts": [(1.5,)]}, "MD0626"),
        ({"prompts": [(99,)]}, "MD0626"),
        ({"prompts": [(1,), (1,) * 13]}, "MD0625"),
        ({"steps": 13}, "MD0625"),
        ({"steps": 0}, "MD0627"),
        ({"steps": True}, "MD0627"),
        ({"temperature": -1.0}, "MD0627"),
        ({"temperature": math.nan}, "MD0627"),
        ({"temperature": 10**400}, "MD0627"),
        ({"temperature": np.float32(np.inf)}, "MD0627"),
        ({"temperature": 1, "top_k": 0}, "MD0627"),
        ({"temperature": 1, "top_p": 0.0}, "MD0627"),
        ({"top_k": 3}, "MD0627"),
        ({"end_token": 11}, "MD0627"),
        ({"end_token": "9" * 30}, "MD0626"),
        ({"stop": ("",)}, "MD0627"),
        ({"beams": 0}, "MD0627"),
        ({"beams": 5}, "MD0627"),
        ({"beams": 2, "temperature": 0.5}, "MD0627"),
        ({"length_penalty": math.inf}, "MD0627"),
    ],
    ids=str,
)
def test_what_is_refused(asked: dict[str, object], code: str) -> None:
    request = GenerationRequest(**{"prompts": [(1,)], **asked})  # type: ignore[arg-type]
    with pytest.raises(DiagnosticError) as error:
        request.task(programs(layout="batch:device", mesh="device:1").contract, NUMBERS)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.help


def test_the_end_token_is_a_number_or_one_character() -> None:
    contract = programs(layout="batch:device", mesh="device:1").contract
    words = TextCodec("chars", "01ab")
    ends = [
        GenerationRequest(["a"], end_token=end).task(contract, words).end_tokens
        for end in (3, "1", "b")
    ]
    assert ends == [(3,), (1,), (3,)]
    for end in (-1, "-1"):
        with pytest.raises(DiagnosticError, match="the end token is -1, and") as error:
            GenerationRequest(["a"], end_token=end).task(contract, words)
        assert "or `none`" in str(error.value.diagnostics[0].help)


def test_numbers_of_numpy_are_numbers() -> None:
    """They become Python's, which can be sent to other processes."""
    contract = programs(layout="batch:device", mesh="device:1").contract
    names: dict[str, Any] = {"steps": 2, "top_k": 3, "beams": 1, "end_token": 4}
    floats: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "length_penalty": 2.0}
    asked: dict[str, Any] = {"prompts": [[np.int32(5)]]}
    asked |= {n: np.int64(x) for n, x in names.items()}
    asked |= {n: np.float32(x) for n, x in floats.items()}
    task = GenerationRequest(**asked).task(contract, NUMBERS)
    assert task == GenerationRequest([[5]], **names, **floats).task(contract, NUMBERS)
    of_task = (*task.steps, *task.end_tokens, task.beams, task.sampling.top_k)
    assert {type(number) for number in of_task} == {int}
    assert {type(n) for n in (task.sampling.temperature, task.length_penalty)} == {float}


def test_the_coldest_draws_are_the_likeliest_token() -> None:
    assert {Sampling(5e-324, seed=seed).next(LOGITS - 1e3, 0) for seed in range(5)} <= {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "top_p": 0.5}, {"beams": 2}], ids=str)
def test_logits_that_are_not_numbers_are_refused(
    bad: float, asked: dict[str, Any], tmp_path: Path
) -> None:
    arrays = params()
    arrays["embed"][3] = bad
    write_npz(str(tmp_path / "params.npz"), arrays)
    found = programs(layout="batch:device", mesh="device:1", prefill="none")
    with pytest.raises(DiagnosticError) as error:
        texts(found, tmp_path, [(1,)], steps=2, **asked)
    assert [d.code for d in error.value.diagnostics] == ["MD0720"]
