"""`--set a=1 b=2`: one option, several sizes."""

from __future__ import annotations

import pytest

import meshdsl as md
from meshdsl.cli.options import spread_settings

from .command import Cli, write

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
    "check --set s.mdsl f.mdsl": "check --set s.mdsl f.mdsl",
    "check --set s.mdsl b=2 f.mdsl": "check --set s.mdsl --set b=2 f.mdsl",
    "check --set a=1 f.mdsl b=2": "check --set a=1 f.mdsl b=2",
    "check f.mdsl --set a=1 s.mdsl b=2": "check f.mdsl --set a=1 --set s.mdsl --set b=2",
    "check f.mdsl --set s.mdsl t.mdsl": "check f.mdsl --set s.mdsl --set t.mdsl",
    "check - --set a=1 s.mdsl": "check - --set a=1 --set s.mdsl",
    "check --set a=1 s.mdsl": "check --set a=1 s.mdsl",
    "check f.mdsl --set a=1 --strict s.mdsl": "check f.mdsl --set a=1 --strict s.mdsl",
    "check --set s.mdsl b=2 --set t.mdsl": "check --set s.mdsl --set b=2 --set t.mdsl",
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


def test_a_file_of_sizes(cli: Cli) -> None:
    """Alone, with other sizes before and after it, before the file, and in Python."""
    write(FILE, "f.mdsl")
    write("dim b = 2, a = 2 * b", "s.mdsl")
    assert cli("check", "f.mdsl", "--set", "s.mdsl").code == 0
    assert cli("check", "--set", "a=3", "--set", "s.mdsl", "b=3", "f.mdsl").code == 0
    assert cli("check", "f.mdsl", "--set", "s.mdsl", "a=3").code == 1
    assert cli("check", "f.mdsl", "--set", "a=3", "s.mdsl").code == 0
    assert cli("check", "f.mdsl", "--set", "a=3", "s.mdsl", "a=5").code == 1
    done = cli("check", "f.mdsl", "--set", "a=4", "f.mdsl")
    assert (done.code, done.codes) == (2, ["error[MD0601]"])
    assert "stand before `--set`" in done.err
    assert md.sizes("s.mdsl") == {"b": 2, "a": 4}
    with pytest.raises(md.ProgramError):
        md.load("f.mdsl")
    assert md.load("f.mdsl", dims=md.sizes("s.mdsl")).outputs
    with pytest.raises(md.ProgramError, match=r"(?s)MD0604.*`dims=md.sizes\('s.mdsl'\)`"):
        md.load("f.mdsl", dims="s.mdsl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("dim b = 2, aa = 4", 1, "error[MD0115]: `--set aa`: no such dim"),
        ("dim a = 0", 1, "error[MD0105]"),
        ("dim a = 4 * c", 1, "error[MD0101]"),
        ("dim a = ", 1, "error[MD00"),
        (
            "dim a = 4\nmesh m = { x: 2 }",
            2,
            "error[MD0601]: a file of sizes may contain only `dim`",
        ),
        ("# nothing", 2, "error[MD0601]: `s.mdsl` has no dims"),
        (None, 2, "error[MD0010]: there is no file `s.mdsl`"),
    ],
)
def test_a_wrong_file_of_sizes(text: str | None, code: int, said: str, cli: Cli) -> None:
    """The place is in that file, if it is there and not empty."""
    write(FILE, "f.mdsl")
    if text is not None:
        write(text, "s.mdsl")
    done = cli("check", "f.mdsl", "--set", "s.mdsl")
    assert done.code == code
    assert said in done.err
    assert "--> s.mdsl:" in done.err or "no " in said
    if "MD0115" not in said:
        with pytest.raises(md.ProgramError, match=said[6:12]):
            md.sizes("s.mdsl")


def test_a_file_of_sizes_is_no_program_with_unused_dims(cli: Cli) -> None:
    assert cli("check", write("dim a = 4, b = 2 * a"), "--strict").code == 0


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


@pytest.mark.parametrize("text", ["a", "a=", "=4", "a=-1", "a=1.5", "a=²"])
def test_not_a_setting(text: str, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("f") / "f.mdsl"
    path.write_text(FILE)
    done = cli("check", path, "--set", text)
    assert done.code == 2
    assert "error[MD0601]" in done.err or "error[MD0115]" in done.err
