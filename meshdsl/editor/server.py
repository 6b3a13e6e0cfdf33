"""The server: its documents, its settings, and what it tells the client by itself."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from lsprotocol import types as lsp
from pygls.exceptions import (
    FeatureRequestError,
    JsonRpcException,
    JsonRpcInvalidRequest,
    JsonRpcParseError,
    JsonRpcServerNotInitialized,
)
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

from meshdsl.diagnostics import Diagnostic
from meshdsl.editor import messages
from meshdsl.editor.documents import Documents, OpenDocument, Version
from meshdsl.editor.facts import Wishes
from meshdsl.editor.text import Text
from meshdsl.pipeline import DEFAULT_POLICY
from meshdsl.placed.place import POLICIES
from meshdsl.version import __version__

SECTION = "meshdsl"
"""The section of the client's settings: `layout`, `mesh` and `reduce`."""

logger = logging.getLogger(__name__)


UNREADABLE = (ValueError, RecursionError, JsonRpcException)
"""The errors of a message that a client sent wrong: no JSON, or of another form."""


def brief(record: logging.LogRecord) -> bool:
    """Whether to log a record; that of a message that was sent wrong gets one line.

    No mistake of ours is to be traced back there. A filter of a handler.
    """
    if not record.name.startswith("pygls"):
        return True
    said = record.getMessage()
    if said.startswith(("Unable to deserialize", "Failed to report")):
        return False  # the error has a record of its own
    error = record.exc_info[1] if record.exc_info else None
    if said.startswith("Error sending data") and isinstance(error, ValueError):
        return False  # the client is gone
    if isinstance(error, UNREADABLE):
        cause = f": {error.__cause__}" if error.__cause__ else ""
        record.msg, record.args, record.exc_info = f"{said}: {error}{cause}", None, None
    return True


class Protocol(LanguageServerProtocol):
    """The protocol, with an answer to every request: a client waits for one."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """The message in a JSON object; a request of another form is answered with its error."""
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            if isinstance(data.get("id"), int | str) and isinstance(data.get("method"), str):
                self._send_response(data["id"], None, error.to_response_error())
            raise

    def refuse(self, error: JsonRpcException) -> None:
        """Answer what is no message, and so has no number."""
        self._send_response(None, None, error.to_response_error())  # type: ignore[arg-type]

    @lsp_method(lsp.SHUTDOWN)
    def lsp_shutdown(self, *args: Any) -> Generator[Any, Any, None]:
        """End the requests under way, each with its answer.

        As that of pygls, which goes through its table of requests itself: a command leaves the
        table as soon as it is cancelled.
        """
        yield self.fm.features[lsp.SHUTDOWN], args, None
        for number, request in self._request_futures.copy().items():
            if number != self.msg_id and not request.done():
                request.cancel()
        self._shutdown = True

    started = False

    def handle_message(self, message: Any) -> None:
        """Handle a message: before `initialize` and after `shutdown` no request is carried out."""
        if getattr(message, "jsonrpc", None) != self.VERSION:
            logger.error("a message that is none of JSON-RPC %s is skipped", self.VERSION)
            expected = f"a message of JSON-RPC {self.VERSION} is expected"
            self.refuse(JsonRpcInvalidRequest(expected))
            return
        method = getattr(message, "method", None)
        if not (
            isinstance(method, str | None) and isinstance(getattr(message, "id", 0), int | str)
        ):
            logger.error("a message whose method or number is of another type is skipped")
            self.refuse(JsonRpcInvalidRequest("`method` is a string, `id` a number or a string"))
            return
        self.started |= method == lsp.INITIALIZE
        if method is None or method == lsp.EXIT or (self.started and not self._shutdown):
            super().handle_message(message)
        elif hasattr(message, "id"):
            late = JsonRpcInvalidRequest("the server was told to shut down")
            early = JsonRpcServerNotInitialized("the server waits for `initialize`")
            error = late if self.started else early
            self._send_response(message.id, None, error.to_response_error())


class MdslServer(LanguageServer):
    """The language server of `.mdsl`.

    Whole texts are synchronised, not edits: a version that comes late or twice then does no harm,
    and no two ways of counting lines can drift apart. `ended` is set by an orderly shutdown.
    """

    protocol: Protocol

    def __init__(self) -> None:
        super().__init__(
            "meshdsl",
            __version__,
            lsp.TextDocumentSyncKind.Full,
            protocol_cls=Protocol,
        )
        self.documents = Documents(self.publish, self.refresh, self.failed)
        self.ended = False

    # --- what the documents tell --------------------------------------------------------------

    def publish(
        self, document: OpenDocument, version: Version, diagnostics: Sequence[Diagnostic]
    ) -> None:
        """Show the diagnostics of a version."""
        items = [messages.shown(d, document.uri, version.text) for d in diagnostics]
        self.text_document_publish_diagnostics(
            lsp.PublishDiagnosticsParams(document.uri, items, version.number)
        )

    def refresh(self, document: OpenDocument) -> None:
        """Let the client ask anew for what placements show."""
        if self.renews_lenses:
            self.workspace_code_lens_refresh(None)
        if self.renews_hints:
            self.workspace_inlay_hint_refresh(None)

    @property
    def renews_lenses(self) -> bool:
        """Whether the client asks for code lenses again when it is told to."""
        workspace = self.client_capabilities.workspace
        return bool(workspace and workspace.code_lens and workspace.code_lens.refresh_support)

    @property
    def renews_hints(self) -> bool:
        """Whether the client asks for inlay hints again when it is told to."""
        workspace = self.client_capabilities.workspace
        return bool(workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support)

    def failed(self, error: Exception) -> Diagnostic:
        """Log a mistake of ours; the diagnostic that says so."""
        told = f"{type(error).__name__}: {error}"
        logger.error("%s", "".join(traceback.format_exception(error)))
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, told))
        help = "this is our mistake: report it with this file; the server goes on"
        return Diagnostic("MD0799", f"meshdsl itself failed: {told}", help=help)

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Log an error that is no answer: a message that cannot be read, for instance.

        One of the log itself is not logged: the client is gone.
        """
        if source is FeatureRequestError or self.reporting:
            return
        self.reporting = True
        try:
            if isinstance(error, ValueError | RecursionError):  # its body is no JSON
                self.protocol.refuse(JsonRpcParseError())
            self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, str(error)))
        finally:
            self.reporting = False

    reporting = False

    # --- settings ------------------------------------------------------------------------------

    async def ask_settings(self) -> None:
        """Ask the client for its settings, if it can be asked."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            return
        asked = lsp.ConfigurationParams([lsp.ConfigurationItem(section=SECTION)])
        answers = await self.workspace_configuration_async(asked)
        self.use_settings(answers[0] if answers else None)

    def use_settings(self, given: Any) -> None:
        """Take what is wished from the settings of a client, of whatever form they are."""
        values = given if isinstance(given, dict) else {}
        layout, mesh, reduce, model = (
            value if isinstance(value := values.get(key), str) and value.strip() else None
            for key in ("layout", "mesh", "reduce", "model")
        )
        if reduce is not None and reduce not in POLICIES:
            told = f"meshdsl.reduce is one of {', '.join(POLICIES)}, not {reduce[:40]}"
            self.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, told))
            reduce = None
        wishes = Wishes(layout, mesh, reduce or DEFAULT_POLICY, model)
        if wishes != self.documents.wishes:
            self.documents.wish(wishes)

    # --- a document ------------------------------------------------------------------------------

    def note(self, uri: str, text: str, number: int | None) -> None:
        """Note the newest text of a document."""
        name = PurePosixPath(unquote(urlsplit(uri).path)).name or "untitled.mdsl"
        encoding = self.server_capabilities.position_encoding or lsp.PositionEncodingKind.Utf16
        self.documents.set(uri, Text.of(name, text, getattr(encoding, "value", encoding)), number)
