"""Tiny models with sharp logits, engines over them, and a client that collects events."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from xjax.config import EngineOptions
from xjax.engine.build import Model, plan_engine, start_engine, with_defaults
from xjax.engine.loop import Engine
from xjax.models import gemma3, llama
from xjax.models.rope import Rope
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent

VOCAB = 96


def _sharpen(params: Any, config: Any, family: Any, scale: float) -> Any:
    """Scale the embedding so that logits differ clearly: a tiny random model is nearly uniform."""
    return params.replace(embed=params.embed * scale)


def tiny_llama() -> Model:
    """Two layers, grouped heads, tied."""
    config = llama.Config(
        num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=64, vocab_size=VOCAB,
        max_context=512, norm_eps=1e-5, tied=True, rope=Rope(dim=16, theta=10000.0),
    )  # fmt: skip
    params = llama.init(jax.random.key(3), config, jnp.dtype("float32"))
    return Model(llama, config, _sharpen(params, config, llama, 4.0), jnp.dtype("float32"))


def tiny_gemma() -> Model:
    """Three window layers to one global: two page groups."""
    base = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 12, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    config = gemma3.config_from_hf(base)
    params = gemma3.init(jax.random.key(5), config, jnp.dtype("float32"))
    return Model(gemma3, config, _sharpen(params, config, gemma3, 4.0), jnp.dtype("float32"))


def make_engine(model: Model, *, lookahead: bool = True, cache: Any = None, **options: Any) -> Engine:
    """An engine with small defaults; `options` as EngineOptions names them."""
    device = jax.devices()[0]
    given = {"max_num_seqs": 4, "page_size": 4, "prefill_chunk_size": 32, "max_model_len": 256, "num_pages": 120}
    filled = with_defaults(EngineOptions(**(given | options)), device)
    plan = plan_engine(model, filled, device=device)
    return start_engine(model, plan, lookahead=lookahead, cache=cache)


@dataclass
class Sample:
    """What one sample of a request received."""

    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None


class Client:
    """Submits requests to an engine and waits for their ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._serial = 0

    def start(self, prompt: list[int], params: SamplingParams, **request: Any) -> "Answer":
        """Submit one request."""
        self._serial += 1
        if params.seed is None:
            params = replace(params, seed=17)
        answer = Answer(params.n)
        self.engine.submit(
            Request(request_id=f"r{self._serial}", prompt_ids=tuple(prompt), sampling=params, **request), answer
        )
        answer.request_id = f"r{self._serial}"
        return answer

    def run(self, prompt: list[int], params: SamplingParams, **request: Any) -> Sample:
        """Submit one request alone and wait."""
        return self.start(prompt, params, **request).wait()[0]


class Answer:
    """Collects the events of one request."""

    def __init__(self, num_samples: int) -> None:
        self.request_id = ""
        self.samples = [Sample() for _ in range(num_samples)]
        self._done = threading.Event()
        self.first = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        sample = self.samples[event.sample_id]
        assert sample.reason is None, "an event after the last one"
        sample.events.append(event)
        sample.token_ids.extend(event.token_ids)
        if event.token_ids:
            self.first.set()
        if event.finish_reason is not None:
            sample.reason, sample.error = event.finish_reason, event.error
            if all(item.reason is not None for item in self.samples):
                self._done.set()

    def wait(self, seconds: float = 120.0) -> list[Sample]:
        """Wait for the end of every sample."""
        assert self._done.wait(seconds), "the request did not end"
        return self.samples
