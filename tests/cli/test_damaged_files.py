"""Files that are damaged, of every kind that is read: a diagnostic, or they are read as they are.

A file has bits flipped, is cut short, has parts of itself in other places, or numbers that grew.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.runtime.array_files import Refused, read_arrays, safetensors_parts
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.job import DataFiles
from meshdsl.cluster.profile import load
from meshdsl.costgraph.graph_file import (
    costs_of,
    layers_of,
    operators_of,
    read_graph,
    transformer_of,
)
from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source
from meshdsl.schedule.csv_files import read
from meshdsl.simulate.against import read_trace
from meshdsl.syntax.parse import read_source
from tests.project import ROOT

CASES = int(os.environ.get("MESHDSL_CASES", "0")) or 40
"""Damaged files of each kind."""

# --- damage ------------------------------------------------------------------------------------


def flipped(data: bytearray, chance: random.Random) -> None:
    """Some bits are others."""
    for _ in range(chance.choice([1, 1, 1, 2, 8, 64])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    """The end is missing."""
    del data[chance.randrange(len(data)) :]


def spliced(data: bytearray, chance: random.Random) -> None:
    """A part is in another place, or twice, or a part is missing."""
    start, at = chance.randrange(len(data)), chance.randrange(len(data))
    part = data[start : start + chance.choice([1, 4, 30, 300])]
    data[at : at + chance.choice([0, len(part), 10])] = part * chance.choice([0, 1, 1, 2])


def grown(data: bytearray, chance: random.Random) -> None:
    """A number in words is another."""
    found = [*re.finditer(rb"\d+", bytes(data))]
    new = [
        b"0",
        b"-1",
        b"9" * 30,
        b"9" * 400,
        b"9" * 5000,
        b"1e999",
        b"4294967296",
        b"nan",
        b"[" * 3000,
    ]
    if found:
        start, end = chance.choice(found).span()
        data[start:end] = chance.choice(new)


def counted(data: bytearray, chance: random.Random) -> None:
    """A number in binary is another."""
    new = struct.pack("<q", chance.choice([-1, 0, 1, 2**31, 2**40, 2**62]))
    at, size = chance.randrange(len(data)), chance.choice([2, 4, 8])
    data[at : at + size] = new[:size]


DAMAGE = (flipped, cut, spliced, grown, counted)


def damaged(whole: bytes, count: int, seed: str) -> Iterator[bytes]:
    """The file, damaged once or twice, `count` times."""
    chance = random.Random(seed)
    for number in range(count):
        data = bytearray(whole)
        for kind in (
            DAMAGE[number % len(DAMAGE)],
            *chance.choices(DAMAGE, k=chance.choice([0, 1])),
        ):
            if data:
                kind(data, chance)
        yield bytes(data)


# --- kinds of files ----------------------------------------------------------------------------

ARRAYS = {
    "x": np.arange(120, dtype=np.float32).reshape(40, 3),
    "y": np.asfortranarray(np.arange(80, dtype=np.int32).reshape(40, 2)),
}
INPUTS = {"x": Spec("f32", {"batch": 4, "io": 3}, {}), "y": Spec("i32", {"batch": 4, "k": 2}, {})}
TOKENS = {"tokens": Spec("i32", {"batch": 2, "seq": 4}, {}, ("below", 256))}
CSV = b"0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
ARGS = {"op": "add", "line": 1, "trips": 1}
TRACE = {
    "otherData": {"made by": "meshdsl 0", "seconds": 1.0},
    "traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": 1, "pid": 0, "tid": 0, "args": ARGS}],
}
GRAPHS = {
    "placement": costs_of,
    "stages": layers_of,
    "transformer": transformer_of,
    "devices": operators_of,
}


def _npz(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **ARRAYS)
    return file.getvalue()


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, ARRAYS["x"])
    return file.getvalue()


def _safetensors() -> bytes:
    kinds = {"x": "f32", "y": "i32"}
    shapes = {name: (kinds[name], list(array.shape)) for name, array in ARRAYS.items()}
    return b"".join(safetensors_parts(shapes, lambda name: ARRAYS[name].tobytes()))


def _arrays(path: Path) -> None:
    for stored in read_arrays(str(path)).values():
        assert stored[...].shape == stored.shape


def _data(path: Path) -> None:
    data = open_data(DataFiles(str(path)), INPUTS, 0)
    for name, spec in INPUTS.items():
        whole = tuple(slice(0, n) for n in spec.dims.values())
        assert data.training.block(name, spec, 0, whole).shape == (*spec.dims.values(),)


def _tokens(path: Path) -> None:
    for kind in ("bytes", "chars"):
        data = open_data(DataFiles(str(path), tokens=kind), TOKENS, 0)
        data.training.block("tokens", TOKENS["tokens"], 0, (slice(0, 2), slice(0, 4)))


def _profile(path: Path) -> None:
    load(str(path))


def _trace(path: Path) -> None:
    read_trace(path)


def _schedule(path: Path) -> None:
    read(read_source(path))


def _graph(path: Path) -> None:
    top = read_graph(path)
    GRAPHS[top.field("kind").text()](top)


def _program(path: Path) -> None:
    check_source(read_source(path), Options(), Diagnostics())


def _file(path: str) -> bytes:
    return (ROOT / path).read_bytes()


KINDS: dict[str, tuple[bytes, Callable[[Path], None]]] = {
    "stored.npz": (_npz(np.savez), _arrays),
    "compressed.npz": (_npz(np.savez_compressed), _arrays),
    "data.npz": (_npz(np.savez), _data),
    "data.safetensors": (_safetensors(), _data),
    "a.safetensors": (_safetensors(), _arrays),
    "a.npy": (_npy(), _arrays),
    "text": ("naïve tokens of a text that is long enough".encode() * 3, _tokens),
    "a.toml": (
        _file("meshdsl/cluster/profiles/v100-p3.toml"),
        _profile,
    ),
    "gpt3.json": (_file("examples/search/gpt3.json"), _graph),
    "alexnet.json": (_file("examples/search/pipedream_alexnet.json"), _graph),
    "trace.json": (json.dumps(TRACE).encode(), _trace),
    "a.csv": (CSV, _schedule),
    "a.mdsl": (_file("examples/mlp.mdsl"), _program),
}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    whole, reads = KINDS[name]
    path = tmp_path / name
    for data in damaged(whole, CASES, name):
        path.write_bytes(data)
        try:
            reads(path)
        except (DiagnosticError, Refused):
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {data!r}") from error


@pytest.mark.parametrize("name", [n for n in KINDS if n != "a.npy"])
def test_whole_files_are_read(name: str, tmp_path: Path) -> None:
    whole, reads = KINDS[name]
    (tmp_path / name).write_bytes(whole)
    reads(tmp_path / name)


def test_every_flipped_bit_of_values_is_found(tmp_path: Path) -> None:
    """The values of an uncompressed archive have no other check than the checksum of each."""
    whole, path = _npz(np.savez), tmp_path / "x.npz"
    start = whole.index(ARRAYS["x"].tobytes())
    for bit in range(0, 8 * ARRAYS["x"].nbytes, 37):
        data = bytearray(whole)
        data[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(Refused, match="CRC"):
            read_arrays(str(path))


HEADERS = {
    "huge": b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 3), }",
    "deep": b"(" * 3000,
    "no Python": b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), ",
    "odd words": b"{'descr': 'zzz', 'fortran_order': 7, 'shape': 'x'}",
    "lists": b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}",
    "pairs": b"{'descr': '(2,)<f4', 'fortran_order': False, 'shape': (3,)}",
    "unhashable": b"{[]: 1}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_odd_headers_are_refused_before_anything_is_allocated(kind: str, tmp_path: Path) -> None:
    import zipfile

    header = HEADERS[kind]
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", body)
    with pytest.raises(Refused, match="damaged"):
        read_arrays(str(path))


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors", "text"])
def test_a_file_that_becomes_shorter_is_a_diagnostic(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(KINDS[name][0])
    text = name == "text"
    inputs = TOKENS if text else INPUTS
    data = open_data(DataFiles(str(path), tokens="bytes" if text else None), inputs, 0)
    ((first, spec), *_) = inputs.items()
    whole = tuple(slice(0, n) for n in spec.dims.values())
    data.training.block(first, spec, 0, whole)
    os.truncate(path, 0)
    with pytest.raises(DiagnosticError, match="shorter") as refused:
        data.training.block(first, spec, 1, whole)
    assert refused.value.diagnostics[0].code == "MD0505"


DEEP = {
    "a.toml": b"a = " + b"[" * 20_000,
    "a.json": b"[" * 200_000,
    "b.json": b'{"kind": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", DEEP)
def test_files_that_nest_without_end_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(DEEP[name])
    readers: list[Callable[[Path], object]] = [_profile]
    for reads in readers if name.endswith("toml") else (read_graph, read_trace):
        with pytest.raises(DiagnosticError):
            reads(path)


def test_damage_of_all_kinds_is_done() -> None:
    """Else the cases above would prove nothing."""
    whole = _npz(np.savez)
    found = [zlib.crc32(data) for data in itertools.islice(damaged(whole, 50, "x"), 50)]
    assert len(set(found)) > 45
    assert zlib.crc32(whole) not in found
