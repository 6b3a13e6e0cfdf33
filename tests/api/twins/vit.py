# mypy: disable-error-code="type-arg,valid-type"
"""A vision transformer and its training step, in Python."""

import meshdsl as md

batch, height, width, rows, columns = md.dims(batch=120, height=8, width=8, rows=4, columns=4)
down, right, patch, pixel, mem = md.dims(down=2, right=2, patch=16, pixel=4, mem=16)
model, heads, key, hidden = md.dims(model=32, heads=4, key=8, hidden=64)
classes, layers = md.dims(classes=10, layers=2)


@md.function
def attend(x: md.Tensor[batch, patch, model]) -> md.Tensor[batch, patch, model]:
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    q = md.einsum(x, wq, out=[batch, heads, patch, key])
    k = md.einsum(x, wk, out=[batch, heads, patch, key])[patch >> mem]
    v = md.einsum(x, wv, out=[batch, heads, patch, key])[patch >> mem]
    s = md.einsum(q, k, out=[batch, heads, patch, mem]) / md.sqrt(key)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, patch, key])
    return md.einsum(o, wo, out=[batch, patch, model])


@md.function
def mlp(x: md.Tensor[batch, patch, model]) -> md.Tensor[batch, patch, model]:
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    h = md.dropout(md.gelu(md.einsum(x, w1, out=[batch, patch, hidden])), 0.1)
    return md.einsum(h, w2, out=[batch, patch, model])


@md.program
def vit(images: md.Tensor[batch, height, width], labels: md.i32[batch]):
    embed = md.param([pixel, model])
    position = md.param([patch, model], init=md.normal(0.1))
    out = md.param([model, classes])

    tiles = images[height >> (rows, down), width >> (columns, right)]
    patches = tiles[(rows, columns) >> patch, (down, right) >> pixel]
    x = md.dropout(md.einsum(patches, embed, out=[batch, patch, model]) + position, 0.1)

    def layer(x):
        x = x + md.dropout(attend(md.layer_norm[model](x)), 0.1)
        x = x + mlp(md.layer_norm[model](x))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.mean[patch](md.layer_norm[model](x)), out, out=[batch, classes])
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    correct = md.mean(md.cast(md.argmax[classes](logits) == labels, "f32"))
    rate = md.cosine(3e-3, 500, warmup=50)
    md.minimize(loss, md.adamw(lr=rate, weight_decay=0.05, clip=1.0))
    return loss, correct
