"""Checkpoints of a training run: saved under one mesh and layout, loaded under any other.

    latest             the names of the committed checkpoints, newest first, one per line
    step-20/           one checkpoint: a .safetensors file per device, and manifest.json
    .step-30.partial/  a checkpoint that is being written; never read, removed by the next save

A checkpoint is whole when its manifest and all files that the manifest lists are as they were
written. The manifest is written last, then the folder gets its name, then `latest` is replaced: a
process killed at any moment leaves earlier commits intact. Format: docs/checkpoints.md. Saving and
loading need torch; looking for the latest does not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.array_files import (
    Refused,
    StoredArray,
    read_safetensors,
    safetensors_parts,
    show_table,
)
from meshdsl.backends.runtime.user_files import new_file, regular, sync_folder
from meshdsl.backends.runtime.values import (
    Part,
    Spec,
    coordinates,
    first_replicas,
    has_sum,
    local_part,
    shape_of,
)
from meshdsl.backends.train import manifest
from meshdsl.diagnostics import Diagnostic, DiagnosticError, counted, fail
from meshdsl.disk_cache import parsed
from meshdsl.option_edits import refuse, set_sizes
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

Blocks: TypeAlias = "Mapping[int, Mapping[str, torch.Tensor]]"
"""The tensors of each device of this process: by rank, then by name."""

Piece = tuple[slice, ...]
"""A part of a tensor without gaps: a slice of each dim."""

KEEP = 3
"""Checkpoints that are kept by default."""

POINTER = "latest"
MANIFEST = "manifest.json"
VERSION = 2
MOST_ROWS = 20
"""Differing tensors that are shown; the others are counted."""

_NAME = re.compile(r"step-(\d{1,18})")
_SPARE = ".old"
"""The suffix of a checkpoint while another of the same step takes its name."""


_checksum = functools.partial(hashlib.blake2b, digest_size=16)


class Damaged(Exception):
    """A checkpoint is not as it was written; the message has the part."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: its place, its step, the `meta` of the save, its tensors and mesh.

    `skipped` has a sentence for every newer one that is damaged.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, Spec]
    mesh: dict[str, int]
    skipped: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """The skipped ones, as warnings for the user."""
        help = f"`{self.path.name}` is used, the newest whole one"
        return tuple(Diagnostic("MD0542", t, severity="warning", help=help) for t in self.skipped)


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` are kept."""

    def __init__(self, folder: str, keep: int = KEEP) -> None:
        assert keep > 0, f"{keep} checkpoints cannot be kept"
        self.folder, self.keep = Path(folder), keep

    def save(
        self,
        step: int,
        blocks: Blocks,
        specs: dict[str, Spec],
        meta: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        """Write a checkpoint and make it the latest. All devices call this, each with its blocks.

        A single process passes those of all. `meta` is JSON data. When a device cannot write, all
        of them raise MD0540, nothing of the new checkpoint stays, and the latest is unchanged.
        """
        mesh, partial = ranks.mesh, partial_of(self.folder, step)
        tensors = {name: _table(spec) for name, spec in specs.items()}
        content = {"step": step, "meta": meta, "mesh": list(mesh.items()), "tensors": tensors}

        def finish() -> None:
            check_sizes(partial, files)
            write_manifest(partial, {**content, "files": msgspec.to_builtins(files)})
            commit(self.folder, step, self.keep)

        try:
            ranks.first_does(lambda: begin(self.folder, step))
            written = ranks.all_do(lambda: write_blocks(partial, blocks, specs, mesh))
            files = {name: facts for part in written for name, facts in part.items()}
            ranks.first_does(finish)
        except BaseException as error:
            if ranks.rank == 0:
                discard(self.folder, step)
            if not isinstance(error, OSError | Damaged):
                raise
            self._not_written(step, error)

    def _not_written(self, step: int, error: OSError | Damaged) -> NoReturn:
        left: list[str] = []
        with contextlib.suppress(OSError):
            left = names(self.folder)
        help = "free some space there, or name another folder"
        help += f"; `{left[0]}` is as it was" if left else ""
        why = describe(error)
        if isinstance(error, Damaged):
            why += "; do all processes see the same folder?"
        message = f"the checkpoint of step {step} could not be written to {self.folder}: {why}"
        raise DiagnosticError(Diagnostic("MD0540", message, help=help)) from error

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None where there are none; reads every byte of it.

        Raises MD0543 where there are some and all are damaged, MD0544 for one of an older format.
        """
        skipped: list[str] = []
        for name in self._names():
            try:
                return _opened(place(self.folder, name), name, tuple(skipped))
            except Damaged as damage:
                skipped.append(f"the checkpoint `{name}` is damaged: {damage}")
        if skipped:
            message = "\n".join([f"no checkpoint in {self.folder} is whole", *skipped])
            fail("MD0543", message, help="start anew, in another folder or without `--resume`")
        return None

    def _names(self) -> list[str]:
        try:
            return names(self.folder)
        except OSError as error:
            fail("MD0501", f"{self.folder} cannot be read: {error.strerror}", help="see what it is")

    def load(
        self, found: Checkpoint, specs: dict[str, Spec], mesh: dict[str, int], rank: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one device under `specs` and `mesh`, one after the other, on the CPU.

        They may have been saved under any other mesh and splits. Each tensor has memory of its own;
        every process reads for itself. Raises MD0541 for a checkpoint of another program, and
        MD0501 where it cannot be read.
        """
        check_same(found, specs)
        for name, spec in specs.items():
            try:
                block = read_block(found, name, spec, mesh, rank)
            except (OSError, Refused) as error:
                help = "it was whole when it was looked at: see whether something else writes there"
                message = f"the checkpoint `{found.path.name}` cannot be read: {describe(error)}"
                fail("MD0501", message, help=help)
            yield name, block


# --- the folder ----------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    """The checkpoints in `folder`, newest first: those in `latest`, then others by their step.

    Raises OSError where there is a folder that cannot be read.
    """
    try:
        there = {n.removesuffix(_SPARE) for n in os.listdir(folder)}
    except FileNotFoundError:
        return []
    there = {n for n in there if _NAME.fullmatch(n)}
    committed = [n for n in dict.fromkeys(_listed(folder)) if n in there]
    others = sorted(there - set(committed), key=step_of, reverse=True)
    return committed + others


def step_of(name: str) -> int:
    """The step of a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match, f"{name} is no name of a checkpoint"
    return int(match[1])


def _listed(folder: Path) -> list[str]:
    """The names in `latest`, newest first; none where it is missing or no text."""
    try:
        with open(folder / POINTER, encoding="utf-8", opener=regular) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return []
    return [line for line in text.splitlines() if _NAME.fullmatch(line)]


def place(folder: Path, name: str) -> Path:
    """The folder of checkpoint `name`, also when a process was killed while it was replaced."""
    path = folder / name
    return path if path.exists() else folder / (name + _SPARE)


def partial_of(folder: Path, step: int) -> Path:
    """The folder that the checkpoint of a step is written into before it is whole."""
    return folder / f".step-{step}.partial"


def begin(folder: Path, step: int) -> None:
    """Remove what killed processes left behind and make the folder that a save writes into.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".step-"):
            _clear(path)
        elif path.name.endswith(_SPARE) and _NAME.fullmatch(path.name.removesuffix(_SPARE)):
            _settle(path)
    partial_of(folder, step).mkdir()


def _clear(path: Path) -> None:
    """Remove a folder with all in it, or a file or a link in its place. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _settle(spare: Path) -> None:
    """End a replacement that was cut short: the old one goes, or is put back."""
    named = spare.with_name(spare.name.removesuffix(_SPARE))
    if named.exists():
        shutil.rmtree(spare, ignore_errors=True)
    else:
        os.rename(spare, named)


def commit(folder: Path, step: int, keep: int) -> None:
    """Give a written checkpoint its name, flip `latest`, keep the newest `keep`. Raises OSError.

    Whatever needs disk space comes first, so that only renames remain.
    """
    name = f"step-{step}"
    order = [name, *(other for other in names(folder) if other != name)]
    flipped = folder / f".{POINTER}.new"
    flipped.unlink(missing_ok=True)  # of a process that was killed
    write(flipped, ["".join(f"{n}\n" for n in order[:keep]).encode()])
    final, spare = folder / name, folder / (name + _SPARE)
    if final.exists():
        os.rename(final, spare)
    os.rename(partial_of(folder, step), final)
    sync_folder(folder)
    os.replace(flipped, folder / POINTER)
    sync_folder(folder)
    remove(folder, [spare.name, *(n for n in order[keep:] if (folder / n / MANIFEST).exists())])


def remove(folder: Path, doomed: Iterable[str]) -> None:
    """Remove checkpoints. Each loses its name first, so that none is ever partial."""
    for name in doomed:
        gone = folder / f".{name}.gone"
        try:
            os.rename(folder / name, gone)
        except OSError:  # missing, or not removable: neither does harm
            continue
        shutil.rmtree(gone, ignore_errors=True)


def discard(folder: Path, step: int) -> None:
    """Remove the files of a failed save."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / f".{POINTER}.new").unlink()


def write(path: Path, parts: Iterable[Any]) -> manifest.StoredFile:
    """Write and sync a new file; returns its size and checksum, for the manifest.

    `parts` are bytes or other buffers of bytes. Raises OSError, also where something has the name.
    """
    checksum, size = _checksum(), 0
    with new_file(path) as file:
        for part in parts:
            file.write(part)
            checksum.update(part)
            size += len(part)
            del part  # before the next one is made
    return manifest.StoredFile(size, checksum.hexdigest())


def describe(error: Exception) -> str:
    """A short text of an error; of one of the system with its file where it is known."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error) or type(error).__name__
    return f"{Path(error.filename).name}: {reason}" if error.filename else reason


# --- the manifest --------------------------------------------------------------------------------


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, which makes the checkpoint in the folder `checkpoint` whole."""
    sealed = {"version": VERSION, "blake2b": _seal(content), **content}
    write(checkpoint / MANIFEST, [json.dumps(sealed, indent=1).encode()])
    sync_folder(checkpoint)


def _seal(content: Mapping[str, Any]) -> str:
    """The checksum of the manifest's own content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return _checksum(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The content of the manifest, less its version and checksum, as it is stored.

    Raises Damaged, and MD0544 for an older format, whose files are whole but of another kind.
    """
    try:
        with open(checkpoint / MANIFEST, "rb", opener=_own) as file:
            content = parsed(file.read())
        version, seal = content.pop("version"), content.pop("blake2b")
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(describe(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    if version == 1:
        message = (
            f"the checkpoint `{checkpoint.name}` has the files of torch.distributed.checkpoint"
        )
        message += f" (format 1), and this meshdsl reads .safetensors files (format {VERSION})"
        help = "end the run with the meshdsl that wrote it; there, `--resume --out p.safetensors` "
        help += "writes the parameters, which `--params` reads here"
        fail("MD0544", message, help=help)
    if version != VERSION:
        raise Damaged(f"{MANIFEST} is of version {version}, which this meshdsl does not read")
    if seal != _seal(content):
        raise Damaged(f"{MANIFEST} is not as it was written")
    return dict(content)


def _own(path: str, flags: int) -> int:
    """Open a file of a checkpoint: a regular one, and no link to one that lies elsewhere."""
    return regular(path, flags | os.O_NOFOLLOW)


def _opened(path: Path, name: str, skipped: tuple[str, ...]) -> Checkpoint:
    """The checkpoint in a folder, every byte of it read and compared. Raises Damaged, MD0544."""
    try:
        content = manifest.checked(read_manifest(path))
    except manifest.Forged as forged:
        raise Damaged(f"{MANIFEST} is none that was written: {forged}") from None
    if content.step != step_of(name):
        raise Damaged(f"it is the checkpoint of step {content.step}")
    check_sizes(path, content.files)
    for file, stored in content.files.items():
        try:
            same = digest(path / file) == stored
        except OSError as error:
            raise Damaged(describe(error)) from None
        if not same:
            raise Damaged(f"{file} holds other bytes than were written")
    tensors = {name: entry.spec() for name, entry in content.tensors.items()}
    checkpoint = Checkpoint(path, content.step, content.meta, tensors, dict(content.mesh), skipped)
    _check_arrays(checkpoint, content.files)
    return checkpoint


def _check_arrays(found: Checkpoint, files: Iterable[str]) -> None:
    """Compare the arrays in the files with the tensors of the manifest. Raises Damaged."""
    expected: dict[str, dict[str, tuple[str, list[int]]]] = {file: {} for file in files}
    for name, spec in found.tensors.items():
        for _, file, piece in _stored(found, name):
            if file not in expected:
                raise Damaged(f"{file} is missing in {MANIFEST}")
            expected[file][name] = (spec.dtype, shape_of(piece))
    try:
        for file, blocks in expected.items():
            arrays = _arrays(found.path, file).items()
            held = ((name, array.dtype, list(array.shape)) for name, array in arrays)
            manifest.check_header(file, held, blocks)
    except (OSError, Refused, manifest.Forged) as error:
        raise Damaged(describe(error)) from None


def one_at(path: Path) -> Checkpoint | None:
    """The checkpoint that `path` itself is, by its name, or None. Raises MD0543, MD0544."""
    if not _NAME.fullmatch(path.name) or not (path / MANIFEST).exists():
        return None
    try:
        return _opened(path, path.name, ())
    except Damaged as damage:
        message = f"the checkpoint `{path.name}` is damaged: {damage}"
        fail("MD0543", message, help="name another one of its folder, or the folder")


def check_sizes(checkpoint: Path, files: Mapping[str, manifest.StoredFile]) -> None:
    """Compare the sizes of files with the manifest, which costs nothing. Raises Damaged."""
    for name, stored in files.items():
        try:
            about = os.lstat(checkpoint / name)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(describe(error)) from None
        if not stat.S_ISREG(about.st_mode):
            raise Damaged(f"{name} is no regular file")
        if about.st_size != stored.bytes:
            raise Damaged(f"{name} has {about.st_size:,} bytes of {stored.bytes:,}")


def digest(path: Path) -> manifest.StoredFile:
    """Size and checksum of a file, as `write` found them. Raises OSError."""
    with open(path, "rb", opener=_own) as file:
        hashed = hashlib.file_digest(file, _checksum)
        return manifest.StoredFile(file.tell(), hashed.hexdigest())


def _table(spec: Spec) -> dict[str, Any]:
    """The manifest entry of a tensor; dims are a list, for their order counts."""
    about = {"dtype": spec.dtype, "dims": list(spec.dims.items()), "split": spec.split}
    seldom = {"parts": spec.parts, "blocks": spec.blocks}
    return {**about, **{key: value for key, value in seldom.items() if value}}


# --- blocks --------------------------------------------------------------------------------------


def file_of(rank: int, piece: int = 0) -> str:
    """The file of the blocks whose first replica is on device `rank`.

    Of blocks with gaps it has the first piece, and one file more each of the next.
    """
    return f"device-{rank}{f'-{piece}' if piece else ''}.safetensors"


def write_blocks(
    folder: Path, blocks: Blocks, specs: Mapping[str, Spec], mesh: dict[str, int]
) -> dict[str, manifest.StoredFile]:
    """Write the first replica of each block, a file for each device that has any.

    Returns the sizes and checksums of the files. Raises OSError.
    """
    files = {}
    for rank, held in blocks.items():
        for name, spec in specs.items():
            _check(name, held[name], spec, mesh, rank)
        first = [name for name, spec in specs.items() if rank in first_replicas(spec, mesh)]
        every = [(n, *piece) for n in first for piece in enumerate(_kept(specs[n], mesh, rank))]
        for number in sorted({number for _, number, _ in every}):
            mine = {name: piece for name, n, piece in every if n == number}
            file = file_of(rank, number)
            files[file] = write(folder / file, _file(held, specs, mine))
    return files


def _kept(spec: Spec, mesh: dict[str, int], rank: int) -> list[tuple[Piece, Piece]]:
    """The pieces of a device's block that its files have.

    One without elements is in none, unless the tensor has none: torch would take it for another
    one that begins at the same place.
    """
    block_pieces = pieces(local_part(spec, mesh, rank))
    if not math.prod(spec.dims.values()):
        return block_pieces
    return [(piece, inside) for piece, inside in block_pieces if math.prod(shape_of(piece))]


def pieces(part: Part) -> list[tuple[Piece, Piece]]:
    """The pieces of a part without gaps: of the whole tensor, and of the block that it is."""
    everything = tuple(slice(0, size) for size in shape_of(part))
    for dim, indices in enumerate(part):
        if isinstance(indices, list):
            ends = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
            runs = itertools.pairwise([0, *ends, len(indices)])
            return [
                (
                    (
                        *_slices(part[:dim]),
                        slice(indices[a], indices[b - 1] + 1),
                        *_slices(part[dim + 1 :]),
                    ),
                    (*everything[:dim], slice(a, b), *everything[dim + 1 :]),
                )
                for a, b in runs
            ]
    return [(_slices(part), everything)]


def _slices(part: Part) -> Piece:
    """A part that has no gaps."""
    return tuple(p for p in part if isinstance(p, slice))


def _check(name: str, block: torch.Tensor, spec: Spec, mesh: dict[str, int], rank: int) -> None:
    """Assert that a block has the dtype and shape of the device's part of a tensor."""
    from meshdsl.backends.engines.in_process import torch_dtype

    expected = (torch_dtype(spec.dtype), shape_of(local_part(spec, mesh, rank)))
    shown = f"device {rank} holds {block.dtype}{list(block.shape)} of {name}"
    assert (block.dtype, list(block.shape)) == expected, f"{shown}, not {expected}"


def _file(
    held: Mapping[str, torch.Tensor],
    specs: Mapping[str, Spec],
    mine: Mapping[str, tuple[Piece, Piece]],
) -> Iterator[Any]:
    """A .safetensors file of pieces, with the positions from which torch assembles the whole."""
    shapes = {name: (specs[name].dtype, shape_of(part)) for name, (part, _) in mine.items()}
    places = {name: {"saved_offsets": [p.start for p in part]} for name, (part, _) in mine.items()}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    return safetensors_parts(shapes, lambda name: bytes_of(held[name][mine[name][1]]), about)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An element that was widened is contiguous with any stride; bytes are seen with 1 alone.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def read_block(
    found: Checkpoint, name: str, spec: Spec, mesh: dict[str, int], rank: int
) -> torch.Tensor:
    """The block of one tensor on a device, in memory of its own. Raises OSError and Refused."""
    is_sum = found.tensors[name].parts or spec.parts
    stored = _of_sum(spec, found, mesh, rank, name) if is_sum else [*_stored(found, name)]
    arrays = functools.cache(lambda file: _arrays(found.path, file))
    part = local_part(spec, mesh, rank)
    block, filled = _read(spec, part, lambda file: arrays(file)[name], stored)
    assert is_sum or filled == block.numel(), f"{filled} of {block.numel()} elements"
    return block


def _arrays(folder: Path, file: str) -> dict[str, StoredArray]:
    """The blocks in a file."""
    path = folder / file
    with open(path, "rb", opener=_own) as opened:
        return dict(read_safetensors(opened, str(path)))


Stored = tuple[int, str, Piece]
"""A device, the file that has a piece of its block, and the piece."""


def _read(
    spec: Spec, part: Part, array: Callable[[str], StoredArray], stored: Iterable[Stored]
) -> tuple[torch.Tensor, int]:
    """A block with the stored ones in it, added up where they overlap; the elements read."""
    import torch

    from meshdsl.backends.engines.in_process import torch_dtype

    block = torch.zeros(shape_of(part), dtype=torch_dtype(spec.dtype), device="cpu")
    values = (block.view(torch.uint16) if spec.dtype == "bf16" else block).numpy()
    filled = 0
    before: list[Piece] = []
    for (_, file, other), (piece, inside) in itertools.product(stored, pieces(part)):
        common = _common(piece, other)
        if common is None:
            continue
        source = array(file)
        assert (source.dtype, list(source.shape)) == (spec.dtype, shape_of(other)), source
        # An index with dots yields no number, but a view of it.
        here = values[(*inside, ...)][(*_within(piece, common), ...)]  # type: ignore[arg-type]
        there = source.whole()[_within(other, common)]
        overlaps = any(_common(common, one) for one in before)
        here[...] = here + there if overlaps else there
        before.append(common)
        filled += math.prod(shape_of(common))
    return block, filled


def _stored(found: Checkpoint, name: str) -> Iterator[Stored]:
    """The devices whose files have the blocks of a tensor, and the pieces that they are."""
    spec = found.tensors[name]
    for rank in first_replicas(spec, found.mesh):
        for number, (piece, _) in enumerate(_kept(spec, found.mesh, rank)):
            yield rank, file_of(rank, number), piece


def _of_sum(
    spec: Spec, found: Checkpoint, mesh: dict[str, int], rank: int, name: str
) -> list[Stored]:
    """The stored parts of a sum that a device takes over.

    Kept on the same devices again, each has its own: so a run goes on just as it would have. Else
    one device takes all, and others begin with zeros.
    """
    stored, held = found.tensors[name], [*_stored(found, name)]
    same = (stored.parts, stored.split, stored.blocks) == (spec.parts, spec.split, spec.blocks)
    if found.mesh == mesh and same:
        position = coordinates(mesh, rank)
        axes = {*spec.parts, *(a for axes in spec.split.values() for a in axes)}
        first = [r for r, *_ in held if all(coordinates(mesh, r)[a] == position[a] for a in axes)]
        return [entry for entry in held if entry[0] in first]
    return held if has_sum(spec, mesh, rank) else []


def _common(one: Piece, other: Piece) -> Piece | None:
    """The intersection of two pieces of a tensor, or None."""
    pairs = zip(one, other, strict=True)
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(p.start >= p.stop for p in common) else common


def _within(part: Piece, smaller: Piece) -> Piece:
    """The indices of a smaller piece, relative to the beginning of `part`."""
    pairs = zip(part, smaller, strict=True)
    return tuple(slice(s.start - p.start, s.stop - p.start) for p, s in pairs)


# --- other programs ------------------------------------------------------------------------------


def check_same(found: Checkpoint, specs: Mapping[str, Spec]) -> None:
    """Raise MD0541 with a table of differences, where tensors are not those of `specs`."""
    rows: list[tuple[str, ...]] = [
        (
            name,
            _shown(wanted) if wanted else "-",
            _shown(stored) if stored else "missing",
            difference(wanted, stored),
        )
        for name, wanted, stored in _pairs(found, specs)
        if difference(wanted, stored)
    ]
    if not rows:
        return
    head = ("tensor", "program", "checkpoint", "")
    program = found.meta.get("program")
    of = f", `{program}`" if program else ""
    message = f"the checkpoint `{found.path.name}` is of another program{of}: "
    message += f"{counted(len(rows), 'tensor')} {'differs' if len(rows) == 1 else 'differ'}"
    more = [f"  and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else []
    sizes = _other_sizes(found, specs)
    refuse(
        "MD0541",
        "\n".join([message, show_table([head, *rows[:MOST_ROWS]]), *more]),
        (set_sizes(sizes),) if sizes else (),
        "go on with the program it was saved from",
        "train this one in another folder",
    )


def _shown(spec: Spec) -> str:
    """A tensor as it is declared: `f32[io=4, h=3]`."""
    return f"{spec.dtype}[{', '.join(f'{dim}={size}' for dim, size in spec.dims.items())}]"


def _pairs(
    found: Checkpoint, specs: Mapping[str, Spec]
) -> Iterator[tuple[str, Spec | None, Spec | None]]:
    """Every tensor of the program, then those it does not have: as wanted and as stored."""
    for name in dict.fromkeys([*specs, *found.tensors]):
        yield name, specs.get(name), found.tensors.get(name)


def difference(wanted: Spec | None, stored: Spec | None) -> str:
    """A short text of how a stored tensor differs from the program's; empty where it does not."""
    if wanted is None:
        return "the program has no such tensor"
    if stored is None:
        return "not saved"
    if list(wanted.dims) != list(stored.dims):
        return f"has dims [{', '.join(stored.dims)}]"
    for dim, size in stored.dims.items():
        if wanted.dims[dim] != size:
            return f"dim {dim} is {size}, not {wanted.dims[dim]}"
    return f"is {stored.dtype}, not {wanted.dtype}" if stored.dtype != wanted.dtype else ""


def _other_sizes(found: Checkpoint, specs: Mapping[str, Spec]) -> dict[str, int]:
    """The sizes that a checkpoint was saved under, where these alone differ."""
    sizes: dict[str, int] = {}
    for _, wanted, stored in _pairs(found, specs):
        if not (wanted and stored) or _kind(wanted) != _kind(stored):
            return {}
        sizes |= dict(stored.dims.items() - wanted.dims.items())
    return sizes


def _kind(spec: Spec) -> tuple[str, list[str]]:
    """The dtype and dims of a tensor, without sizes."""
    return spec.dtype, list(spec.dims)
