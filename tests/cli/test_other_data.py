"""`--resume` with other data than before is told, whatever their size; `latest` may be anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.train.data import BLOCK, fingerprint

from .command import Cli, write
from .test_regular_files import LEARN


def save(number: float, path: str = "d.npz") -> None:
    np.savez(path, x=np.full((8, 2), number, np.float32))


def test_other_data_of_the_same_size_are_told(cli: Cli) -> None:
    run = ["train", write(LEARN), "--data", "d.npz", "--checkpoint", "ck"]
    save(1)
    assert cli(*run, "--steps", "2").codes == []
    save(1)  # the same again
    assert cli(*run, "--steps", "3", "--resume").codes == []
    save(2)
    done = cli(*run, "--steps", "4", "--resume")
    assert (done.code, done.codes) == (0, ["note[MD0517]"])
    assert "d.npz has other content than when the run was saved" in done.err
    assert cli(*run, "--steps", "5", "--resume").codes == []


def test_a_checkpoint_without_a_fingerprint_is_resumed(cli: Cli) -> None:
    from meshdsl.backends.train import checkpoint as disk

    run = ["train", write(LEARN), "--data", "d.npz", "--checkpoint", "ck"]
    save(1)
    assert cli(*run, "--steps", "2").code == 0
    content = disk.read_manifest(Path("ck/step-2"))
    assert content["meta"].pop("data") == fingerprint("d.npz")
    Path("ck/step-2/manifest.json").unlink()  # a checkpoint's files are never written over
    disk.write_manifest(Path("ck/step-2"), content)
    save(2)
    done = cli(*run, "--steps", "3", "--resume")
    assert (done.code, done.codes) == (0, [])
    assert "going on after step 2" in done.out


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 64 * BLOCK, 100 * BLOCK + 7])
def test_the_fingerprint_is_of_size_and_content(size: int, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(size))
    first = fingerprint(str(path))
    assert first == fingerprint(str(path))
    path.write_bytes(bytes(size + 1))
    found = {first, fingerprint(str(path))}
    for at in {0, size - 1, *(range(0, size, BLOCK) if size <= 64 * BLOCK else ())} - {-1}:
        changed = bytearray(size)
        changed[at : at + 1] = b"x" * (size > 0)
        path.write_bytes(changed)
        found.add(fingerprint(str(path)))
    ends = len({0, size - 1, *(range(0, size, BLOCK) if size <= 64 * BLOCK else ())} - {-1})
    assert len(found) == 2 + (ends if size else 0)
    assert fingerprint(str(tmp_path)) is None


def test_a_folder_called_latest_is_told(cli: Cli) -> None:
    run = ["train", write(LEARN), "--data", "d.npz", "--checkpoint", "ck"]
    save(1)
    assert cli(*run, "--steps", "2").code == 0
    Path("ck/latest").unlink()
    Path("ck/latest").mkdir()
    for more in (["--resume"], ["--force"]):
        done = cli(*run, "--steps", "3", *more)
        assert (done.code, done.codes) == (2, ["error[MD0502]"])
        assert "ck/latest is a folder" in done.err
        assert "ck holds step-2" in done.err
    Path("ck/latest").rmdir()
    assert cli(*run, "--steps", "3", "--resume").code == 0
    shutil.rmtree("ck")
