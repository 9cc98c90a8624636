"""How packed weight matrices lie in memory: codes and scales of 16 outputs side by side, in numpy.

    data [Nb, record] uint8      a record for each block of 16 outputs, contiguous
    record                       runs of inputs, one behind the other
      run                        scales of the 16 outputs, then their minimums
                                 for each 32 inputs, a unit:
        unit                     codes; steps, 16 a group of inputs; steps of the minimums

A plane is 64 bytes, 4 inputs of each of 16 outputs: what one integer dot of 16 lanes reads. A unit has
eight chunks of 4 inputs:

    8 bits   8 planes, a chunk each
    4 bits   4 planes, plane j with chunk 2j in low and chunk 2j + 1 in high halves of bytes
    5 bits   those 4, and a plane whose bit c of a byte is bit 4 of the code in chunk c
    6 bits   those 4, and 2 planes: bits 2c and 2c + 1 of plane h are bits 4 and 5 of chunk 4h + c

Knows no files, and neither jax nor numba: what reads and writes records takes the layout from here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

OUTPUTS = 16  # of a block
UNIT = 32  # inputs of a unit
PLANE = 64  # bytes
_CHUNKS = 8  # of a unit
_NUM_PLANES = {4: 4, 5: 5, 6: 6, 8: 8}

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Form:
    """What the records of a packed matrix hold.

    bits          of a code, kept unsigned
    group         inputs that share a scale within a unit: 32 or 16
    scale         "f16", "f32", or "nested": a float16 for a run, times a step of 8 bits for each group
    has_minimum   value = code * scale + minimum; else (code - offset) * scale
    run           units that share a scale of the header

    nested: the minimum is -(its scale * its step); steps are signed where there is no minimum.
    """

    name: str
    bits: int
    group: int = UNIT
    scale: Literal["f16", "f32", "nested"] = "f16"
    has_minimum: bool = False
    run: int = 1

    @property
    def offset(self) -> int:
        """The code that stands for zero."""
        return 0 if self.has_minimum else 1 << (self.bits - 1)

    @property
    def is_nested(self) -> bool:
        """Whether each group has a step of its own."""
        return self.scale == "nested"

    @cached_property
    def unit(self) -> np.dtype[Any]:
        """A unit as numpy has it: fields "codes", and where they are "steps" and "minimum_steps"."""
        fields: list[Any] = [("codes", "u1", (_NUM_PLANES[self.bits], PLANE))]
        if self.is_nested:
            kind = "u1" if self.has_minimum else "i1"
            fields.append(("steps", kind, (UNIT // self.group, OUTPUTS)))
            if self.has_minimum:
                fields.append(("minimum_steps", "u1", (OUTPUTS,)))
        return np.dtype(fields)

    @cached_property
    def layout(self) -> np.dtype[Any]:
        """A run as numpy has it: fields "scales", where there are "minimums", and "units"."""
        kind = "<f4" if self.scale == "f32" else "<f2"
        fields: list[Any] = [("scales", kind, (OUTPUTS,))]
        if self.has_minimum:
            fields.append(("minimums", kind, (OUTPUTS,)))
        return np.dtype([*fields, ("units", self.unit, (self.run,))])

    @property
    def header_bytes(self) -> int:
        """Bytes of a run before its first unit."""
        return self.layout.itemsize - self.run * self.unit.itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit.itemsize

    def field(self, name: str) -> tuple[np.dtype[Any], int]:
        """Type and first byte of a field, of those of the unit within it, of others within a run."""
        fields: Any = self.unit.fields if name in (self.unit.names or ()) else self.layout.fields
        return fields[name][0], fields[name][1]

    @property
    def run_inputs(self) -> int:
        """Inputs of a run."""
        return self.run * UNIT

    def record_bytes(self, num_in: int) -> int:
        """Bytes of a record; `num_in` is a multiple of `run_inputs`."""
        assert num_in % self.run_inputs == 0, (self, num_in)
        return num_in // self.run_inputs * self.layout.itemsize

    def shape(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Shape of the packed matrix."""
        return -(-num_out // OUTPUTS), self.record_bytes(num_in)


# Those of the GGUF types of the same names. Every other 4-bit or 8-bit matrix is `int4` or `int8`.
FORMS = {
    form.name: form
    for form in (
        Form("q8_0", 8),
        Form("q4_0", 4),
        Form("q4_1", 4, has_minimum=True),
        Form("q5_0", 5),
        Form("q5_1", 5, has_minimum=True),
        Form("q4_k", 4, scale="nested", has_minimum=True, run=8),
        Form("q5_k", 5, scale="nested", has_minimum=True, run=8),
        Form("q6_k", 6, group=16, scale="nested", run=8),
    )
}


def int8(run: int) -> Form:
    """The form of codes of 8 bits with a float32 scale for each `run` units."""
    return Form("int8", 8, scale="f32", run=run)


def int4(run: int, *, has_minimum: bool) -> Form:
    """The form of codes of 4 bits with a float32 scale, and maybe a minimum, for each `run` units."""
    return Form("int4", 4, scale="f32", has_minimum=has_minimum, run=run)


@dataclass(frozen=True, eq=False)
class Fields:
    """A matrix taken apart, as a file or `unpack` has it, by output.

    codes           [Out, In]          uint8, unsigned
    scales          [Out, In / run]    float16 or float32, as the form says
    minimums        [Out, In / run]    likewise, or None
    steps           [Out, In / group]  uint8 or int8, or None
    minimum_steps   [Out, In / 32]     uint8, or None
    """

    codes: Bytes
    scales: Array
    minimums: Array | None = None
    steps: Array | None = None
    minimum_steps: Array | None = None


def pack(form: Form, fields: Fields) -> Bytes:
    """Lay a matrix into records; the outputs that fill up the last block have scale 0.

    returns  [Nb, record]  uint8, fresh
    """
    num_out, num_in = fields.codes.shape
    data = np.zeros(form.shape(num_out, num_in), np.uint8)
    put(form, fields, np.arange(num_out), data)
    return data


def put(form: Form, fields: Fields, rows: npt.NDArray[np.intp], data: Bytes) -> None:
    """Lay some outputs of a matrix into its records; safe in several threads for different outputs.

    fields   of the outputs alone
    rows     [outputs]      where each of them goes
    data     [Nb, record]   uint8, contiguous, written
    """
    runs, count = data.view(form.layout), len(rows)  # [Nb, R]
    block, lane = np.divmod(rows, OUTPUTS)
    runs["scales"][block, :, lane] = fields.scales
    if fields.minimums is not None:
        runs["minimums"][block, :, lane] = fields.minimums
    units = runs["units"]  # [Nb, R, run]
    if fields.steps is not None:
        steps = fields.steps.reshape(count, *units.shape[1:], -1)
        units["steps"][block, :, :, :, lane] = steps
    if fields.minimum_steps is not None:
        units["minimum_steps"][block, :, :, lane] = fields.minimum_steps.reshape(count, *units.shape[1:])
    # Words of 4 inputs: the planes of an output are a word each.
    places = units["codes"].view(np.uint32)  # [Nb, R, run, planes, 16]
    chunks, first = np.ascontiguousarray(fields.codes).view(np.uint32).reshape(count, -1, _CHUNKS), 0
    for planes in _planes(chunks, form.bits):
        end = first + planes.shape[2]
        places[block, :, :, first:end, lane] = planes.reshape(count, *units.shape[1:], -1)
        first = end


def _planes(chunks: npt.NDArray[np.uint32], bits: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Put the codes of eight chunks [outputs, units, 8], words of 4 codes, into planes, some at a time."""
    if bits == 8:
        yield chunks
        return
    low = chunks & np.uint32(0x0F0F_0F0F)
    yield low[:, :, ::2] | low[:, :, 1::2] << np.uint32(4)
    if bits == 4:
        return
    high = chunks >> np.uint32(4) & np.uint32(0x0101_0101 if bits == 5 else 0x0303_0303)
    high = high.reshape(*high.shape[:2], bits - 4, -1)
    joined = high[..., 0].copy()
    for i in range(1, high.shape[3]):
        joined |= high[..., i] << np.uint32(i * (bits - 4))
    yield joined


def _chunks(planes: Bytes, bits: int) -> Bytes:
    """Take the codes of eight chunks [..., 8, 64] out of planes [..., planes, 64]."""
    if bits == 8:
        return planes
    low = planes[..., :4, :]
    chunks = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=-2)
    chunks = chunks.reshape(*planes.shape[:-2], _CHUNKS, PLANE)
    if bits == 4:
        return chunks
    width = bits - 4
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    high = (planes[..., 4:, None, :] >> shifts) & np.uint8((1 << width) - 1)
    return chunks | high.reshape(chunks.shape) << np.uint8(4)


def take_apart(form: Form, data: Bytes, shape: Sequence[int]) -> Fields:
    """Undo `pack`.

    data   [Nb, record]   uint8
    shape  (Out, In)
    """
    num_out, num_in = shape
    assert data.shape == form.shape(num_out, num_in), (form, data.shape, shape)
    runs = np.ascontiguousarray(data).view(form.layout)
    units = runs["units"]

    def by_output(values: Array) -> Array:
        """[Nb, ..., 16] -> [Out, columns]"""
        columns = values.reshape(len(data), -1, OUTPUTS).swapaxes(1, 2)
        return columns.reshape(-1, columns.shape[2])[:num_out]

    codes = _chunks(units["codes"], form.bits).reshape(len(data), -1, OUTPUTS, 4)
    codes = codes.swapaxes(1, 2).reshape(-1, num_in)[:num_out]
    names = form.unit.names or ()
    return Fields(
        codes,
        by_output(runs["scales"]),
        by_output(runs["minimums"]) if form.has_minimum else None,
        by_output(units["steps"]) if "steps" in names else None,
        by_output(units["minimum_steps"]) if "minimum_steps" in names else None,
    )


def numbers(form: Form, fields: Fields) -> Floats:
    """Turn a matrix that was taken apart into numbers, rounded as the file formats have it.

    returns  [Out, In]  float32
    """
    num_out, num_in = fields.codes.shape
    signed = fields.codes.astype(np.int16) - np.int16(form.offset)
    with np.errstate(all="ignore"):  # a file may hold any bits; NaN and infinity pass through
        scales, minimums = fields.scales.astype(np.float32), fields.minimums
        minimums = None if minimums is None else minimums.astype(np.float32)
        if fields.steps is not None:
            per_run = fields.steps.shape[1] // scales.shape[1]
            scales = np.repeat(scales, per_run, axis=1) * fields.steps.astype(np.float32)
        if minimums is not None and fields.minimum_steps is not None:
            minimums = np.repeat(minimums, form.run, axis=1) * fields.minimum_steps.astype(np.float32)
            minimums = -minimums
        values = signed.reshape(*scales.shape, -1).astype(np.float32) * scales[:, :, None]
        if minimums is not None:
            values += minimums[:, :, None]
    return values.reshape(num_out, num_in)


def unpack(form: Form, data: Bytes, shape: Sequence[int]) -> Floats:
    """Turn records into numbers.

    data     [Nb, record]  uint8
    shape    (Out, In)
    returns  [Out, In]     float32, those that the file's own type stands for
    """
    return numbers(form, take_apart(form, data, shape))
