"""Rotary position embedding: from a checkpoint's settings to angles; turning is kernels.qkv's business.

Each kind of scaling only changes the inverse frequencies, which are computed once on the host in
float64. Two kinds have others for long contexts than for short ones: they go by the longest context
that the engine runs, never by how long a sequence is, so that a cached key stays right.
Pairs are the two halves of a head (dimension i with i + D/2), as Hugging Face lays them.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from xjax.errors import LoadError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "long", "factors")


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a layer kind.

    dim               rotated dimensions of a head, the first ones
    theta             base of the geometric series
    kind              one of KINDS
    factor            of the scaling; positions shrink by it
    low, high         llama3, yarn: turns within the original context between which scaling fades in
    original_context  dynamic, llama3, yarn, long: tokens that the model was trained on before scaling
    factors           [dim / 2] factors, long: divisors of the frequencies, given by the file itself
    short_factors     [dim / 2] long: those for contexts within the original one
    scale             what cosine and sine are multiplied by, so that scores stay as sharp as they were
    truncate          yarn: whether scaling fades in from one whole pair to another
    context           dynamic, long: tokens of the longest sequence that will be run
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    scale: float = 1.0
    truncate: bool = True
    context: int = 0

    def __post_init__(self) -> None:
        # A kind that an older version does not know must not become plain angles.
        if self.kind not in KINDS:
            raise LoadError(f"rotary embedding of kind {self.kind!r} is unknown")
        lists = {"factors": (self.factors,), "long": (self.factors, self.short_factors)}
        is_fit = all(2 * len(factors) == self.dim for factors in lists.get(self.kind, ()))
        numbers = (self.theta, self.factor, self.scale, *self.factors, *self.short_factors)
        is_sound = self.dim > 0 and self.dim % 2 == 0 and all(0 < number < math.inf for number in numbers)
        if not (is_fit and is_sound):
            raise LoadError(f"rotary embedding of {self.dim} dimensions: its numbers do not fit")

    @property
    def reach(self) -> int:
        """Tokens that scaling can be stretched to, beyond those the config names; 0 for no farther."""
        return int(self.original_context * self.factor) if self.kind == "dynamic" else 0

    def for_length(self, length: int) -> "Rope":
        """Choose the frequencies for an engine that runs sequences of at most `length` tokens."""
        return replace(self, context=length) if self.kind in ("dynamic", "long") else self


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Angle of one position for each pair, [dim / 2] float64."""
    plain = _theta(rope) ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind in ("factors", "long"):
        is_short = rope.kind == "long" and rope.context <= rope.original_context
        return plain / np.asarray(rope.short_factors if is_short else rope.factors, np.float64)
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)
        blend = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return plain * (blend + (1.0 - blend) / rope.factor)
    if rope.kind == "yarn":
        return plain * _yarn_blend(rope)
    return plain


def _theta(rope: Rope) -> float:
    """The base; "dynamic" raises it so that the slowest pair turns no farther than it was trained to."""
    if rope.kind != "dynamic" or rope.context <= rope.original_context:
        return rope.theta
    stretch = rope.factor * (rope.context / rope.original_context - 1) + 1
    return rope.theta * stretch ** (rope.dim / (rope.dim - 2))


def _yarn_blend(rope: Rope) -> np.ndarray:
    """Share of each frequency that scaling leaves, [dim / 2] (arXiv 2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """Index of the pair that makes so many turns within the original context."""
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.high), pair(rope.low)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
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
