"""The emitted forward and backward passes of modules, run with a thread per device."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from meshdsl.backends.engines.in_process import load
from meshdsl.backends.engines.local_devices import DeviceThreads
from meshdsl.backends.engines.local_dist import LocalDist
from meshdsl.backends.module.compiler import Compiler, compiler
from meshdsl.backends.runtime.values import local_part
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.backends.module_cases import (
    ALIAS,
    BLOCK,
    CASES,
    MLP,
    Case,
    alias,
    block,
    drawn,
    expected,
    mlp,
)


def compiled(case: Case) -> Compiler:
    options = Options(layout=case.layout, reduce=case.reduce, dtype="f64")
    return compiler(Compilation(Source("test.mdsl", case.text), options), case.axes)


def text_of(case: Case) -> str:
    made = compiled(case)
    params = [str(p.value.name) for p in made.program.params]
    return made.with_gradients(params, [v.label for v in made.program.inputs]).text


def part(program: Any, specs: str, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """The blocks of device `rank`, in memory of their own."""
    table = getattr(program, specs)
    return {
        name: tensors[name][local_part(spec, program.MESH, rank)].clone()
        for name, spec in table.items()
    }


def bits(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors, also of those in lists of tuples."""
    return tree_map(torch.clone, tensors)  # type: ignore[no-any-return]


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether every tensor, those in lists of tuples too, is as it was."""
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def apart(grads: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Gradients share memory neither with one another nor with any other tensor."""
    every = [*grads, *others]
    before = [tensor.clone() for tensor in every]
    for position, grad in enumerate(grads):
        grad.add_(1)
        assert torch.equal(grad, before[position] + 1), "a gradient overlaps itself"
        others_now = every[:position] + every[position + 1 :]
        others_then = before[:position] + before[position + 1 :]
        assert all(map(torch.equal, others_now, others_then)), "a gradient overlaps another"
        grad.copy_(before[position])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_the_whole_program(case: Case) -> None:
    program: Any = load(text_of(case))
    devices = math.prod(case.axes.values())
    inputs, params = drawn(program.INPUTS, 1), drawn(program.PARAMS, 2)
    cotangents = drawn(program.OUTPUTS, 3)
    right = expected(case, inputs, params, cotangents)
    dist = LocalDist(program.MESH, program.GROUPS, None)
    program.dist = dist

    def call(rank: int) -> Any:
        groups = dist.groups(rank)
        own = [part(program, "INPUTS", inputs, rank), part(program, "PARAMS", params, rank)]
        given = [bits(tensors) for tensors in own]
        outputs, saved = program.forward(rank, groups, *own)
        assert all(map(unchanged, given, own)), "forward wrote into what it was given"
        seeds = part(program, "COTANGENTS", cotangents, rank)
        kept = [bits(tensors) for tensors in (saved, seeds, outputs)]
        first = program.backward(rank, groups, saved, seeds)
        assert all(map(unchanged, kept, [saved, seeds, outputs])), "backward wrote into saved"
        apart([t for grads in first for t in grads.values()], [*seeds.values(), *outputs.values()])
        return outputs, first, program.backward(rank, groups, saved, seeds)

    found = DeviceThreads(devices, dist, call).run()
    assert not found.failures, found.failures
    for rank, (outputs, (by_param, by_input), again) in enumerate(found.outputs):
        check(outputs, part(program, "OUTPUTS", right.outputs, rank))
        check(by_param, part(program, "PARAMS", right.params, rank))
        check(by_input, part(program, "INPUTS", right.inputs, rank))
        check(again[0], by_param)
        check(again[1], by_input)


def check(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(right)
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


LOCAL = [
    Case(MLP, mlp, "dp", {"a": 4}),
    Case(MLP, mlp, "zero2", {"a": 2, "b": 2}),
    Case(ALIAS, alias, "columns", {"a": 2}),
    Case(BLOCK, block, "hybrid", {"a": 2, "b": 2}),
]
"""Programs whose gradients are summed over batches before they are reduced."""


@pytest.mark.parametrize("case", LOCAL, ids=lambda case: case.name)
def test_gradients_of_several_batches_are_reduced_once(case: Case) -> None:
    """They are sums of the whole program's, and their reduction sends what one pass would."""
    made = compiled(case)
    params = [str(p.value.name) for p in made.program.params]
    once, local = (made.with_gradients(params, [], reduced).text for reduced in (True, False))
    assert sent(once) == sent(local)
    program: Any = load(local)
    inputs = [drawn(program.INPUTS, seed) for seed in (1, 2)]
    whole = drawn(program.PARAMS, 3)
    cotangents = drawn(program.OUTPUTS, 4)
    results = [expected(case, each, whole, cotangents).params for each in inputs]
    dist = LocalDist(program.MESH, program.GROUPS, None)
    program.dist = dist

    def call(rank: int) -> Any:
        groups, partials = dist.groups(rank), list[dict[str, torch.Tensor]]()
        for each in inputs:
            own = [part(program, "INPUTS", each, rank), part(program, "PARAMS", whole, rank)]
            _, saved = program.forward(rank, groups, *own)
            seeds = part(program, "COTANGENTS", cotangents, rank)
            partials.append(program.backward(rank, groups, saved, seeds)[0])
        first, second = partials
        return program.reduce_gradients(rank, groups, {n: t + second[n] for n, t in first.items()})

    found = DeviceThreads(math.prod(case.axes.values()), dist, call).run()
    assert not found.failures, found.failures
    total = {name: tensor + results[1][name] for name, tensor in results[0].items()}
    for rank, grads in enumerate(found.outputs):
        check(grads, part(program, "PARAMS", total, rank))


def sent(text: str) -> int:
    """Bytes that the statements of a text send, by its comments."""
    return sum(int(n.replace(",", "")) for n in re.findall(r"# \w+, ([\d,]+) B sent", text))


def test_local_gradients_send_nothing() -> None:
    """Under data parallelism the backward pass then has no collective."""
    made = compiled(Case(MLP, mlp, "dp", {"a": 2}))
    text = made.with_gradients(["w", "b", "v"], ["x"], reduced=False).text
    backward, reduction = text.partition("def backward")[2].split("def reduce_gradients")
    assert sent(backward) == 0
    assert sent(reduction.partition("# ---")[0]) > 0
    assert '"w": "f64[io=8, hidden=16] over a"' in text


def test_only_what_the_backward_pass_reads_is_saved() -> None:
    text = text_of(Case(MLP, mlp, "both", {"a": 2, "b": 2}))
    (saved,) = re.findall(r"saved = \{(.*)\}", text)
    assert re.findall(r'"(\w+)"', saved) == ["x", "w", "v", "h", "sub"]


def test_the_parameters_are_gathered_again_unless_they_are_kept() -> None:
    texts = [text_of(Case(MLP, mlp, layout, {"a": 2})) for layout in ("fsdp", "kept")]
    gathers = [text.partition("def backward")[2].count("# all_gather, ") for text in texts]
    assert gathers == [1, 0]


@pytest.mark.parametrize("case", [c for c in CASES if c.text is MLP][::5], ids=lambda c: c.name)
def test_the_text_is_formatted(case: Case) -> None:
    text = text_of(case)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "-"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == text
