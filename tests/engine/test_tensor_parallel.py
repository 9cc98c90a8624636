"""Engines over several devices give the tokens of one device, in place, and say little to each other."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.engine.schedules import alone, make_jobs, run_schedule
from tests.engine.test_cache_laws import conversations, with_cache
from tests.engine.tiny import make_kit, shared, tiny_gemma, tiny_llama
from tests.engine.tiny_folder import write_folder
from xjax import LLM, LoadError, SamplingParams
from xjax.engine.pack import shapes_of
from xjax.models import layers
from xjax.models.layout import Layout
from xjax.state import kv
from xjax.state.mesh import replicated, shard_bytes

pytestmark = pytest.mark.device

_COLLECTIVE = re.compile(
    r"= (.*) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_DIMS = re.compile(r"\[([\d,]*)\]")
OPTIONS = {"max_num_seqs": 2, "page_size": 8, "prefill_chunk_size": 32, "num_pages": 40}


@pytest.fixture(scope="module")
def llama_pair():
    """One kv head on each of two devices; every shape ready."""
    kit = make_kit(shared(tiny_llama(), 2), rows=(1, 4))
    kit.table.wait(shapes_of(kit.plan.scheduler))
    return kit


def decode_shape(kit):
    return next(shape for shape in shapes_of(kit.plan.scheduler) if not shape.num_prefill and not shape.full)


def collectives(kit, shape):
    """How often each kind is there, and how many numbers make the largest one of each."""
    counts, largest = Counter(), Counter()
    for result, kind in _COLLECTIVE.findall(kit.table.get(shape).call.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in _DIMS.findall(result)]
        counts[kind] += 1
        largest[kind] = max(largest[kind], *sizes)
    return dict(counts), dict(largest)


def expected_collectives(kit, shape):
    """A sum after each half of a layer and one for the embedding; the logits are put together."""
    config = kit.model.config
    counts = {"all-reduce": 2 * config.num_layers + 1, "all-gather": 1}
    sizes = {
        "all-reduce": shape.num_tokens * config.embed_dim,
        "all-gather": shape.num_sampled * config.vocab_size,
    }
    return counts, sizes


def test_every_shape_passes_the_audit_and_sends_nothing_but_sums(llama_pair):
    assert set(shapes_of(llama_pair.plan.scheduler)) <= set(llama_pair.table.ready)
    for shape in shapes_of(llama_pair.plan.scheduler):
        assert collectives(llama_pair, shape) == expected_collectives(llama_pair, shape), shape.name


def test_one_kv_head_on_four_devices():
    """Windows, norms behind both halves; each device has a copy of the head for one query head."""
    kit = make_kit(shared(tiny_gemma(), 4), rows=(1,))
    assert kit.model.config.layout == Layout(4, 4)
    shape = decode_shape(kit)
    assert collectives(kit, shape) == expected_collectives(kit, shape)


def test_heads_that_the_compiler_divides_show_in_what_is_sent(monkeypatch):
    """So the count above would tell of a step that moves pages between devices."""
    monkeypatch.setattr(layers, "on_shards", lambda function, mesh, split: function)
    kit = make_kit(shared(tiny_llama(), 2), rows=(2,))
    shape = decode_shape(kit)
    counts = [sum(found[0].values()) for found in (collectives(kit, shape), expected_collectives(kit, shape))]
    assert counts[0] > counts[1]


def test_pages_on_the_wrong_devices_fail_the_audit(monkeypatch):
    monkeypatch.setattr(kv, "page_sharding", lambda mesh, num_kv_heads: replicated(mesh))
    kit = make_kit(shared(tiny_llama(), 2), rows=(4,), num_pages=400)
    with pytest.raises(LoadError, match=r"\.kv\[\d\]\.[kv]"):
        kit.table.get(decode_shape(kit))


def run_both(kits, jobs):
    """Play jobs on two devices, each held to what it gets alone on one; what happened, and statistics."""
    one, two = (kit.engine() for kit in kits)
    report = run_schedule(two, jobs, alone(one, jobs))
    assert (report.wrong, report.excused) == ([], [])
    stats = two.stats()
    assert stats["failed_steps"] == stats["swap_failures"] == 0
    for engine in (one, two):
        engine.close()
        engine._scheduler.check()
    return {**stats, **report.counts}


def test_a_schedule_gives_the_tokens_of_one_device(llama_kit, llama_pair):
    """With preemption, every way of sampling, and scores, under 40 pages."""
    counts = run_both((llama_kit, llama_pair), make_jobs(3, count=22, longest=156))
    least = {"preemptions": 3, "chunk_splits": 6, "scores": 30, "tokens": 300}
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}


def test_pages_are_moved_and_shared_as_on_one_device(llama_kit, llama_pair):
    """To the host and back, of both devices; copied on them; found again by equal beginnings."""
    counts = run_both((llama_kit, with_cache(llama_pair)), conversations(0))
    least = {"prefix_hit_tokens": 40, "swap_out_pages": 10, "swap_in_pages": 10, "page_copies": 1}
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}


def test_memory_is_that_of_one_device(llama_kit, llama_pair):
    whole, half = llama_kit.plan.memory, llama_pair.plan.memory
    assert half.page_bytes == (whole.page_bytes[0] // 2,)
    assert half.num_pages == whole.num_pages and half.weights < 0.6 * whole.weights
    assert half.weights == shard_bytes(llama_pair.model.params)
    assert ("on each of", "2 devices") in half.table()
    engine = llama_pair.engine()
    pages = engine._state.kv[0].k
    assert [shard.data.shape[1] for shard in pages.addressable_shards] == [1, 1]
    engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


# A process of its own: neither the number of devices nor JAX's cache of programs is the tests'.
PROGRAM = """
import json, sys
import jax
from xjax import LLM, SamplingParams
folder, cache, options = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
for _ in range(2):
    with LLM(folder, tensor_parallel_size=2, compile_cache=cache, **json.loads(options)) as llm:
        assert llm.model.num_devices == len(jax.devices()) == 2
        answers = llm.generate(["Hello there"], params)
        print(json.dumps([list(answers[0].outputs[0].token_ids), llm.stats()["programs_loaded"] > 0]))
"""


def test_llm_makes_two_devices_of_a_cpu_and_keeps_its_programs(folder, tmp_path):
    """Under vLLM's name of the option; programs saved for two devices serve the next two."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_COMPILATION_CACHE_DIR"] = ""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path), json.dumps(OPTIONS)]
    result = subprocess.run(
        command, check=True, env=environment, timeout=240, stdout=subprocess.PIPE, text=True
    )
    with LLM(folder, **OPTIONS) as llm:
        answer = llm.generate(["Hello there"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    ids = list(answer[0].outputs[0].token_ids)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [[ids, False], [ids, True]]
    assert len(set(ids)) > 8


def test_what_cannot_be_shared_is_refused(folder):
    with pytest.raises(
        LoadError, match=r"--tensor-parallel 9: there are only \d devices \(cpu\); for a trial set"
    ):
        LLM(folder, tensor_parallel=9, **OPTIONS)
    with pytest.raises(LoadError, match="this model goes on 1, 2, 4 devices"):
        LLM(folder, tensor_parallel=3, **OPTIONS)
    with pytest.raises(LoadError, match="--kernels numba is for one device"):
        LLM(folder, tensor_parallel=2, kernels="numba", **OPTIONS)
