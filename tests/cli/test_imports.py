"""Commands that only look at programs are quick: they never import torch.

Those that search for the optimum (`--reduce optimal`, the default) import highspy for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    "simulate": ["simulate", MLP, "--cluster", "h100", "--reduce", "deferred"],
    "schedule": ["schedule", "one_f_one_b", "--stages", "4", "--micro", "8"],
    "an error": ["compile", MLP, "--layout", "nothing"],
    "--help": ["--help"],
    "run --help": ["run", "--help"],
    "--version": ["--version"],
    "completion": ["explain"],
}

SCRIPT = """
import sys
sys.argv[0] = "meshdsl"
import meshdsl
if sys.argv[1:]:
    from meshdsl.cli import main
    try:
        main()
    except SystemExit:
        pass
loaded = sorted({name.partition(".")[0] for name in sys.modules})
sys.stderr.write("\\nLOADED " + " ".join(loaded))
"""


ENVIRONMENTS = {
    "completion": {
        "_MESHDSL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"meshdsl\nexplain\n{MLP}\n--layout\n",
        "COMP_CWORD": "4",
    }
}


@pytest.mark.some_of(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_heavy_is_imported(command: str, tmp_path: Path) -> None:
    own = {"PYTHONPATH": str(ROOT), "PATH": "", "MESHDSL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, COMMANDS[command])],
        cwd=tmp_path,
        env=own | ENVIRONMENTS.get(command, {}),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stderr.rpartition("LOADED ")[2].split()
    assert "meshdsl" in loaded
    assert not set(loaded) & set(HEAVY)
    assert command in SEARCHING or "highspy" not in loaded


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "meshdsl", "check", str(MLP)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("fine (1 program, 2 expectations)\n")
