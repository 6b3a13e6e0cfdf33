"""Flat files of tokens: which are read and refused, window by window, never as a whole."""

from __future__ import annotations

import io
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.data import token_files as flat
from meshdsl.backends.data.token_files import FlatTokens, TokenFile
from meshdsl.backends.runtime.user_files import Refused
from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.backends.train.data import fingerprints, open_data, open_everything
from meshdsl.backends.train.job import ORDERS, DataFiles
from meshdsl.diagnostics import Diagnostic, DiagnosticError

BATCH, SEQ = 4, 6
TOKENS = (np.arange(1000) * 7919 + np.arange(1000) ** 2) % 997


def llm_c(tokens: Any, magic: int, version: int, dtype: str, more: int = 0) -> bytes:
    """A file of llm.c: 256 int32 numbers in front, of which the third counts the tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) + more
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()


def npy(tokens: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(tokens, "<i4"))
    return file.getvalue()


def megatron(lengths: list[int], code: int = 8) -> bytes:
    """The index of a file of Megatron: version 1, the dtype, and the sequences."""
    counts = struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    starts = np.cumsum([0, *lengths[:-1]]) * 2
    parts = [np.array(lengths, "<i4"), starts.astype("<i8"), np.arange(len(lengths) + 1)]
    return b"MMIDIDX\0\0" + counts + b"".join(part.tobytes() for part in parts)


def written(folder: Path, kind: str) -> DataFiles:
    """`TOKENS` in a file of a kind, or in a folder of shards."""
    if kind in flat.DTYPES:
        (TOKENS % 120 if kind == "int8" else TOKENS).astype(kind).tofile(folder / "t.bin")
        return DataFiles(str(folder / "t.bin"), tokens=kind)
    if kind == "npy":
        np.save(folder / "t.npy", TOKENS)
        return DataFiles(str(folder / "t.npy"))
    if kind == "gpt-2":
        (folder / "t.bin").write_bytes(llm_c(TOKENS, 20240520, 1, "<u2"))
        return DataFiles(str(folder / "t.bin"))
    if kind == "llama-3":
        (folder / "t.bin").write_bytes(llm_c(TOKENS, 20240801, 7, "<u4"))
        return DataFiles(str(folder / "t.bin"), tokens="uint32")
    if kind == "megatron":
        lengths = [100, 0, 650, 250]
        (folder / "t.idx").write_bytes(megatron(lengths))
        TOKENS.astype("<u2").tofile(folder / "t.bin")
        return DataFiles(str(folder / "t.bin"))
    shards = folder / "shards"
    shards.mkdir()
    for number, part in enumerate(np.split(TOKENS, [3, 400, 401, 990])):
        part.astype("<u2").tofile(shards / f"t_{number}.bin")
    (shards / "meta.pkl").write_bytes(b"of no concern")
    return DataFiles(str(shards), tokens="uint16")


KINDS = [*(kind for kind in flat.DTYPES if kind not in ("int8", "uint8")), "npy", "gpt-2"]
KINDS += ["llama-3", "megatron", "shards"]


def inputs(bound: int = 1000, rows: int = BATCH) -> dict[str, Spec]:
    spec = Spec("i32", {"batch": rows, "seq": SEQ}, {"batch": ("d",)}, ("below", bound))
    return {"tokens": spec, "targets": spec}


def windows(files: DataFiles, step: int, devices: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and targets of a step, put together from what each device reads."""
    batches = open_data(files, inputs(), 5).training
    found = []
    for name, spec in inputs().items():
        parts = [local_part(spec, {"d": devices}, rank) for rank in range(devices)]
        found.append(np.concatenate([batches.block(name, spec, step, part) for part in parts]))
    return found[0], found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_those_of_the_flat_array(kind: str, tmp_path: Path) -> None:
    files = written(tmp_path, kind)
    every = np.lib.stride_tricks.sliding_window_view(TOKENS, SEQ + 1)
    place = {window.tobytes(): start for start, window in enumerate(every)}

    def starts(order: str, step: int) -> list[int]:
        from dataclasses import replace

        tokens, targets = windows(replace(files, order=order), step)
        both = np.concatenate([tokens, targets[:, -1:]], 1).astype(TOKENS.dtype)
        np.testing.assert_array_equal(both[:, 1:], targets)
        return [place[row.tobytes()] for row in both]

    apart = range(0, len(TOKENS) - SEQ, SEQ)
    in_a_pass = len(apart) // BATCH
    taken = [apart[step * BATCH : (step + 1) * BATCH] for step in range(in_a_pass)]
    for step in (0, 1, in_a_pass - 1, in_a_pass):
        assert starts("sequential", step) == list(taken[step % in_a_pass])
    one_pass = [s for step in range(in_a_pass) for s in starts("shuffled", step)]
    assert len(set(one_pass)) == len(one_pass) == in_a_pass * BATCH
    assert set(one_pass) <= set(apart)
    assert one_pass[:BATCH] != starts("shuffled", in_a_pass)
    drawn = {s for step in range(50) for s in starts("random", step)}
    assert len(drawn) > 150
    assert len({s % SEQ for s in drawn}) == SEQ  # they begin anywhere


@pytest.mark.parametrize("order", ORDERS)
def test_only_the_windows_of_a_device_are_read(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 36)  # of which the disk has nothing
    files = DataFiles(str(path), tokens="uint16", order="random" if order == "shuffled" else order)
    read = list[int]()
    actual = os.preadv

    def counted(handle: int, buffers: Any, offset: int) -> int:
        read.append(actual(handle, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    specs = inputs(bound=1 << 16)
    data = open_data(files, specs, 0)
    assert not read
    for step in (0, 10**6):
        data.training.block("tokens", specs["tokens"], step, (slice(0, 2), slice(0, SEQ)))
    assert read == [2 * SEQ] * 4  # two steps of two rows, two bytes a token
    assert fingerprints(files)[path.name]


REFUSED: dict[str, tuple[str, bytes, str | None, str, str]] = {
    "nothing states the dtype": ("t.bin", b"1234", None, "MD0581", "a dtype that nothing states"),
    "half a token": (
        "t.bin",
        b"12345",
        "uint16",
        "MD0580",
        "5 bytes of tokens, and uint16 takes 2",
    ),
    "half a token of four": ("t.x", b"123456", "uint32", "MD0580", "6 bytes of tokens"),
    "an early end": ("t.bin", llm_c([1, 2], 20240520, 1, "<u2", 1), None, "MD0580", "says 3"),
    "another dtype than the header": (
        *("t.bin", llm_c([1, 2], 20240520, 1, "<u2"), "uint32", "MD0580"),
        "says uint16",
    ),
    "bytes of an array": ("t.npy", npy([1, 2]), "bytes", "MD0580", "the header of"),
    "tokens of arrays by name": ("t.npz", b"PK", "chars", "MD0580", "arrays by the names"),
    "no token": ("t.bin", b"", "uint16", "MD0511", "no tokens to train on, and a window takes 7"),
    "texts without a tokenizer": ("t.jsonl", b"{}", None, "MD0582", "nothing says what their"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, tmp_path: Path) -> None:
    name, content, tokens, code, words = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    assert words in refusal(DataFiles(str(tmp_path / name), tokens=tokens), code)


def refusal(files: DataFiles, code: str, bound: int = 1000) -> str:
    return refused(files, code, bound).message


def refused(files: DataFiles, code: str, bound: int = 1000) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        open_data(files, inputs(bound), 0)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.help
    return diagnostic


def test_arrays_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "t.npy")
    odd = {"float": TOKENS * 0.5, "two dims": TOKENS.reshape(10, 100), "big": TOKENS.astype(">i4")}
    for array in odd.values():
        np.save(path, array)
        refusal(DataFiles(path), "MD0580")
    np.save(path, TOKENS)
    cut = Path(path).read_bytes()[:-3]
    Path(path).write_bytes(cut)
    assert "takes 8 for each" in refusal(DataFiles(path), "MD0580")
    Path(path).write_bytes(cut[:-5])
    assert "has 999 tokens, and its header says 1000" in refusal(DataFiles(path), "MD0580")


def test_an_index_of_megatron_agrees_with_its_tokens(tmp_path: Path) -> None:
    files = written(tmp_path, "megatron")
    wrong = [(megatron([100, 650, 249]), "has 1000 tokens, and its header says 999")]
    wrong += [
        (megatron([1000])[:36], "says 0"),
        (megatron([1000], 7), "says nothing of its tokens"),
    ]
    for content, words in wrong:
        (tmp_path / "t.idx").write_bytes(content)
        assert words in refusal(files, "MD0580")


def test_the_place_of_a_token_beyond_the_vocabulary_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, "shards")
    found = refusal(files, "MD0513", bound=996)
    at = int(np.argmax(TOKENS >= 996))
    shard = np.searchsorted([3, 400, 401, 990], at, "right")
    index = at - [0, 3, 400, 401, 990][shard]
    assert f"t_{shard}.bin, token {index} is 996, and the program has room for 996 to" in found
    negative = TOKENS.astype("<i4")
    negative[5] = -100
    negative.tofile(tmp_path / "n.bin")
    signed = DataFiles(str(tmp_path / "n.bin"), tokens="int32", order="sequential")
    assert "n.bin, token 5 is -100" in refusal(signed, "MD0513")
    monkeypatch.setattr(flat, "SCANNED", 0)  # of a large file it is told where it is read
    data, spec = open_data(signed, inputs(), 0).training, inputs()["tokens"]
    assert data.may_refuse
    data.block("tokens", spec, 0, (slice(1, 4), slice(0, SEQ)))
    with pytest.raises(DiagnosticError, match=r"n\.bin, token 5 is -100"):
        data.block("tokens", spec, 0, (slice(0, 1), slice(0, SEQ)))


def folder(tmp_path: Path, *names: str) -> DataFiles:
    for number, name in enumerate(names):
        np.full(100, number, "<u2").tofile(tmp_path / name)
    return DataFiles(str(tmp_path), tokens="uint16", fraction=0.1)


def numbers(files: DataFiles) -> tuple[set[int], set[int]]:
    """Which files are trained on, and held out, by the numbers in them."""
    data = open_data(files, inputs(rows=1), 0)
    spec, part = inputs(rows=1)["tokens"], (slice(0, 1), slice(0, SEQ))
    assert data.held_out is not None
    drawn = {n for s in range(99) for n in data.training.block("tokens", spec, s, part).flat}
    passes = data.held_out.order.passes
    held = {n for s in range(passes) for n in data.held_out.block("tokens", spec, s, part).flat}
    return {int(n) for n in drawn}, {int(n) for n in held}


def test_a_folder_has_files_for_training_and_validation(tmp_path: Path) -> None:
    pair = folder(tmp_path, "train.bin", "val.bin", "x.txt")
    assert numbers(pair) == ({0}, {1})
    assert open_everything(pair, inputs(), False).count == 99 // SEQ
    folder(tmp_path, "train.bin", "val.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin")
    assert numbers(pair) == ({0, 2}, {1, 3})
    folder(tmp_path, *["b.bin"])
    assert "b.bin is neither" in refusal(pair, "MD0580")
    (tmp_path / "b.bin").rename(tmp_path / "train_val.bin")
    assert "train_val.bin is both" in refusal(pair, "MD0580")
    (tmp_path / "train_val.bin").rename(tmp_path / "a.npy")
    assert "several kinds: .bin and .npy" in refusal(pair, "MD0580")


def test_the_file_that_has_too_little_is_named_with_a_way_that_helps(tmp_path: Path) -> None:
    files = folder(tmp_path, "train.bin", "val.bin")
    for size, help in ((0, ""), (20, "write `--set batch=3`; or ")):
        np.zeros(size, "<u2").tofile(tmp_path / "val.bin")
        found = refused(files, "MD0511")
        assert found.message.startswith(f"{tmp_path / 'val.bin'} has ")
        assert found.help == f"{help}give more samples there"
    assert open_data(files, inputs(rows=3), 0).held_out is not None  # that way does help
    np.zeros(0, "<u2").tofile(tmp_path / "val.bin")
    with pytest.raises(DiagnosticError, match=r"val\.bin has no tokens, and a window takes 7"):
        open_everything(files, inputs(), False)
    np.zeros(3, "<u2").tofile(tmp_path / "train.bin")
    assert refusal(files, "MD0511").startswith(f"{tmp_path / 'train.bin'} has 3 tokens to")
    np.zeros(100, "<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "val.bin").unlink()
    assert "hold out more of it with `--eval-f" in str(refused(files, "MD0511").help)


def test_a_dtype_is_doubted_only_where_an_option_states_it(tmp_path: Path) -> None:
    for kind in ("uint16", "npy", "gpt-2", "megatron"):
        (tmp_path / kind).mkdir()
        found = refused(written(tmp_path / kind, kind), "MD0513", bound=900)
        assert ("`--tokens` states it" in str(found.help)) == (kind == "uint16")


@pytest.mark.parametrize("named", ["train.bin", "val.bin"])
def test_a_file_beside_those_of_one_use_is_of_none(named: str, tmp_path: Path) -> None:
    """Else what is held out by its name would be trained on."""
    files = folder(tmp_path, named, "b.bin")
    assert "b.bin is neither" in refusal(files, "MD0580")
    with pytest.raises(DiagnosticError, match=r"b\.bin is neither"):
        open_everything(files, inputs(), False)


def test_what_is_no_data_of_a_folder_is_not_read_and_what_is_gone_is_missed(
    tmp_path: Path,
) -> None:
    files = folder(tmp_path, "val.bin")
    assert "has files for validation alone: val.bin" in refusal(files, "MD0580")
    folder(tmp_path, "train.bin", "._train.bin")
    assert numbers(files) == ({0}, {0})
    (tmp_path / "train_2.bin").symlink_to(tmp_path / "gone")
    assert "train_2.bin" in refusal(files, "MD0505")


def test_a_folder_without_such_names_is_all_of_it_cut(tmp_path: Path) -> None:
    files = folder(tmp_path, "a.bin", "b.bin")
    assert numbers(files) == ({0, 1}, {1})


def test_many_shards_are_not_all_open_and_a_changed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "OPEN", 2)
    paths = [str(tmp_path / f"{n}.bin") for n in range(5)]
    for number, path in enumerate(paths):
        np.full(10, number, "<u2").tofile(path)
    tokens = FlatTokens([TokenFile(path, "uint16", 10) for path in paths])
    np.testing.assert_array_equal(tokens[5:45], np.repeat(np.arange(5), 10)[5:45])
    assert len(tokens._open) == 2
    later = tokens.part(8, 22)
    assert [*later[1:4]] == [0, 1, 1]
    assert later.place(13) == (tokens.files[2], 1)
    np.zeros(10, "<u2").tofile(tmp_path / "new")
    os.replace(tmp_path / "new", paths[0])
    with pytest.raises(Refused, match=r"0.bin has changed since the run began"):
        print(tokens[40:50], tokens[0:10])


def test_a_fingerprint_is_of_every_shard(tmp_path: Path) -> None:
    files = written(tmp_path, "shards")

    def differing() -> Iterator[list[str]]:
        before = fingerprints(files)
        for path in (Path(files.path, name) for name in before):
            content = path.read_bytes()
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            now = fingerprints(files)
            yield [name for name in now if now[name] != before[name]]
            path.write_bytes(content)

    changed = list(itertools.chain.from_iterable(differing()))
    assert changed == list(fingerprints(files))
    assert len(changed) == 5
