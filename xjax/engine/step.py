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

from xjax.models.family import Family
from xjax.sampling.logprobs import NUM_TOP
from xjax.sampling.sample import Choice, sample
from xjax.state.batch import NO_TOKEN, Batch, BatchShape, unpack
from xjax.state.kv import EngineState


@dataclass(frozen=True)
class StepSpec:
    """What is static in every shape of a model's step."""

    family: Family
    config: Any
    backend: str = "xla"

    @property
    def identity(self) -> str:
        """Text that two equal specs share in any two processes."""
        return f"{self.family.name}|{self.config!r}|{self.backend}"


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
    batch, sampled = unpack(packed, shape, embeds=embeds, backend=spec.backend)
    batch = _with_own_tokens(batch, state)
    hidden, state = spec.family.forward(params, spec.config, state, batch, wanted=sampled.token)
    logits = spec.family.logits(params, spec.config, hidden, backend=spec.backend)
    choice = sample(logits, sampled, last_token=state.last_token, allowed=mask)
    state = replace(
        state,
        last_token=state.last_token.at[sampled.slot].set(choice.token),
        position=state.position.at[batch.slot].set(batch.kv_length),
    )
    return state, _flatten(choice)


def _with_own_tokens(batch: Batch, state: EngineState) -> Batch:
    """Put each row's last sampled token where the host did not know it."""
    own = state.last_token[batch.slot[batch.row_of]]
    return replace(batch, token_id=jnp.where(batch.token_id == NO_TOKEN, own, batch.token_id))


def _flatten(choice: Choice) -> jax.Array:
    """The output vector, in the order of `output_fields`."""
    parts = [choice.token, choice.flags]
    if choice.logprobs is not None:
        scores = choice.logprobs
        parts += [scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs]
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
