"""Vector pieces that Numba kernels are made of, as LLVM IR behind intrinsics.

Plain loops reach a fifth of what a core can do, so the inner loops are written for its vector
registers: LANES float32 in each, 32 registers with AVX-512 and on ARM, else 16. What comes out is
ordinary IR, which LLVM fits to any processor. Addresses are int64 in bytes. Nothing here knows
attention's pages or an FFI frame.

    product     C[r, :] (+)= sum over k of A[r, k] * B[k, :]     in rising k, each sum on its own
    dots        C[r, c] (+)= sum over k of A[r, k] * B[c, k]     lane by lane in rising k, then the lanes
    weigh       one row of scores -> exp2(score - highest), with highest, sum and fade kept
    pack_keys, pack_rows   rows -> columns       copy_row, put_row     widened; divided by the sum

Every sum is taken in an order that its own operands alone decide, so that a row's bits do not
depend on the rows beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from xjax.kernels.ffi import intrinsic, procedure

_FEATURES = llvm.get_host_cpu_features()
_HAS_FMA = bool(_FEATURES.get("fma")) or bool(_FEATURES.get("neon"))
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
WIDTH = 2 * LANES  # columns of B in one panel
HEIGHTS = {16: (12, 8, 4), 8: (6, 4, 2), 4: (4, 2, 1)}[
    LANES
]  # rows of a product: 24 or fewer sums fit the registers

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INDEX, _BITS = (
    ir.VectorType(_F32, LANES),
    ir.VectorType(_I32, LANES),
    ir.VectorType(ir.IntType(1), LANES),
)
_BYTES = 4 * LANES
_UNSEEN = -1e30  # as in `xla`: finite, so that a block without a visible key makes no NaN
_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to the nearest integer, which its low bits then hold
# (2**f - 1) / f on [-1/2, 1/2], fitted so that 2**f is right to 1e-7 of itself.
_EXP2 = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.0013264723820611835,
)

Emit = Callable[[Any, Sequence[ir.Value]], None]


def _procedure(count: int, emit: Emit) -> Any:
    """An intrinsic that takes `count` int64 and returns nothing."""

    def generate(context, builder, signature, arguments):
        emit(builder, arguments)
        return context.get_dummy_value()

    return procedure(types.void(*[types.int64] * count), generate)


# ---- values -----------------------------------------------------------------------------


def _splat(builder: Any, value: ir.Value, kind: ir.VectorType = _VECTOR) -> ir.Value:
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, _I32(0))
    return builder.shuffle_vector(one, empty, ir.Constant(_INDEX, [0] * LANES))


def _all(value: float) -> ir.Value:
    return ir.Constant(_VECTOR, [value] * LANES)


def _all_i32(value: int) -> ir.Value:
    return ir.Constant(_INDEX, [value] * LANES)


def load(
    builder: Any, address: ir.Value, kind: ir.Type = _VECTOR, offset: int = 0, align: int = 4
) -> ir.Value:
    if offset:
        address = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(address, ir.PointerType()), typ=kind, align=align)


def store(builder: Any, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
    if offset:
        address = builder.add(address, _I64(offset))
    builder.store(value, builder.inttoptr(address, ir.PointerType()), align=4)


def _fma(builder: Any, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    if not _HAS_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c]
    )


def _larger(builder: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger lane by lane; `b` where either is NaN, which is one instruction on x86."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _across(builder: Any, value: ir.Value, join: Callable[[Any, ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Join all lanes by halves; every lane of the result holds it."""
    step = LANES // 2
    while step:
        order = ir.Constant(_INDEX, [i ^ step for i in range(LANES)])
        value = join(builder, value, builder.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), order))
        step //= 2
    return value


def _power(builder: Any, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Split 2**x into f * q, which is 2**f - 1, and the bits that n adds to an exponent; x = n + f."""
    moved = builder.fadd(x, _all(_MAGIC))
    part = builder.fsub(x, builder.fsub(moved, _all(_MAGIC)))
    value = _all(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        value = _fma(builder, value, part, _all(coefficient))
    return part, value, builder.shl(builder.bitcast(moved, _INDEX), _all_i32(23))


def _exp2(builder: Any, x: ir.Value) -> ir.Value:
    """2**x for x <= 0; not under 2**-126. NaN stays NaN."""
    part, value, exponent = _power(builder, _larger(builder, _all(-126.0), x))
    value = _fma(builder, value, part, _all(1.0))
    return builder.bitcast(builder.add(builder.bitcast(value, _INDEX), exponent), _VECTOR)


def _tanh(builder: Any, x: ir.Value) -> ir.Value:
    """tanh(x) = m / (m + 2) with m = exp(2 x) - 1, which keeps its digits near 0."""
    doubled = builder.fmul(x, _all(2.8853900817779268))  # 2 / ln 2
    doubled = _larger(builder, _all(-30.0), doubled)
    doubled = builder.select(builder.fcmp_ordered("<", _all(30.0), doubled), _all(30.0), doubled)
    part, value, exponent = _power(builder, doubled)
    whole = builder.bitcast(builder.add(_all_i32(0x3F800000), exponent), _VECTOR)
    less_one = _fma(builder, whole, builder.fmul(value, part), builder.fsub(whole, _all(1.0)))
    return builder.fdiv(less_one, builder.fadd(less_one, _all(2.0)))


def _widened(builder: Any, address: ir.Value, is_half: bool) -> ir.Value:
    """LANES numbers of memory as float32: float32 themselves, or the bits of bfloat16."""
    if not is_half:
        return load(builder, address)
    bits = builder.zext(load(builder, address, ir.VectorType(_I16, LANES), align=2), _INDEX)
    return builder.bitcast(builder.shl(bits, _all_i32(16)), _VECTOR)


class Loop:
    """A counted loop in IR: `with Loop(builder, stop, step) as i` from 0 while i < stop; stop > 0.

    `carry(value)` gives the value at the start of a trip, `update` the one for the next;
    after the loop, `results` holds the last ones.
    """

    def __init__(self, builder: Any, stop: ir.Value, step: int, start: Sequence[Any] = ()) -> None:
        self._builder, self._stop, self._step = builder, stop, step
        self._before, self._body = builder.block, builder.append_basic_block("loop")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(_I64)
        self.index.add_incoming(_I64(0), self._before)
        self.values = [builder.phi(value.type) for value in start]
        for phi, value in zip(self.values, start, strict=True):
            phi.add_incoming(value, self._before)

    def close(self, values: Sequence[ir.Value] = ()) -> list[ir.Value]:
        """End the body; `values` are those of the next trip, and after the last one the result."""
        builder = self._builder
        following, here = builder.add(self.index, _I64(self._step)), builder.block
        self.index.add_incoming(following, here)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, here)
        after = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, self._stop), self._body, after)
        builder.position_at_end(after)
        return list(values)


# ---- products ---------------------------------------------------------------------------


def product(height: int, *, row_bytes: int, step_bytes: int, out_bytes: int, fades: bool) -> Any:
    """Make f(a, b, c, fade, num_steps): `height` rows times one panel of WIDTH columns.

    a      [height, k]      float32 at row_bytes and step_bytes apart
    b      [k, WIDTH]       float32, packed
    c      [height, WIDTH]  float32, rows out_bytes apart; overwritten, or with `fades` first
                            multiplied by fade [height] and then added to
    """

    def emit(builder: Any, arguments: Sequence[ir.Value]) -> None:
        a, b, c, fade, num_steps = arguments
        start = []
        for row in range(height):
            factor = _splat(builder, load(builder, fade, _F32, 4 * row)) if fades else None
            for half in range(2):
                if factor is None:
                    start.append(_all(0.0))
                else:
                    old = load(builder, c, _VECTOR, row * out_bytes + half * _BYTES)
                    start.append(builder.fmul(old, factor))
        loop = Loop(builder, num_steps, 1, start)
        left = builder.add(a, builder.mul(loop.index, _I64(step_bytes)))
        right = builder.add(b, builder.mul(loop.index, _I64(2 * _BYTES)))
        columns = [load(builder, right, _VECTOR, half * _BYTES) for half in range(2)]
        following = []
        for row in range(height):
            factor = _splat(builder, load(builder, left, _F32, row * row_bytes))
            for half in range(2):
                following.append(_fma(builder, factor, columns[half], loop.values[2 * row + half]))
        for i, value in enumerate(loop.close(following)):
            store(builder, value, c, i // 2 * out_bytes + i % 2 * _BYTES)

    return _procedure(5, emit)


DOT_HEIGHTS = {16: (6, 4, 2, 1), 8: (3, 2, 1, 1), 4: (2, 1, 1, 1)}[LANES]  # 4 * height sums, 4 of B, 1 of A
DOT_WIDTH = 4
_FOUR = ir.VectorType(_F32, DOT_WIDTH)


def _sums(builder: Any, vectors: list[ir.Value]) -> ir.Value:
    """The sums over the lanes of DOT_WIDTH vectors, as one vector; each by the same tree."""
    lanes_each = LANES
    while len(vectors) > 1:  # halves of two vectors, added up, fill one
        lanes_each //= 2
        joined = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            halves = []
            for half in (0, lanes_each):
                runs = [i for i in range(2 * LANES) if i & lanes_each == half]
                halves.append(builder.shuffle_vector(a, b, ir.Constant(_INDEX, runs)))
            joined.append(builder.fadd(*halves))
        vectors = joined
    value = vectors[0]
    while lanes_each > 1:
        lanes_each //= 2
        order = ir.Constant(_INDEX, [i ^ lanes_each for i in range(LANES)])
        value = builder.fadd(value, builder.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), order))
    places = ir.Constant(ir.VectorType(_I32, DOT_WIDTH), [i * LANES // DOT_WIDTH for i in range(DOT_WIDTH)])
    return builder.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), places)


def _four(builder: Any, value: ir.Value) -> ir.Value:
    one = builder.insert_element(ir.Constant(_FOUR, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, DOT_WIDTH), [0] * DOT_WIDTH))


def dots(height: int, *, is_half: bool) -> Any:
    """Make f(rows, columns, targets, factors, count): `height` rows times DOT_WIDTH columns.

    rows      [height] int64     addresses of count float32 each
    columns   [DOT_WIDTH] int64  addresses of count float32 each, or of bits of bfloat16
    targets   [height] int64     where each row's DOT_WIDTH sums are put
    factors   [height] float32   what they are multiplied by, and then added to what is there; 0: put
    count     > 0, a multiple of LANES
    """

    def emit(builder: Any, arguments: Sequence[ir.Value]) -> None:
        rows, columns, targets, factors, count = arguments
        lefts = [load(builder, rows, _I64, 8 * i, align=8) for i in range(height)]
        rights = [load(builder, columns, _I64, 8 * i, align=8) for i in range(DOT_WIDTH)]
        loop = Loop(builder, count, LANES, [_all(0.0)] * (height * DOT_WIDTH))
        offset = builder.mul(loop.index, _I64(4))
        narrow = builder.mul(loop.index, _I64(2)) if is_half else offset
        values = [_widened(builder, builder.add(right, narrow), is_half) for right in rights]
        following = []
        for row, left in enumerate(lefts):
            x = load(builder, builder.add(left, offset))
            for column, value in enumerate(values):
                following.append(_fma(builder, x, value, loop.values[row * DOT_WIDTH + column]))
        sums = loop.close(following)
        found = [_sums(builder, sums[start : start + DOT_WIDTH]) for start in range(0, len(sums), DOT_WIDTH)]
        places = [load(builder, targets, _I64, 8 * row, align=8) for row in range(height)]
        with builder.if_else(builder.icmp_unsigned("==", factors, _I64(0))) as (puts, adds):
            with puts:
                for value, place in zip(found, places, strict=True):
                    store(builder, value, place)
            with adds:
                for row, (value, place) in enumerate(zip(found, places, strict=True)):
                    factor = _four(builder, load(builder, factors, _F32, 4 * row))
                    value = builder.fadd(builder.fmul(value, factor), load(builder, place, _FOUR))
                    store(builder, value, place)

    return _procedure(5, emit)


# ---- softmax ----------------------------------------------------------------------------


def _emit_weigh(builder: Any, arguments: Sequence[ir.Value], num_vectors: int | None) -> None:
    """Body of `weigh` (a known number of vectors, all seen) and `weigh_seen`."""
    scores, highest, total, fade = arguments[:4]
    old_high = load(builder, highest)
    if num_vectors is None:
        first, stop, low, span = arguments[4:]
        scores = builder.add(scores, builder.mul(first, _I64(_BYTES)))
        length = builder.sub(stop, first)
        lane = builder.add(
            ir.Constant(_INDEX, list(range(LANES))),
            _splat(builder, builder.trunc(builder.sub(builder.mul(first, _I64(LANES)), low), _I32), _INDEX),
        )
        spans = _splat(builder, builder.trunc(span, _I32), _INDEX)
        loop = Loop(builder, length, 1, [_all(_UNSEEN), lane])
        place = builder.add(scores, builder.mul(loop.index, _I64(_BYTES)))
        value = builder.select(
            builder.icmp_unsigned("<", loop.values[1], spans), load(builder, place), _all(_UNSEEN)
        )
        store(builder, value, place)
        high = loop.close(
            [_larger(builder, value, loop.values[0]), builder.add(loop.values[1], _all_i32(LANES))]
        )[0]
    else:
        values = [load(builder, scores, _VECTOR, i * _BYTES) for i in range(num_vectors)]
        level = values
        while len(level) > 1:
            level = [_larger(builder, level[i], level[i + 1]) for i in range(0, len(level), 2)]
        high = level[0]
    high = _larger(builder, _across(builder, high, _larger), old_high)
    fading = _exp2(builder, builder.fsub(old_high, high))
    store(builder, high, highest)
    store(builder, builder.extract_element(fading, _I32(0)), fade)
    if num_vectors is None:
        loop = Loop(builder, length, 1, [_all(0.0), lane])
        place = builder.add(scores, builder.mul(loop.index, _I64(_BYTES)))
        weight = _exp2(builder, builder.fsub(load(builder, place), high))
        weight = builder.select(builder.icmp_unsigned("<", loop.values[1], spans), weight, _all(0.0))
        store(builder, weight, place)
        added = loop.close(
            [builder.fadd(loop.values[0], weight), builder.add(loop.values[1], _all_i32(LANES))]
        )[0]
    else:
        added = _all(0.0)
        for i, value in enumerate(values):
            weight = _exp2(builder, builder.fsub(value, high))
            store(builder, weight, scores, i * _BYTES)
            added = builder.fadd(added, weight)
    store(builder, _fma(builder, load(builder, total), fading, added), total)


def weigh(num_vectors: int) -> Any:
    """Make f(scores, highest, total, fade) for a row of num_vectors * LANES scores, all seen.

    scores    [num_vectors * LANES]  in units of ln 2; become exp2(score - highest)
    highest   [LANES]                of all blocks so far, the same in each lane
    total     [LANES]                sum of weights, by lane
    fade      [1]                    what the block's new highest does to everything before
    """
    return _procedure(4, lambda builder, arguments: _emit_weigh(builder, arguments, num_vectors))


# f(scores, highest, total, fade, first, stop, low, span): the same for vectors first <= i < stop, of which
# the columns low <= column < low + span are seen; the others get weight 0.
weigh_seen = _procedure(8, lambda builder, arguments: _emit_weigh(builder, arguments, None))


def _emit_cap(builder: Any, arguments: Sequence[ir.Value]) -> None:
    scores, num_vectors, factor = arguments
    scale = _splat(builder, load(builder, factor, _F32))
    loop = Loop(builder, num_vectors, 1)
    place = builder.add(scores, builder.mul(loop.index, _I64(_BYTES)))
    store(builder, builder.fmul(_tanh(builder, load(builder, place)), scale), place)
    loop.close()


# f(scores, num_vectors, factor): scores become factor[0] * tanh(score).
cap = _procedure(3, _emit_cap)


# ---- moving rows ------------------------------------------------------------------------


def _transposed(builder: Any, rows: list[ir.Value]) -> list[ir.Value]:
    """Turn LANES vectors around, by exchanging ever smaller halves."""
    step = LANES // 2
    while step:
        low = ir.Constant(_INDEX, [i if not i & step else i - step + LANES for i in range(LANES)])
        high = ir.Constant(_INDEX, [i + step if not i & step else i + LANES for i in range(LANES)])
        for i in range(LANES):
            if not i & step:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = (
                    builder.shuffle_vector(a, b, low),
                    builder.shuffle_vector(a, b, high),
                )
        step //= 2
    return rows


def _turn_rows(is_half: bool, step_bytes: int, has_factor: bool) -> Any:
    def emit(builder: Any, arguments: Sequence[ir.Value]) -> None:
        sources, target, count = arguments[:3]
        scale = _splat(builder, load(builder, arguments[3], _F32)) if has_factor else None
        bases = [load(builder, sources, _I64, 8 * i) for i in range(LANES)]
        loop = Loop(builder, count, LANES)
        offset = builder.mul(loop.index, _I64(2 if is_half else 4))
        rows = [_widened(builder, builder.add(base, offset), is_half) for base in bases]
        place = builder.add(target, builder.mul(loop.index, _I64(step_bytes)))
        for i, value in enumerate(_transposed(builder, rows)):
            store(builder, value if scale is None else builder.fmul(value, scale), place, step_bytes * i)
        loop.close()

    return _procedure(4 if has_factor else 3, emit)


# f(sources, target, count): LANES rows, of which sources [LANES] int64 are the addresses, become LANES
# columns of a packed panel of WIDTH; count > 0 is a multiple of LANES.
pack_keys, pack_half_keys = _turn_rows(False, 2 * _BYTES, False), _turn_rows(True, 2 * _BYTES, False)


def pack_rows(height: int) -> Any:
    """Make f(sources, target, count, factor): `height` rows times factor[0] become a panel [count, height].

    sources   [LANES] int64, addresses of rows, any after the first `height`
    count     > 0, a multiple of LANES
    Whole vectors are stored, so up to LANES - height numbers after the panel are overwritten.
    """
    return _turn_rows(False, 4 * height, True)


def _copy_row(is_half: bool) -> Any:
    def emit(builder: Any, arguments: Sequence[ir.Value]) -> None:
        source, target, count, panel_bytes = arguments
        loop = Loop(builder, count, LANES)
        value = _widened(
            builder, builder.add(source, builder.mul(loop.index, _I64(2 if is_half else 4))), is_half
        )
        panel = builder.lshr(loop.index, _I64(WIDTH.bit_length() - 1))
        column = builder.and_(loop.index, _I64(WIDTH - 1))
        place = builder.add(builder.mul(panel, panel_bytes), builder.mul(column, _I64(4)))
        store(builder, value, builder.add(target, place))
        loop.close()

    return _procedure(4, emit)


# f(source, target, count, panel_bytes): a row of count > 0 numbers, a multiple of LANES, is laid into
# panels of WIDTH columns that are panel_bytes apart.
copy_row, copy_half_row = _copy_row(False), _copy_row(True)


def _emit_put_row(builder: Any, arguments: Sequence[ir.Value]) -> None:
    source, target, count, panel_bytes, total, inverse = arguments
    sums = _across(builder, load(builder, total), lambda builder, a, b: builder.fadd(a, b))
    scale = builder.fdiv(_all(1.0), sums)
    store(builder, builder.extract_element(scale, _I32(0)), inverse)
    is_empty = builder.icmp_signed("==", count, _I64(0))
    with builder.if_then(builder.not_(is_empty)):
        loop = Loop(builder, count, LANES)
        panel = builder.lshr(loop.index, _I64(WIDTH.bit_length() - 1))
        column = builder.and_(loop.index, _I64(WIDTH - 1))
        place = builder.add(builder.mul(panel, panel_bytes), builder.mul(column, _I64(4)))
        value = builder.fmul(load(builder, builder.add(source, place)), scale)
        store(builder, value, builder.add(target, builder.mul(loop.index, _I64(4))))
        loop.close()


# f(source, target, count, panel_bytes, total, inverse): the way back for a row of count numbers, a multiple
# of LANES, divided by the sum of total [LANES]; inverse [1] becomes what it was multiplied with.
put_row = _procedure(6, _emit_put_row)


@intrinsic
def load_half(typing_context, address):
    """One bfloat16 of memory as float32."""

    def generate(context, builder, signature, arguments):
        bits = builder.zext(load(builder, arguments[0], _I16, align=2), _I32)
        return builder.bitcast(builder.shl(bits, _I32(16)), _F32)

    return types.float32(types.int64), generate
