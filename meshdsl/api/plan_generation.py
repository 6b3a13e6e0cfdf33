"""`plan.generate`: the texts that a plan's program of one token continues prompts with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import check_seed
from meshdsl.backends.generate.generated import Generated
from meshdsl.diagnostics import DiagnosticError, Span, fail
from meshdsl.pipeline import Compilation
from meshdsl.records import dataclass
from meshdsl.report.document import Document, line
from meshdsl.report.views.parts import View

if TYPE_CHECKING:
    from meshdsl.backends.generate.contract import Chosen, Contract
    from meshdsl.backends.generate.task import Task, TextPiece
    from meshdsl.backends.generate.text_codec import TextCodec

Prompt = str | Sequence[int]
"""The beginning of a text: the text, or its tokens."""

OnText = Callable[[int, str], object] | None
"""Is called with the number of a text and what was added to it, as soon as it is known."""


@dataclass(frozen=True, slots=True, repr=False)
class Generation(View):
    """The continuations of prompts, in their order: each has `prompt`, `text`, `tokens` and `end`.

    `seconds` is the time from the beginning to the last token, `first_token_seconds` that to the
    first one, and `tokens_per_second` the rate of the new tokens of all texts.
    """

    texts: tuple[Generated, ...]
    seconds: float
    first_token_seconds: float | None
    tokens_per_second: float

    @property
    def document(self) -> Document:
        """The texts, one after the other."""
        return tuple(line(t.prompt + t.text if t.prompt else str(t.tokens)) for t in self.texts)


def generate(
    programs: Chosen,
    task: Task,
    params: Mapping[str, Any],
    engine: str,
    on_text: OnText,
    span: Span,
) -> Generation:
    """Carry out a task with some parameters. Raises MD0602 for an engine that does not generate."""
    from meshdsl.backends.generate import generation
    from meshdsl.backends.generate.generated import Results
    from meshdsl.backends.runtime.array_files import write_npz

    if engine not in generation.ENGINES:
        help = f"choose one of {', '.join(generation.ENGINES)}"
        fail("MD0602", f"{engine!r} is no engine that generates", span, help=help)
    results = Results(task)
    errors: list[BaseException] = []

    def hear(piece: TextPiece) -> None:
        results.hear(piece)
        if on_text is not None and piece.shown:
            try:
                on_text(piece.text, piece.shown)
            except BaseException as error:
                errors.append(error)
                raise

    with tempfile.TemporaryDirectory(prefix="meshdsl-") as folder:
        file = os.path.join(folder, "params.npz")
        states = programs.contract.states
        write_npz(file, {n: a for n, a in params.items() if n not in states}, durable=False)
        try:
            generation.generate(programs, engine, replace(task, params=file), hear)
        except DiagnosticError:
            if errors:  # the caller's own, which ended the run
                raise errors[0] from None
            raise
    return Generation(results.texts, results.seconds, results.first, results.rate)


def programs_of(step: Compilation, prefill: str | Compilation | None) -> Chosen:
    """The program of one token with the one that reads prompts, or its name. Raises MD0624."""
    from meshdsl.backends.generate.contract import of_one_token, with_prefill

    chosen = of_one_token(step)
    if prefill is None or isinstance(prefill, str):
        return with_prefill(chosen, prefill)
    if not isinstance(prefill, Compilation):
        help = "give its name, a plan of it, or 'none'"
        fail("MD0624", f"{kind_of(prefill)} is no program that reads prompts", help=help)
    return with_prefill(chosen, prefill.named.name, {prefill.named.name: prefill})


def task_of(
    contract: Contract, prompts: Any, codec: TextCodec, asked: Mapping[str, Any], span: Span
) -> Task:
    """The task, without a file of parameters. Raises MD0604 and MD0625 to MD0627."""
    from meshdsl.backends.generate.generation_request import GenerationRequest

    stop = asked["stop"]
    if not isinstance(stop, Sequence):
        help = "give a text, or a list of texts"
        fail("MD0627", f"{kind_of(stop)} is no stop string", span, help=help)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    asked = {**asked, "stop": stop, "seed": check_seed(asked["seed"])}
    return GenerationRequest(_as_prompts(prompts, span), **asked).task(contract, codec)


def codec_of(tokens: str | None, tokenizer: Any) -> TextCodec:
    """How text is read. Raises MD0601."""
    from meshdsl.backends.generate.text_codec import TextCodec

    if tokenizer is not None:
        if tokens is not None:
            fail("MD0601", "`tokenizer` and `tokens` are both given", help="choose one of both")
        if not isinstance(tokenizer, str | os.PathLike):
            help = "name the file `tokenizer.json`, or the folder it lies in"
            fail("MD0583", f"{kind_of(tokenizer)} is no path of a tokenizer", help=help)
        return TextCodec("tokenizer", os.fspath(tokenizer))
    if tokens in (None, "bytes", "numbers"):
        return TextCodec(tokens or "none")
    if not isinstance(tokens, str) or not tokens or len({*tokens}) < len(tokens):
        help = "give 'bytes', 'numbers', or each character once, in the order of their tokens"
        fail("MD0627", f"{tokens!r} says of no text which tokens it has", help=help)
    return TextCodec("chars", tokens)


def _as_prompts(prompts: Any, span: Span) -> tuple[Prompt, ...]:
    """One prompt or several, those of tokens as tuples of whole numbers. Raises MD0626."""
    if isinstance(prompts, str):
        return (prompts,)
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(plain, Sequence):
        help = "give a text, the numbers of its tokens, or a list of these"
        fail("MD0626", f"{kind_of(prompts)} is no prompt", span, help=help)
    if not any(isinstance(item, Sequence) or hasattr(item, "tolist") for item in plain):
        return (tuple(plain),)
    return tuple(item if isinstance(item, str) else _as_tokens(item, span) for item in plain)


def _as_tokens(tokens: Any, span: Span) -> tuple[int, ...]:
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(plain, Sequence):
        help = "give all prompts as text or as lists of tokens"
        fail("MD0626", f"{kind_of(tokens)} is no prompt", span, help=help)
    return tuple(plain)
