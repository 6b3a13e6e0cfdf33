"""Hypothesis profiles, one thread per torch process, kept plans, Ctrl-C where a test presses it."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from meshdsl import cli
from meshdsl.search import speculative
from meshdsl.syntax import parse
from tests.garbage import SELDOM, look_seldom
from tests.once import made_once
from tests.ranks import Forks

# Read when torch is first imported: the suite already runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some hundred processes are started: they share what the first has compiled of this project.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# On a busy machine a run may seem to hang; the limit of every test ends one that does.
os.environ.setdefault("MESHDSL_STALL_SECONDS", "0")
# What tests write is read back by tests alone: none of it has to be on the disk when it is.
os.fsync = lambda fd: None

# Nothing may depend on how fast the machine is just now.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", untimed, derandomize=True, database=None, max_examples=40)
settings.register_profile(
    "deep", untimed, max_examples=int(os.environ.get("MESHDSL_CASES", "5000"))
)
settings.load_profile("deep" if "MESHDSL_CASES" in os.environ else "ci")


# Commands that are run in this process set it again.
cli.COLLECTED = SELDOM
look_seldom()
# Three texts of four are read again later, by another test: trees are immutable, and kept.
parse.parse = functools.lru_cache(maxsize=512)(parse.parse.__wrapped__)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through all that is there, again and again.

    Every search asks whether anything is frozen. Python answers by walking through all of it: a
    million objects here, and later all that there is when a test begins a notebook.
    """
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen


def pytest_sessionfinish() -> None:
    """One last look for what was left open in a cycle; pytest's own five then find nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans are kept, and found again, by the tests of this run only: by all its workers."""
    os.environ["MESHDSL_CACHE"] = str(made_once(tmp_path_factory, "plans", lambda folder: None))


@pytest.fixture(autouse=True, scope="session")
def _one_core() -> None:
    """A search takes one core: the suite already runs one process per core.

    That it finds the same with a second one is tested in processes of their own.
    """
    speculative._has_room = lambda: False


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Where ranks are forked from, without an import of torch for each."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def forked_ranks(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torchrun engine forks its ranks: for tests of anything but its launcher."""
    monkeypatch.setattr("meshdsl.backends.engines.torchrun.launched", forks.launched)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt this process, and those it starts, as in the foreground of a terminal.

    A shell starts what a script puts in the background (`make test &`) with SIGINT ignored; that is
    inherited, and Python then leaves it so.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
