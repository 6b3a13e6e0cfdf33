"""Classify scikit-learn's handwritten digits with the compiled program, under four layouts.

`python examples/digits.py [FOLDER]` fits an `MLPClassifier`, saves its weights as `params.npz` and
the held-out images as `inputs.npz` in FOLDER (default: `digits`), then runs `digits.mdsl` on eight
devices under every layout it declares and compares the predictions with scikit-learn's. Needs the
`dev` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from meshdsl.backends.engines import Given, run
from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Options, compile_source
from meshdsl.syntax.parse import read_source

LAYOUTS = ("data_parallel", "megatron", "contraction", "two_d")
HELD_OUT = 360


def fit(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Fit the classifier and save weights and held-out images; its predictions and the truth."""
    images, digits = load_digits(return_X_y=True)
    scaled = (images / 16).astype(np.float32)
    known, held_out, answers, truth = train_test_split(
        scaled, digits, test_size=HELD_OUT, random_state=0, stratify=digits
    )
    model = MLPClassifier(hidden_layer_sizes=(64,), max_iter=400, random_state=0)
    model.fit(known, answers)
    (w1, w2), (b1, b2) = model.coefs_, model.intercepts_
    np.savez(folder / "params.npz", w1=w1, b1=b1, w2=w2, b2=b2)
    np.savez(folder / "inputs.npz", images=held_out)
    return model.predict(held_out), truth


def classify(folder: Path, layout: str) -> np.ndarray:
    """What the compiled program says of the held-out images under one layout."""
    source = read_source(Path(__file__).with_name("digits.mdsl"))
    made = compile_source(source, Options(layout=layout), Diagnostics())
    given = Given(str(folder / "inputs.npz"), str(folder / "params.npz"))
    return run(made, "local", given).outputs["digit"]


def main() -> int:
    """Print one line per layout; 0 if every prediction is scikit-learn's."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "digits")
    folder.mkdir(parents=True, exist_ok=True)
    expected, truth = fit(folder)
    differ = 0
    for layout in LAYOUTS:
        found = classify(folder, layout)
        differ += int((found != expected).sum())
        accuracy = float((found == truth).mean())
        same = int((found == expected).sum())
        print(f"{layout:14} accuracy {accuracy:.4f}, {same} of {len(expected)} as scikit-learn")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
