"""What devices send: added up for all of them at once, it is what each of them sends."""

from __future__ import annotations

from collections import Counter

import pytest

from meshdsl.device.ir import Compute, DeviceProgram, Move, walk
from meshdsl.device.traffic import busiest, senders
from meshdsl.pipeline import Compilation, Options
from meshdsl.syntax.parse import read_source
from tests.project import ROOT

CASES = [
    ("mlp", "data:3,tp:5", "batch:data,hidden:tp"),
    ("mlp", "data:3,tp:5", "io:tp,batch:data"),
    ("moe", "data:3,tp:5", "group:data,experts:tp"),
    ("moe", "data:7", "model:data"),
    ("lm", "data:3,tp:5", "heads:data,key:tp,hidden:tp"),
    ("lm", "data:2,pipe:3", "pipeline"),
]
"""Blocks that differ in size, and stages."""


def device(example: str, mesh: str, layout: str) -> DeviceProgram:
    """The program of each device."""
    program = "lm" if example == "lm" else None
    chosen = Options(mesh=mesh, layout=layout, program=program, reduce="deferred")
    return Compilation(read_source(ROOT / "examples" / f"{example}.mdsl"), chosen).device


@pytest.mark.parametrize(("example", "mesh", "layout"), CASES[:-1])
def test_so_many_are_alike(example: str, mesh: str, layout: str) -> None:
    """Of each kind there are as many as send its bytes; no two kinds do the same."""
    program = device(example, mesh, layout)
    sent = [0] * program.mesh.devices
    for node, count in walk(program.body):
        if isinstance(node, Compute):
            continue
        each = (node.wire,) * len(sent)
        if isinstance(node, Move):
            each = node.step.by_device(node.source.type, program.mesh)
        sent = [before + count * more for before, more in zip(sent, each, strict=True)]
    kinds: Counter[int] = Counter()
    for sender in senders(program):
        kinds[sender.bytes] += sender.alike
    assert kinds == Counter(sent)
    assert len({tuple(sender.done.items()) for sender in senders(program)}) == len(senders(program))


@pytest.mark.parametrize(("example", "mesh", "layout"), CASES)
def test_the_busiest_device_is_one_of_all(example: str, mesh: str, layout: str) -> None:
    program = device(example, mesh, layout)
    every = senders(program)
    assert busiest(program).bytes == max(sender.bytes for sender in every)
    uneven = 0
    for node in (n for n, _ in walk(program.body) if isinstance(n, Move)):
        type_, on = node.source.type, program.mesh
        each = node.step.by_device(type_, on)
        places = [on.coordinates(rank) for rank in range(on.devices)]
        assert each == tuple(sum(node.step.sent_along(type_, on, (), at)) for at in places)
        uneven += len(set(each)) > 1
    assert uneven or len(every) > 1
