"""Alpa's plans for GPTs, mixtures of experts and Wide-ResNets on V100, beside ours.

Both are judged by our costs, on the profile `v100-p3`; what Alpa's plans reached when measured
stands beside what is predicted of them (`SOURCES`; the rates are those of `parax.auto`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.wide_resnet import network, ways_of
from meshdsl.cluster.profile import load
from meshdsl.costgraph.inter_op import (
    InterOpPlan,
    Way,
    Ways,
    best_pipeline,
    pipeline_time,
    submeshes,
    transformer_ways,
)
from meshdsl.costgraph.transformer import Experts, Transformer

P3 = load("v100-p3")
LIMIT = 15.3e9
"""Bytes of a V100's 16 GB that a program can have."""
BATCH = 1024

Stages = tuple[tuple[int, int, tuple[int, int] | None], ...]
"""Of each stage the groups, the devices, and the logical mesh, where it is compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan of Alpa, and TFLOP/s that each GPU reached with it, counted over `flops` of a step.

    `ways` computes groups, with or without what stages send to each other.
    """

    family: str
    size: str
    devices: int
    micros: int
    groups: int
    stages: Stages
    measured: float
    flops: float
    ways: Callable[[bool], Ways]
    sends: bool = True

    @property
    def name(self) -> str:
        """The row."""
        return f"alpa-{self.family}-{self.size}-{self.devices}".lower()

    def ours(self, sends: bool) -> InterOpPlan:
        """The best plan that fits."""
        ways = self.ways(sends)
        best = best_pipeline(self.groups, self.devices, self.micros, LIMIT, ways)
        assert best is not None, f"{self.name}: nothing fits"
        return best

    def theirs(self, sends: bool) -> tuple[Way, ...]:
        """Alpa's stages, each in the fastest way that fits and has its logical mesh."""
        ways, chosen, start = self.ways(sends), [], 0
        for k, (count, devices, mesh) in enumerate(self.stages):
            flights = len(self.stages) - k
            fitting = [
                way
                for way in ways(start, start + count)
                if way.devices == devices
                and mesh in (None, way.mesh[:2])
                and way.held + flights * way.kept <= LIMIT
            ]
            assert fitting, f"{self.name}: stage {k} does not fit"
            chosen.append(min(fitting, key=lambda way: way.seconds))
            start += count
        return tuple(chosen)

    def slower(self, sends: bool) -> float:
        """The share by which Alpa's plan is slower than ours."""
        theirs = pipeline_time(self.theirs(sends), self.micros)
        return theirs / self.ours(sends).seconds - 1

    def predicted(self) -> float:
        """TFLOP/s of a GPU with Alpa's plan."""
        seconds = pipeline_time(self.theirs(self.sends), self.micros)
        return self.flops / self.devices / seconds / 1e12

    def plan(self) -> str:
        """The stages: how many have so many groups, and their mesh."""
        parts = []
        for stage, same in itertools.groupby(self.stages):
            groups, devices, mesh = stage
            shape = " x ".join(map(str, mesh)) if mesh else f"{devices}"
            parts.append(f"{len([*same])} of {groups} on {shape}")
        return "; ".join(parts)


def _transformer(model: Transformer, groups: int, micros: int, devices: int) -> Callable[..., Ways]:
    return lambda sends: transformer_ways(model, P3, groups, BATCH // micros, devices, sends)


# --- GPT -----------------------------------------------------------------------------------------

GPT: list[tuple[str, int, int, int, int, int, int, Stages, float]] = [
    ("350M", 1, 24, 1024, 16, 512, 1, ((1, 1, (1, 1)),), 45.07),
    ("760M", 2, 24, 1536, 16, 128, 6, ((3, 1, (1, 1)),) * 2, 57.92),
    ("1.3B", 4, 24, 2048, 32, 128, 6, ((3, 2, (2, 1)),) * 2, 58.21),
    ("2.6B", 8, 32, 2560, 32, 128, 8, (*((2, 2, (2, 1)),) * 2, (4, 4, (4, 1))), 61.61),
    ("6.7B", 16, 32, 4096, 32, 64, 8, ((4, 8, (2, 4)),) * 2, 60.0),
    ("15B", 32, 48, 5120, 40, 128, 16, ((4, 8, (2, 4)),) * 4, 59.9),
    ("39B", 64, 48, 8192, 64, 1024, 16, ((1, 4, (1, 4)),) * 16, 57.0),
]
"""Devices, layers, width, heads, micro-batches of 1,024 sequences of 1,024 tokens, groups, stages,
TFLOP/s. Devices of a node of eight are 1 x n, logical meshes data x tensor."""


def _gpt() -> Iterator[Case]:
    for size, devices, layers, hidden, heads, micros, groups, stages, measured in GPT:
        model = Transformer(layers, hidden, heads, 1024, 51200, BATCH)
        flops, ways = model.step_flops(True), _transformer(model, groups, micros, devices)
        yield Case("gpt", size, devices, micros, groups, stages, measured, flops, ways)


# --- mixtures of experts -------------------------------------------------------------------------

MOE: list[tuple[str, int, int, int, int, int, int, Stages, float]] = [
    ("380M", 1, 8, 768, 8, 512, 1, ((1, 1, (1, 1)),), 45.46),
    ("690M", 2, 8, 768, 16, 32, 8, ((8, 2, (2, 1)),), 43.03),
    ("1.3B", 4, 16, 768, 16, 32, 8, ((4, 2, (2, 1)),) * 2, 39.92),
    ("2.4B", 8, 16, 1024, 16, 32, 8, ((4, 4, (4, 1)),) * 2, 45.76),
    ("10B", 16, 16, 1536, 32, 16, 8, ((4, 8, (8, 1)),) * 2, 45.36),
    ("27B", 32, 16, 2048, 48, 128, 8, ((1, 4, (4, 1)),) * 8, 38.84),
    ("70B", 64, 32, 2048, 64, 64, 8, ((1, 8, (8, 1)),) * 8, 36.55),
]
"""Devices, layers, width, experts of every other layer, micro-batches, groups, stages, TFLOP/s.

As benchmark/alpa/benchmark_one_case_moe.py at 0e7461c has it: products of eight times the width,
16 heads, groups of 2,048 tokens, Adafactor. FLOPs are those of alpa/util.py, `compute_moe_tflops`.
"""


def _moe() -> Iterator[Case]:
    for size, devices, layers, hidden, experts, micros, groups, stages, measured in MOE:
        mixture = Experts(experts)
        model = Transformer(layers, hidden, 16, 1024, 32000, BATCH, 8, mixture, "adafactor")
        flops, ways = model.step_flops(True), _transformer(model, groups, micros, devices)
        yield Case("moe", size, devices, micros, groups, stages, measured, flops, ways)


# --- Wide-ResNets --------------------------------------------------------------------------------

Blocks = tuple[tuple[int, int], ...]
WIDE: list[tuple[str, int, int, int, int, int, int, Blocks, int, float, tuple[float, float]]] = [
    ("250M", 1, 50, 160, 2, 1536, 24, ((16, 1),), 1, 8.3, (8.3738, 43.985)),
    ("500M", 2, 50, 224, 2, 1536, 24, ((16, 2),), 1, 8.46, (8.4803, 42.503)),
    ("1B", 4, 50, 320, 2, 1536, 24, ((16, 4),), 1, 8.16, (8.1457, 45.104)),
    ("2B", 8, 50, 448, 2, 1536, 24, ((8, 4), (8, 4)), 1, 8.04, (7.7145, 46.639)),
    ("4B", 16, 50, 640, 2, 1536, 32, ((5, 4), (4, 4), (7, 8)), 4, 6.76, (4.7175, 77.785)),
    (
        "6.8B",
        32,
        50,
        320,
        16,
        1536,
        32,
        ((5, 8), (4, 8), (4, 8), (3, 8)),
        4,
        6.6,
        (1.9642, 154.205),
    ),
    (
        "13B",
        64,
        101,
        320,
        16,
        1520,
        38,
        ((4, 8),) * 6 + ((5, 8), (4, 8)),
        8,
        5.3,
        (0.6971, 437.896),
    ),
]
"""Devices, layers, base channels, width factor, batch, micro-batches; blocks and devices a stage.

Behind them the fewest devices of a stage of ours, so that it is found in seconds, and TFLOP/s. How
Alpa splits the blocks within a stage is not compared: its logical meshes alternate without a reason
in the costs. The last two are the rate and the seconds of `parax.intra_only` for the same model:
their product is how many FLOPs Alpa counts, between 2.84 and 2.89 forward passes.
"""


def _wide_resnets() -> Iterator[Case]:
    for size, devices, *network_sizes, batch, micros, blocks, fewest, measured, counted in WIDE:
        layers = network(*network_sizes)
        sizes = [n for n in submeshes(P3, devices) if fewest <= n <= 8]
        ways = ways_of(layers, batch // micros, micros, sizes)
        stages = tuple((count, used, None) for count, used in blocks)
        flops = counted[0] * 1e12 * counted[1] * devices
        yield Case(
            "wide-resnet",
            size,
            devices,
            micros,
            len(layers),
            stages,
            measured,
            flops,
            lambda sends, ways=ways: ways,  # type: ignore[misc]
            sends=False,
        )


CASES = {case.name: case for case in (*_gpt(), *_moe(), *_wide_resnets())}

SOURCES = {
    "alpa-gpt": "plans: alpa-projects/alpa at 14ad84b, benchmark/alpa/suite_auto_gpt.py",
    "alpa-moe": "plans: alpa-projects/alpa at 053c9e2, benchmark/alpa/suite_auto_moe.py",
    "alpa-wide-resnet": "plans: alpa-projects/alpa at 0e7461c, benchmark/alpa/suite_wresnet.py",
    "published": "TFLOP/s/GPU: alpa-projects/alpa at 02b5e33, osdi22_artifact/results_e2e.tsv",
}

# --- the table -----------------------------------------------------------------------------------

HEAD = """\
| row | Alpa's stages | slower than ours | with sending | published | predicted | off by |
|---|---|---|---|---|---|---|"""


def line(case: Case) -> str:
    """A line of the table, of which every figure but the published one is computed now."""
    rate = case.predicted()
    sending = f"{case.slower(True):.1%}" if case.sends else "-"
    figures = f"{case.measured:.4g} | {rate:.4g} | {rate / case.measured - 1:+.1%}"
    return f"| `{case.name}` | {case.plan()} | {case.slower(False):.1%} | {sending} | {figures} |"
