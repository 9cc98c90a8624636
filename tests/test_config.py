"""Options refuse what is out of range by their flag; shapes and groups follow from numbers alone."""

from pathlib import Path

import pytest

from xjax.config import EngineOptions, PagedLayer, RecurrentLayer, StepShapes, cache_home, page_groups
from xjax.errors import LoadError


@pytest.mark.parametrize(("name", "value"), [
    ("max_num_seqs", 0), ("max_num_seqs", 1.0), ("max_num_seqs", True), ("max_model_len", 1),
    ("prefill_chunk_size", 15), ("kv_fraction", 0), ("kv_fraction", 1.1), ("kv_fraction", float("nan")),
    ("kv_fraction", "half"), ("num_pages", 1), ("page_size", 0), ("dtype", "int8"), ("kvcache_dtype", "fp8"),
    ("kernels", "fast"), ("threads", 0), ("preemption_mode", "drop"), ("cpu_mem_fold", -1.0),
    ("disable_prefix_cache", 1), ("max_queue", 0),
    ("generation_config", "some"), ("seed", -1),
])  # fmt: skip
def test_an_option_out_of_range_is_named(name, value):
    with pytest.raises(LoadError, match="--" + name.replace("_", "-")):
        EngineOptions(**{name: value})


def test_names_as_other_engines_have_them():
    options = EngineOptions.from_mapping({"max_num_batched_tokens": 64, "block_size": 8})
    assert (options.prefill_chunk_size, options.page_size) == (64, 8)
    with pytest.raises(LoadError, match="given twice"):
        EngineOptions.from_mapping({"block_size": 8, "page_size": 8})
    with pytest.raises(LoadError, match="unknown option 'max_sequences'; known: .*max_num_seqs"):
        EngineOptions.from_mapping({"max_sequences": 8})


@pytest.mark.parametrize("seqs", [1, 3, 32, 256])
@pytest.mark.parametrize("chunk", [16, 100, 512, 2048])
@pytest.mark.parametrize("length", [2, 40, 8192])
def test_shapes_rise_and_hold_what_may_come(seqs, chunk, length):
    shapes = StepShapes.plan(max_num_seqs=seqs, prefill_chunk_size=chunk, max_model_len=length)
    assert shapes.decode_rows[-1] == seqs and list(shapes.decode_rows) == sorted(set(shapes.decode_rows))
    tokens = [size for size, _ in shapes.prefill]
    assert tokens == sorted(set(tokens)) and tokens[-1] >= min(chunk, length)
    assert all(size % tile == 0 for size, tile in shapes.prefill)
    ratios = [size // tile for size, tile in shapes.prefill]
    assert ratios == sorted(ratios)
    assert len(shapes.decode_rows) + len(shapes.prefill) <= 10
    # One sequence with every pair it can have must fit: distinct tokens, biases, bans.
    assert shapes.num_pairs >= length + 300 + 300


def test_layers_of_one_width_share_a_group():
    near, far, state = PagedLayer(1, 8, window=4), PagedLayer(1, 8), RecurrentLayer(1, 8, 8)
    groups = page_groups((near, far, state, PagedLayer(2, 4, window=9), near))
    assert [(group.window, group.layer_ids) for group in groups] == [(None, (1,)), (4, (0, 4)), (9, (3,))]


def test_the_folder_of_what_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XJAX_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.delenv("XJAX_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "xjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == Path(tmp_path, ".cache", "xjax")
