"""Mixtures of experts in graphs of transformers: counted anew, on one device and on several."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from meshdsl.cluster.profile import Cluster, load
from meshdsl.cluster.timing import Timing
from meshdsl.costgraph.grid import divisions, evaluate
from meshdsl.costgraph.inter_op import InterOpPlan, Way, transformer_ways
from meshdsl.costgraph.solve import as_program
from meshdsl.costgraph.transformer import STATES, Experts, LayerStage, Transformer
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh

SMALL = Transformer(6, 64, 8, 32, 128, 16, 8, Experts(8, 2, 2, 64), "adafactor")
P3 = load("v100-p3")
FLAT = replace(P3, device=replace(P3.device, gemm_half=(0.0, 0.0)))
"""A product takes as long by its FLOPs, whatever its sides are."""

ALPA = [
    ("380M", 8, 768, 8, 0.3835),
    ("690M", 8, 768, 16, 0.6857),
    ("1.3B", 16, 768, 16, 1.3468),
    ("2.4B", 16, 1024, 16, 2.383),
    ("10B", 16, 1536, 32, 10.1696),
    ("27B", 16, 2048, 48, 26.6481),
    ("70B", 32, 2048, 64, 70.4152),
]
"""Layers, width, experts and 10^9 parameters: alpa-projects/alpa at 053c9e2, suite_manual_moe.py,
and at 02b5e33, osdi22_artifact/results_e2e.tsv."""


@pytest.mark.parametrize(("layers", "hidden", "experts", "published"), [c[1:] for c in ALPA])
def test_published_parameters(layers: int, hidden: int, experts: int, published: float) -> None:
    model = Transformer(layers, hidden, 16, 1024, 32000, 1024, 8, Experts(experts))
    assert model.parameters / 1e9 == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_parameters_are_those_of_the_tensors(every: int) -> None:
    m = replace(SMALL, experts=Experts(8, every, 2, 64))
    h, inner, count = m.hidden, m.mlp * m.hidden, 0
    for layer in range(m.layers):
        shapes = [(h, 3 * h), (3 * h,), (h, h), (h,), *[(h,)] * 4]
        mlp = [(h, inner), (inner,), (inner, h), (h,)]
        routed = [(h, 8), (8, h, inner), (8, inner, h)]
        shapes += mlp if layer % every else routed
        count += sum(math.prod(shape) for shape in shapes)
    assert m.parameters == count + (m.vocab + m.seq) * h


def einsum_flops(equation: str, **sizes: int) -> int:
    letters = {c for c in equation if c.isalpha()}
    return 2 * math.prod(sizes[c] for c in letters)


def test_flops_are_those_of_gshard() -> None:
    """The products of alpa/model/moe.py at 3995d72, counted by their letters."""
    m = SMALL
    assert m.experts is not None
    sizes = {"G": m.batch * m.seq // 64, "S": 64, "E": 8, "C": 16, "M": 64, "H": 8 * 64}
    routing = ["GSM,ME->GSE", "GSEC,GSM->EGCM", "EGCM,EMH->EGCH", "EGCH,EHM->GECM"]
    routed = sum(einsum_flops(e, **sizes) for e in (*routing, "GSEC,GECM->GSM"))
    mlp = 2 * einsum_flops("GSM,MH->GSH", **sizes)
    dense = m.layer_flops(m.batch)
    assert m.layer_flops(m.batch, routed=True) - dense == routed - mlp
    assert m.step_flops(False) == 9 * dense + 9 * (dense + routed - mlp) + 3 * m.head_flops(m.batch)


def stage(cluster: Cluster, data: int, tensor: int, shared: int, **others: bool) -> LayerStage:
    """All layers of `SMALL` on a mesh, four sequences a device."""
    mesh = Mesh("submesh", (("data", data), ("tensor", tensor)))
    timing = Timing(cluster, mesh)
    return LayerStage(SMALL, timing, 6, 4, routed=3, shared=shared, **others)


MESHES = [
    (data, tensor, shared)
    for data, tensor in itertools.product((1, 2, 4), repeat=2)
    for shared in SMALL.expert_splits(data)
    if data * tensor <= 8
]


@pytest.mark.parametrize(("data", "tensor", "shared"), MESHES)
def test_all_devices_hold_all_parameters(data: int, tensor: int, shared: int) -> None:
    """Of replicated ones each replica; with split state each state once."""
    experts = 3 * SMALL.expert_parameters
    dense = SMALL.parameters - experts
    for split in (False, True):
        one = stage(P3, data, tensor, shared, split_state=split)
        whole = (dense * data + experts * data / shared) * 6
        whole += (dense + experts) * 4 if split else (dense * data + experts * data / shared) * 4
        assert one.held() * data * tensor == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_experts_are_exchanged_twice_a_pass(data: int, tensor: int) -> None:
    """Where products take as long by their FLOPs, two exchanges in each of three passes are all."""
    apart, shared = (stage(FLAT, data, tensor, n) for n in (1, data))
    slots = 4 * SMALL.seq * 2 // tensor
    exchanged = apart.timing.collective("all_to_all", ("data",), slots * SMALL.hidden * 2).seconds
    more = shared.seconds() - apart.seconds()
    assert more == pytest.approx(2 * 3 * 3 * exchanged, rel=1e-9)
    assert shared.once() < apart.once()
    assert shared.working() == apart.working()


def test_tensor_parallel_devices_share_the_flops() -> None:
    """Experts where they divide, else their width; masks only with experts."""
    whole, halved = (stage(FLAT, 1, n, 1) for n in (1, 2))
    sending = halved.timing.collective("all_reduce", ("tensor",), halved.width * 2).seconds
    computed = halved.seconds() - 6 * 6 * sending
    assert whole.seconds() / 2 < computed < whole.seconds()
    three = replace(SMALL, experts=Experts(3, 2, 2, 64))
    apart, split = (replace(one, model=three) for one in (whole, halved))
    assert split.held() * 2 == pytest.approx(apart.held(), rel=1e-12)
    # Both have all masks: their activations are more than half.
    assert split.working() > apart.working() / 2 + 2 * 4 * SMALL.seq * 42 * 3


def test_a_kept_layer_keeps_what_one_computed_again_needs() -> None:
    again, kept = (stage(P3, 2, 1, 2, recompute=r) for r in (True, False))
    assert again.working() > kept.working() == 0
    dense = LayerStage(SMALL, again.timing, 3, 4, recompute=False)
    assert kept.kept() == dense.kept() + 3 * again.working()


def test_groups_of_tokens_are_whole_on_a_device() -> None:
    """Sixteen sequences in groups of two: at most eight devices by data."""
    for devices in (1, 2, 4, 8, 16):
        for d in divisions(SMALL, P3, devices):
            assert d.devices == devices
            assert d.micro * SMALL.seq % 64 == 0
            assert d.expert in (1, d.data)
            assert evaluate(SMALL, P3, d).seconds > 0
    names = {way.name for way in transformer_ways(SMALL, P3, 6, 16, 8)(0, 6)}
    assert names == {
        str((data, tensor, expert))
        for data, tensor in itertools.product((1, 2, 4, 8), repeat=2)
        for expert in {1, data}
        if data * tensor <= 8
    }


LOOP = """
dim batch = 8, model = 4, hidden = 4, layers = 8
program net(x[batch, model], y[batch, model]) {{
  repeat layers {{
    param w[model, hidden]
    x = tanh(einsum(x, w -> [batch, hidden])[hidden -> model])
  }}
  loss = mean((x - y)^2)
  minimize loss with sgd(lr=0.1)
  return loss
}}
mesh m = {mesh}
layout plan {{ batch -> data, {rules} }} with {schedule}
"""


@pytest.mark.parametrize(
    ("starts", "meshes", "said"),
    [
        ((0, 4), ((2, 1), (2, 1)), "one_f_one_b[batch](4)"),
        ((0, 3, 6), ((1, 2),) * 3, 'one_f_one_b[batch](4, layers="3 3 2")'),
        ((0, 4), ((2, 1), (1, 2)), "their meshes differ"),
        ((0,), ((2, 2),), "mesh { pipe: 1, data: 2, tensor: 2 }"),
    ],
)
def test_a_plan_is_a_layout_where_its_stages_have_one_mesh(
    starts: tuple[int, ...], meshes: tuple[tuple[int, int], ...], said: str
) -> None:
    ways = tuple(Way(math.prod(mesh), 1.0, 0.0, 0.0, str(mesh), mesh) for mesh in meshes)
    model = Transformer(8, 64, 8, 32, 128, 8)
    program, obstacle = as_program(model, InterOpPlan(starts, ways, 1.0, 0), 4, 8)
    assert said in (program or obstacle or "")
    if program is None or len(starts) == 1:
        return
    mesh, rule = program.removeprefix("mesh ").split(", layers ->")
    rules, schedule = f"layers ->{rule}".split(" with ")
    text = LOOP.format(mesh=mesh, rules=rules, schedule=schedule)
    compilation = Compilation(Source("net.mdsl", text), Options(mesh="m", layout="plan"))
    assert dict(compilation.placed.mesh.axes)["pipe"] == len(starts)


def test_iterations_of_a_loop_are_whole() -> None:
    ways = (Way(1, 1.0, 0.0, 0.0, "", (1, 1, 1)),) * 2
    for starts, program in (((0, 2), 'layers="1 2"'), ((0, 3), None)):
        found, obstacle = as_program(SMALL, InterOpPlan(starts, ways, 1.0, 0), 4, 6)
        assert (found is None) == (program is None) == bool(obstacle)
        assert program is None or program in (found or "")


def test_layers_without_experts_have_no_ways_of_theirs() -> None:
    ways = transformer_ways(SMALL, P3, 6, 16, 8)
    assert len(ways(1, 2)) == len({w.name for w in ways(1, 2)}) < len(ways(0, 1))
    assert STATES["adafactor"] < STATES["adam"]
