"""Whatever a config, metadata or tensors of any family hold: a model, or one line that says what is wrong."""

import dataclasses
import tracemalloc

import jax
import pytest

from tests.golden.checkpoints import write_folder, write_gguf
from tests.golden.families import FAMILY_CASES
from tests.golden.gguf_families import write_family
from tests.golden.recipe import CASES
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.models.registry import load_config, supported
from xjax.weights.plan import Planner

NAN, INF = float("nan"), float("inf")
# What no number, flag or name ever is, and what they may be but that most models cannot have.
NEVER = (
    "x", "", "8", "a\n\u2028b", [], [1], [[["x"]]], [None], {}, {"a": 1}, {"rope_type": {}}, -1, -0.5,
    -(10**30), NAN, INF, -INF,
)  # fmt: skip
SOMETIMES = (
    None, True, False, 0, 0.0, 1, 3, 7, 0.5, 1.5, 1 << 14, 1 << 24, 10**9, 10**30, 10**400, 1e-300, 1e300,
    {"rope_type": "yarn"}, {"rope_type": "longrope", "long_factor": "x"},
)  # fmt: skip
# Keys that a family may leave out of its config.json and that others read.
EXTRA = (
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "head_dim",
    "partial_rotary_factor", "attention_bias", "mlp_bias", "original_max_position_embeddings",
    "num_key_value_heads", "use_sliding_window", "max_window_layers", "hidden_activation", "text_config",
)  # fmt: skip
SKIPPED = ("architectures", "model_type", "general.architecture")
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "mrope", "su", "yarn")
ROPE = {
    "factor": 2.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True,
    "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3],
}  # fmt: skip
MOST_BYTES = 8 << 20  # while a config is read


def one_of_each():
    """A case of every architecture that config.json files name."""
    cases = {}
    everyone = [*FAMILY_CASES.values(), CASES["llama_mha_biases"], CASES["gemma_layer_types"]]
    for case in everyone:
        if case.length < 100:
            cases.setdefault(case.config["architectures"][0], case)
    return cases


ONE = one_of_each()


def outcome(checkpoint, config, tensors, *, is_planned=True):
    """None for a model, else the line; any other exception passes. Nothing of a tensor is read."""
    try:
        family, found = load_config(checkpoint.kind, checkpoint.architecture, config, tensors)
        hash(found)
        if is_planned:
            changed = dataclasses.replace(checkpoint, config=config, tensors=tensors)
            specs, planner = family.specs(found), Planner(changed, family, found)
            for path, spec in jax.tree_util.tree_flatten_with_path(specs)[0]:
                planner.plan(path, spec)
            planner.check_all_used(tied=specs.head is None)
    except LoadError as error:
        line = str(error)
        assert "\n" not in line and "\u2028" not in line and len(line) < 400, line
        assert checkpoint.path.name in line or "config.json" in line or "GGUF metadata" in line or (
            "tensor" in line or ".weight" in line
        ), line  # fmt: skip
        return line
    return None


def check_values(checkpoint, keys):
    """Try every bad value of every key; returns how many were refused."""
    config, refused = dict(checkpoint.config), 0
    assert outcome(checkpoint, config, checkpoint.tensors) is None
    tracemalloc.start()
    for key in keys:
        without = {name: value for name, value in config.items() if name != key}
        for value in (*NEVER, *SOMETIMES, None):
            line = outcome(checkpoint, {**config, key: value}, checkpoint.tensors, is_planned=False)
            refused += line is not None
            is_typed = isinstance(config.get(key), int | float) and isinstance(value, str | list | dict)
            if line is not None and is_typed:
                assert key in line, (key, value, line)
        outcome(checkpoint, without, checkpoint.tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES
    return refused


def check_tensors(checkpoint):
    """Take each tensor of the first layer and of none away, and give it other shapes and types."""
    config, tensors, is_gguf = checkpoint.config, dict(checkpoint.tensors), checkpoint.kind == "gguf"
    for name, view in checkpoint.tensors.items():
        if ".1." in name or "rope_factors" in name:
            continue
        shapes = [(*view.shape, 1), view.shape[:-1], ()]
        if not (is_gguf and name == "token_embd.weight"):  # there it says how many words there are
            shapes += [
                (view.shape[0] + 1, *view.shape[1:]),
                *([view.shape[::-1]] * (len(set(view.shape)) > 1)),
            ]
        changes = [{"shape": shape} for shape in shapes]
        changes += [{"dtype": dtype} for dtype in ("int8", "uint8", "bool", "int32")]
        for change in changes:
            line = outcome(checkpoint, config, {**tensors, name: dataclasses.replace(view, **change)})
            # What a config is read off, such as the words of the embedding, may show in another tensor.
            assert line is not None and "tensor" in line, (name, change, line)
            assert name in line or "shape" in change, (name, change, line)
        line = outcome(checkpoint, config, {other: view for other, view in tensors.items() if other != name})
        assert line is not None or (is_gguf and name == "output.weight"), f"{name} is not needed"
    line = outcome(checkpoint, config, {**tensors, "more.weight": next(iter(tensors.values()))})
    assert line is not None and "no place" in line


def test_every_architecture_is_tried():
    listed = {name for entry in supported() for name in entry.hf} - {"Gemma3ForConditionalGeneration"}
    assert set(ONE) == listed


@pytest.mark.parametrize("architecture", ONE)
def test_config_json(architecture, tmp_path):
    checkpoint = open_checkpoint(write_folder(ONE[architecture], tmp_path))
    keys = [key for key in {**checkpoint.config, **dict.fromkeys(EXTRA)} if key not in SKIPPED]
    assert check_values(checkpoint, keys) > 250


@pytest.mark.parametrize("architecture", ONE)
def test_rope_settings(architecture, tmp_path):
    checkpoint = open_checkpoint(write_folder(ONE[architecture], tmp_path))
    config = {key: value for key, value in checkpoint.config.items() if not key.startswith("rope")}
    for kind in KINDS:
        for key in ROPE:
            for value in (*NEVER, *SOMETIMES):
                rope = {**ROPE, "rope_type": kind, key: value}
                outcome(checkpoint, {**config, "rope_scaling": rope}, checkpoint.tensors, is_planned=False)


@pytest.mark.parametrize("architecture", ONE)
def test_tensors_of_a_folder(architecture, tmp_path):
    check_tensors(open_checkpoint(write_folder(ONE[architecture], tmp_path)))


IN_GGUF = [name for name, case in FAMILY_CASES.items() if case.length < 100 and name in (
    "qwen2_tied", "qwen3_tied", "gemma2_caps", "phi3_long", "glm4_biases", "granite_biases", "olmo2_gqa",
    "olmo3_windows", "starcoder2_biases", "mixtral_top2", "qwen2moe_shared", "qwen3moe_tied")]  # fmt: skip
OTHER_GGUF = ("llama_mha_biases", "gemma_tied")
# What metadata may leave out, by the ending of the key.
MORE_METADATA = (
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast", "rope.dimension_count", "attention.sliding_window", "expert_count",
    "expert_gating_func", "expert_weights_scale",
    "expert_used_count", "attention.key_length", "vocab_size", "attention.scale",
)  # fmt: skip


@pytest.fixture(scope="module", params=[*IN_GGUF, *OTHER_GGUF])
def gguf_file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    if request.param in OTHER_GGUF:
        return open_checkpoint(write_gguf(CASES[request.param], path))
    return open_checkpoint(write_family(FAMILY_CASES[request.param], path))


def test_gguf_metadata(gguf_file):
    prefix = gguf_file.architecture + "."
    more = dict.fromkeys(prefix + key for key in MORE_METADATA)
    keys = [key for key in {**gguf_file.config, **more} if key not in SKIPPED and key.startswith(prefix)]
    assert check_values(gguf_file, keys) > 250


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope", "none", "spiral", 7])
def test_rope_of_a_gguf(gguf_file, kind):
    prefix = gguf_file.architecture + ".rope.scaling."
    for key in ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_log_multiplier"):
        for value in (*NEVER, *SOMETIMES):
            scaling = {f"{prefix}type": kind, f"{prefix}factor": 2.0, f"{prefix}{key}": value}
            outcome(gguf_file, {**gguf_file.config, **scaling}, gguf_file.tensors, is_planned=False)


def test_tensors_of_a_gguf(gguf_file):
    check_tensors(gguf_file)
