"""Have `nmt.mdsl` learn to write sentences backwards, on sentences that are drawn here.

`python examples/nmt.py [LAYOUT]` takes 400 steps on four devices, and prints the part of the words
of sentences held out that it then writes rightly.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md

PROGRAM = Path(__file__).with_name("nmt.mdsl")
STEPS, SENTENCES = 400, 4096
SIZES = {"batch": 64, "source": 10, "target": 10, "vocab": 16, "hidden": 64}
BEGIN = 0
"""What stands before the first word of an answer; no sentence holds it."""

Array = np.ndarray[Any, Any]


def drawn(count: int, words: int, vocab: int, seed: int) -> dict[str, Array]:
    """Random sentences, and what is to be written: the same backwards, given word by word."""
    read = np.random.default_rng(seed).integers(1, vocab, (count, words), dtype=np.int32)
    answer = np.ascontiguousarray(read[:, ::-1])
    begin = np.full((count, 1), BEGIN, np.int32)
    return {"read": read, "before": np.hstack([begin, answer[:, :-1]]), "answer": answer}


def learned(layout: str, steps: int = STEPS, sizes: Mapping[str, int] = SIZES) -> float:
    """Train under one layout; the part of the words written rightly, of sentences held out."""
    plan = md.load(PROGRAM, dims=sizes).compile(layout=layout)
    words, vocab = sizes["source"], sizes["vocab"]
    plan.train(drawn(SENTENCES, words, vocab, seed=0), steps)
    return float(plan(**drawn(sizes["batch"], words, vocab, seed=1)).right)


def main() -> int:
    """Print the result of one layout, the first by default."""
    layout = sys.argv[1] if len(sys.argv) > 1 else "sentences"
    right = learned(layout)
    print(f"{layout}: {right:.1%} of the words are right")
    return int(right < 0.95)


if __name__ == "__main__":
    sys.exit(main())
