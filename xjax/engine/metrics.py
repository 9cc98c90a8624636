"""Counters of the engine itself: steps, time on the host, programs, compiles after warm-up.

Written by the engine thread, read by anyone; a reader may see numbers of two neighbouring steps.
"""

import threading
from collections import deque
from collections.abc import Mapping

import jax

from xjax.backend import Histogram

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts backend compiles of the whole process from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.count += 1

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._hear)


_STEP_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HOST_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class EngineMetrics:
    """Running totals, and the last steps' times for medians.

    host_seconds   of each recent step: planning, packing, dispatch and commit, no waiting
    work_seconds   of each recent step: processor time of the engine's thread, which unlike
                   host_seconds does not grow when others hold the processors
    step_seconds   of each recent step: from one result to the next
    compiles       counts backend compiles from the end of the warm-up on
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed_steps = 0
        self.moved_bytes = {"out": 0, "in": 0}
        self.moving_seconds = {"out": 0.0, "in": 0.0}
        self.host_seconds: deque[float] = deque(maxlen=512)
        self.work_seconds: deque[float] = deque(maxlen=512)
        self.step_seconds: deque[float] = deque(maxlen=512)
        self.compiles: CompileCounter | None = None
        self._steps, self._hosts = Histogram(_STEP_BOUNDS), Histogram(_HOST_BOUNDS)
        self._last_read = self._worked = 0.0

    def note_step(self, dispatched: float, read: float, host: float, worked: float) -> float:
        """Take in one finished step and return how long it took; all in seconds.

        dispatched, read   when it was started and when its result was there, on one clock
        host               spent on it by the host
        worked             processor time of the engine's thread so far
        """
        seconds = read - max(self._last_read, dispatched)
        self.num_steps += 1
        self.host_seconds.append(host)
        self.work_seconds.append(worked - self._worked)
        self.step_seconds.append(seconds)
        self._hosts.observe(host)
        self._steps.observe(seconds)
        self._last_read, self._worked = read, worked
        return seconds

    def note_move(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Take in one move of pages, "out" to the host or "in" from there."""
        self.moved_bytes[direction] += num_bytes
        self.moving_seconds[direction] += seconds

    def end_warm_up(self) -> None:
        """From now on no compile is expected, and each is counted."""
        self.compiles = self.compiles or CompileCounter()

    def close(self) -> None:
        """Let go of what is global to the process."""
        if self.compiles is not None:
            self.compiles.close()

    def snapshot(self) -> Mapping[str, float]:
        """All of it by name; medians in seconds."""
        return {
            "engine_steps": self.num_steps,
            "failed_steps": self.num_failed_steps,
            **{f"swap_{name}_bytes": count for name, count in self.moved_bytes.items()},
            **{f"swap_{name}_seconds": seconds for name, seconds in self.moving_seconds.items()},
            "compiles_after_warmup": self.compiles.count if self.compiles is not None else 0,
            "host_seconds_median": _median(self.host_seconds),
            "work_seconds_median": _median(self.work_seconds),
            "step_seconds_median": _median(self.step_seconds),
            **self._steps.stats("step_seconds"),
            **self._hosts.stats("host_seconds"),
        }


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
