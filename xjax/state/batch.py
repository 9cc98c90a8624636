"""The packed layout: one table of fields from which host packing and in-jit unpacking are made.

A step gets one int32 vector (floats bit-cast). `Packed` gives the host a numpy view of each
field of a fresh vector; `unpack` slices the same fields inside the jit. What a field means is
written once, in `_FIELDS`.

    tokens:  | decode region: token i is row i | tile 0 | tile 1 | ...      a tile never spans
             | num_decode tokens, maybe 0      | T      | T      |          two rows

Padding: position -1, writes to page 0, slot R. Nothing here knows a sequence or a model.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

NO_TOKEN = -1  # token id: take the row's last sampled token from the state
NO_POSITION = -1  # position of a padding token
NO_TARGET = -1  # target: report the sampled token's own log-probability


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Everything static about a step; one executable for each.

    num_rows      B: lines of the page tables
    num_decode    tokens in front, token i belonging to row i; 0 or B
    num_prefill   tokens in tiles, a multiple of `tile`
    tile          T: tokens in a tile
    num_groups    G: page groups
    max_pages     M: pages a row's table can name
    num_sampled   J: positions whose logits are computed
    full          penalties, bias, masks and log-probabilities, or greedy and sampling alone
    num_pairs     Z: sparse (sampled position, token id) pairs of the full body
    pooled_dim    E where the rows' hidden states are given back pooled, else 0
    trash_row     R: running row that padding feeds back to
    """

    num_rows: int
    num_decode: int
    num_prefill: int
    tile: int
    num_groups: int
    max_pages: int
    num_sampled: int
    trash_row: int
    full: bool = False
    num_pairs: int = 0
    num_embeds: int = 0
    num_axes: int = 1
    has_recurrent: bool = False
    pooled_dim: int = 0

    @property
    def num_tokens(self) -> int:
        """N: tokens in the step, padding counted."""
        return self.num_decode + self.num_prefill

    @property
    def name(self) -> str:
        """Short name for logs and tables, e.g. "mixed-8+512-full"."""
        kind = (
            f"decode-{self.num_decode}"
            if not self.num_prefill
            else f"mixed-{self.num_decode}+{self.num_prefill}"
        )
        return kind + ("-full" if self.full else "") + ("-pooled" if self.pooled_dim else "")


@dataclass(frozen=True)
class _Field:
    name: str
    kind: str  # i int32, f float32, u uint32
    dims: Callable[[BatchShape], tuple[int, ...]]
    padding: float | Callable[[BatchShape], float] = 0


_FIELDS = (
    _Field("token_id", "i", lambda s: (s.num_tokens,)),
    _Field("position", "i", lambda s: (s.num_tokens,), NO_POSITION),
    _Field("row_of", "i", lambda s: (s.num_tokens,)),
    _Field("write", "i", lambda s: (s.num_groups, s.num_tokens)),
    _Field("table", "i", lambda s: (s.num_groups, s.num_rows, s.max_pages)),
    _Field("slot", "i", lambda s: (s.num_rows,), lambda s: s.trash_row),
    _Field("query_start", "i", lambda s: (s.num_rows,)),
    _Field("query_length", "i", lambda s: (s.num_rows,)),
    _Field("kv_length", "i", lambda s: (s.num_rows,)),
    _Field("adapter", "i", lambda s: (s.num_rows,)),
    _Field("recurrent_read", "i", lambda s: (s.num_rows if s.has_recurrent else 0,), lambda s: s.trash_row),
    _Field("recurrent_write", "i", lambda s: (s.num_rows if s.has_recurrent else 0,), lambda s: s.trash_row),
    _Field(
        "recurrent_snapshot", "i", lambda s: (s.num_rows if s.has_recurrent else 0,), lambda s: s.trash_row
    ),
    _Field("rope_position", "i", lambda s: (s.num_axes, s.num_tokens) if s.num_axes > 1 else (0,)),
    _Field("embed_index", "i", lambda s: (s.num_embeds,), lambda s: s.num_tokens),
    _Field("pool_mean", "i", lambda s: (s.num_rows if s.pooled_dim else 0,)),
    _Field("sample_token", "i", lambda s: (s.num_sampled,)),
    _Field("sample_slot", "i", lambda s: (s.num_sampled,), lambda s: s.trash_row),
    _Field("sample_id", "i", lambda s: (s.num_sampled,)),
    _Field("sample_position", "i", lambda s: (s.num_sampled,)),
    _Field("seed", "u", lambda s: (s.num_sampled, 2)),
    _Field("temperature", "f", lambda s: (s.num_sampled,)),
    _Field("top_k", "i", lambda s: (s.num_sampled,)),
    _Field("top_p", "f", lambda s: (s.num_sampled,), 1.0),
    _Field("min_p", "f", lambda s: (s.num_sampled,)),
    _Field("repetition_penalty", "f", lambda s: (s.num_sampled if s.full else 0,), 1.0),
    _Field("frequency_penalty", "f", lambda s: (s.num_sampled if s.full else 0,)),
    _Field("presence_penalty", "f", lambda s: (s.num_sampled if s.full else 0,)),
    _Field("pending", "i", lambda s: (s.num_sampled if s.full else 0,)),
    _Field("target", "i", lambda s: (s.num_sampled if s.full else 0,), NO_TARGET),
    _Field("want_logprobs", "i", lambda s: (s.num_sampled if s.full else 0,)),
    _Field("pair_row", "i", lambda s: (s.num_pairs,), lambda s: s.num_sampled),
    _Field("pair_id", "i", lambda s: (s.num_pairs,)),
    _Field("pair_count", "i", lambda s: (s.num_pairs,), -1),
    _Field("pair_bias", "f", lambda s: (s.num_pairs,)),
)

_NUMPY = {"i": np.int32, "f": np.float32, "u": np.uint32}
_JAX = {"i": jnp.int32, "f": jnp.float32, "u": jnp.uint32}


@functools.lru_cache(maxsize=256)
def _layout(shape: BatchShape) -> tuple[tuple[tuple[_Field, int, tuple[int, ...]], ...], int]:
    """Each field with its offset and dims, and the length of the vector."""
    placed, offset = [], 0
    for item in _FIELDS:
        dims = item.dims(shape)
        placed.append((item, offset, dims))
        offset += math.prod(dims)
    return tuple(placed), offset


@functools.lru_cache(maxsize=256)
def _places(shape: BatchShape) -> dict[str, tuple[int, int, type, tuple[int, ...]]]:
    """Where each field lies in the vector, by its name."""
    return {
        item.name: (offset, offset + math.prod(dims), _NUMPY[item.kind], dims)
        for item, offset, dims in _layout(shape)[0]
    }


@functools.lru_cache(maxsize=256)
def _padding(shape: BatchShape) -> np.ndarray:
    placed, length = _layout(shape)
    vector = np.zeros(length, np.int32)
    for item, offset, dims in placed:
        value = item.padding(shape) if callable(item.padding) else item.padding
        vector[offset : offset + math.prod(dims)].view(_NUMPY[item.kind])[:] = value
    vector.setflags(write=False)
    return vector


def packed_length(shape: BatchShape) -> int:
    """Number of int32 words of the vector of a shape."""
    return _layout(shape)[1]


class Packed:
    """A fresh vector filled with padding; each field of the layout is an attribute, a numpy view.

    `vector` goes to the device and must not be written after that: jax may alias it.

    start   [packed_length(shape)] int32, begin with a copy of it instead of padding
    """

    def __init__(self, shape: BatchShape, start: np.ndarray | None = None) -> None:
        self.shape = shape
        self.vector = (_padding(shape) if start is None else start).copy()
        self._places = _places(shape)

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in self._places:
            raise AttributeError(name)
        start, stop, kind, dims = self._places[name]
        view = self.__dict__[name] = self.vector[start:stop].view(kind).reshape(dims)
        return view


@struct.dataclass
class Sampled:
    """The positions of a step that get logits, and how to choose their tokens.

    token           [J] int32      index into the step's tokens
    slot            [J] int32      running row that the token is fed back to, R for none
    sample_id       [J] int32      which of a request's n samples
    position        [J] int32      absolute position of the token to be chosen
    seed            [J, 2] uint32  low and high word
    temperature     [J] float32    0 for greedy
    top_k           [J] int32      0 for off
    top_p, min_p    [J] float32    1 and 0 for off
    Of the full body, else empty:
    repetition_penalty, frequency_penalty, presence_penalty   [J] float32
    pending         [J] int32      1: the last token in the state is not in the pairs yet
    target          [J] int32      id whose log-probability is asked for, -1: the chosen one's
    want_logprobs   [J] int32      1: log-probabilities are asked for
    pair_row        [Z] int32      index into J; J for padding
    pair_id         [Z] int32      token id
    pair_count      [Z] int32      times in the output; 0: prompt only; -1: bias only
    pair_bias       [Z] float32    added to the logit
    """

    token: jax.Array
    slot: jax.Array
    sample_id: jax.Array
    position: jax.Array
    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    pending: jax.Array
    target: jax.Array
    want_logprobs: jax.Array
    pair_row: jax.Array
    pair_id: jax.Array
    pair_count: jax.Array
    pair_bias: jax.Array


@struct.dataclass
class Batch:
    """What a model's forward sees of a step.

    token_id        [N] int32        -1 already replaced
    position        [N] int32        index in the sequence, -1 for padding
    rope_position   [N] or [3, N]    what rotary embeddings read
    row_of          [N] int32        row of the tables
    write           [G, N] int32     page * S + offset where the token's k and v go
    table           [G, B, M] int32  page ids by index in the sequence, padded with page 0
    slot            [B] int32        running row, R for padding
    query_start     [B] int32        index of the row's first token of this step
    query_length    [B] int32        tokens of the row in this step
    kv_length       [B] int32        tokens of the row in pages after this step
    adapter         [B] int32        0 for none
    recurrent_read, recurrent_write, recurrent_snapshot   [B] int32 slots, or empty
    embed_index     [Ne] int32       token whose embedding `embeds` replaces, N for none
    embeds          [Ne, E] or None
    pool_mean       [B] int32        of steps that pool: 1 for the sum of the row's tokens, 0 for the last one
    """

    token_id: jax.Array
    position: jax.Array
    rope_position: jax.Array
    row_of: jax.Array
    write: jax.Array
    table: jax.Array
    slot: jax.Array
    query_start: jax.Array
    query_length: jax.Array
    kv_length: jax.Array
    adapter: jax.Array
    recurrent_read: jax.Array
    recurrent_write: jax.Array
    recurrent_snapshot: jax.Array
    embed_index: jax.Array
    embeds: jax.Array | None
    pool_mean: jax.Array
    shape: BatchShape = struct.field(pytree_node=False)
    backend: str = struct.field(pytree_node=False, default="xla")
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)


def unpack(
    packed: jax.Array,
    shape: BatchShape,
    *,
    embeds: jax.Array | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> tuple[Batch, Sampled]:
    """Slice the vector of `shape` inside a jit.

    packed   [packed_length(shape)] int32
    embeds   [Ne, E] or None
    returns  Batch, its token ids as packed (-1 not replaced), and Sampled
    """
    values: dict[str, jax.Array] = {}
    for item, offset, dims in _layout(shape)[0]:
        part = jax.lax.slice(packed, (offset,), (offset + math.prod(dims),))
        if item.kind != "i":
            part = jax.lax.bitcast_convert_type(part, _JAX[item.kind])
        values[item.name] = part.reshape(dims)
    if shape.num_axes == 1:
        values["rope_position"] = values["position"]
    sampled = Sampled(
        token=values.pop("sample_token"),
        slot=values.pop("sample_slot"),
        position=values.pop("sample_position"),
        **{name: values.pop(name) for name in _SAMPLED_SAME_NAME},
    )
    return Batch(**values, embeds=embeds, shape=shape, backend=backend, mesh=mesh), sampled


_SAMPLED_SAME_NAME = (
    "sample_id", "seed", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "frequency_penalty", "presence_penalty",
    "pending", "target", "want_logprobs", "pair_row", "pair_id", "pair_count", "pair_bias",
)  # fmt: skip
