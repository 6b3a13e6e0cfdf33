# mypy: disable-error-code="type-arg,valid-type"
"""sum(A·B), in Python."""

import meshdsl as md

m, a, k = md.dims(m=256, a=128, k=256)


@md.program
def total(left: md.Tensor[m, a], right: md.Tensor[a, k]):
    product = md.einsum(left, right, out=[m, k])
    answer = md.sum(product)
    return answer
