"""LLaMA-2 7B on eight A100 as Galvatron searched it (Miao et al. 2023), from its own profiles.

Time-has-wings/Hetu-Galvatron, galvatron/models/gpt/configs: computation_profiling_bf16_llama2-7b_
all.json at 5c104c6, memory_profiling_… at c576ee7, and the plan that was found, galvatron_config_
llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json at 0bf50ce: no tensor parallelism, ZeRO-3 for every
layer (`dp_types_enc` 1), and 20 of 32 layers recomputed, for 16 sequences. Bandwidths are those of
profile_hardware/hardware_configs at 5085582. Costs follow its model, core/cost_model: a gathered or
scattered gradient hides behind arithmetic, which it slows; tensor parallel layers wait.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from meshdsl.costgraph.exact import integer_program, priced_memory
from meshdsl.costgraph.graph_file import costs_of, read_graph
from tests.project import ROOT

FILE = ROOT / "examples" / "search" / "galvatron_llama2_7b.json"

LAYERS, DEVICES, BATCH = 32, 8, 16
MIB, MS = 1 << 20, 1e-3
SEQUENCE = 2048 * 4096 * 2
"""Bytes of a sequence's activation in bf16."""

FORWARD = {2: 4.295437526702879, 4: 4.124338817596435, 8: 3.9369729995727534, 16: 3.918175506791}
"""Milliseconds of a layer's forward pass a sequence, by how many at a time (16: those of 12)."""
PARAMETERS = 778.2236328125
"""MiB of a layer's parameters in f32: with gradients and Adam's state four times that."""
ACTIVATIONS = {1: 514.5634765625, 2: 273.28173828125, 4: 136.885498046875, 8: 68.3204345703125}
"""MiB that a layer keeps of a sequence, by tensor parallel devices; recomputed, it keeps 32."""
TENSOR = {2: 101.9569091796875, 4: 141.33445739746094, 8: 140.35589599609375}
DATA = {2: 114.43428039550781, 4: 140.14663696289062, 8: 140.35589599609375}
"""GB/s of an all_reduce among neighbours, and among the devices that are not."""
SLOWER = 1.126
"""How much longer computing takes beside a collective (overlap_coefficient.json)."""

LIMIT = int(0.8 * 36 * 1024) + 1 - 588 - 1436 - 1024 - 32
"""MiB for layers: of 36 GiB a fifth is left to the allocator. Embeddings are split over two devices
and ZeRO-3, with four sequences; the context of CUDA and a buffer of gathered activations."""


def zero(stage: int, data: int) -> float:
    """The part of parameters, gradients and state that one of `data` devices holds."""
    split = 1 / data + 0.003
    return {0: 1.0, 2: 7 / 8 * split + 1 / 8, 3: split}[stage]


def beside(computing: float, sending: float) -> float:
    """Milliseconds of both at once."""
    return sending + max(0.0, SLOWER * computing - sending) / SLOWER


def choice(tensor: int, stage: int, again: bool) -> tuple[str, float, float]:
    """The name of a way to compute a layer, its milliseconds and its MiB."""
    data = DEVICES // tensor
    sequences = BATCH // data
    forward = FORWARD[sequences] * sequences / tensor
    backward = forward * (3 if again else 2)
    half = PARAMETERS / 2 / tensor * MIB
    gathered = (data - 1) / data * half / (DATA[data] * 1e9) / MS if data > 1 else 0.0
    # Of ZeRO-2 gradients are scattered, and parameters gathered, behind the backward pass alone.
    ahead, behind = (gathered, 2 * gathered) if stage == 3 else (0.0, 2 * gathered)
    milliseconds = beside(forward, ahead) + beside(backward, behind)
    if tensor > 1:
        reduced = 2 * (tensor - 1) / tensor * sequences * SEQUENCE / (TENSOR[tensor] * 1e9) / MS
        milliseconds += reduced * (6 if again else 4)
    kept = 32 / tensor if again else ACTIVATIONS[tensor]
    held = 4 * PARAMETERS / tensor * zero(stage, data) + kept * sequences
    named = [f"tensor {tensor}" * (tensor > 1), f"ZeRO-{stage}" * (stage > 0), "recomputed" * again]
    return ", ".join(n for n in named if n), milliseconds, held


def choices() -> Iterator[tuple[str, float, float]]:
    """Every way to compute a layer."""
    for tensor, stage, again in itertools.product((1, 2, 4, 8), (0, 2, 3), (False, True)):
        if (tensor == DEVICES) == (stage == 0):
            yield choice(tensor, stage, again)


def test_the_example_is_what_the_profiles_say() -> None:
    graph = json.loads(FILE.read_text(encoding="utf-8"))
    names, milliseconds, held = zip(*choices(), strict=True)
    assert graph["memory_limit"] == LIMIT * MIB
    assert [node["name"] for node in graph["nodes"]] == [f"layer {i}" for i in range(LAYERS)]
    for node in graph["nodes"]:
        assert node["choices"] == list(names)
        assert node["cost"] == pytest.approx([m * MS for m in milliseconds], abs=1e-6)
        assert node["memory"] == pytest.approx([m * MIB for m in held], abs=MIB / 100)


def test_the_published_plan_is_found() -> None:
    """Twenty layers recomputed and twelve kept, all by ZeRO-3: nothing is fitted."""
    graph = costs_of(read_graph(FILE))
    found = integer_program(graph)
    assert found.proven
    assert Counter(graph.names(found.picks).values()) == {"ZeRO-3, recomputed": 20, "ZeRO-3": 12}
    priced = priced_memory(graph)
    assert priced.bound <= found.cost <= priced.cost <= found.cost * 1.025
