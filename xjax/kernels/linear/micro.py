"""Products of packed codes with rows as LLVM IR: the innermost loops of quantized matrices.

    multiply    a run of blocks x a panel of rows -> float32, whatever `Form` the records have
    quantize    a row of float32 -> int8 codes with their scales, as `multiply` reads them
    expand      one output's weights -> float32

A block is 16 outputs, and they are the lanes: every sum belongs to one output and is taken in rising
inputs. Dots of 32 codes are exact integers, so no way to take them can change a bit. There are four,
`MACHINES`, of which `machine` names the best one here; all else is ordinary IR, which LLVM fits to any
processor. Addresses are int64 in bytes. Nothing here knows an FFI frame, a form's name or a job.

    panel   [num_units, height, piece bytes]   a piece: 32 codes of one row, then what `_START` ... name
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from xjax.kernels.lanes import Loop, load, store
from xjax.kernels.linear.forms import OUTPUTS, PLANE, UNIT, Form
from xjax.kernels.linear.packed import TINY

# Of a row's piece, after its codes: what the integer sum begins with, the scale, scale * sum of codes, and
# the first of these for the second half of a unit where that has a scale of its own.
_START, _SCALE, _SUM, _START_1 = 32, 36, 40, 44

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_I32, OUTPUTS), ir.VectorType(_F32, OUTPUTS)
_BYTES, _PLANE = ir.VectorType(_I8, OUTPUTS), ir.VectorType(_I8, 4 * OUTPUTS)
_MAGIC, _MAGIC_BITS = (
    12582912.0,
    0x4B400000,
)  # 1.5 * 2**23: adding it rounds to the nearest integer, ties to even
# Panels of so many rows take so long over a unit that the processor does not look ahead far enough by itself;
# with fewer rows asking for memory, so many bytes before its use, costs a fifth of the read rate. Measured.
_MANY_ROWS, _AHEAD = 8, 3072

MACHINES = ("avx512_vnni", "avx_vnni", "avx2", "plain")
_HEIGHTS = {"avx512_vnni": (12, 8, 4, 2, 1), "avx_vnni": (4, 2, 1), "avx2": (4, 2, 1), "plain": (2, 1)}
# Products of two pairs that an int16 holds when so many are added up: codes of `bits` times at most 127.
_PAIRS = {4: 8, 5: 4, 6: 2, 8: 8}


def piece_bytes(form: Form) -> int:
    """Bytes of 32 inputs of a row of x: a second start where a unit has two scales."""
    return _START_1 + (0 if form.group == UNIT else 4)


def supported() -> tuple[str, ...]:
    """The machines whose instructions this processor has, best first."""
    has = llvm.get_host_cpu_features()
    avx2 = all(has.get(name) for name in ("avx2", "fma", "f16c"))
    found = {
        "avx512_vnni": avx2 and has.get("avx512vnni") and has.get("avx512bw"),
        "avx_vnni": avx2 and (has.get("avxvnni") or (has.get("avx512vnni") and has.get("avx512vl"))),
        "avx2": avx2,
        "plain": True,
    }
    return tuple(name for name in MACHINES if found[name])


def heights(machine: str) -> tuple[int, ...]:
    """Rows of the panels that there are products for, the highest first; the last is 1."""
    return _HEIGHTS[machine]


# ---- values -----------------------------------------------------------------------------


def _kind(value: Any) -> Any:
    return value.type


def _call(builder: Any, name: str, kind: ir.Type, *arguments: ir.Value) -> ir.Value:
    function = ir.FunctionType(kind, [_kind(value) for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def _splat(builder: Any, value: ir.Value, kind: Any) -> ir.Value:
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, _I32(0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))


def _all(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _fma(builder: Any, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


def _pick(builder: Any, value: ir.Value, places: Sequence[int]) -> ir.Value:
    kind = ir.VectorType(_I32, len(places))
    return builder.shuffle_vector(
        value, ir.Constant(_kind(value), ir.Undefined), ir.Constant(kind, list(places))
    )


def _numbers(builder: Any, address: ir.Value, offset: int, scale: str, machine: str) -> ir.Value:
    """16 floats of a header: float32, or float16 widened."""
    if scale == "f32":
        return load(builder, address, _FLOATS, offset)
    if machine != "plain":
        return builder.fpext(
            load(builder, address, ir.VectorType(ir.HalfType(), OUTPUTS), offset, 2), _FLOATS
        )
    half = builder.zext(load(builder, address, ir.VectorType(_I16, OUTPUTS), offset, 2), _WORDS)
    sign = builder.shl(builder.and_(half, _all(0x8000, _WORDS)), _all(16, _WORDS))
    rest = builder.and_(half, _all(0x7FFF, _WORDS))
    normal = builder.add(builder.shl(rest, _all(13, _WORDS)), _all(112 << 23, _WORDS))
    tiny = builder.fmul(builder.sitofp(rest, _FLOATS), _all(2.0**-24, _FLOATS))
    is_tiny = builder.icmp_unsigned("<", rest, _all(0x400, _WORDS))
    bits = builder.select(is_tiny, builder.bitcast(tiny, _WORDS), normal)
    return builder.bitcast(builder.or_(bits, sign), _FLOATS)


# ---- integer dots -----------------------------------------------------------------------

# f(builder, totals, codes, word): each row's total plus its dots with the codes of some chunks, where
# word(row, chunk) loads 4 codes of a row.
Words = Callable[[int, int], ir.Value]
Dots = Callable[[Any, list[ir.Value], list[ir.Value], Words], list[ir.Value]]


def _vnni(width: int) -> Dots:
    """Each 4 unsigned codes times 4 signed ones, added up: one instruction for `width` outputs."""
    kind = ir.VectorType(_I32, width)

    def dots(builder: Any, totals: list[ir.Value], codes: list[ir.Value], word: Words) -> list[ir.Value]:
        starts = range(0, OUTPUTS, width)
        parts = [[_pick(builder, total, range(at, at + width)) for at in starts] for total in totals]
        for c, code in enumerate(codes):  # codes in one register, the rows' sums in all others
            code = builder.bitcast(code, _WORDS)
            own = [_pick(builder, code, range(at, at + width)) for at in starts]
            for row, sums in enumerate(parts):
                x = _splat(builder, word(row, c), kind)
                for i, value in enumerate(own):
                    name = f"llvm.x86.avx512.vpdpbusd.{32 * width}"
                    sums[i] = _call(builder, name, kind, sums[i], value, x)
        return [_joined(builder, sums) for sums in parts]

    return dots


def _joined(builder: Any, parts: list[ir.Value]) -> ir.Value:
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, ir.Constant(_WORDS, list(range(OUTPUTS))))


def _pairs(bits: int) -> Dots:
    """Products of bytes added by two into int16 and then by two into int32, 8 outputs at a time.

    Two products of 8-bit codes would not fit: their halves of 4 bits are multiplied apart.
    """
    words, shorts, bytes_ = (ir.VectorType(_I32, 8), ir.VectorType(_I16, 16), ir.VectorType(_I8, 32))
    units = (1, 16) if bits == 8 else (1,)

    def split(builder: Any, code: ir.Value, half: int) -> list[ir.Value]:
        own = _pick(builder, code, range(32 * half, 32 * half + 32))
        if bits < 8:
            return [own]
        return [builder.and_(own, _all(15, bytes_)), builder.lshr(own, _all(4, bytes_))]

    def add(
        builder: Any, sums: list[ir.Value], some: list[tuple[int, list[ir.Value]]], word: Words
    ) -> list[ir.Value]:
        """Each row's sum of 8 outputs plus its dots with so few chunks that int16 holds them."""
        shorts_of: list[list[Any]] = [[None] * len(units) for _ in sums]
        for c, parts in some:
            for row, found in enumerate(shorts_of):
                x = builder.bitcast(_splat(builder, word(row, c), words), bytes_)
                for i, part in enumerate(parts):
                    pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, part, x)
                    found[i] = pairs if found[i] is None else builder.add(found[i], pairs)
        for row, found in enumerate(shorts_of):
            for unit, pairs in zip(units, found, strict=True):
                four = _call(builder, "llvm.x86.avx2.pmadd.wd", words, pairs, _all(unit, shorts))
                sums[row] = builder.add(sums[row], four)
        return sums

    def dots(builder: Any, totals: list[ir.Value], codes: list[ir.Value], word: Words) -> list[ir.Value]:
        halves = []
        for half in range(2):
            sums = [_pick(builder, total, range(8 * half, 8 * half + 8)) for total in totals]
            for first in range(0, len(codes), _PAIRS[bits]):
                places = range(first, min(first + _PAIRS[bits], len(codes)))
                sums = add(builder, sums, [(c, split(builder, codes[c], half)) for c in places], word)
            halves.append(sums)
        return [_joined(builder, list(pair)) for pair in zip(*halves, strict=True)]

    return dots


def _plain(builder: Any, totals: list[ir.Value], codes: list[ir.Value], word: Words) -> list[ir.Value]:
    """The same in operations that every processor has."""
    for c, code in enumerate(codes):
        for k in range(4):
            own = builder.zext(_pick(builder, code, range(k, 4 * OUTPUTS, 4)), _WORDS)
            for row, total in enumerate(totals):
                x = builder.ashr(builder.shl(word(row, c), _I32(24 - 8 * k)), _I32(24))
                totals[row] = builder.add(total, builder.mul(own, _splat(builder, x, _WORDS)))
    return totals


def _dots(form: Form, machine: str) -> Dots:
    if machine == "plain":
        return _plain
    return _pairs(form.bits) if machine == "avx2" else _vnni(16 if machine == "avx512_vnni" else 8)


# ---- codes ------------------------------------------------------------------------------


def _moved(builder: Any, value: ir.Value, left: int, mask: int) -> ir.Value:
    """Bits of each byte moved to the left, or by a negative number to the right, then masked.

    Bytes may lie in larger integers: no mask here keeps a bit that came from another byte.
    """
    kind = _kind(value)
    if left:
        shift = builder.shl if left > 0 else builder.lshr
        value = shift(value, _each(kind, abs(left)))
    return builder.and_(value, _each(kind, mask if kind == _PLANE else mask * 0x01010101))


def _each(kind: Any, value: int) -> ir.Constant:
    return _all(value, kind) if isinstance(kind, ir.VectorType) else kind(value)


def _chunks(builder: Any, plane: Callable[[int], ir.Value], bits: int) -> Callable[[int], ir.Value]:
    """A function that makes a chunk's codes, a byte each, of what `plane` loads."""
    if bits == 8:
        return plane
    low = [plane(j) for j in range(4)]
    high = [plane(4 + j) for j in range({4: 0, 5: 1, 6: 2}[bits])]

    def chunk(c: int) -> ir.Value:
        value = _moved(builder, low[c // 2], -4 * (c % 2), 15)
        if bits == 5:
            value = builder.or_(value, _moved(builder, high[0], 4 - c, 0x10))
        if bits == 6:
            value = builder.or_(value, _moved(builder, high[c // 4], 4 - 2 * (c % 4), 0x30))
        return value

    return chunk


class _Unit:
    """Emits what 32 inputs of a block add to the sums of a panel's rows."""

    def __init__(self, builder: Any, form: Form, height: int, machine: str) -> None:
        self._builder, self._form, self._height = builder, form, height
        self._dots = _dots(form, machine)

    def _row(self, pieces: ir.Value, row: int, kind: ir.Type, offset: int) -> ir.Value:
        return load(self._builder, pieces, kind, row * piece_bytes(self._form) + offset)

    def _integers(self, pieces: ir.Value, chunks: list[ir.Value], half: int) -> list[ir.Value]:
        """Dots of each row with some of the chunks, beginning at what its piece says."""
        builder, rows = self._builder, range(self._height)
        first, where = half * len(chunks), _START_1 if half else _START
        totals = [_splat(builder, self._row(pieces, row, _I32, where), _WORDS) for row in rows]
        return self._dots(
            builder, totals, chunks, lambda row, c: self._row(pieces, row, _I32, 4 * (first + c))
        )

    def _stepped(self, number: ir.Value, address: ir.Value, index: int) -> ir.Value:
        """A number of the header times the steps of a group, which lie behind the codes."""
        builder, form = self._builder, self._form
        if not form.is_nested:
            return number
        steps = load(builder, address, _BYTES, _code_bytes(form) + OUTPUTS * index, 1)
        if form.has_minimum:
            return builder.fmul(number, builder.uitofp(builder.zext(steps, _WORDS), _FLOATS))
        return builder.fmul(number, builder.sitofp(builder.sext(steps, _WORDS), _FLOATS))

    def emit(
        self, address: ir.Value, pieces: ir.Value, header: list[ir.Value], sums: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """The sums after 32 more inputs, whose codes are at `address` and whose rows are at `pieces`."""
        builder, form, sums = self._builder, self._form, list(sums)
        if self._height >= _MANY_ROWS:
            _prefetch(builder, address, form.unit_bytes)
        halves = UNIT // form.group
        chunk = _chunks(builder, lambda j: load(builder, address, _PLANE, PLANE * j, 1), form.bits)
        each = 8 // halves
        scales = [self._row_vector(pieces, row, _SCALE) for row in range(self._height)]
        for half in range(halves):
            totals = self._integers(pieces, [chunk(half * each + c) for c in range(each)], half)
            factor = self._stepped(header[0], address, half)
            for row, total in enumerate(totals):
                product = builder.fmul(factor, scales[row])
                sums[row] = _fma(builder, builder.sitofp(total, _FLOATS), product, sums[row])
        if form.has_minimum:
            minimum = self._stepped(header[1], address, halves)
            for row in range(self._height):
                sums[row] = _fma(builder, minimum, self._row_vector(pieces, row, _SUM), sums[row])
        return sums

    def _row_vector(self, pieces: ir.Value, row: int, offset: int) -> ir.Value:
        return _splat(self._builder, self._row(pieces, row, _F32, offset), _FLOATS)


def _code_bytes(form: Form) -> int:
    return OUTPUTS * UNIT * form.bits // 8


def _prefetch(builder: Any, address: ir.Value, num_bytes: int) -> None:
    """Ask for the lines that are read _AHEAD bytes later; past the end of memory that does nothing."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for offset in range(0, num_bytes, 64):
        pointer = builder.inttoptr(builder.add(address, _I64(_AHEAD + offset)), ir.PointerType())
        builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])


# ---- functions --------------------------------------------------------------------------


def _function(module: ir.Module, name: str, count: int) -> tuple[Any, Sequence[ir.Value]]:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * count)
    function = ir.Function(module, kind, name)
    return ir.IRBuilder(function.append_basic_block("entry")), function.args


def multiply(module: ir.Module, name: str, form: Form, height: int, machine: str) -> None:
    """Add f(weights, panel, out, num_blocks, num_runs, run, row_bytes, columns, rows) to a module.

    weights   blocks, one behind the other; of each, num_runs > 0 headers with run > 0 groups
    panel     [num_runs * run, height] pieces, as `quantize` makes them
    out       float32, rows row_bytes apart; `columns` of them are there, from the first block's first
    rows      1 <= rows <= height of the panel's rows are wanted; the others repeat the last one
    """
    builder, arguments = _function(module, name, 9)
    weights, panel, out, num_blocks, num_runs, run, row_bytes, columns, rows = arguments
    group = _Unit(builder, form, height, machine)
    last = builder.sub(rows, _I64(1))
    offsets: list[ir.Value] = [_I64(0)]
    for row in range(1, height):
        place = builder.select(builder.icmp_signed("<", _I64(row), last), _I64(row), last)
        offsets.append(builder.mul(place, row_bytes))
    blocks = Loop(builder, num_blocks, 1, [weights])
    runs = Loop(builder, num_runs, 1, [blocks.values[0], panel, *[_all(0.0, _FLOATS)] * height])
    address, pieces, *sums = runs.values
    count = 2 if form.has_minimum else 1
    each = form.header_bytes // count
    header = [_numbers(builder, address, i * each, form.scale, machine) for i in range(count)]
    if form.scale == "nested" and form.has_minimum:
        header[1] = builder.fsub(_all(-0.0, _FLOATS), header[1])
    address = builder.add(address, _I64(form.header_bytes))
    piece = _I64(height * piece_bytes(form))
    if form.scale == "f16":  # one group a header
        sums = group.emit(address, pieces, header, sums)
        ends = [builder.add(address, _I64(form.unit_bytes)), builder.add(pieces, piece), *sums]
    else:
        groups = Loop(builder, run, 1, [address, pieces, *sums])
        address, pieces, *sums = groups.values
        sums = group.emit(address, pieces, header, sums)
        ends = groups.close([builder.add(address, _I64(form.unit_bytes)), builder.add(pieces, piece), *sums])
    address, _, *sums = runs.close(ends)
    _put(builder, sums, blocks.index, (out, columns), offsets)
    blocks.close([address])
    builder.ret_void()


def _put(
    builder: Any,
    sums: list[ir.Value],
    block: ir.Value,
    target: tuple[ir.Value, ir.Value],
    offsets: list[ir.Value],
) -> None:
    """Store a block's sums in those of its columns that exist."""
    out, columns = target
    left = builder.sub(columns, builder.mul(block, _I64(OUTPUTS)))
    left = builder.select(builder.icmp_signed("<", left, _I64(OUTPUTS)), left, _I64(OUTPUTS))
    lane = ir.Constant(_WORDS, list(range(OUTPUTS)))
    mask = builder.icmp_signed("<", lane, _splat(builder, builder.trunc(left, _I32), _WORDS))
    place = builder.add(out, builder.mul(block, _I64(4 * OUTPUTS)))
    kind = ir.FunctionType(ir.VoidType(), [_FLOATS, ir.PointerType(), _I32, mask.type])
    write = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    for value, offset in zip(sums, offsets, strict=True):
        pointer = builder.inttoptr(builder.add(place, offset), ir.PointerType())
        builder.call(write, [value, pointer, _I32(4), mask])


def quantize(module: ir.Module, name: str, halves: int) -> None:
    """Add f(source, pieces, stride, num_units, factor) to a module: one row of x as int8 codes.

    source   [num_units * 32] float32
    pieces   where the first unit's piece goes; the others are `stride` bytes apart
    factor   what the sum of codes is multiplied by for the integer sum's start

    Scale max|x| / 127, codes round(x * (127 / max|x|)), ties to even. A unit with a number that is not
    finite gets a scale that is not finite, so all that its row is multiplied with becomes NaN.
    """
    builder, (source, pieces, stride, num_units, factor) = _function(module, name, 5)
    multiplier = builder.trunc(factor, _I32)
    loop = Loop(builder, num_units, 1, [source, pieces])
    source, piece = loop.values
    values = [load(builder, source, _FLOATS, 64 * half) for half in range(2)]
    sizes = [builder.and_(builder.bitcast(value, _WORDS), _all(0x7FFFFFFF, _WORDS)) for value in values]
    # As integers, bits of larger numbers are larger, infinity's and NaN's largest of all.
    both = builder.select(builder.icmp_signed(">", *sizes), *sizes)
    bits = _call(builder, "llvm.vector.reduce.smax.v16i32", _I32, both)
    highest = builder.bitcast(bits, _F32)
    is_tiny = builder.fcmp_ordered("<", highest, _F32(TINY))
    is_finite = builder.icmp_signed("<", bits, _I32(0x7F800000))
    is_number = builder.and_(is_finite, builder.not_(is_tiny))
    scale = builder.select(is_tiny, _F32(0.0), builder.fdiv(highest, _F32(127.0)))
    inverse = builder.select(is_number, builder.fdiv(_F32(127.0), highest), _F32(0.0))
    store(builder, scale, piece, _SCALE)
    totals = []
    for half, value in enumerate(values):
        moved = builder.fadd(builder.fmul(value, _splat(builder, inverse, _FLOATS)), _all(_MAGIC, _FLOATS))
        codes = builder.sub(builder.bitcast(moved, _WORDS), _all(_MAGIC_BITS, _WORDS))
        keeps = _splat(builder, is_number, ir.VectorType(ir.IntType(1), OUTPUTS))
        codes = builder.select(keeps, codes, _all(0, _WORDS))
        store(builder, builder.trunc(codes, _BYTES), piece, OUTPUTS * half)
        totals.append(_call(builder, "llvm.vector.reduce.add.v16i32", _I32, codes))
    total = builder.add(*totals)
    for part, where in zip(totals if halves == 2 else [total], (_START, _START_1), strict=False):
        store(builder, builder.mul(part, multiplier), piece, where)
    store(builder, builder.fmul(scale, builder.sitofp(total, _F32)), piece, _SUM)
    loop.close([builder.add(source, _I64(4 * UNIT)), builder.add(piece, stride)])
    builder.ret_void()


def expand(module: ir.Module, name: str, form: Form, machine: str) -> None:
    """Add f(record, lane, out, num_runs, run) to a module: one output's weights as numbers.

    record   the block's; num_runs > 0 headers with run > 0 units
    lane     which of its 16 outputs
    out      [num_runs * run * 32] float32, exactly what `forms.unpack` gives
    """
    builder, (address, lane, out, num_runs, run) = _function(module, name, 5)
    number = builder.trunc(lane, _I32)
    runs = Loop(builder, num_runs, 1, [address, out])
    address, out = runs.values
    count = 2 if form.has_minimum else 1
    header = []
    for i in range(count):
        numbers = _numbers(builder, address, i * form.header_bytes // count, form.scale, machine)
        header.append(builder.extract_element(numbers, number))
    if form.is_nested and form.has_minimum:
        header[1] = builder.fsub(_F32(-0.0), header[1])
    units = Loop(builder, run, 1, [builder.add(address, _I64(form.header_bytes)), out])
    _expand_unit(builder, form, units.values, lane, header)
    ends = [builder.add(units.values[0], _I64(form.unit_bytes)), builder.add(units.values[1], _I64(4 * UNIT))]
    runs.close(units.close(ends))
    builder.ret_void()


def _expand_unit(
    builder: Any, form: Form, places: Sequence[ir.Value], lane: ir.Value, header: list[ir.Value]
) -> None:
    """Store 32 weights of one output."""
    address, out = places
    own = builder.add(address, builder.mul(lane, _I64(4)))
    chunk = _chunks(builder, lambda j: load(builder, own, _I32, PLANE * j), form.bits)
    steps, halves = builder.add(address, lane), UNIT // form.group

    def stepped(value: ir.Value, index: int) -> ir.Value:
        if not form.is_nested:
            return value
        step = load(builder, steps, _I8, _code_bytes(form) + OUTPUTS * index, 1)
        widened = builder.zext(step, _I32) if form.has_minimum else builder.sext(step, _I32)
        return builder.fmul(value, builder.sitofp(widened, _F32))

    for half in range(2):
        codes = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for c in range(4):
            codes = builder.insert_element(codes, chunk(4 * half + c), _I32(c))
        values = builder.zext(builder.bitcast(codes, _BYTES), _WORDS)
        values = builder.sitofp(builder.sub(values, _all(form.offset, _WORDS)), _FLOATS)
        scale = stepped(header[0], half if halves == 2 else 0)
        values = builder.fmul(values, _splat(builder, scale, _FLOATS))
        if form.has_minimum:
            values = builder.fadd(values, _splat(builder, stepped(header[1], halves), _FLOATS))
        store(builder, values, out, 64 * half)
