"""A transformer of equal layers, and what a stage of it costs one device of a cluster.

Products take what the profile says of their sizes, pointwise chains what they move, and tensor
parallel layers reduce twice a pass (Shoeybi et al. 2019). A mixture of experts routes its tokens by
products with masks, and expert parallel devices exchange them twice a pass (Lepikhin et al. 2021).
Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.cluster.timing import Timing
from meshdsl.records import dataclass

HALF = 2
"""Bytes of an activation and of a weight (bf16 or f16)."""

GRADIENT = 4
"""Bytes of a gradient: Megatron-LM adds micro-batches up in f32, and reduces that."""

STATES = {"adam": 12, "adafactor": 4}
"""Bytes of a parameter's f32 copy and its moments, by optimizer: two of Adam; Adafactor has moments
of rows and columns, which are too few to count (Shazeer and Stern 2018)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in place of the MLP in one of `every` layers, the first among them (GShard).

    Tokens are routed in groups of `group`: each to `top_k` of the `count` experts, of which each
    takes `capacity` times its even share of a group.
    """

    count: int
    every: int = 2
    top_k: int = 2
    group: int = 2048
    capacity: float = 1.0

    @property
    def places(self) -> int:
        """Tokens of a group that one expert takes."""
        return int(self.top_k * self.group * self.capacity / self.count)

    @property
    def slots(self) -> int:
        """Tokens of a group that all experts take."""
        return self.count * self.places


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT: `layers` of attention and an MLP, with tied embeddings.

    An MLP, and each of the `experts`, is `mlp` times as wide inside as the model.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int
    mlp: int = 4
    experts: Experts | None = None
    optimizer: str = "adam"

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state of a parameter."""
        return STATES[self.optimizer]

    @property
    def layer_parameters(self) -> int:
        """Of a layer with an MLP: its products, and its biases and norms."""
        mlp = 2 * self.mlp * self.hidden**2 + (self.mlp + 1) * self.hidden
        return self.attention_parameters + mlp

    @property
    def attention_parameters(self) -> int:
        """Of the attention of a layer, with both norms of the layer."""
        return 4 * self.hidden**2 + 8 * self.hidden

    @property
    def gate_parameters(self) -> int:
        """Of what routes tokens in a layer with experts."""
        return self.hidden * self.experts.count if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Of all experts of a layer."""
        return 2 * self.mlp * self.hidden**2 * self.experts.count if self.experts else 0

    @property
    def embedding(self) -> int:
        """Parameters of the tokens' and positions' tables."""
        return (self.vocab + self.seq) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        routed = self.expert_layers(0, self.layers)
        layer = self.attention_parameters + self.gate_parameters + self.expert_parameters
        layers = (self.layers - routed) * self.layer_parameters + routed * layer
        return layers + self.embedding

    def expert_layers(self, start: int, end: int) -> int:
        """How many of the layers from one to another, exclusive, have experts."""
        if self.experts is None:
            return 0
        return -(-end // self.experts.every) - -(-start // self.experts.every)

    def layer_flops(self, batch: int, routed: bool = False) -> int:
        """Of one forward pass of a layer: products, scores, what is attended to, and routing."""
        tokens, mlp = batch * self.seq, 4 * self.mlp * self.hidden**2
        attention = tokens * (8 * self.hidden**2 + 4 * self.seq * self.hidden)
        if not routed or self.experts is None:
            return attention + tokens * mlp
        gate, masks = self.experts.count, 2 * self.experts.slots
        taken = tokens * self.experts.slots // self.experts.group
        return attention + 2 * tokens * self.hidden * (gate + masks) + taken * mlp

    def head_flops(self, batch: int) -> int:
        """Of one forward pass of the logits."""
        return 2 * batch * self.seq * self.hidden * self.vocab

    def step_flops(self, recompute: bool) -> int:
        """Of a training step: the backward pass is two forward ones; recomputing is one more."""
        passes, routed = 4 if recompute else 3, self.expert_layers(0, self.layers)
        layers = (self.layers - routed) * self.layer_flops(self.batch)
        layers += routed * self.layer_flops(self.batch, routed=True)
        return passes * layers + 3 * self.head_flops(self.batch)

    def routable(self, micro: int) -> bool:
        """Whether a device that sees `micro` sequences at a time has whole groups of tokens."""
        return self.experts is None or micro * self.seq % self.experts.group == 0

    def expert_splits(self, data: int) -> tuple[int, ...]:
        """How many data parallel devices may share the experts: none, or all where that divides."""
        if self.experts is None or data == 1 or self.experts.count % data:
            return (1,)
        return 1, data


@dataclass(frozen=True, slots=True)
class LayerStage:
    """Consecutive layers as one device computes them: it sees `micro` sequences at a time.

    The mesh of `timing` has the axes `data` and `tensor`, and `pipe` where there are other stages.
    The `first` stage holds the embedding, the `last` computes the logits. Activations are kept, or
    computed again; the optimizer's state is whole, or split over `data` (ZeRO 1). Of the layers,
    `routed` have experts, which `shared` devices along `data` share: 1, or all of them.
    """

    model: Transformer
    timing: Timing
    layers: int
    micro: int
    first: bool = True
    last: bool = True
    recompute: bool = True
    split_state: bool = False
    routed: int = 0
    shared: int = 1

    @property
    def tensor(self) -> int:
        """Devices that share every layer."""
        return self.timing.mesh.size("tensor")

    @property
    def width(self) -> int:
        """Elements of an activation."""
        return self.micro * self.model.seq * self.model.hidden

    @property
    def rows(self) -> int:
        """Tokens that the device sees at a time."""
        return self.micro * self.model.seq

    def seconds(self) -> float:
        """Of a micro-batch, both passes, and what tensor parallel layers reduce in them."""
        passes = 4 if self.recompute else 3
        layers = (self.layers - self.routed) * self._layer()
        if self.routed:
            layers += self.routed * self._routed_layer()
        seconds = passes * layers + 3 * self._head() * self.last
        # Two a pass, behind attention and behind the MLP; the backward pass counts once.
        rounds = 2 * (passes - 1)
        if self.tensor > 1:
            reduced = self.timing.collective("all_reduce", ("tensor",), self.width * HALF)
            seconds += rounds * self.layers * reduced.seconds
        if self.shared > 1:
            # To the experts and back.
            payload = int(self._taken() * self.model.hidden * HALF)
            exchanged = self.timing.collective("all_to_all", ("data",), payload)
            seconds += rounds * self.routed * exchanged.seconds
        return seconds

    def sending(self) -> float:
        """Seconds to send an activation on; the devices of a tensor group send a part each."""
        part = self.width * HALF // self.tensor
        return self.timing.collective("permute", ("pipe",), part).seconds

    def once(self) -> float:
        """Seconds of the gradients' reduction and the update."""
        data = self.timing.mesh.size("data")
        dense, experts = self._parameters(), self._expert_parameters()
        split = data if self.split_state else 1
        updated = dense / split + experts / max(1, split // self.shared)
        seconds = self.timing.passing(updated * (2 * self.model.state + GRADIENT + HALF))
        if data > 1:
            # Experts that all share have each token's gradient on one device.
            replicated = dense + experts if self.shared == 1 else dense
            payload = int(replicated * GRADIENT)
            seconds += self.timing.collective("all_reduce", ("data",), payload).seconds
        return seconds

    def held(self) -> float:
        """Bytes of parameters, gradients and state."""
        split = self.timing.mesh.size("data") if self.split_state else 1
        dense = self._parameters() * (HALF + GRADIENT + self.model.state / split)
        expert_split = max(1, split // self.shared)
        return dense + self._expert_parameters() * (
            HALF + GRADIENT + self.model.state / expert_split
        )

    def kept(self) -> float:
        """Bytes that a micro-batch in flight keeps."""
        if self.recompute:
            return self.layers * HALF * self.width
        dense = (self.layers - self.routed) * self._activations()
        return dense + (self.routed * self._routed_activations() if self.routed else 0.0)

    def working(self) -> float:
        """Bytes of the layer that is computed again, the largest."""
        if not self.recompute:
            return 0.0
        routed = self._routed_activations() if self.routed else 0.0
        return max(routed, self._activations() if self.layers > self.routed else 0.0)

    def _activations(self) -> float:
        """Bytes that a layer keeps for its backward pass (Korthikanti et al. 2022)."""
        return self._attended() + self.width * 4 * self.model.mlp / self.tensor

    def _attended(self) -> float:
        """Bytes of what is kept but for the inner width of the MLP."""
        m = self.model
        return self.width * (10 + (8 + 5 * m.heads * m.seq / m.hidden) / self.tensor)

    def _routed_activations(self) -> float:
        """Bytes that a layer with experts keeps: masks, and what goes in, through and out."""
        masks = 2 * self.rows * self._slots()
        inner = self._taken() * (2 * self.model.mlp / self._halved + 2) * self.model.hidden
        return self._attended() + HALF * (masks + inner)

    def _parameters(self) -> float:
        """Parameters of a device, without experts."""
        m = self.model
        gated = self.routed * (m.attention_parameters + m.gate_parameters)
        layers = (self.layers - self.routed) * m.layer_parameters + gated
        return (layers + m.embedding * self.first) / self.tensor

    def _expert_parameters(self) -> float:
        return self.routed * self.model.expert_parameters / (self.tensor * self.shared)

    def _layer(self) -> float:
        """Seconds of a layer's forward pass: its products, and its passes over memory."""
        h, inner, rows = self.model.hidden, self.model.mlp * self.model.hidden, self.rows
        products = ((rows, inner // self.tensor, h, 1), (rows, h, inner // self.tensor, 1))
        # gelu of the inner width.
        return self._computed(products, 2 * rows * inner // self.tensor)

    def _routed_layer(self) -> float:
        """Seconds of the forward pass of a layer with experts, without the exchange."""
        experts = self.model.experts
        assert experts is not None
        h, inner, rows = self.model.hidden, self.model.mlp * self.model.hidden, self.rows
        groups, slots, width = rows // experts.group, self._slots(), inner // self._halved
        # Of every device that shares the experts come the tokens of some.
        local = experts.count // (self.shared * self.tensor // self._halved)
        taken = experts.places * groups * self.shared
        products = (
            (rows, experts.count, h, 1),
            (slots, h, experts.group, groups),
            (taken, width, h, local),
            (taken, h, width, local),
            (experts.group, h, slots, groups),
        )
        # Two masks are written and read; relu of the inner width.
        return self._computed(products, 4 * rows * slots + 2 * taken * local * width)

    @property
    def _halved(self) -> int:
        """Devices of a tensor group that share the width of an expert: none that share experts."""
        experts = self.model.experts
        assert experts is not None
        return 1 if experts.count % (self.tensor * self.shared) == 0 else self.tensor

    def _slots(self) -> int:
        """Tokens of a group that the experts take whose masks this device has."""
        experts = self.model.experts
        assert experts is not None
        return experts.slots * self._halved // self.tensor

    def _taken(self) -> float:
        """Tokens that this device sends to experts at a time."""
        experts = self.model.experts
        assert experts is not None
        return self.rows * self._slots() / experts.group

    def _computed(self, products: Iterable[tuple[int, int, int, int]], moved: int) -> float:
        """Seconds of attention and what is behind it: products, and elements that are moved."""
        h, t, scores = self.model.hidden, self.tensor, self.model.seq
        rows, heads = self.rows, self.micro * self.model.heads // t
        key = h // self.model.heads
        attention = (
            (rows, 3 * h // t, h, 1),
            (scores, scores, key, heads),
            (scores, key, scores, heads),
            (rows, h, h // t, 1),
        )
        # A chain of pointwise operators counts its ends: two norms and two dropouts with residuals
        # of the width, softmax and dropout of the scores.
        moved += 10 * rows * h + 4 * heads * scores * scores
        seconds = sum(self._product(*sizes) for sizes in (*attention, *products))
        return seconds + self.timing.passing(HALF * moved)

    def _head(self) -> float:
        """Seconds of the logits' forward pass."""
        return self._product(self.rows, self.model.vocab // self.tensor, self.model.hidden, 1)

    def _product(self, rows: int, columns: int, summed: int, times: int) -> float:
        done, sides = 2 * times * rows * columns * summed, (min(rows, columns), max(rows, columns))
        return self.timing.product(self.timing.cluster.device.half, done, sides)
