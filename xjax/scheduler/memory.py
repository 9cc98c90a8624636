"""Rows and pages of sequences: slots, tables, how many pages one needs, getting and giving back.

A sequence gets a slot when it is admitted and keeps it until it ends or is preempted; the tables of
its slot change by deltas and are gathered each step. `PageBook` is the one place that allocates
pages for a sequence and holds the one `release`; window groups give back pages that no later token
can see. Who has to yield when pages run out is decided elsewhere.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.cache.pool import PagePool
from xjax.config import SchedulerConfig
from xjax.scheduler.sequence import Sequence

_UNLIMITED = 2**31 - 1
# Names are those of the packed layout, so packing a step copies columns and nothing else.
_COLUMNS: tuple[tuple[str, type, tuple[int, ...]], ...] = (
    ("seed", np.uint32, (2,)),
    ("sample_id", np.int32, ()),
    ("temperature", np.float32, ()),
    ("top_k", np.int32, ()),
    ("top_p", np.float32, ()),
    ("min_p", np.float32, ()),
    ("repetition_penalty", np.float32, ()),
    ("frequency_penalty", np.float32, ()),
    ("presence_penalty", np.float32, ()),
    ("want_logprobs", np.int32, ()),
)


class RowTable:
    """Per-slot columns and page tables of R rows.

    pages     [G, R, M] int32   page ids by page index, 0 where there is none
    columns   by field name, [R, ...]
    """

    def __init__(self, config: SchedulerConfig) -> None:
        rows = config.max_num_seqs
        max_pages = -(-config.max_model_len // config.page_size)
        self.pages: npt.NDArray[np.int32] = np.zeros((len(config.num_pages), rows, max_pages), np.int32)
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((rows, *dims), kind) for name, kind, dims in _COLUMNS
        }
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a slot and write its sampling parameters there."""
        slot = self._free.pop()
        sequence.slot = slot
        sampling, columns = sequence.request.sampling, self.columns
        seed = (sampling.seed or 0) & (2**64 - 1)
        columns["seed"][slot] = (seed & 0xFFFFFFFF, seed >> 32)
        columns["sample_id"][slot] = sequence.sample_id
        columns["top_k"][slot] = min(max(sampling.top_k, 0), _UNLIMITED)
        columns["want_logprobs"][slot] = sampling.logprobs is not None
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            columns[name][slot] = getattr(sampling, name)
        for group, pages in enumerate(sequence.pages):
            self.pages[group, slot] = 0
            self.pages[group, slot, : len(pages)] = pages

    def give_back(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        assert sequence.slot is not None
        self._free.append(sequence.slot)
        sequence.slot = None


class PageBook:
    """The pools of all groups and the tables that name their pages."""

    def __init__(self, config: SchedulerConfig, rows: RowTable) -> None:
        self.page_size = config.page_size
        self.pools = tuple(PagePool(count) for count in config.num_pages)
        self._windows = {group: window for group, window in enumerate(config.windows) if window is not None}
        self._rows = rows
        self._longest_chunk = config.shapes.prefill[-1][0]

    def pages_at_once(self, group: int, num_tokens: int, num_left: int = _UNLIMITED) -> int:
        """Most pages of a group that `num_tokens` hold at one time, `num_left` of them not computed yet."""
        pages = -(-num_tokens // self.page_size)
        window = self._windows.get(group)
        if window is None:
            return pages
        most = -(-(window - 1 + min(num_left, self._longest_chunk)) // self.page_size) + 1
        return min(pages, most, self.pools[group].num_usable)

    def capacity(self) -> int:
        """Tokens of the longest sequence that can go on alone in the empty pools."""
        least = dict(enumerate([_UNLIMITED] * len(self.pools)))
        for group, window in self._windows.items():
            # To go on by one token: the pages under its window, which may begin inside a page.
            least[group] = -(-(window - 1) // self.page_size) + 1
        short = [pool.num_usable for group, pool in enumerate(self.pools) if pool.num_usable < least[group]]
        return min(short) * self.page_size if short else _UNLIMITED

    def has_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence already holds the pages of its first `num_tokens` tokens."""
        return not sequence.pages or num_tokens <= len(sequence.pages[0]) * self.page_size

    def fitting(self, sequence: Sequence) -> int:
        """Tokens of a sequence that its own pages and the free ones hold."""
        if not self.pools:
            return _UNLIMITED
        return (len(sequence.pages[0]) + min(pool.num_free for pool in self.pools)) * self.page_size

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a running sequence the pages of its first `num_tokens` tokens; they must be free."""
        if self.has_pages(sequence, num_tokens):
            return
        assert sequence.slot is not None
        for group, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            held = len(pages)
            fresh = pool.allocate(-(-num_tokens // self.page_size) - held)
            self._rows.pages[group, sequence.slot, held : held + len(fresh)] = fresh
            pages.extend(fresh)

    def pass_window(self, sequence: Sequence, position: int) -> None:
        """Give back pages that no token from `position` on can see."""
        for group, window in self._windows.items():
            first = sequence.num_passed[group]
            passed = (position - window + 1) // self.page_size
            if passed <= first:
                continue
            pages = sequence.pages[group]
            passed = min(passed, len(pages))
            self.pools[group].release(page for page in pages[first:passed] if page)
            pages[first:passed] = [0] * (passed - first)
            sequence.num_passed[group] = passed
            if sequence.slot is not None:
                self._rows.pages[group, sequence.slot, first:passed] = 0

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds, slot included."""
        for group, pages in enumerate(sequence.pages):
            self.pools[group].release(page for page in pages if page)
            pages.clear()
            sequence.num_passed[group] = 0
        if sequence.slot is not None:
            self._rows.give_back(sequence)
