"""What the server answers: each request of the protocol, and each command, is a function here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypedDict

import attrs
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from meshdsl.diagnostics import Diagnostic, Span
from meshdsl.editor import completion, hovers, line_costs, messages, model_keys, navigation
from meshdsl.editor.documents import OpenDocument
from meshdsl.editor.facts import DocumentFacts, check
from meshdsl.editor.server import MdslServer
from meshdsl.report.autofix import fixed
from meshdsl.syntax.format import format_source

LARGE = 50_000
"""Characters of a text that completion reads anew at every keystroke; of a longer one, it takes the
names as they were known last."""

Handler = Callable[[MdslServer, Any], Any]


# --- the text ----------------------------------------------------------------------------------


def did_open(server: MdslServer, params: lsp.DidOpenTextDocumentParams) -> None:
    """Read a document that was opened."""
    document = params.text_document
    server.note(document.uri, document.text, document.version)


def did_change(server: MdslServer, params: lsp.DidChangeTextDocumentParams) -> None:
    """Read the newest text of a document."""
    document = params.text_document
    if params.content_changes and document.uri in server.documents.open:
        server.note(document.uri, params.content_changes[-1].text, document.version)


def did_close(server: MdslServer, params: lsp.DidCloseTextDocumentParams) -> None:
    """Forget a document, and take its diagnostics away."""
    uri = params.text_document.uri
    server.documents.close(uri)
    server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))


async def shutdown(server: MdslServer, params: None) -> None:
    """Note that the end was announced."""
    server.ended = True


async def initialized(server: MdslServer, params: lsp.InitializedParams) -> None:
    """Ask for the settings as soon as that is allowed."""
    await server.ask_settings()


async def did_change_configuration(
    server: MdslServer, params: lsp.DidChangeConfigurationParams
) -> None:
    """Take settings that have changed: those of the notification, or what the client answers."""
    settings = params.settings if isinstance(params.settings, dict) else {}
    if isinstance(settings.get("meshdsl"), dict):
        server.use_settings(settings["meshdsl"])
    else:
        await server.ask_settings()


# --- names ---------------------------------------------------------------------------------------


async def hover(server: MdslServer, params: lsp.HoverParams) -> lsp.Hover | None:
    """The meaning of the name under the cursor."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=False)
    facts = await server.documents.facts(uri)
    if facts is None:
        return None
    return hovers.hover(facts, placing, facts.text.offset(params.position))


async def complete(server: MdslServer, params: lsp.CompletionParams) -> lsp.CompletionList | None:
    """What may stand at the cursor."""
    document = server.documents.open.get(params.text_document.uri)
    facts = await _names(server, document)
    if document is None or facts is None:
        return None
    text = document.version.text
    offset, model = text.offset(params.position), server.documents.wishes.model
    items = [*completion.complete(facts, text.source.text, offset)]
    if model is not None:
        path = model_keys.beside(document.uri, model)
        items += model_keys.complete(facts, text, offset, path)
    unique = {(item.label, item.kind): item for item in items}
    return lsp.CompletionList(is_incomplete=False, items=list(unique.values()))


async def signature_help(
    server: MdslServer, params: lsp.SignatureHelpParams
) -> lsp.SignatureHelp | None:
    """The form of the call around the cursor."""
    document = server.documents.open.get(params.text_document.uri)
    facts = await _names(server, document)
    if document is None or facts is None:
        return None
    text = document.version.text
    return completion.signature(facts, text.source.text, text.offset(params.position))


async def _names(server: MdslServer, document: OpenDocument | None) -> DocumentFacts | None:
    """The facts of a document; of a large text, those known last if there are any."""
    if document is None:
        return None
    if document.known is not None and len(document.version.text.source.text) > LARGE:
        return document.known
    return await server.documents.facts(document.uri)


async def definition(server: MdslServer, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Where the name under the cursor is defined."""
    uri = params.text_document.uri
    facts = await server.documents.facts(uri)
    return navigation.definitions(facts, uri, facts.text.offset(params.position)) if facts else []


async def references(server: MdslServer, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Where the name under the cursor is used."""
    uri = params.text_document.uri
    facts = await server.documents.facts(uri)
    if facts is None:
        return []
    offset = facts.text.offset(params.position)
    return navigation.references(facts, uri, offset, params.context.include_declaration)


async def highlight(
    server: MdslServer, params: lsp.DocumentHighlightParams
) -> list[lsp.DocumentHighlight]:
    """The places of the name under the cursor."""
    facts = await server.documents.facts(params.text_document.uri)
    return list(navigation.highlights(facts, facts.text.offset(params.position))) if facts else []


async def outline(server: MdslServer, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
    """The declarations of a document."""
    known = await server.documents.facts(params.text_document.uri)
    return list(navigation.outline(known)) if known else []


async def prepare_rename(server: MdslServer, params: lsp.PrepareRenameParams) -> lsp.Range | None:
    """The name under the cursor if it can have another one."""
    facts = await server.documents.facts(params.text_document.uri)
    span = facts and navigation.renameable(facts, facts.text.offset(params.position))
    return facts.text.range(span) if facts and span else None


async def rename(server: MdslServer, params: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    """The edits of a rename; why it is refused is an error of the request."""
    uri = params.text_document.uri
    facts = await server.documents.facts(uri)
    if facts is None:
        return None
    offset = facts.text.offset(params.position)
    renamed = navigation.rename(facts, uri, offset, params.new_name)
    if isinstance(renamed, Diagnostic):
        raise RequestRefused(
            f"{renamed.message}; {renamed.help}" if renamed.help else renamed.message
        )
    return renamed


# --- what is sent ------------------------------------------------------------------------------


async def code_lens(server: MdslServer, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """The bytes of lines, the cost of programs, the choice of layouts."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=not server.renews_lenses)
    facts = await server.documents.facts(uri)
    return list(line_costs.lenses(facts, placing, uri)) if facts else []


async def inlay_hint(server: MdslServer, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """The local sizes of the tensors that are defined in a range."""
    uri = params.text_document.uri
    placing = await server.documents.placing(uri, newest=not server.renews_hints)
    facts = await server.documents.facts(uri)
    if facts is None or placing is None:
        return []
    text = facts.text
    span = Span(text.source, text.offset(params.range.start), text.offset(params.range.end))
    return list(line_costs.hints(facts, placing, span))


# --- edits -------------------------------------------------------------------------------------


async def formatting(
    server: MdslServer, params: lsp.DocumentFormattingParams
) -> list[lsp.TextEdit] | None:
    """The canonical form of a document; nothing of one that cannot be read."""
    facts = await server.documents.facts(params.text_document.uri)
    if facts is None or any(d.code.startswith("MD00") for d in facts.diagnostics):
        return None
    return messages.whole_edit(facts.text, format_source(facts.text.source))


async def code_action(server: MdslServer, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """The fixes of what is wrong in a range, and all fixes of the document at once."""
    uri = params.text_document.uri
    document = server.documents.open.get(uri)
    facts = await server.documents.facts(uri)
    if document is None or facts is None:
        return []
    text, published = document.version.text, document.published
    only = params.context.only or [lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.SourceFixAll]
    actions: list[lsp.CodeAction] = []
    if _wanted(lsp.CodeActionKind.QuickFix, only):
        actions += messages.quick_fixes(published, uri, text, params.range)
    if _wanted(lsp.CodeActionKind.SourceFixAll, only):
        actions += messages.fix_all(uri, published)
    # Who asks for this alone, when a file is saved, may not ask for its edits.
    if params.context.only:
        actions = [await resolve_action(server, action) for action in actions]
    return actions


async def resolve_action(server: MdslServer, action: lsp.CodeAction) -> lsp.CodeAction:
    """An action with its edits."""
    uri = action.data.get("uri") if isinstance(action.data, dict) else None
    facts = await server.documents.facts(uri) if isinstance(uri, str) else None
    if action.edit is not None or facts is None or uri is None:
        return action
    source = facts.text.source
    job = server.documents.typing.do(f"{uri} fixed", lambda stale: fixed(source, check))
    changes = messages.whole_edit(facts.text, (await job).text)
    return attrs.evolve(action, edit=lsp.WorkspaceEdit(changes={uri: changes}))


def _wanted(kind: lsp.CodeActionKind, only: Sequence[Any]) -> bool:
    """Whether a kind is among those that are wanted, or below one: `source` has `source.fixAll`."""
    return any(f"{kind.value}.".startswith(f"{getattr(w, 'value', w)}.") for w in only)


# --- commands ------------------------------------------------------------------------------------


async def choose_layout(
    server: MdslServer, uri: Any = None, name: Any = None, *_: Any
) -> str | None:
    """Choose the layout of a document by name; without one, the user is asked."""
    document = _open(server, uri)
    facts = await server.documents.facts(document.uri)
    layouts = [*facts.declarations.layouts, *facts.declarations.sbps] if facts else []
    if name is None and layouts:
        items = [lsp.MessageActionItem(layout) for layout in layouts]
        told = lsp.ShowMessageRequestParams(lsp.MessageType.Info, "Which layout?", actions=items)
        answer = await server.window_show_message_request_async(told)
        name = answer.title if answer is not None else None
    if name is None:
        return None
    if name not in layouts and ":" not in str(name):
        raise RequestRefused(f"there is no layout `{name}`; there are {', '.join(layouts)}")
    server.documents.choose(document, str(name))
    return str(name)


async def explain_line(server: MdslServer, uri: Any = None, line: Any = None, *_: Any) -> str:
    """What a line (from 0) sends, why, and what would remove it: shown, and the result."""
    document = _open(server, uri)
    placing = await server.documents.placing(document.uri)
    facts = await server.documents.facts(document.uri)
    number = line + 1 if isinstance(line, int) else 0
    sentence = line_costs.explained(placing, facts.text, number) if placing and facts else ""
    told = sentence or f"line {number} sends nothing"
    server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, told))
    return told


class LayoutsShown(TypedDict):
    """The layouts of a document, the one it is shown under, and what its programs cost there."""

    layouts: list[str]
    chosen: str | None
    cost: list[str]


async def layouts(server: MdslServer, uri: Any = None, *_: Any) -> LayoutsShown:
    """The layouts of a document, the one it is shown under, and what its programs cost there.

    When it answers, all that is wrong with them is shown.
    """
    document = _open(server, uri)
    await server.documents.finished(document.uri)
    placing = await server.documents.placing(document.uri)
    facts = await server.documents.facts(document.uri)
    listed = [*facts.declarations.layouts, *facts.declarations.sbps] if facts else []
    cost = [line_costs.cost(report) for report in placing.reports.values()] if placing else []
    return {"layouts": listed, "chosen": placing.layout if placing else None, "cost": cost}


def _open(server: MdslServer, uri: Any) -> OpenDocument:
    document = server.documents.open.get(uri) if isinstance(uri, str) else None
    if document is None:
        raise RequestRefused(f"no document {uri!r} is open")
    return document


# --- registration --------------------------------------------------------------------------------


class RequestRefused(JsonRpcException):
    """A request that cannot be met, with the reason for the user."""

    def __init__(self, told: str) -> None:
        super().__init__(told, lsp.LSPErrorCodes.RequestFailed.value)


COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    line_costs.CHOOSE: choose_layout,
    line_costs.EXPLAIN: explain_line,
    line_costs.LAYOUTS: layouts,
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
        lsp.CompletionOptions(trigger_characters=["[", "(", "@", ">", ":", ".", "{", '"']),
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


def make() -> MdslServer:
    """A server with all features."""
    server = MdslServer()
    for name, noted in NOTED.items():
        server.feature(name)(_at_once(server, noted))
    for name, (handler, options) in FEATURES.items():
        server.feature(name, options)(_guarded(server, handler))
    for name, command in COMMANDS.items():
        server.command(name)(_guarded(server, command))
    return server


def _at_once(server: MdslServer, handler: Handler) -> Callable[[Any], None]:
    def handle(params: Any) -> None:
        try:
            handler(server, params)
        except Exception as error:
            server.failed(error)

    return handle


def _guarded(server: MdslServer, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
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
