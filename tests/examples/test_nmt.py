"""A recurrent network learns: an LSTM that writes short sentences backwards."""

from __future__ import annotations

from tests.examples.scripts import script

SMALL = {"batch": 32, "source": 3, "target": 3, "vocab": 6, "hidden": 32}


def test_sentences_are_written_backwards():
    assert script("nmt").learned("states", 60, SMALL) >= 0.95
