"""The distribution a row must be drawn from, in numpy float64 with a full sort, and its tests."""

import math

import numpy as np

from xjax.state.batch import BatchShape, Packed, Sampled, unpack


def order_of(logits: np.ndarray) -> np.ndarray:
    """Token ids, larger logit first, of equal ones the lower id first."""
    return np.lexsort((np.arange(logits.size), -logits))


def distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities [V] after temperature, top_k, top_p over what is left, min_p."""
    order = order_of(logits)
    values = logits.astype(np.float64)[order]
    with np.errstate(invalid="ignore"):
        weights = np.exp((values - values[0]) / np.float64(np.float32(temperature)))
    weights[values == -np.inf] = 0
    if top_k > 0:
        weights[top_k:] = 0
    if top_p < 1:
        mass = np.cumsum(weights) / weights.sum()
        weights[np.searchsorted(mass, np.float64(np.float32(top_p))) + 1 :] = 0
    weights[weights < np.float64(np.float32(min_p)) * weights[0]] = 0
    result = np.zeros_like(weights)
    result[order] = weights / weights.sum()
    return result


def chi_square_p(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a fit as bad as this one; 0 when a token cannot have been drawn.

    Tokens expected fewer than eight times are counted together. Wilson and Hilferty's
    approximation of the chi-square tail.
    """
    counts = np.bincount(tokens, minlength=probabilities.size)
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * tokens.size
    is_common = expected >= 8
    observed = np.append(counts[is_common], counts[~is_common].sum())
    expected = np.append(expected[is_common], expected[~is_common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = observed.size - 1
    if degrees == 0:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    deviation = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(deviation / math.sqrt(2))


def make_sampled(num_rows: int, *, full=False, num_pairs=0, num_slots=None, **fields) -> Sampled:
    """Rows with the layout's own padding values, and the named fields set."""
    shape = BatchShape(
        num_rows=num_rows,
        num_decode=num_rows,
        num_prefill=0,
        tile=1,
        num_groups=1,
        max_pages=1,
        num_sampled=num_rows,
        trash_row=num_rows if num_slots is None else num_slots,
        full=full,
        num_pairs=num_pairs,
    )
    packed = Packed(shape)
    names = {"token": "sample_token", "position": "sample_position", "slot": "sample_slot"}
    for name, value in fields.items():
        getattr(packed, names.get(name, name))[:] = value
    return unpack(packed.vector, shape)[1]
