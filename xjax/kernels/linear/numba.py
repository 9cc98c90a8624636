"""Products of packed matrices with rows as an FFI call.

    quantize   rows of x become int8 codes, in panels of as many rows as the innermost loops take at once
    multiply   item: a run of blocks of outputs x a run of panels; weights are read where they lie

A row's bits depend on that row and the weights alone: not on the rows beside it, nor on threads. The
innermost loops are `micro`; which of them a form and a processor take stands in a table in memory, a
line for each form, filled before the first call. A compiled program names the line, no address.

    line   factor of a row's start   header bytes   unit bytes   addresses of quantize and expand
           then heights of panels, highest first, each with the address of its multiply; then 0

Importing this imports Numba.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir
from numba import njit, types

from xjax.kernels import ffi, native
from xjax.kernels.ffi import (
    DATA,
    external,
    load_i64,
    own,
    quotient,
    remainder,
    smaller,
    store_i64,
)
from xjax.kernels.linear import micro
from xjax.kernels.linear.forms import OUTPUTS, UNIT, Form

NAME = "xjax_linear_packed"
_TABLE = NAME + "_table"
_LINE = 16  # slots
_FACTOR, _HEADER, _UNIT_BYTES, _QUANTIZE, EXPAND, _FIRST_HEIGHT = range(6)
_FEW_NUMBERS = 1 << 15  # of x, which the caller quantizes alone
_LEAST_BYTES, _MOST_BYTES = 48 << 10, 256 << 10  # weights of an item; the most stay in a core's second cache
_ITEMS_EACH = 8  # items a worker, at least, where the weights allow it

# Slots of a job's own data. An item function with _ROWS_EACH > 0 quantizes, else it multiplies.
(
    _X, _W, _OUT, _PANELS, _LINE_AT, _NUM_ROWS, _NUM_OUT, _NUM_UNITS, _RUN, _PIECE, _RECORD, _HEIGHT, _LAST,
    _NUM_PANELS, _NUM_BLOCKS, _BLOCKS_EACH, _PANELS_EACH, _PANEL_RUNS, _ROWS_EACH, NUM_SLOTS,
) = range(20)  # fmt: skip

_SCALES = ("f16", "f32", "nested")
_NUM_LINES = len(micro.MACHINES) * 4 * 3 * 2 * 2
_table_address = external(_TABLE, 0, has_result=True)


def _caller(count: int) -> Any:
    """An intrinsic that calls void f(count int64) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return ffi.procedure(types.void(*[types.int64] * (count + 1)), generate)


call_five, _call_multiply = _caller(5), _caller(9)


# ---- an item ----------------------------------------------------------------------------


def _item(job, index, worker):
    if own(job, _ROWS_EACH) > 0:
        first = index * own(job, _ROWS_EACH)
        _quantize_rows(job, first, first + own(job, _ROWS_EACH))
    else:
        multiply_item(job, index)


@njit
def multiply_item(job, index):
    """One of the items of a product that `share` counts."""
    _multiply(job, quotient(index, own(job, _PANEL_RUNS)), remainder(index, own(job, _PANEL_RUNS)))


@njit
def _panel_address(job, panel):
    bytes_each = own(job, _HEIGHT) * own(job, _NUM_UNITS) * own(job, _PIECE)
    return own(job, _PANELS) + panel * bytes_each


@njit
def _height(job, panel):
    return own(job, _LAST) if panel == own(job, _NUM_PANELS) - 1 else own(job, _HEIGHT)


@njit
def _quantize_rows(job, first, stop):
    """Quantize rows first <= i < stop, and those that fill up the last panel: they repeat the last row."""
    num_in, num_rows = own(job, _NUM_UNITS) * UNIT, own(job, _NUM_ROWS)
    for row in range(first, smaller(stop, padded_rows(job))):
        quantize_row(job, row, own(job, _X) + 4 * smaller(row, num_rows - 1) * num_in)


@njit
def padded_rows(job):
    """Rows of all panels: those of x, and repetitions of the last that fill up the last panel."""
    return (own(job, _NUM_PANELS) - 1) * own(job, _HEIGHT) + own(job, _LAST)


@njit
def weight_bytes(job):
    """Bytes of the records."""
    return own(job, _NUM_BLOCKS) * own(job, _RECORD)


@njit
def out_row(job, row):
    """Address of a row of the result."""
    return own(job, _OUT) + 4 * row * own(job, _NUM_OUT)


@njit
def quantize_row(job, row, source):
    """Quantize the numbers at `source` as one of the rows."""
    line, panel = own(job, _LINE_AT), quotient(row, own(job, _HEIGHT))
    place = _panel_address(job, panel) + (row - panel * own(job, _HEIGHT)) * own(job, _PIECE)
    stride = _height(job, panel) * own(job, _PIECE)
    call_five(
        load_i64(line + 8 * _QUANTIZE), source, place, stride, own(job, _NUM_UNITS),
        load_i64(line + 8 * _FACTOR),
    )  # fmt: skip


@njit
def _multiply(job, block_run, panel_run):
    """Multiply a run of blocks with a run of panels."""
    first = block_run * own(job, _BLOCKS_EACH)
    num_blocks = smaller(own(job, _BLOCKS_EACH), own(job, _NUM_BLOCKS) - first)
    begin = panel_run * own(job, _PANELS_EACH)
    num_runs = quotient(own(job, _NUM_UNITS), own(job, _RUN))
    num_out, column = own(job, _NUM_OUT), OUTPUTS * first
    for panel in range(begin, smaller(begin + own(job, _PANELS_EACH), own(job, _NUM_PANELS))):
        row = panel * own(job, _HEIGHT)
        height = _height(job, panel)
        _call_multiply(
            _find(own(job, _LINE_AT), height), own(job, _W) + first * own(job, _RECORD),
            _panel_address(job, panel), own(job, _OUT) + 4 * (row * num_out + column), num_blocks, num_runs,
            own(job, _RUN), 4 * num_out, num_out - column, smaller(own(job, _NUM_ROWS) - row, height),
        )  # fmt: skip


@njit
def line_address(index):
    """Where a line of the table is."""
    return _table_address() + 8 * _LINE * index


@njit
def record_bytes(line, num_units, num_runs):
    """Bytes of a record by what a line says; 0 where the line is empty."""
    return num_runs * load_i64(line + 8 * _HEADER) + num_units * load_i64(line + 8 * _UNIT_BYTES)


@njit
def _find(line, height):
    """Address of the product for panels of a height."""
    place = line + 8 * _FIRST_HEIGHT
    while load_i64(place) != height:
        place += 16
    return load_i64(place + 8)


@njit
def _fitting(line, rows):
    """The lowest height that takes so many rows."""
    place = line + 8 * _FIRST_HEIGHT
    while load_i64(place + 16) >= rows:
        place += 16
    return load_i64(place)


_run = ffi.pool(NAME)


# ---- the call ---------------------------------------------------------------------------


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 2 or ffi.num_attributes(frame) != 1 or ffi.attribute_size(frame, 0) != 4:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "linear_packed takes rows, records and a layout")
    x, w, out, panels = (
        ffi.argument(frame, 0),
        ffi.argument(frame, 1),
        ffi.result(frame, 0),
        ffi.result(frame, 1),
    )
    if ffi.dtype(x) != ffi.FLOAT32 or ffi.dtype(out) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "linear_packed takes float32 rows")
    if ffi.rank(x) != 2 or ffi.rank(w) != 2 or ffi.rank(out) != 2 or ffi.rank(panels) != 1:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "linear_packed takes rows [N, In] and records [Nb, R]")
    layout = ffi.attribute(frame, 0)
    workers, num_rows = load_i64(layout + 8), ffi.dim(x, 0)
    if num_rows == 0 or ffi.dim(w, 0) == 0:
        return 0
    job = ffi.make_job(0, workers, NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "linear_packed has no memory for its task")
    panel_bytes = describe(job, w, num_rows, ffi.dim(x, 1), ffi.dim(out, 1), layout)
    if panel_bytes < 0 or panel_bytes > ffi.dim(panels, 0) or ffi.dim(out, 0) != num_rows:
        ffi.release(job)
        return ffi.error(
            frame,
            ffi.INVALID_ARGUMENT,
            "linear_packed's rows do not fit its records, or their form is not prepared",
        )
    place(job, ffi.data(x), ffi.data(out), ffi.data(panels))
    padded = padded_rows(job)
    if padded * ffi.dim(x, 1) <= _FEW_NUMBERS:
        _quantize_rows(job, 0, padded)
    else:
        failed = _quantize_all(frame, job, padded, workers)
        if failed:
            ffi.release(job)
            return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "linear_packed has no memory for its task")
    store_i64(job + 24, share(job, workers))
    _run(frame, job)
    return 0


@njit
def describe(job, w, num_rows, num_in, num_out, layout):
    """Put a product into a job's slots; returns the bytes of its panels, or -1 where something does not fit.

    w        buffer of the records
    layout   address of what `layout_of` gives
    """
    line, run, piece = line_address(load_i64(layout)), load_i64(layout + 16), load_i64(layout + 24)
    num_units, slots = quotient(num_in, UNIT), job + DATA
    num_runs, num_blocks = quotient(num_units, run), quotient(num_out + OUTPUTS - 1, OUTPUTS)
    record = record_bytes(line, num_units, num_runs)
    if load_i64(line + 8 * _FIRST_HEIGHT) == 0 or num_in != num_runs * run * UNIT:
        return -1
    if ffi.rank(w) != 2 or ffi.dim(w, 1) != record or ffi.dim(w, 0) != num_blocks:
        return -1
    height = _fitting(line, num_rows)
    num_panels = quotient(num_rows + height - 1, height)
    store_i64(slots + 8 * _W, ffi.data(w))
    store_i64(slots + 8 * _LINE_AT, line)
    store_i64(slots + 8 * _NUM_ROWS, num_rows)
    store_i64(slots + 8 * _NUM_OUT, num_out)
    store_i64(slots + 8 * _NUM_UNITS, num_units)
    store_i64(slots + 8 * _RUN, run)
    store_i64(slots + 8 * _PIECE, piece)
    store_i64(slots + 8 * _RECORD, record)
    store_i64(slots + 8 * _HEIGHT, height)
    store_i64(slots + 8 * _LAST, _fitting(line, num_rows - (num_panels - 1) * height))
    store_i64(slots + 8 * _NUM_PANELS, num_panels)
    store_i64(slots + 8 * _NUM_BLOCKS, num_blocks)
    store_i64(slots + 8 * _ROWS_EACH, 0)
    return padded_rows(job) * num_units * piece


@njit
def place(job, x, out, panels):
    """Put a product's addresses into a job's slots."""
    store_i64(job + DATA + 8 * _X, x)
    store_i64(job + DATA + 8 * _OUT, out)
    store_i64(job + DATA + 8 * _PANELS, panels)


@njit
def _quantize_all(frame, job, padded, workers):
    """Quantize rows with the pool's threads; whether memory was out."""
    each = ffi.larger(quotient(_FEW_NUMBERS, own(job, _NUM_UNITS) * UNIT), 1)
    first = ffi.make_job(quotient(padded + each - 1, each), workers, NUM_SLOTS)
    if first == 0:
        return True
    for i in range(NUM_SLOTS):
        store_i64(first + DATA + 8 * i, own(job, i))
    store_i64(first + DATA + 8 * _ROWS_EACH, each)
    _run(frame, first)
    return False


@njit
def share(job, workers):
    """Cut a product into items, enough for all threads, each with enough to do; returns how many."""
    num_blocks, num_panels, record = own(job, _NUM_BLOCKS), own(job, _NUM_PANELS), own(job, _RECORD)
    bytes_each = quotient(num_blocks * record, _ITEMS_EACH * workers)
    bytes_each = smaller(ffi.larger(bytes_each, _LEAST_BYTES), _MOST_BYTES)
    blocks_each = ffi.larger(quotient(bytes_each, record), 1)
    block_runs = quotient(num_blocks + blocks_each - 1, blocks_each)
    panel_runs = quotient(_ITEMS_EACH * workers + block_runs - 1, block_runs)
    panels_each = ffi.larger(quotient(num_panels, panel_runs), 1)
    panel_runs = quotient(num_panels + panels_each - 1, panels_each)
    slots = job + DATA
    store_i64(slots + 8 * _BLOCKS_EACH, blocks_each)
    store_i64(slots + 8 * _PANELS_EACH, panels_each)
    store_i64(slots + 8 * _PANEL_RUNS, panel_runs)
    return block_runs * panel_runs


# ---- making it known --------------------------------------------------------------------


def _line(form: Form, machine: str) -> int:
    """Index of the table's line for a form on a machine."""
    index = micro.MACHINES.index(machine)
    for choices, value in (
        ((4, 5, 6, 8), form.bits),
        (_SCALES, form.scale),
        ((False, True), form.has_minimum),
        ((UNIT, UNIT // 2), form.group),
    ):
        index = index * len(choices) + choices.index(value)
    return index


def lines() -> Any:
    """The table in memory, which must be there when code that reads it is compiled."""
    return native.table(_TABLE, _LINE * _NUM_LINES)


def prepare(form: Form, machine: str | None = None) -> int:
    """Compile what a form needs or load it from the disk; returns its line in the table.

    machine   one of micro.MACHINES; None: the best one here
    """
    best = micro.supported()[0]
    table = lines()
    ffi.register(NAME, _handler, _item)
    machine = machine or best
    index = _line(form, machine)
    start = _LINE * index
    if table[start + _FIRST_HEIGHT] == 0:
        heights = micro.heights(machine)

        def build(module: ir.Module) -> None:
            micro.quantize(module, "quantize", UNIT // form.group)
            micro.expand(module, "expand", form, machine)
            for height in heights:
                micro.multiply(module, f"multiply_{height}", form, height, machine)

        names = ["quantize", "expand", *(f"multiply_{height}" for height in heights)]
        kind = f"{form.bits}_{form.group}_{form.scale}_{'minimum' if form.has_minimum else 'none'}"
        target = native.processor(is_plain=machine == "plain")
        found = native.functions(f"{NAME}_{kind}_{machine}", names, build, target)
        # The first height last: with it the line is whole.
        for i, height in reversed(list(enumerate(heights))):
            table[start + _FIRST_HEIGHT + 2 * i + 1] = found[f"multiply_{height}"]
            if i:
                table[start + _FIRST_HEIGHT + 2 * i] = height
        table[start + _QUANTIZE], table[start + EXPAND] = found["quantize"], found["expand"]
        table[start + _HEADER], table[start + _UNIT_BYTES] = form.header_bytes, form.unit_bytes
        table[start + _FACTOR] = -form.offset
        table[start + _FIRST_HEIGHT] = heights[0]
    return index


def linear_packed(
    x: jax.Array, data: jax.Array, form: Form, num_out: int, machine: str | None = None
) -> jax.Array:
    """Multiply rows, as int8 codes, by the transposed weights.

    x        [N, In]       floating point
    data     [Nb, record]  uint8
    returns  [N, Out]      dtype of x
    machine  one of micro.MACHINES; None: the best one here
    """
    layout = layout_of(form, machine)
    panels = jax.ShapeDtypeStruct((most_panel_bytes(form, *x.shape),), jnp.uint8)
    call: Any = jax.ffi.ffi_call(NAME, (jax.ShapeDtypeStruct((x.shape[0], num_out), jnp.float32), panels))
    return call(x.astype(jnp.float32), data, layout=layout)[0].astype(x.dtype)


def layout_of(form: Form, machine: str | None = None) -> np.ndarray:
    """What a call is told of a form: its line in the table, most threads, units of a run, a piece's bytes."""
    workers = ffi.num_workers()
    return np.array([prepare(form, machine), workers, form.run, micro.piece_bytes(form)], np.int64)


def most_panel_bytes(form: Form, num_rows: int, num_in: int) -> int:
    """Bytes of the panels of rows, of which at most 3 fill up the last one."""
    return (num_rows + 3) * num_in // UNIT * micro.piece_bytes(form)
