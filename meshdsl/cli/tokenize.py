"""`meshdsl tokenize`: texts as a flat file of tokens, made once for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from meshdsl.cli import common
from meshdsl.cli.options import Force, TextOptions, opt, option
from meshdsl.diagnostics import fail
from meshdsl.option_edits import give, refuse

TextFiles = Annotated[
    list[Path],
    Argument(
        metavar="FILE…", help="Text files, .jsonl files, or folders of them.", show_default=False
    ),
]


@option
class TokenizeOptions(TextOptions, Force):
    """Options of `tokenize`."""

    out: Path = opt("--out", "F.npy", "The token file to write.", ...)


def command(files: TextFiles, given: TokenizeOptions) -> None:
    """Write texts as one token file, for --data."""
    with common.reporting():
        from meshdsl.backends.train.tokenized import write_texts

        if given.tokenizer is None:
            help = "name the `tokenizer.json` of a model, or its folder"
            fail("MD0601", "`tokenize` without `--tokenizer F`", help=help)
        if given.out.suffix != ".npy":
            fix = give("--out", str(common.with_suffix(given.out, ".npy", "tokens")))
            refuse("MD0602", f"`--out {given.out}`: tokens are written as .npy", fix)
        common.check_output(given.out, given.force)
        count = write_texts([str(path) for path in files], given.texts, str(given.out))
        common.say(f"wrote {count:,} tokens to {given.out}")
