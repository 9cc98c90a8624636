"""What Prometheus reads: requests by outcome, tokens and times seen here, and the backend's counters.

All of it is written on the event loop's thread, so that one token costs a bisection and two
additions, without a lock. It knows neither HTTP nor the engine.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import xjax
from xjax.backend import MISS_REASONS, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# The backend's gauges and counters: name in `Backend.stats` -> (name here, help).
_GAUGES = {
    "running": ("running_sequences", "Sequences that take part in steps."),
    "waiting": ("waiting_sequences", "Sequences that wait for their first or next step."),
    "swapped": ("swapped_sequences", "Sequences whose pages were moved off the device."),
    "queued_requests": ("queued_requests", "Requests of which nothing has run."),
    "prefix_records": ("prefix_cache_records", "Pages of tokens that are kept, on the device or the host."),
    "prefix_cached_tokens": ("prefix_cache_tokens", "Tokens in these."),
    "host_states_used": ("host_states_used", "Recurrent states of sequences in host memory."),
    "host_states_total": ("host_states_capacity", "Recurrent states that host memory has room for."),
}
_COUNTERS = {
    "engine_steps": ("engine_steps", "Steps of the engine."),
    "failed_steps": ("engine_failed_steps", "Steps that failed."),
    "preemptions": ("preemptions", "Times that a sequence gave its pages up."),
    "aborts": ("engine_aborts", "Requests that were ended from outside."),
    "prefill_tokens": ("engine_prefill_tokens", "Prompt tokens computed, repetitions included."),
    "decode_tokens": ("engine_decode_tokens", "Tokens computed one at a time."),
    "compiles_after_warmup": ("compiles_after_warmup", "Programs compiled when all should have been ready."),
    "prefix_hits": ("prefix_cache_hits", "Prompts that began from kept pages."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Tokens that these did not compute."),
    "prefix_host_hit_tokens": (
        "prefix_cache_host_hit_tokens",
        "Of these, tokens that lay on the host.",
    ),
    "prefix_waits": ("prefix_cache_waits", "Times that a sequence waited for pages that another computed."),
    "prefix_stored": ("prefix_cache_stored", "Pages of tokens recorded."),
    "prefix_evicted": ("prefix_cache_evicted", "Kept pages let go to make room."),
    "page_copies": ("page_copies", "Pages copied on the device, to be written by one sample."),
    "retained_pages": (
        "swap_retained_pages",
        "Pages that stayed on the device of swapped sequences.",
    ),
    "swap_failures": ("swap_failures", "Moves of pages that failed and were made up for."),
}
# The same with a label: name here -> (help, label, name in `Backend.stats` with the label's value left out).
_LABELLED = {
    "prefix_cache_misses": ("Prompts that found no kept page, by reason.", "reason", "prefix_misses_{}"),
    "swap_sequences": ("Sequences swapped.", "direction", "swap_{}_sequences"),
    "swap_pages": ("Pages moved to the host (out) and back (in).", "direction", "swap_{}_pages"),
    "swap_states": ("Recurrent states moved with them.", "direction", "swap_{}_states"),
    "swap_bytes": ("Bytes of all of these.", "direction", "swap_{}_bytes"),
    "swap_seconds": ("Time that the host spent on moving them.", "direction", "swap_{}_seconds"),
}
_LABELS = {"reason": MISS_REASONS, "direction": ("out", "in")}
_PAGES = {
    "pages_used_": ("pages_used", "Pages that sequences hold, by group."),
    "pages_idle_": ("pages_idle", "Pages that are kept and that no sequence holds, by group."),
    "pages_cached_": ("pages_cached", "Pages that are kept, by group."),
    "pages_total_": ("pages_capacity", "Pages there are, by group."),
    "host_slots_used_": ("host_slots_used", "Pages in host memory, by group."),
    "host_slots_total_": ("host_slots_capacity", "Pages that host memory has room for, by group."),
}
_ENGINE_TIMES = {
    "step_seconds": "Time from one step's result to the next.",
    "host_seconds": "Time that the host spent on a step.",
}
_BUCKET = re.compile(r"_le_(.+)$")


class ServerMetrics(Collector):
    """Counters and histograms of one server with a registry of their own.

    stats       gives the backend's counters when they are read
    ttft        seconds from arrival to a request's first token
    token_gap   seconds between tokens of a sample
    queue       seconds from arrival to the first step
    whole       seconds from arrival to the end
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats
        self.ttft = Histogram(_REQUEST_BOUNDS)
        self.token_gap = Histogram(_TOKEN_BOUNDS)
        self.queue = Histogram(_REQUEST_BOUNDS)
        self.whole = Histogram(_REQUEST_BOUNDS)
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.refusals: Counter[int] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.active = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def refused(self, status: int) -> None:
        """Count a request that got an error status before it reached the engine."""
        self.refusals[status] += 1

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a request that reached the engine by how it ended."""
        self.outcomes[outcome] += 1
        self.whole.observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """The exposition and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        """Everything, as the registry asks for it."""
        yield InfoMetricFamily("xjax", "What serves.", {"version": xjax.__version__})
        yield from self._requests()
        for seen, name, text in (
            (self.ttft, "xjax_time_to_first_token_seconds", "From arrival to a request's first token."),
            (self.token_gap, "xjax_inter_token_seconds", "Between two tokens of a sample."),
            (self.queue, "xjax_queue_seconds", "From arrival to a request's first step."),
            (self.whole, "xjax_request_seconds", "From arrival to a request's end."),
        ):
            yield times_family(name, text, name, seen.stats(name))
        yield from engine_families(self._stats())

    def _requests(self) -> Iterator[Metric]:
        ended = CounterMetricFamily("xjax_requests", "Requests that ended, by outcome.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            ended.add_metric([outcome], count)
        yield ended
        refused = CounterMetricFamily(
            "xjax_refused_requests", "Requests that never reached the engine, by status.", labels=["status"]
        )
        for status, count in sorted(self.refusals.items()):
            refused.add_metric([str(status)], count)
        yield refused
        yield GaugeMetricFamily("xjax_active_requests", "Requests being answered.", self.active)
        yield CounterMetricFamily("xjax_prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield CounterMetricFamily(
            "xjax_cached_prompt_tokens", "Prompt tokens whose pages were reused.", self.cached_tokens
        )
        yield CounterMetricFamily("xjax_generated_tokens", "Tokens of answers.", self.generated_tokens)


def engine_families(stats: Mapping[str, float]) -> Iterator[Metric]:
    """The backend's counters as metrics; what it does not have is left out."""
    for key, (name, text) in _GAUGES.items():
        if key in stats:
            yield GaugeMetricFamily(f"xjax_{name}", text, stats[key])
    for key, (name, text) in _COUNTERS.items():
        if key in stats:
            yield CounterMetricFamily(f"xjax_{name}", text, stats[key])
    if "prefill_tokens" in stats and "decode_tokens" in stats:
        count = stats["prefill_tokens"] + stats["decode_tokens"]
        yield CounterMetricFamily("xjax_forwarded_tokens", "Tokens that went through the model.", count)
    for name, (text, label, key) in _LABELLED.items():
        found = {value: key.format(value) for value in _LABELS[label] if key.format(value) in stats}
        counts = CounterMetricFamily(f"xjax_{name}", text, labels=[label])
        for value, source in found.items():
            counts.add_metric([value], stats[source])
        if found:
            yield counts
    for prefix, (name, text) in _PAGES.items():
        family = GaugeMetricFamily(f"xjax_{name}", text, labels=["group"])
        for key in sorted(key for key in stats if key.startswith(prefix)):
            family.add_metric([key.removeprefix(prefix)], stats[key])
        if family.samples:
            yield family
    for key, text in _ENGINE_TIMES.items():
        if f"{key}_count" in stats:
            yield times_family(f"xjax_engine_{key}", text, key, stats)


def times_family(name: str, text: str, key: str, stats: Mapping[str, float]) -> HistogramMetricFamily:
    """A histogram as Prometheus wants it, of what `Histogram.stats` says under a name.

    name, text   in the exposition
    key          in `stats`
    """
    bounds: list[tuple[float, float]] = []
    for stat, value in stats.items():
        found = _BUCKET.search(stat) if stat.startswith(key) else None
        if found is not None:
            bounds.append((float(found.group(1)), value))
    buckets = [(repr(bound), value) for bound, value in sorted(bounds)]
    buckets.append(("+Inf", stats[f"{key}_count"]))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=stats.get(f"{key}_sum", 0.0))
