"""`meshdsl search` and `prog.search`: what they print, write, and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.api.errors import ProgramError
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.report.checks import check_source
from meshdsl.syntax.format import format_source
from tests.cli.command import Cli, write
from tests.cli.conftest import cli
from tests.project import ROOT

from .problems import NET

__all__ = ["cli"]

TEXT = format_source(Source("net.mdsl", f"{NET}\nmesh square = {{ x: 2, y: 2 }}\n"))


def test_what_is_proven_is_said_of_the_walks(cli: Cli) -> None:
    path = write(TEXT)
    said = " ".join(cli("search", path).out.split())
    walks = "proven the best of this space under deferred or immediate reduction."
    assert f"{walks} `explain` places with `optimal` reduction, which may send" in said
    said = " ".join(cli("search", path, "--no-partial").out.split())
    assert "proven the best of this space under immediate reduction." in said


@pytest.mark.parametrize(
    "options", [[], ["--cluster", "h100"], ["--objective", "memory"], ["--per-tensor"]]
)
def test_the_layout_places_to_what_is_printed(options: list[str], cli: Cli) -> None:
    path = write(TEXT)
    told = json.loads(cli("search", path, "--json", *options).out)
    for plan in told["plans"]:
        rules = [
            f"{r['selector'] + ': ' if r['selector'] else ''}{r['dim']}" for r in plan["rules"]
        ]
        axes = [", ".join(r["axes"]) for r in plan["rules"]]
        block = "\n".join(f"{d} -> ({a})" for d, a in zip(rules, axes, strict=True))
        text = f"{TEXT}\nlayout found {{\n{block}\n}}\n"
        chosen = Options(layout="found", reduce=plan["reduce"])
        made = compile_source(Source("net.mdsl", text), chosen, Diagnostics())
        assert made.report["totals"]["wire_bytes"] == plan["wire_bytes"]
        assert made.report["totals"]["flops_per_device"] == plan["flops_per_device"]
        assert made.report["memory"] == plan["memory"]


def test_what_is_written_is_expected_of_the_program_that_was_searched(cli: Cli) -> None:
    path = write(f"{TEXT}\nprogram sums(target[batch, io]) {{\n  return sum(target)\n}}\n")
    options = ["--program", "net", "--write", "best", "--expect", "--mesh", "x:2"]
    assert cli("search", path, *options).code == 0
    assert "\nexpect best for net on best_mesh " in Path(path).read_text(encoding="utf-8")
    assert cli("check", path).codes == []


@pytest.mark.parametrize("mesh", ["", "--mesh x:4", "--devices 2", "--mesh x:2,y:2"])
def test_what_is_written_holds(mesh: str, cli: Cli) -> None:
    path = write(TEXT)
    options = ["--write", "best", "--expect", *mesh.split()]
    done = cli("search", path, *options)
    assert done.code == 0
    written = Path(path).read_text(encoding="utf-8")
    assert written == format_source(Source(path, written))
    assert ("mesh best_mesh" in written) == (mesh in {"--mesh x:4", "--devices 2"})
    assert "@" in written.split("expect best")[1]
    found = Diagnostics()
    assert "1 expectation" in check_source(Source(path, written), Options(), found)
    assert not list(found)
    assert cli("search", path, *options).codes == ["error[MD0643]"]
    assert cli("search", path, *options, "--force").code == 0
    assert Path(path).read_text(encoding="utf-8") == written


def notes(text: str) -> list[str]:
    """The codes of what `check` says."""
    found = Diagnostics()
    check_source(Source("net.mdsl", text), Options(), found)
    return [d.code for d in found]


def test_a_layout_of_another_version_is_noted(cli: Cli) -> None:
    """Another size or operator is another version; a comment, or another layout, is none."""
    path = write(TEXT)
    assert cli("search", path, "--write", "best").code == 0
    written = Path(path).read_text(encoding="utf-8")
    assert "; program " in written
    assert notes(written) == notes("# A comment.\n\n" + written) == []
    assert notes(written.replace("mesh square", "layout other { io -> x }\n\nmesh square")) == []
    assert notes(written.replace("hidden = 32", "hidden = 64")) == ["MD0649"]
    assert notes(written.replace("relu", "gelu")) == ["MD0649"]
    sized = write(TEXT)
    assert cli("search", sized, "--write", "best", "--set", "hidden=64").code == 0
    assert "; program " not in Path(sized).read_text(encoding="utf-8")


DEEP = TEXT.replace("io = 8,", "io = 8, wide = 32, layers = 2,").replace(
    "  y = ",
    """  repeat layers {
    param u[hidden, wide]
    param t[wide, hidden]
    h = h + einsum(relu(einsum(h, u -> [batch, wide])), t -> [batch, hidden])
  }
  y = """,
)
"""Parameters that are split are gathered twice: of a loop no copy is alive in the backward pass."""


def test_the_front_is_one(cli: Cli) -> None:
    told = json.loads(cli("search", write(DEEP), "--front", "--json", "--set", "batch=128").out)
    values = [(p["wire_bytes"], p["memory"]["peak"]) for p in told["front"]]
    assert len(values) > 1
    assert values == sorted(values)
    assert [held for _, held in values] == sorted((held for _, held in values), reverse=True)
    most = sorted(held for _, held in values)[1]
    words = ("--front", "--json", "--set", "batch=128", "--memory", f"{most}B")
    told = json.loads(cli("search", write(DEEP), *words).out)
    assert {p["memory"]["peak"] <= most for p in told["front"]} == {True}


@pytest.mark.parametrize("options", [[], ["--cluster", "h100"]])
def test_a_budget_that_is_over_says_what_is_left(options: list[str], cli: Cli) -> None:
    told = cli("search", write(TEXT), "--budget", "0s", *options).out
    assert "not evaluated" in told
    assert "The budget is 0 placed operators" in told
    assert "it ended before all were tried" in told
    found = json.loads(cli("search", write(TEXT), "--budget", "0s", "--json", *options).out)
    assert not found["proven"]
    assert found["budget"] == {"operators": 0, "is_over": True}
    known = found["certificate"]
    best = found["plans"][0]["step_seconds" if options else "wire_bytes"]
    assert known[found["objective"]] <= best * (1 + 1e-6)
    assert known["gap"] == pytest.approx(1 - known[found["objective"]] / best, abs=1e-6)


REFUSED = {
    "--objective time": ("MD0324", 1),
    "--objective speed": ("MD0602", 2),
    "--method guess": ("MD0602", 2),
    "--cluster h10": ("MD0320", 2),
    "--memory lots": ("MD0601", 2),
    "--memory 1KB": ("MD0642", 1),
    "--replicated half": ("MD0601", 2),
    "--budget soon": ("MD0601", 2),
    "--fix batch:z": ("MD0304", 2),
    "--fix bitch:x": ("MD0305", 2),
    "--fix io:x,hidden:x": ("MD0302", 1),
    "--fix io:x,io:none": ("MD0303", 2),
    "--fix io:none,io:x": ("MD0303", 2),
    "--expect": ("MD0601", 2),
    "--write 9bad": ("MD0601", 2),
    "--write layout": ("MD0601", 2),
    "--fix batch:x,io:y --max-rules 1": ("MD0601", 2),
    "--certificate --objective memory": ("MD0646", 2),
    "--memory 80GB/s": ("MD0601", 2),
    "--bandwidth 1GB/s": ("MD0601", 2),
    "--stages 2": ("MD0601", 2),
    **{
        f"--graph {option}": ("MD0601", 2)
        for option in ("--write best", "--front", "--fix batch:x", "--mesh x:2", "--set batch=8")
    },
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options: str, cli: Cli) -> None:
    done = cli("search", write(TEXT), *options.split())
    code, exit_code = REFUSED[options]
    assert f"error[{code}]" in done.codes
    assert done.code == exit_code
    assert done.err.count("\nhelp: ") >= 1
    told = json.loads(cli("search", write(TEXT), *options.split(), "--json").out)
    assert code in [d["code"] for d in told["diagnostics"]]


@pytest.mark.parametrize("amount", ["0GB/s", "0.1B/s", "9" * 400 + "B/s"])
def test_a_link_has_a_speed(amount: str, cli: Cli) -> None:
    graph = ROOT / "examples" / "search" / "pipedream_vgg16.json"
    done = cli("search", "--graph", str(graph), "--devices", "4", "--bandwidth", amount)
    assert (done.codes, done.code) == (["error[MD0601]"], 2)


def test_the_output_is_the_same_for_any_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "net.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    command = [sys.executable, "-m", "meshdsl", "search", str(path), "--cluster", "h100", "--json"]
    found = {
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1


def test_from_python() -> None:
    program = md.load(ROOT / "examples" / "mlp.mdsl")
    found = program.search("square")
    assert found.proven
    assert [p["wire_bytes"] for p in found.json["plans"]] == [
        plan.cost().wire_bytes for plan in found
    ]
    assert found.layout in found.to_mdsl()
    assert str(found[0].explain())
    assert "<pre style=" in found.html()
    with pytest.raises(ProgramError, match="MD0642"):
        program.search("square", memory="1MB")
