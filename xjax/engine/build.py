"""From a checkpoint and options to a running engine, in pieces that a notebook can use alone.

open_checkpoint -> load_model -> plan -> Engine
                   params, spec   memory, shapes, state
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xjax.cache.identity import PageIdentity
from xjax.checkpoints.checkpoint import Checkpoint
from xjax.config import (
    CacheSpec,
    EngineOptions,
    LayerSpec,
    PagedLayer,
    SchedulerConfig,
    StepShapes,
    has_recurrent,
    page_groups,
)
from xjax.engine.loop import Engine
from xjax.engine.memory import MemoryPlan, available_bytes, plan_memory
from xjax.engine.step import StepSpec
from xjax.engine.warmup import ProgramCache, ProgramTable, arithmetic
from xjax.errors import LoadError
from xjax.kernels.choice import choose, choose_dtype
from xjax.kernels.linear import PACKED_BACKENDS
from xjax.kernels.pages import page_dtype
from xjax.models.family import Family
from xjax.models.layout import split_config
from xjax.state.kv import PAGE_LAYOUT, EngineState, abstract_state, allocate, place_state, state_bytes
from xjax.state.mesh import make_mesh, shard_bytes
from xjax.state.quantized import is_quantized, working_bytes
from xjax.state.recurrent import slot_bytes
from xjax.state.zeros import give_back_zeros
from xjax.weights.load import load_params, read_config

Progress = Callable[[str, int, int], None]  # (what, done, total)

_CPU = {"page_size": 16, "prefill_chunk_size": 512}
_ACCELERATOR = {"page_size": 64, "prefill_chunk_size": 2048}
_THREADS_VARIABLE = "PJRT_NPROC"  # read by the runtime when its client starts
_DEVICES_OPTION = "jax_num_cpu_devices"
_DEVICES_FLAG = "xla_force_host_platform_device_count"  # the same in XLA_FLAGS


@dataclass(frozen=True)
class Model:
    """Parameters and what they mean; the engine borrows it, the caller keeps it."""

    family: Family
    config: Any
    params: Any
    dtype: jnp.dtype
    mesh: Mesh | None = None  # None: one device

    @property
    def num_devices(self) -> int:
        """How many devices share the model."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def spec(self) -> CacheSpec:
        """What each layer keeps between steps."""
        return self.family.cache_spec(self.config)


@dataclass(frozen=True)
class EnginePlan:
    """Every number an engine starts with, and the model's config, settled for its longest sequence."""

    config: Any
    scheduler: SchedulerConfig
    memory: MemoryPlan
    state: EngineState  # abstract


def set_threads(threads: int | None) -> None:
    """Limit the processor threads that steps compute with; must come before the first JAX call.

    Raises LoadError when the backend runs already with another number.
    """
    if threads is None:
        return
    if _has_started():
        if os.environ.get(_THREADS_VARIABLE) == str(threads):
            return
        raise LoadError("--threads comes too late: JAX has started; set it before the first use of JAX")
    os.environ[_THREADS_VARIABLE] = str(threads)


def _has_started() -> bool:
    # No public name tells whether the backend runs; without this one the check is left out.
    bridge = getattr(getattr(jax, "_src", None), "xla_bridge", None)
    is_running = getattr(bridge, "backends_are_initialized", None)
    return is_running is not None and is_running()


def set_cpu_devices(count: int) -> None:
    """Let a CPU stand for `count` devices, for a trial; must come before the first JAX call.

    Changes nothing where that is too late, or where the environment or the program has chosen a number.
    """
    is_chosen = _DEVICES_FLAG in os.environ.get("XLA_FLAGS", "") or getattr(jax.config, _DEVICES_OPTION) > 0
    if count > 1 and not is_chosen and not _has_started():
        jax.config.update(_DEVICES_OPTION, count)


def open_mesh(num_devices: int) -> Mesh | None:
    """Lay the first `num_devices` devices in a line; None for a single one. Raises LoadError for too few."""
    if num_devices == 1:
        return None
    found = jax.devices()
    if len(found) < num_devices:
        platform = found[0].platform
        advice = "; for a trial set JAX_NUM_CPU_DEVICES before JAX starts" if platform == "cpu" else ""
        raise LoadError(
            f"--tensor-parallel {num_devices}: there is only {len(found)} device ({platform}){advice}"
            if len(found) == 1
            else f"--tensor-parallel {num_devices}: there are only {len(found)} devices ({platform}){advice}"
        )
    return make_mesh(found[:num_devices])


def with_defaults(options: EngineOptions, device: Any) -> EngineOptions:
    """Fill in what the platform decides."""
    defaults = _CPU if device.platform == "cpu" else _ACCELERATOR
    values: dict[str, Any] = {}
    for name, value in defaults.items():
        given = getattr(options, name)
        values[name] = value if given is None else given
    values["dtype"] = choose_dtype(options.dtype, device.platform)
    values["kvcache_dtype"] = values["dtype"] if options.kvcache_dtype == "auto" else options.kvcache_dtype
    values["kernels"] = choose(options.kernels, device.platform, options.tensor_parallel)
    return options.replace(**values)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    kernels: str = "xla",
    device: Any = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Model:
    """Read a checkpoint's parameters onto a device, or each device's part onto those of a mesh.

    kernels   a backend, as `with_defaults` names it: for some, quantized matrices stay as they are

    Raises LoadError.
    """
    device = device or (jax.devices()[0] if mesh is None else mesh.devices.flat[0])
    name = with_defaults(EngineOptions(dtype=dtype), device).dtype
    family, config = read_config(checkpoint)
    sharding: Any = jax.sharding.SingleDeviceSharding(device)
    if mesh is not None:
        config = split_config(config, mesh.size)
        sharding = family.shardings(config, mesh)
    report = None if progress is None else partial(progress, "load")
    params = load_params(
        checkpoint, family, config, dtype=jnp.dtype(name), sharding=sharding,
        packs=mesh is None and kernels in PACKED_BACKENDS, progress=report,
    )  # fmt: skip
    return Model(family, config, params, jnp.dtype(name), mesh)


def plan_engine(
    model: Model, options: EngineOptions, *, device: Any, available: int | None = None
) -> EnginePlan:
    """Decide shapes, pages and state from a model and options that `with_defaults` has filled in.

    available   bytes of a device to plan with, parameters included; default: ask the devices, which hold
                them already
    """
    assert options.page_size is not None and options.prefill_chunk_size is not None
    config = model.config
    if options.max_model_len is not None:
        config = model.family.for_length(config, options.max_model_len)
    spec, longest = model.family.cache_spec(config), config.max_context
    weights = shard_bytes(model.params)
    shapes = StepShapes.plan(
        max_num_seqs=options.max_num_seqs,
        prefill_chunk_size=options.prefill_chunk_size,
        max_model_len=longest,
    )
    kv_dtype = page_dtype(jnp.dtype(options.kvcache_dtype), device.platform)
    build = partial(
        abstract_state, spec, page_size=options.page_size, num_rows=options.max_num_seqs, dtype=kv_dtype
    )
    groups = page_groups(spec)
    empty = build(num_pages=(0,) * len(groups))
    memory = plan_memory(
        _spec_of_device(spec, model.num_devices),
        available=_free_bytes(model, device) + weights if available is None else available,
        weights=weights,
        activations=activation_bytes(model, shapes) + widened_bytes(model, device.platform),
        num_programs=2 * (len(shapes.decode_rows) + len(shapes.prefill)),  # plain and full bodies
        max_model_len=longest,
        max_num_seqs=options.max_num_seqs,
        page_size=options.page_size,
        chunk=shapes.prefill[-1][0],
        kv_itemsize=kv_dtype.itemsize,
        kv_fraction=options.kv_fraction,
        num_pages=options.num_pages,
        recurrent=state_bytes(empty),
        state_bytes=slot_bytes(empty.recurrent),
        host_fold=_host_fold(options, device),
        is_shared=device.platform == "cpu",
        num_devices=model.num_devices,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest,
        page_size=options.page_size,
        num_pages=memory.num_pages,
        windows=tuple(group.window for group in groups),
        shapes=shapes,
        max_queue=options.max_queue,
        has_recurrent=has_recurrent(spec),
        embed_dim=config.embed_dim,
        prefix_cache=not options.disable_prefix_cache,
        prefix_cache_max_tokens=options.prefix_cache_max_tokens,
        # Of this process alone, which no digest of weights delays; see `cache.identity` for the lasting one.
        namespace=secrets.token_bytes(32),
        host_pages=memory.host_pages if any(memory.host_pages) else None,
        page_bytes=memory.page_bytes,
        host_states=memory.host_states,
        state_bytes=memory.state_bytes,
        preemption_mode=options.preemption_mode,
    )
    return EnginePlan(config, scheduler, memory, build(num_pages=memory.num_pages))


def page_identity(
    spec: StepSpec, plan: EnginePlan, *, dtype: str, coding: Mapping[str, Any], device: Any
) -> PageIdentity:
    """Everything but weights and tokens that a page's bytes depend on.

    dtype    of activations
    coding   what the model's config says of how weights are coded
    device   that computes, or one of them
    """
    pages = {str(layer.k.dtype) for layer in plan.state.kv if layer is not None}
    return PageIdentity(
        family=spec.family.name,
        config=plan.config,
        coding=coding,
        layers=spec.family.cache_spec(plan.config),
        page_dtype="".join(pages),
        page_size=plan.scheduler.page_size,
        layout=PAGE_LAYOUT,
        sharding=() if spec.mesh is None else tuple(spec.mesh.shape.items()),
        dtype=dtype,
        kernels=spec.backend,
        # A weight is what its reader makes of it.
        arithmetic=arithmetic(device, "checkpoints", "weights"),
    )


def _host_fold(options: EngineOptions, device: Any) -> float:
    """Pages on the host for each on the device; none where that would only be the same memory twice."""
    if options.preemption_mode == "recompute":
        return 0.0
    if options.cpu_mem_fold is not None:
        return options.cpu_mem_fold
    return 0.0 if device.platform == "cpu" and options.preemption_mode == "auto" else 0.5


def _spec_of_device(spec: CacheSpec, num_devices: int) -> CacheSpec:
    """What each layer keeps on one of the devices that share it."""

    def share(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer, PagedLayer) or layer.num_kv_heads % num_devices:
            return layer
        return replace(layer, num_kv_heads=layer.num_kv_heads // num_devices)

    return tuple(share(layer) for layer in spec)


def _free_bytes(model: Model, device: Any) -> int:
    """Bytes that there are on each device of a model."""
    if model.mesh is None:
        return available_bytes(device)
    least = min(available_bytes(device) for device in model.mesh.devices.flat)
    return least // model.num_devices if device.platform == "cpu" else least  # they share one memory


def activation_bytes(model: Model, shapes: StepShapes) -> int:
    """Upper estimate of a step's temporaries: the widest layer's values and the logits, twice each."""
    config = model.config
    tokens = shapes.prefill[-1][0] + shapes.decode_rows[-1]
    sampled = shapes.decode_rows[-1] + max(shapes.num_scored)

    def share(size: int) -> int:
        return -(-3 * size // model.num_devices)

    ffn_width, expert_size, experts = share(config.ffn_dim), 0, getattr(config, "experts", None)
    if experts is not None:
        expert_size = share(experts.ffn_dim * config.embed_dim)  # may be copied to be multiplied
        each = share(experts.ffn_dim) + 2 * config.embed_dim
        ffn_width = max(ffn_width, experts.num_active * each + share(experts.shared_ffn_dim))
    width = 4 * config.embed_dim + ffn_width + share(config.num_heads * config.head_dim)
    return 2 * 4 * (tokens * width + expert_size + sampled * config.vocab_size)


def widened_bytes(model: Model, platform: str) -> int:
    """What a step makes of weights before it multiplies: numbers of codes, a block at a time.

    And float32 copies of 16-bit weights, which the CPU's compiler makes of all of them at once.
    """
    leaves = jax.tree.leaves(model.params, is_leaf=is_quantized)
    size = working_bytes([leaf for leaf in leaves if is_quantized(leaf)])
    if platform != "cpu":
        return size
    narrow = [leaf for leaf in leaves if not is_quantized(leaf) and leaf.dtype.itemsize < 4]
    # Of experts, which are stacked, one at a time.
    return size + sum(
        4 * shard_bytes(leaf) // leaf.dtype.itemsize // (leaf.shape[0] if leaf.ndim == 3 else 1)
        for leaf in narrow
    )


def make_table(
    model: Model,
    plan: EnginePlan,
    *,
    backend: str = "xla",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> ProgramTable:
    """The empty table of compiled steps for a model and a plan; `cache` is the folder they are kept in."""
    placed = _placed_state(model, plan)
    (platform,) = {device.platform for device in placed.last_token.sharding.device_set}
    return ProgramTable(
        StepSpec(model.family, plan.config, backend, model.mesh),
        model.params,
        placed,
        cache=None if cache is None else ProgramCache(cache),
        progress=progress,
        max_temporary=4 * activation_bytes(model, plan.scheduler.shapes)
        + widened_bytes(model, platform)
        + (256 << 20),
    )


def start_engine(
    model: Model, plan: EnginePlan, table: ProgramTable | None = None, *, lookahead: bool = True
) -> Engine:
    """Allocate the state and start the engine's threads; programs are compiled when first needed."""
    table, placed = table or make_table(model, plan), _placed_state(model, plan)
    return Engine(
        model.params,
        # Leaf by leaf: together they would take all their memory for a moment.
        lambda: jax.tree.map(lambda leaf: give_back_zeros(allocate(leaf, leaf.sharding)), placed),
        table,
        plan.scheduler,
        spec=model.spec,
        vocab_size=model.config.vocab_size,
        lookahead=lookahead,
    )


def _placed_state(model: Model, plan: EnginePlan) -> EngineState:
    """The abstract state with its shardings, on the devices that hold the parameters."""
    if model.mesh is not None:
        return place_state(plan.state, model.mesh)
    (device,) = set[Any]().union(*(leaf.devices() for leaf in jax.tree.leaves(model.params)))
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), plan.state
    )
