# mypy: disable-error-code="type-arg,valid-type,misc"
"""CLIP in Python."""

import meshdsl as md

batch, key, embed = md.dims(batch=1024, key=64, embed=512)
height, width, color, down, right = md.dims(height=224, width=224, color=3, down=32, right=32)
rows, columns, patches, one, places = md.dims(rows=7, columns=7, patches=49, one=1, places=50)
vmodel, vheads, vhidden, vlayers = md.dims(vmodel=768, vheads=12, vhidden=3072, vlayers=12)
vocab, seq, context, model = md.dims(vocab=49408, seq=77, context=77, model=512)
heads, hidden, layers = md.dims(heads=8, hidden=2048, layers=12)
other, spot, mem = (
    md.dim("other", like=batch),
    md.dim("spot", like=places),
    md.dim("mem", like=seq),
)


@md.function
def attend(x: md.Tensor, seq: md.Dim, mem: md.Dim, model: md.Dim, heads: md.Dim):
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    wo = md.param([heads, key, model], init=md.normal(0.02))
    bq = md.param([heads, key], init=md.zeros())
    bk = md.param([heads, key], init=md.zeros())
    bv = md.param([heads, key], init=md.zeros())
    bo = md.param([model], init=md.zeros())
    q = md.einsum(x, wq, out=[batch, heads, seq, key]) + bq
    k = (md.einsum(x, wk, out=[batch, heads, seq, key]) + bk)[seq >> mem]
    v = (md.einsum(x, wv, out=[batch, heads, seq, key]) + bv)[seq >> mem]
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model]) + bo


@md.function
def mlp(x: md.Tensor, seq: md.Dim, model: md.Dim, hidden: md.Dim):
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    b1 = md.param([hidden], init=md.zeros())
    b2 = md.param([model], init=md.zeros())
    up = md.einsum(x, w1, out=[batch, seq, hidden]) + b1
    return md.einsum(up * md.sigmoid(1.702 * up), w2, out=[batch, seq, model]) + b2


@md.function
def causal(x: md.Tensor, seq: md.Dim, mem: md.Dim, model: md.Dim, heads: md.Dim):
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    wo = md.param([heads, key, model], init=md.normal(0.02))
    bq = md.param([heads, key], init=md.zeros())
    bk = md.param([heads, key], init=md.zeros())
    bv = md.param([heads, key], init=md.zeros())
    bo = md.param([model], init=md.zeros())
    q = md.einsum(x, wq, out=[batch, heads, seq, key]) + bq
    k = (md.einsum(x, wk, out=[batch, heads, seq, key]) + bk)[seq >> mem]
    v = (md.einsum(x, wv, out=[batch, heads, seq, key]) + bv)[seq >> mem]
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model]) + bo


@md.program
def clip(images: md.Tensor[batch, color, height, width], tokens: md.i32[batch, seq]):
    begin = md.param([vmodel], init=md.normal(0.02))
    patch = md.param([color, down, right, vmodel], init=md.normal(0.02))
    vposition = md.param([places, vmodel], init=md.normal(0.02))
    vg0 = md.param([vmodel], init=md.ones())
    vg0b = md.param([vmodel], init=md.zeros())
    tiles = images[height >> (rows, down), width >> (columns, right)]
    seen = md.einsum(tiles, patch, out=[batch, rows, columns, vmodel])[(rows, columns) >> patches]
    x = md.concat[(one, patches) >> places](begin * md.ones[batch, one](), seen)
    x = md.layer_norm[vmodel](x + vposition, vg0, vg0b)

    def see(x):
        vg1 = md.param([vmodel], init=md.ones())
        vg1b = md.param([vmodel], init=md.zeros())
        vg2 = md.param([vmodel], init=md.ones())
        vg2b = md.param([vmodel], init=md.zeros())
        x = x + attend(md.layer_norm[vmodel](x, vg1, vg1b), places, spot, vmodel, vheads)
        x = x + mlp(md.layer_norm[vmodel](x, vg2, vg2b), places, vmodel, vhidden)
        return x

    x = md.repeat(vlayers, see, x)
    vg3 = md.param([vmodel], init=md.ones())
    vg3b = md.param([vmodel], init=md.zeros())
    of_image = md.param([vmodel, embed], init=md.normal(0.02))
    image = md.einsum(
        md.layer_norm[vmodel](x.pick(places, 0), vg3, vg3b), of_image, out=[batch, embed]
    )

    word = md.param([vocab, model], init=md.normal(0.02))
    position = md.param([context, model], init=md.normal(0.01))
    y = word.gather(vocab, tokens) + position.slice(context, None, seq, seq)

    def read(y):
        g1 = md.param([model], init=md.ones())
        g1b = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.ones())
        g2b = md.param([model], init=md.zeros())
        y = y + causal(md.layer_norm[model](y, g1, g1b), seq, mem, model, heads)
        y = y + mlp(md.layer_norm[model](y, g2, g2b), seq, model, hidden)
        return y

    y = md.repeat(layers, read, y)
    g3 = md.param([model], init=md.ones())
    g3b = md.param([model], init=md.zeros())
    of_text = md.param([model, embed], init=md.normal(0.02))
    end = md.argmax[seq](tokens)
    text = md.einsum(md.layer_norm[model](y.gather(seq, end), g3, g3b), of_text, out=[batch, embed])

    logit_scale = md.param([], init=md.uniform(2.6591, 2.6594))
    image = image * md.rsqrt(md.sum[embed](md.square(image)))
    text = text * md.rsqrt(md.sum[embed](md.square(text)))
    logits = md.exp(logit_scale) * md.einsum(image, text[batch >> other], out=[batch, other])
    by_image = md.cross_entropy[other](logits, md.iota[batch])
    by_text = md.cross_entropy[batch](logits, md.iota[other])
    loss = (md.mean(by_image) + md.mean(by_text)) / 2
    rate = md.cosine(5e-4, 400_000, warmup=2000)
    md.minimize(loss, md.adamw(lr=rate, beta2=0.98, eps=1e-6, weight_decay=0.2))
    return loss, logits
