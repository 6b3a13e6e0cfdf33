# mypy: disable-error-code="type-arg,valid-type"
"""C = A·B in blocks over a grid, in Python."""

import meshdsl as md

m, k, n = md.dims(m=256, k=512, n=256)


@md.program
def summa(left: md.Tensor[m, k], right: md.Tensor[k, n]):
    c = md.einsum(left, right, out=[m, n])
    return c
