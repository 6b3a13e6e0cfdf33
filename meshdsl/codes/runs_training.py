"""MD051x and MD072x: `meshdsl train`, before it runs and while it does."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0510",
        "a program that cannot be trained",
        "`meshdsl train` was given a program without `minimize`, so nothing says what is to become "
        "small, nor how.",
        "",
        "Add a line to the program: `minimize loss with adam(lr=0.001)`.",
    ),
    Code(
        "MD0511",
        "too few samples",
        "There are fewer samples, or windows of a text, than one batch takes. Samples that are "
        "held out for `--eval-every` are not there to train on.",
        "",
        "Give more data, or make the batch smaller with `--set`.",
    ),
    Code(
        "MD0512",
        "a text that the program does not take",
        "A text becomes one or two inputs of whole numbers with two dims: the tokens of a window, "
        "and those that follow each. The program takes others.",
        "",
        "Declare `tokens[batch, seq]: i32, targets[batch, seq]: i32`, say which inputs they are "
        "with `--text-inputs tokens,targets`, or give the data as arrays in a .npz file.",
    ),
    Code(
        "MD0513",
        "a vocabulary that does not fit",
        "A text has more different characters, or larger bytes, than the dim that the program "
        "indexes by them; or it has characters that the run was not begun with; or it is not "
        "UTF-8.",
        "",
        "Make the dim larger with `--set`, or read bytes with `--tokens bytes` and a dim of 256.",
    ),
    Code(
        "MD0514",
        "nothing to resume",
        "`--resume` was given, and the folder of `--checkpoint` holds no checkpoint.",
        "",
        "Name the folder that the run wrote its checkpoints into, or begin without `--resume`.",
    ),
    Code(
        "MD0515",
        "a folder with checkpoints of another run",
        "The folder of `--checkpoint` holds checkpoints already, and the run would mix its own "
        "with them.",
        "",
        "Go on from them with `--resume`, begin anew with `--force`, or name another folder.",
    ),
    Code(
        "MD0516",
        "options of a training run that do not go together",
        "Some options need another: `--resume` and `--checkpoint-every` need `--checkpoint`, "
        "`--eval-data` needs `--eval-every`. A run that is resumed goes on with its own values "
        "and seed, so `--params` and another `--seed` contradict it.",
        "",
        "Add the option that is missing, or leave the other one out.",
    ),
    Code(
        "MD0517",
        "something about the data that is worth knowing",
        "A file holds arrays that the program does not read, or a run is resumed on other data "
        "than it was begun with. The run goes on.",
        "",
        "See whether an array has the name that the program reads it by.",
    ),
    Code(
        "MD0518",
        "a folder that another run is training in",
        "Another run of `meshdsl train` has the folder of `--checkpoint`: the two would remove and "
        "replace each other's files. The message says which process it is, where, and since when. "
        "A run on this machine that was killed does not count; of one on another machine that "
        "cannot be known.",
        "",
        "Wait until it ends, or name another folder. If a run on another machine is over, remove "
        "the file `.lock` that it has left in the folder.",
    ),
    Code(
        "MD0519",
        "a run that goes on under another plan",
        "A checkpoint says by a hash what the devices did when it was saved. They do something "
        "else now: another layout, another mesh, other options, or another version of meshdsl. "
        "The run goes on, from the same values.",
        "",
        "Nothing, if that is what you want. To have the same order of sums, resume with the "
        "layout, mesh, options and version that the message names.",
    ),
)

RUNNING: tuple[Code, ...] = (
    Code(
        "MD0720",
        "a loss that is not a number",
        "The loss, or a parameter when it was to be saved, became NaN or infinite. All devices "
        "stopped at that step, and the steps from the last checkpoint on were run again to find "
        "the first statement that made such a value. No checkpoint holds it.",
        "",
        "A lower learning rate or `clip=1.0` in the optimizer often helps; NaN in the data does "
        "the same. `--resume` goes on from the last checkpoint.",
    ),
    Code(
        "MD0721",
        "a process that was killed",
        "The process of one device ended without a word: somebody or the system killed it, for "
        "instance because memory ran out. All others were ended too. The message names the device "
        "and, where it is known, the collective in which another waited for it.",
        "",
        "Run again with `--resume`: the run goes on from the last whole checkpoint.",
    ),
    Code(
        "MD0722",
        "a training run that was stopped",
        "Ctrl-C was pressed. The run ended after the step it was in; a checkpoint was written "
        "where `--checkpoint` names a folder. This is only a note.",
        "",
        "The same command with `--resume` goes on from there.",
    ),
    Code(
        "MD0723",
        "a run that does not move",
        "For a minute nothing has got on: no device has come to another statement, and no step has "
        "ended. The message says what each device is doing: the line it is at, the collective it "
        "waits in, or that its process has been stopped. It may be slow, or hang; nothing is ended "
        "by itself, and the warning comes again after twice as long.",
        "",
        "See what the devices named first are doing, since others wait for them. Ctrl-C ends the "
        "run. MESHDSL_STALL_SECONDS=N says so after N seconds, 0 never.",
    ),
)
"""Those that come up while running."""
