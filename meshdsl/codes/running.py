"""MD07xx: what fails while running."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0701",
        "a device failed",
        "The program of one device ended with an error of torch, such as a lack of memory. The "
        "message names device, place and error; all other devices were stopped.",
        "",
        "See what the error says. `--engine reference` runs the program itself without devices.",
    ),
    Code(
        "MD0702",
        "devices disagree about a collective",
        "Devices called different collectives, or with different shapes, at the same place. This "
        "is a mistake of the compiler.",
        "",
        "Report it with the file and the command. Another layout may avoid it.",
    ),
    Code(
        "MD0703",
        "a run that needs more memory than there is",
        "What all devices would hold at the worst moment, as `explain` predicts it, is more than "
        "the memory of this machine. Nothing was allocated.",
        "",
        "Choose smaller dims (`--set`) or a smaller mesh (`--mesh`). `explain` and `compile` work "
        "at any size.",
    ),
    Code(
        "MD0704",
        "too many devices for one process",
        "The local engine runs every device as a thread of this process, at most 1024.",
        "",
        "Choose a smaller mesh: `--mesh data:2,model:2`.",
    ),
    Code(
        "MD0705",
        "torchrun failed",
        "torchrun ended with an error and none of its processes reported why. The end of its log "
        "is shown.",
        "",
        "See what the log says. `--engine local` runs the same program without torchrun.",
    ),
    Code(
        "MD0706",
        "the program did not end in time",
        "The processes of torchrun were given a limit of time and stopped when it had passed.",
        "",
        "Give more time, or a smaller program.",
    ),
    Code(
        "MD0707",
        "devices hold different values of one thing",
        "Devices that should hold the same block of an output, or of a parameter or state after a "
        "training step, hold different values. This is a mistake of the compiler.",
        "",
        "Report it with the file and the command.",
    ),
    Code(
        "MD0708",
        "an output or an update differs from the reference",
        "`--verify` compared the outputs, and parameters and states after a training step, with "
        "those of the unsharded program in float64, and one is further off than rounding explains.",
        "",
        "See whether `--dtype f64` brings it near: then it is rounding of a sensitive program. If "
        "not, it is a mistake of the compiler: report it.",
    ),
    Code(
        "MD0799",
        "meshdsl itself failed",
        "Something happened that the authors did not foresee.",
        "",
        "Report it with the file and the command; MESHDSL_TRACEBACK=1 shows where it happened.",
    ),
)
