"""The folder of checkpoints: which are kept, which is the latest, and damaged ones."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.diagnostics import DiagnosticError

SPECS = {"w": Spec("f32", {"a": 300}, {"a": ("x",)}), "m": Spec("bf16", {"a": 300}, {})}
MESH = {"x": 2}


def blocks_of(number: float):
    tensors = {"w": torch.full((150,), number), "m": torch.full((300,), number).bfloat16()}
    return {0: tensors, 1: tensors}


def save(folder, step, number=None, keep=3):
    """Save a state that is known by a number, the step unless another is given."""
    number = float(step if number is None else number)
    blocks, ranks = blocks_of(number), Ranks(MESH)
    Checkpoints(str(folder), keep).save(step, blocks, SPECS, {"n": number}, ranks)


def latest(folder):
    """Step and number of the newest whole checkpoint, all of it read and compared."""
    checkpoints = Checkpoints(str(folder))
    found = checkpoints.latest()
    if found is None:
        return None
    held = dict(checkpoints.load(found, SPECS, {"x": 1}, 0))
    number = found.meta["n"]
    assert all(torch.equal(t, torch.full_like(t, number)) for t in held.values())
    return found.step, number


def whole_one(folder):
    """The newest whole checkpoint, which there has to be."""
    found = Checkpoints(str(folder)).latest()
    assert found is not None
    return found


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_no_folder_and_an_empty_one_have_none(tmp_path):
    assert Checkpoints(str(tmp_path / "none")).latest() is None
    assert Checkpoints(str(tmp_path)).latest() is None


def test_the_newest_are_kept_and_the_pointer_names_them(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
        assert latest(tmp_path) == (step, step)
    assert listing(tmp_path) == ["latest", "step-30", "step-40", "step-50"]
    assert (tmp_path / "latest").read_text() == "step-50\nstep-40\nstep-30\n"


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_are_kept_as_asked(tmp_path, keep):
    for step in range(4):
        save(tmp_path, step, keep=keep)
    assert len(listing(tmp_path)) == keep + 1


def test_the_last_saved_is_the_latest_whatever_its_step(tmp_path):
    for step in (100, 200, 10):
        save(tmp_path, step)
    assert latest(tmp_path) == (10, 10)
    save(tmp_path, 20)
    assert listing(tmp_path) == ["latest", "step-10", "step-20", "step-200"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 10, 1)
    save(tmp_path, 10, 2)
    assert latest(tmp_path) == (10, 2)
    assert listing(tmp_path) == ["latest", "step-10"]


def test_a_replacement_that_was_cut_short_is_put_back(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step-10").rename(tmp_path / "step-10.old")
    assert latest(tmp_path) == (10, 10)
    save(tmp_path, 20)
    assert listing(tmp_path) == ["latest", "step-10", "step-20"]


def test_without_a_pointer_the_highest_step_counts(tmp_path):
    for step in (9, 10, 8):
        save(tmp_path, step)
    for damage in (Path.unlink, lambda path: path.write_bytes(b"\xff\x00 junk")):
        damage(tmp_path / "latest")
        assert latest(tmp_path) == (10, 10)


@pytest.mark.parametrize("name", [".latest.new", ".step-1.partial"])
@pytest.mark.parametrize("target", ["victim", "folder", "none"])
def test_a_link_in_the_place_of_what_a_save_writes_is_replaced(tmp_path, name, target):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / target)
    save(folder, 1)
    assert listing(folder) == ["latest", "step-1"]
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "folder" / "file").read_text() == "mine"
    assert not (tmp_path / "none").exists()


def test_what_is_not_ours_stays(tmp_path):
    for name in ("step-7", "notes", "step-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").write_text("../../etc\nstep-99\n")
    for step in range(10, 15):
        save(tmp_path, step, keep=2)
    assert latest(tmp_path) == (14, 14)
    assert listing(tmp_path) == ["latest", "notes", "step-13", "step-14", "step-7", "step-x"]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_step(path):
    path.write_text(path.read_text().replace('"step": 30', '"step": 31'))


def newer_version(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))


DAMAGES = {
    "cut": (truncate, "device-0.safetensors", "has [0-9,]+ bytes of [0-9,]+"),
    "emptied": (
        lambda path: path.write_bytes(b""),
        "device-0.safetensors",
        "has 0 bytes of [0-9,]+",
    ),
    "gone": (Path.unlink, "device-0.safetensors", "device-0.safetensors is missing"),
    "one bit": (flip, "device-0.safetensors", "holds other bytes than were written"),
    "a bit of another": (flip, "device-1.safetensors", "device-1.safetensors holds other bytes"),
    "another gone": (Path.unlink, "device-1.safetensors", "device-1.safetensors is missing"),
    "no manifest": (Path.unlink, "manifest.json", "it has no manifest.json"),
    "half a manifest": (truncate, "manifest.json", "manifest.json cannot be read"),
    "no text": (lambda p: p.write_bytes(b"\xff\xfe"), "manifest.json", "cannot be read"),
    "a list": (lambda p: p.write_text("[]"), "manifest.json", "manifest.json cannot be read"),
    "deep": (lambda p: p.write_text("[" * 10**5), "manifest.json", "cannot be read"),
    "another step": (other_step, "manifest.json", "manifest.json is not as it was written"),
    "version": (newer_version, "manifest.json", "of version 3, which this meshdsl does not read"),
    "all gone": (lambda p: shutil.rmtree(p.parent), "x", ""),
    "renamed": (lambda p: p.parent.rename(p.parent.with_name("step-31")), "x", "of step 30"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_newest_is_skipped_with_the_reason(tmp_path, case):
    damage, name, reason = DAMAGES[case]
    for step in (10, 20, 30):
        save(tmp_path, step)
    damage(tmp_path / "step-30" / name)
    assert latest(tmp_path) == (20, 20)
    if reason and case != "renamed":
        (told,) = whole_one(tmp_path).warnings
        assert (told.code, told.severity) == ("MD0542", "warning")
        assert told.message.startswith("the checkpoint `step-30` is damaged: ")
        assert told.help == "`step-20` is used, the newest whole one"
        assert re.search(reason, told.message)
    save(tmp_path, 30, 31)
    assert latest(tmp_path) == (30, 31)
    assert whole_one(tmp_path).skipped == ()


def test_one_of_an_older_format_is_refused_with_the_way_out(tmp_path):
    save(tmp_path, 10)
    old = tmp_path / "step-10"
    manifest = json.loads((old / "manifest.json").read_text()) | {"version": 1}
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        DiagnosticError, match="the checkpoint `step-10` has the files of torch"
    ) as e:
        Checkpoints(str(tmp_path)).latest()
    (told,) = e.value.diagnostics
    assert told.code == "MD0544"
    assert "--params" in (told.help or "")
    save(tmp_path, 20)
    assert latest(tmp_path) == (20, 20)


def test_two_damaged_ones_are_both_told(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip(tmp_path / "step-30" / "device-0.safetensors")
    truncate(tmp_path / "step-20" / "device-0.safetensors")
    assert latest(tmp_path) == (10, 10)
    skipped = whole_one(tmp_path).skipped
    assert [text.split("`")[1] for text in skipped] == ["step-30", "step-20"]


def test_where_all_are_damaged_nothing_is_started_anew_unasked(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
        truncate(tmp_path / f"step-{step}" / "device-0.safetensors")
    with pytest.raises(DiagnosticError) as caught:
        Checkpoints(str(tmp_path)).latest()
    (told,) = caught.value.diagnostics
    assert told.code == "MD0543"
    assert told.help
    assert "`step-20`" in told.message
    assert "`step-10`" in told.message


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiagnosticError, match="MD0501"):
        Checkpoints(str(tmp_path / "file")).latest()
    with pytest.raises(DiagnosticError, match=r"MD0540.*File exists"):
        save(tmp_path / "file", 1)
