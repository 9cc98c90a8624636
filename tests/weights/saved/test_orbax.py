"""Converted models: every leaf comes back as it was, where and in the dtype that is asked for."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import families, quantized
from tests.golden.checkpoints import write_folder, write_gguf
from tests.golden.recipe import CASES, Case
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.saved import (
    MANIFEST,
    SavedModel,
    describe_files,
    read_manifest,
    seal,
    write_manifest,
)
from xjax.errors import LoadError
from xjax.models.layers import Params
from xjax.models.registry import supported
from xjax.state.mesh import make_mesh
from xjax.state.quantized import QuantizedArray, quantize, spread
from xjax.weights.convert import convert
from xjax.weights.load import load_params, read_config
from xjax.weights.saved import orbax as orbax_form
from xjax.weights.saved.orbax import name_arrays, restore_params, save_arrays
from xjax.weights.saved.plain import to_plain

pytestmark = pytest.mark.device


def load(path, dtype="float32", **options):
    checkpoint = open_checkpoint(path)
    family, config = read_config(checkpoint)
    return config, load_params(checkpoint, family, config, dtype=jnp.dtype(dtype), **options)


def assert_identical(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A folder with windows, two rotary bases and norms that are float32 by their spec; converted."""
    folder = tmp_path_factory.mktemp("gemma")
    source = write_folder(CASES["gemma_tied"], folder / "source")
    return source, convert(source, folder / "saved", dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folder_comes_back_bit_for_bit(dtype, tmp_path):
    source = write_folder(CASES["llama_mha_biases"], tmp_path / "source")
    config, params = load(source, dtype)
    saved_config, saved = load(convert(source, tmp_path / "saved", dtype=dtype), dtype)
    assert saved_config == config
    assert_identical(saved, params)


def test_a_path_that_begins_with_dots(tmp_path, monkeypatch):
    source = write_folder(CASES["llama_tied"], tmp_path / "source")
    _, params = load(source, "float32")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(Path("../source"), Path("../saved"), dtype="float32")
    assert_identical(load(Path("../saved"), "float32")[1], params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_llama3", "gemma_tied"])
def test_gguf_comes_back_bit_for_bit(name, dtype, tmp_path):
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    case = dataclasses.replace(CASES[name], changes={**CASES[name].changes, **changes})
    source = write_gguf(case, tmp_path / "m.gguf", quantize=gguf.GGMLQuantizationType.Q8_0)
    config, params = load(source, dtype)
    saved_config, saved = load(convert(source, tmp_path / "saved", dtype=dtype), dtype)
    assert saved_config == config
    assert_identical(saved, params)


@pytest.mark.parametrize(("saved", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_dtype_is_that_of_the_source(saved, wanted, tmp_path):
    """Cast at restore; a norm that its spec has in float32 stays so."""
    source = write_folder(CASES["gemma_tied"], tmp_path / "source")
    _, found = load(convert(source, tmp_path / "saved", dtype=saved), wanted)
    expected = jax.tree.map(lambda x: x, load(source, saved)[1])
    specs = jax.tree.map(lambda x: x.dtype, load(source, wanted)[1])
    assert_identical(found, jax.tree.map(lambda x, dtype: x.astype(dtype), expected, specs))
    assert found.layers[0].attention.norm.dtype == jnp.float32
    if saved == "float32":
        assert_identical(found, load(source, wanted)[1])


def test_shards_are_slices(tmp_path):
    case = Case("llama_tied", {"num_attention_heads": 8, "num_key_value_heads": 4})
    folder = convert(write_folder(case, tmp_path / "source"), tmp_path / "saved")
    config, params = load(folder)
    family, _ = read_config(open_checkpoint(folder))
    mesh = make_mesh(jax.devices()[:4])
    shardings = family.shardings(config, mesh)
    _, placed = load(folder, sharding=shardings)
    assert_identical(placed, params)
    num_split = 0
    for leaf, sharding, whole in zip(*map(jax.tree.leaves, (placed, shardings, params)), strict=True):
        assert leaf.sharding == sharding
        num_split += not leaf.is_fully_replicated
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])
    assert num_split > 4


def test_one_device_for_all(gemma):
    device = jax.devices()[2]
    for sharding in (device, jax.sharding.SingleDeviceSharding(device)):
        _, params = load(gemma[1], sharding=sharding)
        assert {leaf.devices() == {device} for leaf in jax.tree.leaves(params)} == {True}


# ---- codes ---------------------------------------------------------------------------------------


def _random_codes(shape, kind, group, *, with_zeros=False, with_order=False, seed=0) -> QuantizedArray:
    rng = np.random.default_rng([seed, *shape])
    num_out, num_in = shape
    codes = {
        "int4": lambda: rng.integers(0, 256, (num_out, num_in // 2), np.uint8),
        "float8_e4m3fn": lambda: rng.integers(0, 127, shape, np.uint8).view(jnp.float8_e4m3fn),
    }[kind]()
    groups = (num_out, num_in // group)
    return QuantizedArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(rng.uniform(0.01, 0.1, groups).astype(np.float32)),
        zeros=jnp.asarray(rng.integers(-8, 8, groups, np.int8)) if with_zeros else None,
        order=jnp.asarray(rng.permutation(num_in).astype(np.int32)) if with_order else None,
        kind=f"{kind}_{group}",
        shape=shape,
    )


def _quantized(params: Params) -> Params:
    """Codes in place of some matrices: of every dtype, with and without each thing that may go with them."""
    first, second = params.layers[:2]
    attention, mlp = first.attention, first.feed_forward
    layers = (
        first.replace(
            attention=attention.replace(
                qkv=_random_codes(attention.qkv.shape, "int4", 16, with_zeros=True),
                o=_random_codes(attention.o.shape, "float8_e4m3fn", 16, with_order=True),
            ),
            feed_forward=mlp.replace(gate_up=quantize(mlp.gate_up, symmetric=False)),
        ),
        second.replace(feed_forward=second.feed_forward.replace(down=quantize(mlp.down, "int8"))),
        *params.layers[2:],
    )
    return params.replace(layers=layers)


def _save(params: Params, config, family, folder) -> SavedModel:
    arrays, quantized = name_arrays(params)
    placed = save_arrays(arrays, folder, where="here")
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    saved = SavedModel(
        kind="hf", architecture="LlamaForCausalLM", family=family.name, config=to_plain(config),
        dtype="float32", source="", arrays=placed, quantized=quantized, files=describe_files(folder, names),
    )  # fmt: skip
    write_manifest(folder, saved)
    return read_manifest(folder)


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """(family, config, parameters with codes, the manifest they were saved under, its folder)."""
    folder = tmp_path_factory.mktemp("codes")
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    source = write_folder(Case("llama_tied", changes), folder / "source")
    config, params = load(source)
    family, _ = read_config(open_checkpoint(source))
    params = _quantized(params)
    (folder / "saved").mkdir()
    return family, config, params, _save(params, config, family, folder / "saved"), folder / "saved"


def test_codes_come_back_bit_for_bit(codes):
    family, config, params, saved, folder = codes
    found = restore_params(saved, folder, family.specs(config), dtype=jnp.dtype("float32"))
    assert_identical(found, params)
    assert found.layers[0].attention.qkv.zeros is not None
    assert found.layers[0].attention.o.order is not None
    assert found.layers[0].feed_forward.gate_up.minimum is not None
    assert found.layers[1].feed_forward.down.minimum is None


@pytest.mark.parametrize("name", quantized.MODELS)
def test_quantized_folders_come_back_bit_for_bit(name, tmp_path):
    source = quantized.write_model(name, tmp_path)
    config, params = load(source, "bfloat16")
    saved_config, saved = load(convert(source, tmp_path / "saved", dtype="bfloat16"), "bfloat16")
    assert saved_config == config
    assert_identical(saved, params)
    assert isinstance(saved.layers[0].attention.qkv, QuantizedArray)


def test_codes_keep_their_dtypes(codes):
    """Whatever the rest is cast to."""
    family, config, params, saved, folder = codes
    found = restore_params(saved, folder, family.specs(config), dtype=jnp.dtype("bfloat16"))
    assert_identical(found.layers[0].attention.qkv, params.layers[0].attention.qkv)
    assert found.embed.dtype == jnp.bfloat16


def test_shards_of_codes_are_slices(codes):
    family, config, params, saved, folder = codes
    shardings = family.shardings(config, make_mesh(jax.devices()[:4]))
    found = restore_params(
        saved, folder, family.specs(config), dtype=jnp.dtype("float32"), sharding=shardings
    )
    assert_identical(found, params)
    for name, whole in (("qkv", params.layers[0].attention.qkv), ("o", params.layers[0].attention.o)):
        placed = getattr(found.layers[0].attention, name)
        assert (
            jax.tree.leaves(placed)[0].sharding
            == jax.tree.leaves(spread(whole, getattr(shardings.layers[0].attention, name)))[0]
        )
        for a, b in zip(*map(jax.tree.leaves, (placed, whole)), strict=True):
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(b)[shard.index])
    assert not found.layers[0].attention.qkv.codes.is_fully_replicated


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scales", {"shape": [3, 4]}),
        ("scales", {"shape": [64]}),
        ("codes", {"shape": [2, 64, 32]}),
        ("zeros", {"shape": [1, 4]}),
    ],
)
def test_codes_that_do_not_fit(name, change, codes):
    family, config, _, saved, folder = codes
    at = f"layers.0.attention.qkv.{name}"
    arrays = {**saved.arrays, at: dataclasses.replace(saved.arrays[at], shape=tuple(change["shape"]))}
    with pytest.raises(LoadError, match="the codes of layers.0.attention.qkv do not fit each other"):
        restore_params(
            dataclasses.replace(saved, arrays=arrays),
            folder,
            family.specs(config),
            dtype=jnp.dtype("float32"),
        )


def test_arrays_of_zeros_and_odd_dtypes(tmp_path):
    """A chunk of zeros is written too, and codes of any dtype keep their bits."""
    rng = np.random.default_rng(0)
    bits = jnp.asarray(rng.integers(0, 120, (4, 6), np.uint8))
    arrays = {
        "zeros": jnp.zeros((3, 5)),
        "bytes": bits,
        "codes": bits.astype(jnp.int8),
        "order": jnp.arange(7, dtype=jnp.int32),
        "e4m3": jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn),
        "e5m2": jax.lax.bitcast_convert_type(bits, jnp.float8_e5m2),
    }
    placed = save_arrays(arrays, tmp_path, where="here")
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    saved = SavedModel(
        kind="hf", architecture="", family="", config={}, dtype="", source="", arrays=placed, quantized={},
        files=describe_files(tmp_path, names),
    )  # fmt: skip
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in arrays.items()}
    found = orbax_form._restore(saved, tmp_path, wanted, None)
    assert_identical(found, arrays)


# ---- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", families.FAMILY_CASES.values(), ids=families.FAMILY_CASES)
def test_every_family_has_its_config_back(case, tmp_path):
    checkpoint = open_checkpoint(write_folder(case, tmp_path))
    family, config = read_config(checkpoint)
    saved = SavedModel(
        kind="hf", architecture=checkpoint.architecture, family=family.name,
        config=json.loads(json.dumps(to_plain(config))), dtype="", source="",
        arrays=dict.fromkeys(map(str, range(99))), quantized={}, files={},
    )  # fmt: skip
    found = read_config(dataclasses.replace(checkpoint, saved=saved))
    assert found == (family, config)
    assert hash(found[1]) == hash(config)


def test_no_family_is_left_out():
    seen = {case.config["architectures"][0] for case in [*families.FAMILY_CASES.values(), *CASES.values()]}
    assert {entry.module for entry in supported() if not seen.isdisjoint(entry.hf)} == {
        entry.module for entry in supported()
    }


# ---- parts, memory, imports ----------------------------------------------------------------------


def test_parts_and_progress(gemma, monkeypatch, tmp_path):
    monkeypatch.setattr("xjax.weights.saved.orbax._PART_BYTES", 20_000)
    source = gemma[0]
    seen = []
    folder = convert(source, tmp_path / "saved", progress=lambda *step: seen.append(step))
    saving = [(done, total) for what, done, total in seen if what == "save"]
    assert len(saving) == read_manifest(folder).num_parts > 3
    assert saving == sorted(saving)
    seen.clear()
    _, params = load(folder, progress=lambda *step: seen.append(step))
    assert len(seen) == len(saving)
    assert seen[-1][0] == seen[-1][1] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert_identical(params, load(source)[1])


def test_orbax_runs_beside_the_main_thread(gemma, monkeypatch, tmp_path):
    """Where no Ctrl-C comes in the middle of its imports and its loops."""
    threads, original = [], orbax_form._orbax

    def seen(problem):
        threads.append(threading.current_thread())
        return original(problem)

    monkeypatch.setattr(orbax_form, "_orbax", seen)
    load(convert(gemma[0], tmp_path / "saved"))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_orbax_is_imported_for_converted_models_alone(gemma):
    code = """
import sys, jax.numpy as jnp
from pathlib import Path
import xjax.engine.llm, xjax.weights.convert, xjax_server.cli.app
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import load_model
for path in sys.argv[1:]:
    load_model(open_checkpoint(Path(path)))
    print("orbax.checkpoint" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, gemma)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["False", "True"]
    assert result.stderr == ""


# ---- broken and hostile folders ------------------------------------------------------------------


@pytest.fixture
def saved_copy(gemma, tmp_path):
    return shutil.copytree(gemma[1], tmp_path / "copy")


def _weight_file(folder):
    return max((folder / "params").rglob("0.0"), key=lambda path: path.stat().st_size)


def _edit(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(seal(manifest)))


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _retouch(folder, key, old, new):
    path = folder / MANIFEST
    text = path.read_text()
    changed = re.sub(rf'("{key}": "?){old}', rf"\g<1>{new}", text, count=1)
    assert changed != text
    path.write_text(changed)


FILES = [
    (lambda f: (f / MANIFEST).unlink(), "xjax_model.json: missing"),
    (lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:500]), "not valid JSON"),
    (lambda f: _weight_file(f).unlink(), "missing, but xjax_model.json names it"),
    (lambda f: _weight_file(f).write_bytes(_weight_file(f).read_bytes()[:-4]), "bytes, [0-9]+ were written"),
    (lambda f: _flip(_weight_file(f)), "not the bytes that were written"),
    (lambda f: _flip(f / "params/0/_METADATA"), "not the bytes that were written"),
    (lambda f: _retouch(f, "theta", "1000000.0", "1000001.0"), "xjax_model.json: not what was written"),
    (lambda f: _retouch(f, "dtype", "float32", "float16"), "xjax_model.json: not what was written"),
    (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    (lambda f: _flip(f / "config.json"), "config.json: not the bytes"),
]


@pytest.mark.parametrize(("spoil", "words"), FILES)
def test_files_that_are_not_what_was_written(spoil, words, saved_copy):
    spoil(saved_copy)
    _refused(saved_copy, words)


def _first(manifest):
    return next(iter(manifest["arrays"].values()))


def _as_codes(manifest, **settings):
    manifest["arrays"]["embed.codes"] = manifest["arrays"].pop("embed")
    manifest["quantized"]["embed"] = {"shape": [61, 48], "kind": "int8", **settings}


def _experts(**changes):
    return {"num_experts": 5, "num_active": 2, "ffn_dim": 8, **changes}


MANIFESTS = [
    (lambda m: m.update(version=2), "version 2 of the format.*newer xjax"),
    (lambda m: m.update(version="1"), "'version' must be a whole number"),
    (lambda m: m.update(format="zip"), "'format' must be"),
    (lambda m: m.update(kind="onnx"), "'kind' must be"),
    (lambda m: m.update(architecture="NopeForCausalLM"), "NopeForCausalLM"),
    (lambda m: m.update(family="llama"), "converted as 'llama'.*convert the model again"),
    (lambda m: m.update(arrays=[]), "'arrays' must be an object"),
    (lambda m: m["arrays"].pop("embed"), "array embed is missing"),
    (lambda m: m["arrays"].update(more=_first(m)), "array more has no place"),
    (lambda m: _first(m).update(shape=[3, 3]), r"must have shape \(61, 48\), found \(3, 3\)"),
    (lambda m: _first(m).update(shape=[-1, 3]), "'shape' is no shape"),
    (lambda m: _first(m).update(part=10**12), "more parts than there are arrays"),
    (lambda m: _first(m).update(part=1), "embed: not the array"),
    (lambda m: m["quantized"].update(embed={"shape": [61, 48], "kind": "int8"}), "embed.codes is missing"),
    (lambda m: _as_codes(m, kind=7), "embed.kind: '7' is not"),
    (lambda m: _as_codes(m, shape=7), "embed.shape: expected a list"),
    (lambda m: _as_codes(m, shape=[7, 7]), r"must have shape \(61, 48\), found \(7, 7\)"),
    (lambda m: m["quantized"].update(nowhere={}), "codes nowhere have no place"),
    (lambda m: m["config"].update(num_layers=10**9, windows=[]), "num_layers is 1000000000, more than"),
    (lambda m: m["config"].update(num_layers="7"), "config.num_layers: '7' is not of the type int"),
    (lambda m: m["config"].update(mystery=1), "'mystery' is unknown to this version"),
    (lambda m: m["config"].pop("rope"), "missing.*rope"),
    (lambda m: m["config"]["rope"].update(factors=7), "config.rope.factors: expected a list"),
    (lambda m: m["config"]["rope"].update(kind="spiral"), "config.rope: .*kind 'spiral' is unknown"),
    (lambda m: m["config"]["rope"].update(dim=-16), "config.rope: .*-16 dimensions: its numbers do not fit"),
    (lambda m: m["config"]["rope"].update(theta=math.nan), "config.rope: .*numbers do not fit"),
    (
        lambda m: m["config"]["rope"].update(dim=64),
        "config: more dimensions of a head are rotated than there",
    ),
    (lambda m: m["config"].update(max_context=0), "config: sizes or heads are out of range"),
    (lambda m: m["config"].update(max_context=10**12), "config: sizes or heads are out of range"),
    (lambda m: m["config"].update(num_heads=3, num_kv_heads=2), "config: sizes or heads are out of range"),
    (lambda m: m["config"].update(norm_eps=-1.0), "config: a scale, cap or epsilon is not above 0"),
    (lambda m: m["config"].update(activation="swoosh"), "config: activation 'swoosh' is unknown"),
    (lambda m: m["config"].update(windows=[9]), "config: 1 windows for 7 layers"),
    (lambda m: m["config"]["parts"].update(norm="batch"), "config.parts: norms 'batch' with"),
    (lambda m: m["config"].update(experts=_experts(num_active=6)), "cannot pass 6 of 5 experts"),
    (lambda m: m["config"].update(experts=_experts(dense_layers=[7])), "must lie in 0 to 6"),
    (lambda m: m["files"].update({"../../etc/passwd": {"size": 1, "crc32": 1}}), "not the name of a file"),
    (lambda m: m["files"].update({"/etc/passwd": {"size": 1, "crc32": 1}}), "not the name of a file"),
    (lambda m: m["files"].update({"params/9/x": {"size": 1}}), "'crc32' must be a whole number"),
]


@pytest.mark.parametrize(("change", "words"), MANIFESTS)
def test_hostile_manifests(change, words, saved_copy):
    _edit(saved_copy, change)
    _refused(saved_copy, words)


def test_array_of_another_shape_in_its_part(saved_copy):
    """The manifest is right, the array's own description is not, and its checksum fits."""
    path = saved_copy / "params/0/embed/.zarray"
    path.write_text(path.read_text().replace("61", "62"))
    name = str(path.relative_to(saved_copy))
    found = describe_files(saved_copy, [name])[name]
    _edit(saved_copy, lambda m: m["files"].update({name: dataclasses.asdict(found)}))
    _refused(saved_copy, "params/0/embed: not the array")


def _refused(folder, words):
    with pytest.raises(LoadError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
