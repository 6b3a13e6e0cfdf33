# mypy: disable-error-code="type-arg,valid-type"
"""Handwritten digits in a pipeline, in Python."""

import meshdsl as md

batch, pixels, hidden, classes, layers = md.dims(
    batch=1408, pixels=64, hidden=128, classes=10, layers=4
)
feat = md.dim("feat", hidden)


@md.program
def digits(images: md.Tensor[batch, pixels], labels: md.i32[batch]):
    w_in = md.param([pixels, hidden], init=md.glorot())
    b_in = md.param([hidden], init=md.zeros())
    x = md.relu(md.einsum(images, w_in, out=[batch, hidden]) + b_in)

    def layer(x):
        w = md.param([hidden, feat], init=md.he())
        b = md.param([feat], init=md.zeros())
        x = md.relu(md.einsum(x, w, out=[batch, feat]) + b).rename(feat, hidden)
        return x

    x = md.repeat(layers, layer, x)
    w_out = md.param([hidden, classes], init=md.glorot())
    b_out = md.param([classes], init=md.zeros())
    logits = md.einsum(x, w_out, out=[batch, classes]) + b_out
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    accuracy = md.mean(md.where(md.argmax[classes](logits) == labels, 1.0, 0.0))
    md.minimize(loss, md.sgd(lr=0.1))
    return loss, accuracy
