"""`meshdsl train` from end to end: layouts, resuming, texts, trouble, what it prints."""

from __future__ import annotations

import io
import json
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from meshdsl.report.training_progress import Bar, PlainLines, clock
from tests.waiting import until

from .command import Cli, write
from .forks import Fork, at_work

CLASSIFY = """\
dim batch = 16, io = 8, hidden = 12, classes = 4
mesh two = { d: 2 }
mesh four = { d: 2, t: 2 }
layout data { batch -> d }
layout model { hidden -> d }
layout zero1 { batch -> d, state: hidden -> d }
layout zero3 { batch -> d, params: hidden -> d, state: hidden -> d }
layout square { batch -> d, hidden -> t }
program classify(x[batch, io], label[batch]: i32) {
  param w1[io, hidden]
  param b1[hidden] = zeros()
  param w2[hidden, classes]
  h = relu(einsum(x, w1 -> [batch, hidden]) + b1)
  logits = einsum(h, w2 -> [batch, classes])
  loss = mean(cross_entropy[classes](logits, label))
  right = argmax[classes](logits) == label
  accuracy = mean(cast(right, "f32"))
  return loss, accuracy
  minimize loss with adam(lr=0.02)
}
"""
LAYOUTS = {
    "data": ["--mesh", "two", "--layout", "data"],
    "model": ["--mesh", "two", "--layout", "model"],
    "zero1": ["--mesh", "two", "--layout", "zero1"],
    "zero3": ["--mesh", "two", "--layout", "zero3"],
    "zero3 on four": ["--mesh", "d:4", "--layout", "zero3"],
    "square": ["--mesh", "four", "--layout", "square"],
}
ONE = ["--mesh", "d:1", "--layout", "data"]


@pytest.fixture
def points(cli: Cli) -> str:
    """A file of points in four classes; the program lies beside it."""
    rng = np.random.default_rng(1)
    label = rng.integers(0, 4, 200)
    x = rng.standard_normal((200, 8)) + 2 * rng.standard_normal((4, 8))[label]
    np.savez("d.npz", x=x.astype(np.float32), label=label)
    return write(CLASSIFY)


def logged(path: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in Path(path).read_text().splitlines()]


def curve(path: str) -> list[list[float]]:
    return [[record["loss"], record["accuracy"]] for record in logged(path)]


def train(cli: Cli, *options: str, code: int = 0) -> str:
    done = cli("train", "f.mdsl", "--data", "d.npz", *options)
    assert done.code == code, done.out + done.err
    return done.out + done.err


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_as_one_device_does(layout: str, points: str, cli: Cli) -> None:
    train(cli, "--steps", "30", "--log", "one", *ONE)
    train(cli, "--steps", "30", "--log", "many", *LAYOUTS[layout])
    np.testing.assert_allclose(curve("many"), curve("one"), rtol=1e-4, atol=1e-4)
    assert curve("one")[-1][0] < 0.5 * curve("one")[0][0]


def test_a_process_of_torchrun_does_not_train_alone(
    points: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun of one process may start it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = train(cli, "--steps", "1", *ONE, code=3)
    assert "error[MD0725]" in told
    assert "examples/train_module.py" in told
    monkeypatch.setenv("WORLD_SIZE", "1")
    train(cli, "--steps", "1", *ONE)


def test_a_run_goes_on_under_other_meshes_and_layouts(points: str, cli: Cli) -> None:
    given = ("--eval-every", "10", "--seed", "3")
    train(cli, "--steps", "40", "--log", "whole", *given, *ONE)
    kept = ("--log", "parts", "--checkpoint", "ck", *given)
    train(cli, "--steps", "10", *kept, *LAYOUTS["square"])
    train(cli, "--steps", "20", "--resume", *kept, *LAYOUTS["zero3 on four"])
    train(cli, "--steps", "30", "--resume", *kept, *LAYOUTS["model"])
    printed = train(cli, "--steps", "40", "--resume", *kept, "--out", "o.safetensors", *ONE)
    assert "going on after step 30" in printed
    assert [record["step"] for record in logged("parts")] == list(range(1, 41))
    for one, other in zip(logged("whole"), logged("parts"), strict=True):
        for name in set(one) - {"seconds", "samples_per_s", "memory"}:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-4), name


def test_the_parameters_that_come_out_go_in_again(points: str, cli: Cli) -> None:
    for out in ("o.npz", "o.safetensors"):
        train(cli, "--steps", "20", "--out", out, *LAYOUTS["zero3"])
        train(cli, "--steps", "1", "--params", out, "--log", f"{out}.log", *LAYOUTS["square"])
    train(cli, "--steps", "21", "--log", "whole", *ONE)
    first, second = (curve(f"{out}.log")[0] for out in ("o.npz", "o.safetensors"))
    assert first == second
    assert first[0] < 0.5 * curve("whole")[0][0]


def test_double_precision_is_trained_in_double_precision(points: str, cli: Cli) -> None:
    for name, layout in {"one": ONE, "many": LAYOUTS["square"]}.items():
        train(cli, "--steps", "20", "--log", name, "--dtype", "f64", *layout)
    np.testing.assert_allclose(curve("many"), curve("one"), rtol=1e-9, atol=1e-12)


# --- the reference engine ------------------------------------------------------------------------

STAGED = """\
dim batch = 16, io = 8, out = io, layers = 4
mesh four = { pipe: 4 }
layout late { layers -> pipe } with pipedream[batch](8)
program p(x[batch, io]) {
  repeat layers {
    param w[io, out]
    x = tanh(einsum(x, w -> [batch, out]))[out -> io]
  }
  loss = mean(square(x - 0.5))
  return loss
  minimize loss with adam(lr=0.01)
}
"""
REFERENCE = ("--engine", "reference")


def test_the_reference_learns_as_devices_do(points: str, cli: Cli) -> None:
    given = ("--steps", "12", "--eval-every", "5", "--dtype", "f64", *LAYOUTS["square"])
    train(cli, "--log", "devices", *given)
    printed = train(cli, "--log", "reference", *given, *REFERENCE)
    assert "one device, numpy float64" in printed
    for one, other in zip(logged("devices"), logged("reference"), strict=True):
        for name in set(one) - {"seconds", "samples_per_s", "memory"}:
            assert other[name] == pytest.approx(one[name], rel=1e-9), name


@pytest.mark.usefixtures("points")
def test_stages_that_update_on_the_way_are_trained_and_resumed(cli: Cli) -> None:
    write(STAGED)
    train(cli, "--steps", "6", "--log", "whole", "--eval-every", "2", *REFERENCE)
    kept = ("--log", "parts", "--checkpoint", "ck", "--eval-every", "2", *REFERENCE)
    train(cli, "--steps", "2", *kept)
    train(cli, "--steps", "6", "--resume", *kept)
    measured = {"seconds", "samples_per_s", "memory"}
    whole, parts = (
        [{k: v for k, v in record.items() if k not in measured} for record in logged(name)]
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert "grad_norm" not in whole[0]
    assert whole[-1]["loss"] < whole[0]["loss"]
    train(cli, "--steps", "6", "--log", "devices", "--eval-every", "2")
    for one, other in zip(whole, logged("devices"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
def test_processes_learn_as_threads_do(points: str, cli: Cli) -> None:
    given = ("--steps", "12", "--eval-every", "5", *LAYOUTS["zero3"])
    train(cli, "--log", "threads", "--out", "a.safetensors", *given)
    train(cli, "--log", "processes", "--out", "b.safetensors", "--engine", "torchrun", *given)
    np.testing.assert_allclose(curve("processes"), curve("threads"), rtol=1e-5, atol=1e-6)
    sizes = [Path(name).stat().st_size for name in ("a.safetensors", "b.safetensors")]
    assert sizes[0] == sizes[1]


def test_several_batches_of_a_step_are_one_large_batch(points: str, cli: Cli) -> None:
    write(CLASSIFY.replace("batch = 16", "batch = 8").replace("lr=0.02", "lr=0.02, accumulate=2"))
    train(cli, "--steps", "20", "--log", "parts", *LAYOUTS["zero3"])
    write(CLASSIFY)
    train(cli, "--steps", "20", "--log", "whole", *ONE)
    np.testing.assert_allclose(curve("parts"), curve("whole"), rtol=1e-4, atol=1e-4)
    assert [record["samples_per_s"] > 0 for record in logged("parts")] == [True] * 20


def test_parameters_in_few_bits_come_out_in_all_that_are_kept(points: str, cli: Cli) -> None:
    write(CLASSIFY.replace("lr=0.02", 'lr=0.02, compute="bf16"'))
    given = ("--eval-every", "10", *LAYOUTS["zero3"])
    train(cli, "--steps", "20", "--out", "o.npz", "--log", "log", *given)
    with np.load("o.npz") as out:
        assert (out["w1"].view(np.uint32) & 0xFFFF).any()  # more digits than bf16 has
    evaluated = [record["eval_loss"] for record in logged("log") if "eval_loss" in record]
    assert evaluated[-1] < evaluated[0]


# --- what is printed -----------------------------------------------------------------------------


def test_what_a_run_prints(points: str, cli: Cli) -> None:
    printed = train(
        cli, "--steps", "20", "--eval-every", "10", "--checkpoint", "ck", "--out", "o.npz"
    )
    lines = printed.splitlines()
    assert lines[0] == "classify under layout data on { d: 2 }: 2 devices, engine local"
    assert re.match(r"memory: [\d.]+ \w+ predicted per device; measured is the peak of ", lines[1])
    assert lines[2].startswith("step 1/20: loss ")
    assert re.search(r", lr [\d.e-]+, grad norm [\d.]+, memory [\d.,]+ [MG]iB, .* left$", lines[2])
    assert sum(line.startswith("step 10: held out: loss ") for line in lines) == 1
    assert "step 20: wrote ck/step-20" in lines
    assert lines[-1] == "wrote o.npz"
    again = train(cli, "--steps", "20", "--checkpoint", "ck", "--resume")
    assert "nothing to do: step 20 was reached before" in again


def test_json_is_all_that_is_printed(points: str, cli: Cli) -> None:
    done = cli("train", points, "--data", "d.npz", "--steps", "6", "--eval-every", "3", "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert (found["program"], found["engine"], found["layout"]) == ("classify", "local", "data")
    assert (found["ended"], found["start"], found["steps"], found["samples"]) == (
        *("finished", 0, 6),
        96,
    )
    assert set(found["eval"]) == set(found["values"]) == {"loss", "accuracy"}
    wrong = cli("train", points, "--data", "none.npz", "--steps", "6", "--json")
    assert wrong.code == 2
    assert json.loads(wrong.out)["diagnostics"][0]["code"] == "MD0505"


FLAT = """\
dim batch = 4, m = 2
program flat(x[batch, m]) {
  param w[m]
  loss = mean(relu(x * w - SHIFT))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize(("shift", "steps"), [("100.0", [1]), ("-100.0", [])])
def test_a_gradient_that_is_zero_is_said_once(shift: str, steps: list[int], cli: Cli) -> None:
    write(FLAT.replace("SHIFT", shift), "flat.mdsl")
    np.savez("flat.npz", x=np.random.default_rng(0).standard_normal((8, 2)).astype("f4"))
    done = cli("train", "flat.mdsl", "--data", "flat.npz", "--steps", "3")
    assert done.code == 0, done.err
    notes = [line for line in done.err.splitlines() if "MD0507" in line]
    assert notes == [
        f"note[MD0507]: every gradient of step {step} is 0: no parameter learns from it"
        for step in steps
    ]


MEMORY = {"predicted": 5 << 20, "memory_of": "GPU 0"}
MEASURED = {"measured": {"lr": 3e-4, "grad_norm": 1.25, "memory": 3 << 30}}
EVENTS: list[dict[str, Any]] = [
    {"kind": "begin", "start": 2, "steps": 4, "amount": 10, "unit": "tokens", **MEMORY},
    {"kind": "step", "step": 3, "values": {"loss": 1.23456, "n": 7}, "seconds": 0.5, **MEASURED},
    {"kind": "eval", "step": 3, "values": {"loss": 2.0}},
    {"kind": "step", "step": 4, "values": {"loss": 1.0, "n": 7}, "seconds": 1.0, **MEASURED},
    {"kind": "checkpoint", "step": 4, "path": "ck/step-4"},
    {"kind": "watch", "first": 3, "last": 4},
    {"kind": "note", "code": "MD0517", "text": "", "severity": "note", "help": ""},
]


@pytest.mark.parametrize("kind", [PlainLines, Bar])
def test_what_is_shown_of_a_run(kind: Any) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=kind is Bar, highlight=False)
    shown = kind(console, "a title")
    for event in EVENTS:
        shown.tell(event)
    shown.close()
    text = out.getvalue()
    parts = ["a title", "going on after step 2", "loss 1, n 7", "20 tokens/s", "0:00 left"]
    parts += ["5 MiB predicted", "lr 0.0003, grad norm 1.25, memory 3 GiB"]
    for part in (*parts, "step 3: held out: loss 2", "wrote ck/step-4", "steps 3 to 4 again"):
        assert part in text


def test_time_is_shown_as_a_clock() -> None:
    assert [clock(s) for s in (0.2, 61, 3599.6, 7384)] == ["0:00", "1:01", "1:00:00", "2:03:04"]


# --- a text --------------------------------------------------------------------------------------

LANGUAGE = """\
dim batch = 8, seq = 12, vocab = 16, model = 16
mesh two = { d: 2 }
layout data { batch -> d }
layout words { vocab -> d }
layout sequence { seq -> d }
program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model]
  param out[model, vocab]
  h = embed[vocab = tokens]
  logits = einsum(h, out -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with adam(lr=0.05)
}
"""


def test_a_language_model_learns_a_text(cli: Cli) -> None:
    path = write(LANGUAGE)
    write("the cat sat on the mat; the dog sat on the log. " * 30, "t.txt")
    curves = []
    for layout in ("data", "words", "sequence"):
        done = cli(
            *("train", path, "--data", "t.txt", "--steps", "60", "--layout", layout),
            *("--log", layout, "--eval-every", "60"),
        )
        assert done.code == 0, done.err
        assert "tokens/s" in done.out
        curves.append([record["loss"] for record in logged(layout)])
        assert curves[-1][-1] < 1.6
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-4)


def test_characters_that_do_not_fit_are_told(cli: Cli) -> None:
    path = write(LANGUAGE)
    write("the quick brown fox jumps over the lazy dog " * 9, "t.txt")
    done = cli("train", path, "--data", "t.txt", "--steps", "3")
    assert (done.code, done.codes) == (2, ["error[MD0513]"])
    assert "27 different characters, and the program has room for 16 tokens" in done.err
    assert cli("train", path, "--data", "t.txt", "--steps", "3", "--set", "vocab=28").code == 0
    done = cli("train", path, "--data", "t.txt", "--steps", "3", "--tokens", "bytes")
    assert (done.code, done.codes) == (2, ["error[MD0513]"])


def test_a_resumed_run_keeps_the_numbers_of_its_characters(cli: Cli) -> None:
    path = write(LANGUAGE)
    write("abcdefgh" * 30, "t.txt")
    write("bdfh" * 60, "u.txt")
    write("bdfx" * 60, "v.txt")
    kept = ("--checkpoint", "ck")
    assert cli("train", path, "--data", "t.txt", "--steps", "2", *kept).code == 0
    done = cli("train", path, "--data", "u.txt", "--steps", "4", "--resume", *kept)
    assert done.code == 0, done.err
    done = cli("train", path, "--data", "v.txt", "--steps", "6", "--resume", *kept)
    assert (done.code, done.codes) == (2, ["error[MD0513]"])
    assert "'x', character 3, is not among those trained on" in done.err


# --- trouble -------------------------------------------------------------------------------------

EXPLODES = CLASSIFY.replace("adam(lr=0.02)", "sgd(lr=1e6)").replace(
    "mean(cross_entropy[classes](logits, label))", "mean(square(logits))"
)


def test_a_loss_that_is_no_number_names_step_and_line(points: str, cli: Cli) -> None:
    write(EXPLODES)
    kept = ("--checkpoint", "ck", "--checkpoint-every", "1", "--log", "log")
    printed = train(cli, "--steps", "50", *kept, code=3)
    assert "error[MD0720]: the loss is " in printed
    assert "running steps" in printed
    assert "--> f.mdsl:" in printed
    assert "the last checkpoint is ck/step-" in printed
    last = logged("log")[-1]
    assert last["loss"] is None
    assert f"in step {last['step']}; `" in printed
    printed = train(cli, "--steps", "50", *kept, "--resume", code=3)
    assert f"going on after step {last['step'] - 1}" in printed


def test_seed_and_values_of_a_resumed_run_are_its_own(points: str, cli: Cli) -> None:
    kept = ("--checkpoint", "ck")
    train(cli, "--steps", "2", "--seed", "5", *kept)
    assert "begun with seed 5" in train(
        cli, "--steps", "3", "--seed", "6", "--resume", *kept, code=2
    )
    assert "error[MD0515]" in train(cli, "--steps", "3", *kept, code=2)
    np.savez("p.npz", w=np.ones(3))
    both = train(cli, "--steps", "3", "--params", "p.npz", "--resume", *kept, code=2)
    assert "error[MD0516]" in both
    train(cli, "--steps", "3", "--seed", "5", "--resume", *kept)
    printed = train(cli, "--steps", "1", "--force", *kept)
    assert "going on" not in printed


def test_a_checkpoint_of_another_program_is_refused(points: str, cli: Cli) -> None:
    train(cli, "--steps", "2", "--checkpoint", "ck")
    printed = train(
        cli, "--steps", "3", "--checkpoint", "ck", "--resume", "--set", "hidden=16", code=2
    )
    assert "error[MD0541]" in printed


WRONG: dict[str, tuple[str, ...]] = {
    "--engine cloud": ("MD0602", "write `--engine local`, `--engine torchrun`"),
    "--tokens words": ("MD0602", "there are chars, bytes"),
    "--batch bach": ("MD0602", "did you mean `batch`?"),
    "--out o.txt": ("MD0602", "--out o.npz"),
    "--out .": ("MD0602", "`--out .`: parameters are", "--out params.npz"),
    "--out ..": ("MD0602", "`--out ..`: parameters are", "--out ../params.npz"),
    "--out none/o.npz": ("MD0502", "there is no folder none"),
    "--out f.mdsl --force": ("MD0602", "parameters are written as .npz"),
    "--log d.npz": ("MD0503", "add `--force`"),
    "--checkpoint f.mdsl": ("MD0502", "cannot be used for checkpoints"),
    "--resume": ("MD0516", "leave out `--resume`", "`--checkpoint DIR`"),
    "--resume --checkpoint ck": ("MD0514", "there is no checkpoint in ck"),
    "--checkpoint-every 3": ("MD0516", "leave out", "`--checkpoint DIR`"),
    "--eval-data d.npz": ("MD0516", "leave out", "`--eval-every 100`"),
    "--eval-every 2 --eval-data none.npz": ("MD0505", "cannot read none.npz"),
    "--eval-every 2 --eval-fraction 0.05": ("MD0511", "0.05 of d.npz is 10 samples"),
    "--eval-every 2 --eval-fraction 0.95": ("MD0511", "holds 10 samples to train on"),
    "--params none.npz": ("MD0505", "cannot read none.npz"),
    "--params d.npz": ("MD0504", "the program has no such name"),
    "--set batch=256": ("MD0511", "holds 200 samples to train on, and a step takes 256"),
    "--eval-fraction 2": ("MD0604", "--eval-fraction"),
    "--mesh d:2000000000": ("MD0310", "does not divide"),
    "--mesh d:2048 --set batch=2048": ("MD0704", "at most 1,024 devices"),
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_commands(options: str, points: str, cli: Cli) -> None:
    code, *words = WRONG[options]
    before = set(Path().iterdir())
    done = cli("train", points, "--data", "d.npz", "--steps", "3", *options.split())
    assert done.codes == [f"error[{code}]"]
    assert done.code == (1 if code == "MD0310" else 2)
    assert all(each in done.err for each in words), done.err
    assert "help: " in done.err
    assert set(Path().iterdir()) == before


# --- stopped -------------------------------------------------------------------------------------


def training(points: str, *options: str | Path) -> AbstractContextManager[Fork]:
    """A run beside the test, in its folder, that writes a log and goes on until it is stopped."""
    return at_work("train", points, "--data", "d.npz", "--steps", 10**8, "--log", "log", *options)


def has_logged(steps: int = 1) -> bool:
    """Whether a run has made some steps."""
    return Path("log").exists() and Path("log").read_text().count("\n") >= steps


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_run_with_a_checkpoint(points: str, cli: Cli) -> None:
    """And with the parameters of the last step in the file that was asked for."""
    with training(points, "--checkpoint", "ck", "--out", "w.npz") as process:
        until(has_logged)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "wrote w.npz" in out
    steps = len(logged("log"))
    assert f"note[MD0722]: stopped after step {steps}: ck/step-{steps}" in err
    assert "--resume" in err
    assert f"wrote ck/step-{steps}" in out
    train(cli, "--steps", str(steps + 2), "--resume", "--checkpoint", "ck", "--log", "log")
    assert [record["step"] for record in logged("log")] == list(range(1, steps + 3))


def test_a_run_killed_before_its_first_checkpoint_begins_anew_at_the_first_try(
    points: str, cli: Cli
) -> None:
    """`--resume` says what to write in its place, as the log that is there is not overwritten."""
    with training(points, "--checkpoint", "ck") as process:
        until(has_logged)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    given = ("--steps", "2", "--checkpoint", "ck", "--log", "log")
    said = train(cli, *given, "--resume", code=2)
    assert "error[MD0514]: there is no checkpoint in ck" in said
    assert "help: begin anew: `--force` in place of `--resume` replaces log" in said
    train(cli, *given, "--force")
    assert [record["step"] for record in logged("log")] == [1, 2]


@pytest.mark.parametrize("more", [(), ("--force",), ("--log", "new")])
def test_with_nothing_to_replace_resume_is_left_out(
    more: tuple[str, ...], points: str, cli: Cli
) -> None:
    Path("log").touch()
    log = () if "--log" in more else ("--log", "log") if more else ()
    given = ("--steps", "1", "--checkpoint", "ck", *log, *more)
    assert "help: leave out `--resume`" in train(cli, *given, "--resume", code=2)
    train(cli, *given)
