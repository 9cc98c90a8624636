"""What goes into an engine and what comes out: plain frozen values, serializable.

A `Request` is token ids and how to continue them. The engine answers with `TokenEvent`s,
one for each sample and step that produced something, the last one with a `finish_reason`.
This module knows no text, no pages and no arrays.
"""

# Values come from users; annotations promise nothing about them.
# pyright: reportUnnecessaryComparison=false, reportUnnecessaryIsInstance=false

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from xjax.errors import RequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_SAMPLES = 128
MAX_SEED = 2**64 - 1
MAX_SALT = 256  # bytes
POOLINGS = ("last", "mean")


class FinishReason(enum.StrEnum):
    """Why a sample ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{param}: {message}", param=param)


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number in a range; NaN is in none, and an int may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; every field is checked on construction.

    Order of the transforms: penalties, logit_bias, temperature, top_k, top_p over what
    top_k left, min_p. `temperature=0` takes the most likely token.
    Raises RequestError naming the field that is out of range.
    """

    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0  # end-of-sequence and stop tokens are banned before
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None  # None: drawn by the front that builds the request
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the chosen token's and the best k
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None:
                value = ()
            if isinstance(value, str | int):
                value = (value,)
            _require(isinstance(value, Iterable), name, f"must be one or a list of them, not {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        self._check_counts()
        self._check_numbers()
        self._check_lists()

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as they are: no penalties, bias, bans or log-probabilities."""
        is_shaped = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return not (
            is_shaped
            or self.logit_bias
            or self.min_tokens
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )

    def replace(self, **changes: Any) -> "SamplingParams":
        """Copy with some fields changed, checked again."""
        return replace(self, **changes)

    def _check_counts(self) -> None:
        _require(
            self.max_tokens is None or (_is_count(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            f"must be an integer of at least 1, not {self.max_tokens!r}",
        )
        _require(
            _is_count(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            f"must be an integer of at least 0, not {self.min_tokens!r}",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"{self.min_tokens} is above max_tokens, {self.max_tokens}",
        )
        _require(
            _is_count(self.n) and 1 <= self.n <= MAX_SAMPLES,
            "n",
            f"must be an integer from 1 to {MAX_SAMPLES}, not {self.n!r}",
        )
        _require(
            _is_count(self.top_k) and self.top_k >= -1,
            "top_k",
            f"must be an integer of at least -1, not {self.top_k!r}",
        )
        _require(
            self.seed is None or (_is_count(self.seed) and -(2**63) <= self.seed <= MAX_SEED),
            "seed",
            f"must be a 64-bit integer, not {self.seed!r}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or (_is_count(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                f"must be an integer from 0 to {MAX_LOGPROBS}, not {value!r}",
            )

    def _check_numbers(self) -> None:
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "frequency_penalty": (-2.0, 2.0),
            "presence_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            _require(
                _is_number(value, low, high),
                name,
                f"must be a number from {low:g} to {high:g}, not {value!r}",
            )
        _require(self.top_p > 0, "top_p", "must be above 0")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, f"must be true or false, not {value!r}")

    def _check_lists(self) -> None:
        _require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}",
        )
        for text in self.stop:
            _require(
                isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH,
                "stop",
                f"each must be a string of 1 to {MAX_STOP_LENGTH} characters",
            )
        _require(
            len(self.stop_token_ids) <= MAX_LOGIT_BIAS,
            "stop_token_ids",
            f"at most {MAX_LOGIT_BIAS} ids, not {len(self.stop_token_ids)}",
        )
        for token_id in self.stop_token_ids:
            _require(
                _is_count(token_id) and 0 <= token_id < 2**31,
                "stop_token_ids",
                f"{token_id!r} is not a token id",
            )
        _require(
            isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"must be a mapping of at most {MAX_LOGIT_BIAS} token ids",
        )
        for token_id, value in self.logit_bias.items():
            _require(
                _is_count(token_id) and 0 <= token_id < 2**31,
                "logit_bias",
                f"{token_id!r} is not a token id",
            )
            _require(
                _is_number(value, -100, 100),
                "logit_bias",
                f"must be a number from -100 to 100, not {value!r}",
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids, ready for an engine.

    `sampling.seed` is set and `sampling.max_tokens` may be None. `eos_ids` are the ids that
    end a sample unless `ignore_eos`. `priority`: larger runs first. `arrival` in seconds
    of the front's monotonic clock. `max_queue_time` in seconds, None for no limit. `cache_salt`: pages are
    shared with requests of the same salt alone.
    `pooling`: "last" or "mean" asks for the hidden states of the prompt, pooled into one vector, and
    for no token; every token of such a prompt is computed, so it never starts from kept pages.
    Raises RequestError for a salt of more than MAX_SALT bytes, and for a pooling that is neither or that is
    asked for with what tokens have.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: float = 0.0
    max_queue_time: float | None = None
    cache_salt: bytes = b""
    pooling: str | None = None

    def __post_init__(self) -> None:
        _require(
            isinstance(self.cache_salt, bytes) and len(self.cache_salt) <= MAX_SALT,
            "cache_salt",
            f"must be at most {MAX_SALT} bytes",
        )
        if self.pooling is None:
            return
        _require(
            isinstance(self.pooling, str) and self.pooling in POOLINGS,
            "pooling",
            f"must be one of {', '.join(POOLINGS)}, not {self.pooling!r}",
        )
        _require(
            self.sampling.n == 1 and self.sampling.prompt_logprobs is None,
            "pooling",
            "goes with neither n nor prompt_logprobs: no token is made",
        )


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position: the token's own, its rank from 1, the best few."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class TokenEvent(NamedTuple):
    """What one sample of one request produced in one step.

    token_ids         new output tokens, oldest first (a finishing stop token is included)
    logprobs          one entry a token, or empty when none were asked for
    finish_reason     set on the last event of the sample; nothing follows it
    stop_token_id     the id that ended the sample, when an id did
    prompt_logprobs   on the first event, when asked for: one entry a prompt token, the
                      first None
    error             one line, when finish_reason is ERROR
    error_code        what kind of error where a client can do something about it: "queue_timeout"
    embedding         the pooled hidden states, on the one event of a request with `pooling`
    num_cached_tokens prompt tokens whose pages were reused; set on the first event
    queue_seconds     from the request's arrival to its first step; set on the first event
    """

    request_id: str
    sample_id: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    queue_seconds: float | None = None
    error_code: str | None = None
    embedding: tuple[float, ...] | None = None
