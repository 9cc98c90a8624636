"""Recurrent state goes to the host and back as one with its sequence's pages, and never has a second copy."""

import pytest

from tests.scheduler.pages.swapping import SIZE, Play, letters
from xjax.scheduler.sequence import Status


def recurrent(*, states: int = 4, **changes) -> Play:
    return Play(has_recurrent=True, host_states=states, **changes)


def crowd(play: Play) -> tuple[str, str]:
    """Two that fit together at first; the younger has to yield. Each needs up to 16 of 20 pages."""
    return play.submit(letters("abcd"), 46), play.submit(letters("wxyz"), 44)


def test_all_pages_and_the_state_go_in_one_transfer_and_come_back_in_one():
    play, moves = recurrent(), []
    take = play.roster.swap.take_moves
    play.loop.scheduler.swap.take_moves = lambda: moves.append(take()) or moves[-1]
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    sequence = play.live(young)
    num_pages = -(-sequence.num_computed // SIZE)
    assert sequence.cache.swapped.first == 0 and sequence.slot is None
    (save,) = [item for part in moves if part for item in part.saves]
    assert save.states.tolist() == [sequence.cache.swapped.state] and save.num_pages == num_pages
    assert play.counts["host_states_used"] == 1
    play.until(lambda: not play.is_swapped(young))
    (load,) = [item for part in moves if part for item in part.loads]
    assert load.rows.tolist() == [sequence.slot] and load.states.tolist() == save.states.tolist()
    play.run()
    counts = play.counts
    assert counts["swap_out_states"] == counts["swap_out_sequences"] == counts["swap_in_states"]
    assert counts["recomputed_tokens"] == counts["retained_pages"] == 0


def test_a_state_comes_back_into_another_row():
    play = recurrent(rows=3)
    _, young = crowd(play)
    play.steps(3)
    row = play.live(young).slot
    play.until(lambda: play.is_swapped(young))
    play.roster.rows._free.sort(key=lambda free: free == row, reverse=True)  # the last is handed out next
    play.until(lambda: not play.is_swapped(young))
    assert play.live(young).slot != row
    play.run()
    assert play.counts["recomputed_tokens"] == 0


@pytest.mark.parametrize("states", [0, 1])
def test_without_room_for_the_state_nothing_moves_and_all_is_computed_again(states):
    play = recurrent(states=states, loop={"is_checked": False})  # its books have no place for a stranger
    if states:
        held = play.roster.book.states.allocate(1)
    crowd(play)
    play.until(lambda: play.counts["preemptions"] > 0)
    assert play.counts["swap_out_pages"] == play.counts["swap_out_states"] == 0
    assert all(host.num_free == host.num_usable for host in play.roster.book.hosts)
    if states:
        play.roster.book.states.end_save(held)
        play.roster.book.states.release(held)
    play.run()
    assert play.counts["recomputed_tokens"] > 0


def test_without_room_for_the_pages_the_state_stays_too():
    play = recurrent(host=3)
    crowd(play)
    play.run()
    assert play.counts["swap_out_states"] == 0 and play.counts["recomputed_tokens"] > 0


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_save_that_fails_means_to_compute_again(delay):
    play = recurrent(loop={"broken_moves": lambda serial: serial == 1, "move_delay": lambda serial: delay})
    crowd(play)
    play.run()
    assert play.counts["swap_failures"] == 1 and play.counts["recomputed_tokens"] > 0


@pytest.mark.parametrize("num_broken", [1, 2, 3, 10**6])
def test_a_load_that_fails_leaves_the_state_on_the_host(num_broken):
    play = recurrent(loop={"broken_moves": lambda serial: 1 < serial <= 1 + num_broken})
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    before = play.live(young).cache.swapped
    play.until(lambda: play.counts["swap_failures"] > 0)
    if num_broken < 3:
        assert play.live(young).cache.swapped == before
    play.run()
    assert play.counts["swap_failures"] == min(num_broken, 3)
    assert (play.counts["recomputed_tokens"] > 0) == (num_broken >= 3)


@pytest.mark.parametrize("where", ["saving", "on the host", "loading", "loaded"])
@pytest.mark.parametrize("way", ["abort", "finish"])
def test_an_end_anywhere_leaves_no_state(where, way):
    play = recurrent(loop={"move_delay": lambda serial: 3})
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    if where == "on the host":
        play.steps(6)
        assert play.roster.swap.is_ready(play.live(young))
    if where.startswith("load"):
        play.until(lambda: not play.is_swapped(young))
        play.steps(2 if where == "loaded" else 0)
    if way == "abort":
        play.loop.abort(young)
    else:
        play.loop.finish(young, 0, 2)
    play.run()
    assert play.roster.book.states.num_free == 4


@pytest.mark.parametrize("windows", [(None,), (None, 7), (5,)])
def test_a_sequence_swapped_many_times_finishes(windows):
    play = recurrent(windows=windows)
    long, other = play.submit(letters("abcxy"), 46), play.submit(letters("klm"), 30)
    rows = set()
    for i in range(400):
        play.loop.step()
        if long in play.roster.groups and play.live(long).status is Status.RUNNING and i % 3 == 0:
            rows.add(play.live(long).slot)
            play.roster.preempt(play.live(long), swap=True)
            assert play.is_swapped(long)
    play.run()
    assert play.counts["swap_out_states"] >= 12 and play.counts["recomputed_tokens"] == 0
    assert other in play.events


def test_swapping_is_judged_by_the_bytes_of_the_state_too():
    """All tokens count against it, since nothing of such a sequence can be found again."""
    for state_bytes, is_better in ((1, True), (10**9, False)):
        play = recurrent(preemption_mode="auto", page_bytes=(1,), state_bytes=state_bytes)
        _, young = crowd(play)
        play.until(lambda play=play, young=young: play.live(young).num_computed > 20)
        pace = play.loop.scheduler.pace
        for _ in range(20):
            pace.observe_move(10**6, 0.001)
        assert play.loop.scheduler._planner._is_swap_better(play.live(young)) is is_better
