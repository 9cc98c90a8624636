"""What clients may send, as pydantic models: checked in C, before anybody thinks about the content.

Every field says whether it is supported or refused; names that are in no model are ignored, whatever
they hold, and `IGNORED` lists those that clients are known to send. docs/api.md and /openapi.json are
made from here. It knows neither model nor tokenizer.

null is the same as absent everywhere. `Refused` marks a field that would change the answer and is
not built: it is taken only with a value that changes nothing.
"""

from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from xjax.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
)

MAX_PROMPTS = 512
MAX_CHOICES = 1024  # prompts times n
MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**53  # what JavaScript can write exactly; longer than any context

# Fields that clients send and that change no answer here.
IGNORED = {
    "user": "who asks",
    "metadata": "labels for a dashboard",
    "store": "whether to keep the answer; nothing is kept",
    "service_tier": "there is one tier",
    "safety_identifier": "who asks",
    "prompt_cache_key": "equal beginnings are found without it; `cache_salt` keeps them apart",
    "prompt_cache_retention": "what was used last stays longest",
    "prediction": "a hint for speed",
    "parallel_tool_calls": "of no meaning without tools",
    "verbosity": "a hint to models trained with it",
    "length_penalty": "of no meaning without beam search",
    "early_stopping": "of no meaning without beam search",
    "spaces_between_special_tokens": "text is the sum of its tokens' bytes",
    "request_id": "ids are made by the server",
}


# Only an assistant may say nothing, when it calls a tool.
_NEEDS_CONTENT: JsonDict = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"properties": {"role": {"const": "assistant"}}},
    ]
}


@dataclass(frozen=True)
class Refused:
    """Marks a field that is refused (400, unsupported_parameter) with any value but null and these."""

    why: str
    harmless: tuple[Any, ...] = ()

    def is_harmless(self, value: object) -> bool:
        """Whether leaving the field out means the same."""
        return value is None or any(type(value) is type(item) and value == item for item in self.harmless)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        return {"enum": [None, *self.harmless]}


def _whole(value: object) -> object:
    """JSON has one kind of number, and some languages write 1 as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kind(by_type: dict[type, str], default: str) -> Discriminator:
    """Chooses a union's member by the JSON type, so that errors speak of that member alone."""

    def choose(value: object) -> str:
        return by_type.get(type(value), default)

    return Discriminator(choose)


def _prompt_kind(value: object) -> str:
    if isinstance(value, list) and value:
        first = cast("list[object]", value)[0]
        return "=id_lists" if isinstance(first, list) else "=texts" if isinstance(first, str) else "=ids"
    return "=ids" if isinstance(value, list) else "=text"


def _few(value: object) -> object:
    """A mapping is checked entry by entry, and each complaint takes memory: the many are not looked at."""
    entries = cast("dict[object, object]", value) if isinstance(value, dict) else {}
    if len(entries) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_long", "should have at most {most} entries", {"most": MAX_LOGIT_BIAS})
    return cast(object, value)


def _short(value: str) -> str:
    """A salt is limited in bytes, which pydantic does not count."""
    if len(value.encode()) > MAX_SALT:
        raise PydanticCustomError("too_long", "should have at most {most} bytes", {"most": MAX_SALT})
    return value


WHOLE = BeforeValidator(_whole)
FEW = BeforeValidator(_few)
FAST = Field(fail_fast=True)  # of every list: a body has room for millions of faults, and each would be kept
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Objects = Annotated[list[dict[str, Any]], FAST]
TokenIds = Annotated[list[TokenId], Field(min_length=1), FAST]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FAST]
IdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), FAST]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS), FAST]
PromptField = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[TokenIds, Tag("=ids")]
    | Annotated[IdLists, Tag("=id_lists")],
    Discriminator(_prompt_kind),
]
Stop = Annotated[
    Annotated[StopText, Tag("=text")] | Annotated[StopTexts, Tag("=texts")],
    _kind({str: "=text"}, "=texts"),
]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT), AfterValidator(_short)]
OPEN = ConfigDict(strict=True, extra="allow")
CLOSED = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ContentPart(BaseModel):
    """A part of a message's content; `type` is "text", other kinds are refused with a 400."""

    model_config = OPEN

    type: Annotated[str, WithJsonSchema({"enum": ["text", "input_text", "output_text"]})]
    text: str | None = None


class Message(BaseModel):
    """One message. What else it carries (name, tool_call_id, reasoning_content) goes to the template."""

    model_config = OPEN | ConfigDict(json_schema_extra=_NEEDS_CONTENT)

    role: Annotated[str, Field(min_length=1)] = Field(
        description="what the template knows: system, user, assistant, tool; developer as system"
    )
    content: Annotated[
        Annotated[None, Tag("=null")]
        | Annotated[str, Tag("=text")]
        | Annotated[list[ContentPart], Tag("=parts"), FAST],
        _kind({type(None): "=null", str: "=text"}, "=parts"),
    ] = None
    tool_calls: Objects | None = None

    def as_given(self) -> dict[str, Any]:
        """What was sent, without the nulls that clients put where they have nothing."""
        fields = self.model_dump(exclude_unset=True)
        return {name: value for name, value in fields.items() if value is not None or name == "content"}


class StreamOptions(BaseModel):
    """What a stream holds besides its deltas."""

    model_config = CLOSED

    include_usage: bool | None = Field(None, description="a last chunk with `usage` and no choices")
    continuous_usage_stats: bool | None = Field(None, description="`usage` so far in every chunk")


class SamplingFields(BaseModel):
    """What chat and completions have in common."""

    model_config = CLOSED

    model: str | None = Field(None, description="a served name; absent or empty: the first one; another: 404")
    stream: bool | None = Field(None, description="send server-sent events; default false")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES), WHOLE] | None = Field(
        None, description="answers to one prompt; default 1"
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 takes the most likely token; default: the model's, else 1"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="1: off; default: the model's, else 1"
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="0 or -1: off; default: the model's, else off"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="0: off; default: the model's, else 0"
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="over the answer; default 0"
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="over the answer; default 0"
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="over prompt and answer; default: the model's, else 1"
    )
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_LOGIT_BIAS), FEW] | None = Field(
        None,
        description=f"token id, as a string, to what its logit gets, -100 to 100; at most {MAX_LOGIT_BIAS}",
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED), WHOLE] | None = Field(
        None, description="-2^63 to 2^64-1; equal seeds give equal answers; default: each request its own"
    )
    stop: Stop | None = Field(None, description="one text or several, none empty, that end the answer")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGIT_BIAS), FAST] | None = Field(
        None, description="token ids that end the answer"
    )
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop text; default false")
    ignore_eos: bool | None = Field(None, description="go on past the end of sequence; default false")
    skip_special_tokens: bool | None = Field(
        None, description="leave special tokens out of the text; default true"
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="tokens before which nothing ends the answer, at most `max_tokens`; default 0"
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None,
        description="log-probabilities of the prompt's tokens and of the best so many; not with `stream`",
    )
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="-2^53 to 2^53; lower runs first; default 0"
    )
    cache_salt: Salt | None = Field(
        None,
        description=f"not empty, at most {MAX_SALT} bytes in UTF-8: only requests with the same one share "
        "kept pages",
    )
    return_token_ids: bool | None = Field(
        None, description="`token_ids` in choices, `prompt_token_ids` beside them; default false"
    )
    response_format: Annotated[Any, Refused("output is not constrained", ({"type": "text"},))] = Field(
        None, description="the answer's form"
    )
    structured_outputs: Annotated[Any, Refused("output is not constrained")] = None
    guided_json: Annotated[Any, Refused("output is not constrained")] = None
    guided_regex: Annotated[Any, Refused("output is not constrained")] = None
    guided_choice: Annotated[Any, Refused("output is not constrained")] = None
    guided_grammar: Annotated[Any, Refused("output is not constrained")] = None
    grammar: Annotated[Any, Refused("output is not constrained")] = None
    json_schema: Annotated[Any, Refused("output is not constrained")] = None
    allowed_token_ids: Annotated[Any, Refused("output is not constrained")] = None
    bad_words: Annotated[Any, Refused("output is not constrained", ([],))] = None
    logits_processors: Annotated[Any, Refused("no code runs on logits", ([],))] = None
    use_beam_search: Annotated[Any, Refused("answers are sampled", (False,))] = None
    truncate_prompt_tokens: Annotated[Any, Refused("prompts are never cut")] = None
    return_tokens_as_token_ids: Annotated[Any, Refused("tokens are given as text", (False,))] = None


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FAST] = Field(
        description="the conversation, not empty; parts of text are joined by a line break, others refused"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="most tokens of the answer, cut to what the context has left; default: all of it"
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="older name of `max_completion_tokens`, which comes first"
    )
    logprobs: bool | None = Field(None, description="give the tokens' log-probabilities; default false")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="and those of the best so many; only with `logprobs`"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt where the answer begins; default true"
    )
    continue_final_message: bool | None = Field(
        None, description="go on from the last message's content; not with `add_generation_prompt`"
    )
    reasoning_effort: str | None = Field(None, description="a variable of the chat template, if given")
    tools: Objects | None = Field(
        None, description='refused unless empty or `tool_choice` is "none", with which the model sees none'
    )
    tool_choice: Annotated[Any, Refused("tools are not called", ("none", "auto"))] = None
    functions: Annotated[Any, Refused("tools are not called", ([],))] = None
    function_call: Annotated[Any, Refused("tools are not called", ("none", "auto"))] = None
    chat_template: Annotated[Any, Refused("the server's template is used")] = None
    documents: Annotated[Any, Refused("put them into a message", ([],))] = None
    add_special_tokens: Annotated[Any, Refused("the template writes them", (False,))] = None
    echo: Annotated[Any, Refused("the answer alone is given", (False,))] = None
    modalities: Annotated[Any, Refused("answers are text", ([], ["text"]))] = None
    audio: Annotated[Any, Refused("answers are text")] = None
    web_search_options: Annotated[Any, Refused("nothing is searched")] = None


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: PromptField = Field(
        description="a text, token ids, or a list of either; a text gets the tokenizer's own special tokens"
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE] | None = Field(
        None, description="most tokens of an answer, cut to what the context has left; default 16"
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="log-probabilities of the tokens and of the best so many"
    )
    echo: bool | None = Field(
        None, description="begin with the prompt, its log-probabilities included; default false"
    )
    add_special_tokens: bool | None = Field(
        None, description="put the tokenizer's own around a text; default true"
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES), WHOLE] | None = Field(
        None, description="refused unless equal to `n`"
    )
    suffix: Annotated[Any, Refused("the model continues, it does not fill in", ("",))] = None
    prompt_embeds: Annotated[Any, Refused("prompts are text or ids")] = None


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model_config = CLOSED

    model: str | None = Field(None, description="a served name; absent or empty: the first one")
    prompt: str | None = Field(None, description="a text, encoded as completions do")
    messages: Annotated[list[Message], Field(min_length=1), FAST] | None = Field(
        None, description="a conversation, encoded as chat does"
    )
    add_special_tokens: bool | None = Field(
        None, description="put the tokenizer's own around a text; default true; of no meaning to messages"
    )
    add_generation_prompt: bool | None = Field(None, description="as in chat; default true")
    continue_final_message: bool | None = Field(None, description="as in chat; default false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="as in chat")
    tools: Objects | None = Field(None, description="given to the chat template")
    return_token_strs: bool | None = Field(
        None, description="the tokens as the vocabulary spells them too; default false"
    )
    chat_template: Annotated[Any, Refused("the server's template is used")] = None


class CacheClearRequest(BaseModel):
    """Body of POST /v1/cache/clear: an empty object, or none at all."""

    model_config = CLOSED


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = CLOSED

    model: str | None = Field(None, description="a served name; absent or empty: the first one")
    tokens: Annotated[list[TokenId], FAST] = Field(description="token ids; special tokens are written out")
