"""`--help`: whole summaries, and options below the headings of their classes."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from meshdsl.cli.app import NAMES, app

SHARED = {
    "--mesh": "Program options",
    "--set": "Program options",
    "--layout": "Placement options",
    "--no-cache": "Placement options",
    "--tokenizer": "Data options",
    "--strict": "General options",
    "--json": "General options",
    "--help": "General options",
}
"""Options of several commands, with the heading they are below in each."""

OWN_MEANING = {
    ("generate", "--tokenizer"),
    ("weights", "--set"),
}
"""Options that the class of the command declares itself."""


def _help(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def _sections(text: str) -> dict[str, list[str]]:
    """The options by heading."""
    parts = re.split(r"^([A-Z][\w ]*):\n", text, flags=re.MULTILINE)
    return {
        heading: re.findall(r"^  .*?(--[\w-]+)", body, re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_list_of_commands_cuts_no_summary() -> None:
    listed = dict(re.findall(r"^  (\w+) +(\S.*)$", _help().partition("Commands:")[2], re.MULTILINE))
    assert tuple(listed) == NAMES
    assert [text for text in listed.values() if text.endswith("...") or len(text) > 60] == []


@pytest.mark.parametrize("name", NAMES)
def test_shared_options_are_below_their_headings(name: str) -> None:
    sections = _sections(_help(name))
    where = {option: heading for heading, options in sections.items() for option in options}
    assert where["--help"] == list(sections)[-1]
    for option, heading in where.items():
        if option in SHARED and (name, option) not in OWN_MEANING:
            assert heading == SHARED[option], option
