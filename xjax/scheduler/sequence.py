"""One sample of one request while it lives: its tokens, pages, row and progress.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^                  |
       +----- preempt ----+        (its pages are gone, its tokens stay)

Counts of tokens, all from the start of the prompt:

    |<------------- num_tokens: known here ------------->|<- in_flight: sampled, not read yet ->|
    |<---- num_computed: in pages once every dispatched step has run ---->|

Knows nothing of other sequences; who may run is the scheduler's business.
"""

import enum

import numpy as np

from xjax.request import FinishReason, Request, TokenLogprobs


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.WAITING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.FINISHED),
}


class TokenCounts:
    """Distinct token ids of a sequence and how often each is in its output, kept as arrays.

    ids, counts   [num] int32; count 0 marks a token that only the prompt has
    """

    def __init__(self, prompt: np.ndarray) -> None:
        distinct = np.unique(prompt)
        self.num = len(distinct)
        self._ids = np.empty(max(2 * self.num, 64), np.int32)
        self._ids[: self.num] = distinct
        self._counts = np.zeros(len(self._ids), np.int32)
        self._index = {int(token): i for i, token in enumerate(distinct)}

    @property
    def ids(self) -> np.ndarray:
        """Distinct ids, [num] int32."""
        return self._ids[: self.num]

    @property
    def counts(self) -> np.ndarray:
        """Times each is in the output, [num] int32."""
        return self._counts[: self.num]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._index.get(token_id)
        if place is None:
            if self.num == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            place = self._index[token_id] = self.num
            self._ids[place] = token_id
            self.num += 1
        self._counts[place] += 1


class Sequence:
    """One sample of a request. `max_tokens` is already clipped to the context."""

    def __init__(self, request: Request, sample_id: int, *, max_tokens: int, num_groups: int, serial: int) -> None:
        self.request = request
        self.sample_id = sample_id
        self.max_tokens = max_tokens
        self.num_prompt = len(request.prompt_ids)
        self._tokens = np.empty(self.num_prompt + min(max_tokens, 256), np.int32)
        self._tokens[: self.num_prompt] = request.prompt_ids
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.in_flight = 0
        self.status = Status.WAITING
        self.slot: int | None = None
        self.pages: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.num_passed = [0] * num_groups  # leading pages given back, out of the window
        self.order = (-request.priority, request.arrival, serial)
        self.num_bypassed = 0  # times a later one was admitted while this one did not fit
        self.finish_reason: FinishReason | None = None
        self.counts: TokenCounts | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        sampling = request.sampling
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            self.counts = TokenCounts(self._tokens[: self.num_prompt])
        if sampling.prompt_logprobs is not None and sample_id == 0:
            self.prompt_logprobs = [None] * self.num_prompt
        self.has_emitted = False

    @property
    def num_output(self) -> int:
        """Output tokens known here."""
        return self.num_tokens - self.num_prompt

    @property
    def num_expected(self) -> int:
        """Tokens known here or sampled by a step under way."""
        return self.num_tokens + self.in_flight

    @property
    def num_left(self) -> int:
        """Tokens that must be computed before the next can be sampled; 1 for one that decodes."""
        return self.num_expected - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one token behind a finished prefill."""
        return self.num_left == 1 and self.num_expected > self.num_prompt

    @property
    def is_exhausted(self) -> bool:
        """Whether the tokens under way already reach max_tokens, so that nothing is left to sample."""
        return self.num_expected - self.num_prompt >= self.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether positions of the prompt still have to be reported."""
        return self.prompt_logprobs is not None and not self.has_emitted

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Known tokens [start, stop) as a view, int32."""
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]

    def append(self, token_id: int) -> None:
        """Add a sampled token that was read back."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), np.int32)])
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.counts is not None:
            self.counts.add(token_id)

    def move(self, status: Status) -> None:
        """Change the status along a legal edge."""
        assert (self.status, status) in _LEGAL, f"{self.status} -> {status}"
        self.status = status
