"""Rows of running sequences: slots, sampling parameters and page tables.

A sequence gets a slot when it is admitted and keeps it until it ends or is preempted; the tables of
its slot change by deltas and are gathered each step.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

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
        self.write(sequence)

    def write(self, sequence: Sequence) -> None:
        """Write the whole table of a sequence that has a slot."""
        for group, pages in enumerate(sequence.pages):
            self.pages[group, sequence.slot] = 0
            self.pages[group, sequence.slot, : len(pages)] = pages

    def give_back(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        assert sequence.slot is not None
        self._free.append(sequence.slot)
        sequence.slot = None
