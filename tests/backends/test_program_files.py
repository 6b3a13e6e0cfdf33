"""What an emitted program reads: damaged files end in a sentence, odd ones are not waited for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from meshdsl.backends.runtime import main
from meshdsl.backends.runtime.main import local_value, read_file
from meshdsl.backends.runtime.values import Spec

SPEC = Spec("f32", {"n": 8, "m": 4}, {})
VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files that a program leaves open until it ends."""
    opened: list[IO[bytes]] = []

    def noted(*given: Any, **more: Any) -> IO[bytes]:
        opened.append(open(*given, **more))
        return opened[-1]

    monkeypatch.setattr(main, "open", noted, raising=False)
    yield
    for file in opened:
        file.close()


def value(path: Path) -> torch.Tensor:
    """The array `x` of a file, as a device has it."""
    return local_value("x", SPEC, read_file(str(path), {"x": SPEC}), 0, {}, 0)


def saved(path: Path) -> Path:
    if path.suffix == ".npz":
        np.savez(path, x=VALUES)
    else:
        save_file({"x": VALUES}, path, {"about": "this"})
    return path


def said(path: Path) -> str:
    """What is said of a file; of one that is read as if nothing were wrong, that."""
    try:
        value(path)
    except (ValueError, OSError) as error:
        return str(error)
    return "read"


@pytest.fixture(params=["x.npz", "x.safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path / request.param)


def test_arrays_are_read(path: Path) -> None:
    assert np.array_equal(value(path).numpy(), VALUES)


def test_an_empty_one_too(tmp_path: Path) -> None:
    save_file({"x": VALUES[:0]}, tmp_path / "x.safetensors")
    none = SPEC._replace(dims={"n": 0, "m": 4})
    found = read_file(str(tmp_path / "x.safetensors"), {"x": none})
    assert local_value("x", none, found, 0, {}, 0).shape == (0, 4)


def test_a_flipped_bit_of_an_archive_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npz")
    data = bytearray(path.read_bytes())
    data[data.find(VALUES.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^x cannot be read: BadZipFile\(.*CRC"):
        value(path)


def test_a_file_that_shrinks_is_found(tmp_path: Path) -> None:
    """It is opened, and shorter when its values are read; a map of it would end the process."""
    path, large = tmp_path / "x.safetensors", SPEC._replace(dims={"n": 1 << 16})
    save_file({"x": np.ones(1 << 16, np.float32)}, path)
    opened = read_file(str(path), {"x": large})
    os.truncate(path, 1 << 17)
    with pytest.raises(ValueError, match=r"^x cannot be read: .* ends within it"):
        local_value("x", large, opened, 0, {}, 0)


def test_whatever_is_cut_off_or_changed_it_is_told_in_a_line(path: Path) -> None:
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole), 7)]
    for at in range(0, len(whole), 5):
        for byte in (0, 255):
            damaged.append(whole[:at] + bytes([byte]) + whole[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        assert re.fullmatch(".+", said(path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file_is_refused(make: Callable[[Path], None], path: Path) -> None:
    path.unlink()
    make(path)
    with pytest.raises(OSError, match=r"regular|directory"):
        value(path)


def test_an_array_without_a_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", VALUES)
    with pytest.raises(ValueError, match="one array without a name"):
        value(tmp_path / "x.npy")
