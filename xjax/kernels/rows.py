"""What is done to rows of numbers between products, as LLVM IR behind intrinsics.

    total, squares   sums of a row, or of the squares of how far it is from a number -> float32
    turn             a head: bias, norm, rotary embedding -> float32, or bits of bfloat16
    scale_row        (x - shift) * factor * weight + bias
    add_row          a result: (x + bias) * factor * weight * scale + residual
    gate_row         act(gate + bias) * (up + bias)
    next_above, which_above   the 64 numbers at a time that hold one above a key, and which of them are
    lane_maxima      largest keys of a row's lanes
    exp_total        sum of exp2((x - best) * factor)

Vectors have 16 lanes on every processor, ends are masked, products are rounded before they are added,
and sums are taken lane by lane and then by halves: a row's bits depend on the row alone. Addresses are
int64 in bytes; 0 stands for an array that is not there. Knows no FFI frame.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from xjax.kernels.ffi import procedure
from xjax.kernels.lanes import Loop

LANES = 16
KINDS = ("silu", "gelu_tanh", "gelu")  # `gate_row` takes the index

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_SHORTS, _MASK = ir.VectorType(_I16, LANES), ir.VectorType(ir.IntType(1), LANES)
_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to the nearest integer, which its low bits then hold
_LOG2E = 1.4426950408889634
# (2**f - 1) / f on [-1/2, 1/2], fitted so that 2**f is right to 1e-7 of itself.
_EXP2 = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.0013264723820611835,
)
# log(erfc(z) * exp(z**2) / t) by t = 1 / (1 + z / 2), fitted to 4e-8 for z from 0 to 9.
_ERFC = (
    -1.2654086351394653,
    0.9978483319282532,
    0.3932742774486542,
    0.0033348959404975176,
    0.09205389022827148,
    -0.24921241402626038,
    -0.49414610862731934,
    1.0063565969467163,
    -0.6174999475479126,
    0.13339926302433014,
)
_FAR = 9.0  # where erfc is 0 to float32


# ---- values -----------------------------------------------------------------------------


def _all(value: float, kind: Any = _FLOATS) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _splat(builder: Any, value: ir.Value, kind: Any = _FLOATS) -> ir.Value:
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, _I32(0))
    return builder.shuffle_vector(one, empty, ir.Constant(_WORDS, [0] * LANES))


def _mask(builder: Any, index: ir.Value, count: ir.Value) -> ir.Value:
    """Lanes of the vector at `index` that are below `count`."""
    left = builder.trunc(builder.sub(count, index), _I32)
    lane = ir.Constant(_WORDS, list(range(LANES)))
    return builder.icmp_signed("<", lane, _splat(builder, left, _WORDS))


def _pointer(builder: Any, address: ir.Value, index: ir.Value, size: int = 4) -> ir.Value:
    place = builder.add(address, builder.mul(index, _I64(size)))
    return builder.inttoptr(place, ir.PointerType())


def _read(builder: Any, address: ir.Value, index: ir.Value, mask: ir.Value) -> ir.Value:
    """Numbers of a row; 0 where there is no more of it."""
    kind = ir.FunctionType(_FLOATS, [ir.PointerType(), _I32, _MASK, _FLOATS])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return builder.call(function, [_pointer(builder, address, index), _I32(4), mask, _all(0.0)])


class _Optional:
    """A row that may be missing; another one's address stands in, since processors are slow to read at 0."""

    def __init__(self, builder: Any, address: ir.Value, other: ir.Value, default: float = 0.0) -> None:
        is_there = builder.icmp_unsigned("!=", address, _I64(0))
        self._builder, self._default = builder, _all(default)
        self._address = builder.select(is_there, address, other)
        self._is_there = _splat(builder, is_there, _MASK)

    def read(self, index: ir.Value, mask: ir.Value) -> ir.Value:
        """Numbers of the row; the default where it is missing."""
        value = _read(self._builder, self._address, index, mask)
        return self._builder.select(self._is_there, value, self._default)


def _write(builder: Any, value: ir.Value, address: ir.Value, index: ir.Value, mask: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_FLOATS, ir.PointerType(), _I32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(function, [value, _pointer(builder, address, index), _I32(4), mask])


def _write_half(builder: Any, value: ir.Value, address: ir.Value, index: ir.Value, mask: ir.Value) -> None:
    """Store as bits of bfloat16: to the nearest, ties to even; NaN stays one."""
    bits = builder.bitcast(value, _WORDS)
    last = builder.and_(builder.lshr(bits, _all(16, _WORDS)), _all(1, _WORDS))
    rounded = builder.add(bits, builder.add(last, _all(0x7FFF, _WORDS)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, builder.or_(bits, _all(0x400000, _WORDS)), rounded)
    shorts = builder.trunc(builder.lshr(bits, _all(16, _WORDS)), _SHORTS)
    kind = ir.FunctionType(ir.VoidType(), [_SHORTS, ir.PointerType(), _I32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}i16.p0")
    builder.call(function, [shorts, _pointer(builder, address, index, 2), _I32(2), mask])


def _across(builder: Any, value: ir.Value) -> ir.Value:
    """The sum of all lanes, by halves."""
    step = LANES // 2
    while step:
        order = ir.Constant(_WORDS, [i ^ step for i in range(LANES)])
        value = builder.fadd(value, builder.shuffle_vector(value, ir.Constant(_FLOATS, ir.Undefined), order))
        step //= 2
    return builder.extract_element(value, _I32(0))


def _polynomial(builder: Any, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    value = _all(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = builder.fadd(builder.fmul(value, x), _all(coefficient))
    return value


def _exp2(builder: Any, x: ir.Value) -> ir.Value:
    """2**x; x no farther from 0 than 126 is taken for that. NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, _all(-126.0)), _all(-126.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, _all(126.0)), _all(126.0), x)
    moved = builder.fadd(x, _all(_MAGIC))
    part = builder.fsub(x, builder.fsub(moved, _all(_MAGIC)))
    value = builder.fadd(builder.fmul(_polynomial(builder, part, _EXP2), part), _all(1.0))
    exponent = builder.shl(builder.bitcast(moved, _WORDS), _all(23, _WORDS))
    return builder.bitcast(builder.add(builder.bitcast(value, _WORDS), exponent), _FLOATS)


def _switched(builder: Any, x: ir.Value, slope: ir.Value) -> ir.Value:
    """x / (1 + 2**-slope)."""
    power = _exp2(builder, builder.fsub(_all(-0.0), slope))
    return builder.fdiv(x, builder.fadd(_all(1.0), power))


def _silu(builder: Any, x: ir.Value) -> ir.Value:
    return _switched(builder, x, builder.fmul(x, _all(_LOG2E)))


def _gelu_tanh(builder: Any, x: ir.Value) -> ir.Value:
    """x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    cube = builder.fmul(builder.fmul(x, x), x)
    inner = builder.fadd(x, builder.fmul(cube, _all(0.044715)))
    return _switched(builder, x, builder.fmul(inner, _all(2 * 0.7978845608028654 * _LOG2E)))


def _gelu(builder: Any, x: ir.Value) -> ir.Value:
    """x * (1 - erfc(z) / 2), or x * erfc(z) / 2 for negative x; z = |x| / sqrt(2)."""
    size = builder.bitcast(builder.and_(builder.bitcast(x, _WORDS), _all(0x7FFFFFFF, _WORDS)), _FLOATS)
    z = builder.fmul(size, _all(0.7071067811865476))
    z = builder.select(builder.fcmp_ordered(">", z, _all(_FAR)), _all(_FAR), z)
    t = builder.fdiv(_all(1.0), builder.fadd(builder.fmul(z, _all(0.5)), _all(1.0)))
    exponent = builder.fsub(_polynomial(builder, t, _ERFC), builder.fmul(z, z))
    half = builder.fmul(builder.fmul(t, _all(0.5)), _exp2(builder, builder.fmul(exponent, _all(_LOG2E))))
    is_negative = builder.fcmp_ordered("<", x, _all(0.0))
    return builder.fmul(x, builder.select(is_negative, half, builder.fsub(_all(1.0), half)))


_ACTIVATIONS: tuple[Callable[[Any, ir.Value], ir.Value], ...] = (_silu, _gelu_tanh, _gelu)


# ---- rows -------------------------------------------------------------------------------


def _kernel(kinds: str, emit: Callable[..., ir.Value | None], result: Any = types.void) -> Any:
    """An intrinsic of arguments by letter: i an int64, f a float32."""
    given = [types.int64 if kind == "i" else types.float32 for kind in kinds]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = emit(builder, *arguments)
        return context.get_dummy_value() if found is None else found

    return procedure(result(*given), generate)


def _emit_total(builder: Any, source: ir.Value, bias: ir.Value, count: ir.Value) -> ir.Value:
    biases = _Optional(builder, bias, source)
    loop = Loop(builder, count, LANES, [_all(0.0)])
    mask = _mask(builder, loop.index, count)
    x = builder.fadd(_read(builder, source, loop.index, mask), biases.read(loop.index, mask))
    return _across(builder, loop.close([builder.fadd(loop.values[0], x)])[0])


# total(source, bias, count > 0): the sum of source + bias.
total = _kernel("iii", _emit_total, types.float32)


def _emit_squares(
    builder: Any, source: ir.Value, bias: ir.Value, count: ir.Value, shift: ir.Value
) -> ir.Value:
    biases = _Optional(builder, bias, source)
    loop = Loop(builder, count, LANES, [_all(0.0)])
    mask = _mask(builder, loop.index, count)
    x = builder.fadd(_read(builder, source, loop.index, mask), biases.read(loop.index, mask))
    x = builder.fsub(x, _splat(builder, shift))
    square = builder.select(mask, builder.fmul(x, x), _all(0.0))
    return _across(builder, loop.close([builder.fadd(loop.values[0], square)])[0])


# squares(source, bias, count > 0, shift): the sum of (source + bias - shift)**2.
squares = _kernel("iiif", _emit_squares, types.float32)


def _emit_inverse_root(builder: Any, total: ir.Value, count: ir.Value, eps: ir.Value) -> ir.Value:
    mean = builder.fadd(builder.fdiv(total, builder.sitofp(count, _F32)), eps)
    kind = ir.FunctionType(_F32, [_F32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.sqrt.f32")
    return builder.fdiv(_F32(1.0), builder.call(function, [mean]))


# inverse_root(total, count, eps): 1 / sqrt(total / count + eps).
inverse_root = _kernel("fif", _emit_inverse_root, types.float32)


def _turn(is_half: bool) -> Any:
    put = _write_half if is_half else _write

    def emit(
        builder: Any,
        source: ir.Value,
        bias: ir.Value,
        weight: ir.Value,
        cos: ir.Value,
        sin: ir.Value,
        half: ir.Value,
        dim: ir.Value,
        target: ir.Value,
        factor: ir.Value,
    ) -> None:
        factors, biases = _splat(builder, factor), _Optional(builder, bias, source)
        weights = _Optional(builder, weight, source, 1.0)

        def normed(index: ir.Value, mask: ir.Value) -> ir.Value:
            x = builder.fadd(_read(builder, source, index, mask), biases.read(index, mask))
            return builder.fmul(builder.fmul(x, factors), weights.read(index, mask))

        with builder.if_then(builder.icmp_signed(">", half, _I64(0))):
            loop = Loop(builder, half, LANES)
            mask, other = _mask(builder, loop.index, half), builder.add(loop.index, half)
            first, second = normed(loop.index, mask), normed(other, mask)
            c, s = _read(builder, cos, loop.index, mask), _read(builder, sin, loop.index, mask)
            low = builder.fsub(builder.fmul(first, c), builder.fmul(second, s))
            high = builder.fadd(builder.fmul(second, c), builder.fmul(first, s))
            put(builder, low, target, loop.index, mask)
            put(builder, high, target, other, mask)
            loop.close()
        start = builder.add(half, half)
        rest = builder.sub(dim, start)
        with builder.if_then(builder.icmp_signed(">", rest, _I64(0))):
            loop = Loop(builder, rest, LANES)
            mask, index = _mask(builder, loop.index, rest), builder.add(start, loop.index)
            put(builder, normed(index, mask), target, index, mask)
            loop.close()

    return _kernel("iiiiiiiif", emit)


# turn(source, bias, weight, cos, sin, half, dim, target, factor): x = (source + bias) * factor * weight;
# pairs (i, i + half) of it are turned, and what lies behind them stays.
turn, turn_half = _turn(False), _turn(True)


def _emit_scale_row(
    builder: Any,
    source: ir.Value,
    weight: ir.Value,
    bias: ir.Value,
    target: ir.Value,
    count: ir.Value,
    shift: ir.Value,
    factor: ir.Value,
) -> None:
    shift, factor = _splat(builder, shift), _splat(builder, factor)
    weights, biases = _Optional(builder, weight, source, 1.0), _Optional(builder, bias, source)
    loop = Loop(builder, count, LANES)
    mask = _mask(builder, loop.index, count)
    x = builder.fmul(builder.fsub(_read(builder, source, loop.index, mask), shift), factor)
    x = builder.fmul(x, weights.read(loop.index, mask))
    x = builder.fadd(x, biases.read(loop.index, mask))
    _write(builder, x, target, loop.index, mask)
    loop.close()


# scale_row(source, weight, bias, target, count > 0, shift, factor)
scale_row = _kernel("iiiiiff", _emit_scale_row)


def _emit_add_row(
    builder: Any,
    source: ir.Value,
    bias: ir.Value,
    weight: ir.Value,
    residual: ir.Value,
    target: ir.Value,
    count: ir.Value,
    factor: ir.Value,
    scale: ir.Value,
) -> None:
    factor, scale = _splat(builder, factor), _splat(builder, scale)
    biases, weights = _Optional(builder, bias, source), _Optional(builder, weight, source, 1.0)
    loop = Loop(builder, count, LANES)
    mask = _mask(builder, loop.index, count)
    x = builder.fadd(_read(builder, source, loop.index, mask), biases.read(loop.index, mask))
    x = builder.fmul(builder.fmul(x, factor), weights.read(loop.index, mask))
    x = builder.fadd(builder.fmul(x, scale), _read(builder, residual, loop.index, mask))
    _write(builder, x, target, loop.index, mask)
    loop.close()


# add_row(source, bias, weight, residual, target, count > 0, factor, scale)
add_row = _kernel("iiiiiiff", _emit_add_row)


def _gate(kind: int) -> Any:
    def emit(
        builder: Any,
        gate: ir.Value,
        gate_bias: ir.Value,
        up: ir.Value,
        up_bias: ir.Value,
        target: ir.Value,
        count: ir.Value,
    ) -> None:
        biases, others = _Optional(builder, gate_bias, gate), _Optional(builder, up, gate, 1.0)
        is_gated = builder.icmp_unsigned("!=", up, _I64(0))
        other_biases = _Optional(builder, builder.select(is_gated, up_bias, _I64(0)), gate)
        loop = Loop(builder, count, LANES)
        mask = _mask(builder, loop.index, count)
        x = builder.fadd(_read(builder, gate, loop.index, mask), biases.read(loop.index, mask))
        x = _ACTIVATIONS[kind](builder, x)
        other = builder.fadd(others.read(loop.index, mask), other_biases.read(loop.index, mask))
        _write(builder, builder.fmul(x, other), target, loop.index, mask)
        loop.close()

    return _kernel("iiiiii", emit)


# gate_...(gate, gate bias, up, up bias, target, count > 0); no up: it is 1
gate_silu, gate_gelu_tanh, gate_gelu = (_gate(kind) for kind in range(len(KINDS)))


# ---- scores -----------------------------------------------------------------------------

GROUP = 4 * LANES  # numbers that are looked at together: one bit each in an int64


def _keys(builder: Any, x: ir.Value) -> ir.Value:
    """Numbers as integers of their order: -0 just below 0, NaN as +inf."""
    bits = builder.bitcast(x, _WORDS)
    sign = builder.lshr(builder.ashr(bits, _all(31, _WORDS)), _all(1, _WORDS))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, _all(0x7F800000, _WORDS), builder.xor(bits, sign))


def _above(
    builder: Any, source: ir.Value, first: ir.Value, count: ir.Value, threshold: ir.Value
) -> list[ir.Value]:
    """Which lanes of a group's vectors hold a number of the row whose key is above the threshold."""
    found, high = [], _splat(builder, builder.trunc(threshold, _I32), _WORDS)
    for start in range(0, GROUP, LANES):
        index = builder.add(first, _I64(start))
        mask = _mask(builder, index, count)
        keys = _keys(builder, _read(builder, source, index, mask))
        found.append(builder.and_(builder.icmp_signed(">", keys, high), mask))
    return found


def _emit_next_above(
    builder: Any, source: ir.Value, first: ir.Value, count: ir.Value, threshold: ir.Value
) -> ir.Value:
    before, look = builder.block, builder.append_basic_block("look")
    following, after = builder.append_basic_block("following"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", first, count), look, after)
    builder.position_at_end(look)
    index = builder.phi(_I64)
    index.add_incoming(first, before)
    parts = _above(builder, source, index, count, threshold)
    joined = builder.or_(builder.or_(parts[0], parts[1]), builder.or_(parts[2], parts[3]))
    has_one = builder.icmp_unsigned("!=", builder.bitcast(joined, _I16), _I16(0))
    here = builder.block
    builder.cbranch(has_one, after, following)
    builder.position_at_end(following)
    step = builder.add(index, _I64(GROUP))
    index.add_incoming(step, following)
    builder.cbranch(builder.icmp_signed("<", step, count), look, after)
    builder.position_at_end(after)
    result = builder.phi(_I64)
    for value, block in ((first, before), (index, here), (step, following)):
        result.add_incoming(value, block)
    return result


# next_above(source, first, count, threshold): where the next group begins that has one; count or more: none.
next_above = _kernel("iiii", _emit_next_above, types.int64)


def _emit_which_above(
    builder: Any, source: ir.Value, first: ir.Value, count: ir.Value, threshold: ir.Value
) -> ir.Value:
    bits = _I64(0)
    for i, part in enumerate(_above(builder, source, first, count, threshold)):
        wide = builder.zext(builder.bitcast(part, _I16), _I64)
        bits = builder.or_(bits, builder.shl(wide, _I64(LANES * i)))
    return bits


# which_above(source, first, count, threshold): the numbers of that group, the lowest bit for its first.
which_above = _kernel("iiii", _emit_which_above, types.int64)


def _emit_lane_maxima(builder: Any, source: ir.Value, num_vectors: ir.Value, target: ir.Value) -> None:
    loop = Loop(builder, num_vectors, 1, [_all(-(1 << 31), _WORDS)])
    index = builder.mul(loop.index, _I64(LANES))
    keys = _keys(builder, builder.load(_pointer(builder, source, index), typ=_FLOATS, align=4))
    is_more = builder.icmp_signed(">", keys, loop.values[0])
    found = loop.close([builder.select(is_more, keys, loop.values[0])])[0]
    wide = builder.sext(found, ir.VectorType(_I64, LANES))
    builder.store(wide, builder.inttoptr(target, ir.PointerType()), align=8)


# lane_maxima(source, num_vectors > 0, target): the largest key of each lane, LANES int64.
lane_maxima = _kernel("iii", _emit_lane_maxima)


def _emit_lowest_bit(builder: Any, bits: ir.Value) -> ir.Value:
    return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))


# lowest_bit(bits != 0): the index of the lowest bit that is set.
lowest_bit = _kernel("i", _emit_lowest_bit, types.int64)


def _emit_exp_total(
    builder: Any, source: ir.Value, count: ir.Value, best: ir.Value, factor: ir.Value
) -> ir.Value:
    most = _all(3.4028234663852886e38)
    bests, factors = _splat(builder, best), _splat(builder, factor)
    loop = Loop(builder, count, GROUP, [_all(0.0)] * (GROUP // LANES))
    sums = []
    for i, total in enumerate(loop.values):
        index = builder.add(loop.index, _I64(LANES * i))
        mask = _mask(builder, index, count)
        x = _read(builder, source, index, mask)
        x = builder.select(builder.fcmp_ordered("<", x, most), x, most)
        x = builder.fmul(builder.fsub(x, bests), factors)
        is_seen = builder.and_(builder.fcmp_ordered(">=", x, _all(-126.0)), mask)
        sums.append(builder.fadd(total, builder.select(is_seen, _exp2(builder, x), _all(0.0))))
    a, b, c, d = loop.close(sums)
    return _across(builder, builder.fadd(builder.fadd(a, b), builder.fadd(c, d)))


# exp_total(source, count > 0, best, factor): the sum of exp2((x - best) * factor), where NaN and +inf are the
# largest finite number and what is below 2**-126 is 0.
exp_total = _kernel("iiff", _emit_exp_total, types.float32)
