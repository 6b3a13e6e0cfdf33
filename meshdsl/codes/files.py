"""MD05xx: inputs, outputs, files."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0501",
        "a file that cannot be read or written",
        "The system refused to read or write a file while the command was at it, or a file "
        "changed since it was checked.",
        "",
        "Check the path, the permissions and the free space.",
    ),
    Code(
        "MD0502",
        "an output that has no place to go",
        "The folder of the output does not exist or cannot be written to, or the output is a "
        "folder itself, a device or a pipe. Nothing was run and nothing was written.",
        "",
        "Make the folder, or choose another.",
    ),
    Code(
        "MD0503",
        "an output that exists already",
        "Files are not overwritten unasked.",
        "",
        "Choose another name, or overwrite it with `--force`.",
    ),
    Code(
        "MD0504",
        "arrays that do not fit the program",
        "Names, shapes and kinds of numbers in a file of inputs or parameters are compared with "
        "what the program declares before anything runs. The table names all that differ. A size "
        "of 1 is not stretched.",
        "",
        "Save every array under its name, with the shape and kind in the table. Floats may be of "
        "another width; they are rounded, with a note.",
    ),
    Code(
        "MD0505",
        "a file of arrays that cannot be used",
        "Arrays are read from .npz and .safetensors files. Files with pickled Python objects are "
        "refused, since unpickling can run code hidden in them; damaged files are too.",
        "",
        "Save the arrays with `numpy.savez(path, name=array, …)`.",
    ),
    Code(
        "MD0506",
        "values were rounded",
        "A file holds floats of more digits than the program computes with. This is only a note.",
        "",
        "Declare the tensor wider, or run with `--dtype f64`, to keep all digits.",
    ),
)
