"""MD054x: checkpoints."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0540",
        "a checkpoint that could not be written",
        "The disk is full, or the system refused to write. What had been written of the new "
        "checkpoint was removed; the checkpoints from before are as they were.",
        "",
        "Free some space, or name another folder, and resume from the latest checkpoint.",
    ),
    Code(
        "MD0541",
        "a checkpoint of another program",
        "The tensors of a checkpoint are compared with those of the program by name, type, dims "
        "and sizes, optimizer state included. The table names all that differ. Mesh and layout may "
        "be other ones.",
        "",
        "Go on with the program, the optimizer and the sizes that it was saved with, or train "
        "this one in another folder.",
    ),
    Code(
        "MD0542",
        "a damaged checkpoint was skipped",
        "A newer checkpoint has files that are missing or not as they were written, so an older "
        "one that is whole is used. This is a warning.",
        "",
        "Nothing needs to be done; the step is saved again when training comes to it.",
    ),
    Code(
        "MD0543",
        "no checkpoint is whole",
        "There are checkpoints in the folder, but every one has files that are missing or not as "
        "they were written.",
        "",
        "Restore one from a copy, or start anew.",
    ),
)
