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

    dim               rotated dimensions of a head, the first ones
    theta             base of the geometric series
    kind              "default", "linear", "llama3", "yarn" or "factors"
    factor            of the scaling; positions shrink by it
    low, high         llama3, yarn: turns within the original context between which scaling fades in
    original_context  llama3, yarn: tokens that the model was trained on before scaling
    factors           [dim / 2] divisors of the frequencies, given by the file itself
    scale             what cosine and sine are multiplied by, so that scores stay as sharp as they were
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    scale: float = 1.0


def rope_from_hf(
    settings: Mapping[str, Any] | None,
    *,
    dim: int,
    theta: float,
    context: int = 0,
    original: int | None = None,
) -> Rope:
    """Read a `rope_scaling` or `rope_parameters` mapping; its own rope_theta wins over `theta`.

    context    tokens that the model is said to take, of which "longrope" and "yarn" make use
    original   tokens before scaling, where the file says it outside of the mapping

    "dynamic" scaling starts only behind the context the model was trained for, which is where
    `max_context` ends, so it is the default kind here. Raises LoadError for kinds we do not have.
    """
    get = Settings(settings or {}, "config.json, rope scaling")
    kind = get.values.get("rope_type", get.values.get("type", "default"))
    theta = get.number("rope_theta", theta)
    if kind in ("default", "dynamic", None):
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, "linear", get.number("factor"))
    if kind == "llama3":
        low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
        if low >= high:
            raise LoadError(f"config.json: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        return Rope(dim, theta, "llama3", get.number("factor"), low, high, _original(get, original))
    if kind == "yarn":
        return _yarn_from_hf(get, dim, theta, original or context)
    if kind in ("longrope", "su"):
        return _long_from_hf(get, dim, theta, context, _original(get, original))
    known = "default, dynamic, linear, llama3, longrope, yarn"
    raise LoadError(f"config.json: rope scaling of type {kind!r} is not supported; known: {known}")


def _original(get: Settings, default: int | None) -> int:
    return int(get.number("original_max_position_embeddings", default))


def _mscale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosine and sine by (arXiv 2309.00071, eq. 22, split over both)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_from_hf(get: Settings, dim: int, theta: float, original: int) -> Rope:
    factor, scale = get.number("factor"), get.optional_number("attention_factor")
    mscale, all_dim = get.optional_number("mscale"), get.optional_number("mscale_all_dim")
    if scale is None:
        scale = _mscale(factor)
        if mscale is not None and all_dim is not None:
            scale = _mscale(factor, mscale) / _mscale(factor, all_dim)
    low, high = get.number("beta_slow", 1.0), get.number("beta_fast", 32.0)
    original = _original(get, original)
    if not get.flag("truncate", True):
        raise LoadError("config.json: yarn without truncated bounds is not supported")
    return Rope(dim, theta, "yarn", factor, low, high, original, scale=scale)


def _long_from_hf(get: Settings, dim: int, theta: float, context: int, original: int) -> Rope:
    """One list of factors for all positions: the long one where the context is beyond the original."""
    factor = get.optional_number("factor") or context / original
    scale = get.optional_number("attention_factor")
    if scale is None:
        scale = long_scale(factor, original)
    key = "long_factor" if context > original else "short_factor"
    return Rope(
        dim,
        theta,
        "factors",
        factors=read_factors(get.values.get(key), dim, f"config.json: {key}"),
        scale=scale,
    )


def long_scale(factor: float, original: int) -> float:
    """What "longrope" multiplies cosine and sine by for a context that grew by a factor."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def read_factors(values: Any, dim: int, name: str) -> tuple[float, ...]:
    """The divisors of the frequencies from a list; LoadError when it is none of dim / 2 positive numbers."""
    is_list = isinstance(values, list | tuple) and len(values) == dim // 2
    if not is_list or not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in values):
        raise LoadError(f"{name} must be a list of {dim // 2} numbers above 0")
    return tuple(float(x) for x in values)


def rope_from_gguf(get: Settings, *, dim: int, theta: float) -> Rope:
    """Read the rotary settings of GGUF metadata. Raises LoadError for kinds we do not have."""
    theta, kind = (
        get.number("rope.freq_base", theta),
        get.values.get(f"{get.prefix}rope.scaling.type", "none"),
    )
    if kind == "linear":
        return Rope(dim, theta, "linear", get.number("rope.scaling.factor"))
    if kind == "yarn":
        return _yarn_from_gguf(get, dim, theta)
    if kind != "none":
        known = "none, linear, yarn"
        raise LoadError(f"{get.source}: rope scaling of type {kind!r} is not supported; known: {known}")
    return Rope(dim, theta)


def _yarn_from_gguf(get: Settings, dim: int, theta: float) -> Rope:
    factor = get.number("rope.scaling.factor")
    low = get.number("rope.scaling.yarn_beta_slow", 1.0)
    high = get.number("rope.scaling.yarn_beta_fast", 32.0)
    original = get.integer("rope.scaling.original_context_length", get.integer("context_length"))
    # The converter writes what a config.json calls attention_factor, which is the whole scale.
    scale = get.optional_number("rope.scaling.yarn_attn_factor")
    if scale is None:
        scale = _mscale(factor) * get.number("rope.scaling.attn_factor", 1.0)
        if get.values.get(f"{get.prefix}rope.scaling.yarn_log_multiplier"):
            scale /= _mscale(factor, get.number("rope.scaling.yarn_log_multiplier"))
    return Rope(dim, theta, "yarn", factor, low, high, original, scale=scale)


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
    if rope.kind == "yarn":
        return plain * _yarn_blend(rope)
    return plain


def _yarn_blend(rope: Rope) -> np.ndarray:
    """Share of each frequency that scaling leaves, [dim / 2] (arXiv 2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """Index of the pair that makes so many turns within the original context."""
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(pair(rope.high)), 0), min(math.ceil(pair(rope.low)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low if high > low else 0.001), 0.0, 1.0)
    return (1.0 - ramp) + ramp / rope.factor


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
    return (cos, sin) if rope.scale == 1.0 else (cos * rope.scale, sin * rope.scale)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each pair of a head by its token's angle, in float32; dimensions behind the pairs stay.

    x         [N, H, D]     any floating dtype
    cos, sin  [N, d / 2]    float32; d <= D rotated dimensions
    returns   [N, H, D]     dtype of x
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :].astype(jnp.float32))
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
