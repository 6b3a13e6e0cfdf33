"""Hypothesis profiles, and one thread per torch process."""

from __future__ import annotations

import os

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
