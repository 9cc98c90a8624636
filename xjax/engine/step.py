"""The one jitted step: embeddings to sampled tokens, over a donated state.

    packed --unpack--> Batch, Sampled --forward--> hidden --head--> logits [J, V]
           --sample--> token --feedback--> state

A pure function of (params, state, packed). Everything static is in `StepSpec` and the shape.
It knows no sequence and no page pool.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xjax.models.family import Family
from xjax.sampling.logprobs import NUM_TOP
from xjax.sampling.sample import Choice, sample
from xjax.state.batch import NO_TOKEN, Batch, BatchShape, unpack
from xjax.state.kv import EngineState


@dataclass(frozen=True)
class StepSpec:
    """What is static in every shape of a model's step; `mesh` None for one device."""

    family: Family
    config: Any
    backend: str = "xla"
    mesh: Mesh | None = None

    @property
    def identity(self) -> str:
        """Text that two equal specs share in any two processes."""
        mesh = None if self.mesh is None else tuple(self.mesh.shape.items())
        return f"{self.family.name}|{self.config!r}|{self.backend}|{mesh}"


def output_fields(shape: BatchShape, vocab_size: int) -> tuple[tuple[str, type, tuple[int, ...]], ...]:
    """Name, numpy type and dims of each part of a step's output vector."""
    j = shape.num_sampled
    fields: tuple[tuple[str, type, tuple[int, ...]], ...] = (
        ("token", np.int32, (j,)),
        ("flags", np.int32, (j,)),
    )
    if shape.full:
        top = min(NUM_TOP, vocab_size)
        fields += (
            ("logprob", np.float32, (j,)),
            ("rank", np.int32, (j,)),
            ("top_ids", np.int32, (j, top)),
            ("top_logprobs", np.float32, (j, top)),
        )
    if shape.pooled_dim:
        fields += (("pooled", np.float32, (shape.num_rows, shape.pooled_dim)),)
    return fields


def step(
    params: Any,
    state: EngineState,
    packed: jax.Array,
    mask: jax.Array | None = None,
    embeds: jax.Array | None = None,
    *,
    spec: StepSpec,
    shape: BatchShape,
) -> tuple[EngineState, jax.Array]:
    """Run one step. DONATES state.

    packed   [packed_length(shape)] int32
    mask     [J, ceil(V / 32)] int32 grammar bits, or None
    embeds   [Ne, E] that replace token embeddings, or None
    returns  the next state, and [output_fields(shape)] packed into one int32 vector
    """
    batch, sampled = unpack(packed, shape, embeds=embeds, backend=spec.backend, mesh=spec.mesh)
    batch = _with_own_tokens(batch, state)
    wanted = None if shape.pooled_dim else sampled.token  # a sum needs every token's hidden state
    hidden, state = spec.family.forward(params, spec.config, state, batch, wanted=wanted)
    pooled = None
    if shape.pooled_dim:
        pooled, hidden = _pool(hidden, batch, sampled.token), hidden[sampled.token]
    logits = spec.family.logits(params, spec.config, hidden, backend=spec.backend, mesh=spec.mesh)
    choice = sample(logits, sampled, last_token=state.last_token, allowed=mask, backend=spec.backend)
    state = replace(
        state,
        last_token=state.last_token.at[sampled.slot].set(choice.token),
        position=state.position.at[batch.slot].set(batch.kv_length),
    )
    return state, _flatten(choice, pooled)


def _pool(hidden: jax.Array, batch: Batch, sampled: jax.Array) -> jax.Array:
    """Pool the hidden states of each row: the sum over its tokens of this step, or that of its last token.

    hidden    [N, E]   model dtype
    sampled   [J]      int32, of which the first B are the rows' last tokens
    returns   [B, E]   float32
    """
    wide, num_rows = hidden.astype(jnp.float32), batch.shape.num_rows
    row = jnp.where(batch.position < 0, num_rows, batch.row_of)  # padding: one more row, which is dropped
    # Added row by row: a product with zeros would carry what is not finite from one row to the others.
    sums = jax.ops.segment_sum(wide, row, num_segments=num_rows + 1)[:num_rows]
    return jnp.where(batch.pool_mean[:, None] > 0, sums, wide[sampled[:num_rows]])


def _with_own_tokens(batch: Batch, state: EngineState) -> Batch:
    """Put each row's last sampled token where the host did not know it."""
    own = state.last_token[batch.slot[batch.row_of]]
    return replace(batch, token_id=jnp.where(batch.token_id == NO_TOKEN, own, batch.token_id))


def _flatten(choice: Choice, pooled: jax.Array | None) -> jax.Array:
    """The output vector, in the order of `output_fields`."""
    parts = [choice.token, choice.flags]
    if choice.logprobs is not None:
        scores = choice.logprobs
        parts += [scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs]
    if pooled is not None:
        parts.append(pooled)
    words = [
        part if part.dtype == jnp.int32 else jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts
    ]
    return jnp.concatenate([word.reshape(-1) for word in words])


def trace_batch(packed: jax.Array, state: EngineState, *, shape: BatchShape, backend: str = "xla") -> Batch:
    """The batch that `step` hands to the model, for looking into a step from a notebook.

    packed   [packed_length(shape)] int32
    """
    batch, _ = unpack(packed, shape, backend=backend)
    return _with_own_tokens(batch, state)
