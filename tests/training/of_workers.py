"""A network whose workers compress what they send, and layouts with one to four of them."""

NETWORK = """
dim batch = 8, a = 9, b = 7, layers = 2
layout dp { batch -> data }
layout pod { batch -> (pod, data) }
layout tp { batch -> data, a -> tp }
layout zero1 extends dp { state: a -> data }
layout fsdp extends dp { params: a -> data }
layout summed extends dp { grads: a -> data }
program p(x[batch, a, b], y[batch, b]) {
  param w[a, b]
  param c[b]
  param one[]
  total = mean(x * w) * 63 + mean(y * c) * 7 + mean(y) * one
  repeat layers {
    param u[a, b]
    total = total + mean(x * u) * 126
  }
  loss = total
  return loss
  minimize loss with OPTIMIZER
}
"""
LAYOUTS = {
    "one": ("dp", "data:1", 1), "dp": ("dp", "data:2", 2), "four": ("dp", "data:4", 4),
    "pod": ("pod", "pod:2,data:2", 4), "zero1": ("zero1", "data:2", 2),
    "fsdp": ("fsdp", "data:2", 2),
}  # fmt: skip
