"""The questions of the page answered by Python in the browser itself, in place of a server.

A web worker has loaded Python and this package (`docs/browser/worker.mjs`); it calls `reply` for
each question, one after the other. There is no file to save. The cache of plans is in the memory of
the page, and has those of the first examples from the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from meshdsl.pipeline import Options
from meshdsl.play.answer import answered, asked, colours
from meshdsl.play.protocol import CompileQuestion, Failed, PageAnswer, Runs, TextQuestion
from meshdsl.play.questions import QUESTION, HTTPRefused, check_form

FILE = "program.mdsl"
"""The name of the program in diagnostics."""


def reply(path: str, body: str) -> str:
    """The answer to a question in JSON: `[status, body]`, as the server's."""
    try:
        return json.dumps([200, _ROUTES[path](json.loads(body))])
    except HTTPRefused as refused:
        return json.dumps([refused.status, {"error": refused.why}])
    except Exception as error:  # our own mistake: the page says so and lives on
        return json.dumps([500, {"error": f"meshdsl itself failed: {type(error).__name__}"}])


def _compile(question: CompileQuestion) -> PageAnswer | Failed:
    """The outcome of a text under the choices beside it."""
    check_form(question, QUESTION)
    options = asdict(asked(question, Options()))
    return answered({"name": FILE, "text": question["text"], "options": options})


def _colours(question: TextQuestion) -> Runs:
    """The words of a text, as lengths and classes."""
    check_form(question, {"text": str})
    return {"runs": colours(question["text"])}


_ROUTES: Mapping[str, Callable[[Any], object]] = {"/compile": _compile, "/colours": _colours}
