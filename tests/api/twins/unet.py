# mypy: disable-error-code="type-arg,valid-type"
"""U-Net and its training step, in Python."""

import meshdsl as md

n, colors, classes, kh, kw, uh, uw = md.dims(n=2, colors=1, classes=2, kh=3, kw=3, uh=2, uw=2)
h, h2, h3, h4, h5 = md.dims(h=32, h2=16, h3=8, h4=4, h5=2)
w, w2, w3, w4, w5 = md.dims(w=32, w2=16, w3=8, w4=4, w5=2)
a, a2, a3, a4, a5 = md.dims(a=4, a2=8, a3=16, a4=32, a5=64)
b, b2, b3, b4, b5 = md.dims(b=4, b2=8, b3=16, b4=32, b5=64)
ab, ab2, ab3, ab4 = md.dims(ab=8, ab2=16, ab3=32, ab4=64)


@md.function
def double(x: md.Tensor, h: md.Dim, w: md.Dim, before: md.Dim, a: md.Dim, b: md.Dim):
    k1 = md.param([a, before, kh, kw], init=md.he())
    k2 = md.param([b, a, kh, kw], init=md.he())
    x = md.relu(md.conv[h.by(kh), w.by(kw)](x, k1, pad="same"))
    return md.relu(md.conv[h.by(kh), w.by(kw)](x, k2, pad="same"))


@md.function
def down(x: md.Tensor, high, wide, before, h, w, a, b):
    return double(md.max_pool[high.by(2) >> h, wide.by(2) >> w](x), h, w, before, a, b)


@md.function
def up(x: md.Tensor, seen: md.Tensor, high, wide, before, h, w, a, b, ab):
    k = md.param([before, a, uh, uw], init=md.he())
    x = md.upconv[high.by(uh) >> h, wide.by(uw) >> w](x, k, stride=2)
    return double(md.concat[(a, b) >> ab](x, seen), h, w, ab, a, b)


@md.program
def unet(image: md.Tensor[n, colors, h, w], mask: md.i32[n, h, w]):
    last = md.param([b, classes])
    x1 = double(image, h, w, colors, a, b)
    x2 = down(x1, h, w, b, h2, w2, a2, b2)
    x3 = down(x2, h2, w2, b2, h3, w3, a3, b3)
    x4 = down(x3, h3, w3, b3, h4, w4, a4, b4)
    x5 = down(x4, h4, w4, b4, h5, w5, a5, b5)
    y4 = up(x5, x4, h5, w5, b5, h4, w4, a4, b4, ab4)
    y3 = up(y4, x3, h4, w4, b4, h3, w3, a3, b3, ab3)
    y2 = up(y3, x2, h3, w3, b3, h2, w2, a2, b2, ab2)
    y1 = up(y2, x1, h2, w2, b2, h, w, a, b, ab)
    logits = md.einsum(y1, last, out=[n, h, w, classes])
    loss = md.mean(md.cross_entropy[classes](logits, mask))
    right = md.mean(md.cast(md.argmax[classes](logits) == mask, md.f32))
    md.minimize(loss, md.adam(lr=3e-3))
    return loss, right
