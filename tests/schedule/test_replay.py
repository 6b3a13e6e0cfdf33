"""The reference engine carries tables out: against training written by hand, version by version.

The network is x -> tanh(x a), then layers x -> tanh(x w + b), then a mean square. The oracle knows
no table: it has the recursions of the papers, one micro-batch after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.asynchronous_reference import Replay, Replayed, replay_of
from meshdsl.backends.engines.reference import made_up, reference_step, whole_specs
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.schedule.table import Action
from tests.covering import covered

MICRO, SIZE, WIDTH, LAYERS = 24, 2, 3, 8
TEXT = """
dim batch = BATCH, model = 3, out = model, l = 8
mesh m = { pipe: 4 }
layout pp { l -> pipe } with SCHEDULE
SCHEDULES
program p(x[batch, model], t[batch, model]) {
  param a[model, out] = normal(0.6)
  x = tanh(einsum(x, a -> [batch, out]))[out -> model]
  repeat l {
    param w[model, out] = normal(0.6)
    param b[out] = normal(0.3)
    x = tanh(einsum(x, w -> [batch, out]) + b)[out -> model]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""
Arrays = dict[str, Array]
Versions = Callable[[int, int], int]
"""The version that a micro-batch reads on a stage."""


def compiled(
    schedule: str, opt: str = "sgd(0.2)", pipe: int = 4, text: str = TEXT, batch: int = MICRO * SIZE
) -> Compilation:
    for name, value in {"BATCH": str(batch), "SCHEDULES": "", "SCHEDULE": schedule}.items():
        text = text.replace(name, value)
    options = Options(mesh=f"pipe:{pipe}", cache=False)
    return Compilation(Source("p.mdsl", text.replace("OPT", opt)), options, Diagnostics())


def values(made: Compilation) -> tuple[Arrays, Arrays]:
    inputs, params = whole_specs(made.named, draws(made.named))
    return made_up(inputs, seed=1), made_up(params, seed=1)


def replayed(made: Compilation, states: Mapping[str, Array] | None = None) -> Replayed:
    found = replay_of(made)
    assert found is not None
    return found.step(*values(made), states or {})


# --- the oracle ----------------------------------------------------------------------------------


Block = dict[str, Array]
Optimizer = Callable[[Block, Block, int, int], Block]
"""The new block of a stage, from the newest one, its gradient, the stage and the number done."""


def gradients(
    x: Array, t: Array, forward: list[Block], backward: list[Block]
) -> tuple[float, list[Block]]:
    """The loss of a micro-batch, and the gradient of each stage's block.

    Activations are made with the blocks `forward`, gradients go back through those of `backward`.
    """
    owners = [(s, i) for s, block in enumerate(forward) for i in range(len(block["w"]))]
    seen = [x, np.tanh(x @ forward[0]["a"])]
    for block in forward:
        for w, b in zip(block["w"], block["b"], strict=True):
            seen.append(np.tanh(seen[-1] @ w + b))
    loss = float(np.mean((seen[-1] - t) ** 2))
    slope = 2 * (seen[-1] - t) / t.size
    found = [{n: np.zeros_like(v) for n, v in block.items()} for block in forward]
    for layer in reversed(range(LAYERS)):
        stage, i = owners[layer]
        inner = slope * (1 - seen[layer + 2] ** 2)
        found[stage]["b"][i] = inner.sum(0)
        found[stage]["w"][i] = seen[layer + 1].T @ inner
        slope = inner @ backward[stage]["w"][i].T
    found[0]["a"] = x.T @ (slope * (1 - seen[1] ** 2))
    return loss, found


def recursion(
    made: Compilation,
    stages: int,
    forward: Versions,
    backward: Callable[[list[list[Block]], int, int], Block],
    optimizer: Optimizer,
    batch: int = 1,
) -> tuple[list[float], Arrays]:
    """The losses, and the parameters at the end: all stages update behind every `batch`."""
    inputs, params = values(made)
    held: list[list[Block]] = [[b] for b in blocks(params, sizes_of(made, stages))]
    losses: list[float] = []
    waiting: list[list[Block]] = [[] for _ in range(stages)]
    for m in range(MICRO):
        x, t = (inputs[n][m * SIZE : (m + 1) * SIZE].astype(float) for n in "xt")
        read = [held[s][forward(m, s)] for s in range(stages)]
        back = [backward(held, m, s) for s in range(stages)]
        loss, grads = gradients(x, t, read, back)
        losses.append(loss)
        for s in range(stages):
            waiting[s].append(grads[s])
            if (m + 1) % batch == 0:
                mean = {n: np.stack([g[n] for g in waiting[s]]).mean(axis=0) for n in grads[s]}
                held[s].append(optimizer(held[s][-1], mean, s, len(held[s]) - 1))
                waiting[s].clear()
    ends = [versions[-1] for versions in held]
    whole = {n: np.concatenate([e[n] for e in ends]) for n in "wb"}
    return losses, {"a": ends[0]["a"], **whole}


def sizes_of(made: Compilation, stages: int) -> tuple[int, ...]:
    """The layers of each stage."""
    assert made.placed.pipe is not None
    return made.placed.pipe.sizes or (LAYERS // stages,) * stages


def blocks(params: Arrays, sizes: tuple[int, ...]) -> list[Block]:
    wide = {name: array.astype(float) for name, array in params.items()}
    parts = [np.split(wide[name], np.cumsum(sizes)[:-1]) for name in "wb"]
    found = [dict(zip("wb", pair, strict=True)) for pair in zip(*parts, strict=True)]
    found[0]["a"] = wide["a"]
    return found


def descent(old: Block, grads: Block, stage: int, done: int) -> Block:
    return {n: w - 0.2 * grads[n] for n, w in old.items()}


class Momentum:
    """`momentum(0.1, beta=0.9)`, with a velocity for each stage."""

    def __init__(self) -> None:
        self.v: dict[tuple[int, str], Any] = {}

    def __call__(self, old: Block, grads: Block, stage: int, done: int) -> Block:
        for n, g in grads.items():
            self.v[stage, n] = 0.9 * self.v.get((stage, n), 0.0) + g
        return {n: w - 0.1 * self.v[stage, n] for n, w in old.items()}


def same(made: Compilation, losses: list[float], params: Arrays) -> None:
    found = replayed(made)
    assert float(found.outputs["loss"]) == pytest.approx(np.mean(losses), rel=1e-12)
    for name, array in params.items():
        np.testing.assert_allclose(found.updated[name], array, rtol=1e-11, atol=1e-13)


# --- the four rules ------------------------------------------------------------------------------


LAYERS_OF_STAGES = ("4 4", "2 2 2 2", "1 1 1 1 1 1 1 1", "3 5", "1 4 1 2")


@covered(
    name=("ampnet", "pipedream", "two_bw"),
    opt=("sgd(0.2)", "momentum(0.1)"),
    layers=LAYERS_OF_STAGES,
)
def test_training_is_the_recursion_of_the_papers(name: str, opt: str, layers: str) -> None:
    pipe = len(layers.split())

    def late(m: int, s: int) -> int:
        return max(0, m - (pipe - 1 - s))

    made = compiled(f'{name}[batch]({MICRO}, layers="{layers}")', opt, pipe)
    found = replay_of(made)
    assert found is not None
    rows = found.table.schedule.rows

    def as_arrived(m: int, s: int) -> int:
        return sum(a.kind == "U" for a in rows[s][: rows[s].index(Action("F", m, s))])

    rules: dict[str, tuple[Versions, Versions]] = {
        "ampnet": (as_arrived, lambda m, s: m),
        "pipedream": (late, late),
        "two_bw": (lambda m, s: max(0, m // pipe - 1),) * 2,
    }
    forward, backward = rules[name]
    optimizer = Momentum() if "momentum" in opt else descent
    batch = pipe if name == "two_bw" else 1
    read = lambda held, m, s: held[s][backward(m, s)]  # noqa: E731
    same(made, *recursion(made, pipe, forward, read, optimizer, batch))


@pytest.mark.parametrize("anneal", [5, 40])
@pytest.mark.parametrize("layers", LAYERS_OF_STAGES)
def test_pipemare_corrects_what_passes_read_and_how_far_they_step(layers: str, anneal: int) -> None:
    """Yang et al. 2021: steps over tau^p, and backward weights w - tau delta."""
    pipe = len(layers.split())
    average: dict[tuple[int, str], Any] = {}

    def tau(s: int) -> int:
        return pipe - 1 - s

    def optimizer(old: Block, grads: Block, s: int, done: int) -> Block:
        rate = 0.2 / max(1, tau(s)) ** (1 - min(done / anneal, 1))
        for n, g in grads.items():
            gamma = math.exp(-2) ** (1 / max(1, tau(s)))
            step = -rate * g
            average[s, n] = gamma * average.get((s, n), 0.0) + (1 - gamma) * step
        return {n: w - rate * grads[n] for n, w in old.items()}

    def backward(held: list[list[Block]], m: int, s: int) -> Block:
        apart = min(m, tau(s))
        return {n: w - apart * average.get((s, n), 0.0) for n, w in held[s][m].items()}

    made = compiled(f'pipemare[batch]({MICRO}, anneal={anneal}, layers="{layers}")', pipe=pipe)
    same(made, *recursion(made, pipe, lambda m, s: max(0, m - tau(s)), backward, optimizer))


@pytest.mark.parametrize("pipe", [2, 4, 8])
def test_stages_keep_as_many_versions_as_the_table_needs(pipe: int) -> None:
    kept = {
        "ampnet": [1] * pipe,
        "pipedream": [pipe - s for s in range(pipe)],
        "two_bw": [2] * pipe,
        "pipemare": [1] * pipe,
    }
    for name, copies in kept.items():
        made = compiled(f"{name}[batch]({MICRO})", pipe=pipe)
        found = replay_of(made)
        assert found is not None
        assert [v.copies for v in found.table.versions] == copies
        assert list(replayed(made).copies) == copies, name


def test_a_table_determines_every_bit() -> None:
    for name in ("ampnet", "pipedream", "two_bw", "pipemare"):
        one, other = (replayed(compiled(f"{name}[batch](24)", "adam(0.01)")) for _ in range(2))
        for key, array in one.updated.items():
            assert array.tobytes() == other.updated[key].tobytes(), key


# --- tables without updates on the way -----------------------------------------------------------


@pytest.mark.parametrize("opt", ["sgd(0.2)", "adamw(lr=0.01)", "adafactor(0.1)"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "chimera"])
def test_a_synchronous_table_is_ordinary_training(name: str, opt: str) -> None:
    made = compiled(f"{name}[batch](8)", opt)
    pipe = made.placed.pipe
    assert pipe is not None
    assert pipe.use is not None
    found = Replay(made, pipe, pipe.use.verified(4, 8)).step(*values(made), {})
    outputs, updated = reference_step(made.named, *values(made), {})
    assert float(found.outputs["loss"]) == pytest.approx(float(outputs["loss"]), rel=1e-12)
    assert found.updated.keys() == updated.keys()
    for key, array in updated.items():
        np.testing.assert_allclose(found.updated[key], array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("opt", ["sgd(0.2)", "adamw(lr=cosine(0.01, 30))"])
def test_one_stage_is_ordinary_training_on_micro_batches(opt: str) -> None:
    made = compiled("ampnet[batch](24)", opt)
    pipe = made.placed.pipe
    assert pipe is not None
    found = Replay(made, pipe, of_one_stage()).step(*values(made), {})
    small = compiled("one_f_one_b[batch](2)", opt, pipe=1, batch=SIZE).named
    (inputs, kept), states = values(made), dict[str, Array]()
    for m in range(MICRO):
        mine = {n: a[m * SIZE : (m + 1) * SIZE] for n, a in inputs.items()}
        _, new = reference_step(small, mine, kept, states)
        kept, states = ({n: a for n, a in new.items() if (n in kept) == p} for p in (True, False))
    for key, array in {**kept, **states}.items():
        np.testing.assert_allclose(found.updated[key], array, rtol=1e-9, atol=1e-12)


@functools.cache
def of_one_stage() -> Any:
    from meshdsl.schedule.registry import generate
    from meshdsl.schedule.verification import verify

    return verify(generate("ampnet", 1, MICRO))


def test_the_micro_batches_may_be_those_that_the_optimizer_accumulates() -> None:
    cut = compiled("pipedream[batch](24)")
    accumulated = compiled("pipedream", "sgd(0.2, accumulate=24)", batch=SIZE)
    inputs, params = values(cut)
    several = {n: a.reshape(MICRO, SIZE, WIDTH) for n, a in inputs.items()}
    found = replay_of(accumulated)
    assert found is not None
    other = found.step(several, params, {})
    for key, array in replayed(cut).updated.items():
        assert np.array_equal(array, other.updated[key]), key


def test_declared_tables_with_halves_and_rules_of_their_own() -> None:
    rows = """
schedule mine(stages=2, micro=4, weights=RULE) {
  0: F0 F1 I0 W0 U0 F2 I1 F3 W1 U1 I2 W2 I3 W3 U3
  1: F0 I0 F1 W0 U0 I1 W1 U1 F2 I2 W2 F3 I3 W3 U3
}
"""
    found = {}
    for rule in ("latest", "stashed"):
        text = TEXT.replace("SCHEDULES", rows.replace("RULE", rule))
        made = compiled("mine[batch]", pipe=2, text=text, batch=8)
        found[rule] = replayed(made)
        replay = replay_of(made)
        assert replay is not None
        assert [v.copies for v in replay.table.versions] == list(found[rule].copies)
    assert not np.array_equal(found["latest"].updated["w"], found["stashed"].updated["w"])


# --- weights that a program makes something of before it uses them -------------------------------


def test_a_backward_pass_reads_what_its_own_version_makes() -> None:
    """A weight that is squared, clamped or summed first has the version of the pass that reads."""
    plain = compiled("ampnet[batch](24)")
    twice = TEXT.replace("einsum(x, w ->", "einsum(x, (w * 0.5 + w * 0.5) ->")
    twice = twice.replace("einsum(x, a ->", "einsum(x, (a + a * 1.0) * 0.5 ->")
    other = replayed(compiled("ampnet[batch](24)", text=twice))
    for key, array in replayed(plain).updated.items():
        np.testing.assert_allclose(other.updated[key], array, rtol=1e-9, atol=1e-12)


def test_recomputed_activations_are_of_the_version_of_the_backward_pass() -> None:
    body = "    x = tanh(einsum(x, w -> [batch, out]) + b)[out -> model]\n"
    text = TEXT.replace(body, f"    recompute {{\n  {body}    }}\n")
    one, other = (replayed(compiled("pipedream[batch](24)", text=t)) for t in (TEXT, text))
    for key, array in one.updated.items():
        np.testing.assert_allclose(other.updated[key], array, rtol=1e-9, atol=1e-12)
    changed = replayed(compiled("ampnet[batch](24)", text=text))
    plain = replayed(compiled("ampnet[batch](24)"))
    assert not np.allclose(changed.updated["w"], plain.updated["w"], rtol=1e-9)


# --- what is refused -----------------------------------------------------------------------------


TIED = TEXT.replace("square(x - t)", "square(einsum(x, a -> [batch, out])[out -> model] - t)")
SHARED = TEXT.replace("x = tanh(einsum(x, w ->", "x = tanh(einsum(x, w + a ->")
COLLECTED = TEXT.replace("+ b)[out -> model]\n", "+ b)[out -> model]\n    y = mean(square(x))\n")
COLLECTED = COLLECTED.replace("mean(square(x - t))", "mean(square(x - t)) + sum(y)")


@pytest.mark.parametrize(
    ("text", "opt", "code", "said"),
    [
        (TEXT, "sgd(0.2, clip=1.0)", "MD0337", "`clip` needs the norm of all gradients"),
        (TEXT, "sgd(0.2, compress=powersgd(1))", "MD0337", "`compress`"),
        (TIED, "sgd(0.2)", "MD0337", "`a` is read on stages 0 and 3"),
        (COLLECTED, "sgd(0.2)", "MD0330", "is read after the loop"),
        (SHARED, "sgd(0.2)", "MD0337", "`a` is read by every stage"),
    ],
)  # fmt: skip
def test_what_stages_cannot_update_apart_is_refused(
    text: str, opt: str, code: str, said: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        replay_of(compiled("pipedream[batch](24)", opt, text=text))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert said in found.message
    assert found.help
    assert found.span


def test_stages_update_equally_often() -> None:
    rows = """
schedule mine(stages=2, micro=2) {
  0: F0 F1 B0 U0 B1 U1
  1: F0 B0 F1 B1 U1
}
"""
    text = TEXT.replace("SCHEDULES", rows)
    with pytest.raises(DiagnosticError, match="different numbers"):
        replay_of(compiled("mine[batch]", pipe=2, text=text, batch=4))


def test_a_table_without_updates_has_no_replay() -> None:
    assert replay_of(compiled("one_f_one_b[batch](24)")) is None
