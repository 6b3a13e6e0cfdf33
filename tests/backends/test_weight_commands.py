"""Models of other programs in commands and plans; what their entries are told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.analysis import analyse
from meshdsl.backends.weights.model_files import ModelTensor
from meshdsl.backends.weights.patterns import patterns_of
from meshdsl.cli.app import app
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Options
from tests.backends.weight_models import (
    PROGRAM,
    compiled,
    read,
    refused,
    theirs,
    write_folder,
)

TRAINED = """
dim batch = 4, io = 4, hidden = 6
weights hf {
  w: "layer.weight"[hidden, io]
  v: "head.weight"[io, hidden] or init
  lora: init
}
program p(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  param lora[io] = zeros()
  y = einsum(relu(einsum(x, w -> [batch, hidden])), v -> [batch, io])
  loss = mean((y + lora - target)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_a_model_is_trained_from_folder_to_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((6, 4)).astype(np.float32)
    folder = write_folder(tmp_path / "from", {"layer.weight": weight})
    (folder / "config.json").write_text('{"torch_dtype": "float16"}')
    (tmp_path / "p.mdsl").write_text(TRAINED)
    x = draw.standard_normal((4, 4)).astype(np.float32)
    np.savez("data.npz", x=x, target=x)
    command = ["train", "p.mdsl", "--data", "data.npz", "--steps", "1", "--params", "from"]

    def trained(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*command, *more])
        return done.exit_code, done.output

    code, told = trained("--out", "to", "--as", "hf")
    assert code == 0, told
    assert "`lora`: no key, so not in the model" in told
    assert sorted(path.name for path in Path("to").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    written = theirs(Path("to"))
    assert {key: tensor.shape for key, tensor in written.items()} == {
        "layer.weight": (6, 4),
        "head.weight": (4, 6),
    }
    assert 0 < np.abs(written["layer.weight"] - weight).max() < 1
    assert json.loads(Path("to/config.json").read_text()) == {"torch_dtype": "float32"}
    code, told = trained("--out", "narrow.bin", "--as", "hf:bf16")
    assert code == 0, told
    assert "2 parameters of f32 written as bf16, rounded" in told
    narrow = torch.load("narrow.bin", weights_only=True)
    for key, tensor in narrow.items():
        assert tensor.equal(torch.from_numpy(written[key]).bfloat16())
    assert "f16 has a smaller range" in trained("--out", "half.bin", "--as", "hf:f16")[1]
    code, told = trained("--out", "to", "--as", "hf")
    assert code != 0
    assert "MD0554" in told
    assert "add `--force`" in told
    assert trained("--out", "to", "--as", "hf", "--force")[0] == 0
    assert "MD0552" in trained("--out", "other", "--as", "nix")[1]
    Path("to.bin").mkdir()
    assert "to.bin is a folder" in trained("--out", "to.bin", "--as", "hf", "--force")[1]
    (Path("to") / "latest").write_text("step-1")
    assert "to holds a checkpoint" in trained("--out", "to", "--as", "hf", "--force")[1]


def test_a_draft_is_read_after_it_was_corrected(tmp_path, models, monkeypatch):
    """What has no counterpart is a comment, and a run says so."""
    monkeypatch.chdir(tmp_path)
    params, paths = models
    plain = PROGRAM[: PROGRAM.index("weights")] + PROGRAM[PROGRAM.index("program") :]
    Path("p.mdsl").write_text(plain)
    done = CliRunner().invoke(app, ["weights", "p.mdsl", str(paths["folder"]), "--name", "mine"])
    assert done.exit_code == 0, done.output
    text = f"{done.output}\n{plain}"
    table = refused(paths["folder"], text).message
    assert all(word in table for word in ("extra", "head", "h.*.q.bias (4)", "sizes[0]"))
    for line, corrected in {
        "# no tensor of the sizes of extra: [model=8]": "extra: init",
        "# no tensor of the sizes of head: [vocab=8, model=8]": "head: embed",
        "# no parameter of these sizes: 'h.*.q.bias' f32[3], 4 tensors": 'ignore "*.bias"',
        "# no parameter of these sizes: 'sizes[0]' f32[3]": 'ignore "sizes[0]"',
        '(wk, wv): "kv.weight"[(kv, key) + (kv, key), model]':
        '(wk, wv): "kv.weight"[model, (kv, key) + (kv, key)]',
    }.items():  # fmt: skip
        assert line in text
        text = text.replace(line, corrected)
    assert 'under "h.{2 * layers + 1}." {\n    up: "up"[hidden, model, 1]' in text
    arrays = read(paths["folder"], compiled(text=text))
    assert all(np.array_equal(array, params[name]) for name, array in arrays.items())


PATTERNS = {
    ("h.0.a", "h.1.a", "h.2.a", "e"): ["h.{n0}.a", "e"],
    ("h.0.m.0.w", "h.0.m.2.w", "h.1.m.0.w", "h.1.m.2.w"): ["h.{n0}.m.0.w", "h.{n0}.m.2.w"],
    ("h.1.x", "h.3.x", "h.5.x"): ["h.{2 * n0 + 1}.x"],
    ("l.0.e.0.w", "l.0.e.1.w", "l.2.e.0.w", "l.2.e.1.w"): ["l.0.e.{n0}.w", "l.2.e.{n0}.w"],
    ("0.w", "1.w", "00.w"): ["{n0}.w", "00.w"],
    ("h.0.x", "h.5.x"): ["h.0.x", "h.5.x"],
}


@pytest.mark.parametrize("keys", PATTERNS)
def test_keys_that_differ_in_numbers_are_patterns(keys):
    tensors = {key: ModelTensor("", "f32", "<f4", (2,), 0, (4,)) for key in keys}
    found = [p.text([f"n{i}" for i in range(len(p.numbers))]) for p in patterns_of(tensors)]
    assert found == PATTERNS[keys]


def test_plans_load_and_save(tmp_path, models):
    params, paths = models
    (tmp_path / "p.mdsl").write_text(PROGRAM)
    plan = md.load(tmp_path / "p.mdsl").compile(layout="tensor")
    plan.load_weights(paths["shards"])
    assert all(np.array_equal(plan.params[name], value) for name, value in params.items())
    plan.save_weights(tmp_path / "m.pt")
    other = md.load(tmp_path / "p.mdsl").compile()
    other.load_weights(tmp_path / "m.pt", "hf")
    assert all(np.array_equal(other.params[name], value) for name, value in params.items())
    entries = {name: f'"{name}"[{", ".join(plan.named.params[n].value.type.names)}]'
               for n, name in enumerate(str(p.value.name) for p in plan.named.params)}  # fmt: skip
    plan.save_weights(tmp_path / "plain", entries, dtype="f64")
    plain = theirs(tmp_path / "plain")
    assert plain.keys() == params.keys()
    assert all(np.array_equal(plain[n].astype(np.float32), params[n]) for n in params)
    assert {tensor.dtype for tensor in plain.values()} == {np.dtype(np.float64)}
    half = md.load(tmp_path / "p.mdsl").compile(dtype="bf16")
    with pytest.warns(md.ProgramWarning, match="6 parameters of f32 read as bf16, rounded"):
        half.load_weights(paths["folder"])
    with pytest.raises(md.ProgramError, match="MD0146"):
        plan.load_weights(paths["folder"], {"embed": '"wte.weight"[vocab]'})
    with pytest.raises(md.ProgramError, match="MD0554"):
        plan.save_weights(tmp_path / "plain", entries)


def test_a_block_is_not_named_in_vain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.mdsl").write_text(TRAINED)
    for command, wanted in (
        ("run p.mdsl --as hf", "MD0601"),
        ("train p.mdsl --data d.npz --steps 1 --as hf", "MD0516"),
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 2
        assert wanted in done.output
        assert "--params FOLDER" in done.output


PARAMS = """
dim io = 4, layers = 3
weights hf { %s }
def f(x[io]) -> [io] {
  param w[io]
  return x * w
}
program p(x[io]) {
  param v[io]
  repeat layers {
    x = f(x)
  }
  return x * v
}
"""

HELPED = {
    "MD0145": ('w: "a.{layers}"[io]\nv: init', 'f.w: "a.{layers}"[io]\nv: init'),
    "MD0146": ('f.w: "a"[io]\nv: init', 'f.w: "a.{layers}"[io]\nv: init'),
    "MD0147 number": ('v: "a"[io, 2]\nf.w: init', 'v: "a"[io, 1]\nf.w: init'),
    "MD0147 two": ('v: "a"[io]\nv: "b"[io]\nf.w: init', 'v: "a"[io] or "b"[io]\nf.w: init'),
    "MD0149": ('f.w: "a.{layers}"[io]', 'f.w: "a.{layers}"[io]\nv: "KEY"[io]'),
    "MD0149 of layers": ('v: "a"[io]', 'v: "a"[io]\nf.w: "KEY"[layers, io]'),
    "MD0005": ('v: init\nf.w: "a"[layers, io] or\ninit', 'v: init\nf.w: "a"[layers, io] or init'),
}
"""Entries with a mistake, and those that the help leads to."""


@pytest.mark.parametrize("case", HELPED)
def test_the_help_on_an_entry_mends_it(case):
    wrong, mended = HELPED[case]
    told = analyse(Source("p.mdsl", PARAMS % wrong), Options()).diagnostics
    assert case[:6] in [d.code for d in told]
    help = next(d.help for d in told if d.code == case[:6])
    assert help is not None
    if case.startswith("MD0149"):
        assert mended.splitlines()[-1] in help.split("`")[1::2]
    assert not analyse(Source("p.mdsl", PARAMS % mended), Options()).diagnostics
