"""Programs that are hard to write back as text, each for the reason it is called by."""

from __future__ import annotations

DIMS = "dim a = 4, b = 6, c = 8, n = 3, m = 5, a1 = 2, a2 = 2, part = 2, wide = 8, ab = 24\n"

"""What every program here declares first."""

PROGRAMS = {
    "calls of calls": """
def f(x[a, b]) -> [a, b] {
  param w[b]
  return x * w
}
def g(x[a, b]) -> [a, b] {
  return f(f(x))
}
program p(x[a, b]) {
  y = g(f(x))
  return y
}""",
    "one def for several dims": """
def lin[i, o](x[..., i]) -> [..., o] {
  param w[i, o]
  return sum[i](x * w)
}
def two[i](x[..., i]) -> [..., i] {
  h = relu(lin[i, c](x))
  return lin[c, i](h)
}
program p(x[a, b], y[m, a]) {
  u = two[b](x)
  v = two[a](y)
  return u, v
}""",
    "a call that nobody reads": """
def f(x[a]) -> [a] {
  param w[a]
  return x * w
}
program p(x[a]) {
  u = f(x)
  dead = f(x)
  v = f(x)
  return u, v
}""",
    "several results": """
def pair[d](x[..., d]) {
  t = max[d](x)
  return sum[d](x - t), t
}
program p(x[a, b]) {
  u, v = pair[a](x)
  w, z = pair[b](x)
  q, r = pair[b](x)
  return u, v, w, r
}""",
    "arguments that are carried": """
def f(x[a]) -> [a] {
  repeat n {
    param w[a]
    x = x + w
  }
  return x
}
program p(h[a]) {
  acc = 0.0
  repeat m {
    h = f(h)
    acc = acc + sum(h)
  }
  return h, acc
}""",
    "transposes that nobody wrote": """
def f(x[a, b]) -> [b, a] {
  return x + 1.0
}
program p(x[a, b], k[a, b]: bool) {
  y = f(x)
  z[b, a] = k
  t = x
  repeat n {
    t = relu(y) - t
  }
  return y, z, t
}""",
    "numbers in sums of products": """
program p(x[a, b], y[b, c]) {
  param w[b]
  t = sum[b](x * 1.0 * y * 2.0)
  u = sum[b](relu(x) * 3.0 * abs(y))
  v = sum[b](1.0 * (x * w))
  q = sum[a](relu(x) * abs(x) * 4.0)
  return t, u, v, q
}""",
    "precedence": """
program p(x[a], k: bool, s: i32) {
  y = x^3 + x^-1.5 - x^2 * x^0.5 + (-x)^2 - (x + 1)^x
  z = -(x * x) / (x / x) - (x - (x - x))
  q = not (x > 0.0 and x < 1.0) or not x == x
  w = pow(x, 2.0)
  return y, z, q, w, 2.0 - x, x + 0.0, sum(s), x^1, k
}""",
    "places that are fixed": """
program p(x[a@r, b@(s, t)]) {
  param w[b@none, c]
  y[a@r, c@none] = einsum(x, w -> [a, c])
  u[c@r, a] = y
  return y, u
}""",
    "parameters in their order": """
def f(x[a]) -> [a] {
  param p[a]
  return x + p
}
program q(x[a]) {
  y = f(x)
  param w[a] = zeros()
  repeat n {
    param v[a] = normal(0.02)
    y = y * w + v * f(y)
  }
  param last[a]: bf16 = uniform(-1.0, 2)
  return y * cast(last, f32)
}""",
    "first uses that are gone": """
def f(x[a]) {
  param p[a]
  return x
}
program q(x[a]) {
  y = f(x)
  param w[a, b]
  t = sum[a](w)
  repeat n {
    param v[a, b]
    s = sum[b](v)
    x = x + 1.0
  }
  return y, x, w
}""",
    "a parameter that is returned": """
def table() {
  param p[a, b] = normal(0.5)
  return p
}
program q(x[a]) {
  w = table()
  y = einsum(x, w -> [b])
  return einsum(y, w -> [a])
}""",
    "names given twice": """
program q(x[a]) {
  s = x + 1.0
  s = s * s
  repeat n {
    t = s * 2.0
    s = t + s
  }
  t = s
  return t, s
}""",
    "views and options": """
program q(x[a, b], ids[m]: i32) {
  u = x[a -> (a1, a2)][(a1, a2) -> a]
  v = x[(b, a) -> ab]
  w = x[a = ids, b = 0]
  z = x[a = 1:3 -> part][part -> a1][a1 -> a2]
  k = pad[b -> wide](x, 1, 1, -1.5)
  o = one_hot[a](ids, i64)
  g = gelu(x, "tanh")
  j = concat[wide](x[b = 0], x[b = 1])
  return u, v, w, z, k, o, g, j, shift[b](x, -2)
}""",
    "recompute": """
def block(x[a]) -> [a] {
  recompute {
    h = relu(x)
    x = exp(h) + x
  }
  return x * 2.0
}
program q(x[a]) {
  repeat n {
    x = block(x)
  }
  recompute {
    y = block(x)
    z = y * y
  }
  return y, z
}""",
    "dtypes": """
program q(x[a]: f64, i[a]: i32) {
  param w[a]: f64
  acc = zeros[a](f64)
  repeat n {
    acc = acc + x * w * 0.1
  }
  return acc, i * 3 + iota[a], cast(i, f64)
}""",
    "arguments in another order": """
def f(x[...], y[...]) {
  return y - x
}
program q(x[a]) {
  return f(relu(x), exp(x)), f(y=exp(x), x=relu(x)), f(1.0, x), f(x, x)
}""",
    "named results inside": """
def f(x[...]) {
  h = x * 2.0
  return h
}
def g(x[...]) {
  return f(x)
}
program q(x[a]) {
  y = g(x)
  z = f(x) + g(y)
  return z, f(z)
}""",
    "long lines": """
program q(first_of_all[a, b, c], second_of_all[a, b, c], third_of_all[a, b, c], fourth[a, b, c]) {
  return where(first_of_all > second_of_all, maximum(third_of_all, fourth), minimum(fourth, first_of_all))
}""",  # noqa: E501
}
