"""Parameters as one file: what is written is what `--params` and other tools read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from meshdsl.backends.runtime.array_files import SAFETENSORS_DTYPES, check_arrays, read_arrays
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train import exported_params
from meshdsl.backends.train.exported_params import as_params, export_params
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import DTYPES
from tests.backends.test_checkpoint import MESHES, cut, placed, same, save, whole

MESH = MESHES["2x2"]


@dataclass
class Case:
    tensors: dict[str, torch.Tensor]
    specs: dict[str, Spec]


@pytest.fixture
def case():
    specs = placed(MESH, 14, 3) | {
        "odd": Spec("bool", {"a": 3}, {}),
        "h": Spec("f16", {"a": 5}, {}),
    }
    return Case(whole(specs), specs)


@pytest.fixture
def export(case):
    """Writes the tensors of the case."""

    def export(path, specs=None):
        specs = case.specs if specs is None else specs
        export_params(cut(case.tensors, case.specs, MESH), str(path), specs, MESH)

    return export


def test_safetensors_are_read_by_the_library_and_by_us(tmp_path, case, export):
    path = tmp_path / "p.safetensors"
    export(path)
    theirs = safetensors.torch.load_file(path)
    assert theirs.keys() == case.tensors.keys()
    assert all(same(theirs[name], tensor) for name, tensor in case.tensors.items())
    ours = read_arrays(str(path))
    assert check_arrays(ours, case.specs, "parameters") == []
    for name, spec in case.specs.items():
        assert ours[name].dtype == spec.dtype
        tensor = case.tensors[name]
        expected = (tensor.float() if spec.dtype == "bf16" else tensor).numpy()
        np.testing.assert_array_equal(ours[name][...], expected)


def test_a_checkpoint_has_the_same_bytes(tmp_path, case, export):
    """Whatever mesh its tensors were saved from."""
    save(tmp_path / "run", 1, case.tensors, case.specs, MESH)
    export(tmp_path / "p.safetensors")
    with as_params(str(tmp_path / "run"), [*case.specs, "other"]) as path:
        assert Path(str(path)).read_bytes() == (tmp_path / "p.safetensors").read_bytes()


def test_npz_holds_the_same_numbers(tmp_path, case, export):
    path = tmp_path / "p.npz"
    export(path)
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == set(case.tensors)
        for name, tensor in case.tensors.items():
            expected = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            np.testing.assert_array_equal(archive[name], expected)


def test_some_can_be_chosen(tmp_path, case, export):
    chosen = dict(list(case.specs.items())[:3])
    export(tmp_path / "p.safetensors", chosen)
    assert safetensors.torch.load_file(tmp_path / "p.safetensors").keys() == chosen.keys()


def test_the_library_s_files_come_back_the_same(tmp_path, case):
    safetensors.torch.save_file(case.tensors, tmp_path / "theirs.safetensors")
    export_params(
        cut(case.tensors, case.specs, MESH), str(tmp_path / "o.safetensors"), case.specs, MESH
    )
    ours, theirs = (read_arrays(str(tmp_path / f"{n}.safetensors")) for n in ("o", "theirs"))
    for name in case.specs:
        np.testing.assert_array_equal(ours[name][...], theirs[name][...])


def test_every_dtype_has_a_name():
    assert {dtype.upper() for dtype in DTYPES} <= set(SAFETENSORS_DTYPES)


def test_the_same_tensors_give_the_same_bytes(tmp_path, case, export):
    for name in ("a", "b"):
        export(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def code_of(call):
    with pytest.raises(DiagnosticError) as caught:
        call()
    (told,) = caught.value.diagnostics
    assert told.help
    return told.code


def test_what_cannot_be_written_is_told(tmp_path, case, export, monkeypatch):
    assert code_of(lambda: export(tmp_path / "p.pt")) == "MD0602"
    assert code_of(lambda: export(tmp_path / "none" / "p.safetensors")) == "MD0501"

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(exported_params, "bytes_of", full)
    (tmp_path / "p.safetensors").write_text("before")
    assert code_of(lambda: export(tmp_path / "p.safetensors")) == "MD0501"
    assert (tmp_path / "p.safetensors").read_text() == "before"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_blocks_that_do_not_cover_a_tensor_are_our_mistake(tmp_path, case):
    blocks = cut(case.tensors, case.specs, MESH, [0, 1])
    with pytest.raises(AssertionError, match="the blocks hold"):
        export_params(blocks, str(tmp_path / "p.npz"), case.specs, MESH)
    assert not (tmp_path / "p.npz").exists()
