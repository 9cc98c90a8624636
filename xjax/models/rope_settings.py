"""Rotary settings as files have them: `rope_scaling` or `rope_parameters` of a config.json, GGUF metadata."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xjax.errors import LoadError
from xjax.models.rope import Rope, inverse_frequencies
from xjax.models.settings import Settings, short

_PLAIN = ("default", "mrope", None)  # "mrope": with text alone, the positions of all axes are equal
_LEAST = 1e-30  # of a frequency; float32 holds it and its inverse


def rope_from_hf(
    settings: Mapping[str, Any] | None,
    *,
    dim: int,
    theta: float,
    context: int = 0,
    original: int | None = None,
) -> Rope:
    """Read a `rope_scaling` or `rope_parameters` mapping; its own rope_theta wins over `theta`.

    context    tokens that the model is said to take, for which frequencies are chosen
    original   tokens before scaling, where the file says it outside of the mapping, which wins

    Raises LoadError for kinds we do not have, and for numbers that give no frequencies.
    """
    get = Settings(settings or {}, "config.json, rope scaling")
    for key, value in get.values.items():
        if isinstance(value, Mapping):
            raise LoadError(
                f"{get.source}: {key} has settings of its own; not supported for this architecture"
            )
    kind = get.values.get("rope_type", get.values.get("type", "default"))
    if kind == "yarn" and "long_factor" in get.values:  # Phi-3's first files call it so
        kind = "longrope"
    theta = get.number("rope_theta", theta)
    if not isinstance(kind, str | None) or kind not in _READERS:
        known = ", ".join(sorted(str(name) for name in _READERS if name is not None))
        raise LoadError(f"config.json: rope scaling of type {short(kind)} is not supported; known: {known}")
    return _checked(get.source, lambda: _READERS[kind](get, dim, theta, context, original))


def ropes_from_hf(get: Settings, *, dim: int, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """Read the settings of full layers and of window layers, nested by layer kind or flat.

    theta, local_theta   bases where the settings have none

    Flat scaling is that of full layers alone.
    """
    nested, context = get.table("rope_parameters"), get.integer("max_position_embeddings", 2048)
    if nested is not None and "full_attention" in nested:
        both = Settings(nested, "config.json")
        scaling, local = both.table("full_attention"), both.table("sliding_attention")
    else:
        scaling, local = nested or get.table("rope_scaling"), None
    return (
        rope_from_hf(scaling, dim=dim, theta=theta, context=context),
        rope_from_hf(local, dim=dim, theta=local_theta, context=context),
    )


def _checked(source: str, read: Callable[[], Rope]) -> Rope:
    """What `read` returns. Raises LoadError when it gives frequencies that no angle can be made of."""
    try:
        with np.errstate(all="ignore"):
            rope = read()
            values = [inverse_frequencies(rope), [rope.scale]]
            if rope.reach:
                values.append(inverse_frequencies(rope.for_length(rope.reach)))
    except (ArithmeticError, ValueError) as error:
        raise LoadError(f"{source}: its numbers give no rotary frequencies ({error})") from error
    every = np.concatenate(values)
    if not np.all((every > _LEAST) & (every < 1 / _LEAST)):  # a comparison that NaN fails too
        raise LoadError(f"{source}: its numbers give rotary frequencies that are not finite and above 0")
    return rope


def _plain(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    return Rope(dim, theta)


def _linear(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    return Rope(dim, theta, "linear", get.number("factor"))


def _dynamic(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    factor = get.number("factor")
    return Rope(
        dim, theta, "dynamic", factor, original_context=context or _original(get, None, 0), context=context
    )


def _llama3(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
    if low >= high:
        raise LoadError(f"config.json: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return Rope(dim, theta, "llama3", get.number("factor"), low, high, _original(get, original, context))


def _yarn(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    original = _original(get, original, context)
    factor = get.number("factor", context / original or None)
    scale = get.optional_number("attention_factor")
    mscale, all_dim = get.optional_number("mscale"), get.optional_number("mscale_all_dim")
    if scale is None:
        scale = _mscale(factor)
        if mscale is not None and all_dim is not None:
            scale = _mscale(factor, mscale) / _mscale(factor, all_dim)
    low, high = get.number("beta_slow", 1.0), get.number("beta_fast", 32.0)
    truncate = get.flag("truncate", True)
    return Rope(dim, theta, "yarn", factor, low, high, original, scale=scale, truncate=truncate)


def _long(get: Settings, dim: int, theta: float, context: int, original: int | None) -> Rope:
    original = _original(get, original, context)
    scale = get.optional_number("attention_factor")
    if scale is None:
        scale = _long_scale(get.optional_number("factor") or context / original, original)
    long, short = (
        read_factors(get.values.get(f"{kind}_factor"), dim, f"config.json: {kind}_factor")
        for kind in ("long", "short")
    )
    return _long_rope(dim, theta, original, long, short, scale, context)


_READERS: dict[str | None, Callable[[Settings, int, float, int, int | None], Rope]] = {
    **dict.fromkeys(_PLAIN, _plain),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
    "su": _long,
}


def _original(get: Settings, outside: int | None, context: int) -> int:
    """Tokens before scaling: as said outside of the mapping, then in it, then all that the model takes."""
    return outside or get.integer("original_max_position_embeddings", context or None)


def _mscale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosine and sine by (arXiv 2309.00071, eq. 22, split over both)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _long_scale(factor: float, original: int) -> float:
    """What "longrope" multiplies cosine and sine by for a context that grew by a factor."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _long_rope(
    dim: int,
    theta: float,
    original: int,
    long: tuple[float, ...],
    short: tuple[float, ...],
    scale: float,
    context: int,
) -> Rope:
    return Rope(
        dim, theta, "long", original_context=original, factors=long, short_factors=short, scale=scale,
        context=context,
    )  # fmt: skip


def read_factors(values: Any, dim: int, name: str) -> tuple[float, ...]:
    """The divisors of the frequencies from a list; LoadError when it is none of dim / 2 positive numbers."""
    is_list = isinstance(values, list | tuple) and len(values) == dim // 2
    if not is_list or not all(_is_divisor(x) for x in values):
        raise LoadError(f"{name} must be a list of {dim // 2} numbers above 0")
    return tuple(float(x) for x in values)


def _is_divisor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _LEAST < value < 1 / _LEAST


def rope_from_gguf(get: Settings, *, dim: int, theta: float) -> Rope:
    """Read the rotary settings of GGUF metadata. Raises LoadError for kinds we do not have."""
    theta = get.number("rope.freq_base", theta)
    kind = get.values.get(f"{get.prefix}rope.scaling.type")
    # Files from before there were kinds name a factor alone, under one of two keys.
    factor = get.optional_number("rope.scaling.factor") or get.optional_number("rope.scale_linear")
    if kind == "yarn":
        return _checked(get.source, lambda: _yarn_from_gguf(get, dim, theta))
    if kind == "linear" or (kind is None and factor is not None):
        factor = factor or get.number("rope.scaling.factor")
        return _checked(get.source, lambda: Rope(dim, theta, "linear", factor))
    if kind not in (None, "none"):
        known = "none, linear, yarn"
        raise LoadError(f"{get.source}: rope scaling of type {short(kind)} is not supported; known: {known}")
    return _checked(get.source, lambda: Rope(dim, theta))


def rope_dim_from_gguf(get: Settings, head_dim: int) -> int:
    """Read how many dimensions of a head are rotated."""
    dim = get.head_dim("rope.dimension_count", head_dim)
    if dim > head_dim:
        raise LoadError(
            f"{get.source}: {get.prefix}rope.dimension_count must be at most the head size, {head_dim}"
        )
    return dim


def _yarn_from_gguf(get: Settings, dim: int, theta: float) -> Rope:
    factor = get.number("rope.scaling.factor")
    low = get.number("rope.scaling.yarn_beta_slow", 1.0)
    high = get.number("rope.scaling.yarn_beta_fast", 32.0)
    original = get.integer("rope.scaling.original_context_length", get.integer("context_length"))
    # The converter writes what a config.json calls attention_factor, which is the whole scale.
    scale = get.optional_number("rope.scaling.yarn_attn_factor")
    if scale is None:
        scale = _mscale(factor) * get.number("rope.scaling.attn_factor", 1.0)
        if get.values.get(f"{get.prefix}rope.scaling.yarn_log_multiplier"):
            scale /= _mscale(factor, get.number("rope.scaling.yarn_log_multiplier"))
    return Rope(dim, theta, "yarn", factor, low, high, original, scale=scale)


def factors_from_gguf(get: Settings, tensor: Any, *, dim: int, theta: float) -> Rope:
    """Read the divisors of the frequencies that a file holds as `rope_freqs.weight`."""
    factors = read_factors(tensor.read().reshape(-1).tolist(), dim, "rope_freqs.weight")
    theta = get.number("rope.freq_base", theta)
    return _checked(get.source, lambda: Rope(dim, theta, "factors", factors=factors))


def long_from_gguf(get: Settings, tensors: Mapping[str, Any], *, dim: int, theta: float) -> Rope:
    """Read "longrope", whose lists are tensors; a model whose context was never extended may lack them."""
    context = get.integer("context_length")
    original = get.integer("rope.scaling.original_context_length", context)
    long, short = (f"rope_factors_{kind}.weight" for kind in ("long", "short"))
    if long not in tensors and short not in tensors and context <= original:
        return rope_from_gguf(get, dim=dim, theta=theta)
    for name in (long, short):
        if name not in tensors:
            raise LoadError(f"{get.source}: the context was extended, but tensor {name} is missing")
    lists = [read_factors(tensors[name].read().reshape(-1).tolist(), dim, name) for name in (long, short)]
    theta = get.number("rope.freq_base", theta)

    def read() -> Rope:
        scale = get.optional_number("rope.scaling.attn_factor") or _long_scale(context / original, original)
        return _long_rope(dim, theta, original, lists[0], lists[1], scale, context)

    return _checked(get.source, read)
