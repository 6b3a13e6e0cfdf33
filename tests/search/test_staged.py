"""Layouts with a pipeline: found, written, compiled again, and never worse than those without."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from meshdsl.report.search_result import block_of
from meshdsl.search.candidate import Candidate
from meshdsl.search.methods import METHODS
from meshdsl.search.pipeline_search import FITTED, _PipelineSearch
from meshdsl.search.problem import SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.reasons import reasons
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import solve
from meshdsl.search.stage_boundaries import Beginning, Beginnings
from meshdsl.simulate.engine import simulate
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.covering import some
from tests.pipelines.test_programs import PROGRAMS

__all__ = ["cli"]

TEXT = """
dim batch = 16, io = 512, hidden = 2048, layers = 4, out = io
mesh some = { data: 2, pipe: 2 }
layout staged { layers -> pipe } with gpipe[batch](4)
program net(x[batch, io], t[batch, io]) {
  repeat layers {
    param w[io, hidden]
    param v[hidden, out]
    x = x + einsum(tanh(einsum(x, w -> [batch, hidden])), v -> [batch, out])[out -> io]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with adamw(lr=0.01)
}
"""
MESH = "data:2,pipe:2"
PAIR = "pipe:2"
CHAIN = """
dim batch = 32, io = 64, a = 512, b = 256, c = 1024, d = 64, out = 16
program net(x[batch, io], t[batch, out]) {
  param w1[io, a]
  param w2[a, b]
  param w3[b, c]
  param w4[c, d]
  param w5[d, out]
  h1 = tanh(einsum(x, w1 -> [batch, a]))
  h2 = tanh(einsum(h1, w2 -> [batch, b]))
  h3 = tanh(einsum(h2, w3 -> [batch, c])) + mean[b](h2)
  h4 = tanh(einsum(h3, w4 -> [batch, d]))
  y = einsum(h4, w5 -> [batch, out])
  loss = mean(square(y - t))
  return loss
  minimize loss with adamw(lr=0.01)
}
"""
"""A network without a loop, whose layers are of several sizes."""


@cache
def found_in(
    text: str,
    mesh: str,
    memory: int | None = None,
    pipeline: str | None = "pipe",
    storage: bool = True,
) -> SearchResult:
    """What is found on a mesh of H100s."""
    made = Compilation(Source("net.mdsl", text), Options(mesh=mesh))
    asked = SearchRequest(cluster="h100", memory=memory, pipeline=pipeline, storage=storage)
    return solve(problems(asked, made), METHODS["layouts"])


@pytest.mark.parametrize(
    ("net", "mesh", "storage"),
    some(
        [
            (TEXT, MESH, True),
            (TEXT, "pipe:4", True),
            (CHAIN, "pipe:2", True),
            (CHAIN, "pipe:3,tp:2", False),
        ]
    ),
)
def test_what_is_printed_is_what_was_found(net: str, mesh: str, storage: bool) -> None:
    """Each pipeline, as text: it sends, holds and takes what the search says."""
    found = found_in(net, mesh, storage=storage)
    piped = [plan for plan in found.every if plan.schedule is not None]
    assert piped
    for plan in sorted(piped, key=found.problem.key)[:4]:
        text = f"{net}\n{block_of(found, plan, 'again')}"
        options = Options(mesh=mesh, layout="again", reduce=plan.policy)
        made = Compilation(Source("net.mdsl", text), options)
        assert made.checked() is not None
        report = explain(made.device)
        assert report["totals"]["wire_bytes"] == plan.sent
        assert report["memory"]["peak"] == plan.peak
        assert report["totals"]["flops_per_device"] == plan.flops
        timing = Timing(load("h100"), made.device.mesh)
        assert simulate(made.device, timing).seconds == pytest.approx(plan.seconds, rel=1e-9)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_network_is_cut_as_none_of_all_ways_is_better(stages: int) -> None:
    """Every cut, written by hand and compiled: none takes less time than what is found."""
    found = found_in(CHAIN, f"pipe:{stages}", storage=stages == 2)
    best = min((p for p in found.every if p.schedule is not None), key=found.problem.key)
    assert best.schedule is not None
    assert len(best.cuts) == best.schedule.verified(stages).schedule.stages - 1
    names = ("h2", "h3", "h4", "y", "loss")
    timing = Timing(load("h100"), found.problem.mesh)
    for chosen in itertools.combinations(names, stages - 1):
        cuts = ", ".join(f"{name}: pipe = {i + 1}" for i, name in enumerate(chosen))
        text = f"{CHAIN}\nlayout cut {{ {cuts} }} with one_f_one_b[batch]({best.schedule.micro})"
        options = Options(mesh=f"pipe:{stages}", layout="cut")
        made = Compilation(Source("net.mdsl", text), options)
        assert simulate(made.device, timing).seconds >= best.seconds * (1 - 1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_even_stages(before: list[int], stages: int) -> None:
    """The largest stage is as small as any way to cut has it."""
    ends = list(itertools.accumulate(before, lambda a, b: a + b + 1))
    places = Beginnings(tuple(Beginning((f"v{i}",), n) for i, n in enumerate(ends)), ends[-1] + 3)
    ways = list(places.every(stages))
    assert places.ways(stages) == len(ways)

    def largest(chosen: tuple[int, ...]) -> float:
        borders = [0.0, *(places.places[i].before for i in chosen), places.work]
        return max(b - a for a, b in itertools.pairwise(borders))

    even = places.even(stages)
    assert (even is None) == (not ways)
    if even is not None:
        assert largest(even) == min(map(largest, ways))
        assert set(places.near(even)) <= set(ways) - {even}


@pytest.mark.parametrize("name", some(["frozen", "two carries", "batch last"], of=3))
def test_never_worse_than_without(name: str) -> None:
    text = PROGRAMS[name].replace("OPT", "adamw(lr=0.01)")
    with_stages = found_in(text, "d:2,pipe:2", storage=False)
    without = found_in(text, "d:2,pipe:2", pipeline=None, storage=False)
    key = without.problem.key
    assert key(with_stages.plans[0]) <= key(without.plans[0])
    assert with_stages.count.pipelines > 0
    assert not with_stages.proven


def test_memory_that_only_stages_keep_to() -> None:
    """Below what any layout without stages takes, one with them is found, and fits."""
    limit = min(p.peak for p in found_in(TEXT, PAIR).every if p.schedule is not None)
    found = found_in(TEXT, PAIR, limit)
    assert found.plans
    assert all(p.schedule is not None and p.peak <= limit for p in found.plans)
    assert not found_in(TEXT, PAIR, limit, None).plans


def test_computing_again_is_found_where_nothing_else_fits() -> None:
    """A byte less than what any pipeline holds that computes nothing again."""
    every = [p for p in found_in(TEXT, PAIR).every if p.schedule is not None]
    limit = min(plan.peak for plan in every) - 1
    found = found_in(TEXT, PAIR, limit)
    again = [p for p in found.every if p.schedule and "recompute=stage" in str(p.schedule)]
    assert again
    if min(plan.peak for plan in again) <= limit:
        assert found.plans
        assert found.plans[0].peak <= limit


def test_the_fastest_are_stored_and_computed_again_until_they_fit() -> None:
    """None does within a byte. A conventional layout is among those that are tried."""
    every = found_in(TEXT, "data:2,pipe:2,tp:2", 1).every
    tried: dict[frozenset[str], list[Candidate]] = {}
    for plan in (p for p in every if p.schedule is not None):
        general = frozenset(str(rule) for rule in plan.rules if not rule.selector)
        tried.setdefault(general, []).append(plan)
    assert frozenset(("batch -> data", "hidden -> tp", "layers -> pipe")) in tried
    plain = sorted(filter(is_plain, every), key=lambda plan: plan.seconds)
    assert len(plain) > FITTED
    kinds = set()
    for plan in plain[:FITTED]:
        others = tried[frozenset(map(str, plan.rules))]
        assert micro_of(plan) in map(micro_of, filter(is_again, others))
        # Of a layout that splits all parameters nothing is stored in parts.
        kinds |= {(is_again(other), len(other.rules) > len(plan.rules)) for other in others}
    assert kinds == {*itertools.product((False, True), repeat=2)}


def is_plain(plan: Candidate) -> bool:
    """Whether a pipeline has no rules for what is stored, and computes nothing again."""
    if plan.schedule is None or plan.schedule.name != "one_f_one_b":
        return False
    return not any(rule.selector for rule in plan.rules) and not plan.schedule.options


def is_again(plan: Candidate) -> bool:
    return "recompute=stage" in str(plan.schedule)


def micro_of(plan: Candidate) -> int | None:
    return plan.schedule.micro if plan.schedule else None


def test_no_pipeline_that_is_left_out_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the seconds of all operators rule out, and layouts beyond the best pipeline."""
    bounded = found_in(TEXT, PAIR)
    monkeypatch.setattr(_PipelineSearch, "_is_slower", lambda self, computing: False)
    free = found_in.__wrapped__(TEXT, PAIR)
    assert bounded.plans[0].asked == free.plans[0].asked
    assert bounded.count.pipelines <= free.count.pipelines


def between(mesh: str) -> int:
    """Bytes of memory that pipelines keep to, and no other layout."""
    least = min(plan.peak for plan in found_in(TEXT, mesh, pipeline=None).every)
    staged = min(p.peak for p in found_in(TEXT, mesh).every if p.schedule is not None)
    assert staged < least
    return (staged + least) // 2


def test_reasons_are_those_of_the_pipeline() -> None:
    """A rule that is left out is left out of the same pipeline."""
    found = found_in(TEXT, MESH)
    plan = next(plan for plan in found.plans if plan.schedule is not None)
    block = block_of(found, plan)
    assert block.rstrip().endswith(f"}} with {plan.schedule}")
    assert "layers -> pipe" in block
    assert all("  # " in line for line in block.splitlines()[:-1])


def test_an_optimizer_that_accumulates_has_its_micro_batches() -> None:
    text = TEXT.replace("adamw(lr=0.01)", "adamw(lr=0.01, accumulate=4)")
    found = found_in(text, "pipe:2")
    uses = {str(p.schedule) for p in found.every if p.schedule is not None}
    assert "one_f_one_b" in uses
    assert not any("[" in use for use in uses)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_in_a_file_and_as_json(file: Path, cli: Cli) -> None:
    memory = ("--memory", f"{between(PAIR)}B")
    common = (file, "--mesh", PAIR, "--cluster", "h100", "--pipeline", "pipe")
    done = cli("search", *common, "--json", *memory, "--write", "best", "--expect")
    assert done.code == 0
    facts = json.loads(done.out)
    assert facts["space"]["pipelines"] > 0
    assert facts["plans"][0]["schedule"].startswith(("one_f_one_b", "zb", "interleaved", "gpipe"))
    checked = cli("check", file)
    assert (checked.code, checked.err) == (0, "")
    assert f"with {facts['plans'][0]['schedule']}" in file.read_text(encoding="utf-8")


def test_every_shape_of_a_mesh(file: Path, cli: Cli) -> None:
    """Where the axis has one device, there are no stages."""
    options = ("--devices", "2", "--cluster", "h100", "--pipeline", "pipe")
    told = cli("search", file, "--mesh", "data:1,pipe:1", *options)
    assert told.code == 0
    assert "other meshes" in told.out


def test_a_batch_that_stages_do_not_divide_is_cut_all_the_same() -> None:
    """The numbers of micro-batches nearest to multiples of the stages are taken."""
    text = TEXT.replace("layers = 4", "layers = 6").replace("batch = 16", "batch = 32")
    found = found_in(text, "pipe:3")
    numbers = {p.schedule.micro for p in found.every if p.schedule is not None}
    assert numbers == {4, 8, 16, 32}


@pytest.mark.parametrize("fix", some(["layers:pipe,batch:data", "layers:pipe"]))
def test_stages_that_are_asked_for(fix: str, file: Path, cli: Cli) -> None:
    """Then there are pipelines alone."""
    options = ("--mesh", "data:2,pipe:2", "--cluster", "h100", "--pipeline", "pipe", "--fix", fix)
    facts = json.loads(cli("search", file, *options, "--json").out)
    assert facts["plans"]
    for plan in facts["plans"]:
        rules = {f"{r['dim']}:{','.join(r['axes'])}" for r in plan["rules"] if not r["selector"]}
        assert plan["schedule"] is not None
        assert rules >= set(fix.split(","))


def test_no_rule_of_a_pipeline_does_harm() -> None:
    """Less a rule, in stages all the same, none is better: also on the best of several meshes."""
    made = Compilation(Source("net.mdsl", TEXT), Options(mesh="data:1,pipe:1"))
    limit = between(PAIR)
    asked = SearchRequest(cluster="h100", memory=limit, pipeline="pipe", devices=2)
    for found in (found_in(TEXT, PAIR, limit), solve(problems(asked, made), METHODS["layouts"])):
        best = found.plans[0]
        for reason in reasons(found, best):
            if reason.without is not None and found.problem.fits(reason.without):
                assert found.problem.key(reason.without) >= found.problem.key(best)


def test_fewest_bytes() -> None:
    """Without a cluster, too, what is printed is what was found."""
    made = Compilation(Source("net.mdsl", TEXT), Options(mesh="data:2,pipe:2"))
    found = solve(problems(SearchRequest(pipeline="pipe"), made), METHODS["layouts"])
    plan = next(plan for plan in found.plans if plan.schedule is not None)
    text = f"{TEXT}\n{block_of(found, plan, 'again')}"
    options = Options(mesh="data:2,pipe:2", layout="again", reduce=plan.policy)
    report = explain(Compilation(Source("net.mdsl", text), options).device)
    assert report["totals"]["wire_bytes"] == plan.sent


REFUSED = {
    "--fix layers:data": ("MD0907", "needs micro-batches", "with one_f_one_b"),
    "--pipeline pip": ("MD0647", "the mesh has no such axis", "write `--pipeline pipe`"),
    "--pipeline pipe --mesh pipe:3": ("MD0647", "does not divide over `pipe` of 3", "another size"),
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options: str, file: Path, cli: Cli) -> None:
    done = cli("search", file, "--cluster", "h100", *options.split())
    code, message, help = REFUSED[options]
    assert done.codes == [f"error[{code}]"]
    assert message in done.err
    assert help in done.err


WITHOUT = {
    "no loop": (
        "repeat layers {\n    param w[io, hidden]\n    param v[hidden, out]",
        "no `repeat`",
    ),
    "no step": ("minimize loss with adamw(lr=0.01)", "no training step"),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_programs_without_stages(case: str, file: Path, cli: Cli) -> None:
    old, message = WITHOUT[case]
    text = TEXT.replace(old, old.replace("repeat layers {\n", "") if "repeat" in old else "")
    text = text.replace("  }\n  loss", "  loss") if "repeat" in old else text
    file.write_text(text, encoding="utf-8")
    done = cli("search", file, "--cluster", "h100", "--pipeline", "pipe", "--mesh", "pipe:4")
    assert done.codes == ["error[MD0647]"]
    assert message in done.err


def test_in_python(file: Path) -> None:
    """A plan is compiled with its schedule."""
    limit = between(PAIR)
    found = md.load(file).search({"pipe": 2}, cluster="h100", pipeline="pipe", memory=limit)
    first = found[0]
    assert f"with {found.json['plans'][0]['schedule']}" in found.layout
    assert "SCHEDULE = (" in first.code
    assert first.cost().wire_bytes == found.json["plans"][0]["wire_bytes"]


def test_a_cut_network_in_python(tmp_path: Path) -> None:
    """Plans are compiled with their stages."""
    file = tmp_path / "chain.mdsl"
    file.write_text(CHAIN, encoding="utf-8")
    found = md.load(file).search({"pipe": 2}, cluster="h100", pipeline="pipe", storage=False)
    cut = [
        (plan, told) for plan, told in zip(found, found.json["plans"], strict=True) if told["cuts"]
    ]
    assert cut
    for plan, told in cut:
        assert "SCHEDULE = (" in plan.code
        assert plan.cost().wire_bytes == told["wire_bytes"]


@pytest.mark.parametrize("fix", some(["io:tp", "hidden:tp", "batch:tp", "io:tp,batch:none"]))
def test_a_rule_that_is_fixed_meets_the_batch(fix: str) -> None:
    """No split of the batch is tried over an axis that a fixed rule has of the same tensors."""
    made = Compilation(Source("net.mdsl", TEXT), Options(mesh="pipe:2,tp:2"))
    found = solve(
        problems(SearchRequest(pipeline="pipe", fix=fix, storage=False), made), METHODS["layouts"]
    )
    dim, axis = fix.split(",")[0].split(":")
    assert found.plans
    for plan in found.plans:
        assert any((rule.dim, rule.axes) == (dim, (axis,)) for rule in plan.rules)


@pytest.mark.parametrize("options", ["--from staged", "--pipeline pipe --from batch:data"])
def test_begun_from_stages_or_beside_them(options: str, file: Path, cli: Cli) -> None:
    """A layout to begin from may have stages, and stages may be looked for beside it."""
    done = cli("search", file, "--cluster", "h100", "--no-storage", *options.split())
    assert done.codes == []
