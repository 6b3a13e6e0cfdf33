# mypy: disable-error-code="type-arg,valid-type"
"""One dim over two mesh axes, in Python."""

import meshdsl as md

i, j = md.dims(i=64, j=64)


@md.program
def two_axes(t: md.Tensor[i, j]):
    u = t + 1.0
    v = md.relu(u)
    return v
