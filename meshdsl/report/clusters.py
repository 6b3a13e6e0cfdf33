"""`meshdsl cluster list` and `show`: profiles, with nominal rates beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from meshdsl.cluster.profile import MEASURED, UNBOUNDED, Cluster, Device, Level
from meshdsl.cluster.this_machine import kept
from meshdsl.ir.types import DTYPES
from meshdsl.report.document import Block, Document, Gap, Grid, Item, Piece, duration, line


def as_json(cluster: Cluster) -> dict[str, object]:
    """A profile as it is in TOML; an outermost level of any size has none."""
    levels = [asdict(level) for level in cluster.levels]
    for level in levels:
        if level["size"] == UNBOUNDED:
            del level["size"]
    return {
        "name": cluster.name,
        "source": list(cluster.source),
        "device": asdict(cluster.device) | {"gemm_half": list(cluster.device.gemm_half)},
        "levels": levels,
        "tables": [
            {"collective": kind, "devices": n, "level": level, "points": [list(p) for p in points]}
            for (kind, n, level), points in cluster.tables.items()
        ],
    }


def listed(clusters: Sequence[Cluster]) -> Document:
    """A line for each cluster: its device, and its links inside out."""
    head = ("", "best TFLOP/s", "memory", "links, innermost first, GB/s measured/nominal")
    lines = tuple(
        (c.name, _best(c), f"{c.device.memory / 1e9:,.0f} GB", ", ".join(map(_link, c.levels)))
        for c in clusters
    )
    return (Grid("", head, lines), Gap(), *_unmeasured([c.name for c in clusters]))


def _best(cluster: Cluster) -> str:
    rates = {d: r for d, r in cluster.device.flops.items() if d in DTYPES}
    dtype, rate = max(rates.items(), key=lambda item: item[1])
    return f"{rate / 1e12:,.4g} ({dtype})"


def _link(level: Level) -> str:
    """The text `8 switch 359/450`."""
    size = "" if level.size == UNBOUNDED else f"{level.size:,} "
    shared = f" for {level.shared_by}" if level.shared_by > 1 else ""
    rates = f"{_gigabytes(level.bandwidth)}/{_gigabytes(level.nominal)}"
    return f"{size}{level.kind} {rates}{shared}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.4g}"


def shown(cluster: Cluster) -> Document:
    """A profile in full."""
    device = cluster.device
    rates = ", ".join(f"{dtype} {rate / 1e12:,.4g}" for dtype, rate in device.flops.items())
    (short, wide), reached = device.gemm_half, device.attention_eff
    facts = {
        "best TFLOP/s": rates,
        "products": f"reach {device.mm_eff:.0%} of that when large, half of it at {short:g} rows"
        f" or {wide:g} columns",
        **({"attention": f"reaches {reached:.0%} of it"} if reached else {}),
        "memory": f"{device.memory / 1e9:,.4g} GB, {_gigabytes(device.hbm)} GB/s, of which"
        f" {device.hbm_eff:.0%} is reached",
        **_tiers(device),
        "a kernel": f"takes {duration(device.launch)} to start",
        "beside sending": f"computing takes {device.overlap_slowdown:g} times as long",
    }
    return (
        line(cluster.name, "strong"),
        *(Item((Piece(f"  {key:16}", "name"),), (Piece(text),)) for key, text in facts.items()),
        Gap(),
        _levels(cluster),
        *_tables(cluster),
        Gap(),
        *(Item((Piece("source: ", "muted"),), (Piece(text),)) for text in cluster.source),
        *_unmeasured([cluster.name]),
    )


def _tiers(device: Device) -> dict[str, str]:
    """How fast the memory of the host and a disk are, as far as that is known."""
    rates = {"host": device.host, "disk": device.disk}
    return {n: f"{_gigabytes(rate)} GB/s each way" for n, rate in rates.items() if rate}


def _levels(cluster: Cluster) -> Grid:
    head = ("level", "of", "links", "a hop", "measured GB/s", "nominal GB/s", "shared by")
    lines = tuple(
        (
            str(number),
            "any number" if level.size == UNBOUNDED else f"{level.size:,}",
            level.kind if level.axes == 1 else f"{level.axes}-D {level.kind}",
            duration(level.alpha),
            _gigabytes(level.bandwidth),
            _gigabytes(level.nominal),
            str(level.shared_by),
        )
        for number, level in enumerate(cluster.levels, 1)
    )
    return Grid("Rates are of one device in one direction.", head, lines)


def _tables(cluster: Cluster) -> Iterator[Block]:
    """Measured tables, which are used in place of latency and rate."""
    if not cluster.tables:
        return
    yield Gap()
    lines = tuple(
        (kind, str(n), str(level + 1), _ends(points))
        for (kind, n, level), points in cluster.tables.items()
    )
    yield Grid("Measured tables:", ("of", "devices", "level", "from … to"), lines)


def _ends(points: Sequence[tuple[float, float]]) -> str:
    first, last = points[0], points[-1]
    ends = (f"{size:,.0f}: {duration(seconds)}" for size, seconds in (first, last))
    return " … ".join(ends)


def _unmeasured(names: Sequence[str]) -> Iterator[Block]:
    if MEASURED in names and kept() is None:
        text = "cpu: typical figures; `meshdsl cluster measure` measures this machine instead"
        yield line(text)
