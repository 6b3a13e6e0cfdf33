"""Checkpoints: what was saved under one placement comes back under any other, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from meshdsl.backends.engines.in_process import torch_dtype
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.backends.train import checkpoint as disk
from meshdsl.backends.train.checkpoint import MOST_ROWS, Checkpoints
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import DTYPES

ROOT = Path(__file__).resolve().parent.parent.parent
MESHES = {
    "1": {"x": 1},
    "4": {"x": 4},
    "2x2": {"x": 2, "y": 2},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
    "none": {},
}
DIMS = {"a": 8, "b": 16}
META = {"program": "mlp", "seed": 7, "position": 640}


LYING: tuple[dict[str, list[list[int]]], ...] = (
    {},
    {"a": [[4, 5, 0, 1, 6, 7, 2, 3]]},
    {"a": [[5, 0, 1], [2, 3, 4, 6, 7]]},
    {"b": [[*range(8, 16), *range(8)]]},
    {"a": [[0, 4, 1, 5, 2, 6, 3, 7]]},
    {"a": [[*range(8)], []]},
    {"b": [[], [*range(16)]]},
)
"""What lies in blocks, as stages have them; taken in turn."""


def splits(mesh: dict[str, int]) -> Iterator[dict[str, tuple[str, ...]]]:
    """Every way to split two dims over axes of a mesh: any axes, any order, either dim."""
    for count in range(len(mesh) + 1):
        for axes in itertools.permutations(mesh, count):
            for cut in range(count + 1):
                chosen = {"a": axes[:cut], "b": axes[cut:]}
                yield {dim: names for dim, names in chosen.items() if names}


def lying(
    blocks: dict[str, list[list[int]]],
    split: dict[str, tuple[str, ...]],
    mesh: dict[str, int],
) -> dict[str, list[list[int]]] | None:
    """The blocks; their order alone where a dim is not split into as many first."""
    found = {}
    for dim, each in blocks.items():
        fits = [mesh[axis] for axis in split.get(dim, ())][:1] == [len(each)]
        found[dim] = each if fits else [[*itertools.chain(*each)]]
    return found or None


def placed(
    mesh: dict[str, int], count: int, stride: int, dims: dict[str, int] = DIMS
) -> dict[str, Spec]:
    """Tensors of all dtypes; if `count` allows, all placements occur, in an order of their own."""
    every, dtypes = list(splits(mesh)), list(DTYPES)
    return {
        f"layer.{i}/w": Spec(
            dtypes[i % len(dtypes)],
            dims,
            every[i * stride % len(every)],
            blocks=lying(LYING[(i + stride) % len(LYING)], every[i * stride % len(every)], mesh)
            if dims == DIMS
            else None,
        )
        for i in range(count)
    } | {f"scalar.{dtype}": Spec(dtype, {}, {}) for dtype in DTYPES}


def whole(specs: dict[str, Spec], seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of any bits: NaNs, infinities and signed zeros among them."""
    source, found = torch.Generator().manual_seed(seed), {}
    for name, spec in specs.items():
        count = math.prod(spec.dims.values()) * DTYPES[spec.dtype].bytes
        bits = torch.randint(2 if spec.dtype == "bool" else 256, (count,), generator=source)
        flat = bits.to(torch.uint8).view(torch_dtype(spec.dtype))
        found[name] = flat.reshape(list(spec.dims.values()))
    return found


def cut(tensors, specs, mesh, ranks=None):
    """The local blocks of each rank."""
    ranks = range(math.prod(mesh.values())) if ranks is None else ranks
    return {r: {n: t[local_part(specs[n], mesh, r)] for n, t in tensors.items()} for r in ranks}


def same(a, b):
    """Whether tensors have the same dtype, shape and bits."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def save(folder, step, tensors, specs, mesh, meta=META, keep=3):
    """Save by one process with the blocks of all devices."""
    blocks = cut(tensors, specs, mesh)
    Checkpoints(str(folder), keep).save(step, blocks, specs, meta, Ranks(mesh))


def loaded(folder, found, specs, mesh, ranks):
    """The blocks of each of `ranks`, which read for themselves."""
    store = Checkpoints(str(folder))
    return {rank: dict(store.load(found, specs, mesh, rank)) for rank in ranks}


def found_in(folder):
    found = Checkpoints(str(folder)).latest()
    assert found is not None
    return found


@pytest.fixture
def small(tmp_path):
    """A checkpoint of two tensors, with what was saved."""
    specs = {"w": Spec("f32", {"a": 4, "b": 2}, {"a": ("x",)}), "n": Spec("i64", {}, {})}
    tensors = whole(specs)
    save(tmp_path, 5, tensors, specs, {"x": 2})
    return tmp_path, tensors, specs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What is saved of so many tensors under placements on one mesh: once for all that read it."""

    @functools.cache
    def made(mesh, count, a, b):
        specs = placed(MESHES[mesh], count, 1, {"a": a, "b": b})
        tensors, folder = whole(specs), tmp_path_factory.mktemp("saved")
        save(folder, 20, tensors, specs, MESHES[mesh])
        return folder, tensors

    return made


@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_any_placement_reloads_under_any_other(saved, before, after):
    reloaded(saved, before, after, DIMS)


def test_parts_of_a_sum_go_on_where_they_were_and_elsewhere_as_their_sum(tmp_path):
    before, after = {"x": 2, "y": 2}, {"x": 4}
    specs = {"e": Spec("f32", {"a": 4, "b": 3}, {"a": ("y",)}, parts=("x",))}
    parts = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    blocks = {r: {"e": parts[r // 2][2 * (r % 2) : 2 * (r % 2) + 2]} for r in range(4)}
    Checkpoints(str(tmp_path)).save(1, blocks, specs, META, Ranks(before))
    found = found_in(tmp_path)
    again = loaded(tmp_path, found, specs, before, range(4))
    assert all(same(again[r]["e"], blocks[r]["e"]) for r in range(4))
    for other in (Spec("f32", specs["e"].dims, {}, parts=("x",)), Spec("f32", specs["e"].dims, {})):
        moved = loaded(tmp_path, found, {"e": other}, after, range(4))
        held = [moved[r]["e"] for r in range(4)]
        expected = [sum(parts), *[torch.zeros(4, 3) if other.parts else sum(parts)] * 3]
        assert all(map(same, held, expected))


@pytest.mark.parametrize("dims", [{"a": 5, "b": 7}, {"a": 3, "b": 1}], ids=str)
@pytest.mark.parametrize(("before", "after"), [("4", "2x2"), ("2x2", "2x2x2"), ("2x2x2", "4")])
def test_blocks_of_several_sizes_reload_under_any_other(saved, before, after, dims):
    reloaded(saved, before, after, dims)


def reloaded(saved, before, after, dims):
    """What is saved under all placements on one mesh comes back under those on another."""
    old, new = MESHES[before], MESHES[after]
    count = max(len(list(splits(old))), len(list(splits(new)))) + 3
    wanted = placed(new, count, 5, dims)
    folder, tensors = saved(before, count, *dims.values())
    found = found_in(folder)
    assert (found.step, found.meta, found.skipped) == (20, META, ())
    ranks = range(math.prod(new.values()))
    held = loaded(folder, found, wanted, new, ranks)
    expected = cut(tensors, wanted, new)
    for rank in ranks:
        assert list(held[rank]) == list(wanted)
        for name, block in held[rank].items():
            assert same(block, expected[rank][name]), (rank, name, wanted[name])


def test_the_table_of_placements_has_splits_in_another_order_than_the_mesh():
    every = list(splits(MESHES["2x2x2"]))
    assert len(every) == 49
    assert {"a": ("z", "x"), "b": ("y",)} in every


def test_each_device_gets_memory_of_its_own(small):
    folder, _, specs = small
    held = loaded(folder, found_in(folder), specs, {"x": 2, "y": 2}, [0, 1, 2, 3])
    pointers = {block.data_ptr() for blocks in held.values() for block in blocks.values()}
    assert len(pointers) == 8


def test_some_ranks_can_be_loaded_alone(small):
    folder, tensors, specs = small
    held = loaded(folder, found_in(folder), specs, {"x": 4}, [2])
    assert list(held) == [2]
    assert same(held[2]["w"], tensors["w"][2:3])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it_into_whole_tensors(tmp_path):
    specs = placed(MESHES["2x2"], 12, 1)
    tensors = whole(specs)
    save(tmp_path, 3, tensors, specs, MESHES["2x2"])
    state = {name: torch.zeros_like(t) for name, t in tensors.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "step-3"))
    load(state, storage_reader=reader, no_dist=True)
    assert all(same(state[name], t) for name, t in tensors.items())


def test_the_library_reads_the_blocks_of_a_device(tmp_path):
    mesh = MESHES["2x2"]
    specs = placed(mesh, 12, 1)
    tensors = whole(specs)
    save(tmp_path, 3, tensors, specs, mesh)
    for rank, held in cut(tensors, specs, mesh).items():
        for path in (tmp_path / "step-3").glob(f"device-{rank}*.safetensors"):
            number = int(path.stem.split("-")[2]) if path.stem.count("-") > 1 else 0
            blocks = load_file(path)
            # Another device has the same blocks, or there is nothing in them.
            full = {n for n in specs if held[n].numel()}
            assert (set(blocks) >= full) == (rank == number == 0)
            assert all(block.numel() for block in blocks.values())
            for name, block in blocks.items():
                _, inside = disk.pieces(local_part(specs[name], mesh, rank))[number]
                assert same(block, held[name][inside])


def test_blocks_are_taken_from_their_devices_one_after_the_other(tmp_path, monkeypatch):
    taken: list[weakref.ref[Any]] = []
    real = disk.bytes_of

    def copied(tensor):
        assert all(earlier() is None for earlier in taken)
        array = np.array(real(tensor))
        taken.append(weakref.ref(array))
        return array.data

    monkeypatch.setattr(disk, "bytes_of", copied)
    specs = placed(MESHES["2x2"], 12, 1)
    save(tmp_path, 1, whole(specs), specs, MESHES["2x2"])
    assert len(taken) > len(specs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_bytes_are_those_of_the_elements_whatever_the_strides(size, dtype):
    """A block of one element, or none, counts as contiguous with a stride of 0."""
    flat = torch.arange(1, 4).to(torch_dtype(dtype))
    for tensor in (flat[:1].expand(1, size), flat[0].expand(size), flat.flip(0)[:size, None]):
        assert bytes(disk.bytes_of(tensor)) == bytes(disk.bytes_of(tensor.clone()))
    assert len(disk.bytes_of(flat[0].expand(size))) == size * DTYPES[dtype].bytes


def test_a_block_held_by_many_is_written_once(tmp_path):
    specs = {"w": Spec("f32", {"a": 4096}, {})}
    save(tmp_path, 1, whole(specs), specs, {"x": 4})
    written = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.safetensors"))
    assert 4096 * 4 <= written < 4096 * 4 * 1.2


def test_the_same_state_gives_the_same_bytes(small, tmp_path_factory):
    folder, tensors, specs = small
    other = tmp_path_factory.mktemp("other")
    save(other, 5, tensors, specs, {"x": 2})
    for path in sorted((folder / "step-5").iterdir()):
        assert path.read_bytes() == (other / "step-5" / path.name).read_bytes(), path.name


def test_looking_for_the_latest_needs_no_torch(small):
    folder, _, _ = small
    code = "import sys; from meshdsl.backends.train.checkpoint import Checkpoints as C\n"
    code += f"assert C({str(folder)!r}).latest().step == 5; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_warning_is_left_switched_off(small):
    before = list(warnings.filters)
    folder, tensors, specs = small
    save(folder, 6, tensors, specs, {"x": 2})
    assert warnings.filters == before


OTHERS = {
    "missing": {"v": Spec("f32", {"a": 4}, {})},
    "size": {"w": Spec("f32", {"a": 4, "b": 3}, {})},
    "dtype": {"w": Spec("bf16", {"a": 4, "b": 2}, {})},
    "order": {"w": Spec("f32", {"b": 2, "a": 4}, {})},
    "name": {"w": Spec("f32", {"a": 4, "c": 2}, {})},
    "rank": {"w": Spec("f32", {"a": 4}, {})},
}
ROWS = {
    "missing": "v       f32[a=4]  missing     not saved",
    "size": "w       f32[a=4, b=3]  f32[a=4, b=2]  dim b is 2, not 3",
    "dtype": "w       bf16[a=4, b=2]  f32[a=4, b=2]  is f32, not bf16",
    "order": "w       f32[b=2, a=4]  f32[a=4, b=2]  has dims [a, b]",
    "name": "w       f32[a=4, c=2]  f32[a=4, b=2]  has dims [a, b]",
    "rank": "w       f32[a=4]  f32[a=4, b=2]  has dims [a, b]",
}


def refusal(folder, specs):
    with pytest.raises(DiagnosticError) as caught:
        loaded(folder, found_in(folder), specs, {"x": 1}, [0])
    (told,) = caught.value.diagnostics
    assert told.code == "MD0541"
    assert told.help
    return told


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_another_program_is_refused_with_a_table(small, case):
    folder, _, specs = small
    told = refusal(folder, specs | OTHERS[case])
    first, _, *rows = told.message.splitlines()
    assert first == "the checkpoint `step-5` is of another program, `mlp`: 1 tensor differs"
    assert [row.split() for row in rows] == [ROWS[case].split()]
    assert ("--set" in told.help) == (case == "size")


def test_all_that_differs_stands_in_one_table(small):
    folder, _, _ = small
    told = refusal(folder, {"w": Spec("f32", {"a": 4, "b": 3}, {}), "v": Spec("f32", {}, {})})
    assert told.message.splitlines()[1:] == [
        "  tensor  program        checkpoint",
        "  w       f32[a=4, b=3]  f32[a=4, b=2]  dim b is 2, not 3",
        "  v       f32[]          missing        not saved",
        "  n       -              i64[]          the program has no such tensor",
    ]


def test_other_sizes_are_named_as_they_are_set(small):
    folder, _, specs = small
    told = refusal(folder, specs | {"w": Spec("f32", {"a": 8, "b": 3}, {})})
    (fix,) = told.fixes
    assert sorted(str(edit.value) for edit in fix.options) == ["a=4", "b=2"]
    assert told.help.startswith("write `--set ")


def test_a_long_table_is_cut(small):
    folder, _, specs = small
    many = {f"t{i}": Spec("f32", {}, {}) for i in range(50)}
    lines = refusal(folder, specs | many).message.splitlines()
    assert "50 tensors differ" in lines[0]
    assert (len(lines), lines[-1]) == (MOST_ROWS + 3, "  and 30 more")


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("bomb-went-off"),)


def test_a_file_cannot_run_code(small, monkeypatch):
    folder, _, specs = small
    monkeypatch.chdir(folder)
    checkpoint, file = folder / "step-5", "device-0.safetensors"
    (checkpoint / file).write_bytes(pickle.dumps(Bomb()))
    content = disk.read_manifest(checkpoint)
    content["files"][file] = msgspec.to_builtins(disk.digest(checkpoint / file))
    (checkpoint / disk.MANIFEST).unlink()
    disk.write_manifest(checkpoint, content)
    with pytest.raises(DiagnosticError, match="its header would be longer") as caught:
        loaded(folder, found_in(folder), specs, {"x": 1}, [0])
    assert caught.value.diagnostics[0].code == "MD0543"
    assert not (folder / "bomb-went-off").exists()


def test_a_file_that_changes_after_it_was_found_is_told(small):
    folder, _, specs = small
    found = found_in(folder)
    (folder / "step-5" / "device-0.safetensors").unlink()
    with pytest.raises(
        DiagnosticError, match=r"`step-5` cannot be read: device-0\.\w+: No such"
    ) as caught:
        loaded(folder, found, specs, {"x": 1}, [0])
    assert caught.value.diagnostics[0].code == "MD0501"


def test_blocks_that_are_not_the_program_s_are_our_mistake(small):
    folder, tensors, specs = small
    for name, wrong in {"w": tensors["w"][:, :1], "n": tensors["n"].int()}.items():
        with pytest.raises(AssertionError, match=f"of {name}, not"):
            save(folder, 6, tensors | {name: wrong}, specs, {"x": 2})
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-5"]
