"""`--set a=1 b=2`: one option, several sizes."""

from __future__ import annotations

import pytest

from meshdsl.cli.options import spread_settings

from .command import Cli

SPREAD = {
    "check f.mdsl": "check f.mdsl",
    "check f.mdsl --set a=1": "check f.mdsl --set a=1",
    "check f.mdsl --set a=1 b=2 c=3": "check f.mdsl --set a=1 --set b=2 --set c=3",
    "check --set a=1 b=2 f.mdsl": "check --set a=1 --set b=2 f.mdsl",
    "check f.mdsl --set a=1 --set b=2": "check f.mdsl --set a=1 --set b=2",
    "check f.mdsl --set a=1 --strict b=2": "check f.mdsl --set a=1 --strict b=2",
    "check f.mdsl --set a=x b=2": "check f.mdsl --set a=x b=2",
    "check f.mdsl --set a=1 b=-2": "check f.mdsl --set a=1 --set b=-2",
    "check f.mdsl --set": "check f.mdsl --set",
}


@pytest.mark.parametrize(("given", "wanted"), SPREAD.items())
def test_spread(given: str, wanted: str) -> None:
    assert " ".join(spread_settings(given.split())) == wanted


FILE = """\
dim a = 5, b = 5, c = 2 * b, four = 4
mesh pod = { x: 2, y: 2 }
layout l { a -> x, c -> y }
program p(u[a, c]) { return u[a -> four] }
"""


def test_sizes_are_taken(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("f") / "f.mdsl"
    path.write_text(FILE)
    assert cli("check", path).code == 1
    assert cli("check", path, "--set", "a=4").code == 0
    done = cli("explain", path, "--set", "a=4", "b=3", "--json")
    assert done.code == 0
    assert '"c"' in done.out
    assert "6" in done.out


def test_the_last_one_counts(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("f") / "f.mdsl"
    path.write_text(FILE)
    assert cli("check", path, "--set", "a=3", "a=4").code == 0
    assert cli("check", path, "--set", "a=4", "a=3").code == 1


@pytest.mark.parametrize("size", ["0", "2147483648", "9" * 5000])
def test_out_of_range(size: str, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("f") / "f.mdsl"
    path.write_text(FILE)
    done = cli("check", path, "--set", f"a={size}")
    assert done.code == 2
    assert "error[MD0106]: the size of a dim lies in 1 … 2147483647" in done.err


@pytest.mark.parametrize("text", ["a", "a=", "=4", "a=-1", "a=1.5", "a=²", "a=4,b=2"])
def test_not_a_setting(text: str, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("f") / "f.mdsl"
    path.write_text(FILE)
    done = cli("check", path, "--set", text)
    assert done.code == 2
    assert "error[MD0601]" in done.err or "error[MD0115]" in done.err
