"""The text of tokens that come one by one, and where it stops."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshdsl.backends.generate.text_codec import ShownText, TextCodec
from meshdsl.diagnostics import DiagnosticError
from tests.data.tokenizer_files import END, save_tokenizer

from .models import programs, texts


def test_tokens_of_characters() -> None:
    words = TextCodec("chars", "abc ")
    assert words.tokens("cab") == (2, 0, 1)
    assert (words.known(9), words.known(3)) == (4, 3)
    assert words.text([3, 0]) == " a"
    with pytest.raises(DiagnosticError, match="'d', character 1 of prompt 2"):
        words.tokens("ad", "prompt 2")


def test_tokens_of_bytes_wait_for_the_whole_character() -> None:
    decode = TextCodec("bytes").decoder()
    assert [decode(b) for b in "aü".encode()] == ["a", "", "ü"]
    assert decode(0xC3) + decode(None) == "�"


def test_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    """Its special tokens end texts, and a word that begins none has its space."""
    words = TextCodec("tokenizer", str(save_tokenizer(tmp_path / "bytes")))
    assert words.text(words.tokens("the ünïcödé cat")) == "the ünïcödé cat"
    assert (words.end, words.number(END)) == (0, 0)
    assert words.text(words.tokens("a ü")[:-1]) == "a �"
    size = len({*words.tokens("the cat")})
    assert words.known(10**6) > size > 1
    inner = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    spaced = TextCodec("tokenizer", str(tmp_path))
    assert (spaced.tokens("a b"), spaced.text((0, 1)), spaced.end) == ((0, 1), "a b", None)
    shown = ShownText(spaced, (), (0,))
    assert [shown.add(1), shown.add(0), shown.add(None)] == [" b", " a", ""]


def test_a_text_ends_before_the_first_stop_string() -> None:
    """Whatever is shown never has to be taken back, and all is shown that is no part of one."""
    words = TextCodec("chars", "ab")
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        for stop in (["aab"], ["aba", "bb"], ["ababab"], []):
            shown, pieces = ShownText(words, stop), list[str]()
            for token in words.tokens(text):
                pieces.append(shown.add(token))
                if shown.is_stopped:
                    break
            else:
                pieces.append(shown.add(None))
            ends = [at for s in stop if (at := text.find(s)) >= 0]
            first = min((text.find(s) + len(s) for s in stop if s in text), default=None)
            cut = min(text[:first].find(s) for s in stop if s in text[:first]) if ends else None
            assert "".join(pieces) == text[:cut]


def test_pieces_are_the_text_as_it_grows(tmp_path: Path) -> None:
    """To a stop string of several tokens, and to an end token that is not shown."""
    words = TextCodec("chars", "abcdefghijk")
    found = programs(layout="batch -> data", mesh="data:2")
    plain, pieces = texts(found, tmp_path, ["bcd", "e"], words, steps=6)
    first, second = (t.text for t in plain.texts)
    assert [p.seconds for p in pieces] == sorted(p.seconds for p in pieces)
    assert (plain.count, len(first), len(second)) == (12, 6, 6)
    assert 0 < plain.rate == plain.count / plain.seconds
    assert "".join(p.shown for p in pieces if p.text == 0) == first
    stop = first[2:4]
    ends: dict[str, Any] = {"stop": (stop,), "end_token": words.tokens(second)[3]}
    ended, _ = texts(found, tmp_path, ["bcd", "e"], words, steps=6, **ends)
    for one, text in zip(ended.texts, (first, second), strict=True):
        end = min(at for s in (stop, second[3]) if (at := text.find(s)) >= 0)
        assert one.text == text[:end]
        assert one.end == ("stop string" if text[end:].startswith(stop) else "end token")
        assert one.tokens == words.tokens(text[: len(one.tokens)])
