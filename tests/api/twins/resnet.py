# mypy: disable-error-code="type-arg,valid-type"
"""A residual network on images of digits and its training step, in Python."""

import meshdsl as md

batch, h, w, h2, w2, kh, kw = md.dims(batch=96, h=8, w=8, h2=4, w2=4, kh=3, kw=3)
c, cin, c2, cin2, classes = md.dims(c=16, cin=16, c2=32, cin2=32, classes=10)


@md.function
def normed(x: md.Tensor, learning, batch: md.Dim, c: md.Dim, h: md.Dim, w: md.Dim):
    scale = md.param([c], init=md.ones())
    shift = md.param([c], init=md.zeros())
    running_mean = md.param([c], init=md.zeros())
    running_var = md.param([c], init=md.ones())
    m = md.mean[batch, h, w](x)
    v = md.mean[batch, h, w](md.square(x - m))
    md.update(running_mean, running_mean + learning * 0.1 * (m - running_mean))
    md.update(running_var, running_var + learning * 0.1 * (v - running_var))
    m = learning * m + (1 - learning) * md.stop_gradient(running_mean)
    v = learning * v + (1 - learning) * md.stop_gradient(running_var)
    return (x - m) * md.rsqrt(v + 1e-5) * scale + shift


@md.function
def block(x: md.Tensor, learning, c: md.Dim, cin: md.Dim, h: md.Dim, w: md.Dim):
    k1 = md.param([c, cin, kh, kw], init=md.he())
    k2 = md.param([c, cin, kh, kw], init=md.he())
    along = md.conv[h.by(kh), w.by(kw)]
    a = md.relu(normed(along(x[c >> cin], k1, pad="same"), learning, batch, c, h, w))
    return md.relu(x + normed(along(a[c >> cin], k2, pad="same"), learning, batch, c, h, w))


@md.function
def scores(images: md.Tensor[batch, h, w], learning) -> md.Tensor[batch, classes]:
    stem = md.param([c, kh, kw], init=md.he())
    down = md.param([c2, c, kh, kw], init=md.he())
    last = md.param([c2, classes])
    bias = md.param([classes], init=md.zeros())
    x = md.relu(md.conv[h.by(kh), w.by(kw)](images, stem, pad="same"))
    x = block(x, learning, c, cin, h, w)
    halved = md.conv[h.by(kh) >> h2, w.by(kw) >> w2]
    y = md.relu(halved(x, down, stride=2, pad="same"))
    y = block(y, learning, c2, cin2, h2, w2)
    return md.einsum(md.mean[h2, w2](y), last, out=[batch, classes]) + bias


@md.program
def resnet(images: md.Tensor[batch, h, w], labels: md.i32[batch]):
    loss = md.mean(md.cross_entropy[classes](scores(images, 1.0), labels))
    md.minimize(loss, md.adamw(lr=md.cosine(0.02, 60), weight_decay=0.1))
    return loss
