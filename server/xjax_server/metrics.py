"""What Prometheus reads: requests by outcome, tokens and times seen here, and the backend's counters.

All of it is written on the event loop's thread, so that one token costs a bisection and two
additions, without a lock. It knows neither HTTP nor the engine.
"""

from collections.abc import Callable, Mapping


class ServerMetrics:
    """Counters and histograms of one server with a registry of their own.

    stats   gives the backend's counters when they are read
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def text(self) -> tuple[bytes, str]:
        """The exposition and its media type."""

    def refused(self, status: int) -> None:
        """Count a request that got an error status before it reached the engine."""
