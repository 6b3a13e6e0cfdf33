# mypy: disable-error-code="type-arg,valid-type"
"""SUMMA panel by panel, in Python."""

import meshdsl as md

m, n, panels, width = md.dims(m=256, n=256, panels=8, width=64)
height = md.dim("height", like=width)


@md.program
def summa(left: md.Tensor[panels, m, width], right: md.Tensor[panels, height, n]):
    c = md.zeros[m, n]()

    def panel(c):
        c = c + md.einsum(left, right[height >> width], out=[m, n])
        return c

    c = md.repeat(panels, panel, c)
    return c
