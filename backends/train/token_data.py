"""Texts and files of tokens, as windows: what they are read as, and which inputs they fill."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshdsl.backends.data.token_files import (
    DTYPES,
    NPY,
    FlatTokens,
    TokenFile,
    TokenSequence,
    first_beyond,
    has_validation,
    holds_tokens,
    token_files,
)
from meshdsl.backends.runtime.array_files import read_arrays
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.user_files import Refused, read_regular, regular
from meshdsl.backends.runtime.values import NUMPY_DTYPES, Array, Part, Spec
from meshdsl.backends.train.batches import (
    GIVE_MORE,
    HOLD_OUT_MORE,
    Anywhere,
    Batches,
    Data,
    Everything,
    InOrder,
    Order,
    Spaced,
    enough,
    order_of,
)
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import counted, did_you_mean, fail
from meshdsl.option_edits import give, refuse
from meshdsl.records import dataclass

ARCHIVES = (b"PK\x03\x04", NPY, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of files of arrays and of pickles."""

CODES = 0x110000
"""The number of code points of Unicode."""

TOKENS = ("chars", "bytes", *DTYPES)
"""What `--tokens` may say: how a text is read, or the dtype of a raw file."""


def is_tokens(files: DataFiles) -> bool:
    """Whether the data are tokens, or a text to be read as such. Raises Refused and MD0582."""
    path = files.path
    if files.stored or holds_tokens(path, files.tokens):
        return True
    if path.endswith((".npz", ".safetensors")):
        if files.tokens is not None:
            message = f"`--tokens {files.tokens}`: {path} has arrays by the names of inputs"
            fail("MD0580", message, help="leave `--tokens` out, or name a file of tokens or a text")
        return False
    if os.path.isdir(path):
        help = "name a folder with .bin or .npy files, or make tokens of its texts: `--tokenizer F`"
        fail("MD0580", f"{path} has no files of tokens", help=help)
    try:
        with open(path, "rb", opener=regular) as file:
            start = file.read(8)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    if start.startswith(ARCHIVES):
        read_arrays(path)  # raises what is wrong with it
    if path.endswith(".jsonl") and files.tokens is None:
        message = f"{path} has texts, and nothing says what their tokens are"
        other = "make tokens of its texts: `--tokenizer tokenizer.json`"
        refuse("MD0582", message, give("--tokens", "bytes", safe=False), other)
    return True


# --- windows -------------------------------------------------------------------------------------


class Windows:
    """Windows of tokens: row r of the first input begins at token `rows[r]`.

    The second input, where there is one, is the first shifted by a token: the next tokens. Each
    token is below `bound`.
    """

    def __init__(
        self, tokens: TokenSequence, names: tuple[str, ...], batch: str, bound: int
    ) -> None:
        self.tokens, self.names, self.batch, self.bound = tokens, names, batch, bound
        self.may_refuse = isinstance(tokens, FlatTokens) and tokens.may_exceed(bound)

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of the windows that begin at `rows`.

        Raises MD0513 for a number that is no token of the program.
        """
        columns = np.arange([*spec.dims.values()][1])[part[1]] + self.names.index(name)
        tokens = np.empty((len(rows), len(columns)), NUMPY_DTYPES[spec.dtype])
        if tokens.size:
            first, end = int(columns.min()), int(columns.max()) + 1
            for number, row in enumerate(rows.tolist()):
                window = self.tokens[row + first : row + end]
                if self.may_refuse:
                    check_tokens(self.tokens, row + first, window, self.bound)
                tokens[number] = window[columns - first]
        return tokens

    def weight(self, rows: Array) -> int:
        """The number of windows: all have as many tokens."""
        return len(rows)


def check_tokens(tokens: TokenSequence, start: int, window: Array, bound: int) -> None:
    """Refuse numbers that are no tokens below `bound`. Raises MD0513 with the place of the first.

    `window` are the tokens from `start` on.
    """
    at = first_beyond(window, bound)
    if at is None:
        return
    assert isinstance(tokens, FlatTokens)
    file, index = tokens.place(start + at)
    message = f"{file.label}, token {index} is {int(window[at])}, and the program has room for"
    help = "make the dim that tokens index larger with `--set`, by whatever name it has"
    if file.is_raw:
        help += "; or the file is of another dtype: `--tokens` states it"
    fail("MD0513", f"{message} {counted(bound, 'token')}", help=help)


def _check_all(tokens: FlatTokens, bound: int) -> None:
    """Refuse a small source with numbers that are no tokens, before anything runs."""
    step = 1 << 22
    for start in range(0, len(tokens), step):
        check_tokens(tokens, start, tokens[start : start + step], bound)


# --- opening -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenSource:
    """Tokens to train on and those that are held out (None: not wanted).

    `vocabulary` are the characters of a text. `training_of` and `held_out_of` are what messages
    call the two; held-out tokens may be the last part of the others: `is_cut`.
    """

    training: TokenSequence
    training_of: str
    held_out: TokenSequence | None = None
    held_out_of: str = ""
    vocabulary: str | None = None
    is_cut: bool = False

    @property
    def more_held_out(self) -> str:
        """The way to more samples that are held out."""
        return HOLD_OUT_MORE if self.is_cut else GIVE_MORE


def open_tokens(files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int) -> Data:
    """The data of a text, or of flat tokens; a step takes `times` batches. Raises Refused too."""
    names = text_inputs(files, inputs)
    spec = inputs[names[0]]
    (batch, rows), (_, length) = spec.dims.items()
    bound = min(index_bound(inputs[name]) for name in names)
    source = token_source(files, bound)
    window = length + len(names) - 1
    _long_enough(source.training, window, source.training_of, " to train on")
    order = _order(files, seed, source, (length, window), rows * times)
    amount, reader = rows * length, Windows(source.training, names, batch, bound)
    batches = Batches(reader, order, amount * times, "tokens", files.accumulate, reader.may_refuse)
    evaluated = None
    if source.held_out is not None:
        windows = max(len(source.held_out) - len(names) + 1, 0) // length
        what = f"{source.held_out_of} has {counted(windows, 'window')} of {length} tokens"
        enough(windows, rows, what, batch, more=source.more_held_out)
        reader = Windows(source.held_out, names, batch, bound)
        in_order = InOrder(0, windows, rows, length)
        evaluated = Batches(reader, in_order, amount, "tokens", may_refuse=reader.may_refuse)
    return Data(batches, evaluated, len(source.training), (), source.vocabulary)


def every_window(files: DataFiles, inputs: Mapping[str, Spec]) -> Everything:
    """Windows that lie end to end in all tokens. Raises DiagnosticError and Refused."""
    names = text_inputs(files, inputs)
    spec = inputs[names[0]]
    (batch, rows), (_, length) = spec.dims.items()
    bound = min(index_bound(inputs[name]) for name in names)
    tokens: TokenSequence
    vocabulary, where = None, files.path
    if files.stored or holds_tokens(files.path, files.tokens):
        source = token_source(files, bound, all_of_it=True)
        tokens, where = source.training, source.training_of
    else:
        if files.tokens != "bytes" and files.vocabulary is None:
            message = f"nothing says which numbers the characters of {files.path} had in training"
            help = "name the folder of the run's checkpoints with `--params`; in Python, give them "
            help += "in the order of their numbers: `characters='abc'`"
            fail("MD0513", message, help=help)
        tokens, vocabulary = tokens_of(files.path, files.tokens, files.vocabulary, bound)
    _long_enough(tokens, length + len(names) - 1, where)
    windows = (len(tokens) - len(names) + 1) // length
    reader = Windows(tokens, names, batch, bound)
    unit, refuses = "tokens", reader.may_refuse
    return Everything(reader, windows, rows, length, length, unit, refuses, vocabulary)


def _order(
    files: DataFiles, seed: int, source: TokenSource, window: tuple[int, int], batch: int
) -> Order:
    """The places of the windows of each step. A window is `length` tokens apart from the next.

    `window` is that and the tokens that are read, with the one that follows.
    """
    (length, read), tokens = window, len(source.training)
    if files.order in (None, "random"):
        return Anywhere(seed, tokens - read + 1, batch)
    windows = (tokens - read) // length + 1
    if windows < batch:
        message = f"{source.training_of} has {counted(windows, 'window')} of {length} tokens"
        help = "give more tokens, a smaller batch or shorter windows with `--set`"
        fail("MD0511", f"{message} one after the other, and a step takes {batch}", help=help)
    return Spaced(order_of(files.order, seed, windows, batch), length)


def token_source(files: DataFiles, bound: int, all_of_it: bool = False) -> TokenSource:
    """The tokens of a run, or all that an evaluation reads. Raises MD0513, MD0580 and Refused."""
    if all_of_it:
        stored = files.stored or token_files(files.path, files.tokens, held_out=True)
        return TokenSource(_flat(stored, bound), _label(stored, files.path))
    if files.stored or holds_tokens(files.path, files.tokens):
        return _flat_source(files, bound)
    tokens, vocabulary = tokens_of(files.path, files.tokens, files.vocabulary, bound)
    if files.held_out is not None:
        other = _held_out(files, vocabulary, bound)
        return TokenSource(tokens, files.path, other, files.held_out, vocabulary)
    return _cut(files, tokens, files.path, vocabulary)


def _flat_source(files: DataFiles, bound: int) -> TokenSource:
    """The tokens of flat files."""
    stored = files.stored or token_files(files.path, files.tokens)
    training, training_of = _flat(stored, bound), _label(stored, files.path)
    held, where = files.stored_held_out, files.held_out or files.path
    wanted = files.held_out is not None or files.fraction > 0
    if not held and files.held_out is not None:
        if not holds_tokens(files.held_out, files.tokens):
            help = "give a file of tokens to evaluate on, as to train on"
            message = f"{files.held_out} is not a file of tokens, and {files.path} is"
            fail("MD0512", message, help=help)
        held = token_files(files.held_out, files.tokens, held_out=True)
    elif not held and wanted and has_validation(files.path):
        held = token_files(files.path, files.tokens, held_out=True)
    if held:
        return TokenSource(training, training_of, _flat(held, bound), _label(held, where))
    return _cut(files, training, training_of)


def _label(files: Sequence[TokenFile], path: str) -> str:
    """What messages call the files of `path`: the one of a folder, if it is the only one."""
    return files[0].label if len(files) == 1 else path


def _flat(files: tuple[TokenFile, ...], bound: int) -> FlatTokens:
    tokens = FlatTokens(files)
    if tokens.is_small and tokens.may_exceed(bound):
        _check_all(tokens, bound)
    return tokens


def _cut(
    files: DataFiles, tokens: TokenSequence, path: str, vocabulary: str | None = None
) -> TokenSource:
    """The tokens with the last `fraction` of them held out, where that is wanted."""
    cut = len(tokens) - math.floor(len(tokens) * files.fraction)
    training, held_out = _part(tokens, 0, cut), _part(tokens, cut, len(tokens))
    if not files.fraction:
        return TokenSource(training, path, vocabulary=vocabulary)
    where = f"the last {files.fraction:g} of {path}"
    return TokenSource(training, path, held_out, where, vocabulary, is_cut=True)


def text_inputs(files: DataFiles, inputs: Mapping[str, Spec]) -> tuple[str, ...]:
    """The inputs that a text fills: tokens, and next tokens. Raises DiagnosticError."""
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
    declared = ", ".join(shown_input(name, spec) for name, spec in inputs.items()) or "no inputs"
    help = "declare `tokens[batch, seq]: i32, targets[batch, seq]: i32`, or give the data as .npz"
    kind = "has tokens" if files.stored or holds_tokens(files.path, files.tokens) else "is a text"
    message = f"{files.path} {kind}, and the program takes {declared}"
    fail("MD0512", message, help=help)


def shown_input(name: str, spec: Spec) -> str:
    """An input as it is declared."""
    return f"{name}[{', '.join(spec.dims)}]: {spec.dtype}"


def index_bound(spec: Spec) -> int:
    """The size of the smallest dim that an input indexes."""
    how = spec.draw
    return int(how[1]) if how and how[0] == "below" else np.iinfo(np.int32).max


def ignored_index(spec: Spec) -> int | None:
    """The index of targets that a program ignores, of an input for targets; None: there is none."""
    how = spec.draw
    return int(how[2]) if how and how[0] == "below" and len(how) > 2 else None


# --- texts as characters or bytes ----------------------------------------------------------------


def _part(tokens: TokenSequence, start: int, stop: int) -> TokenSequence:
    return tokens.part(start, stop) if isinstance(tokens, FlatTokens) else tokens[start:stop]


def tokens_of(
    path: str, kind: str | None, known: str | None, bound: int
) -> tuple[TokenSequence, str | None]:
    """The tokens of a text, all below `bound`, and the vocabulary if they are characters."""
    if kind == "bytes":
        try:
            file = TokenFile(path, "uint8", os.stat(path).st_size)
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}") from None
        return _flat((file,), bound), None
    numbers, vocabulary = _characters(path, known)
    if len(vocabulary) > bound:
        has = f"{path} has {len(vocabulary)} different characters"
        message = f"{has}, and the program has room for {bound} tokens"
        larger = f"`--set vocab={len(vocabulary)}`, by whatever name it has"
        fail("MD0513", message, help=f"make the dim that tokens index larger: {larger}")
    return numbers, vocabulary


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
    try:
        data = read_regular(path)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        refuse("MD0513", message, give("--tokens", "bytes", safe=False))


def _held_out(files: DataFiles, vocabulary: str | None, bound: int) -> TokenSequence:
    """The tokens of the text to evaluate on."""
    assert files.held_out is not None
    if not is_tokens(replace(files, path=files.held_out)) or holds_tokens(files.held_out, None):
        help = "give a text to evaluate on, as to train on"
        fail("MD0512", f"{files.held_out} is not a text, and {files.path} is", help=help)
    return tokens_of(files.held_out, files.tokens, vocabulary, bound)[0]


def _long_enough(tokens: TokenSequence, window: int, path: str, use: str = "") -> None:
    if len(tokens) < window:
        message = f"{path} has {counted(len(tokens), 'token')}{use}, and a window takes {window}"
        help = "give more tokens there"
        if len(tokens) > 1:
            help += ", or make the windows shorter with `--set`"
        fail("MD0511", message, help=help)
