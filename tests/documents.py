"""What pages show is what commands print: these are called in this process."""

from __future__ import annotations

import re
import shlex
from difflib import SequenceMatcher

from typer.testing import CliRunner

from meshdsl.cli.app import app
from meshdsl.cli.options import spread_settings

MAY_DIFFER = {
    "how long it took": r"\d[\d,.]* (?:s\b|tokens/s)|\d+:\d\d left",
    "how much was rounded": r"\d(?:\.\d)?e-\d\d",
    "what was learned of a page that is edited": r"(?:loss|norm) \d+(?:\.\d+)?",
    "how much memory a process with torch takes": r"memory [\d.]+ [MG]iB",
}


def printed(command: str, *codes: int) -> str:
    """What `meshdsl …` prints; it has to end with one of the exit codes, or 0."""
    name, *words = shlex.split(command)
    assert name == "meshdsl", f"nobody knows how to run `{command}`"
    done = CliRunner().invoke(app, spread_settings(words))
    assert done.exit_code in (0, *codes), done.output
    return done.output


def sessions(text: str) -> list[tuple[str, str]]:
    """Each `$ command` of a block, and what is shown below it."""
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first, "a session begins with `$ `"
    assert parts
    pairs = (part.partition("\n") for part in parts)
    return [(command, shown) for command, _, shown in pairs]


def check_shown(command: str, shown: str, output: str) -> None:
    assert shows(shown, output), f"{command}\nshown:\n{shown}\nprinted:\n{output}"


def shows(shown: str, output: str) -> bool:
    """Whether a page shows what is printed, but for the lines that `…` stands for."""
    pattern = "(?:.*\n)*?".join(map(re.escape, comparable(shown).split("…\n")))
    return re.fullmatch(pattern, comparable(output)) is not None


def renewed(shown: str, output: str) -> str:
    """What a page would show of what is printed now: the lines most like those that it shows."""
    lines, start, parts = output.splitlines(), 0, re.split("^…\n", shown, flags=re.MULTILINE)
    chosen = []
    for number, part in enumerate(parts):
        old = part.splitlines()
        if not old:
            chosen.append("")
            continue
        start = _most_like(old[0], lines, start, start) if number else 0
        end = _most_like(old[-1], lines, start, start + len(old) - 1) + 1
        end = len(lines) if number == len(parts) - 1 else end
        chosen.append("".join(f"{line.rstrip()}\n" for line in lines[start:end]))
        start = end
    return "…\n".join(chosen)


def _most_like(line: str, lines: list[str], start: int, expected: int) -> int:
    """The number of the line, from `start` on, that is most like one: of several the nearest."""
    likeness = {
        n: (SequenceMatcher(None, line, lines[n]).ratio(), -abs(n - expected))
        for n in range(start, len(lines))
    }
    return max(likeness, key=likeness.__getitem__, default=start)


def comparable(text: str) -> str:
    """A text without what may differ."""
    for pattern in MAY_DIFFER.values():
        text = re.sub(pattern, "*", text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").split("\n"))
