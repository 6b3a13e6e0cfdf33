"""A text as data for language models: its bytes or characters as tokens, in windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meshdsl.backends.runtime.files import Refused, read_arrays, regular
from meshdsl.backends.runtime.values import NUMPY_DTYPES, Array, Spec
from meshdsl.backends.train.data import Anywhere, Batches, Data, InOrder, Part
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import counted, did_you_mean, fail

MAGIC = (b"PK\x03\x04", b"\x93NUMPY", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""What files of arrays and pickles begin with."""

CODES = 0x110000
"""How many characters Unicode has room for."""

TOKENS = ("chars", "bytes")


def is_text(path: str) -> bool:
    """Whether a file is to be read as text; Refused when it cannot be read at all."""
    if path.endswith((".npz", ".safetensors")):
        return False
    try:
        with open(path, "rb", opener=regular) as file:
            start = file.read(8)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    if start.startswith(MAGIC):
        read_arrays(path)  # says what is wrong with it
    return True


class Windows:
    """Windows of a text: row r of the first input begins at token `rows[r]`.

    The second input, where there is one, is the first one shifted by a token: what comes next.
    """

    def __init__(self, ids: Array, names: tuple[str, ...], batch: str) -> None:
        self.ids, self.names, self.batch = ids, names, batch

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the windows that begin at `rows`."""
        columns = np.arange(part[1].start, part[1].stop) + self.names.index(name)
        found: Array = self.ids[rows[:, None] + columns].astype(NUMPY_DTYPES[spec.dtype])
        return found


def open_text(files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int) -> Data:
    """The data of a text file; a step takes `times` batches. Raises Refused as well."""
    names = text_inputs(files, inputs)
    spec = inputs[names[0]]
    (batch, rows), (_, length) = spec.dims.items()
    bound = min(_bound(inputs[name]) for name in names)
    ids, vocabulary = tokens_of(files.path, files.tokens, files.vocabulary, bound)
    kept = math.floor(len(ids) * files.fraction)
    training, held_out = ids[: len(ids) - kept], ids[len(ids) - kept :]
    if files.held_out is not None:
        held_out = _held_out(files, vocabulary, bound)
    window = length + len(names) - 1
    _long_enough(training, window, files.path)
    order = Anywhere(seed, len(training) - window + 1, rows * times)
    amount, reader = rows * length, Windows(training, names, batch)
    batches = Batches(reader, order, amount * times, "tokens", files.accumulate)
    if not files.fraction and files.held_out is None:
        return Data(batches, None, len(training), (), vocabulary)
    windows = (len(held_out) - len(names) + 1) // length
    _enough_windows(windows, rows, length, files)
    reader = Windows(held_out, names, batch)
    evaluated = Batches(reader, InOrder(0, windows, rows, length), amount, "tokens")
    return Data(batches, evaluated, len(training), (), vocabulary)


def _enough_windows(windows: int, rows: int, length: int, files: DataFiles) -> None:
    """Refuse a text to evaluate on of which no batch can be made."""
    if windows >= rows:
        return
    where = files.held_out or f"the last {files.fraction:g} of {files.path}"
    message = f"{where} has {counted(windows, 'window')} of {length} tokens, and a batch {rows}"
    help = "give a longer text, hold out more of it, or make the batch smaller"
    fail("MD0511", message, help=help)


def text_inputs(files: DataFiles, inputs: Mapping[str, Spec]) -> tuple[str, ...]:
    """The inputs that a text becomes: tokens, and what comes next. Raises DiagnosticError."""
    named = files.text_inputs
    for name in named or ():
        if name not in inputs:
            help = did_you_mean(name, list(inputs)) or f"there are {', '.join(inputs) or 'none'}"
            fail("MD0602", f"`--text-inputs`: the program has no input `{name}`", help=help)
    wanted = named or tuple(n for n, spec in inputs.items() if spec.dtype in ("i32", "i64"))
    shapes = {tuple(inputs[name].dims.items()) for name in wanted}
    fits = len(shapes) == 1 and len(next(iter(shapes))) == 2 and len(wanted) in (1, 2)
    others = [name for name in inputs if name not in wanted]
    if fits and not others and all(inputs[n].dtype in ("i32", "i64") for n in wanted):
        return wanted
    declared = ", ".join(_shown(name, spec) for name, spec in inputs.items()) or "no inputs"
    help = "declare `tokens[batch, seq]: i32, targets[batch, seq]: i32`, or give the data as .npz"
    message = f"{files.path} is a text, and the program takes {declared}"
    fail("MD0512", message, help=help)


def _shown(name: str, spec: Spec) -> str:
    return f"{name}[{', '.join(spec.dims)}]: {spec.dtype}"


def _bound(spec: Spec) -> int:
    """The size of the smallest dim that an input indexes."""
    how = spec.draw
    return int(how[1]) if how and how[0] == "below" else np.iinfo(np.int32).max


# --- tokens --------------------------------------------------------------------------------------


def tokens_of(path: str, kind: str, known: str | None, bound: int) -> tuple[Array, str | None]:
    """The tokens of a text, all below `bound`, and the vocabulary if they are characters."""
    if kind == "bytes":
        ids, vocabulary = _bytes(path), None
    else:
        ids, vocabulary = _characters(path, known)
    _check_vocabulary(ids, vocabulary, bound, path)
    return ids, vocabulary


def _bytes(path: str) -> Array:
    if not Path(path).stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def _characters(path: str, known: str | None) -> tuple[Array, str]:
    """Every character as its number in the vocabulary: `known`, or the text's own, sorted."""
    codes = np.frombuffer(_decoded(path).encode("utf-32-le", "surrogatepass"), "<u4")
    if known is None:
        present = np.zeros(CODES, bool)
        present[codes] = True
        known = "".join(map(chr, np.flatnonzero(present)))
    numbers = np.full(CODES, -1, np.int32)
    numbers[[ord(c) for c in known]] = np.arange(len(known))
    ids = numbers[codes]
    if len(ids) and ids.min() < 0:
        at = int(np.argmax(ids < 0))
        message = f"{path}: {chr(codes[at])!r}, character {at}, is not among those trained on"
        help = "`--tokens bytes` reads any text; or train on a text that has all characters"
        fail("MD0513", message, help=help)
    return ids, known


def _decoded(path: str) -> str:
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        fail("MD0513", message, help="`--tokens bytes` reads any file")


def _check_vocabulary(ids: Array, vocabulary: str | None, bound: int, path: str) -> None:
    """Refuse tokens that are no index of what the program indexes by them."""
    most = len(vocabulary) if vocabulary is not None else int(ids.max(initial=0)) + 1
    if most <= bound:
        return
    has = f"{most} different characters" if vocabulary is not None else f"bytes up to {most - 1}"
    message = f"{path} has {has}, and the program has room for {bound} tokens"
    help = f"make the dim that tokens index larger: `--set vocab={most}`, by whatever name it has"
    fail("MD0513", message, help=help)


def _held_out(files: DataFiles, vocabulary: str | None, bound: int) -> Array:
    """The tokens of the file to evaluate on."""
    assert files.held_out is not None
    if not is_text(files.held_out):
        help = "give a text to evaluate on, as to train on"
        fail("MD0512", f"{files.held_out} is not a text, and {files.path} is", help=help)
    return tokens_of(files.held_out, files.tokens, vocabulary, bound)[0]


def _long_enough(ids: Array, window: int, path: str) -> None:
    if len(ids) < window:
        message = (
            f"{path} has {counted(len(ids), 'token')} to train on, and a window takes {window}"
        )
        fail("MD0511", message, help="give a longer text, or make the windows shorter with `--set`")
