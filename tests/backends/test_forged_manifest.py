"""A manifest that no save has written is refused with what is wrong with it, even a sealed one."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train import checkpoint as disk
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.diagnostics import DiagnosticError
from tests.poison import poisoned

MESH = {"x": 2, "y": 2}
SPECS = {
    "w": Spec("f32", {"a": 4, "b": 2}, {"a": ("x",)}, blocks={"a": [[1, 0], [3, 2]]}),
    "m": Spec("f32", {"a": 4}, {}, parts=("x",)),
    "n": Spec("i64", {}, {}),
}
META = {"seed": 7, "size": 64, "vocabulary": "ab", "program": "mlp", "plan": "12", "rule": "one"}
FREE = {
    *("seed", "vocabulary", "program", "plan", "rule"),
    *("size: missing", "size: null", "size: large", "meta: table", "split: table", "x: list"),
    *("meta: object", "0: text", "0: path", "0: absolute", "0: control"),
    *("blocks: missing", "blocks: null", "blocks: table"),
}
"""Fields, and values of fields, that a save may write: they say nothing of what lies in files.

Names of dims are compared with those of the program."""
Content = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = {
        r: {
            "w": torch.full((2, 2), float(r // 2)),
            "m": torch.full((4,), float(r)),
            "n": torch.tensor(3),
        }
        for r in range(4)
    }
    Checkpoints(str(tmp_path)).save(5, blocks, SPECS, META, Ranks(MESH))
    return tmp_path


def problem(folder: Path, content: object) -> str:
    """What is told of a forged manifest with the right seal; empty where it is believed."""
    sealed = {"version": disk.VERSION, "blake2b": disk._seal(content), **content}  # type: ignore
    (folder / "step-5" / "manifest.json").write_text(json.dumps(sealed))
    try:
        found = Checkpoints(str(folder)).latest()
    except DiagnosticError as error:
        (told,) = error.diagnostics
        assert told.code == "MD0543"
        return told.message.partition("is damaged: ")[2]
    assert found is not None
    return ""


def test_every_field_is_checked(folder: Path) -> None:
    whole = disk.read_manifest(folder / "step-5")
    assert problem(folder, whole) == ""
    believed, tried = [], 0
    for name, other in poisoned(whole):
        found = problem(folder, other)
        tried += 1
        place, how = name.split(": ")
        last = place.rpartition(".")[2]
        if not found and not {last, f"{last}: {how}"} & FREE:
            believed.append(name)
    assert believed == []
    assert tried >= 200


def changed(**fields: Any) -> Callable[[Content], None]:
    return lambda content: content.update(fields)


def tensor(**fields: Any) -> Callable[[Content], None]:
    return lambda content: content["tensors"]["w"].update(fields)


def file(name: str, **fields: Any) -> Callable[[Content], None]:
    def add(content: Content) -> None:
        known = next(iter(content["files"].values()))
        content["files"][name] = {**known, **fields}

    return add


def without(name: str) -> Callable[[Content], None]:
    return lambda content: content.pop(name)


def renamed(content: Content) -> None:
    content["tensors"]["v"] = content["tensors"].pop("w")


FORGED: dict[str, tuple[Callable[[Content], object], str]] = {
    **{f"no {name}": (without(name), "missing") for name in ("step", "meta", "mesh", "tensors")},
    "no files": (without("files"), "missing"),
    "no tensor": (changed(tensors={}), "other arrays"),
    "no file": (changed(files={}), "larger than it"),
    "more fields": (changed(more=1), "unknown field"),
    "another step": (changed(step=6), "of step 6"),
    "a step before all": (changed(step=-1), "Expected `int` >= 0"),
    "a huge step": (changed(step=10**30), "Expected `int`"),
    "a huge mesh": (changed(mesh=[["x", 10**9]]), "Expected `int` <= "),
    "a huge mesh of many": (changed(mesh=[[f"x{n}", 1024] for n in range(9)]), "devices"),
    "an axis twice": (changed(mesh=[["x", 2], ["x", 2]]), "occurs twice"),
    "an axis of nothing": (changed(mesh=[["x", 0], ["y", 2]]), "Expected `int` >= 1"),
    "a larger mesh": (changed(mesh=[["x", 4], ["y", 2]]), "blocks along a"),
    "axes in another order": (changed(mesh=[["y", 2], ["x", 2]]), "other arrays|is missing"),
    "an axis that is none": (tensor(split={"a": ["z"]}), "axis that the mesh does not have"),
    "split twice": (tensor(split={"a": ["x"], "b": ["x"]}), "over an axis twice"),
    "split and in parts": (tensor(parts=["x"]), "over an axis twice"),
    "split otherwise": (tensor(split={"a": ["y"]}), "other arrays|is missing"),
    "a dim that is none": (tensor(split={"z": ["x"]}), "a dim it does not have"),
    "a dim twice": (tensor(dims=[["a", 4], ["a", 2]]), "occurs twice"),
    "a larger dim": (tensor(dims=[["a", 4], ["b", 3]]), "other arrays"),
    "a huge dim": (tensor(dims=[["a", 4], ["b", 1 << 60]]), "larger than it"),
    "too huge a dim": (tensor(dims=[["a", 4], ["b", 1 << 80]]), "Expected `int`"),
    "less than nothing": (tensor(dims=[["a", 4], ["b", -2]]), "Expected `int` >= 0"),
    "not a number": (tensor(dims=[["a", 4], ["b", math.nan]]), "cannot be read"),
    "another dtype": (tensor(dtype="i32"), "other arrays"),
    "a dtype that is none": (tensor(dtype="../f32"), "w is ../f32"),
    "blocks that overlap": (tensor(blocks={"a": [[0, 1], [1, 2]]}), "overlap"),
    "blocks with a gap": (tensor(blocks={"a": [[0, 1], [3]]}), "leave something out"),
    "more blocks": (tensor(blocks={"a": [[0], [1], [2, 3]]}), "3 blocks along a"),
    "blocks of nothing": (tensor(blocks={"c": [[0, 1], [2, 3]]}), "a dim it does not have"),
    "blocks beside the dim": (tensor(blocks={"a": [[0, 1], [2, 9]]}), "overlap"),
    "another name": (renamed, "other arrays"),
    "an absolute path": (file("/etc/passwd"), "is no file of a checkpoint"),
    "an upward path": (file("../device-0.safetensors"), "is no file of a checkpoint"),
    "a hidden path": (file("device-0.safetensors/../../x"), "is no file of a checkpoint"),
    "a control character": (file("device-0\x1b.safetensors"), "is no file of a checkpoint"),
    "a line end": (file("device-0.safetensors\n"), "is no file of a checkpoint"),
    "a device that is none": (file("device-4.safetensors"), "is no file of a checkpoint"),
    "a file that is missing": (file("device-3.safetensors"), "is missing"),
    "another size": (file("device-0.safetensors", bytes=7), "bytes of 7|larger than it"),
    "a size below nothing": (file("device-0.safetensors", bytes=-1), "Expected `int` >= 0"),
    "a checksum that is none": (file("device-0.safetensors", blake2b="x"), "matching regex"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_refused(case: str, folder: Path) -> None:
    change, reason = FORGED[case]
    content = copy.deepcopy(disk.read_manifest(folder / "step-5"))
    change(content)
    found = problem(folder, content)
    assert any(part in found for part in reason.split("|")), found


def test_a_name_that_occurs_twice_is_refused(folder: Path) -> None:
    path = folder / "step-5" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"step": 5,', '"step": 5, "step": 5,', 1))
    with pytest.raises(DiagnosticError, match=r"MD0543.*\n.*cannot be read"):
        Checkpoints(str(folder)).latest()


@pytest.mark.parametrize("name", ["manifest.json", "device-0.safetensors"])
def test_a_link_is_not_followed(name: str, folder: Path) -> None:
    path = folder / "step-5" / name
    elsewhere = folder.parent / f"{folder.name}-{name}"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(DiagnosticError, match="MD0543"):
        Checkpoints(str(folder)).latest()


def test_what_is_whole_is_read_as_it_was(folder: Path) -> None:
    found = Checkpoints(str(folder)).latest()
    assert found is not None
    assert (found.step, found.meta, found.mesh, found.tensors) == (5, META, MESH, SPECS)
