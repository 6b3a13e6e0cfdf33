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
from tests.backends.module_cases import CASES, MLP, Case, drawn, expected, mlp


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
