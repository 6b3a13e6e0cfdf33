"""A parameter is not gathered again while its copy is alive: fewer bytes, and no more memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import Bucket, DeviceProgram, Move, Start
from meshdsl.device.memory import memory
from meshdsl.device.traffic import senders
from meshdsl.ir.program import every
from meshdsl.pipeline import Compilation
from meshdsl.placed import storage
from tests.compiling import compile_text
from tests.covering import in_turn
from tests.pipelines.test_programs import hold_bytes, hold_to, results

LM = Path("examples/lm.mdsl").read_text(encoding="utf-8")

NETWORK = """
dim b = 8, m = SIZE
mesh one = { data: 1 }
layout l { b -> data, params: m -> data, grads: m -> data }
program p(x[b, m], t[b, m]) {
  param w1[m, f]
  param v1[f, m]
  param w2[m, f]
  param v2[f, m]
  y = x + einsum(tanh(einsum(x, w1 -> [b, f])), v1 -> [b, m])
  z = y + einsum(tanh(einsum(y, w2 -> [b, f])), v2 -> [b, m])
  loss = mean(square(z - t))
  return loss
  minimize loss with sgd(0.1)
}
dim f = 4 * m
"""


def gathers(program: DeviceProgram) -> list[str]:
    """The variables that are gathered from storage, as often as they are."""
    stored, nodes = set(program.params), list(every(program.body))
    collectives = [n.collective for n in nodes if isinstance(n, Start)]
    collectives += [n for n in nodes if isinstance(n, Move | Bucket)]
    moves = [m for n in collectives for m in n.moves]
    return sorted(m.source.name for m in moves if m.source in stored)


def test_the_embedding_of_a_language_model_is_gathered_once() -> None:
    """It reads tokens first, writes logits last, and begins the backward pass."""
    made = compile_text(
        LM, program="lm", mesh="four", layout="zero3", set_dims={"vocab": 50304, "model": 1024}
    )
    assert gathers(made.device).count("embed") == 1
    (told,) = (c for c in made.report["collectives"] if c["tensor"] == "embed")
    assert told["wire_bytes"] == 3 * 50304 * 1024 * 4 // 4 == 154_533_888


def test_only_around_the_loss_is_a_copy_alive() -> None:
    """Of the last parameter; no gradient needs the first one."""
    text = NETWORK.replace("SIZE", "512")
    found = gathers(compile_text(text, mesh="data:4", layout="l").device)
    times = {name: found.count(name) for name in ("w1", "v1", "w2", "v2")}
    assert times == {"w1": 1, "v1": 2, "w2": 2, "v2": 1}


@in_turn(
    case=[
        ("lm", "four", "zero3"),
        ("lm", "square", "megatron_zero3"),
        ("network", "data:4", "l"),
        ("network", "data:3", "l"),
    ],
    size=(8, 512),
)
def test_less_is_sent_and_no_more_is_held(
    case: tuple[str, str, str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mesh, layout = case
    text = LM if name == "lm" else NETWORK.replace("SIZE", str(size))
    sizes = {"vocab": 16 * size} if name == "lm" else {}
    program = name if name == "lm" else "p"
    compiled = partial(
        compile_text, text, program=program, mesh=mesh, layout=layout, set_dims=sizes
    )
    shared = compiled().device
    monkeypatch.setattr(storage, "_alive_in_both", lambda nodes, moved: frozenset())
    apart = compiled().device
    assert sent(shared) < sent(apart)
    assert memory(shared)["peak"] <= memory(apart)["peak"]


def sent(program: DeviceProgram) -> int:
    return max(sender.bytes for sender in senders(program))


@pytest.mark.parametrize("mesh", ["data:2", "data:3", "data:4"])
def test_numbers_and_bytes(mesh: str) -> None:
    text = NETWORK.replace("SIZE", "8")
    made = compile_text(text, mesh=mesh, layout="l")
    run = run_local(made.text, seed=4)
    hold_to(results(run), results(run_local(alone(text).text, seed=4)))
    assert not run.disagreements()
    hold_bytes(run, made)


def alone(text: str) -> Compilation:
    return compile_text(text, mesh="one", layout="l")
