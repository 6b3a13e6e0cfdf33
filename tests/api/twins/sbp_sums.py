# mypy: disable-error-code="type-arg,valid-type"
"""A·B + C·D, in Python."""

import meshdsl as md

m, a, c, k = md.dims(m=256, a=128, c=128, k=256)


@md.program
def sums(
    left: md.Tensor[m, a],
    right: md.Tensor[a, k],
    other: md.Tensor[m, c],
    last: md.Tensor[c, k],
):
    ab = md.einsum(left, right, out=[m, k])
    cd = md.einsum(other, last, out=[m, k])
    y = ab + cd
    return y
