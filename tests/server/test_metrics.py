"""What Prometheus reads, beside its own client as reference."""

import json
import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from prometheus_client.parser import text_string_to_metric_families

from xjax.backend import Histogram, cache_stats
from xjax.config import SchedulerConfig, StepShapes
from xjax.scheduler import Scheduler
from xjax_server.metrics import ServerMetrics, times_family

BOUNDS = (0.001, 0.01, 0.1, 1.0)
STATS = {
    "running": 3,
    "waiting": 2,
    "swapped": 1,
    "pages_used_0": 5,
    "pages_total_0": 10,
    "pages_used_1": 6,
    "pages_total_1": 20,
    "compiles_after_warmup": 4,
    "preemptions": 7,
    "step_seconds_sum": 1.5,
    "step_seconds_count": 9,
    "step_seconds_le_0.01": 2,
    "step_seconds_le_0.1": 8,
    "host_seconds_sum": 0.5,
    "host_seconds_count": 9,
    "host_seconds_le_0.01": 9,
    "prefix_hits": 11,
    "prefix_hit_tokens": 176,
    "prefix_misses_unknown": 12,
    "prefix_misses_window": 0,
    "prefix_stored": 13,
    "prefix_evicted": 14,
    "prefix_records": 15,
    "prefix_cached_tokens": 240,
    "page_copies": 16,
    "prefill_tokens": 100,
    "decode_tokens": 20,
    "swap_out_sequences": 3,
    "swap_in_sequences": 2,
    "swap_out_pages": 30,
    "swap_out_states": 5,
    "host_states_used": 6,
    "host_states_total": 7,
    "swap_out_bytes": 3000,
    "swap_in_seconds": 0.5,
    "swap_failures": 1,
    "retained_pages": 17,
    "pages_idle_0": 4,
    "host_slots_used_0": 9,
    "host_slots_total_0": 18,
    "something_else": 1,
}


def samples(metrics):
    text, media_type = metrics.text()
    assert media_type.startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation and family.name.startswith("xjax")
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_a_histogram_counts_as_the_client_s_own():
    ours, reference = Histogram(BOUNDS), Reference("x", "x", buckets=BOUNDS, registry=CollectorRegistry())
    draw = random.Random(0)
    for value in [*BOUNDS, 0.0, 5.0, *(draw.expovariate(5) for _ in range(500))]:
        ours.observe(value)
        reference.observe(value)
    expected = {
        (s.name, s.labels.get("le")): s.value for s in next(iter(reference.collect())).samples
        if not s.name.endswith("_created")
    }  # fmt: skip
    got = {
        (s.name, s.labels.get("le")): s.value for s in times_family("x", "x", "y", ours.stats("y")).samples
    }
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected)


def test_a_value_may_count_several_times():
    ours = Histogram(BOUNDS)
    ours.observe(0.05, 3)
    assert (ours.count, ours.total) == (3, pytest.approx(0.15))


def test_everything_is_there_before_the_first_request():
    found = samples(ServerMetrics(dict))
    for outcome in ("stop", "length", "abort", "error"):
        assert found["xjax_requests_total", ("outcome", outcome)] == 0
    for name in ("time_to_first_token", "inter_token", "queue", "request"):
        assert found[f"xjax_{name}_seconds_count",] == 0
    assert found["xjax_prompt_tokens_total",] == found["xjax_generated_tokens_total",] == 0


def test_the_backend_s_counters_are_told():
    found = samples(ServerMetrics(lambda: STATS))
    assert found["xjax_running_sequences",] == 3
    assert found["xjax_waiting_sequences",] == 2
    assert found["xjax_swapped_sequences",] == 1
    assert found["xjax_preemptions_total",] == 7
    assert found["xjax_compiles_after_warmup_total",] == 4
    assert found["xjax_pages_used", ("group", "1")] == 6
    assert found["xjax_pages_capacity", ("group", "0")] == 10
    assert found["xjax_engine_step_seconds_bucket", ("le", "0.1")] == 8
    assert found["xjax_engine_step_seconds_bucket", ("le", "+Inf")] == 9
    assert found["xjax_engine_step_seconds_sum",] == 1.5
    assert found["xjax_engine_host_seconds_bucket", ("le", "0.01")] == 9
    assert not any("something" in key[0] for key in found)


def test_the_cache_is_told():
    found = samples(ServerMetrics(lambda: STATS))
    expected = {
        ("xjax_prefix_cache_hits_total",): 11,
        ("xjax_prefix_cache_hit_tokens_total",): 176,
        ("xjax_prefix_cache_misses_total", ("reason", "unknown")): 12,
        ("xjax_prefix_cache_misses_total", ("reason", "window")): 0,
        ("xjax_prefix_cache_stored_total",): 13,
        ("xjax_prefix_cache_evicted_total",): 14,
        ("xjax_prefix_cache_records",): 15,
        ("xjax_prefix_cache_tokens",): 240,
        ("xjax_page_copies_total",): 16,
        ("xjax_forwarded_tokens_total",): 120,
        ("xjax_swap_sequences_total", ("direction", "out")): 3,
        ("xjax_swap_sequences_total", ("direction", "in")): 2,
        ("xjax_swap_pages_total", ("direction", "out")): 30,
        ("xjax_swap_states_total", ("direction", "out")): 5,
        ("xjax_host_states_used",): 6,
        ("xjax_host_states_capacity",): 7,
        ("xjax_swap_bytes_total", ("direction", "out")): 3000,
        ("xjax_swap_seconds_total", ("direction", "in")): 0.5,
        ("xjax_swap_failures_total",): 1,
        ("xjax_swap_retained_pages_total",): 17,
        ("xjax_pages_idle", ("group", "0")): 4,
        ("xjax_host_slots_used", ("group", "0")): 9,
        ("xjax_host_slots_capacity", ("group", "0")): 18,
    }
    assert {key: found[key] for key in expected} == expected
    assert ("xjax_prefix_cache_misses_total", ("reason", "short")) not in found


def test_every_counter_of_the_scheduler_is_in_reach():
    """Names are spelled in two places: where they are counted, and here."""
    shapes = StepShapes.plan(max_num_seqs=1, prefill_chunk_size=32, max_model_len=64)
    stats = Scheduler(
        SchedulerConfig(
            max_num_seqs=1, max_model_len=64, page_size=4, num_pages=(9,), windows=(None,), shapes=shapes
        )
    ).stats()
    moved = {f"swap_{way}_{unit}": 1 for way in ("in", "out") for unit in ("bytes", "seconds")}
    names = {name for name in {**stats, **moved} if name.startswith(("prefix", "swap", "pages", "host"))}
    marked = {name: float(i) for i, name in enumerate(sorted(names), 1000)}
    told = set(samples(ServerMetrics(lambda: marked)).values())
    assert [name for name, value in marked.items() if value not in told] == []
    shown = json.dumps(cache_stats(marked))
    assert [name for name, value in marked.items() if f"{value:.0f}" not in shown] == []


def test_what_happened_is_counted():
    metrics = ServerMetrics(dict)
    metrics.refused(404)
    metrics.refused(404)
    metrics.ended("stop", 0.2)
    found = samples(metrics)
    assert found["xjax_refused_requests_total", ("status", "404")] == 2
    assert found["xjax_requests_total", ("outcome", "stop")] == 1
    assert found["xjax_request_seconds_bucket", ("le", "0.25")] == 1
