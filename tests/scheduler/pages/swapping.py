"""A loop with a small pool and whole pages by letter, and runs whose every answer is checked."""

from collections.abc import Callable, Sequence

import numpy as np

from tests.fakes import FakeLoop, FakeModel, answer_alone
from tests.scheduler.traces import check_events
from xjax.config import SchedulerConfig, StepShapes
from xjax.request import Request, SamplingParams, TokenEvent
from xjax.scheduler.sequence import Sequence as Live

SIZE = 4


class Play:
    """Requests over a fake engine; `run` ends when all have ended and each got what it gets alone."""

    def __init__(
        self,
        num_pages: int = 21,
        *,
        host: int | None = 60,
        windows: tuple[int | None, ...] = (None,),
        rows: int = 4,
        loop: dict[str, Callable[[int], object]] | None = None,
        **changes: object,
    ) -> None:
        values: dict[str, object] = {
            "max_num_seqs": rows, "max_model_len": 120, "page_size": SIZE, "preemption_mode": "swap",
            "num_pages": (num_pages,) * len(windows), "windows": windows, "least_awaited": 4,
            "shapes": StepShapes(decode_rows=(rows,), prefill=((32, 4),), num_scored=(4,), num_pairs=200),
            "host_pages": None if host is None else (host,) * len(windows),
        }  # fmt: skip
        self.config = SchedulerConfig(**(values | changes))  # type: ignore[arg-type]
        model = FakeModel(windows, nan_token=-1, has_state=self.config.has_recurrent)
        self.loop = FakeLoop(self.config, model, **(loop or {}))  # type: ignore[arg-type]
        self.roster = self.loop.scheduler._roster
        self.requests: list[Request] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self.loop.on_event = lambda event: self.events.setdefault(event.request_id, []).append(event)

    def submit(self, prompt: Sequence[int], max_tokens: int, *, n: int = 1, **changes: object) -> str:
        """Queue a request; it ends after `max_tokens`."""
        name = f"r{len(self.requests)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, seed=5, ignore_eos=True, n=n)
        values = {"arrival": self.loop.now + len(self.requests) / 1000} | changes
        request = Request(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, **values)
        self.loop.submit(request)
        self.requests.append(request)
        return name

    def steps(self, count: int) -> None:
        """Go on for some steps."""
        for _ in range(count):
            self.loop.step()

    def until(self, is_so: Callable[[], bool], most: int = 300) -> None:
        """Go on until something is so."""
        for _ in range(most):
            if is_so():
                return
            self.loop.step()
        raise AssertionError("it never came to that")

    def run(self, most: int = 3000) -> None:
        """Go on to the end and check every answer; nothing may be left behind."""
        self.until(lambda: self.loop.is_idle, most)
        for request in self.requests:
            for sample_id in range(request.sampling.n):
                answer = answer_alone(self.loop.device.model, request, sample_id, self.loop.scheduler.longest)
                events = [item for item in self.events[request.request_id] if item.sample_id == sample_id]
                check_events(request, events, answer)
        assert self.counts["pages_used_0"] == 0
        for pool, host in zip(self.roster.book.pools, self.roster.book.hosts, strict=True):
            assert pool.num_available == pool.num_usable and host.num_available == host.num_usable
        assert self.counts["host_states_used"] == 0

    @property
    def counts(self) -> dict[str, float]:
        return self.loop.scheduler.stats()

    def live(self, name: str) -> Live:
        """The sequence of a request."""
        return self.roster.groups[name].sequences[0]

    def is_swapped(self, name: str) -> bool:
        return name in self.roster.groups and self.live(name).cache.swapped is not None

    def cached(self, name: str) -> int:
        """Tokens that a request was told to have found."""
        (found,) = [e.num_cached_tokens for e in self.events[name] if e.num_cached_tokens is not None]
        return found


def letters(text: str) -> list[int]:
    """Pages of tokens, one a letter."""
    rng = {letter: np.random.default_rng(ord(letter)) for letter in text}
    pages = {letter: rng[letter].integers(2, 60, SIZE).tolist() for letter in sorted(set(text))}
    return [token for letter in text for token in pages[letter]]
