"""Tiny models with sharp logits, engines over them, and a client that collects events."""

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xjax.config import EngineOptions
from xjax.engine.build import EnginePlan, Model, make_table, plan_engine, start_engine, with_defaults
from xjax.engine.loop import Engine
from xjax.engine.warmup import ProgramTable
from xjax.models import gemma3, llama
from xjax.models.decoder import Config
from xjax.models.layout import split_config
from xjax.models.rope import Rope
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
from xjax.state.mesh import make_mesh
from xjax.weights.fuse import fuse_qkv, interleave

VOCAB = 96


def _sharpen(params: Any, *, o: float, qkv: float, head: float) -> Any:
    """Let every token of the context show in the next one, and clearly.

    A tiny random model repeats itself, and its logits are nearly equal: so attention is scaled up
    until its text wanders, and the head is one of its own.
    """
    layers = tuple(
        replace(
            layer, attention=replace(layer.attention, o=layer.attention.o * o, qkv=layer.attention.qkv * qkv)
        )
        for layer in params.layers
    )
    weight = head * jax.random.normal(jax.random.key(7), params.embed.shape, jnp.float32)
    return replace(params, layers=layers, embed=params.embed * 0.5, head=weight)


def tiny_llama() -> Model:
    """Two layers, grouped heads."""
    config = Config(
        num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=64, vocab_size=VOCAB,
        max_context=512, norm_eps=1e-5, tied=False, rope=Rope(dim=16, theta=10000.0),
    )  # fmt: skip
    params = llama.FAMILY.init(jax.random.key(3), config, jnp.dtype("float32"))
    return Model(llama.FAMILY, config, _sharpen(params, o=1.6, qkv=2, head=1.0), jnp.dtype("float32"))


def tiny_gemma() -> Model:
    """Three window layers to one global: two page groups."""
    base = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 12, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    config = gemma3.config_from_hf(base)
    params = gemma3.FAMILY.init(jax.random.key(5), config, jnp.dtype("float32"))
    return Model(gemma3.FAMILY, config, _sharpen(params, o=4, qkv=1, head=3.0), jnp.dtype("float32"))


def shared(model: Model, num_devices: int) -> Model:
    """The same model over several devices, its fused weights laid out anew as a loader does."""
    mesh, num_kv, dim = (
        make_mesh(jax.devices()[:num_devices]),
        model.config.num_kv_heads,
        model.config.head_dim,
    )
    config = split_config(model.config, num_devices)

    def lay(path: Any, leaf: jax.Array, sharding: Any) -> jax.Array:
        values = np.asarray(leaf)
        out = values
        if path[-1].name == "qkv":
            heads = values.reshape(num_kv, -1, dim, values.shape[1])
            parts = [part.reshape(-1, values.shape[1]) for part in np.split(heads, (-2, -1), axis=1)]
            out = np.empty((config.num_kv_heads * (config.num_heads // config.num_kv_heads + 2) * dim,
                            values.shape[1]), values.dtype)  # fmt: skip
            fuse_qkv(out, parts, config.num_kv_heads, dim, 0, config.layout.kv_copies)
        elif path[-1].name == "gate_up":
            out = np.empty_like(values)
            interleave(out, [values], num_devices)
        return jax.device_put(out, sharding)

    shardings = model.family.shardings(config, mesh)
    params = jax.tree_util.tree_map_with_path(lay, model.params, shardings)
    return Model(model.family, config, params, model.dtype, mesh)


@dataclass(frozen=True)
class Kit:
    """A model with its plan and its table of programs, from which engines are started."""

    model: Model
    plan: EnginePlan
    table: ProgramTable

    def engine(self, *, lookahead: bool = True) -> Engine:
        """A fresh engine; it shares the compiled programs with every other one of the kit."""
        return start_engine(self.model, self.plan, self.table, lookahead=lookahead)


def make_kit(model: Model, *, cache: Any = None, rows: tuple[int, ...] = (1, 4), **options: Any) -> Kit:
    """Small defaults, and few shapes, since each takes seconds; `options` as EngineOptions names them."""
    device = jax.devices()[0]
    options["tensor_parallel"] = model.num_devices
    given = {
        "max_num_seqs": 4,
        "page_size": 4,
        "prefill_chunk_size": 64,
        "max_model_len": 160,
        "num_pages": 40,
    }
    filled = with_defaults(EngineOptions(**(given | options)), device)
    plan = plan_engine(model, filled, device=device, available=2 << 30)
    shapes = replace(plan.scheduler.shapes, decode_rows=rows, prefill=((64, 16),), num_scored=(16,))
    plan = replace(plan, scheduler=replace(plan.scheduler, shapes=shapes))
    return Kit(model, plan, make_table(model, plan, cache=None if cache is None else Path(cache)))


def make_engine(model: Model, *, lookahead: bool = True, cache: Any = None, **options: Any) -> Engine:
    """An engine of a kit of its own."""
    return make_kit(model, cache=cache, **options).engine(lookahead=lookahead)


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
            Request(request_id=f"r{self._serial}", prompt_ids=tuple(prompt), sampling=params, **request),
            answer,
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

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return self._done.is_set()

    def wait(self, seconds: float = 120.0) -> list[Sample]:
        """Wait for the end of every sample."""
        assert self._done.wait(seconds), "the request did not end"
        return self.samples
