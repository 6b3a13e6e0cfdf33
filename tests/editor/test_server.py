"""The server as an editor meets it: a client of the protocol, over standard input and output."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urlsplit

import numpy as np
import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from safetensors.numpy import save_file

from meshdsl.analysis import analyse
from meshdsl.diagnostics import Source
from meshdsl.editor.features import FEATURES, make
from meshdsl.pipeline import Options
from tests.editor.conftest import SERVER, Editor
from tests.project import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="module")

MLP = (ROOT / "examples/mlp.mdsl").read_text()

SEVEN = (
    MLP.replace("param w[io, hidden]", "param w[io, hiddn]")
    .replace("relu(", "rleu(")
    .replace("zeros()", "zero()")
    .replace("einsum(h, v ->", "einsum(h, vv ->")
    .replace("y - target", "y - taget")
    .replace("batch -> rows, hidden -> cols", "batch -> row, hiden -> cols")
)
"""Seven mistakes in `examples/mlp.mdsl`, each a name that is spelled wrong."""


def spot(text: str, word: str, nth: int = 0, inside: int = 1) -> lsp.Position:
    """The position in the `nth` occurrence of a word; the text is ASCII before it in its line."""
    at = -1
    for _ in range(nth + 1):
        at = text.index(word, at + 1)
    line = text.count("\n", 0, at)
    return lsp.Position(line, at + inside - (text.rfind("\n", 0, at) + 1))


def under(text: str, found: lsp.Range) -> str:
    """The characters of a range in one line, counted as UTF-16."""
    assert found.start.line == found.end.line
    line = text.splitlines()[found.start.line].encode("utf-16-le")
    return line[2 * found.start.character : 2 * found.end.character].decode("utf-16-le")


def document(uri: str) -> lsp.TextDocumentIdentifier:
    return lsp.TextDocumentIdentifier(uri)


# --- diagnostics -------------------------------------------------------------------------------


async def test_seven_mistakes_are_told_at_once(editor: Editor) -> None:
    told = await editor.open("file:///seven.mdsl", SEVEN)
    wrong = analyse(Source("", SEVEN), Options()).diagnostics
    assert [(under(SEVEN, d.range), d.code) for d in told] == [
        (d.span.text if d.span else "", d.code) for d in wrong
    ]
    assert {d.code for d in told} >= {"MD0101", "MD0103", "MD0260", "MD0304", "MD0305"}
    for diagnostic in told:
        assert diagnostic.source == "meshdsl"
        assert diagnostic.code_description is not None
        file, line = urldefrag(diagnostic.code_description.href)
        record = Path(urlsplit(file).path).read_text().splitlines()[int(line[1:]) - 1]
        assert record == f"[{diagnostic.code}]"
    editor.close("file:///seven.mdsl")


async def test_positions_count_as_the_client_does(editor: Editor) -> None:
    """Behind a byte order mark, between emoji, with the line ends of Windows."""
    text = "\ufeffdim a = 4, b = aa # 🧮\r\nprogram p(x[a]) { # 😀😀\r\n  y = x + /* */ 🙃zz\r\n"
    lines = "program q(x[a]) {\r\n  y = x[a = 0:2 -> b] # 🧮🧮\r\n  return y + 🧮xx\r\n}\r\n"
    uri = "file:///emoji.mdsl"
    told = await editor.open(uri, text)
    assert "aa" in {under(text, d.range) for d in told}
    told = await editor.type(uri, "dim a = 4, b = 2\r\n" + lines)
    assert {under("\n" + lines.replace("\r", ""), d.range) for d in told} == {"🧮"}
    editor.close(uri)


async def test_what_is_only_seen_when_it_is_placed(editor: Editor) -> None:
    """A layout that leaves devices idle, an expectation that does not hold; with both places."""
    uri = "file:///placed.mdsl"
    told = await editor.open(uri, MLP.replace("rows: 2", "rows: 3000"))
    assert "MD0301" in {d.code for d in told}
    told = await editor.type(uri, MLP.replace("all_reduce over cols: 1", "all_reduce over cols: 7"))
    assert {(d.code, d.severity) for d in told} == {("MD0401", lsp.DiagnosticSeverity.Error)}
    told = await editor.type(uri, MLP.replace("dim hidden = 4 * io", "dim hidden = 4 * io, io = 2"))
    (twice,) = [d for d in told if d.code == "MD0104"]
    assert twice.related_information is not None
    assert "first declared" in twice.related_information[0].message
    editor.close(uri)
    await editor.open("file:///placed2.mdsl", MLP)  # what was sent before has been read
    assert editor.client.diagnostics[uri] == ()
    editor.close("file:///placed2.mdsl")


async def test_versions_that_come_late_change_nothing(editor: Editor) -> None:
    uri = "file:///late.mdsl"
    await editor.open(uri, MLP)
    for number in range(2, 12):
        editor.change(uri, MLP + "# more\n" * number + "program" * (number % 2), number)
    editor.change(uri, SEVEN, 12)
    editor.change(uri, MLP, 3)
    told = await editor.told(uri)
    assert len(told) >= 5
    editor.close(uri)


LIMITS = {
    "empty": "",
    "no line end": "dim",
    "damaged": MLP[: len(MLP) // 2] + "\n}}} ) [ layout { -> \n" + MLP[len(MLP) // 3 :],
    "a NUL byte": MLP + "\0\n",
    "no Unicode": MLP.replace("cols", "\ud83d", 1),
    "control characters": "# \x0c\x0b\u2028\x85\x1c\n" + MLP + "\nlayout \x0c {}",
    "nested": "program p() {\n  x = " + "(" * 3000 + "\n}",
    "one long line": "dim " + ", ".join(f"d{i} = {i}" for i in range(1, 300)),
    "huge": "\n".join(["# " + "all the same " * 7] * 11_000 + [SEVEN]),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_any_text_gets_answers(editor: Editor, name: str) -> None:
    """Every request is answered, whatever the text, and what is wrong is told."""
    text, uri = LIMITS[name], f"file:///limits-{len(name)}.mdsl"
    told = await editor.open(uri, text)
    assert told or name in ("empty", "one long line")
    last = text.count("\n")
    middle = spot(text, "io", 3) if text.count("io") > 3 else lsp.Position(0, 0)
    for place in (lsp.Position(0, 0), lsp.Position(last, 3), lsp.Position(10**6, 10**6), middle):
        await _everything(editor, uri, place)
    edits = await editor.ask(
        lsp.TEXT_DOCUMENT_FORMATTING,
        lsp.DocumentFormattingParams(document(uri), lsp.FormattingOptions(2, True)),
    )
    if name not in ("empty", "one long line", "no Unicode", "huge"):
        assert not edits
    editor.close(uri)
    assert not [m for m in editor.client.log_messages if "Error" in m.message]


async def _everything(editor: Editor, uri: str, place: lsp.Position) -> None:
    where, whole = document(uri), lsp.Range(lsp.Position(0, 0), place)
    context = lsp.CodeActionContext([])
    await asyncio.gather(
        editor.ask(lsp.TEXT_DOCUMENT_HOVER, lsp.HoverParams(where, place)),
        editor.ask(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionParams(where, place)),
        editor.ask(lsp.TEXT_DOCUMENT_SIGNATURE_HELP, lsp.SignatureHelpParams(where, place)),
        editor.ask(lsp.TEXT_DOCUMENT_DEFINITION, lsp.DefinitionParams(where, place)),
        editor.ask(
            lsp.TEXT_DOCUMENT_REFERENCES,
            lsp.ReferenceParams(lsp.ReferenceContext(True), where, place),
        ),
        editor.ask(lsp.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT, lsp.DocumentHighlightParams(where, place)),
        editor.ask(lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL, lsp.DocumentSymbolParams(where)),
        editor.ask(lsp.TEXT_DOCUMENT_PREPARE_RENAME, lsp.PrepareRenameParams(where, place)),
        editor.ask(lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensParams(where)),
        editor.ask(lsp.TEXT_DOCUMENT_INLAY_HINT, lsp.InlayHintParams(where, whole)),
        editor.ask(lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionParams(where, whole, context)),
    )


async def test_requests_about_nothing_are_answered(editor: Editor) -> None:
    """Documents that are not open, commands that do not exist, arguments that make no sense."""
    await _everything(editor, "file:///nowhere.mdsl", lsp.Position(1, 1))
    for command, *arguments in (
        ("meshdsl.nothing", 1),
        ("meshdsl.chooseLayout",),
        ("meshdsl.chooseLayout", "file:///nowhere.mdsl", "megatron"),
        ("meshdsl.explainLine", 3, {}),
        ("meshdsl.layouts", None, None, None),
    ):
        with pytest.raises(JsonRpcException):
            await editor.command(command, *arguments)
    assert await editor.open("file:///fine.mdsl", MLP) == []


# --- placements ----------------------------------------------------------------------------------


WEIGHTS = """
dim io = 4, hidden = 6
weights hf {
  w: "layer.weight"[hidden, io]
  v: "head.weight"[(io, hidden)] or w
}
program p(x[io]) {
  param w[io, hidden]
  param v[io, hidden]
  return sum(x * w * v)
}
"""


async def test_a_block_of_weights_is_explained_and_completed(editor: Editor) -> None:
    uri = "file:///weights.mdsl"
    assert await editor.open(uri, WEIGHTS) == []
    where = lsp.HoverParams(document(uri), spot(WEIGHTS, "hf"))
    told = (await editor.ask(lsp.TEXT_DOCUMENT_HOVER, where)).contents.value
    assert "layer.weight[6, 4]: w\nhead.weight[24]: v" in told

    async def offered(word: str, nth: int = 0) -> set[str]:
        place = spot(WEIGHTS, word, nth)
        params = lsp.CompletionParams(document(uri), place)
        items = await editor.ask(lsp.TEXT_DOCUMENT_COMPLETION, params)
        return {item.label for item in getattr(items, "items", items)}

    assert await offered("w: ") == {"w", "v", "ignore", "under"}
    assert await offered("w\n}") == {"w", "v", "init"}
    assert await offered("hidden, io]") == {"io", "hidden"}


async def test_keys_of_a_model_are_completed(editor: Editor, tmp_path: Path) -> None:
    """Those that have the sizes of the parameter first, with its dims; of groups, what is left."""
    save_file(
        {
            **{f"m.h.{n}.w": np.zeros((3, 2), np.float32) for n in range(4)},
            **{f"m.h.{n}.b": np.zeros(5, np.float32) for n in range(4)},
        },
        tmp_path / "model.safetensors",
    )
    uri = (tmp_path / "p.mdsl").as_uri()
    text = """dim io = 2, hidden = 3, layers = 4
weights hf { w: }
weights other { under "m." or "" { under "h.{layers}." { w: "b" } } }
program p(x[io]) {
  repeat layers {
    param w[io, hidden]
    x = x + sum[hidden](w)
  }
  return x
}
"""
    await editor.open(uri, text)
    editor.client.set_configuration({"meshdsl": {"model": "model.safetensors"}})
    editor.client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams(None))

    async def offered(place: lsp.Position) -> dict[str, str]:
        params = lsp.CompletionParams(document(uri), place)
        found = await editor.ask(lsp.TEXT_DOCUMENT_COMPLETION, params)
        items = sorted(getattr(found, "items", found), key=lambda item: item.sort_text or "")
        return {item.text_edit.new_text: item.detail for item in items if item.text_edit}

    keys = {'"m.h.{layers}.w"[hidden, io]': "f32[3, 2]", '"m.h.{layers}.b"[]': "f32[5]"}
    while not (found := await offered(spot(text, "w: ", inside=3))):
        await asyncio.sleep(0)
    assert found == keys
    keys = {'"w"[hidden, io]': "f32[3, 2]", '"b"[]': "f32[5]"}
    assert await offered(spot(text, '"b"', inside=2)) == keys
    assert await offered(spot(text, "return")) == {}
    editor.client.workspace_did_change_configuration(
        lsp.DidChangeConfigurationParams({"meshdsl": {}})
    )
    editor.close(uri)


async def test_lenses_hints_and_hovers_follow_the_chosen_layout(editor: Editor) -> None:
    uri = "file:///lens.mdsl"
    await editor.open(uri, MLP)

    async def lenses():
        found = await editor.ask(lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensParams(document(uri)))
        return {lens.range.start.line + 1: lens.command.title for lens in found}

    async def hints():
        whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
        found = await editor.ask(
            lsp.TEXT_DOCUMENT_INLAY_HINT, lsp.InlayHintParams(document(uri), whole)
        )
        return {hint.position.line + 1: hint.label for hint in found}

    async def hover(word: str, nth: int = 0):
        params = lsp.HoverParams(document(uri), spot(MLP, word, nth))
        return (await editor.ask(lsp.TEXT_DOCUMENT_HOVER, params)).contents.value

    before = await lenses()
    assert before[18] == "all_reduce 64 KiB"
    assert (before[8], before[9]) == ("chosen", "choose this layout")
    assert before[12].startswith("hybrid on { rows: 2, cols: 2 }: 2 collectives, 64 KiB sent")
    assert (await hints())[17] == "[batch 64→32, hidden 2048→1024]"
    assert (await hints())[13] == " 2048→1024"
    told = await hover("y = ")
    for part in ("f32[batch 64, io 512]", "32 × 512", "all_reduce sum of y over cols", "optimal"):
        assert part in told
    assert "`hidden` = 2,048" in await hover("hidden")
    assert "1024 over cols" in await hover("hidden")
    assert "hidden -> cols" in await hover("hybrid")
    assert "4 devices" in await hover("square")
    assert "relu(x)" in await hover("relu")
    assert await editor.command("meshdsl.chooseLayout", uri, "data_parallel") == "data_parallel"
    assert await editor.told(uri) == []
    after = await lenses()
    assert 18 not in after
    assert after[9] == "chosen"
    assert (await hints())[17] == "[batch 64→32, hidden 2048]"
    assert "all_reduce sum of loss" in await editor.command("meshdsl.explainLine", uri, 18)
    broken = MLP.replace("dim batch", "# one line more\ndim batch").replace("return loss, y", "re(")
    assert await editor.type(uri, broken)
    moved = await lenses()
    assert moved[20] == after[19], "lenses stay at their lines while there are errors"
    editor.close(uri)


async def test_settings_choose_layout_mesh_and_policy(editor: Editor) -> None:
    uri, client = "file:///settings.mdsl", editor.client
    await editor.open(uri, MLP)
    settings = {"layout": "megatron", "mesh": "line", "reduce": "deferred"}
    client.set_configuration({"meshdsl": settings})
    client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams(None))
    while (found := await editor.command("meshdsl.layouts", uri))["chosen"] != "megatron":
        await asyncio.sleep(0)
    assert "megatron on" in found["cost"][0]
    strange = {"meshdsl": {"layout": 3, "reduce": "never", "mesh": "no such mesh"}}
    client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams(strange))
    while (found := await editor.command("meshdsl.layouts", uri))["chosen"] != "hybrid":
        await asyncio.sleep(0)
    assert "optimal" in client.messages[-1].message
    client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams({"meshdsl": {}}))
    editor.close(uri)


# --- names and edits -----------------------------------------------------------------------------


async def test_definitions_and_references(editor: Editor) -> None:
    uri = "file:///names.mdsl"
    text = MLP.replace("return loss, y", "z = softmax[io](y)\n  return loss, z")
    await editor.open(uri, text)

    async def defined(word: str, nth: int):
        params = lsp.DefinitionParams(document(uri), spot(text, word, nth))
        (place,) = await editor.ask(lsp.TEXT_DOCUMENT_DEFINITION, params)
        return place

    hidden = await defined("hidden", 3)
    assert (hidden.uri, under(text, hidden.range), hidden.range.start.line) == (uri, "hidden", 2)
    softmax = await defined("softmax", 0)
    source = Path(urlsplit(softmax.uri).path).read_text()
    assert source.splitlines()[softmax.range.start.line].startswith("def softmax[")
    params = lsp.ReferenceParams(
        lsp.ReferenceContext(False), document(uri), spot(text, "hidden", 3)
    )
    found = await editor.ask(lsp.TEXT_DOCUMENT_REFERENCES, params)
    assert len(found) == len(re.findall("hidden", re.sub("#.*", "", text))) - 1
    editor.close(uri)


async def test_renames(editor: Editor) -> None:
    uri = "file:///rename.mdsl"
    await editor.open(uri, MLP)
    place = spot(MLP, "hidden", 4)
    named = await editor.ask(
        lsp.TEXT_DOCUMENT_PREPARE_RENAME, lsp.PrepareRenameParams(document(uri), place)
    )
    assert under(MLP, named) == "hidden"
    done = await editor.ask(
        lsp.TEXT_DOCUMENT_RENAME, lsp.RenameParams(document(uri), place, "inner")
    )
    text = edited(MLP, done.changes[uri])
    assert text == re.sub("(#.*)|hidden", lambda m: m[1] or "inner", MLP)
    assert await editor.type(uri, text) == []
    with pytest.raises(JsonRpcException, match="io"):
        await editor.ask(lsp.TEXT_DOCUMENT_RENAME, lsp.RenameParams(document(uri), place, "io"))
    word = lsp.PrepareRenameParams(document(uri), spot(MLP, "relu"))
    assert await editor.ask(lsp.TEXT_DOCUMENT_PREPARE_RENAME, word) is None
    editor.close(uri)


async def test_fixes_mend_the_file(editor: Editor) -> None:
    uri = "file:///fix.mdsl"
    await editor.open(uri, SEVEN)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    only = lsp.CodeActionContext([], only=[lsp.CodeActionKind.SourceFixAll])
    (everything,) = await editor.ask(
        lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionParams(document(uri), whole, only)
    )
    assert edited(SEVEN, everything.edit.changes[uri]) != SEVEN
    place = spot(SEVEN, "rleu")
    (fix, *_) = await editor.ask(
        lsp.TEXT_DOCUMENT_CODE_ACTION,
        lsp.CodeActionParams(document(uri), lsp.Range(place, place), lsp.CodeActionContext([])),
    )
    assert fix.title == "write `relu`"
    assert fix.is_preferred
    assert edited(SEVEN, fix.edit.changes[uri]) == SEVEN.replace("rleu", "relu")
    editor.close(uri)


async def test_formatting(editor: Editor) -> None:
    uri = "file:///format.mdsl"
    crooked = MLP.replace("  y = einsum(h, v -> ", "y=einsum( h,v->").replace("\n", "\r\n")
    await editor.open(uri, crooked)
    params = lsp.DocumentFormattingParams(document(uri), lsp.FormattingOptions(2, True))
    (edit,) = await editor.ask(lsp.TEXT_DOCUMENT_FORMATTING, params)
    assert edit.range.start.line == edit.range.end.line - 1, "only the line that differs"
    assert edited(crooked.replace("\r\n", "\n"), [edit]) == MLP
    await editor.type(uri, MLP)
    assert not await editor.ask(lsp.TEXT_DOCUMENT_FORMATTING, params)
    editor.close(uri)


def edited(text: str, edits: list[lsp.TextEdit]) -> str:
    """A text after edits; it is ASCII."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for edit in sorted(edits, key=lambda e: (-e.range.start.line, -e.range.start.character)):
        first = starts[edit.range.start.line] + edit.range.start.character
        last = starts[edit.range.end.line] + edit.range.end.character
        text = text[:first] + edit.new_text + text[last:]
    return text


# --- the process -------------------------------------------------------------------------------


def message(**content: object) -> bytes:
    body = json.dumps({"jsonrpc": "2.0", **content}).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


EXIT = message(method="exit")


def conversation(sent: list[bytes]) -> tuple[int, list[Any]]:
    """The exit code of a server that is told all this, and what it wrote: nothing but messages."""
    done = subprocess.run(SERVER, input=b"".join(sent), capture_output=True, check=False)
    return done.returncode, answers_in(done.stdout)


def answers_in(rest: bytes) -> list[Any]:
    """The messages that a server wrote."""
    answers = []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        size = int(head.split(b"\r\n")[0].removeprefix(b"Content-Length: "))
        answers.append(json.loads(rest[:size]))
        rest = rest[size:]
    return answers


async def test_exit_without_shutdown_ends_it_and_stdout_has_the_protocol_alone() -> None:
    item = {"uri": "file:///a.mdsl", "languageId": "mdsl", "version": 1, "text": MLP}
    sent = [
        message(id=1, method="initialize", params={"capabilities": {}}),
        message(method="textDocument/didOpen", params={"textDocument": item}),
        b"Content-Length: 9\r\n\r\nnot JSON!",
        message(id=2, method="meshdsl/unheardOf", params={}),
        message(method="exit"),
    ]
    status, answers = conversation(sent)
    assert status == 1
    assert {a.get("id") for a in answers} >= {1, 2}


BAD_FRAMES = {
    "a length without end": b"Content-Length: 99999999999999\r\n\r\n{}",
    "a length of many digits": b"Content-Length: %s\r\n\r\n{}" % (b"9" * 5000),
    "a negative length": b"Content-Length: -7\r\n\r\n{}",
    "a length that is no number": b"Content-Length: seven\r\n\r\n{}",
    "no length": b"Content-Type: x\r\n\r\n{}",
    "lists in lists": b"Content-Length: 100000\r\n\r\n" + b"[" * 100000,
    "a number of many digits": b"Content-Length: 5000\r\n\r\n" + b"9" * 5000,
}


@pytest.mark.parametrize("split", [b"", b"\r\n"], ids=["at once", "after a line end"])
async def test_the_server_survives_bad_frames(split: bytes) -> None:
    sent = [message(id=1, method="initialize", params={"capabilities": {}})]
    for number, frame in enumerate(BAD_FRAMES.values(), 2):
        sent += [frame + split, message(id=number, method="meshdsl/unheardOf", params={})]
    last = len(BAD_FRAMES) + 2
    status, answers = conversation([*sent, message(id=last, method="shutdown"), EXIT])
    assert status == 0
    assert {a.get("id") for a in answers} >= set(range(1, last + 1))


def frame(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


BAD_BODIES = {
    "no JSON": b"[[[[",
    "no text": b'"\xff"',
    "brackets without end": b"[" * 100_000,
    "no message": b"[]",
    "no version": b"{}",
    "another version": b'{"jsonrpc": "1.0", "method": "exit"}',
    "an id that is none": b'{"jsonrpc": "2.0", "id": {}, "result": 1}',
    "a number that is a list": b'{"jsonrpc": "2.0", "id": [1], "method": "shutdown"}',
    "a method that is a number": b'{"jsonrpc": "2.0", "id": 8, "method": 1.0, "params": null}',
    "params in a response": b'{"jsonrpc": "2.0", "id": 7, "params": 1}',
    "params that are none": b'{"jsonrpc": "2.0", "method": "textDocument/didOpen", "params": 1}',
}


async def test_a_body_that_is_no_message_is_answered_without_a_traceback() -> None:
    command = {"params": {"command": "x", "arguments": []}}
    sent = [
        message(id=1, method="initialize", params={"capabilities": {}}),
        *map(frame, BAD_BODIES.values()),
        message(id=2, method="workspace/executeCommand", **command),
        message(id=3, method="shutdown"),
        EXIT,
    ]
    done = subprocess.run(SERVER, input=b"".join(sent), capture_output=True, check=False)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == len(BAD_BODIES) + 1, done.stderr
    assert (done.stdout.count(b"-32700"), done.stdout.count(b"-32600")) == (3, 6)
    answer = next(a for a in answers_in(done.stdout) if a.get("id") == 2)
    assert "not defined" in str(answer["error"])


async def test_a_client_that_is_gone_is_told_nothing() -> None:
    """That nothing can be sent cannot be sent either."""
    sent = [message(id=1, method="initialize", params={"capabilities": {}}), frame(b"[[[[")]
    server = subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=-1)
    assert server.stdout is not None
    server.stdout.close()
    _, said = server.communicate(b"".join(sent))
    assert server.returncode == 1
    assert b"recursion" not in said


async def test_a_message_that_is_cut_short_ends_it() -> None:
    status, _ = conversation([b"Content-Length: 1000\r\n\r\n{"])
    assert status == 1


async def test_every_request_is_answered_whatever_its_form() -> None:
    """Those without what the method asks for too: a client that waits for ever is a hang."""
    methods = sorted(name for name in FEATURES if "/" in name and not name.startswith("workspace"))
    forms: list[Any] = [None, [1], 5, {}, {"textDocument": 5}, {"textDocument": {"uri": 5}}]
    requests = [(m, {"params": form}) for m in methods for form in forms]
    requests += [(m, {}) for m in methods]
    sent = [message(id=1, method="initialize", params={"capabilities": {}})]
    sent += [message(id=i, method=m, **p) for i, (m, p) in enumerate(requests, 2)]
    last = len(sent) + 1
    sent += [message(id=last, method="shutdown")]
    sent += [message(id=last + 1, method="meshdsl/late", params={}), message(method="exit")]
    status, answers = conversation(sent)
    assert status == 0
    errors = {a["id"]: a.get("error") for a in answers if "id" in a}
    assert sorted(errors) == list(range(1, last + 2))
    assert errors[last] is None
    assert errors[last + 1]["code"] == -32600, "after shutdown"


async def test_nothing_is_carried_out_before_initialize() -> None:
    item = {"uri": "file:///a.mdsl", "languageId": "mdsl", "version": 1, "text": MLP}
    asked = {"textDocument": {"uri": item["uri"]}, "position": {"line": 0, "character": 0}}
    sent = [
        message(method="textDocument/didOpen", params={"textDocument": item}),
        message(id=1, method="textDocument/hover", params=asked),
        message(id=2, method="initialize", params={"capabilities": {}}),
        message(id=3, method="textDocument/hover", params=asked),
        message(id=4, method="shutdown"),
        message(method="exit"),
    ]
    status, answers = conversation(sent)
    errors = {a["id"]: a.get("error") for a in answers if "id" in a}
    assert status == 0
    assert errors[1]["code"] == -32002
    assert [errors[i] for i in (2, 3, 4)] == [None] * 3
    assert not any(a.get("method") == "textDocument/publishDiagnostics" for a in answers)


async def test_ctrl_c_ends_it_at_once(ctrl_c: None) -> None:
    with subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(message(id=1, method="initialize", params={"capabilities": {}}))
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"Content-Length")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT


class Written:
    """A writer that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, data: bytes) -> None:
        self.messages.append(json.loads(data))

    def close(self) -> None:
        pass


async def test_shutdown_ends_requests_under_way_with_an_answer_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A command leaves the table of requests while the shutdown goes through it."""
    server, written = make(), Written()
    server.protocol.set_writer(written, include_headers=False)

    @server.command("wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    async def send(**content: Any) -> None:
        content["jsonrpc"] = "2.0"
        server.protocol.handle_message(server.protocol.structure_message(content))
        for _ in range(20):
            await asyncio.sleep(0)

    able = {"capabilities": {"workspace": {"configuration": True}}}
    await send(id=1, method=lsp.INITIALIZE, params=able)
    await send(method=lsp.INITIALIZED, params={})
    command = {"command": "wait", "arguments": []}
    for number in (2, 3, 4):
        await send(id=number, method=lsp.WORKSPACE_EXECUTE_COMMAND, params=command)
    await send(id=5, method=lsp.SHUTDOWN, params=None)
    asked = next(m["id"] for m in written.messages if "method" in m)
    await send(id=asked, result=[None])
    answers = [m for m in written.messages if "method" not in m]
    codes = {m["id"]: m.get("error", {}).get("code") for m in answers}
    assert codes == {1: None, 2: -32800, 3: -32800, 4: -32800, 5: None}
    assert server.ended
    assert not [record for record in caplog.records if record.exc_info]
