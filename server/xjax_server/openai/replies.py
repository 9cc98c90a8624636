"""What the server answers, as shapes: for /openapi.json, docs/api.md and the tests that hold replies to them.

Nothing is made from these at run time; frames and replies are written as JSON text.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
StopReason = str | int | None


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    """Tokens of all prompts, each counted once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RankedLogprob(Shape):
    """A token of `prompt_logprobs`, by its id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


# ---- chat ----


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[int] | None = None


class ChatCompletion(Shape):
    """Reply of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Shape):
    """Event of a chat stream: the role, what is new, why it ended, and the usage if asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


# ---- completions ----


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Shape):
    """Reply of POST /v1/completions, and the form of its stream's events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None = None


# ---- models and tokens ----


class Model(Shape):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Shape):
    """Reply of GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    """Reply of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    """Reply of POST /detokenize."""

    prompt: str


# ---- the cache ----


class CacheMisses(Shape):
    unknown: int
    short: int
    window: int
    whole: int
    state: int


class PageCounts(Shape):
    used: int
    idle: int
    cached: int
    total: int


class SlotCounts(Shape):
    used: int
    total: int


class SwapDirection(Shape):
    sequences: int
    pages: int
    states: int
    bytes: int
    seconds: float


class SwapCounts(Shape):
    out: SwapDirection
    # `in` is a word of Python's.
    in_: Annotated[SwapDirection, Field(alias="in")]
    retained_pages: int
    failures: int
    waiting: int


class CacheStats(Shape):
    """Reply of GET /v1/cache/stats, and what `LLM.cache_stats` gives."""

    hits: int
    hit_tokens: int
    host_hit_tokens: int
    misses: CacheMisses
    waits: int
    stored: int
    evicted: int
    copies: int
    forwarded_tokens: int
    records: int
    cached_tokens: int
    pages: list[PageCounts]
    host_slots: list[SlotCounts]
    host_states: SlotCounts
    swap: SwapCounts


class CacheCleared(Shape):
    """Reply of POST /v1/cache/clear: how many pages of tokens were forgotten."""

    cleared_records: int


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Shape):
    """Body of every reply that is not a 200, and of an error event in a stream."""

    error: ErrorDetail
