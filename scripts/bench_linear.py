#!/usr/bin/env python3
"""Measure products of packed matrices against the bytes that they read, beside XLA's float32 dots.

    scripts/bench_linear.py [--forms q8_0,q4_0,...] [--rows 1,8,16,512] [--out 4096] [--inputs 4096]
                            [--megabytes 96] [--threads 2] [--repeats 15] [--machine avx2]

Matrices of one form follow one another in one program until they fill so many megabytes, so that no cache
holds them. Kernels take turns, and between them a sum over as much memory tells the read rate. Medians;
the rates in brackets are the best seen.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_experts import ReadRate, timed

from xjax.engine.build import set_threads
from xjax.kernels.linear import linear
from xjax.kernels.linear.forms import FORMS, Form
from xjax.kernels.linear.numba import linear_packed


def draw(form: Form, num_out: int, num_in: int, seed: int) -> jax.Array:
    """Records of random bytes, but for scales that are no numbers."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, form.shape(num_out, num_in), dtype=np.uint8)
    runs = data.view(form.layout)
    for name in set(runs.dtype.names or ()) - {"units"}:
        runs[name] = rng.uniform(-0.01, 0.01, runs[name].shape)
    return jax.device_put(data)


def chain(multiply: Callable[[jax.Array, Any], jax.Array]) -> Callable[[jax.Array, list[Any]], jax.Array]:
    """A program of one product after another, each with rows that depend on the one before."""

    def run(x: jax.Array, weights: list[Any]) -> jax.Array:
        total = jnp.zeros((), x.dtype)
        for w in weights:
            total = multiply(x + total, w)[0, 0] * 1e-9
        return total

    return jax.jit(run)


def measure(form: Form, rows: list[int], options: argparse.Namespace, dense: list[jax.Array]) -> None:
    """Print a line for each number of rows."""
    num_out, num_in = options.out, options.inputs
    num_bytes = int(np.prod(form.shape(num_out, num_in)))
    count = max(1, (options.megabytes << 20) // num_bytes)
    packed = [draw(form, num_out, num_in, seed) for seed in range(count)]
    multiply = partial(linear_packed, form=form, num_out=num_out, machine=options.machine)
    programs = {"packed": (chain(multiply), packed), "xla": (chain(linear), dense)}
    rate = ReadRate(jnp.ones((options.megabytes << 18,), jnp.float32))
    for num_rows in rows:
        x = jax.random.normal(jax.random.key(0), (num_rows, num_in))
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        repeats = max(3, min(options.repeats, 15 * 64 // num_rows))
        for repeat in range(repeats + 1):
            for name, (program, weights) in programs.items():
                sample, _ = timed(partial(program, x, weights))
                if repeat:
                    seconds[name].append(sample / len(weights))
            rate.measure()
        clock, best = (function(seconds["packed"]) for function in (np.median, np.min))
        theirs, weights = np.median(seconds["xla"]), num_out * num_in
        print(
            f"{form.name:5} {num_rows:4} rows  {1e6 * clock:8.0f} us {weights / clock / 1e9:5.1f} G weights/s"
            f"  {num_rows * weights / clock / 1e9:4.0f} GMAC/s ({num_rows * weights / best / 1e9:.0f})"
            f"  {num_bytes / clock / 1e9:5.1f} GB/s ({num_bytes / best / 1e9:.1f}) of {rate.best / 1e9:.1f}"
            f"  xla float32 {num_rows * weights / theirs / 1e9:4.0f} GMAC/s, {theirs / clock:.1f} x the time",
            flush=True,
        )


def measure_small(form: Form, options: argparse.Namespace) -> None:
    """Print what a call of a small matrix costs."""
    for num_out, num_in in ((64, 256), (576, 768), (960, 768)):
        weights = [draw(form, num_out, num_in, 0)] * 100
        run = chain(partial(linear_packed, form=form, num_out=num_out, machine=options.machine))
        x = jnp.ones((1, num_in))
        samples = [timed(partial(run, x, weights))[0] for _ in range(options.repeats + 1)][1:]
        print(f"{form.name:5}  {num_out} x {num_in}: {1e4 * np.median(samples):.1f} us a call", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default="1,8,16,512")
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--machine")
    options = parser.parse_args()
    set_threads(options.threads)
    dense = [jnp.full((options.out, options.inputs), 0.01) for _ in range(2)]
    for name in options.forms.split(","):
        measure(FORMS[name], [int(rows) for rows in options.rows.split(",")], options, dense)
        measure_small(FORMS[name], options)


if __name__ == "__main__":
    main()
