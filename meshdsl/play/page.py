"""The page: one document with its style and script inside, which loads nothing else."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal

from meshdsl.cluster.profile import names
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Options
from meshdsl.placed.place import POLICIES
from meshdsl.play.protocol import PageExample, PageState
from meshdsl.report.html import escaped
from meshdsl.report.page import as_data, colours, digest, picture_colours
from meshdsl.version import __version__

SCRIPTS = ("engine.js", "link.js", "play.js")
"""The parts of the script, in order."""

_PLACE = re.compile(r"\{\{(\w+)\}\}")


def begun(
    engine: Literal["server", "worker"],
    source: Source,
    options: Options,
    digest: str | None = None,
    writable: bool = False,
    examples: Sequence[PageExample] = (),
) -> PageState:
    """The state of a page that begins with a text and with the choices of the options."""
    return {
        "engine": engine,
        "examples": list(examples),
        "file": source.name,
        "text": source.text,
        "digest": digest,
        "writable": writable,
        "policies": list(POLICIES),
        "clusters": list(names()),
        "chosen": {
            "program": options.program,
            "mesh": options.mesh,
            "layout": options.layout,
            "sbp": options.sbp,
            "cluster": options.cluster,
            "reduce": options.reduce,
            "sizes": dict(options.set_dims),
        },
    }


def static_page(examples: Sequence[PageExample]) -> str:
    """The page without a server: a web worker beside it answers, from the folder `play`.

    It begins with the first of the examples.
    """
    first = Source(f"{examples[0]['name']}.mdsl", examples[0]["text"])
    html, _ = page(begun("worker", first, Options(), examples=examples))
    return html


def fragment(text: str, sbp: str | None = None) -> str:
    """The part of the static page's address that makes it begin with a program (`link.js`).

    The program is placed by its `sbp` block of that name, where one is given.
    """
    chosen = {"text": text} if sbp is None else {"text": text, "sbp": sbp}
    code = zlib.compress(json.dumps(chosen).encode(), 9, wbits=-15)
    return f"#code={base64.urlsafe_b64encode(code).decode('ascii').rstrip('=')}"


def page(state: PageState) -> tuple[str, str]:
    """The page that starts from a state, and the content security policy it needs.

    The policy allows the style and the script of the page, by their hashes, and beside them only
    what answers its questions: the server that it came from, or the worker beside it. A page of the
    worker has its policy inside: servers of files send none.
    """
    style = "\n".join((colours(), picture_colours(), _resource("play.css"), _syntax_colours()))
    script = "\n".join(map(_resource, SCRIPTS))
    policy = _policy(state, style, script)
    inside = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    parts = {
        "policy": inside if state["engine"] == "worker" else "",
        "version": escaped(__version__),
        "title": escaped(f"{state['file']}: meshdsl play"),
        "file": escaped(state["file"]),
        "data": as_data(state),
        "style": style,
        "script": script,
    }
    html = _PLACE.sub(lambda place: parts[place[1]], _resource("page.html"))
    return html, policy


def _policy(state: PageState, style: str, script: str) -> str:
    allowed = {
        "default-src": "'none'",
        "style-src": f"'{digest(style)}'",
        "script-src": f"'{digest(script)}'",
        "img-src": "data:",
        **({"worker-src": "'self'"} if state["engine"] == "worker" else {"connect-src": "'self'"}),
        "base-uri": "'none'",
        "form-action": "'none'",
        **({} if state["engine"] == "worker" else {"frame-ancestors": "'none'"}),
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _syntax_colours() -> str:
    """The colours of words, for a light page and a dark one."""
    dark = _rules("github-dark")
    return f"{_rules('default')}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


def _rules(style: str) -> str:
    """Colours alone: a word has no background, and all letters have one width."""
    from pygments.styles import get_style_by_name
    from pygments.token import STANDARD_TYPES

    style_class = get_style_by_name(style)
    named = ((STANDARD_TYPES.get(kind), look["color"]) for kind, look in style_class)
    return "\n".join(f".code .{name} {{ color: #{c}; }}" for name, c in named if name and c)
