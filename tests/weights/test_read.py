"""An array made in parts equals one made of whole tensors; parts are small, and together cover it."""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sources import ROOT
from xjax.checkpoints.checkpoint import TensorView
from xjax.checkpoints.tensor import MappedFile
from xjax.state.mesh import ParamSpec
from xjax.weights import read
from xjax.weights.fuse import fuse_qkv, interleave, shift, stack
from xjax.weights.plan import LeafPlan
from xjax_server.bench.loading.files import Shape, write_model

pytestmark = pytest.mark.device

QKV = partial(fuse_qkv, num_kv_heads=2, head_dim=8)
COPIES = partial(fuse_qkv, num_kv_heads=4, head_dim=8, pairs=0, copies=2)
# name -> shape of the array, shapes of its tensors, how they are put together, at least so many parts
PLANS = {
    "embedding": ((40, 6), [(40, 6)], stack, 10),
    "gate and up": ((20, 6), [(10, 6), (10, 6)], stack, 6),
    "gate and up of two devices": ((20, 6), [(10, 6), (10, 6)], partial(interleave, blocks=2), 6),
    "gate over up of two devices": ((20, 6), [(20, 6)], partial(interleave, blocks=2), 5),
    "q, k, v of four devices": ((96, 6), [(32, 6), (16, 6), (16, 6)], COPIES, 1),
    "q, k, v": ((64, 6), [(32, 6), (16, 6), (16, 6)], partial(QKV, pairs=0), 16),
    "q, k, v, pairs": ((64, 6), [(32, 6), (16, 6), (16, 6)], partial(QKV, pairs=8), 16),
    "q, k, v, some pairs, one tensor": ((64, 6), [(64, 6)], partial(QKV, pairs=4), 16),
    "experts": ((3, 10, 6), [(3, 10, 6)], stack, 8),
    "bias": ((64,), [(32,), (16,), (16,)], partial(QKV, pairs=8), 1),
    "norm": ((6,), [(6,)], partial(shift, offset=1.0), 1),
    "row longer than a part": ((3, 100), [(3, 100)], stack, 3),
}


def plan_of(name, folder, dtype="<f4"):
    shape, shapes, fuse, _ = PLANS[name]
    values = np.random.default_rng(0).standard_normal(sum(map(np.prod, shapes)), np.float32)
    (folder / "data").write_bytes(b"xx" + values.tobytes())  # not aligned, as in safetensors
    mapped, start, views = MappedFile(folder / "data"), 2, []
    for number, one in enumerate(shapes):
        views.append(TensorView(f"t{number}", one, "float32", "data", mapped, start))
        start += views[-1].num_bytes
    return LeafPlan(ParamSpec(shape, (None,) * len(shape)), tuple(views), fuse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANS)
def test_parts_in_any_order_make_the_array(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "PART", 24)
    monkeypatch.setattr(read, "SLAB", 12)
    plan = plan_of(name, tmp_path)
    wanted = np.empty(plan.spec.shape, np.float32)
    plan.fuse(wanted, [view.read() for view in plan.views])
    out = np.full(plan.spec.shape, np.nan, jnp.dtype(dtype))
    parts = list(read.parts_of(plan, out))
    assert len(parts) >= PLANS[name][3]
    random.Random(0).shuffle(parts)
    for part in parts:
        part()
    np.testing.assert_array_equal(out, wanted.astype(out.dtype))


def test_bfloat16_is_copied_and_float32_rounded_to_even(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, 4 * 600, np.uint8)
    (tmp_path / "data").write_bytes(values.tobytes())
    mapped = MappedFile(tmp_path / "data")
    copied = np.empty((4, 300), jnp.bfloat16)
    TensorView("x", (4, 300), "bfloat16", "data", mapped, 0).read_into(copied)
    assert copied.tobytes() == values.tobytes()
    numbers = np.random.default_rng(0).standard_normal(600, np.float32)
    (tmp_path / "numbers").write_bytes(numbers.tobytes())
    rounded = np.empty((2, 300), jnp.bfloat16)
    TensorView("x", (2, 300), "float32", "numbers", MappedFile(tmp_path / "numbers"), 0).read_into(rounded)
    bits = numbers.view(np.uint32).astype(np.uint64)
    wanted = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(rounded.view(np.uint16).reshape(-1), wanted)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak of a process")
@pytest.mark.parametrize("form", ["safetensors-f32", "gguf-q8_0"])
def test_peak_memory(form, tmp_path):
    """Beside the parameters, 134 MB of them in one array, loading takes next to nothing."""
    shape = Shape(layers=1, embed=1024, ffn=2048, heads=16, kv_heads=4, vocab=1 << 16)
    path = write_model(tmp_path, form, shape)
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_load.py"), str(path), "bfloat16"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["parameter_bytes"] > found["largest_bytes"] == 2 << 26
    taken = found["peak_bytes"] - found["before_bytes"] - found["parameter_bytes"]
    assert taken < 100e6
