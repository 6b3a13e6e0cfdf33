"""`plan.train`: what is learned under any layout, and what a plan then computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.train.lock import locked

batch, io, hidden = md.dims(batch=8, io=4, hidden=16)
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
LAYOUTS = ({"batch": "data"}, {"batch": "data", "hidden": "tp"}, "batch:data,io:tp")


@md.program
def net(x: md.Tensor[batch, io], target: md.Tensor[batch, io]):  # type: ignore[valid-type,type-arg]
    w = md.param("w", [io, hidden])
    v = md.param("v", [hidden, io])
    y = md.einsum(md.relu(md.einsum(x, w, out=[batch, hidden])), v, out=[batch, io])
    loss = md.mean(md.square(y - target))
    md.minimize(loss, md.adamw(lr=1e-2))
    return loss


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_lowers_the_loss_alike_under_every_layout(layout) -> None:
    plan = net.compile({"data": 2, "tp": 2}, layout)
    alone = net.compile()
    before = float(plan(X[:8], X[:8])["loss"])
    found, expected = (p.train({"x": X, "target": X}, 30) for p in (plan, alone))
    assert found.losses[0] > 2 * found.losses[-1]
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    assert float(plan(X[:8], X[:8])["loss"]) < before / 2
    assert str(found).startswith("trained 30 steps: loss")


def test_explain_is_about_the_step_and_a_call_about_the_outputs() -> None:
    plan = net.compile({"data": 2}, {"batch": "data"})
    phases = {c["phase"] for c in plan.explain().json["collectives"]}
    assert "backward" in phases or "update" in phases
    assert plan.cost().memory["state"] > plan.cost().memory["params"]
    assert plan(X[:8], X[:8])["loss"].shape == ()


STORED = """
dim batch = 4, model = 6, hidden = 9, layers = 2
program p(x[batch, model], t[batch, model]) {
  y = x
  repeat layers {
    param w[model, hidden]
    param v[hidden, model]
    y = y + einsum(tanh(einsum(y, w -> [batch, hidden])), v -> [batch, model])
  }
  loss = mean((y - t)^2)
  return loss
  minimize loss with adam(lr=0.01)
}
"""
RULES = (
    "batch -> data", "batch -> data, state: model -> data", "batch -> data, params: model -> data",
    "batch -> data, state: model -> data, grads: model -> data", "hidden -> data",
    "hidden -> data, state: model -> data",
)  # fmt: skip


@pytest.mark.parametrize("rules", RULES)
def test_a_resumed_run_has_the_same_bits(rules: str, tmp_path: Path) -> None:
    """Whatever way what is gathered lies in memory: loaded values lie as they are written."""
    (tmp_path / "p.mdsl").write_text(STORED, encoding="utf-8")
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(64, 6)).astype("f4") for name in "xt"}
    program = md.load(tmp_path / "p.mdsl")

    def plan() -> md.Plan:
        return program.compile("data:2", rules.split(", "))

    whole, first, second = plan(), plan(), plan()
    whole.train(data, 6, progress=False)
    first.train(data, 3, checkpoint=str(tmp_path / "ck"), progress=False)
    second.train(data, 6, checkpoint=str(tmp_path / "ck"), resume=True, progress=False)
    for name, array in whole.params.items():
        np.testing.assert_array_equal(np.asarray(second.params[name]), np.asarray(array), name)


def test_a_run_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    data, folder = {"x": X, "target": X}, str(tmp_path / "run")
    whole = net.compile().train(data, 20)
    first = net.compile({"d": 2}, {"batch": "d"})
    first.train(data, 10, checkpoint=folder, checkpoint_every=10)
    rest = net.compile({"d": 4}, {"hidden": "d"}).train(data, 20, checkpoint=folder, resume=True)
    np.testing.assert_allclose(rest.losses, whole.losses[10:], rtol=1e-4)
    (note,) = rest.notes
    assert (note.code, note.severity) == ("MD0519", "note")
    assert "step-10 was saved under another plan" in note.message
    assert "mesh { d: 2 }; now it is" in note.message


def test_a_plan_that_was_found_again_is_the_same_one(tmp_path: Path) -> None:
    """No output, whether it was kept, searched again or is shown by another file."""
    data, folder = {"x": X, "target": X}, str(tmp_path / "run")
    for steps, cache in ((2, True), (4, False), (6, True)):
        plan = net.compile({"data": 2, "tp": 2}, {"batch": "data", "hidden": "tp"}, cache=cache)
        done = plan.train(data, steps, checkpoint=folder, resume=steps > 2)
        assert (done.steps, done.notes) == (steps, ())
    other = net.compile({"data": 2, "tp": 2}, {"batch": "data", "hidden": "tp"}, reduce="deferred")
    (note,) = other.train(data, 8, checkpoint=folder, resume=True).notes
    assert note.code == "MD0519"
    assert note.message == "step-6 was saved under another plan, of the same layout and mesh"


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    plan, data = net.compile(), {"x": X, "target": X}
    with locked(str(tmp_path)), pytest.raises(md.ProgramError, match=r"MD0518.*is in use by proc"):
        plan.train(data, 1, checkpoint=str(tmp_path))
    assert plan.train(data, 1, checkpoint=str(tmp_path)).steps == 1


def test_what_cannot_be_trained_is_refused() -> None:
    @md.program
    def plain(x: md.Tensor[batch, io]):  # type: ignore[valid-type,type-arg]
        return md.sum(x)

    with pytest.raises(md.ProgramError, match="MD0510"):
        plain.compile().train({"x": X}, 3)
    with pytest.raises(md.ProgramError, match="MD05"):
        net.compile().train({"x": X}, 3)


REFUSED: dict[str, dict[str, list[dict[str, Any]]]] = {
    "train": {
        "MD0516": [{"resume": True}, {"checkpoint_every": 1}, {"eval_data": {"x": X, "target": X}}],
        "MD0511": [{"eval_every": 1, "eval_fraction": 0}],
        "MD0602": [{"engine": "lokal"}],
        "MD0604": [
            *({"eval_fraction": f, "eval_every": 1} for f in (-0.1, 2, float("nan"), "a", None)),
            *({name: n} for name in ("eval_every", "checkpoint_every") for n in (-1, 1.5)),
            {"end_token": 0},
            {"tensorboard": 3},
        ],
    },
    "evaluate": {
        "MD0602": [{"engine": "lokal"}],
        "MD0604": [{"batches": 0}, {"batches": 1.5}, {"end_token": 0}, {"characters": 3}],
    },
}


@pytest.mark.parametrize("method", REFUSED)
def test_arguments_are_refused_as_options_are(method: str) -> None:
    plan = net.compile()
    steps = [1] if method == "train" else []
    for code, every in REFUSED[method].items():
        for arguments in every:
            with pytest.raises(md.ProgramError) as caught:
                getattr(plan, method)({"x": X, "target": X}, *steps, **arguments)
            assert [d.code for d in caught.value.diagnostics] == [code], arguments


def test_a_plan_as_a_module_learns_in_a_loop_of_ones_own() -> None:
    import torch

    module = net.compile({"d": 1}, {"batch": "d"}).module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    x, losses = torch.tensor(X[:8]), []
    for _ in range(20):
        loss = module(x=x, target=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.parametrize("argument", ["data", "eval_data"])
def test_arrays_are_called_by_their_argument(argument: str) -> None:
    """They go through a file that no user has seen."""
    good, short = {"x": X, "target": X}, {"x": X, "target": X[:5]}
    data, held = (short, None) if argument == "data" else (good, short)
    with pytest.raises(md.ProgramError) as caught:
        net.compile().train(data, 2, eval_every=1, eval_data=held)
    (found,) = caught.value.diagnostics
    assert f"`{argument}`" in found.message
    assert ".npz" not in found.message


# --- tokens --------------------------------------------------------------------------------------

row, seq, vocab, model = md.dims(row=4, seq=6, vocab=50, model=8)
TOKENS = np.arange(400) ** 2 % 47


@md.program
def lm(tokens: md.i32[row, seq], targets: md.i32[row, seq]):  # type: ignore[valid-type]
    embed = md.param("embed", [vocab, model])
    out = md.param("out", [model, vocab])
    logits = md.einsum(embed.gather(vocab, tokens), out, out=[row, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adam(lr=0.05))
    return loss


def test_tokens_are_an_array_or_a_file_and_evaluated(tmp_path: Path) -> None:
    """Whatever they come from, the batches are the same; a short last batch weighs less."""
    np.save(tmp_path / "t.npy", TOKENS)
    TOKENS.astype("<u2").tofile(tmp_path / "t.bin")
    given: list[tuple[object, dict[str, str]]] = [(TOKENS, {}), (str(tmp_path / "t.npy"), {})]
    given += [(str(tmp_path / "t.bin"), {"tokens": "uint16"})]
    plans = [lm.compile({"d": 2}, {"row": "d"}) for _ in given]
    every = [
        plan.train(data, 5, order="shuffled", eval_every=5, **options)  # type: ignore[arg-type]
        for plan, (data, options) in zip(plans, given, strict=True)
    ]
    assert every[0].losses == every[1].losses == every[2].losses
    assert every[0].evaluated == every[1].evaluated != {}
    found = plans[0].evaluate(TOKENS[:200])
    assert (found.samples, found.batches, found.rest) == (33, 9, 1)
    characters = "".join(chr(ord("0") + n) for n in range(int(TOKENS.max()) + 1))
    (tmp_path / "t.txt").write_text("".join(characters[n] for n in TOKENS[:200]))
    of_text = plans[0].evaluate(str(tmp_path / "t.txt"), characters=characters)
    assert of_text.values == found.values
    with pytest.raises(md.ProgramError, match="characters='abc'"):
        plans[0].evaluate(str(tmp_path / "t.txt"))
    weights = {name: np.asarray(array, float) for name, array in plans[0].params.items()}
    logits = weights["embed"][TOKENS[:198]] @ weights["out"]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(198), TOKENS[1:199]]
    assert found.values["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found.values["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    with pytest.raises(md.ProgramError, match=r"`data`, token 5 is 60"):
        plans[0].train(np.where(np.arange(400) == 5, 60, TOKENS), 1)
    with pytest.raises(md.ProgramError, match="MD0602"):
        plans[0].train(TOKENS, 1, order="any")


OWN = """
dim row = 4, seq = 6, vocab = 50, model = 2
program p(tokens[row, seq]: i32, targets[row, seq]: i32) {
  param embed[vocab, model]
  param out[model, vocab]
  logits = einsum(embed[vocab = tokens], out -> [row, seq, vocab])
  cross_entropy = sum(cross_entropy[vocab](logits, targets))
  return cross_entropy
}
"""


def test_the_perplexity_is_of_no_output_that_happens_to_be_called_cross_entropy(
    tmp_path: Path,
) -> None:
    (tmp_path / "p.mdsl").write_text(OWN)
    found = md.load(tmp_path / "p.mdsl").compile().evaluate(TOKENS)
    assert set(found.values) == {"cross_entropy", "accuracy"}
