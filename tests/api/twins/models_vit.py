# mypy: disable-error-code="type-arg,valid-type,misc,index"
"""ViT in Python."""

import meshdsl as md

batch, channels, height, width, rows = md.dims(
    batch=256, channels=3, height=224, width=224, rows=14
)
columns, down, right, patch, one = md.dims(columns=14, down=16, right=16, patch=196, one=1)
seq, model, heads, key, hidden = md.dims(seq=197, model=768, heads=12, key=64, hidden=3072)
classes, layers = md.dims(classes=1000, layers=12)
mem = md.dim("mem", like=seq)


@md.function
def norm(
    x: md.Tensor[..., model], g: md.Tensor[model], b: md.Tensor[model]
) -> md.Tensor[..., model]:
    y = x - md.mean[model](x)
    return y * md.rsqrt(md.mean[model](md.square(y)) + 1e-12) * g + b


@md.function
def attention(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
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
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    b1 = md.param([hidden], init=md.zeros())
    b2 = md.param([model], init=md.zeros())
    h = md.gelu(md.einsum(x, w1, out=[batch, seq, hidden]) + b1)
    return md.einsum(h, w2, out=[batch, seq, model]) + b2


@md.program
def vit(images: md.f32[batch, channels, height, width], labels: md.i32[batch]):
    patch_w = md.param([channels, down, right, model], init=md.normal(0.02))
    patch_b = md.param([model], init=md.zeros())
    token = md.param([model], init=md.normal(0.02))
    position = md.param([seq, model], init=md.normal(0.02))
    tiles = images[height >> (rows, down), width >> (columns, right)]
    patches = (
        md.einsum(tiles[(rows, columns) >> patch], patch_w, out=[batch, patch, model]) + patch_b
    )
    x = md.concat[(one, patch) >> seq](md.broadcast[batch, one](token), patches) + position

    def layer(x):
        g1 = md.param([model], init=md.ones())
        b1 = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.ones())
        b2 = md.param([model], init=md.zeros())
        x = x + attention(norm(x, g1, b1))
        x = x + mlp(norm(x, g2, b2))
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.ones())
    bf = md.param([model], init=md.zeros())
    out_w = md.param([model, classes], init=md.normal(0.02))
    out_b = md.param([classes], init=md.zeros())
    first = norm(x, gf, bf).pick(seq, 0)
    logits = md.einsum(first, out_w, out=[batch, classes]) + out_b
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    md.minimize(
        loss, md.adamw(lr=md.cosine(3e-3, 90_000, warmup=10_000), weight_decay=0.3, clip=1.0)
    )
    return loss, logits
