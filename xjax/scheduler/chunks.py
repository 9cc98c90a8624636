"""Which prefill shape serves the waiting prompts best, and how they share it. Pure functions."""

from collections.abc import Sequence

_STEP_OVERHEAD = 32  # a step costs about as much as this many tokens before it computes any


def divide(lengths: Sequence[int], tokens: int, tile: int) -> list[int]:
    """Tokens of each waiting prompt that a shape takes, oldest first, tiles never shared by two.

    lengths   tokens that each waiting prompt still needs, oldest first

    The first prompt that cannot end in this step leaves up to half of the tiles to younger ones
    that can, so that short prompts need not wait for the whole of a long one.
    """
    tiles, counts = tokens // tile, [0] * len(lengths)
    for place, length in enumerate(lengths):
        need = -(-length // tile)
        if need <= tiles:
            counts[place], tiles = length, tiles - need
            continue
        spare = tiles // 2
        for other in range(place + 1, len(lengths)):
            need = -(-lengths[other] // tile)
            if need <= spare:
                counts[other], spare, tiles = lengths[other], spare - need, tiles - need
            if not spare:
                break
        counts[place] = min(length, tiles * tile)
        break
    return counts


def choose_prefill(lengths: Sequence[int], shapes: Sequence[tuple[int, int]], limit: int) -> int:
    """Index of the shape with the most prompt tokens for its cost among those within `limit` tokens.

    lengths   tokens that each waiting prompt still needs, oldest first
    shapes    (tokens, tile), rising; the smallest is always allowed
    """
    best, best_rate = 0, 0.0
    for place, (tokens, tile) in enumerate(shapes):
        if place and tokens > limit:
            break
        rate = sum(divide(lengths, tokens, tile)) / (tokens + _STEP_OVERHEAD)
        if rate > best_rate:
            best, best_rate = place, rate
    return best
