"""`meshdsl play`: a page on this machine that shows what comes of a program while it is edited."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli import common
from meshdsl.cli.options import PlacingOptions, flag, opt, option, pipeline_options
from meshdsl.output_files import write_whole

if TYPE_CHECKING:
    from meshdsl.play.http_server import Play


@option
class Served(PlacingOptions):
    """Options of `play`."""

    port: int = opt("--port", "N", "The port; 0 takes a free one.", 0, min=0, max=65535)
    no_open: bool = flag("--no-open", "Do not open a browser.")
    read_only: bool = flag("--read-only", "Disable saving.")


def command(
    given: Served,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A .mdsl file. [default: an example]", show_default=False
        ),
    ] = None,
) -> None:
    """Edit a program in the browser, with bytes and memory."""
    with common.reporting():
        from meshdsl.play.edited_file import EditedFile
        from meshdsl.play.http_server import Play

        chosen = pipeline_options(given)
        writable = file is not None and not given.read_only
        document = EditedFile(file, writable, write_whole)
        document.read()
        _serve(Play(document, chosen), given)


def _serve(play: Play, given: Served) -> None:
    """Serve the page until Ctrl-C."""
    from meshdsl.play.http_server import address, listen

    server = listen(play, given.port)
    try:
        where = address(server, play)
        common.say(f"{play.document.name} is at {where}")
        common.say("Ctrl-C ends it.")
        play.desk.warm()
        if not given.no_open:
            _open(where)
        server.serve_forever()
    except KeyboardInterrupt:
        common.say("")
    finally:
        play.desk.close()
        server.server_close()


def _open(where: str) -> None:
    """Open a browser, unless it is one that would take the terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(where)
