"""Paged attention as one FFI call: float32 products in vector registers, an online softmax between.

    item    tokens of one row (a part of a tile, or one decode token) x one kv head
    rows    its queries, G a token, in panels of at most HEIGHTS[0]; each panel knows what it sees
    block   _BLOCK keys at positions that are multiples of _BLOCK, packed once for all panels

Blocks lie at absolute positions and every sum runs in the order of positions, so a token's result
is the same to the bit in any batch, tile or chunk: blocks that it does not see change nothing. Only
keys between the first and the last position that a panel sees are read. Importing this imports Numba.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi, lanes
from xjax.kernels.attention import xla
from xjax.kernels.ffi import (
    DATA,
    larger,
    load_f32,
    load_i32,
    load_i64,
    own,
    quotient,
    remainder,
    smaller,
    store_f32,
    store_i64,
)  # fmt: skip
from xjax.kernels.lanes import HEIGHTS, LANES, WIDTH

NAME = "xjax_attention"
_BLOCK = 128  # keys; a multiple of WIDTH
_MANY_ROWS, _FEW_ROWS = 192, 96  # queries of an item, about: many pay for packing keys, few can be shared out
_MANY_WORKERS = 5  # from here on few
_PANEL_BYTES = 4 * WIDTH
_LOG2E = 1.4426950408889634
_UNSEEN = -1e30  # as in `xla`

# Slots of a job's own data: addresses of arrays, then their dimensions, then `_layout`.
(
    _Q, _K, _V, _TABLE, _ROW_OF, _POSITION, _OUT, _SCRATCH, _FACTORS,
    _HEADS, _KV_HEADS, _GROUP, _DIM, _PAGES, _SIZE, _MAX_PAGES, _IS_HALF, _TILE_ITEMS,
    _NUM_DECODE, _TILE, _WINDOW, _PART, _PARTS, _MOST,
    _KEYS, _VALUES, _SCORES, _QUERIES, _RESULT, _HIGHEST, _TOTAL, _FADE, _ADDRESSES, _ZEROS, _END,
    _NUM_SLOTS,
) = range(36)  # fmt: skip


def _layout(num_decode: int, tile: int, window: int | None, group: int, dim: int, workers: int) -> np.ndarray:
    """What a call is told beside its arrays: the slots from _NUM_DECODE on; places in a worker's scratch."""
    rows = _FEW_ROWS if workers >= _MANY_WORKERS else _MANY_ROWS
    part = min(max(rows // group, 1), max(tile, 1))
    most = -(-part * group // LANES) * LANES + LANES
    deep, wide = -(-dim // LANES) * LANES, -(-dim // WIDTH) * WIDTH
    floats = (
        _BLOCK * deep,  # keys       [_BLOCK / WIDTH, D, WIDTH]
        _BLOCK * wide,  # values     [D / WIDTH, _BLOCK, WIDTH]
        _TALL * _BLOCK,  # scores    [height, _BLOCK]
        most * deep,  # queries      panels of [D, height]
        most * wide,  # result       [D / WIDTH, most, WIDTH]
        most * LANES,  # highest     [most, LANES]
        most * LANES,  # total       [most, LANES]
        most,  # fade                [most]
        2 * _BLOCK,  # addresses     [_BLOCK] int64
        deep,  # zeros               a key that is not there
    )
    places = 4 * np.cumsum((0, *floats))
    return np.array([num_decode, tile, window or 0, part, -(-tile // part), most, *places], np.int64)


def _scores(height: int):
    return lanes.product(height, row_bytes=4, step_bytes=4 * height, out_bytes=4 * _BLOCK, fades=False)


def _values(height: int):
    return lanes.product(height, row_bytes=4 * _BLOCK, step_bytes=4, out_bytes=_PANEL_BYTES, fades=True)


_TALL, _MIDDLE, _LOW = HEIGHTS
_scores_tall, _scores_middle, _scores_low = (_scores(height) for height in HEIGHTS)
_values_tall, _values_middle, _values_low = (_values(height) for height in HEIGHTS)
_pack_tall, _pack_middle, _pack_low = (lanes.pack_rows(height) for height in HEIGHTS)
_weigh_all = lanes.weigh(_BLOCK // LANES)
_weigh_seen, _cap, _put_row = lanes.weigh_seen, lanes.cap, lanes.put_row
_pack_keys, _pack_half_keys = lanes.pack_keys, lanes.pack_half_keys
_copy_row, _copy_half_row, _load_half = lanes.copy_row, lanes.copy_half_row, lanes.load_half


@njit
def _height(rows):
    """Rows of the next panel when so many are left."""
    return _TALL if rows > _MIDDLE else _MIDDLE if rows > _LOW else _LOW


# ---- an item ----------------------------------------------------------------------------


def _attend_item(job, index, worker):
    """One kv head of one decode token or of one part of a tile."""
    num_kv, part, tile = own(job, _KV_HEADS), own(job, _PART), own(job, _TILE)
    num_tile_items, head = own(job, _TILE_ITEMS), remainder(index, num_kv)
    if index < num_tile_items:  # the last parts first: they see the most
        number = quotient(num_tile_items - 1 - index, num_kv)
        inside = remainder(number, own(job, _PARTS)) * part
        first = own(job, _NUM_DECODE) + quotient(number, own(job, _PARTS)) * tile + inside
        count = smaller(part, tile - inside)
    else:
        first, count = quotient(index - num_tile_items, num_kv), 1
    positions, seeing = own(job, _POSITION) + 4 * first, 0
    while seeing < count and load_i32(positions + 4 * seeing) >= 0:
        seeing += 1
    if seeing > 0:
        _attend(job, own(job, _SCRATCH) + worker * own(job, _END), head, first, seeing)
    row_bytes = 4 * own(job, _GROUP) * own(job, _DIM)
    for token in range(first + seeing, first + count):
        _fill(own(job, _OUT) + (token * num_kv + head) * row_bytes, row_bytes, np.float32(0))


@njit
def _fill(address, num_bytes, value):
    for place in range(address, address + num_bytes, 4):
        store_f32(place, value)


@njit
def _attend(job, scratch, head, first, count):
    """Attend `count` tokens of one row, none of them padding."""
    result, highest = scratch + own(job, _RESULT), scratch + own(job, _HIGHEST)
    total, fade = scratch + own(job, _TOTAL), scratch + own(job, _FADE)
    num_rows = _load_queries(job, scratch, head, first, count)
    _fill(result, highest - result, np.float32(0))
    _fill(highest, total - highest, np.float32(_UNSEEN))
    _fill(total, fade - total, np.float32(0))
    positions, window = own(job, _POSITION) + 4 * first, own(job, _WINDOW)
    low = larger(load_i32(positions) - window + 1, 0) if window != 0 else 0
    stop = load_i32(positions + 4 * (count - 1)) + 1
    start = low - remainder(low, _BLOCK)
    while start < stop:
        _load_block(job, scratch, head, first, start, larger(low - start, 0), smaller(stop - start, _BLOCK))
        row = 0
        while row < num_rows:
            height = _height(num_rows - row)
            _attend_panel(job, scratch, positions, count, start, row, height)
            row += height
        start += _BLOCK
    _store_result(job, scratch, head, first, count)


@njit
def _load_queries(job, scratch, head, first, count):
    """Scale the queries and lay them into panels [D, height]; returns the rows, padding counted."""
    group, dim, scale = own(job, _GROUP), own(job, _DIM), own(job, _FACTORS)
    panel, row, num_rows = scratch + own(job, _QUERIES), 0, count * group
    sources, zeros = scratch + own(job, _ADDRESSES), scratch + own(job, _ZEROS)
    whole = dim - remainder(dim, LANES)
    _fill(zeros, 4 * dim, np.float32(0))
    while row < num_rows:
        height = _height(num_rows - row)
        for i in range(LANES):
            token, inner = quotient(row + i, group), remainder(row + i, group)
            at = ((first + token) * own(job, _KV_HEADS) + head) * group + inner
            source = own(job, _Q) + 4 * at * dim
            store_i64(sources + 8 * i, source if row + i < num_rows else zeros)
        if whole == 0:
            pass
        elif height == _TALL:
            _pack_tall(sources, panel, whole, scale)
        elif height == _MIDDLE:
            _pack_middle(sources, panel, whole, scale)
        else:
            _pack_low(sources, panel, whole, scale)
        for i in range(height if whole < dim else 0):
            for d in range(whole, dim):
                value = load_f32(load_i64(sources + 8 * i) + 4 * d) * load_f32(scale)
                store_f32(panel + 4 * (d * height + i), value)
        row += height
        panel += 4 * height * dim
    return row


@njit
def _find_keys(job, addresses, zeros, head, first, start, begin, stop):
    """Addresses of the keys begin <= i < stop of a block, and `zeros` around them to whole vectors."""
    num_kv, size = own(job, _KV_HEADS), own(job, _SIZE)
    row_bytes = own(job, _DIM) * (2 if own(job, _IS_HALF) else 4)
    table = own(job, _TABLE) + 4 * load_i32(own(job, _ROW_OF) + 4 * first) * own(job, _MAX_PAGES)
    for i in range(begin - remainder(begin, LANES), begin):
        store_i64(addresses + 8 * i, zeros)
    i = begin
    while i < stop:
        page, inside = quotient(start + i, size), remainder(start + i, size)
        page_id = load_i32(table + 4 * smaller(page, own(job, _MAX_PAGES) - 1))
        page_id = smaller(larger(page_id, 0), own(job, _PAGES) - 1)
        address = own(job, _K) + ((page_id * num_kv + head) * size + inside) * row_bytes
        end = smaller(i + size - inside, stop)
        while i < end:
            store_i64(addresses + 8 * i, address)
            address += row_bytes
            i += 1
    for i in range(stop, stop + remainder(LANES - remainder(stop, LANES), LANES)):
        store_i64(addresses + 8 * i, zeros)


@njit
def _load_block(job, scratch, head, first, start, begin, stop):
    """Pack the keys begin <= i < stop of the block at position `start` by columns, the values by rows."""
    dim, is_half = own(job, _DIM), own(job, _IS_HALF)
    addresses, zeros = scratch + own(job, _ADDRESSES), scratch + own(job, _ZEROS)
    _find_keys(job, addresses, zeros, head, first, start, begin, stop)
    whole = dim - remainder(dim, LANES)
    for i in range(begin - remainder(begin, LANES), stop, LANES):
        column = remainder(i, WIDTH)
        target = scratch + own(job, _KEYS) + 4 * ((i - column) * dim + column)
        if whole > 0 and is_half:
            _pack_half_keys(addresses + 8 * i, target, whole)
        elif whole > 0:
            _pack_keys(addresses + 8 * i, target, whole)
        if whole < dim:
            for lane in range(LANES):
                source = load_i64(addresses + 8 * (i + lane))
                for d in range(whole, dim):
                    store_f32(target + 4 * (d * WIDTH + lane), _number(source, d, is_half))
    other, panel_bytes = own(job, _V) - own(job, _K), _BLOCK * _PANEL_BYTES
    for i in range(begin, stop):
        target = scratch + own(job, _VALUES) + i * _PANEL_BYTES
        source = load_i64(addresses + 8 * i) + other
        if whole > 0 and is_half:
            _copy_half_row(source, target, whole, panel_bytes)
        elif whole > 0:
            _copy_row(source, target, whole, panel_bytes)
        for d in range(whole, dim):
            place = quotient(d, WIDTH) * panel_bytes + 4 * remainder(d, WIDTH)
            store_f32(target + place, _number(source, d, is_half))


@njit
def _number(row, index, is_half):
    return _load_half(row + 2 * index) if is_half else load_f32(row + 4 * index)


@njit
def _attend_panel(job, scratch, positions, count, start, row, height):
    """One step of the online softmax for rows of a panel over the packed block at position `start`."""
    dim, window, group = own(job, _DIM), own(job, _WINDOW), own(job, _GROUP)
    last_token = smaller(quotient(row + height - 1, group), count - 1)
    stop = smaller(load_i32(positions + 4 * last_token) + 1 - start, _BLOCK)
    begin = 0
    if window != 0:
        begin = larger(load_i32(positions + 4 * quotient(row, group)) - window + 1 - start, 0)
    if stop <= begin:
        return
    scores, queries = scratch + own(job, _SCORES), scratch + own(job, _QUERIES) + 4 * row * dim
    keys, first, end = scratch + own(job, _KEYS), quotient(begin, WIDTH), quotient(stop + WIDTH - 1, WIDTH)
    for panel in range(first, end):
        right, out = keys + panel * dim * _PANEL_BYTES, scores + panel * _PANEL_BYTES
        if height == _TALL:
            _scores_tall(queries, right, out, 0, dim)
        elif height == _MIDDLE:
            _scores_middle(queries, right, out, 0, dim)
        else:
            _scores_low(queries, right, out, 0, dim)
    _weigh(job, scratch, positions, count, start, row, height, first, end)
    fade = scratch + own(job, _FADE)
    left, right = scores + 4 * begin, scratch + own(job, _VALUES) + begin * _PANEL_BYTES
    out = scratch + own(job, _RESULT) + row * _PANEL_BYTES
    for _ in range(quotient(dim + WIDTH - 1, WIDTH)):
        if height == _TALL:
            _values_tall(left, right, out, fade, stop - begin)
        elif height == _MIDDLE:
            _values_middle(left, right, out, fade, stop - begin)
        else:
            _values_low(left, right, out, fade, stop - begin)
        right += _BLOCK * _PANEL_BYTES
        out += own(job, _MOST) * _PANEL_BYTES


@njit
def _weigh(job, scratch, positions, count, start, row, height, first, end):
    """Turn a panel's scores, vectors of columns `first` to `end`, into weights."""
    window, group, each = own(job, _WINDOW), own(job, _GROUP), WIDTH // LANES
    scores, factor = scratch + own(job, _SCORES), own(job, _FACTORS) + 4
    has_cap = load_f32(factor) != np.float32(0)
    highest = scratch + own(job, _HIGHEST) + 4 * row * LANES
    total = scratch + own(job, _TOTAL) + 4 * row * LANES
    fade = scratch + own(job, _FADE)
    for i in range(row, row + height):
        token = quotient(i, group)
        if has_cap:
            _cap(scores + first * _PANEL_BYTES, (end - first) * each, factor)
        seen, low = 0, 0
        if token < count:
            seen = load_i32(positions + 4 * token) + 1 - start
            low = larger(seen - window, 0) if window != 0 else 0
        if low == 0 and seen >= _BLOCK:
            _weigh_all(scores, highest, total, fade)
        else:
            span = larger(smaller(seen, _BLOCK) - low, 0)
            _weigh_seen(scores, highest, total, fade, first * each, end * each, low, span)
        scores += 4 * _BLOCK
        highest += 4 * LANES
        total += 4 * LANES
        fade += 4


@njit
def _store_result(job, scratch, head, first, count):
    """Divide by the sums of weights and put the rows where they belong."""
    group, dim = own(job, _GROUP), own(job, _DIM)
    whole, panel_bytes = dim - remainder(dim, LANES), own(job, _MOST) * _PANEL_BYTES
    factor = scratch + own(job, _FADE)
    for row in range(count * group):
        source = scratch + own(job, _RESULT) + row * _PANEL_BYTES
        token, inner = quotient(row, group), remainder(row, group)
        at = ((first + token) * own(job, _KV_HEADS) + head) * group + inner
        target = own(job, _OUT) + 4 * at * dim
        _put_row(source, target, whole, panel_bytes, scratch + own(job, _TOTAL) + 4 * row * LANES, factor)
        for d in range(whole, dim):
            place = quotient(d, WIDTH) * panel_bytes + 4 * remainder(d, WIDTH)
            store_f32(target + 4 * d, load_f32(source + place) * load_f32(factor))


_run = ffi.pool(NAME)


# ---- the call ---------------------------------------------------------------------------


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 6:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention takes six arrays")
    q, k, v, table = (
        ffi.argument(frame, 0),
        ffi.argument(frame, 1),
        ffi.argument(frame, 2),
        ffi.argument(frame, 3),
    )
    row_of, position = ffi.argument(frame, 4), ffi.argument(frame, 5)
    out, scratch = ffi.result(frame, 0), ffi.result(frame, 1)
    if ffi.dtype(q) != ffi.FLOAT32 or ffi.dtype(out) != ffi.FLOAT32 or ffi.dtype(k) != ffi.dtype(v):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention takes float32 queries, and keys like values")
    if ffi.dtype(k) != ffi.FLOAT32 and ffi.dtype(k) != ffi.UINT16:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention reads pages of float32 or of bfloat16 bits")
    if ffi.dtype(table) != ffi.INT32 or ffi.dtype(row_of) != ffi.INT32 or ffi.dtype(position) != ffi.INT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention takes int32 tables, rows and positions")
    if (
        ffi.rank(q) != 3
        or ffi.rank(k) != 4
        or ffi.dim(k, 3) != ffi.dim(q, 2)
        or remainder(ffi.dim(q, 1), ffi.dim(k, 1))
    ):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention takes q [N, H, D] and pages [P, K, S, D]")
    if ffi.num_attributes(frame) != 2 or ffi.attribute_size(frame, 1) != _NUM_SLOTS - _NUM_DECODE:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "attention takes factors and a layout")
    factors, layout = ffi.attribute(frame, 0), ffi.attribute(frame, 1)
    num_decode, tile = load_i64(layout), load_i64(layout + 8)
    num_kv = ffi.dim(k, 1)
    num_tile_items = (
        quotient(ffi.dim(q, 0) - num_decode, tile) * load_i64(layout + 8 * (_PARTS - _NUM_DECODE)) * num_kv
    )
    job = ffi.make_job(num_tile_items + num_decode * num_kv, ffi.dim(scratch, 0), _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "attention has no memory for its task")
    slots = job + DATA
    for i in range(6):
        store_i64(slots + 8 * i, ffi.data(ffi.argument(frame, i)))
    store_i64(slots + 8 * _OUT, ffi.data(out))
    store_i64(slots + 8 * _SCRATCH, ffi.data(scratch))
    store_i64(slots + 8 * _FACTORS, factors)
    store_i64(slots + 8 * _HEADS, ffi.dim(q, 1))
    store_i64(slots + 8 * _KV_HEADS, num_kv)
    store_i64(slots + 8 * _GROUP, quotient(ffi.dim(q, 1), num_kv))
    store_i64(slots + 8 * _DIM, ffi.dim(q, 2))
    store_i64(slots + 8 * _PAGES, ffi.dim(k, 0))
    store_i64(slots + 8 * _SIZE, ffi.dim(k, 2))
    store_i64(slots + 8 * _MAX_PAGES, ffi.dim(table, 1))
    store_i64(slots + 8 * _IS_HALF, np.int64(ffi.dtype(k) == ffi.UINT16))
    store_i64(slots + 8 * _TILE_ITEMS, num_tile_items)
    for i in range(_NUM_SLOTS - _NUM_DECODE):
        store_i64(slots + 8 * (_NUM_DECODE + i), load_i64(layout + 8 * i))
    _run(frame, job)
    return 0


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    ffi.register(NAME, _handler, _attend_item)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    row_of: jax.Array,
    position: jax.Array,
    *,
    num_decode: int,
    tile: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attend each token to the pages of its own sequence.

    q         [N, H, D]      model dtype
    k, v      [P, K, S, D]   float32, or uint16 bits of bfloat16; other pages go to `xla`
    table     [B, M]         int32 page ids
    row_of    [N]            int32
    position  [N]            int32, -1 for padding
    returns   [N, H, D]      dtype of q

    Has no gradient: `xla` has.
    """
    static = {"num_decode": num_decode, "tile": tile, "scale": scale, "window": window, "soft_cap": soft_cap}
    if k.dtype not in (jnp.float32, jnp.uint16):
        return xla.attend(q, k, v, table, row_of, position, **static)
    register()
    workers = ffi.num_workers()
    layout = _layout(num_decode, tile, window, q.shape[1] // k.shape[1], q.shape[2], workers)
    call = jax.ffi.ffi_call(
        NAME,
        (
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((workers, int(layout[-1]) // 4), jnp.float32),
        ),
    )
    # Scores come out in units of ln 2, or, with a soft cap, first in units of the cap.
    factors = (scale / soft_cap, soft_cap * _LOG2E) if soft_cap else (scale * _LOG2E, 0.0)
    wide = q.astype(jnp.float32)
    out, _ = call(wide, k, v, table, row_of, position, factors=np.array(factors, np.float32), layout=layout)
    return out.astype(q.dtype)
