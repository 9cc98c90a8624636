"""Rotary position embedding: from a checkpoint's settings to angles, and the rotation itself.

Each kind of scaling only changes the inverse frequencies, which are computed once on the host in
float64. Pairs are the two halves of a head (dimension i with i + D/2), as Hugging Face lays them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xjax.errors import LoadError
from xjax.models.settings import Settings


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a layer kind.

    dim               rotated dimensions of a head
    theta             base of the geometric series
    kind              "default", "linear", "llama3" or "factors"
    factor            of the scaling; positions shrink by it
    low, high         llama3: turns within the original context between which scaling fades in
    original_context  llama3: tokens that the model was trained on before scaling
    factors           [dim / 2] divisors of the frequencies, given by the file itself
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


def rope_from_hf(settings: Mapping[str, Any] | None, *, dim: int, theta: float) -> Rope:
    """Read a `rope_scaling` or `rope_parameters` mapping; its own rope_theta wins over `theta`.

    "dynamic" scaling starts only behind the context the model was trained for, which is where
    `max_context` ends, so it is the default kind here. Raises LoadError for kinds we do not have.
    """
    get = Settings(settings or {}, "config.json, rope scaling")
    kind = get.values.get("rope_type", get.values.get("type", "default"))
    theta = get.number("rope_theta", theta)
    if get.number("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError("config.json: partial rotary embedding (partial_rotary_factor) is not supported")
    if kind in ("default", "dynamic", None):
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, "linear", get.number("factor"))
    if kind == "llama3":
        low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
        if low >= high:
            raise LoadError(f"config.json: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        original = int(get.number("original_max_position_embeddings"))
        return Rope(dim, theta, "llama3", get.number("factor"), low, high, original)
    known = "default, dynamic, linear, llama3"
    raise LoadError(f"config.json: rope scaling of type {kind!r} is not supported; known: {known}")


def rope_from_gguf(get: Settings, *, dim: int, theta: float) -> Rope:
    """Read the rotary settings of GGUF metadata. Raises LoadError for kinds we do not have."""
    theta, kind = (
        get.number("rope.freq_base", theta),
        get.values.get(f"{get.prefix}rope.scaling.type", "none"),
    )
    if kind == "linear":
        return Rope(dim, theta, "linear", get.number("rope.scaling.factor"))
    if kind != "none":
        raise LoadError(f"{get.source}: rope scaling of type {kind!r} is not supported; known: none, linear")
    return Rope(dim, theta)


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Angle of one position for each pair, [dim / 2] float64."""
    plain = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / np.asarray(rope.factors, np.float64)
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)
        blend = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return plain * (blend + (1.0 - blend) / rope.factor)
    return plain


def angles(rope: Rope, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each token's angles.

    position  [N]                 int32
    returns   two [N, dim / 2]    float32
    """
    frequencies = jnp.asarray(inverse_frequencies(rope), jnp.float32)
    angle = position.astype(jnp.float32)[:, None] * frequencies[None, :]

    def wave(is_sine: jax.Array) -> jax.Array:
        return jnp.where(is_sine, jnp.sin(angle), jnp.cos(angle))

    # A loop, since XLA does not fuse its results into what reads them: with a barrier alone, which its
    # CPU compiler drops, every layer computes them again for every head.
    cos, sin = jax.lax.map(wave, jnp.array([False, True]))
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each pair of a head by its token's angle, in float32.

    x         [N, H, D]     any floating dtype
    cos, sin  [N, D / 2]    float32
    returns   [N, H, D]     dtype of x
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
