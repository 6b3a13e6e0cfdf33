# mypy: disable-error-code="type-arg,valid-type,misc"
"""DLRM with the names of its authors' code, in Python."""

import meshdsl as md

batch, table, rows, dense, model = md.dims(
    batch=2048, table=26, rows=10_000_000, dense=13, model=64
)
bottom1, bottom2, top1, top2, top3 = md.dims(bottom1=512, bottom2=256, top1=512, top2=512, top3=256)
one, feature, match, pair = md.dims(one=1, feature=27, match=729, pair=351)
other = md.dim("other", like=feature)


@md.program
def dlrm(numbers: md.Tensor[batch, dense], ids: md.i32[batch, table], clicked: md.Tensor[batch]):
    emb = md.param([table, rows, model], init=md.normal(0.001))
    w1 = md.param([dense, bottom1])
    b1 = md.param([bottom1], init=md.zeros())
    w2 = md.param([bottom1, bottom2])
    b2 = md.param([bottom2], init=md.zeros())
    w3 = md.param([bottom2, model])
    b3 = md.param([model], init=md.zeros())
    plain = md.param([model, top1])
    pairs = md.param([pair, top1])
    b4 = md.param([top1], init=md.zeros())
    w5 = md.param([top1, top2])
    b5 = md.param([top2], init=md.zeros())
    w6 = md.param([top2, top3])
    b6 = md.param([top3], init=md.zeros())
    w7 = md.param([top3, one])
    b7 = md.param([one], init=md.zeros())

    found = emb.gather(rows, ids)
    z = md.relu(md.einsum(numbers, w1, out=[batch, bottom1]) + b1)
    z = md.relu(md.einsum(z, w2, out=[batch, bottom2]) + b2)
    z = md.relu(md.einsum(z, w3, out=[batch, model]) + b3)
    x = md.concat[(one, table) >> feature](z * md.ones[one](), found)

    matches = md.einsum(x, x[feature >> other], out=[batch, feature, other])
    until = md.iota[feature] * (md.iota[feature] - 1)
    row = md.sum[feature](md.cast(until <= 2 * md.iota[pair], "i32")) - 1
    column = md.iota[pair] - row * (row - 1) // 2
    flat = matches[(feature, other) >> match]
    below = flat.gather(match, row * feature + column)

    h = md.relu(
        md.einsum(z, plain, out=[batch, top1]) + md.einsum(below, pairs, out=[batch, top1]) + b4
    )
    h = md.relu(md.einsum(h, w5, out=[batch, top2]) + b5)
    h = md.relu(md.einsum(h, w6, out=[batch, top3]) + b6)
    logits = (md.einsum(h, w7, out=[batch, one]) + b7).pick(one, 0)
    loss = md.mean(md.softplus(logits) - clicked * logits)
    md.minimize(loss, md.adamw(lr=1e-3, weight_decay=0.01, clip=1.0))
    return loss, logits
