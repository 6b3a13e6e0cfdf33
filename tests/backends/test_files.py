"""Reading, checking and writing arrays: nothing runs code, nothing is guessed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

from meshdsl.backends.engines.reference import block_values
from meshdsl.backends.runtime.array_files import (
    ArraysRefused,
    Refused,
    check_arrays,
    read_arrays,
    write_npz,
)
from meshdsl.backends.runtime.values import Spec

SPECS = {
    "x": Spec("f32", {"a": 2, "b": 3}, {}),
    "ids": Spec("i32", {"a": 2}, {}),
    "mask": Spec("bool", {}, {}),
}
GOOD = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "ids": np.array([1, 2], np.int32),
    "mask": np.array(True),
}


def safetensors(path, header, data=b"", length=None):
    """A .safetensors file of any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def entry(dtype="F32", shape=(2,), ends=(0, 8)):
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(ends)}}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_slices(tmp_path, save):
    path = str(tmp_path / "in.npz")
    save(path, **GOOD, turned=np.asfortranarray(GOOD["x"]), big=GOOD["x"].astype(">f8"))
    found = read_arrays(path)
    assert list(found) == [*GOOD, "turned", "big"]
    for name in ("x", "turned", "big"):
        assert found[name].shape == (2, 3)
        part = found[name][1:, :2]
        np.testing.assert_array_equal(part, GOOD["x"][1:, :2])
        assert part.dtype.isnative
    assert found["mask"][()]
    assert (found["x"].dtype, found["ids"].dtype, found["mask"].dtype) == ("f32", "i32", "bool")


def test_safetensors_as_the_library_writes_them(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {
        "bf16": torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16),
        "f16": torch.tensor([1.0, 2.0], dtype=torch.float16),
        "f64": torch.tensor(3.0, dtype=torch.float64),
        "i64": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    path = str(tmp_path / "p.safetensors")
    save_file(tensors, path, metadata={"made": "by a test"})
    found = read_arrays(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        expected = (tensor.float() if name == "bf16" else tensor).numpy()
        np.testing.assert_array_equal(found[name][()], expected)
        assert found[name].shape == expected.shape
        if name != "empty":
            assert found[name].dtype == name
    np.testing.assert_array_equal(found["bf16"][1:, :1], [[0.25]])


MALFORMED = {
    "shorter than its length": (b"", b"", None, 3, "header would be longer"),
    "header longer than the file": (b"{}", b"", 10**6, None, "header would be longer"),
    "a huge length": (b"{}", b"", 2**64 - 1, None, "header would be longer"),
    "not JSON": (b"{oops", b"", None, None, "header cannot be read"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, None, "header cannot be read"),
    "too deep": (b"[" * 100_000, b"", None, None, "header cannot be read"),
    "a list": (b"[]", b"", None, None, "not a table of arrays"),
    "a name twice": (b'{"w": {}, "w": {}}', b"", None, None, "a name occurs twice"),
    "entry not a table": ({"w": 3}, b"", None, None, "no sound dtype"),
    "negative shape": (entry(shape=(-2,)), bytes(8), None, None, "no sound dtype"),
    "true as a size": (entry(shape=(True, 2)), bytes(8), None, None, "no sound dtype"),
    "offsets of three": (entry(ends=(0, 8, 9)), bytes(8), None, None, "no sound dtype"),
    "unknown dtype": (entry("F8_E4M3"), bytes(8), None, None, "F8_E4M3, which is not supported"),
    "size is not the shape's": (entry(ends=(0, 4)), bytes(8), None, None, "size its shape says"),
    "offsets backwards": (entry(ends=(8, 0)), bytes(8), None, None, "size its shape says"),
    "past the end": (entry(ends=(8, 16)), bytes(8), None, None, "lies outside the file"),
    "overflowing shape": (entry(shape=(2**62, 4)), bytes(8), None, None, "size its shape says"),
    "one over another": (
        entry() | {"v": entry(ends=(4, 12))["w"]}, bytes(12), None, None, "over another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_safetensors_are_refused(tmp_path, case):
    header, data, length, cut, message = MALFORMED[case]
    path = safetensors(tmp_path / "p.safetensors", header, data, length)
    if cut is not None:
        (tmp_path / "p.safetensors").write_bytes(b"abc")
    with pytest.raises(Refused, match=message):
        read_arrays(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


def pickled_npy(path):
    np.save(path, np.array([Bomb()], dtype=object), allow_pickle=True)


def pickled_npz(path):
    np.savez(path, w=np.array([Bomb()], dtype=object))


def bare_pickle(path):
    path.write_bytes(pickle.dumps(Bomb()))


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.npy", pickled_npy), ("a.npz", pickled_npz), ("b.npz", bare_pickle), ("a.pt", bare_pickle)],
)
def test_pickles_are_refused_with_the_reason(tmp_path, monkeypatch, name, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    with pytest.raises(Refused, match="unpickling can run code hidden in a file"):
        read_arrays(str(tmp_path / name))
    assert not (tmp_path / "bomb-went-off").exists()


def test_other_files_are_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 not really")
    (tmp_path / "text.csv").write_text("1,2\n")
    for name, message in [
        ("one.npy", "one array without a name"),
        ("junk.npz", "not a sound .npz"),
        ("text.csv", "neither .npz nor"),
        ("none.npz", "No such file"),
    ]:
        with pytest.raises(Refused, match=message):
            read_arrays(str(tmp_path / name))
    with pytest.raises(Refused, match="cannot read"):
        read_arrays(str(tmp_path))


@pytest.mark.parametrize("change", ["shape", "cut", "dtype"])
def test_damaged_members_of_an_npz_are_refused(tmp_path, change):
    np.save(tmp_path / "w.npy", np.ones((4, 4), np.float32))
    data = (tmp_path / "w.npy").read_bytes()
    data = {
        "shape": data.replace(b"(4, 4)", b"(9, 9)"),
        "cut": data[:-8],
        "dtype": data.replace(b"'<f4'", b"'zzz'"),
    }[change]
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", data)
    with pytest.raises(Refused, match="is damaged"):
        read_arrays(str(tmp_path / "a.npz"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_npz_with_one_member_twice_is_refused(tmp_path, compression):
    """The intended one of the two is unknown; numpy silently takes the last."""
    path = tmp_path / "in.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for value in (1.0, 2.0):
            with archive.open("x.npy", "w") as member:
                np.lib.format.write_array(member, np.full(3, value))
    with pytest.raises(Refused, match=r"in\.npz is damaged: it holds x\.npy twice"):
        read_arrays(str(path))


def test_everything_wrong_is_in_one_table():
    arrays = {
        "x": np.zeros((2, 1)),
        "mask": np.zeros((), np.int64),
        "extra": np.zeros(3, np.complex64),
    }
    with pytest.raises(ArraysRefused) as caught:
        check_arrays(arrays, SPECS, "inputs")
    assert caught.value.problems == [
        "x: dim b is 1, not 3",
        "ids: missing",
        "mask: is int, not bool; convert it first",
        "extra: the program has no such name",
    ]
    assert caught.value.table.splitlines() == [
        "  name   expected       found",
        "  x      f32[a=2, b=3]  f64[2, 1]     dim b is 1, not 3",
        "  ids    i32[a=2]       missing       missing",
        "  mask   bool[]         i64[]         is int, not bool; convert it first",
        "  extra  -              complex64[3]  the program has no such name",
    ]
    assert "the inputs do not fit the program" in str(caught.value)


def test_narrower_floats_are_noted_and_other_kinds_refused():
    assert check_arrays(GOOD, SPECS, "inputs") == []
    wide = GOOD | {"x": GOOD["x"].astype(np.float64), "ids": GOOD["ids"].astype(np.int64)}
    assert check_arrays(wide, SPECS, "inputs") == ["x: rounded from f64 to f32"]
    for name, array in [("x", GOOD["x"].astype(int)), ("ids", np.array([1.0, 2.0]))]:
        with pytest.raises(ArraysRefused, match="convert it first"):
            check_arrays(GOOD | {name: array}, SPECS, "inputs")


def test_a_dtype_of_numpy_is_none_of_the_language():
    given = {"x": np.ones(2, np.longdouble)}  # it is "f16" to numpy, of 16 bytes
    assert block_values("x", Spec("f16", {"a": 2}, {}), given, 0, (slice(2),)).dtype == np.float16


def test_written_files_are_whole_and_always_the_same_bytes(tmp_path):
    arrays = GOOD | {"file": np.ones(2), "mlp.w1": np.zeros((0, 3))}
    for name in ("a.npz", "b.npz"):
        write_npz(str(tmp_path / name), arrays)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "b.npz"]
    with np.load(tmp_path / "a.npz") as archive:
        assert archive.files == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(archive[name], array)
