"""A small language model with the programs that generate, and the whole sequence as an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.backends.engines.reference import run_reference
from meshdsl.backends.generate.contract import Chosen, chosen
from meshdsl.backends.generate.generated import Results
from meshdsl.backends.generate.generation import generate
from meshdsl.backends.generate.generation_request import GenerationRequest
from meshdsl.backends.generate.task import TextPiece
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.compiling import named
from tests.project import ROOT

LM = (ROOT / "examples/lm.mdsl").read_text(encoding="utf-8")
ROWS = LM.replace(
    "program lm_step(token[batch]: i32, pos[]: i32)",
    "program lm_step(token[batch]: i32, pos[batch]: i32)",
)
SIZES = {
    **{"batch": 4, "seq": 12, "model": 8, "hidden": 8, "heads": 2, "key": 4},
    **{"layers": 2, "vocab": 11},
}
NUMBERS = TextCodec("none")


def params(**sizes: int) -> dict[str, Array]:
    """Parameters whose likeliest tokens differ from one to the next."""
    generator = np.random.default_rng(5)
    program = named(LM, set_dims={**SIZES, **sizes}, program="lm")
    types = {str(p.value.name): p.value.type for p in program.params}
    return {n: generator.normal(size=t.shape) for n, t in types.items()}


def programs(text: str = LM, prefill: str | None = None, **options: Any) -> Chosen:
    """The programs of a text that generate."""
    sizes = {**SIZES, **options.pop("sizes", {})}
    given = Options(set_dims=sizes, dtype="f64", reduce="immediate", **options)
    return chosen(Compilation(Source("lm.mdsl", text), given), prefill)


def texts(
    found: Chosen,
    folder: Path,
    prompts: Sequence[str | Sequence[int]],
    codec: TextCodec = NUMBERS,
    vocab: int = SIZES["vocab"],
    **asked: Any,
) -> tuple[Results, list[TextPiece]]:
    """The continuations of prompts on the local engine, and the pieces in order."""
    file = folder / "params.npz"
    if not file.exists():
        write_npz(str(file), params(vocab=vocab))
    task = GenerationRequest(prompts, **asked).task(found.contract, codec)
    task = replace(task, params=str(file))
    results, pieces = Results(task), list[TextPiece]()

    def hear(piece: TextPiece) -> None:
        results.hear(piece)
        pieces.append(piece)

    generate(found, "local", task, hear)
    return results, pieces


class Oracle:
    """The logits after each token of a sequence, by the program of whole sequences in float64."""

    def __init__(self, **sizes: int) -> None:
        text = LM.replace("return loss\n  minimize", "return logits\n  minimize")
        self._params = params(**sizes)
        sizes = {**SIZES, **sizes, "batch": 1}
        self._known: dict[tuple[int, ...], Array] = {}
        self._program = named(text, set_dims=sizes, program="lm", evaluate=True)

    def logits(self, tokens: Sequence[int]) -> Array:
        """Those after the last one of some tokens."""
        if tuple(tokens) in self._known:
            return self._known[tuple(tokens)]
        padded = np.zeros((1, SIZES["seq"]), np.int32)
        padded[0, : len(tokens)] = tokens
        given = {"tokens": padded, "targets": np.zeros_like(padded)}
        found = run_reference(self._program, given, self._params)["logits"]
        return self._known.setdefault(tuple(tokens), np.asarray(found[0, len(tokens) - 1]))

    def likelihoods(self, tokens: Sequence[int]) -> Array:
        """The log-probability of each next token."""
        logits = self.logits(tokens)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    def likeliest(self, prompt: Sequence[int], steps: int) -> tuple[int, ...]:
        """The likeliest tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(steps):
            tokens.append(int(np.argmax(self.logits(tokens))))
        return tuple(tokens[len(prompt) :])
