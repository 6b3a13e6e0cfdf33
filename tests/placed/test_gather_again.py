"""`activations: gather = again`: a backward pass that stores parts and gathers them again."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import DeviceLoop
from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.ir.program import every
from meshdsl.pipeline import Compilation
from meshdsl.placed.ir import Reshard
from tests.compiling import compile_text
from tests.covering import in_turn
from tests.pipelines.test_programs import hold_bytes, hold_text, hold_to, results

HEAD = """
dim b = 4, s = 4, mem = s, m = 8, f = 16, layers = 4, inner = 2
mesh one = { tp: 1 }
"""

LAYERS = """
program p(x0[b, s, m], t[b, s, m]) {
  param w0[m]
  x = x0 * w0
  repeat layers {
    param w[m, f]
    param v[f, m]
    n = rms_norm[m](x)
    h = gelu(einsum(n, w -> [b, s, f]))
    x = x + einsum(h, v -> [b, s, m])
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""

NESTED = """
program p(x0[b, s, m], t[b, s, m]) {
  param w0[m]
  x = x0 * w0
  repeat layers {
    param g[m]
    repeat inner {
      param w[m, f]
      param v[f, m]
      n = rms_norm[m](x) * g
      h = gelu(einsum(n, w -> [b, s, f]))
      x = x + einsum(h, v -> [b, s, m])
    }
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""

OUTSIDE = """
program p(x0[b, s, m], t[b, s, m]) {
  param w0[m]
  n = rms_norm[m](x0 * w0)
  x = x0
  repeat layers {
    param w[m, f]
    param v[f, m]
    h = gelu(einsum(n, w -> [b, s, f])) * einsum(tanh(x), w -> [b, s, f])
    x = x + einsum(h, v -> [b, s, m])
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""

NETWORK = """
program p(x0[b, s, m], t[b, s, m]) {
  param w1[m, f]
  param v1[f, m]
  param w2[m, f]
  param v2[f, m]
  param w0[m]
  x = x0 * w0
  n1 = rms_norm[m](x)
  h1 = gelu(einsum(n1, w1 -> [b, s, f]))
  y = x + einsum(h1, v1 -> [b, s, m])
  n2 = rms_norm[m](y)
  h2 = gelu(einsum(n2, w2 -> [b, s, f]))
  z = y + einsum(h2, v2 -> [b, s, m])
  loss = mean(square(z - t))
  return loss
  minimize loss with OPT
}
"""

RECOMPUTED = LAYERS.replace("    n = rms_norm[m](x)\n", "    recompute { n = rms_norm[m](x) }\n")

PROGRAMS = {
    "layers": LAYERS,
    "nested": NESTED,
    "outside": OUTSIDE,
    "network": NETWORK,
    "recompute": RECOMPUTED,
}

OF_X = "f -> tp, x: s -> tp"
SPLIT = f"{OF_X}, y: s -> tp, z: s -> tp"

RULES = {
    SPLIT: "tp:4",
    f"{SPLIT} ": "tp:3",
    f"{SPLIT}, b -> dp": "tp:2,dp:2",
    "f -> tp, x: s -> (cp, tp), y: s -> (cp, tp), s -> cp": "cp:2,tp:2",
}
"""Meshes, by the rules on them."""

AGAIN = ", activations: gather = again"


def compiled(
    name: str, mesh: str, rules: str, optimizer: str = "sgd(0.1)", use: str = "", **options: Any
) -> Compilation:
    text = HEAD + PROGRAMS[name].replace("OPT", optimizer) + f"layout l {{ {rules} }} {use}\n"
    return compile_text(text, mesh=mesh, layout="l", **options)


@functools.cache
def alone(name: str, optimizer: str) -> Any:
    return results(run_local(compiled(name, "one", "", optimizer).text, seed=4))


def hold(made: Compilation, name: str, optimizer: str) -> None:
    """Numbers are those of one device, bytes those that are told, and the text is read back."""
    run = run_local(made.text, seed=4)
    hold_to(results(run), alone(name, optimizer))
    assert not run.disagreements()
    hold_bytes(run, made)
    hold_text(made)


@in_turn(
    name=PROGRAMS,
    rules=RULES,
    optimizer=("sgd(0.1)", "adamw(0.1, accumulate=2)"),
    reduce=("optimal", "immediate", "deferred", "mesh-tf"),
)
def test_a_step_has_the_numbers_of_one_device(
    name: str, rules: str, optimizer: str, reduce: str
) -> None:
    mesh = RULES[rules]
    gathers = [
        compiled(name, mesh, rules + setting, optimizer, reduce=reduce) for setting in ("", AGAIN)
    ]
    hold(gathers[1], name, optimizer)
    before, after = (kept(made) for made in gathers)
    assert after < before or name in ("network", "recompute")


def test_a_small_copy_that_lives_on_is_not_gathered_again() -> None:
    """The text deletes large tensors alone: a gather would save nothing."""
    small, large = (
        compile_text(
            HEAD + NETWORK.replace("OPT", "sgd(0.1)") + f"layout l {{ {SPLIT}{AGAIN} }}\n",
            mesh="tp:4",
            layout="l",
            set_dims={"b": size},
        )
        for size in (4, 1 << 14)
    )
    assert not small.placed.gathered_again
    assert large.placed.gathered_again
    assert large.report["memory"]["peak"] < largest_without(1 << 14)


def largest_without(size: int) -> int:
    text = HEAD + NETWORK.replace("OPT", "sgd(0.1)") + f"layout l {{ {SPLIT} }}\n"
    made = compile_text(text, mesh="tp:4", layout="l", set_dims={"b": size})
    return int(made.report["memory"]["peak"])


def kept(made: Compilation) -> int:
    """The bytes that loops of the forward pass collect for the backward pass."""
    loops = (n for n in every(made.device.body) if isinstance(n, DeviceLoop))
    forward = (loop for loop in loops if loop.phase == "forward")
    return sum(c.outer.local.bytes for loop in forward for c in loop.collected)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("layers", "with one_f_one_b[b](2)"),
        ("layers", "with zb_h1[b](2)"),
        ("layers", "with interleaved[b](2, chunks=2)"),
        ("layers", "with one_f_one_b[b](2, recompute=stage)"),
        ("nested", "with gpipe[b](4)"),
        ("network", "with zb_h1[b](2)"),
    ],
)
def test_stages_of_a_pipeline_gather_again(name: str, use: str) -> None:
    rules = SPLIT + (", n2: pipe = 1" if name == "network" else ", layers -> pipe")
    made = compiled(name, "pipe:2,tp:2", rules + AGAIN, "adamw(0.1)", use)
    assert made.placed.gathered_again
    hold(made, name, "adamw(0.1)")


# --- what is selected ----------------------------------------------------------------------------


TWO = LAYERS.replace(
    "    x = x +",
    """    x = x + einsum(einsum(tanh(x), w -> [b, s, f]), v -> [b, s, m])
    p = rms_norm[m](x)
    h = h * einsum(p, w -> [b, s, f])
    x = x +""",
)


TAKEN_BACK = """
dim batch = 6, model = 8, layers = 4
mesh two = { b: 2 }
layout l { batch -> b, y: batch -> none, activations: gather = again }
program p(x[batch, model], target[batch, model]) {
  repeat layers {
    param w[model]
    y = tanh(x * w)
    x = x + y
  }
  loss = mean(square(x - target))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize("policy", ["immediate", "mesh-tf", "deferred", "optimal"])
def test_where_the_backward_pass_takes_the_part_that_is_stored_nothing_is_moved(
    policy: str,
) -> None:
    made = compile_text(TAKEN_BACK, layout="l", reduce=policy)
    run = run_local(made.text, seed=4)
    hold_to(results(run), results(run_local(compile_text(TAKEN_BACK, mesh="b:1").text, seed=4)))
    hold_bytes(run, made)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ("n: gather = again", {"n"}),
        ("activations: gather = again", {"n", "p", "_"}),
        ("activations: gather = again, n: gather = once", {"p", "_"}),
        ("n: gather = once, activations: gather = again", {"p", "_"}),
        ("p: gather = again", {"p"}),
        ("activations: gather = once", set[str]()),
    ],
)
def test_the_narrower_setting_wins(settings: str, again: set[str]) -> None:
    text = HEAD + TWO.replace("OPT", "sgd(0.1)") + f"layout l {{ {OF_X}, {settings} }}\n"
    placed = compile_text(text, mesh="tp:4", layout="l").placed
    gathers = (n for n in every(placed.body) if isinstance(n, Reshard) and n.phase == "backward")
    found = {n.target.value.label for n in gathers if "gather = again" in n.words()[0]}
    assert found == again


def test_a_layout_takes_over_the_settings_of_another() -> None:
    text = HEAD + LAYERS.replace("OPT", "sgd(0.1)")
    text += f"layout l {{ {SPLIT}{AGAIN} }}\nlayout m extends l {{ activations: gather = once }}\n"
    found = [
        bool(compile_text(text, mesh="tp:4", layout=name).placed.gathered_again) for name in "lm"
    ]
    assert found == [True, False]


def test_the_report_tells_the_cause_and_the_memory() -> None:
    made = compiled("layers", "tp:4", SPLIT + AGAIN)
    told = [c for c in made.report["collectives"] if "gather = again" in c["why"]]
    assert [(c["kind"], c["tensor"], c["phase"]) for c in told] == [
        ("all_gather", "d_x, n", "backward")  # both are small, and sent together
    ]
    # Of 4 layers, 4 by 4 by 8 floats, and a quarter of them.
    assert told[0]["why"].endswith("the backward pass stores 512 B of it, not the 2,048 B gathered")
    assert "`activations: gather = again` (line " in told[0]["why"]
    assert not made.report["proven"]


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ("activations: gather = again", []),
        ("n: gather = again", []),
        ("h: gather = again", ["MD0306"]),
        ("m: gather = again", ["MD0306"]),
        ("h: gather = once", []),
        ("params: gather = again", ["MD0313"]),
        ("grads: gather = again", ["MD0313"]),
        ("grads.n: reduce = bf16", ["MD0313"]),
        ("activations.n: gather = again", ["MD0306"]),
        ("n: gather = twice", ["MD0314"]),
        ("activations: gather = 1", ["MD0314"]),
        ("activations: reduce = bf16", ["MD0313"]),
        ("n: gather = again, n: gather = once", ["MD0315"]),
    ],
)
def test_what_is_wrong_is_told(settings: str, codes: list[str]) -> None:
    diagnostics = Diagnostics()
    try:
        compile_text(
            HEAD + LAYERS.replace("OPT", "sgd(0.1)") + f"layout l {{ {OF_X}, {settings} }}\n",
            diagnostics,
            mesh="tp:4",
            layout="l",
        )
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
    assert [d.code for d in dict.fromkeys(diagnostics)] == codes


CALLED_SO = """
dim batch = 8, activations = 8, o = 8
mesh m = {{ tp: 2 }}
layout l {{ {rules} }} {schedule}
def {function}(x[batch, activations], w[activations, o]) -> [batch, activations] {{
  n = tanh(einsum(x, w -> [batch, o])[o -> activations])
  return n * x
}}
program p(x[batch, activations]) {{
  param w[activations, o]
  y = {function}(x, w)
  {tensor} = {function}(y, w)
  loss = mean(square({tensor}))
  return loss
  minimize loss with sgd(lr=0.1)
}}
"""


@pytest.mark.parametrize(
    ("rules", "schedule", "function", "tensor", "codes"),
    [
        ("activations -> tp, activations: gather = again", "", "f", "z", ["MD0306"]),
        ("activations: activations -> tp, z: batch -> tp", "", "activations", "z", []),
        ("activations -> tp, activations.n: gather = again", "", "activations", "z", ["MD0306"]),
        ("batch -> tp, activations: gather = once", "", "activations", "z", ["MD0313"]),
        (
            "activations: batch -> tp, activations: gather=once",
            "",
            "f",
            "activations",
            ["MD0313"],
        ),
        ("activations: tp = 1", "with gpipe[batch](2)", "f", "activations", []),
    ],
)
def test_a_tensor_a_dim_and_a_function_may_be_called_activations(
    rules: str, schedule: str, function: str, tensor: str, codes: list[str]
) -> None:
    """Rules and stages mean these; a setting means all activations, and a note says so."""
    text = CALLED_SO.format(rules=rules, schedule=schedule, function=function, tensor=tensor)
    diagnostics = Diagnostics()
    compile_text(text, diagnostics, layout="l").checked()
    assert [d.code for d in diagnostics] == codes
    assert all(d.severity == "note" and d.span for d in diagnostics)


# --- bytes a layer: Korthikanti et al., "Reducing Activation Recomputation", MLSys 2023 -----------

GPT = """
dim b = 2, s = 16, mem = s, h = 32, a = 4, k = h / a, f = 4 * h, layers = 3, vocab = 64
mesh one = { tp: 1 }
layout tp { a -> tp, f -> tp, vocab -> tp }
layout sp extends tp { x: s -> tp }
layout sp_again extends sp { activations: gather = again }
program gpt(ids[b, s]: i32, target[b, s]: i32) {
  param embed[vocab, h]
  x = embed[vocab = ids]
  repeat layers {
    param wq[h, a, k]
    param wk[h, a, k]
    param wv[h, a, k]
    param wo[a, k, h]
    param w1[h, f]
    param w2[f, h]
    OPEN
    n = rms_norm[h](x)
    q = einsum(n, wq -> [b, a, s, k])
    key = einsum(n, wk -> [b, a, s, k])[s -> mem]
    value = einsum(n, wv -> [b, a, s, k])[s -> mem]
    o = attention[k, mem](q, key, value, iota[s] >= iota[mem])
    x = x + dropout(einsum(o, wo -> [b, s, h]), 0.1)
    u = einsum(rms_norm[h](x), w1 -> [b, s, f])
    x = x + dropout(einsum(gelu(u), w2 -> [b, s, h]), 0.1)
    CLOSE
  }
  loss = mean(cross_entropy[vocab](einsum(x, embed -> [b, s, vocab]), target))
  return loss
  minimize loss with sgd(0.1)
}
"""

SIZES = {
    2: {"b": 1, "s": 2048, "h": 1024, "a": 16},
    4: {"b": 2, "s": 2048, "h": 2048, "a": 16},
    8: {"b": 4, "s": 4096, "h": 4096, "a": 32},
}
"""Sizes of a model, by the devices along `tp`."""


def due(layout: str, t: int, b: int, s: int, h: int, a: int) -> int:
    """The bytes of activations that one device keeps of a layer, in 16 bits, by the paper.

    Each term in units of s·b·h, as in its section 4.1:

    - attention: the operand of q, k and v 2, q and k 4, v 2, the operand of the projection 2, the
      mask of the dropout behind it 1;
    - MLP: the operands of its products 2 and 8, the operand of gelu 8, the mask of its dropout 1;
    - the operands of two norms 4.

    What is here is less: no mask of a dropout is kept, which draws its numbers again (1 and 1).
    Instead of the 5·a·s²·b bytes of scores, flash attention keeps the logarithm of a sum in f32 of
    each head and position, 4·a·s·b. Dropout has the number of its layer, 4 bytes on each device.
    """
    sbh, logsumexp, layer = s * b * h, 4 * a * s * b, 4
    replicated, split = (2 + 2 + 4) * sbh, (4 + 2 + 2 + 8 + 8) * sbh + logsumexp
    ways = {"one": 1, "full": 1}.get(layout, t)
    if layout in ("full", "full_sp"):  # only what enters a layer
        return 2 * sbh // ways + layer
    if layout == "tp":
        return replicated + split // t + layer
    return (replicated + split) // ways + layer


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("layout", ["one", "tp", "sp_again", "full", "full_sp"])
def test_activations_of_a_layer_are_those_of_the_paper(layout: str, t: int) -> None:
    """Exactly: as much more as is kept with a layer more. Of `full`, the layer is recomputed.

    There are so many layers that they, not the loss, have the peak.
    """
    is_full = layout.startswith("full")
    text = GPT.replace("OPEN", "recompute {" * is_full).replace("CLOSE", "}" * is_full)
    chosen = {"one": "tp", "full": "tp", "full_sp": "sp"}.get(layout, layout)
    mesh = "one" if layout == "one" else f"tp:{t}"
    held = []
    for layers in (12, 13):
        sizes = {**SIZES[t], "layers": layers}
        made = compile_text(text, mesh=mesh, layout=chosen, dtype="bf16", set_dims=sizes)
        held.append(made.report["memory"]["activations"])
    assert held[1] - held[0] == due(layout, t, **SIZES[t])


def test_without_the_setting_gathered_operands_are_kept() -> None:
    """Those of the layers, which the paper has split, are kept whole: 4·s·b·h."""
    held = []
    for layers in (4, 5):
        sizes = {**SIZES[4], "layers": layers}
        made = compile_text(
            GPT.replace("OPEN", "").replace("CLOSE", ""),
            mesh="tp:4",
            layout="sp",
            dtype="bf16",
            set_dims=sizes,
        )
        held.append(made.report["memory"]["activations"])
    sbh = math.prod(SIZES[4][d] for d in "sbh")
    assert held[1] - held[0] == due("sp_again", 4, **SIZES[4]) + 4 * sbh - 4 * sbh // 4
