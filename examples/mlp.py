"""The two-layer example of the Mesh-TensorFlow paper in Python; mlp.mdsl says the same."""

import meshdsl as md

batch, io = md.dims(batch=64, io=512)
hidden = md.dim("hidden", 4 * io)

square = md.mesh(rows=2, cols=2)
hybrid = md.layout(batch="rows", hidden="cols")


@md.program
def mlp(x: md.Tensor[batch, io], target: md.Tensor[batch, io]):
    """Mean squared error of two layers."""
    w = md.param([io, hidden])
    b = md.param([hidden], init=md.zeros())
    v = md.param([hidden, io])

    h = md.relu(md.einsum(x, w, out=[batch, hidden]) + b)
    y = md.einsum(h, v, out=[batch, io])
    loss = md.mean((y - target) ** 2)
    return loss, y


if __name__ == "__main__":
    plan = mlp.compile(square, hybrid)
    print(plan.explain())
    loss, y = plan(**plan.sample())
    print(f"loss {loss:.6f}, y {y.shape}")
