"""`meshdsl generate`: the texts that a trained language model continues prompts with."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.cli import common
from meshdsl.cli.options import (
    AsData,
    File,
    PlacingOptions,
    opt,
    option,
    pipeline_options,
    refuse_unknown,
    weights,
    which_program,
)
from meshdsl.diagnostics import Diagnostics, counted, fail
from meshdsl.pipeline import Compilation

if TYPE_CHECKING:
    from meshdsl.backends.generate.generated import Results
    from meshdsl.backends.generate.generation_request import GenerationRequest
    from meshdsl.backends.generate.task import TextPiece
    from meshdsl.backends.generate.text_codec import TextCodec

TOKENS = ("bytes", "chars", "numbers")


@option
class Generate(PlacingOptions, AsData):
    """Options of `generate`."""

    params: str = opt(
        "--params", "F", "Parameters: a file, or the folder of a checkpoint or model.", ...
    )
    weights: str | None = weights("The `weights` block to load a model with.")
    prompt: list[str] = opt("--prompt", "TEXT", "A prompt; repeat the option for more.")
    prompts: Path | None = opt("--prompts", "F", "A file with a prompt per line.")
    steps: int | None = opt(
        "--steps", "N", "The number of tokens. [default: as many as fit]", min=1
    )
    temperature: float = opt(
        "--temperature", "T", "Sampling temperature; 0 takes the likeliest token.", 0.0, min=0.0
    )
    top_k: int | None = opt("--top-k", "K", "Sample from the K likeliest tokens.", min=1)
    top_p: float = opt(
        "--top-p", "P", "Sample from the fewest tokens with total probability P.", 1.0
    )
    seed: int = opt("--seed", "S", "The seed of sampling.", 0)
    beams: int = opt("--beams", "N", "Beam search with N beams, each a row of the batch.", 1, min=1)
    length_penalty: float = opt(
        "--length-penalty", "A", "Beam search: above 1 favours longer texts.", 1.0
    )
    end_token: str | None = opt(
        "--end-token", "T", "The token that ends a text, by number or text, or none."
    )
    stop: list[str] = opt(
        "--stop", "TEXT", "End a text before this string; repeat the option for more."
    )
    tokens: str | None = opt("--tokens", "T", "bytes, chars or numbers. [default: as in training]")
    tokenizer: str | None = opt(
        "--tokenizer", "F", "A tokenizer.json. [default: the model folder's]"
    )
    prefill: str | None = which_program(
        "The program that processes a whole prompt at once, or none.", "--prefill"
    )
    engine: str = opt("--engine", "E", "The engine: local or torchrun.", "local")


def command(file: File, given: Generate) -> None:
    """Continue prompts with a trained language model."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.backends.generate.generation import ENGINES

        refuse_unknown("engine", given.engine, ENGINES, "not one of those there are")
        if given.tokens is not None:
            refuse_unknown("tokens", given.tokens, TOKENS, "not one of those there are")
        compilation = common.compiled(file, pipeline_options(given), diagnostics, "declarations")
        _generate(compilation, given, diagnostics)


def _generate(made: Compilation, given: Generate, diagnostics: Diagnostics) -> None:
    from meshdsl.backends.generate.contract import chosen
    from meshdsl.backends.generate.generated import Results
    from meshdsl.backends.generate.generation import checked_params, generate
    from meshdsl.backends.weights.params import params_file

    codec = _codec(given)
    programs = chosen(made, given.prefill)
    task = _request(given).task(programs.contract, codec)
    step, states = programs.step, programs.contract.states
    names = [str(p.value.name) for p in step.named.params]
    stored = [n for n in names if n not in states]
    with params_file(given.params, step, stored, given.weights, diagnostics) as params:
        assert params is not None
        diagnostics.add(*checked_params(step, params, states))
        task = replace(task, params=params)
        results = Results(task)
        shown = None if given.json else _Stream([codec.text(p) for p in task.prompts])

        def hear(piece: TextPiece) -> None:
            results.hear(piece)
            if shown is not None:
                shown.hear(piece)

        generate(programs, given.engine, task, hear)
        for each in (step, programs.prefill):
            diagnostics.add(*(each.diagnostics if each is not None else ()))
    if given.json:
        common.print_json(_facts(results))
    else:
        common.say(_summary(results), to_errors=True)


def _request(given: Generate) -> GenerationRequest:
    from meshdsl.backends.generate.generation_request import GenerationRequest

    prompts = [*(given.prompt or ()), *(_lines(given.prompts) if given.prompts else ())]
    sampling = (given.temperature, given.top_k, given.top_p, given.seed)
    ends = (given.end_token, tuple(given.stop or ()))
    beams = (given.beams, given.length_penalty)
    return GenerationRequest(tuple(prompts), given.steps, *sampling, *ends, *beams)


def _lines(path: Path) -> list[str]:
    """The prompts of a file, of which only a line feed ends a line. Raises MD0626."""
    from meshdsl.backends.runtime.user_files import read_regular

    try:
        lines = read_regular(path).decode("utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        help = "name a text file that has a prompt on each line"
        fail("MD0626", f"cannot read {path}: {reason}", help=help)
    ended = lines if lines[-1] else lines[:-1]
    return [line.removesuffix("\r") for line in ended]


class _Stream:
    """Writes texts as they grow, one after the other: those that follow wait for their turn."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._waiting = defaultdict[int, list[str]](list)
        self._ended = set[int]()
        self._current = 0
        common.say_text(prompts[0])

    def hear(self, piece: TextPiece) -> None:
        """Write a piece, or keep it for later."""
        if piece.end is not None:
            self._ended.add(piece.text)
        self._waiting[piece.text].append(piece.shown)
        while self._current < len(self._prompts):
            common.say_text("".join(self._waiting.pop(self._current, ())))
            if self._current not in self._ended:
                break
            self._current += 1
            common.say_text("\n")
            if self._current < len(self._prompts):
                common.say_text("\n" + self._prompts[self._current])


def _summary(results: Results) -> str:
    """One line: how much was generated, how fast."""
    texts = results.texts
    many = f" of {counted(len(texts), 'text')}" if len(texts) > 1 else ""
    first = f", the first after {results.first:.2g} s" if results.first is not None else ""
    return (
        f"{counted(results.count, 'token')}{many} in {results.seconds:.3g} s: "
        f"{results.rate:,.0f} tokens/s{first}"
    )


def _facts(results: Results) -> dict[str, object]:
    texts = [
        {"prompt": t.prompt, "text": t.prompt + t.text, "tokens": t.tokens, "end": t.end}
        for t in results.texts
    ]
    speed = {"seconds": results.seconds, "first_token_seconds": results.first}
    return {"version": 2, "texts": texts, **speed, "tokens_per_second": results.rate}


def _codec(given: Generate) -> TextCodec:
    """How text is read: as asked, or as the checkpoint was trained. Raises MD0601 and MD0626."""
    from meshdsl.backends.data.tokenizer import FILE as TOKENIZER
    from meshdsl.backends.generate.text_codec import TextCodec
    from meshdsl.backends.train.described import description
    from meshdsl.backends.train.exported_params import checkpoint_at
    from meshdsl.backends.weights.model_files import is_model

    if given.tokenizer is not None:
        if given.tokens is not None:
            help = "choose one of both"
            fail("MD0601", "`--tokenizer` and `--tokens` are both given", help=help)
        return TextCodec("tokenizer", given.tokenizer)
    meta: Mapping[str, Any] = {}
    if os.path.isdir(given.params) and not is_model(given.params):
        meta = checkpoint_at(given.params).meta
    characters, folder = meta.get("vocabulary"), description(given.params)
    kind = given.tokens or ("chars" if characters is not None else meta.get("tokens"))
    if kind not in TOKENS and os.path.isfile(os.path.join(folder, TOKENIZER)):
        return TextCodec("tokenizer", folder)
    if kind is None and os.path.exists(given.params):  # else it is told that nothing is there
        help = (
            "state it: `--tokenizer F`, `--tokens bytes`, or `--tokens numbers` for prompts '5 6 7'"
        )
        fail("MD0626", f"nothing in {given.params} says which tokens a text has", help=help)
    if kind == "chars":
        if characters is None:
            message = f"{given.params} does not say which characters it was trained on"
            fail("MD0626", message, help="name a checkpoint of a training with `--tokens chars`")
        return TextCodec("chars", characters)
    return TextCodec("bytes" if kind in ("bytes", None) else "numbers")
