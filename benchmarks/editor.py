"""How soon the language server answers, on `examples/lm.mdsl`, after a keystroke.

    python -m benchmarks.editor [KEYSTROKES]

The server runs as an editor starts it. Each keystroke sends the whole text with one character more;
then the time is taken until each answer is there. In the second table the layout is
`megatron_zero3`, and keystrokes come while an earlier version is being placed.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

FILE = Path(__file__).parent.parent / "examples/lm.mdsl"
SERVER = [sys.executable, "-c", "from meshdsl.cli import main; main()", "lsp"]


def requests(uri: str, text: str) -> dict[str, tuple[str, Any]]:
    """What is timed: a request, and its parameters at `softmax` in line 33."""
    lines = text.split("\n")
    line = next(i for i, words in enumerate(lines) if "softmax[mem]" in words)
    where = lsp.TextDocumentIdentifier(uri)
    place = lsp.Position(line, lines[line].index("softmax[mem]") + 8)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(len(lines), 0))
    return {
        "completion": (lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionParams(where, place)),
        "hover": (lsp.TEXT_DOCUMENT_HOVER, lsp.HoverParams(where, place)),
        "definition": (lsp.TEXT_DOCUMENT_DEFINITION, lsp.DefinitionParams(where, place)),
        "code lenses": (lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensParams(where)),
        "inlay hints": (lsp.TEXT_DOCUMENT_INLAY_HINT, lsp.InlayHintParams(where, whole)),
        "code actions": (
            lsp.TEXT_DOCUMENT_CODE_ACTION,
            lsp.CodeActionParams(where, whole, lsp.CodeActionContext([])),
        ),
    }


async def run(keystrokes: int) -> None:
    """Print both tables."""
    client = LanguageClient("benchmark", "1")
    for told in (lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS, lsp.WORKSPACE_CODE_LENS_REFRESH):
        client.feature(told)(lambda params: None)
    client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)(lambda params: None)
    await client.start_io(*SERVER)
    refresh = lsp.ClientCapabilities(
        workspace=lsp.WorkspaceClientCapabilities(
            code_lens=lsp.CodeLensWorkspaceClientCapabilities(refresh_support=True),
            inlay_hint=lsp.InlayHintWorkspaceClientCapabilities(refresh_support=True),
        )
    )
    await client.initialize_async(lsp.InitializeParams(refresh))
    client.initialized(lsp.InitializedParams())
    text, uri = FILE.read_text(encoding="utf-8"), FILE.as_uri()
    item = lsp.TextDocumentItem(uri, "mdsl", 0, text)
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
    await _command(client, "meshdsl.layouts", uri)
    await _table(client, "typing", uri, text, range(1, keystrokes), 0.0)
    await _command(client, "meshdsl.chooseLayout", uri, "megatron_zero3")
    await _command(client, "meshdsl.layouts", uri)
    more = range(keystrokes, 2 * keystrokes)
    await _table(client, "typing while an older version is placed", uri, text, more, 0.2)
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()


async def _command(client: LanguageClient, name: str, *arguments: object) -> None:
    await client.workspace_execute_command_async(lsp.ExecuteCommandParams(name, list(arguments)))


async def _table(
    client: LanguageClient, title: str, uri: str, text: str, versions: range, pause: float
) -> None:
    times: dict[str, list[float]] = {}
    for version in versions:
        for label, (method, params) in requests(uri, text).items():
            where = lsp.VersionedTextDocumentIdentifier(version, uri)
            now = text + "#" * (version * 10 + len(times.get(label, ())) % 10) + "\n"
            change = lsp.TextDocumentContentChangeWholeDocument(now)
            client.text_document_did_change(lsp.DidChangeTextDocumentParams(where, [change]))
            started = time.perf_counter()
            await client.protocol.send_request_async(method, params)
            times.setdefault(label, []).append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(pause)
    print(f"{title:44}{'median':>10}{'most':>10}")
    for label, taken in times.items():
        print(f"  {label:42}{statistics.median(taken):7.1f} ms{max(taken):7.1f} ms")


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
