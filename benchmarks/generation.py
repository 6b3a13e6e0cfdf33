"""How fast text is generated with a cache of keys and values: ours beside others, in one process.

`python -m benchmarks.generation [--only WORD…] [--rounds N]` continues a prompt with the program
`lm_step` of `examples/lm.mdsl`, token by token, the likeliest each time: as `meshdsl generate` does
it on one device, as eager torch by hand, and in JAX where it is installed. All have the same
parameters and one thread, and have to say the same tokens. They take turns. Printed are tokens a
second (median), the times of the others as multiples of ours (by the clock and by processor time;
above 1: ours is faster), and the memory of a token at its peak, MiB.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.hand_models import Tensors
from benchmarks.training import machine, with_words
from benchmarks.training_by_hand import lm_params
from benchmarks.training_cases import KEY, TEXTS, first_values
from benchmarks.training_jax import configure, is_there, normed
from benchmarks.training_memory import MIB, peak
from meshdsl.backends.engines.in_process import Emitted, LocalSession, call_device
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.generate.contract import contract_of
from meshdsl.backends.generate.generation import Speaker
from meshdsl.backends.generate.task import Task
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source

PROMPT = tuple(b"A layout")
CACHES = ("keys", "values")
Say = Callable[[], list[int]]
Timed = tuple[list[int], float, float]
"""The tokens, and the seconds they took, by the clock and of the processor."""


@dataclass(frozen=True, slots=True)
class Case:
    """A language model at `sizes` of `lm.mdsl`, which fills its `seq` positions with text."""

    name: str
    sizes: Mapping[str, int]

    @property
    def steps(self) -> int:
        """The tokens that are generated; the last of them is not read."""
        return self.sizes["seq"] + 1 - len(PROMPT)

    def compiled(self) -> Compilation:
        """Its program of one token, on one device."""
        options = Options(
            program="lm_step", layout="batch:device", mesh="device:1", set_dims=self.sizes
        )
        return compile_source(Source("lm.mdsl", TEXTS["lm"]), options, Diagnostics())


CASES = (
    Case("lm 128", {"batch": 1, "seq": 128}),
    Case("lm 128 batch 16", {"batch": 16, "seq": 128}),
)
"""Three layers, and heads of 32."""


# --- ours ----------------------------------------------------------------------------------------


class Ours:
    """What `meshdsl generate` does on the local engine, and a step of it."""

    def __init__(self, case: Case, folder: str) -> None:
        self.made = case.compiled()
        contract = contract_of(self.made.named)
        assert not isinstance(contract, str), contract
        self.session = LocalSession(Emitted(self.made.emitted).load())
        self.program = self.session.programs.program
        specs = self.program.PARAMS
        self.arrays = first_values(specs, {"device": 1}, 0)
        # Else the layers add so little to a token that the likeliest to follow is itself.
        self.arrays["embed"] *= np.float32(0.05)
        file = str(Path(folder) / "params.npz")
        write_npz(file, {n: a for n, a in self.arrays.items() if n not in CACHES})
        codec = TextCodec("numbers")
        self.task = Task(contract, (PROMPT,), (case.steps,), contract.counted, file, codec)

    def timed(self) -> Timed:
        """A run."""

        def device(ranks: Ranks) -> Timed:
            torch.set_num_threads(1)
            speaker = Speaker(ranks, self.session.programs, self.task, lambda piece: None)
            return timed(lambda: speaker.run()[0])

        return self.session.run(device)[0]

    def step(self) -> Callable[[], Any]:
        """The last token, for its memory."""
        tables = [
            {n: torch.from_numpy(a.copy()) for n, a in first_values(s, {"device": 1}, 0).items()}
            for s in (self.program.INPUTS, self.program.PARAMS)
        ]
        ranks = self.session.run(lambda ranks: ranks)[0]

        def token() -> Any:
            with torch.inference_mode():
                return call_device(ranks, self.program, (*tables, {}))

        return token


def timed(say: Say) -> Timed:
    """A run of another variant."""
    started, worked = time.perf_counter(), time.process_time()
    tokens = say()
    return tokens, time.perf_counter() - started, time.process_time() - worked


# --- by hand -------------------------------------------------------------------------------------


class ByHand:
    """Eager torch: q, k and v in one product, attention over what the cache has so far."""

    def __init__(self, case: Case, given: Tensors) -> None:
        self.batch, self.steps = case.sizes["batch"], case.steps
        *layers, self.embed, self.position = lm_params(given)
        self.layers = [layers[i : i + 6] for i in range(0, len(layers), 6)]
        heads = self.layers[0][2].shape[0] // KEY
        shape = (2, len(self.layers), self.batch, heads, len(self.position), KEY)
        self.keys, self.values = torch.zeros(shape)

    def say(self) -> list[int]:
        """The tokens after the prompt."""
        tokens = list(PROMPT)
        with torch.inference_mode():
            for at in range(len(PROMPT) + self.steps - 1):
                logits = self.logits(tokens[at], at)
                if at + 1 >= len(PROMPT):
                    tokens.append(int(logits[0].argmax()))
        return tokens[len(PROMPT) :]

    def logits(self, token: int, at: int) -> torch.Tensor:
        """The scores of the next token, which every row of the batch is given."""
        width = self.embed.shape[1:]
        x = F.embedding(torch.full((self.batch,), token), self.embed) + self.position[at]
        for i, (g1, wqkv, wo, g2, w1, w2) in enumerate(self.layers):
            z = F.rms_norm(x, width, g1, eps=1e-6)
            q, k, v = (z @ wqkv).view(self.batch, 3, -1, KEY).unbind(1)
            keys, values = self.keys[i], self.values[i]
            keys[:, :, at], values[:, :, at] = k, v
            seen = keys[:, :, : at + 1], values[:, :, : at + 1]
            o = F.scaled_dot_product_attention(q[:, :, None], *seen)
            x = x + o.flatten(1) @ wo
            x = x + F.gelu(F.rms_norm(x, width, g2, eps=1e-6) @ w1) @ w2
        return F.rms_norm(x, width, eps=1e-6) @ self.embed.mT


# --- in JAX --------------------------------------------------------------------------------------


class WithJax:
    """A compiled step of one token, whose caches are given up to the next."""

    def __init__(self, case: Case, params: Mapping[str, Any]) -> None:
        import jax

        self.batch, self.steps = case.sizes["batch"], case.steps
        self.caches = [jax.numpy.asarray(params[name]) for name in CACHES]
        self.params = {n: jax.numpy.asarray(a) for n, a in params.items() if n not in CACHES}
        self.step = jax.jit(jax_step, donate_argnums=1)

    def say(self) -> list[int]:
        """The tokens after the prompt."""
        tokens = list(PROMPT)
        for at in range(len(PROMPT) + self.steps - 1):
            given = np.full(self.batch, tokens[at], np.int32)
            likeliest, self.caches = self.step(self.params, self.caches, given, at)
            if at + 1 >= len(PROMPT):
                tokens.append(int(likeliest))
        return tokens[len(PROMPT) :]

    def peak(self) -> int:
        """Bytes that the compiler reserves for a token: arguments, results and all between."""
        given = np.zeros(self.batch, np.int32)
        found: Any = self.step.lower(self.params, self.caches, given, 0).compile()
        sizes = found.memory_analysis()
        whole = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return int(whole - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes)


def jax_step(params: dict[str, Any], caches: list[Any], token: Any, at: Any) -> Any:
    """The likeliest token after one, and the caches with its keys and values."""
    import jax
    import jax.numpy as jnp

    keys, values = caches
    x = params["embed"][token] + params["position"][at]
    seen = jnp.arange(keys.shape[3]) <= at
    for layer in range(len(params["g1"])):
        p = {n: value[layer] for n, value in params.items() if n not in ("embed", "position")}
        z = normed(x) * p["g1"]
        q, k, v = (jnp.einsum("bm,mhk->bhk", z, p[f"project.w{n}"]) for n in "qkv")
        keys, values = keys.at[layer, :, :, at].set(k), values.at[layer, :, :, at].set(v)
        s = jnp.where(seen, jnp.einsum("bhk,bhmk->bhm", q, keys[layer]) / KEY**0.5, -1e9)
        o = jnp.einsum("bhm,bhmk->bhk", jax.nn.softmax(s, -1), values[layer])
        x = x + jnp.einsum("bhk,hkm->bm", o, p["joined.wo"])
        z = normed(x) * p["g2"]
        x = x + jax.nn.gelu(z @ p["mlp.w1"], approximate=False) @ p["mlp.w2"]
    return jnp.argmax((normed(x) @ params["embed"].T)[0]), [keys, values]


# --- the table -----------------------------------------------------------------------------------

Times = dict[str, list[tuple[float, float]]]


def measure(case: Case, rounds: int) -> tuple[Times, dict[str, int]]:
    """Seconds of all tokens in each round, and bytes at the peak of one, of each variant."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(case, folder)
        given = {n: torch.from_numpy(a.copy()) for n, a in ours.arrays.items()}
        hand = ByHand(case, given)
        variants: dict[str, Callable[[], Timed]] = {
            "ours": ours.timed,
            "hand": lambda: timed(hand.say),
        }
        peaks = {
            "explain": memory(ours.made.device)["peak"],
            "ours": peak(ours.step),
            "hand": peak(lambda: last_token(case, given)),
        }
        if is_there():
            jax = WithJax(case, ours.arrays)
            variants["JAX"] = lambda: timed(jax.say)
            peaks["JAX"] = jax.peak()
        said = {name: variant()[0] for name, variant in variants.items()}
        for name, tokens in said.items():
            assert tokens == said["ours"], f"{name}: {tokens}, not {said['ours']}"
        times: Times = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                times[name].append(variant()[1:])
    return times, peaks


def last_token(case: Case, given: Tensors) -> Callable[[], Any]:
    """By hand, the token that reads all of the cache."""
    hand = ByHand(case, {n: x.clone() for n, x in given.items()})

    def token() -> Any:
        with torch.inference_mode():
            return hand.logits(0, case.sizes["seq"] - 1)

    return token


def row(case: Case, times: Times, peaks: Mapping[str, int]) -> str:
    """The line of the table."""
    seconds = statistics.median(wall for wall, _ in times["ours"])
    cells = [case.name, f"{(case.steps + len(PROMPT) - 1) / seconds:.0f}"]
    for name in ("hand", "JAX"):
        pairs = list(zip(times["ours"], times.get(name, ()), strict=False))
        ratios = (
            [statistics.median(b[i] / a[i] for a, b in pairs) for i in range(2)] if pairs else []
        )
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
    memories = (peaks.get(name) for name in ("explain", "ours", "hand", "JAX"))
    cells += ["" if size is None else f"{size / MIB:.2f}" for size in memories]
    return f"| {' | '.join(cells)} |"


HEAD = ("model", "ours, tokens/s", "by hand", "JAX", "MiB: explain", "ours", "by hand", "JAX")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="cases with all of these words")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, interleaved (7)")
    options = parser.parse_args()
    chosen = with_words(parser, CASES, options.only)
    torch.set_num_threads(1)
    configure()
    print(machine())
    print(f"\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for case in chosen:
        print(row(case, *measure(case, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
