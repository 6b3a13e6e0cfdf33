"""A program with a block of weights, and the model that has them, in each form that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from meshdsl.backends.weights.params import mapped_model
from meshdsl.diagnostics import DiagnosticError
from meshdsl.pipeline import Compilation
from tests.compiling import compile_text

PROGRAM = """
dim batch = 4, vocab = 8, model = 8, kv = 2, group = 2, key = 2, layers = 4, hidden = 12
mesh four = { data: 2, tp: 2 }
layout data { batch -> (data, tp) }
layout tensor { batch -> data, kv -> tp, hidden -> tp, vocab -> tp }
layout zero3 { batch -> (data, tp), params: model -> (data, tp) }
layout stages { batch -> data, layers -> tp } with gpipe[batch](2)
weights hf {
  embed: "wte.weight"[vocab, model]
  wq: "h.{layers}.q.weight"[(kv, group, key), model]
  (wk, wv): "h.{layers}.kv.weight"[model, (kv, key) + (kv, key)]
  up: "h.{2 * layers + 1}.up"[hidden, model, 1]
  head: "lm_head.weight"[vocab, model] or embed
  extra: init
  ignore "*.bias"
  ignore "sizes[*]"
}
program p(ids[batch]: i32) {
  param embed[vocab, model]
  x = embed[vocab = ids]
  param extra[model] = ones()
  repeat layers {
    param wq[model, kv, group, key]
    param wk[model, kv, key]
    param wv[model, kv, key]
    param up[model, hidden]
    q = einsum(x, wq -> [batch, kv, group, key])
    k = einsum(x, wk -> [batch, kv, key])
    v = einsum(x, wv -> [batch, kv, key])
    s = einsum(q, k -> [batch, kv, group])
    h = einsum(x, up -> [batch, hidden])
    x = x + 0.1 * sum[kv, group](s) + 0.1 * einsum(h, up -> [batch, model]) + mean[kv, key](v)
  }
  param head[vocab, model]
  return einsum(x * extra, head -> [batch, vocab])
}
"""

LAYOUTS = ("data", "tensor", "zero3", "stages")


def params_and_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of the parameters, and the tensors of a model that has them, made by hand."""
    draw = np.random.default_rng(0)
    shapes = {
        "embed": (8, 8), "wq": (4, 8, 2, 2, 2), "wk": (4, 8, 2, 2), "wv": (4, 8, 2, 2),
        "up": (4, 8, 12),
    }  # fmt: skip
    params = {n: (0.3 * draw.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    model = {"wte.weight": params["embed"]}
    for layer in range(4):
        model[f"h.{layer}.q.weight"] = params["wq"][layer].reshape(8, 8).T
        both = (params["wk"][layer].reshape(8, 4), params["wv"][layer].reshape(8, 4))
        model[f"h.{layer}.kv.weight"] = np.concatenate(both, axis=1)
        model[f"h.{2 * layer + 1}.up"] = params["up"][layer].T[:, :, None]
        model[f"h.{layer}.q.bias"] = np.zeros(3, np.float32)
    model["sizes[0]"] = np.zeros(3, np.float32)
    params |= {"head": params["embed"], "extra": np.ones(8, np.float32)}
    return params, model


def write_folder(folder: Path, model: dict[str, Any], shards: int = 1) -> Path:
    """A folder as `transformers` writes it, by the library of the format."""
    folder.mkdir(exist_ok=True)
    model = {key: np.ascontiguousarray(tensor) for key, tensor in model.items()}
    if shards == 1:
        safetensors.numpy.save_file(model, folder / "model.safetensors")
        return folder
    where = {
        key: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, key in enumerate(model)
    }
    for file in set(where.values()):
        inside = {key: tensor for key, tensor in model.items() if where[key] == file}
        safetensors.numpy.save_file(inside, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_torch(path: Path, model: dict[str, Any]) -> Path:
    """A state dict, whose tensors are views of others where they were transposed."""
    torch.save({key: torch.from_numpy(tensor) for key, tensor in model.items()}, path)
    return path


def params_and_files(folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The values, and the model in each form that is read."""
    params, model = params_and_model()
    return params, {
        "folder": write_folder(folder / "whole", model),
        "shards": write_folder(folder / "shards", model, 3),
        "torch": write_torch(folder / "state.bin", model),
        "file": write_folder(folder / "file", model) / "model.safetensors",
    }


def compiled(layout: str | None = None, text: str = PROGRAM, **options: Any) -> Compilation:
    return compile_text(text, layout=layout, **options)


def read(path: Path, made: Compilation) -> dict[str, Any]:
    """The whole parameters of a program in a model."""
    return {name: array[()] for name, array in mapped_model(str(path), made, None).arrays.items()}


def theirs(out: Path) -> dict[str, Any]:
    """The tensors of a model as the libraries of the formats read them."""
    if out.suffix == ".bin":
        return {k: t.numpy() for k, t in torch.load(out, weights_only=True).items()}
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {k: t for file in files for k, t in safetensors.numpy.load_file(file).items()}


def refused(path: Path, text: str = PROGRAM, block: str | None = None) -> Any:
    """The diagnostic of a model that is refused before anything is read."""
    with pytest.raises(DiagnosticError) as error:
        mapped_model(str(path), compile_text(text), block)
    (told,) = error.value.diagnostics
    return told
