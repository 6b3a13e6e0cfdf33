"""Tokenizers of other programs' models: what is encoded is decoded, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from meshdsl.backends.data.texts import documents
from meshdsl.backends.data.tokenizer import batched, load_tokenizer
from meshdsl.diagnostics import DiagnosticError

from .tokenizer_files import END, TEXT, save_tokenizer

ODD = f"{TEXT}\n\n ünïcödé 💡 \t the"


def test_texts_are_the_tokens_of_the_package_and_back(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path)
    package = Tokenizer.from_file(str(path))
    package.no_truncation()
    for place in (path, tmp_path):
        tokenizer = load_tokenizer(str(place))
        tokens = tokenizer.encode(ODD)
        assert tokens == package.encode(ODD).ids
        assert len(tokens) > 5
        assert tokenizer.encode_many([ODD, TEXT]) == [tokens, tokenizer.encode(TEXT)]
        assert (tokenizer.decode(tokens), tokenizer.size) == (ODD, package.get_vocab_size())
        end = tokenizer.number(END)
        assert tokenizer.end == end == 0
        assert (tokenizer.decode([end]), tokenizer.decode([end], special=True)) == ("", END)
        stream = tokenizer.stream()
        parts = [stream.text(token) for token in tokens]
        assert "".join(parts) == ODD
        assert "" in parts  # the first byte of a character
        assert not any("�" in part for part in parts)


def test_without_a_file_that_says_so_no_token_ends_a_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path, end=False)))
    assert tokenizer.end is None
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert load_tokenizer(str(tmp_path)).end is None


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(DiagnosticError) as error:
            load_tokenizer(str(path)).number("<end>")
        (diagnostic,) = error.value.diagnostics
        assert diagnostic.code == "MD0583"
        return f"{diagnostic.message}; {diagnostic.help}"

    assert "No such file" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    assert "is no tokenizer" in refused(tmp_path)
    save_tokenizer(tmp_path)
    assert f"has no token '<end>'; its special tokens are {END}" in refused(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'meshdsl[text]'" in refused(tmp_path)


def test_texts_come_in_batches() -> None:
    assert list(batched(iter(["ab", "c", "defg", "", "h"]), 3)) == [
        ["ab", "c"],
        ["defg"],
        ["", "h"],
    ]


LINES = {
    b'{"text": "caf\xe9"}': ("line 1 is not UTF-8", "iconv -f ENCODING"),
    b'{"text": "a"}\n{"text"': ("line 2 is no JSON", "each line is a document"),
    b'{"text": "\\ud83d"}': ("line 1 has half a character", "a pair of `\\u` escapes"),
    b'{"the body": "a"}': ("line 1 has no text `text`", "`--text-field 'the body'`"),
    b"[]": ("line 1 has no text `text`", 'each line is: `{"text"'),
}


@pytest.mark.parametrize("content", LINES)
def test_a_line_that_is_no_document_is_told_with_a_way_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(DiagnosticError) as caught:
        list(documents(str(tmp_path / "d.jsonl"), "text"))
    (found,) = caught.value.diagnostics
    message, help = LINES[content]
    assert message in found.message
    assert help in str(found.help)
