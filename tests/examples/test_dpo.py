"""`examples/models/llama_dpo.mdsl` beside the formulas of DPO in torch, in float64.

What is compared with is the loss of Rafailov et al. 2023 on logits of two Llamas: the policy is the
reference with products of its adapters added to two matrices of each layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.weights.params import mapped_model
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.examples.formulas.decoders import DECODERS, llama
from tests.examples.formulas.published import KEY, LAYERS, MODEL, VOCAB, State
from tests.project import ROOT

BATCH, SEQ, RANK, BETA = 4, 6, 3, 0.1
SIZES = {
    "batch": BATCH, "seq": SEQ, "model": MODEL, "vocab": VOCAB, "layers": LAYERS, "rank": RANK,
    "stretch": 1, "kv": 2, "group": 2, "half": KEY // 2, "hidden": 12,
}  # fmt: skip
MESHES = {"zero3": "data:2", "megatron": "data:2,tp:2", "pipeline": "data:1,pipe:2"}
ADAPTERS = {
    "qa": (LAYERS, MODEL, RANK), "qb": (LAYERS, RANK, 2, 2, KEY),
    "va": (LAYERS, MODEL, RANK), "vb": (LAYERS, RANK, 2, KEY),
}  # fmt: skip


def compiled(layout: str) -> Compilation:
    """The program under a layout, in f64 throughout."""
    path = ROOT / "examples" / "models" / "llama_dpo.mdsl"
    text = path.read_text(encoding="utf-8").replace(', compute="bf16"', "")
    options = Options(
        mesh=MESHES[layout], layout=layout, dtype="f64", set_dims=SIZES, program="llama_dpo"
    )
    return Compilation(Source(str(path), text), options)


def drawn(*sizes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(0.4 * np.random.default_rng(seed).standard_normal(sizes))


def log_probability(state: State, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of each row, the sum over the targets that are no -100."""
    logs = functional.log_softmax(llama(state, {"tokens": tokens}), dim=-1)
    chosen = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (chosen * (targets != -100)).sum(dim=-1)


def with_adapters(base: State, adapters: dict[str, torch.Tensor]) -> State:
    """The reference and, in its matrices of queries and values, twice the adapters' products."""
    state = State(base)
    for layer in range(LAYERS):
        for which in "qv":
            key = f"model.layers.{layer}.self_attn.{which}_proj.weight"
            a, b = (adapters[f"{which}{n}"][layer] for n in "ab")
            state[key] = base[key] + 2 * (a @ b.flatten(1)).T
    return state


def dpo(
    base: State, adapters: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the share of prompts whose chosen answer has gained more."""
    policy, pairs = with_adapters(base, adapters), []
    for answer in (0, 1):
        rows = tokens[:, answer], targets[:, answer]
        pairs.append(log_probability(policy, *rows) - log_probability(base, *rows))
    margin = BETA * (pairs[0] - pairs[1])
    return -functional.logsigmoid(margin).mean(), (margin > 0).double().mean()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, Any, Any, Any]:
    """A folder with a model, all parameters and a batch; the tensors of these."""
    folder = tmp_path_factory.mktemp("dpo")
    base = DECODERS["llama"].drawn(torch.float64)
    save_file(base, folder / "model.safetensors")
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, VOCAB, (BATCH, 2, SEQ)).astype(np.int32)
    targets = draw.integers(0, VOCAB, (BATCH, 2, SEQ)).astype(np.int32)
    targets[:, :, :2] = -100  # the prompt
    targets[1, 0, 4:] = -100  # the end of a shorter answer
    np.savez(folder / "batch.npz", tokens=tokens, targets=targets)
    adapters = {n: drawn(*s, seed=k) for k, (n, s) in enumerate(ADAPTERS.items())}
    arrays = mapped_model(str(folder / "model.safetensors"), compiled("zero3"), None).arrays
    params: dict[str, Any] = {name: array[()] for name, array in arrays.items()}
    params |= {name: tensor.numpy() for name, tensor in adapters.items()}
    np.savez(folder / "params.npz", **params)
    rows = torch.from_numpy(tokens), torch.from_numpy(targets.astype(np.int64))
    return folder, base, adapters, *rows


@pytest.mark.parametrize("layout", MESHES)
def test_a_step_is_that_of_the_formula(given, layout):
    """Loss and accuracy, gradients, and a step of AdamW; only adapters have any of the last two."""
    folder, base, adapters, tokens, targets = given
    made = compiled(layout)
    source = InputSource(str(folder / "batch.npz"), str(folder / "params.npz"))
    result = run(made, "local", source)
    trained = {n: t.clone().requires_grad_() for n, t in adapters.items()}
    loss, accuracy = dpo(base, trained, tokens, targets)
    assert 0 < accuracy < 1
    assert result.outputs["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert result.outputs["accuracy"] == accuracy.item()
    loss.backward()
    step = torch.optim.AdamW(trained.values(), lr=1e-4, weight_decay=0)
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    step.step()
    assert {n.partition(".")[0] for n in result.updated if "." in n} == set(ADAPTERS)
    largest = max(t.grad.abs().max() for t in trained.values() if t.grad is not None)
    for name, tensor in trained.items():
        assert tensor.grad is not None
        gradient = torch.from_numpy(result.updated[f"{name}.m"]) / (1 - 0.9)
        assert (gradient - tensor.grad).abs().max() < 1e-12 * largest, name
        moved = torch.from_numpy(result.updated[name]) - tensor.detach()
        assert moved.abs().max() < 1e-12, name


def test_the_reference_has_neither_gradients_nor_states():
    """At the sizes of the file. The policy's matrices are stored once, for both."""
    path = ROOT / "examples" / "models" / "llama_dpo.mdsl"
    source = Source(str(path), path.read_text(encoding="utf-8"))
    options = Options(mesh="stages", layout="pipeline", program="llama_dpo")
    report = Compilation(source, options).report
    sizes = report["memory"]
    layers, model, rank, heads, kv, key = 4, 2048, 8, 32, 8, 64  # layers of a stage
    adapters = layers * rank * (model + heads * key + model + kv * key)
    assert sizes["grads"] == 4 * adapters  # sums of micro-batches, f32
    assert sizes["state"] == 12 * adapters + 4  # two moments and the master, f32; the step
    sent = {c["tensor"] for c in report["collectives"] if c["kind"] == "send"}
    assert sent == {"policy", "reference", "d_policy"}
