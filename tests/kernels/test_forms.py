"""The layout of packed matrices: records against the file formats' own numbers and the written rules."""

import dataclasses

import numpy as np
import pytest

from xjax.checkpoints.blocks import SPLITTERS, split
from xjax.checkpoints.dequantize import BLOCK_TYPES, dequantize, num_bytes
from xjax.kernels.linear.forms import FORMS, Fields, Form, int4, int8, pack, take_apart, unpack


def _random_bytes(dtype: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes(dtype, shape), np.uint8)


def _random_fields(form: Form, num_out: int, num_in: int) -> Fields:
    rng = np.random.default_rng(num_out)

    def scales() -> np.ndarray:
        kind = np.float32 if form.scale == "f32" else np.float16
        return rng.standard_normal((num_out, num_in // form.run_inputs)).astype(kind)

    def steps(width: int) -> np.ndarray:
        low, kind = (0, np.uint8) if form.has_minimum else (-128, np.int8)
        return rng.integers(low, 128, (num_out, num_in // width)).astype(kind)

    codes = rng.integers(0, 1 << form.bits, (num_out, num_in)).astype(np.uint8)
    nested = form.is_nested
    return Fields(
        codes,
        scales(),
        scales() if form.has_minimum else None,
        steps(form.group) if nested else None,
        steps(32) if nested and form.has_minimum else None,
    )


TYPES = FORMS | {"iq4_nl": FORMS["q8_0"], "q3_k": FORMS["q6_k"]}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(16, 256), (1, 256), (37, 512), (64, 1024)])
def test_unpacked_records_are_the_numbers_of_the_file(dtype: str, shape: tuple[int, int]) -> None:
    """Random bits, infinite and subnormal scales and NaN among them, to the bit."""
    data = _random_bytes(dtype, shape, shape[0])
    parts = split(data, dtype, shape[1])
    form = TYPES[dtype]
    packed = pack(form, Fields(**vars(parts)))
    assert packed.dtype == np.uint8 and packed.shape == form.shape(*shape)
    expected, found = dequantize(data, dtype, shape), unpack(form, packed, shape)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(found.view(np.uint32)[real], expected.view(np.uint32)[real])


@pytest.mark.parametrize(
    "form", [*FORMS.values(), int8(1), int8(4), int4(1, has_minimum=True), int4(4, has_minimum=False)]
)
def test_taking_apart_undoes_packing(form: Form) -> None:
    fields = _random_fields(form, 19, 512)
    found = take_apart(form, pack(form, fields), (19, 512))
    for field in dataclasses.fields(Fields):
        one, other = getattr(fields, field.name), getattr(found, field.name)
        assert (one is None) == (other is None), field.name
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("form", "num_in", "record"),
    [
        (FORMS["q8_0"], 64, 2 * (32 + 512)),
        (FORMS["q4_0"], 64, 2 * (32 + 256)),
        (FORMS["q4_1"], 64, 2 * (64 + 256)),
        (FORMS["q5_0"], 64, 2 * (32 + 320)),
        (FORMS["q5_1"], 64, 2 * (64 + 320)),
        (FORMS["q4_k"], 512, 2 * (64 + 8 * (256 + 32))),
        (FORMS["q5_k"], 512, 2 * (64 + 8 * (320 + 32))),
        (FORMS["q6_k"], 512, 2 * (32 + 8 * (384 + 32))),
        (int8(16), 512, 64 + 16 * 512),
        (int4(4, has_minimum=True), 256, 2 * (128 + 4 * 256)),
    ],
)
def test_sizes_of_records(form: Form, num_in: int, record: int) -> None:
    assert form.record_bytes(num_in) == record
    assert form.shape(33, num_in) == (3, record)
    assert form.header_bytes + form.run * form.unit_bytes == form.layout.itemsize


def test_a_block_takes_no_more_than_in_the_file_but_for_steps() -> None:
    for name, form in FORMS.items():
        in_file = 16 * num_bytes(name, (1, 1024))
        assert form.record_bytes(1024) <= in_file * 1.03, name


def _code(form: Form, record: np.ndarray, output: int, column: int) -> int:
    """The code of an output and an input, read as the contract says, bit by bit."""
    run, rest = divmod(column, form.run_inputs)
    unit, place = divmod(rest, 32)
    start = run * form.layout.itemsize + form.header_bytes + unit * form.unit_bytes
    chunk, byte = place // 4, output * 4 + place % 4
    plane = lambda j: int(record[start + 64 * j + byte])  # noqa: E731
    if form.bits == 8:
        return plane(chunk)
    code = plane(chunk // 2) >> 4 * (chunk % 2) & 15
    if form.bits == 5:
        code |= (plane(4) >> chunk & 1) << 4
    if form.bits == 6:
        code |= (plane(4 + chunk // 4) >> 2 * (chunk % 4) & 3) << 4
    return code


@pytest.mark.parametrize("form", [*FORMS.values(), int8(2), int4(2, has_minimum=True)])
def test_codes_lie_where_the_rules_say(form: Form) -> None:
    fields = _random_fields(form, 21, 512)
    data = pack(form, fields)
    for output, column in np.random.default_rng(1).integers(0, (21, 512), (200, 2)):
        found = _code(form, data[output // 16], output % 16, column)
        assert found == fields.codes[output, column], (output, column)


@pytest.mark.parametrize("dtype", ["q4_k", "q6_k"])
def test_steps_lie_behind_the_codes(dtype: str) -> None:
    form, fields = FORMS[dtype], _random_fields(FORMS[dtype], 16, 512)
    record = pack(form, fields)[0]
    assert fields.steps is not None
    for unit in range(16):
        start = unit // 8 * form.layout.itemsize + form.header_bytes + unit % 8 * form.unit_bytes
        behind = record[start + 64 * (4 if form.bits == 4 else 6) :][:32].reshape(2, 16)
        if fields.minimum_steps is not None:
            np.testing.assert_array_equal(behind, [fields.steps[:, unit], fields.minimum_steps[:, unit]])
        else:
            np.testing.assert_array_equal(behind.view(np.int8), fields.steps[:, 2 * unit : 2 * unit + 2].T)


def test_outputs_that_fill_up_have_scale_zero() -> None:
    for form in FORMS.values():
        fields = _random_fields(form, 17, 256)
        whole = unpack(form, pack(form, fields), (32, 256))
        assert whole[:17].any() and not whole[17:].any()


def test_columns_of_a_split_tensor() -> None:
    for dtype, block in BLOCK_TYPES.items():
        if dtype not in SPLITTERS:
            continue
        parts = split(_random_bytes(dtype, (3, 512)), dtype, 512)
        assert parts.codes.shape == (3, 512) and parts.codes.dtype == np.uint8
        assert parts.scales.shape == (3, 512 // block.block_size) and parts.scales.dtype == np.float16
