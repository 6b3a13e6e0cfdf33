"""What the server answers: each request of the protocol, and each command, is a function here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypedDict

import attrs
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from meshdsl.diagnostics import Diagnostic, Span
from meshdsl.editor import completion, hovers, messages, names, sent
from meshdsl.editor.documents import Document
from meshdsl.editor.facts import Facts, check
from meshdsl.editor.server import Server
from meshdsl.report.fix import fixed
from meshdsl.syntax.format import format_source

LARGE = 50_000
"""Characters of a text that completion reads anew at every keystroke; of a longer one, it takes the
names as they were known last."""

Handler = Callable[[Server, Any], Any]


# --- the text ----------------------------------------------------------------------------------


def did_open(server: Server, params: lsp.DidOpenTextDocumentParams) -> None:
    """Read a document that was opened."""
    document = params.text_document
    server.note(document.uri, document.text, document.version)


def did_change(server: Server, params: lsp.DidChangeTextDocumentParams) -> None:
    """Read the newest text of a document."""
    document = params.text_document
    if params.content_changes and document.uri in server.documents.open:
        server.note(document.uri, params.content_changes[-1].text, document.version)


def did_close(server: Server, params: lsp.DidCloseTextDocumentParams) -> None:
    """Forget a document, and take its diagnostics away."""
    uri = params.text_document.uri
    server.documents.close(uri)
    server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))


async def shutdown(server: Server, params: None) -> None:
    """Note that the end was announced."""
    server.ended = True


async def initialized(server: Server, params: lsp.InitializedParams) -> None:
    """Ask for the settings as soon as that is allowed."""
    await server.ask_settings()


async def did_change_configuration(
    server: Server, params: lsp.DidChangeConfigurationParams
) -> None:
    """Take settings that have changed: those of the notification, or what the client answers."""
    given = params.settings if isinstance(params.settings, dict) else {}
    if isinstance(given.get("meshdsl"), dict):
        server.use_settings(given["meshdsl"])
    else:
        await server.ask_settings()


# --- names ---------------------------------------------------------------------------------------


async def hover(server: Server, params: lsp.HoverParams) -> lsp.Hover | None:
    """The meaning of the name under the cursor."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=False)
    known = await server.documents.facts(uri)
    if known is None:
        return None
    return hovers.hover(known, placing, known.text.offset(params.position))


async def complete(server: Server, params: lsp.CompletionParams) -> lsp.CompletionList | None:
    """What may stand at the cursor."""
    document = server.documents.open.get(params.text_document.uri)
    known = await _names(server, document)
    if document is None or known is None:
        return None
    text = document.version.text
    found = completion.complete(known, text.source.text, text.offset(params.position))
    unique = {(item.label, item.kind): item for item in found}
    return lsp.CompletionList(is_incomplete=False, items=list(unique.values()))


async def signature_help(
    server: Server, params: lsp.SignatureHelpParams
) -> lsp.SignatureHelp | None:
    """The form of the call around the cursor."""
    document = server.documents.open.get(params.text_document.uri)
    known = await _names(server, document)
    if document is None or known is None:
        return None
    text = document.version.text
    return completion.signature(known, text.source.text, text.offset(params.position))


async def _names(server: Server, document: Document | None) -> Facts | None:
    """The facts of a document; of a large text, those known last if there are any."""
    if document is None:
        return None
    if document.known is not None and len(document.version.text.source.text) > LARGE:
        return document.known
    return await server.documents.facts(document.uri)


async def definition(server: Server, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Where the name under the cursor is defined."""
    uri = params.text_document.uri
    known = await server.documents.facts(uri)
    return names.definitions(known, uri, known.text.offset(params.position)) if known else []


async def references(server: Server, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Where the name under the cursor is used."""
    uri = params.text_document.uri
    known = await server.documents.facts(uri)
    if known is None:
        return []
    offset = known.text.offset(params.position)
    return names.references(known, uri, offset, params.context.include_declaration)


async def highlight(
    server: Server, params: lsp.DocumentHighlightParams
) -> list[lsp.DocumentHighlight]:
    """The places of the name under the cursor."""
    known = await server.documents.facts(params.text_document.uri)
    return list(names.highlights(known, known.text.offset(params.position))) if known else []


async def outline(server: Server, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
    """The declarations of a document."""
    known = await server.documents.facts(params.text_document.uri)
    return list(names.outline(known)) if known else []


async def prepare_rename(server: Server, params: lsp.PrepareRenameParams) -> lsp.Range | None:
    """The name under the cursor if it can have another one."""
    known = await server.documents.facts(params.text_document.uri)
    span = known and names.renameable(known, known.text.offset(params.position))
    return known.text.range(span) if known and span else None


async def rename(server: Server, params: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    """The edits of a rename; why it is refused is an error of the request."""
    uri = params.text_document.uri
    known = await server.documents.facts(uri)
    if known is None:
        return None
    offset = known.text.offset(params.position)
    found = names.rename(known, uri, offset, params.new_name)
    if isinstance(found, Diagnostic):
        raise Refused(f"{found.message}; {found.help}" if found.help else found.message)
    return found


# --- what is sent ------------------------------------------------------------------------------


async def code_lens(server: Server, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """The bytes of lines, the cost of programs, the choice of layouts."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=not server.renews_lenses)
    known = await server.documents.facts(uri)
    return list(sent.lenses(known, placing, uri)) if known else []


async def inlay_hint(server: Server, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """The local sizes of the tensors that are defined in a range."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=not server.renews_hints)
    known = await server.documents.facts(uri)
    if known is None or placing is None:
        return []
    text = known.text
    span = Span(text.source, text.offset(params.range.start), text.offset(params.range.end))
    return list(sent.hints(known, placing, span))


# --- edits -------------------------------------------------------------------------------------


async def formatting(
    server: Server, params: lsp.DocumentFormattingParams
) -> list[lsp.TextEdit] | None:
    """The canonical form of a document; nothing of one that cannot be read."""
    known = await server.documents.facts(params.text_document.uri)
    if known is None or any(d.code.startswith("MD00") for d in known.diagnostics):
        return None
    return messages.whole_edit(known.text, format_source(known.text.source))


async def code_action(server: Server, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """The fixes of what is wrong in a range, and all fixes of the document at once."""
    uri = params.text_document.uri
    document = server.documents.open.get(uri)
    known = await server.documents.facts(uri)
    if document is None or known is None:
        return []
    text, found = document.version.text, document.published
    only = params.context.only or [lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.SourceFixAll]
    actions: list[lsp.CodeAction] = []
    if _wanted(lsp.CodeActionKind.QuickFix, only):
        actions += messages.quick_fixes(found, uri, text, params.range)
    if _wanted(lsp.CodeActionKind.SourceFixAll, only):
        actions += messages.fix_all(uri, found)
    # Who asks for this alone, when a file is saved, may not ask for its edits.
    if params.context.only:
        actions = [await resolve_action(server, action) for action in actions]
    return actions


async def resolve_action(server: Server, action: lsp.CodeAction) -> lsp.CodeAction:
    """An action with its edits."""
    uri = action.data.get("uri") if isinstance(action.data, dict) else None
    known = await server.documents.facts(uri) if isinstance(uri, str) else None
    if action.edit is not None or known is None or uri is None:
        return action
    source = known.text.source
    job = server.documents.typing.do(f"{uri} fixed", lambda stale: fixed(source, check))
    changes = messages.whole_edit(known.text, (await job).text)
    return attrs.evolve(action, edit=lsp.WorkspaceEdit(changes={uri: changes}))


def _wanted(kind: lsp.CodeActionKind, only: Sequence[Any]) -> bool:
    """Whether a kind is among those that are wanted, or below one: `source` has `source.fixAll`."""
    return any(f"{kind.value}.".startswith(f"{getattr(w, 'value', w)}.") for w in only)


# --- commands ------------------------------------------------------------------------------------


async def choose_layout(server: Server, uri: Any = None, name: Any = None, *_: Any) -> str | None:
    """Choose the layout of a document by name; without one, the user is asked."""
    document = _open(server, uri)
    known = await server.documents.facts(document.uri)
    layouts = [*known.declarations.layouts, *known.declarations.sbps] if known else []
    if name is None and layouts:
        items = [lsp.MessageActionItem(layout) for layout in layouts]
        told = lsp.ShowMessageRequestParams(lsp.MessageType.Info, "Which layout?", actions=items)
        answer = await server.window_show_message_request_async(told)
        name = answer.title if answer is not None else None
    if name is None:
        return None
    if name not in layouts and ":" not in str(name):
        raise Refused(f"there is no layout `{name}`; there are {', '.join(layouts)}")
    server.documents.choose(document, str(name))
    return str(name)


async def explain_line(server: Server, uri: Any = None, line: Any = None, *_: Any) -> str:
    """What a line (from 0) sends, why, and what would remove it: shown, and the result."""
    document = _open(server, uri)
    placing = await server.documents.placing(document.uri)
    known = await server.documents.facts(document.uri)
    number = line + 1 if isinstance(line, int) else 0
    found = sent.explained(placing, known.text, number) if placing and known else ""
    told = found or f"line {number} sends nothing"
    server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, told))
    return told


class LayoutsShown(TypedDict):
    """The layouts of a document, the one it is shown under, and what its programs cost there."""

    layouts: list[str]
    chosen: str | None
    cost: list[str]


async def layouts(server: Server, uri: Any = None, *_: Any) -> LayoutsShown:
    """The layouts of a document, the one it is shown under, and what its programs cost there."""
    document = _open(server, uri)
    placing = await server.documents.placing(document.uri)
    known = await server.documents.facts(document.uri)
    listed = [*known.declarations.layouts, *known.declarations.sbps] if known else []
    cost = [sent.cost(report) for report in placing.reports.values()] if placing else []
    return {"layouts": listed, "chosen": placing.layout if placing else None, "cost": cost}


def _open(server: Server, uri: Any) -> Document:
    document = server.documents.open.get(uri) if isinstance(uri, str) else None
    if document is None:
        raise Refused(f"no document {uri!r} is open")
    return document


# --- registration --------------------------------------------------------------------------------


class Refused(JsonRpcException):
    """A request that cannot be met, with the reason for the user."""

    def __init__(self, told: str) -> None:
        super().__init__(told, lsp.LSPErrorCodes.RequestFailed.value)


COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    sent.CHOOSE: choose_layout,
    sent.EXPLAIN: explain_line,
    sent.LAYOUTS: layouts,
}
"""The commands of `workspace/executeCommand`."""

NOTED: dict[str, Handler] = {
    lsp.TEXT_DOCUMENT_DID_OPEN: did_open,
    lsp.TEXT_DOCUMENT_DID_CHANGE: did_change,
    lsp.TEXT_DOCUMENT_DID_CLOSE: did_close,
}
"""Notifications that are taken in order, before anything else is read."""

FEATURES: dict[str, tuple[Handler, Any]] = {
    lsp.INITIALIZED: (initialized, None),
    lsp.SHUTDOWN: (shutdown, None),
    lsp.WORKSPACE_DID_CHANGE_CONFIGURATION: (did_change_configuration, None),
    lsp.TEXT_DOCUMENT_HOVER: (hover, None),
    lsp.TEXT_DOCUMENT_COMPLETION: (
        complete,
        lsp.CompletionOptions(trigger_characters=["[", "(", "@", ">", ":", ".", "{"]),
    ),
    lsp.TEXT_DOCUMENT_SIGNATURE_HELP: (
        signature_help,
        lsp.SignatureHelpOptions(trigger_characters=["(", ","]),
    ),
    lsp.TEXT_DOCUMENT_DEFINITION: (definition, None),
    lsp.TEXT_DOCUMENT_REFERENCES: (references, None),
    lsp.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT: (highlight, None),
    lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (outline, None),
    lsp.TEXT_DOCUMENT_PREPARE_RENAME: (prepare_rename, None),
    lsp.TEXT_DOCUMENT_RENAME: (rename, lsp.RenameOptions(prepare_provider=True)),
    lsp.TEXT_DOCUMENT_CODE_LENS: (code_lens, lsp.CodeLensOptions()),
    lsp.TEXT_DOCUMENT_INLAY_HINT: (inlay_hint, lsp.InlayHintOptions()),
    lsp.TEXT_DOCUMENT_FORMATTING: (formatting, None),
    lsp.TEXT_DOCUMENT_CODE_ACTION: (
        code_action,
        lsp.CodeActionOptions(
            [lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.SourceFixAll],
            resolve_provider=True,
        ),
    ),
    lsp.CODE_ACTION_RESOLVE: (resolve_action, None),
}
"""Requests, and notifications that may wait, with the options that are told to the client."""


def make() -> Server:
    """A server with all features."""
    server = Server()
    for name, noted in NOTED.items():
        server.feature(name)(_at_once(server, noted))
    for name, (handler, options) in FEATURES.items():
        server.feature(name, options)(_guarded(server, handler))
    for name, command in COMMANDS.items():
        server.command(name)(_guarded(server, command))
    return server


def _at_once(server: Server, handler: Handler) -> Callable[[Any], None]:
    def handle(params: Any) -> None:
        try:
            handler(server, params)
        except Exception as error:
            server.failed(error)

    return handle


def _guarded(server: Server, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """The handler, a mistake of ours in it logged: then there is no answer, and nothing ends."""

    async def handle(*params: Any) -> Any:
        try:
            return await handler(server, *params)
        except JsonRpcException:
            raise
        except Exception as error:
            server.failed(error)
            return None

    return handle
