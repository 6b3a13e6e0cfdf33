# mypy: disable-error-code="type-arg,valid-type"
"""VGG-11 and its training step, in Python."""

import meshdsl as md

n, colors, h, w, classes, kh, kw = md.dims(n=16, colors=3, h=32, w=32, classes=10, kh=3, kw=3)
h1, w1, h2, w2, h3, w3 = md.dims(h1=16, w1=16, h2=8, w2=8, h3=4, w3=4)
h4, w4, h5, w5 = md.dims(h4=2, w4=2, h5=1, w5=1)
c1, c2, c3, c3b, c4, c4b, c5, c5b = md.dims(
    c1=8, c2=16, c3=32, c3b=32, c4=64, c4b=64, c5=64, c5b=64
)
wide, wide2 = md.dims(wide=64, wide2=64)


@md.program
def vgg(images: md.Tensor[n, colors, h, w], labels: md.i32[n]):
    k1 = md.param([c1, colors, kh, kw], init=md.he())
    k2 = md.param([c2, c1, kh, kw], init=md.he())
    k3 = md.param([c3, c2, kh, kw], init=md.he())
    k3b = md.param([c3b, c3, kh, kw], init=md.he())
    k4 = md.param([c4, c3b, kh, kw], init=md.he())
    k4b = md.param([c4b, c4, kh, kw], init=md.he())
    k5 = md.param([c5, c4b, kh, kw], init=md.he())
    k5b = md.param([c5b, c5, kh, kw], init=md.he())
    e1 = md.param([c1], init=md.zeros())
    e2 = md.param([c2], init=md.zeros())
    e3 = md.param([c3], init=md.zeros())
    e3b = md.param([c3b], init=md.zeros())
    e4 = md.param([c4], init=md.zeros())
    e4b = md.param([c4b], init=md.zeros())
    e5 = md.param([c5], init=md.zeros())
    e5b = md.param([c5b], init=md.zeros())
    v6 = md.param([c5b, h5, w5, wide], init=md.he())
    e6 = md.param([wide], init=md.zeros())
    v7 = md.param([wide, wide2], init=md.he())
    e7 = md.param([wide2], init=md.zeros())
    v8 = md.param([wide2, classes])
    e8 = md.param([classes], init=md.zeros())

    conv1 = md.relu(md.conv[h.by(kh), w.by(kw)](images, k1, pad=1, out=[n, c1, h, w]) + e1)
    x = md.max_pool[h.by(2) >> h1, w.by(2) >> w1](conv1, stride=2)
    conv2 = md.relu(md.conv[h1.by(kh), w1.by(kw)](x, k2, pad=1, out=[n, c2, h1, w1]) + e2)
    x = md.max_pool[h1.by(2) >> h2, w1.by(2) >> w2](conv2, stride=2)
    third, fourth, fifth = (md.conv[a.by(kh), b.by(kw)] for a, b in ((h2, w2), (h3, w3), (h4, w4)))
    conv3 = md.relu(third(x, k3, pad=1, out=[n, c3, h2, w2]) + e3)
    conv3b = md.relu(third(conv3, k3b, pad=1, out=[n, c3b, h2, w2]) + e3b)
    x = md.max_pool[h2.by(2) >> h3, w2.by(2) >> w3](conv3b, stride=2)
    conv4 = md.relu(fourth(x, k4, pad=1, out=[n, c4, h3, w3]) + e4)
    conv4b = md.relu(fourth(conv4, k4b, pad=1, out=[n, c4b, h3, w3]) + e4b)
    x = md.max_pool[h3.by(2) >> h4, w3.by(2) >> w4](conv4b, stride=2)
    conv5 = md.relu(fifth(x, k5, pad=1, out=[n, c5, h4, w4]) + e5)
    conv5b = md.relu(fifth(conv5, k5b, pad=1, out=[n, c5b, h4, w4]) + e5b)
    x = md.max_pool[h4.by(2) >> h5, w4.by(2) >> w5](conv5b, stride=2)
    dense = md.relu(md.einsum(x, v6, out=[n, wide]) + e6)
    hidden = md.relu(md.einsum(dense, v7, out=[n, wide2]) + e7)
    logits = md.einsum(hidden, v8, out=[n, classes]) + e8
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    md.minimize(loss, md.momentum(lr=0.05, clip=1.0))
    return loss
