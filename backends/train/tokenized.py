"""Texts that a run trains on, as tokens: made once, before the engines read any of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from meshdsl.backends.data.texts import SUFFIXES, end_of, text_files, write_tokens
from meshdsl.backends.data.token_files import TokenFile, has_validation, token_file
from meshdsl.backends.data.tokenizer import load_tokenizer
from meshdsl.backends.runtime.user_files import Refused, replacing_for_good
from meshdsl.backends.train.job import ORDERS, DataFiles
from meshdsl.backends.train.token_data import TOKENS
from meshdsl.diagnostics import did_you_mean, fail
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Texts:
    """How texts become tokens: a `tokenizer.json`, the token that ends a document, the JSON field.

    Without `end` the folder of the tokenizer says which it is; `none`: documents have no end.
    """

    tokenizer: str | None = None
    end: str | None = None
    field: str = "text"


def check_options(files: DataFiles, texts: Texts) -> None:
    """Refuse options that mean nothing, or contradict each other. Raises MD0601 and MD0602."""
    for option, value, choices in (
        ("tokens", files.tokens, TOKENS),
        ("order", files.order, ORDERS),
    ):
        if value is not None and value not in choices:
            help = did_you_mean(value, list(choices)) or f"there are {', '.join(choices)}"
            fail("MD0602", f"`--{option} {value}`: not one of those there are", help=help)
    if texts.tokenizer is not None and files.tokens is not None:
        help = "choose one: a tokenizer is for texts, a dtype for files of tokens"
        fail("MD0601", "`--tokenizer` and `--tokens` are both given", help=help)


@contextmanager
def tokenized(files: DataFiles, texts: Texts, all_of_it: bool = False) -> Iterator[DataFiles]:
    """The files with the tokens of their texts, where a tokenizer is named; else as they are.

    The tokens lie in a folder for temporary files until the block ends. Of a folder with files for
    validation, these are held out if samples are wanted for that, and alone read by an evaluation:
    `all_of_it`. Raises MD0580, MD0582 and MD0583, and as `check_options`.
    """
    check_options(files, texts)
    if texts.tokenizer is None:
        yield replace(files, end=_number(texts.end))
        return
    tokenizer = load_tokenizer(texts.tokenizer)
    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as folder:

        def stored(paths: Sequence[str], path: str, name: str) -> TokenFile:
            out = os.path.join(folder, name)
            with open(out, "wb") as file:
                write_tokens(paths, tokenizer, end, texts.field, file)
            return replace(token_file(out, None), name=path)

        with unreadable("name a text, a .jsonl file or a folder of them"):
            paths = text_files(files.path, all_of_it)
            end = end_of(tokenizer, texts.end, paths)
            training, held_out = stored(paths, files.path, "train.npy"), tuple[TokenFile, ...]()
            of_folder = files.fraction > 0 and has_validation(files.path, SUFFIXES)
            if files.held_out is not None or of_folder:
                held = files.held_out or files.path
                held_out = (stored(text_files(held, held_out=True), held, "val.npy"),)
        files = replace(files, stored=(training,), stored_held_out=held_out, end=end)
        yield replace(files, sources=(*paths, tokenizer.path))


def _number(end: str | None) -> int | None:
    """The token that ends documents in files of tokens, by its number. Raises MD0601."""
    if end is None or (end.isascii() and end.isdecimal() and len(end) < 10):
        return None if end is None else int(end)
    help = "name its number, `--end-token 50256`, or the tokenizer: `--tokenizer F`"
    fail("MD0601", f"`--end-token {end}`: nothing says which token this is", help=help)


def write_texts(paths: Sequence[str], texts: Texts, out: str) -> int:
    """Write the tokens of texts into the file `out`; returns how many there are.

    Raises MD0501, MD0505 and MD0580 to MD0583.
    """
    assert texts.tokenizer is not None
    tokenizer = load_tokenizer(texts.tokenizer)
    with unreadable("name texts, .jsonl files or folders of them"):
        for path in paths:
            if has_validation(path, SUFFIXES):
                help = "name the files of each, and write them into files of their own"
                fail("MD0580", f"{path} has texts for training and for validation", help=help)
        # Files for validation alone are texts as well as any.
        every = [file for path in paths for file in text_files(path, held_out=True)]
        end = end_of(tokenizer, texts.end, every)
        try:
            with replacing_for_good(out) as file:
                return write_tokens(every, tokenizer, end, texts.field, file)
        except OSError as error:
            help = "choose another name or free some space"
            fail("MD0501", f"cannot write {out}: {error.strerror}", help=help)


@contextmanager
def unreadable(help: str) -> Iterator[None]:
    """Raise MD0505 for a file that cannot be read."""
    try:
        yield
    except Refused as refused:
        fail("MD0505", str(refused), help=help)
