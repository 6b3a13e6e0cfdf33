"""CONTRIBUTING's schedule: a function in a file, its name in a table, and no other edit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.schedule import registry
from meshdsl.schedule.verification import verify
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.pipelines import test_forward
from tests.pipelines.test_programs import compiled, hold_bytes, hold_to, on_one_device, results
from tests.project import ROOT, guide_file
from tests.schedule import test_command, test_files, test_laws, test_published

__all__ = ["cli"]

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAME = "k_f_k_b"
NET = """\
dim l = 4, b = 8, m = 4
program p(x[b, m]) {
  repeat l {
    param v[m]
    x = tanh(x * v)
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The schedules, with that of the guide among them."""
    (tmp_path / "grouped.py").write_text(guide_file("meshdsl/schedule/grouped.py"))
    package = sys.modules["meshdsl.schedule"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    known = dict(registry.schedules())
    monkeypatch.setattr(registry, "_RECORDS", known)
    homes = (*registry.HOMES, "grouped")
    assert f"\nHOMES = {homes}\n".replace("'", '"') in GUIDE
    monkeypatch.setattr(registry, "HOMES", homes)
    registry.schedules.cache_clear()
    yield
    registry.schedules.cache_clear()
    sys.modules.pop("meshdsl.schedule.grouped", None)


@pytest.mark.usefixtures("added")
def test_it_is_known_and_keeps_its_law() -> None:
    record = registry.schedules()[NAME]
    assert record.meaning.startswith("1F1B on groups of micro-batches")
    assert record.options == {"group": 2}
    table = registry.generate(NAME, 4, 8, {"group": 1})
    assert table.rows == registry.generate("one_f_one_b", 4, 8).rows
    verify(registry.generate(NAME, 4, 8))


OBLIGATIONS = (
    test_published.test_laws_are_exact,
    test_laws.test_messages,
    test_files.test_what_is_written_is_read,
    test_command.test_the_picture_has_every_action,
    test_forward.test_every_table_has_its_forward_passes,
)
"""Tests of every schedule that need nothing but its name."""


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("obligation", OBLIGATIONS)
def test_it_meets_what_every_schedule_does(obligation: Callable[[str], None]) -> None:
    obligation(NAME)


@pytest.mark.usefixtures("added")
def test_the_command_draws_it(cli: Cli) -> None:
    asked = ("schedule", NAME, "--stages", "4", "--micro")
    assert NAME in cli(*asked, "8").out
    assert cli(*asked, "7").codes == ["error[MD0529]"]


@pytest.mark.usefixtures("added")
def test_a_step_in_it_has_the_numbers_of_one_device() -> None:
    made = compiled(NET, "pipe:2", "l -> pipe", f"with {NAME}[b](4)")
    run = run_local(made.text, seed=4)
    hold_to(results(run), on_one_device(NET))
    hold_bytes(run, made)
