# mypy: disable-error-code="type-arg,valid-type"
"""The product that Mesh-TensorFlow's search is tested on, in Python."""

import meshdsl as md

a, b, c = md.dims(a=10, b=5, c=20)


@md.program
def product(x: md.Tensor[a, b], y: md.Tensor[b, c]):
    z = md.einsum(x, y, out=[a, c])
    return z
