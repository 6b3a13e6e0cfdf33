"""Wide residual networks of 50 to 152 layers (Zagoruyko and Komodakis 2016), as programs.

Each bottleneck has two dims of channels of its own; the blocks of one resolution share the dims of
the image and of what is added. So the dims are many, and only few meet.
"""

from __future__ import annotations

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottlenecks of each resolution (He et al. 2016)."""


def wide_resnet(layers: int, wider: int = 1, batch: int = 32, side: int = 56) -> str:
    """The text of a training step, on images that have passed the first convolution and pool."""
    dims = [f"batch = {batch}", "kh1 = 1", "kw1 = 1", "kh = 3", "kw = 3", "classes = 1000"]
    body = ["  x = images"]
    before = "r0"
    dims += [f"r0 = {64 * wider}", f"h0 = {side}", f"w0 = {side}"]
    for stage, blocks in enumerate(BLOCKS[layers], start=1):
        narrow = 64 * 2 ** (stage - 1) * wider
        at = side // 2 ** (stage - 1)
        out, h, w = f"r{stage}", f"h{stage}", f"w{stage}"
        dims += [f"{out} = {4 * narrow}", f"{h} = {at}", f"{w} = {at}"]
        for block in range(blocks):
            a, b = f"a{stage}_{block}", f"b{stage}_{block}"
            dims += [f"{a} = {narrow}", f"{b} = {narrow}"]
            first = block == 0
            source = before if first else out
            sides = f"h{stage - 1}, w{stage - 1}" if first else f"{h}, {w}"
            moved = f"h{stage - 1} by kh -> {h}, w{stage - 1} by kw -> {w}"
            window = moved if first else f"{h} by kh, {w} by kw"
            stride = f"stride={1 if stage == 1 else 2}, " if first else ""
            name = f"{stage}_{block}"
            body += [
                f"  param down{name}[{a}, {source}] = he()",
                f"  param conv{name}[{b}, {a}, kh, kw] = he()",
                f"  param up{name}[{out}, {b}] = he()",
                f"  y{name} = relu(einsum(x, down{name} -> [batch, {a}, {sides}]))",
                f'  z{name} = relu(conv[{window}](y{name}, conv{name}, {stride}pad="same"'
                f" -> [batch, {b}, {h}, {w}]))",
                f"  u{name} = einsum(z{name}, up{name} -> [batch, {out}, {h}, {w}])",
            ]
            if first:
                body += [
                    f"  param past{name}[{out}, {source}, kh1, kw1] = he()",
                    f"  x = relu(u{name} + conv[h{stage - 1} by kh1 -> {h}, w{stage - 1} by kw1"
                    f" -> {w}](x, past{name}, {stride}"
                    f'pad="same" -> [batch, {out}, {h}, {w}]))',
                ]
            else:
                body += [f"  x = relu(u{name} + x)"]
        before = out
    text = "\n".join(body)
    return f"""dim {", ".join(dims)}
program wide_resnet(images[batch, r0, h0, w0], labels[batch]: i32) {{
{text}
  param last[{before}, classes]
  scores = einsum(mean[h4, w4](x), last -> [batch, classes])
  loss = mean(cross_entropy[classes](scores, labels))
  return loss
  minimize loss with momentum(lr=0.1)
}}
"""
