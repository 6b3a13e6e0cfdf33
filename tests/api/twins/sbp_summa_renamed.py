# mypy: disable-error-code="type-arg,valid-type"
"""SUMMA with two names for the inner dim, in Python."""

import meshdsl as md

m, k, n = md.dims(m=256, k=512, n=256)
k_cols, k_rows = md.dims(k_cols=k, k_rows=k)


@md.program
def summa(left: md.Tensor[m, k_cols], right: md.Tensor[k_rows, n]):
    c = md.einsum(left[k_cols >> k], right[k_rows >> k], out=[m, n])
    return c
