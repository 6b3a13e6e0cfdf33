"""`meshdsl play` as a command; the page itself is tested in tests/play."""

from __future__ import annotations

import socket
import webbrowser

import pytest

from meshdsl.play.http_server import HOST, PageServer

from .command import Cli, write


def test_bad_commands(cli: Cli) -> None:
    for file in ("nothing.mdsl", ".", "-"):
        assert cli("play", file, "--no-open").codes == ["error[MD0010]"]
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        done = cli("play", "--no-open", "--port", str(taken.getsockname()[1]))
    assert (done.code, done.codes) == (2, ["error[MD0622]"])
    assert cli("play", "--port", "70000").codes == ["error[MD0604]"]


@pytest.mark.parametrize("words", [[], ["--no-open"]])
def test_a_browser_is_opened_if_it_may(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    opened: list[str] = []
    browser = webbrowser.BackgroundBrowser("browser")
    monkeypatch.setattr(browser, "open", opened.append)
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    _ends_at_once(monkeypatch)
    done = cli("play", write("dim a = 4"), *words)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("f.mdsl is at http://127.0.0.1:")
    assert [address in done.out for address in opened] == [True] * (not words)


def test_a_browser_of_the_terminal_is_not_opened(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = webbrowser.GenericBrowser("w3m")
    monkeypatch.setattr(browser, "open", pytest.fail)
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    _ends_at_once(monkeypatch)
    assert cli("play").code == 0


def _ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C as soon as the server runs."""

    def interrupted(server: PageServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
