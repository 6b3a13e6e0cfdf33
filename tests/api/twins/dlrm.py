# mypy: disable-error-code="type-arg,valid-type"
"""A recommender and its training step, in Python."""

import meshdsl as md

batch, table, rows, dense, model = md.dims(batch=128, table=8, rows=1000, dense=13, model=16)
bottom, top, feature, other, one = md.dims(bottom=64, top=64, feature=9, other=9, one=1)


@md.program
def dlrm(numbers: md.Tensor[batch, dense], ids: md.i32[batch, table], clicked: md.Tensor[batch]):
    table_rows = md.param([table, rows, model], init=md.normal(0.1))
    dense1 = md.param([dense, bottom])
    dense2 = md.param([bottom, model])
    pairs = md.param([feature, other, top])
    plain = md.param([model, top])
    out = md.param([top])

    found = table_rows.gather(rows, ids)
    z = md.einsum(
        md.relu(md.einsum(numbers, dense1, out=[batch, bottom])), dense2, out=[batch, model]
    )
    x = md.concat[(table, one) >> feature](found, z * md.ones[one]())
    match = md.einsum(x, x[feature >> other], out=[batch, feature, other])
    match = md.where(md.iota[feature] > md.iota[other], match, 0.0)
    h = md.relu(md.einsum(match, pairs, out=[batch, top]) + md.einsum(z, plain, out=[batch, top]))
    logit = md.einsum(h, out, out=[batch])
    loss = md.mean(md.softplus(logit) - clicked * logit)
    right = md.mean(md.cast((logit > 0.0) == (clicked > 0.5), "f32"))
    md.minimize(loss, md.adam(lr=3e-3))
    return loss, right
