"""Train `resnet.mdsl` on scikit-learn's handwritten digits, then classify digits held out.

`python examples/resnet.py [LAYOUT]` takes 60 steps and prints the part of 360 images that is then
classified rightly, by the averages that training kept. Needs the `dev` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import meshdsl as md

PROGRAM = Path(__file__).with_name("resnet.mdsl")
HELD_OUT, STEPS = 360, 60

Array = np.ndarray[Any, Any]


def images_and_digits() -> tuple[Array, Array, Array, Array]:
    """Images to learn from, those held out, and the digits on them: values from 0 to 1."""
    found = load_digits()
    images, digits = (found.images / 16).astype(np.float32), found.target.astype(np.int32)
    parts: tuple[Array, Array, Array, Array] = train_test_split(
        images, digits, test_size=HELD_OUT, random_state=0, stratify=digits
    )
    return parts


def learned(layout: str, steps: int = STEPS) -> float:
    """Train under one layout; the part of the held-out images that is then classified rightly."""
    known, held_out, answers, truth = images_and_digits()
    plan = md.load(PROGRAM).compile(layout=layout)
    plan.train({"images": known, "labels": answers}, steps)
    program = md.load(PROGRAM, program="classify", dims={"batch": HELD_OUT})
    classifier = program.compile(layout=layout)
    classifier.params = plan.params
    return float((classifier(images=held_out).digit == truth).mean())


def main() -> int:
    """Print the result of one layout, the first by default."""
    layout = sys.argv[1] if len(sys.argv) > 1 else "data_parallel"
    right = learned(layout)
    print(f"{layout}: {right:.1%} of the images are classified rightly")
    return int(right < 0.97)


if __name__ == "__main__":
    sys.exit(main())
