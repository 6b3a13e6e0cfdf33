"""The models of `examples/models`, on weights as their publishers' code names and lays them out.

What is compared with is written here in torch, on the state dict of the other program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.generate.contract import NO_PREFILL, chosen
from meshdsl.backends.generate.generated import Results
from meshdsl.backends.generate.generation import generate
from meshdsl.backends.generate.generation_request import GenerationRequest
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.train.devices import train_local
from meshdsl.backends.train.job import DataFiles, Job
from meshdsl.backends.weights.draft import draft
from meshdsl.backends.weights.params import chosen_weights, params_file, read_model
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from tests.project import ROOT

State = dict[str, torch.Tensor]
BATCH, SEQ, VOCAB, LAYERS, MODEL = 8, 6, 24, 4, 16


def gpt2(state: State, ids: torch.Tensor) -> torch.Tensor:
    """GPT-2's logits: weights are stored as `Conv1D` has them, inputs before outputs."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"]
        )

    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        q, k, v = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(MODEL, dim=-1)
        heads = [t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v)]
        q, k, v = heads
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(o.transpose(1, 2).flatten(-2), f"{h}.attn.c_proj")
        up = functional.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(up, f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T


def gpt2_shapes() -> dict[str, list[int]]:
    shapes = {"wte.weight": [VOCAB, MODEL], "wpe.weight": [9, MODEL], "ln_f.weight": [MODEL]}
    shapes["ln_f.bias"] = [MODEL]
    for layer in range(LAYERS):
        for name, sizes in {
            "ln_1": [MODEL], "ln_2": [MODEL], "attn.c_attn": [MODEL, 48],
            "attn.c_proj": [MODEL, MODEL], "mlp.c_fc": [MODEL, 64], "mlp.c_proj": [64, MODEL],
        }.items():  # fmt: skip
            shapes |= {f"h.{layer}.{name}.weight": sizes, f"h.{layer}.{name}.bias": sizes[-1:]}
    return {f"transformer.{name}": sizes for name, sizes in shapes.items()}


def llama(
    state: State,
    ids: torch.Tensor,
    base: float = 500000.0,
    mlp: Callable[[State, str, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Llama's logits: weights are stored as `Linear` has them, outputs before inputs."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], state[f"{name}.weight"], 1e-5)

    frequency = base ** (-torch.arange(2, dtype=torch.float64) / 2)
    angle = torch.outer(torch.arange(ids.shape[1]).double(), frequency).repeat(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turn = torch.cat((-second, first), dim=-1)
        return (x * angle.cos() + turn * angle.sin()).to(x.dtype)

    x = state["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        h = f"model.layers.{layer}"
        y = norm(x, f"{h}.input_layernorm")
        q, k, v = (
            (y @ state[f"{h}.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 4)).transpose(1, 2)
            for n in "qkv"
        )
        o = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + o.transpose(1, 2).flatten(-2) @ state[f"{h}.self_attn.o_proj.weight"].T
        y = norm(x, f"{h}.post_attention_layernorm")
        x = x + (mlp or gated)(state, h, y)
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def gated(state: State, layer: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ state[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (functional.silu(gate) * up) @ state[f"{layer}.mlp.down_proj.weight"].T


def llama_shapes(mlp: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [VOCAB, MODEL], "model.norm.weight": [MODEL]}
    names = {
        "input_layernorm": [MODEL], "post_attention_layernorm": [MODEL],
        "self_attn.q_proj": [16, MODEL], "self_attn.k_proj": [8, MODEL],
        "self_attn.v_proj": [8, MODEL], "self_attn.o_proj": [MODEL, 16],
    }  # fmt: skip
    names |= mlp or {
        "mlp.gate_proj": [12, MODEL], "mlp.up_proj": [12, MODEL], "mlp.down_proj": [MODEL, 12],
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": sizes for name, sizes in names.items()}
    return {**shapes, "lm_head.weight": [VOCAB, MODEL]}


EXPERTS = 4


def mixtral(state: State, ids: torch.Tensor) -> torch.Tensor:
    """Mixtral's logits: each token is the sum of two experts, by shares that are 1 together."""

    def moe(state: State, layer: str, x: torch.Tensor) -> torch.Tensor:
        h = f"{layer}.block_sparse_moe"
        shares = functional.softmax(x @ state[f"{h}.gate.weight"].T, dim=-1)
        shares, which = shares.topk(2, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, down, up = (state[f"{h}.experts.{expert}.w{n}.weight"].T for n in (1, 2, 3))
            share = (shares * (which == expert)).sum(dim=-1, keepdim=True)
            y = y + share * ((functional.silu(x @ gate) * (x @ up)) @ down)
        return y

    return llama(state, ids, 1000000.0, moe)


def mixtral_shapes() -> dict[str, list[int]]:
    sizes = {"w1": [12, MODEL], "w2": [MODEL, 12], "w3": [12, MODEL]}
    names = {f"experts.{n}.{w}": shape for n in range(EXPERTS) for w, shape in sizes.items()}
    names["gate"] = [EXPERTS, MODEL]
    return llama_shapes({f"block_sparse_moe.{name}": shape for name, shape in names.items()})


SEGMENTS = torch.arange(SEQ) * 2 // SEQ
PRESENT = (torch.arange(SEQ) < torch.randint(3, SEQ + 1, (BATCH, 1))).int()


def bert(state: State, ids: torch.Tensor) -> torch.Tensor:
    """BERT's logits of every word: norms stand behind the sums, and padding is not read."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], scale, shift, 1e-12)

    e = "bert.embeddings"
    x = state[f"{e}.word_embeddings.weight"][ids]
    x = x + state[f"{e}.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + state[f"{e}.token_type_embeddings.weight"][SEGMENTS], f"{e}.LayerNorm")
    for layer in range(LAYERS):
        h = f"bert.encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{h}.attention.self.{n}").unflatten(-1, (4, 4)).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        mask = PRESENT[:, None, None, :].bool()
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = linear(o.transpose(1, 2).flatten(-2), f"{h}.attention.output.dense")
        x = norm(x + o, f"{h}.attention.output.LayerNorm")
        up = functional.gelu(linear(x, f"{h}.intermediate.dense"))
        x = norm(x + linear(up, f"{h}.output.dense"), f"{h}.output.LayerNorm")
    c = "cls.predictions"
    y = norm(functional.gelu(linear(x, f"{c}.transform.dense")), f"{c}.transform.LayerNorm")
    return y @ state[f"{e}.word_embeddings.weight"].T + state[f"{c}.bias"]


def bert_shapes() -> dict[str, list[int]]:
    names = {f"attention.self.{n}": [MODEL, MODEL] for n in ("query", "key", "value")}
    names |= {"attention.output.dense": [MODEL, MODEL], "attention.output.LayerNorm": [MODEL]}
    names |= {"intermediate.dense": [64, MODEL], "output.dense": [MODEL, 64]}
    names["output.LayerNorm"] = [MODEL]
    names = {f"bert.encoder.layer.{n}.{k}": s for n in range(LAYERS) for k, s in names.items()}
    names["bert.embeddings.LayerNorm"] = [MODEL]
    names["cls.predictions.transform.dense"] = [MODEL, MODEL]
    names["cls.predictions.transform.LayerNorm"] = [MODEL]
    shapes = {f"{name}.bias": sizes[:1] for name, sizes in names.items()}
    shapes |= {f"{name}.weight": sizes for name, sizes in names.items()}
    for name, size in {"word": VOCAB, "position": 9, "token_type": 2}.items():
        shapes[f"bert.embeddings.{name}_embeddings.weight"] = [size, MODEL]
    return {**shapes, "cls.predictions.bias": [VOCAB]}


@dataclass
class Published:
    """A model: its formulas, its tensors, the sizes of the test, and inputs beside the tokens."""

    apply: Callable[[State, torch.Tensor], torch.Tensor]
    shapes: Callable[[], dict[str, list[int]]]
    sizes: dict[str, int]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def scored(self) -> torch.Tensor:
        """How much the loss of each token counts."""
        return self.inputs.get("scored", torch.ones(BATCH, SEQ))


_LLAMA = {"kv": 2, "group": 2, "half": 2, "hidden": 12}
MODELS = {
    "gpt2": Published(gpt2, gpt2_shapes, {"context": 9, "heads": 4, "key": 4}),
    "llama": Published(llama, llama_shapes, _LLAMA),
    "mixtral": Published(mixtral, mixtral_shapes, {**_LLAMA, "experts": EXPERTS}),
    "bert": Published(
        bert,
        bert_shapes,
        {"context": 9, "heads": 4, "key": 4},
        {
            "segment_ids": SEGMENTS.int().repeat(BATCH, 1),
            "present": PRESENT,
            "scored": (torch.arange(SEQ) % 2).float().repeat(BATCH, 1),
        },
    ),
}
LAYOUTS = {
    "data_parallel": "data:4", "zero3": "data:4", "megatron": "data:2,tp:2",
    "pipeline": "data:2,pipe:2", "expert_parallel": "data:2,tp:2",
}  # fmt: skip
TOLERANCE = {"f32": 1e-5, "f64": 1e-12}


def drawn(shapes: dict[str, list[int]], dtype: str) -> State:
    draw, kind = np.random.default_rng(1), torch.float64 if dtype == "f64" else torch.float32
    return {
        n: torch.from_numpy(0.4 * draw.standard_normal(s) + (s == [MODEL])).to(kind)
        for n, s in shapes.items()
    }


def compiled(
    model: str, layout: str, dtype: str, evaluate: bool = True, batch: int = BATCH
) -> Compilation:
    sizes = {"batch": batch, "seq": SEQ, "model": MODEL, "vocab": VOCAB, "layers": LAYERS}
    sizes |= MODELS[model].sizes
    path = ROOT / "examples" / "models" / f"{model}.mdsl"
    text = Source(str(path), path.read_text(encoding="utf-8"))
    chosen = Options(mesh=LAYOUTS[layout], layout=layout, dtype=dtype, set_dims=sizes)
    return Compilation(text, replace(chosen, evaluate=evaluate))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("models")
    ids = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)
    for model, published in MODELS.items():
        arrays: dict[str, Any] = {"tokens": ids, "targets": ids[:, ::-1]}
        arrays |= {name: tensor.numpy() for name, tensor in published.inputs.items()}
        np.savez(made / f"{model}.npz", **arrays)
        for dtype in TOLERANCE:
            state = drawn(published.shapes(), dtype)
            if dtype == "f32":  # as base models are published: without a prefix
                state = {re.sub("^(transformer|bert)[.]", "", n): t for n, t in state.items()}
            safetensors.torch.save_file(state, made / f"{model}-{dtype}.safetensors")
    return made


@pytest.mark.parametrize(
    ("model", "layout"),
    [(m, n) for m in MODELS for n in LAYOUTS if m == "mixtral" or n != "expert_parallel"],
)
def test_logits_are_those_of_the_publishers_formulas(folder, model, layout):
    """In f64 under every layout, in f32 as well under every second."""
    published = MODELS[model]
    ids = torch.from_numpy(np.load(folder / f"{model}.npz")["tokens"]).long()
    dtypes = ("f64", "f32") if layout in ("zero3", "pipeline") else ("f64",)
    for dtype in dtypes:
        made = compiled(model, layout, dtype)
        names = [str(p.value.name) for p in made.named.params]
        path = str(folder / f"{model}-{dtype}.safetensors")
        with params_file(path, made, names, None, Diagnostics()) as params:
            result = run(made, "local", InputSource(str(folder / f"{model}.npz"), params))
        wanted = published.apply(drawn(published.shapes(), dtype), ids).numpy()
        error = np.abs(result.outputs["logits"] - wanted).max() / np.abs(wanted).max()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize(("model", "layout"), [("gpt2", "zero3"), ("llama", "megatron")])
def test_texts_are_those_of_the_publishers_formulas(folder, model, layout):
    """The likeliest token after each; prompts of two lengths, read at once and token by token."""
    path = str(folder / f"{model}-f64.safetensors")
    state = drawn(MODELS[model].shapes(), "f64")
    prompts: list[tuple[int, ...]] = [(3, 1, 4), (15,)]
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(3):
            logits = MODELS[model].apply(state, torch.tensor([ids]))
            ids.append(int(logits[0, -1].argmax()))
        wanted.append(tuple(ids[len(prompt) :]))
    for prefill in (None, NO_PREFILL):
        programs = chosen(compiled(model, layout, "f64", batch=2), prefill)
        assert (programs.prefill is None) == (prefill is not None)
        names = [str(p.value.name) for p in programs.step.named.params]
        task = GenerationRequest(prompts, 3).task(programs.contract, TextCodec("numbers"))
        with params_file(path, programs.step, names, None, Diagnostics()) as params:
            task = replace(task, params=params)
            results = Results(task)
            generate(programs, "local", task, results.hear)
        assert [text.tokens for text in results.texts] == wanted


@pytest.mark.parametrize("model", MODELS)
def test_a_draft_is_the_block_of_the_model(folder, model):
    """Of sizes and names alone: each parameter at the place that the file's own block has."""
    made = compiled(model, "data_parallel", "f64")
    types = {str(p.value.name): p.value.type for p in made.named.params}
    text = draft("drafted", types, read_model(str(folder / f"{model}-f64.safetensors")))
    source = Source("drafted", f"{made.source.text}\n{text}")
    found = chosen_weights(Compilation(source, made.options), "drafted")
    drafted = {param.name: replace(param.places[0], prefix="") for param in found.params}
    wanted = {p.name: replace(p.places[0], prefix="") for p in chosen_weights(made, "hf").params}
    wrong = {name for name, place in wanted.items() if drafted[name] != place}
    assert wrong <= {"predicted.w", "predicted.b", "predicted.shift"}  # their names say nothing


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "megatron"),
        ("llama", "zero3"),
        ("mixtral", "expert_parallel"),
        ("bert", "pipeline"),
    ],
)
def test_a_step_on_a_model_is_that_of_torch(folder, tmp_path, model, layout):
    """Read, trained by one step of AdamW, and written: the tensors that torch's step has."""
    published = MODELS[model]
    made = compiled(model, layout, "f64", evaluate=False)
    goal = made.named.goal
    assert goal is not None
    names = [str(p.value.name) for p in made.named.params]
    path, out = folder / f"{model}-f64.safetensors", tmp_path / "out.safetensors"
    weights = chosen_weights(made, "hf")
    with params_file(str(path), made, names, "hf", Diagnostics()) as params:
        data = DataFiles(str(folder / f"{model}.npz"))
        job = Job(data, 1, params=params, out=str(out), weights=weights, rate=goal.optimizer.lr)
        train_local(Emitted(made.emitted), job, lambda event: None, lambda: False)
    state = {n: t.requires_grad_() for n, t in drawn(published.shapes(), "f64").items()}
    arrays = np.load(folder / f"{model}.npz")
    ids, targets = (torch.from_numpy(arrays[n]).long() for n in ("tokens", "targets"))
    logits = published.apply(state, ids)
    losses = functional.cross_entropy(logits.mT, targets, reduction="none")
    ((losses * published.scored).sum() / published.scored.sum()).backward()
    options = goal.optimizer.options
    rate = {"gpt2": 3e-7, "bert": 1e-8}.get(model, 1.5e-7)  # the first step of the warm-up
    step = torch.optim.AdamW(state.values(), lr=rate, weight_decay=options["weight_decay"])
    torch.nn.utils.clip_grad_norm_(state.values(), 1.0)
    before = {n: t.detach().clone() for n, t in state.items()}
    step.step()
    written = safetensors.torch.load_file(out)
    assert written.keys() == state.keys()
    for name, tensor in state.items():
        moved, wanted = written[name] - before[name], tensor.detach() - before[name]
        assert (moved - wanted).abs().max() < 1e-12, name
        if not name.endswith("key.bias"):  # softmax takes it away
            assert math.isclose(wanted.abs().max().item(), rate, rel_tol=0.1), name
