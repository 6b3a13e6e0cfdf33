"""Updates and norms of several parameters as one: which are, at what memory, with what numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch

from meshdsl.backends.runtime import update_kernels
from meshdsl.backends.runtime.main import on_device
from meshdsl.backends.runtime.values import Spec
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import Bucket, Compute, DeviceProgram, Move, Node
from meshdsl.device.memory import memory
from meshdsl.device.passes import passes
from meshdsl.device.verify import verify
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.program import every
from meshdsl.ops.opdef import lookup
from meshdsl.pipeline import Compilation, Options
from tests.programs.harness import Case as StepCase
from tests.report.golden import WHOLE, Case, made
from tests.training.stepping import check_step

TWO = """
dim batch = 8, io = 4, hidden = 8
mesh two = { d: 2 }
layout split { batch -> d }
program p(x[batch, io]) {
  param w[io, hidden]
  param b[hidden]
  param v[hidden, io]
  param c[io]
  loss = mean(square(einsum(relu(einsum(x, w -> [batch, hidden]) + b), v -> [batch, io]) + c))
  return loss
  minimize loss with OPT
}
"""


@functools.cache
def compiled(optimizer: str, text: str = TWO) -> Compilation:
    return Compilation(Source("p.mdsl", text.replace("OPT", optimizer)), Options(cache=False))


def updates(program: DeviceProgram) -> list[Compute]:
    nodes = (node for node in every(program.body) if isinstance(node, Compute))
    return [node for node in nodes if lookup(node.name).each > 1]


CALLS = {
    "sgd(0.1)": 1,
    "sgd(0.1, clip=1.0)": 1,
    "momentum(0.1, nesterov=true)": 1,
    "adamw(lr=cosine(0.1, 10), clip=1.0)": 1,
    "adam(0.1)": 1,
    "adafactor(0.1)": 4,  # each has a size of its own
}


@pytest.mark.parametrize("optimizer", CALLS)
def test_parameters_with_equal_options_are_updated_by_one_call(optimizer: str) -> None:
    program = compiled(optimizer).device
    assert len(updates(program)) == CALLS[optimizer]
    assert len(program.updates) == len({old for old, _ in program.updates})
    norms = [n for n in every(program.body) if isinstance(n, Compute) and n.name == "squared_norm"]
    assert [len(norm.ins) for norm in norms] == ([4] if "clip" in optimizer else [])


def test_the_call_reads_parameters_and_states_by_name() -> None:
    text = compiled("adamw(lr=cosine(0.1, 10), clip=1.0)").text
    assert 'grads = {"w": d_w, "b": d_b, "v": d_v, "c": d_c}' in text
    assert "[params[name] for name in grads]," in text
    assert '[states[f"{name}.v"] for name in grads],' in text
    assert "squared_norms(grads.values())" in text
    assert 'states["w.m"]' not in text
    assert 'params["w"] = ' not in text  # it is the same tensor


SOME = [case for case in WHOLE if case.example in ("lm", "moe_stages", "resnet", "vit")]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_one_call_needs_no_more_memory(case: Case) -> None:
    placed = made(case).placed
    apart = lower(placed)
    for step in passes(placed)[:-3]:
        apart = step(apart)
    together = made(case).device
    verify(together)
    assert memory(together)["peak"] <= memory(apart)["peak"]
    flops = [sum(node.flops for node in updates(program)) for program in (apart, together)]
    assert flops[0] == flops[1]
    assert not list(between_updates(together))


def between_updates(program: DeviceProgram) -> Iterator[Node]:
    """Blocking collectives between two updates of a kind, that could be before both."""
    for at, node in enumerate(program.body):
        if isinstance(node, Compute) and lookup(node.name).each > 1:
            moves = [*takewhile(lambda n: isinstance(n, Move | Bucket), program.body[at + 1 :])]
            after = program.body[at + 1 + len(moves) :][:1]
            if any(isinstance(n, Compute) and n.name == node.name for n in after):
                yield from (n for n in moves if set(node.makes).isdisjoint(n.reads))


# --- kernels -------------------------------------------------------------------------------------

SHAPES = [(3, 5), (7,), (), (2, 2, 4), (6, 4)]
KERNELS: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd_": (0, {"weight_decay": 0.5}),
    "momentum_": (1, {"beta": 0.5, "nesterov": True, "weight_decay": 0.25}),
    "adam_": (2, {"step": 3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
}


def tensors(seed: int, turned: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    values = [torch.rand(shape, generator=numbers) for shape in SHAPES]
    if turned:  # of those with two dims, the elements lie in another order
        values = [x.mT.contiguous().mT if x.dim() == 2 else x for x in values]
    return [x.to(dtype) for x in values]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("scale", [1.0, torch.tensor(0.5)], ids=["1", "clipped"])
@pytest.mark.parametrize("turned", ["", "parameters", "gradients"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_call_on_lists_is_a_call_for_each(
    name: str, turned: str, scale: Any, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also where gradients are copied in pieces."""
    states, options = KERNELS[name]
    options = options | ({"decoupled": True} if name == "adam_" else {})
    monkeypatch.setattr(update_kernels, "PIECE", 16)
    grads = tensors(1, turned == "gradients", torch.bfloat16 if narrow else torch.float32)
    kernel = getattr(update_kernels, name)

    def operands() -> list[list[torch.Tensor]]:
        return [tensors(2 + n, turned == "parameters") for n in range(1 + states)]

    together, apart = operands(), operands()
    kernel(together[0], grads, *together[1:], lr=0.1, scale=scale, **options)
    for w, g, *more in zip(apart[0], grads, *apart[1:], strict=True):
        kernel([w], [g], *([x] for x in more), lr=0.1, scale=scale, **options)
    for found, wanted in zip(together, apart, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert not torch.equal(together[0][0], operands()[0][0])
    if not narrow:
        donated = operands()
        kernel(
            donated[0],
            tensors(1, False),
            *donated[1:],
            lr=0.1,
            scale=scale,
            donated=True,
            **options,
        )
        for found, wanted in zip(donated, together, strict=True):
            torch.testing.assert_close(found, wanted)


# --- gradients that an update overwrites ---------------------------------------------------------

STEP = """
dim b = 4, i = 3
mesh two = {{ d: 2 }}
layout split {{ b -> d }}
program p(x[b, i], y[i]) {{
  param w[i]
  param v[i]
  loss = sum(einsum(x, tanh(w) -> [b])) + {term}
  return loss{more}
  minimize loss with OPT
}}
"""
DONATED: dict[str, tuple[str, str, str, int]] = {
    "all": ("adamw(0.1, clip=1.0)", "sum(tanh(v) * y)", "", 2),
    "with a decay": ("sgd(0.1, weight_decay=0.1)", "sum(tanh(v) * y)", "", 2),
    "looked ahead of": ("momentum(0.1, nesterov=true)", "sum(tanh(v) * y)", "", 2),
    "as they are": ("adamw(0.1)", "sum(tanh(v) * y)", "", 0),
    "returned as well": ("adamw(0.1, clip=1.0)", "sum(tanh(v) * y)", ", grad(loss, v)", 2),
    "one is an input": ("adamw(0.1, clip=1.0)", "sum(v * y)", ", y", 1),
    "one is of one number": ("adamw(0.1, clip=1.0)", "sum(v)", "", 1),
}
"""By name: the optimizer, a term of the loss, what else is returned, how many are overwritten."""


@pytest.mark.parametrize("name", DONATED)
def test_gradients_are_overwritten_where_nobody_reads_them_again(name: str) -> None:
    optimizer, term, more, count = DONATED[name]
    text = STEP.format(term=term, more=more)
    program = compiled(optimizer, text).device
    donated = [node for node in updates(program) if dict(node.attrs).get("donated")]
    assert sum(len(node.outs) // len(lookup(node.name).overwrites) for node in donated) == count
    check_step(StepCase(text.replace("OPT", optimizer), "two", "split"))


# --- steps ---------------------------------------------------------------------------------------


def test_the_counter_of_steps_stays_on_the_host() -> None:
    tables = [{"x": torch.ones(2), "at": torch.tensor(1, dtype=torch.int32)}, {"w": torch.ones(2)},
              {"step": torch.tensor(1, dtype=torch.int32),
               "w.n": torch.ones(2, dtype=torch.int32)}]  # fmt: skip
    specs = [{name: Spec("", {}, {}, ("steps",) if name == "step" else None) for name in table}
             for table in tables]  # fmt: skip
    placed = on_device(tables, specs, torch.device("meta"))
    where = {name: x.device.type for table in placed for name, x in table.items()}
    assert where == {"x": "meta", "at": "meta", "w": "meta", "step": "cpu", "w.n": "meta"}


def test_a_rate_is_a_number_that_an_update_reads() -> None:
    text = compiled("adamw(lr=cosine(0.1, 10), clip=1.0)").text
    assert "learning_rate = cosine_rate(step, peak=0.1, steps=10, warmup=0, final=0.0)" in text
    assert "learning_rate,\n" in text
    # Of arithmetic it is a tensor.
    assert "= cosine_rate(" not in compiled("adafactor(lr=cosine(0.1, 10))").text


def test_indices_of_a_maximum_are_not_checked() -> None:
    text = "dim b = 4, v = 8\nmesh one = { d: 1 }\nprogram p(x[b, v], t[v]) {\n"
    text += "  return t[v = argmax[v](x)]\n}\n"
    indices = compiled("", text).text
    assert "check_index" not in indices
    # Nothing else reads it: it stays in i64, as torch makes it.
    assert "torch.int32" not in indices.partition("# ---")[0]
    assert ".long()" not in indices.partition("# ---")[0]
    returned = text.replace("  return t", "  i = argmax[v](x)\n  return i, t")
    assert (
        ".to(torch.int32)" in compiled("", returned.replace("t[v = argmax[v](x)]", "t[v = i]")).text
    )
    unknown = text.replace("x[b, v]", "x[b, v], i[b]: i32").replace("argmax[v](x)", "i")
    assert "check_index" in compiled("", unknown).text
    twice = unknown.replace("return t[v = i]", "return t[v = i] + x[v = i]")
    assert compiled("", twice).text.partition("# ---")[0].count(".long()") == 1


ALONE = """
dim batch = 4, model = 4, layers = 2, out = 4
mesh m = { a: 2 }
layout l { layers -> a, params: model -> a } with gpipe[batch](2)
program net(x[batch, model]) {
  repeat layers {
    param w[model]
    x = x * w
  }
  param b[model]
  param c[out]
  loss = mean(square(sum[model](x + b) + c))
  return loss
  minimize loss with sgd(0.1, clip=1.0)
}"""


def test_norms_of_what_one_stage_has_alone_stay_apart() -> None:
    program = Compilation(Source("net.mdsl", ALONE), Options(), Diagnostics()).device
    norms = [n for n in every(program.body) if isinstance(n, Compute) and n.name == "squared_norm"]
    assert {len({v.on for v in norm.ins}) for norm in norms} == {1}


def test_what_one_stage_has_alone_is_updated_in_the_call_of_all() -> None:
    (case,) = (case for case in SOME if (case.example, case.layout) == ("lm", "pipeline"))
    device, _, _ = made(case).text.partition("# ---")
    assert device.count("adam_(") == 1
    assert '    if pipe == 0:\n        grads["position"] = d_position\n' in device
    assert "position_m" not in device


def test_a_small_collective_in_flight_does_not_part_an_update() -> None:
    case = Case("moe", "gshard_tp")
    device, _, _ = made(case).text.partition("# ---")
    assert "d_wg_work = all_reduce_start(" in device
    assert device.count("adam_(") == 1
