"""A transformer of equal layers, and what a stage of it costs one device of a cluster.

Products take what the profile says of their sizes, pointwise chains what they move, and tensor
parallel layers reduce twice a pass (Shoeybi et al. 2019). Nothing is fitted.
"""

from __future__ import annotations

from meshdsl.cluster.timing import Timing
from meshdsl.records import dataclass

HALF = 2
"""Bytes of an activation and of a weight (bf16 or f16)."""

GRADIENT = 4
"""Bytes of a gradient: Megatron-LM adds micro-batches up in f32, and reduces that."""

STATE = 12
"""Bytes of a parameter's f32 copy and two moments (Adam)."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT: `layers` of attention and an MLP of four times the width, with tied embeddings."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int

    @property
    def layer_parameters(self) -> int:
        """12 h² of the products, and biases and norms: 13 h."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the tokens' and positions' tables."""
        return (self.vocab + self.seq) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer_parameters + self.embedding

    def layer_flops(self, batch: int) -> int:
        """Of one forward pass of a layer: products, scores and what is attended to."""
        return batch * self.seq * (24 * self.hidden**2 + 4 * self.seq * self.hidden)

    def head_flops(self, batch: int) -> int:
        """Of one forward pass of the logits."""
        return 2 * batch * self.seq * self.hidden * self.vocab

    def step_flops(self, recompute: bool) -> int:
        """Of a training step: the backward pass is two forward ones; recomputing is one more."""
        passes = 4 if recompute else 3
        return passes * self.layers * self.layer_flops(self.batch) + 3 * self.head_flops(self.batch)


@dataclass(frozen=True, slots=True)
class LayerStage:
    """Consecutive layers as one device computes them: it sees `micro` sequences at a time.

    The mesh of `timing` has the axes `data` and `tensor`, and `pipe` where there are other stages.
    The `first` stage holds the embedding, the `last` computes the logits. Activations are kept, or
    computed again; the optimizer's state is whole, or split over `data` (ZeRO 1).
    """

    model: Transformer
    timing: Timing
    layers: int
    micro: int
    first: bool = True
    last: bool = True
    recompute: bool = True
    split_state: bool = False

    @property
    def tensor(self) -> int:
        """Devices that share every layer."""
        return self.timing.mesh.size("tensor")

    @property
    def width(self) -> int:
        """Elements of an activation."""
        return self.micro * self.model.seq * self.model.hidden

    def seconds(self) -> float:
        """Of a micro-batch, both passes, and what tensor parallel layers reduce in them."""
        passes = 4 if self.recompute else 3
        seconds = self.layers * passes * self._layer() + 3 * self._head() * self.last
        if self.tensor > 1:
            # Two a pass, behind attention and behind the MLP; the backward pass counts once.
            rounds = 2 * (passes - 1) * self.layers
            reduced = self.timing.collective("all_reduce", ("tensor",), self.width * HALF)
            seconds += rounds * reduced.seconds
        return seconds

    def sending(self) -> float:
        """Seconds to send an activation on; the devices of a tensor group send a part each."""
        part = self.width * HALF // self.tensor
        return self.timing.collective("permute", ("pipe",), part).seconds

    def once(self) -> float:
        """Seconds of the gradients' reduction and the update."""
        parameters, data = self._parameters(), self.timing.mesh.size("data")
        updated = parameters / data if self.split_state else parameters
        seconds = self.timing.passing(updated * (2 * STATE + GRADIENT + HALF))
        if data > 1:
            reduced = self.timing.collective("all_reduce", ("data",), int(parameters * GRADIENT))
            seconds += reduced.seconds
        return seconds

    def held(self) -> float:
        """Bytes of parameters, gradients and state."""
        data = self.timing.mesh.size("data") if self.split_state else 1
        return self._parameters() * (HALF + GRADIENT + STATE / data)

    def kept(self) -> float:
        """Bytes that a micro-batch in flight keeps."""
        return self.layers * (HALF * self.width if self.recompute else self._activations())

    def working(self) -> float:
        """Bytes of the layer that is computed again."""
        return self._activations() if self.recompute else 0.0

    def _activations(self) -> float:
        """Bytes that a layer keeps for its backward pass (Korthikanti et al. 2022)."""
        m = self.model
        return self.width * (10 + (24 + 5 * m.heads * m.seq / m.hidden) / self.tensor)

    def _parameters(self) -> float:
        held = self.layers * self.model.layer_parameters + self.model.embedding * self.first
        return held / self.tensor

    def _layer(self) -> float:
        """Seconds of a layer's forward pass: its products, and its passes over memory."""
        h, t, scores = self.model.hidden, self.tensor, self.model.seq
        rows, heads = self.micro * scores, self.micro * self.model.heads // t
        key = h // self.model.heads
        products = (
            (rows, 3 * h // t, h, 1),
            (scores, scores, key, heads),
            (scores, key, scores, heads),
            (rows, h, h // t, 1),
            (rows, 4 * h // t, h, 1),
            (rows, h, 4 * h // t, 1),
        )
        # A chain of pointwise operators counts its ends: two norms and two dropouts with residuals
        # of the width, gelu of four times the width, softmax and dropout of the scores.
        moved = 10 * rows * h + 8 * rows * h // t + 4 * heads * scores * scores
        return sum(self._product(*sizes) for sizes in products) + self.timing.passing(HALF * moved)

    def _head(self) -> float:
        """Seconds of the logits' forward pass."""
        rows = self.micro * self.model.seq
        return self._product(rows, self.model.vocab // self.tensor, self.model.hidden, 1)

    def _product(self, rows: int, columns: int, summed: int, times: int) -> float:
        done, sides = 2 * times * rows * columns * summed, (min(rows, columns), max(rows, columns))
        return self.timing.product(self.timing.cluster.device.half, done, sides)
