"""Hypothesis profiles, one thread per torch process, and plans kept in a folder of the session."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Read when torch is first imported: the suite already runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None, database=None)
settings.register_profile(
    "deep",
    max_examples=int(os.environ.get("MESHDSL_CASES", "5000")),
    print_blob=True,
    deadline=None,
)
settings.load_profile("deep" if "MESHDSL_CASES" in os.environ else "ci")


@pytest.fixture(autouse=True, scope="session")
def _plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans are kept, and found again, by the tests of this process only."""
    os.environ["MESHDSL_CACHE"] = str(tmp_path_factory.mktemp("plans"))
