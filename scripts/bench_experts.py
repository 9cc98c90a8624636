#!/usr/bin/env python3
"""Measure mixtures of experts against the bytes that they must read and the products they must make.

    scripts/bench_experts.py [--experts 32] [--active 8] [--embed 2048] [--ffn 768] [--layers 4]
                             [--rows 1,8,512] [--threads 2] [--repeats 20]

The operation alone, its kernels taking turns, each time with experts drawn anew; then a whole step of
one row through a model of such layers, its weights filled with a constant, the routers drawn. Between all
of it a sum over weights tells the read rate. "x floor" is against the weights of the experts in use (and,
of a step, everything else that it reads) at the best read rate seen; GFLOP/s are given by processor time
too, which other work on the machine moves less.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_steps import StepAlone

from xjax.engine.build import Model, set_threads
from xjax.kernels.choice import choose
from xjax.kernels.moe import moe
from xjax.models import qwen3_moe
from xjax.models.decoder import Config
from xjax.models.experts import Experts
from xjax.models.layers import LayerParts
from xjax.models.rope import Rope

_FLOAT32 = jnp.dtype("float32")


class ReadRate:
    """Bytes a second of a sum over an array, the best of all."""

    def __init__(self, array: jax.Array) -> None:
        self._array, self._sum, self.best = array, jax.jit(jnp.sum), 0.0
        jax.block_until_ready(self._sum(array))

    def measure(self) -> None:
        """Read it once."""
        seconds, _ = timed(partial(self._sum, self._array))
        self.best = max(self.best, self._array.nbytes / seconds)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock and of processors."""
    work, began = time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began, time.process_time() - work


def measure_operation(experts: Experts, embed: int, rows: int, repeats: int) -> None:
    """Time the operation by each kernel and print a line for each."""
    count, active, ffn = experts.num_experts, experts.num_active, experts.ffn_dim
    keys = jax.random.split(jax.random.key(0), 3)
    gate_up = jax.random.normal(keys[0], (count, 2 * ffn, embed)) * embed**-0.5
    down = jax.random.normal(keys[1], (count, embed, ffn)) * ffn**-0.5
    x, rng = jax.random.normal(keys[2], (rows, embed)), np.random.default_rng(0)
    weight = jnp.full((rows, active), 1 / active)
    backends = sorted({"xla", choose("auto", "cpu")})
    calls = {name: jax.jit(partial(moe, activation="silu", backend=name)) for name in backends}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in backends}
    rate, used = ReadRate(gate_up), []
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            ids = np.stack([rng.permutation(count)[:active] for _ in range(rows)]).astype(np.int32)
            sample = timed(partial(call, x, ids, weight, gate_up, down))
            if repeat:  # the first compiles
                samples[name].append(sample)
                used.append(len(np.unique(ids)))
        rate.measure()
    flop = 6 * rows * active * ffn * embed
    num_bytes = float(np.mean(used)) * 3 * ffn * embed * _FLOAT32.itemsize
    for name in backends:
        clock, work = (np.array(values) for values in zip(*samples[name], strict=True))
        print(
            f"{rows:4} rows  {name:6} {1e3 * clock.min():8.2f} ms, median {1e3 * np.median(clock):8.2f}"
            f"   x floor {clock.min() * rate.best / num_bytes:5.2f}"
            f"   GFLOP/s {flop / clock.min() / 1e9:4.0f}, a processor {flop / work.min() / 1e9:4.0f}"
            f"   read rate {rate.best / 1e9:.1f} GB/s"
        )


def make_model(experts: Experts, embed: int, num_layers: int) -> Model:
    """A Qwen3-MoE whose weights are a constant, but for the routers and embeddings."""
    config = Config(
        num_layers=num_layers, embed_dim=embed, num_heads=embed // 128, num_kv_heads=4, head_dim=128,
        ffn_dim=experts.ffn_dim, vocab_size=32_000, max_context=4096, norm_eps=1e-6, tied=True,
        rope=Rope(128, 1e6), parts=LayerParts(qk_norm="head"), experts=experts,
    )  # fmt: skip
    family, keys = qwen3_moe.FAMILY, iter(jax.random.split(jax.random.key(0), num_layers + 1))

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_drawn = leaf.shape in ((experts.num_experts, embed), (config.vocab_size, embed))
        return jax.random.normal(next(keys), leaf.shape) if is_drawn else jnp.full(leaf.shape, 0.01)

    params = jax.tree.map(fill, family.abstract(config, _FLOAT32))
    return Model(family, config, params, _FLOAT32)


def measure_step(model: Model, threads: int, repeats: int) -> None:
    """Time whole steps of one row and print a line for each kernel family."""
    experts, backends = model.config.experts, sorted({"xla", choose("auto", "cpu")})
    leaves = jax.tree.leaves(model.params)
    stacks = sum(leaf.nbytes for leaf in leaves if leaf.ndim == 3)
    rest = sum(leaf.nbytes for leaf in leaves) - stacks
    num_bytes = rest + stacks * experts.num_active / experts.num_experts
    steps = {
        name: StepAlone(model, threads=threads, rows=1, tokens=repeats + 128, kernels=name)
        for name in backends
    }
    rate, samples = ReadRate(model.params.embed), {name: [] for name in backends}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            found = step.decode([[7] * (64 + repeat)], 1)["seconds"]
            samples[name] += found if repeat else []
        rate.measure()
    for name, step in steps.items():
        best, median = min(samples[name]), float(np.median(samples[name]))
        print(
            f"a step    {name:6} {1e3 * best:8.2f} ms, median {1e3 * median:8.2f}   x floor "
            f"{best * rate.best / num_bytes:5.2f}   reads {num_bytes / 1e6:.0f} MB of "
            f"{(stacks + rest) / 1e6:.0f}   read rate {rate.best / 1e9:.1f} GB/s"
        )
        step.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("experts", 32), ("active", 8), ("embed", 2048), ("ffn", 768), ("layers", 4),
                          ("threads", 2), ("repeats", 20)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,8,512", help="of the operation alone")
    given = parser.parse_args(arguments)
    set_threads(given.threads)
    experts = Experts(num_experts=given.experts, num_active=given.active, ffn_dim=given.ffn, normalizes=True)
    for rows in map(int, given.rows.split(",")):
        measure_operation(
            experts, given.embed, rows, given.repeats if rows < 64 else max(given.repeats // 4, 1)
        )
    if given.layers:
        measure_step(make_model(experts, given.embed, given.layers), given.threads, given.repeats)


if __name__ == "__main__":
    main()
