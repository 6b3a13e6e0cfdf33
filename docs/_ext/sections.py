"""Long pages in parts: a page for each section of a page that is too long to scroll through.

On a forge such a page is one file. Here it keeps what stands above its first section, with a list
of the parts; a section that is still too long is divided in turn. Links to a heading lead to the
part that has it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from docs._ext import generated

ROOT = Path(__file__).resolve().parents[2]

LONG = (
    "CHANGELOG",
    "docs/api",
    "docs/decisions",
    "docs/pipelines",
    "docs/search",
    "docs/training",
    "grammar/README",
)
"""Pages that are divided."""

MOST = 10_500
"""The most pixels of a part, by `height`, that is not divided further."""

_FENCE = re.compile(r"^ *(`{3,})")
_HEADING = re.compile(r"^(#{1,4}) (.*)$")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


@dataclass
class Section:
    """A heading, what stands below it, and the sections inside of it."""

    level: int
    title: str
    lines: list[str] = field(default_factory=list)
    inside: list[Section] = field(default_factory=list)

    def own(self) -> Iterator[str]:
        """The heading, and the lines up to the first section inside."""
        yield f"{'#' * self.level} {self.title}"
        yield from self.lines

    def whole(self) -> Iterator[str]:
        """All lines."""
        yield from self.own()
        for section in self.inside:
            yield from section.whole()


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """The lines of a text, each with whether it is in a fenced block."""
    fence = ""
    for line in text.splitlines():
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
            yield line, True
        elif match and line.strip() == fence:
            fence = ""
            yield line, True
        else:
            yield line, bool(fence)


def tree(text: str) -> Section:
    """A page as its sections."""
    stack: list[Section] = []
    for line, fenced in lines_of(text):
        match = None if fenced else _HEADING.match(line)
        if match is None:
            if stack:
                stack[-1].lines.append(line)
            continue
        section = Section(len(match[1]), match[2])
        while stack and stack[-1].level >= section.level:
            stack.pop()
        if stack:
            stack[-1].inside.append(section)
        stack.append(section)
        if len(stack) == 1:
            first = section
    return first


def height(text: str) -> float:
    """About how many pixels a text is high, in a column of 46 em."""
    total = 0.0
    for line, fenced in lines_of(text):
        if fenced:
            total += 450 if ".. auto" in line else 20
        elif line.startswith("#"):
            total += 60
        elif line.startswith("|"):
            total += 12 + 24 * -(-len(_shown(line)) // 105)
        elif "<img" in line:
            total += 260
        else:
            total += 12 if not line.strip() else 32 * max(len(_shown(line)) / 95, 0.3)
    return total


def _shown(line: str) -> str:
    """A line without what is not on the page: tags, and where links lead."""
    return re.sub(r"<[^>]+>|\]\([^)]*\)", "", line)


def slug(title: str) -> str:
    """The anchor of a heading, as a forge and MyST make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower().strip()).replace(" ", "-")


@cache
def parts(page: str) -> Mapping[str, tuple[str, list[str]]]:
    """The pages that a long page becomes: the text of each, and the parts below it."""
    text = generated.filled((ROOT / f"{page}.md").read_text(encoding="utf-8"))
    found: dict[str, tuple[str, list[str]]] = {}
    _divide(page, page, tree(text), found)
    return found


def _divide(
    page: str, name: str, section: Section, found: dict[str, tuple[str, list[str]]]
) -> None:
    """Write a section as the page `name`, or as a page with one for each section inside."""
    shift = section.level - 1
    whole = "\n".join(section.whole())
    if section.level > 1 and height(whole) <= MOST:
        found[name] = (_raised(whole, shift), [])
        return
    section.inside = section.inside or list(_cut(section))
    below: list[str] = []
    found[name] = (_raised("\n".join(section.own()), shift), below)
    for inner in section.inside:
        part = f"{page}/{slug(inner.title)}"
        assert part not in found, f"two sections of {page} are called {inner.title}"
        below.append(part)
        _divide(page, part, inner, found)


def _cut(section: Section) -> Iterator[Section]:
    """A section without sections inside, cut between the entries of its list or its paragraphs."""
    cut = Section(section.level + 1, f"{section.title}, part 1")
    number = 1
    for line, fenced in lines_of("\n".join(section.lines)):
        begins = line.startswith("- ") or cut.lines[-1:] == [""]
        if not fenced and begins and height("\n".join(cut.lines)) > MOST / 2:
            yield cut
            number += 1
            cut = Section(section.level + 1, f"{section.title}, part {number}")
        cut.lines.append(line)
    section.lines = []
    yield cut


def _raised(text: str, by: int) -> str:
    """A text with its headings `by` levels higher."""
    return "\n".join(
        line[by:] if not fenced and _HEADING.match(line) else line
        for line, fenced in lines_of(text)
    )


@cache
def anchors(page: str) -> Mapping[str, str]:
    """The part that has each anchor of a long page."""
    found: dict[str, str] = {}
    for name, (text, _) in parts(page).items():
        for line, fenced in lines_of(text):
            match = None if fenced else _HEADING.match(line)
            if match:
                found.setdefault(slug(match[2]), name)
    return found


def page_of(name: str) -> str | None:
    """The long page that a page is, or is a part of."""
    return next((page for page in LONG if name == page or name.startswith(f"{page}/")), None)


def text_of(name: str) -> str | None:
    """The text of a page that is, or is a part of, a long one, with its list of parts."""
    page = page_of(name)
    if page is None or name not in parts(page):
        return None
    text, below = parts(page)[name]
    text = _LINK.sub(lambda match: _from(page, name, match), text).rstrip("\n")
    if not below:
        return f"{text}\n"
    here = posixpath.dirname(name) or "."
    titles = (parts(page)[part][0].partition("\n")[0].lstrip("# ") for part in below)
    links = (
        f'- <a id="{posixpath.basename(part)}"></a>[{title}]({posixpath.relpath(part, here)}.md)'
        for title, part in zip(titles, below, strict=True)
    )
    contents = ["```{toctree}", ":hidden:", "", *(f"/{part}" for part in below), "```"]
    return "\n".join([text, "", *links, "", *contents, ""])


def _from(page: str, name: str, match: re.Match[str]) -> str:
    """A link of a long page, from one of its parts; what is no link in code stays."""
    path, anchor = match[1], match[2] or ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else None
    if target is None:
        if anchor.lstrip("#") not in anchors(page):
            return match[0]
        target = f"{page}.md"
    elif not (ROOT / target).exists():
        return match[0]
    return f"]({posixpath.relpath(target, posixpath.dirname(name) or '.')}{anchor})"
