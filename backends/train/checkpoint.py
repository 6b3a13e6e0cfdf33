"""Checkpoints of a training run: saved under one mesh and layout, loaded under any other.

Format: docs/checkpoints.md. Saving and loading need torch; looking for the latest does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train import checkpoint_folder as disk
from meshdsl.backends.train.checkpoint_found import Found, Stored, check_same
from meshdsl.backends.train.checkpoint_team import Team
from meshdsl.diagnostics import Diagnostic, DiagnosticError, fail

if TYPE_CHECKING:
    import torch

Blocks: TypeAlias = "Mapping[int, Mapping[str, torch.Tensor]]"
"""What each device of this process holds: by rank, then by name."""

KEEP = 3
"""Checkpoints that are kept unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which devices this process is, on which mesh, and the process group it saves with.

    `group` is None where one process holds the blocks of all devices.
    """

    ranks: tuple[int, ...]
    mesh: dict[str, int]
    group: Any = None


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
        sharing: Sharing,
    ) -> None:
        """Write a checkpoint and make it the latest. All processes of the group call this.

        `meta` is anything JSON can hold. When a process cannot write, all of them raise MD0540,
        nothing of the new checkpoint stays, and the latest is the one it was.
        """
        assert set(blocks) == set(sharing.ranks), f"{set(blocks)} are not {sharing.ranks}"
        team = Team(sharing.group)
        try:
            self._save(step, blocks, specs, meta, sharing, team)
        except disk.DiskError as error:
            self._discard(step, team)
            self._not_written(step, error)
        except BaseException:
            self._discard(step, team)
            raise

    def _save(
        self,
        step: int,
        blocks: Blocks,
        specs: dict[str, Spec],
        meta: dict[str, Any],
        sharing: Sharing,
        team: Team,
    ) -> None:
        from meshdsl.backends.train.checkpoint_plan import write_blocks

        team.first_does(lambda: disk.begin(self.folder, step))
        partial = disk.partial_of(self.folder, step)
        write_blocks(partial, blocks, specs, sharing.mesh, sharing.group)
        files: dict[str, Any] = {}
        for part in team.all_do(lambda: team.digests(partial)):
            files |= part
        tensors = {name: Stored.of(spec).as_table() for name, spec in specs.items()}
        content = {"step": step, "meta": meta, "mesh": sharing.mesh, "tensors": tensors}
        team.first_does(lambda: self._commit(step, {**content, "files": files}))

    def _commit(self, step: int, content: dict[str, Any]) -> None:
        partial = disk.partial_of(self.folder, step)
        disk.check_files(partial, content["files"], sums=False)
        disk.write_manifest(partial, content)
        disk.commit(self.folder, step, self.keep)

    def _discard(self, step: int, team: Team) -> None:
        if team.is_first:
            disk.discard(self.folder, step)

    def _not_written(self, step: int, error: Exception) -> NoReturn:
        left: list[str] = []
        with contextlib.suppress(OSError):
            left = disk.names(self.folder)
        help = "free some space there, or name another folder"
        help += f"; `{left[0]}` is as it was" if left else ""
        message = f"the checkpoint of step {step} could not be written to {self.folder}: {error}"
        raise DiagnosticError(Diagnostic("MD0540", message, help=help)) from error

    def latest(self) -> Found | None:
        """The newest whole checkpoint, or None where there are none; reads every byte of it.

        Raises MD0543 where there are some and all are damaged.
        """
        skipped: list[str] = []
        for name in self._names():
            path = disk.place(self.folder, name)
            try:
                return self._open(path, name, tuple(skipped))
            except disk.Damaged as damage:
                skipped.append(f"the checkpoint `{name}` is damaged: {damage}")
        if skipped:
            message = "\n".join([f"no checkpoint in {self.folder} is whole", *skipped])
            fail("MD0543", message, help="start anew, in another folder or without `--resume`")
        return None

    def _names(self) -> list[str]:
        try:
            return disk.names(self.folder)
        except OSError as error:
            fail("MD0501", f"{self.folder} cannot be read: {error.strerror}", help="see what it is")

    def _open(self, path: Path, name: str, skipped: tuple[str, ...]) -> Found:
        content = disk.read_manifest(path)
        disk.check_files(path, content["files"], sums=True)
        if content["step"] != disk.step_of(name):
            raise disk.Damaged(f"it is the checkpoint of step {content['step']}")
        tensors = {n: Stored.from_table(entry) for n, entry in content["tensors"].items()}
        return Found(path, content["step"], content["meta"], tensors, skipped)

    def load(
        self, found: Found, specs: dict[str, Spec], mesh: dict[str, int], ranks: Sequence[int]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """What each of `ranks` holds of the tensors under `specs` and `mesh`, on the CPU.

        It may have been saved under any other mesh and splits. Each tensor has memory of its own;
        every process reads for itself. Raises MD0541 for a checkpoint of another program, and
        MD0501 where it cannot be read.
        """
        from meshdsl.backends.train.checkpoint_plan import read_blocks

        check_same(found, specs)
        try:
            return read_blocks(found.path, specs, mesh, ranks)
        except disk.DiskError as error:
            help = "it was whole when it was looked at: see whether something else writes there"
            fail("MD0501", f"the checkpoint `{found.path.name}` cannot be read: {error}", help=help)
