"""Packages of operators for tests: installed for one test, as an entry point on the path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshdsl.named import packages
from meshdsl.ops.opdef import ADDED
from tests.project import ROOT

EXAMPLE = ROOT / "examples" / "own_operator"
"""The package of the guide."""

KERNELS = "swiglu_kernels"
"""The name that files use it by."""


@contextmanager
def installed(folder: Path, name: str, home: str, *, path: Path | None = None) -> Iterator[None]:
    """Meanwhile, the entry point `name = home` is that of a package in `folder`.

    Its modules are in `path`, or in the folder. Afterwards nothing of it is left in the process.
    """
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{packages.GROUP}]\n{name} = {home}\n")
    places = [str(p) for p in dict.fromkeys((folder, path or folder))]
    operators, loaded, modules = dict(ADDED), dict(packages.LOADED), set(sys.modules)
    before_path = os.environ.get("PYTHONPATH")
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [before_path])])
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for place in places:
            sys.path.remove(place)
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if before_path is None else {"PYTHONPATH": before_path}
        for table, before in ((ADDED, operators), (packages.LOADED, loaded)):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        root = home.partition(":")[0].partition(".")[0]
        for module in [m for m in sys.modules if m not in modules and m.partition(".")[0] == root]:
            if not module.endswith(".kernel"):  # torch takes a kernel once
                del sys.modules[module]


@contextmanager
def example(folder: Path) -> Iterator[Path]:
    """Meanwhile, the package of the guide is installed; its program."""
    with installed(folder, KERNELS, f"{KERNELS}:OPERATORS", path=EXAMPLE):
        yield EXAMPLE / "mlp.mdsl"
