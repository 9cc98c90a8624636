"""Products of packed matrices with rows in JAX's own operations: the arithmetic of `micro`, on any device.

Activations are rounded to int8 in the same way, dots of 32 codes are exact, and sums are taken in the same
order; only that a product may be rounded before it is added. Slow on a CPU: there it is for tests. Has no
gradient worth having, since codes of activations are steps.
"""

import jax
import jax.numpy as jnp

from xjax.kernels.linear.forms import OUTPUTS, PLANE, UNIT, Form

# Units of x below it are zeros: threads may differ in what they do with denormal numbers, and above it none
# can come up with float16 scales.
TINY = 2.0**-64
_CHUNKS = 8


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round each 32 numbers of a row to int8 codes and a scale.

    x        [N, In]                        floating point
    returns  [N, G, 32], [N, G]             float32: codes from -127 to 127, scales; G = In / 32

    A unit with a number that is not finite gets a scale that is not finite, and codes 0.
    """
    units = x.astype(jnp.float32).reshape(x.shape[0], -1, UNIT)
    highest = jnp.abs(units).max(-1)
    is_tiny = highest < TINY
    is_number = jnp.isfinite(highest) & ~is_tiny
    scale = jnp.where(is_tiny, 0.0, highest / 127.0)
    inverse = jnp.where(is_number, 127.0 / jnp.where(is_number, highest, 1.0), 0.0)[..., None]
    codes = jnp.where(is_number[..., None], jnp.round(units * inverse), 0.0)
    return codes, scale


def linear_packed(x: jax.Array, data: jax.Array, form: Form, num_out: int) -> jax.Array:
    """Multiply rows, as int8 codes, by the transposed weights.

    x        [N, In]       floating point
    data     [Nb, record]  uint8
    returns  [N, Out]      dtype of x
    """
    codes, scale = quantize(x)
    halves, start = UNIT // form.group, jnp.zeros((x.shape[0], data.shape[0] * OUTPUTS), jnp.float32)

    def add_unit(i: jax.Array, sums: jax.Array) -> jax.Array:
        header, unit = _unit(data, form, i)
        weights = _codes(unit, form)  # [Nb * 16, 32]
        own, size = codes[:, i], scale[:, i, None]
        for half, factor in enumerate(_factors(header, unit, form)):
            columns = slice(half * form.group, (half + 1) * form.group) if halves > 1 else slice(None)
            both_last = (((1,), (1,)), ((), ()))
            dots = jax.lax.dot_general(own[:, columns], weights[:, columns], both_last)
            sums = sums + (dots - form.offset * own[:, columns].sum(-1, keepdims=True)) * (
                factor[None] * size
            )
        if form.has_minimum:
            sums = sums + _minimum(header, unit, form)[None] * (size * own.sum(-1, keepdims=True))
        return sums

    sums = jax.lax.fori_loop(0, x.shape[1] // UNIT, add_unit, start)
    return sums[:, :num_out].astype(x.dtype)


def rows_packed(token_id: jax.Array, data: jax.Array, form: Form, num_in: int, dtype: jnp.dtype) -> jax.Array:
    """Look up rows of an embedding.

    token_id  [N]           int32; one that no row has is taken for the nearest that has
    data      [Nb, record]  uint8
    returns   [N, In]       `dtype`, rounded from the float32 of `forms.unpack`
    """
    number = jnp.clip(token_id, 0, data.shape[0] * OUTPUTS - 1)
    records, lane = data[number // OUTPUTS], number % OUTPUTS

    def unit_of(i: jax.Array) -> jax.Array:
        header, unit = _unit(records, form, i)
        weights = _own(_codes(unit, form).reshape(-1, OUTPUTS, UNIT), lane)  # [N, 32]
        scales = [_own(factor.reshape(-1, OUTPUTS), lane) for factor in _factors(header, unit, form)]
        values = (weights - form.offset) * jnp.repeat(jnp.stack(scales, axis=-1), form.group, axis=-1)
        if form.has_minimum:
            values = values + _own(_minimum(header, unit, form).reshape(-1, OUTPUTS), lane)[:, None]
        return values.astype(dtype)

    values = jax.lax.map(unit_of, jnp.arange(num_in // UNIT))  # [G, N, 32]
    return values.swapaxes(0, 1).reshape(-1, num_in)


def _own(values: jax.Array, lane: jax.Array) -> jax.Array:
    """Of each block the output `lane` [N]: [N, 16, ...] -> [N, ...]."""
    return values[jnp.arange(lane.shape[0]), lane]


def _unit(data: jax.Array, form: Form, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bytes of the header and of one unit of every block: [Nb, header], [Nb, unit]."""
    run, place = index // form.run, index % form.run
    start = run * form.layout.itemsize
    header = jax.lax.dynamic_slice_in_dim(data, start, form.header_bytes, axis=1)
    unit_start = start + form.header_bytes + place * form.unit_bytes
    return header, jax.lax.dynamic_slice_in_dim(data, unit_start, form.unit_bytes, axis=1)


def _codes(unit: jax.Array, form: Form) -> jax.Array:
    """The codes of a unit: [Nb, unit] uint8 -> [Nb * 16, 32] float32."""
    blocks = unit.shape[0]
    planes = unit[:, : OUTPUTS * UNIT * form.bits // 8].reshape(blocks, -1, PLANE)
    if form.bits < 8:
        chunks = _parts(planes[:, :4], 4)
        if form.bits > 4:
            chunks = chunks | (_parts(planes[:, 4:], form.bits - 4) << jnp.uint8(4))
        planes = chunks
    codes = planes.reshape(blocks, _CHUNKS, OUTPUTS, 4).swapaxes(1, 2)
    return codes.reshape(blocks * OUTPUTS, UNIT).astype(jnp.float32)


def _parts(planes: jax.Array, width: int) -> jax.Array:
    """The fields of `width` bits of each byte, lowest first: [Nb, n, 64] -> [Nb, n * 8 / width, 64]."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[None, None, :, None]
    parts = (planes[:, :, None] >> shifts) & jnp.uint8((1 << width) - 1)
    return parts.reshape(planes.shape[0], -1, PLANE)


def _header_numbers(header: jax.Array, form: Form, index: int) -> jax.Array:
    """Scales (0) or minimums (1) of the header: [Nb * 16] float32."""
    kind = jnp.float32 if form.scale == "f32" else jnp.float16
    size = jnp.dtype(kind).itemsize
    part = header[:, index * OUTPUTS * size : (index + 1) * OUTPUTS * size]
    numbers = jax.lax.bitcast_convert_type(part.reshape(-1, OUTPUTS, size), kind)
    return numbers.astype(jnp.float32).reshape(-1)


def _steps(unit: jax.Array, form: Form, index: int) -> jax.Array:
    """The steps of a group, or of the minimums behind them: [Nb * 16] float32."""
    start = OUTPUTS * UNIT * form.bits // 8 + OUTPUTS * index
    steps = unit[:, start : start + OUTPUTS]
    if not form.has_minimum:
        steps = jax.lax.bitcast_convert_type(steps, jnp.int8)
    return steps.astype(jnp.float32).reshape(-1)


def _factors(header: jax.Array, unit: jax.Array, form: Form) -> list[jax.Array]:
    """What codes of each group are multiplied by: [Nb * 16] each."""
    numbers = _header_numbers(header, form, 0)
    if not form.is_nested:
        return [numbers]
    return [numbers * _steps(unit, form, half) for half in range(UNIT // form.group)]


def _minimum(header: jax.Array, unit: jax.Array, form: Form) -> jax.Array:
    """What is added to codes times their factor: [Nb * 16]."""
    numbers = _header_numbers(header, form, 1)
    return -(numbers * _steps(unit, form, UNIT // form.group)) if form.is_nested else numbers
