"""The engine's state: one immutable pytree, the only argument a step donates.

Pages hold keys and values head-major, K and V apart, each layer on its own, so that a step
updates them in place and a swap moves lists of per-layer arrays. Which page belongs to whom is
the host's business; nothing here knows a sequence.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from xjax.config import CacheSpec, PagedLayer, page_groups
from xjax.state.mesh import page_sharding, replicated
from xjax.state.recurrent import Recurrent, abstract_recurrent

TRASH_PAGE = 0
PAGE_LAYOUT = 1  # version of how a page's numbers lie; pages of another one are not read


@struct.dataclass
class LayerKV:
    """Pages of one layer.

    k, v   [P, K, S, D]   cache dtype; P is its group's, page 0 takes what padding writes
    """

    k: jax.Array
    v: jax.Array


@struct.dataclass
class EngineState:
    """Everything on the device that outlives a step, parameters excepted.

    kv           one LayerKV or None for each layer
    recurrent    one Recurrent or None for each layer
    last_token   [R+1] int32   the token each running row sampled last; row R is trash
    position     [R+1] int32   how many tokens each running row holds in pages
    """

    kv: tuple[LayerKV | None, ...]
    recurrent: tuple[Recurrent | None, ...]
    last_token: jax.Array
    position: jax.Array


def abstract_state(
    spec: CacheSpec,
    *,
    num_pages: tuple[int, ...],
    page_size: int,
    num_rows: int,
    num_snapshots: int = 0,
    dtype: jnp.dtype = jnp.dtype("float32"),
) -> EngineState:
    """Describe a state with ShapeDtypeStructs; `num_pages` by group, `num_rows` is R."""
    group_of = {layer_id: g for g, group in enumerate(page_groups(spec)) for layer_id in group.layer_ids}
    kv: list[LayerKV | None] = []
    recurrent: list[Recurrent | None] = []
    for layer_id, layer in enumerate(spec):
        if isinstance(layer, PagedLayer):
            shape = (num_pages[group_of[layer_id]], layer.num_kv_heads, page_size, layer.head_dim)
            leaf: Any = jax.ShapeDtypeStruct(shape, dtype)
            kv.append(LayerKV(leaf, leaf))
            recurrent.append(None)
        else:
            kv.append(None)
            recurrent.append(abstract_recurrent(layer, num_rows, num_snapshots))
    rows: Any = jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32)
    return EngineState(tuple(kv), tuple(recurrent), rows, rows)


def allocate(abstract: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Make the state, or the part of one, that `abstract` describes: zero, each leaf a buffer of its own."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), abstract)


def place_state(abstract: EngineState, mesh: Mesh) -> EngineState:
    """Give an abstract state its shardings: pages by kv head, the rest on every device."""

    def put(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def put_layer(layer: LayerKV) -> LayerKV:
        sharding = page_sharding(mesh, layer.k.shape[1])
        return LayerKV(put(layer.k, sharding), put(layer.v, sharding))

    rest = jax.tree.map(lambda leaf: put(leaf, replicated(mesh)), abstract.replace(kv=()))  # pyright: ignore[reportAttributeAccessIssue]
    return rest.replace(kv=tuple(None if layer is None else put_layer(layer) for layer in abstract.kv))


def state_bytes(abstract: EngineState) -> int:
    """Bytes of all leaves of a state, abstract or real."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
