"""Train on scikit-learn's handwritten digits, and classify them as scikit-learn does.

`python examples/digits.py [FOLDER]` takes 400 steps of `digits.mdsl` on eight devices and then
classifies 360 images held out. Then it fits an `MLPClassifier` to the same images, saves its
weights as `params.npz` and the held-out images as `inputs.npz` in FOLDER (default: `digits`), runs
`digits.mdsl` with them under every layout it declares, and compares the predictions with
scikit-learn's. Needs the `dev` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import meshdsl as md
from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Options, compile_source
from meshdsl.syntax.parse import read_source

LAYOUTS = ("data_parallel", "megatron", "contraction", "two_d")
HELD_OUT = 360
STEPS = 400
PROGRAM = Path(__file__).with_name("digits.mdsl")

Array = np.ndarray[Any, Any]


def images_and_digits() -> tuple[Array, Array, Array, Array]:
    """Images to learn from, those held out, and the digits on them: values from 0 to 1."""
    images, digits = load_digits(return_X_y=True)
    found: tuple[Array, Array, Array, Array] = train_test_split(
        (images / 16).astype(np.float32),
        digits.astype(np.int32),
        test_size=HELD_OUT,
        random_state=0,
        stratify=digits,
    )
    return found


def train(layout: str) -> float:
    """Train under one layout; the part of the held-out images that is then classified rightly."""
    known, held_out, answers, truth = images_and_digits()
    plan = md.load(PROGRAM).compile(layout=layout)
    plan.train({"images": known, "labels": answers}, STEPS)
    classifier = md.load(PROGRAM, dims={"batch": HELD_OUT}).compile(layout=layout)
    classifier.params = plan.params
    found = classifier(images=held_out, labels=truth).digit
    return float((found == truth).mean())


def fit(folder: Path) -> tuple[Array, Array]:
    """Fit scikit-learn's classifier and save its weights; its predictions and the truth."""
    known, held_out, answers, truth = images_and_digits()
    model = MLPClassifier(hidden_layer_sizes=(64,), max_iter=400, random_state=0)
    model.fit(known, answers)
    (w1, w2), (b1, b2) = model.coefs_, model.intercepts_
    np.savez(folder / "params.npz", w1=w1, b1=b1, w2=w2, b2=b2)
    np.savez(folder / "inputs.npz", images=held_out, labels=truth)
    return model.predict(held_out), truth


def classify(folder: Path, layout: str) -> Array:
    """What the compiled program says of the held-out images under one layout."""
    options = Options(layout=layout, set_dims={"batch": HELD_OUT}, evaluate=True)
    made = compile_source(read_source(PROGRAM), options, Diagnostics())
    given = InputSource(str(folder / "inputs.npz"), str(folder / "params.npz"))
    found: Array = run(made, "local", given).outputs["digit"]
    return found


def main() -> int:
    """Print one line per layout; 0 if every prediction is scikit-learn's."""
    print(f"trained {STEPS} steps: accuracy {train('data_parallel'):.4f}")
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
