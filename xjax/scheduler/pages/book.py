"""Pages of sequences: how many one needs, getting them and giving them back.

`PageBook` is the one place that takes pages for a sequence and holds the one `release`; window groups
give back pages that no later token can see. Pages that nobody uses but the index make room for those
that are needed. Who has to yield when there are none of either is decided elsewhere.
"""

from xjax.cache.host import HostPool
from xjax.cache.index import PrefixIndex
from xjax.cache.pool import PagePool
from xjax.config import SchedulerConfig
from xjax.scheduler.pages.rows import RowTable
from xjax.scheduler.sequence import Sequence

_UNLIMITED = 2**31 - 1


class PageBook:
    """The pools of all groups, the index over them and the tables that name their pages.

    pools, hosts   device pages and host slots, by group
    states         host slots for recurrent state
    index          which pages hold which tokens
    """

    def __init__(self, config: SchedulerConfig, rows: RowTable) -> None:
        self.page_size = config.page_size
        self.pools = tuple(PagePool(count) for count in config.num_pages)
        self.hosts = tuple(HostPool(count) for count in config.host_pages or (0,) * len(self.pools))
        self.states = HostPool(config.host_states)
        most = config.prefix_cache_max_tokens
        self.index = PrefixIndex(
            self.pools,
            self.hosts,
            config.windows,
            config.page_size,
            max_pages=(None if most is None else most // config.page_size) if config.prefix_cache else 0,
        )
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
        return (len(sequence.pages[0]) + min(pool.num_available for pool in self.pools)) * self.page_size

    def take(self, group: int, count: int) -> list[int]:
        """Take pages of a group, idle ones of the index where too few are free; they must be available."""
        pool = self.pools[group]
        while pool.num_free < count and self.index.evict(group):
            pass
        return pool.allocate(count)

    def take_slots(self, counts: list[int], num_states: int = 0) -> list[list[int]] | None:
        """Take host slots of every group, idle ones of the index where too few are free, and for states.

        returns   slots of each group, then those for states; None, with nothing taken, for too few
        """
        if num_states > self.states.num_free:
            return None
        if any(host.num_available < count for host, count in zip(self.hosts, counts, strict=True)):
            return None
        for group, (host, count) in enumerate(zip(self.hosts, counts, strict=True)):
            while host.num_free < count and self.index.evict_slot(group):
                pass
        if any(host.num_free < count for host, count in zip(self.hosts, counts, strict=True)):
            return None
        slots = [host.allocate(count) for host, count in zip(self.hosts, counts, strict=True)]
        return [*slots, self.states.allocate(num_states)]

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a running sequence the pages of its first `num_tokens` tokens; they must be available."""
        if self.has_pages(sequence, num_tokens):
            return
        assert sequence.slot is not None
        for group, pages in enumerate(sequence.pages):
            held = len(pages)
            fresh = self.take(group, -(-num_tokens // self.page_size) - held)
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

    def stats(self) -> dict[str, float]:
        """Counters of the index since the start; gauges of pages, host slots and records now."""
        index = self.index
        found: dict[str, float] = {
            "prefix_stored": index.num_stored,
            "prefix_evicted": index.num_evicted,
            "prefix_records": len(index),
            "prefix_cached_tokens": len(index) * self.page_size,
        }
        for group, (pool, host) in enumerate(zip(self.pools, self.hosts, strict=True)):
            found[f"pages_used_{group}"] = pool.num_usable - pool.num_available
            found[f"pages_cached_{group}"] = pool.num_kept
            found[f"pages_idle_{group}"] = pool.num_idle
            found[f"pages_total_{group}"] = pool.num_usable
            found[f"host_slots_used_{group}"] = host.num_usable - host.num_free
            found[f"host_slots_total_{group}"] = host.num_usable
        found["host_states_used"] = self.states.num_usable - self.states.num_free
        found["host_states_total"] = self.states.num_usable
        return found

    def release(self, sequence: Sequence) -> None:
        """Give back every page that a sequence holds, the last first."""
        for group, pages in enumerate(sequence.pages):
            self.pools[group].release(page for page in reversed(pages) if page)
            pages.clear()
            sequence.num_passed[group] = 0
