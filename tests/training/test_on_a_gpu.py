"""`benchmarks.gpu` on a CPU: the models by hand compute what ours do, and the rest runs, too."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from benchmarks.gpu import HEAD, MODELS, ByHand, Gpu, Model, Ours, check, differences, row
from benchmarks.training_by_hand import ByHand as TrainedByHand
from benchmarks.training_cases import Case
from benchmarks.training_worker import tensors
from meshdsl.backends.engines.in_process import load

CPU = Gpu(torch.device("cpu"))


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_models_by_hand_learn_as_ours(model: Model) -> None:
    program = load(model.compiled("f32", small=True, cluster="h100").text)
    elsewhere = Ours(program, torch.device("meta")).tables
    assert all(x.is_meta for table in elsewhere for x in table.values())
    ours = Ours(program, CPU.where)
    inputs, params = ({n: x.clone() for n, x in t.items()} for t in ours.tables[:2])
    check(ours, ByHand(model.by_hand, params, inputs, "f32"), "f32")


def test_the_translator_by_hand_computes_what_ours_does() -> None:
    case = Case("nmt", "one", "adamw", {"hidden": 8, "model": 8, "batch": 2})
    program = load(case.emitted().text)
    params, inputs, states = (
        tensors(program, specs, 0) for specs in (program.PARAMS, program.INPUTS, program.STATES)
    )
    theirs = TrainedByHand(case, {n: x.clone() for n, x in params.items()}, inputs)()
    with torch.inference_mode():
        ours = program.device(0, {}, inputs, params, states)["loss"]
    assert math.isclose(ours, theirs, rel_tol=1e-5)


def test_a_row_has_a_cell_for_each_column() -> None:
    options = Namespace(small=True, cluster="h100")
    text = row(MODELS[-1], "bf16", CPU, options)
    assert text.count("|") == len(HEAD) + 1
    assert text.count("not tried") == 2


def test_a_cpu_computes_what_a_cpu_computes() -> None:
    said = dict(text.split(": at most ") for text in differences(CPU))
    far = {name: float(text.split()[0]) for name, text in said.items()}
    assert far.pop("dropout") == far.pop("convolution") == 0
    assert far.pop("attention f32") < 1e-5
    assert far.pop("attention bf16") < 2e-2
    assert not far
