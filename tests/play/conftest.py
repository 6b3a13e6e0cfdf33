"""One server for the tests of a module, on a file that each test finds as it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from meshdsl.output_files import write_whole
from meshdsl.pipeline import Options
from meshdsl.play.edited_file import EditedFile
from meshdsl.play.http_server import HOST, PageServer, Play, listen
from tests.project import ROOT

TEXT = (ROOT / "examples/mlp.mdsl").read_text(encoding="utf-8")
QUESTION: dict[str, Any] = {
    "text": TEXT,
    "program": None,
    "layout": None,
    "sbp": None,
    "cluster": None,
    "mesh": None,
    "reduce": "optimal",
    "sizes": {},
}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        """The body, as data."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs, and the file it shows."""

    server: PageServer
    play: Play
    path: Path

    def ask(
        self,
        path: str,
        body: object = None,
        method: str = "",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """A request as the page makes it; `headers` replace its own, `""` leaves one out."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {
            "Host": f"{HOST}:{self.server.server_port}",
            "Authorization": f"Bearer {self.play.token}",
            "Content-Type": "application/json" if sent is not None else "",
            "Content-Length": str(len(sent)) if sent is not None else "",
        } | (headers or {})
        connection = HTTPConnection(HOST, self.server.server_port)
        connection.putrequest(method or ("GET" if sent is None else "POST"), path, skip_host=True)
        for name, value in given.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(sent)
        reply = connection.getresponse()
        try:
            return Reply(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def compile(self, **more: object) -> Any:
        """What comes of the file under other choices, with all views."""
        found, seen = (self.ask(path, QUESTION | more) for path in ("/compile", "/views"))
        assert (found.status, seen.status) == (200, 200), (found.body, seen.body)
        answer, views = found.json, seen.json["views"]
        return answer | {"result": answer["result"] and answer["result"] | views}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a file."""
    path = tmp_path_factory.mktemp("play") / "mlp.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    play = Play(EditedFile(path, True, write_whole), Options())
    server = listen(play, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Served(server, play, path)
    play.desk.close()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def served(running: Served) -> Served:
    """The server, its file as it was at first."""
    running.path.write_text(TEXT, encoding="utf-8")
    return running
