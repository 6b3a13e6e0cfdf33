"""A server over standard input and output, as an editor starts it: one for each module of tests."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_lsp
from lsprotocol import types as lsp
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities, make_test_lsp_client

SERVER = [sys.executable, "-c", "from meshdsl.cli import main; main()", "lsp"]


@dataclass
class Editor:
    """An editor with documents in it."""

    client: LanguageClient
    versions: dict[str, int] = field(default_factory=dict)

    async def open(self, uri: str, text: str) -> list[lsp.Diagnostic]:
        """The diagnostics of a document that is opened."""
        self.versions[uri] = 1
        item = lsp.TextDocumentItem(uri, "mdsl", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return await self.told(uri)

    async def type(self, uri: str, text: str) -> list[lsp.Diagnostic]:
        """The diagnostics of a document that is changed."""
        self.change(uri, text, self.versions[uri] + 1)
        return await self.told(uri)

    def change(self, uri: str, text: str, version: int) -> None:
        """Send a version of a document."""
        self.versions[uri] = max(version, self.versions[uri])
        whole = lsp.TextDocumentContentChangeWholeDocument(text)
        where = lsp.VersionedTextDocumentIdentifier(version, uri)
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(where, [whole]))

    def close(self, uri: str) -> None:
        """Close a document."""
        document = lsp.TextDocumentIdentifier(uri)
        self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))

    async def told(self, uri: str) -> list[lsp.Diagnostic]:
        """What is shown once everything about the newest version is known."""
        await self.command("meshdsl.layouts", uri)
        return list(self.client.diagnostics[uri])

    async def ask(self, method: str, params: Any) -> Any:
        """The answer to a request."""
        return await self.client.protocol.send_request_async(method, params)

    async def command(self, name: str, *arguments: object) -> Any:
        """The result of a command."""
        params = lsp.ExecuteCommandParams(name, list(arguments))
        return await self.ask(lsp.WORKSPACE_EXECUTE_COMMAND, params)


def asked_again() -> LanguageClient:
    """A client that may be told to ask for lenses and hints again."""
    client = make_test_lsp_client()
    client.feature(lsp.WORKSPACE_CODE_LENS_REFRESH)(lambda params: None)
    client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)(lambda params: None)
    return client


@pytest_lsp.fixture(  # type: ignore[untyped-decorator]
    config=ClientServerConfig(SERVER, asked_again), scope="module"
)
async def client(lsp_client: LanguageClient):
    """A client connected to a server of its own."""
    capabilities = client_capabilities("visual-studio-code")
    await lsp_client.initialize_session(lsp.InitializeParams(capabilities))
    yield
    await lsp_client.shutdown_session()


@pytest.fixture(scope="module")
def editor(client: LanguageClient) -> Editor:
    """An editor whose documents the client has."""
    return Editor(client)
