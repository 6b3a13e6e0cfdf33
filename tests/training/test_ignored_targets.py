"""`cross_entropy(…, ignore_index=…)`: the mean over the other targets is that of torch's kernel.

It is exact under every layout, with accumulated batches and in pipelines.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.named.expand import IN_PARTS
from meshdsl.named.prelude_files import function_names
from meshdsl.ops.opdef import load_all
from meshdsl.pipeline import Compilation, Options
from tests.compiling import compile_text, run_text
from tests.covering import in_turn
from tests.pipelines.test_programs import hold_bytes, hold_to, results
from tests.programs.harness import Case, explained

TEXT = """
dim batch = 6, seq = 3, vocab = 7, model = 4, layers = 2
program p(x[batch, seq, model], targets[seq, batch]: i32) {
  param w[model, vocab]
  repeat layers {
    param u[model]
    x = tanh(x * u)
  }
  logits = einsum(x, w -> [batch, seq, vocab])
  l = cross_entropy[vocab](logits, targets, ignore_index=IGNORED)
  loss = sum(l) / sum(where(targets == IGNORED, 0.0, 1.0))
  return loss
  minimize loss with sgd(lr=1.0OPTIONS)
}
"""
LAYOUTS = {
    "d:1": "{}",
    "d:4": "{ batch -> d }",
    "v:3": "{ vocab -> v }",
    "d:2,v:2": "{ seq -> d, vocab -> v, params: model -> d }",
    "pipe:2,v:2": "{ layers -> pipe, vocab -> v } with one_f_one_b",
}


def compiled(ignored: int, mesh: str, size: int, options: str) -> Compilation:
    text = TEXT.replace("IGNORED", str(ignored)).replace("OPTIONS", options)
    source = Source("p.mdsl", f"{text}layout chosen {LAYOUTS[mesh]}\n")
    chosen = Options(mesh=mesh, layout="chosen", dtype="f64", set_dims={"batch": size})
    return Compilation(source, chosen)


def samples(ignored: int, size: int) -> dict[str, Array]:
    """Of the first samples most targets are ignored, of the others few."""
    rng = np.random.default_rng(7)
    targets = rng.integers(0, 7, (3, size)).astype(np.int32)
    targets[:2, : size // 2] = ignored
    targets[1, -1] = ignored
    return {"x": rng.normal(size=(size, 3, 4)), "targets": targets}


def by_torch(
    given: dict[str, Array], params: dict[str, Array], ignored: int
) -> tuple[float, dict[str, Array]]:
    """The loss and the parameters after a step, in float64 and with torch's own average."""
    held = {name: torch.tensor(a, dtype=torch.float64) for name, a in params.items()}
    w, u = (held[name].requires_grad_() for name in ("w", "u"))
    x = torch.tensor(given["x"])
    for layer in range(2):
        x = torch.tanh(x * u[layer])
    targets = torch.tensor(given["targets"]).long().T
    loss = torch.nn.functional.cross_entropy(
        (x @ w).flatten(0, 1), targets.flatten(), ignore_index=ignored
    )
    dw, du = torch.autograd.grad(loss, (w, u))
    stepped = {"w": (w - dw).detach().numpy(), "u": (u - du).detach().numpy()}
    return loss.item(), {**stepped, "step": np.array(1)}


@in_turn(mesh=LAYOUTS, ignored=(-100, 2), count=(1, 2, 3))
def test_the_mean_over_what_counts(mesh: str, ignored: int, count: int) -> None:
    count = max(count, 2) if "pipe" in mesh else count
    size = 5 * count if count == 1 else 4 * count
    given = samples(ignored, size)
    rng = np.random.default_rng(9)
    params = {"w": rng.normal(size=(4, 7)), "u": rng.normal(size=(2, 4))}
    options = f", accumulate={count}" if count > 1 else ""
    made = compiled(ignored, mesh, size // count, options)
    batches = {
        "x": given["x"].reshape(count, -1, 3, 4),
        "targets": given["targets"].reshape(3, count, -1).transpose(1, 0, 2),
    }
    found = run_local(made.text, batches if count > 1 else given, params)
    loss, stepped = by_torch(given, params, ignored)
    hold_to(results(found), {"loss": np.array(loss), **stepped}, 1e-12)
    assert not found.disagreements()
    hold_bytes(found, made)


CALL = """
dim batch = 3, vocab = 5
mesh m = { a: 2 }
layout whole { batch -> a }
layout parts { vocab -> a }
program p(logits[batch, vocab], targets[batch]: i32) {
  return cross_entropy[vocab](logits, targets, ignore_index=-1)
}
"""


@pytest.mark.parametrize("layout", ["whole", "parts"])
def test_other_indices_are_checked(layout: str) -> None:
    logits = np.zeros((3, 5), np.float32)
    good = {"logits": logits, "targets": np.array([4, -1, 0], np.int32)}
    losses = run_text(CALL, good, layout=layout)["out0"]
    np.testing.assert_allclose(losses, np.log(5) * np.array([1, 0, 1]), rtol=1e-6)
    bad = {"logits": logits, "targets": np.array([-1, -2, 9], np.int32)}
    with pytest.raises(LocalRunError, match=r":7: index -2 at \[batch=1\] is out of") as error:
        run_text(CALL, bad, layout=layout)
    assert error.value.code == "MD0801"


def test_one_kernel_does_it_where_no_class_is_split() -> None:
    assert "ignore_index=-1)" in compile_text(CALL, layout="whole").emitted.text
    assert compile_text(CALL, layout="parts").emitted.text.count("cross_entropy(") == 0


def test_it_sends_what_it_sends_without() -> None:
    """Three numbers a position where classes are split; which are ignored every device knows."""
    sent = [
        explained(Case(text, "a:4", "vocab:a", "optimal", {"vocab": 8}))["totals"]["by_kind"]
        for text in (CALL, CALL.replace(", ignore_index=-1", ""))
    ]
    assert sent[0] == sent[1] == {"all_reduce": 3 * 2 * 3 * 3 * 4 // 4}


@pytest.mark.parametrize(
    ("option", "code"),
    [("ignore_index=1.5", "MD0213"), ("ignore=1", "MD0253"), ("-1, 2", "MD0251")],
)
def test_what_is_refused(option: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_text(CALL.replace("ignore_index=-1", option), layout="whole")
    assert [d.code for d in error.value.diagnostics] == [code]


def test_a_call_is_taken_apart_where_its_record_says_that_the_prelude_lacks_an_option() -> None:
    """The record names an option of it; a function of `named/expand.py` has the definition."""
    lacking = {name: record for name, record in load_all().items() if record.prelude_lacks}
    assert set(lacking) == set(IN_PARTS) & function_names()
    for record in lacking.values():
        assert record.prelude_lacks in dict(record.surface.options)
