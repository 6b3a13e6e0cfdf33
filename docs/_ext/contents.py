"""The table of contents: the pages that an index links to, in its order.

An index is a page that people read on a forge as well, so the contents are taken from its links
rather than written beside them.
"""

from __future__ import annotations

import posixpath
import re

from sphinx.environment import BuildEnvironment

from docs._ext import entries

INDEXES = ("docs/README", "examples/notebooks/README")

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)((?:#[^)\s]*)?)\)")
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


def listed(env: BuildEnvironment, page: str, text: str) -> str:
    """The text of a page; of an index with the contents, a part for each of its sections."""
    if page not in INDEXES:
        return text
    first, *rest = _SECTION.split(text)
    sections = [("", first), *zip(rest[::2], rest[1::2], strict=True)]
    by_title = {title: _pages(env, page, body) for title, body in sections}
    # What the text above the sections leads to as well is listed in its section.
    below = {each for title, pages in by_title.items() if title for each in pages}
    seen = {page}
    parts = []
    for title, pages in by_title.items():
        found = [each for each in pages if each not in seen and (title or each not in below)]
        seen.update(found)
        if found:
            parts.append(_toctree(title, found))
    return "\n\n".join([text.rstrip("\n"), *parts]) + "\n"


def _pages(env: BuildEnvironment, page: str, text: str) -> list[str]:
    """The pages that a text of `page` links to, each once."""
    known = env.found_docs
    names = (posixpath.splitext(_from_root(page, link))[0] for link, _ in _LINK.findall(text))
    return list(dict.fromkeys(name for name in names if name in known))


def _from_root(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _toctree(caption: str, pages: list[str]) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *(f"/{name}" for name in pages), "```"])


def to_pages(env: BuildEnvironment, page: str, text: str) -> str:
    """The text with its links as the site has them.

    A link to a folder leads to the page that a forge shows for it, and one to a place of an index
    or of a long page to the page that has it.
    """

    def led(match: re.Match[str]) -> str:
        index = posixpath.splitext(_from_root(page, match[1]))[0]
        entry = entries.led(index, match[2].lstrip("#")) if match[2] else None
        if entry:
            return f"]({posixpath.relpath(entry, posixpath.dirname(page) or '.')})"
        readme = _from_root(page, f"{match[1]}/README")
        return (
            f"]({match[1].rstrip('/')}/README.md{match[2]})"
            if readme in env.found_docs
            else match[0]
        )

    return _LINK.sub(led, text)
