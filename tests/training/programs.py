"""Small programs that are differentiated: one for each way in which a gradient can go wrong.

All return `loss` and minimise it with a learning rate of 1, so that a step subtracts the gradient.
Layouts are given as `mesh layout`, several to a program.
"""

from __future__ import annotations

from dataclasses import dataclass

DIMS = (
    "dim batch = 4, io = 8, out = io, hidden = 16, layers = 3, steps = 2, seq = 4, vocab = 8\n"
    "dim k4 = 4, k5 = seq\n"
)
HEAD = "program p(x[batch, io], target[batch, io]) {"
TAIL = "  return loss\n  minimize loss with sgd(lr=1.0)\n}\n"


@dataclass(frozen=True, slots=True)
class Differentiated:
    """The body of a program on `x` and `target`, and where it runs.

    `overwrites`: its forward pass works in place, on what torch's autograd would read again.
    """

    body: str
    layouts: tuple[str, ...]
    head: str = HEAD
    overwrites: bool = False

    @property
    def text(self) -> str:
        lines = "".join(f"  {line.strip()}\n" for line in self.body.strip().splitlines())
        return f"{DIMS}{self.head}\n{lines}{TAIL}"


MLP = """
param w[io, hidden]
param b[hidden] = zeros()
param v[hidden, io]
h = relu(einsum(x, w -> [batch, hidden]) + b)
y = einsum(h, v -> [batch, io])
loss = mean((y - target)^2)
"""

DATA = "x:4 { batch -> x }"
MODEL = "x:2 { hidden -> x }"
BOTH = "x:2,y:2 { batch -> x, hidden -> y }"
CONTRACTED = "x:4 { io -> x }"
FULLY = "x:2,y:2 { batch -> x, hidden -> y, params: io -> x, grads: io -> x }"
KEPT = "x:4 { batch -> x, params: io -> x keep }"
GRADS = "x:4 { batch -> x, grads: io -> x }"

PROGRAMS = {
    "mlp": Differentiated(MLP, (DATA, MODEL, BOTH, CONTRACTED, FULLY, KEPT, GRADS)),
    "loop with stacked, captured and carried": Differentiated(
        """
        param s[io] = ones()
        param u[layers, io]
        h = x
        total = sum[io](x * s)
        repeat layers {
            param w[io, hidden]
            param v[hidden, io]
            z = tanh(einsum(h * s, w -> [batch, hidden]))
            total = total + sum[hidden](z * z)
            h = h + einsum(z, v -> [batch, io]) * u
        }
        loss = mean((h - target)^2) + mean(total)
        """,
        (DATA, BOTH, FULLY, KEPT, CONTRACTED),
    ),
    "a carry that is only read in the loop": Differentiated(
        """
        param w[io]
        a = x
        b = target
        repeat layers {
            c = a
            a = tanh(b * w)
            b = c
        }
        loss = mean(a) + sum(x * w)
        """,
        (DATA, CONTRACTED),
    ),
    "nested loops": Differentiated(
        """
        param s[io]
        h = x
        repeat layers {
            param w[io]
            repeat steps {
                param v[io]
                h = tanh(h * v + w) * s
            }
            h = h + w
        }
        loss = mean(h * h)
        """,
        (DATA, CONTRACTED, KEPT),
    ),
    "a loop's outputs, and those of a loop in it": Differentiated(
        """
        param w[io, hidden]
        param u[hidden, out]
        s = zeros[batch, hidden]()
        repeat layers {
            s = tanh(s + einsum(x, w -> [batch, hidden]))
            h = s
            repeat steps {
                param v[hidden]
                s = s * v
                inner = tanh(s)
            }
            first = inner[steps = 0] * h
        }
        y = einsum(h + first, u -> [batch, layers, out])
        loss = mean(square(y)) + mean(sum[layers, steps](inner * v)) + mean(s)
        """,
        (DATA, MODEL, BOTH, FULLY, KEPT),
    ),
    "a loop's outputs read by a later loop": Differentiated(
        """
        param w[io]
        h = x
        repeat layers {
            h = tanh(h * w)
            g = h[io -> out]
        }
        z = target[io -> out]
        repeat layers { z = z + sin(g) * w[io -> out] }
        loss = mean(z)
        """,
        (DATA, CONTRACTED),
    ),
    "a loop's outputs in recompute, and a gradient by them": Differentiated(
        """
        param w[io]
        recompute {
            h = x
            repeat layers {
                h = h * w + x
                g = h
            }
        }
        d = grad(sum(square(g) * target), g)
        recompute {
            repeat layers {
                e = tanh(d * w)
            }
        }
        loss = mean(e * g)
        """,
        (DATA, CONTRACTED, FULLY),
    ),
    "a stack used by itself in a loop": Differentiated(
        """
        param w[layers, io]
        h = x + sum[layers](w)
        repeat layers { h = tanh(h * w) + einsum(h, w -> [batch]) }
        loss = mean(h)
        """,
        (DATA, CONTRACTED, "x:2 { params: io -> x }"),
    ),
    "recompute": Differentiated(
        """
        param w[io, hidden]
        param v[hidden, io]
        recompute {
            h = gelu(einsum(x, w -> [batch, hidden]))
            y = sin(einsum(h, v -> [batch, io]))
        }
        loss = mean((y - target)^2) + mean(h)
        """,
        (DATA, BOTH, FULLY, KEPT),
    ),
    "recompute inside a loop": Differentiated(
        """
        param s[io] = ones()
        h = x
        repeat layers {
            recompute {
                param w[io, hidden]
                param v[hidden, io]
                z = tanh(einsum(h * s, w -> [batch, hidden]))
                h = h + einsum(z, v -> [batch, io])
            }
        }
        loss = mean((h - target)^2)
        """,
        (DATA, BOTH, FULLY),
    ),
    "recompute around a loop": Differentiated(
        """
        param t[io, hidden]
        recompute {
            q = sigmoid(einsum(x, t -> [batch, hidden]))
            repeat layers {
                param r[hidden]
                q = q + square(q) * r
            }
            q = square(q)
        }
        loss = mean(q * q)
        """,
        (DATA, BOTH, FULLY),
    ),
    "softmax, norms and cross-entropy": Differentiated(
        """
        param g[io] = ones()
        param b[io] = zeros()
        param w[io, hidden]
        param v[hidden, vocab]
        h = layer_norm[io](x, g, b)
        a = softmax[hidden](einsum(h, w -> [batch, hidden]))
        c = log_softmax[hidden](einsum(rms_norm[io](x, g), w -> [batch, hidden]))
        z = logsumexp[hidden](c * a)
        logits = einsum(a + c, v -> [batch, vocab])
        loss = mean(cross_entropy[vocab](logits, ids)) + mean(z * sum[io](target))
        """,
        (
            DATA,
            BOTH,
            "x:2,y:2 { io -> x, vocab -> y }",
            CONTRACTED,
            FULLY,
            "x:2,y:2 { hidden -> (x, y) }",
        ),
        "program p(x[batch, io], target[batch, io], ids[batch]: i32) {",
    ),
    "embedding, tied to the output": Differentiated(
        """
        param embed[vocab, io] = normal(1.0)
        param pos[seq, io] = normal(0.5)
        h = tanh(embed[vocab = tokens] + pos)
        logits = einsum(rms_norm[io](h), embed -> [batch, seq, vocab])
        loss = mean(cross_entropy[vocab](logits, targets))
        """,
        (
            DATA,
            "x:2 { vocab -> x }",
            "x:2,y:2 { batch -> x, vocab -> y }",
            CONTRACTED,
            "x:2,y:2 { batch -> x, seq -> y, params: vocab -> x }",
            KEPT,
        ),
        "program p(tokens[batch, seq]: i32, targets[batch, seq]: i32) {",
    ),
    "cumsum, shift, concat, pad, slice": Differentiated(
        """
        param w[io]
        both = cumsum[io](x * w)
        moved = shift[io](both, 1) + shift[io](both * w, -2)
        joined = concat[io -> hidden](both, moved)
        part = joined[hidden = 3:7 -> seq]
        wide = pad[seq -> vocab](part, 1, 3)
        one = joined[hidden = 5]
        loss = mean(joined * joined) + mean(square(wide)) + mean(one * sum[seq](part))
        """,
        (DATA, CONTRACTED, "x:2 { hidden -> x, seq -> x, vocab -> x }"),
    ),
    "views": Differentiated(
        """
        param w[io, hidden]
        h = einsum(x, w -> [batch, hidden])
        a = h[hidden -> (seq, k4)]
        b = a[seq -> k5]
        s = softmax[k5](einsum(a, b -> [batch, seq, k5]))
        o = einsum(s, b -> [batch, seq, k4])[(seq, k4) -> hidden]
        loss = mean(o * h) + mean(square(h[hidden = 2]))
        """,
        (DATA, BOTH, "x:2 { seq -> x }", "x:2,y:2 { batch -> x, hidden -> y, seq -> y }"),
    ),
    "where, maxima and products": Differentiated(
        """
        param w[io]
        h = x * w
        a = where(h > 0.0, h * 3.0, 0.1 * h)
        b = maximum(h, target) - minimum(h, 0.5) + abs(h)
        loss = mean(a * b) + sum(max[io](h)) + mean(prod[io](tanh(h) + 1.5)) + min(h + target)
        """,
        (DATA, CONTRACTED, "x:2,y:2 { batch -> x, io -> y }"),
    ),
    "stop_gradient": Differentiated(
        """
        param w[io, out]
        h = einsum(x, w -> [batch, out])
        loss = mean(h * stop_gradient(h)) + mean(stop_gradient(square(h)) + h)
        """,
        (DATA, CONTRACTED),
    ),
    "a value used many times": Differentiated(
        """
        param w[io, hidden]
        param k[hidden]
        h = einsum(x, w -> [batch, hidden])
        q = h * k
        loss = mean(q * h + h) + mean(square(h)) - mean(h / (abs(q) + 2.0)) + sum(h)
        """,
        (DATA, MODEL, BOTH, FULLY, CONTRACTED),
    ),
    "a loss of sums that are partial": Differentiated(
        """
        param w[io, hidden]
        param v[hidden, io]
        y = einsum(einsum(x, w -> [batch, hidden]), v -> [batch, io])
        loss = sum(y + target) + 0.5 * sum(-y)
        """,
        (DATA, MODEL, BOTH, CONTRACTED),
    ),
    "gradient of a gradient": Differentiated(
        """
        param w[io, hidden]
        param v[hidden, io]
        h = tanh(einsum(x, w -> [batch, hidden]))
        y = einsum(h, v -> [batch, io])
        inner = mean((y - target)^2)
        dx, dw = grad(inner, x, w)
        loss = inner + sum(square(dx)) + mean(dw * w)
        """,
        (DATA, MODEL, BOTH, "x:4 { batch -> x, params: io -> x }"),
    ),
    "gradient of a gradient through norms": Differentiated(
        """
        param w[io, vocab]
        param g[io] = ones()
        logits = einsum(layer_norm[io](x, g) + rms_norm[io](x), w -> [batch, vocab])
        inner = mean(cross_entropy[vocab](logits, ids)) + mean(square(softmax[vocab](logits)))
        loss = sum(square(grad(inner, x))) + inner
        """,
        (DATA, "x:2 { vocab -> x }", CONTRACTED),
        "program p(x[batch, io], ids[batch]: i32) {",
        overwrites=True,
    ),
    "gradient of a gradient through a loop": Differentiated(
        """
        param w[layers, io]
        h = x
        repeat layers { h = tanh(h * w) + h }
        inner = mean(h * h)
        d = grad(inner, x)
        loss = sum(square(d - target))
        """,
        (DATA, CONTRACTED),
    ),
    "a gradient by a stack, read in loops": Differentiated(
        """
        param w[layers, io]
        param u[layers, steps, io]
        h = x
        repeat layers {
            h = tanh(h * w)
            repeat steps { h = tanh(h * u) }
        }
        dw, du = grad(mean(h * h), w, u)
        z = target
        repeat layers { z = z * w + dw }
        repeat steps {
            repeat layers { z = tanh(z + dw * du) }
        }
        loss = mean(z * z)
        """,
        (DATA, CONTRACTED, KEPT),
    ),
    "gradients inside a loop": Differentiated(
        """
        param w[io, hidden]
        z = zeros[batch, io]()
        repeat steps {
            e = square(einsum(z + x, w -> [batch, hidden]))
            z = z - 0.1 * grad(sum(e), z)
        }
        loss = mean(z * target)
        """,
        (DATA, MODEL, BOTH),
    ),
    "gradients of micro-batches": Differentiated(
        """
        param w[io, out]
        param scale[io]
        total = zeros[io, out]()
        repeat steps {
            h = tanh(einsum(x * scale, w -> [batch, out]))
            total = total + grad(sum(h * h), w)
        }
        loss = sum(total * w) + mean(square(x))
        """,
        (DATA, CONTRACTED, KEPT),
        "program p(x[steps, batch, io]) {",
    ),
    "each parameter is the gradient of the other": Differentiated(
        """
        param w[io, hidden]
        param v[io, hidden]
        loss = sum(w * v)
        """,
        (DATA, CONTRACTED, FULLY, KEPT),
    ),
    "each is the transpose of the other's gradient": Differentiated(
        """
        param w[io, out]
        param v[io, out]
        loss = sum(w * v[io -> out, out -> io])
        """,
        (DATA, "x:2 { io -> x, out -> none }", KEPT),
    ),
    "gradients that a loop swaps": Differentiated(
        """
        param w[io]
        param v[io]
        a = w
        b = v
        repeat layers {
            c = a
            a = b
            b = c
        }
        loss = sum(a * b)
        """,
        (DATA, CONTRACTED, KEPT),
    ),
    "one row of a table": Differentiated(
        """
        param table[vocab, io]
        loss = mean(tanh(table[vocab = id]) * x)
        """,
        (DATA, CONTRACTED, "x:2 { vocab -> x }", KEPT),
        "program p(x[batch, io], id[]: i32) {",
    ),
    "mixed widths": Differentiated(
        """
        param w[io, hidden]: f64
        h = einsum(cast(x, f64), w -> [batch, hidden])
        loss = mean(square(cast(h, f32))) + cast(mean(h), f32)
        """,
        (DATA, BOTH),
    ),
}
