"""Frozen settings, the cache spec a model declares, and the one reader of our environment.

`EngineOptions` is the flat set of option names that the command line and `LLM` share; its
fields carry the help, so flags and the table in the docs are made from it. `CacheSpec` is all
that cache, scheduler and memory plan know about a model. No arrays, no files are opened here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from xjax.errors import LoadError

# ---- the cache spec ---------------------------------------------------------------------


@dataclass(frozen=True)
class PagedLayer:
    """A layer that keeps keys and values in pages.

    num_kv_heads, head_dim   K and D of its pages
    window                   tokens it looks back on (itself counted), None for all
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer that keeps one state of fixed size for each sequence.

    num_heads, key_dim, value_dim    H, Dk, Dv of the recurrent state
    conv_channels, conv_width        C, W of the convolution; 0 channels for none
    """

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int = 0
    conv_width: int = 1


LayerSpec = PagedLayer | RecurrentLayer
CacheSpec = tuple[LayerSpec, ...]


@dataclass(frozen=True)
class PageGroup:
    """Layers whose pages live and die together; a page id means one page in each of them."""

    window: int | None
    layer_ids: tuple[int, ...]


def page_groups(spec: CacheSpec) -> tuple[PageGroup, ...]:
    """Sort the paged layers of a spec into groups: full attention first, then by window."""
    windows = {layer.window for layer in spec if isinstance(layer, PagedLayer)}
    ordered = sorted(windows, key=lambda window: (window is not None, window or 0))
    return tuple(
        PageGroup(
            window,
            tuple(
                i for i, layer in enumerate(spec) if isinstance(layer, PagedLayer) and layer.window == window
            ),
        )
        for window in ordered
    )


def has_recurrent(spec: CacheSpec) -> bool:
    """Whether any layer of the spec keeps recurrent state."""
    return any(isinstance(layer, RecurrentLayer) for layer in spec)


# ---- options ----------------------------------------------------------------------------


def _option(default: Any, text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": text, **extra})


DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "xla", "numba")
PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Every engine option, flat, in the spelling of the command line (dashes for underscores).

    A default of None means that the platform decides; `resolve` fills it in.
    Raises LoadError naming the option when a value is out of range.
    """

    max_num_seqs: int = _option(
        32,
        "sequences that run at once; `generate` takes no more than there are prompts",
        low=1,
        high=4096,
    )
    max_model_len: int | None = _option(
        None, "longest prompt plus answer in tokens; default: what the model allows", low=2, high=2**30
    )
    prefill_chunk_size: int | None = _option(
        None,
        "prompt tokens computed in one step; default: 512 on CPU, 2048 on accelerators",
        low=16,
        high=65536,
        aliases=("max_num_batched_tokens",),
    )
    kv_fraction: float = _option(
        0.6,
        "share of the memory left after weights that pages may take",
        low=0.01,
        high=1.0,
        aliases=("gpu_memory_utilization",),
    )
    num_pages: int | None = _option(
        None,
        "pages of the largest group; default: the memory plan decides",
        low=2,
        high=2**30,
        aliases=("num_gpu_blocks_override",),
    )
    page_size: int | None = _option(
        None,
        "tokens in a page; default: 16 on CPU, 64 on accelerators",
        low=1,
        high=1024,
        aliases=("block_size",),
    )
    dtype: str = _option(
        "auto", "of weights and activations; auto: float32 on CPU, else bfloat16", choices=DTYPES
    )
    kvcache_dtype: str = _option(
        "auto", "of keys and values; auto: as --dtype", choices=DTYPES, aliases=("kv_cache_dtype",)
    )
    kernels: str = _option(
        "auto", "kernel family; auto: numba on a CPU that has AVX2, else xla", choices=KERNELS
    )
    threads: int | None = _option(None, "processor threads to compute with; default: all", low=1, high=1024)
    tensor_parallel: int = _option(
        1,
        "devices that share each layer; on a CPU they are made for a trial",
        low=1,
        high=1024,
        aliases=("tensor_parallel_size",),
        short="-tp",
    )
    preemption_mode: str = _option(
        "auto",
        "when pages run out: move some of a sequence to the host (swap) or compute it again; "
        "auto: what takes less time, as measured",
        choices=PREEMPTION_MODES,
    )
    cpu_mem_fold: float | None = _option(
        None,
        "host memory for pages, as a multiple of the device's pages; "
        "default: 0.5, or 0 where both are the same memory, as on CPU",
        low=0.0,
        high=64.0,
    )
    disable_prefix_cache: bool = _option(
        False,
        "compute every prompt anew instead of reusing pages of equal beginnings",
        aliases=("no_enable_prefix_caching",),
    )
    prefix_cache_max_tokens: int | None = _option(
        None, "most tokens that the prefix cache keeps; default: what the pages hold", low=0, high=2**40
    )
    max_queue: int | None = _option(
        None, "requests that may wait; default: no limit, of the server 1024", low=1, high=10**7
    )
    generation_config: str = _option(
        "auto", "take sampling defaults from the model or not", choices=("auto", "none")
    )
    seed: int = _option(
        0, "seed of requests that name none; each request draws its own", low=0, high=2**63 - 1
    )
    compile_cache: str | None = _option(
        None,
        "absolute folder of compiled programs, 'auto' or 'none'; "
        "default: auto on the command line, none in Python",
    )

    def __post_init__(self) -> None:
        self._check_folder()
        for item in fields(self):
            value, meta = getattr(self, item.name), item.metadata
            flag = "--" + item.name.replace("_", "-")
            if value is None:
                continue
            if "choices" in meta and value not in meta["choices"]:
                raise LoadError(f"{flag} must be one of {', '.join(meta['choices'])}, not {value!r}")
            if item.type == "bool" or item.type is bool:
                if not isinstance(value, bool):
                    raise LoadError(f"{flag} must be true or false, not {value!r}")
            if "low" in meta:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if not isinstance(meta["low"], float):
                    is_number = is_number and isinstance(value, int)
                if not is_number or not meta["low"] <= value <= meta["high"]:
                    raise LoadError(f"{flag} must be from {meta['low']} to {meta['high']}, not {value!r}")

    def _check_folder(self) -> None:
        folder = self.compile_cache
        if folder is None or folder in ("auto", "none"):
            return
        if not Path(folder).expanduser().is_absolute():
            raise LoadError(f"--compile-cache must be an absolute folder, 'auto' or 'none', not {folder!r}")

    def replace(self, **changes: Any) -> "EngineOptions":
        """Copy with some options changed."""
        return replace(self, **changes)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "EngineOptions":
        """Build from names as users write them, aliases included; unknown ones raise LoadError."""
        names = {item.name: item.name for item in fields(cls)}
        for item in fields(cls):
            names.update(dict.fromkeys(item.metadata.get("aliases", ()), item.name))
        values: dict[str, Any] = {}
        for key, value in options.items():
            if key not in names:
                raise LoadError(f"unknown option {key!r}; known: {', '.join(sorted(names))}")
            if names[key] in values:
                raise LoadError(f"option {names[key]!r} was given twice, once as {key!r}")
            values[names[key]] = value
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class StepShapes:
    """The static shapes that steps come in, as far as the host must know them.

    decode_rows       rows of the decode shapes, rising; the last holds every running sequence
    prefill           (tokens, tile) of the mixed shapes, rising in both and in their ratio
    num_scored        prompt positions of a full mixed step that can be scored, by shape
    num_pairs         sparse penalty and bias pairs of a full step
    """

    decode_rows: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    num_scored: tuple[int, ...]
    num_pairs: int

    @classmethod
    def plan(cls, *, max_num_seqs: int, prefill_chunk_size: int, max_model_len: int) -> "StepShapes":
        """Choose a short list of shapes: each costs seconds to compile and about 60 MB."""
        rows = tuple(sorted({min(size, max_num_seqs) for size in (1, 4, 8, 16)} | {max_num_seqs}))
        if max_num_seqs > 32:
            rows = tuple(sorted(set(rows) | {size for size in (64, 128, 256) if size < max_num_seqs}))
        longest = -(-min(prefill_chunk_size, max_model_len) // 32) * 32
        prefill = tuple((size, 32) for size in (32, 128) if size < longest)
        prefill += ((longest, 128 if longest >= 512 and longest % 128 == 0 else 32),)
        scored = tuple(min(tokens, 64) for tokens, _ in prefill)
        return cls(
            decode_rows=rows, prefill=prefill, num_scored=scored, num_pairs=max(4096, max_model_len + 2048)
        )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know; every number is final."""

    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: tuple[int, ...]  # by group, the trash page 0 included
    windows: tuple[int | None, ...]  # by group
    shapes: StepShapes
    max_queue: int | None = None
    has_recurrent: bool = False
    step_time_target: float = 0.25  # seconds that a step with running decodes should take
    embed_dim: int = 0  # numbers of a hidden state, which steps that pool them give back
    prefix_cache: bool = True
    prefix_cache_max_tokens: int | None = None
    namespace: bytes = bytes(32)  # of page keys: everything but the tokens that a page's bytes depend on
    host_pages: tuple[int, ...] | None = None  # slots in host memory by group, None for none
    page_bytes: tuple[int, ...] | None = None  # by group, to judge what moving a page costs
    host_states: int = 0  # slots in host memory for the recurrent state of a sequence
    state_bytes: int = 0  # of the recurrent state of a sequence
    preemption_mode: str = "auto"  # auto, swap or recompute
    least_awaited: int = 32  # tokens worth waiting for while another computes them: the cost of a step


# ---- environment ------------------------------------------------------------------------

# Of the compiler and its runtime: each can change what a program is compiled to.
_COMPILER_VARIABLES = ("XLA_FLAGS", "PJRT_NPROC", "NPROC", "LIBTPU_INIT_ARGS")


def compiler_environment() -> str:
    """What the environment tells the compiler, as text in which any difference shows."""
    return repr([os.environ.get(name) for name in _COMPILER_VARIABLES])


def cache_home() -> Path:
    """Folder of everything we keep between runs: XJAX_HOME, else XDG_CACHE_HOME/xjax, else ~/.cache/xjax."""
    home = os.environ.get("XJAX_HOME")
    if home:
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").expanduser().absolute() / "xjax"


def environment_api_keys() -> list[str]:
    """Keys that the server asks for: XJAX_API_KEY, where it is set."""
    key = os.environ.get("XJAX_API_KEY")
    return [key] if key else []
