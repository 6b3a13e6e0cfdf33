# mypy: disable-error-code="type-arg,valid-type,misc"
"""ResNet-50 in Python."""

import meshdsl as md

batch, color, classes = md.dims(batch=256, color=3, classes=1000)
h0, h, hp, h1, h2, h3, h4 = md.dims(h0=224, h=112, hp=56, h1=56, h2=28, h3=14, h4=7)
w0, w, wp, w1, w2, w3, w4 = md.dims(w0=224, w=112, wp=56, w1=56, w2=28, w3=14, w4=7)
c0, c1, c2, c3, c4 = md.dims(c0=64, c1=256, c2=512, c3=1024, c4=2048)
m1, m2, m3, m4 = md.dims(m1=64, m2=128, m3=256, m4=512)
n1, n2, n3, n4 = md.dims(n1=64, n2=128, n3=256, n4=512)
sh, sw, kh, kw, oh, ow = md.dims(sh=7, sw=7, kh=3, kw=3, oh=1, ow=1)
more1, more2, more3, more4 = md.dims(more1=2, more2=3, more3=5, more4=2)


@md.function
def normed(x: md.Tensor, learning, c: md.Dim, h: md.Dim, w: md.Dim):
    scale = md.param([c], init=md.ones())
    shift = md.param([c], init=md.zeros())
    average = md.param([c], init=md.zeros())
    variance = md.param([c], init=md.ones())
    m = md.mean[batch, h, w](x)
    v = md.mean[batch, h, w](md.square(x - m))
    n = batch * h * w
    md.update(average, average + learning * 0.1 * (m - average))
    md.update(variance, variance + learning * 0.1 * (v * n / (n - 1) - variance))
    m = learning * m + (1 - learning) * md.stop_gradient(average)
    v = learning * v + (1 - learning) * md.stop_gradient(variance)
    return (x - m) * md.rsqrt(v + 1e-5) * scale + shift


@md.function
def first(
    x: md.Tensor, learning, c: md.Dim, cin: md.Dim, m: md.Dim, n: md.Dim,
    h: md.Dim, w: md.Dim, ho: md.Dim, wo: md.Dim,
):  # fmt: skip
    k1 = md.param([m, cin], init=md.he())
    k2 = md.param([n, m, kh, kw], init=md.he())
    k3 = md.param([c, n], init=md.he())
    project = md.param([c, cin, oh, ow], init=md.he())
    y = md.relu(normed(md.einsum(x, k1, out=[batch, m, h, w]), learning, m, h, w))
    y = md.conv[h.by(kh) >> ho, w.by(kw) >> wo](y, k2, stride=h // ho, pad=1)
    y = md.relu(normed(y, learning, n, ho, wo))
    y = normed(md.einsum(y, k3, out=[batch, c, ho, wo]), learning, c, ho, wo)
    short = md.conv[h.by(oh) >> ho, w.by(ow) >> wo](x, project, stride=h // ho)
    return md.relu(y + normed(short, learning, c, ho, wo))


@md.function
def plain(x: md.Tensor, learning, c: md.Dim, m: md.Dim, n: md.Dim, h: md.Dim, w: md.Dim):
    k1 = md.param([m, c], init=md.he())
    k2 = md.param([n, m, kh, kw], init=md.he())
    k3 = md.param([c, n], init=md.he())
    y = md.relu(normed(md.einsum(x, k1, out=[batch, m, h, w]), learning, m, h, w))
    y = md.conv[h.by(kh), w.by(kw)](y, k2, pad="same")
    y = md.relu(normed(y, learning, n, h, w))
    y = normed(md.einsum(y, k3, out=[batch, c, h, w]), learning, c, h, w)
    return md.relu(x + y)


@md.function
def scores(images: md.Tensor[batch, color, h0, w0], learning) -> md.Tensor[batch, classes]:
    stem = md.param([c0, color, sh, sw], init=md.he())
    head = md.param([classes, c4], init=md.normal(0.01))
    bias = md.param([classes], init=md.zeros())
    x = md.conv[h0.by(sh) >> h, w0.by(sw) >> w](images, stem, stride=2, pad=3)
    x = md.relu(normed(x, learning, c0, h, w))
    x = md.max_pool[h.by(kh) >> hp, w.by(kw) >> wp](x, stride=2, pad=1)
    x1 = first(x, learning, c1, c0, m1, n1, hp, wp, h1, w1)

    def more_1(x1):
        x1 = plain(x1, learning, c1, m1, n1, h1, w1)
        return x1

    x1 = md.repeat(more1, more_1, x1)
    x2 = first(x1, learning, c2, c1, m2, n2, h1, w1, h2, w2)

    def more_2(x2):
        x2 = plain(x2, learning, c2, m2, n2, h2, w2)
        return x2

    x2 = md.repeat(more2, more_2, x2)
    x3 = first(x2, learning, c3, c2, m3, n3, h2, w2, h3, w3)

    def more_3(x3):
        x3 = plain(x3, learning, c3, m3, n3, h3, w3)
        return x3

    x3 = md.repeat(more3, more_3, x3)
    x4 = first(x3, learning, c4, c3, m4, n4, h3, w3, h4, w4)

    def more_4(x4):
        x4 = plain(x4, learning, c4, m4, n4, h4, w4)
        return x4

    x4 = md.repeat(more4, more_4, x4)
    return md.einsum(md.mean[h4, w4](x4), head, out=[batch, classes]) + bias


@md.program
def resnet50(images: md.Tensor[batch, color, h0, w0], labels: md.i32[batch]):
    logits = scores(images, 1.0)
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    rate = md.cosine(0.1, 450_000, warmup=25_000)
    md.minimize(loss, md.momentum(lr=rate, weight_decay=1e-4))
    return loss, logits
