# mypy: disable-error-code="type-arg,valid-type"
"""Any configuration is correct, in Python."""

import builtins

import meshdsl as md

m, k, n = md.dims(m=8, k=16, n=8)


@md.program(name="any")
def anything(a: md.Tensor[m, k], b: md.Tensor[k, n]):
    t = md.einsum(a, b, out=[m, n])
    h = md.relu(t)
    r = md.max[n](h)
    c = md.sum[m](h)
    low = md.min[k](a)
    assert builtins.all(x.dtype == "f32" for x in (t, h, r, c, low))
    return h, r + 0.0, c, low
