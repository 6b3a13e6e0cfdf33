"""A recurrent network learns: an LSTM that writes short sentences backwards."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "nmt.py"
SMALL = {"batch": 32, "source": 3, "target": 3, "vocab": 6, "hidden": 32}


def test_sentences_are_written_backwards():
    spec = importlib.util.spec_from_file_location("nmt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    nmt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nmt)
    assert nmt.learned("states", 60, SMALL) >= 0.95
