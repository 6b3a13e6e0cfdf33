"""The mixture of experts: what it sends, on a page and with 600 billion parameters, and learns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.runtime.values import Array
from meshdsl.backends.train.devices import train_local
from meshdsl.backends.train.job import DataFiles, Event, Job
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.project import ROOT

TEXT = (ROOT / "examples/moe.mdsl").read_text("utf-8")
HUGE = {
    "layers": 18, "group": 2048, "token": 2048, "model": 1024, "hidden": 8192, "inner": 8192,
    "experts": 2048, "slot": 2,
}  # fmt: skip
"""GShard's model of 600 billion parameters: each second of its 36 layers has experts."""


def collectives(text: str = TEXT, layout: str = "gshard", **options: Any) -> list[Any]:
    program = compile_text(text, layout=layout, **options).device
    assert program is not None
    return list(explain(program)["collectives"])


def sent(found: list[Any]) -> Counter[str]:
    """The bytes by kind of collective."""
    return sum((Counter({c["kind"]: c["wire_bytes"]}) for c in found), Counter())


def test_a_layer_sends_its_slots_four_times_and_its_gradients_once() -> None:
    text = TEXT.replace("return loss, auxiliary", "return loss")
    found = collectives(text, set_dims={"layers": 1})
    assert [c["kind"] for c in found] == ["all_to_all"] * 4 + ["all_reduce"]
    assert sent(found) == {"all_to_all": 4 * 3072, "all_reduce": 6918}
    assert sum(sent(found).values()) == 19_206


ROUTED = {
    "combine, dispatch, balance = top2_gating[token, experts, slot](logits)": (
        "shares, to, from, full, balance = "
        "top_k_routing[token, experts, choice, slot, pairs, slots, places](logits)"
    ),
    "einsum(dispatch, x -> [experts, group, slot, model])": (
        "einsum((x[token = from] * full)[slots -> (experts, slot)] "
        "-> [experts, group, slot, model])"
    ),
    "out = expert(inside)": (
        "out = einsum(expert(inside) -> [group, experts, slot, model])[(experts, slot) -> slots]"
    ),
    "einsum(combine, out -> [group, token, model])": "sum[choice](shares * out[slots = to])",
    "return loss, auxiliary": "return loss",
}
"""The example with tokens that are fetched, by what it replaces."""


def test_tokens_that_are_fetched_send_as_much() -> None:
    text = TEXT
    for old, new in ROUTED.items():
        assert old in text
        text = text.replace(old, new)
    dims = "dim choice = 2, pairs = token * choice, slots = experts * slot, places = slots + 1\n"
    found = collectives(dims + text.partition("# `slot = token`")[0], set_dims={"layers": 1})
    assert [c["kind"] for c in found] == ["all_to_all"] * 4 + ["all_reduce"]
    assert sum(sent(found).values()) == 19_206


def test_600_billion_parameters_send_as_much_as_was_derived() -> None:
    found = collectives(mesh="e:2048", dtype="bf16", set_dims=HUGE)
    exchanges = [c for c in found if c["kind"] == "all_to_all"]
    assert [c["payload_bytes"] for c in exchanges] == [8_388_608] * 4
    assert sum(c["count"] for c in exchanges) == 72
    assert sent(found)["all_to_all"] == 603_684_864


@pytest.mark.parametrize(("slot", "reduced"), [(8, 4096), (2, 2048)])
def test_what_experts_add_up_is_reduced_where_it_is_smaller(slot: int, reduced: int) -> None:
    """As tokens, of which there are as many under any capacity, or in the slots."""
    found = collectives(layout="gshard_tp", mesh="grid", set_dims={"slot": slot})
    over_tp = [c for c in found if c["axes"] == ["tp"] and c["phase"] == "forward"]
    assert [(c["kind"], c["wire_bytes"]) for c in over_tp] == [
        ("all_reduce", 2 * 4096),  # the dense layers'
        ("all_reduce", 2 * reduced),
    ]


# --- training ------------------------------------------------------------------------------------


def train(folder: Path, layout: str, mesh: str, steps: int) -> list[dict[str, Array]]:
    """The outputs of each step, the tokens that the least busy expert took among them."""
    rng = np.random.default_rng(0)
    topics, maps = rng.normal(size=(8, 32)), rng.normal(size=(8, 32, 32)) / 6
    topic = rng.integers(8, size=(64, 16))
    x = topics[topic] + 0.3 * rng.normal(size=(64, 16, 32))
    target = x + np.einsum("gtm,gtmn->gtn", x, maps[topic])
    data = {"input": x.astype(np.float32), "target": target.astype(np.float32)}
    np.savez(folder / "data.npz", **data)
    text = TEXT.replace(
        "  auxiliary = zeros[]()", "  auxiliary = zeros[]()\n  load = zeros[experts]()"
    )
    text = text.replace(
        "balance\n", "balance\n    load = load + sum[group, token, slot](dispatch)\n"
    )
    text = text.replace("  loss =", "  least = min(load)\n  loss =")
    text = text.replace("loss, auxiliary\n", "loss, auxiliary, least\n")
    emitted = Emitted(compile_text(text, layout=layout, mesh=mesh, reduce="immediate").emitted)
    events: list[Event] = []
    job = Job(DataFiles(str(folder / "data.npz"), batch="group"), steps, seed=1)
    train_local(emitted, job, events.append, lambda: False)
    return [event["values"] for event in events if event["kind"] == "step"]


def test_it_learns_and_no_expert_starves(tmp_path: Path) -> None:
    """Of 256 places in two layers each of 4 experts has 64 if all get equally much."""
    found = train(tmp_path, "gshard", "e:1", 200)
    first, last = found[:10], found[-10:]
    assert mean(last, "loss") < 0.1 * mean(first, "loss")
    assert mean(last, "auxiliary") < mean(first, "auxiliary")
    assert 2 <= mean(last, "auxiliary") < 2.4
    assert min(v["least"] for v in found) >= 20


def mean(steps: list[dict[str, Array]], name: str) -> float:
    return float(np.mean([v[name] for v in steps]))


@pytest.mark.parametrize(("layout", "mesh"), [("gshard", "four"), ("gshard_tp", "grid")])
def test_it_learns_alike_under_every_layout(layout: str, mesh: str, tmp_path: Path) -> None:
    alone = train(tmp_path, "gshard", "e:1", 5)
    for one, other in zip(alone, train(tmp_path, layout, mesh, 5), strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-4)
