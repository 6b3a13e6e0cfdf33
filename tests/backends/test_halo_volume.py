"""What halos of h and w send, of random convolutions: the elements that each device lacks, no more.

The oracle knows nothing of windows: of each device it lists the elements that the taps of its
outputs read, and takes away those of its block. A corner comes to a device once, padding never.
Where a stride leaves out some of a block, what is exchanged along one dim is as wide as the block
in the other, or as what is read of that: the order in which less is sent.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np

from tests.programs.harness import Case, run_case

CASES = int(os.environ.get("MESHDSL_CASES", "6"))
MESHES = ({"r": 2, "q": 2}, {"r": 3, "q": 2}, {"r": 2, "q": 3}, {"r": 4, "q": 1})
TEXT = """
dim n = 2, c = 3, out = 2, {dims}
layout image {{ {rules} }}
program net(x[n, c, h, w]) {{
  param k[out, c, kh, kw]
  return conv[{windows}](x, k, {options} -> [n, out, {to}])
}}
"""


class Along:
    """The windows along one dim, which is split in so many blocks."""

    def __init__(self, size: int, kernel: int, stride: int, dilation: int, pad: int) -> None:
        self.size, self.kernel = size, kernel
        self.stride, self.dilation, self.pad = stride, dilation, pad
        self.positions = (size + 2 * pad - (kernel - 1) * dilation - 1) // stride + 1

    def block(self, size: int, ways: int, number: int) -> range:
        """The indices of a block: all have the same size, but the last there are."""
        most = -(-size // ways)
        return range(min(number * most, size), min((number + 1) * most, size))

    def read(self, ways: int, number: int) -> set[int]:
        """The elements that the taps of a block of positions read, all between them, no padding."""
        at = [
            position * self.stride + tap * self.dilation - self.pad
            for position in self.block(self.positions, ways, number)
            for tap in range(self.kernel)
        ]
        return set(range(min(at), max(at) + 1)) & set(range(self.size)) if at else set()


def lacked(along: tuple[Along, Along], ways: tuple[int, int]) -> tuple[int, int, bool]:
    """The elements of an image that devices read and do not have, of all devices together.

    And those of an exchange along one dim and then the other; whether all blocks are read whole.
    """
    total, exchanged, whole = 0, [0, 0], True
    for numbers in itertools.product(*map(range, ways)):
        of_each = list(zip(along, ways, numbers, strict=True))
        read = set(itertools.product(*(sorted(a.read(n, i)) for a, n, i in of_each)))
        own = set(itertools.product(*(a.block(a.size, n, i) for a, n, i in of_each)))
        total += len(read - own)
        blocks = [set(a.block(a.size, n, i)) for a, n, i in of_each]
        whole = whole and all(
            b <= a.read(n, i) for b, (a, n, i) in zip(blocks, of_each, strict=True)
        )
        # A dim that is not split is sent as it is.
        reads = [a.read(n, i) if n > 1 else set(range(a.size)) for a, n, i in of_each]
        for first, then in ((0, 1), (1, 0)):
            missing = [r - b for b, r in zip(blocks, reads, strict=True)]
            exchanged[first] += len(missing[first]) * len(blocks[then])
            exchanged[first] += len(reads[first]) * len(missing[then])
    return total, min(exchanged), whole


def drawn(rng: Any) -> tuple[tuple[Along, Along], dict[str, int]]:
    """Windows that fit, and a mesh."""
    stride, dilation, pad = (int(rng.integers(*pair)) for pair in ((1, 4), (1, 3), (0, 3)))
    while True:
        sizes = [(int(rng.integers(5, 14)), int(rng.integers(1, 5))) for _ in range(2)]
        along = [Along(*pair, stride, dilation, pad) for pair in sizes]
        if all(a.positions > 0 for a in along):
            return (along[0], along[1]), MESHES[int(rng.integers(len(MESHES)))]


def has_halos_alone(report: Any) -> bool:
    """Whether nothing is sent but halos."""
    return all(c["kind"] == "halo" for c in report["collectives"])


def sent_in_turn(report: Any) -> int:
    """What the device sends that sends most in a collective, of all of them: their price."""
    return sum(c["wire_bytes"] for c in report["collectives"])


def test_halos_send_what_devices_lack() -> None:
    rng = np.random.default_rng(11)
    exact = 0
    for _ in range(CASES):
        along, mesh = drawn(rng)
        h, w = along
        dims, rules, to, windows = [], [], [], []
        for name, axis, a in (("h", "r", h), ("w", "q", w)):
            dims += [f"{name} = {a.size}", f"k{name} = {a.kernel}"]
            rules.append(f"{name} -> {axis}")
            same = a.positions == a.size
            to.append(name if same else f"{name}o")
            windows.append(f"{name} by k{name}" if same else f"{name} by k{name} -> {name}o")
            if not same:
                dims.append(f"{name}o = {a.positions}")
                rules.append(f"{name}o -> {axis}")
        words = {"dims": dims, "rules": rules, "to": to, "windows": windows}
        options = f"stride={h.stride}, dilation={h.dilation}, pad={h.pad}"
        text = TEXT.format(options=options, **{k: ", ".join(v) for k, v in words.items()})
        names = ",".join(f"{name}:{size}" for name, size in mesh.items())
        case = Case(text, names, "image", "deferred")
        report = run_case(case).report  # the numbers, and the bytes of each device
        if not has_halos_alone(report):
            # Small blocks that several devices read are gathered, where that sends no more; in more
            # messages, each of which costs as much as some kilobytes by default.
            least = sent_in_turn(report)
            report = run_case(replace(case, reduce="optimal")).report
            assert has_halos_alone(report), text
            assert least <= sent_in_turn(report), text
        halos = report["collectives"]
        lacking, exchanged, whole = lacked(along, (mesh["r"], mesh["q"]))
        assert exchanged == lacking or not whole
        sent = sum(c["cluster_wire_bytes"] for c in halos)
        assert sent == 4 * 2 * 3 * exchanged, (text, mesh, lacking)
        exact += bool(sent) and exchanged == lacking
    assert exact > CASES / 3
