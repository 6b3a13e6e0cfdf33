"""Documents as rows: each row of a batch is a document, or a piece of a long one, and padding."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.backends.data.token_files import FlatTokens, TokenSequence, holds_tokens
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.values import Array, Part, Spec, cast
from meshdsl.backends.train.batches import (
    GIVE_MORE,
    Batches,
    Data,
    Everything,
    InOrder,
    enough,
    order_of,
)
from meshdsl.backends.train.job import DataFiles
from meshdsl.backends.train.token_data import (
    check_tokens,
    ignored_index,
    index_bound,
    shown_input,
    token_source,
)
from meshdsl.diagnostics import counted, fail
from meshdsl.records import dataclass

SCANNED_AT_ONCE = 1 << 22
"""The tokens that are looked through for ends of documents at once."""


class DocumentRows:
    """Rows of documents that end with the token `end`, padded with it.

    A document of more than `length` tokens is several rows. `names` are the inputs for tokens, for
    those that follow, and perhaps for which of these are of the document: the others are padding.
    Targets that are padding are `ignored` instead, where the program ignores such targets.
    """

    may_refuse = True

    def __init__(
        self,
        tokens: FlatTokens,
        names: tuple[str, ...],
        batch: str,
        bound: int,
        end: int,
        length: int,
        ignored: int | None = None,
    ) -> None:
        self.tokens, self.names, self.batch = tokens, names, batch
        self.bound, self.end = bound, end
        self.padding = (end, end if ignored is None else ignored)
        self.starts, self.counts = rows_of(tokens, end, length)

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, name: str, spec: Spec, rows: Array, part: Part) -> Array:
        """The block `part` of input `name`, of these rows. Raises MD0513."""
        columns = np.arange([*spec.dims.values()][1])[part[1]]
        counts = self.counts[rows][:, None]
        shift = self.names.index(name)
        if shift == len(self.padding):
            return cast(columns < counts, spec.dtype)
        read = np.full((len(rows), len(columns)), self.padding[shift], np.int64)
        for number, row in enumerate(rows.tolist()):
            start, stop = int(self.starts[row]), int(self.starts[row] + self.counts[row] + 1)
            document = self.tokens[start:stop]
            check_tokens(self.tokens, start, document, self.bound)
            within = columns + shift < len(document)
            read[number, within] = document[columns[within] + shift]
        return cast(read, spec.dtype)

    def weight(self, rows: Array) -> int:
        """The number of targets that are no padding."""
        return int(self.counts[rows].sum())


def open_rows(files: DataFiles, inputs: Mapping[str, Spec], seed: int, times: int) -> Data:
    """The data of documents; a step takes `times` batches. Raises DiagnosticError and Refused."""
    make, (batch, size) = _reader(files, inputs)
    source = token_source(files, index_bound(inputs[make.names[0]]))
    reader, held_out = make(source.training), None
    if source.held_out is not None:
        held = make(source.held_out)
        what = f"{source.held_out_of} has {counted(len(held), 'row')} of documents"
        enough(len(held), size, what, batch, more=source.more_held_out)
        held_out = Batches(held, InOrder(0, len(held), size), size, "samples", may_refuse=True)
    what = f"{source.training_of} has {counted(len(reader), 'row')} of documents to train on"
    enough(len(reader), size * times, what, batch, times)
    order = order_of(files.order, seed, len(reader), size * times)
    training = Batches(reader, order, size * times, "samples", files.accumulate, may_refuse=True)
    return Data(training, held_out, len(reader))


def every_row(files: DataFiles, inputs: Mapping[str, Spec]) -> Everything:
    """All documents, in order. Raises DiagnosticError and Refused."""
    make, (_, size) = _reader(files, inputs)
    source = token_source(files, index_bound(inputs[make.names[0]]), all_of_it=True)
    reader = make(source.training)
    if not len(reader):
        message = f"{source.training_of} has no document of two tokens or more"
        fail("MD0511", message, help=GIVE_MORE)
    return Everything(reader, len(reader), size, may_refuse=True)


@dataclass(frozen=True)
class RowReaders:
    """Makes readers of documents for the inputs `names` of a program."""

    names: tuple[str, ...]
    batch: str
    bound: int
    end: int
    length: int
    ignored: int | None

    def __call__(self, tokens: TokenSequence) -> DocumentRows:
        """A reader of the documents in some tokens."""
        assert isinstance(tokens, FlatTokens), "documents are in files of tokens"
        end, length, ignored = self.end, self.length, self.ignored
        return DocumentRows(tokens, self.names, self.batch, self.bound, end, length, ignored)


def _reader(files: DataFiles, inputs: Mapping[str, Spec]) -> tuple[RowReaders, tuple[str, int]]:
    """What makes readers of the documents, and the dim of rows with its size."""
    names = row_inputs(files, inputs)
    (batch, size), (_, length) = inputs[names[0]].dims.items()
    bound = min(index_bound(inputs[name]) for name in names[:2])
    if files.end is None or not (files.stored or holds_tokens(files.path, files.tokens)):
        help = "name it: `--end-token 50256` in files of tokens, `--tokenizer F` for texts"
        fail("MD0583", f"nothing says which token ends a document of {files.path}", help=help)
    if files.end >= bound:
        message = f"documents end with the token {files.end}, and the program has room for"
        help = "make the dim that tokens index larger with `--set`, by whatever name it has"
        fail("MD0513", f"{message} {counted(bound, 'token')}", help=help)
    ignored = ignored_index(inputs[names[1]])
    return RowReaders(names, batch, bound, files.end, length, ignored), (batch, size)


def row_inputs(files: DataFiles, inputs: Mapping[str, Spec]) -> tuple[str, ...]:
    """The inputs for tokens, for those that follow, and for which of these count.

    The third may be missing where the program ignores targets of one index. Raises MD0512 where it
    does not say what becomes of padding.
    """
    names = files.text_inputs or tuple(sorted(inputs, key=lambda n: not _is_index(inputs[n])))
    specs = [inputs[name] for name in names if name in inputs]
    shapes = {tuple(spec.dims.items()) for spec in specs}
    kinds = [_is_index(spec) for spec in specs]
    fits = len(specs) == len(names) == len(inputs) and len(shapes) == 1
    is_said = kinds == [True, True, False]
    is_said = is_said or (kinds == [True, True] and ignored_index(specs[1]) is not None)
    if fits and is_said and len(next(iter(shapes))) == 2:
        return tuple(names)
    declared = ", ".join(shown_input(name, spec) for name, spec in inputs.items()) or "no inputs"
    message = f"rows of documents are padded, and the program takes {declared}"
    help = (
        "declare `tokens[batch, seq]: i32, targets[batch, seq]: i32` and give `cross_entropy` its"
        " `ignore_index=-100`; or another input `counts[batch, seq]`, which is 0 for padding, and"
        " divide: `sum(loss * counts) / sum(counts)`"
    )
    fail("MD0512", message, help=help)


def _is_index(spec: Spec) -> bool:
    return spec.dtype in ("i32", "i64")


def rows_of(tokens: FlatTokens, end: int, length: int) -> tuple[Array, Array]:
    """The first token of each row, and how many targets it has; the last document may lack its end.

    All tokens are looked through once, some at a time.
    """
    ends = [np.empty(0, np.int64)]
    for start in range(0, len(tokens), SCANNED_AT_ONCE):
        piece = tokens[start : start + SCANNED_AT_ONCE]
        ends.append(start + np.flatnonzero(piece == end))
    stops = np.concatenate(ends) + 1
    if len(tokens) and (not len(stops) or stops[-1] < len(tokens)):
        stops = np.append(stops, len(tokens))
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
    targets = stops - starts - 1
    pieces = -(-targets // length)
    document = np.repeat(np.arange(len(starts)), pieces)
    within = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    counts = np.minimum(targets[document] - length * within, length)
    return starts[document] + length * within, counts
