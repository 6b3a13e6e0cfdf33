"""Commands that only look at programs are quick: they never import torch, and few other libraries.

Those that search for the optimum (`--reduce optimal`, the default) import highspy for it, and with
it numpy; once the plan is in the cache, they do not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.project import ROOT

MLP = ROOT / "examples" / "mlp.mdsl"
HEAVY = ("torch", "sklearn", "matplotlib", "jax")
SEARCHING = ("check", "check --json", "explain", "explain --json", "compile")

COMMANDS: dict[str, list[str | Path]] = {
    "import": [],
    "check": ["check", MLP],
    "check --json": ["check", MLP, "--json"],
    "fmt": ["fmt", "--check", MLP],
    "explain": ["explain", MLP],
    "explain --json": ["explain", MLP, "--json"],
    "explain, deferred": ["explain", MLP, "--reduce", "deferred"],
    "compile, deferred": ["compile", MLP, "--reduce", "deferred"],
    "explain a code": ["explain", "MD0301"],
    "compile": ["compile", MLP],
    "search": ["search", MLP],
    "search, on a cluster": ["search", MLP, "--cluster", "h100"],
    "advise": ["advise", MLP, "--cluster", "h100"],
    "simulate": ["simulate", MLP, "--cluster", "h100", "--reduce", "deferred"],
    "schedule": ["schedule", "one_f_one_b", "--stages", "4", "--micro", "8"],
    "an error": ["compile", MLP, "--layout", "nothing"],
    "--help": ["--help"],
    "run --help": ["run", "--help"],
    "--version": ["--version"],
    "completion": ["explain"],
}

SCRIPT = """
import json, sys
import meshdsl
for words in json.loads(sys.argv[1]):
    sys.argv = ["meshdsl", *words]
    if words:
        from meshdsl.cli import main
        try:
            main()
        except SystemExit:
            pass
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stderr.write("\\nLOADED " + " ".join(loaded) + "\\n")
"""


ENVIRONMENTS = {
    "completion": {
        "_MESHDSL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"meshdsl\nexplain\n{MLP}\n--layout\n",
        "COMP_CWORD": "4",
    }
}


NUMBERS = ("numpy", "highspy", "pydantic", "opt_einsum")
"""What computes numbers, and what checks the values of options: a browser need not have them."""

LOOKS = {
    "fmt": "rich meshdsl.ops.elementwise meshdsl.report.explanation meshdsl.cli.explain",
    "check": "rich meshdsl.report.pictures meshdsl.simulate.timeline meshdsl.cli.explain",
    "explain": "meshdsl.report.pictures meshdsl.simulate.timeline meshdsl.syntax.complaints",
}
"""Commands on a program without errors or pipelines, with what else they import none of."""

MODULES = """
import sys
from meshdsl.cli import main
sys.argv = ["meshdsl", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code
sys.stderr.write("LOADED " + " ".join(sys.modules))
"""

ALONE = [*ENVIRONMENTS, *SEARCHING]
TOGETHER = [[name for name in COMMANDS if name not in ALONE], [*SEARCHING], [*ENVIRONMENTS]]
"""Commands that one process carries out, one after the other."""


@pytest.mark.parametrize("commands", TOGETHER, ids=["light", "searching", "completion"])
def test_nothing_heavy_is_imported(commands: list[str], tmp_path: Path) -> None:
    own = {"PYTHONPATH": str(ROOT), "PATH": "", "MESHDSL_CACHE": str(tmp_path)}
    words = json.dumps([[*map(str, COMMANDS[name])] for name in commands])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words],
        cwd=tmp_path,
        env=own | ENVIRONMENTS.get(commands[0], {}),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    assert len(loaded) == len(commands)
    for command, names in zip(commands, loaded, strict=True):
        assert "meshdsl" in names
        assert not set(names) & set(HEAVY), command
        assert command in SEARCHING or "highspy" not in names, command


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "meshdsl", "check", str(MLP)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("fine (1 program, 2 expectations)\n")


def test_the_commands_are_made_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their functions, for which typer takes longer than most commands run."""
    assert cli("--version").code == 0

    def made_again(app: object) -> None:
        raise AssertionError

    monkeypatch.setattr("typer.main.get_command", made_again)
    assert cli("--version").code == 0


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_at_a_program_needs_no_numbers(command: str, tmp_path: Path) -> None:
    """Once the plans of an earlier command are in the cache."""
    own = {"PYTHONPATH": str(ROOT), "PATH": "", "MESHDSL_CACHE": str(tmp_path)}
    for _ in range(1 if command == "fmt" else 2):
        done = subprocess.run(
            [sys.executable, "-c", MODULES, *map(str, COMMANDS[command])],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            check=True,
        )
    loaded = set(done.stderr.rpartition("LOADED ")[2].split())
    assert loaded.intersection({*HEAVY, *NUMBERS, *LOOKS[command].split()}) == set()
