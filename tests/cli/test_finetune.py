"""`examples/finetune_llama.sh` at tiny sizes: adapters trained, merged, exported, generating."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from meshdsl.backends.train.exported_params import as_params, checkpoint_at
from tests.examples.formulas.decoders import DECODERS, llama
from tests.examples.formulas.published import LAYERS, VOCAB, State
from tests.project import ROOT

from .command import Cli, write

SIZES = f"model=16 kv=2 group=2 half=2 hidden=12 vocab={VOCAB} layers={LAYERS} stretch=1"
SCRIPT = ROOT / "examples" / "finetune_llama.sh"
PROMPT = "w3 w1 w4"

RECORD = """#!/bin/sh
printf '%s\\n' "$@" '' >> "$CALLS"
echo '{}'
"""
"""What stands for `meshdsl` in the script: its arguments are written down, then a blank line."""


def commands(model: str, tokens: str, out: str, **variables: str) -> list[list[str]]:
    """The commands of the script, as a shell calls them."""
    Path("bin").mkdir()
    Path("bin/meshdsl").write_text(RECORD)
    Path("bin/meshdsl").chmod(0o755)
    path = f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CALLS": str(Path("calls").absolute()), **variables}
    subprocess.run(["sh", SCRIPT, model, tokens, out, PROMPT], env=environment, check=True)
    calls = Path("calls").read_text().rstrip("\n").split("\n\n")
    return [call.split("\n") for call in calls]


@pytest.fixture
def base(cli: Cli) -> dict[str, torch.Tensor]:
    """A model with a tokenizer, in the folder `base`, and tokens in `t.bin`."""
    folder = Path("base")
    folder.mkdir()
    state = DECODERS["llama"].drawn(torch.bfloat16)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    words = {f"w{n}": n for n in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (np.arange(400) ** 2 % VOCAB).astype("<u4").tofile("t.bin")
    return state


def greedy(state: State, steps: int) -> list[int]:
    ids = [int(word[1:]) for word in PROMPT.split()]
    for _ in range(steps):
        ids.append(int(llama(state, {"tokens": torch.tensor([ids])})[0, -1].argmax()))
    return ids[-steps:]


def test_a_llama_is_finetuned_by_adapters_and_handed_back(
    base: dict[str, torch.Tensor], cli: Cli
) -> None:
    """From a folder that `transformers` writes to another one, under tensor parallelism."""
    given = {"SIZES": SIZES, "BATCH": "batch=2 seq=8", "STEPS": "3", "NEW": "4"}
    train, export, evaluate, generate = commands("base", "t.bin", "out", **given)
    assert cli(*train).code == 0
    done = cli(*export)
    assert (done.code, done.codes) == (0, ["note[MD0554]", "note[MD0551]"])

    checkpoint = checkpoint_at("out/run")
    trained = {"qa", "qb", "va", "vb"}
    states = [name for name in checkpoint.tensors if name.endswith((".m", ".v", ".master"))]
    assert {name.partition(".")[0] for name in states} == trained
    with as_params("out/run", trained) as file:
        adapters = load_file(str(file))
    merged = load_file("out/tuned/model.safetensors")
    assert merged.keys() == base.keys()
    changed = 0
    for name, tensor in base.items():
        wanted = tensor
        if found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qv])_proj\.weight", name):
            layer, which = int(found[1]), found[2]
            a, b = adapters[f"{which}a"][layer], adapters[f"{which}b"][layer]
            change = 2 * torch.einsum("mr,r...->m...", a, b).flatten(1).T
            wanted = (tensor.float() + change).bfloat16()
            changed += bool((wanted != tensor).any())
        assert torch.equal(merged[name], wanted), name
    assert changed == 2 * LAYERS

    state = State((name, tensor.float()) for name, tensor in merged.items())
    done = cli(*evaluate, "--json")
    ids = torch.from_numpy(np.fromfile("t.bin", "<u4").astype(np.int64))[: 4 * 2 * 8 + 1]
    rows, targets = ids[:-1].reshape(-1, 8), ids[1:].reshape(-1, 8)
    loss = torch.nn.functional.cross_entropy(llama(state, {"tokens": rows}).mT, targets).item()
    assert json.loads(done.out)["values"]["loss"] == pytest.approx(loss, rel=1e-5)

    (text,) = json.loads(cli(*generate).out)["texts"]
    assert text["tokens"] == greedy(state, 4)
    assert text["text"].split() == [*PROMPT.split(), *(f"w{n}" for n in text["tokens"])]
    assert json.loads(Path("out/tuned/config.json").read_text()) == {"dtype": "bfloat16"}

    for name in ("tokenizer.json", "config.json"):
        copied = Path("out/run/model", name).read_bytes()
        assert copied == Path("base", name).read_bytes()
    assert Path("out/tuned/tokenizer.json").is_file()


PROGRAMS = """
dim io = 2
weights w { a: "key"[io], b: init }
program p(x[io]) {
  param a[io]
  param b[io] = zeros()
  l = sum(x * a + b)
  return l
  minimize l with sgd(lr=0.1)
}
program doubled() {
  param a[io]
  a := 2 * a
  return a
}
program with_inputs(x[io]) {
  param a[io]
  a := x
  return x
}
program other() {
  param c[io] = zeros()
  c := c + 1
  return c
}
program nothing() {
  param a[io]
  return a
}
"""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--apply", "doubld"], "error[MD0628]"),
        (["--apply", "p"], "error[MD0628]"),
        (["--apply", "with_inputs"], "error[MD0628]"),
        (["--apply", "other"], "error[MD0628]"),
        (["--apply", "nothing"], "error[MD0628]"),
        (["--out", "o.bin"], "error[MD0602]"),
        (["--params", "gone.npz"], "error[MD0505]"),
        (["--params", "d.safetensors"], "error[MD0628]"),
        (["--as", "v", "--out", "folder"], "error[MD0552]"),
        (["--program", "gone"], "error[MD0108]"),
    ],
)
def test_what_cannot_be_exported(cli: Cli, options: list[str], code: str) -> None:
    write(PROGRAMS)
    np.savez("p.npz", a=np.ones(2, np.float32), b=np.zeros(2, np.float32))
    save_file({"key": torch.ones(2)}, "d.safetensors")
    given = {
        "--params": "p.npz",
        "--out": "o.npz",
        **dict(zip(options[::2], options[1::2], strict=True)),
    }
    done = cli("export", "f.mdsl", *(word for pair in given.items() for word in pair))
    assert (done.code, done.codes) == (2, [code]) or code in done.codes, done.err
    assert not any(Path(name).exists() for name in ("o.npz", "o.bin", "folder"))


def test_parameters_are_exported_to_one_file(cli: Cli) -> None:
    write(PROGRAMS)
    a, b = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    np.savez("p.npz", a=a, b=b)
    done = cli("export", "f.mdsl", "--params", "p.npz", "--out", "o.npz", "--apply", "doubled")
    assert (done.code, done.out.strip(), done.codes) == (0, "wrote o.npz", [])
    found = np.load("o.npz")
    np.testing.assert_array_equal(found["a"], 2 * a)
    np.testing.assert_array_equal(found["b"], b)
    assert cli("export", "f.mdsl", "--params", "p.npz", "--out", "o.npz").codes == ["error[MD0503]"]
    done = cli("export", "f.mdsl", "--params", "p.npz", "--out", "m.safetensors", "--as", "w")
    assert done.codes == ["note[MD0554]"]
    assert load_file("m.safetensors").keys() == {"key"}
