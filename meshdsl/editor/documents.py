"""The open documents: each keystroke makes a new version, and workers find out what it says.

The event loop only notes the text and answers from results. A request waits for the analysis of the
newest version; a version that is outdated meanwhile is dropped wherever it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import field, replace

from meshdsl.diagnostics import Diagnostic
from meshdsl.editor.daemon_thread import DaemonThread
from meshdsl.editor.facts import DocumentFacts, Placing, Wishes, checked, place, read
from meshdsl.editor.text import Text
from meshdsl.records import dataclass

QUIET = 0.15
"""Seconds without a keystroke before a version is placed."""

Publish = Callable[["OpenDocument", "Version", tuple[Diagnostic, ...]], None]


@dataclass(slots=True, eq=False)
class Version:
    """One version of a document, and what is known of it so far.

    `number` is the client's. `placing` is that of an older version where this one has errors, None
    where none was ever placed.
    """

    text: Text
    number: int | None
    wishes: Wishes
    facts: asyncio.Future[DocumentFacts | None]
    placing: asyncio.Future[Placing | None]


@dataclass(slots=True, eq=False)
class OpenDocument:
    """An open document. `layout` is the one chosen for it alone.

    `known` are the last facts there were, `placed` is the last placing, `published` are the
    diagnostics that are shown.
    """

    uri: str
    version: Version
    layout: str | None = None
    known: DocumentFacts | None = None
    placed: Placing | None = None
    following: asyncio.Task[None] | None = None
    published: tuple[Diagnostic, ...] = ()


@dataclass(slots=True, eq=False)
class Documents:
    """All open documents by URI.

    `publish` shows diagnostics of a version; `placed` is called when a document has a new placing;
    `failed` reports an exception of ours and returns the diagnostic of it.
    """

    publish: Publish
    placed: Callable[[OpenDocument], None]
    failed: Callable[[Exception], Diagnostic]
    wishes: Wishes = field(default_factory=Wishes)
    quiet: float = QUIET
    open: dict[str, OpenDocument] = field(default_factory=dict)
    typing: DaemonThread = field(default_factory=lambda: DaemonThread("reading"))
    placer: DaemonThread = field(default_factory=lambda: DaemonThread("placing"))

    def set(self, uri: str, text: Text, number: int | None) -> None:
        """Open a document, or note its newest version; one older than what is known is ignored."""
        document = self.open.get(uri)
        if document is None:
            version = self._version(text, number, self.wishes)
            document = self.open[uri] = OpenDocument(uri, version)
        elif number is not None and number < (document.version.number or number):
            return
        else:
            self._drop(document)
            document.version = self._version(text, number, self._wishes(document))
        document.following = asyncio.create_task(self._follow(document, document.version))

    def close(self, uri: str) -> None:
        """Forget a document."""
        document = self.open.pop(uri, None)
        if document is not None:
            self._drop(document)

    def wish(self, wishes: Wishes) -> None:
        """Place every document anew under other wishes."""
        self.wishes = wishes
        for document in list(self.open.values()):
            self.choose(document, document.layout)

    def choose(self, document: OpenDocument, layout: str | None) -> None:
        """Choose a layout for one document; None: what is wished for all of them."""
        document.layout = layout
        self.set(document.uri, document.version.text, document.version.number)

    async def facts(self, uri: str) -> DocumentFacts | None:
        """The facts of the newest version; None if the document was closed, or we failed."""
        while (document := self.open.get(uri)) is not None:
            version = document.version
            facts = await asyncio.shield(version.facts)
            if document.version is version:
                return facts
        return None

    async def placing(self, uri: str, newest: bool = True) -> Placing | None:
        """The placing of the newest version, or the last one there was before it had errors.

        Unless the `newest` is wanted, the last one that is known, if there is any.
        """
        while (document := self.open.get(uri)) is not None:
            if document.placed is not None and not newest:
                return document.placed
            version = document.version
            placing = await asyncio.shield(version.placing)
            if document.version is version:
                return placing
        return None

    async def finished(self, uri: str) -> None:
        """Wait until all that is wrong with the newest version is shown."""
        while (document := self.open.get(uri)) is not None and document.following is not None:
            following = document.following
            await asyncio.wait([following])
            if document.following is following:
                return

    def _wishes(self, document: OpenDocument) -> Wishes:
        if document.layout is None:
            return self.wishes
        return replace(self.wishes, layout=document.layout)

    def _version(self, text: Text, number: int | None, wishes: Wishes) -> Version:
        loop = asyncio.get_running_loop()
        return Version(text, number, wishes, loop.create_future(), loop.create_future())

    def _drop(self, document: OpenDocument) -> None:
        """Stop the work on the newest version, which is no longer the newest."""
        if document.following is not None:
            document.following.cancel()
        for future in (document.version.facts, document.version.placing):
            if not future.done():
                future.set_result(None)

    async def _follow(self, document: OpenDocument, version: Version) -> None:
        """Find out everything about a version, until it is outdated."""
        try:
            facts = await self.typing.do(document.uri, lambda stale: read(version.text))
        except Exception as error:
            self._show(document, version, (self.failed(error),))
            version.facts.set_result(None)
            version.placing.set_result(document.placed)
            return
        document.known = facts
        version.facts.set_result(facts)
        if facts.wrong:
            version.placing.set_result(document.placed)
            self._show(document, version, facts.diagnostics)
            return
        if any(d.severity == "error" for d in document.published):
            self._show(document, version, facts.diagnostics)
        await self._place(document, version, facts)

    async def _place(self, document: OpenDocument, version: Version, facts: DocumentFacts) -> None:
        """Place a version once the keyboard is quiet, and show what is wrong with its layouts."""
        await asyncio.sleep(self.quiet)
        try:
            placing = await self.placer.do(
                document.uri, lambda stale: place(facts, version.wishes, stale)
            )
            document.placed = placing
            version.placing.set_result(placing)  # what waits for it need not wait for the checks
            self.placed(document)
            placing = await self.placer.do(
                document.uri, lambda stale: checked(facts, placing, stale)
            )
        except Exception as error:
            problems = (*facts.diagnostics, self.failed(error))
            if not version.placing.done():
                version.placing.set_result(document.placed)
            self._show(document, version, problems)
            return
        document.placed = placing
        self._show(document, version, (*facts.diagnostics, *placing.diagnostics))

    def _show(
        self, document: OpenDocument, version: Version, diagnostics: tuple[Diagnostic, ...]
    ) -> None:
        document.published = diagnostics
        self.publish(document, version, diagnostics)
