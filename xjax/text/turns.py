"""What a chat's next turn finds in pages, and where its template parts from them.

    in pages after a turn   the prompt, then what the model said but for the token that ended it
    the next prompt         the template's rendering of the question, the answer and the next question
                            |------- the same -------| parts ...

A template that rewrites its own past, by dropping what the model thought for example, parts early. No
model runs: the answer is given. Knows no pages beyond their size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xjax.errors import RequestError
from xjax.text.front import Front

# What templates put around thoughts.
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
_FIXED = frozenset(("self", "messages", "tools", "add_generation_prompt", "continue_final_message"))


@dataclass(frozen=True)
class Turns:
    """Two turns of a conversation in token ids.

    prompt        of the first turn
    said          by the model, with the token that ends it, where the vocabulary has one
    next_prompt   of the second turn
    """

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    next_prompt: tuple[int, ...]

    @property
    def in_pages(self) -> tuple[int, ...]:
        """What is computed when the first turn has ended: the last token is sampled and never read."""
        return self.prompt + self.said[:-1]

    @property
    def num_same(self) -> int:
        """Tokens that the second prompt begins with and that are in pages."""
        pairs = zip(self.in_pages, self.next_prompt, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), self._num_both)

    @property
    def _num_both(self) -> int:
        return min(len(self.in_pages), len(self.next_prompt))

    @property
    def is_parted(self) -> bool:
        """Whether the second prompt goes on otherwise than what is in pages."""
        return self.num_same < self._num_both

    def num_hit(self, page_size: int, num_same: int | None = None) -> int:
        """Tokens that the second turn takes from pages: full ones, and never its last token.

        num_same   as if so many were the same; None: those that are
        """
        same = self.num_same if num_same is None else num_same
        return min(same, len(self.in_pages), len(self.next_prompt) - 1) // page_size * page_size

    def num_hit_at_best(self, page_size: int) -> int:
        """Tokens that it would take if the template kept its past as it was."""
        return self.num_hit(page_size, len(self.in_pages))


def thought_marks(front: Front) -> tuple[str, str] | None:
    """What the model's template puts around thoughts; None for one that knows of none."""
    sources = "" if front.template is None else "".join(front.template.sources.values())
    return next((marks for marks in _THOUGHTS if marks[1] in sources), None)


def two_turns(
    front: Front,
    question: str,
    answer: str,
    next_question: str,
    *,
    thoughts: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Turns:
    """Render two turns of a conversation.

    thoughts   what the model thinks before it answers, and the client sends back with the answer
    Raises RequestError for what the template refuses, and where there is none.
    """
    kwargs: dict[str, Any] = dict(template_kwargs or {})
    ended: dict[str, Any] = {**kwargs, "add_generation_prompt": False}
    fixed = _FIXED.intersection(kwargs)
    if fixed:
        raise RequestError(f"the template's variable {min(fixed)} cannot be set here", param=min(fixed))
    first = [{"role": "user", "content": question}]
    prompt = front.encode_chat(first, **kwargs)
    said = answer
    opening, closing = thought_marks(front) or _THOUGHTS[0]
    if thoughts is not None:
        said = f"{opening}\n{thoughts}\n{closing}\n\n{answer}"
        shown = front.tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip()
        if shown.endswith(opening):  # the prompt has begun the thoughts already
            said = said.removeprefix(f"{opening}\n")
    past = [*first, {"role": "assistant", "content": said}]
    ids = front.tokenizer.encode(said, add_special_tokens=False, parse_special=True)
    whole = front.encode_chat(past, **ended)
    ends = [token for token in whole[len(prompt) :] if token in front.eos_ids] or sorted(front.eos_ids)
    return Turns(
        prompt=tuple(prompt),
        said=(*ids, *ends[-1:]),
        next_prompt=tuple(front.encode_chat([*past, {"role": "user", "content": next_question}], **kwargs)),
    )
