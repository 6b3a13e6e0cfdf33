"""Data for training: which samples a step takes, and that devices read their own part of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.backends.train.batches import Anywhere, InOrder, Shuffled
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import DiagnosticError

MESHES: dict[str, tuple[dict[str, int], dict[str, tuple[str, ...]]]] = {
    "batch": ({"d": 2}, {"batch": ("d",)}),
    "another dim": ({"d": 2}, {"io": ("d",), "seq": ("d",)}),
    "both": ({"d": 2, "t": 2}, {"batch": ("t",), "io": ("d",), "seq": ("d",)}),
    "batch over two axes": ({"d": 2, "t": 2}, {"batch": ("t", "d")}),
    "nothing": ({"d": 3}, {}),
    "blocks of several sizes": ({"d": 3}, {"batch": ("d",)}),
    "empty blocks": ({"d": 5, "t": 2}, {"batch": ("d",), "io": ("t", "d")}),
}

# --- orders --------------------------------------------------------------------------------------


def test_an_epoch_takes_every_sample_once_in_an_order_of_its_own():
    order = Shuffled(7, 23, 5)
    epochs = [np.concatenate([order.rows(4 * e + s) for s in range(4)]) for e in range(3)]
    for rows in epochs:
        assert len(set(rows.tolist())) == 20
        assert set(rows.tolist()) <= set(range(23))
    assert len({tuple(rows) for rows in epochs}) == 3
    assert len({n for rows in epochs for n in rows}) == 23  # what one leaves out, another takes


@pytest.mark.parametrize("kind", [Shuffled, Anywhere])
def test_an_order_depends_on_seed_and_step_alone(kind):
    forward = [kind(3, 50, 4).rows(step) for step in range(30)]
    order = kind(3, 50, 4)
    for step in reversed(range(30)):
        np.testing.assert_array_equal(order.rows(step), forward[step])
    assert any((kind(4, 50, 4).rows(s) != forward[s]).any() for s in range(30))


def test_orders_are_frozen():
    # Written down once: a change would change the losses of every run that is resumed.
    np.testing.assert_array_equal(Shuffled(0, 10, 5).rows(0), [3, 8, 2, 1, 6])
    np.testing.assert_array_equal(Anywhere(0, 1000, 4).rows(1), [287, 7, 317, 41])


def test_windows_are_drawn_from_everywhere():
    drawn = np.concatenate([Anywhere(1, 10, 8).rows(step) for step in range(500)])
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10
    assert (abs(counts - 400) < 100).all()


def test_held_out_samples_come_in_order():
    order = InOrder(10, 7, 3)
    assert order.passes == 2
    assert [order.rows(s).tolist() for s in range(3)] == [[10, 11, 12], [13, 14, 15], [10, 11, 12]]


# --- arrays --------------------------------------------------------------------------------------


def inputs(split: dict[str, tuple[str, ...]] | None = None) -> dict[str, Spec]:
    split = split or {}

    def spec(dtype: str, dims: dict[str, int]) -> Spec:
        return Spec(dtype, dims, {d: axes for d, axes in split.items() if d in dims})

    return {
        "x": spec("f32", {"batch": 4, "io": 6}),
        "y": spec("i32", {"batch": 4}),
        "turned": spec("f32", {"io": 6, "batch": 4}),
        "scale": spec("f32", {"io": 6}),
        "one": spec("f32", {}),
    }


def arrays(samples: int = 11) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((samples, 6)).astype(np.float32),
        "y": rng.integers(0, 9, samples),
        "turned": rng.standard_normal((6, samples)).astype(np.float32),
        "scale": np.arange(6, dtype=np.float32),
        "one": np.float32(3),
    }


WRITERS = {"npz": np.savez, "compressed": np.savez_compressed}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", MESHES)
def test_the_parts_of_all_devices_make_the_batch(writer, case, tmp_path):
    mesh, split = MESHES[case]
    path, given = str(tmp_path / "d.npz"), arrays()
    WRITERS[writer](path, **given)
    data = open_data(DataFiles(path), inputs(), 5)
    for step in (0, 1, 7):
        rows = data.training.order.rows(step)
        whole = {
            "x": given["x"][rows],
            "y": given["y"][rows],
            "turned": given["turned"][:, rows],
            "scale": given["scale"],
            "one": given["one"],
        }
        for name, spec in inputs(split).items():
            for rank in range(int(np.prod(list(mesh.values())))):
                part = local_part(spec, mesh, rank)
                block = data.training.block(name, spec, step, part)
                np.testing.assert_array_equal(block, whole[name][part])
                assert block.dtype == {"f32": np.float32, "i32": np.int32}[spec.dtype]


def test_only_the_rows_of_a_device_are_read(tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", **arrays())
    data = open_data(DataFiles(str(tmp_path / "d.npz")), inputs(), 5)
    spec = inputs({"batch": ("d",)})["x"]
    found: list[int] = []

    def counted(file: int, rooms: list[memoryview], start: int) -> int:
        found.append(preadv(file, rooms, start))
        return found[-1]

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    block = data.training.block("x", spec, 0, local_part(spec, {"d": 2}, 1))
    assert sum(found) == block.size * arrays()["x"].itemsize


def test_samples_that_are_held_out_are_never_trained_on(tmp_path):
    given = {**arrays(41), "y": np.arange(41)}
    np.savez(tmp_path / "d.npz", **given)
    data = open_data(DataFiles(str(tmp_path / "d.npz"), fraction=0.25), inputs(), 0)
    assert data.held_out is not None
    spec, part = inputs()["y"], (slice(0, 4),)
    trained = {n for s in range(60) for n in data.training.block("y", spec, s, part)}
    steps = range(data.held_out.order.passes)
    held = [n for s in steps for n in data.held_out.block("y", spec, s, part)]
    assert trained == set(range(31))
    assert held == list(range(31, 39))  # two whole batches of the ten


def test_a_file_of_its_own_is_held_out(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays())
    np.savez(tmp_path / "e.npz", **{**arrays(8), "y": np.arange(8)})
    files = DataFiles(str(tmp_path / "d.npz"), held_out=str(tmp_path / "e.npz"))
    data = open_data(files, inputs(), 0)
    assert data.held_out is not None
    block = data.held_out.block("y", inputs()["y"], 1, (slice(0, 4),))
    np.testing.assert_array_equal(block, [4, 5, 6, 7])
    assert data.size == 11


def test_another_dim_of_samples(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((4, 9), np.float32))
    specs = {"x": inputs()["x"]}
    files = DataFiles(str(tmp_path / "d.npz"), batch="io")
    assert open_data(files, specs, 0).training.amount == 6
    with pytest.raises(DiagnosticError, match="no input has this dim"):
        open_data(DataFiles(str(tmp_path / "d.npz"), batch="oi"), specs, 0)


@pytest.mark.parametrize("case", ["batch", "both", "nothing", "empty blocks"])
def test_a_step_of_several_batches_reads_what_a_large_batch_does(case, tmp_path):
    mesh, split = MESHES[case]
    np.savez(tmp_path / "d.npz", **arrays(30))
    several = {
        name: spec._replace(dims={"accumulate": 3, **spec.dims})
        for name, spec in inputs(split).items()
    }
    large = {
        name: spec._replace(dims={d: 12 if d == "batch" else n for d, n in spec.dims.items()})
        for name, spec in inputs().items()
    }
    one = open_data(DataFiles(str(tmp_path / "d.npz")), large, 5)
    data = open_data(DataFiles(str(tmp_path / "d.npz"), accumulate="accumulate"), several, 5)
    assert (data.training.amount, one.training.amount) == (12, 12)
    for step in (0, 1, 5):
        for name, spec in several.items():
            whole = one.training.block(name, large[name], step, _all_of(large[name]))
            if "batch" in large[name].dims:
                batches = np.split(whole, 3, list(large[name].dims).index("batch"))
            else:
                batches = [whole] * 3
            for rank in range(int(np.prod(list(mesh.values())))):
                part = local_part(spec, mesh, rank)
                found = data.training.block(name, spec, step, part)
                np.testing.assert_array_equal(found, np.stack(batches)[part])


def _all_of(spec: Spec) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in spec.dims.values())


def test_arrays_that_nobody_reads_are_worth_a_note(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(), names=np.arange(3))
    (note,) = open_data(DataFiles(str(tmp_path / "d.npz")), inputs(), 0).notes
    assert (note.code, note.severity) == ("MD0517", "note")
    assert "does not read names of" in note.message


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no array": ({"y": None}, "MD0504", "missing"),
    "another dim": ({"x": np.ones((11, 5), np.float32)}, "MD0504", "dim io is 5, not 6"),
    "fewer of one": ({"y": np.ones(9, int)}, "MD0504", "dim batch is 9, not 11"),
    "a dim less": ({"x": np.ones(11, np.float32)}, "MD0504", "has 1 dims, not 2"),
    "a kind": ({"y": np.ones(11)}, "MD0504", "is float, not int"),
    "whole": ({"scale": np.ones(11, np.float32)}, "MD0504", "dim io is 11, not 6"),
    "few": (arrays(3), "MD0511", "holds 3 samples to train on, and a step takes 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_do_not_fit(case, tmp_path):
    changed, code, words = REFUSED[case]
    given = {k: v for k, v in {**arrays(), **changed}.items() if v is not None}
    np.savez(tmp_path / "d.npz", **given)
    with pytest.raises(DiagnosticError) as caught:
        open_data(DataFiles(str(tmp_path / "d.npz")), inputs(), 0)
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in found.message
    assert found.help


# --- texts ---------------------------------------------------------------------------------------

TEXT = "to be, or not to be: that is the question.\n" * 3


def text_inputs(
    bound: int = 40, split: dict[str, tuple[str, ...]] | None = None
) -> dict[str, Spec]:
    spec = Spec("i32", {"batch": 4, "seq": 6}, split or {}, ("below", bound))
    return {"tokens": spec, "targets": spec}


def opened(tmp_path: Path, text: str = TEXT, bound: int = 40, **files: Any) -> Any:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    return open_data(DataFiles(str(tmp_path / "t.txt"), **files), text_inputs(bound), 3)


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("tokens", ["chars", "bytes"])
def test_windows_of_a_text(case, tokens, tmp_path):
    mesh, split = MESHES[case]
    split = {dim: axes for dim, axes in split.items() if dim != "io"}
    data = opened(tmp_path, bound=256, tokens=tokens)
    letters = sorted(set(TEXT)) if tokens == "chars" else [chr(n) for n in range(256)]
    specs = text_inputs(256, split)
    for step in range(20):
        for rank in range(int(np.prod(list(mesh.values())))):
            part = local_part(specs["tokens"], mesh, rank)
            starts = data.training.order.rows(step)[part[0]]
            for name, spec in specs.items():
                block = data.training.block(name, spec, step, part)
                shift = name == "targets"
                windows = [np.array([*TEXT[s + shift :][:6]]) for s in starts]
                texts = ["".join(window[part[1]]) for window in windows]
                assert ["".join(letters[n] for n in row) for row in block] == texts


def test_every_window_of_a_text_can_come_and_no_other(tmp_path):
    data = opened(tmp_path, TEXT[:10])
    starts = {s for step in range(200) for s in data.training.order.rows(step)}
    assert starts == {0, 1, 2, 3}  # six tokens and the one that follows, of ten


def test_the_end_of_a_text_is_held_out(tmp_path):
    text = "a" * 90 + "b" * 60
    data = opened(tmp_path, text, fraction=0.4)
    spec, part = text_inputs()["tokens"], (slice(0, 4), slice(0, 6))
    assert data.vocabulary == "ab"
    assert not any(data.training.block("targets", spec, s, part).any() for s in range(50))
    assert data.held_out.order.passes == 2  # nine windows of six, four at a time
    assert all(data.held_out.block("tokens", spec, s, part).all() for s in range(2))


def test_held_out_windows_lie_end_to_end(tmp_path):
    (tmp_path / "e.txt").write_text(TEXT[:60])
    data = opened(tmp_path, held_out=str(tmp_path / "e.txt"))
    part = (slice(0, 4), slice(0, 6))
    steps = range(data.held_out.order.passes)
    blocks = [data.held_out.block("tokens", text_inputs()["tokens"], s, part) for s in steps]
    letters = sorted(set(TEXT))
    assert "".join(letters[n] for n in np.concatenate(blocks).ravel()) == TEXT[:48]


def test_unicode_characters_are_sorted_by_code(tmp_path):
    data = opened(tmp_path, "größer 漢字 \N{PILE OF POO}\r\n" * 4)
    assert data.vocabulary == "".join(sorted(set("größer 漢字 \N{PILE OF POO}\r\n")))
    known = opened(tmp_path, "größer größer", vocabulary=data.vocabulary)
    assert known.vocabulary == data.vocabulary


def test_one_input_of_tokens_takes_windows_without_what_follows(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT[:9])
    only = {"ids": text_inputs()["tokens"]}
    data = open_data(DataFiles(str(tmp_path / "t.txt")), only, 3)
    assert {s for step in range(99) for s in data.training.order.rows(step)} == {0, 1, 2, 3}


def test_names_of_inputs_can_be_given_in_any_order(tmp_path):
    data = opened(tmp_path, text_inputs=("targets", "tokens"))
    part = (slice(0, 4), slice(0, 6))
    first, second = (data.training.block(n, text_inputs()[n], 0, part) for n in text_inputs())
    np.testing.assert_array_equal(first[:, :-1], second[:, 1:])


TEXTS_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "vocabulary": ({"bound": 15}, "MD0513", "17 different characters, and the program has room"),
    "bytes": (
        {"bound": 100, "tokens": "bytes"},
        "MD0513",
        "t.txt, token 0 is 116, and the program has room for 100 tokens",
    ),
    "short": ({"text": "to be"}, "MD0511", "has 5 tokens to train on, and a window takes 7"),
    "empty": ({"text": "", "tokens": "bytes"}, "MD0511", "has no tokens to train on"),
    "nothing held out": (
        {"fraction": 0.1},
        "MD0511",
        "has 1 window of 6 tokens, and a step takes 4",
    ),
    "unknown": ({"vocabulary": "tobe, "}, "MD0513", "'r', character 8, is not among those"),
    "no such input": ({"text_inputs": ("token",)}, "MD0602", "the program has no input `token`"),
    "one input left": ({"text_inputs": ("tokens",)}, "MD0512", "the program takes tokens[batch"),
}


@pytest.mark.parametrize("case", TEXTS_REFUSED)
def test_texts_that_do_not_fit(case, tmp_path):
    changed, code, words = TEXTS_REFUSED[case]
    with pytest.raises(DiagnosticError) as caught:
        opened(tmp_path, **changed)
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in found.message
    assert found.help


def test_a_text_that_is_not_utf8_is_bytes(tmp_path):
    path = str(tmp_path / "t.txt")
    Path(path).write_bytes(b"caf\xe9 " * 20)
    with pytest.raises(DiagnosticError, match="byte 0xe9 at offset 3"):
        open_data(DataFiles(path), text_inputs(256), 0)
    assert open_data(DataFiles(path, tokens="bytes"), text_inputs(256), 0).size == 100


def test_a_program_without_tokens_takes_no_text(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises(DiagnosticError, match="is a text, and the program takes x") as caught:
        open_data(DataFiles(str(tmp_path / "t.txt")), inputs(), 0)
    assert caught.value.diagnostics[0].code == "MD0512"


@pytest.mark.parametrize("name", ["d.npy", "d.pkl", "d.txt", "missing.txt", "missing.npz"])
def test_files_that_are_no_data(name, tmp_path):
    contents = {"d.npy": b"\x93NUMPY", "d.pkl": b"\x80\x04K\x01.", "d.txt": b"PK\x03\x04"}
    if name in contents:
        (tmp_path / name).write_bytes(contents[name])
    with pytest.raises(DiagnosticError) as caught:
        open_data(DataFiles(str(tmp_path / name)), text_inputs(), 0)
    assert caught.value.diagnostics[0].code == "MD0505"
