"""A model of a trillion parameters on 3,072 devices: what is said of it before anything runs.

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from tests.project import ROOT
from tests.ranks import Forks

PATH = ROOT / "examples" / "large" / "gpt_3072.mdsl"
SEQ, MODEL, VOCAB, TP, STAGES, MICRO = 2048, 25600, 51200, 8, 64, 512


@pytest.fixture(scope="module")
def compiled() -> Compilation:
    """The training step in bf16."""
    source = Source(str(PATH), PATH.read_text("utf-8"))
    return Compilation(source, Options(layout="staged", dtype="bf16", reduce="deferred"))


@pytest.fixture(scope="module")
def report(compiled: Compilation) -> Mapping[str, Any]:
    """What is told of it."""
    return explain(compiled.device)


def test_bubble_and_what_is_in_flight(report: Mapping[str, Any]) -> None:
    found = report["pipeline"]
    # F = I = W: 63/575 for a backward pass in one, less where the stage before waits for I only.
    assert Fraction(found["bubble"]) == Fraction(2 * 63, 3 * MICRO + 2 * 63)
    assert found["in_flight"] == [STAGES - s for s in range(STAGES)]


def test_memory_by_stage(report: Mapping[str, Any]) -> None:
    layer = 12 * MODEL**2 // TP
    outside = VOCAB // TP * MODEL + SEQ * MODEL
    assert report["memory"]["params"] == 2 * (2 * layer + outside)
    peaks = report["pipeline"]["peak"]
    # A micro-batch in flight is the inputs of two layers.
    kept = 2 * SEQ * MODEL * 2
    assert {a - b for a, b in pairwise(peaks[1:-1])} == {kept}


def test_a_message_of_each_micro_batch_and_direction(report: Mapping[str, Any]) -> None:
    sends = [c for c in report["collectives"] if c["kind"] == "send"]
    assert [c["count"] for c in sends] == [MICRO, MICRO]
    assert {c["wire_bytes"] // c["count"] for c in sends} == {SEQ * MODEL * 2}


def test_the_text_has_a_row_for_each_stage(compiled: Compilation) -> None:
    lines = compiled.text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("SCHEDULE = ("))
    assert lines.index(")", start) == start + STAGES + 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text with few micro-batches, all of which go through the same functions."""
    options = Options(
        layout="staged", dtype="bf16", reduce="deferred", schedule="one_f_one_b[batch](8)"
    )
    path = tmp_path_factory.mktemp("large") / "gpt.py"
    source = Source(str(PATH), PATH.read_text("utf-8"))
    path.write_text(Compilation(source, options).text, encoding="utf-8")
    return path


def test_devices_of_3072_take_a_step(text: Path, forks: Forks, tmp_path: Path) -> None:
    """One of the first stage, of one in the middle, and of the last."""
    script = str(Path(__file__).with_name("fake_rank.py"))
    ranks = [str(stage * TP) for stage in (0, 31, 63)]
    log = tmp_path / "log"
    with forks.ranks(1, [script, str(text), *ranks], tmp_path, log) as leader:
        assert leader.wait() == 0, log.read_text("utf-8")
    _, *printed, _ = log.read_text("utf-8").splitlines()  # between the number and the exit code
    assert printed == ["{'loss': ()}"] * 3


LOOP = """
dim batch = 16, model = 8, layers = 4, out = model
mesh stages = { pipe: 2 }
layout staged { layers -> pipe } with gpipe[batch](4)
program net(x[batch, model]) {
  repeat layers {
    param w[model, out]
    x = tanh(einsum(x, w -> [batch, out])[out -> model])
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.01)
}
"""


@pytest.mark.parametrize("batch", [16, 10**9])
def test_a_loop_of_any_length_on_stages_is_placed(batch: int) -> None:
    sizes = {"layers": 10**9, "batch": batch}
    made = Compilation(Source("net.mdsl", LOOP), Options(set_dims=sizes))
    assert "gpipe" in made.text
    with pytest.raises(DiagnosticError, match=r"MD0106.*500,000,000 iterations of `layers`"):
        explain(made.device)
