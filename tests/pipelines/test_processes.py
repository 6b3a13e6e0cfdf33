"""Pipelines on real processes: gloo sends what threads hand over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.pipelines.test_cuts import FOUR, PROGRAMS
from tests.pipelines.test_forward import MANY, NETWORK
from tests.pipelines.test_micro_batches import CUT, OPTIMIZER
from tests.pipelines.test_slices import TEXT
from tests.pipelines.test_updates import ENDS
from tests.ranks import Forks

CASES = {
    "one_f_one_b": ("headed", "pipe:4", "layers -> pipe", "one_f_one_b[batch](8)"),
    "uneven and several": (
        "headed", "data:2,pipe:2", "layers -> pipe, batch -> data, state: layers -> (pipe, data)",
        'interleaved[batch](2, layers="2 1 2 3")',
    ),
    "V and data": (
        "summed", "data:2,pipe:2", "layers -> pipe, batch -> data", "zb_v[batch](4)",
    ),
    "chimera and both": (
        "headed", "data:2,pipe:2,tp:2",
        "layers -> pipe, batch -> data, model -> tp, state: layers -> (pipe, data)",
        "chimera[batch](4, forward=2)",
    ),
    "both ways in halves": ("mlp", "pipe:2", "layers -> pipe", "dualpipe[batch](4)"),
    "waves": ("summed", "pipe:2", "layers -> pipe", "hanayo[batch](4, waves=2)"),
    "slices": (
        "lm", "data:2,pipe:2", "layers -> pipe, batch -> data",
        'terapipe[seq](4, slices="3 2 2 1")',
    ),
}  # fmt: skip


CASES |= {
    "network and data": ("cut tied", "d:2,pipe:2", "h3: pipe = 1, b -> d", "zb_h1[b](4)"),
    "network in chunks": ("cut residual", "pipe:2", FOUR, "zb_v[b](4)"),
}
"""And networks that rules cut."""

DATA = "data:2,pipe:2"
CASES |= {
    "updates of a stash": ("ends", DATA, "l -> pipe, batch -> data", "pipedream[batch](8)"),
    "corrected updates": ("ends", DATA, "l -> pipe, batch -> data", "pipemare[batch](8)"),
    "loop forward": ("many", DATA, "layers -> pipe, batch -> data", "one_f_one_b[batch](4)"),
    "network forward": ("net", "pipe:2", "h2: pipe = 1", "one_f_one_b[batch](4)"),
}
TEXTS = {**CUT, **{f"cut {name}": text for name, text in PROGRAMS.items()}}
TEXTS |= {"lm": TEXT, "ends": ENDS, "many": MANY, "net": NETWORK}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_threads(case: str, forks: Forks, tmp_path: Path) -> None:
    name, mesh, rules, schedule = CASES[case]
    optimizer = "adamw(lr=0.01)" if name == "ends" else OPTIMIZER
    text = TEXTS[name].replace("OPTIMIZER", optimizer).replace("OPT", optimizer)
    text = text.replace("layers = 4", "layers = 8")
    text += f"\nlayout chosen {{ {rules} }} with {schedule}\n"
    made = Compilation(Source("net.mdsl", text), Options(mesh=mesh, layout="chosen"))
    threads = run_local(made.text, seed=2)
    (tmp_path / "prog.py").write_text(made.text, encoding="utf-8")
    command = ["prog.py", "--seed", "2", "--out", "out.npz"]
    command += ["--updated", "updated.npz"] if threads.updated else []
    log = tmp_path / "log"
    with forks.ranks(made.device.mesh.devices, command, tmp_path, log) as leader:
        assert leader.wait() == 0, log.read_text(encoding="utf-8")
    for file, arrays in {"out": threads.outputs, "updated": threads.updated}.items():
        if not arrays:
            continue
        with np.load(tmp_path / f"{file}.npz") as found:
            for key, array in arrays.items():
                most = np.abs(array).max(initial=0)
                np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-6 * most)
