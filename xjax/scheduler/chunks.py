"""Which prefill shape serves the waiting prompts best. Pure functions."""

from collections.abc import Sequence

_STEP_OVERHEAD = 32  # a step costs about as much as this many tokens before it computes any


def fill(lengths: Sequence[int], tokens: int, tile: int) -> int:
    """Prompt tokens that a shape takes up, oldest prompt first, tiles never shared by two."""
    tiles, taken = tokens // tile, 0
    for length in lengths:
        if tiles == 0:
            break
        count = min(length, tiles * tile)
        tiles -= -(-count // tile)
        taken += count
    return taken


def choose_prefill(lengths: Sequence[int], shapes: Sequence[tuple[int, int]], limit: int) -> int:
    """Index of the shape with the most prompt tokens for its cost among those within `limit` tokens.

    lengths   tokens that each waiting prompt still needs, oldest first
    shapes    (tokens, tile), rising; the smallest is always allowed
    """
    best, best_rate = 0, 0.0
    for i, (tokens, tile) in enumerate(shapes):
        if i and tokens > limit:
            break
        rate = fill(lengths, tokens, tile) / (tokens + _STEP_OVERHEAD)
        if rate > best_rate:
            best, best_rate = i, rate
    return best
