"""What goes wrong in one stage: who is told what, and that the others end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import Emitted, run_local
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.train.job import DataFiles, Job
from meshdsl.backends.train.training_run import train
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from tests.pipelines.test_micro_batches import CUT, OPTIMIZER


def compiled(name: str, rules: str = "", text: str = "") -> Compilation:
    """A program of `CUT` in two stages."""
    text = text or CUT[name].replace("OPTIMIZER", OPTIMIZER)
    text += f"\nlayout chosen {{ layers -> pipe{rules} }} with one_f_one_b[batch](2)\n"
    return Compilation(Source("net.mdsl", text), Options(mesh="pipe:2", layout="chosen"))


def place_of(text: str, words: str) -> str:
    """`file:line` of the line of a program with these words."""
    return f"net.mdsl:{next(n for n, line in enumerate(text.splitlines(), 1) if words in line)}"


def test_an_index_that_a_pass_would_read_is_told_before_the_passes() -> None:
    """By every stage, the first of them first; at the line that reads it."""
    made = compiled("headed")
    targets = np.full((8, 6), 99, np.int32)
    emitted = made.emitted
    with pytest.raises(LocalRunError) as caught:
        run_local(emitted.text, {"targets": targets}, seed=1, lines=emitted.places)
    error = caught.value
    assert "99" in error.message
    assert (error.device, error.place) == (0, place_of(CUT["headed"], "cross_entropy[vocab]"))


def test_messages_have_the_place_of_the_loop() -> None:
    emitted = compiled("headed").emitted
    lines = emitted.text.splitlines()
    for word in (".receive(", ".send("):
        places = {emitted.places[n] for n, line in enumerate(lines, 1) if f"_line{word}" in line}
        assert places == {place_of(CUT["headed"], "repeat layers")}


def test_a_table_that_deadlocks_is_told_as_one() -> None:
    emitted = compiled("mlp").emitted
    text = emitted.text.replace('"F0 F1 B0 B1",', '"F0 B0 F1 B1",').replace(
        '    "F0 B0 F1 B1",\n)', '    "F0 F1 B0 B1",\n)'
    )
    assert text != emitted.text
    with pytest.raises(LocalRunError, match="waits in send"):
        run_local(text, seed=1, lines=emitted.places)


def test_where_a_nan_begins_is_found_inside_of_a_pass(tmp_path: Path) -> None:
    source = CUT["mlp"].replace("OPTIMIZER", "sgd(lr=0.1)").replace("tanh(", "log(")
    made = compiled("mlp", text=source)
    data = np.random.default_rng(0).normal(size=(64, 6)).astype("f4")
    np.savez(tmp_path / "d.npz", x=data, target=data)
    job = Job(DataFiles(str(tmp_path / "d.npz")), 2, seed=1)
    with pytest.raises(DiagnosticError) as caught:
        train(Emitted(made.emitted), "local", job, lambda event: None)
    (found,) = caught.value.diagnostics
    assert found.code == "MD0720"
    assert place_of(source, "log(") in found.message
    assert "on device 0" in found.message


def test_the_text_is_for_reading() -> None:
    text: ProgramText = compiled("mlp").emitted
    assert "def forward(micro):" in text.text
    assert "def backward(micro):" in text.text
