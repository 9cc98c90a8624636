"""Counters of the engine itself: steps, time on the host, programs, compiles after warm-up.

Written by the engine thread, read by anyone; a reader may see numbers of two neighbouring steps.
"""

import threading
from collections import deque
from collections.abc import Mapping

import jax

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


class EngineMetrics:
    """Running totals, and the last steps' times for medians.

    host_seconds   of each recent step: planning, packing, dispatch and commit, no waiting
    work_seconds   of each recent step: processor time of the engine's thread, which unlike
                   host_seconds does not grow when others hold the processors
    step_seconds   of each recent step: from one result to the next
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed_steps = 0
        self.host_seconds: deque[float] = deque(maxlen=512)
        self.work_seconds: deque[float] = deque(maxlen=512)
        self.step_seconds: deque[float] = deque(maxlen=512)
        self.host_seconds_total = 0.0

    def note_step(self, host: float, work: float, total: float) -> None:
        """Take in one finished step, times in seconds."""
        self.num_steps += 1
        self.host_seconds.append(host)
        self.work_seconds.append(work)
        self.step_seconds.append(total)
        self.host_seconds_total += host

    def snapshot(self) -> Mapping[str, float]:
        """All of it by name; medians in seconds."""
        return {
            "engine_steps": self.num_steps,
            "failed_steps": self.num_failed_steps,
            "host_seconds_total": self.host_seconds_total,
            "host_seconds_median": _median(self.host_seconds),
            "work_seconds_median": _median(self.work_seconds),
            "step_seconds_median": _median(self.step_seconds),
        }


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
