"""`advise`: what it says is what the search finds, and its commands do what it says."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.advice_report import advised
from meshdsl.search.advice import KINDS, advice
from meshdsl.search.request import SearchRequest
from tests.cli.command import Cli
from tests.cli.conftest import cli

__all__ = ["cli"]

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = {"mlp": "--budget 20s", "matmul": "", "digits": "--memory 190kB"}
COSTLY = {
    "dlrm": "--memory 2MB", "moe": "", "vit": "", "transformer": "--memory 15MB", "nmt": "",
    "linear_attention": "", "encdec": "", "few_kv_heads": "--memory 1MB",
    "lm": "--program lm --mesh data:2,tp:2 --memory 19MB",
}  # fmt: skip
MODELS = QUICK | COSTLY if "MESHDSL_CASES" in os.environ else QUICK


@pytest.mark.parametrize("name", MODELS)
def test_the_advice_is_what_the_search_finds(name: str, cli: Cli, tmp_path: Path) -> None:
    """And its commands, followed literally, have its figures, and write its layout."""
    follow((EXAMPLES / f"{name}.mdsl").read_text("utf-8"), MODELS[name], cli, tmp_path)


def test_the_advice_of_a_pipeline_is_found_again(cli: Cli, tmp_path: Path) -> None:
    """Only stages fit: the search of the last command has to look for them, too."""
    facts = follow(STAGES, "--pipeline pipe --memory 650kB", cli, tmp_path)
    assert [way["kind"] for way in facts["ways"]] == ["pipeline"]


def follow(text: str, options: str, cli: Cli, folder: Path) -> Any:
    """The advice for a program as data, after its commands have been carried out."""
    file = folder / "program.mdsl"
    file.write_text(text, encoding="utf-8")
    words = [str(file), "--cluster", "h100", *options.split()]
    facts = json.loads(cli("advise", *words, "--json").out)
    plans = {plan["name"]: plan for plan in facts["plans"]}
    best = plans["advised"]
    assert best["memory"] <= facts["memory_limit"]
    faster = (p for p in facts["plans"] if p["fits"] and p["step_seconds"] < best["step_seconds"])
    # A search divides the work: plans that do all of it everywhere are no result of it.
    assert {p["name"] for p in faster} <= {"one device"}
    explain, search = (shlex.split(c)[1:] for c in facts["commands"])
    report = json.loads(cli(*explain, "--json").out)
    assert report["memory"]["peak"] == best["memory"]
    assert report["totals"]["wire_bytes"] == best["wire_bytes"]
    assert report["time"]["seconds"] == pytest.approx(best["step_seconds"], rel=1e-9)
    assert report["time"]["by_bound"] == pytest.approx(facts["bounds"])
    found = json.loads(cli(*search, "--json").out)["plans"][0]
    assert found["step_seconds"] == best["step_seconds"]
    assert len(found["rules"]) + len(found["settings"]) + len(found["cuts"]) == len(best["rules"])
    written = file.read_text("utf-8").partition("layout advised {")[2].partition("\n}")[0]
    assert all(rule in written for rule in best["rules"])
    return facts


WIDE = """
dim batch = BATCH, a = WIDTH, b = WIDTH
mesh m = { x: 8 }
program p(x[batch, a]) {
  param w[a, b]
  param v[b, a]
  y = einsum(relu(einsum(x, w -> [batch, b])), v -> [batch, a])
  loss = mean(square(y - x))
  return loss
  minimize loss with adam(lr=0.1)
}
"""
STAGES = """
dim batch = 64, io = 64, hidden = 256, layers = 2, out = io
mesh some = { pipe: 2 }
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
CASES = {
    "many samples, a small network": (65536, 1024, None, ["data"]),
    "few samples, wide matrices": (4, 16384, None, ["tensor"]),
    "states do not fit everywhere": (8192, 8192, "1.6GB", ["data", "zero"]),
}


def made(text: str) -> Compilation:
    return Compilation(Source("case.mdsl", text), Options(layout=""), Diagnostics())


@pytest.mark.parametrize("case", CASES)
def test_what_is_known_to_be_right_is_advised(case: str) -> None:
    batch, width, memory, kinds = CASES[case]
    compilation = made(WIDE.replace("BATCH", str(batch)).replace("WIDTH", str(width)))
    limit = None if memory is None else int(float(memory.removesuffix("GB")) * 1e9)
    facts = advised(advice(SearchRequest(cluster="h100", memory=limit), compilation), "case.mdsl")
    # Where all samples are split, states may be, too: that sends no more.
    used = [way["kind"].rstrip("123") for way in facts["ways"]]
    assert used == kinds or (not memory and used == [*kinds, "zero"] == ["data", "zero"])
    assert all(KINDS[way["kind"]] in facts["advice"] for way in facts["ways"])
    assert all(way["inside_machine"] and way["ways"] == 8 for way in facts["ways"])
    answers = {q["question"]: q for q in facts["questions"]}
    assert answers["Is there batch for all devices?"]["answer"] == ("no" if batch < 8 else "yes")
    alone = answers["Does it fit on one device?"]["answer"]
    assert alone == ("no" if memory else "yes")


def test_an_axis_over_machines_is_told_from_one_within() -> None:
    text = WIDE.replace("BATCH", "65536").replace("WIDTH", "1024").replace("x: 8", "y: 2, x: 8")
    facts: Any = advised(advice(SearchRequest(cluster="h100"), made(text)), "case.mdsl")
    way = facts["ways"][0]
    assert (way["kind"], way["axes"]) == ("data", ["y", "x"])
    assert not way["inside_machine"]


def test_without_a_cluster_there_is_no_advice(cli: Cli) -> None:
    assert cli("advise", str(EXAMPLES / "mlp.mdsl")).codes == ["error[MD0324]"]
    said = cli("advise", str(EXAMPLES / "mlp.mdsl"), "--cluster", "h100", "--memory", "1kB")
    assert said.codes == ["error[MD0642]"]


def test_python_has_the_same() -> None:
    program = md.load(EXAMPLES / "mlp.mdsl")
    found = program.advise(cluster="h100")
    assert found.json["advice"].startswith("tensor parallelism, 2 ways over rows")
    assert "Does it fit on one device?" in str(found)
    (best,) = (plan for plan in found.json["plans"] if plan["name"] == "advised")
    assert found.plan.explain().json["memory"]["peak"] == best["memory"]
