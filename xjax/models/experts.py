"""A feed-forward of many experts, of which a router picks a few for each token.

    scores = softmax(router(x)), float32 -> the best `num_active` -> weights, made to sum to one or not
    out = sum of weight * expert(x) [+ sigmoid(shared_gate(x)) * shared(x)]

Of equal scores the expert of the lower number wins. Norms, residuals and checkpoints' names are not
known here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from xjax.errors import LoadError
from xjax.kernels import moe
from xjax.kernels.activation import gate
from xjax.models.settings import Settings, short
from xjax.state.mesh import ParamSpec, on_shards
from xjax.state.quantized import Weight, matmul


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How the experts of a model are set.

    num_active       experts that a token passes
    ffn_dim          of each expert
    shared_ffn_dim   of the expert that every token passes; 0: there is none
    normalizes       whether the weights of a token's experts are made to sum to one
    dense_layers     layers that have an ordinary feed-forward instead
    """

    num_experts: int
    num_active: int
    ffn_dim: int
    shared_ffn_dim: int = 0
    normalizes: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise LoadError(f"a token cannot pass {self.num_active} of {self.num_experts} experts")


@struct.dataclass
class ExpertStack:
    """Weights of all experts; F is the width of one.

    gate_up   [X, 2 * F, E]   of each expert the gate's rows, then the other's
    down      [X, E, F]
    """

    gate_up: jax.Array
    down: jax.Array


@struct.dataclass
class SharedExpert:
    """Weights of the expert that every token passes, of width F.

    gate      [1, E]       how much it counts
    gate_up   [2 * F, E]
    down      [E, F]
    """

    gate: jax.Array
    gate_up: Weight
    down: Weight


@struct.dataclass
class ExpertsParams:
    """Weights of a feed-forward half with experts.

    norm        [E]      float32, or None
    router      [X, E]   float32
    post_norm   [E]      float32, or None
    norm_bias   [E]      float32, or None
    """

    norm: jax.Array | None
    router: jax.Array
    experts: ExpertStack
    shared: SharedExpert | None = None
    post_norm: jax.Array | None = None
    norm_bias: jax.Array | None = None


def route(x: jax.Array, router: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Pick the experts of each token and what each of them counts.

    x        [N, E]   model dtype
    router   [X, E]   float32
    returns  expert ids [N, k] int32, best first, and weights [N, k] float32
    """
    logits = jax.lax.dot_general(
        x.astype(jnp.float32), router, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
    weight, expert_id = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), experts.num_active)
    if experts.normalizes:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return expert_id, weight


def mix(
    params: ExpertsParams,
    x: jax.Array,
    is_real: jax.Array,
    *,
    experts: Experts,
    activation: str,
    backend: str,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Pass each token through its experts; devices that share the model each through a part of every one.

    x         [N, E]   model dtype, after the norm
    is_real   [N]      bool; the others are padding, and pass no expert but the shared one
    returns   [N, E]
    """
    expert_id, weight = route(x, params.router, experts)
    expert_id = jnp.where(is_real[:, None], expert_id, experts.num_experts)
    stack, shared = params.experts, params.shared
    run = partial(moe.moe, activation=activation, backend=backend)
    is_split = mesh is not None and experts.ffn_dim % mesh.size == 0
    run = on_shards(run, mesh if is_split else None, (None, None, None, 1, 2), result=None)
    out = run(x, expert_id, weight, stack.gate_up, stack.down)
    if shared is None:
        return out
    inner = gate_shards(matmul(x, shared.gate_up, backend=backend, mesh=mesh), activation, mesh)
    share = jax.nn.sigmoid(matmul(x, shared.gate, backend=backend).astype(jnp.float32))
    return out + share.astype(x.dtype) * matmul(inner, shared.down, backend=backend, mesh=mesh, split=1)


def gate_shards(inner: jax.Array, kind: str, mesh: Mesh | None) -> jax.Array:
    """Activate gates and multiply the rest by them, as `gate` does; on a mesh each device its own part.

    inner     [N, 2 * F]  gates, then the rest; on a mesh in a run of both for each device
    returns   [N, F]
    """
    is_split = mesh is not None and inner.shape[1] // 2 % mesh.size == 0
    return on_shards(partial(gate, kind=kind), mesh if is_split else None, (1,))(inner)


def experts_specs(experts: Experts, embed_dim: int, **norms: Any) -> ExpertsParams:
    """Describe the parameters with ParamSpecs; those of the norms are given."""
    count, ffn, shared = experts.num_experts, experts.ffn_dim, experts.shared_ffn_dim
    shared_specs = SharedExpert(
        gate=_spec((1, embed_dim), (None, "embed")),
        gate_up=_spec((2 * shared, embed_dim), ("ffn", "embed"), units=shared),
        down=_spec((embed_dim, shared), ("embed", "ffn")),
    )
    return ExpertsParams(
        router=_spec((count, embed_dim), (None, "embed"), dtype="float32"),
        experts=ExpertStack(
            gate_up=_spec((count, 2 * ffn, embed_dim), (None, "ffn", "embed"), units=ffn),
            down=_spec((count, embed_dim, ffn), (None, "embed", "ffn")),
        ),
        shared=shared_specs if shared else None,
        **norms,
    )


def _spec(*args: Any, **fields: Any) -> Any:
    # As in `layers`: trees of specs have the type of the tree that they describe.
    return ParamSpec(*args, **fields)


def read_hf_experts(get: Settings, *, num_experts: str, ffn_dim: str, **fields: Any) -> Experts:
    """Read what config.json files call alike, given the keys that differ; `fields` win.

    num_experts, ffn_dim   keys of how many there are and how wide each is
    """
    count = get.integer(num_experts)
    found: dict[str, Any] = {
        "num_experts": count,
        "num_active": _check_active(get, "num_experts_per_tok", count),
        "ffn_dim": get.integer(ffn_dim),
    }
    return Experts(**(found | fields))


def read_dense_layers(get: Settings, num_layers: int) -> tuple[int, ...]:
    """Read which layers have an ordinary feed-forward, as Qwen's config.json files have it."""
    named = get.values.get("mlp_only_layers") or []
    is_list = isinstance(named, list) and all(type(i) is int for i in named)
    if not is_list or not all(0 <= i < num_layers for i in named):
        raise LoadError(f"{get.source}: mlp_only_layers must list layers from 0 to {num_layers - 1}")
    step = get.integer("decoder_sparse_step", 1)
    dense = tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
    if len(dense) == num_layers:
        raise LoadError(
            f"{get.source}: mlp_only_layers and decoder_sparse_step leave no layer to the experts"
        )
    return dense


def read_gguf_experts(get: Settings, tensors: Any, num_layers: int, *, normalizes: bool) -> Experts:
    """Read GGUF metadata; which layers have experts, and a width it lacks, are read off the tensors."""
    count = get.integer("expert_count")
    dense = tuple(i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in tensors)
    if len(dense) == num_layers:
        raise LoadError(f"{get.source}: {get.prefix}expert_count is {count}, but no layer has a router")
    _check_softmax(get)
    first = next(i for i in range(num_layers) if i not in dense)
    shared = tensors.get(f"blk.{first}.ffn_up_shexp.weight")
    return Experts(
        num_experts=count,
        num_active=_check_active(get, "expert_used_count", count),
        ffn_dim=_gguf_ffn_dim(get, tensors, first),
        shared_ffn_dim=shared.shape[0] if shared is not None and shared.shape else 0,
        normalizes=get.flag("expert_weights_norm", normalizes),
        dense_layers=dense,
    )


def _check_softmax(get: Settings) -> None:
    """Refuse routers of newer models, which files of these architectures can hold too."""
    kind = get.integer("expert_gating_func", 1, low=0)
    if kind > 1:  # 0: not set
        raise LoadError(
            f"{get.source}: {get.prefix}expert_gating_func {kind} is not supported, only 1, softmax"
        )
    scale = get.values.get(f"{get.prefix}expert_weights_scale")
    if scale is not None and not (isinstance(scale, int | float) and scale in (0, 1)):
        raise LoadError(
            f"{get.source}: {get.prefix}expert_weights_scale {short(scale)} is not supported, only 1"
        )


def _gguf_ffn_dim(get: Settings, tensors: Any, layer: int) -> int:
    stacked = tensors.get(f"blk.{layer}.ffn_up_exps.weight")
    default = stacked.shape[1] if stacked is not None and len(stacked.shape) == 3 else None
    return get.integer("expert_feed_forward_length", default or get.integer("feed_forward_length"))


def _check_active(get: Settings, key: str, count: int) -> int:
    active = get.integer(key)
    if active > count:
        raise LoadError(f"{get.source}: {get.prefix}{key} is {active}, but there are {count} experts")
    return active
