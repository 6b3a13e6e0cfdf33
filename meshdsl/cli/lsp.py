"""`meshdsl lsp`: the language server for editors, over standard input and output."""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO, cast

from meshdsl.cli.options import flag, option


@option
class Lsp:
    """Options of `lsp`."""

    stdio: bool = flag("--stdio", "Use standard input and output, which is the default.")


def command(given: Lsp) -> None:
    """Run the language server; your editor starts it."""
    import logging

    from meshdsl.editor.features import make
    from meshdsl.editor.frames import Frames
    from meshdsl.editor.server import brief

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(brief)
    sys.setswitchinterval(0.001)  # the loop gets its turn soon, also while a worker is busy
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Else the thread that waits for the next message would hold the process after Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    server = make()
    server.start_io(cast(BinaryIO, Frames(sys.stdin.buffer)))
    sys.stderr.flush()
    # A worker in the middle of a long job is not waited for.
    os._exit(0 if server.ended else 1)
