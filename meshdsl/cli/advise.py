"""`meshdsl advise`: how to divide a program over devices, in words made from a search."""

from __future__ import annotations

from meshdsl.cli import common
from meshdsl.cli.options import AsData, File, SearchOptions, Sizes, Strict, Which, opt, option
from meshdsl.cli.options import pipeline_options as options_of


@option
class Limits:
    """Options of what there is to divide over."""

    cluster: str | None = opt("--cluster", "C", "The cluster: h100, … or a .toml file.")
    devices: int | None = opt(
        "--devices", "N", "Try every mesh shape of N devices.", min=1, max=1 << 20
    )
    memory: str | None = opt("--memory", "80GB", "The memory of a device. [default: the cluster's]")
    pipeline: str | None = opt("--pipeline", "AXIS", "Also search pipeline stages on this axis.")
    budget: str | None = opt("--budget", "10s", "Stop after this much work, with the best so far.")


@option
class Advise(Which, Limits, SearchOptions, Sizes, Strict, AsData):
    """Options of `advise`."""


def command(file: File, given: Advise) -> None:
    """Recommend how to divide a program over devices, and why."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.report.advice_report import advised, shown
        from meshdsl.search.advice import advice
        from meshdsl.search.request import Amounts, SearchRequest

        compilation = common.compiled(file, options_of(given), diagnostics, "named")
        request = SearchRequest(
            cluster=given.cluster, devices=given.devices, pipeline=given.pipeline
        ).with_amounts(Amounts(given.memory, budget=given.budget))
        with common.patience(f"searching layouts of {compilation.source.name}"):
            facts = advised(advice(request, compilation), str(file), _same(given))
        if given.json:
            common.print_json(facts)
            return
        from meshdsl.report.terminal import print_document

        print_document(shown(facts))


def _same(given: Advise) -> list[str]:
    """The words of the options that commands for the same program need, too."""
    words = ["--cluster", given.cluster] if given.cluster else []
    words += ["--program", given.program] if given.program else []
    words += ["--dtype", given.dtype] if given.dtype else []
    for setting in given.settings or []:
        words += ["--set", setting]
    return words
