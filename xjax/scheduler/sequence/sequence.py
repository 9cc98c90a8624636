"""One sample of one request while it lives: its tokens, pages, row and progress.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^                  |
       +----- preempt ----+        (its tokens stay; its pages are gone, or wait on the host)

Counts of tokens, all from the start of the prompt:

    |<------------- num_tokens: known here ------------->|<- in_flight: sampled, not read yet ->|
    |<---- num_computed: in pages once every dispatched step has run ---->|

Knows nothing of other sequences; who may run is decided elsewhere.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xjax.cache.index import Record
from xjax.request import FinishReason, Request, TokenLogprobs
from xjax.scheduler.sequence.penalties import Penalties


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


@dataclass(frozen=True)
class SwappedPages:
    """What a waiting sequence has on the host.

    first   leading pages that stayed on the device
    slots   by group, of each page from `first` on; 0 where the sequence needs none
    state   slot of its recurrent state, the only copy that there is; 0 where the model has none
    """

    first: int
    slots: tuple[tuple[int, ...], ...]
    state: int = 0

    def in_group(self, group: int) -> list[int]:
        """Slots of a group."""
        return [slot for slot in self.slots[group] if slot]

    def held(self) -> list[list[int]]:
        """Slots of each group, and then that of the state, if any."""
        groups = [self.in_group(group) for group in range(len(self.slots))]
        return [*groups, [self.state] if self.state else []]


@dataclass
class CacheProgress:
    """What the prefix index and the host have of a sequence.

    keys, tokens    of its full pages, as far as they are made
    salt            of its keys
    records         of its leading pages that the index has or had; each follows the one before
    num_matched     leading pages that it found computed when it was last admitted
    num_published   leading pages that the index was told of
    matched_step    number of the plan that admitted it so; -1: nothing matched
    num_cached      tokens found when it was first admitted and there to be used; None before
    awaited         key of a page that another sequence is computing
    swapped         its pages on the host while it waits, where it has some
    num_failed      times that its pages on the host could not be brought back
    is_loading      its pages are on their way back; it has a row and computes from the next plan on
    """

    salt: bytes = b""
    keys: list[bytes] = field(default_factory=list[bytes])
    tokens: list[bytes] = field(default_factory=list[bytes])
    records: list[Record] = field(default_factory=list[Record])
    num_matched: int = 0
    num_published: int = 0
    matched_step: int = -1
    num_cached: int | None = None
    awaited: bytes | None = None
    swapped: SwappedPages | None = None
    num_failed: int = 0
    is_loading: bool = False


class Sequence:
    """One sample of a request. `max_tokens` is already clipped to the context.

    pages        page ids by group and index in the sequence; 0 for one given back. All groups
                 have the same number of them
    num_passed   leading pages given back by group, out of the window
    order        sorts the oldest of the highest priority first; no two are equal
    stop_ids     token ids that end it
    admitted     when it first got a row, on the clock of `plan`
    cache        what the prefix index and the host have of it
    """

    def __init__(
        self,
        request: Request,
        sample_id: int,
        *,
        prompt: npt.NDArray[np.int32],
        max_tokens: int,
        num_groups: int,
        serial: int,
    ) -> None:
        self.request = request
        self.sample_id = sample_id
        self.max_tokens = max_tokens
        self.num_prompt = len(prompt)
        self._tokens: npt.NDArray[np.int32] = prompt
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.in_flight = 0
        self.status = Status.WAITING
        self.slot: int | None = None
        self.pages: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.num_passed = [0] * num_groups
        self.order = (-request.priority, request.arrival, serial)
        self.num_bypassed = 0  # times a later one was admitted while this one did not fit
        self.finish_reason: FinishReason | None = None
        self.penalties: Penalties | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.sampling.prompt_logprobs is not None and sample_id == 0:
            self.prompt_logprobs = [None for _ in range(self.num_prompt)]
        eos_ids = frozenset[int]() if request.sampling.ignore_eos else request.eos_ids
        self.stop_ids = eos_ids.union(request.sampling.stop_token_ids)
        self.admitted: float | None = None
        self.cache = CacheProgress(salt=request.cache_salt)

    @property
    def num_expected(self) -> int:
        """Tokens known here or sampled by a step under way."""
        return self.num_tokens + self.in_flight

    @property
    def num_expected_output(self) -> int:
        """Output tokens known here or sampled by a step under way; index of the next to be sampled."""
        return self.num_tokens + self.in_flight - self.num_prompt

    @property
    def has_output(self) -> bool:
        """Whether a sampled token of it was read."""
        return self.num_tokens > self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that must be computed before the next can be sampled; 1 for one that decodes."""
        return self.num_tokens + self.in_flight - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one token behind what is in pages."""
        expected = self.num_tokens + self.in_flight
        if expected - self.num_computed != 1:
            return False
        if expected > self.num_prompt:
            return True
        return self.num_computed > 0 and not self.num_unscored and self.request.pooling is None

    @property
    def num_unscored(self) -> int:
        """Positions of the prompt whose successor's log-probability is still to be computed."""
        if self.prompt_logprobs is None or self.has_output:
            return 0
        return max(self.num_prompt - 1 - self.num_computed, 0)

    @property
    def last_token(self) -> int:
        """The last token known here."""
        return int(self._tokens[self.num_tokens - 1])

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Known tokens [start, stop) as a view, int32."""
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]

    def begin(self, now: float) -> None:
        """Make what only a sequence that runs needs, the first time that it is admitted."""
        if self.admitted is None:
            self.admitted = now
            self.penalties = Penalties.of(self.request, self._tokens[: self.num_prompt])

    def append(self, token_id: int) -> None:
        """Add a sampled token that was read back."""
        place = self.num_tokens
        if place == len(self._tokens):
            more = min(max(place // 2, 256), self.num_prompt + self.max_tokens - place)
            self._tokens = np.concatenate([self._tokens, np.empty(more, np.int32)])
        self._tokens[place] = token_id
        self.num_tokens = place + 1
        if self.penalties is not None:
            self.penalties.add(token_id)

    def move(self, status: Status) -> None:
        """Change the status along a legal edge."""
        assert (self.status, status) in _LEGAL, f"{self.status} -> {status}"
        self.status = status
