"""The models of `examples/models`, on weights as their publishers' code names and lays them out.

What is compared with is written in torch, in `formulas`, on the state dict of the other program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from meshdsl.backends.engines.execution import InputSource, Result, run
from meshdsl.backends.engines.reference import whole_specs
from meshdsl.backends.generate.contract import NO_PREFILL
from meshdsl.backends.generate.contract import chosen as chosen_programs
from meshdsl.backends.generate.generated import Results
from meshdsl.backends.generate.generation import generate
from meshdsl.backends.generate.generation_request import GenerationRequest
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.train.exported_params import export_params
from meshdsl.backends.weights.draft import draft
from meshdsl.backends.weights.params import chosen_weights, params_file, read_model
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.checks import check_source
from meshdsl.syntax.parse import read_source
from tests.covering import some
from tests.examples.formulas.decoders import DECODERS
from tests.examples.formulas.encoder_decoders import ENCODER_DECODERS
from tests.examples.formulas.encoders import ENCODERS
from tests.examples.formulas.others import OTHERS
from tests.examples.formulas.published import BATCH, LAYERS, MODEL, SEQ, VOCAB, Inputs, State
from tests.project import ROOT, matching

MODELS = {**DECODERS, **ENCODERS, **ENCODER_DECODERS, **OTHERS}
LAYOUTS = {
    "data_parallel": "data:4", "zero3": "data:4", "megatron": "tp:2", "pipeline": "data:2,pipe:2",
    "expert_parallel": "data:2,tp:2", "hybrid": "data:2,tp:2",
    "context": "data:1,ring:2", "tables": "data:4", "rows": "data:2,tp:2",
}  # fmt: skip
TOLERANCE = {"f32": 1e-5, "f64": 1e-12}
DTYPES = {"f32": torch.float32, "f64": torch.float64}


def compiled(
    model: str, layout: str, dtype: str = "f64", evaluate: bool = True, batch: int = BATCH
) -> Compilation:
    path = ROOT / "examples" / "models" / f"{model}.mdsl"
    text = Source(str(path), path.read_text(encoding="utf-8"))
    named = Compilation(text, Options()).declarations.dims
    usual = {"batch": batch, "seq": SEQ, "model": MODEL, "vocab": VOCAB, "layers": LAYERS}
    sizes = {n: s for n, s in usual.items() if n in named} | MODELS[model].sizes
    chosen = Options(mesh=LAYOUTS[layout], layout=layout, dtype=dtype, set_dims=sizes)
    return Compilation(text, replace(chosen, evaluate=evaluate))


def computed(made: Compilation, model: Path, inputs: Path) -> Result:
    names = [str(p.value.name) for p in made.named.params]
    with params_file(str(model), made, names, None, Diagnostics()) as params:
        return run(made, "local", InputSource(str(inputs), params))


def whole(inputs: Inputs) -> Inputs:
    """As torch takes them: indices are of 64 bits."""
    return {n: t.long() if t.dtype == torch.int32 else t for n, t in inputs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("models")
    for model, published in MODELS.items():
        arrays: dict[str, Any] = {n: t.numpy() for n, t in published.inputs.items()}
        np.savez(made / f"{model}.npz", **arrays)
        for name, dtype in DTYPES.items():
            state = published.drawn(dtype)
            if name == "f32":  # as base models are published: without a prefix
                state = State((n.removeprefix(published.prefix), t) for n, t in state.items())
            safetensors.torch.save_file(state, made / f"{model}-{name}.safetensors")
    return made


def close(found: Any, wanted: torch.Tensor, dtype: str) -> bool:
    error = np.abs(found - wanted.detach().numpy()).max() / wanted.abs().max().item()
    return bool(error < TOLERANCE[dtype])


OF_IMAGES = {"resnet50", "clip"}
"""Compared in `test_vision_models.py`, with their own states and inputs."""

WITH_ADAPTERS = {"llama_lora", "llama_dpo"}
"""Compared in `tests/cli/test_finetune.py`, merged, and in `test_dpo.py`."""


PATHS = {path.stem: path for path in matching("examples/models/*.mdsl")}
EXPECTED = PATHS if "MESHDSL_CASES" in os.environ else ["llama_dpo"]
"""Files whose expectations are checked."""


@pytest.mark.parametrize("model", EXPECTED)
def test_expectations_hold_at_the_sizes_of_the_file(model: str) -> None:
    found = Diagnostics()
    line = check_source(read_source(PATHS[model]), Options(), found)
    assert [str(d) for d in found] == []
    assert int(line.split(" expectation")[0].split()[-1]) >= 4


def test_every_model_is_compared() -> None:
    models = PATHS.keys()
    assert models - OF_IMAGES - WITH_ADAPTERS == MODELS.keys()


@pytest.mark.parametrize(
    ("model", "layout"),
    [(m, n) for m, p in MODELS.items() for n in some(n for n in p.layouts if n != p.trained)],
)
def test_logits_are_those_of_the_publishers_formulas(folder, model, layout):
    """In f64 under every other layout, in f32 as well under the first."""
    published = MODELS[model]
    for dtype in ("f64", "f32") if layout == "data_parallel" else ("f64",):
        made = compiled(model, layout, dtype)
        path = folder / f"{model}-{dtype}.safetensors"
        result = computed(made, path, folder / f"{model}.npz")
        wanted = published.logits(published.drawn(DTYPES[dtype]), whole(published.inputs))
        assert close(result.outputs["logits"], wanted, dtype)


@pytest.mark.parametrize(("model", "layout"), [("gpt2", "zero3"), ("llama", "megatron")])
def test_texts_are_those_of_the_publishers_formulas(folder, model, layout):
    """The likeliest token after each; prompts of two lengths, read at once and token by token."""
    published = MODELS[model]
    state = published.drawn(torch.float64)
    prompts: list[tuple[int, ...]] = [(3, 1, 4), (15,)]
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(3):
            logits = published.logits(state, {"tokens": torch.tensor([ids])})
            ids.append(int(logits[0, -1].argmax()))
        wanted.append(tuple(ids[len(prompt) :]))
    for prefill in (None, NO_PREFILL):
        programs = chosen_programs(compiled(model, layout, batch=2), prefill)
        assert (programs.prefill is None) == (prefill is not None)
        names = [str(p.value.name) for p in programs.step.named.params]
        task = GenerationRequest(prompts, 3).task(programs.contract, TextCodec("none"))
        path = str(folder / f"{model}-f64.safetensors")
        with params_file(path, programs.step, names, None, Diagnostics()) as params:
            task = replace(task, params=str(params))
            results = Results(task)
            generate(programs, "local", task, results.hear)
        assert [text.tokens for text in results.texts] == wanted


@pytest.mark.parametrize("model", [m for m in MODELS if m not in ENCODER_DECODERS])
def test_a_draft_is_the_block_of_the_model(folder, model):
    """Of sizes and names alone: each parameter at the place that the file's own block has.

    Where encoder and decoder have the same tensors, names of parameters do not tell which is which.
    """
    made = compiled(model, "data_parallel")
    types = {str(p.value.name): p.value.type for p in made.named.params}
    text = draft("drafted", types, read_model(str(folder / f"{model}-f64.safetensors")))
    source = Source("drafted", f"{made.source.text}\n{text}")
    found = chosen_weights(Compilation(source, made.options), "drafted")
    drafted = {param.name: replace(param.places[0], prefix="") for param in found.params}
    wanted = {p.name: replace(p.places[0], prefix="") for p in chosen_weights(made, None).params}
    wrong = {name for name, place in wanted.items() if drafted.get(name) != place}
    assert wrong <= UNTOLD.get(model, set())


UNTOLD = {
    "bert": {"predicted.w", "predicted.b", "predicted.shift"},
    "vit": {"g1", "mlp.b2"},
    "mamba2": {f"mixer.{n}" for n in ("wz", "wx", "wb", "wc", "wt", "rate", "skip")}
    | {f"mixer.{n}" for n in ("sx", "sb", "sc", "scale")},
    "dlrm": {"w7", "b6"},
}
"""Parameters whose names say nothing of their place."""


@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_a_model_is_that_of_torch(folder, tmp_path, model):
    """Logits, gradients, a step of AdamW, and the tensors that are written after it."""
    published = MODELS[model]
    made = compiled(model, published.trained, evaluate=False)
    result = computed(made, folder / f"{model}-f64.safetensors", folder / f"{model}.npz")
    state, inputs = published.drawn(torch.float64), whole(published.inputs)
    trained = {n: t.requires_grad_() for n, t in state.items() if n not in published.still}
    before = {n: t.detach().clone() for n, t in state.items()}
    logits = published.logits(state, inputs)
    assert close(result.outputs["logits"], logits, "f64")
    loss = published.loss(logits, inputs)
    assert close(result.outputs["loss"], loss, "f64")
    loss.backward()
    assert made.named.goal is not None
    decay = made.named.goal.optimizer.options["weight_decay"]
    step = torch.optim.AdamW(trained.values(), lr=published.rate, weight_decay=decay)
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    step.step()

    kept = {n[:-2]: v for n, v in result.updated.items() if n.endswith(".m")}
    gradients = written(made, tmp_path, {n: v / (1 - 0.9) for n, v in kept.items()})
    assert gradients.keys() == state.keys()
    largest = max(t.grad.abs().max().item() for t in trained.values() if t.grad is not None)
    for name, tensor in trained.items():
        assert tensor.grad is not None
        assert (gradients[name] - tensor.grad).abs().max() < 1e-12 * largest, name

    moved = written(made, tmp_path, {n: result.updated[n] for n in kept})
    for name, tensor in trained.items():
        wanted = tensor.detach() - before[name]
        assert (moved[name] - before[name] - wanted).abs().max() < 1e-12, name


def written(made: Compilation, folder: Path, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the model that is written of arrays of its parameters; frozen ones are 0."""
    specs = whole_specs(made.named, {})[1]
    specs = {str(p.value.name): specs[str(p.value.name)] for p in made.named.params}
    zeros = {n: np.zeros(tuple(s.dims.values())) for n, s in specs.items()}
    blocks = {0: {n: torch.from_numpy(arrays.get(n, zeros[n])) for n in specs}}
    path = folder / "out.safetensors"
    export_params(blocks, str(path), specs, {}, chosen_weights(made, None))
    return safetensors.torch.load_file(path)
