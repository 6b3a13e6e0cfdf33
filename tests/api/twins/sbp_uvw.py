# mypy: disable-error-code="type-arg,valid-type"
"""U·V·W, twice, in Python."""

import meshdsl as md

m, a, t_cols, y_cols = md.dims(m=256, a=128, t_cols=1024, y_cols=16)
b, s_cols, z_cols = md.dims(b=128, s_cols=64, z_cols=256)


@md.program
def uvw(
    u: md.Tensor[m, a],
    v: md.Tensor[a, t_cols],
    w: md.Tensor[t_cols, y_cols],
    p: md.Tensor[m, b],
    q: md.Tensor[b, s_cols],
    r: md.Tensor[s_cols, z_cols],
):
    t = md.einsum(u, v, out=[m, t_cols])
    y = md.einsum(t, w, out=[m, y_cols])
    s = md.einsum(p, q, out=[m, s_cols])
    z = md.einsum(s, r, out=[m, z_cols])
    return y, z
