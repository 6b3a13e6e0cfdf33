"""What published searches have found, found from no layout at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.pipeline import Compilation, Options
from meshdsl.search.candidate import Candidate
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import solve
from meshdsl.syntax.parse import read_source
from tests.project import ROOT

SEARCH = ROOT / "examples" / "search"
LOSS = 6
"""The bytes by which the loss is summed over 4 devices: Alpa's objectives do not count them."""


def searched(path: Path, mesh: str, sizes: dict[str, int] | None = None, **asked) -> SearchResult:
    """The result of a search in a file; `asked` are fields of `SearchRequest`."""
    chosen = Options(mesh=mesh, set_dims=sizes or {}, program="lm" if path.stem == "lm" else None)
    made = Compilation(read_source(path), chosen)
    tasks = problems(SearchRequest(**asked), made)
    return solve([replace(task, declared=()) for task in tasks], METHODS["layouts"])


def text(plan: Candidate) -> str:
    """The rules of a plan."""
    return str(plan)


# The oracles of its tests/shard_parallel/test_mlp.py: an all_reduce of b bytes costs 2(n-1)/n b.
ALPA_LAYER = 32 * 32 + 32
WIDE = {"batch": 32, "io": 256, "hidden": 256}


def test_alpa_finds_data_parallelism() -> None:
    best = searched(SEARCH / "alpa_mlp.mdsl", "line").plans[0]
    # What the optimizer keeps is split on top: no byte more is sent, and less is held.
    assert text(best) == "batch -> x, state: io -> x"
    assert best.sent == 6 * ALPA_LAYER * 4 * 3 // 2 + LOSS


def test_alpa_finds_tensor_parallelism() -> None:
    best = searched(SEARCH / "alpa_mlp.mdsl", "line", WIDE).plans[0]
    assert text(best) == "hidden -> x"
    assert best.sent == 5 * 32 * 256 * 4 * 3 // 2


def test_alpa_on_two_axes() -> None:
    """Its oracle is 81,920 + 13,056. Biases of split layers are split here: 188 B less."""
    found = searched(SEARCH / "alpa_mlp.mdsl", "square", fix="batch:x,hidden:y")
    best = found.plans[0]
    assert text(best) == "batch -> x, hidden -> y"
    assert best.sent == 81920 + 12868 < 81920 + 13056
    # Alpa's batch stays on one axis: over both, less is sent.
    assert searched(SEARCH / "alpa_mlp.mdsl", "square").plans[0].sent < best.sent


def test_auto_mtf_finds_the_least_memory() -> None:
    """`a:m2;c:m1`, of 75 elements: layout_optimizer_test.py of Mesh-TensorFlow."""
    best = searched(SEARCH / "auto_mtf.mdsl", "grid", objective="memory").plans[0]
    assert text(best) == "a -> m2, c -> m1"
    assert best.peak == 75 * 4


def test_alexnet_is_no_worse_than_one_weird_trick() -> None:
    source = read_source(ROOT / "examples" / "alexnet.mdsl")
    made = Compilation(source, Options(layout="weird_trick", reduce="deferred"))
    trick = made.report["totals"]["wire_bytes"]
    assert searched(Path(source.name), "two").plans[0].sent <= trick


def test_experts_are_split_and_tokens_travel() -> None:
    """GShard's layer, from no layout at all: what the example declares by hand."""
    found = searched(ROOT / "examples" / "moe.mdsl", "four", selectors=True, storage=False)
    best = found.plans[0]
    assert text(best) == "group -> e, expert: experts -> e"
    source = read_source(ROOT / "examples" / "moe.mdsl")
    by_hand = Compilation(source, Options(mesh="four", layout="gshard", reduce="deferred"))
    assert best.sent == by_hand.report["totals"]["wire_bytes"]
    assert not found.proven


LM = ROOT / "examples" / "lm.mdsl"


@pytest.fixture(scope="module")
def lm() -> SearchResult:
    """The language model on 2 x 2 devices."""
    return searched(LM, "square", storage=False)


def test_the_language_model_finds_megatron_next_to_data_parallelism(lm: SearchResult) -> None:
    first, second = (text(plan) for plan in lm.plans[:2])
    assert first == "batch -> (data, tp)"
    assert second == "batch -> data, heads -> tp, hidden -> tp"


def test_under_a_limit_of_memory_states_are_split(lm: SearchResult) -> None:
    """Megatron with ZeRO (Rajbhandari et al. 2020), where no layout without it fits."""
    limit = min(plan.peak for plan in lm.every) - 1
    found = searched(LM, "square", memory=limit, fix="batch:data,heads:tp,hidden:tp")
    best = found.plans[0]
    assert best.peak <= limit
    assert any(rule.selector == ("state",) for rule in best.rules)


def test_megatron_and_zero_under_a_limit_of_memory() -> None:
    """From no layout at all, for GPT-3 on 6 x 8 A100 of 80 GB."""
    options = Options(dtype="bf16")
    made = Compilation(read_source(SEARCH / "gpt3.mdsl"), options)
    found = solve(problems(SearchRequest(memory=80 * 10**9), made), METHODS["layouts"])
    best, *others = found.plans
    megatron = next(p for p in others if not {*best.rules} <= {*p.rules})
    general = {str(rule) for rule in megatron.rules if not rule.selector}
    assert {"batch -> data", "heads -> tp", "hidden -> tp"} <= general
    assert {"params: model -> data", "grads: model -> data"} <= set(map(str, megatron.rules))
    assert max(best.peak, megatron.peak) <= 80e9
    # One that splits no batch, and each product in two ways, is as fast by the profile.
    assert best.seconds < megatron.seconds < 1.03 * best.seconds
