"""The inputs of the examples in the table of foreign spellings, and what these mean in numpy."""

from __future__ import annotations

import numpy as np

from meshdsl.backends.engines.reference import run_reference
from meshdsl.backends.runtime.values import Array
from meshdsl.named.foreign import ForeignRow, rows
from meshdsl.named.ir import NamedProgram

SIZES = {"batch": 3, "io": 6, "hidden": 4, "seq": 5, "two": 2}
ROWS = [row for row in rows() if row.mdsl]


def inputs() -> dict[str, Array]:
    """Values of the inputs of every example."""
    rng = np.random.default_rng(4)
    shapes = {"x": (3, 6), "z": (3, 6), "w": (6, 4), "v": (4,), "s": (3, 5, 6)}
    found = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    return {**found, "ids": np.array([2, 0, 3], np.int32), "seed": np.array(7, np.int64)}


def check_meaning(row: ForeignRow, program: NamedProgram) -> None:
    """Compare the output of a program with the row's meaning in numpy."""
    names = [v.label for v in program.inputs]
    (found,) = run_reference(program, {n: inputs()[n] for n in names}, {}).values()
    expected = eval(row.means, {"np": np, **inputs()})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


POSITIONS = {"a": 3, "b": 5, "e": 3, "c": 7, "n": 4}
SHAPES = {"x": "ab", "y": "ab", "s": "ae", "w": "bc", "q": "nab", "u": "b", "z": "a"}
"""Tensors of which some dims with other names are of one size, as only positions can tell."""


def nested(seed: int) -> str:
    """An expression as other libraries write it, in which positions are counted several times."""
    random = np.random.default_rng(seed)

    def made(depth: int) -> str:
        if depth == 0:
            return str(random.choice(list(SHAPES)))
        one, other = (f"({made(depth - 1)})" for _ in range(2))
        forms = [f"{one} @ {other}", f"{one}.T", f"-{one}", f"{one} ** 2", f"{one}.sum(0)"]
        forms += [f"{one}[0]", f"{one}[..., 1:]", f"{one}.swapaxes(0, 1)", f"{one}.mean(-1)"]
        forms += [f"np.exp(-{one} ** 2)", f"{one}.swapaxes(0, -1)", f"{one}.max(1)"]
        return str(random.choice(forms))

    return made(int(random.integers(1, 5)))


def arrays() -> dict[str, Array]:
    """Values of the tensors of `nested`."""
    rng = np.random.default_rng(5)
    shapes = {n: tuple(POSITIONS[d] for d in dims) for n, dims in SHAPES.items()}
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
