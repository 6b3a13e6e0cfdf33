"""Profiles of clusters: those built in are whole, and what is wrong with one is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshdsl.cluster.profile import CHECKS, UNBOUNDED, Device, Level, load, names
from meshdsl.diagnostics import Diagnostic, DiagnosticError
from tests.clusters import SMALL

WHOLE = f"""\
{SMALL}
[[levels]]
kind = "ring"
alpha = 1e-6
bandwidth = 1e9
nominal = 1e9

[[tables]]
collective = "all_reduce"
devices = 4
points = [[1024, 1e-6], [2048, 3e-6]]
"""


def _wrong(text: str, tmp_path: Path) -> tuple[Diagnostic, ...]:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DiagnosticError) as raised:
        load(str(path))
    return raised.value.diagnostics


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(WHOLE, encoding="utf-8")
    found = load(str(path))
    assert found.name == "own"
    assert (found.levels[0].size, found.levels[1].size) == (4, UNBOUNDED)
    assert found.tables["all_reduce", 4, 0] == ((1024, 1e-6), (2048, 3e-6))
    assert hash(found) == hash(load(str(path)))


@pytest.mark.parametrize("name", names())
def test_a_profile_that_is_built_in(name: str) -> None:
    cluster = load(name)
    assert cluster.source
    assert cluster.device.flops["f32"] <= max(cluster.device.flops.values())
    for level in cluster.levels:
        assert level.bandwidth <= level.nominal
    for points in cluster.tables.values():
        assert points[0][1] <= points[-1][1]


LINES = [
    (number, line.split(" =")[0])
    for number, line in enumerate(WHOLE.splitlines())
    if " =" in line and line.split(" =")[0] != "size"
]


@pytest.mark.parametrize(("number", "name"), LINES)
def test_a_field_that_is_missing_or_wrong_is_named(number: int, name: str, tmp_path: Path) -> None:
    lines = WHOLE.splitlines()
    table = next(line for line in reversed(lines[:number]) if line.startswith("["))
    wrong = [*lines[:number], f"{name} = true", *lines[number + 1 :]]
    (found,) = _wrong("\n".join(wrong), tmp_path)
    assert found.code == "MD0321"
    assert table in found.message
    assert f"`{name}` should be" in found.message
    assert found.span is not None
    assert found.span.line == number + 1
    if name == "devices":  # may be left out
        return
    (found,) = _wrong("\n".join([*lines[:number], *lines[number + 1 :]]), tmp_path)
    assert table in found.message
    assert f"`{name}` is missing" in found.message
    assert found.help is not None
    assert found.help.startswith(f"write `{name} = …`, ")
    assert found.span is not None
    assert found.span.text == table


def test_every_field_is_checked() -> None:
    for table, fields in CHECKS.items():
        assert list(fields)
        assert set(fields) == {f.name for f in dataclasses.fields(table)}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[device]", "[devise]", "`[device]` is missing"),
        ("[[levels]]", "[levels]", "this is no TOML"),
        ("alpha = 1e-6\n", "alpha = -1\n", "`alpha` should be not negative"),
        ("alpha = 1e-6\n", "alpha = 5e-324\n", "`alpha` should be a number from 0 to 1e+30"),
        ("f32 = 1e12", "f32 = 1e308", "should be a number from 0 to 1e+30"),
        ("mm_eff = 0.5", "mm_eff = 2", "`mm_eff` should be a number from 0.01 to 1"),
        ("mm_eff", "mm_ef", "no field `mm_ef`"),
        ("f32 = 1e12", "f23 = 1e12", "`flops` should be"),
        ("[2048, 3e-6]", "[1000, 3e-6]", "in the order of bytes"),
        ('"ring"', '"mesh"', "`kind` should be one of switch, ring, torus"),
        ("[device]", "source = 3\n[device]", "`source` should be a list of texts"),
        ("[device]", "levels = 3\n[device]", "this is no TOML"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, says: str, tmp_path: Path) -> None:
    found = _wrong(WHOLE.replace(old, new, 1), tmp_path)
    assert any(says in d.message for d in found), [d.message for d in found]


def test_a_profile_of_one_wrong_kind(tmp_path: Path) -> None:
    found = [d.message for d in _wrong("device = 1\nlevels = 2\ntables = [3]", tmp_path)]
    assert "`device` is a table" in found
    assert "`levels` is a list of tables: write `[[levels]]`" in found
    assert "`tables` is a table" in found


@pytest.mark.parametrize(
    ("name", "help"), [("h10", "did you mean `h100`?"), ("zzzzz", "or name a .toml file")]
)
def test_an_unknown_name(name: str, help: str) -> None:
    with pytest.raises(DiagnosticError, match="MD0320") as raised:
        load(name)
    assert help in (raised.value.diagnostics[0].help or "")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(DiagnosticError, match="MD0320: the profile nowhere"):
        load("nowhere.toml")


def test_classes_of_a_profile_are_hashable() -> None:
    cluster = load("h100")
    assert {type(cluster.device), type(cluster.levels[0])} == {Device, Level}
    assert len({cluster, load("h100")}) == 1
