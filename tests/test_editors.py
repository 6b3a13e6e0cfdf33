"""The editor's grammar: valid, of the same words as the language, and colouring the same things."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pygments.token import Comment, Keyword, Number, Operator, String

from meshdsl.editor.facts import Wishes
from meshdsl.editor.features import COMMANDS
from meshdsl.lexer import AXIS, DIM, FUNCTION, OPERATOR, MdslLexer, vocabulary
from meshdsl.ops.opdef import load_all
from meshdsl.placed.place import POLICIES
from tests.project import ROOT, matching

FOLDER = ROOT / "editors/vscode"
GRAMMAR = json.loads((FOLDER / "syntaxes/mdsl.tmLanguage.json").read_text())
EXAMPLES = matching("examples/**/*.mdsl", "meshdsl/prelude/*.mdsl")

PACKAGE = json.loads((FOLDER / "package.json").read_text())

# --- a small matcher of TextMate grammars ------------------------------------------------------

Rule = dict[str, Any]
Run = tuple[int, int, str]
"""Start and end of characters in a line, and the innermost scope they get."""


def flat(patterns: list[Rule]) -> Iterator[Rule]:
    """Patterns with what they include."""
    for rule in patterns:
        if "include" in rule:
            yield from flat([GRAMMAR["repository"][rule["include"].removeprefix("#")]])
        elif "match" in rule or "begin" in rule:
            yield rule
        else:
            yield from flat(rule["patterns"])


def coloured(text: str) -> list[tuple[str, str]]:
    """The words of a text, each with the innermost scope that the grammar gives it."""
    stack: list[Rule] = [{"patterns": GRAMMAR["patterns"]}]
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        found += [(line[a:b], scope) for a, b, scope in runs(line, stack) if line[a:b].strip()]
    return found


def runs(line: str, stack: list[Rule]) -> Iterator[Run]:
    """The part of a line that each rule matches; open rules stay on the stack."""
    at, steps = 0, 0
    while True:
        steps += 1
        assert steps < 10_000, f"the grammar does not move on in {line!r}"
        match, rule, ends = earliest(line, at, stack)
        if match is None:
            return
        yield from captured(line, match, rule, "endCaptures" if ends else "")
        if ends:
            stack.pop()
        elif "begin" in rule:
            stack.append(rule)
        at = match.end()
        if not match.group() and not ends and "begin" not in rule:
            return


def earliest(line: str, at: int, stack: list[Rule]) -> tuple[re.Match[str] | None, Rule, bool]:
    """The first match at or after `at`: the end of the open rule, or else a pattern, in order."""
    open_rule = stack[-1]
    candidates = [(open_rule["end"], open_rule, True)] if "end" in open_rule else []
    for rule in flat(open_rule.get("patterns", [])):
        candidates.append((rule.get("match") or rule["begin"], rule, False))
    best: tuple[re.Match[str] | None, Rule, bool] = (None, {}, False)
    for pattern, rule, ends in candidates:
        match = re.compile(pattern).search(line, at)
        if match and (best[0] is None or match.start() < best[0].start()):
            best = (match, rule, ends)
    return best


def captured(line: str, match: re.Match[str], rule: Rule, key: str) -> Iterator[Run]:
    captures = rule.get(key or ("beginCaptures" if "begin" in rule else "captures"), {})
    if not key and not captures:
        yield match.start(), match.end(), rule.get("name", "")
    for number, capture in captures.items():
        start, end = match.span(int(number))
        if start < 0:
            continue
        if "name" in capture:
            yield start, end, capture["name"]
        else:
            stack = [{"patterns": capture["patterns"]}]
            yield from ((start + a, start + b, s) for a, b, s in runs(line[start:end], stack))


# --- the files ---------------------------------------------------------------------------------


def rules(node: Any) -> Iterator[Rule]:
    if isinstance(node, dict):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from rules(child)


@pytest.mark.parametrize("path", matching("editors/vscode/**/*.json"), ids=lambda p: p.name)
def test_json_is_valid(path: Path) -> None:
    assert isinstance(json.loads(path.read_text()), dict)


def test_the_package_points_at_files_that_exist() -> None:
    contributes = json.loads((FOLDER / "package.json").read_text())["contributes"]
    (language,), (grammar,) = contributes["languages"], contributes["grammars"]
    assert (FOLDER / language["configuration"]).is_file()
    assert (FOLDER / grammar["path"]).is_file()
    assert grammar["scopeName"] == GRAMMAR["scopeName"]
    assert grammar["language"] == language["id"]
    assert language["extensions"] == [".mdsl"]
    assert set(MdslLexer.aliases) == set(language["aliases"])


def test_patterns_are_regular_expressions_and_includes_exist() -> None:
    for rule in rules(GRAMMAR):
        for key in ("match", "begin", "end"):
            if isinstance(rule.get(key), str):
                re.compile(rule[key])
        if isinstance(rule.get("include"), str):
            assert rule["include"].removeprefix("#") in GRAMMAR["repository"]
        if isinstance(rule.get("name"), str) and rule is not GRAMMAR:
            assert rule["name"].endswith(".mdsl")


def test_every_rule_of_the_grammar_is_used() -> None:
    included = {r["include"].removeprefix("#") for r in rules(GRAMMAR) if "include" in r}
    assert included == set(GRAMMAR["repository"])


def lists() -> dict[str, set[str]]:
    """The lists of words in the grammar, by the scope that they get."""
    found: dict[str, set[str]] = {}
    for rule in rules(GRAMMAR):
        pattern = rule.get("match", "")
        words = re.search(r"\((\w+(?:\|\w+)*)\)(?!\?)", pattern)
        if words:
            group = len(re.findall(r"\((?!\?)", pattern[: words.start()])) + 1
            scope = rule.get("name") or rule["captures"][str(group)]["name"]
            found.setdefault(scope, set()).update(words[1].split("|"))
    return found


def makers() -> set[str]:
    """Operators that may be written without `( )`; all others are known by it."""
    return {
        name
        for name, opdef in load_all().items()
        if opdef.surface.items == "dim" and opdef.surface.arity == (0, 0)
    }


def test_the_words_are_those_of_the_language() -> None:
    known = vocabulary()
    assert lists() == {
        "keyword.declaration.mdsl": known.declarations,
        "keyword.control.mdsl": known.statements,
        "keyword.other.mdsl": known.links,
        "keyword.operator.logical.mdsl": known.logic,
        "support.function.maker.mdsl": makers(),
        "support.type.mdsl": known.dtypes,
        "variable.language.mdsl": known.selectors,
        "constant.language.mdsl": {"none"},
    }


# --- what it colours -----------------------------------------------------------------------------

SAME = (
    ((Comment.Single,), ("comment.",)),
    ((String,), ("string.",)),
    ((Number.Integer, Number.Float), ("constant.numeric.",)),
    ((Keyword.Declaration,), ("keyword.declaration.",)),
    ((Operator.Word,), ("keyword.operator.logical.",)),
    ((OPERATOR, FUNCTION), ("support.function.", "entity.name.function.")),
    ((DIM,), ("variable.other.constant.dim.",)),
    ((AXIS,), ("variable.other.axis.",)),
)
"""Types of the Pygments lexer and the scopes of the editor that mean the same."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_coloured_as_by_the_lexer(path: Path) -> None:
    text = path.read_text()
    lexer = MdslLexer(stripnl=False)
    scopes = coloured(text)
    for types, names in SAME:
        wanted = [part for type_, part in lexer.get_tokens(text) if type_ in types]
        assert [part for part, scope in scopes if scope.startswith(names)] == wanted, names


CASES = {
    "layout l extends k { params: a -> (x, y) keep, h.w: b -> none }": {
        "layout": "keyword.declaration",
        "extends": "keyword.other",
        "params": "variable.language",
        "a": "variable.other.constant.dim",
        "y": "variable.other.axis",
        "keep": "keyword.other",
        "w": "variable.other",
        "none": "constant.language",
    },
    "program p(x[a@(r, s), b@none]: bf16) {\n  y = x[a = ids, b = 0:4 -> c]\n}": {
        "p": "entity.name.function",
        "r": "variable.other.axis",
        "none": "constant.language",
        "bf16": "support.type",
        "ids": "variable.other",
        "c": "variable.other.constant.dim",
        "@": "keyword.operator.pin",
    },
    "program p(x[a]) {\n  y = shift[a](x, by=1)\n}": {
        "by": "variable.other",
        "x": "variable.other",
    },
    "sbp s { w at y.z: (S(0), P(max)) }": {
        "at": "keyword.other",
        "S": "constant.language",
        "max": "constant.language",
        "z": "variable.other",
    },
    "layout l { a -> pipe } with interleaved[batch](8, chunks=2, recompute=stage)": {
        "with": "keyword.other",
        "interleaved": "entity.name.type",
        "batch": "variable.other.constant.dim",
        "8": "constant.numeric",
        "chunks": "variable.other",
        "recompute": "variable.other",
        "stage": "variable.other",
    },
    "schedule mine(stages=2) {\n  0: F0 B0@1\n}\nprogram p(schedule[a]) {\n  y = schedule\n}": {
        "mine": "entity.name.type",
        "stages": "variable.other",
        "F0": "support.function",
        "1": "constant.numeric",
        "@": "keyword.operator.pin",
        "y": "variable.other",
    },
    'weights hf {\n  under "h." or "" {\n  (m.w, v): "k.{a}"[b = 4, (c, d) + 1] or init\n  }\n  '
    'ignore "*.x"\n}\ndim z = 1': {
        "weights": "keyword.declaration",
        "hf": "entity.name.type",
        "w": "variable.other",
        "c": "variable.other.constant.dim",
        "under": "keyword.other",
        "init": "constant.language",
        "ignore": "keyword.other",
        "z": "variable.other.constant.dim",
    },
    "expect l for q on m { memory: 1 }": {
        "for": "keyword.other",
        "q": "entity.name.type",
        "m": "entity.name.type",
    },
    "expect l with mesh-tf { all_reduce over (x, y): 2, h: [a@x] }": {
        "l": "entity.name.type",
        "mesh-tf": "keyword.other",
        "over": "keyword.other",
        "y": "variable.other.axis",
        "a": "variable.other.constant.dim",
    },
}


@pytest.mark.parametrize("text", CASES)
def test_words_get_their_scopes(text: str) -> None:
    found = {part: scope.removesuffix(".mdsl") for part, scope in reversed(coloured(text))}
    assert {word: found.get(word) for word in CASES[text]} == CASES[text]


# --- the client --------------------------------------------------------------------------------


def test_the_settings_are_those_of_the_server() -> None:
    known = {field.name for field in dataclasses.fields(Wishes)}
    settings = PACKAGE["contributes"]["configuration"]["properties"]
    of_the_client = {"command", "trace.server"}
    assert {name.removeprefix("meshdsl.") for name in settings} == known | of_the_client
    policies = settings["meshdsl.reduce"]
    assert policies["enum"] == list(POLICIES)
    assert policies["default"] == Wishes().reduce
    assert settings["meshdsl.command"]["default"] == ["meshdsl", "lsp"]


def test_the_client_calls_commands_that_there_are() -> None:
    """Its own commands must not have the names of the server's, which it registers too."""
    text = (FOLDER / "extension.js").read_text()
    own = {command["command"] for command in PACKAGE["contributes"]["commands"]}
    assert own == set(re.findall(r'registerCommand\("([^"]+)"', text))
    assert set(re.findall(r'ask\("([^"]+)"', text)) <= set(COMMANDS)
    assert not own & set(COMMANDS)


def test_the_client_is_pinned() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert lock["packages"][""]["dependencies"] == PACKAGE["dependencies"]
    for name, version in PACKAGE["dependencies"].items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert (FOLDER / PACKAGE["main"]).is_file()


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_client_is_javascript() -> None:
    subprocess.run(["node", "--check", FOLDER / PACKAGE["main"]], check=True)


CLIENT = """
const Module = require("module");
const told = [];
let word = "none";
class LanguageClient {
  constructor(id, name, server) { this.command = server.command; this.state = "initial"; }
  isRunning() { return this.state === "running"; }
  async start() {
    this.state = this.command === "good" ? "running" : "failed";
    told.push(`${this.command} ${this.state}`);
    if (this.state === "failed") throw new Error("ENOENT");
  }
  async dispose() {
    if (!this.isRunning()) throw new Error("Client is not running and can't be stopped");
    told.push(`${this.command} ended`);
    this.state = "stopped";
  }
}
let changed;
const vscode = {
  StatusBarAlignment: {},
  window: {
    createStatusBarItem: () => ({ hide() {}, show() {} }),
    showErrorMessage: async (text) => { told.push(text); },
    onDidChangeActiveTextEditor() {},
  },
  commands: { registerCommand() {} },
  languages: { onDidChangeDiagnostics() {} },
  workspace: {
    getConfiguration: () => ({ get: () => [word, "lsp"] }),
    onDidChangeConfiguration: (call) => { changed = call; },
  },
};
const load = Module._load;
Module._load = (name, ...rest) =>
  name === "vscode" ? vscode
  : name === "vscode-languageclient/node" ? { LanguageClient } : load(name, ...rest);
(async () => {
  const extension = require(process.argv[1]);
  await extension.activate({ subscriptions: [] });
  for (word of ["good", "none", "good"]) await changed({ affectsConfiguration: () => true });
  await extension.deactivate();
  console.log(JSON.stringify(told));
})();
"""
"""The client without its editor. As in the real library, one that does not run cannot be ended."""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_a_client_without_a_server_says_so_and_starts_one_once_the_setting_is_right() -> None:
    words = ["node", "-e", CLIENT, str(FOLDER / PACKAGE["main"])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    missing = "meshdsl: `none` could not be started (ENOENT). Is it installed?"
    first = ["none failed", missing, "good running"]
    assert json.loads(done.stdout) == [*first, "good ended", *first, "good ended"]
