"""Pages of sequences: what a window keeps, counted by going through positions one by one."""

import numpy as np
import pytest

from xjax.config import SchedulerConfig, StepShapes
from xjax.request import Request, SamplingParams
from xjax.scheduler.pages.book import PageBook
from xjax.scheduler.pages.rows import RowTable
from xjax.scheduler.sequence import Sequence


def make(windows, num_pages, page_size=4, chunk=8):
    shapes = StepShapes(decode_rows=(2,), prefill=((chunk, 4),), num_scored=(4,), num_pairs=99)
    config = SchedulerConfig(
        max_num_seqs=2,
        max_model_len=64,
        page_size=page_size,
        num_pages=num_pages,
        windows=windows,
        shapes=shapes,
    )
    rows = RowTable(config)
    book = PageBook(config, rows)
    request = Request(request_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams())
    prompt = np.array([1, 2, 3], np.int32)
    sequence = Sequence(request, 0, prompt=prompt, max_tokens=9, num_groups=len(windows), serial=0)
    rows.take(sequence)
    return rows, book, sequence


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 17])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_window_keeps_what_later_tokens_see_and_no_more(window, chunk):
    rows, book, sequence = make((None, window), (65, 65))
    for start in range(0, 60, chunk):
        book.pass_window(sequence, start)
        book.grow(sequence, start + chunk)
        pages = sequence.pages[1]
        seen = {position // 4 for position in range(max(start - window + 1, 0), start + chunk)}
        assert {i for i, page in enumerate(pages) if page} == seen
        assert rows.pages[1, sequence.slot, : len(pages)].tolist() == pages
        assert all(sequence.pages[0]) and len(sequence.pages[0]) == len(pages)
        assert len(seen) <= book.pages_at_once(1, start + chunk)
    held = [sum(page != 0 for page in pages) for pages in sequence.pages]
    assert [64 - pool.num_free for pool in book.pools] == held
    book.release(sequence)
    assert [pool.num_free for pool in book.pools] == [64, 64]
    rows.give_back(sequence)
    assert sequence.slot is None and rows.num_free == 2


def test_fitting_is_limited_by_the_scarcest_group():
    _, book, sequence = make((None, 4), (9, 5))
    assert book.fitting(sequence) == 16
    book.grow(sequence, 10)
    assert book.fitting(sequence) == 16
    assert book.has_pages(sequence, 12) and not book.has_pages(sequence, 13)
    book.pass_window(sequence, 10)
    assert book.fitting(sequence) == 20


def test_model_without_pages_is_never_short():
    _, book, sequence = make((), ())
    assert book.has_pages(sequence, 10**6)
    assert book.fitting(sequence) == book.capacity() == 2**31 - 1
    book.grow(sequence, 50)
    book.release(sequence)


def test_settings_larger_than_the_device_counts_are_cut():
    rows, _, sequence = make((None,), (65,))
    rows.give_back(sequence)
    sequence.request = Request(
        request_id="b", prompt_ids=(1,), sampling=SamplingParams(top_k=10**30, seed=2**64 - 1)
    )
    rows.take(sequence)
    assert rows.columns["top_k"][sequence.slot] == 2**31 - 1
    assert rows.columns["seed"][sequence.slot].tolist() == [2**32 - 1] * 2
