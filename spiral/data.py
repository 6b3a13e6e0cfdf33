"""Write spiral.npz: 2,000 points on two spirals, and which of the two each one lies on."""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("spiral.npz")


def main() -> None:
    """Draw the points, the same ones every time."""
    draw = np.random.default_rng(seed=0)
    label = draw.integers(2, size=2000)
    turn = draw.uniform(0.2, 1.0, size=label.size)
    angle = 2 * np.pi * turn + np.pi * label
    point = 2 * turn * np.stack([np.cos(angle), np.sin(angle)])
    point += draw.normal(scale=0.05, size=point.shape)
    np.savez(FILE, point=point.T.astype(np.float32), label=label.astype(np.int32))
    print(f"wrote {FILE.name}: {label.size:,} points")


if __name__ == "__main__":
    main()
