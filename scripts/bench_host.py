"""Host time of a step: a model that computes nothing, the engine around it at full work.

    scripts/bench_host.py ROWS [STEPS [no-prefix-cache]]
                                           prints JSON: median, range and count of
                                           host_seconds   on the clock, waiting for a processor counted
                                           work_seconds   processor time of the engine's thread

Every row has a 4,096-token context of pages, V is 152 thousand, half of the rows ask for
log-probabilities. Device time does not count: planning, packing, dispatch, commit and emit do.
"""

import json
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from xjax.config import CacheSpec, EngineOptions, PagedLayer
from xjax.engine.build import Model, plan_engine, start_engine, with_defaults
from xjax.request import Request, SamplingParams, TokenEvent
from xjax.state.batch import Batch
from xjax.state.kv import EngineState
from xjax_server.bench.samples import summarize

VOCAB, CONTEXT, PROMPT = 152_000, 4096, 64


@dataclass(frozen=True)
class NullConfig:
    """What the engine asks of any config."""

    vocab_size: int = VOCAB
    max_context: int = CONTEXT
    embed_dim: int = 8
    ffn_dim: int = 8
    num_heads: int = 1
    head_dim: int = 8


class NullFamily:
    """A family whose forward pass returns zeros; only what a step calls is there."""

    name = "null"

    def cache_spec(self, config: NullConfig) -> CacheSpec:
        """One layer, so that page tables are made and sent."""
        return (PagedLayer(1, 8),)

    def for_length(self, config: NullConfig, length: int) -> NullConfig:
        """Of the context alone."""
        return replace(config, max_context=length)

    def forward(
        self,
        params: Any,
        config: NullConfig,
        state: EngineState,
        batch: Batch,
        *,
        wanted: jax.Array | None = None,
    ) -> Any:
        """Hidden [N, E] or [J, E] of zeros; pages stay as they are."""
        tokens = batch.token_id if wanted is None else wanted
        return jnp.zeros((tokens.shape[0], config.embed_dim), jnp.float32), state

    def logits(
        self, params: Any, config: NullConfig, hidden: jax.Array, *, backend: str = "xla", mesh: Any = None
    ) -> jax.Array:
        """Logits [J, V] that are all equal: the first token wins."""
        return jnp.zeros((hidden.shape[0], config.vocab_size), jnp.float32)


def measure(rows: int, steps: int, *, prefix_cache: bool = True) -> dict[str, list[float]]:
    """Host and work seconds of steps in which every row decodes."""
    device = jax.devices()[0]
    params = {"one": jax.device_put(jnp.ones((1,), jnp.float32), device)}
    model = Model(NullFamily(), NullConfig(), params, jnp.dtype("float32"))  # type: ignore[arg-type]
    options = EngineOptions(
        max_num_seqs=rows,
        max_model_len=CONTEXT,
        num_pages=rows * CONTEXT // 16 + 1,
        disable_prefix_cache=not prefix_cache,
    )
    plan = plan_engine(model, with_defaults(options, device), device=device)
    engine = start_engine(model, plan)
    open_ids, done = set(range(rows)), threading.Event()

    def sink(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            open_ids.discard(int(event.request_id))
            if not open_ids:
                done.set()

    for row in range(rows):
        logprobs = 5 if row % 2 else None
        sampling = SamplingParams(
            max_tokens=steps, temperature=0, ignore_eos=True, seed=row, logprobs=logprobs
        )
        prompt = tuple(range(row + 1, row + 1 + PROMPT))
        engine.submit(Request(request_id=str(row), prompt_ids=prompt, sampling=sampling), sink)
    done.wait()
    # The last steps, before rows began to end.
    metrics = engine.metrics
    samples = {
        "host_seconds": list(metrics.host_seconds)[-steps // 2 - 4 : -4],
        "work_seconds": list(metrics.work_seconds)[-steps // 2 - 4 : -4],
    }
    engine.close()
    return samples


if __name__ == "__main__":
    rows, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    found = measure(rows, steps, prefix_cache="no-prefix-cache" not in sys.argv)
    print(json.dumps({name: summarize(values) for name, values in found.items()}))
