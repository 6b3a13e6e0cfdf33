"""`meshdsl train` and `evaluate` on tokens: resumed bitwise, refused in time, averaged rightly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.data.token_files import SCANNED
from meshdsl.backends.train.job import ORDERS
from tests.data.tokenizer_files import TEXT, save_tokenizer
from tests.waiting import until

from .command import Cli, write
from .forks import at_work

LANGUAGE = """\
dim batch = 4, seq = 6, vocab = 50, model = 8
mesh two = { d: 2 }
layout data { batch -> d }
layout zero3 { batch -> d, params: vocab -> d, state: vocab -> d }
layout sequence { seq -> d }
layout words { vocab -> d }
program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model]
  param out[model, vocab]
  logits = einsum(embed[vocab = tokens], out -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with adam(lr=0.05)
}
"""
RAW = ("--tokens", "uint16")
MEASURED = {"seconds", "tokens_per_s", "memory"}


@pytest.fixture
def program(cli: Cli) -> str:
    """A program, and two shards of tokens for it in the folder `shards`."""
    tokens = (np.arange(400) ** 2 % 47).astype("<u2")
    Path("shards").mkdir()
    tokens[:250].tofile("shards/train_0.bin")
    tokens[250:].tofile("shards/train_1.bin")
    tokens[:101].tofile("shards/val.bin")
    return write(LANGUAGE)


def train(cli: Cli, *options: str, code: int = 0) -> str:
    done = cli("train", "f.mdsl", "--data", "shards", *RAW, *options)
    assert done.code == code, done.out + done.err
    return done.out + done.err


def params(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def put(path: str, at: int, token: int) -> None:
    """Write one token of a file."""
    with open(path, "r+b") as file:
        file.seek(2 * at)
        file.write(int(token).to_bytes(2, "little"))


def logged(path: str) -> list[dict[str, Any]]:
    records = [json.loads(text) for text in Path(path).read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in records]


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_goes_on_bit_for_bit(order: str, program: str, cli: Cli) -> None:
    given = ("--order", order, "--layout", "zero3", "--eval-every", "4", "--seed", "3")
    train(cli, "--steps", "20", "--out", "whole.npz", "--log", "whole", *given)
    kept = ("--checkpoint", "ck", "--log", "parts", *given)
    train(cli, "--steps", "12", *kept)  # a pass over windows that lie end to end has 16 steps
    printed = train(cli, "--steps", "20", "--resume", "--out", "parts.npz", *kept)
    assert "note" not in printed
    assert logged("whole") == logged("parts")
    whole, parts = params("whole.npz"), params("parts.npz")
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in parts.items()}
    manifest = json.loads(Path("ck/step-20/manifest.json").read_text())
    assert (manifest["meta"]["order"], set(manifest["meta"]["data"])) == (
        *(order, {"train_0.bin", "train_1.bin"}),
    )


def test_a_run_that_was_killed_goes_on_bit_for_bit(program: str, cli: Cli) -> None:
    given = ("--steps", "40", "--layout", "data")
    train(cli, *given, "--out", "whole.npz")
    kept = ("--checkpoint", "ck", "--checkpoint-every", "1", "--log", "log")
    with at_work("train", program, "--data", "shards", *RAW, *given, *kept) as run:
        until(lambda: Path("log").exists() and Path("log").read_text().count("\n") > 2)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    train(cli, *given, "--resume", *kept, "--out", "rest.npz")
    whole, rest = params("whole.npz"), params("rest.npz")
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in rest.items()}


def test_evaluations_need_what_is_held_out(program: str, cli: Cli) -> None:
    given = ("--steps", "2", "--eval-every", "1", "--eval-fraction", "0")
    printed = train(cli, *given, "--checkpoint", "ck", code=2)
    assert "error[MD0511]: nothing is held out to evaluate" in printed
    assert not Path("ck").exists()


def test_a_changed_shard_and_another_order_are_told(program: str, cli: Cli) -> None:
    kept = ("--checkpoint", "ck", "--steps")
    train(cli, *kept, "1")
    np.ones(150, "<u2").tofile("shards/train_1.bin")
    printed = train(cli, *kept, "2", "--resume")
    assert "train_1.bin has other content than when the run was saved" in printed
    printed = train(cli, *kept, "3", "--resume", "--order", "shuffled")
    assert "begun with no `--order`, and goes on with `--order shuffled`" in printed
    np.ones(5, "<u2").tofile("shards/train_2.bin")
    assert "there are 405 samples to train on, the run began with 400" in train(
        cli, *kept, "4", "--resume"
    )


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("engine", ["local", "torchrun", "reference"])
def test_a_token_beyond_the_vocabulary_loses_nothing(engine: str, program: str, cli: Cli) -> None:
    os.truncate("shards/train_0.bin", SCANNED + 2)
    given = ("--order", "sequential", "--layout", "data", "--steps", "9", "--engine", engine)
    train(cli, "--out", "whole.npz", *given)
    at = 6 * 4 * 5 + 20  # in the last row of the sixth step
    sound = np.fromfile("shards/train_0.bin", "<u2", 1, offset=2 * at)[0]
    put("shards/train_0.bin", at, 50)
    kept = ("--checkpoint", "ck", "--log", "log", *given)
    printed = train(cli, "--out", "part.npz", *kept, code=2)
    assert "error[MD0513]: shards/train_0.bin, token 140 is 50, and the program has" in printed
    assert "The parameters of step 5 are in ck/step-5 and part.npz" in printed
    assert len(logged("log")) == 5
    put("shards/train_0.bin", at, sound)
    train(cli, "--out", "rest.npz", "--resume", *kept)
    whole, rest = params("whole.npz"), params("rest.npz")
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in rest.items()}


def test_a_held_out_token_beyond_the_vocabulary_loses_nothing(program: str, cli: Cli) -> None:
    os.truncate("shards/val.bin", SCANNED + 2)
    put("shards/val.bin", 3, 51)
    given = ("--eval-every", "2", "--checkpoint", "ck", "--log", "log")
    printed = train(cli, "--steps", "5", *given, code=2)
    assert "shards/val.bin, token 3 is 51" in printed
    assert "The parameters of step 2 are in ck/step-2" in printed
    assert [record["step"] for record in logged("log")] == [1, 2]


# --- evaluation ----------------------------------------------------------------------------------


def expected(tokens: np.ndarray, weights: dict[str, np.ndarray], seq: int = 6) -> dict[str, float]:
    """The averages over windows that lie end to end, in float64."""
    count = (len(tokens) - 1) // seq
    read, following = (tokens[i : i + count * seq].astype(int) for i in (0, 1))
    logits = weights["embed"].astype(float)[read] @ weights["out"].astype(float)
    top = logits.max(1)
    losses = np.log(np.exp(logits - top[:, None]).sum(1)) + top
    losses -= logits[np.arange(count * seq), following]
    accuracy = np.mean(logits.argmax(1) == following)
    loss = losses.mean()
    return {"loss": loss, "cross_entropy": loss, "accuracy": accuracy, "perplexity": np.exp(loss)}


@pytest.mark.usefixtures("forked_ranks")
def test_averages_are_over_every_window_whatever_the_batches(program: str, cli: Cli) -> None:
    train(cli, "--steps", "20", "--out", "o.npz", "--checkpoint", "ck")
    tokens, weights = np.fromfile("shards/val.bin", "<u2"), params("o.npz")
    wanted = expected(tokens, weights)

    def found(*options: str) -> dict[str, Any]:
        done = cli("evaluate", program, "--data", "shards", *RAW, "--json", *options)
        assert (done.code, done.err) == (0, ""), done.out
        result: dict[str, Any] = json.loads(done.out)
        return result

    # 16 windows: four batches of 4, one of 5 and a short one of 1, one that is short itself.
    cases: list[tuple[int, tuple[str, ...]]] = [(4, ()), (4, ("--layout", "zero3"))]
    cases += [(3, ("--set", "batch=6", "--layout", "words")), (2, ("--set", "batch=15"))]
    cases += [(1, ("--set", "batch=99", "--layout", "sequence")), (3, ("--set", "batch=7"))]
    for number, (batches, options) in enumerate(cases):
        result = found("--params", ("o.npz", "ck")[number % 2], *options)
        assert (result["batches"], result["samples"], result["tokens"]) == (batches, 16, 96)
        assert result["values"] == pytest.approx(wanted, rel=1e-5)
    for engine in ("torchrun", "reference"):
        result = found("--params", "o.npz", "--engine", engine, "--set", "batch=7")
        assert result["values"] == pytest.approx(wanted, rel=1e-5)
    result = found("--params", "o.npz", "--batches", "2", "--set", "batch=3")
    assert result["tokens"] == 36
    assert result["values"] == pytest.approx(expected(tokens[:37], weights), rel=1e-5)
    printed = cli("evaluate", program, "--data", "shards/val.bin", *RAW, "--params", "o.npz").out
    assert f"perplexity {wanted['perplexity']:.4g}" in printed
    assert "averages over 96 tokens in 4 batches\n" in printed


def test_samples_of_arrays_are_averaged_too(cli: Cli) -> None:
    program = write(
        "dim batch = 8, io = 3, classes = 4\nmesh two = { d: 2 }\nlayout data { batch -> d }\n"
        "program p(x[batch, io], label[batch]: i32) {\n  param w[io, classes]\n"
        "  loss = mean(cross_entropy[classes](einsum(x, w -> [batch, classes]), label))\n"
        "  return loss\n  minimize loss with sgd(lr=0.1)\n}\n"
    )
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((19, 3)).astype("f4"), rng.integers(0, 4, 19)
    weights = rng.standard_normal((3, 4)).astype("f4")
    np.savez("d.npz", x=x, label=label)
    np.savez("p.npz", w=weights)
    done = cli("evaluate", program, "--data", "d.npz", "--params", "p.npz", "--json")
    result = json.loads(done.out)
    logits = x.astype(float) @ weights
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(19), label]
    assert (result["batches"], result["samples"]) == (3, 19)
    assert result["values"]["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert result["values"]["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == label))


def test_a_last_batch_that_cannot_be_placed_is_told(program: str, cli: Cli) -> None:
    write(LANGUAGE.replace("seq = 6", "seq = 6, third = batch / 3"))
    train(cli, "--steps", "1", "--out", "o.npz", "--set", "batch=6")
    given = ("--data", "shards", *RAW, "--params", "o.npz", "--set", "batch=6")
    done = cli("evaluate", program, *given)
    assert done.code == 1, done.err
    assert "the last batch has 4 samples, of 6" in done.err
    assert "help: `--batches 2` leaves it out" in done.err
    done = cli("evaluate", program, *given, "--batches", "2")
    assert (done.code, "in 2 batches\n" in done.out) == (0, True)


# --- texts ---------------------------------------------------------------------------------------


def test_documents_are_tokens_that_end(cli: Cli) -> None:
    save_tokenizer(Path("tok"))
    program = write(LANGUAGE.replace("vocab = 50", "vocab = 300"))
    lines = [json.dumps({"text": TEXT * n, "id": n}) for n in range(1, 9)]
    write("\n\n".join(lines) + "\n", "d.jsonl")
    given = ("--tokenizer", "tok", "--eval-every", "8", "--checkpoint", "ck")
    done = cli("train", program, "--data", "d.jsonl", "--steps", "8", *given)
    assert done.code == 0, done.err
    write(TEXT, "e.txt")
    done = cli("evaluate", program, "--data", "e.txt", "--tokenizer", "tok", "--params", "ck")
    assert "perplexity" in done.out
    write(lines[0] + '\n{"body": "x"}\n', "d.jsonl")
    done = cli("train", program, "--data", "d.jsonl", "--steps", "9", "--resume", *given)
    assert (done.code, done.codes) == (2, ["error[MD0582]"])
    assert "d.jsonl, line 2 has no text `text`" in done.err
    assert "help: write `--text-field body`" in done.err
    write("\n".join(lines) + "\n", "d.jsonl")
    save_tokenizer(Path("tok"), end=False)
    Path("tok/tokenizer_config.json").unlink()
    done = cli("train", program, "--data", "d.jsonl", "--steps", "9", "--resume", *given)
    assert "nothing says which token of tok/tokenizer.json ends a document" in done.err
    ended = ("--end-token", "<|endoftext|>")
    done = cli("train", program, "--data", "d.jsonl", "--steps", "9", "--resume", *given, *ended)
    assert (done.code, done.codes) == (0, ["note[MD0517]"])  # the file, for its empty lines
    done = cli("train", program, "--data", "d.jsonl", "--steps", "9", "--tokens", "bytes", *given)
    assert done.codes == ["error[MD0601]"]


MASKED = """\
dim batch = 4, seq = 6, vocab = 50, model = 8
mesh two = { d: 2 }
layout data { batch -> d }
program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32, counts[batch, seq]) {
  param embed[vocab, model]
  param out[model, vocab]
  logits = einsum(embed[vocab = tokens], out -> [batch, seq, vocab])
  loss = sum(cross_entropy[vocab](logits, targets) * counts) / sum(counts)
  return loss
  minimize loss with adam(lr=0.05)
}
"""


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("engine", ["local", "torchrun"])
def test_an_evaluation_says_which_token_is_none(engine: str, program: str, cli: Cli) -> None:
    train(cli, "--steps", "1", "--out", "o.npz")
    os.truncate("shards/val.bin", SCANNED + 2)
    put("shards/val.bin", 6 * 4 + 13, 51)  # of the second device
    given = ("--data", "shards", *RAW, "--params", "o.npz", "--engine", engine)
    done = cli("evaluate", program, *given)
    assert (done.code, done.codes) == (2, ["error[MD0513]"])
    assert "shards/val.bin, token 37 is 51, and the program has room for 50 tokens" in done.err
    Path("shards/train_0.bin").rename("notes.txt")
    Path("shards/train_1.bin").unlink()
    Path("shards/val.bin").unlink()
    assert "shards has no files of tokens" in cli("evaluate", program, *given).err


@pytest.mark.usefixtures("forked_ranks")
def test_padding_counts_nowhere(program: str, cli: Cli) -> None:
    write(MASKED)
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 50, n) for n in rng.integers(0, 20, 30)]
    stream = np.concatenate([np.append(document, 0) for document in documents])
    np.save("t.npy", stream)
    given = ("--data", "t.npy", "--documents", "rows", "--end-token", "0")
    done = cli("train", program, *given, "--steps", "9", "--eval-every", "9", "--out", "o.npz")
    assert done.code == 0, done.err
    weights = {name: array.astype(float) for name, array in params("o.npz").items()}
    losses = list[float]()
    for document in documents:
        ended = np.append(document, 0)
        logits = weights["embed"][ended[:-1]] @ weights["out"]
        chosen = logits[np.arange(len(document)), ended[1:]]
        losses += [*(np.log(np.exp(logits).sum(1)) - chosen)]
    for options in ([], ["--set", "batch=7"], ["--engine", "torchrun"], ["--engine", "reference"]):
        done = cli("evaluate", program, *given, "--params", "o.npz", "--json", *options)
        assert done.code == 0, done.err
        assert json.loads(done.out)["values"] == pytest.approx({"loss": np.mean(losses)}, rel=1e-5)


def test_tokens_of_texts_are_written_once(program: str, cli: Cli) -> None:
    save_tokenizer(Path("tok"))
    write("".join(json.dumps({"body": TEXT * n}) + "\n" for n in range(9)), "d.jsonl")
    named = ("--tokenizer", "tok", "--text-field", "body")
    done = cli("tokenize", "d.jsonl", *named, "--out", "t.npy")
    tokens = np.load("t.npy")
    assert (done.code, done.out) == (0, f"wrote {len(tokens)} tokens to t.npy\n")
    assert (tokens.dtype, (tokens == 0).sum()) == ("uint16", 9)
    given = ("--set", "vocab=300", "--steps", "3", "--log")
    assert cli("train", program, "--data", "t.npy", *given, "a").code == 0
    assert cli("train", program, "--data", "d.jsonl", *named, *given, "b").code == 0
    assert logged("a") == logged("b")
    assert cli("tokenize", "d.jsonl", *named, "--out", "t.npy").codes == ["error[MD0503]"]
    assert cli("tokenize", "d.jsonl", *named, "--out", "t.bin").codes == ["error[MD0602]"]
    assert cli("tokenize", "d.jsonl", "--out", "u.npy").codes == ["error[MD0601]"]
    assert cli("tokenize", "e.txt", *named, "--out", "u.npy").codes == ["error[MD0505]"]
    Path("v").mkdir()
    Path("d.jsonl").rename("v/val.jsonl")  # texts for validation alone are made tokens of, too
    assert cli("tokenize", "v", *named, "--out", "v.npy").code == 0
    assert Path("v.npy").read_bytes() == Path("t.npy").read_bytes()
    Path("v/train.jsonl").write_text("")
    assert cli("tokenize", "v", *named, "--out", "u.npy").codes == ["error[MD0580]"]
    Path("n").mkdir()
    assert (
        "n has no file that ends in .jsonl or .txt"
        in cli("tokenize", "n", *named, "--out", "u.npy").err
    )
    assert not Path("u.npy").exists()
