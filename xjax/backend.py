"""The one interface between those who want tokens and those who make them.

The engine, a remote replica and the fake of the tests implement it. Calls may come from any
thread and return at once; events are delivered on the backend's own thread, in order for each
sample, and the receiver must not block it. `cache_stats` puts the counters of kept and moved pages into
the form that users see, in Python and over HTTP; `Histogram` counts times, as they are told among them.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, Protocol

from xjax.request import Request, TokenEvent

EventSink = Callable[[TokenEvent], None]


class Backend(Protocol):
    """Takes requests, delivers events."""

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Queue a request; its events go to `on_event`.

        Raises RequestError for one that can never run here, CapacityError for a full queue
        and EngineError when the engine has stopped.
        """
        ...

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """End one sample with reason "stop" after its first `num_tokens` output tokens.

        For a stop that only the text shows; tokens after it count nowhere and no event
        with them follows. Unknown or ended samples are ignored.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End every sample of a request and free what it holds; unknown ids are ignored."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by name."""
        ...

    def failure(self) -> str | None:
        """Why nothing is served any more, in one line; None while requests are taken."""
        ...

    def clear_cache(self) -> "Future[int]":
        """Forget every kept prefix; what is submitted afterwards finds none of them.

        Running requests keep their pages. The result is how many pages of tokens were forgotten;
        EngineError where the engine has stopped.
        """
        ...


class Histogram:
    """Counts of values by upper bound, and their sum; one thread observes.

    bounds   ascending; a value that equals one counts there
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take in a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def stats(self, name: str) -> dict[str, float]:
        """As `Backend.stats` has it.

        name   `name`_le_`bound`: values up to it; `name`_sum and `name`_count: of all
        """
        running = list(accumulate(self._counts))
        found: dict[str, float] = {
            f"{name}_le_{bound:g}": count for bound, count in zip(self._bounds, running, strict=False)
        }
        return {**found, f"{name}_sum": self.total, f"{name}_count": running[-1]}


MISS_REASONS = ("unknown", "short", "window", "whole", "state")


def cache_stats(stats: Mapping[str, float]) -> dict[str, Any]:
    """What `Backend.stats` says of the prefix cache and of swapping; counts since the start, or of now.

    hits, hit_tokens     prompts that began from kept pages, each counted once, whatever n; tokens in those
    host_hit_tokens      of these, tokens whose pages came from the host
    misses               those that found nothing, by reason: "unknown": no such tokens are kept;
                         "short": no more than a page; "window": pages matched, but those inside a window are
                         gone; "whole": every token was to be computed, for log-probabilities or a vector;
                         "state": recurrent state is not kept
    waits                times that one waited for pages that another was computing
    stored, evicted      pages of tokens that were recorded; device pages let go to make room
    copies               pages copied on the device, to be written by one sample
    forwarded_tokens     tokens that went through the model, repetitions included
    records, cached_tokens   pages of tokens that are kept now, anywhere, and tokens in them
    pages                by group, now: used by sequences, idle (kept, used by none), kept, total
    host_slots           by group, now: pages in host memory used or kept, total
    host_states          now: recurrent states of sequences in host memory, total
    swap                 "out", "in": sequences, pages, states, bytes, seconds; retained_pages: stayed on the
                         device while their sequence was swapped; failures: moves that failed and were made up
                         for; waiting: sequences that are swapped now
    """

    def count(name: str) -> int:
        return int(stats.get(name, 0))

    def direction(name: str) -> dict[str, float]:
        counts: dict[str, float] = {
            unit: count(f"swap_{name}_{unit}") for unit in ("sequences", "pages", "states", "bytes")
        }
        return {**counts, "seconds": float(stats.get(f"swap_{name}_seconds", 0.0))}

    def groups(prefix: str, names: tuple[str, ...]) -> list[dict[str, int]]:
        number = sum(name.startswith(f"{prefix}_total_") for name in stats)
        return [{name: count(f"{prefix}_{name}_{group}") for name in names} for group in range(number)]

    return {
        "hits": count("prefix_hits"),
        "hit_tokens": count("prefix_hit_tokens"),
        "host_hit_tokens": count("prefix_host_hit_tokens"),
        "misses": {reason: count(f"prefix_misses_{reason}") for reason in MISS_REASONS},
        "waits": count("prefix_waits"),
        "stored": count("prefix_stored"),
        "evicted": count("prefix_evicted"),
        "copies": count("page_copies"),
        "forwarded_tokens": count("prefill_tokens") + count("decode_tokens"),
        "records": count("prefix_records"),
        "cached_tokens": count("prefix_cached_tokens"),
        "pages": groups("pages", ("used", "idle", "cached", "total")),
        "host_slots": groups("host_slots", ("used", "total")),
        "host_states": {name: count(f"host_states_{name}") for name in ("used", "total")},
        "swap": {
            "out": direction("out"),
            "in": direction("in"),
            "retained_pages": count("retained_pages"),
            "failures": count("swap_failures"),
            "waiting": count("swapped"),
        },
    }
