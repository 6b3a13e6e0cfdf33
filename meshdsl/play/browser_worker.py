"""The questions of the page answered by Python in the browser itself, in place of a server.

A web worker has loaded Python and this package (`docs/browser/worker.mjs`); it calls `reply` for
each question, one after the other. There is no file to save. The cache of plans is in the memory of
the page, and has those of the first examples from the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.play.answer import answer, runs_of
from meshdsl.play.jobs import PATHS, Jobs, job_of
from meshdsl.play.protocol import CompareQuestion, CompileQuestion, Failed, JobAnswer
from meshdsl.play.questions import HTTPRefused

FILE = "program.mdsl"
"""The name of the program in diagnostics."""


def reply(path: str, body: str) -> str:
    """The answer to a question in JSON: `[status, body]`, as the server's."""
    try:
        if path not in _ROUTES:
            raise HTTPRefused(404, "there is no such question")
        return json.dumps([200, _ROUTES[path](json.loads(body))])
    except HTTPRefused as refused:
        return json.dumps([refused.status, {"error": refused.why}])
    except Exception as error:  # our own mistake: the page says so and lives on
        return json.dumps([500, {"error": f"meshdsl itself failed: {type(error).__name__}"}])


def warming(text: str) -> Iterator[None]:
    """Compile a small program, solver included, in steps of at most a tenth of a second or so.

    The plan of the first answer comes from the cache. So the first edit would be the first to call
    the solver, and would wait while the browser compiles it.
    """
    compilation = Compilation(Source(FILE, text), Options(cache=False), Diagnostics())
    for stage in ("placed", "device", "emitted", "advised"):
        getattr(compilation, stage)
        yield
    answer(compilation)


_JOBS = Jobs()


def _job(path: str, question: CompileQuestion | CompareQuestion) -> JobAnswer | Failed:
    """The answer to a question that is a job."""
    return _JOBS.answer(job_of(path, question, FILE, Options()))


_ROUTES: Mapping[str, Callable[[Any], object]] = {
    **{path: partial(_job, path) for path in PATHS},
    "/colours": runs_of,
}
