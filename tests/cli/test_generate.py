"""`meshdsl generate`: token after token, what the whole sequence says; and `run --params`."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.backends.engines.reference import run_reference
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.cli.app import app
from meshdsl.cli.options import spread_settings
from tests.compiling import named
from tests.data.tokenizer_files import save_tokenizer
from tests.project import ROOT

from .command import Cli, Done, write

SIZES = {"batch": 4, "seq": 12, "model": 16, "hidden": 32, "heads": 2, "key": 8, "layers": 2}
SET = ["--set", *(f"{dim}={size}" for dim, size in SIZES.items())]
LM = (ROOT / "examples/lm.mdsl").read_text(encoding="utf-8")
TEXT = "the cat sat on the mat, the rat sat on the cat, and that was that. " * 8
QUICK = ["--reduce", "immediate"]
"""No search for a plan."""
STEP = ["generate", "lm.mdsl", *SET, "--params", "kept", "--prompt", "the "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model of a few steps."""
    made = tmp_path_factory.mktemp("lm")
    (made / "lm.mdsl").write_text(LM, encoding="utf-8")
    (made / "data.txt").write_text(TEXT)
    files = ["--data", str(made / "data.txt"), "--checkpoint", str(made / "kept")]
    how = ["--tokens", "bytes", "--steps", "12", "--layout", "zero1", "--mesh", "data:2", *QUICK]
    words = spread_settings(["train", str(made / "lm.mdsl"), *SET, *files, *how])
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return made


@pytest.fixture
def trained(cli: Cli, folder: Path) -> Cli:
    """The command line in such a folder."""
    shutil.copytree(folder, ".", dirs_exist_ok=True)
    return cli


def whole(tokens: list[int], params: dict[str, np.ndarray]) -> list[int]:
    """The likeliest token after each, by the program of a whole sequence."""
    text = LM.replace("return loss\n  minimize", "return logits\n  minimize")
    program = named(text, set_dims=SIZES, program="lm", evaluate=True)
    padded = np.zeros((SIZES["batch"], SIZES["seq"]), np.int32)
    padded[:, : len(tokens)] = tokens
    given = {"tokens": padded, "targets": np.zeros_like(padded)}
    found = run_reference(program, given, params)["logits"][0]
    return [int(n) for n in found.argmax(-1)]


def texts(done: Done) -> list[dict[str, Any]]:
    """The texts that `--json` prints."""
    found: list[dict[str, Any]] = json.loads(done.out)["texts"]
    return found


@pytest.mark.usefixtures("forked_ranks")
def test_token_by_token_as_the_whole_sequence(trained: Cli) -> None:
    """Under every layout, on both engines; sampled, too."""
    from meshdsl.backends.train.checkpoint import read_block
    from meshdsl.backends.train.exported_params import checkpoint_at

    (first,) = texts(trained(*STEP, "--json"))
    assert first["text"].startswith("the ")
    assert first["end"] == "length"
    assert len(first["tokens"]) == SIZES["seq"] + 1 - len("the ")
    found = checkpoint_at("kept")
    specs = {n: s._replace(split={}) for n, s in found.tensors.items()}
    params = {n: read_block(found, n, spec, {}, 0).numpy() for n, spec in specs.items()}
    tokens = [*b"the ", *first["tokens"]]
    assert whole(tokens[:-1], params)[3:] == tokens[4:]
    sampled = ["--temperature", "0.8", "--seed", "5"]
    (other,) = texts(trained(*STEP, *sampled, "--json"))
    assert other["tokens"] != first["tokens"]
    for layout in ("megatron", "sequence", "zero3"):
        split = ["--layout", layout, "--mesh", "data:2,tp:2", "--json"]
        how, expected = ([], first) if layout != "megatron" else (sampled, other)
        assert texts(trained(*STEP, *split, *how)) == [expected]
    processes = ["--layout", "megatron", "--mesh", "data:1,tp:2", "--engine", "torchrun"]
    more = ["--prompt", "a cat", "--stop", first["text"][-3:], "--steps", "8", "--beams", "2"]
    assert trained(*STEP, *processes, *more).out == trained(*STEP, *more).out
    if os.environ.get("MESHDSL_CASES"):
        processes = ["--layout", "zero3", "--mesh", "data:2", "--engine", "torchrun"]
        assert texts(trained(*STEP, *processes, *sampled, "--json")) == [other]


def test_a_forward_program_runs_on_a_checkpoint(trained: Cli) -> None:
    """States that it lacks begin anew; a step of it, and a file, do as well."""
    run = ["run", "lm.mdsl", *SET, "--mesh", "data:2"]
    results = [
        trained(*run, "--params", where, "--layout", layout, "--verify")
        for where, layout in (("kept", "data_parallel"), ("kept/step-12", "zero3"))
    ]
    assert [done.code for done in results] == [0] * 2
    losses = {_loss(done.out) for done in results}
    assert len(losses) == 1
    assert _loss(trained(*run).out) not in losses
    assert trained(*run, "--program", "lm_step", "--params", "kept").code == 0


def _loss(out: str) -> str:
    """The loss that `run` shows, to some digits."""
    found = re.search(r"^loss +f32\[\] +f32\[\] +(\d\.\d{4})", out, re.M)
    assert found is not None, out
    return found[1]


def test_texts_in_their_order(trained: Cli) -> None:
    """Several prompts, of options and of a file, to a stop string and an end token."""
    write("a\u2028c\r\nthat\n", "prompts.txt")
    step = [*STEP, "--prompts", "prompts.txt", "--steps", "5", "--temperature", "1", "--top-k", "9"]
    found = texts(trained(*step, "--json"))
    assert [t["prompt"] for t in found] == ["the ", "a\u2028c", "that"]
    done = trained(*step)
    assert done.out == "\n\n".join(t["text"] for t in found) + "\n"
    assert re.fullmatch(
        r"15 tokens of 3 texts in .* s: .* tokens/s, the first after .* s\n", done.err
    )
    stop = found[2]["text"][-1]
    ended = texts(
        trained(*step, "--json", "--stop", stop, "--end-token", str(found[1]["tokens"][0]))
    )
    assert (ended[1]["end"], ended[1]["text"]) == ("end token", "a\u2028c")
    assert (ended[2]["end"], ended[2]["text"]) == ("stop string", found[2]["text"].split(stop)[0])


def test_a_folder_of_a_model_has_its_tokenizer(cli: Cli) -> None:
    """Which also says what ends a text, unless an option does."""
    save_tokenizer(Path("hf"))
    sizes = {**SIZES, "vocab": 300}
    types = {str(p.value.name): p.value.type for p in named(LM, set_dims=sizes).params}
    lines = "\n".join(f'{n}: "{n}"[{", ".join(t.names)}]' for n, t in types.items())
    write(f"{LM}weights hf {{\n{lines}\n}}\n", "lm.mdsl")
    draw = np.random.default_rng(2)
    arrays = {n: draw.normal(size=t.shape).astype("f4") for n, t in types.items()}
    save_file(arrays, "hf/model.safetensors")
    step = ["generate", "lm.mdsl", *SET, "vocab=300", "--params", "hf", "--json"]
    step += ["--prompt", "the cat", "--temperature", "30", "--steps", "6"]
    (one,) = texts(cli(*step))
    assert one["text"].startswith("the cat")
    assert len(one["tokens"]) == 6
    end = ["--end-token", str(one["tokens"][2])]
    assert [texts(cli(*step, *end))[0][k] for k in ("tokens", "end")] == [
        one["tokens"][:3],
        "end token",
    ]
    assert texts(cli(*step, "--tokens", "bytes"))[0]["prompt"] == "the cat"

    # So has a checkpoint of a run on texts, or one that began with the model.
    write("the cat sat on the mat. " * 20, "t.txt")
    train = ["train", "lm.mdsl", *SET, "vocab=300", "--steps", "1", "--data", "t.txt", *QUICK]
    for name, given in {"a": ["--tokenizer", "hf"], "b": ["--params", "hf"]}.items():
        more = ["--tokens", "bytes"] if name == "b" else []
        assert cli(*train, *given, *more, "--checkpoint", name).code == 0
        assert Path(name, "model", "tokenizer.json").is_file()
    step[step.index("hf")] = "a/step-1"
    (found,) = texts(cli(*step))
    (wanted,) = texts(cli(*step, "--tokenizer", "hf"))
    assert found["tokens"] == wanted["tokens"]
    step[step.index("a/step-1")] = "b"  # trained on bytes
    (found,) = texts(cli(*step))
    (wanted,) = texts(cli(*step, "--tokens", "bytes"))
    assert found["tokens"] == wanted["tokens"]


def test_a_model_of_tokens_that_nobody_wrote_as_text(cli: Cli) -> None:
    """Trained on a file of numbers, it continues numbers; what says nothing is refused."""
    write(LM, "lm.mdsl")
    (np.arange(400) ** 2 % 61).astype("uint16").tofile("t.bin")
    train = ["train", "lm.mdsl", *SET, "--data", "t.bin", "--tokens", "uint16", "--steps", "1"]
    assert cli(*train, "--checkpoint", "kept", "--out", "kept.npz", *QUICK).code == 0
    step = ["generate", "lm.mdsl", *SET, "--steps", "3"]
    (one,) = texts(cli(*step, "--params", "kept", "--prompt", "5  6 70", "--json"))
    shown = " ".join(str(n) for n in (5, 6, 70, *one["tokens"]))
    assert (one["prompt"], one["text"]) == ("5 6 70", shown)
    done = cli(*step, "--params", "kept.npz", "--prompt", "5 6 70")
    assert done.codes == ["error[MD0626]"]
    assert "--tokens numbers" in done.err
    numbers = ["--tokens", "numbers", "--params", "kept.npz"]
    assert cli(*step, *numbers, "--prompt", "5 6 70").out == f"{shown}\n"
    done = cli(*step, *numbers, "--prompt", "5 six")
    assert done.codes == ["error[MD0626]"]
    assert "'six'" in done.err
    model = md.load("lm.mdsl", program="lm_step", dims=SIZES).compile()
    model.params = dict(np.load("kept.npz"))
    assert model.generate("5 6 70", 3, tokens="numbers").texts[0].text == shown[len("5 6 70") :]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--prompt", "the cat sat on the mat"], "error[MD0625]"),
        (["--prompt", "the", "--steps", "11"], "error[MD0625]"),
        (["--prompt", ""], "error[MD0626]"),
        (["--tokens", "chars"], "error[MD0626]"),
        (["--set", "hidden=16"], "error[MD0504]"),
        (["--set", "vocab=100", "--prompt", "x"], "error[MD0626]"),
        (["--program", "lm"], "error[MD0624]"),
        (["--params", "."], "error[MD0505]"),
        (["--params", "n" * 300], "error[MD0505]"),
        (["--engine", "reference"], "error[MD0602]"),
        (["--prefill", "lm"], "error[MD0624]"),
        (["--prefill", "lm_step"], "error[MD0624]"),
        (["--prompts", "gone"], "error[MD0626]"),
        (["--end-token", "256"], "error[MD0627]"),
        (["--end-token", "ab"], "error[MD0627]"),
        (["--tokenizer", "gone"], "error[MD0583]"),
        (["--tokenizer", "gone", "--tokens", "bytes"], "error[MD0601]"),
        (["--stop", ""], "error[MD0627]"),
        (["--top-k", "4"], "error[MD0627]"),
        (["--top-p", "0.5"], "error[MD0627]"),
        (["--top-p", "0", "--temperature", "1"], "error[MD0627]"),
        (["--top-p", "1.5", "--temperature", "1"], "error[MD0627]"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_what_cannot_be_generated(cli: Cli, arguments: list[str], code: str) -> None:
    write(LM, "lm.mdsl")
    types = {str(p.value.name): p.value.type for p in named(LM, set_dims=SIZES).params}
    write_npz("kept.npz", {n: np.zeros(t.shape, np.float32) for n, t in types.items()})
    given = dict(zip(STEP[-4::2], STEP[-3::2], strict=True)) | {"--params": "kept.npz"}
    given |= {} if "--tokenizer" in arguments else {"--tokens": "bytes"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    done = cli("generate", "lm.mdsl", *SET, *(word for pair in given.items() for word in pair))
    assert done.codes == [code], done.err
    assert "help: " in done.err


def test_programs_of_another_form(cli: Cli) -> None:
    text = """
dim vocab = 9, c = 3
program none(t[]: i32, pos[]: i32) {
  param e[vocab]
  y = e * cast(t + pos, f32)
  return y
}
program single(t[]: i32) {
  param e[vocab]
  return e
}
program wide(t[]: i32, pos[]: i32) {
  param e[vocab, c]
  e := e * 2
  y = e + 1
  return y
}
program places(t[]: i32, pos[c]: i32) {
  param e[vocab]
  e := e + 1
  return e
}
"""
    np.savez("p.npz", e=np.zeros(9))
    done = cli("generate", write(text), "--params", "p.npz", "--prompt", "x", "--tokens", "bytes")
    assert done.codes == ["error[MD0624]"]
    for name in ("none", "single", "wide", "places"):
        assert f"`{name}`: " in done.err
