"""`meshdsl cluster`: the machines that times are predicted for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, option
from meshdsl.cluster.profile import MEASURED
from meshdsl.diagnostics import fail


class What(StrEnum):
    """What to do with profiles."""

    list = "list"
    show = "show"
    measure = "measure"


@option
class Clusters(AsData):
    """Options of `cluster`."""


def command(
    what: Annotated[
        What,
        typer.Argument(
            metavar="list|show|measure",
            help="List all, show one, or measure this machine.",
            show_default=False,
        ),
    ],
    given: Clusters,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="For `show`: h100, … or a .toml file.",
            autocompletion=complete.clusters,
            show_default=False,
        ),
    ] = None,
) -> None:
    """List, show or measure clusters for predicted times."""
    with common.reporting(given.json):
        from meshdsl.cluster.profile import load, names
        from meshdsl.report.clusters import as_json, listed, shown
        from meshdsl.report.terminal import print_document

        if (name is not None) != (what is What.show):
            help = "for instance `meshdsl cluster show h100`"
            fail("MD0604", "`cluster show` takes a name, `list` and `measure` take none", help=help)
        if what is What.measure:
            from meshdsl.backends.engines.link_times import measure
            from meshdsl.cluster.this_machine import keep

            with common.patience("timing products and collectives on this machine"):
                keep(measure())
        every = names() if what is What.list else (name or MEASURED,)
        clusters = [load(each) for each in every]
        if given.json:
            facts = [as_json(cluster) for cluster in clusters]
            common.print_json({"version": 1, "clusters": facts})
        elif what is What.list:
            print_document(listed(clusters))
        else:
            print_document(shown(clusters[0]))
