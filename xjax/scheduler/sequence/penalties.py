"""What one sequence adds to its logits, as the sparse pairs a step takes: bans, biases, counts.

    |<- bans ->|<- biases ->|<- distinct tokens of the prompt, then new ones of the output ->|
     until min_tokens                         with their count in the output

Made from the token list alone, so it is right after any recompute. Knows no logits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xjax.request import Request

_ONLY_BIAS = -1  # count of a pair that no penalty applies to


@dataclass(frozen=True)
class Pairs:
    """Sparse penalties and biases of one row.

    ids      [z] int32
    counts   [z] int32     times in the output; 0: prompt only; -1: bias only
    biases   [z] float32   added to the logit
    """

    row: int
    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    biases: npt.NDArray[np.float32]


class Penalties:
    """The pairs of a sequence in growing arrays; an id is at most once before and once among the counts."""

    def __init__(self, request: Request, prompt: npt.NDArray[np.int32]) -> None:
        sampling = request.sampling
        biases = sampling.logit_bias
        banned = _banned(request)
        bans = sorted(banned - biases.keys())
        front = [*bans, *biases]
        distinct = np.unique(prompt) if _has_counts(request) else np.empty(0, np.int32)
        self._has_counts = _has_counts(request)
        self._min_tokens = sampling.min_tokens
        self._num_bans = len(bans)
        self._num = len(front) + len(distinct)
        size = max(2 * self._num, 64)
        self._ids: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        self._counts: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        self._biases: npt.NDArray[np.float32] = np.zeros(size, np.float32)
        self._ids[: self._num] = [*front, *distinct.tolist()]
        self._counts[: len(front)] = _ONLY_BIAS
        self._biases[: len(front)] = [-np.inf if i in banned else biases[i] for i in front]
        # A biased id that is banned for now gets its bias when the bans are lifted.
        self._hidden = {place: biases[i] for place, i in enumerate(front) if i in banned and i in biases}
        self._place_by_id = {int(i): len(front) + place for place, i in enumerate(distinct)}

    @classmethod
    def of(cls, request: Request, prompt: npt.NDArray[np.int32]) -> "Penalties | None":
        """The penalties of a request's sequence, or None when it has none at all.

        prompt   [num_prompt] int32
        """
        if request.sampling.logit_bias or _has_counts(request) or _banned(request):
            return cls(request, prompt)
        return None

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        if not self._has_counts:
            return
        place = self._place_by_id.get(token_id)
        if place is None:
            if self._num == len(self._ids):
                more = len(self._ids)
                self._ids = np.concatenate([self._ids, np.zeros(more, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
                self._biases = np.concatenate([self._biases, np.zeros(more, np.float32)])
            place = self._place_by_id[token_id] = self._num
            self._ids[place] = token_id
            self._num += 1
        self._counts[place] += 1

    def size(self, num_output: int) -> int:
        """Number of pairs for the output token with index `num_output`."""
        return self._num - self._start(num_output)

    def pairs(self, row: int, num_output: int) -> Pairs | None:
        """The pairs for the output token with index `num_output`; None when there are none.

        They stay as they are: ids are only appended, biases replaced, and counts are copied.
        """
        start = self._start(num_output)
        if start == self._num:
            return None
        if self._hidden and num_output >= self._min_tokens:
            self._biases = self._biases.copy()
            for place, bias in self._hidden.items():
                self._biases[place] = bias
            self._hidden = {}
        part = slice(start, self._num)
        return Pairs(row, self._ids[part], self._counts[part].copy(), self._biases[part])

    def _start(self, num_output: int) -> int:
        return self._num_bans if num_output >= self._min_tokens else 0


def _has_counts(request: Request) -> bool:
    sampling = request.sampling
    return bool(sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty)


def _banned(request: Request) -> set[int]:
    """Ids that must not be chosen before min_tokens."""
    sampling = request.sampling
    if not sampling.min_tokens:
        return set()
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_ids)}
