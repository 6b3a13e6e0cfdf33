# mypy: disable-error-code="type-arg,valid-type"
"""AlexNet in two towers and its training step, in Python."""

import meshdsl as md

n, colors, h, w, classes = md.dims(n=8, colors=3, h=63, w=63, classes=10)
h1, w1, h2, w2, h3, w3, h6, w6 = md.dims(h1=15, w1=15, h2=7, w2=7, h3=3, w3=3, h6=1, w6=1)
tower, other, c1, c2, c3, c4, c5 = md.dims(tower=2, other=2, c1=2, c2=6, c3=12, c4=8, c5=8)
wide, wide2 = md.dims(wide=16, wide2=16)
kh, kw, mh, mw, lh, lw = md.dims(kh=11, kw=11, mh=5, mw=5, lh=3, lw=3)


@md.function
def dense(x: md.Tensor[n, tower, c5, h6, w6]) -> md.Tensor[n, wide]:
    v6 = md.param([tower, c5, h6, w6, wide], init=md.he())
    e6 = md.param([wide], init=md.zeros())
    return md.relu(md.einsum(x, v6, out=[n, wide]) + e6)


@md.program
def alexnet(images: md.Tensor[n, colors, h, w], labels: md.i32[n]):
    k1 = md.param([tower, c1, colors, kh, kw], init=md.he())
    k2 = md.param([tower, c2, c1, mh, mw], init=md.he())
    k3 = md.param([tower, c3, other, c2, lh, lw], init=md.he())
    k4 = md.param([tower, c4, c3, lh, lw], init=md.he())
    k5 = md.param([tower, c5, c4, lh, lw], init=md.he())
    e1 = md.param([tower, c1], init=md.zeros())
    e2 = md.param([tower, c2], init=md.zeros())
    e3 = md.param([tower, c3], init=md.zeros())
    e4 = md.param([tower, c4], init=md.zeros())
    e5 = md.param([tower, c5], init=md.zeros())
    v7 = md.param([wide, wide2], init=md.he())
    e7 = md.param([wide2], init=md.zeros())
    v8 = md.param([wide2, classes])
    e8 = md.param([classes], init=md.zeros())

    x = md.relu(md.conv[h.by(kh) >> h1, w.by(kw) >> w1](images, k1, stride=4, pad=2) + e1)
    x = md.max_pool[h1.by(3) >> h2, w1.by(3) >> w2](x, stride=2)
    large, small = md.conv[h2.by(mh), w2.by(mw)], md.conv[h3.by(lh), w3.by(lw)]
    x = md.relu(large(x, k2, pad=2, out=[n, tower, c2, h2, w2]) + e2)
    x = md.max_pool[h2.by(3) >> h3, w2.by(3) >> w3](x, stride=2)
    x = md.relu(small(x[tower >> other], k3, pad=1) + e3)
    x = md.relu(small(x, k4, pad=1, out=[n, tower, c4, h3, w3]) + e4)
    x = md.relu(small(x, k5, pad=1, out=[n, tower, c5, h3, w3]) + e5)
    x = md.max_pool[h3.by(3) >> h6, w3.by(3) >> w6](x, stride=2)
    y = md.relu(md.einsum(dense(x), v7, out=[n, wide2]) + e7)
    logits = md.einsum(y, v8, out=[n, classes]) + e8
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    md.minimize(loss, md.sgd(lr=0.01))
    return loss
