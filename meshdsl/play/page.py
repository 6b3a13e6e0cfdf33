"""The page: one document with its style and script inside, which loads nothing else."""

from __future__ import annotations

import re
from importlib.resources import files

from meshdsl.play.protocol import PageState
from meshdsl.report.html import escaped
from meshdsl.report.page import as_data, colours, digest
from meshdsl.version import __version__

_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(state: PageState) -> tuple[str, str]:
    """The page that starts from a state, and the content security policy it needs.

    The policy allows the style and the script of the page, by their hashes, and requests to the
    server that the page came from.
    """
    style = "\n".join((colours(), _resource("play.css"), _syntax_colours()))
    script = _resource("play.js")
    parts = {
        "version": escaped(__version__),
        "title": escaped(f"{state['file']}: meshdsl play"),
        "file": escaped(state["file"]),
        "data": as_data(state),
        "style": style,
        "script": script,
    }
    html = _PLACE.sub(lambda place: parts[place[1]], _resource("page.html"))
    policy = {
        "default-src": "'none'",
        "style-src": f"'{digest(style)}'",
        "script-src": f"'{digest(script)}'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, "; ".join(f"{name} {value}" for name, value in policy.items())


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
