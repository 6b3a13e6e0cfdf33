"""Plans that are kept: found again, never believed where they do not fit, never in the way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from meshdsl.device.printer import print_program
from meshdsl.placed import ilp_candidates, optimal, place
from tests.compiling import compile_text
from tests.project import ROOT

TEXT = """
dim m = 64, a = 64, n = 16, k = 8
mesh four = { x: 4 }
layout split { a -> x }
layout named { a -> x, t: n -> x }
program p(u[m, a], v[a, n], w[n, k]) {
  t = einsum(u, v -> [m, n])
  y = exp(einsum(t, w -> [m, k]))
  return y
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per search that is made."""
    made: list[Any] = []

    def counted(*about: Any) -> Any:
        made.append(about)
        return optimal.solve(*about)

    monkeypatch.setattr(place, "solve", counted)
    return made


def device(text: str = TEXT, **options: Any) -> str:
    return print_program(
        compile_text(text, **{"mesh": "four", "layout": "split", **options}).device
    )


def test_a_search_is_made_once(folder: Path, searches: list[Any]) -> None:
    assert device() == device()
    # Places and comments are no part of a problem.
    device(f"# a comment\n{TEXT}")
    assert len(searches) == len(list(folder.iterdir())) == 1


def test_what_was_tried_for_remedies_is_searched_once(folder: Path, searches: list[Any]) -> None:
    text = (ROOT / "examples" / "mlp.mdsl").read_text(encoding="utf-8")
    first, second = (compile_text(text).advised["remedies"] for _ in range(2))
    assert first == second
    assert len(searches) == len(list(folder.iterdir())) > 1


def test_another_problem_is_another_search(folder: Path, searches: list[Any]) -> None:
    others: list[dict[str, Any]] = [
        {"layout": "named"},
        {"message_bytes": 0},
        {"set_dims": {"m": 128}},
        {"mesh": "x:2"},
        {"text": TEXT.replace("exp", "tanh")},
        {"text": TEXT.replace("return y", "return y, t")},
        {"dtype": "f64"},
    ]
    device()
    for count, options in enumerate(others, 2):
        device(**options)
        assert len(searches) == count, options


def test_that_there_is_no_plan_is_found_once(
    folder: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program that is too large to be searched."""
    monkeypatch.setattr(ilp_candidates, "MOST_COMBINATIONS", 0)
    assert device() == device()
    assert len(searches) == len(list(folder.iterdir())) == 1


def test_without_the_cache_nothing_is_kept(folder: Path, searches: list[Any]) -> None:
    assert device(cache=False) == device(cache=False)
    assert len(searches) == 2
    assert not folder.exists()


def digested(plan: object) -> str:
    """The file of a plan, with the right digest."""
    text = json.dumps(plan)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def damaged(text: str) -> dict[str, str]:
    """The ways in which a file may be damaged."""
    plan = json.loads(text.partition("\n")[2])["plan"]
    return {
        "empty": "",
        "cut": text[: len(text) // 2],
        "a list": digested([1, 2]),
        "no digest": json.dumps({"plan": plan}),
        "changed": text.replace('"x"', '"y"'),
        "short": digested({"plan": {**plan, "decisions": plan["decisions"][1:]}}),
    }


@pytest.mark.parametrize("how", damaged(digested({"plan": {"decisions": []}})))
def test_a_damaged_file_is_searched_anew(folder: Path, searches: list[Any], how: str) -> None:
    whole = device()
    (path,) = folder.iterdir()
    path.write_text(damaged(path.read_text())[how])
    assert device() == whole
    assert len(searches) == 2
    assert device() == whole
    assert len(searches) == 2


def test_a_plan_that_is_not_legal_is_searched_anew(folder, searches, monkeypatch) -> None:
    """Even one with the right digest: what is read is checked against the program."""
    whole = device()
    (path,) = folder.iterdir()
    entry = json.loads(path.read_text().partition("\n")[2])
    entry["plan"]["decisions"][-1][1] = [[[["m", ["x"]]], [], None]]
    path.write_text(digested(entry))
    assert device() == whole
    assert len(searches) == 2


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path, monkeypatch, searches) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path / "file" / "plans"))
    assert device() == device()
    assert len(searches) == 2


def test_only_so_many_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdsl.disk_cache.MOST_FILES", 2)
    for m in (64, 128, 256, 512):
        device(set_dims={"m": m})
    assert len(list(folder.iterdir())) == 2
