"""Running the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdsl.cli import main

from .command import Cli, Done


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of commands that do not ask for `cli` are in a folder of their own, too."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in an empty folder; what meshdsl did not foresee is raised as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MESHDSL_TRACEBACK", "1")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr("sys.argv", ["meshdsl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capsys.readouterr())

    return run
