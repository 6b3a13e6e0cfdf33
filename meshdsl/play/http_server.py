"""The server of the page: on this machine, for the one who has its address, and for nobody else.

It listens on 127.0.0.1. Every request has to carry the secret of the address that the terminal
shows, and to name this server as its host and its origin: a page of another site can neither read
nor ask anything, not by a name of its own that leads to 127.0.0.1 either (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshdsl.diagnostics import DiagnosticError, fail
from meshdsl.option_edits import leave_out
from meshdsl.pipeline import Options
from meshdsl.play.answer import runs_of
from meshdsl.play.compile_queue import Desk
from meshdsl.play.edited_file import EditedFile
from meshdsl.play.jobs import PATHS, job_of
from meshdsl.play.page import begun, page
from meshdsl.play.protocol import (
    CompareQuestion,
    CompileQuestion,
    Failed,
    JobAnswer,
    PageState,
    Saved,
    SaveQuestion,
)
from meshdsl.play.questions import HTTPRefused, check_form
from meshdsl.records import dataclass

HOST = "127.0.0.1"
MAX_BODY = 1 << 20
"""The most bytes of a request."""

PATIENCE = 30
"""Seconds that a connection may stay silent."""


@dataclass(frozen=True, slots=True)
class Play:
    """The state behind the page: its file, the options it begins with, and its secret."""

    document: EditedFile
    options: Options
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    desk: Desk = field(default_factory=Desk)

    def state(self) -> PageState:
        """The text of the file, its digest, and the choices that the page begins with."""
        source, digest = self.document.read()
        return begun("server", source, self.options, digest, self.document.writable)

    def ask(self, path: str, question: CompileQuestion | CompareQuestion) -> JobAnswer | Failed:
        """The answer to a question that is a job; 409 where a newer one was asked."""
        outcome = self.desk.ask(job_of(path, question, self.document.name, self.options))
        if outcome is None:
            raise HTTPRefused(409, "superseded by a newer question")
        return outcome

    def save(self, question: SaveQuestion) -> Saved:
        """Write the file, unless it changed since the page read it: then 412."""
        check_form(question, {"text": str, "digest": str})
        try:
            digest = self.document.save(question["text"], question["digest"])
        except DiagnosticError as error:
            raise HTTPRefused(403, error.diagnostics[0].message) from None
        if digest is None:
            raise HTTPRefused(412, "the file on disk is not the one that this page read")
        return {"digest": digest}


# --- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of HTTP."""

    status: int
    kind: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


def _json(value: object, status: int = 200) -> Reply:
    return Reply(status, "application/json", json.dumps(value))


class Handler(BaseHTTPRequestHandler):
    """One request. The server sets `play` in a subclass."""

    play: Play
    timeout = PATIENCE
    _left = True
    server_version = "meshdsl"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, or its state."""
        self._answer({"/": self._page, "/state": self._state})

    def do_POST(self) -> None:
        """A question in JSON."""
        play = self.play
        jobs = {path: partial(play.ask, path) for path in PATHS}
        routes: dict[str, Callable[[Any], object]]
        routes = {**jobs, "/colours": runs_of, "/save": play.save}
        self._answer({path: partial(self._asked, ask) for path, ask in routes.items()})

    def _answer(self, routes: Mapping[str, Callable[[], Reply]]) -> None:
        """Send the reply of the route that the path names; a broken connection is no error."""
        with suppress(OSError):
            self._send(self._reply(routes))

    def _reply(self, routes: Mapping[str, Callable[[], Reply]]) -> Reply:
        try:
            self._check_host()
            path = urlsplit(self.path).path
            if path not in routes:
                raise HTTPRefused(404, "there is no such page")
            return routes[path]()
        except HTTPRefused as refused:
            self._body_left_over()
            return _json({"error": refused.why}, refused.status)
        except DiagnosticError as error:
            return _json({"error": error.diagnostics[0].message}, 404)
        except OSError:
            raise
        except Exception as error:  # our own mistake: the page says so and lives on
            return _json({"error": f"meshdsl itself failed: {type(error).__name__}"}, 500)

    # --- who asks ----------------------------------------------------------------------------

    def _check_host(self) -> None:
        """Refuse what was sent under another name, or by a page of another origin."""
        assert isinstance(self.server, PageServer)
        hosts = tuple(f"{name}:{self.server.server_port}" for name in (HOST, "localhost"))
        if self.headers.get_all("Host") not in [[host] for host in hosts]:
            raise HTTPRefused(403, "another host was meant")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers['Host']}":
            raise HTTPRefused(403, "a page of another origin asks")

    def _check_token(self, given: str) -> None:
        if not hmac.compare_digest(given.encode(), self.play.token.encode()):
            raise HTTPRefused(403, "open the address that the terminal shows")

    def _check_bearer(self) -> None:
        self._check_token(self.headers.get("Authorization", "").removeprefix("Bearer "))

    # --- what is answered --------------------------------------------------------------------

    def _page(self) -> Reply:
        self._check_token(parse_qs(urlsplit(self.path).query).get("token", [""])[0])
        text, policy = page(self.play.state())
        return Reply(200, "text/html; charset=utf-8", text, {"Content-Security-Policy": policy})

    def _state(self) -> Reply:
        self._check_bearer()
        return _json(self.play.state())

    def _asked(self, ask: Callable[[Any], object]) -> Reply:
        self._check_bearer()
        return _json(ask(self._body()))

    def _body(self) -> Any:
        """The JSON of a request."""
        if self.headers.get_content_type() != "application/json":
            raise HTTPRefused(415, "the body has to be application/json")
        length = self._length()
        if length < 0:
            raise HTTPRefused(411, "the length of the body is missing")
        if length > MAX_BODY:
            raise HTTPRefused(413, f"the body is larger than {MAX_BODY:,} bytes")
        try:
            return json.loads(self._read(length).decode("utf-8"))
        except (ValueError, RecursionError):
            raise HTTPRefused(400, "the body is no JSON") from None

    def _length(self) -> int:
        """The bytes of the body; negative where that is not said."""
        length = self.headers.get("Content-Length", "")
        return int(length[:12]) if length.isascii() and length.isdigit() else -1

    def _read(self, length: int) -> bytes:
        self._left = False
        return self.rfile.read(length)

    def _body_left_over(self) -> None:
        """Read the body of a refused request: one that is closed unread loses its answer."""
        if self._left and 0 < self._length() <= MAX_BODY:
            self._read(self._length())

    def _send(self, reply: Reply) -> None:
        body = reply.text.encode("utf-8")
        self.send_response(reply.status)
        for name, value in {**SAFE, **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request of this server, in JSON as everything else."""
        self.close_connection = True
        with suppress(OSError):
            self._send(_json({"error": message or "this cannot be answered"}, code))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is the user's."""


SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer: nothing is kept, and no other page gets hold of it."""


class PageServer(ThreadingHTTPServer):
    """A thread for each request; none of them keeps the process from ending."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break."""


def listen(play: Play, port: int) -> PageServer:
    """The server, listening; port 0: any that is free. Raises MD0622 for one that is taken."""
    handler = type("Handler", (Handler,), {"play": play})
    try:
        return PageServer((HOST, port), handler)
    except OSError as error:
        fix, why = leave_out("--port"), "a free one is taken"
        message = f"port {port} cannot be used: {error.strerror}"
        fail("MD0622", message, help=f"{fix.title}: {why}", fixes=(fix,))


def address(server: PageServer, play: Play) -> str:
    """The address of the page, with its secret."""
    return f"http://{HOST}:{server.server_port}/?token={play.token}"
