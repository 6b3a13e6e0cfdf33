"""`meshdsl generate`: the text that a trained language model continues a prompt with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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
)
from meshdsl.diagnostics import Diagnostics, fail
from meshdsl.pipeline import Compilation

if TYPE_CHECKING:
    from meshdsl.backends.generate.task import Tokens

TOKENS = ("bytes", "chars")


@option
class Generate(PlacingOptions, AsData):
    """Options of `generate`."""

    params: str = opt(
        "--params", "F", "Parameters: a file, or a checkpoint's or model's folder.", ...
    )
    weights: str | None = weights("The `weights` block by which a model is read.")
    prompt: str = opt("--prompt", "TEXT", "The beginning of the text.", ...)
    steps: int | None = opt("--steps", "N", "How many tokens (what there is room for).", min=1)
    temperature: float = opt("--temperature", "T", "0: the likeliest token.", 0.0, min=0.0)
    seed: int = opt("--seed", "S", "Of the choice at other temperatures.", 0)
    tokens: str | None = opt("--tokens", "T", "bytes or chars (as in training).")
    engine: str = opt("--engine", "E", "local or torchrun.", "local")


def command(file: File, given: Generate) -> None:
    """Continue a prompt with a trained language model: by its program of one step."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.backends.generate.generation import ENGINES

        refuse_unknown("engine", given.engine, ENGINES, "not one of those there are")
        if given.tokens is not None:
            refuse_unknown("tokens", given.tokens, TOKENS, "not one of those there are")
        compilation = common.compiled(file, pipeline_options(given), diagnostics, "declarations")
        _generate(compilation, given, diagnostics)


def _generate(made: Compilation, given: Generate, diagnostics: Diagnostics) -> None:
    from dataclasses import replace

    from meshdsl.backends.generate.contract import chosen
    from meshdsl.backends.generate.generation import checked_params, generate
    from meshdsl.backends.generate.task import task_of
    from meshdsl.backends.weights.params import params_file

    step, contract = chosen(made)
    tokens = _tokens(given)
    prompt = tokens.read(given.prompt, contract.counted)
    names = [str(p.value.name) for p in step.named.params]
    stored = [n for n in names if n not in contract.states]
    with params_file(given.params, step, stored, given.weights, diagnostics) as params:
        assert params is not None
        diagnostics.add(*checked_params(step, params, contract.states))
        vocabulary = tokens.known(contract.counted)
        task = task_of(contract, prompt, given.steps, vocabulary, params)
        task = replace(task, temperature=given.temperature, seed=given.seed)
        generated: list[int] = []
        texts = [given.prompt]

        def tell(token: int) -> None:
            generated.append(token)
            show(tokens.text(token))

        def show(text: str) -> None:
            texts.append(text)
            if not given.json:
                common.say_text(text)

        if not given.json:
            common.say_text(given.prompt)
        generate(step.checked(), given.engine, task, tell)
        diagnostics.add(*step.diagnostics)
        show(tokens.rest())
    if given.json:
        common.print_json({"version": 1, "text": "".join(texts), "tokens": generated})
    else:
        common.say("")


def _tokens(given: Generate) -> Tokens:
    """How text is read: as asked, or as the checkpoint was trained. Raises MD0626."""
    from meshdsl.backends.generate.task import Tokens
    from meshdsl.backends.train.export import checkpoint_at
    from meshdsl.backends.weights.model_files import is_model

    vocabulary = None
    if os.path.isdir(given.params) and not is_model(given.params):
        vocabulary = checkpoint_at(given.params).meta.get("vocabulary")
    if given.tokens == "chars" and vocabulary is None:
        message = f"{given.params} does not say which characters it was trained on"
        fail("MD0626", message, help="name a checkpoint of a training with `--tokens chars`")
    return Tokens(None if given.tokens == "bytes" else vocabulary)
