"""Completion of keys of a published model, in blocks of weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from lsprotocol import types as lsp

from meshdsl.backends.runtime.user_files import Refused
from meshdsl.backends.weights.draft import offered
from meshdsl.backends.weights.model_files import is_of_torch, tensors_of
from meshdsl.backends.weights.patterns import KeyPattern, patterns_of
from meshdsl.diagnostics import Span
from meshdsl.editor.completion import Cursor, place_at
from meshdsl.editor.facts import DocumentFacts
from meshdsl.editor.text import Text


def complete(
    known: DocumentFacts, text: Text, offset: int, path: str
) -> Iterator[lsp.CompletionItem]:
    """The keys of the model at `path`, where one may stand at an offset of a text.

    First are those of tensors that have the sizes of the parameter, with its dims.
    """
    place = place_at(text.source.text, offset)
    if place is None or place.head != "weights" or place.last not in ("COLON", "OR"):
        return
    words = [str(word) for word in place.inside.words]
    param = "".join(words[: words.index(":")]) if ":" in words else ""
    types = {
        str(p.value.name): p.value.type
        for program in known.analysis.written.values()
        for p in (program.params if program else ())
    }
    begin = offset - len(place.begun)
    closes = place.begun[:1] == text.source.text[offset : offset + 1] == '"'
    where = text.range(Span(text.source, begin, offset + closes))
    prefixes = _prefixes(place)
    for pattern, key, dims in offered(param, types, _keys(path)):
        prefix = next((p for p in prefixes if key.startswith(p)), None)
        if prefix is not None:
            label = f'"{key.removeprefix(prefix)}"'
            yield lsp.CompletionItem(
                label,
                kind=lsp.CompletionItemKind.Value,
                detail=f"{pattern.dtype}[{', '.join(map(str, pattern.shape))}]",
                sort_text=f"{'0' if dims else '1'}{label}",
                filter_text=label,
                text_edit=lsp.TextEdit(where, f"{label}[{dims}]"),
            )


def _prefixes(place: Cursor) -> list[str]:
    """What the keys in the groups around the cursor may begin with, the longest first."""
    prefixes = [""]
    for bracket in place.brackets[:-1]:
        texts = [str(word)[1:-1] for word in bracket.words if word.type == "STRING"]
        prefixes = [before + text for before in prefixes for text in texts or [""]]
    return sorted(prefixes, key=len, reverse=True)


def beside(uri: str, model: str) -> str:
    """The path of a model that is named in the settings: a relative one is beside the document."""
    folder = os.path.dirname(unquote(urlsplit(uri).path))
    return os.path.join(folder, os.path.expanduser(model))


def _keys(path: str) -> tuple[KeyPattern, ...]:
    """The keys of a model; none of one that cannot be read, or that only torch reads."""
    try:
        return _keys_at(path, os.stat(path).st_mtime_ns)
    except (OSError, Refused):
        return ()


@functools.lru_cache(maxsize=4)
def _keys_at(path: str, changed: int) -> tuple[KeyPattern, ...]:
    del changed
    return () if is_of_torch(path) else tuple(patterns_of(tensors_of(path)))
