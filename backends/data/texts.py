"""Texts as flat files of tokens: `.txt` and `.jsonl` files, by a tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any

from meshdsl.backends.data.token_files import shards
from meshdsl.backends.data.tokenizer import Tokenizer, batched
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.user_files import Refused, read_regular, regular
from meshdsl.diagnostics import fail
from meshdsl.option_edits import FEW, one_of, refuse

SUFFIXES = (".jsonl", ".txt")
"""Files of texts in a folder, by their names."""

AT_ONCE = 1 << 22
"""The characters that are made tokens of at once."""

UTF8 = "write it as UTF-8: `iconv -f ENCODING -t utf-8 OLD > NEW`, from the encoding that it has"


def text_files(path: str, held_out: bool = False) -> list[str]:
    """The files of texts that a file or a folder stands for: see `shards`. Raises MD0580."""
    return shards(path, SUFFIXES, held_out) if os.path.isdir(path) else [path]


def documents(path: str, field: str) -> Iterator[str]:
    """The documents of a file: all of a text, the `field` of each line of a `.jsonl`.

    Raises MD0582, and Refused where the file cannot be read.
    """
    if not path.endswith(".jsonl"):
        yield _text(path)
        return
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _document(line, field, f"{path}, line {number}")
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None


def _text(path: str) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        fail("MD0582", f"{path} is not UTF-8: byte {error.start}", help=UTF8)


def _document(line: bytes, field: str, place: str) -> str:
    try:
        parsed = json.loads(line)
    except UnicodeDecodeError:
        fail("MD0582", f"{place} is not UTF-8", help=UTF8)
    except (ValueError, RecursionError):
        help = 'each line is a document: `{"text": "…"}`'
        fail("MD0582", f"{place} is no JSON", help=help)
    fields = parsed if isinstance(parsed, dict) else {}
    if isinstance(fields.get(field), str):
        return _whole(fields[field], place)
    others = [key for key, value in fields.items() if isinstance(value, str)]
    form = ['each line is: `{"text": "…"}`'] if not others else []
    refuse("MD0582", f"{place} has no text `{field}`", one_of("--text-field", others[:FEW]), *form)


def _whole(text: str, place: str) -> str:
    """The text, if it is one: JSON can write halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        help = "a pair of `\\u` escapes is one character; this one has only its half"
        fail("MD0582", f"{place} has half a character", help=help)
    return text


def write_tokens(
    paths: Sequence[str], tokenizer: Tokenizer, end: int | None, field: str, file: IO[bytes]
) -> int:
    """Write the tokens of all documents of the files as a `.npy`; returns how many there are.

    Each document ends with the token `end`, where there is one and the tokenizer has not put it
    there. About `AT_ONCE` characters are in memory, or one document.
    """
    dtype = np.dtype("uint16" if tokenizer.size <= 1 << 16 else "uint32").newbyteorder("<")
    count = 0
    _write_header(file, dtype, count)
    texts = (text for path in paths for text in documents(path, field))
    for batch in batched(texts, AT_ONCE):
        for tokens in tokenizer.encode_many(batch):
            if end is not None and tokens[-1:] != [end]:
                tokens.append(end)
            file.write(np.array(tokens, dtype).tobytes())
            count += len(tokens)
    file.seek(0)
    _write_header(file, dtype, count)  # as long as before: numpy leaves room for the count
    return count


def _write_header(file: IO[bytes], dtype: Any, count: int) -> None:
    described = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, described)


def end_of(tokenizer: Tokenizer, named: str | None, paths: Sequence[str]) -> int | None:
    """The token that ends documents: the one that is `named`, or that of the tokenizer's folder.

    `none` is no token. Raises MD0583 where several documents of a file would have no end.
    """
    if named is not None:
        return None if named == "none" else tokenizer.number(named)
    if tokenizer.end is None and any(path.endswith(".jsonl") for path in paths):
        help = "name it: `--end-token '<|endoftext|>'`, or `--end-token none`"
        fail("MD0583", f"nothing says which token of {tokenizer.path} ends a document", help=help)
    return tokenizer.end
