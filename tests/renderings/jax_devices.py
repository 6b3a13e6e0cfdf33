"""Runs JAX renderings on forced host devices: `python jax_devices.py CASES RESULTS` (pickles).

Started with XLA_FLAGS=--xla_force_host_platform_device_count=N. Cases and results are those of
`dtensor_ranks.py`; what a variable held is the type that JAX shows, and its local shape.
"""

from __future__ import annotations

import pickle
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

Case = dict[str, Any]


def run_case(case: Case) -> dict[str, Any]:
    """One rendering, operator by operator in Python's order."""
    space: dict[str, Any] = {"__name__": "rendering"}
    exec(compile(case["text"], "rendering.py", "exec"), space)
    seen: dict[str, Any] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is space["program"].__code__:
            seen.update(frame.f_locals)

    mesh = space["device_mesh"]()
    with jax.set_mesh(mesh):
        sys.setprofile(watch)
        try:
            outputs = space["program"](mesh, case["inputs"], case["params"])
        finally:
            sys.setprofile(None)
    held = {n: _held(x) for n, x in seen.items() if isinstance(x, jax.Array)}
    return {"outputs": {n: np.asarray(x) for n, x in outputs.items()}, "held": held}


def _held(x: Any) -> tuple[str, tuple[int, ...]]:
    return str(jax.typeof(x)), tuple(x.addressable_shards[0].data.shape)


def main() -> None:
    """Run every case."""
    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = []
    for case in pickle.loads(Path(sys.argv[1]).read_bytes()):
        try:
            found.append(run_case(case))
        except Exception:
            found.append({"error": traceback.format_exc()})
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
