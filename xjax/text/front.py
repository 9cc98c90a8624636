"""From what a user writes to the token ids of a prompt; the command line, LLM and server share it.

    prompt    text ─ special tokens in it parsed ─ ids, with the tokenizer's own around them
    messages  ─ special tokens in them hidden ─ template ─ cut at the template's special tokens
              ─ hidden text put back, encoded as text ─ ids, with nothing added

So a user's <|im_end|> in a message stays text, and no prompt begins twice. Knows no engine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from xjax.errors import RequestError
from xjax.text.messages import check_messages, check_unicode
from xjax.text.template import ChatTemplate
from xjax.text.tokenizer import Tokenizer

# Supplementary private-use characters: no text has them, and no template touches them.
_PRIVATE = range(0xF0000, 0xFFFFE)
_END = "\U0010fffd"  # private as well, and none of those above
_MAX_DEPTH = 100
_PRIVATE_PATTERN = re.compile("[\U000f0000-\U000ffffd]")


class Front:
    """The tokenizer and the chat template of one model, as one.

    eos_ids   ids that end an answer, from every source that the model has
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, eos_ids: frozenset[int]):
        self.tokenizer = tokenizer
        self.template = template
        self.eos_ids = eos_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt as it is, special tokens written in it included."""
        check_unicode(text, "prompt")
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        if tuple(ids[: len(prefix)]) == prefix:
            prefix = ()
        return [*prefix, *ids, *suffix]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Render messages and encode them; other keyword arguments go to the template.

        continue_final_message   end where the last message's content ends, so that the answer goes on from it
        Raises RequestError when the model has no template, and for what the template refuses.
        """
        if self.template is None:
            raise RequestError(
                "this model has no chat template: send a prompt instead of messages (over HTTP to "
                "/v1/completions), or load the model with one (--chat-template FILE)",
                param="messages",
            )
        given: list[Any] = [check_messages(messages), _check_tools(tools), kwargs]
        for part in _strings(given):
            check_unicode(part, "messages")
        hiding = _Hiding(self.tokenizer, given)
        if hiding.is_needed:
            given = [hiding.hide(value) for value in given]
        render = _render_begun if continue_final_message else ChatTemplate.render
        text = render(self.template, given[0], tools=given[1], **given[2])
        check_unicode(text, "messages")
        segments = self.tokenizer.split_special(text)
        if hiding.is_needed:
            segments = [hiding.show(part) if isinstance(part, str) else part for part in segments]
        return self.tokenizer.encode_segments(segments)


def _render_begun(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
    """Render messages up to the end of the last one's content."""
    param = "continue_final_message"
    if kwargs.setdefault("add_generation_prompt", False):
        raise RequestError(f"{param}: not with add_generation_prompt", param=param)
    *before, last = messages
    marked = {**last, "content": (last.get("content") or "") + _END}
    begun, mark, _ = template.render([*before, marked], **kwargs).rpartition(_END)
    if not mark:
        raise RequestError(f"{param}: the chat template does not show the last message", param=param)
    # A template that trims contents would have trimmed this one but for the mark behind it.
    is_kept = template.render(messages, **kwargs).startswith(begun)
    return begun if is_kept else begun.rstrip()


class _Hiding:
    """Special tokens written in messages, each exchanged for a private character that is in none."""

    def __init__(self, tokenizer: Tokenizer, value: object):
        self._tokenizer = tokenizer
        texts = list(_strings(value))
        self.is_needed = any(map(tokenizer.has_special, texts))
        taken: set[str] = set()
        for text in texts if self.is_needed else ():
            taken.update(_PRIVATE_PATTERN.findall(text))
        self._free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
        self._private_by_special: dict[str, str] = {}

    def hide(self, value: Any, depth: int = 0) -> Any:
        """Return a value with every special token in its strings exchanged."""
        if isinstance(value, str):
            return self._tokenizer.replace_special(value, self._private)
        if depth > _MAX_DEPTH:
            raise RequestError(f"messages: nested more than {_MAX_DEPTH} levels deep", param="messages")
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self.hide(key, depth + 1): self.hide(item, depth + 1) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.hide(item, depth + 1) for item in cast("Sequence[Any]", value)]
        return value

    def show(self, text: str) -> str:
        """Put the special tokens back, as text."""
        return text.translate(
            {ord(private): special for special, private in self._private_by_special.items()}
        )

    def _private(self, special: str) -> str:
        private = self._private_by_special.get(special)
        if private is None:
            private = next(self._free, "")
            if not private:
                raise RequestError("messages: they use every private character of Unicode", param="messages")
            self._private_by_special[special] = private
        return private


def _check_tools(tools: object) -> list[object] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError("tools: expected a list of objects", param="tools")
    return list(cast("Sequence[object]", tools))


def _strings(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            fields = cast("Mapping[object, object]", item)
            waiting += [*fields.keys(), *fields.values()]
        elif isinstance(item, list | tuple):
            waiting += cast("Sequence[object]", item)
