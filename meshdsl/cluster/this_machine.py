"""The profile of this machine, as `meshdsl cluster measure` found it, and where it is kept.

It is kept in the user's cache folder by the model of the processor and the version of torch;
processes have one thread each, as under torchrun.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshdsl.disk_cache import read, write

KIND = "clusters"
"""The folder of measured profiles."""
FORMAT = 2

Times = Mapping[tuple[str, int], Sequence[tuple[float, float]]]
"""By what was timed and how many processes took part: pairs of bytes (FLOPs) and seconds."""


def kept() -> str | None:
    """The TOML text of this machine's profile; None where it was not measured."""
    return read(KIND, _key(), str)


def keep(times: Times) -> str:
    """Write a profile of this machine's times, and keep it."""
    text = profile(times)
    write(KIND, _key(), text)
    return text


def machine() -> str:
    """The processor, the version of torch and the number of threads that were measured."""
    import importlib.metadata

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"{_processor()}, torch {torch}, one thread a process"


def _key() -> str:
    return hashlib.sha256(f"{FORMAT} {machine()}".encode()).hexdigest()


def _processor() -> str:
    """The model of the processor as Linux tells it, or what the system says."""
    import platform

    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def profile(times: Times) -> str:
    """The profile as TOML: tables, and rates for what they do not have.

    A level has the latency of the least message to another process, and the rate of one of 1 MB.
    """
    rate = max(flops / seconds for flops, seconds in times["product", 1])
    moved = max(size / seconds for size, seconds in times["pointwise", 1])
    sent = times["permute", 2]
    alpha = sent[0][1]
    size, seconds = sent[-2]
    bandwidth = size / max(seconds - alpha, seconds / 2)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"""\
source = ["measured on this machine: {machine()}"]

[device]
flops = {{ f32 = {rate:.4g}, f64 = {rate / 2:.4g} }}
mm_eff = 1.0
gemm_half = [0, 0]
hbm = {moved:.4g}
hbm_eff = 1.0
launch = 0.0
memory = {memory}
overlap_slowdown = 2.0
host = {moved / 2:.4g}

[[levels]]
kind = "switch"
alpha = {alpha:.4g}
bandwidth = {bandwidth:.4g}
nominal = {bandwidth:.4g}
{"".join(_table(what, world, points) for (what, world), points in times.items())}"""


def _table(what: str, world: int, points: Sequence[tuple[float, float]]) -> str:
    """One table; what takes longer than more bytes do was measured in a busy moment."""
    falling = itertools.accumulate((s for _, s in reversed(points)), min)
    seconds = reversed(list(falling))
    pairs = (f"[{size:.0f}, {s:.4g}]" for (size, _), s in zip(points, seconds, strict=True))
    return f"""
[[tables]]
collective = "{what}"
devices = {world}
points = [{", ".join(pairs)}]
"""
