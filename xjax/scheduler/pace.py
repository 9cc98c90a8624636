"""How long steps take, learned as they are read: what a prompt's chunk may cost rows that decode.

    step = the decodes' own time + a time for each prompt token of its shape

Knows no sequence. Times are seconds, given by whoever measures them.
"""

from xjax.scheduler.plan import Plan

_WEIGHT = 0.2  # of the newest step
_MOST = 3.0  # a step counts as at most so many times what was expected: compiling beside it is no pace


class Pace:
    """Running estimates of both parts of a step; None until the first was seen."""

    def __init__(self) -> None:
        self._decode: float | None = None
        self._per_token: float | None = None
        self._per_byte: float | None = None

    def observe_move(self, num_bytes: int, seconds: float) -> None:
        """Learn from how long it took to move pages one way."""
        self._per_byte = _moved(self._per_byte, seconds / max(num_bytes, 1))

    def is_moving_faster(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether to move pages out and back takes less time than to compute so many tokens again.

        True as long as one of them was never seen.
        """
        if self._per_byte is None or self._per_token is None:
            return True
        return 2 * num_bytes * self._per_byte <= num_tokens * self._per_token

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from how long a step took."""
        if plan.prefill is None:
            self._decode = _moved(self._decode, seconds)
            return
        own = self._decode if plan.num_decode and self._decode is not None else 0.0
        self._per_token = _moved(self._per_token, max(seconds - own, 0.0) / plan.prefill[0])

    def most_tokens(self, target: float, most: int) -> int:
        """Prompt tokens that a step with decodes may take, at most `most`.

        The step should end within `target` seconds, or, where decoding alone takes longer than half of
        that, within twice the time of the decodes: smaller chunks would then save nobody much.
        """
        if not self._per_token:
            return most
        own = self._decode or 0.0
        return min(int(max(target - own, own) / self._per_token), most)


def _moved(before: float | None, sample: float) -> float:
    if before is None:
        return sample
    return (1 - _WEIGHT) * before + _WEIGHT * min(sample, _MOST * before)
