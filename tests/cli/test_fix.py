"""`check --fix`: what it writes, shows and says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .command import Cli

WRONG = """\
dim batch = 4, io = 8
mesh m = { rows: 2 }
layout l { batch -> row }
program p(x[batch, io]) {
  h = rleu(x)   # not smooth
  return h + 1, ids
}
"""
RIGHT = WRONG.replace("-> row ", "-> rows ").replace("rleu", "relu")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("p.mdsl")
    path.write_text(WRONG)
    return path


def test_fixes_are_written_and_told(file: Path, cli: Cli) -> None:
    done = cli("check", str(file), "--fix")
    assert done.out == (
        "p.mdsl:5:7: MD0103: write `relu`\n"
        "p.mdsl:3:12: MD0304: write `rows`\n"
        "p.mdsl: fixed 2 of 3 problems\n"
    )
    assert "unknown tensor `ids`" in done.err
    assert done.code == 1
    assert file.read_text() == RIGHT
    assert [path.name for path in Path().iterdir()] == ["p.mdsl"]


def test_line_ends_mark_and_permissions_stay(file: Path, cli: Cli) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + WRONG.replace("\n", "\r\n").encode())
    file.chmod(0o640)
    cli("check", str(file), "--fix")
    assert file.read_bytes() == b"\xef\xbb\xbf" + RIGHT.replace("\n", "\r\n").encode()
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("second", "left"), [("rows", ""), ("none", ", batch -> none")])
def test_a_rule_is_removed_where_another_says_the_same(
    file: Path, cli: Cli, second: str, left: str
) -> None:
    program = "dim batch = 4\nmesh m = {{ rows: 2 }}\nlayout l {{ batch -> rows{} }}\n"
    program += "program p(x[batch]) {{ return x }}\n"
    file.write_text(program.format(f", batch -> {second}"))
    assert cli("check", str(file), "--fix").code == (1 if left else 0)
    assert file.read_text() == program.format(left)


def test_diff_shows_and_writes_nothing(file: Path, cli: Cli) -> None:
    done = cli("check", str(file), "--fix", "--diff")
    assert "-  h = rleu(x)   # not smooth\n+  h = relu(x)   # not smooth\n" in done.out
    assert "MD0103" in done.err
    assert done.code == 1
    assert file.read_text() == WRONG


def test_diff_alone_is_refused(file: Path, cli: Cli) -> None:
    done = cli("check", str(file), "--diff")
    assert done.code == 2
    assert "add `--fix`" in done.err
    assert "try: meshdsl check" in done.err


def test_a_file_without_problems_is_left_alone(file: Path, cli: Cli) -> None:
    file.write_text(RIGHT.replace(", ids", ""))
    before = file.stat().st_mtime_ns
    done = cli("check", str(file), "--fix")
    assert (done.code, done.out) == (0, "p.mdsl: fine (1 program, no expectations)\n")
    assert file.stat().st_mtime_ns == before


def test_json_has_fixes_and_what_was_done(file: Path, cli: Cli) -> None:
    (found, *_) = json.loads(cli("check", str(file), "--json").out)["diagnostics"]
    (fix,) = [f for f in found["fixes"] if f["title"] == "write `relu`"]
    place = {"start": {"line": 5, "column": 7}, "end": {"line": 5, "column": 11}}
    assert fix["edits"] == [{"file": "p.mdsl", **place, "text": "relu"}]
    assert fix["safe"] is True
    data = json.loads(cli("check", str(file), "--fix", "--json").out)
    assert [item["title"] for item in data["fixed"]] == ["write `relu`", "write `rows`"]
    assert [d["code"] for d in data["diagnostics"]] == ["MD0102"]


def test_a_link_is_followed(file: Path, cli: Cli) -> None:
    link = Path("link.mdsl")
    link.symlink_to(file)
    cli("check", str(link), "--fix")
    assert link.is_symlink()
    assert file.read_text() == RIGHT


def test_unused_names_are_errors_under_strict(file: Path, cli: Cli) -> None:
    file.write_text("dim a = 4, spare = 2\nprogram p(x[a]) { return x }\n")
    assert cli("check", str(file)).code == 0
    done = cli("check", str(file), "--strict")
    assert done.code == 1
    assert "error[MD0134]" in done.err
