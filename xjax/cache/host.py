"""Slots for pages in host memory: counted like pages, and held by the mover while bytes move.

    allocate --bytes land: ready--> readable --begin_load / end_load--> ...
                                       free when owner, index and mover have all let go

A slot that is given up while the mover still writes or reads it is not handed out before the mover is
done with it. Knows neither bytes nor sequences. Used by one thread.
"""

from collections.abc import Iterable

from xjax.cache.pool import PagePool


class HostPool(PagePool):
    """Slots 1 .. num_pages-1 of one page group; there may be none."""

    least = 1

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots + 1)
        self._saving: set[int] = set()
        self._loading: dict[int, int] = {}

    def allocate(self, count: int) -> list[int]:
        """Take slots that bytes are about to land in; the caller and the mover hold one reference each."""
        slots = super().allocate(count)
        self.retain(slots)
        self._saving.update(slots)
        return slots

    def end_save(self, slots: Iterable[int]) -> None:
        """The mover has written these slots, or failed to."""
        slots = list(slots)
        self._saving.difference_update(slots)
        self.release(slots)

    def begin_load(self, slots: Iterable[int]) -> None:
        """The mover is going to read these slots."""
        slots = list(slots)
        assert self.is_ready(slots), "a slot is read before its bytes are there"
        self.retain(slots)
        for slot in slots:
            self._loading[slot] = self._loading.get(slot, 0) + 1

    def end_load(self, slots: Iterable[int]) -> None:
        """The mover has read these slots, or failed to."""
        slots = list(slots)
        for slot in slots:
            self._loading[slot] -= 1
            if not self._loading[slot]:
                del self._loading[slot]
        self.release(slots)

    def is_ready(self, slots: Iterable[int]) -> bool:
        """Whether the bytes of all of these have landed."""
        return self._saving.isdisjoint(slots)

    @property
    def busy(self) -> list[list[int]]:
        """Slots by reference of the mover, for `check`."""
        loading = [slot for slot, count in self._loading.items() for _ in range(count)]
        return [sorted(self._saving), loading]
